"""clearhead's own CPU kernels (csrc/), compiled when the package is installed.

The forward pass is the op `clearhead::native` where a call is nothing but query, key, value and
numbers, and else `clearhead::native_aux`: it has masks and the like, and can return more than the
output. With gradients both are the second, asked for the row maximum m and sum z, and from these
the op of `chunked` goes back. `clearhead::native_packed` runs packed sequences; it has no backward.
`again` is the same forward pass beside the dispatcher, for calls that need no check and that nobody
watches.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Problem, in_transform
from ..results import Aux, TopK
from . import autograd
from .fields import ROW_STATISTICS, bare_rules, empty_out, rules_of, with_statistics
from .library import Library, find_library, run, threads

NAME = "native"
MAX_HEAD_SIZE = 512
MAX_TOP_K = 16
# What the kernels return beside the output; "head_mask" is that they multiply by it.
GIVEN = frozenset({"head_mask", "lse", "max_logit", "entropy", "top_k", "key_mass", "first_mass",
                   "previous_mass", "self_mass", "distance", "weights"})  # fmt: skip
TOP_K = {"top_k": ("top_weights", "top_keys")}  # one name of Aux, two of clearhead.h


def why_not(problem: Problem) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    p = problem
    if p.device.type != "cpu":
        return f"its kernels run on a CPU, and query is on {p.device.type}"
    if p.dtype == torch.float64:
        return "its kernels compute in float32, and query is float64"
    if p.dropout_p > 0:
        return "it has no dropout"
    if in_transform():
        return "it lacks the derivatives that a torch.func transform may ask for"
    no_output = p.Dv == 0 and not _wanted(p)
    if no_output or 0 in (p.B, p.H, p.L, p.S, p.D):  # min() would order them in a traced graph
        return "an axis of size 0 leaves its kernels nothing to do"
    if max(p.D, p.Dv) > MAX_HEAD_SIZE:
        name, size = ("head", p.D) if p.D > MAX_HEAD_SIZE else ("value head", p.Dv)
        return f"{name} size {size} is over {MAX_HEAD_SIZE}"
    library = find_library()
    return library if isinstance(library, str) else None


def gives(problem: Problem) -> frozenset[str]:
    """What this backend can return beside the output, by the names of AuxRequest, and "head_mask"
    if it multiplies the output by it. Weights of it carry no gradient."""
    not_given = {"top_k"} if problem.aux.top_k > MAX_TOP_K else set()
    return GIVEN - not_given - ({"weights"} if problem.needs_grad else set())


def leaks(problem: Problem) -> bool:
    """Whether NaN or Inf could reach rows that must not see it: never."""
    return False


def describe(problem: Problem) -> str:
    """How this backend would run the call."""
    library = find_library()
    assert isinstance(library, Library)
    n, isa = threads(), library.isa[problem.query.dtype]
    alone = ", statistics alone, without values" if problem.Dv == 0 else ""
    return f"clearhead's CPU kernels, {isa}, {n} thread{'s' * (n > 1)}{alone}"


def forward(problem: Problem) -> tuple[Tensor, Aux]:
    """Compute out (B, H, L, Dv), in query's dtype, and what it gives of problem.aux."""
    p, given = problem, gives(problem)
    head_mask = p.head_mask if "head_mask" in given else None
    query, key, value, *added = p.differentiable
    rules = *added, p.mask, p.key_mask, p.doc_q, p.doc_k, head_mask
    names = _wanted(p)
    if not names and all(tensor is None for tensor in rules):
        return attend(query, key, value, *_numbers(p)), Aux()
    first_key = p.first_key if "first_mass" in names else None
    out, found = attend_aux(query, key, value, *_numbers(p), *rules, first_key, names, p.aux.top_k)
    return out, _aux(names, found)


def forward_packed(
    problem: Problem, bounds_q: list[int], bounds_k: list[int]
) -> tuple[Tensor, Aux]:
    """As `forward`, of packed sequences in one call; each gets the bits that it gets alone.

    In problem they lie one behind the other, in one batch item, from bounds_q[n] to bounds_q[n + 1]
    and bounds_k likewise. alibi_slopes and head_mask broadcast to (sequences, H); it has no other
    tensors than these, sinks, query, key and value, and none of them needs a gradient.
    """
    p, names = problem, _wanted(problem)
    out, found = attend_packed(
        p.query, p.key, p.value, *_numbers(p), p.sinks, p.alibi_slopes, p.head_mask, bounds_q,
        bounds_k, names, p.aux.top_k,
    )  # fmt: skip
    return out, _aux(names, found)


def _wanted(problem: Problem) -> list[str]:
    """What a call asks for and these kernels give, by the names of clearhead.h, and "lse"."""
    given = gives(problem)
    wanted = [name for name in problem.aux.asked if name in given]
    return [n for name in wanted for n in TOP_K.get(name, (name,))]


def _numbers(problem: Problem) -> tuple[float, int | None, int | None, float | None]:
    p = problem
    return p.scale, p.left, p.right, p.softcap


def _aux(names: list[str], tensors: list[Tensor]) -> Aux:
    """What the op found, by the names of Aux."""
    found: dict = dict(zip(names, tensors, strict=True))
    if "top_weights" in found:
        found["top_k"] = TopK(*(found.pop(name) for name in TOP_K["top_k"]))
    return Aux(**found)


# -- beside the ops -------------------------------------------------------------------------------


class Again(NamedTuple):
    """What is the same in all calls of a kind (see clearhead.kinds)."""

    numbers: tuple[float, int | None, int | None, float | None]  # as _numbers has them
    alone: bytes | None  # these packed, for a call of no other tensors that needs no gradient
    needs_grad: bool
    names: list[str]  # the statistics that are wanted
    top_k: int


def again_of(problem: Problem) -> Again:
    """What `again` needs for calls of this one's kind, which these kernels serve alone."""
    p, names, numbers = problem, _wanted(problem), _numbers(problem)
    tensors = (*p.differentiable, p.head_mask)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    alone = all(t is None for t in (*tensors[3:], p.mask, p.key_mask))
    packed = bare_rules(*numbers) if alone and not needs_grad else None
    return Again(numbers, packed, needs_grad, names, p.aux.top_k)


def again(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    same: Again,
    attn_mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    key_mask: Tensor | None,
    head_mask: Tensor | None,
) -> tuple[Tensor, Aux | None]:
    """`forward` of a call of a kind that these kernels have served, its tensors as they came. No
    Aux if nothing is wanted in it."""
    names, top_k = same.names, same.top_k
    if same.alone is not None:
        if not names:
            return run(query, key, value, same.alone), None
        found, filled = _empty(query, key.shape[2], names, top_k)
        return run(query, key, value, with_statistics(same.alone, filled)), _aux(names, found)
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    mask, float_mask = (attn_mask, None) if boolean else (None, attn_mask)
    if key_mask is not None:
        key_mask = _with_axes(2, key_mask).expand(-1, key.shape[2])
    first_key = None
    if key_mask is not None and "first_mass" in names:
        first_key = Problem(query, key, value, key_mask=key_mask).first_key
    kernel = _attend_aux_here if same.needs_grad else _attend_aux
    out, found = kernel(
        query, key, value, *same.numbers, _with_axes(4, float_mask), _with_axes(4, bias), sinks,
        _with_axes(2, alibi_slopes), _with_axes(4, mask), key_mask, None, None,
        _with_axes(2, head_mask), first_key, names, top_k,
    )  # fmt: skip
    return out, _aux(names, found) if names else None


def again_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    same: Again,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    head_mask: Tensor | None,
    bounds_q: list[int],
    bounds_k: list[int],
) -> tuple[Tensor, Aux]:
    """`forward_packed` of a call of a kind that these kernels have served."""
    out, found = _attend_packed(
        query, key, value, *same.numbers, sinks, alibi_slopes, head_mask, bounds_q, bounds_k,
        same.names, same.top_k,
    )  # fmt: skip
    return out, _aux(same.names, found)


def _with_axes(n: int, tensor: Any) -> Any:
    """A tensor, if it is one, with so many axes, the ones that are missing in front."""
    return tensor if tensor is None or tensor.ndim == n else tensor[(None,) * (n - tensor.ndim)]


# -- the ops --------------------------------------------------------------------------------------

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, float scale, SymInt? left, SymInt? right, "
    "float? softcap"
)
_TENSORS = (
    "Tensor? float_mask, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes, Tensor? mask, "
    "Tensor? key_mask, Tensor? doc_q, Tensor? doc_k, Tensor? head_mask"
)
_NO_TENSORS = (None,) * 9
# torch.library.custom_op would do the same at four times the cost per call.
_ops = torch.library.Library("clearhead", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_ops.define(f"native({_INPUTS}) -> Tensor", tags=_tags)
_ops.define(
    f"native_aux({_INPUTS}, {_TENSORS}, Tensor? first_key, str[] wanted, SymInt top_k)"
    " -> (Tensor out, Tensor[] found)",
    tags=_tags,
)
_ops.define(
    f"native_packed({_INPUTS}, Tensor? sinks, Tensor? alibi_slopes, Tensor? head_mask, "
    "int[] bounds_q, int[] bounds_k, str[] wanted, int top_k) -> (Tensor out, Tensor[] found)",
    tags=_tags,
)
attend = torch.ops.clearhead.native.default
attend_aux = torch.ops.clearhead.native_aux.default
attend_packed = torch.ops.clearhead.native_packed.default


def _attend(query: Tensor, key: Tensor, value: Tensor, *numbers: Any) -> Tensor:
    return run(query, key, value, bare_rules(*numbers))


def _attend_aux(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, list[Tensor]]:
    """out and what is wanted beside it, by the names of clearhead.h."""
    *rules, first_key, wanted, top_k = rest
    found, filled = _empty(query, key.shape[2], wanted, top_k)
    B, H, L, _ = query.shape
    packed, _alive = rules_of((B, H, L, key.shape[2]), *rules, first_key=first_key, found=filled)
    return run(query, key, value, packed), found


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    head_mask: Tensor | None,
    bounds_q: list[int],
    bounds_k: list[int],
    wanted: list[str],
    top_k: int,
) -> tuple[Tensor, list[Tensor]]:
    offsets = torch.tensor([bounds_q, bounds_k], dtype=torch.int64)
    N = len(bounds_q) - 1
    L, S = (max(map(operator.sub, bounds[1:], bounds)) for bounds in (bounds_q, bounds_k))
    found, filled = _empty(query, key.shape[2], wanted, top_k)
    rules, _alive = rules_of(
        (N, query.shape[1], L, S), scale, left, right, softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, head_mask=head_mask, offsets=offsets, found=filled,
    )  # fmt: skip
    return run(query, key, value, rules, (N, L, S)), found


def _empty(
    query: Tensor, S: int, wanted: Sequence[str], top_k: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Memory for what is wanted, and with its names all that the kernels are to fill: key_mass and
    weights rest on m and z."""
    if not wanted:
        return [], {}
    B, H, L, _ = query.shape
    last = {"top_weights": top_k, "top_keys": top_k, "weights": S}
    names = _with_sums(wanted) if "key_mass" in wanted or "weights" in wanted else wanted
    filled: dict[str, Tensor] = {}
    for name in names:
        if name in ROW_STATISTICS:
            filled[name] = query.new_empty(B, H, L, dtype=torch.float32)
        else:
            shape = (B, H, S) if name == "key_mass" else (B, H, L, last[name])
            dtype = torch.int64 if name == "top_keys" else torch.float32
            filled[name] = query.new_empty(shape, dtype=dtype)
    return list(filled.values())[: len(wanted)], filled


def _with_sums(wanted: Sequence[str]) -> list[str]:
    """The names, and behind them m and z if these are not among them."""
    return [*wanted, *[name for name in ("m", "z") if name not in wanted]]


def _fake(query: Tensor, key: Tensor, value: Tensor, *rules: Any) -> Tensor:
    B, H, L, _ = query.shape
    return empty_out(query, query.stride(1) < query.stride(2), B, H, L, value.shape[3])


def _fake_aux(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, list[Tensor]]:
    *rules, _, wanted, top_k = rest
    found, _ = _empty(query, key.shape[2], wanted, top_k)
    return _fake(query, key, value, *rules), found


_aux_below = autograd.below(attend_aux, _attend_aux)


class NativeAttention(torch.autograd.Function):
    """attend_aux with gradients: (keys, wanted, top_k, first_key, *its other inputs) -> (out,
    *found). Of what is found only lse carries one."""

    @staticmethod
    def forward(
        ctx: Any, keys: Any, wanted: Sequence[str], top_k: int, first_key: Tensor | None,
        *inputs: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        names = _with_sums(wanted)
        out, found = _aux_below(keys, (*inputs, first_key, names, top_k))
        query, key, value, *rest = inputs
        m, z = (found[names.index(name)] for name in ("m", "z"))
        ctx.save_for_backward(query, key, value, *rest[4:], m, z)
        ctx.numbers = rest[:4]
        found = found[: len(wanted)]
        ctx.lse = wanted.index("lse") if "lse" in wanted else None
        ctx.mark_non_differentiable(*[t for n, t in enumerate(found) if n != ctx.lse])
        return (out, *found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        d_out, *d_found = grads
        query, key, value, *tensors, head_mask, m, z = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        needs_added, needs_head_mask = needs[7:11], needs[15]
        d_head_mask = None
        if head_mask is not None:
            spread = head_mask[..., None, None].to(d_out.dtype)
            if needs_head_mask:
                no_head_mask, no_first_key = None, None
                out, _ = attend_aux(query, key, value, *ctx.numbers, *tensors, no_head_mask,
                                    no_first_key, [], 0)  # fmt: skip
                d_head_mask = (d_out.to(m.dtype) * out).sum((-2, -1)).sum_to_size(head_mask.shape)
                d_head_mask = d_head_mask.to(head_mask.dtype)
            d_out = d_out * spread
        d_lse = torch.zeros_like(m) if ctx.lse is None else d_found[ctx.lse]
        scale, left, right, softcap = ctx.numbers
        no_seed, no_dropout, any_order = None, 0.0, False
        needs = [*needs[:3], *needs_added]
        found = torch.ops.clearhead.chunked_backward(
            d_out, d_lse, m, z, needs, query, key, value, *tensors, no_seed, left, right, scale,
            softcap, no_dropout, any_order,
        )  # fmt: skip
        found = [g if need else None for g, need in zip(found, needs, strict=True)]
        return (*[None] * 4, *found[:3], *[None] * 4, *found[3:], *[None] * 4, d_head_mask)


def _with_gradients(keys: Any, *inputs: Any) -> Tensor:
    return NativeAttention.apply(keys, (), 0, None, *inputs, *_NO_TENSORS)[0]


def _aux_with_gradients(keys: Any, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
    *others, first_key, wanted, top_k = inputs
    out, *found = NativeAttention.apply(keys, wanted, top_k, first_key, *others)
    return out, found


for _op, _kernel, _unreal in (
    (attend, _attend, _fake), (attend_aux, _attend_aux, _fake_aux),
    (attend_packed, _attend_packed, None),
):  # fmt: skip
    _ops.impl(_op._opname, _kernel, "CPU")
    if _unreal is not None:
        torch.library.register_fake(_op._schema.name, _unreal, lib=_ops)
autograd.register(_ops, attend, _attend, _with_gradients, tensors=3)
_attend_aux_here = autograd.register(_ops, attend_aux, _attend_aux, _aux_with_gradients)

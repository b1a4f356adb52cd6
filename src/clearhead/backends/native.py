"""clearhead's own CPU kernels (csrc/), compiled when the package is installed.

The forward pass is the op `clearhead::native`, and `clearhead::native_aux` where more than the
output is asked for. Their backward is the op of `chunked`, from the row maximum m and sum z that
the kernels save. `clearhead::native_packed` runs packed sequences, and has no backward. `again` is
the same forward pass beside the dispatcher, for calls that need no check and that nobody watches.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..problem import Problem, in_transform
from ..results import Aux, TopK
from . import autograd
from .library import (
    Library,
    empty_out,
    find_library,
    log_of_sums,
    rules_of,
    run,
    statistics_of,
    threads,
)

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
    n = threads()
    alone = ", statistics alone, without values" if problem.Dv == 0 else ""
    return f"clearhead's CPU kernels, {library.isa}, {n} thread{'s' * (n > 1)}{alone}"


def forward(problem: Problem) -> tuple[Tensor, Aux]:
    """Compute out (B, H, L, Dv), in query's dtype, and what it gives of problem.aux."""
    p, given = problem, gives(problem)
    head_mask = p.head_mask if "head_mask" in given else None
    inputs = (*p.differentiable, p.mask, p.key_mask, p.doc_q, p.doc_k, head_mask, p.left, p.right,
              p.scale, p.softcap)  # fmt: skip
    names = _wanted(p)
    if not names:
        return attend(*inputs)[0], Aux()
    first_key = p.first_key if "first_mass" in names else None
    found = attend_aux(*inputs, first_key, names, p.aux.top_k)
    return found[0], _aux(names, found[3])


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
        p.query, p.key, p.value, p.sinks, p.alibi_slopes, p.head_mask, p.left, p.right, p.scale,
        p.softcap, bounds_q, bounds_k, names, p.aux.top_k,
    )  # fmt: skip
    return out, _aux(names, found)


def _wanted(problem: Problem) -> list[str]:
    """What a call asks for and these kernels give, by the names of clearhead.h, and "lse"."""
    given = gives(problem)
    wanted = [name for name in problem.aux.asked if name in given]
    return [n for name in wanted for n in TOP_K.get(name, (name,))]


def _aux(names: list[str], tensors: list[Tensor]) -> Aux:
    """What the op found, by the names of Aux."""
    found = dict(zip(names, tensors, strict=True))
    top_k = TopK(*(found.pop(name) for name in TOP_K["top_k"])) if "top_weights" in found else None
    return Aux(**found, top_k=top_k)


# -- beside the ops -------------------------------------------------------------------------------


class Again(NamedTuple):
    """What is the same in all calls of a kind (see clearhead.kinds)."""

    numbers: tuple  # left, right, scale, softcap
    rules: bytes | None  # of a call of nothing but query, key and value
    needs_grad: bool
    names: list[str]  # the statistics that are wanted
    top_k: int


def again_of(problem: Problem) -> Again:
    """What `again` needs for calls of this one's kind, which these kernels serve alone."""
    p, names = problem, _wanted(problem)
    numbers = p.left, p.right, p.scale, p.softcap
    tensors = (*p.differentiable, p.head_mask)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    alone = all(t is None for t in (*tensors[3:], p.mask, p.key_mask))
    no_tensors: tuple[Any, ...] = (None,) * 9
    rules, _ = rules_of((1, 1, 1, 1), *(*no_tensors, *numbers))
    bare = alone and not needs_grad and not names
    return Again(numbers, rules if bare else None, needs_grad, names, p.aux.top_k)


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
    if same.rules is not None:
        return run(query, key, value, same.rules), None
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    mask, float_mask = (attn_mask, None) if boolean else (None, attn_mask)
    if key_mask is not None:
        key_mask = _with_axes(2, key_mask).expand(-1, key.shape[2])  # type: ignore[union-attr]
    rules = (_with_axes(4, float_mask), _with_axes(4, bias), sinks, _with_axes(2, alibi_slopes),
             _with_axes(4, mask), key_mask, None, None, _with_axes(2, head_mask),
             *same.numbers)  # fmt: skip
    names = same.names
    if names:
        first_key = None
        if key_mask is not None and "first_mass" in names:
            first_key = Problem(query, key, value, key_mask=key_mask).first_key
        kernel: Any = _attend_aux_here if same.needs_grad else _attend_aux
        found = kernel(query, key, value, *rules, first_key, names, same.top_k)
        return found[0], _aux(names, found[3])
    if same.needs_grad:
        return _attend_here(query, key, value, *rules)[0], None
    packed, _alive = rules_of((*query.shape[:3], key.shape[2]), *rules)
    return run(query, key, value, packed), None


def _with_axes(n: int, tensor: Tensor | None) -> Tensor | None:
    """A tensor with so many axes, the ones that are missing in front."""
    return tensor if tensor is None or tensor.ndim == n else tensor[(None,) * (n - tensor.ndim)]


# -- the ops --------------------------------------------------------------------------------------

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? float_mask, Tensor? bias, Tensor? sinks, "
    "Tensor? alibi_slopes, Tensor? mask, Tensor? key_mask, Tensor? doc_q, Tensor? doc_k, "
    "Tensor? head_mask, SymInt? left, SymInt? right, float scale, float? softcap"
)
TENSORS = 12
# torch.library.custom_op would do the same at four times the cost per call.
_ops = torch.library.Library("clearhead", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_ops.define(f"native({_INPUTS}) -> (Tensor out, Tensor m, Tensor z)", tags=_tags)
_ops.define(
    f"native_aux({_INPUTS}, Tensor? first_key, str[] wanted, SymInt top_k)"
    " -> (Tensor out, Tensor m, Tensor z, Tensor[] statistics)",
    tags=_tags,
)
_ops.define(
    "native_packed(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? head_mask, int? left, int? right, float scale, float? softcap, int[] bounds_q, "
    "int[] bounds_k, str[] wanted, int top_k) -> (Tensor out, Tensor[] statistics)",
    tags=_tags,
)
attend = torch.ops.clearhead.native.default
attend_aux = torch.ops.clearhead.native_aux.default
attend_packed = torch.ops.clearhead.native_packed.default


def _attend(query: Tensor, key: Tensor, value: Tensor, *rules: Any) -> tuple[Tensor, ...]:
    packed, _alive = rules_of((*query.shape[:3], key.shape[2]), *rules)
    m, z = _maxima_and_sums(query)
    return run(query, key, value, packed, m, z), m, z


def _attend_aux(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    float_mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    key_mask: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    head_mask: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    first_key: Tensor | None,
    wanted: list[str],
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    (B, H, L, _), S = query.shape, key.shape[2]
    rules, _alive = rules_of((B, H, L, S), float_mask, bias, sinks, alibi_slopes, mask, key_mask,
                             doc_q, doc_k, head_mask, left, right, scale, softcap)  # fmt: skip
    return _call(query, key, value, rules, first_key, wanted, top_k)


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    head_mask: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    bounds_q: list[int],
    bounds_k: list[int],
    wanted: list[str],
    top_k: int,
) -> tuple[Tensor, list[Tensor]]:
    offsets = torch.tensor([bounds_q, bounds_k], dtype=torch.int64)
    N = len(bounds_q) - 1
    L, S = (max(map(operator.sub, bounds[1:], bounds)) for bounds in (bounds_q, bounds_k))
    shape = N, query.shape[1], L, S
    rules, _alive = rules_of(shape, None, None, sinks, alibi_slopes, None, None, None, None,
                             head_mask, left, right, scale, softcap, offsets)  # fmt: skip
    out, _, _, found = _call(query, key, value, rules, None, wanted, top_k, (N, L, S))
    return out, found


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: bytes,
    first_key: Tensor | None,
    wanted: list[str],
    top_k: int,
    packed: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out, m and z (B, H, L), m = -inf and z = 0 where empty, and the wanted statistics, by the
    names of clearhead.h and "lse"."""
    B, _, L, _ = query.shape
    m, z = _maxima_and_sums(query)
    found = _empty(query, key.shape[2], wanted, top_k)
    filled = dict(zip(wanted, found, strict=True))
    out = run(query, key, value, rules, m, z, statistics_of(filled, first_key, B, L), packed)
    if "lse" in filled:
        log_of_sums(z, m, filled["lse"])
    return out, m, z, found


def _maxima_and_sums(query: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for m and z, (B, H, L) each."""
    m = query.new_empty(*query.shape[:3], dtype=torch.float32)
    return m, torch.empty_like(m)


def _empty(query: Tensor, S: int, names: list[str], top_k: int) -> list[Tensor]:
    """Memory for the statistics of these names."""
    B, H, L, _ = query.shape
    shapes = {"key_mass": (B, H, S), "top_weights": (B, H, L, top_k), "top_keys": (B, H, L, top_k),
              "weights": (B, H, L, S)}  # fmt: skip
    return [
        query.new_empty(
            *shapes.get(name, (B, H, L)),
            dtype=torch.int64 if name == "top_keys" else torch.float32,
        )
        for name in names
    ]


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out = empty_out(query, (*query.shape[:3], value.shape[3]), query.stride())
    return (out, *_maxima_and_sums(query))


def _fake_aux(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple:
    *_, wanted, top_k = rest
    found = _empty(query, key.shape[2], wanted, top_k)
    return (*_fake(query, key, value), found)


def _save(ctx: Any, inputs: Sequence, output: tuple) -> None:
    """m, z and the statistics but lse carry no gradient."""
    _, m, z, *rest = output
    ctx.save_for_backward(*inputs[:TENSORS], m, z)
    ctx.numbers, ctx.rest, ctx.lse = inputs[TENSORS:16], len(inputs) - TENSORS, None
    others: list[Tensor] = []
    if rest:
        wanted, (others,) = inputs[17], rest
        if "lse" in wanted:
            ctx.lse = wanted.index("lse")
            others = others[: ctx.lse] + others[ctx.lse + 1 :]
    ctx.mark_non_differentiable(m, z, *others)


def _backward(ctx: Any, d_out: Tensor, d_m: Tensor, d_z: Tensor, *d_found: Tensor) -> tuple:
    *tensors, head_mask, m, z = ctx.saved_tensors
    *needs, needs_head_mask = (ctx.needs_input_grad[n] for n in (*range(7), 11))
    d_head_mask = None
    if head_mask is not None:
        spread = head_mask[..., None, None].to(d_out.dtype)
        if needs_head_mask:
            out = attend(*tensors, None, *ctx.numbers)[0]
            d_head_mask = (d_out.to(m.dtype) * out).sum((-2, -1)).sum_to_size(head_mask.shape)
            d_head_mask = d_head_mask.to(head_mask.dtype)
        d_out = d_out * spread
    d_lse = torch.zeros_like(m) if ctx.lse is None else d_found[ctx.lse]
    no_seed, no_dropout, any_order = None, 0.0, False
    grads = torch.ops.clearhead.chunked_backward(
        d_out, d_lse, m, z, needs, *tensors, no_seed, *ctx.numbers, no_dropout, any_order
    )
    grads = (g if need else None for g, need in zip(grads, needs, strict=True))
    return (*grads, *[None] * 4, d_head_mask, *[None] * ctx.rest)


def _implement(op: Any, kernel: Any, fake: Any) -> Any:
    """Give an op its kernels. Returns what does the same beside the dispatcher."""
    _ops.impl(op._opname, kernel, "CPU")
    torch.library.register_fake(op._schema.name, fake, lib=_ops)
    return autograd.register(_ops, op, kernel, _save, _backward)


_attend_here = _implement(attend, _attend, _fake)
_attend_aux_here = _implement(attend_aux, _attend_aux, _fake_aux)
_ops.impl("native_packed", _attend_packed, "CPU")

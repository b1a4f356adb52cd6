"""One attention call of any model, caught with all its numbers while the model runs: for `trace`.

`watch` hands over queries, keys and rules of a call. What the call mixes with its weights, and what
it returned, are read here: from its arguments, or, where a model writes attention out, from the two
products around its softmax.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..arguments import make_problem
from ..functional import attention
from . import calls
from .calls import Call
from .fastpath import FUSED
from .mode import Mode
from .names import example, is_layer
from .products import PRODUCTS, Products, as_matmul
from .watch import DEFAULT, Watch

LARGEST = 2**20  # weights of one call: every step holds as many numbers, and all are to be shown


@dataclass
class Caught:
    """One sequence of an attention call, in float32 or float64, detached.

    Attributes:
        layer: its name. kind: which function was called. heads: the numbers of the H heads, of as
            many as num_heads. G: how many of them share a key.
        query (H, L, D), key (Hkv, S, D), value (Hkv, S, Dv); None where a model that writes
            attention out makes them in a way that could not be read.
        allowed: (H, L, S) bool, True = may attend; None where all may. added: (H, L, S), what is
            added to the scores. sinks: (H,). scale, softcap: as in clearhead.attention.
        entered: (H, L, S), what went into a softmax, where scale and mask do not explain it.
        context: (H, L, Dv), what the call returned. weights: (H, L, S), where the code made them.
        module: whose call it was. output: (L, E), what the module made of it.
        out_weight (E, H*Dv), out_bias (E,): of the matrix that made it, where that is known.
        dtype: of the call.
    """

    layer: str
    kind: str
    heads: list[int]
    num_heads: int
    dtype: torch.dtype
    module: nn.Module | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    allowed: Tensor | None = None
    added: Tensor | None = None
    sinks: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    entered: Tensor | None = None
    context: Tensor | None = None
    weights: Tensor | None = None
    output: Tensor | None = None
    out_weight: Tensor | None = None
    out_bias: Tensor | None = None
    G: int = 1

    @property
    def sizes(self) -> tuple[int, int]:
        """(L, S)."""
        if self.query is not None and self.key is not None:
            return self.query.shape[1], self.key.shape[1]
        assert self.entered is not None
        return self.entered.shape[1], self.entered.shape[2]

    @property
    def every_head(self) -> bool:
        """Whether all heads of the call were taken, in their order."""
        return self.heads == list(range(self.num_heads))


def catch(
    model: Any, inputs: Any, layer: int | str, heads: Iterable[int] | None, sequence: int
) -> Caught:
    """Run a model once, and give the first attention call of a layer.

    Raises ValueError where there is no such call, or its sizes do not fit what was asked for.
    """
    watch = Catch(model if isinstance(model, nn.Module) else None, layer, heads, sequence)
    with torch.no_grad(), watch:
        if isinstance(inputs, Mapping):
            model(**inputs)
        elif isinstance(inputs, list | tuple):
            model(*inputs)
        else:
            model(*([] if inputs is None else [inputs]))
    if watch.caught is None:
        others = [u for u in watch.seen.unseen if u.where != str(layer)][:3]
        missed = "".join(f"; {u.where}: {u.what} {u.why}" for u in others)
        raise ValueError(
            f"trace: no attention of layer {layer!r} was called; called were "
            f"{example(watch.numbers)}{missed}"
        )
    return watch.caught


class Catch(Watch):
    """A watch that takes one call, and no statistics."""

    packs = False

    def __init__(
        self, model: nn.Module | None, layer: int | str, heads: Iterable[int] | None, sequence: int
    ) -> None:
        super().__init__(model, layer, None, DEFAULT, 1, None, "zero")
        self.layers = None  # follow all modules: a fused layer does not call the one in it
        self.layer_wanted, self.heads_wanted = layer, None if heads is None else list(heads)
        self.sequence = sequence
        self.caught: Caught | None = None
        self.of_weights: Products | None = None  # what is made of the weights that were caught
        self._call: Call | None = None
        self._hook: Any = None

    def new_mode(self) -> Mode:
        """The mode for a forward."""
        return CatchMode(self)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        super().__exit__(kind, *rest)
        if self._hook is not None:
            self._hook.remove()

    def record(self, name: str, number: int, call: Call) -> None:
        """Take a call, if it is the wanted one; `after` gets its arguments and its result."""
        if self.caught is not None or not is_layer(self.layer_wanted, name, number):
            return
        B, H, L, S = call.sizes
        heads = list(range(H)) if self.heads_wanted is None else self.heads_wanted
        wrong = [h for h in heads if isinstance(h, bool) or not 0 <= h < H]
        if wrong or not heads:
            raise ValueError(
                f"trace: heads are {heads}, but layer {name} has {H}, from 0 to {H - 1}; name one "
                "or more of them"
            )
        if not 0 <= self.sequence < B:
            raise ValueError(
                f"trace: sequence is {self.sequence}, but layer {name} was called with {B}, from "
                f"0 to {B - 1}"
            )
        if len(heads) * L * S > LARGEST or not L * S:
            raise ValueError(
                f"trace: layer {name} has {len(heads)} heads of {L} x {S} weights; the steps hold "
                f"1 to {LARGEST:,}. Name fewer heads, as in heads=[0], or pass a shorter text"
                if L * S
                else f"trace: layer {name} was called with {L} rows and {S} keys; it needs one each"
            )
        self._call = call
        self.caught = Caught(name, call.kind, heads, H, call.query.dtype, self.module)

    def after(
        self, products: Products, func: Callable, args: tuple, kwargs: dict[str, Any], out: Any
    ) -> None:
        """Every torch call, after it ran."""
        caught, call, self._call = self.caught, self._call, None
        if caught is not None and call is not None:
            products.keep = False
            self._follow_output(caught)
            if call.kind == "softmax":
                self._softmax(caught, call, products.of(args[0] if args else kwargs["input"]))
                self.of_weights = Products()
                self.of_weights.mark(out)
            elif call.kind == "multi_head_attention_forward":
                self._torch_module(caught, call, args, kwargs, out)
            else:
                self._function(caught, call, args, kwargs, out)
        elif caught is not None and self.of_weights is not None:
            self._mixed(caught, self.of_weights, func, args, kwargs, out)

    # -- one way of calling each -------------------------------------------------------------------

    def _function(
        self, caught: Caught, call: Call, args: tuple, kwargs: dict[str, Any], out: Any
    ) -> None:
        """torch's function, or clearhead's."""
        query, key, value = (
            args[n] if len(args) > n else kwargs[name]
            for n, name in enumerate(("query", "key", "value"))
        )
        value = value.detach()
        if call.kind == "attention":
            lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (query, key, value)))
            value = value.expand(*lead, *value.shape[-3:])
            value = value.flatten(0, -4) if lead else value[None]
        else:
            value = calls.four_axes(value, caught.module)
        context = (out[0] if isinstance(out, tuple) else out).detach()
        context = context.reshape(*call.sizes[:3], context.shape[-1])
        self._rules(caught, call, value, context)

    def _torch_module(
        self, caught: Caught, call: Call, args: tuple, kwargs: dict[str, Any], out: Any
    ) -> None:
        """nn.MultiheadAttention, which returns what out_proj made of its heads."""
        value, W, b = calls.torch_values(args, kwargs)
        output = out[0].detach()
        output = output if output.dim() == 2 else output[:, self.sequence]
        caught.output = _wide(output)
        context = attention(call.query, call.key, value[:, :, : call.key.shape[2]], **call.rules)
        caught.out_weight, caught.out_bias = _wide(W), None if b is None else _wide(b)
        rows = context[self.sequence].transpose(0, 1).flatten(1)
        hold(caught, "output", F.linear(rows, W, b), output, float(output.abs().max()))
        self._rules(caught, call, value, context)

    def _rules(self, caught: Caught, call: Call, value: Tensor, context: Tensor) -> None:
        """Fill in a call that came with its rules; keys that no row sees are left out."""
        S, b = call.key.shape[2], self.sequence
        value = value.expand(call.sizes[0], *value.shape[1:])[:, :, :S]
        problem = make_problem(call.query, call.key, value, **call.rules)
        sizes = problem.B, problem.H, problem.L, problem.S
        key, value = call.key[b], value[b]
        if caught.every_head:
            caught.G = problem.G
        else:
            key, value = (t[[h // problem.G for h in caught.heads]] for t in (key, value))
        caught.query, caught.key, caught.value = (
            self._of(caught, call.query),
            *map(_wide, (key, value)),
        )
        caught.context = self._of(caught, context)
        allowed = caught.query.new_ones(len(caught.heads), *caught.sizes, dtype=torch.bool)
        if problem.allowed is not None:
            allowed = self._of(caught, problem.allowed.expand(sizes))
        added = problem.bias_tile(0, problem.L, 0, problem.S)
        if added is not None:
            added = self._of(caught, added.expand(sizes))
            allowed = _without_huge(allowed, added, caught.dtype)
            added = added.masked_fill(~allowed, 0)
            caught.added = added if bool(added.any()) else None
        caught.allowed = None if bool(allowed.all()) else allowed
        if problem.sinks is not None:
            caught.sinks = _wide(problem.sinks[caught.heads])
        caught.scale, caught.softcap = problem.scale, problem.softcap

    def _softmax(self, caught: Caught, call: Call, product: Any) -> None:
        """A softmax over scores that the model computed from queries and keys."""
        assert call.weights is not None
        caught.weights = self._of(caught, call.weights)
        entered = self._of(caught, call.rules["bias"])
        if "sinks" in call.rules:
            caught.sinks = _wide(call.rules["sinks"][caught.heads])
        made = None if product is None or product.made is None else as_matmul(*product.made)
        for operand in () if made is None else made[:2]:
            _narrow(caught, operand)
        visible = entered != -math.inf
        visible = _without_huge(visible, entered, caught.dtype)
        caught.entered = entered = entered.masked_fill(~visible, -math.inf)
        if made is None:
            return
        rows, columns = (self._of_product(caught, t) for t in (made[0], made[1].mT))
        if rows is None or columns is None:
            return
        # The other way round where the code turned the product before its softmax.
        for query, key in ((rows, columns), (columns, rows)):
            scores = query @ key.mT
            if scores.shape != entered.shape:
                continue
            if caught.query is None:
                caught.query, caught.key = query, key
            scale = _scale(scores, entered, visible, caught.dtype, query.shape[-1])
            if scale is not None:
                caught.query, caught.key, caught.scale, caught.entered = query, key, scale, None
                caught.allowed = None if bool(visible.all()) else visible
                return

    def _mixed(
        self, caught: Caught, marks: Products, func: Callable, args: tuple, kwargs: dict[str, Any],
        out: Any,
    ) -> None:  # fmt: skip
        """Follow the weights to the product with the values."""
        if func not in PRODUCTS:
            marks.follow(func, args, kwargs, out)
            return
        parts = as_matmul(func, args, kwargs, out, left=lambda t: marks.of(t) is not None)
        if parts is None:
            return
        self.of_weights = None
        caught.value, caught.context = (self._of_product(caught, t) for t in parts[1:])

    def _of_product(self, caught: Caught, tensor: Tensor) -> Tensor | None:
        """The wanted sequence and heads of an operand with all leading axes of its product."""
        _narrow(caught, tensor)
        tensor = calls.score_axes(tensor.detach(), caught.module)
        if tensor.shape[0] <= self.sequence or tensor.shape[1] != caught.num_heads:
            return None
        return self._of(caught, tensor)

    def _of(self, caught: Caught, tensor: Tensor) -> Tensor:
        """The wanted sequence and heads of (B, H, ...)."""
        return _wide(tensor.detach()[self.sequence][caught.heads])

    def _follow_output(self, caught: Caught) -> None:
        """Take what the module returns, when it does."""
        if caught.module is None or isinstance(caught.module, FUSED):
            return

        def hook(module: nn.Module, args: Any, out: Any) -> None:
            first = out[0] if isinstance(out, Sequence) and out else out
            if caught.output is None and isinstance(first, Tensor):
                rows = first.detach()
                rows = rows[self.sequence] if rows.dim() == 3 else rows
                if rows.dim() == 2:
                    caught.output = _wide(rows)

        self._hook = caught.module.register_forward_hook(hook)


class CatchMode(Mode):
    """Sees every torch call, and shows it to a Catch once it ran."""

    watch: Catch

    def __init__(self, watch: Catch) -> None:
        super().__init__(watch)
        self.products.keep = True

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():
            self.watch.after(self.products, func, args, kwargs or {}, out)
        return out


def hold(caught: Caught, name: str, made: Tensor, own: Tensor, size: float) -> None:
    """Raise where the steps' numbers are not the call's own, up to rounding numbers of a size."""
    if made.shape == own.shape:
        worst = float((made.double() - own.double()).abs().nan_to_num(math.inf).max())
        if worst <= rounding(caught.dtype) * size:
            return
        what = f"differs from the call's own by {worst:.2g}"
    else:
        what = f"has shape {tuple(made.shape)}, the call's own {tuple(own.shape)}"
    raise NotImplementedError(
        f"trace: layer {caught.layer} attends in a way that the steps do not follow: their {name} "
        f"{what}. Dropout does that, and so does a head that is switched off; call eval() first"
    )


def rounding(dtype: torch.dtype) -> float:
    """How far two orders of the same sums may be apart, for numbers of size 1."""
    exact = dtype in (torch.float32, torch.float64)
    return (100 if exact else 4) * torch.finfo(dtype).eps


def _narrow(caught: Caught, tensor: Tensor) -> None:
    """The dtype of the call: what a softmax ran in may be wider than what it was made of."""
    if torch.finfo(tensor.dtype).eps > torch.finfo(caught.dtype).eps:
        caught.dtype = tensor.dtype


def _without_huge(allowed: Tensor, added: Tensor, dtype: torch.dtype) -> Tensor:
    """allowed, (H, L, S), without what codes block by a huge negative number in place of -inf. A
    row in which all are blocked so is spread evenly, and stays."""
    seen = allowed & (added > torch.finfo(dtype).min / 2)
    return torch.where(seen.any(-1, keepdim=True), seen, allowed)


def _scale(
    scores: Tensor, entered: Tensor, visible: Tensor, dtype: torch.dtype, D: int
) -> float | None:
    """The number that makes scores what entered the softmax wherever that is visible, or None."""
    if not bool(visible.any(-1).all()):
        return None
    s, e = scores[visible].double(), entered[visible].double()
    norm = float(s @ s)
    scale = float(s @ e) / norm if norm else 0.0
    for known in (1 / math.sqrt(D), 1.0):
        if abs(scale / known - 1) < min(rounding(dtype), 1e-3):
            scale = known
    apart = float((e - scale * s).abs().max())
    close = apart <= rounding(dtype) * max(1.0, float(e.abs().max()))
    return scale if scale > 0 and close else None


def _wide(tensor: Tensor) -> Tensor:
    """A copy that later calls cannot change, in float32 at least."""
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)

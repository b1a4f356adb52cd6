"""Which softmax is an attention: one over a product of two activations.

Models that write attention out compute scores = q @ k^T, scale and mask them, and call softmax. So
a tensor made by matmul, bmm, baddbmm or einsum from two tensors, neither of which is a parameter or
a view of one, is marked, and so is what elementwise calls, views and casts make of it. A softmax
over the last axis of a marked tensor is attention, and its result is the weights. Every other one
is not: a vocabulary's and a router's logits come out of a layer's weights, a gate's from no product
at all.

A column that is joined to the scores (torch.cat) is a sink: a logit for each head without a value.
Scores of several products joined (blocks of local attention) are passed over, and listed.
"""

import dataclasses
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
PRODUCTS = {
    torch.matmul: 0, torch.bmm: 0, Tensor.matmul: 0, Tensor.bmm: 0, Tensor.__matmul__: 0,
    Tensor.__rmatmul__: 0, torch.mm: 0, Tensor.mm: 0, torch.baddbmm: 1, Tensor.baddbmm: 1,
    torch.einsum: 1,
}  # fmt: skip
_OPERANDS = ("batch1", "batch2", "mat2", "other", "tensor2")
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_LEAVE = (F.linear, F.layer_norm, F.embedding)
_ATTENTION = re.compile(r"(?i)attention|attn")


@dataclass(frozen=True)
class Product:
    """What a marked tensor is: scores, and what was joined to them."""

    raw: Tensor | None = None  # the scores before a sink was joined
    sinks: Tensor | None = None  # (H,)
    made: tuple[Any, ...] | None = None  # func, args, kwargs and result of the product, if kept
    parts: int = 1  # how many products' scores stand side by side in it


class Products:
    """The marked tensors of one forward; it keeps none of them alive, nor their operands unless
    `keep` is set."""

    def __init__(self) -> None:
        self.keep = False
        self._marks: dict[int, tuple[weakref.ref, Product]] = {}

    def of(self, tensor: object) -> Product | None:
        """The mark of a tensor."""
        mark = self._marks.get(id(tensor))
        return mark[1] if mark is not None and mark[0]() is tensor else None

    def mark(self, tensor: Tensor, product: Product | None = None) -> None:
        """Mark a tensor, as a product of its own where none is given."""
        product = Product() if product is None else product
        self._marks[id(tensor)] = (weakref.ref(tensor), product)

    def follow(self, func: Any, args: tuple, kwargs: dict[str, Any], out: object) -> None:
        """Take notice of a call that is no softmax."""
        first = PRODUCTS.get(func)
        if first is not None:
            named = [kwargs[name] for name in _OPERANDS if name in kwargs]
            if isinstance(out, Tensor) and self._is_product((*args[first:], *named)):
                self.mark(out, Product(made=(func, args, kwargs, out) if self.keep else None))
        elif self._marks and isinstance(out, Tensor) and func not in _LEAVE and out.ndim > 1:
            for arg in args:
                if isinstance(arg, Tensor):
                    product = self.of(arg)
                    if product is not None:
                        self.mark(out, product)
                        return
                elif func in _JOINS:
                    self._join(arg, args, kwargs, out)

    def _is_product(self, operands: tuple) -> bool:
        if operands and isinstance(operands[0], list | tuple):  # einsum takes a list, too
            operands = tuple(operands[0])
        tensors = [t for t in operands if isinstance(t, Tensor)]
        return len(tensors) == 2 and not any(_is_parameter(t) for t in tensors)

    def _join(self, parts: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
        """Scores with a column joined behind them."""
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if not isinstance(parts, list | tuple) or dim not in (-1, out.ndim - 1):
            return
        scores = [p for p in parts if self.of(p) is not None]
        if len(scores) > 1:
            self.mark(out, Product(parts=len(scores)))
        if len(scores) != 1:
            return
        if len(parts) == 2 and parts[0] is scores[0] and parts[1].shape[-1] == 1:
            column = parts[1].detach()
            if column.ndim == 4 and (0 in column.shape or _same_for_all_rows(column)):
                product = self.of(scores[0]) or Product()
                raw, sinks = scores[0].detach(), column[0, :, 0, 0]
                self.mark(out, dataclasses.replace(product, raw=raw, sinks=sinks))

    def of_softmax(
        self, scores: object, args: tuple, kwargs: dict[str, Any], module: nn.Module | None
    ) -> tuple[Product | None, str]:
        """The product that a softmax runs over, or None and the reason why it is no attention."""
        product = self.of(scores)
        if product is None or not isinstance(scores, Tensor):
            return None, "what it runs over is no product of two activations"
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dim not in (-1, scores.ndim - 1):
            return None, f"it runs over axis {dim}, not over the keys on the last one"
        if product.parts > 1:
            return None, f"the scores of {product.parts} products are joined in what it runs over"
        if scores.ndim == 2 and not _ATTENTION.search(type(module).__name__):
            # A router whose weights were cast first looks like this; so does one head's attention.
            return None, "it has two axes, and the class of its module does not say attention"
        return product, ""


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _same_for_all_rows(column: Tensor) -> bool:
    return bool((column == column[:1, :, :1]).all())


def as_matmul(
    func: Any,
    args: tuple,
    kwargs: dict[str, Any],
    out: Tensor,
    left: Callable[[Tensor], bool] | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A product as (rows (..., L, D), columns (..., D, S), result (..., L, S)), the leading axes
    of all three the same.

    Args:
        func, args, kwargs, out: the call and its result. What baddbmm adds is not in it.
        left: which operand must have the rows; an einsum with the two the other way is turned.

    Returns:
        None where left is not such an operand, or an einsum is no such product.
    """
    operands = [*args[PRODUCTS[func] :], *(kwargs[n] for n in _OPERANDS if n in kwargs)]
    if func is torch.einsum:
        if operands and isinstance(operands[0], list | tuple):
            operands = list(operands[0])
        found = _einsum(args[0], operands, out, left)
        if found is None:
            return None
        a, b, out = found
    else:
        a, b = operands[:2]
        if func is Tensor.__rmatmul__:
            a, b = b, a
        if left is not None and not left(a):
            return None
    if a.ndim < 2 or b.ndim < 2:
        return None
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (t.detach().expand(*lead, *t.shape[-2:]) for t in (a, b))
    return a, b, out.detach()


def _einsum(
    equation: Any, operands: list[Any], out: Tensor, left: Callable[[Tensor], bool] | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """An einsum over one label that both operands have, as operands and result of a matmul."""
    if not isinstance(equation, str) or "." in equation or len(operands) != 2:
        return None
    names, arrow, result = equation.replace(" ", "").partition("->")
    first, _, second = names.partition(",")
    one, other = (first, operands[0]), (second, operands[1])
    if left is not None and not left(operands[0]):
        if not left(operands[1]):
            return None
        one, other = other, one
    elif left is None and result[-2:-1] not in first:
        one, other = other, one
    summed = set(one[0]) & set(other[0]) - set(result)
    rest = set(other[0]) - set(one[0])
    if not arrow or len(summed) != 1 or len(rest) != 1:
        return None
    c, column = summed.pop(), rest.pop()
    lead = result[:-2] if left is None else one[0].replace(c, "")[:-1]
    row = result[-2] if left is None else one[0].replace(c, "")[-1]
    wanted = (one, lead + row + c), (other, lead + c + column), ((result, out), lead + row + column)
    arranged = [_arranged(tensor, has, want) for (has, tensor), want in wanted]
    if any(t is None for t in arranged):
        return None
    return tuple(arranged)  # type: ignore[return-value]


def _arranged(tensor: Tensor, has: str, wanted: str) -> Tensor | None:
    """Axes by label in the wanted order, those it has not of size 1; None if it has others."""
    if set(has) - set(wanted) or len(set(has)) != len(has):
        return None
    tensor = tensor.permute([has.index(label) for label in wanted if label in has])
    for place, label in enumerate(wanted):
        if label not in has:
            tensor = tensor.unsqueeze(place)
    return tensor

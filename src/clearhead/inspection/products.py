"""Which softmax is an attention: one over a product of two activations.

Models that write attention out compute scores = q @ k^T, scale and mask them, and call softmax. So
a tensor made by matmul, bmm, baddbmm or einsum from two tensors, neither of which is a parameter or
a view of one, is marked, and so is what elementwise calls, views and casts make of it. A softmax
over the last axis of a marked tensor is attention, and its result is the weights. Every other one
is not: a vocabulary's and a router's logits come out of a layer's weights, a gate's from no product
at all.

A column that is joined to the scores (torch.cat) is a sink: a logit for each head without a value.
"""

import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)
_PRODUCTS = {
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


class Products:
    """The marked tensors of one forward; it keeps none of them alive."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref, Product]] = {}

    def of(self, tensor: object) -> Product | None:
        """The mark of a tensor."""
        mark = self._marks.get(id(tensor))
        return mark[1] if mark is not None and mark[0]() is tensor else None

    def _mark(self, tensor: Tensor, product: Product) -> None:
        self._marks[id(tensor)] = (weakref.ref(tensor), product)

    def follow(self, func: Any, args: tuple, kwargs: dict[str, Any], out: object) -> None:
        """Take notice of a call that is no softmax."""
        first = _PRODUCTS.get(func)
        if first is not None:
            named = [kwargs[name] for name in _OPERANDS if name in kwargs]
            if isinstance(out, Tensor) and self._is_product((*args[first:], *named)):
                self._mark(out, Product())
        elif self._marks and isinstance(out, Tensor) and func not in _LEAVE and out.ndim > 1:
            for arg in args:
                if isinstance(arg, Tensor):
                    product = self.of(arg)
                    if product is not None:
                        self._mark(out, product)
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
        if len(scores) != 1:
            return
        if len(parts) == 2 and parts[0] is scores[0] and parts[1].shape[-1] == 1:
            column = parts[1].detach()
            if column.ndim == 4 and (0 in column.shape or _same_for_all_rows(column)):
                self._mark(out, Product(scores[0].detach(), column[0, :, 0, 0]))

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
        if scores.ndim == 2 and not _ATTENTION.search(type(module).__name__):
            # A router whose weights were cast first looks like this; so does one head's attention.
            return None, "it has two axes, and the class of its module does not say attention"
        return product, ""


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _same_for_all_rows(column: Tensor) -> bool:
    return bool((column == column[:1, :, :1]).all())

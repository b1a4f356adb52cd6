"""The mode that sees every torch call, and what it does with those that are attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import functional
from . import calls, packed
from .calls import Call
from .products import SOFTMAX, Products

if TYPE_CHECKING:
    from .watch import Watch

_OTHER_KERNEL = re.compile(r"(?i)attention|attn|sdpa|flash")


class Mode(TorchFunctionMode):
    """Sees every torch call of a thread while it is entered, and hands the attentions over."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.products = watch, Products()

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is functional.varlen_attention and not self.watch.packs:
            with self:  # which then sees a call of each sequence
                return func.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
        read = _READERS.get(func)
        if read is not None:
            return read(self.watch, self.products, func, args, kwargs)
        out = func(*args, **kwargs)
        self.products.follow(func, args, kwargs, out)
        if _is_other_kernel(func):
            name = getattr(func, "__name__", str(func))
            why = "is a kernel of its own, whose calls watch cannot read"
            self.watch.seen.miss(self.watch.path, name, why)
            if self.watch.modules.frame is not None:
                self.watch.modules.frame.all += 1  # said once
        return out


def _read(
    make: Callable[..., Call | None],
) -> Callable[[Watch, Products, Callable, tuple, dict[str, Any]], Any]:
    """How a call is handled that is read from its arguments alone."""

    def handle(
        watch: Watch, products: Products, func: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        with torch._C.DisableTorchFunction():  # its own torch calls are nobody's business
            call = make(args, kwargs, watch.module)
        if call is None:
            return func(*args, **kwargs)
        name, number = watch.layer()
        out = func(*args, **kwargs)
        out = watch.ablation.of_outputs(name, number, call, out)
        with torch._C.DisableTorchFunction():
            watch.record(name, number, call)
        return out

    return handle


def _read_softmax(
    watch: Watch, products: Products, func: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    scores = args[0] if args else kwargs["input"]
    with torch._C.DisableTorchFunction():
        product, why = products.of_softmax(scores, args, kwargs, watch.module)
    out = func(*args, **kwargs)
    if product is None:
        watch.seen.pass_over(watch.path, tuple(out.shape), why)
        return out
    name, number = watch.layer()
    S = out.shape[-1] if product.sinks is None else out.shape[-1] - 1
    with torch._C.DisableTorchFunction():
        raw = scores if product.raw is None else product.raw
        call = calls.softmax(raw, out[..., :S], product.sinks, watch.module)
    out = watch.ablation.of_weights(name, number, call, out)
    with torch._C.DisableTorchFunction():
        watch.record(name, number, call)
    return out


def _read_packed(
    watch: Watch, products: Products, func: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    out = func(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        for call in packed.read(args, kwargs):
            watch.record(*watch.layer(), call)
    return out


_READERS: dict[Any, Callable] = {
    F.scaled_dot_product_attention: _read(calls.sdpa),
    F.multi_head_attention_forward: _read(calls.torch_module),
    functional.attention: _read(calls.mine),
    functional.varlen_attention: _read_packed,
    **dict.fromkeys(SOFTMAX, _read_softmax),
}


_kernels: dict[Any, bool] = {}


def _is_other_kernel(func: Any) -> bool:
    found = _kernels.get(func)
    if found is None:
        name = getattr(func, "__name__", "")
        found = _kernels[func] = bool(_OTHER_KERNEL.search(name))
    return found

"""torch's fused encoder layers, kept as they are while `watch` looks.

nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.TransformerEncoder run one fused kernel in
eval mode without gradients. They leave it where a mode is active or a hook sits on them, and their
other path rounds differently and fills the rows of padding. So there is no hook on these modules,
but a forward of the instance. Where the fused kernel may run it runs first, alone, and its result
is handed back; then the module runs again, seen.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class _Second(threading.local):
    """Whose second run of a module is under way in this thread."""

    owner: object | None = None


second = _Second()


def may_be_fused(module: nn.Module, kind: type[TorchFunctionMode]) -> bool:
    """Whether torch may take its fused path through a module, but for modes of this kind."""
    if module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    if any(not isinstance(mode, kind) for mode in _get_current_function_mode_stack()):
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        return False
    return not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())


@contextmanager
def without(mode: TorchFunctionMode) -> Iterator[None]:
    """Take a mode off the stack, wherever it stands there, and put it back."""
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        for other in (mode, *reversed(above)):
            _push_mode(other)

"""Which module of a model is running, in each thread: hooks that keep its path, and the mode.

The mode is entered when an outermost module begins, if its forward is to be recorded, and left when
it returns. Hooks hand nothing back, so they change nothing.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .fastpath import FUSED, may_be_fused, second, without

# Classes that compute attention, by their names, and their helpers.
_ATTENTION = re.compile(r"(?i)attention|attn")
_HELPER = re.compile(r"(?i)norm|output|mask|bias|drop|cache|embed|rotary|interface")
# How many callers `calling_module` asks. Before Python 3.13 a look keeps what a function holds
# until it returns or is looked at again, so distant ones (a training loop) are left alone.
_CALLERS = 12


def named_attention(module: nn.Module) -> bool:
    """Whether a module says by the name of its class that it computes attention."""
    name = type(module).__name__
    return bool(_ATTENTION.search(name)) and not _HELPER.search(name)


def calling_module() -> nn.Module | None:
    """The module that is at work where no hooks tell: the first argument, `self` or `module`, of
    the innermost function that has one there; None where none of the nearest callers has.
    """
    caller: FrameType | None = sys._getframe(1)
    for _ in range(_CALLERS):
        if caller is None:
            break
        code = caller.f_code
        first = caller.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module):
            return first
        caller = caller.f_back
    return None


class Owner(Protocol):
    """What `Modules` asks and tells the watch that it works for."""

    def starts(self, path: str, step: int) -> TorchFunctionMode | None:
        """A mode for this forward of an outermost module, or None where none is recorded."""

    def finished(self, frame: Frame) -> None:
        """A module returned, and a mode was on."""

    def all_returned(self, frame: Frame, complete: bool) -> None:
        """An outermost module returned, after a forward with a mode on."""


class Frame:
    """A module that is running: its path, and how many attentions were called in it itself (own)
    and in all that it called (all)."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module, self.path, self.own, self.all = module, path, 0, 0


class _Thread(threading.local):
    """What one thread is in the middle of."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.mode: TorchFunctionMode | None = None
        self.step = 0


class Modules:
    """The modules of a model that are followed, and what runs now.

    Attributes:
        paths: the path of each module of the model. forwards: how often each outermost module was
            called. base: what to count from for one that was not yet outermost.
    """

    def __init__(self, model: nn.Module | None, owner: Owner) -> None:
        self.owner = owner
        self.paths = {} if model is None else dict(model.named_modules())
        self.forwards: dict[str, int] = {}
        self.base = 0
        self.thread = _Thread()
        self._path_of = {id(module): path for path, module in self.paths.items()}
        self._undo: dict[str, list[Callable[[], Any]]] = {}

    @property
    def frame(self) -> Frame | None:
        """The innermost module that is running in this thread."""
        return self.thread.frames[-1] if self.thread.frames else None

    @property
    def followed(self) -> list[str]:
        """The paths of the modules that are followed."""
        return list(self._undo)

    def follow(self, path: str) -> None:
        """Follow a module from now on."""
        module = self.paths[path]
        if isinstance(module, FUSED):
            before = module.__dict__.get("forward")
            module.forward = self._seen_forward(module, module.forward)  # type: ignore[method-assign]
            self._undo[path] = [functools.partial(_restore, module, before)]
        else:
            self._undo[path] = [
                module.register_forward_pre_hook(lambda module, _: self._enter(module)).remove,
                module.register_forward_hook(
                    lambda module, _, out: self._leave(module, out is not None), always_call=True
                ).remove,
            ]

    def leave_alone(self, path: str) -> None:
        """Follow a module no longer."""
        for undo in self._undo.pop(path):
            undo()

    def _enter(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        thread, path = self.thread, self._path_of[id(module)]
        # Checkpointing runs modules again inside backward: those calls were recorded before.
        if not thread.frames and torch._C._current_graph_task_id() == -1:
            thread.step = self.forwards.get(path, self.base)
            self.forwards[path] = thread.step + 1
            thread.mode = self.owner.starts(path, thread.step)
            if thread.mode is not None:
                thread.mode.__enter__()
        thread.frames.append(Frame(module, path))

    def _leave(self, module: nn.Module, complete: bool) -> None:
        thread = self.thread
        # A pre-hook of the user that raised before ours ran leaves nothing to take off.
        if torch.compiler.is_compiling() or all(f.module is not module for f in thread.frames):
            return
        while thread.frames:
            frame = thread.frames.pop()
            if thread.mode is not None:
                self.owner.finished(frame)
            if thread.frames:
                thread.frames[-1].all += frame.all
            elif thread.mode is not None:
                thread.mode.__exit__(None, None, None)
                thread.mode = None
                self.owner.all_returned(frame, complete)
            if frame.module is module:
                break

    def _seen_forward(self, module: nn.Module, forward: Callable) -> Callable:
        """The forward of a module of torch's that may take a fused path: see fastpath.py."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            thread = self.thread
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            if second.owner not in (None, self):  # another watch looks again; this one has looked
                if thread.mode is None:
                    return forward(*args, **kwargs)
                with without(thread.mode):
                    return forward(*args, **kwargs)
            out = None
            self._enter(module)
            try:
                mode = thread.mode
                alone = mode is not None and second.owner is None
                if mode is None or not alone or not may_be_fused(module, type(mode)):
                    out = forward(*args, **kwargs)
                    return out
                thread.mode = None
                try:
                    with without(mode):
                        out = forward(*args, **kwargs)
                finally:
                    thread.mode = mode
                second.owner = self
                try:
                    forward(*args, **kwargs)
                finally:
                    second.owner = None
                return out
            finally:
                self._leave(module, out is not None)

        return run

    def stop(self) -> None:
        """Follow nothing any more, and leave every module as it was."""
        for path in self.followed:
            self.leave_alone(path)
        if self.thread.mode is not None:
            self.thread.mode.__exit__(None, None, None)
            self.thread.mode = None
        self.thread.frames.clear()


def _restore(module: nn.Module, forward: Callable | None) -> None:
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward

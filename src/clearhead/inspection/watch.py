"""watch: see every attention inside any PyTorch code, without changing what it computes.

    an outermost module of the model is called   a mode begins that sees every torch call
    modules below it are called                  hooks keep their path, which names the calls
    an attention is called                       recognised and read (calls.py, products.py),
                                                 its statistics taken, its own result handed back
    the outermost module returns                 the mode ends

A forward that is not recorded (`every`) runs without the mode: all it pays for are the hooks.
What torch.compile made runs as the code that it was made from, which can be seen.
"""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..results import AuxRequest, checked
from .calls import Call
from .fastpath import FUSED
from .mode import Mode
from .modules import Frame, Modules, calling_module, named_attention
from .names import Layers, as_list, example, is_layer, matches
from .record import Record, Seen
from .surgery import Ablation

DEFAULT = AuxRequest(
    max_logit=True, entropy=True, first_mass=True, previous_mass=True, self_mass=True,
    distance=True, reduce="head",
)  # fmt: skip


def watch(
    model: nn.Module | None = None,
    layers: Layers | None = None,
    heads: Iterable[int] | None = None,
    aux: AuxRequest = DEFAULT,
    every: int = 1,
    ablate: Mapping[int | str, Iterable[int]] | None = None,
    mode: str = "zero",
) -> "Watch":
    """See every attention that runs inside a `with`, whatever code makes it.

        with clearhead.watch(model) as seen:
            model(**inputs)
        seen.head_stats()            # one row for each layer, head and step

    What is seen: F.scaled_dot_product_attention from anywhere, nn.MultiheadAttention and torch's
    transformer layers, clearhead's own, and softmax over a product of queries and keys. What ran
    and could not be seen stands in `seen.unseen`. Results and gradients stay what they are, to the
    bit; statistics are taken by clearhead.attention from the very queries, keys and masks, from
    before dropout, and are detached.

    Args:
        model: whose modules name the calls, by their paths ("model.layers.3.self_attn"; a second
            call in the same forward of a module is "...#1"). Without one, everything that this
            thread runs is seen, and is named "call 0", "call 1" ...
        layers: which layers to record; all where None. Numbers count the layers in the order of
            their first calls, from 0; strings are paths, of a layer or of what holds it, and may
            have wildcards ("*.3.*").
        heads: which query heads to record, from 0; all where None.
        aux: which statistics; by default one Summary per head of each cheap one.
        every: record each n-th forward of the model only.
        ablate: {layer: heads} whose outputs are replaced, in every forward.
        mode: "zero", or "mean": by their mean over the L rows, for each sequence of the batch.

    Returns:
        A context manager that gives a `Seen`, which is filled while the code runs.
    Raises:
        ValueError: layers or ablate name what the model does not have, among others.
        NotImplementedError: a call of a layer to be ablated is not one that can be.

    >>> import torch
    >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(1, 5, 8)
    >>> with watch(layer, aux=AuxRequest(weights=True)) as seen:
    ...     out, _ = layer(x, x, x)
    >>> seen.maps(0).shape
    torch.Size([1, 2, 5, 5])
    """
    return Watch(model, layers, heads, aux, every, ablate, mode)


class Watch:
    """The context manager that `watch` makes."""

    def __init__(
        self,
        model: nn.Module | None,
        layers: Layers | None,
        heads: Iterable[int] | None,
        aux: AuxRequest,
        every: int,
        ablate: Mapping[int | str, Iterable[int]] | None,
        mode: str,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(
                f"watch: model is a {type(model).__name__}; it must be a module, or None for all "
                "that runs"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"watch: every is {every!r}; it must be a whole number from 1 on")
        checked(aux)
        if not aux.asked and not ablate:
            raise ValueError(
                "watch: aux asks for nothing; name a statistic, as in AuxRequest(lse=True)"
            )
        self.model, self.aux, self.every = model, aux, every
        self.layers = None if layers is None else as_list("layers", layers)
        self.heads = None if heads is None else [int(h) for h in heads]
        self.ablation = Ablation(ablate or {}, mode)
        self.seen = Seen()
        self.modules = Modules(model, self)
        self.numbers: dict[str, int] = {}  # of layers, in the order of their first calls
        self._silent: set[str] = set()  # modules that ran, and called no attention themselves
        self._layer_modules: set[str] = set()
        self._all: Mode | None = None  # without a model
        self._stance: Any = None  # of torch.compile
        for wanted in (*(self.layers or ()), *self.ablation.layers):
            if model is not None and isinstance(wanted, str) and not self._known(wanted):
                raise ValueError(
                    f"watch: no module of the model is called {wanted!r}; its modules are called "
                    f"like {example(self.modules.paths)}"
                )

    def __enter__(self) -> Seen:
        if self.modules.followed or self._all is not None:
            raise RuntimeError("watch: this one is already at work; call watch() again for another")
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled
            self._stance = torch.compiler.set_stance("force_eager")
        if self.model is None:
            self._all = self.new_mode()
            self._all.__enter__()
        for path, module in self.modules.paths.items():
            if self._may_attend(path, module):
                self.modules.follow(path)
        return self.seen

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.modules.stop()
        if self._all is not None:
            self._all.__exit__(None, None, None)
            self._all = None
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        if kind is None:
            self._account()

    # -- modules -----------------------------------------------------------------------------------

    def _known(self, wanted: str) -> bool:
        name = wanted.partition("#")[0]
        return any(matches(name, path or type(module).__name__)
                   for path, module in self.modules.paths.items())  # fmt: skip

    def _may_attend(self, path: str, module: nn.Module) -> bool:
        """Whether attention that is wanted can be called in a module itself, or all below it."""
        wanted = [*(self.layers or ()), *self.ablation.layers]
        paths = [w.partition("#")[0] for w in wanted if isinstance(w, str)]
        by_path_only = self.layers is not None and len(paths) == len(wanted)
        names = [path or type(module).__name__]
        if isinstance(module, FUSED):  # which may compute what is below it without calling it
            names += [p for p in self.modules.paths if p.startswith(f"{path}." if path else "")]
        if by_path_only and not any(matches(w, name) for w in paths for name in names if name):
            return False
        ours = not type(module).__module__.startswith("torch.nn.")
        return not path or ours or isinstance(module, FUSED)

    def new_mode(self) -> Mode:
        """A mode that sees every torch call."""
        return Mode(self)

    def starts(self, path: str, step: int) -> Mode | None:
        """The mode for a forward of the model, if it is one to be recorded."""
        return self.new_mode() if step % self.every == 0 or self.ablation.layers else None

    def finished(self, frame: Frame) -> None:
        """Remember whether a module attends; list one that should and was not seen to."""
        (self._layer_modules if frame.own else self._silent).add(frame.path)
        if not frame.all and named_attention(frame.module):
            self.seen.miss(
                frame.path,
                type(frame.module).__name__,
                "ran, and no attention was recognised in it (compiled code, flex_attention and "
                "kernels of other packages cannot be seen)",
            )

    def all_returned(self, frame: Frame, complete: bool) -> None:
        """After a whole forward of the model, follow only what the next ones need."""
        if frame.module is not self.model or not complete or not self._silent:
            return
        self.modules.base = self.modules.forwards[""]
        numbers = [w for w in (*(self.layers or ()), *self.ablation.layers) if isinstance(w, int)]
        for path in self.modules.followed:
            module = self.modules.paths[path]
            if numbers:  # now it is known which modules they are
                needed = any(
                    self._wanted(name, number)
                    for name, number in self.numbers.items()
                    if name.partition("#")[0] == (path or type(module).__name__)
                )
            else:
                needed = not path or path not in self._silent - self._layer_modules
                needed = needed or named_attention(module) or isinstance(module, FUSED)
            if not needed:
                self.modules.leave_alone(path)
        self._silent.clear()

    def _wanted(self, name: str, number: int) -> bool:
        wanted = self.layers is None or any(is_layer(w, name, number) for w in self.layers)
        return wanted or any(is_layer(w, name, number) for w in self.ablation.layers)

    # -- calls -------------------------------------------------------------------------------------

    def layer(self) -> tuple[str, int]:
        """The name and number of the layer whose attention is being called; counts the call."""
        frame = self.modules.frame
        if frame is None:
            name = f"call {len(self.numbers)}"
        else:
            name = frame.path or type(frame.module).__name__
            if frame.own:
                name += f"#{frame.own}"
            frame.own += 1
            frame.all += 1
        return name, self.numbers.setdefault(name, len(self.numbers))

    @property
    def packs(self) -> bool:
        """Whether packed sequences may share a call, and the statistics of one: not where each has
        heads replaced, or its weights kept."""
        return not self.ablation.layers and not self.aux.weights

    @property
    def module(self) -> nn.Module | None:
        """The innermost module that is running."""
        frame = self.modules.frame
        return calling_module() if frame is None else frame.module

    @property
    def path(self) -> str:
        """The path of that module."""
        frame = self.modules.frame
        return "" if frame is None else frame.path or type(frame.module).__name__

    def record(self, name: str, number: int, call: Call) -> None:
        """Take the statistics of a call, if it is one to be recorded."""
        step = self.modules.thread.step
        if not self.aux.asked or step % self.every:
            return
        if self.layers is not None and not any(is_layer(w, name, number) for w in self.layers):
            return
        _, H, L, S = call.sizes
        heads = list(range(H)) if self.heads is None else self.heads
        if any(not 0 <= h < H for h in heads):
            raise ValueError(
                f"watch: heads are {heads}, but layer {name} has {H}, from 0 to {H - 1}"
            )
        if heads != list(range(H)):
            call = call.of_heads(heads)
        found, rows = call.statistics(self.aux)
        self.seen.records.append(Record(name, number, step, call.kind, heads, L, S, found, rows))

    def _account(self) -> None:
        """Say what was asked for and never came."""
        for wanted in self.ablation.layers:
            if not any(is_layer(wanted, *layer) for layer in self.numbers.items()):
                raise ValueError(
                    f"watch: ablate names layer {wanted!r}, and no attention of that name or "
                    f"number was called; called were {example(self.numbers)}"
                )
        for wanted in self.layers or ():
            if not any(is_layer(wanted, *layer) for layer in self.numbers.items()):
                self.seen.miss(
                    str(wanted), "the layer", "was asked for, and no attention of it was called"
                )

"""A step of a computation, its numbers and the line of code that made them; and the list of steps
that `trace` and `worked_example` return, with the page that shows it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ABOUT = "Point at a number of a result, and the row and the column that made it light up."

# The axes of a step's values.
TOKENS = ("tokens", "features")
PER_TOKEN, PAIRS = ("heads", *TOKENS), ("heads", "queries", "keys")

# Code, title and explanation, as far as they are the same for every call.
SCORES = (
    "scores = q @ k.transpose(-2, -1)",
    "Scores",
    "Row by row, a word's query meets every word's key in a dot product. The higher the score, "
    "the better they fit.",
)
FUTURE = (
    "The future is masked",
    "No word may look at one that comes after it: above the diagonal every score becomes minus "
    "infinity.",
)
CONTEXT = (
    "context = weights @ v",
    "Context",
    "Each word receives the average of the values it may see, mixed in the proportions of its "
    "weights. Every head has its own opinion.",
)
JOINED = (
    "Heads side by side again",
    "The split is undone: each word's pieces stand in one row. Again no number changes.",
)
OUTPUT = (
    "Output",
    "Until here the heads knew nothing of each other. One last learned matrix combines what they "
    "found.",
)


@dataclass(frozen=True, eq=False)
class Step:
    """One named step of an attention call.

    Attributes:
        name: the variable the code assigns, such as "scores".
        title: a few words for a heading.
        explanation: one or two sentences for a reader who is learning attention.
        code: the Python that was executed to make the values.
        values: the result, (rows, columns), or (H, rows, columns) where per_head.
        axes: what each axis of values counts: "heads", "features", or places in the text, which
            are "tokens", "queries" and "keys".
        per_head: whether the first axis counts heads.
        heads: into how many equal blocks of columns, one a head, a matrix that is not per_head
            falls; 1 where its columns belong to no single head.
        tokens: the words of the text, one for each token.
    """

    name: str
    title: str
    explanation: str
    code: str
    values: Tensor
    axes: tuple[str, ...]
    per_head: bool = False
    heads: int = 1
    tokens: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of values."""
        return tuple(self.values.shape)


class Recorder:
    """Executes lines of code in one small namespace and keeps what they assign."""

    def __init__(self, tokens: Sequence[str], **names: Any) -> None:
        self.tokens, self.names = tuple(tokens), {"torch": torch, "nn": nn, "math": math, **names}
        self.steps: list[Step] = []

    def step(
        self, axes: tuple[str, ...], code: str, title: str, explanation: str, heads: int = 1
    ) -> None:
        """Execute code, and record the variable that its last line assigns as a Step."""
        exec(code, self.names)
        name = code.splitlines()[-1].split(" = ")[0]
        values = self.names[name].detach()
        per_head = axes[:1] == ("heads",)
        self.steps.append(
            Step(name, title, explanation, code, values, axes, per_head, heads, self.tokens)
        )


class Steps(list[Any]):
    """Steps of one attention call in order, with the learned matrices that they multiply by.

    Attributes:
        parameters: W_query, W_key, W_value and out_proj as far as there are such, each as the code
            multiplies by it: (columns in, columns out), or (H, columns in, columns out) of a
            wrapper, whose heads have their own.
        call: of a call inside a model, what the code calls so: its tensors and numbers.
    """

    def __init__(
        self,
        steps: Iterable[Any] = (),
        parameters: Mapping[str, Tensor] | None = None,
        call: Any = None,
    ):
        super().__init__(steps)
        self.parameters, self.call = dict(parameters or {}), call

    def to_html(self, about: str = ABOUT) -> str:
        """The steps as one self-contained page, as text."""
        from ..view import page

        attention = None
        weights = next((step.values for step in self if step.name == "weights"), None)
        if weights is not None and weights.shape[-1] == weights.shape[-2]:
            from .capture import Capture

            tokens = [" " * (n > 0) + word for n, word in enumerate(self[0].tokens)]
            capture = Capture(tokens, [False] * len(tokens), shape=(1, len(weights)))
            capture.add(weights)
            attention = capture.data()
        return page.page(
            title="Multi-head attention by hand" if self.call is None else self.call.layer,
            about=f"{len(self)} steps, {_sizes(self)}",
            attention=attention,
            steps=[page.steps_data(self, self.parameters, about, heads=self._heads())],
            start="steps",
        )

    def _heads(self) -> list[str]:
        """What the heads are called, where that is not 1, 2, ..."""
        return [] if self.call is None else [str(h) for h in self.call.heads]

    def write(self, path: str | Path) -> str:
        """Write the page, and say so: "steps.html: 95 kB"."""
        from ..view import page

        return page.write(path, self.to_html())

    def _repr_html_(self) -> str:
        from ..view import page

        return page.frame(self.to_html())


def _sizes(steps: list[Any]) -> str:
    words = len(steps[0].tokens)
    heads = next((len(step.values) for step in steps if step.per_head), 1)
    return f"{words} word{'s' * (words != 1)}, {heads} head{'s' * (heads != 1)}"


def parameters_of(module: Any) -> dict[str, Tensor]:
    """The learned matrices of a MultiHeadAttention or of a wrapper, as in `Steps`."""
    found: dict[str, Tensor] = {}
    heads = getattr(module, "heads", None)
    for name in ("W_query", "W_key", "W_value"):
        if heads is not None:
            own = [getattr(head, name).weight.detach().T for head in heads]
            found[name] = torch.stack(own)
        elif hasattr(module, name):
            found[name] = getattr(module, name).weight.detach().T
    if getattr(module, "out_proj", None) is not None:
        found["out_proj"] = module.out_proj.weight.detach().T
    return found

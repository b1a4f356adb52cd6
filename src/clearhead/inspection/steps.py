"""The list of steps that `trace` and `worked_example` return, and the page that shows it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABOUT = "Point at a number of a result, and the row and the column that made it light up."


class Steps(list[Any]):
    """Steps of one attention call in order, with the learned matrices that they multiply by.

    Attributes:
        parameters: W_query, W_key, W_value and out_proj as far as there are such, each as the code
            multiplies by it: (columns in, columns out), or (H, columns in, columns out) of a
            wrapper, whose heads have their own.
    """

    def __init__(self, steps: Iterable[Any] = (), parameters: Mapping[str, Tensor] | None = None):
        super().__init__(steps)
        self.parameters = dict(parameters or {})

    def to_html(self, about: str = ABOUT) -> str:
        """The steps as one self-contained page, as text."""
        from ..view import page

        attention = None
        weights = next((step.values for step in self if step.name == "weights"), None)
        if weights is not None:
            from .capture import Capture

            tokens = [" " * (n > 0) + word for n, word in enumerate(self[0].tokens)]
            capture = Capture(tokens, [False] * len(tokens), shape=(1, len(weights)))
            capture.add(weights)
            attention = capture.data()
        return page.page(
            title="Multi-head attention by hand",
            about=f"{len(self)} steps, {_sizes(self)}",
            attention=attention,
            steps=[page.steps_data(self, self.parameters, about)],
            start="steps",
        )

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

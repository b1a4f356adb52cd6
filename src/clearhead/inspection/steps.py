"""A step of a computation: its numbers, and the line of code that made them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


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

"""All that `see` puts into a file about one run of a model: gathered layer by layer, then written.

report = Report(text, offsets, special, names, shape)
hf.attentions(model, tokens, report.add, report.take)
report.html(title, about, roles)
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .call_steps import heads_at_work
from .capture import Capture, pieces
from .steps import Step
from .trace import worked_example

MOST_TOKENS = 32  # of a text whose heads are shown in numbers
FAITHFUL = 1e-3  # how far weights may be from softmax(q k / sqrt(D)) for those numbers to be right
EXAMPLE = "the dog fetched the ball"
BY_HAND = (
    "Five words, two heads of size three, numbers drawn at random: the arithmetic of any model, "
    "small enough to follow."
)
BY_MODEL = (
    "The text and the heads of the first panel, in the numbers that the model computed. Positions "
    "are in the queries and keys already."
)


class Report:
    """What one run of a model on a text shows, for a page or a figure.

    Args:
        text, offsets, special: as for inspection.links.words_of.
        names: what the vocabulary calls the tokens.
        shape: (layers, heads) as far as known; see Capture.
        full: see Capture.
    """

    def __init__(
        self,
        text: str,
        offsets: Sequence[tuple[int, int]],
        special: Sequence[bool],
        names: Sequence[str],
        shape: tuple[int, int] = (32, 32),
        full: str | None = None,
    ):
        hidden = [added or i == 0 for i, added in enumerate(special)]
        tokens = pieces(text, offsets, special, names)
        self.capture = Capture(tokens, hidden, full, shape)
        self.short = len(tokens) <= MOST_TOKENS
        self._taken: tuple[Any, ...] = ()
        self._inputs: list[tuple[Any, ...]] = []

    def take(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> None:
        """Take in the queries, keys and values of a layer, just before its weights."""
        self._taken = (query, key, scale)
        if self.short:
            self._inputs.append(tuple(x.detach().cpu().float() for x in (query, key, value)))

    def add(self, layer: int, weights: Tensor) -> None:
        """Take in the weights of a layer."""
        self.capture.add(weights, *self._taken)
        self._taken = ()
        if self.short and len(self._inputs) == len(self.capture.heads):
            self._inputs[-1] += (weights.detach().cpu().float(),)

    def html(
        self,
        title: str,
        about: str,
        roles: Iterable[Sequence[Any]] = (),
        badges: Iterable[Sequence[Any]] = (),
        first: Sequence[tuple[int, int]] = (),
    ) -> str:
        """The page as text.

        Args:
            title, about: what stands at its top.
            roles: (role, layer, head, score, baseline, n, held_out, ablation) each; where there
                are none, the first panel shows heads that stand out in this text.
            badges: (role, layer, head, score) of every head that has a role; those of roles where
                there are none.
            first: (layer, head) to show in the first panel where their role fits it.
        """
        from ..view import page
        from ..view import roles as of_heads

        rows, three = self._first(roles, first)
        example = worked_example(EXAMPLE.split())
        tours = [
            page.steps_data(
                example,
                example.parameters,
                BY_HAND,
                name="Five words by hand",
            )
        ]
        chosen = [(one["layer"], one["head"]) for one in three]
        if steps := self.steps(chosen):
            tours.insert(
                0,
                page.steps_data(
                    steps,
                    about=BY_MODEL,
                    name="These heads",
                    heads=[f"{layer}.{head}" for layer, head in chosen],
                ),
            )
        return page.page(
            title=title,
            about=about,
            attention=self.capture.data(),
            steps=tours,
            roles=rows,
            badges=of_heads.badges(badges, rows),
            three=three,
        )

    def steps(self, heads: Sequence[tuple[int, int]]) -> list[Step]:
        """The steps of some heads in numbers; none where the text is long, or where the weights
        come about in another way than by softmax(q k / sqrt(D))."""
        if not heads or len(self._inputs) != len(self.capture.heads):
            return []
        q, k, v, weights = [], [], [], []
        for layer, head in heads:
            query, key, value, of_layer = self._inputs[layer]
            q.append(query[head])
            k.append(key[head * len(key) // len(query)])
            v.append(value[head * len(value) // len(query)])
            weights.append(of_layer[head])
        if len({x.shape for x in (*q, *k, *v)}) != 1:
            return []
        stacked = torch.stack(q), torch.stack(k), torch.stack(v)
        steps = heads_at_work(*stacked, self.capture.tokens)
        made = next(step.values for step in steps if step.name == "weights")
        apart = float((made - torch.stack(weights)).abs().max())
        return steps if apart < FAITHFUL and math.isfinite(apart) else []

    def write(
        self,
        title: str,
        about: str,
        html: str | Path | None = None,
        picture: str | Path | None = None,
        head: tuple[int, int | None] | None = None,
        roles: Iterable[Sequence[Any]] = (),
        badges: Iterable[Sequence[Any]] = (),
        first: Sequence[tuple[int, int]] = (),
    ) -> list[str]:
        """Write a page, a picture, or both, and say so: ["heads.html: 2.1 MB"].

        Args:
            title, about: what stands at the top.
            html: the file of the page.
            picture: the file of the figure, a .png, .pdf or .svg.
            head: (layer, head) that the figure draws in full, head None for all of the layer; where
                this is None, the heads of the page's first panel.
            roles, badges, first: as for html().
        """
        from ..view import figure, page

        told = []
        if html is not None:
            told.append(page.write(html, self.html(title, about, roles, badges, first)))
        if picture is not None:
            heads = [(one["layer"], one["head"]) for one in self._first(roles, first)[1]]
            if head is not None:
                layer, one = head
                heads = [(layer, n) for n in range(self.capture.heads[layer]) if one in (None, n)]
            small = [part.tolist() for part in self.capture.small()]
            maps = {pair: self.capture.map(*pair).tolist() for pair in heads}
            size = figure.draw(picture, title, self.capture.tokens, self.capture.heads, small, maps)
            told.append(f"{picture}: {page.size(size)}")
        return told

    def _first(
        self, roles: Iterable[Sequence[Any]], first: Sequence[tuple[int, int]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows of roles, and the heads of the first panel, as the page takes them."""
        from ..view import roles as of_heads

        data = self.capture.data()
        rows = of_heads.rows(roles)
        three = of_heads.three(rows, data["tokens"], first)
        return rows, three or of_heads.measured(data["statistics"], data["heads"])

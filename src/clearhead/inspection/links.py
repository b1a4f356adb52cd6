"""Who looks at whom: from weights between tokens to links between words, and numbers for heads.

Tokens are pieces of words, and a model parks much of its attention where it says nothing: on the
first token and on those that the tokenizer adds. So weights are gathered by words, and links to
those tokens and to a word itself are left out.

    words_of      a text and its tokens' places -> words
    by_word       weights (H, L, L) -> (H, W, W)
    beyond_habit  how far each of them exceeds what its head does anyway
    statistic     one number for each head: sink, previous, self, entropy, distance
    Look          all of this over the layers of a model, one at a time
"""

import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LEAST = 0.01  # a weaker link says nothing
REMARKABLE = 0.2  # so much beyond its habit, and a head is worth a look


@dataclass(frozen=True)
class Words:
    """The words of a text: W of them, and for each of its L tokens which word it is part of.

    word_of: L numbers from 0 to W - 1, or -1 for a token of no word (added, or only space).
    """

    texts: list[str]
    word_of: list[int]


class Link(NamedTuple):
    """Word number `target` is looked at with this weight, by this head of this layer (from 0)."""

    target: int
    weight: float
    layer: int
    head: int


def words_of(
    text: str, offsets: Sequence[tuple[int, int]], special: Sequence[bool] | None = None
) -> Words:
    """Group tokens into words: runs without a space, less the punctuation at their ends.

    Han and kana characters, which need no spaces, are words of their own. No word ends inside a
    token.

    Args:
        text: what was tokenized.
        offsets: each token's (start, end) in it.
        special: True for tokens that the tokenizer added.

    >>> words_of("She ran.", [(0, 3), (3, 5), (5, 7), (7, 8)])
    Words(texts=['She', 'ran', '.'], word_of=[0, 1, 1, 2])
    """
    pieces = [piece for run in re.finditer(r"\S+", text) for piece in _pieces(text, *run.span())]
    piece_at = [-1] * len(text)
    for number, (start, end) in enumerate(pieces):
        piece_at[start:end] = [number] * (end - start)
    first_piece: list[int] = []  # of each token
    joined: set[int] = set()  # pieces that stand in one token with the piece before
    for (start, end), added in zip(offsets, special or [False] * len(offsets), strict=True):
        touched = [] if added else [piece for piece in piece_at[start:end] if piece >= 0]
        first_piece.append(touched[0] if touched else -1)
        joined.update(piece for piece in touched if piece > touched[0])

    group_of: list[int] = []
    spans: list[tuple[int, int]] = []  # of pieces joined to words
    for number, (start, end) in enumerate(pieces):
        if number in joined:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
        group_of.append(len(spans) - 1)
    # Some tokenizers drop characters, and with them whole words.
    kept = sorted({group_of[piece] for piece in first_piece if piece >= 0})
    number_of = {group: number for number, group in enumerate(kept)}
    return Words(
        texts=[" ".join(text[slice(*spans[group])].split()) for group in kept],
        word_of=[number_of[group_of[piece]] if piece >= 0 else -1 for piece in first_piece],
    )


def _pieces(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Cut a run without spaces into punctuation, a word or lone characters, punctuation."""
    first, last = start, end
    while first < end and _is_mark(text[first]):
        first += 1
    while last > first and _is_mark(text[last - 1]):
        last -= 1
    cuts = {start, first, last, end}
    for i in range(first, last):
        if _stands_alone(text[i]):
            cuts.update((i, i + 1))
    edges = sorted(cuts)
    return list(itertools.pairwise(edges))


def _is_mark(letter: str) -> bool:
    return unicodedata.category(letter)[0] in "PS"  # punctuation and symbols


def _stands_alone(letter: str) -> bool:
    return "\u3040" <= letter <= "\u30ff" or "\u3400" <= letter <= "\u9fff"


def by_word(weights: Tensor, word_of: Sequence[int]) -> Tensor:
    """Gather weights (H, L, L) by words: (H, W, W), W being the highest number in word_of + 1.

    A word's weight on another is the sum over the other's tokens and the mean over its own. Tokens
    of no word (-1) are left out on both sides.
    """
    words = torch.tensor(word_of, device=weights.device)
    kept = (words >= 0).nonzero()[:, 0]
    words = words[kept]
    H, W = weights.shape[0], max(word_of, default=-1) + 1
    sums = weights.new_zeros(H, weights.shape[1], W).index_add_(2, words, weights[:, :, kept])
    rows = weights.new_zeros(H, W, W).index_add_(1, words, sums[:, kept])
    return rows / torch.bincount(words, minlength=W)[:, None]


def beyond_habit(between: Tensor) -> Tensor:
    """How far each weight between words (H, W, W) exceeds what its head does anyway.

    Subtracted is the larger of two means: of the head's weights at the same distance, and of those
    on the same word, each without the link itself and with 0 where there is no other. A head that
    always looks at the word before, or always at the same comma, comes out near 0.
    """
    H, W = between.shape[:2]
    places = torch.arange(W, device=between.device)
    apart = places[:, None] - places
    possible = apart >= 0 if is_causal(between) else torch.ones_like(apart, dtype=torch.bool)
    possible = (possible & (apart != 0)).to(between.dtype)
    between = between * possible

    same = (apart + W - 1).flatten()
    sums = between.new_zeros(H, 2 * W - 1).index_add_(1, same, between.flatten(1))[:, same]
    others = torch.bincount(same, possible.flatten())[same] - 1
    at_distance = (sums.view_as(between) - between) / others.view(W, W).clamp(min=1)
    others = possible.sum(0) - 1
    on_word = (between.sum(1, keepdim=True) - between) / others.clamp(min=1)
    return between - torch.maximum(at_distance, on_word)


class Links:
    """For each two words of W, the head of all that were added which links them most."""

    def __init__(self, W: int):
        self.score, self.weight = torch.zeros(W, W), torch.zeros(W, W)
        self.layer, self.head = torch.zeros(2, W, W, dtype=torch.int32)

    def add(self, layer: int, score: Tensor, between: Tensor, first_head: int = 0) -> None:
        """Take in heads of one layer by their scores (H, W, W), with their weights."""
        best, head = score.max(0)
        stronger = best > self.score
        self.score[stronger] = best[stronger]
        self.weight[stronger] = between.gather(0, head[None])[0][stronger]
        self.head[stronger] = head[stronger].int() + first_head
        self.layer[stronger] = layer

    def link(self, i: int, j: int) -> Link:
        """The link of word i to word j."""
        return Link(j, float(self.weight[i, j]), int(self.layer[i, j]), int(self.head[i, j]))


class Look:
    """What one run of a model shows about a text, taken in layer by layer.

    Args:
        text, offsets, special: as for words_of.
        stat: which statistic to keep for each head.
        layer, head: links of this layer, or of this head of it, only.
        hide_sink: whether links to the first token and to added ones are left out.

    words holds the words, heads[layer][head] the statistic, causal whether all words look back
    only. Raises ValueError for an unknown statistic.
    """

    def __init__(
        self,
        text: str,
        offsets: Sequence[tuple[int, int]],
        special: Sequence[bool],
        stat: str = "sink",
        layer: int | None = None,
        head: int | None = None,
        hide_sink: bool = True,
    ):
        if stat not in STATISTICS:
            raise ValueError(f"the statistic is {stat}; it must be one of {', '.join(STATISTICS)}")
        self.words = words_of(text, offsets, special)
        self.hidden = torch.tensor([extra or i == 0 for i, extra in enumerate(special)])
        self.stat, self.layer, self.head = stat, layer, head
        self._unlinked = self.hidden & hide_sink
        self.heads: list[list[float]] = []
        self.causal = True
        W = len(self.words.texts)
        self._by_weight, self._by_surprise = Links(W), Links(W)

    def add(self, layer: int, weights: Tensor) -> None:
        """Take in one layer's weights (H, L, L).

        Raises:
            ValueError: this is the layer asked for, and it lacks the head asked for.
        """
        weights = weights.cpu()
        self.causal = self.causal and is_causal(weights)
        self.heads.append(statistic(self.stat, weights, self.hidden.tolist()))
        if self.layer not in (None, layer) or not self.words.texts:
            return
        if self.head is not None and self.head >= len(weights):
            raise ValueError(
                f"there is no head {self.head} in layer {layer}: its heads are 0 to "
                f"{len(weights) - 1}"
            )
        first = self.head or 0
        between = by_word(weights.masked_fill(self._unlinked, 0), self.words.word_of)
        between = between[first:] if self.head is None else between[first : first + 1]
        score = between - between.diagonal(0, -2, -1).diag_embed()
        self._by_weight.add(layer, score, between, first)
        self._by_surprise.add(layer, beyond_habit(between), between, first)

    def strongest(self, k: int) -> list[list[Link]]:
        """For each word at most k links, the strongest first, each to another word.

        Left out are links to the word itself and, with hide_sink, to the first and added tokens.
        """
        weight = self._by_weight.weight
        top, target = weight.topk(min(k, len(weight)), dim=1)
        return [
            [self._by_weight.link(i, j) for w, j in zip(row, js, strict=True) if w >= LEAST]
            for i, (row, js) in enumerate(zip(top.tolist(), target.tolist(), strict=True))
        ]

    def outstanding(self, k: int) -> list[tuple[int, Link]]:
        """At most k links (word, link) past the neighbours that exceed their head's habit most."""
        score = self._by_surprise.score.clone()
        for off in (-1, 0, 1):
            score.diagonal(off).zero_()
        W = len(score)
        best = score.flatten().topk(min(k, W * W))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        found = [(pair // W, pair % W) for value, pair in pairs if value >= REMARKABLE]
        return [(i, self._by_surprise.link(i, j)) for i, j in found]


def is_causal(weights: Tensor) -> bool:
    """Whether no query of weights (H, L, L) looks at a later key."""
    return not bool(weights.triu(1).any())


def _sink(weights: Tensor, hidden: Tensor) -> Tensor:
    return weights[..., hidden].sum(-1)


def _previous(weights: Tensor, hidden: Tensor) -> Tensor:
    rows = weights.diagonal(-1, -2, -1)
    return torch.nn.functional.pad(rows, (1, 0))


def _self(weights: Tensor, hidden: Tensor) -> Tensor:
    return weights.diagonal(0, -2, -1)


def _entropy(weights: Tensor, hidden: Tensor) -> Tensor:
    L = weights.shape[-1]
    seen = torch.arange(1, L + 1, device=weights.device) if is_causal(weights) else torch.tensor(L)
    return torch.special.entr(weights).sum(-1) / seen.clamp(min=2).to(weights.dtype).log()


def _distance(weights: Tensor, hidden: Tensor) -> Tensor:
    places = torch.arange(weights.shape[-1], device=weights.device)
    return (weights * (places[:, None] - places).abs()).sum(-1)


STATISTICS = {
    "sink": _sink,
    "previous": _previous,
    "self": _self,
    "entropy": _entropy,
    "distance": _distance,
}


def statistic(name: str, weights: Tensor, hidden: Sequence[bool]) -> list[float]:
    """One number for each head of weights (H, L, L): the mean over all rows but hidden ones.

    sink: the share of the weight on hidden tokens. previous, self: on the token before, on the
    token itself. entropy: of the row, as a share of the most it could be (0 one token, 1 all
    alike). distance: how many tokens away the weight lies on average.

    >>> statistic("previous", torch.eye(3)[None].roll(1, 1), [True, False, False])
    [1.0]
    """
    hide = torch.tensor(hidden, dtype=torch.bool, device=weights.device)
    rows = STATISTICS[name](weights, hide)[:, ~hide]
    return rows.mean(1).tolist() if rows.shape[1] else [math.nan] * len(rows)

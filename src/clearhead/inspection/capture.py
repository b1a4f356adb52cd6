"""What a page keeps of a model's attention: weights come in layer by layer, plain bytes come out.

Weights are kept as levels of their logarithm, because what matters spans four decades and because
neighbouring levels deflate well:

    level 0 is less than 2^-octaves; n = 1 ... levels is 2^(octaves (n - levels) / (levels - 1))

A text of a few dozen tokens keeps every weight at 16 bits. A longer one keeps for each query the
`TOP` strongest keys, or on request all of them at 6 bits (full="maps"), or 8-bit queries and keys
from which the weights are computed again (full="qk", see queries_keys.py).
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .links import STATISTICS, is_causal, statistic
from .queries_keys import pack, unpack

TOP = 8
THUMBNAIL = 64
FULL = ("maps", "qk")
EXACT = 2**20  # so many weights, over all heads, are cheap enough to keep at 16 bits


class Scale(NamedTuple):
    """How weights become whole numbers: 0 to levels, over so many octaves below 1, in bytes."""

    levels: int
    octaves: int
    bytes: int


FINE, TOPS, COARSE = Scale(65535, 24, 2), Scale(255, 12, 1), Scale(63, 10, 1)


def to_levels(weights: Tensor, scale: Scale) -> Tensor:
    """Weights from 0 to 1 as levels, in int32.

    >>> to_levels(torch.tensor([0.0, 2.0**-10, 1.0]), COARSE).tolist()
    [0, 1, 63]
    """
    place = 1 + weights.clamp(min=1e-30).log2() / scale.octaves
    return (1 + place * (scale.levels - 1)).round().clamp(0, scale.levels).int()


def to_weights(levels: Tensor, scale: Scale) -> Tensor:
    """The weights that levels stand for, in float32; level 0 stands for 0."""
    weights = 2 ** (scale.octaves * (levels.float() - scale.levels) / (scale.levels - 1))
    return weights.masked_fill(levels == 0, 0)


class Capture:
    """What one run of a model on a text leaves for a page, taken in layer by layer.

    Args:
        tokens: L pieces of the text, one a token, with the spaces before them.
        hidden: True for tokens that "hide the sink" leaves out: the first and the added ones.
        full: None for the TOP strongest keys of each query, "maps" for all weights, "qk" for
            queries and keys. A text short enough keeps all weights exactly, whatever this is.
        shape: (layers, heads) as far as known, to tell whether the text is short enough.

    Raises ValueError for another `full`, or where hidden is not as long as tokens.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        hidden: Sequence[bool],
        full: str | None = None,
        shape: tuple[int, int] = (32, 32),
    ):
        if full is not None and full not in FULL:
            raise ValueError(f"full is {full}; it must be {' or '.join(FULL)}, or left out")
        if len(tokens) != len(hidden):
            raise ValueError(f"there are {len(tokens)} tokens and {len(hidden)} of hidden")
        self.tokens, self.hidden = list(tokens), list(map(bool, hidden))
        L = len(tokens)
        exact = math.prod(shape) * L * (L + 1) // 2 <= EXACT
        self.kind = "all" if exact or full == "maps" else full or "top"
        self.scale = FINE if exact else COARSE if full == "maps" else TOPS
        self.causal: bool | None = None
        self.heads: list[int] = []  # of each layer
        self.statistics: dict[str, list[list[float]]] = {}
        self._blobs: list[bytes] = []
        self._keys: list[bytes] = []
        self._thumbnails: list[bytes] = []
        self._kept: list[list[float]] = []

    def add(
        self,
        weights: Tensor,
        query: Tensor | None = None,
        key: Tensor | None = None,
        scale: float | None = None,
        extra: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Take in the next layer.

        Args:
            weights: (H, L, L), each row a query.
            query, key: (H, L, D) and (Hkv, L, D) with positions applied; needed for full="qk",
                and for the largest score of each head.
            scale: of the scores; 1/sqrt(D) where None.
            extra: further statistics of the layer, H numbers each.

        Raises:
            ValueError: weights are not (H, L, L), or full="qk" and the queries and keys are
                missing or do not give these weights.
        """
        L = len(self.tokens)
        if weights.dim() != 3 or weights.shape[1:] != (L, L):
            raise ValueError(
                f"weights have shape {tuple(weights.shape)}; for {L} tokens they must be "
                f"(H, {L}, {L})"
            )
        weights = weights.detach().cpu().float()
        looks_back = is_causal(weights)
        # Rows are cut at the diagonal where all layers so far looked back only.
        if self.causal is None:
            self.causal = looks_back
        elif self.causal and not looks_back:
            raise ValueError(
                f"layer {len(self.heads)} looks ahead and those before it look back only; write "
                "a page for each kind of layer"
            )
        self.heads.append(len(weights))
        for name in STATISTICS:
            self._keep(name, statistic(name, weights, self.hidden))
        if query is not None and key is not None:
            query, key = query.detach().cpu().float(), key.detach().cpu().float()
            self._keep("max_logit", _largest_scores(weights, query, key, scale))
        for name, values in (extra or {}).items():
            self._keep(name, list(map(float, values)))
        self._thumbnails += map(_bytes, to_levels(thumbnails(weights), COARSE).to(torch.uint8))
        if self.kind == "qk":
            if query is None or key is None:
                raise ValueError(
                    'full="qk" needs the queries and keys, which this model does not show; '
                    'full="maps" keeps all weights'
                )
            blobs, keys = pack(query, key, scale, weights)
            self._blobs += blobs
            self._keys += keys
            self._kept.append([1.0] * len(weights))
        elif self.kind == "all":
            self._blobs += map(_bytes, self._cut(to_levels(weights, self.scale)))
            self._kept.append([1.0] * len(weights))
        else:
            self._blobs += self._strongest(weights)

    def _keep(self, name: str, values: list[float]) -> None:
        self.statistics.setdefault(name, []).append(values)

    def _cut(self, levels: Tensor) -> Tensor:
        """(H, L, L) -> (H, what may be seen), rows one after another, in 1 or 2 bytes a level."""
        L = len(self.tokens)
        if self.causal:
            rows, columns = torch.tril_indices(L, L)
            levels = levels[:, rows, columns]
        levels = levels.flatten(1)
        if self.scale.bytes == 1:
            return levels.to(torch.uint8)
        # Low bytes of all, then high bytes of all: the high ones repeat, and so deflate.
        return torch.cat([levels % 256, levels // 256], dim=1).to(torch.uint8)

    def _strongest(self, weights: Tensor) -> list[bytes]:
        """For each head: levels (L, k), then how far apart the keys are, low and high bytes."""
        k = min(TOP, len(self.tokens))
        top, keys = weights.topk(k, dim=-1)
        self._kept.append(_mean(top.sum(-1), self.hidden))
        # Keys in the order of the text, so that each is told by its distance from the one before.
        keys, order = keys.sort(dim=-1)
        levels = to_levels(top.gather(-1, order), self.scale)
        apart = keys.diff(dim=-1, prepend=torch.zeros_like(keys[..., :1]))
        planes = torch.stack([levels, apart % 256, apart // 256], dim=1)
        return [_bytes(head.transpose(1, 2).contiguous().to(torch.uint8)) for head in planes]

    def map(self, layer: int, head: int) -> Tensor:
        """The weights (L, L) of one head as the page shows them; what was not kept is 0."""
        index, L = sum(self.heads[:layer]) + head, len(self.tokens)
        if self.kind == "qk":
            return unpack(self._blobs[index], self._keys[index], L, bool(self.causal))
        levels = torch.frombuffer(bytearray(self._blobs[index]), dtype=torch.uint8).int()
        found = torch.zeros(L, L)
        if self.kind == "all":
            if self.scale.bytes == 2:
                levels = levels[: len(levels) // 2] + 256 * levels[len(levels) // 2 :]
            if not self.causal:
                return to_weights(levels.view(L, L), self.scale)
            found[tuple(torch.tril_indices(L, L))] = to_weights(levels, self.scale)
            return found
        levels, low, high = levels.view(3, -1, L).transpose(1, 2)
        keys = (low + 256 * high).cumsum(-1)
        # Keys that were blocked come with level 0, and may repeat one that was kept.
        return found.scatter_add_(1, keys, to_weights(levels, self.scale))

    def small(self) -> list[Tensor]:
        """The thumbnail (T, T) of each head as the page shows it."""
        T = min(len(self.tokens), THUMBNAIL)
        return [
            to_weights(torch.frombuffer(bytearray(part), dtype=torch.uint8).int(), COARSE).view(
                T, T
            )
            for part in self._thumbnails
        ]

    def data(self) -> dict[str, Any]:
        """All of it as numbers, strings, lists and bytes, for view.page.

        Heads stand in one list, layer by layer. thumbnails, blobs and keys are not deflated yet.
        """
        L = len(self.tokens)
        return {
            "tokens": self.tokens,
            "hidden": self.hidden,
            "causal": bool(self.causal),
            "heads": self.heads,
            "statistics": {
                name: [value for layer in layers for value in layer]
                for name, layers in self.statistics.items()
                if len(layers) == len(self.heads)
            },
            "kept": [value for layer in self._kept for value in layer],
            "thumbnail": {"size": min(L, THUMBNAIL), **COARSE._asdict()},
            "maps": {"kind": self.kind, "top": min(TOP, L), **self.scale._asdict()},
            "thumbnails": self._thumbnails,
            "blobs": self._blobs,
            "keys": self._keys,
        }


def thumbnails(weights: Tensor) -> Tensor:
    """Weights (H, L, L) between at most 64 stretches of the text: (H, T, T), rows still sum to 1.

    A stretch's weight on another is the sum over the other's tokens and the mean over its own.
    """
    H, L = weights.shape[:2]
    T = min(L, THUMBNAIL)
    stretch = torch.arange(L) * T // max(L, 1)
    sums = weights.new_zeros(H, L, T).index_add_(2, stretch, weights)
    rows = weights.new_zeros(H, T, T).index_add_(1, stretch, sums)
    return rows / torch.bincount(stretch, minlength=T)[:, None]


def _largest_scores(
    weights: Tensor, query: Tensor, key: Tensor, scale: float | None
) -> list[float]:
    """The largest score of each head between two tokens that may see each other."""
    G, D = len(query) // len(key), query.shape[-1]
    scale = 1 / math.sqrt(D) if scale is None else scale
    scores = scale * query @ key.repeat_interleave(G, 0).transpose(1, 2)
    return scores.masked_fill(weights == 0, -math.inf).amax((1, 2)).tolist()


def _mean(rows: Tensor, hidden: Sequence[bool]) -> list[float]:
    shown = rows[:, ~torch.tensor(hidden)]
    return (shown if shown.shape[1] else rows).mean(1).tolist()


def _bytes(levels: Tensor) -> bytes:
    # Without numpy, which torch does not need either.
    return ctypes.string_at(levels.data_ptr(), levels.numel()) if levels.numel() else b""


def pieces(
    text: str,
    offsets: Sequence[tuple[int, int]],
    special: Sequence[bool],
    names: Sequence[str],
) -> list[str]:
    """The stretch of text that each token adds, with what stands before it; added ones by name.

    A token that ends inside a letter, as those of an emoji do, adds nothing and is "".

    >>> pieces("A dog", [(0, 0), (0, 1), (2, 5)], [True, False, False], ["[CLS]", "a", "dog"])
    ['[CLS]', 'A', ' dog']
    """
    found, done = [], 0
    for (_, end), added, name in zip(offsets, special, names, strict=True):
        found.append(name if added else text[done:end])
        done = done if added else max(done, end)
    return found

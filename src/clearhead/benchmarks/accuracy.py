"""How exact it is: our error and torch's on the same numbers, against float64.

Of a long call only the last rows are computed, so that their gold, the plain softmax in float64,
stays affordable.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..functional import attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTHS = (128, 512, 2048, 8192, 32768, 65536)
SIZES = (64, 128, 256)
RULES = ("full", "causal", "one row")
MOST_ROWS, MOST_SCORES, FEWEST_SCORES = 512, 2**22, 2**20  # of a draw
SINGLE = 8  # rows that are computed one by one
DRAWS = 10


@dataclass(frozen=True)
class Setting:
    """Calls of one kind: rule "full", "causal" (aligned to the lower right), or "one row" (as in
    decoding: the last rows of "full", a call for each). S: keys. D: head size."""

    rule: str
    D: int
    S: int

    @property
    def name(self) -> str:
        return f"{self.rule}, D {self.D}, {self.S} keys"

    @property
    def order(self) -> tuple[int, int, int]:
        return RULES.index(self.rule), self.D, self.S


SETTINGS = tuple(Setting(rule, D, S) for rule in RULES for D in SIZES for S in LENGTHS)


class Error(NamedTuple):
    """Against float64: root of the mean square over all elements of all draws, the mean over the
    draws of each one's worst element, and the worst of all."""

    rms: float
    worst: float
    most: float


@dataclass
class Errors:
    """Ours and torch's on the same numbers: `draws` draws of (1, heads, rows, D)."""

    setting: Setting
    dtype: str
    draws: int
    heads: int
    rows: int
    ours: Error
    torch: Error

    @property
    def ratios(self) -> Error:
        """Ours / torch's: below 1 ours is the smaller one."""
        return Error(*(a / b if a else 0.0 for a, b in zip(self.ours, self.torch, strict=True)))


class Draw:
    """Normal numbers: query (1, H, L, D), key and value (1, H, S, D), of which the query rows are
    the last ones. Queries are `spread` times as large: over 1 few keys get most of the weight."""

    def __init__(self, D: int, S: int, dtype: torch.dtype, spread: float, seed: int) -> None:
        L = min(S, MOST_ROWS, MOST_SCORES // S)
        H = max(1, FEWEST_SCORES // (L * S))
        generator = torch.Generator().manual_seed(seed)
        self.query, self.key, self.value = (
            (torch.randn(1, H, rows, D, generator=generator) * times).to(dtype)
            for rows, times in ((L, spread), (S, 1.0), (S, 1.0))
        )
        self._doubled = self.key[0].double(), self.value[0].double()

    def gold(self, rule: str) -> Tensor:
        """In float64, head by head."""
        rows = self.query[0, :, -SINGLE:] if rule == "one row" else self.query[0]
        out = []
        for query, key, value in zip(rows.double(), *self._doubled, strict=True):
            s = query @ key.mT * query.shape[-1] ** -0.5
            if rule == "causal":
                s.masked_fill_(~self._past(), float("-inf"))
            out.append(torch.softmax(s, -1) @ value)
        return torch.stack(out)[None]

    def ours(self, rule: str) -> Tensor:
        """Whatever backend `attention` takes for it."""
        if rule == "one row":
            return self._one_by_one(attention)
        return attention(self.query, self.key, self.value, is_causal=rule == "causal")

    def torchs(self, rule: str) -> Tensor:
        """F.scaled_dot_product_attention. Its is_causal is aligned to the upper left."""
        tensors = self.query, self.key, self.value
        if rule == "one row":
            return self._one_by_one(scaled_dot_product_attention)
        if rule == "full":
            return scaled_dot_product_attention(*tensors)
        if self.query.shape[2] == self.key.shape[2]:
            return scaled_dot_product_attention(*tensors, is_causal=True)
        return scaled_dot_product_attention(*tensors, self._past())

    def _past(self) -> Tensor:
        L, S = self.query.shape[2], self.key.shape[2]
        return torch.ones(L, S, dtype=torch.bool).tril(S - L)

    def _one_by_one(self, attend: Callable[[Tensor, Tensor, Tensor], Any]) -> Tensor:
        rows = self.query[:, :, -SINGLE:].split(1, 2)
        return torch.cat([attend(row, self.key, self.value) for row in rows], 2)


@torch.inference_mode()
def measure(
    settings: Sequence[Setting],
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    draws: int = DRAWS,
    spread: float = 1.0,
    first: int = 0,
    on_start: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Iterator[Errors]:
    """Yield the errors of each setting in each dtype; those of one shape see the same numbers.

    Args:
        dtypes: keys of DTYPES. draws, spread: see `Draw`; the seeds are first, first + 1, ...
        on_start: told what comes next, the number done, and the number in all.
    """
    shapes = dict.fromkeys((setting.D, setting.S) for setting in settings)
    plan = [(dtype, D, S) for dtype in dtypes for D, S in shapes]
    for done, (dtype, D, S) in enumerate(plan):
        on_start(f"D {D}, {S} keys, {dtype}", done, len(plan))
        here = [setting for setting in settings if (setting.D, setting.S) == (D, S)]
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in here]
        for seed in range(first, first + draws):
            draw = Draw(D, S, DTYPES[dtype], spread, seed)
            for setting, errors in zip(here, found, strict=True):
                gold, rule = draw.gold(setting.rule), setting.rule
                errors.append((draw.ours(rule) - gold, draw.torchs(rule) - gold))
        for setting, errors in zip(here, found, strict=True):
            ours, theirs = (_error(each) for each in zip(*errors, strict=True))
            heads, rows = errors[0][0].shape[1:3]
            yield Errors(setting, dtype, draws, heads, rows, ours, theirs)


def _error(found: Sequence[Tensor]) -> Error:
    squares = statistics.fmean(float(e.square().mean()) for e in found)
    worst = [float(e.abs().max()) for e in found]
    return Error(squares**0.5, statistics.fmean(worst), max(worst))


def to_plain(errors: Sequence[Errors], about: dict[str, Any], spread: float) -> dict[str, Any]:
    """What a JSON file of errors holds."""
    rows = []
    for e in errors:
        parts = {"ours": e.ours, "torch": e.torch, "ratios": e.ratios}
        rows.append(
            {"key": f"{e.setting.name}, {e.dtype}", **dataclasses.asdict(e)}
            | {name: part._asdict() for name, part in parts.items()}
        )
    return {"machine": about, "spread": spread, "rows": rows}

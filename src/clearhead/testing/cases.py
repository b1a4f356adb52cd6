"""The calls that every backend, dtype and device is held to: sizes, rules, kinds of numbers.

Sizes are distinct primes where they can be, so that no transposition passes; then 1, 0, and one
below and above a tile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """Random tensors of one case, all from one generator."""

    case: "Case"
    generator: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def chosen(self, share: float, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) < share

    def numbers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator)

    def holes(self, mask: Tensor, share: float = 0.3) -> Tensor:
        """The mask with -inf in places."""
        return mask.masked_fill(self.chosen(share, *mask.shape), -math.inf)


def _no_rules(draw: Draw) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """One call: sizes, rules (keyword arguments of `attention`) and the kind of numbers in it.

    `make` draws query, key, value and the rules on the CPU; `inputs` is one of normal, large (three
    times normal), huge row, constant row, ties.
    """

    name: str
    B: int = 2
    H: int = 6
    Hkv: int = 3
    L: int = 5
    S: int = 7
    D: int = 11
    Dv: int = 11
    rules: Callable[[Draw], dict[str, Any]] = _no_rules
    inputs: str = "normal"

    def make(
        self, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """(query, key, value, rules) in the dtype, the same for the same seed."""
        draw = Draw(self, torch.Generator().manual_seed(seed), dtype)
        query = draw.normal(self.B, self.H, self.L, self.D)
        key = draw.normal(self.B, self.Hkv, self.S, self.D)
        value = draw.normal(self.B, self.Hkv, self.S, self.Dv)
        if self.inputs == "large":
            query, key = query * 3, key * 3
        elif self.inputs == "huge row":
            query[:, :, self.L // 2] *= 20
        elif self.inputs == "constant row":
            query[:, :, self.L // 2] = 0.5
            key[:, :, self.S // 2] = -0.25
        elif self.inputs == "ties":
            key = key[:, :, :1].expand_as(key).contiguous()
        return query, key, value, self.rules(draw)


def _rule(name: str, rules: Callable[[Draw], dict[str, Any]], **sizes: Any) -> Case:
    return Case(name, rules=rules, **sizes)


def _everything(d: Draw) -> dict[str, Any]:
    c = d.case
    return {
        "attn_mask": d.holes(d.normal(c.B, 1, c.L, c.S), 0.1),
        "is_causal": True,
        "scale": 0.4,
        "bias": d.normal(c.H, 1, c.S),
        "key_mask": d.chosen(0.9, c.B, c.S),
        "window": (c.S // 2, 3),
        "documents": (d.numbers(2, c.B, c.L), d.numbers(2, c.B, c.S)),
        "softcap": 2.0,
        "sinks": d.normal(c.H),
        "alibi_slopes": d.normal(c.B, c.H).abs(),
        "head_mask": d.normal(c.B, c.H),
    }


_SQUARE = {"L": 13, "S": 13}
_CAUSAL = {"is_causal": True}
_TALL = {"L": 7, "S": 3}  # the first rows see nothing when causal

CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("one of everything", B=1, H=1, Hkv=1, L=1, S=1, D=1, Dv=1),
    Case("equal heads", H=3, Hkv=3),
    Case("one key head", H=5, Hkv=1),
    Case("small values", Dv=3),
    Case("wide values", D=3, Dv=17),
    Case("large numbers", inputs="large"),
    Case("huge row", B=5, S=23, inputs="huge row"),
    Case("constant row", inputs="constant row"),
    Case("ties", inputs="ties"),
    _rule("causal square", lambda d: _CAUSAL, **_SQUARE),
    _rule("causal, equal heads, head size 64", lambda d: _CAUSAL, H=2, Hkv=2, D=64, Dv=64,
          **_SQUARE),
    _rule("causal with a past", lambda d: _CAUSAL),
    _rule("causal, rows without keys", lambda d: _CAUSAL, **_TALL),
    _rule("decode", lambda d: _CAUSAL, L=1, S=19),
    _rule("scale 0", lambda d: {"scale": 0.0, **_CAUSAL}),
    _rule("scale negative", lambda d: {"scale": -1.0, **_CAUSAL}),
    _rule("scale tiny", lambda d: {"scale": 1e-30}),
    _rule("window", lambda d: {"window": (3, 2)}, **_SQUARE),
    _rule("window to the left", lambda d: {"window": (4, 0)}, **_SQUARE),
    _rule("window to the right", lambda d: {"window": (None, 2)}),
    _rule("window of the own key", lambda d: {"window": (0, 0)}, **_SQUARE),
    _rule("window and causal", lambda d: {"window": (2, 2), **_CAUSAL}),
    _rule("window without keys", lambda d: {"window": (1, 0)}, L=7, S=3),
    _rule("key mask", lambda d: {"key_mask": d.chosen(0.6, d.case.B, d.case.S)}, B=3),
    _rule("key mask, one item empty", lambda d: {
        "key_mask": torch.tensor([[False] * 7, [True] * 4 + [False] * 3]), **_CAUSAL}),
    _rule("documents", lambda d: {"documents": d.numbers(3, d.case.B, 13), **_CAUSAL}, **_SQUARE),
    _rule("documents of queries and keys", lambda d: {
        "documents": (d.numbers(3, d.case.B, d.case.L), d.numbers(3, d.case.B, d.case.S))}),
    _rule("bool mask", lambda d: {"attn_mask": d.chosen(0.6, 2, 6, 5, 7)}),
    _rule("bool mask of every other key", lambda d: {
        "attn_mask": (torch.arange(5)[:, None] + torch.arange(7)) % 2 == 0}),
    _rule("bool mask per head", lambda d: {"attn_mask": d.chosen(0.6, 6, 1, 7)}),
    _rule("bool mask of rows", lambda d: {"attn_mask": d.chosen(0.6, 5, 1)}),
    _rule("bool mask and causal", lambda d: {"attn_mask": d.chosen(0.7, 2, 1, 5, 7), **_CAUSAL}),
    _rule("float mask", lambda d: {"attn_mask": d.holes(d.normal(5, 7))}),
    _rule("float mask per item", lambda d: {"attn_mask": d.normal(2, 1, 1, 7), **_CAUSAL}),
    _rule("mask of huge negatives", lambda d: {"attn_mask": d.normal(5, 7).masked_fill(
        ~d.chosen(0.5, 5, 7) | (torch.arange(5) == 2)[:, None], torch.finfo(d.dtype).min / 2)}),
    _rule("bias", lambda d: {"bias": d.normal(6, 5, 7)}),
    _rule("bias and float mask", lambda d: {"bias": d.normal(1, 6, 1, 7),
                                            "attn_mask": d.holes(d.normal(2, 1, 5, 7))}),
    _rule("softcap", lambda d: {"softcap": 1.5}),
    _rule("softcap, causal, bias", lambda d: {"softcap": 0.7, "bias": d.normal(5, 7), **_CAUSAL}),
    _rule("sinks", lambda d: {"sinks": d.normal(6)}),
    _rule("sinks, rows without keys", lambda d: {"sinks": d.normal(6), **_CAUSAL}, **_TALL),
    _rule("alibi", lambda d: {"alibi_slopes": d.normal(6).abs()}),
    _rule("alibi per item, causal", lambda d: {"alibi_slopes": d.normal(2, 6), **_CAUSAL}),
    _rule("head mask", lambda d: {"head_mask": d.normal(6)}),
    _rule("everything", _everything),
    _rule("everything, square", _everything, **_SQUARE),
    _rule("everything, more rows than keys", _everything, L=11, S=5),
    _rule("one row over a tile", lambda d: _CAUSAL, B=1, H=2, Hkv=1, L=65, S=129, D=5, Dv=5),
    _rule("a row under a tile", lambda d: {"window": (40, 7)}, B=1, H=2, Hkv=2, L=63, S=127, D=5,
          Dv=5),
    Case("no batch", B=0),
    Case("no heads", H=0, Hkv=0),
    Case("no rows", L=0),
    _rule("no keys", lambda d: {"sinks": d.normal(6)}, S=0),
    Case("no head size", D=0),
    _rule("no value size", lambda d: _CAUSAL, Dv=0),
)  # fmt: skip

"""Packed sequences: one call of varlen_attention, recorded as the call of each sequence.

What is asked of them is computed in one call as well; each has the numbers that it has alone.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import varlen_attention
from ..results import Aux, AuxRequest, summarised
from .calls import Call

_ARGUMENTS = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "dropout_p", "is_causal")
_RULES = ("is_causal", "scale", "window", "softcap", "sinks", "alibi_slopes")


def read(args: tuple, kwargs: dict[str, Any]) -> list["PackedCall"]:
    """The call of each sequence of a varlen_attention; none for one without values, which asks for
    statistics only."""
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    if given["value"].shape[-1] == 0:
        return []
    q, k = (given[name].detach().transpose(0, 1)[None] for name in ("query", "key"))
    rules = {name: given[name] for name in _RULES if name in given}
    rules = {n: t.detach() if isinstance(t, Tensor) else t for n, t in rules.items()}
    offsets = given["cu_seqlens_q"], given["cu_seqlens_k"]
    whole = Whole(Call("attention", q, k, rules), *offsets)
    return [whole.sequence(n) for n in range(len(offsets[0]) - 1)]


class Whole:
    """All sequences of one call: query (1, H, total, D), key (1, Hkv, total, D), and their offsets;
    alibi_slopes among the rules may be (N, H)."""

    def __init__(self, call: Call, cu_q: Tensor, cu_k: Tensor) -> None:
        self.call, self.cu_q, self.cu_k = call, cu_q, cu_k
        self._rows, self._keys = (
            list(itertools.starmap(slice, itertools.pairwise(offsets.tolist())))
            for offsets in (cu_q, cu_k)
        )
        self._of_heads: dict[tuple[int, ...], Whole] = {}
        self._found: tuple[AuxRequest, Aux] | None = None

    def sequence(self, n: int) -> "PackedCall":
        """The call of sequence n."""
        rules = dict(self.call.rules)
        slopes = rules.get("alibi_slopes")
        if slopes is not None and slopes.ndim == 2:
            rules["alibi_slopes"] = slopes[n]
        query, key = self.call.query[:, :, self._rows[n]], self.call.key[:, :, self._keys[n]]
        return PackedCall(self.call.kind, query, key, rules, whole=self, n=n)

    def of_heads(self, heads: Iterable[int]) -> "Whole":
        """The same with these query heads alone; the same one whenever it is asked for."""
        chosen = tuple(heads)
        if chosen not in self._of_heads:
            self._of_heads[chosen] = Whole(self.call.of_heads(chosen), self.cu_q, self.cu_k)
        return self._of_heads[chosen]

    def statistics(self, n: int, aux: AuxRequest) -> Aux:
        """Each row's numbers of sequence n, (1, H, L), and lse among them; computed for all at the
        first time."""
        asked = dataclasses.replace(aux, lse=True, reduce=None)
        if self._found is None or self._found[0] != asked:
            query, key = (t[0].transpose(0, 1) for t in (self.call.query, self.call.key))
            with torch.no_grad():
                _, found = varlen_attention(
                    query, key, key[..., :0], self.cu_q, self.cu_k,
                    **self.call.rules, return_aux=asked,
                )  # fmt: skip
            self._found = asked, found
        found = self._found[1]
        part = found.each(lambda t: _heads_first(t[self._rows[n]]))
        if found.key_mass is not None:
            part.key_mass = _heads_first(found.key_mass[self._keys[n]])
        return part


@dataclasses.dataclass
class PackedCall(Call):
    """The call of one of the packed sequences: the n-th of `whole`."""

    whole: Whole = dataclasses.field(kw_only=True)
    n: int = dataclasses.field(kw_only=True)

    def of_heads(self, heads: Sequence[int]) -> Call:
        """The same call with these of its query heads alone, in this order."""
        return self.whole.of_heads(heads).sequence(self.n)

    def statistics(self, aux: AuxRequest) -> tuple[Aux, Tensor | None]:
        """As any call's. Weights have no packed form, and are not asked for here."""
        found = self.whole.statistics(self.n, aux)
        lse = found.lse
        assert isinstance(lse, Tensor)
        rows = None
        if aux.reduce is None:
            rows = self._counts(lse)
        else:
            found = summarised(found, lse != -math.inf)
        if not aux.lse:
            found.lse = None
        return found, rows


def _heads_first(tensor: Tensor) -> Tensor:
    """(rows, H, ...) -> (1, H, rows, ...), dense, as a call alone has it: sums keep their order."""
    return tensor.transpose(0, 1)[None].contiguous()

"""What a call can return beside its output: the request, the answer, and summaries of it."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

# Percent of the rows that lie below each of Summary.quantiles.
PERCENT = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class AuxRequest:
    """What to return beside the output: statistics of the attention weights w_ij.

    w_ij are the weights from before dropout and before head_mask; a row of them sums to 1, to less
    beside a sink, and is 0 where the row sees no key. own(i) = i + (S - L). Everything is exact,
    never changes the output, and apart from weights needs no memory for L * S numbers.

    Args:
        lse: log of the sum of exp(score) over the keys a row may see (and its sink), (B, H, L),
            natural log, differentiable; -inf for an empty row.
        max_logit: (B, H, L), the largest visible score after scale, softcap and biases, without
            the sink; -inf for an empty row.
        entropy: (B, H, L), -sum_j w_ij log w_ij in nats, the sink's share left out.
        top_k: how many of the largest weights to return with their keys, a TopK; any number, and
            0 is none.
        key_mass: (B, H, S), sum_i w_ij, the attention that each key receives.
        first_mass: (B, H, L), the weight of the first key of the row's sequence: the first that
            key_mask allows and that is of the row's own document; 0 where the row may not see it.
        previous_mass, self_mass: (B, H, L), the weight of key own(i) - 1, and of own(i); 0 where
            there is no such key or the row may not see it.
        distance: (B, H, L), sum_j w_ij |own(i) - j|; a sink's share counts as 0.
        weights: (B, H, L, S), differentiable.
        reduce: None for one number per row, "head" for one Summary per head in place of the rows.
            Only rows that count enter it: not those that see no key, and not padded ones, whose own
            key key_mask forbids (in self-attention, L == S, and in causal calls, where keys may be
            cached). key_mass stays per key and sums the rows that count. Not with weights.

    All are float32 (float64 for float64). lse and weights carry gradients, except under reduce; the
    others are detached.

    >>> AuxRequest(lse=True, top_k=3)
    AuxRequest(lse=True, top_k=3)
    """

    lse: bool = False
    max_logit: bool = False
    entropy: bool = False
    top_k: int = 0
    key_mass: bool = False
    first_mass: bool = False
    previous_mass: bool = False
    self_mass: bool = False
    distance: bool = False
    weights: bool = False
    reduce: str | None = None

    def __repr__(self) -> str:
        asked = [f"{name}={value!r}" for name, value in vars(self).items() if value]
        return f"AuxRequest({', '.join(asked)})"

    @property
    def asked(self) -> list[str]:
        """The names of what is asked for, in the order of the fields."""
        return [name for name, value in vars(self).items() if value and name != "reduce"]

    def only(self, names: Collection[str]) -> "AuxRequest":
        """The same request, without what is not among the names."""
        dropped: dict[str, Any] = {name: 0 for name in self.asked if name not in names}
        return dataclasses.replace(self, **dropped)


class TopK(NamedTuple):
    """The largest weights of each row, falling, and their keys; of equal ones the lower key first.

    weights: (B, H, L, k). indices: (B, H, L, k), int64. Where a row sees fewer than k keys the
    weight is 0 and the index -1.
    """

    weights: Tensor
    indices: Tensor


class Summary(NamedTuple):
    """A statistic over the rows of each head that count; NaN for a head that has none.

    mean, min, max: (B, H). quantiles: (B, H, 5), the values below which lie 5, 25, 50, 75 and 95 %
    of the rows, interpolated linearly. Of top_k there is one per rank: (B, H, k), (B, H, k, 5).
    """

    mean: Tensor
    min: Tensor
    max: Tensor
    quantiles: Tensor


@dataclass
class Aux:
    """What an AuxRequest asked for; a field that was not asked for is None.

    With reduce="head" every field that has one number per row is a Summary instead, of top_k's
    weights too.
    """

    lse: Tensor | Summary | None = None
    max_logit: Tensor | Summary | None = None
    entropy: Tensor | Summary | None = None
    top_k: TopK | Summary | None = None
    key_mass: Tensor | None = None
    first_mass: Tensor | Summary | None = None
    previous_mass: Tensor | Summary | None = None
    self_mass: Tensor | Summary | None = None
    distance: Tensor | Summary | None = None
    weights: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Aux":
        """The same with every tensor changed."""
        return joined([self], lambda tensors, _: change(tensors[0]))

    def beside(self, other: "Aux") -> "Aux":
        """The same, with what the other has in place of what this one has not."""
        return Aux(
            *(b if a is None else a for a, b in zip(_fields(self), _fields(other), strict=True))
        )


# So that vmap, torch.export and tracers take it as what a function returns.
_pytree.register_dataclass(Aux, serialized_type_name="clearhead.Aux")


def _fields(aux: Aux) -> list[Any]:
    return [getattr(aux, field.name) for field in dataclasses.fields(aux)]


def joined(parts: Sequence[Aux], join: Callable[[list[Tensor], bool], Tensor]) -> Aux:
    """One Aux of several alike: join(tensors, whether they are of a Summary) makes each tensor."""

    def join_field(values: tuple) -> Any:
        first = values[0]
        if not isinstance(first, tuple):
            return first if first is None else join(list(values), False)
        reduced = isinstance(first, Summary)
        return type(first)(*(join(list(tensors), reduced) for tensors in zip(*values, strict=True)))

    return Aux(*map(join_field, zip(*map(_fields, parts), strict=True)))


def summarised(aux: Aux, counts: Tensor) -> Aux:
    """Each statistic of rows as a Summary over those that count, (B, H, L) bool; no gradients."""
    held = {f.name: getattr(aux, f.name) for f in dataclasses.fields(aux)}
    of_keys = held.pop("key_mass")
    rows = {  # (B, H, n, L): what has n ranks is n statistics
        name: value.weights.mT if isinstance(value, TopK) else value[:, :, None]
        for name, value in held.items()
        if value is not None
    }
    result = Aux(key_mass=None if of_keys is None else of_keys.detach())
    if not rows:
        return result
    # All at once: sorting is most of the time, and torch does it on one thread for one statistic.
    whole = _summary(torch.cat(list(rows.values()), 2), counts[:, :, None])
    place = 0
    for name, value in rows.items():
        n = value.shape[2]
        part = slice(place, place + n) if name == "top_k" else place
        setattr(result, name, Summary(*(tensor[:, :, part] for tensor in whole)))
        place += n
    return result


def _summary(values: Tensor, counts: Tensor) -> Summary:
    """Over the last axis of values (..., L), where counts, which broadcasts to them, is True."""
    counts = counts.expand_as(values)
    n = counts.sum(-1, keepdim=True)
    mean = torch.where(counts, values.detach(), 0).sum(-1) / n[..., 0]
    # NaN sorts last, so the rows that count are the first n; one more stands for a head without.
    rows = torch.nn.functional.pad(
        torch.where(counts, values.detach(), math.nan), (0, 1), value=math.nan
    )
    rows = rows.sort(-1).values
    last = (n - 1).clamp(min=0)
    # In hundredths of a row: whole numbers, which do not round.
    place = last * torch.tensor(PERCENT, device=values.device)
    low, rest = place // 100, place % 100
    below, above = rows.gather(-1, low), rows.gather(-1, torch.minimum(low + 1, last))
    quantiles = below + (above - below) * (rest.to(rows.dtype) / 100)
    return Summary(mean, rows[..., 0], rows.gather(-1, last)[..., 0], quantiles)


def checked(request: AuxRequest | None) -> AuxRequest:
    """The request, or an empty one for None; raises for what is none.

    Under reduce lse is asked for in any case: it tells which rows see a key.
    """
    if request is None:
        return AuxRequest()
    if not isinstance(request, AuxRequest):
        raise TypeError(
            f"attention: return_aux is a {type(request).__name__}; it must be an AuxRequest, such "
            "as AuxRequest(lse=True)"
        )
    k = request.top_k
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(
            f"attention: top_k is {k!r}; it must be how many weights per row to return, an int"
        )
    if k < 0:
        raise ValueError(f"attention: top_k is {k}; it must be 1 or more, or 0 for none")
    if request.reduce not in (None, "head"):
        raise ValueError(
            f'attention: reduce is {request.reduce!r}; it must be "head", or None for every row'
        )
    if request.reduce is not None and request.weights:
        raise ValueError(
            "attention: weights have no summary per head; ask for them without reduce, or for "
            "key_mass, their sum over the rows"
        )
    return request if request.reduce is None else dataclasses.replace(request, lse=True)

"""The statistics of a case as plain dicts of tensors: the truth, the peer's, and an Aux's."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..results import PERCENT, Aux, AuxRequest, Summary, TopK
from ..textbook import statistics_by_definition
from .planted import visible

TOP_K = 3
ALL = AuxRequest(
    lse=True, max_logit=True, entropy=True, top_k=TOP_K, key_mass=True, first_mass=True,
    previous_mass=True, self_mass=True, distance=True,
)  # fmt: skip
_RULES = ("attn_mask", "bias", "is_causal", "window", "key_mask", "documents")


def defined(
    query: Tensor,
    key: Tensor,
    rules: dict[str, Any],
    weights: Tensor,
    lse: Tensor,
    reduce: str | None = None,
) -> dict[str, Tensor]:
    """The definition's statistics of these weights, rules being the arguments of the call.

    Under reduce summaries over the rows that count: mean, min, max and quantiles, one after another
    on the last axis.
    """
    seen = visible(query, key, **{n: rules[n] for n in _RULES if n in rules})
    own = {n: rules[n] for n in ("key_mask", "documents") if n in rules}
    found = statistics_by_definition(weights, lse, seen, **own, top_k=TOP_K) | {"lse": lse.double()}
    if reduce is None:
        return found
    counts = seen.any(-1) & ~_padded(query, key, rules)[:, None]
    kept = torch.where(counts[..., None], weights, 0)
    result = {"key_mass": kept.double().sum(-2)}
    for name, rows in found.items():
        if name not in ("key_mass", "top_keys"):
            result[name] = _summary(rows, counts)
    return result


def _padded(query: Tensor, key: Tensor, rules: dict[str, Any]) -> Tensor:
    """The rows (B, L) whose own key key_mask forbids, where rows and keys are of one sequence."""
    (B, _, L, _), S = query.shape, key.shape[-2]
    padded = torch.zeros(B, L, dtype=torch.bool)
    mask = rules.get("key_mask")
    if mask is not None and (L == S or rules.get("is_causal")):
        for i in range(max(0, L - S), L):
            padded[:, i] = ~mask[:, i + S - L]
    return padded


def _summary(rows: Tensor, counts: Tensor) -> Tensor:
    """Of (B, H, L) or (B, H, L, k), head by head and rank by rank: (B, H, 8) or (B, H, k, 8)."""
    ranks = rows[..., None] if rows.ndim == 3 else rows
    B, H, _, k = ranks.shape
    level = torch.tensor(PERCENT, dtype=torch.float64) / 100
    result = torch.full((B, H, k, 8), math.nan, dtype=torch.float64)
    for b, h, rank in itertools.product(range(B), range(H), range(k)):
        x = ranks[b, h, counts[b, h], rank]
        if len(x):
            parts = x.mean().view(1), x.min().view(1), x.max().view(1), x.quantile(level)
            result[b, h, rank] = torch.cat(parts)
    return result if rows.ndim == 4 else result[:, :, 0]


def measured(aux: Aux) -> dict[str, Tensor]:
    """What came back, by the names of `defined`."""
    found: dict[str, Tensor] = {}
    for name, value in vars(aux).items():
        if isinstance(value, Summary):
            parts = (*(t[..., None] for t in value[:3]), value.quantiles)
            found["top_weights" if name == "top_k" else name] = torch.cat(parts, -1)
        elif isinstance(value, TopK):
            found |= {"top_weights": value.weights, "top_keys": value.indices}
        elif value is not None:
            found[name] = value
    return found


def chosen(weights: Tensor, keys: Tensor) -> Tensor:
    """The weights (B, H, L, k) of the keys (B, H, L, k) that were chosen, 0 for key -1.

    Raises:
        AssertionError: a row has a key twice.
    """
    order = keys.sort(-1).values
    if bool(((order[..., 1:] == order[..., :-1]) & (order[..., 1:] >= 0)).any()):
        raise AssertionError("top_k: a row has the same key twice")
    return pad(weights, (1, 0)).gather(-1, keys + 1)

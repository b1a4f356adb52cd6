"""How right is proved: one table of cases, one of errors, one of planted bugs, and one budget.

    gold    the definition in float64 (textbook.attention_by_definition)
    peer    plain textbook arithmetic in the tested dtype: an honest competitor
    budget  factor * (worst error of peer + eps * max|gold|)

Shipped, so that you can hold your own machine, device or backend against it:

>>> from clearhead.testing import CASES, check
>>> sorted(check(CASES[0]))            # raises AssertionError if anything is out of budget
['d_key', 'd_query', 'd_value', 'lse', 'out', 'weights']
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import attention
from ..results import Aux, AuxRequest
from ..textbook import attention_by_definition
from . import planted
from . import statistics as stats
from .cases import CASES, Case
from .errors import ERRORS

__all__ = [
    "CASES",
    "ERRORS",
    "FACTORS",
    "PLANTED_BUGS",
    "PLANTED_STATISTICS",
    "Case",
    "assert_within_budget",
    "check",
    "check_statistics",
]

# The one table of tolerances. A factor above 3 needs its measured figure beside it.
FACTORS = {
    "out": 2.0,
    "lse": 2.0,
    "weights": 2.0,
    "statistic": 2.0,
    "gradient": 3.0,
    # torch's own CPU kernels use a fast exp: 6.85 was measured for their float32 gradients.
    "gradient by torch": 8.0,
}

PLANTED_BUGS = planted.BUGS
PLANTED_STATISTICS = planted.BUGS_IN_STATISTICS


def assert_within_budget(
    actual: Tensor, gold: Tensor, peer: Tensor, kind: str = "out", *, name: str = ""
) -> float:
    """Raise unless actual's worst error is at most factor * (peer's worst error + eps * max|gold|).

    Args:
        actual: the result under test. gold: the truth, float64. peer: plain arithmetic, in actual's
            dtype. All of one shape; where gold is infinite, actual must be the same infinity.
        kind: a key of FACTORS. name: what the message calls the result.

    Returns:
        The share of the budget that was used, 0 to 1.

    >>> gold = torch.ones(2, dtype=torch.float64)
    >>> assert_within_budget(gold.float(), gold, gold.float())
    0.0
    """
    label = name or kind
    if actual.shape != gold.shape:
        raise AssertionError(f"{label}: shape {tuple(actual.shape)}, not {tuple(gold.shape)}")
    if actual.dtype != peer.dtype:
        raise AssertionError(f"{label}: dtype {actual.dtype}, not {peer.dtype}")
    eps = torch.finfo(actual.dtype).eps
    actual, gold, peer = (t.detach().double().cpu() for t in (actual, gold, peer))
    infinite = gold.isinf()
    if not torch.equal(actual[infinite], gold[infinite]):
        raise AssertionError(f"{label}: differs where the right answer is infinite")
    actual, gold, peer = actual[~infinite], gold[~infinite], peer[~infinite]
    if not bool(actual.isfinite().all()):
        bad = int((~actual.isfinite()).sum())
        raise AssertionError(f"{label}: {bad} of {actual.numel()} entries are not finite")
    if not bool(peer.isfinite().all()):
        raise AssertionError(f"{label}: the peer is not finite, so there is no budget")
    if actual.numel() == 0:
        return 0.0
    error = float((actual - gold).abs().max())
    allowed = float((peer - gold).abs().max()) + eps * float(gold.abs().max())
    allowed *= FACTORS[kind]
    if error > allowed:
        raise AssertionError(f"{label}: error {error:.3g} is over the budget of {allowed:.3g}")
    return error / allowed if allowed else 0.0


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_mask: Tensor | None = None,
    **rules: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The peer: all scores at once, in the inputs' dtype; out, lse and weights."""
    (B, H, L, D), (Hkv, S), dtype = query.shape, key.shape[1:3], query.dtype
    key, value = (t.repeat_interleave(H // max(Hkv, 1), dim=1) for t in (key, value))
    visible = planted.visible(query, key, attn_mask=attn_mask, bias=bias, is_causal=is_causal,
                              **rules)  # fmt: skip
    s = query @ key.transpose(-2, -1) * (1 / math.sqrt(max(D, 1)) if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    for added in (attn_mask, bias):
        if added is not None and added.dtype != torch.bool:
            s = s + added.masked_fill(added == -math.inf, 0).to(dtype)
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None] * planted.distances(query, key)
    logits = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(B, H, L, 1)], -1)
    empty = ~visible.any(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0)
    weights = torch.softmax(logits, -1)[..., :S].masked_fill(empty, 0)
    m = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.sum(-1, keepdim=True)
    lse = (m + (logits - m).exp().sum(-1, keepdim=True).log())[..., 0]
    lse = lse.masked_fill(empty[..., 0], -math.inf)
    out = weights @ value
    if head_mask is not None:
        out = out * head_mask[..., None, None]
    accumulated = torch.promote_types(dtype, torch.float32)
    return out, lse.to(accumulated), weights.to(accumulated)


def check(
    case: Case,
    attend: Callable[..., Any] = attention,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    gradients: bool = True,
    aux: bool = True,
    atol: float | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Hold `attend` to the definition on one case: output, lse, weights, and every gradient.

    Args:
        attend: takes and returns what `clearhead.attention` does.
        gradients, aux: False leaves them out, for a backend that has none.
        atol: judge by this absolute tolerance instead of the budget: for structure in float64 on
            random sizes, where gold is no more exact than what it judges.

    Returns:
        For each result the share of its budget that was used.
    Raises:
        AssertionError: naming the case and what is out of budget.
    """
    query, key, value, rules = case.make(dtype, seed)
    inputs = {"query": query, "key": key, "value": value}
    inputs |= {k: v for k, v in rules.items() if isinstance(v, Tensor) and v.is_floating_point()}
    others = {k: v for k, v in rules.items() if k not in inputs}

    def tested(**tensors: Any) -> tuple[Tensor, ...]:
        moved = {name: _move(other, device) for name, other in others.items()}
        request = AuxRequest(lse=True, weights=True) if aux else None
        result = attend(**tensors, **moved, backend=backend, return_aux=request)
        if not aux:
            return (result,)
        out, found = result
        assert isinstance(found, Aux) and isinstance(found.lse, Tensor)
        assert found.weights is not None
        return out, found.lse, found.weights

    def gold(**tensors: Any) -> tuple[Tensor, ...]:
        results = attention_by_definition(**tensors, **others, return_aux=True)
        assert isinstance(results, tuple)
        return results[: 3 if aux else 1]

    def peer(**tensors: Any) -> tuple[Tensor, ...]:
        return plain(**tensors, **others)[: 3 if aux else 1]

    def turned_peer(**tensors: Any) -> tuple[Tensor, ...]:
        return peer(**_turned(tensors))

    peers = (peer, turned_peer) if dtype == torch.float64 else (peer,)
    runs = [
        _run(function, inputs, gradients, seed, where)
        for function, where in ((tested, device), (gold, "cpu"), *((each, "cpu") for each in peers))
    ]
    report = {}
    for name in runs[0]:
        kind = "gradient" if name.startswith("d_") else name
        if kind == "gradient" and backend == "sdpa" and dtype == torch.float32:
            kind = "gradient by torch"
        label = f"{case.name}, {dtype}, {backend}: {name}"
        actual, truth, *rivals = (run[name] for run in runs)
        if atol is None:
            rival = _farthest(truth, rivals)
            report[name] = assert_within_budget(actual, truth, rival, kind, name=label)
        else:
            truth = truth.to(actual.dtype)
            torch.testing.assert_close(actual, truth, atol=atol, rtol=0, msg=_prefix(label))
    return report


def check_statistics(
    case: Case,
    attend: Callable[..., Any] = attention,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    reduce: str | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Hold every statistic of `attend` on one case to the definition, and its output to the bits
    that it has when nothing is asked for.

    Args:
        attend: takes and returns what `clearhead.attention` does.
        reduce: as in AuxRequest.

    Returns:
        For each statistic the share of its budget that was used.
    Raises:
        AssertionError: naming the case and what is out of budget.
    """
    query, key, value, rules = case.make(dtype, seed)
    inputs = {"query": query, "key": key, "value": value, **rules}
    moved = {name: _move(tensor, device) for name, tensor in inputs.items()}
    label = f"{case.name}, {dtype}, {backend}"
    out, aux = attend(
        **moved, backend=backend, return_aux=dataclasses.replace(stats.ALL, reduce=reduce)
    )
    if not torch.equal(out, attend(**moved, backend=backend)):
        raise AssertionError(f"{label}: asking for statistics changed the output")

    results = attention_by_definition(**inputs, return_aux=True)
    assert isinstance(results, tuple)
    _, lse, weights = results
    gold = stats.defined(query, key, rules, weights, lse, reduce)
    peers = []
    for tensors in (inputs, _turned(inputs)) if dtype == torch.float64 else (inputs,):
        _, plain_lse, plain_weights = plain(**tensors)
        peers.append(stats.defined(query, key, rules, plain_weights, plain_lse, reduce))
    actual = {name: tensor.cpu() for name, tensor in stats.measured(aux).items()}
    if actual.keys() != gold.keys():
        raise AssertionError(f"{label}: returned {sorted(actual)}, not {sorted(gold)}")
    if reduce is None:
        keys, true_keys = actual.pop("top_keys"), gold.pop("top_keys")
        if keys.dtype != torch.int64 or not torch.equal(keys < 0, true_keys < 0):
            raise AssertionError(f"{label}: top_k lists another number of keys than are seen")
        # Which of two almost equal weights is the larger is rounding: judged by the weights.
        actual["top_keys"] = stats.chosen(weights, keys).to(plain_lse.dtype)
        for found in (gold, *peers):
            found["top_keys"] = found["top_weights"]
    for found in (actual, gold, *peers):
        # The definition reads it off lse, so it is judged beside lse and is as exact.
        found["max_logit"] = torch.stack([found["lse"], found["max_logit"]])
    report = {}
    for name, truth in gold.items():
        unknown = truth.isnan()
        if not torch.equal(actual[name].isnan(), unknown):
            raise AssertionError(f"{label}: {name} is NaN elsewhere than the truth")
        known = [
            t.masked_fill(unknown, 0)
            for t in (actual[name], truth, *(peer[name].to(plain_lse.dtype) for peer in peers))
        ]
        rival = _farthest(known[1], known[2:])
        report[name] = assert_within_budget(
            known[0], known[1], rival, "statistic", name=f"{label}: {name}"
        )
    return report


def _turned(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same call, its head dimension backwards: products are summed in the other order.

    In float64 the truth is itself a rounded sum, and a peer that happens to round alike shows no
    error: of one row whose scores are far apart (huge row) it had 4.4e-16 where this one had
    1.8e-15. So there the budget is that of the worse of the two.
    """
    query, key = (tensors[name].flip(-1) for name in ("query", "key"))
    return {**tensors, "query": query, "key": key}


def _farthest(truth: Tensor, peers: Sequence[Tensor]) -> Tensor:
    """The peer whose worst error is the largest."""
    if truth.numel() == 0:
        return peers[0]
    return max(peers, key=lambda peer: float((peer - truth).detach().abs().nan_to_num(0).max()))


def _prefix(label: str) -> Callable[[str], str]:
    return lambda message: f"{label}: {message}"


def _run(
    function: Callable[..., tuple[Tensor, ...]],
    inputs: dict[str, Tensor],
    gradients: bool,
    seed: int,
    device: torch.device | str,
) -> dict[str, Tensor]:
    """The results by name, and the gradients of a fixed random sum of them by the inputs."""
    leaves = {k: t.to(device, copy=True).requires_grad_(gradients) for k, t in inputs.items()}
    outputs = function(**leaves)
    results = dict(zip(("out", "lse", "weights"), outputs, strict=False))
    if gradients:
        generator = torch.Generator().manual_seed(seed + 1)
        total: Any = 0
        for output in outputs:
            factor = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            factor = factor.to(leaves["query"].dtype).to(output.dtype).to(device)
            total = total + (output.masked_fill(output.isinf(), 0) * factor).double().sum()
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if total.requires_grad:
            found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), found, strict=True):
            results[f"d_{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return results


def _move(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, tuple):
        return tuple(_move(v, device) for v in value)
    return value.to(device) if isinstance(value, Tensor) else value

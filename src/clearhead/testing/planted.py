"""Wrong attentions, each wrong in one way that has been somebody's real bug.

A test suite that passes with one of these in place of `attention` proves nothing. Each is a
function from an attend (with attention's arguments, given by name) to a broken one.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..results import Aux, AuxRequest, Summary, summarised

Attend = Callable[..., Any]


def visible(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    key_mask: Tensor | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """All rules as one bool mask (B, H, L, S), written down independently of visibility.py."""
    B, H, L, _ = query.shape
    S = key.shape[-2]
    i, j = torch.arange(L)[:, None], torch.arange(S)[None, :]
    offset = j - (i + S - L)
    seen = torch.ones(B, H, L, S, dtype=torch.bool)
    if is_causal:
        seen &= offset <= 0
    left, right = window or (None, None)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    if key_mask is not None:
        seen &= key_mask[:, None, None, :]
    if documents is not None:
        rows, keys = documents if isinstance(documents, tuple) else (documents, documents)
        seen &= (rows[:, :, None] == keys[:, None, :])[:, None]
    for mask in (attn_mask, bias):
        if mask is not None:
            seen &= mask if mask.dtype == torch.bool else mask != -math.inf
    return seen


def distances(query: Tensor, key: Tensor) -> Tensor:
    """|own key - j|, (L, S), in query's dtype."""
    L, S = query.shape[-2], key.shape[-2]
    own = torch.arange(L)[:, None] + S - L
    return (own - torch.arange(S)).abs().to(query.dtype)


def _arguments(change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> Callable:
    """A bug in how the arguments are read; change gets them by name."""

    def plant(attend: Attend) -> Attend:
        def broken(**arguments: Any) -> Any:
            return attend(**(change(arguments) or arguments))

        return broken

    return plant


def _result(change: Callable[[Tensor, Aux | None, dict[str, Any]], tuple]) -> Callable:
    """A bug in what comes out; change gets (out, aux, arguments)."""

    def plant(attend: Attend) -> Attend:
        def broken(**arguments: Any) -> Any:
            result = attend(**arguments)
            out, aux = result if isinstance(result, tuple) else (result, None)
            out, aux = change(out, aux, arguments)
            return (out, aux) if isinstance(result, tuple) else out

        return broken

    return plant


def _causal_slips(a: dict[str, Any]) -> dict[str, Any]:
    if not a.get("is_causal"):
        return a
    left, right = a.get("window") or (None, None)
    return {**a, "is_causal": False, "window": (left, 1 if right is None else min(right, 1))}


def _upper_left(a: dict[str, Any]) -> dict[str, Any]:
    if not a.get("is_causal"):
        return a
    L, S = a["query"].shape[-2], a["key"].shape[-2]
    triangle = torch.ones(L, S, dtype=torch.bool).tril()
    mask = a.get("attn_mask")
    if mask is None:
        combined = triangle
    elif mask.dtype == torch.bool:
        combined = mask & triangle
    else:
        combined = torch.where(triangle, mask, -math.inf)
    return {**a, "is_causal": False, "attn_mask": combined}


def _wider_window(a: dict[str, Any]) -> dict[str, Any]:
    left, right = a.get("window") or (None, None)
    return a if left is None else {**a, "window": (left + 1, right)}


def _narrower_right(a: dict[str, Any]) -> dict[str, Any]:
    left, right = a.get("window") or (None, None)
    return {**a, "window": (left, right - 1)} if right else a


def _tiled_groups(a: dict[str, Any]) -> dict[str, Any]:
    H, Hkv = a["query"].shape[1], a["key"].shape[1]
    order = [h % Hkv for h in range(H)]
    return {**a, "key": a["key"][:, order], "value": a["value"][:, order]}


def _scale_off(a: dict[str, Any]) -> dict[str, Any]:
    usual = 1 / math.sqrt(max(a["query"].shape[-1], 1))
    return {**a, "scale": 1.005 * (usual if a.get("scale") is None else a["scale"])}


def _scale_zero_is_none(a: dict[str, Any]) -> dict[str, Any]:
    return {**a, "scale": a.get("scale") or None}


def _softcap_after_mask(a: dict[str, Any]) -> dict[str, Any]:
    """A blocked score of -inf becomes -softcap, and the key takes part."""
    cap = a.get("softcap")
    if cap is None or a["key"].shape[-2] == 0:
        return a
    names = ("attn_mask", "bias", "is_causal", "window", "key_mask", "documents")
    seen = visible(a["query"], a["key"], **{n: a[n] for n in names if n in a})
    lowered = torch.where(seen, 0.0, -2.0 * cap).to(a["query"].dtype)
    kept = {n: v for n, v in a.items() if n not in names}
    for name in ("attn_mask", "bias"):
        if a.get(name) is not None and a[name].dtype != torch.bool:
            lowered = lowered + a[name].masked_fill(a[name] == -math.inf, 0)
    return {**kept, "attn_mask": lowered}


def _one_padded_key(a: dict[str, Any]) -> dict[str, Any]:
    mask = a.get("key_mask")
    return a if mask is None else {**a, "key_mask": mask | ~mask.cumsum(1).bool()}


def _first_item_for_all(a: dict[str, Any]) -> dict[str, Any]:
    mask = a.get("key_mask")
    return a if mask is None else {**a, "key_mask": mask[:1].expand_as(mask)}


def _inverted(a: dict[str, Any]) -> dict[str, Any]:
    mask = a.get("attn_mask")
    return a if mask is None or mask.dtype != torch.bool else {**a, "attn_mask": ~mask}


def _thresholded(a: dict[str, Any]) -> dict[str, Any]:
    mask = a.get("attn_mask")
    return a if mask is None or mask.dtype == torch.bool else {**a, "attn_mask": mask > -math.inf}


def _drop(name: str) -> Callable:
    return _arguments(lambda a: {k: v for k, v in a.items() if k != name})


def _detached(name: str) -> Callable:
    def change(a: dict[str, Any]) -> dict[str, Any]:
        return a if a.get(name) is None else {**a, name: a[name].detach()}

    return _arguments(change)


class _GradientOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.01


def _gradient_off(name: str) -> Callable:
    return _arguments(lambda a: {**a, name: _GradientOff.apply(a[name])})


def _zeroed(out: Tensor, aux: Aux | None, a: dict[str, Any]) -> tuple:
    flat = torch.ones(out.numel(), dtype=out.dtype)
    flat[out.numel() // 2 :][:1] = 0
    return out * flat.view(out.shape), aux


def _empty_row_averages(out: Tensor, aux: Aux | None, a: dict[str, Any]) -> tuple:
    names = ("attn_mask", "bias", "is_causal", "window", "key_mask", "documents")
    seen = visible(a["query"], a["key"], **{n: a[n] for n in names if n in a})
    if a["key"].shape[-2] == 0 or out.shape[1] == 0:
        return out, aux
    mean = (
        a["value"].mean(-2, keepdim=True).repeat_interleave(out.shape[1] // a["value"].shape[1], 1)
    )
    return torch.where(seen.any(-1, keepdim=True), out, mean), aux


def _lse_in_base_2(out: Tensor, aux: Aux | None, a: dict[str, Any]) -> tuple:
    if aux is None or not isinstance(aux.lse, Tensor):
        return out, aux
    return out, dataclasses.replace(aux, lse=aux.lse / math.log(2))


def _weights_with_sink_renormalised(out: Tensor, aux: Aux | None, a: dict[str, Any]) -> tuple:
    if aux is None or aux.weights is None:
        return out, aux
    total = aux.weights.sum(-1, keepdim=True)
    return out, dataclasses.replace(aux, weights=aux.weights / torch.where(total == 0, 1, total))


BUGS: dict[str, Callable[[Attend], Attend]] = {
    "causal slips by one": _arguments(_causal_slips),
    "causal aligned to the upper left": _arguments(_upper_left),
    "window wider by one": _arguments(_wider_window),
    "window narrower on the right": _arguments(_narrower_right),
    "window switched off by causal": _arguments(
        lambda a: {**a, "window": None} if a.get("is_causal") else a
    ),
    "causal switched off by a mask": _arguments(
        lambda a: {**a, "is_causal": False} if a.get("attn_mask") is not None else a
    ),
    "groups tiled": _arguments(_tiled_groups),
    "scale off by 0.5 %": _arguments(_scale_off),
    "scale 0 taken for none": _arguments(_scale_zero_is_none),
    "softcap after mask": _arguments(_softcap_after_mask),
    "a padded key unmasked": _arguments(_one_padded_key),
    "the first item's padding for all": _arguments(_first_item_for_all),
    "bool mask inverted": _arguments(_inverted),
    "float mask thresholded": _arguments(_thresholded),
    "documents leak": _drop("documents"),
    "sinks ignored": _drop("sinks"),
    "alibi ignored": _drop("alibi_slopes"),
    "bias ignored": _drop("bias"),
    "head mask ignored": _drop("head_mask"),
    "head mask on the next head": _arguments(
        lambda a: {**a, "head_mask": a["head_mask"].roll(1, -1)} if "head_mask" in a else a
    ),
    "an element zeroed": _result(_zeroed),
    "empty rows average": _result(_empty_row_averages),
    "lse in base 2": _result(_lse_in_base_2),
    "weights renormalised beside a sink": _result(_weights_with_sink_renormalised),
    "key gradient off by 1 %": _gradient_off("key"),
    "query gradient off by 1 %": _gradient_off("query"),
    "value gradient off by 1 %": _gradient_off("value"),
    "no gradient to a mask": _detached("attn_mask"),
    "no gradient to a bias": _detached("bias"),
    "no gradient to sinks": _detached("sinks"),
    "no gradient to slopes": _detached("alibi_slopes"),
}


# -- statistics -----------------------------------------------------------------------------------


def _statistic(name: str, change: Callable[[Any, Tensor, dict[str, Any]], Any]) -> Callable:
    """A bug in one statistic of rows; change gets it, the weights and the arguments."""

    def plant(attend: Attend) -> Attend:
        def broken(**arguments: Any) -> Any:
            result = attend(**arguments)
            request = arguments.get("return_aux")
            if request is None or request.reduce is not None or not getattr(request, name):
                return result
            (out, aux), wanted = result, AuxRequest(weights=True)
            weights = attend(**{**arguments, "return_aux": wanted})[1].weights
            wrong = change(getattr(aux, name), weights, arguments)
            return out, dataclasses.replace(aux, **{name: wrong})

        return broken

    return plant


def _reduction(change: Callable[[Aux, Aux, Tensor], Aux]) -> Callable:
    """A bug under reduce; change gets the Aux, that of all rows, and which of them see a key."""

    def plant(attend: Attend) -> Attend:
        def broken(**arguments: Any) -> Any:
            result = attend(**arguments)
            request = arguments.get("return_aux")
            if request is None or request.reduce is None:
                return result
            rows = dataclasses.replace(request, reduce=None, lse=True)
            of_rows = attend(**{**arguments, "return_aux": rows})[1]
            return result[0], change(result[1], of_rows, of_rows.lse != -math.inf)

        return broken

    return plant


def _weight_of(own: int, aligned: bool = True) -> Callable:
    """The weight of the key that stands `own` keys behind the row's own."""

    def change(mass: Tensor, weights: Tensor, a: dict[str, Any]) -> Tensor:
        L, S = weights.shape[-2:]
        diagonal = weights.diagonal(own + (S - L if aligned else 0), -2, -1)
        first = max(0, -own - (S - L if aligned else 0))
        wrong = torch.zeros_like(mass)
        wrong[..., first : first + diagonal.shape[-1]] = diagonal
        return wrong

    return change


def _signed_distance(distance: Tensor, weights: Tensor, a: dict[str, Any]) -> Tensor:
    L, S = weights.shape[-2:]
    own = torch.arange(L)[:, None] + S - L
    return (weights * (own - torch.arange(S))).sum(-1).to(distance.dtype)


def _first_key_of_all(mass: Tensor, weights: Tensor, a: dict[str, Any]) -> Tensor:
    return weights[..., 0] if weights.shape[-1] else mass


def _first_key_of_any_document(mass: Tensor, weights: Tensor, a: dict[str, Any]) -> Tensor:
    if a.get("key_mask") is None or a.get("documents") is None:
        return _first_key_of_all(mass, weights, a)
    first = a["key_mask"].int().argmax(1)[:, None, None, None]
    return weights.gather(-1, first.expand(*weights.shape[:-1], 1))[..., 0]


def _with_sink(logit: Tensor, weights: Tensor, a: dict[str, Any]) -> Tensor:
    return logit if a.get("sinks") is None else logit.maximum(a["sinks"][:, None].to(logit.dtype))


def _renormalised_entropy(entropy: Tensor, weights: Tensor, a: dict[str, Any]) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.special.entr(weights / torch.where(total == 0, 1, total)).sum(-1)


def _quantiles_upside_down(aux: Aux, of_rows: Aux, seen: Tensor) -> Aux:
    if isinstance(aux.distance, Summary):
        upside_down = aux.distance._replace(quantiles=aux.distance.quantiles.flip(-1))
        aux = dataclasses.replace(aux, distance=upside_down)
    return aux


BUGS_IN_STATISTICS: dict[str, Callable[[Attend], Attend]] = {
    "entropy in bits": _statistic("entropy", lambda x, w, a: x / math.log(2)),
    "entropy of exponentials that are not divided by their sum": _statistic(
        "entropy", lambda x, w, a: x + (w * w.amax(-1, keepdim=True).log().clamp(min=-99)).sum(-1)
    ),
    "entropy of weights renormalised beside a sink": _statistic("entropy", _renormalised_entropy),
    "entropy of empty rows is NaN": _statistic(
        "entropy", lambda x, w, a: torch.where(w.sum(-1) == 0, math.nan, x)
    ),
    "largest score with the sink": _statistic("max_logit", _with_sink),
    "largest score of empty rows is 0": _statistic(
        "max_logit", lambda x, w, a: x.masked_fill(x == -math.inf, 0)
    ),
    "first key ignores padding and documents": _statistic("first_mass", _first_key_of_all),
    "first key ignores documents": _statistic("first_mass", _first_key_of_any_document),
    "previous mass is of the own key": _statistic("previous_mass", _weight_of(0)),
    "previous mass is of the next key": _statistic("previous_mass", _weight_of(1)),
    "previous mass is two keys back": _statistic("previous_mass", _weight_of(-2)),
    "own key aligned to the upper left": _statistic("self_mass", _weight_of(0, aligned=False)),
    "distance signed": _statistic("distance", _signed_distance),
    "distance counted from 1": _statistic("distance", lambda x, w, a: x + w.sum(-1)),
    "key mass averaged": _statistic("key_mass", lambda x, w, a: x / max(1, w.shape[-2])),
    "key mass of the next head": _statistic("key_mass", lambda x, w, a: x.roll(1, 1)),
    "key mass without the last row": _statistic("key_mass", lambda x, w, a: w[:, :, :-1].sum(-2)),
    "top weights rising": _statistic("top_k", lambda x, w, a: x._replace(weights=x[0].flip(-1))),
    "top keys off by one": _statistic("top_k", lambda x, w, a: x._replace(
        indices=torch.where(x[1] < 0, -1, (x[1] + 1) % max(1, w.shape[-1])))),
    "top keys filled up with key 0": _statistic(
        "top_k", lambda x, w, a: x._replace(indices=x[1].clamp(min=0))),
    "padded rows counted": _reduction(
        lambda aux, rows, seen: dataclasses.replace(summarised(rows, seen), key_mass=aux.key_mass)),
    "empty rows counted": _reduction(lambda aux, rows, seen: dataclasses.replace(
        aux, entropy=summarised(rows, torch.ones_like(seen)).entropy)),
    "key mass of padded rows counted": _reduction(
        lambda aux, rows, seen: dataclasses.replace(aux, key_mass=rows.key_mass)),
    "quantiles upside down": _reduction(_quantiles_upside_down),
}  # fmt: skip

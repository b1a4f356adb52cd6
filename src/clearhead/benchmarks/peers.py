"""Who else computes the same. A peer is a function (Call or Layer) -> a function without arguments
that runs it once and returns the output; NotImplementedError says in a sentence why it cannot."""

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..functional import attention, varlen_attention
from ..module import MultiHeadAttention
from ..results import AuxRequest
from ..textbook import MultiHeadAttentionWrapper
from .shapes import Case

Run = Callable[[], Tensor]
MOST_SCORES = 2**31  # bytes


class Call:
    """The tensors of a case, and the arguments that say its rules to `attention`."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.query = torch.randn(case.B, case.H, case.L, case.D, dtype=dtype)
        self.key = torch.randn(case.B, case.kv_heads, case.keys, case.D, dtype=dtype)
        self.value = torch.randn_like(self.key)
        self.rules: dict[str, Any] = {"is_causal": case.causal}
        if case.window:
            self.rules["window"] = (case.window - 1, 0)
        if case.padded:
            self.rules["key_mask"] = torch.arange(case.keys) < case.lengths()[:, None]
        if case.mask:
            self.rules["attn_mask"] = torch.randn(1, 1, case.L, case.keys, dtype=dtype)

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value as varlen_attention takes them: (total, heads, D)."""
        query, key, value = (t[0].transpose(0, 1) for t in (self.query, self.key, self.value))
        return query.contiguous(), key.contiguous(), value.contiguous()

    def dense(self) -> Tensor | None:
        """The rules as the mask that torch's own function needs, or None; not the packing."""
        case = self.case
        own, j = torch.arange(case.L)[:, None] + case.keys - case.L, torch.arange(case.keys)
        if case.mask:
            added: Tensor = self.rules["attn_mask"]
            return added
        if case.padded:
            keys: Tensor = self.rules["key_mask"]
            return keys[:, None, None]
        if case.window:
            return (j <= own) & (j > own - case.window)
        return j <= own if case.causal and case.L > 1 and case.keys != case.L else None


class Layer:
    """The same weights in each kind of module, and its input x (B, L, E)."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        E = case.H * case.D
        self.x = torch.randn(case.B, case.L, E, dtype=dtype)
        self.wrapper = MultiHeadAttentionWrapper(E, case.D, case.H).to(dtype).eval()
        self.ours = MultiHeadAttention.from_heads(self.wrapper).to(dtype).eval()
        self.ours.is_causal = case.causal


# -- ours ------------------------------------------------------------------------------------------

# What cases of a kind ask for; `without` is the same call without it.
ASKED = {
    "weights": AuxRequest(weights=True),
    "statistics": AuxRequest(lse=True, max_logit=True, entropy=True),
    "deterministic": None,
}


def clearhead_call(call: Call) -> Run:
    """`attention`, or `varlen_attention` where sequences are packed."""
    case, rules = call.case, call.rules
    if case.packed:
        packed, offsets = call.packed(), call.case.offsets()
        return lambda: varlen_attention(*packed, offsets, offsets, is_causal=case.causal)
    tensors = call.query, call.key, call.value
    asked = ASKED.get(case.kind)
    if asked is not None:
        return lambda: attention(*tensors, **rules, return_aux=asked)[0]
    deterministic = case.kind == "deterministic"
    return lambda: attention(*tensors, **rules, deterministic=deterministic)


def clearhead_without(call: Call) -> Run:
    """Ours again, without what a case asks for beside a plain call: what asking costs."""
    if call.case.kind not in ASKED:
        raise NotImplementedError("the case asks for nothing beside its output")
    return lambda: attention(call.query, call.key, call.value, **call.rules)


def clearhead_layer(layer: Layer) -> Run:
    """`MultiHeadAttention`."""
    return lambda: layer.ours(layer.x)


# -- calls -----------------------------------------------------------------------------------------


def sdpa(call: Call) -> Run:
    """F.scaled_dot_product_attention with what serves a case best: is_causal or a mask."""
    case = call.case
    if case.kind == "weights":
        raise NotImplementedError("it returns no weights")
    grouped = case.kv_heads != case.H
    if case.packed:
        query, key, value = (t.transpose(0, 1)[None] for t in call.packed())
        bounds = call.case.offsets().tolist()
        pieces = [slice(*bounds[n : n + 2]) for n in range(case.packed)]
        return lambda: torch.cat(
            [
                scaled_dot_product_attention(
                    query[:, :, p], key[:, :, p], value[:, :, p], is_causal=case.causal,
                    enable_gqa=grouped,
                )
                for p in pieces
            ],
            2,
        )[0].transpose(0, 1)  # fmt: skip
    mask = call.dense()
    by_rule = case.causal and mask is None and case.L > 1
    return lambda: scaled_dot_product_attention(
        call.query, call.key, call.value, mask, is_causal=by_rule, enable_gqa=grouped
    )


def flex(call: Call) -> Run:
    """FlexAttention, compiled, with a block mask."""
    case = call.case
    if case.kind in (*ASKED, "mask", "packed"):
        raise NotImplementedError(f"not set up for {case.kind}")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = call.dense()
    if mask is None and case.causal and case.L > 1:
        mask = torch.ones(case.L, case.keys, dtype=torch.bool).tril(case.keys - case.L)
    block_mask = None
    if mask is not None:
        dense = mask.expand(case.B, 1, case.L, case.keys)

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return dense[b, 0, i, j]

        block_mask = create_block_mask(mask_mod, case.B, None, case.L, case.keys, device="cpu")
    torch.compiler.reset()  # after eight shapes it would run uncompiled, with a line in a log
    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.kv_heads != case.H

    def run() -> Tensor:
        out = compiled(call.query, call.key, call.value, block_mask=block_mask, enable_gqa=grouped)
        assert isinstance(out, Tensor)
        return out

    return run


def eager(call: Call) -> Run:
    """Matrix product, mask, softmax, matrix product: all weights in memory, as models write it."""
    case = call.case
    if case.packed:
        raise NotImplementedError("it has no packed form")
    _refuse_too_many_scores(case, call.dtype)
    group, mask = case.H // case.kv_heads, call.dense()
    if mask is None and case.causal:
        mask = torch.ones(case.L, case.keys, dtype=torch.bool).tril(case.keys - case.L)
    blocked = None if mask is None or mask.is_floating_point() else ~mask

    def run() -> Tensor:
        key, value = (t.repeat_interleave(group, 1) for t in (call.key, call.value))
        scores = call.query @ key.mT * case.D**-0.5
        if blocked is not None:
            scores = scores.masked_fill(blocked, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1)
        if case.kind == "statistics":
            torch.special.entr(weights).sum(-1), scores.amax(-1), scores.logsumexp(-1)
        return weights @ value

    return run


def x_transformers(call: Call) -> Run:
    """The attention of the package x-transformers, as it comes (flash off)."""
    case = call.case
    if importlib.util.find_spec("x_transformers") is None:
        raise NotImplementedError("x-transformers is not installed")
    if case.kind not in ("prefill", "lengths") or case.B > 1 and case.padded:
        raise NotImplementedError(f"not set up for {case.kind}")
    _refuse_too_many_scores(case, call.dtype)
    from x_transformers.attend import Attend

    attend = Attend(heads=case.H, causal=case.causal, scale=case.D**-0.5)
    group = case.H // case.kv_heads
    return lambda: attend(
        call.query, *(t.repeat_interleave(group, 1) for t in (call.key, call.value))
    )[0]


def _refuse_too_many_scores(case: Case, dtype: torch.dtype) -> None:
    needed = case.B * case.H * case.L * case.keys * dtype.itemsize
    if needed > MOST_SCORES:
        raise NotImplementedError(f"its scores alone would be {needed / 2**30:.0f} GB")


# -- layers ----------------------------------------------------------------------------------------


def torch_module(layer: Layer) -> Run:
    """nn.MultiheadAttention, without weights, in eval mode."""
    case, ours = layer.case, layer.ours
    E = case.H * case.D
    module = nn.MultiheadAttention(E, case.H, bias=False, batch_first=True, dtype=layer.dtype)
    joined = [ours.W_query.weight, ours.W_key.weight, ours.W_value.weight]
    module.load_state_dict(
        {"in_proj_weight": torch.cat(joined), "out_proj.weight": ours.out_proj.weight}
    )
    module.eval()
    future = None
    if case.causal:
        future = torch.ones(case.L, case.L, dtype=torch.bool).triu(1)

    def run() -> Tensor:
        out: Tensor = module(
            layer.x, layer.x, layer.x, need_weights=False, attn_mask=future, is_causal=case.causal
        )[0]
        return out

    return run


def heads_in_series(layer: Layer) -> Run:
    """The textbook's wrapper: one head after another."""
    if not layer.case.causal:
        raise NotImplementedError("the textbook's heads are causal")
    return lambda: layer.wrapper(layer.x)


def heads_stitched(layer: Layer, dtype: torch.dtype | None = None) -> Run:
    """The textbook's efficient form: one wide projection, split, all scores at once."""
    case, ours = layer.case, copy.deepcopy(layer.ours)
    x = layer.x if dtype is None else layer.x.to(dtype)
    ours.to(x.dtype)
    future = torch.ones(case.L, case.L, dtype=torch.bool).triu(1) if case.causal else None

    def run() -> Tensor:
        projected = (linear(x) for linear in (ours.W_query, ours.W_key, ours.W_value))
        query, key, value = (t.unflatten(-1, (case.H, case.D)).transpose(1, 2) for t in projected)
        scores = query @ key.mT
        if future is not None:
            scores = scores.masked_fill(future, float("-inf"))
        context = torch.softmax(scores / case.D**0.5, -1) @ value
        out: Tensor = ours.out_proj(context.transpose(1, 2).flatten(2))
        return out

    return run


def x_transformers_layer(layer: Layer) -> Run:
    """The layer of the package x-transformers, with its own weights: timed, not compared."""
    if importlib.util.find_spec("x_transformers") is None:
        raise NotImplementedError("x-transformers is not installed")
    from x_transformers.x_transformers import Attention

    case = layer.case
    width = case.H * case.D
    module = Attention(dim=width, dim_head=case.D, heads=case.H, causal=case.causal)
    module.to(layer.dtype).eval()

    def run() -> Tensor:
        out = module(layer.x)
        return out[0] if isinstance(out, tuple) else out

    return run


CALL_PEERS: dict[str, Callable[[Call], Run]] = {
    "sdpa": sdpa,
    "flex": flex,
    "eager": eager,
    "x-transformers": x_transformers,
    "without": clearhead_without,
}
LAYER_PEERS: dict[str, Callable[[Layer], Run]] = {
    "nn.MultiheadAttention": torch_module,
    "series": heads_in_series,
    "stitched": heads_stitched,
    "x-transformers": x_transformers_layer,
}
DEFAULT = ("sdpa", "without", "nn.MultiheadAttention", "series", "stitched")
ALL = tuple(dict.fromkeys((*CALL_PEERS, *LAYER_PEERS)))

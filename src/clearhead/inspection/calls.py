"""One attention call of any code as clearhead.attention takes it, and its statistics.

Each function here reads one way of calling: torch's F.scaled_dot_product_attention, what
nn.MultiheadAttention calls, clearhead's own, and a softmax over a product of queries and keys. All
make a `Call`: query (B, H, L, D), key (B, Hkv, S, D) and the rules, in the words of
clearhead.attention. Nothing here changes a tensor that it is given.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..functional import attention
from ..results import Aux, AuxRequest

# Names under which modules and their configs keep their number of query heads.
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


@dataclass
class Call:
    """One call: whose rows look at which keys, before any dropout.

    Attributes:
        kind: which function was called.
        query: (B, H, L, D), key: (B, Hkv, S, D). rules: further arguments of clearhead.attention.
        weights: (B, H, L, S), where the code computed them itself.
        tail: keys at the end that no row may see and that key and rules therefore leave out.
    """

    kind: str
    query: Tensor
    key: Tensor
    rules: dict[str, Any] = field(default_factory=dict)
    weights: Tensor | None = None
    tail: int = 0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, L, S), all keys counted."""
        B, H, L, _ = self.query.shape
        return B, H, L, self.key.shape[-2] + self.tail

    def of_heads(self, heads: Sequence[int]) -> "Call":
        """The same call with these of its query heads alone, in this order."""
        H, Hkv = self.query.shape[1], self.key.shape[1]
        index = torch.tensor(heads, dtype=torch.long, device=self.query.device)
        rules = dict(self.rules)
        for name in ("attn_mask", "bias"):
            tensor = rules.get(name)
            if tensor is not None and tensor.ndim >= 3 and tensor.shape[-3] == H > 1:
                rules[name] = tensor.index_select(-3, index)
        for name in ("sinks", "alibi_slopes"):
            if rules.get(name) is not None:
                rules[name] = rules[name].index_select(-1, index)
        key = self.key.index_select(1, index // (H // Hkv)) if Hkv > 1 else self.key
        weights = None if self.weights is None else self.weights.index_select(1, index)
        query = self.query.index_select(1, index)
        return Call(self.kind, query, key, rules, weights, self.tail)

    def statistics(self, aux: AuxRequest) -> tuple[Aux, Tensor | None]:
        """What aux asks for, detached; and which rows count, (B, L), None for all or under reduce.

        Keys that were left out weigh 0.
        """
        own = self.weights if aux.weights else None
        rows_wanted = aux.reduce is None
        asked = dataclasses.replace(
            aux, lse=aux.lse or rows_wanted, weights=aux.weights and own is None
        )
        with torch.no_grad():
            _, found = attention(
                self.query, self.key, self.key[..., :0], **self.rules, return_aux=asked
            )
        rows = self._counts(found.lse) if isinstance(found.lse, Tensor) else None
        if not aux.lse:
            found.lse = None
        if own is not None:
            # A copy: what is kept must not change when the model goes on with its own.
            found.weights = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
        elif found.weights is not None and self.tail:
            found.weights = F.pad(found.weights, (0, self.tail))
        if found.key_mass is not None and self.tail:
            found.key_mass = F.pad(found.key_mass, (0, self.tail))
        return found.each(Tensor.detach), rows

    def _counts(self, lse: Tensor) -> Tensor | None:
        """Rows that see a key, less those of padding: as AuxRequest's reduce has it."""
        rows = (lse != -math.inf).any(1)
        key_mask, (_, _, L, S) = self.rules.get("key_mask"), self.sizes
        if key_mask is not None and self.tail == 0 and (L == S or self.rules.get("is_causal")):
            own = torch.arange(L, device=lse.device) + (S - L)
            rows = rows & (key_mask[:, own.clamp(min=0)] | (own < 0))
        return None if bool(rows.all()) else rows


def sdpa(args: tuple, kwargs: dict[str, Any], module: nn.Module | None) -> Call:
    """F.scaled_dot_product_attention, aligned to the upper left; packed grouped heads unpacked."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, mask = given["query"].detach(), given["key"].detach(), given.get("attn_mask")
    query, key, mask = _unpacked(query, key, mask, module)
    query, key = four_axes(query, module), four_axes(key, module)
    if query.shape[:2] != key.shape[:2]:
        B = torch.broadcast_shapes(query.shape[:1], key.shape[:1])[0]
        query, key = (t.expand(B, *t.shape[1:]) for t in (query, key))
        if query.shape[1] == 1:
            query = query.expand(-1, key.shape[1], -1, -1)
    rules: dict[str, Any] = {"scale": given.get("scale")}
    L, S = query.shape[2], key.shape[2]
    if mask is not None:
        mask = _mask_axes(mask.detach(), given["query"].ndim, module, L, S)
    causal = bool(given.get("is_causal"))
    if causal and L > S:
        upper_left = torch.ones(L, S, dtype=torch.bool, device=query.device).tril()
        mask, causal = _both(mask, upper_left), False
    tail = 0
    if causal and L < S:  # the keys from L on are seen by nobody
        key, tail = key[:, :, :L], S - L
        mask = mask[..., :L] if mask is not None and mask.shape[-1] == S else mask
    return _with_mask("scaled_dot_product_attention", query, key, rules, mask, causal, tail)


def mine(args: tuple, kwargs: dict[str, Any], module: nn.Module | None) -> Call | None:
    """clearhead.attention; None for a call without values, which asks for statistics only."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in names[:3])
    if value.shape[-1] == 0 and query.shape[-1] > 0:
        return None
    lead = tuple(torch.broadcast_shapes(query.shape[:-3], key.shape[:-3]))
    query, key = (t.detach().expand(*lead, *t.shape[-3:]) for t in (query, key))
    query, key = (t.flatten(0, -4) if lead else t[None] for t in (query, key))
    rules = {
        name: _folded(name, given[name], lead) for name in (*_AXES, *_NUMBERS) if name in given
    }
    mask, causal = rules.pop("attn_mask", None), bool(given.get("is_causal"))
    if any(rules.get(name) is not None for name in ("bias", "key_mask", "window", "documents")):
        rules |= {"attn_mask": mask, "is_causal": causal}
        return Call("attention", query, key, rules)
    return _with_mask("attention", query, key, rules, mask, causal, 0)


# The tensors among the rules of clearhead.attention, with how many axes stand behind those of B.
_AXES = {"attn_mask": 3, "bias": 3, "key_mask": 1, "documents": 1, "alibi_slopes": 1, "sinks": 1}
_NUMBERS = ("scale", "window", "softcap")


def _folded(name: str, value: Any, lead: tuple[int, ...]) -> Any:
    """A rule, detached, its leading axes folded into one, as those of query are."""
    if isinstance(value, tuple) and name == "documents":
        return tuple(_folded(name, tensor, lead) for tensor in value)
    if not isinstance(value, Tensor):
        return value
    behind = _AXES[name]
    if value.ndim <= behind or len(lead) == 1:
        return value.detach()
    return value.detach().expand(*lead, *value.shape[-behind:]).flatten(0, -behind - 1)


# The arguments of F.multi_head_attention_forward in their order.
_TORCH = ("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight",
          "in_proj_bias", "bias_k", "bias_v", "add_zero_attn", "dropout_p", "out_proj_weight",
          "out_proj_bias", "training", "key_padding_mask", "need_weights",
          "attn_mask")  # fmt: skip


def torch_module(args: tuple, kwargs: dict[str, Any], module: nn.Module | None) -> Call:
    """F.multi_head_attention_forward: the projections again, and its masks (True = BLOCKED)."""
    given = {**dict(zip(_TORCH, args, strict=False)), **kwargs}
    H, padding = given["num_heads"], given.get("key_padding_mask")
    query, key = given["query"], given["key"]
    if query.ndim == 2:
        query, key = query[:, None], key[:, None]
        padding = None if padding is None else padding[None]
    with torch.no_grad():
        q, k = _projected(query, key, given)
        N = q.shape[1]
        if given.get("bias_k") is not None:
            k = torch.cat([k, given["bias_k"].expand(1, N, -1)])
        q, k = (t.unflatten(-1, (H, -1)).permute(1, 2, 0, 3) for t in (q, k))  # (N, H, L, D)
        if given.get("static_k") is not None:
            k = given["static_k"].unflatten(0, (N, H))
        if given.get("add_zero_attn"):
            k = F.pad(k, (0, 0, 0, 1))
        L, S = q.shape[2], k.shape[2]
        mask = given.get("attn_mask")
        if given.get("is_causal") and padding is None and not given.get("need_weights", True):
            # A hint that torch follows without a look at the mask.
            mask = torch.ones(L, S, dtype=torch.bool, device=q.device).triu(1)
        elif mask is not None and mask.ndim == 3:
            mask = mask.unflatten(0, (N, H))
        allowed = None
        for blocked in (mask, None if padding is None else padding[:, None, None]):
            if blocked is not None:
                extra = S - blocked.shape[-1]  # learned and zero tokens, which all may see
                blocked = F.pad(blocked, (0, extra)) if extra else blocked
                allowed = _both(allowed, ~blocked if blocked.dtype == torch.bool else blocked)
    return _with_mask("multi_head_attention_forward", q, k, {}, allowed, False, 0)


def torch_values(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values (N, H, S, Dv) of the same call, and the matrix and bias that its heads go through."""
    given = {**dict(zip(_TORCH, args, strict=False)), **kwargs}
    H, value, b = given["num_heads"], given["value"], given["in_proj_bias"]
    value = value[:, None] if value.ndim == 2 else value
    with torch.no_grad():
        if given.get("use_separate_proj_weight"):
            W = given["v_proj_weight"]
        else:
            W = given["in_proj_weight"].chunk(3)[2]
        v = F.linear(value, W, None if b is None else b.chunk(3)[2])
        N = v.shape[1]
        if given.get("bias_v") is not None:
            v = torch.cat([v, given["bias_v"].expand(1, N, -1)])
        v = v.unflatten(-1, (H, -1)).permute(1, 2, 0, 3)
        if given.get("static_v") is not None:
            v = given["static_v"].unflatten(0, (N, H))
        if given.get("add_zero_attn"):
            v = F.pad(v, (0, 0, 0, 1))
    return v, given["out_proj_weight"].detach(), given["out_proj_bias"]


def _projected(query: Tensor, key: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries and keys, (length, N, E) each."""
    if given.get("use_separate_proj_weight"):
        W_q, W_k = given["q_proj_weight"], given["k_proj_weight"]
    else:
        W_q, W_k, _ = given["in_proj_weight"].chunk(3)
    b_q, b_k = (None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)[:2]
    return F.linear(query, W_q, b_q), F.linear(key, W_k, b_k)


def softmax(
    scores: Tensor, weights: Tensor, sinks: Tensor | None, module: nn.Module | None
) -> Call:
    """weights = softmax(scores), (..., L, S) each; sinks (H,) where the code has a column of them.

    The scores go to clearhead.attention as the bias of queries and keys that are 0.
    """
    scores = scores.detach()
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    bias, weights = (score_axes(t, module) for t in (scores, weights.detach()))
    B, H, L, S = bias.shape
    query, key = bias.new_zeros(B, H, L, 1), bias.new_zeros(B, H, S, 1)
    # Codes that block with a huge negative number in place of -inf.
    blocked = bias <= torch.finfo(weights.dtype).min / 2
    rules: dict[str, Any] = {"bias": bias}
    if sinks is not None:
        rules["sinks"] = sinks.detach().to(bias.dtype)
    seen = (~blocked).flatten(1, 2).any(1)
    if S and not bool(seen.all()):
        rules["key_mask"] = seen
    return Call("softmax", query, key, rules, weights)


# -- axes and masks --------------------------------------------------------------------------------


def heads_of(module: nn.Module | None) -> int | None:
    """How many query heads a module says it has."""
    for holder in (module, getattr(module, "config", None)):
        for name in _HEADS:
            heads = getattr(holder, name, None)
            if isinstance(heads, int) and heads > 0:
                return heads
    return None


def _unpacked(
    query: Tensor, key: Tensor, mask: Tensor | None, module: nn.Module | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """transformers decodes grouped heads as Hkv heads of G queries each; here they are H heads."""
    G, H = getattr(module, "num_key_value_groups", 1), heads_of(module)
    if not isinstance(G, int) or G <= 1 or query.ndim != 4 or query.shape[1] * G != H:
        return query, key, mask
    if query.shape[2] != G or key.shape[1] != query.shape[1]:
        return query, key, mask
    if mask is not None and mask.ndim == 4 and mask.shape[1] != 1:
        mask = mask.flatten(1, 2).unsqueeze(2)
    return query.flatten(1, 2).unsqueeze(2), key, mask


def four_axes(tensor: Tensor, module: nn.Module | None) -> Tensor:
    """(B, H, length, D) of (..., length, D): heads are the third axis from the right, and of three
    axes the first holds batch and heads, or the batch alone where the module does not say."""
    if tensor.ndim == 2:
        return tensor[None, None]
    if tensor.ndim == 3:
        H = heads_of(module) or 1
        H = H if tensor.shape[0] % H == 0 else 1
        return tensor.unflatten(0, (-1, H)) if tensor.numel() else tensor[:, None]
    return tensor.flatten(0, -4)


def score_axes(scores: Tensor, module: nn.Module | None) -> Tensor:
    """(B, H, L, S); of five axes and more, all between the first and L are heads, in groups."""
    return scores.flatten(1, -3) if scores.ndim > 4 else four_axes(scores, module)


def _mask_axes(mask: Tensor, axes: int, module: nn.Module | None, L: int, S: int) -> Tensor:
    """The mask of a call whose query has so many axes, with four or fewer."""
    if mask.ndim < 2:
        return mask.expand(L, S)
    return four_axes(mask, module) if mask.ndim == 3 == axes or mask.ndim > 4 else mask


def _both(mask: Tensor | None, other: Tensor) -> Tensor:
    """Two masks, each bool (True = may attend) or floating (added), as one."""
    if mask is None:
        return other
    if mask.dtype == other.dtype == torch.bool:
        return mask & other
    mask, other = (
        torch.zeros((), device=t.device).masked_fill(~t, -math.inf) if t.dtype == torch.bool else t
        for t in (mask, other)
    )
    return mask + other


def _with_mask(
    kind: str, query: Tensor, key: Tensor, rules: dict[str, Any], mask: Tensor | None,
    causal: bool, tail: int,
) -> Call:  # fmt: skip
    """The call under a mask. Keys that no row may see become a key_mask, which tells padding from
    text; where keys outnumber rows, those at the end (unused slots of a cache) are left out, so
    that row i stands at its own key."""
    L, S = query.shape[2], key.shape[2]
    rules = {**rules, "is_causal": causal}
    if mask is not None and mask.ndim >= 2 and mask.shape[-1] == S > 0 and L > 0:
        allowed = mask if mask.dtype == torch.bool else mask != -math.inf
        seen = allowed.any(-2)
        seen = seen.any(-2) if seen.ndim == 3 else seen
        seen = seen if seen.ndim == 2 else seen.reshape(1, S)
        if not bool(seen.all()):
            used = seen.any(0).nonzero()
            end = max(L, int(used.max()) + 1 if len(used) else 0) if S > L else S
            key, mask, seen, tail = key[:, :, :end], mask[..., :end], seen[:, :end], tail + S - end
            if not bool(seen.all()):
                rules["key_mask"] = seen
    if mask is not None:
        rules["attn_mask"] = mask
    return Call(kind, query, key, rules, tail=tail)

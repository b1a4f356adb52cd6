"""The arguments of a call, checked: every error about a shape, a size or a dtype there is.

`make_problem` turns the arguments of `clearhead.attention` into a `Problem`, with all leading axes
folded into B. Each error says what it got, what it needs, and what to do.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .problem import Problem
from .results import AuxRequest, checked
from .visibility import window_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_mask: Tensor | None = None,
    deterministic: bool = False,
    return_aux: AuxRequest | None = None,
) -> Problem:
    """Check the arguments of `clearhead.attention` and fold them into a Problem.

    Under autocast query, key and value take its dtype first, as they do for torch's own attention.

    Raises:
        ValueError: a size or a number does not fit; TypeError: a wrong kind of argument or dtype.
        Each says what it got and needs.
    """
    query, key, value = _autocast(query, key, value)
    _check_tensors(query, key, value)
    lead = _leading(query, key, value)
    H, L, D = query.shape[-3:]
    Hkv, S = key.shape[-3:-1]
    _check_heads(H, Hkv)
    fold = _Fold(lead, query.device)

    mask: Tensor | None = None
    float_mask: Tensor | None = None
    if attn_mask is not None:
        need_tensor("attn_mask", attn_mask)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(
                f"attention: attn_mask has dtype {attn_mask.dtype}; it must be bool (True = may "
                "attend) or floating (added to the scores). For 0/1 numbers pass attn_mask.bool()"
            )
        spread = fold("attn_mask", attn_mask, H=H, L=L, S=S)
        if attn_mask.dtype == torch.bool:
            mask = spread
        else:
            float_mask = spread
    if bias is not None:
        _need_float("bias", bias)
        bias = fold("bias", bias, H=H, L=L, S=S)
    if key_mask is not None:
        need_tensor("key_mask", key_mask)
        if key_mask.dtype != torch.bool:
            raise TypeError(
                f"attention: key_mask has dtype {key_mask.dtype}; it must be bool, True = may be "
                "attended. For 0/1 numbers pass key_mask.bool(); what is to be added is bias="
            )
        key_mask = fold("key_mask", key_mask, S=S).expand(-1, S)
    doc_q, doc_k = _documents(documents, fold, L, S)
    left, right = window_of(window)
    if is_causal:
        right = 0

    if sinks is not None:
        _need_float("sinks", sinks)
        if tuple(sinks.shape) != (H,):
            raise ValueError(
                f"attention: sinks has shape {tuple(sinks.shape)}; it needs one logit per query "
                f"head, ({H},)"
            )
        fold.same_device("sinks", sinks)
    if alibi_slopes is not None:
        _need_float("alibi_slopes", alibi_slopes)
        alibi_slopes = fold("alibi_slopes", alibi_slopes, H=H)
    if head_mask is not None:
        _need_float("head_mask", head_mask)
        head_mask = fold("head_mask", head_mask, H=H)

    return Problem(
        query=fold.batch(query),
        key=fold.batch(key),
        value=fold.batch(value),
        float_mask=float_mask,
        bias=bias,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        mask=mask,
        key_mask=key_mask,
        doc_q=doc_q,
        doc_k=doc_k,
        left=left,
        right=right,
        scale=_of_scores("scale", scale, 1 / math.sqrt(max(D, 1)), query.dtype),
        softcap=_softcap(softcap, query.dtype),
        dropout_p=_dropout(dropout_p),
        deterministic=bool(deterministic),
        aux=checked(return_aux),
        head_mask=head_mask,
        lead=lead,
    )


class _Fold:
    """Broadcasts a tensor to the call's axes and folds the leading ones into B."""

    def __init__(self, lead: tuple[int, ...], device: torch.device) -> None:
        self.lead, self.device = lead, device

    def same_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(
                f"attention: {name} is on {tensor.device}, query on {self.device}; move one"
            )

    def batch(self, tensor: Tensor) -> Tensor:
        """(*lead, H, L, D), its leading axes possibly of size 1 or missing -> (B, H, L, D)."""
        tensor = tensor.expand(*self.lead, *tensor.shape[-3:])
        return self._flat(tensor)

    def __call__(self, name: str, tensor: Tensor, **axes: int) -> Tensor:
        """Check that a tensor broadcasts to (*lead, *axes); give it B or 1 in front."""
        self.same_device(name, tensor)
        sizes = (*self.lead, *axes.values())
        names = (*("B" if len(self.lead) == 1 else "batch" for _ in self.lead), *axes)
        wanted = f"({', '.join(names)}) = {tuple(sizes)}"
        if tensor.ndim > len(sizes):
            raise ValueError(
                f"attention: {name} has shape {tuple(tensor.shape)}, {tensor.ndim} axes; it must "
                f"broadcast to {wanted}"
            )
        for axis in range(-tensor.ndim, 0):
            if tensor.shape[axis] != sizes[axis] and tensor.shape[axis] != 1:
                raise ValueError(
                    f"attention: {name} has shape {tuple(tensor.shape)}; it must broadcast to "
                    f"{wanted}, and its axis {axis} is {tensor.shape[axis]}, not "
                    f"{names[axis]} = {sizes[axis]}"
                )
        for _ in range(len(sizes) - tensor.ndim):
            tensor = tensor.unsqueeze(0)
        n = len(self.lead)
        if n != 1:
            if any(size != 1 for size in tensor.shape[:n]):
                tensor = tensor.expand(*self.lead, *tensor.shape[n:])
            else:
                tensor = tensor.reshape(*tensor.shape[:n], *tensor.shape[n:])
            tensor = self._flat(tensor)
        return tensor

    def _flat(self, tensor: Tensor) -> Tensor:
        n = len(self.lead)
        if n == 1:
            return tensor
        return tensor.unsqueeze(0) if n == 0 else tensor.flatten(0, n - 1)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    if not isinstance(tensors[0], Tensor):
        return tensors
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64
        else t
        for t in tensors
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        need_tensor(name, tensor)
        if tensor.is_nested or tensor.layout != torch.strided:
            raise TypeError(
                f"attention: {name} is a nested or sparse tensor; pass a plain one with key_mask=, "
                "or packed rows to varlen_attention"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"attention: {name} has dtype {tensor.dtype}; it must be float16, bfloat16, "
                "float32 or float64"
            )
        if tensor.ndim < 3:
            raise ValueError(
                f"attention: {name} has shape {tuple(tensor.shape)}; it needs at least three axes, "
                "(heads, length, head size)"
            )
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"attention: {name} has dtype {tensor.dtype}, query has {query.dtype}; they must "
                "be the same, so convert one of them"
            )
        if tensor.device != query.device:
            raise ValueError(
                f"attention: {name} is on {tensor.device}, query on {query.device}; move one"
            )
    D, shape = query.shape[-1], tuple(key.shape)
    if key.shape[-1] != D:
        raise ValueError(
            f"attention: key has shape {shape}; its last axis must equal query's head size D = {D}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"attention: value has shape {tuple(value.shape)}, key has {shape}; they must have the "
            f"same number of heads and the same length, (..., {shape[-3]}, {shape[-2]}, value size)"
        )


def _leading(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    lead = tuple(query.shape[:-3])
    if tuple(key.shape[:-3]) == lead and tuple(value.shape[:-3]) == lead:
        return lead
    try:
        return tuple(torch.broadcast_shapes(lead, key.shape[:-3], value.shape[:-3]))
    except RuntimeError:
        raise ValueError(
            f"attention: the leading axes of query {lead}, key {tuple(key.shape[:-3])} and value "
            f"{tuple(value.shape[:-3])} differ; they must be equal, or 1 where one is shared"
        ) from None


def _check_heads(H: int, Hkv: int) -> None:
    if (H != 0 and Hkv == 0) or (Hkv != 0 and H % Hkv != 0):
        raise ValueError(
            f"attention: query has {H} heads and key has {Hkv}; the number of query heads must be "
            "a multiple of the number of key/value heads"
        )


def _documents(
    documents: Tensor | Sequence[Tensor] | None, fold: _Fold, L: int, S: int
) -> tuple[Tensor | None, Tensor | None]:
    if documents is None:
        return None, None
    if isinstance(documents, Tensor):
        if L != S:
            raise ValueError(
                f"attention: documents is one tensor, but L = {L} and S = {S} differ; pass a pair, "
                "the numbers of the queries (B, L) and of the keys (B, S)"
            )
        documents = (documents, documents)
    if not isinstance(documents, Sequence) or len(documents) != 2:
        raise TypeError(
            "attention: documents must be one tensor (B, L), or a pair of tensors (B, L) and (B, S)"
        )
    for tensor in documents:
        need_tensor("documents", tensor)
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError(
                f"attention: documents has dtype {tensor.dtype}; it must hold whole numbers, the "
                "number of each token's document"
            )
    doc_q, doc_k = documents
    return fold("documents", doc_q, L=L).expand(-1, L), fold("documents", doc_k, S=S).expand(-1, S)


def _number(name: str, value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat):
        raise TypeError(
            f"attention: {name} is a {type(value).__name__}; it must be a number. A tensor of "
            "scales can be multiplied into query instead"
        )
    if not -math.inf < value < math.inf:  # math.isfinite cannot be traced
        raise ValueError(f"attention: {name} is {value}; it must be finite")
    return float(value)


def _of_scores(name: str, value: object, default: float, dtype: torch.dtype) -> float:
    """A number that scores are computed with: no larger than these can be."""
    number = _number(name, value, default)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    most = torch.finfo(computed).max
    if not -most <= number <= most:
        raise ValueError(
            f"attention: {name} is {number}; scores are computed in {computed}, which ends at "
            f"{most:.3g}"
        )
    return number


def _softcap(softcap: float | None, dtype: torch.dtype) -> float | None:
    if softcap is None:
        return None
    softcap = _of_scores("softcap", softcap, 0.0, dtype)
    if softcap <= 0:
        raise ValueError(
            f"attention: softcap is {softcap}; it must be positive, and None turns it off"
        )
    return softcap


def _dropout(dropout_p: float) -> float:
    dropout_p = _number("dropout_p", dropout_p, 0.0)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"attention: dropout_p is {dropout_p}; it must lie between 0 and 1")
    return dropout_p


def need_tensor(name: str, value: object, function: str = "attention") -> None:
    """Raise TypeError unless the argument is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{function}: {name} is a {type(value).__name__}; it must be a tensor")


def _need_float(name: str, value: object) -> None:
    need_tensor(name, value)
    if not value.is_floating_point():  # type: ignore[attr-defined]
        raise TypeError(
            f"attention: {name} has dtype {value.dtype}; it must be floating"  # type: ignore[attr-defined]
        )

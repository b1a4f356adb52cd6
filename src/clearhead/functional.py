"""attention(), varlen_attention() and explain(): the functions that everything else stands on."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.overrides import (
    handle_torch_function,
    has_torch_function,
    has_torch_function_variadic,
    wrap_torch_function,
)

from . import backends, kinds
from .arguments import make_problem, need_tensor
from .backends import native
from .explanation import Explanation, explain
from .problem import Problem
from .results import Aux, AuxRequest, joined, summarised
from .visibility import Window

__all__ = ["Explanation", "attention", "explain", "varlen_attention"]


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *, scale: float | None = ...,
    bias: Tensor | None = ..., key_mask: Tensor | None = ..., window: Window | None = ...,
    documents: Tensor | tuple[Tensor, Tensor] | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., head_mask: Tensor | None = ...,
    deterministic: bool = ..., backend: str = ..., return_aux: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *, scale: float | None = ...,
    bias: Tensor | None = ..., key_mask: Tensor | None = ..., window: Window | None = ...,
    documents: Tensor | tuple[Tensor, Tensor] | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., head_mask: Tensor | None = ...,
    deterministic: bool = ..., backend: str = ..., return_aux: AuxRequest,
) -> tuple[Tensor, Aux]: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ...,
    dropout_p: float = ..., is_causal: bool = ..., *, scale: float | None = ...,
    bias: Tensor | None = ..., key_mask: Tensor | None = ..., window: Window | None = ...,
    documents: Tensor | tuple[Tensor, Tensor] | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., head_mask: Tensor | None = ...,
    deterministic: bool = ..., backend: str = ..., return_aux: AuxRequest | None,
) -> Tensor | tuple[Tensor, Aux]: ...  # fmt: skip
def attention(
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
    window: Window | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_mask: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Aux]:
    """Attention of every query row over the keys it may see, head by head.

        s_ij  = softcap(scale * q_i . k_j) + attn_mask_ij + bias_ij - slope_h * |own(i) - j|
        w_ij  = softmax over the visible j (and the sink)
        out_i = sum_j dropout(w_ij) v_j                      own(i) = i + (S - L)

    All rules (is_causal, window, key_mask, documents, attn_mask) are combined by AND. What may not
    be attended has no influence at all, whatever it holds: its gradient is 0, and NaN or Inf there
    change nothing (on a GPU see `explain`).

    Args:
        query: (B, H, L, D), float16, bfloat16, float32 or float64. No leading axis, or more of
            them, work too, here and below.
        key: (B, Hkv, S, D), value: (B, Hkv, S, Dv); H is a multiple of Hkv, and query head h reads
            key/value head h // (H // Hkv). Leading axes of size 1 are shared.
        attn_mask: broadcasts to (B, H, L, S); bool, True = may attend, or floating, added to the
            scores (-inf blocks).
        dropout_p: chance that a weight is dropped, 0 to 1; always on when above 0, as in torch.
        is_causal: row i sees key j when j <= i + (S - L): aligned to the lower right, so that the
            last row sees every key. (torch aligns to the upper left.)
        scale: factor of q . k; 1 / sqrt(D) by default, 0 and negative numbers are numbers.
        bias: floating, broadcasts to (B, H, L, S), added to the scores.
        key_mask: (B, S) bool, True = may be attended.
        window: (left, right) neighbours visible beside the own key; None is no limit on that side.
        documents: whole numbers (B, L) when L == S, or a pair (B, L) and (B, S); a row sees the
            keys of its own document only.
        softcap: positive c for c * tanh(s / c), before anything is added; None for none.
        sinks: (H,) logits that take part in the softmax and carry no value.
        alibi_slopes: (H,) or (B, H), ALiBi (Press et al. 2022), on both sides of the own key.
        head_mask: (H,) or (B, H), multiplies each head's output.
        deterministic: the same bits for a row (and its lse) however its prompt was cut into calls.
        backend: "auto" for the fastest that is right, or a name that `explain` lists.
        return_aux: an AuxRequest, to get (out, aux): lse, statistics of the weights, the weights.

    Returns:
        out (B, H, L, Dv) in query's dtype (under autocast, in autocast's); a row that sees no key
        is exactly 0 and passes no gradient. With return_aux: (out, Aux).
    Raises:
        ValueError, TypeError: sizes or kinds do not fit. NotImplementedError: the named backend
        cannot serve the call, with the reason.
    Half types accumulate in float32. Source: Vaswani et al. 2017; docs/spec.md section 2.

    >>> q, k, v = torch.randn(3, 2, 4, 7, 8)
    >>> attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 7, 8])
    """
    if has_torch_function_variadic(query, key, value):
        return handle_torch_function(
            attention, (query, key, value), query, key, value, attn_mask, dropout_p, is_causal,
            scale=scale, bias=bias, key_mask=key_mask, window=window, documents=documents,
            softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, head_mask=head_mask,
            deterministic=deterministic, backend=backend, return_aux=return_aux,
        )  # fmt: skip
    kind = None
    if documents is None:
        kind = kinds.kind_of(query, key, value, attn_mask, dropout_p, is_causal, scale, bias,
                             key_mask, window, softcap, sinks, alibi_slopes, head_mask,
                             deterministic, backend, return_aux)  # fmt: skip
        same = None if kind is None else kinds.known(kind)
        if same is not None:
            out, aux = native.again(query, key, value, same, attn_mask, bias, sinks, alibi_slopes,
                                    key_mask, head_mask)  # fmt: skip
            if return_aux is None or aux is None:
                return out
            return out, aux if return_aux.reduce is None else _reduced(aux, return_aux, None)
    problem = make_problem(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, bias=bias,
        key_mask=key_mask, window=window, documents=documents, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, head_mask=head_mask, deterministic=deterministic,
        return_aux=return_aux,
    )  # fmt: skip
    out, aux = backends.run(problem, backend)
    kinds.keep(kind, problem, backend)
    out = problem.unfold(out)
    if return_aux is None:
        return out
    return out, _reduced(aux, return_aux, problem).each(problem.unfold)


def _reduced(aux: Aux, request: AuxRequest, problem: Problem | None) -> Aux:
    """The statistics of rows as they are, or under reduce their summaries over those that count:
    without a problem all that see a key."""
    if request.reduce is None:
        return aux
    assert isinstance(aux.lse, Tensor)
    counts = aux.lse != -math.inf if problem is None else problem.rows_that_count(aux.lse)
    return summarised(aux if request.lse else dataclasses.replace(aux, lse=None), counts)


@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    dropout_p: float = ..., is_causal: bool = ..., *, scale: float | None = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ..., head_mask: Tensor | None = ..., deterministic: bool = ...,
    backend: str = ..., return_aux: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    dropout_p: float = ..., is_causal: bool = ..., *, scale: float | None = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ..., head_mask: Tensor | None = ..., deterministic: bool = ...,
    backend: str = ..., return_aux: AuxRequest,
) -> tuple[Tensor, Aux]: ...  # fmt: skip
@overload
def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    dropout_p: float = ..., is_causal: bool = ..., *, scale: float | None = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
    alibi_slopes: Tensor | None = ..., head_mask: Tensor | None = ..., deterministic: bool = ...,
    backend: str = ..., return_aux: AuxRequest | None,
) -> Tensor | tuple[Tensor, Aux]: ...  # fmt: skip
@wrap_torch_function(lambda query, key, value, *_, **__: (query, key, value))
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_mask: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Aux]:
    """Attention within each of N sequences that are packed one behind the other, without padding.

    Sequence n has the query rows cu_seqlens_q[n] ... cu_seqlens_q[n + 1] - 1 and the keys of
    cu_seqlens_k likewise, and gets exactly what `attention` gives it alone; causal and window are
    aligned within the sequence, to its lower right. Any of them may be empty. Where the backend of
    all is native and no gradient or summary is wanted, one call of its kernels runs them all;
    otherwise each has its own.

    Args:
        query: (total queries, H, D); key: (total keys, Hkv, D); value: (total keys, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) whole numbers, from 0, never falling, up to the total.
        alibi_slopes, head_mask: (H,) or (N, H). The others: as in `attention`.

    Returns:
        out (total queries, H, Dv). With return_aux: (out, Aux), each row's numbers being (total
        queries, H) or (total queries, H, k), key_mass (total keys, H), and under reduce each
        Summary per sequence, (N, H); weights have no packed form and are refused.
    Raises:
        ValueError: the offsets do not cover the rows exactly, among others.

    >>> x = torch.randn(7, 4, 8)
    >>> offsets = torch.tensor([0, 3, 7])
    >>> varlen_attention(x, x, x, offsets, offsets, is_causal=True).shape
    torch.Size([7, 4, 8])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        need_tensor(name, tensor, "varlen_attention")
        if tensor.ndim != 3:
            raise ValueError(
                f"varlen_attention: {name} has shape {tuple(tensor.shape)}; it must have three "
                "axes, (total rows, heads, head size)"
            )
    bounds_q = _offsets("cu_seqlens_q", cu_seqlens_q, len(query), "query")
    bounds_k = _offsets("cu_seqlens_k", cu_seqlens_k, len(key), "key")
    if len(value) != len(key):
        _offsets("cu_seqlens_k", cu_seqlens_k, len(value), "value")
    if len(bounds_q) != len(bounds_k):
        raise ValueError(
            f"varlen_attention: cu_seqlens_q counts {len(bounds_q) - 1} sequences and cu_seqlens_k "
            f"{len(bounds_k) - 1}; they must count the same"
        )
    if return_aux is not None and return_aux.weights:
        raise NotImplementedError(
            "varlen_attention: weights have no packed form; ask attention() for them, one sequence "
            "at a time"
        )

    N = len(bounds_q) - 1
    slopes = _per_sequence("alibi_slopes", alibi_slopes, N, query.shape[1])
    masks = _per_sequence("head_mask", head_mask, N, query.shape[1])
    if backend != "auto":
        backends.named(backend)

    def sequence(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """The arguments of attention for sequence n."""
        rows, keys = slice(*bounds_q[n : n + 2]), slice(*bounds_k[n : n + 2])
        tensors = query[rows], key[keys], value[keys]
        q, k, v = (t.transpose(0, 1) for t in tensors)
        return (q, k, v), {
            "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "window": window,
            "softcap": softcap, "sinks": sinks, "alibi_slopes": slopes[n], "head_mask": masks[n],
            "deterministic": deterministic, "return_aux": return_aux,
        }  # fmt: skip

    if (
        len(query)
        and len(key)
        and _may_share_a_call(query, key, value, sinks, alibi_slopes, head_mask)
    ):
        q, k, v = (t.unsqueeze(0).transpose(1, 2) for t in (query, key, value))
        kind = kinds.kind_of(q, k, v, None, dropout_p, is_causal, scale, None, None, window,
                             softcap, sinks, alibi_slopes, head_mask, deterministic, backend,
                             return_aux)  # fmt: skip
        # However long they are: native's choice rests on no length.
        kind = kind and ("packed", query.shape[1:], *kind[1:])
        same = kinds.known(kind)
        if same is not None:
            out, aux = native.again_packed(
                q, k, v, same, sinks, alibi_slopes, head_mask, bounds_q, bounds_k
            )
            out = _rows_first(out)
            return out if return_aux is None else (out, aux.each(_rows_first))
        tensors, rules = sequence(0)
        first = make_problem(*tensors, **rules)
        q, k, v = (t.to(first.dtype) for t in (q, k, v))
        whole = dataclasses.replace(
            first, query=q, key=k, value=v, alibi_slopes=alibi_slopes, head_mask=head_mask
        )
        if _all_are_native(whole, backend):
            kinds.keep(kind, whole, backend)
            out, aux = native.forward_packed(whole, bounds_q, bounds_k)
            out = _rows_first(out)
            return out if return_aux is None else (out, aux.each(_rows_first))

    outs, auxes = [], []
    lengths = list(zip(*map(_lengths, (bounds_q, bounds_k)), strict=True))
    for n in range(max(N, 1)):  # without a sequence, an empty one shows shapes and dtypes
        tensors, rules = sequence(n)
        # Nothing is to be computed for an empty one, whatever backend the others need.
        its_backend = backend if N and all(lengths[n]) else "auto"
        out = attention(*tensors, **rules, backend=its_backend)
        if isinstance(out, tuple):
            out, aux = out
            auxes.append(aux)
        outs.append(out.transpose(0, 1))
    out = torch.cat(outs)
    if return_aux is None:
        return out

    def join(tensors: list[Tensor], reduced: bool) -> Tensor:
        return (
            torch.stack(tensors)[:N] if reduced else torch.cat([t.transpose(0, 1) for t in tensors])
        )

    return out, joined(auxes, join)


def _may_share_a_call(*tensors: Tensor | None) -> bool:
    """Whether nobody has to see a call for each sequence: no compiler, which could not read the
    offsets, no gradient, and no mode or subclass that looks at `attention`."""
    if torch.compiler.is_compiling() or has_torch_function(tensors):
        return False
    return not torch.is_grad_enabled() or not any(
        t is not None and t.requires_grad for t in tensors
    )


def _all_are_native(whole: Problem, backend: str) -> bool:
    """Whether native is the backend of each packed sequence that has rows and keys, and gives all
    that is asked for: neither rests on how long one is."""
    return (
        backend in ("auto", native.NAME)
        and whole.aux.reduce is None
        and native.why_not(whole) is None
        and backends.choose(whole, backend) is native
        and not backends.lacks(whole, native)
    )


def _rows_first(tensor: Tensor) -> Tensor:
    """(1, H, total, ...) -> (total, H, ...)"""
    return tensor[0].transpose(0, 1).contiguous()


def _lengths(bounds: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(bounds)]


def _offsets(name: str, offsets: Tensor, total: int, rows: str) -> list[int]:
    need_tensor(name, offsets, "varlen_attention")
    if offsets.ndim != 1 or offsets.is_floating_point() or len(offsets) < 1:
        raise ValueError(
            f"varlen_attention: {name} has shape {tuple(offsets.shape)} and dtype {offsets.dtype}; "
            "it must be (number of sequences + 1,) whole numbers"
        )
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != total or bounds != sorted(bounds):
        raise ValueError(
            f"varlen_attention: {name} is {bounds}; it must start at 0, never fall, and end at the "
            f"{total} rows of {rows}. Cut off rows that belong to no sequence"
        )
    return bounds


def _per_sequence(name: str, tensor: Tensor | None, N: int, H: int) -> Sequence[Tensor | None]:
    if tensor is None:
        return [None] * max(N, 1)
    if tuple(tensor.shape) not in ((H,), (N, H)):
        raise ValueError(
            f"varlen_attention: {name} has shape {tuple(tensor.shape)}; it must be (H,) = ({H},) "
            f"or (sequences, H) = ({N}, {H})"
        )
    return tensor.expand(N, H).unbind(0) if N else [None]

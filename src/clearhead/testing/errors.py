"""Every error of a call: what provokes it, its kind, and its whole text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..functional import attention, varlen_attention
from ..results import AuxRequest


@dataclass(frozen=True)
class Error:
    """A call that must raise `kind` with exactly `text`."""

    name: str
    call: Callable[[], Any]
    kind: type[Exception]
    text: str


def _q(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*(shape or (2, 4, 5, 8)), dtype=dtype)


def _with(**changes: Any) -> Callable[[], Any]:
    """attention on query (2, 4, 5, 8), key and value (2, 2, 7, 8), with some arguments changed."""
    usual = {"query": _q(), "key": _q(2, 2, 7, 8), "value": _q(2, 2, 7, 8)}
    return lambda: attention(**{**usual, **changes})


def _varlen(*arguments: Any) -> Callable[[], Any]:
    return lambda: varlen_attention(*arguments)


def _packed(cu_q: list[int], cu_k: list[int], **changes: Any) -> Callable[[], Any]:
    rows = _q(6, 4, 8)
    offsets = torch.tensor(cu_q), torch.tensor(cu_k)
    return lambda: varlen_attention(rows, rows, rows, *offsets, **changes)


_MASK = "it must broadcast to (B, H, L, S) = (2, 4, 5, 7)"

ERRORS: tuple[Error, ...] = (
    Error("query is a list", _with(query=[1.0]), TypeError,
          "attention: query is a list; it must be a tensor"),
    Error("whole numbers", _with(query=_q().long()), TypeError,
          "attention: query has dtype torch.int64; it must be float16, bfloat16, float32 or float64"),
    Error("two axes", _with(query=_q(5, 8)), ValueError,
          "attention: query has shape (5, 8); it needs at least three axes, (heads, length, head size)"),
    Error("two dtypes", _with(key=_q(2, 2, 7, 8, dtype=torch.float64)), TypeError,
          "attention: key has dtype torch.float64, query has torch.float32; they must be the same, so "
          "convert one of them"),
    Error("two devices", _with(key=_q(2, 2, 7, 8).to("meta")), ValueError,
          "attention: key is on meta, query on cpu; move one"),
    Error("a sparse tensor", _with(value=_q(2, 2, 7, 8).to_sparse()), TypeError,
          "attention: value is a nested or sparse tensor; pass a plain one with key_mask=, or packed "
          "rows to varlen_attention"),
    Error("key head size", _with(key=_q(2, 2, 7, 6)), ValueError,
          "attention: key has shape (2, 2, 7, 6); its last axis must equal query's head size D = 8"),
    Error("value length", _with(value=_q(2, 2, 6, 8)), ValueError,
          "attention: value has shape (2, 2, 6, 8), key has (2, 2, 7, 8); they must have the same "
          "number of heads and the same length, (..., 2, 7, value size)"),
    Error("batch", _with(key=_q(3, 2, 7, 8), value=_q(3, 2, 7, 8)), ValueError,
          "attention: the leading axes of query (2,), key (3,) and value (3,) differ; they must be "
          "equal, or 1 where one is shared"),
    Error("heads do not divide", _with(key=_q(2, 3, 7, 8), value=_q(2, 3, 7, 8)), ValueError,
          "attention: query has 4 heads and key has 3; the number of query heads must be a multiple "
          "of the number of key/value heads"),
    Error("no key heads", _with(key=_q(2, 0, 7, 8), value=_q(2, 0, 7, 8)), ValueError,
          "attention: query has 4 heads and key has 0; the number of query heads must be a multiple "
          "of the number of key/value heads"),
    Error("mask of whole numbers", _with(attn_mask=torch.ones(5, 7, dtype=torch.long)), TypeError,
          "attention: attn_mask has dtype torch.int64; it must be bool (True = may attend) or "
          "floating (added to the scores). For 0/1 numbers pass attn_mask.bool()"),
    Error("mask too short", _with(attn_mask=torch.ones(5, 6).bool()), ValueError,
          f"attention: attn_mask has shape (5, 6); {_MASK}, and its axis -1 is 6, not S = 7"),
    Error("mask of another head count", _with(attn_mask=_q(3, 1, 7)), ValueError,
          f"attention: attn_mask has shape (3, 1, 7); {_MASK}, and its axis -3 is 3, not H = 4"),
    Error("mask with five axes", _with(attn_mask=_q(1, 1, 1, 5, 7)), ValueError,
          f"attention: attn_mask has shape (1, 1, 1, 5, 7), 5 axes; {_MASK}"),
    Error("bool bias", _with(bias=torch.ones(5, 7).bool()), TypeError,
          "attention: bias has dtype torch.bool; it must be floating"),
    Error("key mask of numbers", _with(key_mask=torch.ones(2, 7)), TypeError,
          "attention: key_mask has dtype torch.float32; it must be bool, True = may be attended. For "
          "0/1 numbers pass key_mask.bool(); what is to be added is bias="),
    Error("key mask too long", _with(key_mask=torch.ones(2, 8).bool()), ValueError,
          "attention: key_mask has shape (2, 8); it must broadcast to (B, S) = (2, 7), and its axis "
          "-1 is 8, not S = 7"),
    Error("one documents tensor for two lengths", _with(documents=torch.zeros(2, 5).long()),
          ValueError, "attention: documents is one tensor, but L = 5 and S = 7 differ; pass a pair, "
          "the numbers of the queries (B, L) and of the keys (B, S)"),
    Error("documents of floats", _with(documents=(_q(2, 5), _q(2, 7))), TypeError,
          "attention: documents has dtype torch.float32; it must hold whole numbers, the number of "
          "each token's document"),
    Error("window as a number", _with(window=3), TypeError,
          "attention: window is 3; it must be a pair (left, right) of neighbours beside the own key, "
          "None for no limit. W keys with the own one are (W - 1, 0)"),
    Error("negative window", _with(window=(-1, 0)), ValueError,
          "attention: window is (-1, 0); a side must be 0 or more, or None for no limit"),
    Error("half a neighbour", _with(window=(1.5, 0)), TypeError,
          "attention: window is (1.5, 0); each side must be an int or None"),
    Error("sinks per key head", _with(sinks=_q(2)), ValueError,
          "attention: sinks has shape (2,); it needs one logit per query head, (4,)"),
    Error("slopes of another head count", _with(alibi_slopes=_q(3)), ValueError,
          "attention: alibi_slopes has shape (3,); it must broadcast to (B, H) = (2, 4), and its axis "
          "-1 is 3, not H = 4"),
    Error("head mask of bools", _with(head_mask=torch.ones(4).bool()), TypeError,
          "attention: head_mask has dtype torch.bool; it must be floating"),
    Error("softcap 0", _with(softcap=0.0), ValueError,
          "attention: softcap is 0.0; it must be positive, and None turns it off"),
    Error("softcap over the numbers", _with(softcap=1e39), ValueError,
          "attention: softcap is 1e+39; scores are computed in torch.float32, which ends at "
          "3.4e+38"),
    Error("scale over the numbers", _with(scale=-1e39), ValueError,
          "attention: scale is -1e+39; scores are computed in torch.float32, which ends at "
          "3.4e+38"),
    Error("scale as a tensor", _with(scale=torch.ones(())), TypeError,
          "attention: scale is a Tensor; it must be a number. A tensor of scales can be multiplied "
          "into query instead"),
    Error("scale NaN", _with(scale=float("nan")), ValueError,
          "attention: scale is nan; it must be finite"),
    Error("dropout over 1", _with(dropout_p=1.5), ValueError,
          "attention: dropout_p is 1.5; it must lie between 0 and 1"),
    Error("unknown backend", _with(backend="cuda"), ValueError,
          "attention: backend is 'cuda'; it must be one of \"auto\", \"native\", \"sdpa\", "
          "\"flex\", \"chunked\""),
    Error("a backend that cannot", _with(backend="sdpa", softcap=2.0, dropout_p=0.1), NotImplementedError,
          'attention(backend="sdpa"): torch\'s fused kernels have no softcap; backend="auto" runs '
          "this call with chunked"),
    Error("aux as a bool", _with(return_aux=True), TypeError,
          "attention: return_aux is a bool; it must be an AuxRequest, such as AuxRequest(lse=True)"),
    Error("top_k as a float", _with(return_aux=AuxRequest(top_k=2.0)), TypeError,  # type: ignore[arg-type]
          "attention: top_k is 2.0; it must be how many weights per row to return, an int"),
    Error("top_k as a bool", _with(return_aux=AuxRequest(top_k=True)), TypeError,
          "attention: top_k is True; it must be how many weights per row to return, an int"),
    Error("top_k negative", _with(return_aux=AuxRequest(top_k=-1)), ValueError,
          "attention: top_k is -1; it must be 1 or more, or 0 for none"),
    Error("an unknown reduction", _with(return_aux=AuxRequest(entropy=True, reduce="mean")), ValueError,
          "attention: reduce is 'mean'; it must be \"head\", or None for every row"),
    Error("reduced weights", _with(return_aux=AuxRequest(weights=True, reduce="head")), ValueError,
          "attention: weights have no summary per head; ask for them without reduce, or for "
          "key_mass, their sum over the rows"),
    Error("packed rows with a batch", lambda: varlen_attention(
          _q(), _q(), _q(), torch.tensor([0]), torch.tensor([0])), ValueError,
          "varlen_attention: query has shape (2, 4, 5, 8); it must have three axes, (total rows, "
          "heads, head size)"),
    Error("packed rows as a list", _varlen([[1.0]], _q(), _q(), None, None),
          TypeError, "varlen_attention: query is a list; it must be a tensor"),
    Error("offsets as a list", _varlen(*[_q(6, 4, 8)] * 3, [0], [0]),
          TypeError, "varlen_attention: cu_seqlens_q is a list; it must be a tensor"),
    Error("slack rows", _packed([0, 2, 4], [0, 3, 6]), ValueError,
          "varlen_attention: cu_seqlens_q is [0, 2, 4]; it must start at 0, never fall, and end at "
          "the 6 rows of query. Cut off rows that belong to no sequence"),
    Error("falling offsets", _packed([0, 4, 2, 6], [0, 3, 5, 6]), ValueError,
          "varlen_attention: cu_seqlens_q is [0, 4, 2, 6]; it must start at 0, never fall, and end "
          "at the 6 rows of query. Cut off rows that belong to no sequence"),
    Error("two numbers of sequences", _packed([0, 6], [0, 3, 6]), ValueError,
          "varlen_attention: cu_seqlens_q counts 1 sequences and cu_seqlens_k 2; they must count the "
          "same"),
    Error("offsets as floats", lambda: varlen_attention(
          _q(6, 4, 8), _q(6, 4, 8), _q(6, 4, 8), torch.zeros(2), torch.zeros(2)), ValueError,
          "varlen_attention: cu_seqlens_q has shape (2,) and dtype torch.float32; it must be (number "
          "of sequences + 1,) whole numbers"),
    Error("packed weights", _packed([0, 6], [0, 6], return_aux=AuxRequest(weights=True)),
          NotImplementedError, "varlen_attention: weights have no packed form; ask attention() for "
          "them, one sequence at a time"),
    Error("packed slopes", _packed([0, 6], [0, 6], alibi_slopes=_q(3)), ValueError,
          "varlen_attention: alibi_slopes has shape (3,); it must be (H,) = (4,) or (sequences, H) = "
          "(1, 4)"),
)  # fmt: skip

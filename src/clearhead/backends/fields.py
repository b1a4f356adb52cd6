"""One call of the compiled library: the struct of csrc/clearhead.h, packed in parts.

    addresses   of query, key, value, out and the workspace: what no two calls share
    layout      sizes, dtype and strides: the same for all layers of a model, made once and kept
    rules       numbers, masks and the like, and what is to be filled beside out

Every field has eight bytes.
"""

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
NO_LIMIT = 2**63 - 1
# What is to be filled, in the struct's order: first what has one number per row.
ROW_STATISTICS = ("m", "z", "lse", "max_logit", "entropy", "first_mass", "previous_mass",
                  "self_mass", "distance")  # fmt: skip
_STATISTICS_FIELDS = (*ROW_STATISTICS, "first_key", "its strides", "", "top_weights", "top_keys",
                      "top_k", "key_mass", "weights")  # fmt: skip
_FIELD = {name: n for n, name in enumerate(_STATISTICS_FIELDS)}

ADDRESSES = struct.Struct("@4PPqPq")  # query to workspace_bytes
_LAYOUT = struct.Struct("@7qq12q")  # sizes, dtype, strides
_NUMBERS = struct.Struct("@2d2q")  # scale to right
_RULES = struct.Struct("@" + "P4qq" * 3 + "P2q2P4qPP2qP2q2P")  # mask to cu_k
_STATISTICS = struct.Struct("@9PP2q2Pq2P")  # m to weights
CALL = struct.Struct(
    "@" + "".join(part.format[1:] for part in (ADDRESSES, _LAYOUT, _NUMBERS, _RULES, _STATISTICS))
)
_NO_RULES, _NO_STATISTICS = bytes(_RULES.size), bytes(_STATISTICS.size)
_NO_DENSE = (0, 0, 0, 0, 0, 0)

# -- layout ---------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """What follows from the sizes, strides and dtypes of query, key and value."""

    packed: bytes
    sizes: tuple[int, int, int, int]  # of out
    heads_in_rows: bool  # of query, and so of out
    dense: bool  # the last axis of all three has stride 1


def layout_of(
    query: Tensor, key: Tensor, value: Tensor, sequences: tuple[int, int, int] | None = None
) -> Layout:
    """The layout of a call, from query (B, H, L, D), key (B, Hkv, S, D) and value (B, Hkv, S, Dv).

    `sequences` is for sequences packed into one batch item: how many, and the most queries and keys
    of one.

    Raises:
        ValueError, TypeError: sizes or dtypes with which the library would read other memory.
    """
    return _layout(
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, sequences,
    )  # fmt: skip


# A model has a few per length of its prompts, and one for each step of its decoding.
@functools.lru_cache(maxsize=512)
def _layout(
    of_query: torch.Size, of_key: torch.Size, of_value: torch.Size,
    q_strides: tuple[int, ...], k_strides: tuple[int, ...], v_strides: tuple[int, ...],
    q_dtype: torch.dtype, k_dtype: torch.dtype, v_dtype: torch.dtype,
    sequences: tuple[int, int, int] | None,
) -> Layout:  # fmt: skip
    B, H, L, D = of_query
    _, Hkv, S, Dv = of_value
    if of_key != (B, Hkv, S, D) or of_value[0] != B:
        raise ValueError(
            f"clearhead::native: query, key and value have shapes {tuple(of_query)}, "
            f"{tuple(of_key)}, {tuple(of_value)}; they need (B, H, L, D), (B, Hkv, S, D) "
            "and (B, Hkv, S, Dv)"
        )
    if not q_dtype == k_dtype == v_dtype:
        raise TypeError(
            f"clearhead::native: query, key and value are {q_dtype}, {k_dtype} and {v_dtype}; they "
            "must be alike"
        )
    heads_in_rows = q_strides[1] < q_strides[2]
    strides: list[int] = []
    for shape, given in ((of_query, q_strides), (of_key, k_strides), (of_value, v_strides)):
        strides += (given if given[3] == 1 else _strides(False, *shape[1:]))[:3]
    strides += _strides(heads_in_rows, H, L, Dv)[:3]
    sizes = B, H, L, Dv
    if sequences is not None:
        B, L, S = sequences
    packed = _LAYOUT.pack(B, H, Hkv, L, S, D, Dv, DTYPES[q_dtype], *strides)
    dense = q_strides[3] == k_strides[3] == v_strides[3] == 1
    return Layout(packed, sizes, heads_in_rows, dense)


def densely(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, copied where the stride of the last axis is not 1."""
    # contiguous() would leave a tensor with D = 1 as it is, whatever its strides.
    whole = torch.contiguous_format
    return tuple(t if t.stride(3) == 1 else t.clone(memory_format=whole) for t in tensors)


def empty_out(query: Tensor, heads_in_rows: bool, B: int, H: int, L: int, Dv: int) -> Tensor:
    """out, of shape (B, H, L, Dv): in memory its heads lie within its rows where those of query do,
    so that joining the heads again is a view."""
    if heads_in_rows:
        return query.new_empty_strided((B, H, L, Dv), _strides(True, H, L, Dv))
    return query.new_empty(B, H, L, Dv)  # 0.5 us less than with a tuple


def _strides(heads_in_rows: bool, H: int, L: int, Dv: int) -> tuple[int, int, int, int]:
    return (L * H * Dv, Dv, H * Dv, 1) if heads_in_rows else (H * L * Dv, L * Dv, Dv, 1)


# -- rules ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def bare_rules(
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
) -> bytes:
    """The part of a call that follows its layout, where there are no other rules and nothing else
    is to be filled."""
    numbers = _NUMBERS.pack(
        scale, softcap or 0.0,
        NO_LIMIT if left is None else left, NO_LIMIT if right is None else right,
    )  # fmt: skip
    return numbers + _NO_RULES + _NO_STATISTICS


def rules_of(
    shape: tuple[int, int, int, int],
    scale: float,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
    float_mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    doc_q: Tensor | None = None,
    doc_k: Tensor | None = None,
    head_mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    first_key: Tensor | None = None,
    found: dict[str, Tensor] | None = None,
) -> tuple[bytes, tuple]:
    """The part of a call of shape (B, H, L, S) that says what is added, who sees what and what else
    is to be filled, and the tensors that must live until the call. All that are given broadcast.

    Of B packed sequences offsets (2, B + 1), int64 and dense, has where their rows and their keys
    start and end. What is `found` has the struct's names, and is dense.
    """
    B, H, L, S = shape
    bare = bare_rules(scale, left, right, softcap)
    if (
        float_mask is bias is sinks is alibi_slopes is mask is None
        and key_mask is doc_q is doc_k is head_mask is offsets is None
    ):
        return with_statistics(bare, found, first_key, B, L) if found else bare, ()
    float_mask, bias = _readable(float_mask), _readable(bias)
    sinks = None if sinks is None else sinks.to(torch.float32).contiguous()
    alibi_slopes, head_mask = (_in(torch.float32, t) for t in (alibi_slopes, head_mask))
    doc_q, doc_k = (_in(torch.int64, t) for t in (doc_q, doc_k))
    cu_q = address_of(offsets)
    rules = _RULES.pack(
        *dense_fields(mask, *shape), *dense_fields(float_mask, *shape), *dense_fields(bias, *shape),
        *spread(key_mask, B, S), address_of(doc_q), address_of(doc_k),
        *spread(doc_q, B, L)[1:], *spread(doc_k, B, S)[1:],
        address_of(sinks), *spread(alibi_slopes, B, H), *spread(head_mask, B, H),
        cu_q, cu_q and cu_q + 8 * (B + 1),
    )  # fmt: skip
    alive = float_mask, bias, sinks, alibi_slopes, head_mask, doc_q, doc_k, offsets
    rules = bare[: _NUMBERS.size] + rules + _NO_STATISTICS
    return with_statistics(rules, found, first_key, B, L) if found else rules, alive


def with_statistics(
    rules: bytes,
    found: dict[str, Tensor],
    first_key: Tensor | None = None,
    B: int = 0,
    L: int = 0,
) -> bytes:
    """The rules of a call that asks for nothing beside out, asking for what is `found`; first_key
    broadcasts to (B, L)."""
    fields = [0] * len(_FIELD)
    for name, tensor in found.items():
        fields[_FIELD[name]] = tensor.data_ptr()
    if first_key is not None:
        fields[_FIELD["first_key"] : _FIELD["top_weights"]] = spread(first_key, B, L)
    if "top_weights" in found:
        fields[_FIELD["top_k"]] = found["top_weights"].shape[-1]
    return rules[: -_STATISTICS.size] + _STATISTICS.pack(*fields)


def _readable(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype in DTYPES else tensor.to(torch.float32)


def _in(dtype: torch.dtype, tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None else tensor.to(dtype)


def address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def dense_fields(tensor: Tensor | None, *shape: int) -> tuple[int, ...]:
    """The fields of clearhead_dense: address, strides with 0 where broadcast, dtype."""
    if tensor is None:
        return _NO_DENSE
    return (tensor.data_ptr(), *tensor.expand(shape).stride(), DTYPES[tensor.dtype])


def spread(tensor: Tensor | None, *shape: int) -> tuple[int, int, int]:
    """Address and strides of a tensor with two axes, 0 where broadcast."""
    if tensor is None:
        return 0, 0, 0
    strides = tensor.expand(shape).stride()
    return tensor.data_ptr(), strides[0], strides[1]

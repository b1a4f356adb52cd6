"""The C interface called field by field, for tests of what it computes."""

import ctypes
from types import SimpleNamespace

import torch

from clearhead.backends import fields, library

ROWS = fields.ROW_STATISTICS
STATISTICS = (*ROWS, "top_k", "key_mass")


def run(
    query,
    key,
    value,
    attn_mask=None,
    bias=None,
    *,
    wanted=(),
    top_k=0,
    first_key=None,
    head_mask=None,
    cu_q=None,
    cu_k=None,
    max_lengths=None,
    is_causal=False,
    window=None,
    key_mask=None,
    documents=None,
    scale=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    threads=None,
):
    """out, m, z and the statistics that are wanted, by name; the rules as attention has them."""
    B, H, L, D = query.shape
    Hkv, S, Dv = value.shape[1:]
    found = {"out": torch.full((B, H, L, Dv), 777.0, dtype=query.dtype)}
    for name in ROWS:
        if name not in wanted and name not in ("m", "z"):
            continue
        found[name] = torch.full((B, H, L), 777.0)
    if "top_k" in wanted:
        found["top_weights"] = torch.full((B, H, L, top_k), 777.0)
        found["top_keys"] = torch.full((B, H, L, top_k), 777)
    if "key_mass" in wanted:
        found["key_mass"] = torch.full((B, H, S), 777.0)
    if "weights" in wanted:
        found["weights"] = torch.full((B, H, L, S), 777.0)
    left, right = window or (None, None)
    right = 0 if is_causal else right
    doc_q, doc_k = documents if isinstance(documents, tuple) else (documents, documents)
    is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
    mask, added = (attn_mask, None) if is_bool else (None, attn_mask)
    longest = max_lengths or (L, S)
    batch = B if cu_q is None else len(cu_q) - 1
    at = fields.address_of
    floats = [None if t is None else t.float().contiguous()
              for t in (sinks, alibi_slopes, head_mask)]  # fmt: skip
    sinks, slopes, head_mask = floats
    threads = threads or torch.get_num_threads()
    call = ctypes.create_string_buffer(fields.CALL.size)
    values = [
        *map(at, (query, key, value, found["out"])),
        library.find_library().parallel_for, threads, 0, 0,
        batch, H, Hkv, *longest, D, Dv, fields.DTYPES[query.dtype],
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *found["out"].stride()[:3],
        D**-0.5 if scale is None else scale, softcap or 0.0,
        fields.NO_LIMIT if left is None else left, fields.NO_LIMIT if right is None else right,
        *(field for t in (mask, added, bias) for field in fields.dense_fields(t, B, H, L, S)),
        *fields.spread(key_mask, B, S), at(doc_q), at(doc_k),
        *fields.spread(doc_q, B, L)[1:], *fields.spread(doc_k, B, S)[1:],
        at(sinks), *fields.spread(slopes, batch, H), *fields.spread(head_mask, batch, H),
        at(cu_q), at(cu_k), *(at(found.get(name)) for name in ROWS),
        *fields.spread(first_key, B, L), at(found.get("top_weights")), at(found.get("top_keys")),
        top_k, at(found.get("key_mass")), at(found.get("weights")),
    ]  # fmt: skip
    fields.CALL.pack_into(call, 0, *values)
    needed = ctypes.c_int64()
    _succeed(library.find_library().workspace(call, ctypes.byref(needed)))
    workspace = torch.full((needed.value,), 255, dtype=torch.uint8)  # NaN
    values[6:8] = at(workspace), needed.value
    fields.CALL.pack_into(call, 0, *values)
    _succeed(library.find_library().forward(call))
    return SimpleNamespace(**found)


def _succeed(status):
    if status:
        raise library._refused(status)

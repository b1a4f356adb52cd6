"""Statistics of the weights, a block of rows at a time: what AuxRequest asks for beside lse.

    for a group of heads, for a block of rows i, with all the keys j that these rows may see:
    1-4  w_ij = exp(s_ij - m_i) / z_i           as in `chunked`, from query and key again
    5    of each row its largest score, sums over j (entropy, distance), places (the masses, top_k);
         of each key the sum over i (key_mass)

A block holds whole rows, so nothing is rescaled. It is a pass of its own, without values: the
output's pass stays as it is, to the bit, and other backends can stand beside this one.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..problem import Problem, in_transform
from ..results import Aux, TopK
from .blocks import Block, cut_into_blocks
from .dense import dense_weights

STATISTICS = ("max_logit", "entropy", "top_k", "key_mass", "first_mass", "previous_mass",
              "self_mass", "distance")  # fmt: skip
# Below the log of every weight that is not 0, so that 0 * log 0 is 0.
LOG_ZERO = -1000.0


def statistics(problem: Problem, offered: Sequence[str] = STATISTICS) -> Aux:
    """What problem.aux asks for of what is offered; nothing of it carries gradients."""
    names = [name for name in problem.aux.asked if name in offered]
    if not names:
        return Aux()
    p = problem.detached()
    added = (p.float_mask, p.bias, p.sinks, p.alibi_slopes)
    rules = (p.mask, p.key_mask, p.doc_q, p.doc_k, p.left, p.right, p.scale, p.softcap)
    return _named(names, measure(p.query, p.key, *added, *rules, ",".join(names), p.aux.top_k))


def dense_statistics(problem: Problem) -> Aux:
    """The same in one piece, for torch.func transforms, which the op below has no rules for."""
    p = problem
    names = [name for name in p.aux.asked if name in STATISTICS]
    if not names:
        return Aux()
    weights, _, max_logit, allowed = (t.detach() for t in dense_weights(p))
    first = p.first_key
    first = None if first is None else first[:, None, :, None]
    found = {"max_logit": max_logit}
    w_ij = torch.where(allowed, weights, 0)
    found |= _of_weights(p, w_ij, ~allowed, first, (0, p.L, 0, p.S), names, p.aux.top_k)
    return _named(names, [found[name] for name in _tensors(names)])


def _tensors(names: Sequence[str]) -> list[str]:
    """The names of the tensors that these statistics are returned in."""
    twice = {"top_k": ("top_weights", "top_keys")}
    return [tensor for name in names for tensor in twice.get(name, (name,))]


def _named(names: Sequence[str], tensors: Sequence[Tensor]) -> Aux:
    found: dict = dict(zip(_tensors(names), tensors, strict=True))
    if "top_k" in names:
        found["top_k"] = TopK(found.pop("top_weights"), found.pop("top_keys"))
    return Aux(**found)


@torch.library.custom_op("clearhead::chunked_statistics", mutates_args=())
def measure(
    query: Tensor,
    key: Tensor,
    float_mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    key_mask: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    names: str,
    top_k: int,
) -> list[Tensor]:
    """The pass as an op: the tensors of the statistics that names, joined by commas, lists."""
    p = Problem(query, key, key[..., :0], float_mask, bias, sinks, alibi_slopes, mask, key_mask,
                doc_q, doc_k, left, right, scale, softcap)  # fmt: skip
    wanted = names.split(",")
    found = dict(zip(_tensors(wanted), _nothing(query, key, wanted, top_k), strict=True))
    with torch.autocast(p.device.type, enabled=False):
        for block in cut_into_blocks(p):
            _measure_block(block, wanted, top_k, found)
    return list(found.values())


@measure.register_fake
def _(query: Tensor, key: Tensor, *rest: Any) -> list[Tensor]:
    names, top_k = rest[-2:]
    return _nothing(query, key, names.split(","), top_k)


def _nothing(query: Tensor, key: Tensor, names: Sequence[str], top_k: int) -> list[Tensor]:
    """The answer where no row sees a key."""
    B, H, L, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    empty = {"lse": -math.inf, "max_logit": -math.inf}
    tensors = []
    for name in _tensors(names):
        if name == "key_mass":
            tensors.append(query.new_zeros(B, H, key.shape[2], dtype=dtype))
        elif name == "top_weights":
            tensors.append(query.new_zeros(B, H, L, top_k, dtype=dtype))
        elif name == "top_keys":
            tensors.append(query.new_full((B, H, L, top_k), -1, dtype=torch.int64))
        else:
            tensors.append(query.new_full((B, H, L), empty.get(name, 0.0), dtype=dtype))
    return tensors


def _measure_block(
    block: Block, names: Sequence[str], top_k: int, whole: dict[str, Tensor]
) -> None:
    p, (tile,) = block.problem, block.tiles
    allowed = block.allowed(tile)
    s_ij, _ = block.scores(block.rows(p.query), block.keys(p.key, tile), tile, allowed)
    max_i = m_i = s_ij.amax(-1, keepdim=True)
    empty = max_i == -math.inf
    if p.sinks is not None:
        m_i = torch.maximum(max_i, block.sinks(p.sinks))
    base = m_i.masked_fill(m_i == -math.inf, 0)
    w_ij = s_ij.sub_(base).exp_()
    z_i = w_ij.sum(-1, keepdim=True)
    if p.sinks is not None:
        z_i += (block.sinks(p.sinks) - base).exp()
    lse_i = (m_i + z_i.log()).masked_fill_(empty, -math.inf)
    w_ij /= z_i.masked_fill(empty, 1)
    blocked = None if allowed is None else ~allowed
    if blocked is not None and not bool(base.isfinite().all()):
        w_ij.masked_fill_(blocked, 0)  # a row whose maximum is NaN has NaN where it may not look

    place = (block.i0, block.i1, *tile)
    first = p.first_key
    first = None if first is None else first[block.b, None, None, block.i0 : block.i1, None]
    found = {"lse": lse_i[..., 0], "max_logit": max_i[..., 0]}
    found |= _of_weights(p, w_ij, blocked, first, place, names, top_k)
    for name, tensor in whole.items():
        if name == "key_mass":
            block.heads(tensor)[..., tile[0] : tile[1]] += found[name]
        else:
            block.heads(tensor)[:, :, :, block.i0 : block.i1] = found[name]


def _of_weights(
    p: Problem,
    w_ij: Tensor,
    blocked: Tensor | None,
    first: Tensor | None,
    place: tuple[int, int, int, int],
    names: Sequence[str],
    top_k: int,
) -> dict[str, Tensor]:
    """The statistics of a tile of weights (..., rows, keys), 0 where blocked.

    first (..., rows, 1) are the keys of first_mass, None for key 0; place is (i0, i1, j0, j1).
    """
    i0, i1, j0, j1 = place
    own = torch.arange(i0, i1, device=p.device)[:, None] + (p.S - p.L)
    found: dict[str, Tensor] = {}
    if "entropy" in names:
        found["entropy"] = 0 - (w_ij * w_ij.log().clamp(min=LOG_ZERO)).sum(-1)
    if "distance" in names:
        found["distance"] = (w_ij * p.distance(i0, i1, j0, j1)).sum(-1)
    if "key_mass" in names:
        found["key_mass"] = w_ij.sum(-2)
    if "top_k" in names:
        found["top_weights"], found["top_keys"] = _largest(w_ij, blocked, top_k, j0)
    keys = {"self_mass": own, "previous_mass": own - 1,
            "first_mass": torch.zeros_like(own) if first is None else first}  # fmt: skip
    return found | {n: _at_key(w_ij, j, j0) for n, j in keys.items() if n in names}


def _at_key(w_ij: Tensor, j: Tensor, j0: int) -> Tensor:
    """w_ij of one key j of each row, (..., rows, 1), 0 where j is none of these keys."""
    keys = w_ij.shape[-1]
    if keys == 0:
        return w_ij.sum(-1)
    inside = (j >= j0) & (j < j0 + keys)
    index = (j - j0).clamp(0, keys - 1).expand(*w_ij.shape[:-1], 1)
    return torch.where(inside, w_ij.gather(-1, index), 0)[..., 0]


def _largest(w_ij: Tensor, blocked: Tensor | None, k: int, j0: int) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row and their keys: weight 0 and key -1 beyond those seen."""
    marked = w_ij if blocked is None else torch.where(blocked, -1, w_ij)
    keys = marked.shape[-1]
    n = min(k, keys)
    if marked.dtype == torch.float32 and not in_transform():
        # torch.topk keeps no order among equals. The bits of floats from 0 up are ordered like
        # the floats, so one whole number can hold the weight and, below it, how early its key is.
        order = marked.view(torch.int32).long().bitwise_left_shift_(32)
        late = torch.arange(keys - 1, -1, -1, device=marked.device)
        order.bitwise_or_(late)
        index = keys - 1 - (order.topk(n).values & 0xFFFFFFFF)
    else:
        index = torch.sort(marked, dim=-1, descending=True, stable=True).indices[..., :n]
    weights = marked.gather(-1, index)
    none = weights < 0
    weights, index = torch.where(none, 0, weights), torch.where(none, -1, index + j0)
    return pad(weights, (0, k - n)), pad(index, (0, k - n), value=-1)

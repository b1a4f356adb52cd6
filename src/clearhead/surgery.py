"""Heads of a MultiHeadAttention taken out for good, or merged."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .module import MultiHeadAttention

# The parameters with rows or columns that belong to heads: (module, axis, kind of head).
_ROWS = (("W_query", "query"), ("W_gate", "query"), ("W_key", "key"), ("W_value", "key"))


def prune_heads(module: MultiHeadAttention, heads: Iterable[int]) -> MultiHeadAttention:
    """A new module without these query heads: what is left of the output is what they did not add.

        out = sum over the heads kept of context_h W_out_h (+ bias)

    Grouped heads share their keys and values, so from every group the same number must go, or all.

    Args:
        module: it stays as it is. heads: the query heads to remove, from 0; some must be left.

    Returns:
        A module of the same options with smaller weights; input and output keep their widths.
    Raises:
        ValueError: there is no such head, none would be left, or groups would differ in size.

    >>> mha = MultiHeadAttention(6, 3, 4)
    >>> prune_heads(mha, [0, 2]).out_proj.weight.shape
    torch.Size([12, 6])
    """
    H, G = module.num_heads, module.num_heads // module.num_kv_heads
    gone = set(heads)
    wrong = sorted(h for h in gone if not 0 <= h < H)
    if wrong:
        raise ValueError(f"prune_heads: there is no head {wrong[0]}; the module has {H}, from 0")
    kept = [h for h in range(H) if h not in gone]
    left = [sum(h // G == g for h in kept) for g in range(module.num_kv_heads)]
    sizes = sorted({count for count in left if count})
    if not kept:
        raise ValueError(f"prune_heads: all {H} heads would go; leave one or more")
    if len(sizes) > 1:
        raise ValueError(
            f"prune_heads: of the {module.num_kv_heads} groups of {G} heads {left} would be left; "
            "each must keep the same number or none, so remove as many from each, or whole groups"
        )
    return _rebuilt(module, kept, [g for g, count in enumerate(left) if count])


def _rebuilt(module: MultiHeadAttention, kept: list[int], groups: list[int]) -> MultiHeadAttention:
    """The module with these query heads and key/value heads alone."""
    small = copy.deepcopy(module)
    small.num_heads, small.num_kv_heads = len(kept), len(groups)
    sizes = {"W_query": module.head_dim, "W_key": module.head_dim,
             "W_gate": module.value_head_dim, "W_value": module.value_head_dim}  # fmt: skip
    for name, kind in _ROWS:
        layer = getattr(small, name)
        if layer is not None:
            rows = _places(kept if kind == "query" else groups, sizes[name])
            _take(layer, rows, 0)
            layer.out_features = len(rows)
    columns = _places(kept, module.value_head_dim)
    _take(small.out_proj, columns, 1)
    small.out_proj.in_features = len(columns)  # type: ignore[assignment]
    if small.sinks is not None:
        small.sinks = _parameter(small.sinks.detach()[kept], small.sinks)
    if small.alibi:  # the slopes that these heads had among all
        total, of = module.alibi_of or (module.num_heads, list(range(module.num_heads)))
        small.alibi_of = total, [of[h] for h in kept]
    return small


def merge_kv_heads(module: MultiHeadAttention, num_kv_heads: int) -> MultiHeadAttention:
    """A new module in which groups of key/value heads are replaced by their mean.

    This is how Ainslie et al. 2023 (section 2.1) make grouped heads of a trained module; it changes
    the output, and training goes on from there.

    Args:
        module: it stays as it is. num_kv_heads: how many to keep, a divisor of those it has.

    Raises:
        ValueError: it is no divisor.

    >>> merge_kv_heads(MultiHeadAttention(6, 3, 4), 2).num_kv_heads
    2
    """
    Hkv = module.num_kv_heads
    if num_kv_heads < 1 or Hkv % num_kv_heads:
        raise ValueError(
            f"merge_kv_heads: num_kv_heads is {num_kv_heads}; it must divide the module's {Hkv}"
        )
    merged = copy.deepcopy(module)
    merged.num_kv_heads = num_kv_heads
    for layer in (merged.W_key, merged.W_value):
        for name in ("weight", "bias"):
            held = getattr(layer, name)
            if held is not None:
                heads = held.detach().unflatten(0, (num_kv_heads, Hkv // num_kv_heads, -1))
                setattr(layer, name, _parameter(heads.mean(1).flatten(0, 1), held))
        layer.out_features = len(layer.weight)
    return merged


def _places(heads: list[int], size: int) -> list[int]:
    return [h * size + d for h in heads for d in range(size)]


def _take(layer: nn.Module, places: list[int], axis: int) -> None:
    weight, bias = layer.weight, layer.bias
    index = torch.tensor(places, device=weight.device)  # type: ignore[arg-type]
    layer.weight = _parameter(weight.detach().index_select(axis, index), weight)  # type: ignore
    if axis == 0 and bias is not None:
        layer.bias = _parameter(bias.detach().index_select(0, index), bias)  # type: ignore


def _parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=like.requires_grad)

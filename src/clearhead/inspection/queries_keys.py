"""Queries and keys in 8 bits, from which a page computes any head's weights again.

A map of weights grows with the square of the text, queries and keys with its length. Softmax does
not change when all scores of a row move together, so the mean of the keys is taken off first; a
channel in which keys are large and queries small is balanced, which leaves the products as they
were and the rounding errors smaller.

    scores_ij = scale (q_i . k_j) = a_i b_j (int8 q_i . int8 k_j) + what is the same for all j

a_i and b_j are float32, one a row. Rows are 8 bits each on their own largest number.
"""

import ctypes
import math

import torch
from torch import Tensor

FAITHFUL = 0.1  # mean total variation between weights and those computed again


def pack(
    query: Tensor, key: Tensor, scale: float | None, weights: Tensor
) -> tuple[list[bytes], list[bytes]]:
    """Pack one layer.

    Args:
        query: (H, L, D) with positions applied.
        key: (Hkv, L, D) likewise; Hkv divides H.
        scale: of the scores; 1/sqrt(D) where None.
        weights: (H, L, L), what the page has to come back to.

    Returns:
        For each of H heads the queries, a (L float32) and then L * D int8, and for each of H heads
        the keys in the same form; heads that share their keys share the bytes.

    Raises:
        ValueError: plain softmax of the packed scores, with the future hidden where the weights
            look back only, is not what the weights are: the layer has a window, a sink, a bias.
    """
    H, L, D = query.shape
    G = H // len(key)
    scale = 1 / math.sqrt(D) if scale is None else scale
    key = key - key.mean(1, keepdim=True)
    groups = query.reshape(len(key), G * L, D)
    balance = (key.square().mean(1).sqrt() / groups.square().mean(1).sqrt().clamp(min=1e-12)).sqrt()
    balance = balance.clamp(min=1e-6)[:, None]
    (q, a), (k, b) = _rows(scale * groups * balance), _rows(key / balance)
    q, a = q.view(H, L, D), a.view(H, L)

    again = weights_of(q, a, k.repeat_interleave(G, 0), b.repeat_interleave(G, 0), weights)
    apart = float((again - weights).abs().sum(-1).mean() / 2)
    if not apart < FAITHFUL:
        raise ValueError(
            f'full="qk" would show weights that are {apart:.2f} off on average: this model does '
            'more to its scores than a softmax (a window, a sink, a bias); full="maps" is right'
        )
    keys = [_bytes(b[g], k[g]) for g in range(len(k))]
    return [_bytes(a[h], q[h]) for h in range(H)], [keys[h // G] for h in range(H)]


def weights_of(q: Tensor, a: Tensor, k: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """What the page computes: softmax of a b (q . k) over the keys, (H, L, L)."""
    return _weights(q, a, k, b, causal=not bool(like.triu(1).any()))


def unpack(queries: bytes, keys: bytes, L: int, causal: bool) -> Tensor:
    """The weights (L, L) of one head from what `pack` made of it."""

    def parts(packed: bytes) -> tuple[Tensor, Tensor]:
        rows = torch.frombuffer(bytearray(packed[4 * L :]), dtype=torch.int8).view(1, L, -1)
        return rows, torch.frombuffer(bytearray(packed[: 4 * L]), dtype=torch.float32)[None]

    return _weights(*parts(queries), *parts(keys), causal=causal)[0]


def _weights(q: Tensor, a: Tensor, k: Tensor, b: Tensor, causal: bool) -> Tensor:
    scores = (q.float() @ k.float().transpose(1, 2)) * a[..., None] * b[:, None]
    if causal:
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1)


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    size = (x.abs().amax(-1) / 127).clamp(min=1e-30)
    return (x / size[..., None]).round().to(torch.int8), size


def _bytes(size: Tensor, rows: Tensor) -> bytes:
    size, rows = size.contiguous(), rows.contiguous()
    return b"".join(
        ctypes.string_at(part.data_ptr(), part.numel() * part.element_size())
        for part in (size, rows)
    )

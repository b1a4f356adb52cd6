"""How `chunked` cuts a call into blocks, and the products that keep what is blocked inert."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..problem import Problem

# Scores per block. 2^20 floats are 4 MB; see the benchmarks for other sizes.
BLOCK = 1 << 20
MIN_ROWS = 16
# With deterministic=True rows and keys are cut at multiples of these, counted from key 0, and every
# product has this one shape, so a row meets the same arithmetic however its prompt was cut.
TILE_ROWS, TILE_KEYS = 64, 128

Tile = tuple[int, int]


@dataclass
class Block:
    """Some heads and rows of a call, and how both passes read their operands.

    Tensors of a block have axes (b, g, G, rows, ...): batch, key/value head, query head of its
    group. The rows of a group share one product with their keys: K and V are never expanded.
    """

    problem: Problem
    b: slice
    g: slice
    i0: int
    i1: int
    tiles: list[Tile]
    above: int = 0
    below: int = 0

    def heads(self, tensor: Tensor) -> Tensor:
        """(B|1, H|1, ...) -> (b|1, g|1, G|1, ...)."""
        tensor = tensor if tensor.shape[0] == 1 else tensor[self.b]
        if tensor.shape[1] == 1:
            return tensor.unsqueeze(2)
        return tensor.unflatten(1, (self.problem.Hkv, self.problem.G))[:, self.g]

    def rows(self, tensor: Tensor) -> Tensor:
        """(B, H, L, n) -> (b, g, G, rows, n) in the compute dtype, whole tiles if need be."""
        part = self.heads(tensor)[..., self.i0 : self.i1, :].to(self.problem.compute_dtype)
        return pad(part, (0, 0, self.above, self.below)) if self.above or self.below else part

    def keys(self, tensor: Tensor, tile: Tile) -> Tensor:
        """(B, Hkv, S, n) -> (b, g, keys, n) in the compute dtype."""
        part = tensor[self.b, self.g, tile[0] : tile[1]].to(self.problem.compute_dtype)
        missing = tile[1] - tile[0] - part.shape[2]
        return pad(part, (0, 0, 0, missing)) if missing else part

    def fit(self, tensor: Tensor, tile: Tile) -> Tensor:
        """(..., rows, keys) of the call, maybe broadcast -> for whole tiles, 0 beyond."""
        missing = max(0, tile[1] - self.problem.S)
        if self.above or self.below or missing:
            shape = (*tensor.shape[:-2], self.i1 - self.i0, tile[1] - tile[0] - missing)
            tensor = pad(tensor.expand(shape), (0, missing, self.above, self.below))
        return self.heads(tensor)

    def allowed(self, tile: Tile) -> Tensor | None:
        j0, j1 = tile[0], min(tile[1], self.problem.S)
        allowed = self.problem.allowed_tile(self.i0, self.i1, j0, j1)
        if allowed is None and (self.above or self.below or j1 < tile[1]):
            allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.problem.device)
        return None if allowed is None else self.fit(allowed, tile)

    def keep(self, seed: Tensor, tile: Tile) -> Tensor:
        G = self.problem.G
        i0, i1 = self.i0 - self.above, self.i1 + self.below
        heads = slice(self.g.start * G, self.g.stop * G)
        keep = keep_tile(self.problem, seed, self.b, heads, i0, i1, *tile)
        return keep.unflatten(1, (-1, G))

    def scores(
        self, q: Tensor, k: Tensor, tile: Tile, allowed: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Step 1: s_ij (b, g, G, rows, keys), and tanh(s / softcap) where there is a softcap."""
        softcap = self.problem.softcap
        s, tanh = times(q, k.mT, self.problem.scale), None
        if softcap is not None:
            tanh = s.div_(softcap).tanh_()
            s = tanh * softcap
        added = self.problem.bias_tile(self.i0, self.i1, tile[0], min(tile[1], self.problem.S))
        if added is not None:
            s += self.fit(added, tile)
        if allowed is not None:
            s.masked_fill_(~allowed, -math.inf)
        return s, tanh

    def crop(self, tensor: Tensor, tile: Tile) -> tuple[Tensor, Tile]:
        """(..., rows, keys) of whole tiles -> what is of the call, and its keys."""
        j1 = min(tile[1], self.problem.S)
        rows = slice(self.above, tensor.shape[-2] - self.below)
        return tensor[..., rows, : j1 - tile[0]], (tile[0], j1)

    def put_rows(self, whole: Tensor, part: Tensor, add: bool = False) -> None:
        """Write (b, g, G, rows, n) of whole tiles to its place in (B, H, L, n), or add it there."""
        place = self.heads(whole)[..., self.i0 : self.i1, :]
        part = part[..., self.above : part.shape[-2] - self.below, :]
        _ = place.add_(part) if add else place.copy_(part)

    def add_keys(self, whole: Tensor, part: Tensor, tile: Tile) -> None:
        """Add (b, g, keys, n) of a whole tile to its place in (B, Hkv, S, n)."""
        j1 = min(tile[1], self.problem.S)
        whole[self.b, self.g, tile[0] : j1] += part[:, :, : j1 - tile[0]]

    def sinks(self, sinks: Tensor) -> Tensor:
        """(H,) -> (1, g, G, 1, 1) in the compute dtype."""
        return self.heads(sinks.to(self.problem.compute_dtype)[None, :, None, None])


def cut_into_blocks(problem: Problem) -> Iterator[Block]:
    """Blocks whose scores fit BLOCK; rows that can see no key are left out."""
    p = problem
    if min(p.B, p.H, p.L, p.S) == 0:
        return
    ranges = p.visibility.key_ranges(p.device)
    first, end = ranges[0].amin(0).tolist(), ranges[1].amax(0).tolist()
    # How many keys a row can see bounds its block: a window needs no room for the rest.
    width = max(1, max(e - f for f, e in zip(first, end, strict=True)))
    per_head = p.G * width * min(p.L, MIN_ROWS)
    heads = min(p.Hkv, max(1, BLOCK // per_head))
    batch = min(p.B, max(1, BLOCK // (per_head * p.Hkv))) if heads == p.Hkv else 1
    rows = max(MIN_ROWS, BLOCK // (batch * heads * p.G * width))
    if width < p.S:  # a block of many rows would see many windows, most of it blocked
        rows = min(rows, max(2 * MIN_ROWS, width // 4))
    rows = TILE_ROWS if p.deterministic else rows

    i0 = 0
    while i0 < p.L:
        above = (i0 + p.S - p.L) % TILE_ROWS if p.deterministic else 0
        i1 = min(p.L, i0 + rows - above)
        j0, j1 = min(first[i0:i1]), max(end[i0:i1])
        tiles, below = [(j0, j1)], 0
        if p.deterministic:
            j0 -= j0 % TILE_KEYS
            tiles = [(j, j + TILE_KEYS) for j in range(j0, j1, TILE_KEYS)]
            below = rows - above - (i1 - i0)
        if j0 < j1:
            for b in range(0, p.B, batch):
                for g in range(0, p.Hkv, heads):
                    b_, g_ = slice(b, min(b + batch, p.B)), slice(g, min(g + heads, p.Hkv))
                    yield Block(p, b_, g_, i0, i1, tiles, above, below)
        i0 = i1


def times(rows: Tensor, matrix: Tensor, scale: float = 1.0) -> Tensor:
    """scale * (b, g, G, r, n) @ (b, g, n, c): the rows of a group in one product."""
    b, g, G, r, n = rows.shape
    rows, matrix = rows.reshape(b * g, G * r, n), matrix.flatten(0, 1)
    unused = rows.new_empty(1, 1, 1)
    product = torch.baddbmm(unused, rows, matrix, beta=0, alpha=scale)
    return product.view(b, g, G, r, matrix.shape[-1])


def times_across(left: Tensor, right: Tensor) -> Tensor:
    """(b, g, G, r, c)^T @ (b, g, G, r, n) -> (b, g, c, n), summed over the rows of a group."""
    return left.flatten(2, 3).mT @ right.flatten(2, 3)


def inert(product: Callable, left: Tensor, x: Tensor, see: Tensor | None) -> Tensor:
    """product(left, x), in which NaN and Inf in x reach only what may see them.

    see is None where all of x is known to be tame, else as left: 1 where visible, 0 where not.
    left is exactly 0 where blocked, so there is only 0 * NaN and 0 * Inf to keep out.
    """
    if see is None:
        return product(left, x)
    return product(left, torch.where(x.isfinite(), x, 0)) + spoil(product, see, x)


def seen(allowed: Tensor | None, like: Tensor) -> Tensor:
    """`allowed` as the factor of `inert`: numbers in the shape of a block of scores."""
    return torch.ones_like(like) if allowed is None else allowed.to(like.dtype).expand_as(like)


def spoil(product: Callable, see: Tensor, x: Tensor) -> Tensor:
    """What the NaN and Inf in x do to those that see them (1 where seen): 0, NaN, Inf or -Inf."""
    nan = product(see, x.isnan().to(x.dtype))
    high = product(see, (x == math.inf).to(x.dtype))
    low = product(see, (x == -math.inf).to(x.dtype))
    infinite = torch.where(high > 0, math.inf, 0.0) - torch.where(low > 0, math.inf, 0.0)
    return torch.where(nan > 0, math.nan, infinite.to(x.dtype))


def keep_tile(
    problem: Problem, seed: Tensor, b: slice, h: slice, i0: int, i1: int, j0: int, j1: int
) -> Tensor:
    """Which weights survive, bool (b, h, i1 - i0, j1 - j0): a hash of (seed, head, row, key).

    It is the same in whatever blocks it is asked for, so the backward asks again.
    """
    heads = torch.arange(problem.H, device=problem.device)[h]
    rows = torch.arange(i0, i1, device=problem.device)
    keys = torch.arange(j0, j1, device=problem.device)
    state = _mix(seed[b, None] ^ _mix(heads + 1))
    state = _mix(state[..., None] + _mix(rows + 0x51ED27))
    state = _mix(state[..., None] ^ _mix(keys + 0x2F0B43))
    return state >= int(problem.dropout_p * 2**32)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (the multipliers of Wellons' lowbias32), kept in int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def survivors_scale(dropout_p: float) -> float:
    return 1 / (1 - dropout_p) if dropout_p < 1 else 0.0

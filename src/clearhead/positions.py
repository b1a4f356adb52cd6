"""Positions inside attention. ALiBi lives here; rotary embeddings join it in a later version."""

import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of ALiBi, one per head, (H,) float32: 2^(-8/H), 2^(-16/H), ... for a power of two.

    For another H: the slopes of the power of two P below it, then every other slope of 2 P.
    Source: Press, Smith, Lewis 2022, section 3, and its reference code for other head counts.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """

    def geometric(n: int) -> list[float]:
        return [2 ** (-8 * (h + 1) / n) for h in range(n)]

    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads is {num_heads}; it must be 1 or more")
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = geometric(power) + geometric(2 * power)[::2][: num_heads - power]
    return torch.tensor(slopes, device=device)

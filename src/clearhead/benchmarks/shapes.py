"""What is measured: calls and layers with the shapes of real models."""

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = (
    "prefill", "chunked prefill", "decode", "window", "padding", "packed", "mask", "weights",
    "statistics", "deterministic", "layer", "lengths", "heads",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kind of call, or of layer (kind "layer" and "heads": projections and all).

    Attributes:
        H, L, D: query heads, query rows, head size. B: batch. Hkv: key/value heads, 0 for H.
        S: keys, 0 for L. causal: aligned to the lower right. window: keys that a row sees, its own
            one counted, 0 for all. padded: the batch holds sequences from L / 4 to L keys.
        packed: number of sequences behind each other in L rows, 0 for none.
        mask: an additive float mask (1, 1, L, S).
    """

    name: str
    kind: str
    H: int
    L: int
    D: int
    B: int = 1
    Hkv: int = 0
    S: int = 0
    causal: bool = False
    window: int = 0
    padded: bool = False
    packed: int = 0
    mask: bool = False

    @property
    def kv_heads(self) -> int:
        return self.Hkv or self.H

    @property
    def keys(self) -> int:
        return self.S or self.L

    @property
    def is_layer(self) -> bool:
        return self.kind in ("layer", "heads")

    @property
    def rule(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def shape(self) -> str:
        heads = f"{self.H}/{self.Hkv}" if self.Hkv else f"{self.H}"
        length = f"{self.L}" if self.keys == self.L else f"{self.L} of {self.keys}"
        return f"{self.B} x {heads} x {length} x {self.D}"

    def lengths(self) -> Tensor:
        """Keys that are there in each sequence of the batch, (B,); all S if nothing is padded."""
        if not self.padded:
            return torch.full((self.B,), self.keys)
        return torch.linspace(self.keys // 4, self.keys, self.B).long()

    def offsets(self) -> Tensor:
        """Where packed sequences start and end, (packed + 1,): each one is longer than the last."""
        shares = torch.arange(1, self.packed + 1).cumsum(0)
        inner = shares * self.L // int(shares[-1])
        return torch.cat([torch.zeros(1, dtype=torch.long), inner])

    def pairs(self) -> int:
        """Pairs (i, j) that are visible, over the batch and one head: what the arithmetic needs."""
        if self.packed:
            rows = self.offsets().diff()
            return int((rows * (rows + 1) // 2 if self.causal else rows**2).sum())
        own = torch.arange(self.L) + self.keys - self.L
        ends = (own + 1 if self.causal else torch.full_like(own, self.keys))[None]
        ends = ends.minimum(self.lengths()[:, None])
        firsts = (own - self.window + 1).clamp(0) if self.window else torch.zeros_like(own)
        return int((ends - firsts[None]).clamp(0).sum())

    def flops(self) -> int:
        """Of q . k and of p . v, a multiplication and an addition counted as two."""
        return 4 * self.D * self.H * self.pairs()


def _llama(name: str, kind: str, L: int, S: int = 0, Hkv: int = 8) -> Case:
    return Case(name, kind, H=32, L=L, D=128, Hkv=Hkv, S=S, causal=True)


def _twelve(
    name: str,
    L: int,
    causal: bool,
    B: int = 1,
    kind: str = "prefill",
    window: int = 0,
    packed: int = 0,
) -> Case:
    return Case(name, kind, 12, L, 64, B, causal=causal, window=window, packed=packed)


CASES = (
    _twelve("12 heads, 64 tokens", 64, True),
    Case("SmolLM2-135M prompt", "prefill", H=9, L=128, D=64, Hkv=3, causal=True),
    _twelve("BERT-base batch", 128, False, B=8),
    _twelve("GPT-2 batch", 128, True, B=8),
    _twelve("ViT-B batch", 197, False, B=8),
    _twelve("BERT-base", 512, False),
    _twelve("GPT-2 prompt", 512, True),
    _twelve("GPT-2 context", 1024, True),
    _twelve("Whisper-small encoder", 1500, False),
    _twelve("12 heads, 1024 tokens", 1024, False),
    _twelve("12 heads, 2048 tokens", 2048, True),
    _twelve("12 heads, 2048 tokens", 2048, False),
    _twelve("12 heads, 4096 tokens", 4096, True),
    _twelve("12 heads, 4096 tokens", 4096, False),
    Case("Qwen3-0.6B prompt", "prefill", H=16, L=1024, D=128, Hkv=8, causal=True),
    Case("12 heads of size 128", "prefill", H=12, L=2048, D=128, causal=True),
    _llama("Llama-3-8B prompt", "prefill", 2048),
    _llama("Llama-3-8B, last 512 of a prompt", "chunked prefill", 512, 2048),
    _llama("Llama-3-8B token, 1024 keys", "decode", 1, 1024),
    _llama("Llama-3-8B token, 4096 keys", "decode", 1, 4096),
    _llama("Llama-3-8B token, 16384 keys", "decode", 1, 16384),
    _llama("Llama-2-7B token, 4096 keys", "decode", 1, 4096, Hkv=32),
    Case("SmolLM2-135M token, 1024 keys", "decode", H=9, L=1, D=64, Hkv=3, S=1024, causal=True),
    Case("Whisper-small decoder token", "decode", H=12, L=1, D=64, S=1500),
    _twelve("12 heads, window of 256", 4096, True, kind="window", window=256),
    Case("Gemma-3-1B window layer", "window", H=4, L=4096, D=256, Hkv=1, causal=True, window=512),
    Case("BERT-base batch, padded", "padding", H=12, L=512, D=64, B=8, padded=True),
    _twelve("GPT-2, 8 sequences packed", 2048, True, kind="packed", packed=8),
    Case("12 heads, additive mask", "mask", H=12, L=1024, D=64, mask=True),
    _twelve("GPT-2 prompt, weights", 512, True, kind="weights"),
    _twelve("GPT-2 prompt, statistics", 512, True, kind="statistics"),
    _twelve("12 heads, 2048 tokens, statistics", 2048, True, kind="statistics"),
    _llama("Llama-3-8B, last 512, deterministic", "deterministic", 512, 2048),
    _llama("Llama-3-8B token, deterministic", "deterministic", 1, 4096),
    _twelve("BERT-base layer", 128, False, B=8, kind="layer"),
    _twelve("GPT-2 layer", 1024, True, kind="layer"),
)

# How time grows with the length, and with the number of heads.
GROWTH = (
    *(_twelve(f"12 heads, {L} tokens", L, True, kind="lengths")
      for L in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
    *(Case(f"{H} heads, 512 tokens", "heads", H=H, L=512, D=64, causal=True)
      for H in (1, 2, 4, 8, 16, 32)),
)  # fmt: skip

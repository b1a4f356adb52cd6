"""How much faster the native kernels are than torch's fused attention, on this machine, now.

    python benchmarks/run.py [--threads N] [--seconds S] [words of the names of cases]

Each case is first held to torch's own answer in float64 arithmetic. Then both run in turn, theirs
right after ours, and the figure is the median of the ratios torch's time / ours, with the quartiles
beside it: above 1 is faster. What else runs on the machine disturbs the times, but both alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from clearhead import attention, explain

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Shape:
    """One kind of call; S defaults to L, Hkv to H."""

    name: str
    B: int = 1
    H: int = 12
    L: int = 1024
    D: int = 64
    Hkv: int = 0
    rules: Callable[["Shape"], dict[str, Any]] = field(default=lambda shape: {})


def _causal(shape: Shape) -> dict[str, Any]:
    return {"is_causal": True}


def _padding(shape: Shape) -> dict[str, Any]:
    lengths = torch.linspace(shape.L // 4, shape.L, shape.B).long()
    return {"key_mask": torch.arange(shape.L) < lengths[:, None]}


SHAPES = (
    Shape("tiny, causal", L=64, rules=_causal),
    Shape("SmolLM2 prompt, grouped heads, causal", H=9, Hkv=3, L=128, rules=_causal),
    Shape("BERT-base batch, full", B=8, L=128),
    Shape("GPT-2 batch, causal", B=8, L=128, rules=_causal),
    Shape("ViT-B batch, full", B=8, L=197),
    Shape("BERT-base, full", L=512),
    Shape("BERT-base batch, key padding", B=8, L=512, rules=_padding),
    Shape("GPT-2 prompt, causal", L=512, rules=_causal),
    Shape("GPT-2 context, causal", L=1024, rules=_causal),
    Shape("additive mask (1, 1, L, L)", rules=lambda s: {"attn_mask": torch.randn(1, 1, s.L, s.L)}),
    Shape("long, causal", L=2048, rules=_causal),
    Shape("long, full", L=2048),
    Shape("longer, causal", L=4096, rules=_causal),
    Shape("longer, full", L=4096),
    Shape("head size 128, causal", L=2048, D=128, rules=_causal),
    Shape("Llama-3-8B layer, causal", H=32, Hkv=8, L=2048, D=128, rules=_causal),
    Shape("window of 256 keys", L=4096, rules=lambda s: {"window": (255, 0)}),
)


def calls(shape: Shape, dtype: torch.dtype) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Ours and torch's for the same numbers, checked against each other."""
    rules = {
        name: rule.to(dtype) if isinstance(rule, Tensor) and rule.is_floating_point() else rule
        for name, rule in shape.rules(shape).items()
    }
    heads = shape.Hkv or shape.H
    query = torch.randn(shape.B, shape.H, shape.L, shape.D, dtype=dtype)
    key, value = torch.randn(2, shape.B, heads, shape.L, shape.D, dtype=dtype)
    assert explain(query, key, value, **rules).backend == "native"

    theirs: dict[str, Any] = {"enable_gqa": heads != shape.H}
    if "window" in rules:
        i, j = torch.arange(shape.L)[:, None], torch.arange(shape.L)
        theirs["attn_mask"] = (j <= i) & (j >= i - rules["window"][0])
    elif "key_mask" in rules:
        theirs["attn_mask"] = rules["key_mask"][:, None, None]
    else:
        theirs |= rules

    def run_ours() -> Tensor:
        return attention(query, key, value, **rules)

    def run_theirs() -> Tensor:
        return scaled_dot_product_attention(query, key, value, **theirs)

    last = slice(-64, None)  # rows enough to see a mistake, few enough for float64
    mask = theirs.get("attn_mask")
    if mask is None and theirs.get("is_causal"):
        mask = torch.ones(shape.L, shape.L, dtype=torch.bool).tril()
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., last, :]
    if mask is not None and mask.is_floating_point():
        mask = mask.double()
    gold = scaled_dot_product_attention(
        query[:, :, last].double(), key.double(), value.double(), mask,
        enable_gqa=heads != shape.H,
    )  # fmt: skip
    errors = [float((run()[:, :, last] - gold).abs().max()) for run in (run_ours, run_theirs)]
    allowed = 1.5 * errors[1] + torch.finfo(dtype).eps * float(gold.abs().max())
    if not errors[0] <= allowed:
        raise SystemExit(f"{shape.name}, {dtype}: error {errors[0]:.2g}, torch's {errors[1]:.2g}")
    return run_ours, run_theirs


def ratios(ours: Callable, theirs: Callable, seconds: float) -> list[float]:
    found = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 7:
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        theirs()
        found.append((time.perf_counter() - middle) / (middle - start))
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="only cases whose name holds one of these")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="per case and dtype")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    x = torch.ones(1, 1, 64, 64)
    print(f"{explain(x, x, x).how}; torch {torch.__version__}; median of torch's time / ours\n")
    print("| case | B x H (Hkv) x L x D | " + " | ".join(str(d)[6:] for d in DTYPES) + " |")
    print("|---|---|" + "---|" * len(DTYPES))
    for shape in SHAPES:
        if options.names and not any(name in shape.name for name in options.names):
            continue
        heads = f"{shape.H} ({shape.Hkv})" if shape.Hkv else f"{shape.H}"
        row = [shape.name, f"{shape.B} x {heads} x {shape.L} x {shape.D}"]
        for dtype in DTYPES:
            low, median, high = statistics.quantiles(
                ratios(*calls(shape, dtype), options.seconds), n=4
            )
            row.append(f"{median:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()

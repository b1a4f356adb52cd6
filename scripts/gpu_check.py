"""Hold every backend that serves on this CUDA device to the definition, and print it as one table.

    python scripts/gpu_check.py [--dtype float32 --dtype bfloat16] [--no-times]

For each case of clearhead.testing.CASES and each backend that claims it: the share of the error
budget that output and gradients used (1.00 is the limit). Then, at real models' sizes, chunked's
time over each backend's, measured alternately in this one run. Exits 1 if anything is over its
budget or raises although explain() said that it would serve, 3 if there is no device.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from clearhead import attention, explain
from clearhead.backends import BACKENDS
from clearhead.testing import CASES, Case, check, check_statistics

# FlexAttention wants head sizes of 16 and more; the table's are small, so these grow with it.
REAL = {
    "Llama 3 8B layer, causal": (1, 32, 8, 4096, 128, {"is_causal": True}),
    "Llama 3 8B layer, window 1024": (
        1,
        32,
        8,
        4096,
        128,
        {"is_causal": True, "window": (1023, 0)},
    ),
    "BERT base, padded": (32, 12, 12, 512, 64, {"key_mask": "padded"}),
    "packed documents": (1, 16, 16, 8192, 64, {"is_causal": True, "documents": "packed"}),
    "softcap": (1, 16, 8, 4096, 128, {"is_causal": True, "softcap": 50.0}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--no-times", action="store_true", help="only the errors")
    options = parser.parse_args()
    console = Console()
    if not torch.cuda.is_available():
        console.print("gpu_check: there is no CUDA device here, so nothing was checked")
        return 3
    # Budgets are those of full float32; TensorFloat-32 would be another arithmetic.
    torch.backends.cuda.matmul.allow_tf32 = False
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failures = 0
    for name in options.dtype or ["float32", "bfloat16"]:
        failures += errors(console, getattr(torch, name))
    if not options.no_times:
        times(console)
    console.print(f"{failures} failures")
    return 1 if failures else 0


def errors(console: Console, dtype: torch.dtype) -> int:
    """One row per case, one column per backend: the largest share of its budget, or why not."""
    table = Table(title=f"share of the error budget, {dtype}")
    table.add_column("case")
    for name in BACKENDS:
        table.add_column(name, justify="right")
    failures = 0
    for case in CASES:
        row = []
        for backend in BACKENDS:
            tried = wider(case) if backend == "flex" and case.D and case.Dv else case
            row.append(entry(tried, backend, dtype))
            failures += row[-1].startswith("FAIL")
        table.add_row(case.name, *row)
    console.print(table)
    return failures


def wider(case: Case) -> Case:
    return replace(case, D=max(case.D, 16), Dv=max(case.Dv, 16))


def entry(case: Case, backend: str, dtype: torch.dtype) -> str:
    """The largest share, with gradients where the backend has them; "-" where it does not serve."""
    for gradients in (True, False):
        if not claims(case, backend, dtype, gradients):
            continue
        aux = backend == "chunked"
        try:
            report = check(case, dtype=dtype, device="cuda", backend=backend, gradients=gradients,
                           aux=aux)  # fmt: skip
            report |= check_statistics(case, dtype=dtype, device="cuda", backend=backend)
        except Exception as error:  # a table of all failures says more than the first of them
            return f"FAIL {type(error).__name__}: {str(error).splitlines()[0][:60]}"
        return f"{max(report.values()):.2f}" + ("" if gradients else " forward")
    return "-"


def claims(case: Case, backend: str, dtype: torch.dtype, gradients: bool) -> bool:
    query, key, value, rules = case.make(dtype)
    moved = {name: to_cuda(rule, gradients) for name, rule in rules.items()}
    inputs = (to_cuda(t, gradients) for t in (query, key, value))
    return explain(*inputs, **moved, backend=backend).backend is not None


def to_cuda(value, gradients: bool):
    if isinstance(value, tuple):
        return tuple(to_cuda(v, gradients) for v in value)
    if not isinstance(value, Tensor):
        return value
    return value.cuda().requires_grad_(gradients and value.is_floating_point())


def times(console: Console) -> None:
    """Forward and backward at real sizes in bfloat16: chunked's time over each backend's."""
    table = Table(title="chunked's time / this backend's, forward + backward, bfloat16")
    table.add_column("call")
    for name in BACKENDS:
        table.add_column(name, justify="right")
    table.add_column("auto picks")
    for label, (B, H, Hkv, L, D, rules) in REAL.items():
        query = torch.randn(B, H, L, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        key, value = (
            torch.randn(B, Hkv, L, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(2)
        )
        filled = {name: fill(rule, B, L) for name, rule in rules.items()}
        serving = [b for b in BACKENDS if explain(query, key, value, **filled, backend=b).backend]
        measured: dict[str, list[float]] = {b: [] for b in serving}
        for _ in range(5):
            for backend in serving:
                measured[backend].append(once(backend, query, key, value, filled))
        medians = {b: statistics.median(t[1:]) for b, t in measured.items()}
        ratios = [
            f"{medians['chunked'] / medians[b]:.2f}" if b in medians else "-" for b in BACKENDS
        ]
        chosen = explain(query, key, value, **filled).backend
        fastest = min(medians, key=medians.__getitem__)
        note = "" if chosen == fastest else f" (fastest: {fastest})"
        table.add_row(label, *ratios, f"{chosen}{note}")
    console.print(table)


def fill(rule, B: int, L: int):
    if rule == "padded":
        return (
            torch.arange(L, device="cuda")[None]
            < torch.linspace(L // 4, L, B, device="cuda")[:, None]
        )
    if rule == "packed":
        return (torch.arange(L, device="cuda")[None] // 1000).expand(B, L)
    return rule


def once(backend: str, query: Tensor, key: Tensor, value: Tensor, rules: dict) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = attention(query, key, value, **rules, backend=backend)
    torch.autograd.grad(out.sum(), (query, key, value))
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())

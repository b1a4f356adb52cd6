"""Ratios of alternating runs, what the machine can do at best, and peak memory."""

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

FEWEST = 5  # pairs of runs for one ratio


class Ratio(NamedTuple):
    """Their time / ours over `pairs` pairs, quartiles and median: above 1 ours is faster."""

    low: float
    median: float
    high: float
    pairs: int


def alternate(
    ours: Callable[[], object], theirs: Callable[[], object], seconds: float
) -> tuple[Ratio, float]:
    """The ratio, and the median of our own times in seconds."""
    ratios: list[float] = []
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(ratios) < FEWEST or time.perf_counter() < end:
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        theirs()
        ratios.append((time.perf_counter() - middle) / (middle - start))
        times.append(middle - start)
    low, median, high = statistics.quantiles(ratios, n=4)
    return Ratio(low, median, high, len(ratios)), statistics.median(times)


def gemm_flops(dtype: torch.dtype, seconds: float = 0.5) -> float:
    """The most that torch's matrix product does a second here, counted as in `Case.flops`."""
    n = 1024
    a, b, out = torch.randn(3, n, n).to(dtype)
    return 2 * n**3 / _fastest(lambda: torch.mm(a, b, out=out), seconds)


def read_bytes(seconds: float = 0.5) -> float:
    """The most that torch reads of memory a second here: a sum over more than the caches hold."""
    x = torch.ones(64 << 20)
    return x.nbytes / _fastest(lambda: x.sum(), seconds)


def _fastest(run: Callable[[], object], seconds: float) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def peak_mb(run: Callable[[], object]) -> float | None:
    """MB that a run needs at its peak over what is held before; None where Linux does not tell."""
    if sys.platform != "linux":
        return None
    run()  # what is loaded once, and workspaces that are kept
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        return None
    before = _status("VmRSS")
    run()
    return max(_status("VmHWM") - before, 0) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

"""Right first, then timed: one Row for each case, dtype and number of threads."""

import dataclasses
import importlib.metadata
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..explanation import explain
from ..testing import assert_within_budget, plain
from ..textbook import attention_by_definition
from . import peers
from .measure import Ratio, alternate, gemm_flops, peak_mb, read_bytes
from .shapes import Case

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# A decoding step reads far more than it computes.
FEW_ROWS = 8


@dataclass
class Row:
    """What was measured of one case.

    Attributes:
        backend: what `explain` says of the call. error: share of the budget of
            `clearhead.testing` that our worst element used. seconds: median of our times.
        share: of the machine's own matrix product (bound "gemm"), in the case's dtype or in float32
            where that is faster, or of its fastest reading (bound "memory").
        ratios: their time / ours, by peer. mb: peak memory over the inputs, likewise.
        reasons: why a peer has no ratio.
    """

    case: Case
    dtype: str
    threads: int
    backend: str = ""
    error: float = math.nan
    seconds: float = math.nan
    share: float = math.nan
    bound: str = "gemm"
    ratios: dict[str, Ratio] = field(default_factory=dict)
    mb: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What makes a row of two files the same."""
        case = self.case
        return f"{case.kind}, {case.rule}: {case.name}, {case.shape}, {self.dtype}, {self.threads}"


def machine(dtypes: Sequence[torch.dtype]) -> dict[str, Any]:
    """What the figures were measured on, and which kernels served these dtypes."""
    served: dict[str, list[str]] = {}
    for dtype in dtypes:
        x = torch.ones(1, 1, 64, 64, dtype=dtype)
        served.setdefault(explain(x, x, x).how, []).append(str(dtype).removeprefix("torch."))
    apart = len(served) > 1
    return {
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "clearhead": _version(),
        "native": "; ".join(
            f"{' and '.join(names)}: {how}" if apart else how for how, names in served.items()
        ),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("clearhead")
    except importlib.metadata.PackageNotFoundError:
        return "a checkout that is not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@torch.inference_mode()
def measure(
    cases: Sequence[Case],
    *,
    dtypes: Sequence[str] = tuple(DTYPES),
    threads: Sequence[int] = (),
    names: Sequence[str] = peers.DEFAULT,
    seconds: float = 2.0,
    memory: bool = True,
    on_start: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Iterator[Row]:
    """Yield the rows, each as soon as it is there.

    Args:
        dtypes: keys of DTYPES. threads: numbers of threads, torch's present one by default.
        names: peers, of `peers.ALL`. seconds: for each pair of ours and a peer.
        memory: whether to measure the peak memory of each.
        on_start: told what comes next, the number done, and the number in all.
    Raises:
        AssertionError: ours, or a peer, is not right: then there is nothing to compare.
    """
    before = torch.get_num_threads()
    plan = [(n, dtype, case) for n in (threads or (before,)) for dtype in dtypes for case in cases]
    peaks: dict[tuple[int, str], tuple[float, float]] = {}
    try:
        for done, (n, dtype, case) in enumerate(plan):
            on_start(f"{case.name}, {dtype}", done, len(plan))
            torch.set_num_threads(n)
            torch.manual_seed(0)
            if (n, dtype) not in peaks:
                products = {torch.float32, DTYPES[dtype]}
                peaks[n, dtype] = max(map(gemm_flops, products)), read_bytes()
            yield _row(Row(case, dtype, n), names, seconds, memory, *peaks[n, dtype])
    finally:
        torch.set_num_threads(before)


def _row(
    row: Row, names: Sequence[str], seconds: float, memory: bool, gemm: float, read: float
) -> Row:
    case, dtype = row.case, DTYPES[row.dtype]
    subject: Any
    table: dict[str, Callable[[Any], peers.Run]]
    if case.is_layer:
        subject, table = peers.Layer(case, dtype), dict(peers.LAYER_PEERS)
        ours = peers.clearhead_layer(subject)
        row.error = _check_layer(subject, ours)
    else:
        subject, table = peers.Call(case, dtype), dict(peers.CALL_PEERS)
        ours = peers.clearhead_call(subject)
        row.error = _check_call(subject, ours)
        said = explain(subject.query, subject.key, subject.value, **subject.rules)
        row.backend = said.backend or ""
    reference, times = ours(), []
    for name in (name for name in table if name in names):
        try:
            theirs = table[name](subject)
            if not (case.is_layer and name == "x-transformers"):  # that one has its own weights
                _check_peer(theirs(), reference, f"{case.name}: {name}")
        except (NotImplementedError, RuntimeError) as reason:
            row.reasons[name] = " ".join(str(reason).split())[:200]
            continue
        row.ratios[name], ours_seconds = alternate(ours, theirs, seconds)
        times.append(ours_seconds)
        if memory:
            row.mb[name] = peak_mb(theirs)
    if not times:
        times.append(alternate(ours, ours, seconds)[1])
    if memory:
        row.mb["clearhead"] = peak_mb(ours)
    row.seconds = min(times)
    if case.L <= FEW_ROWS:
        bytes_read = 2 * case.B * case.kv_heads * case.keys * case.D * dtype.itemsize
        row.bound, row.share = "memory", bytes_read / row.seconds / read
    else:
        flops = case.flops()
        if case.is_layer:
            flops += 4 * 2 * case.B * case.L * (case.H * case.D) ** 2
        row.share = flops / row.seconds / gemm
    return row


# -- right first -----------------------------------------------------------------------------------


def _check_call(call: peers.Call, ours: peers.Run) -> float:
    """Hold the last rows to the definition: enough to see a mistake, few enough for its loop."""
    case, out, rules = call.case, ours(), dict(call.rules)
    if case.packed:
        first, last = case.offsets().tolist()[-2:]
        query, key, value = (t[:, :, first:last] for t in (call.query, call.key, call.value))
        out = out[first:last].transpose(0, 1)[None]
    else:
        query, key, value = call.query, call.key, call.value
    n = max(1, min(query.shape[2], 1024 // (case.B * case.H)))
    if "attn_mask" in rules:
        rules["attn_mask"] = rules["attn_mask"][..., -n:, :]
    query, out = query[:, :, -n:], out[:, :, -n:]
    gold = attention_by_definition(query, key, value, **rules)
    assert isinstance(gold, Tensor)
    honest = plain(query, key, value, **rules)[0]
    return assert_within_budget(out, gold, honest, name=f"{case.name}, {call.dtype}")


def _check_layer(layer: peers.Layer, ours: peers.Run) -> float:
    """Hold a layer to the textbook's efficient form in float64."""
    gold = peers.heads_stitched(layer, torch.float64)()
    honest = peers.heads_stitched(layer)()
    return assert_within_budget(ours(), gold, honest, name=f"{layer.case.name}, {layer.dtype}")


def _check_peer(theirs: Tensor, ours: Tensor, name: str) -> None:
    """A ratio means something only if both computed the same; their rounding is their own."""
    tolerance = 1e-4 if ours.dtype == torch.float32 else 5e-2
    torch.testing.assert_close(
        theirs, ours, atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}"
    )


# -- as plain data ---------------------------------------------------------------------------------


def to_plain(rows: Sequence[Row], about: dict[str, Any]) -> dict[str, Any]:
    """What a JSON file of results holds."""
    return {"machine": about, "rows": [{"key": row.key, **dataclasses.asdict(row)} for row in rows]}


def from_plain(data: Any) -> list[Row]:
    """The rows of such a file.

    Raises:
        ValueError: it is no file of results.
    """
    try:
        rows = []
        for found in data["rows"]:
            fields = {name: value for name, value in found.items() if name != "key"}
            fields["case"] = Case(**fields["case"])
            fields["ratios"] = {name: Ratio(*r) for name, r in fields["ratios"].items()}
            rows.append(Row(**fields))
        return rows
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the file holds no results of `clearhead bench --json` ({error!r})"
        ) from None

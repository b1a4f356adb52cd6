"""A PNG of the results: bars for the cases, and lines for how time grows."""

from collections.abc import Sequence
from typing import Any

from .report import TITLES
from .run import Row

# Okabe and Ito's colours, which the colour-blind tell apart.
COLOURS = {
    "sdpa": "#0072B2", "flex": "#E69F00", "eager": "#CC79A7", "x-transformers": "#F0E442",
    "without": "#999999", "nn.MultiheadAttention": "#56B4E9", "series": "#D55E00",
    "stitched": "#009E73",
}  # fmt: skip
OURS = "#000000"


def draw(rows: Sequence[Row], about: dict[str, Any], path: str) -> None:
    """Write the chart.

    Raises:
        ImportError: matplotlib is missing. ValueError: there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "a chart needs matplotlib: pip install 'clearhead[plot]', or leave --png out"
        ) from error
    threads = max((row.threads for row in rows), default=0)
    rows = [row for row in rows if row.threads == threads and set(row.ratios) - {"without"}]
    bars = [row for row in rows if row.case.kind not in ("lengths", "heads")]
    growth = {kind: [r for r in rows if r.case.kind == kind] for kind in ("lengths", "heads")}
    growth = {kind: found for kind, found in growth.items() if found}
    if not rows:
        raise ValueError("there is nothing to draw: no case was timed beside a peer")

    names = list(dict.fromkeys(map(_label, bars)))
    tall = 0.3 * len(names) + 1 if names else 0
    figure = Figure(figsize=(9, tall + 3.6 * bool(growth) + 0.6), layout="constrained")
    parts = figure.subfigures(
        bool(names) + bool(growth), 1, squeeze=False,
        height_ratios=[h for h, wanted in ((tall, names), (3.6, growth)) if wanted],
    )[:, 0]  # fmt: skip
    if names:
        dtypes = list(dict.fromkeys(row.dtype for row in bars))
        _bars(parts[0].subplots(1, len(dtypes), sharey=True, squeeze=False)[0], dtypes, bars)
    if growth:
        for axes, (kind, found) in zip(
            parts[-1].subplots(1, len(growth), squeeze=False)[0], growth.items(), strict=True
        ):
            _lines(axes, kind, found)
    figure.suptitle(
        f"{about['processor']}, {threads} thread{'s' * (threads != 1)}, torch {about['torch']}: "
        "a peer's time / clearhead's",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _bars(axes: Any, dtypes: Sequence[str], rows: Sequence[Row]) -> None:
    """One bar for each case, from 1 on: the first of its peers, torch's own if that ran."""
    labels = list(dict.fromkeys(map(_label, rows)))
    for part, dtype in zip(axes, dtypes, strict=True):
        part.set_title(dtype, fontsize=9)
        for row in (r for r in rows if r.dtype == dtype):
            name = next(iter(row.ratios))
            ratio = row.ratios[name]
            y = labels.index(_label(row))
            spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            part.barh(y, ratio.median - 1, left=1, xerr=spread, color=COLOURS[name], height=0.7,
                      error_kw={"elinewidth": 0.8})  # fmt: skip
            part.annotate(f"{ratio.median:.2f} x {TITLES[name]}", (max(ratio.high, 1), y), (3, 0),
                          textcoords="offset points", va="center", fontsize=6)  # fmt: skip
        part.axvline(1, color="0.3", linewidth=0.8)
        part.set_xscale("log")
        low, high = part.get_xlim()
        part.set_xlim(min(low, 0.7), high * 2.5)
        part.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"], fontsize=7)
        part.minorticks_off()
        part.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(labels)), labels, fontsize=6)
    axes[0].set_ylim(len(labels) - 0.4, -0.6)


def _label(row: Row) -> str:
    """What tells a case from the others."""
    return f"{row.case.name}\n{row.case.kind}, {row.case.rule}, {row.case.shape}"


def _lines(axes: Any, kind: str, rows: Sequence[Row]) -> None:
    """Times over the length or the number of heads, both axes logarithmic."""
    rows = [row for row in rows if row.dtype == "float32"] or list(rows)
    x = [row.case.L if kind == "lengths" else row.case.H for row in rows]
    ours = [row.seconds * 1e3 for row in rows]
    axes.plot(x, ours, "o-", color=OURS, label="clearhead", markersize=3)
    for name in dict.fromkeys(name for row in rows for name in row.ratios):
        points = [
            (at, time * row.ratios[name].median)
            for at, time, row in zip(x, ours, rows, strict=True)
            if name in row.ratios
        ]
        axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[name], label=TITLES[name],
                  markersize=3)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x, [str(at) for at in x], fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    title = (
        "12 heads of 64, causal" if kind == "lengths" else "heads of 64, 512 tokens, with layers"
    )
    axes.set_title(f"ms for {title}, {rows[0].dtype}", fontsize=8)
    axes.set_xlabel("tokens" if kind == "lengths" else "heads", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)

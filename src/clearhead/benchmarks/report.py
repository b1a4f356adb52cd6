"""The rows as tables, and two files of results beside each other."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from .accuracy import Errors
from .run import Row

TITLES = {
    "sdpa": "F.sdpa",
    "flex": "flex, compiled",
    "eager": "eager with weights",
    "x-transformers": "x-transformers",
    "without": "ours without asking",
    "nn.MultiheadAttention": "nn.MHA",
    "series": "heads in series",
    "stitched": "stitched, textbook",
}


def heading(about: dict[str, Any]) -> str:
    """What the figures were measured on, in a line."""
    return f"{about['processor']}; {about['native']}; torch {about['torch']}; {about['date']}."


def tables(
    rows: Sequence[Row],
) -> list[tuple[str, list[str], list[tuple[str, str, list[float | None], str, str]]]]:
    """For a terminal: title, names of peers, and rows, for each dtype and number of threads and
    for calls and layers apart, since these have other peers."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        what = "layers" if row.case.is_layer else "calls"
        threads = f"{row.threads} thread{'s' * (row.threads != 1)}"
        groups.setdefault(f"{what}, {row.dtype}, {threads}", []).append(row)
    found = []
    for title, part in groups.items():
        names = [name for name in TITLES if any(name in row.ratios for row in part)]
        lines = []
        for row in part:
            ratios = [row.ratios[n].median if n in row.ratios else None for n in names]
            case, shape, *_, share, mb = cells(row, ())
            lines.append((case, shape, ratios, share, mb))
        found.append((title, [TITLES[name] for name in names], lines))
    return found


def markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """A heading, what it was measured on, and one table for each number of threads."""
    lines = [
        heading(about),
        "Figures are a peer's time / ours, median (quartiles) of alternating runs: above 1 ours is",
        "faster. Share: of torch's own matrix product, in that dtype or in float32 where that is",
        "faster, or, with m, of its fastest reading of memory. MB: peak over the inputs.",
    ]
    for threads in dict.fromkeys(row.threads for row in rows):
        part = [row for row in rows if row.threads == threads]
        lines += ["", f"### {threads} thread{'s' * (threads != 1)}", "", *table(part)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of one table, with a column for each peer that has a figure in it."""
    names = [name for name in TITLES if any(name in row.ratios for row in rows)]
    head = ["case", "B x H x L x D", "dtype", *(TITLES[n] for n in names), "share", "MB"]
    return [_line(head), _line(["---"] * len(head)), *(_line(cells(row, names)) for row in rows)]


def cells(row: Row, names: Sequence[str]) -> list[str]:
    """What a table says of one row."""
    case = row.case
    ratios = (row.ratios.get(name) for name in names)
    mb = row.mb.get("clearhead")
    return [
        f"{case.name} ({case.kind}, {case.rule})",
        case.shape,
        row.dtype,
        *(f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})" if r else "" for r in ratios),
        f"{row.share:.0%}{' m' * (row.bound == 'memory')}",
        "" if mb is None else f"{mb:.0f}",
    ]


def _line(parts: Sequence[str]) -> str:
    return f"| {' | '.join(parts)} |"


class Change(NamedTuple):
    """How a case stands beside a peer, then and now: peer's time / ours. `apart` says that the
    spreads do not overlap."""

    case: str
    shape: str
    dtype: str
    peer: str
    then: float
    now: float
    apart: bool


def changes(rows: Sequence[Row], old: Sequence[Row]) -> list[Change]:
    """Rows that both have, by how much the ratio to the first common peer changed.

    The peers are the yardstick: they ran beside ours both times, so the machine's mood cancels.
    """
    before = {row.key: row for row in old}
    found = []
    for row in rows:
        past = before.get(row.key)
        name = next((n for n in row.ratios if past and n in past.ratios), None)
        if past is None or name is None:
            continue
        then, now = past.ratios[name], row.ratios[name]
        apart = now.low > then.high or now.high < then.low
        case, shape, dtype, *_ = cells(row, ())
        found.append(Change(case, shape, dtype, TITLES[name], then.median, now.median, apart))
    return found


# -- errors ----------------------------------------------------------------------------------------


def how_drawn(errors: Sequence[Errors], spread: float) -> str:
    """How the figures of errors are to be read, in a few sentences."""
    draws = max((e.draws for e in errors), default=0)
    queries = "" if spread == 1 else f", queries {spread:g} times as large"
    return (
        "Error of clearhead / error of F.sdpa on the same numbers, both against float64: below 1 "
        f"clearhead is nearer. {draws} draw{'s' * (draws != 1)} of normal numbers{queries}. Mean: "
        "roots of the mean squares. Worst: the worst element of each draw, averaged over the "
        "draws. Of all: the worst element of all draws, which is one number's chance."
    )


def tables_of_errors(errors: Sequence[Errors]) -> list[tuple[str, list[tuple[str, list[float]]]]]:
    """For a terminal: a title and rows (name, ratios and our own rms) for each dtype and rule."""
    groups: dict[str, list[tuple[str, list[float]]]] = {}
    dtypes = list(dict.fromkeys(e.dtype for e in errors))
    for e in sorted(errors, key=lambda e: (dtypes.index(e.dtype), *e.setting.order)):
        name = f"D {e.setting.D}, {e.setting.S} keys"
        rows = groups.setdefault(f"{e.setting.rule}, {e.dtype}", [])
        rows.append((name, [*e.ratios, e.ours.rms, e.torch.rms]))
    return list(groups.items())


def markdown_of_errors(errors: Sequence[Errors], about: dict[str, Any], spread: float) -> str:
    """What it was measured on, how, and one table for each dtype; its first rows are ranges."""
    lines = [heading(about), *textwrap.wrap(how_drawn(errors, spread), 100)]
    for dtype in dict.fromkeys(e.dtype for e in errors):
        part = sorted((e for e in errors if e.dtype == dtype), key=lambda e: e.setting.order)
        head = ["rule", "D", "keys", "heads x rows", "mean", "worst", "of all", "rms", "F.sdpa's"]
        lines += ["", f"### {dtype}", "", _line(head), _line(["---"] * len(head))]
        for rule in dict.fromkeys(e.setting.rule for e in part):
            ratios = zip(*(e.ratios for e in part if e.setting.rule == rule), strict=True)
            spans = (f"{min(r):.2f} to {max(r):.2f}" for r in ratios)
            lines.append(_line([f"**{rule}**", "all", "all", "", *spans, "", ""]))
        for e in part:
            lines.append(
                _line([e.setting.rule, str(e.setting.D), str(e.setting.S), f"{e.heads} x {e.rows}",
                       *(f"{r:.2f}" for r in e.ratios), f"{e.ours.rms:.1e}", f"{e.torch.rms:.1e}"])
            )  # fmt: skip
    return "\n".join(lines) + "\n"

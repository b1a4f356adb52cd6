"""The results of `clearhead bench` on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .terminal import print_wrapped

WORSE = "red"


def show_results(
    console: Console,
    title: str,
    peers: Sequence[str],
    rows: Sequence[tuple[str, str, Sequence[float | None], str, str]],
) -> None:
    """Print one table: the medians of the ratios, those below 1 in red.

    Args:
        title: what all rows have in common. peers: names of the columns of ratios.
        rows: case, shape, one ratio for each peer (None where there is none), share, MB.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("case", overflow="fold", min_width=16)
    table.add_column("B x H x L x D", overflow="fold", min_width=12)
    for name in (*peers, "share", "MB"):
        table.add_column(name, justify="right", overflow="fold")
    for case, shape, ratios, share, mb in rows:
        shown = ("" if r is None else _ratio(r, worse=r < 1) for r in ratios)
        table.add_row(case, shape, *shown, share, mb)
    console.print(table)


def show_errors(console: Console, title: str, rows: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Print one table of errors, the ratios above 1 in red.

    Args:
        title: what all rows have in common.
        rows: name, the ratios of mean, worst and worst of all, and both means.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for name in ("mean", "worst", "of all", "rms", "F.sdpa's"):
        table.add_column(name, justify="right")
    for name, (*ratios, ours, theirs) in rows:
        shown = (_ratio(r, worse=r > 1) for r in ratios)
        table.add_row(name, *shown, f"{ours:.1e}", f"{theirs:.1e}")
    console.print(table)


def show_changes(
    console: Console, changes: Sequence[tuple[str, str, str, str, float, float, bool]]
) -> None:
    """Print what changed between two runs, as clearhead.benchmarks.report.Change has it: within the
    spread in parentheses, and what fell farther in red."""
    if not changes:
        print_wrapped(console, "No case stands in both files.", indent=0)
        return
    title = "A peer's time / clearhead's, then and now; (within the spread)"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("case", overflow="fold", min_width=16)
    table.add_column("B x H x L x D", overflow="fold", min_width=12)
    for name in ("dtype", "beside"):
        table.add_column(name, overflow="fold")
    for name in ("then", "now", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, shape, dtype, peer, then, now, apart in changes:
        by = f"{now / then - 1:+.0%}"
        change = Text(by if apart else f"({by})", WORSE if apart and now < then else "")
        table.add_row(case, shape, dtype, peer, f"{then:.2f}", f"{now:.2f}", change)
    console.print(table)


def _ratio(ratio: float, worse: bool) -> Text:
    return Text(f"{ratio:.2f}", WORSE if worse else "")


TIMES = (
    "A peer's time / clearhead's, median of alternating runs: above 1 clearhead is faster. "
    "Share: of torch's own matrix product or, with m, of its fastest reading of memory. "
    "MB: peak over the inputs."
)


def show_reading(console: Console, about: str, how: str = TIMES) -> None:
    """How the figures are to be read, and what they were measured on."""
    print_wrapped(console, about, indent=0)
    console.print()
    print_wrapped(console, how, indent=0, style="dim")


def show_lines(console: Console, lines: Sequence[str]) -> None:
    """Lines as they are, cut at the edge of the console."""
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", markup=False, highlight=False)

"""The results of `clearhead bench` on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

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
        shown = (
            "" if r is None else f"{r:.2f}" if r >= 1 else f"[{WORSE}]{r:.2f}[/]" for r in ratios
        )
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
        shown = (f"{r:.2f}" if r <= 1 else f"[{WORSE}]{r:.2f}[/]" for r in ratios)
        table.add_row(name, *shown, f"{ours:.1e}", f"{theirs:.1e}")
    console.print(table)


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

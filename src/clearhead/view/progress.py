"""A bar in the terminal while something takes its time."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .terminal import make_console


@contextlib.contextmanager
def progress_bar(start: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr while something takes its time: progress(what, done, total)."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(start, total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )

"""What `clearhead bench` does with its options."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import accuracy, peers, report, run
from .shapes import CASES, GROWTH, KINDS, Case


class Results(NamedTuple):
    """What a terminal shows: what it was measured on, the tables as `show_results` takes them, and
    what changed since the other file, None if there was none."""

    about: str
    tables: list[tuple[str, list[str], list[tuple[str, str, list[float | None], str, str]]]]
    changes: list[report.Change] | None


class AccuracyResults(NamedTuple):
    """The same of `bench_accuracy`: the machine, how it was drawn, and what `show_errors` takes."""

    about: str
    drawn: str
    tables: list[tuple[str, list[tuple[str, list[float]]]]]


def bench(
    words: Sequence[str],
    *,
    threads: str = "",
    dtypes: str = "",
    names: str = "",
    seconds: float = 2.0,
    growth: bool = False,
    json_path: str | None = None,
    markdown_path: str | None = None,
    png_path: str | None = None,
    compare_path: str | None = None,
    on_start: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Results:
    """Measure, and write the files that were asked for.

    Args:
        words: only cases whose name or kind holds one of these; all without.
        threads, dtypes, names: lists apart by commas; names are peers, or "all". Without dtypes
            those of `run.DTYPES`.

    Raises:
        ValueError: a word, number, dtype, peer or file that does not fit. All that can be known
        before the first case runs is checked before.
    """
    counts = _threads(threads)
    kinds = _among("--dtypes", dtypes, tuple(run.DTYPES)) or list(run.DTYPES)
    chosen = peers.ALL if names == "all" else _among("--peers", names, peers.ALL) or peers.DEFAULT
    if not 0 < seconds <= 600:
        raise ValueError(f"--seconds is {seconds}; it must be above 0 and at most 600")
    cases = select(words, growth)
    old = None
    if compare_path is not None:
        try:
            old = run.from_plain(json.loads(Path(compare_path).read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"--compare {compare_path} cannot be read: {error}") from None
    _check_files(json_path, markdown_path, png_path)
    if png_path is not None:
        import matplotlib  # noqa: F401  a missing one is told before minutes of work

        if Path(png_path).suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--png {png_path} must end in .png, .pdf or .svg")

    about = run.machine([run.DTYPES[kind] for kind in kinds])
    rows = []
    for row in run.measure(
        cases, dtypes=kinds, threads=counts, names=chosen, seconds=seconds, on_start=on_start
    ):
        rows.append(row)
        if json_path is not None:  # after each row: an interrupted run leaves what it has
            _write_json(json_path, run.to_plain(rows, about))
    if markdown_path is not None:
        Path(markdown_path).write_text(report.markdown(rows, about), encoding="utf-8")
    if png_path is not None:
        from .chart import draw

        draw(rows, about, png_path)
    changes = None if old is None else report.changes(rows, old)
    return Results(report.heading(about), report.tables(rows), changes)


def bench_accuracy(
    words: Sequence[str],
    *,
    dtypes: str = "",
    draws: int = accuracy.DRAWS,
    spread: float = 1.0,
    json_path: str | None = None,
    markdown_path: str | None = None,
    on_start: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> AccuracyResults:
    """Measure errors instead of times, and write the files that were asked for.

    Args:
        words: only settings whose name holds one of these; all without.
        dtypes: a list apart by commas; without those of `accuracy.DTYPES`.
        draws, spread: see `accuracy.measure`.

    Raises:
        ValueError: a word, number, dtype or file that does not fit.
    """
    kinds = _among("--dtypes", dtypes, tuple(accuracy.DTYPES)) or list(accuracy.DTYPES)
    if not 1 <= draws <= 100_000:
        raise ValueError(f"--draws is {draws}; it must be at least 1 and at most 100000")
    if not 0 < spread <= 1000:
        raise ValueError(f"--spread is {spread}; it must be above 0 and at most 1000")
    settings = select_settings(words)
    _check_files(json_path, markdown_path)
    about = run.machine([accuracy.DTYPES[kind] for kind in kinds])
    found = []
    for errors in accuracy.measure(
        settings, dtypes=kinds, draws=draws, spread=spread, on_start=on_start
    ):
        found.append(errors)
        if json_path is not None:
            _write_json(json_path, accuracy.to_plain(found, about, spread))
    if markdown_path is not None:
        text = report.markdown_of_errors(found, about, spread)
        Path(markdown_path).write_text(text, encoding="utf-8")
    return AccuracyResults(
        report.heading(about), report.how_drawn(found, spread), report.tables_of_errors(found)
    )


def listing(words: Sequence[str]) -> list[str]:
    """One line for each case that the words choose, those of --growth too."""
    cases = select(words, growth=True)
    return [f"{case.kind:16} {case.name:36} {case.shape}" for case in cases]


def accuracy_listing(words: Sequence[str]) -> list[str]:
    """One line for each setting of `bench_accuracy` that the words choose."""
    return [setting.name for setting in select_settings(words)]


def select_settings(words: Sequence[str]) -> list[accuracy.Setting]:
    """The settings whose name holds one of the words; raises ValueError if there is none."""
    found = [s for s in accuracy.SETTINGS if not words or any(w in s.name for w in words)]
    if not found:
        raise ValueError(
            f"no setting is named like {' or '.join(words)}; --accuracy --list shows them, as "
            f"{accuracy.SETTINGS[0].name!r}"
        )
    return found


def select(words: Sequence[str], growth: bool) -> list[Case]:
    """The cases whose name or kind holds one of the words; those of --growth too where they are of
    that kind, or no other is found. Raises ValueError if there is none."""

    def named(cases: Sequence[Case]) -> list[Case]:
        return [c for c in cases if not words or any(w == c.kind or w in c.name for w in words)]

    growth = growth or bool(set(words) & {"lengths", "heads"})
    found = named([*CASES, *GROWTH] if growth else CASES) or named(GROWTH)
    if not found:
        raise ValueError(
            f"no case is named like {' or '.join(words)}; --list shows them, and their kinds are "
            f"{', '.join(KINDS)}"
        )
    return found


def _check_files(*paths: str | None) -> None:
    for path in paths:
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ValueError(f"{path} is in a folder that does not exist; make it first")
        if path is not None and Path(path).is_dir():
            raise ValueError(f"{path} is a folder; name a file in it")


def _write_json(path: str, data: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _threads(text: str) -> list[int]:
    everything = torch.get_num_threads()
    counts = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part != "all" and (not part.isdecimal() or not 1 <= int(part) <= 1024):
            raise ValueError(f"--threads is {text!r}; it must be whole numbers or all, as in 1,all")
        counts.append(everything if part == "all" else int(part))
    return list(dict.fromkeys(counts)) or [everything]


def _among(option: str, text: str, known: Sequence[str]) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in known:
            raise ValueError(f"{option} names {part!r}; it must be of {', '.join(known)}")
    return parts

"""Matrices, steps of attention and choices of a backend, drawn in a terminal.

Everything is laid out for the width of the console: the heads of a step stand beside each other
where they fit and below each other where they do not, and a matrix that is wider still loses its
middle columns and says so. Colours only repeat what titles and gaps say too, so nothing is lost in
a pipe or under NO_COLOR, both of which rich respects.
"""

import itertools
import math
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

# Blue and teal, then hues that stay apart in the common kinds of colour blindness and are readable
# on black and on white. Heads beyond the last begin again; their titles tell them apart.
HEAD_COLOURS = ("#3b82f6", "#0d9488", "#d97706", "#c0569f", "#8a8a00", "#dc4a3d", "#8b6fd6")

INDENT = 4
GUTTER = "    "
ROW_LABEL_LIMIT = 12
COLUMN_LABEL_LIMIT = 8  # a column may grow this wide for its label, so that most words stay whole
ALONG_THE_TEXT = ("tokens", "queries", "keys")
PROSE = 88  # sentences are not set wider than this, however wide the terminal


class StepLike(Protocol):
    """What `show_step` reads of a step; `clearhead.inspection.Step` is one."""

    @property
    def title(self) -> str: ...
    @property
    def explanation(self) -> str: ...
    @property
    def code(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def values(self) -> Any: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def per_head(self) -> bool: ...
    @property
    def heads(self) -> int: ...
    @property
    def tokens(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Block:
    """One matrix among its like: rows of numbers, a title, and one rich style for each column.

    Where the style changes from one column to the next, a gap is left.
    """

    values: Sequence[Sequence[float]]
    styles: Sequence[str]
    title: str = ""


def head_colour(h: int) -> str:
    """The colour of head h, counted from 0: blue, teal, and further ones."""
    return HEAD_COLOURS[h % len(HEAD_COLOURS)]


def make_console(**options: Any) -> Console:
    """A console on the present stdout that prints text as it is, without guessing at highlights."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def show_step(console: Console, number: int, step: StepLike, precision: int = 2) -> None:
    """Print one step: its number and title, what it does, its code, its shape and its matrices.

    Args:
        console: where to print; its width decides the layout.
        number: shown before the title.
        step: values are nested lists, or an array with tolist().
        precision: digits behind the decimal point.
    """
    _show_heading(console, number, step)
    rows, columns = (_labels(step, axis) for axis in (-2, -1))
    values = _plain(step.values)
    if step.per_head:
        blocks = [
            Block(matrix, [head_colour(h)] * len(columns), f"head {h + 1}")
            for h, matrix in enumerate(values)
        ]
    else:
        per_head = max(1, len(columns) // step.heads)
        coloured = [head_colour(j // per_head) for j in range(len(columns))]
        blocks = [Block(values, coloured if step.heads > 1 else [""] * len(columns))]
    show_blocks(console, blocks, rows, columns, precision)
    console.print()


def show_comparison(
    console: Console,
    number: int,
    efficient: StepLike,
    plain: StepLike,
    difference: StepLike,
    precision: int = 2,
) -> None:
    """Print the last step: two answers (rows, columns) beside each other, and how far apart."""
    _show_heading(console, number, plain)
    rows, columns = (_labels(plain, axis) for axis in (-2, -1))
    pair = (("efficient", efficient), ("wrapper", plain))
    blocks = [Block(_plain(step.values), [""] * len(columns), title) for title, step in pair]
    show_blocks(console, blocks, rows, columns, precision)
    console.print()
    print_wrapped(console, difference.code, style="green", hanging=4)
    far = _plain(difference.values)
    text = f"{difference.title.lower()} {far:.1e}" if far else "no difference at all"
    console.print()
    print_wrapped(console, text, style="bold")
    print_wrapped(console, difference.explanation)


def show_blocks(
    console: Console,
    blocks: Sequence[Block],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    precision: int = 2,
) -> None:
    """Print matrices with the same labels, as many beside each other as the width allows.

    Numbers are aligned at the decimal point, over all of them. An exact zero is a plain "0".
    """
    cells = [[[_number(v, precision) for v in row] for row in block.values] for block in blocks]
    names = [_fit(name, ROW_LABEL_LIMIT) for name in row_labels]
    name_width = max((cell_len(name) for name in names), default=0)
    room = console.width - INDENT - name_width
    together, widths, shown = _layout(blocks, cells, column_labels, room)

    for start in range(0, len(blocks), together):
        if start:
            console.print()
        line = range(start, min(start + together, len(blocks)))
        drawn = [_draw(blocks[b], cells[b], column_labels, widths, shown) for b in line]
        for name, parts in zip(["", "", *names], zip(*drawn, strict=True), strict=True):
            text = Text(" " * INDENT + set_cell_size(name, name_width))
            text.append_text(Text(GUTTER).join(parts))
            text.rstrip()
            if text:  # untitled blocks leave their first line empty
                console.print(text, no_wrap=True, overflow="crop")
    if None in shown:
        cut = f"columns {len(shown) - 1} to {len(widths) - 1} of {len(widths)} are left out"
        print_wrapped(console, f"{cut}; a wider terminal shows more", style="dim")


def _show_heading(console: Console, number: int, step: StepLike) -> None:
    console.print(Text(f"{number:>{INDENT - 2}}  {step.title}", style="bold"))
    print_wrapped(console, step.explanation)
    console.print()
    for line in step.code.splitlines():
        print_wrapped(console, line, style="green", hanging=4, width=console.width)
    print_wrapped(console, f"{tuple(step.shape)}: {', '.join(step.axes)}", style="dim")
    console.print()


def show_choice(
    console: Console,
    chosen: str | None,
    how: str,
    reasons: Mapping[str, str],
    notes: Iterable[str] = (),
) -> None:
    """Print which backend a call would use, how, and the sentence against each other one.

    Args:
        chosen: the backend's name, None where none can serve.
        how: how it would run the call.
        reasons: each other backend's name -> why not that one.
        notes: what else there is to know.
    """
    name = chosen or "none"
    deep = max(len(n) for n in [name, *reasons]) + 2
    for other, reason in {name: how, **reasons}.items():
        style = ("bold green" if chosen else "bold red") if other == name else ""
        print_wrapped(console, other.ljust(deep) + reason, style, indent=0, hanging=deep)
    for note in notes:
        console.print()
        print_wrapped(console, f"Note: {note}", indent=0)


def print_wrapped(
    console: Console,
    sentence: str,
    style: str = "",
    *,
    indent: int = INDENT,
    hanging: int = 0,
    width: int = PROSE,
) -> None:
    """Print text at an indent, wrapped at words; lines after the first stand `hanging` deeper."""
    for line in textwrap.wrap(
        sentence,
        max(min(width, console.width), indent + hanging + 1),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_on_hyphens=False,
    ):
        console.print(Text(line, style), no_wrap=True, overflow="crop")


def _layout(
    blocks: Sequence[Block], cells: list[list[list[str]]], column_labels: Sequence[str], room: int
) -> tuple[int, list[int], list[int | None]]:
    """How many blocks stand beside each other, how wide each column is, and which are shown.

    Whole words come before wide gaps, and both before a cut. Widths include the gap on the left. A
    None among the columns shown stands for the ones left out.
    """
    number = max((len(cell) for block in cells for row in block for cell in row), default=1)
    breaks = [0, *(int(a != b) for a, b in itertools.pairwise(blocks[0].styles))]

    def columns(gap: int, limit: int) -> list[int]:
        names = (min(cell_len(name), limit) for name in column_labels)
        return [gap + max(number, name) + extra for name, extra in zip(names, breaks, strict=True)]

    def beside(widths: list[int]) -> int:
        wide = max([sum(widths), *(cell_len(block.title) + 1 for block in blocks)])
        return (room + len(GUTTER)) // (wide + len(GUTTER))

    roomy, tight = columns(2, COLUMN_LABEL_LIMIT), columns(1, COLUMN_LABEL_LIMIT)
    lines = math.ceil(len(blocks) / max(1, beside(tight)))
    together = math.ceil(len(blocks) / lines)
    widths = next((w for w in (roomy, tight) if beside(w) >= together), columns(1, 0))
    if beside(widths) > 0:
        return together, widths, list(range(len(widths)))
    shown: list[int | None] = [len(widths) - 1]
    room -= widths[-1] + 2
    for j, width in enumerate(widths[:-1]):
        room -= width
        if room < 0:
            break
        shown.insert(j, j)
    return together, widths, [*shown[:-1], None, shown[-1]]


def _draw(
    block: Block,
    cells: list[list[str]],
    column_labels: Sequence[str],
    widths: list[int],
    shown: list[int | None],
) -> list[Text]:
    """The lines of one block, all equally wide: title, column labels, rows."""
    header, lines = Text(), [Text() for _ in cells]
    for j in shown:
        if j is None:
            for line in (header, *lines):
                line.append(" …", "dim")
            continue
        header.append(_right(column_labels[j], widths[j]), "dim")
        for line, row, text in zip(lines, block.values, cells, strict=True):
            quiet = row[j] == 0 or row[j] == -math.inf
            line.append(_right(text[j], widths[j]), "dim" if quiet else block.styles[j])
    title = Text(" " + block.title, f"bold {block.styles[0]}".strip())
    drawn = [title, header, *lines]
    wide = max(line.cell_len for line in drawn)
    for line in drawn:
        line.pad_right(wide - line.cell_len)
    return drawn


def _number(value: float, precision: int) -> str:
    """A number as text; those of one precision align when set flush right."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value:.{precision}e}"
    text = f"{value:.{precision}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _labels(step: StepLike, axis: int) -> Sequence[str]:
    """Words for an axis along the text, 1, 2, ... for any other, and for one that has another
    length: of a call between two texts the words are those of one."""
    if step.axes[axis] in ALONG_THE_TEXT and len(step.tokens) == step.shape[axis]:
        return step.tokens
    return [str(n + 1) for n in range(step.shape[axis])]


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def _fit(text: str, width: int) -> str:
    """Text in at most `width` cells, without control characters, which could drive the terminal."""
    text = "".join(c for c in text if unicodedata.category(c) != "Cc")
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip() + "…"


def _right(text: str, width: int) -> str:
    """Text flush right in `width` cells, at least one of them empty on the left."""
    text = _fit(text, width - 1)
    return " " * (width - cell_len(text)) + text

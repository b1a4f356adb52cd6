"""One head's attention as a picture in a terminal: a row for each query, a column for each key.

With colour, one character holds two rows: the upper half block in the colour of the first on the
colour of the second. Without, each row is a line of shades. A text too long for the terminal is
shown in blocks of tokens, each with its largest weight.
"""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from .links import SIZE_COLOURS, fit, is_ascii, mix
from .terminal import print_wrapped

DARK = "#101418"  # no weight at all
WIDEST_CELL = 8
LETTERS, ASCII = " ·░▒▓█", " .:-=+*#%@"


def show_head(
    console: Console,
    tokens: Sequence[str],
    weights: Sequence[Sequence[float]],
    *,
    title: str,
    hidden: Sequence[int] = (),
) -> None:
    """Print one head's weights (L, L) as a picture.

    Args:
        console: where to print; its width, colours and letters decide how.
        tokens: L names.
        weights: each row a query.
        title: printed above.
        hidden: columns that are left dark, such as the sink.
    """
    print_wrapped(console, title, style="bold", indent=0)
    coloured = bool(console.color_system)
    beside = " / " if coloured and not is_ascii(console) else ""
    names = [fit(console, " ".join(token.split()) or "_") for token in tokens]
    label = max(map(cell_len, names), default=0)
    label = label * 2 + len(beside) if beside else label
    room = max(1, console.width - label - 1)
    block = -(-len(tokens) // room)
    values = _pooled(weights, set(hidden), block)
    names = names[::block]
    cell = max(1, min(WIDEST_CELL, room // max(1, len(values))))
    top = max((value for row in values for value in row), default=0.0) or 1.0

    if cell > 2:
        heads = "".join(set_cell_size(name[: cell - 1], cell) for name in names)
        console.print(Text(" " * (label + 1) + heads.rstrip(), "dim"), no_wrap=True)
    if beside:
        for i in range(0, len(values), 2):
            lower = values[i + 1] if i + 1 < len(values) else None
            pair = names[i] + (beside + names[i + 1] if lower is not None else "")
            line = Text(set_cell_size(pair, label + 1))
            for j, value in enumerate(values[i]):
                behind = f" on {_colour(lower[j] / top)}" if lower is not None else ""
                line.append("▀" * cell, _colour(value / top) + behind)
            console.print(line, no_wrap=True, overflow="crop")
    else:
        shades = ASCII if is_ascii(console) else LETTERS
        for name, row in zip(names, values, strict=True):
            drawn = (shades[round(min(1.0, value / top) * (len(shades) - 1))] for value in row)
            text = set_cell_size(name, label + 1) + "".join(shade * cell for shade in drawn)
            console.print(Text(text.rstrip()), no_wrap=True, overflow="crop")
    told = f"Rows look at columns. Full strength is {top:.2f}."
    if block > 1:
        told += (
            f" Each cell is the largest of {block} x {block} tokens; a wider terminal shows more."
        )
    print_wrapped(console, told, style="dim", indent=0)


def _pooled(weights: Sequence[Sequence[float]], hidden: set[int], block: int) -> list[list[float]]:
    rows = [[0.0 if j in hidden else w for j, w in enumerate(row)] for row in weights]
    L = len(rows)
    starts = range(0, L, block)
    return [
        [
            max(
                rows[a][b] for a in range(i, min(i + block, L)) for b in range(j, min(j + block, L))
            )
            for j in starts
        ]
        for i in starts
    ]


def _colour(part: float) -> str:
    return mix((DARK, *SIZE_COLOURS), part)

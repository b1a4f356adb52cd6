"""All heads of a model, and a few in full, as a picture for a paper: PNG, PDF or SVG.

matplotlib is imported when a figure is drawn: `pip install "clearhead[plot]"` brings it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Sequence[float]]

MOST_NAMES = 40  # tokens that are named beside a map
WIDTH = 7.0  # inches, a page's text
DOTS = 200  # an inch
PAPER, INK, QUIET = "#ffffff", "#1b2230", "#596273"
COLOURS = ("#f6f5f1", "#cfe3d4", "#7dc0b4", "#35919c", "#2b5f93", "#2f2b6e", "#180f3d")


def draw(
    path: str | Path,
    title: str,
    tokens: Sequence[str],
    heads: Sequence[int],
    small: Sequence[Rows],
    maps: Mapping[tuple[int, int], Rows],
) -> int:
    """Draw the figure into a file, whose ending chooses the kind: .png, .pdf or .svg.

    Args:
        path: of the file.
        title: above everything.
        tokens: L of them.
        heads: how many heads each layer has.
        small: a thumbnail (T, T) for each head, layer by layer.
        maps: (layer, head) -> weights (L, L), to be drawn in full below.

    Returns:
        The size of the file in bytes.

    Raises:
        ImportError: matplotlib is not installed. ValueError: the ending is of no such kind, or the
            file cannot be written.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".png", ".pdf", ".svg"):
        raise ValueError(f"the figure is {path}; its name must end in .png, .pdf or .svg")
    try:
        from matplotlib import rc_context
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'a figure needs matplotlib, which is not installed; pip install "clearhead[plot]" '
            "brings it"
        ) from error
    colours = LinearSegmentedColormap.from_list("clearhead", COLOURS)
    layers, most = len(heads), max(heads)
    # Layers go along the longer side.
    wide = layers >= most
    columns, rows = (layers, most) if wide else (most, layers)
    above = 0.62
    grid = (WIDTH - 0.5) * rows / columns
    each = (WIDTH - 0.3) / max(1, min(3, len(maps)))
    below = (each + 0.15) * -(-len(maps) // 3)
    height = above + grid + 0.35 + below

    # Type 42 keeps the letters of a PDF editable; SVG keeps them as text.
    style: Any = {"font.size": 7, "pdf.fonttype": 42, "svg.fonttype": "none", "text.color": INK}
    with rc_context(style):
        figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
        name(figure, 0.1 / WIDTH, 1 - 0.2 / height, title, size=9, weight="bold")
        told = (
            f"{'Layers' if wide else 'Heads'} from left to right, {'heads' if wide else 'layers'} "
            "from top to bottom. In each square: queries down, keys across, shade the cube root of "
            "the weight."
        )
        name(figure, 0.1 / WIDTH, 1 - 0.38 / height, told, color=QUIET)
        places = [(layer, head) for layer, count in enumerate(heads) for head in range(count)]
        side = (WIDTH - 0.5) / columns
        for (layer, head), thumbnail in zip(places, small, strict=True):
            across, down = (layer, head) if wide else (head, layer)
            box = square(0.35 + side * across, above + side * down, side * 0.92, height)
            axes = figure.add_axes(box)
            show(axes, thumbnail, colours)
            if down == 0:
                axes.set_title(str(across), fontsize=6, color=QUIET, pad=2)
            if across == 0:
                axes.set_ylabel(
                    str(down), fontsize=6, color=QUIET, rotation=0, labelpad=5, va="center"
                )
            if (layer, head) in maps:
                frame(axes)
        for n, ((layer, head), weights) in enumerate(maps.items()):
            left = 0.1 + (each + 0.05) * (n % 3)
            top = above + grid + 0.3 + (each + 0.15) * (n // 3)
            axes = figure.add_axes(square(left + 0.5, top + 0.5, each - 0.6, height))
            show(axes, weights, colours)
            axes.set_xlabel(f"head {layer}.{head}", fontsize=8, color=INK)
            label(axes, tokens)
        try:
            figure.savefig(path, dpi=DOTS, facecolor=PAPER)
        except OSError as error:
            raise ValueError(f"{path} could not be written: {error.strerror or error}") from error
    return Path(path).stat().st_size


def square(left: float, top: float, side: float, height: float) -> Any:
    """A square in inches from the upper left corner, as matplotlib counts."""
    return (left / WIDTH, 1 - (top + side) / height, side / WIDTH, side / height)


def show(axes: Any, weights: Rows, colours: Any) -> None:
    """Draw one map without ticks."""
    bent = [[max(0.0, value) ** (1 / 3) for value in row] for row in weights]
    axes.imshow(bent, cmap=colours, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set(linewidth=0.3, color="#c9c8c2")


def frame(axes: Any) -> None:
    """Mark a thumbnail whose map is drawn in full."""
    for side in axes.spines.values():
        side.set(linewidth=1.2, color=INK)


def name(figure: Any, x: float, y: float, text: str, size: float = 7, **looks: Any) -> None:
    """A line of text; what would be read as a formula is not."""
    figure.text(x, y, text, fontsize=size, va="center", parse_math=False, **looks)


def label(axes: Any, tokens: Sequence[str]) -> None:
    """Name rows and columns by their tokens, all or every n-th."""
    every = -(-len(tokens) // MOST_NAMES)
    ticks = range(0, len(tokens), every)
    names = [clean(tokens[n]) for n in ticks]
    size = max(3.0, min(7.0, 110 / max(1, len(names))))
    axes.set_xticks(ticks, names, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(ticks, names, fontsize=size, parse_math=False)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, pad=1.5, colors=QUIET)


def clean(token: str, most: int = 10) -> str:
    """A token in letters that a figure's typeface has, cut to a length that fits."""
    letters = "".join(c if c.isprintable() and ord(c) < 0x2100 else "□" for c in token.strip())
    return letters if len(letters) <= most else letters[: most - 1] + "…"

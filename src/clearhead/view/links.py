"""Links between words, and one number for each head of each layer, drawn in a terminal.

A head is written layer.head, 9.4 being head 4 of layer 9, both counted from 0. Colour tells how
deep in the model a layer is, and in the map how large a number is; both are said in figures too, so
nothing is lost in a pipe or under NO_COLOR. Letters beyond ASCII are only used where the output
can show them.
"""

import itertools
import math
import unicodedata
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from .terminal import print_wrapped

Link = tuple[int, float, int, int]  # number of the word looked at, weight, layer, head

DEPTH_COLOURS = ("#3b82f6", "#0d9488", "#b58900", "#dc4a3d", "#c0569f")  # first to last layer
SIZE_COLOURS = ("#1e3a5f", "#1f6f8b", "#2a9d8f", "#e0a030", "#ffd166")  # 0 to 1, behind figures
QUIET = 0.1  # smaller numbers stand on no colour
BAR_LIMIT = 10
CELL = 3  # a figure of the map: a space and two digits
MOST_LINES = 60  # a map that would be longer is drawn in shades, one character for each head
GAP = 2

TITLES = {
    "sink": "How much of its attention each head leaves on {hidden}, in hundredths",
    "previous": "How much of its attention each head gives the token before, in hundredths",
    "self": "How much of its attention each head gives the token itself, in hundredths",
    "entropy": "How widely each head spreads its attention: 00 on one token, 99 on all alike",
    "distance": "How many tokens away each head looks, on average",
}


def show_links(
    console: Console,
    words: Sequence[str],
    links: Sequence[Sequence[Link]],
    *,
    layers: int,
    causal: bool,
    hidden: str = "the first token",
    meanings: Sequence[Sequence[str]] | None = None,
    left_out: str | None = None,
) -> None:
    """Print for each word what it looks at most, how much, and which head does.

    Args:
        console: where to print; its width decides how many links stand on a line.
        words: W of them.
        links: W lists, the strongest first.
        layers: of the model; the colour of a link is the depth of its layer.
        causal: whether words look back only.
        hidden: what many heads rest on, in words.
        meanings: for each link what it is by the role of its head, "" where that tells nothing.
        left_out: what links are not shown to, in words; itself and `hidden` by default.
    """
    said = meanings or [[""] * len(row) for row in links]
    names = [fit(console, word) for word in words]
    deep = max(map(cell_len, names), default=0) + GAP
    all_links = [link for row in links for link in row]
    wide = max((cell_len(names[j]) for j, *_ in all_links), default=0)
    labels = [
        [f"{_name(link)} {meaning}".rstrip() for link, meaning in zip(*row, strict=True)]
        for row in zip(links, said, strict=True)
    ]
    label = max((len(text) for row in labels for text in row), default=0)
    bare = wide + len(" .00 ") + label + GAP
    room = console.width - deep + GAP
    beside = max(1, min(max(map(len, links), default=0), room // bare))
    bar = max(0, min(BAR_LIMIT, room // beside - bare - 1))

    print_wrapped(
        console,
        "What each word looks at most, how much, and which head does (layer.head, from 0)",
        style="bold",
        indent=0,
    )
    for i, (name, row, texts) in enumerate(zip(names, links, labels, strict=True)):
        line = Text().append(set_cell_size(name, deep), "bold")
        if not row:
            first = causal and i == 0
            line.append(
                "comes first: nothing to look back at" if first else f"only {hidden}", "dim"
            )
            console.print(line, no_wrap=True, overflow="crop")
        for start in range(0, len(row), beside):
            some = slice(start, start + beside)
            for (target, weight, layer, _), text in zip(row[some], texts[some], strict=True):
                style = depth_colour(layer, layers)
                far = "bold " if abs(target - i) > 1 else ""
                line.append(set_cell_size(names[target], wide), far + style)
                line.append(" " + _bar(console, weight, bar) if bar else "", style)
                line.append(f" {hundredths(weight)} ")
                line.append(text.ljust(label + GAP), style)
            line.rstrip()
            console.print(line, no_wrap=True, overflow="crop")
            line = Text(" " * deep)
    styles = "Bold: past a neighbour. Colour: depth. " if console.color_system else ""
    told = f"{styles}Left out: {left_out or f'itself, {hidden}'}."
    if meanings:
        told += " Behind a head: what it does in tests; nobody checked that it does so here."
    print_wrapped(console, told, style="dim", indent=0)


def show_outstanding(
    console: Console,
    words: Sequence[str],
    found: Sequence[tuple[int, Link]],
    *,
    layers: int,
    meanings: Sequence[str] | None = None,
) -> None:
    """Print the links that no habit of their head explains: (number of the word, its link)."""
    arrow = "->" if is_ascii(console) else "→"
    entries = []
    for (i, link), meaning in zip(found, meanings or [""] * len(found), strict=True):
        pair = (fit(console, words[j]) for j in (i, link[0]))
        entry = Text(f" {arrow} ".join(pair), f"bold {depth_colour(link[2], layers)}")
        entry.append(f" {hundredths(link[1])}", "default not bold")
        entries.append(entry.append(f" {_name(link)} {meaning}".rstrip(), "not bold"))
    console.print(Text("What stands out", "bold"))
    wide = max((entry.cell_len for entry in entries), default=0) + 2 * GAP
    beside = max(1, (console.width + 2 * GAP) // max(1, wide))
    for start in range(0, len(entries), beside):
        line = Text()
        for entry in entries[start : start + beside]:
            line.append_text(entry).pad_right(wide - entry.cell_len)
        line.rstrip()
        console.print(line, no_wrap=True, overflow="crop")
    text = "Far over what the same head gives to that word, or at that distance, elsewhere."
    if not entries:
        text = "No head does anything here that it does not do elsewhere in this text."
    print_wrapped(console, text, style="dim", indent=0)


def show_map(
    console: Console,
    values: Sequence[Sequence[float]],
    name: str,
    hidden: str = "the first token",
) -> None:
    """Print one number for each head: layers from left to right, heads from top to bottom.

    Args:
        console: where to print; layers that do not fit its width go on further down.
        values: values[layer][head]; NaN leaves an empty cell, and layers may differ in heads.
        name: of the statistic, a key of TITLES. Its numbers are shares, shown in hundredths,
            or for "distance" tokens, shown as whole numbers.
        hidden: what "sink" is about, in words.
    """
    share = name != "distance"
    numbers = [v for layer in values for v in layer if not math.isnan(v)]
    top = 1.0 if share else max([1.0, *numbers])
    print_wrapped(console, TITLES[name].format(hidden=hidden), style="bold", indent=0)
    if not numbers:
        print_wrapped(console, "There is nothing to measure.", style="dim", indent=0)
        return
    heads = max(map(len, values))
    margin = len(f"head {heads - 1}") + 1
    cell = CELL if share else max(CELL, len(f"{max(numbers):.0f}") + 1)
    layers = _blocks(len(values), (console.width - margin) // cell)
    figures = len(layers) * (heads + 1) <= MOST_LINES
    if not figures:
        cell, layers = 1, _blocks(len(values), console.width - margin)
    for block in layers:
        header = Text().append("layer".ljust(margin), "dim")
        for layer in block:
            text = f"{layer:>{cell}}" if figures else " " if layer % 10 else str(layer // 10)[-1]
            header.append(text, depth_colour(layer, len(values)))
        header.rstrip()
        console.print(header, no_wrap=True, overflow="crop")
        for head in range(heads):
            line = Text().append(f"head {head}".ljust(margin), "dim")
            for layer in block:
                value = values[layer][head] if head < len(values[layer]) else math.nan
                line.append_text(_cell(console, value, top, share, cell))
            line.rstrip()
            console.print(line, no_wrap=True, overflow="crop")
    _show_extremes(console, values, share)


def _show_extremes(console: Console, values: Sequence[Sequence[float]], share: bool) -> None:
    cells = [
        (value, f"{layer}.{head}")
        for layer, row in enumerate(values)
        for head, value in enumerate(row)
        if not math.isnan(value)
    ]
    cells.sort(key=lambda cell: cell[0], reverse=True)

    def told(some: Iterable[tuple[float, str]]) -> str:
        return ", ".join(f"{head} ({figure(value)})" for value, head in some)

    def figure(value: float) -> str:
        return hundredths(value) if share else f"{value:.1f}"

    mean = sum(value for value, _ in cells) / len(cells)
    text = f"mean {figure(mean)}; most {told(cells[:4])}"
    text += f"; least {told(cells[-1:])}" if len(cells) > 4 else ""
    print_wrapped(console, text, indent=0)


def _cell(console: Console, value: float, top: float, share: bool, width: int) -> Text:
    if math.isnan(value):
        return Text(" " * width)
    part = min(1.0, max(0.0, value / top))
    if width == 1:
        shades = " .:-=+*#%@" if is_ascii(console) else " ·░▒▓█"
        return Text(shades[round(part * (len(shades) - 1))], mix(SIZE_COLOURS, part))
    text = f"{min(99, int(value * 100 + 0.5)):02d}" if share else f"{value:.0f}"
    if part < QUIET:
        return Text(text.rjust(width), "dim")
    behind = mix(SIZE_COLOURS, part)
    return Text(text.rjust(width), f"{'#000000' if part > 0.6 else '#ffffff'} on {behind}")


def _blocks(layers: int, room: int) -> list[range]:
    """Layers in as few blocks as fit the room, about equally wide."""
    count = math.ceil(layers / max(1, room))
    edges = [layers * block // count for block in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def _name(link: Link) -> str:
    return f"{link[2]}.{link[3]}"


def depth_colour(layer: int, layers: int) -> str:
    return mix(DEPTH_COLOURS, layer / max(1, layers - 1))


def hundredths(value: float) -> str:
    """.00 to .99, and 1.0: always three characters."""
    text = f"{value:.2f}"
    return text[1:] if text.startswith("0") else text[:3]


def _bar(console: Console, part: float, width: int) -> str:
    """A bar as long as the part of width, always width cells."""
    halves = max(1, round(part * width * 2))
    if is_ascii(console):
        return ("=" * ((halves + 1) // 2)).ljust(width)
    return ("━" * (halves // 2) + "╸" * (halves % 2)).ljust(width)


def mix(colours: Sequence[str], part: float) -> str:
    """The colour that lies at part (0 to 1) of the way through evenly spaced ones."""
    place = min(1.0, max(0.0, part)) * (len(colours) - 1)
    left = min(int(place), len(colours) - 2)
    a, b = ([int(colour[k : k + 2], 16) for k in (1, 3, 5)] for colour in colours[left : left + 2])
    mixed = (round(x + (y - x) * (place - left)) for x, y in zip(a, b, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def fit(console: Console, word: str) -> str:
    """A word without control characters, which could drive the terminal, cut to a fair width."""
    limit = max(7, min(14, console.width // 8))
    word = "".join(c for c in word if unicodedata.category(c)[0] != "C")
    end = "." if is_ascii(console) else "…"
    return word if cell_len(word) <= limit else set_cell_size(word, limit - 1).rstrip() + end

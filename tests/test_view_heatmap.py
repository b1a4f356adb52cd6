"""One head as a picture: half blocks with colour, shades without, blocks of tokens where narrow."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from clearhead.view.heatmap import ASCII, show_head

TOKENS = ["The", "dog", "fetched"]
WEIGHTS = [[1.0, 0.0, 0.0], [0.8, 0.0, 0.0], [0.2, 0.8, 0.0]]


def picture(weights, tokens, width=60, encoding="utf-8", colour=None, hidden=()):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=out,
        width=width,
        color_system=colour,
        force_terminal=bool(colour),
        highlight=False,
        markup=False,
    )
    show_head(console, tokens, weights, title="Head 4 of layer 9", hidden=hidden)
    out.flush()
    lines = out.buffer.getvalue().decode(encoding).splitlines()
    assert all(cell_len(re.sub(r"\x1b\[[^m]*m", "", line)) <= width for line in lines)
    return lines


def test_shades():
    lines = picture(WEIGHTS, TOKENS)
    assert lines[0] == "Head 4 of layer 9"
    assert lines[1].split() == TOKENS
    assert lines[2:5] == [
        "The     ████████",
        "dog     ▓▓▓▓▓▓▓▓",
        "fetched ········▓▓▓▓▓▓▓▓",
    ]
    assert lines[5] == "Rows look at columns. Full strength is 1.00."


def test_without_letters_beyond_ascii():
    lines = picture(WEIGHTS, TOKENS, encoding="ascii")
    assert lines[4] == "fetched " + ASCII[2] * 8 + ASCII[7] * 8
    coloured = picture(WEIGHTS, TOKENS, encoding="ascii", colour="truecolor")
    assert coloured[4] == lines[4]  # half blocks are no ASCII


def test_the_sink_is_left_dark_and_the_rest_fills_the_scale():
    lines = picture(WEIGHTS, TOKENS, hidden=[0])
    assert lines[2].strip() == "The"
    assert lines[4] == "fetched " + " " * 8 + "█" * 8
    assert "Full strength is 0.80." in lines[5]


def test_half_blocks_hold_two_rows_in_one():
    lines = picture(WEIGHTS, TOKENS, colour="truecolor")
    assert len(lines) == 5
    assert "The / dog" in lines[2] and "fetched" in lines[3]
    first = re.findall(r"38;2;(\d+;\d+;\d+)(?:;48;2;(\d+;\d+;\d+))?m▀+", lines[2])
    assert [upper for upper, _ in first] == ["255;209;102", "16;20;24", "16;20;24"]
    assert first[2][1] == "16;20;24" and first[0][1] != first[1][1]
    assert all(not lower for _, lower in re.findall(r"38;2;([\d;]+)(48)?m▀", lines[3]))


@pytest.mark.parametrize("colour", [None, "truecolor"])
@pytest.mark.parametrize("width", [30, 50])
def test_a_long_text_is_shown_in_blocks_with_their_largest_weight(colour, width):
    L = 130
    weights = [[0.0] * L for _ in range(L)]
    weights[129][7] = 0.5
    lines = picture(weights, [f"w{i}" for i in range(L)], width=width, colour=colour)
    told = re.sub(r"\x1b\[[^m]*m", "", " ".join(lines))
    block = int(re.search(r"largest of (\d+) x \1 tokens", told)[1])
    rows = -(-L // block)
    assert block > 1 and "Full strength is 0.50" in told
    drawn = [line for line in lines if "█" in line or "▀" in line]
    if colour is None:
        assert len(drawn) == 1 and drawn[0].endswith("█")
        label = cell_len(drawn[0]) - 7 // block - 1
        assert label < width
    else:
        assert len(drawn) == -(-rows // 2)


def test_odd_texts():
    assert picture([[1.0]], ["\x1b[31m"])[2].endswith("█")
    assert picture([[0.0]], ["a"])[-1] == "Rows look at columns. Full strength is 1.00."
    assert any("_" in line for line in picture(WEIGHTS, ["a", " ", "\n"]))

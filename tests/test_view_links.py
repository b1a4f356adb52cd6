"""Links and the map of heads as drawn: every figure said, every width kept, colour or not."""

import io
import math
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from clearhead.view.links import TITLES, show_links, show_map, show_outstanding
from clearhead.view.terminal import make_console

WORDS = ["The", "dog", "barked", "because", "she", "saw", "it", "."]
LINKS = [
    [],
    [],
    [(1, 0.951, 11, 1)],
    [(2, 0.9, 2, 0), (1, 0.3, 9, 4)],
    [(3, 0.93, 1, 2), (1, 0.714, 9, 4), (2, 0.5, 17, 0)],
    [(4, 0.9951, 16, 0), (1, 0.2, 9, 14), (3, 0.014, 29, 8)],
    [(5, 0.5, 1, 1)],
    [(6, 0.4, 0, 0)],
]


def drawn(show, *args, width=80, colour=False, encoding="utf-8", **options):
    """The lines that a function prints."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = make_console(
        file=file,
        width=width,
        color_system="truecolor" if colour else None,
        force_terminal=colour,
        legacy_windows=False,
    )
    show(console, *args, **options)
    file.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    for line in lines:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        assert cell_len(plain) <= width and "\x1b" not in plain
        assert plain == plain.rstrip() or colour
    return lines


def links(**options):
    return drawn(show_links, WORDS, LINKS, **{"layers": 30, "causal": True, **options})


def test_links_of_each_word():
    assert links() == [
        "What each word looks at most, how much, and which head does (layer.head, from 0)",
        "The      comes first: nothing to look back at",
        "dog      only the first token",
        "barked   dog     ━━━━━ .95 11.1",
        "because  barked  ━━━━╸ .90 2.0   dog     ━╸    .30 9.4",
        "she      because ━━━━╸ .93 1.2   dog     ━━━╸  .71 9.4   barked  ━━╸   .50 17.0",
        "saw      she     ━━━━━ 1.0 16.0  dog     ━     .20 9.14  because ╸     .01 29.8",
        "it       saw     ━━╸   .50 1.1",
        ".        it      ━━    .40 0.0",
        "Left out: itself, the first token.",
    ]


def test_links_in_other_widths():
    wide = links(width=120)
    assert "because ━━━━━━━━━╸ .93 1.2   dog     ━━━━━━━    .71 9.4" in wide[5]
    narrow = links(width=60)
    start = next(i for i, line in enumerate(narrow) if line.startswith("she "))
    assert narrow[start].split() == [
        "she", "because", "━━━━━━╸", ".93", "1.2", "dog", "━━━━━", ".71", "9.4"
    ]  # fmt: skip
    assert narrow[start + 1].split() == ["barked", "━━━╸", ".50", "17.0"]
    for width in (35, 47, 500):
        assert links(width=width)


def test_links_without_letters_beyond_ascii():
    lines = links(encoding="ascii")
    assert (
        "she      because ===== .93 1.2   dog     ====  .71 9.4   barked  ===   .50 17.0" in lines
    )
    long = drawn(show_links, ["extraordinarily", "long"], [[], [(0, 1.0, 0, 0)]], layers=1,
                 causal=False, encoding="ascii")  # fmt: skip
    assert long[2].split() == ["long", "extraordi.", "==========", "1.0", "0.0"]


def test_words_that_look_nowhere():
    both = drawn(show_links, ["a", "b"], [[], []], layers=2, causal=False, hidden="<s> and </s>")
    assert both[1:] == [
        "a  only <s> and </s>",
        "b  only <s> and </s>",
        "Left out: itself, <s> and </s>.",
    ]


def test_colours_of_links():
    lines = links(colour=True)
    her = next(line for line in lines if "she" in line and "9.4" in line)
    assert "\x1b[1mshe" in her
    near, far = re.findall(r"\x1b\[([0-9;]+)m(?:because|dog) *\x1b", her)
    assert not near.startswith("1;") and far.startswith("1;")  # bold reaches past a neighbour
    depth = {
        re.search(r"38;2;[0-9;]+", colour)[0]
        for line in lines
        for colour, head in re.findall(r"\x1b\[([0-9;]+)m(\S+) *\x1b", line)
        if head == "9.4"
    }
    assert len(depth) == 1  # one layer, one colour
    assert any("Bold: past a neighbour. Colour: depth. Left out" in line for line in lines)


def test_words_cannot_drive_the_terminal():
    words = ["\x1b[31mred", "two\nlines", "漢字", "é" * 40]
    rows = [[], [(0, 0.5, 0, 0)], [(1, 0.5, 0, 0)], [(2, 0.5, 0, 0)]]
    lines = drawn(show_links, words, rows, layers=1, causal=True)
    assert lines[1].startswith("[31mred")
    assert lines[2].startswith("twolines")
    assert lines[3].startswith("漢字        twolines")
    assert lines[4].startswith("ééééééééé… ")


def test_what_stands_out():
    found = [(4, (1, 0.71, 9, 4)), (5, (3, 0.84, 18, 5)), (6, (1, 0.4, 0, 11))]
    told = "Far over what the same head gives to that word, or at that distance, elsewhere."
    assert drawn(show_outstanding, WORDS, found, layers=30) == [
        "What stands out",
        "she → dog .71 9.4         saw → because .84 18.5    it → dog .40 0.11",
        told,
    ]
    narrow = drawn(show_outstanding, WORDS, found, layers=30, width=30, encoding="ascii")
    assert narrow[1:4] == ["she -> dog .71 9.4", "saw -> because .84 18.5", "it -> dog .40 0.11"]
    assert drawn(show_outstanding, WORDS, [], layers=30) == [
        "What stands out",
        "No head does anything here that it does not do elsewhere in this text.",
    ]


# ---- the map ----

VALUES = [[0.0, 0.5, 0.994], [1.0, 0.25, 0.096]]


def test_a_map_of_shares():
    assert drawn(show_map, VALUES, "sink", hidden="[CLS] and [SEP]") == [
        "How much of its attention each head leaves on [CLS] and [SEP], in hundredths",
        "layer    0  1",
        "head 0  00 99",
        "head 1  50 25",
        "head 2  99 10",
        "mean .47; most 1.0 (1.0), 0.2 (.99), 0.1 (.50), 1.1 (.25); least 0.0 (.00)",
    ]


def test_a_map_of_distances():
    assert drawn(show_map, [[0.4, 12.6], [1234.0, 7.0]], "distance") == [
        "How many tokens away each head looks, on average",
        "layer      0    1",
        "head 0     0 1234",
        "head 1    13    7",
        "mean 313.5; most 1.0 (1234.0), 0.1 (12.6), 1.1 (7.0), 0.0 (0.4)",
    ]


def test_layers_that_do_not_fit_go_on_below():
    values = [[layer / 30 + head / 300 for head in range(9)] for layer in range(30)]
    for width, blocks in ((120, 1), (80, 2), (60, 2), (40, 3)):
        lines = drawn(show_map, values, "previous", width=width)
        headers = [line for line in lines if line.startswith("layer")]
        assert len(headers) == blocks
        numbers = [int(number) for header in headers for number in header.split()[1:]]
        assert numbers == list(range(30))
    assert len(drawn(show_map, values, "previous")) <= 23  # with links it is one screen of 45


def test_layers_may_differ_in_heads_and_numbers_may_be_missing():
    assert drawn(show_map, [[0.5], [0.25, math.nan], [0.1, 0.2, 0.3]], "self")[1:5] == [
        "layer    0  1  2",
        "head 0  50 25 10",
        "head 1        20",
        "head 2        30",
    ]
    assert drawn(show_map, [[math.nan]], "self")[1:] == ["There is nothing to measure."]


def test_a_map_of_many_heads_is_drawn_in_shades():
    values = [[layer / 79 for _ in range(64)] for layer in range(80)]
    for encoding, first, last in (("utf-8", "·", "█"), ("ascii", ".", "@")):
        lines = drawn(show_map, values, "entropy", encoding=encoding, width=100)
        rows = [line for line in lines if line.startswith("head")]
        assert len(rows) == 64
        shades = rows[0].split(maxsplit=2)[2]
        assert shades[0] == first and shades[-1] == last
        assert lines[-1].startswith("mean .50; most 79.0 (1.0), ")
    lines = drawn(show_map, values, "entropy", width=50)
    assert lines[2] == "layer   0         1         2         3"
    assert len([line for line in lines if line.startswith("head")]) == 128


def test_colours_of_the_map():
    lines = drawn(show_map, VALUES, "sink", colour=True)
    row = next(line for line in lines if "head 0" in line)
    assert re.search(r"\x1b\[2m 00", row)  # small numbers stand on no colour
    assert re.search(r"\x1b\[38;2;0;0;0;48;2;255;209;102m 99", row)
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert plain == drawn(show_map, VALUES, "sink")


@pytest.mark.parametrize("name", TITLES)
def test_every_statistic_has_its_title(name):
    title = drawn(show_map, VALUES, name)[0]
    assert "{" not in title and title[0].isupper() and len(title) <= 80


def test_no_colour_where_none_is_wanted(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    show_map(console, VALUES, "sink")
    assert "38;2" not in file.getvalue() and "48;2" not in file.getvalue()

"""What the terminal view prints, held word for word, at several widths and without colours."""

import io
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from clearhead.view import terminal
from clearhead.view.terminal import (
    Block,
    head_colour,
    make_console,
    show_blocks,
    show_choice,
    show_comparison,
    show_step,
)

ESCAPE = "\x1b["
PAIRS = ("heads", "queries", "keys")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def printed(show, *args, width=80, **options):
    """What a console of this width prints, as lines."""
    file = io.StringIO()
    show(make_console(file=file, width=width, **options), *args)
    return file.getvalue().splitlines()


def in_colour(show, *args, width=80):
    return "\n".join(
        printed(show, *args, width=width, force_terminal=True, color_system="truecolor")
    )


def colour_code(h):
    red, green, blue = (int(head_colour(h)[i : i + 2], 16) for i in (1, 3, 5))
    return f"38;2;{red};{green};{blue}m"


def a_step(values, axes, tokens=("the", "dog"), per_head=False, heads=1, shape=(), **other):
    texts = {"title": "Scores", "explanation": "They fit.", "code": "scores = q @ k"} | other
    return SimpleNamespace(
        values=values, axes=axes, tokens=tokens, per_head=per_head, heads=heads, shape=shape,
        **texts,
    )  # fmt: skip


SCORES = a_step(
    [[[0.5, -math.inf], [-1.25, 2]], [[3, -math.inf], [0, -0.001]]],
    ("heads", "queries", "keys"),
    per_head=True,
    shape=(2, 2, 2),
)


def test_a_step_is_title_sentence_code_shape_and_heads_beside_each_other():
    assert printed(show_step, 8, SCORES) == [
        " 8  Scores",
        "    They fit.",
        "",
        "    scores = q @ k",
        "    (2, 2, 2): heads, queries, keys",
        "",
        "        head 1            head 2",
        "           the    dog        the    dog",
        "    the   0.50   -inf       3.00   -inf",
        "    dog  -1.25   2.00          0   0.00",
        "",
    ]


def test_gaps_shrink_before_the_heads_part():
    assert printed(show_step, 8, SCORES, width=36)[6:-1] == [
        "        head 1          head 2",
        "          the   dog       the   dog",
        "    the  0.50  -inf      3.00  -inf",
        "    dog -1.25  2.00         0  0.00",
    ]


def test_narrow_terminals_get_the_heads_below_each_other():
    assert printed(show_step, 8, SCORES, width=30)[7:] == [
        "        head 1",
        "           the    dog",
        "    the   0.50   -inf",
        "    dog  -1.25   2.00",
        "",
        "        head 2",
        "           the    dog",
        "    the   3.00   -inf",
        "    dog      0   0.00",
        "",
    ]


def test_a_matrix_whose_columns_belong_to_heads_has_a_gap_and_colours():
    queries = a_step([[1, 2, 3, 4]], ("tokens", "features"), ("the",), heads=2, shape=(1, 4))
    assert printed(show_step, 2, queries)[-3:] == [
        "            1     2      3     4",
        "    the  1.00  2.00   3.00  4.00",
        "",
    ]
    row = in_colour(show_step, 2, queries).splitlines()[-1]
    for j, number in enumerate(["1.00", "2.00", "3.00", "4.00"]):
        assert re.search(rf"{colour_code(j // 2)} +{number}", row)


def test_each_head_has_its_colour_and_the_masked_places_have_none():
    text = in_colour(show_step, 8, SCORES)
    assert f"{ESCAPE}1;{colour_code(1)} head 2" in text
    assert f"{ESCAPE}{colour_code(0)}   0.50" in text
    assert f"{ESCAPE}{colour_code(1)}   3.00" in text
    assert f"{ESCAPE}2m   -inf" in text


def test_colours_differ_between_neighbours_and_never_run_out():
    colours = [head_colour(h) for h in range(40)]
    assert len(set(colours)) == 7
    assert all(a != b for a, b in zip(colours, colours[1:], strict=False))


def test_no_color_keeps_the_text_and_drops_the_colours(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = in_colour(show_step, 8, SCORES)
    assert "38;2" not in text and "head 2" in text


@pytest.mark.parametrize("precision, expected", [(0, "-1"), (1, "-1.2"), (4, "-1.2500")])
def test_precision(precision, expected):
    lines = printed(show_step, 8, SCORES, precision)
    assert lines[9].split()[1] == expected


@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("heads", [1, 2, 3, 5])
def test_nothing_is_wider_than_the_terminal_and_every_head_is_there(width, heads):
    words = ["the", "dog", "fetched", "the", "ball"]
    values = [[[h + i / 10 for _ in words] for i in range(5)] for h in range(heads)]
    step = a_step(values, PAIRS, words, per_head=True, shape=(heads, 5, 5))
    lines = printed(show_step, 8, step, width=width)
    assert max(cell_len(line) for line in lines) <= width
    text = "\n".join(lines)
    for h in range(heads):
        assert text.count(f"head {h + 1}") == 1
        assert f"{h}.40" in text


def test_heads_fill_the_lines_evenly():
    step = a_step([[[0.5]]] * 4, PAIRS, ("the",), per_head=True, shape=(4, 1, 1))
    titles = [line for line in printed(show_step, 1, step, width=45) if "head " in line]
    assert [line.split() for line in titles] == [
        ["head", "1", "head", "2"],
        ["head", "3", "head", "4"],
    ]


def test_a_cut_matrix_keeps_both_ends_and_says_what_is_missing():
    row = [j + 1.0 for j in range(30)]
    block = Block([row], [""] * 30)
    labels = [str(j + 1) for j in range(30)]
    assert printed(show_blocks, [block], ["the"], labels, width=40) == [
        "            1     2     3     4 …    30",
        "    the  1.00  2.00  3.00  4.00 … 30.00",
        "    columns 5 to 29 of 30 are left out;",
        "    a wider terminal shows more",
    ]
    assert "left out" not in "".join(printed(show_blocks, [block], ["the"], labels, width=300))


def test_long_and_wide_words_are_cut_to_cells_and_stay_aligned():
    words = ["incomprehensibilities", "犬が好きですよね", "a"]
    block = Block([[0.25] * 3] * 3, [""] * 3)
    lines = printed(show_blocks, [block], words, words)
    assert lines[0].split() == ["incompre…", "犬が好き…", "a"]
    assert lines[1].startswith("    incomprehen…")
    assert lines[2].startswith("    犬が好きで… ")
    assert [cell_len(line) for line in lines] == [42] * 4


def test_control_characters_in_words_never_reach_the_terminal():
    block = Block([[1.0]], [""])
    assert ESCAPE not in "".join(printed(show_blocks, [block], ["\x1b[31mred"], ["\x1b[2J"]))


def test_markup_in_words_is_text():
    block = Block([[1.0]], [""])
    lines = printed(show_blocks, [block], ["[red]"], [":dog:"])
    assert "[red]" in lines[1] and ":dog:" in lines[0]


@pytest.mark.parametrize(
    "value, expected",
    [(0.0, "0"), (-0.0, "0"), (-0.001, "0.00"), (1e30, "1.00e+30"), (math.nan, "nan"),
     (math.inf, "inf"), (999999, "999999.00")],
)  # fmt: skip
def test_unusual_numbers(value, expected):
    assert printed(show_blocks, [Block([[value]], [""])], ["x"], ["1"])[1].split() == [
        "x",
        expected,
    ]


def test_comparison_shows_both_answers_and_the_distance():
    one, two = (a_step([[v]], ("tokens", "features"), ("the",), shape=(1, 1)) for v in (0.5, 0.25))
    far = a_step(0.25, (), title="Largest difference", code="d = a - b", explanation="Rounding.")
    assert printed(show_comparison, 14, one, two, far)[-8:] == [
        "        efficient     wrapper",
        "            1             1",
        "    the  0.50          0.25",
        "",
        "    d = a - b",
        "",
        "    largest difference 2.5e-01",
        "    Rounding.",
    ]
    equal = a_step(0.0, (), title="Largest difference", code="d = a - b", explanation="Rounding.")
    assert "    no difference at all" in printed(show_comparison, 14, one, one, equal)


def test_choice_wraps_each_sentence_under_its_backend():
    reasons = {"flex": "needs a CUDA device and this call is on the cpu", "chunked": "is slower"}
    how, notes = "its kernel with is_causal", ["NaN spreads"]
    assert printed(show_choice, "sdpa", how, reasons, notes, width=34) == [
        "sdpa     its kernel with is_causal",
        "flex     needs a CUDA device and",
        "         this call is on the cpu",
        "chunked  is slower",
        "",
        "Note: NaN spreads",
    ]
    assert printed(show_choice, None, "ask another", {"sdpa": "no"}) == [
        "none  ask another",
        "sdpa  no",
    ]


def test_only_the_chosen_backend_stands_out():
    text = in_colour(show_choice, "sdpa", "runs", {"flex": "compiles"})
    assert text == f"{ESCAPE}1;32msdpa  runs{ESCAPE}0m\nflex  compiles"


def test_the_view_imports_no_torch():
    # The package itself does import torch, so an empty one stands in for it.
    program = (
        "import sys, types\n"
        "package = types.ModuleType('clearhead')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['clearhead'] = package\n"
        "import clearhead.view.terminal\n"
        "sys.exit(5 if 'torch' in sys.modules else 0)\n"
    )
    folder = Path(terminal.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", program, str(folder)]).returncode == 0

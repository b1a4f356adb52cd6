"""The command line, as its users meet it: what it prints, in what width, and every error's line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

import clearhead
from clearhead.cli import app
from clearhead.textbook import MultiHeadAttentionWrapper
from clearhead.view.terminal import HEAD_COLOURS

ESCAPE = "\x1b["


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)


def run(*args, width=80):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(width)})


def lines_of(*args, width=80):
    result = run(*args, width=width)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout.splitlines()


def process(*args, **environment):
    """`python -m clearhead` with its output in a pipe."""
    source = str(Path(clearhead.__file__).parents[1])
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "clearhead", *args],
        env=clean
        | {"PYTHONPATH": source, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
        | environment,
        capture_output=True,
        encoding="utf-8",
    )


# ---- walkthrough ----


def test_walkthrough_shows_every_step_of_the_worked_example():
    lines = lines_of("walkthrough")
    titles = [line for line in lines if re.match(r" ?\d+  \w", line)]
    assert [int(title.split()[0]) for title in titles] == list(range(1, 15))
    assert titles[0] == " 1  Words become vectors"
    assert titles[9] == "10  Weights"
    shapes = [line.strip().split(":")[0] for line in lines if re.match(r" +\([\d, ]+\): ", line)]
    assert shapes == (
        ["(5, 6)"] * 4 + ["(2, 5, 3)"] * 3 + ["(2, 5, 5)"] * 3 + ["(2, 5, 3)"] + ["(5, 6)"] * 3
    )
    assert "    scores = q @ k.transpose(-2, -1)" in lines
    assert "    module = MultiHeadAttention.from_heads(wrapper)" in lines


def test_walkthrough_rows_are_labelled_with_the_words():
    lines = lines_of("walkthrough", "a tiny cat", "--precision", 3)
    start = lines.index("10  Weights")
    block = lines[start : lines.index("11  Context")]
    rows = [line.split() for line in block[-4:-1]]
    assert [row[0] for row in rows] == ["a", "tiny", "cat"]
    assert rows[0][1:] == ["1.000", "0", "0", "1.000", "0", "0"]
    for row in rows:
        numbers = [float(cell) for cell in row[1:]]
        assert abs(sum(numbers[:3]) - 1) < 0.002 and abs(sum(numbers[3:]) - 1) < 0.002


def test_walkthrough_ends_with_both_answers_and_a_difference_of_rounding_only():
    lines = lines_of("walkthrough", width=120)
    titles = [line.split() for line in lines if line.startswith("        ")]
    assert ["efficient", "wrapper"] in titles
    row = [line.split() for line in lines if line.startswith("    ball ")][-1][1:]
    assert row[:6] == row[6:]
    [difference] = [line for line in lines if "largest difference" in line]
    assert float(difference.split()[-1]) < 1e-6


def test_walkthrough_tells_when_the_answers_differ(monkeypatch):
    right = MultiHeadAttentionWrapper.forward
    monkeypatch.setattr(MultiHeadAttentionWrapper, "forward", lambda self, x: right(self, x) + 0.5)
    [difference] = [line for line in lines_of("walkthrough") if "largest difference" in line]
    assert difference.split()[-1] == "5.0e-01"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("heads", [1, 2, 5])
def test_walkthrough_keeps_to_the_width_and_shows_every_head(width, heads):
    lines = lines_of("walkthrough", "--heads", heads, width=width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert ESCAPE not in text
    assert {f"head {h + 1}" for h in range(heads)} == set(re.findall(r"head \d+", text))


def test_heads_stand_beside_each_other_only_where_there_is_room():
    assert any(line.split() == ["head", "1", "head", "2"] for line in lines_of("walkthrough"))
    narrow = lines_of("walkthrough", width=40)
    assert not any("head 1" in line and "head 2" in line for line in narrow)


def test_walkthrough_is_repeatable_and_its_options_matter():
    first = lines_of("walkthrough")
    assert lines_of("walkthrough", "the dog fetched the ball", "--seed", 0) == first
    for other in (["--seed", 1], ["--head-dim", 4], ["--input-dim", 9], ["--precision", 4]):
        assert lines_of("walkthrough", *other) != first


def test_walkthrough_takes_any_white_space_between_words():
    assert lines_of("walkthrough", " a\tb\n c ") == lines_of("walkthrough", "a b c")


def test_long_sentences_are_cut_and_say_so():
    words = " ".join(f"word{i}" for i in range(40))
    assert any("left out" in line for line in lines_of("walkthrough", words))
    assert not any("left out" in line for line in lines_of("walkthrough"))


@pytest.mark.parametrize(
    "args, message",
    [
        ([""], "the text is empty; give at least one word"),
        ([" \n "], "the text is empty; give at least one word"),
        (["w " * 257], "the number of words is 257; it must be at most 256"),
        (["--heads", 0], "--heads is 0; it must be at least 1"),
        (["--heads", -2], "--heads is -2; it must be at least 1"),
        (["--heads", 10**30], f"--heads is {10**30}; it must be at most 1024"),
        (["--head-dim", 0], "--head-dim is 0; it must be at least 1"),
        (["--head-dim", 600], "--heads times --head-dim is 1200; it must be at most 1024"),
        (["--input-dim", 0], "--input-dim is 0; it must be at least 1"),
        (["--input-dim", 5000], "--input-dim is 5000; it must be at most 1024"),
        (["--precision", -1], "--precision is -1; it must be at least 0"),
        (["--precision", 13], "--precision is 13; it must be at most 12"),
        (["--seed", -1], "--seed is -1; it must be at least 0"),
    ],
)
def test_bad_walkthroughs_get_one_line_and_status_2(args, message):
    result = run("walkthrough", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"clearhead: {message}\n"


# ---- explain ----


def test_explain_names_the_backend_and_a_reason_for_every_other():
    lines = lines_of("explain", "--shape", "2,4,16,16,8", "--causal", width=200)
    assert lines[0] == (
        "query (2, 4, 16, 8), key (2, 4, 16, 8), value (2, 4, 16, 8), float32 on cpu"
    )
    x = torch.zeros(2, 4, 16, 8)
    chosen = clearhead.explain(x, x, x, is_causal=True)
    assert lines[2].split()[0] == chosen.backend and lines[2].endswith(chosen.how)
    names = {line.split()[0] for line in lines[2:] if line and not line.startswith(" ")}
    assert names == {"chunked", "native", "sdpa", "flex"}
    assert all(len(line.split()) > 2 for line in lines[2:] if line and not line.startswith(" "))


OPTIONS = {
    "--kv-heads 2": {"key": (2, 2, 16, 8), "value": (2, 2, 16, 8)},
    "--value-dim 5": {"value": (2, 4, 16, 5)},
    "--dtype bfloat16": {},
    "--window 3,none": {"window": (3, None)},
    "--window 3,0": {"window": (3, 0)},
    "--mask bool": {"attn_mask": "bool"},
    "--mask float": {"attn_mask": "float32"},
    "--key-mask": {"key_mask": (2, 16)},
    "--documents": {"documents": 2},
    "--softcap 30": {"softcap": 30.0},
    "--sinks": {"sinks": (4,)},
    "--alibi": {"alibi_slopes": (4,)},
    "--dropout 0.1": {"dropout_p": 0.1},
    "--causal": {"is_causal": True},
    "--grad": {"requires_grad": True},
    "--weights": {"weights": True},
    "--lse": {"lse": True},
    "--deterministic": {"deterministic": True},
    "--backend chunked": {"backend": "chunked"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_reaches_explain_as_what_it_means(option, monkeypatch):
    seen = {}
    real = clearhead.explain

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        aux = rest["return_aux"]
        seen.update(rest, dropout_p=dropout_p, is_causal=is_causal)
        seen.update(key=tuple(key.shape), value=tuple(value.shape), dtype=str(query.dtype))
        seen["requires_grad"] = query.requires_grad
        seen["attn_mask"] = None if attn_mask is None else str(attn_mask.dtype).split(".")[1]
        for name in ("key_mask", "sinks", "alibi_slopes"):
            seen[name] = None if rest[name] is None else tuple(rest[name].shape)
        seen["documents"] = None if rest["documents"] is None else len(rest["documents"])
        seen.update(weights=aux is not None and aux.weights, lse=aux is not None and aux.lse)
        return real(query, key, value, attn_mask, dropout_p, is_causal, **rest)

    monkeypatch.setattr(clearhead, "explain", spy)
    lines_of("explain", "--shape", "2,4,16,16,8")
    expected = dict(seen)
    lines_of("explain", "--shape", "2,4,16,16,8", *option.split())
    changed = {name: value for name, value in seen.items() if value != expected[name]}
    changed.pop("return_aux", None)
    wanted = {"dtype": "torch.bfloat16"} if "dtype" in option else OPTIONS[option]
    assert changed == wanted


def test_explain_needs_no_memory_for_the_shape_it_is_asked_about():
    # Tensors of these shapes would take 34 GB; the test's own process would not survive them.
    first = lines_of("explain", "--shape", "64,64,16384,16384,32", width=200)
    assert first[0].startswith("query (64, 64, 16384, 32)")


def test_explain_takes_empty_axes():
    assert lines_of("explain", "--shape", "0,2,3,0,4")[0].startswith("query (0, 2, 3, 4)")


@pytest.mark.parametrize(
    "args, message",
    [
        (["1,2,3"], "--shape is '1,2,3'; it must be whole numbers in the form B,H,L,S,D"),
        (["1,2,3,4,x"], "--shape is '1,2,3,4,x'; it must be whole numbers in the form B,H,L,S,D"),
        (["1,-2,3,4,5"], "a size is -2; it must be at least 0"),
        (
            ["99999,9999,1,1,99"],
            f"the count of numbers in query is {99999 * 9999 * 99}; it must be at most {2**33}",
        ),
        (
            ["1,1,99999,99999,8", "--window", "3,0"],
            f"batch times queries times keys, with a rule, is {99999**2}; "
            f"it must be at most {2**30}",
        ),
        (["1,4,5,5,8", "--kv-heads", "-1"], "a size is -1; it must be at least 0"),
        (
            ["1,4,5,5,8", "--window", "3"],
            "--window is '3'; it must be whole numbers or none in the form L,R",
        ),
        (["1,4,5,5,8", "--mask", "int"], "--mask is int; it must be none, bool or float"),
        (
            ["1,4,5,5,8", "--dtype", "nn"],
            "--dtype is nn; it must be float32, float64, float16 or bfloat16",
        ),
        (
            ["1,4,5,5,8", "--dtype", "int64"],
            "--dtype is int64; it must be float32, float64, float16 or bfloat16",
        ),
    ],
)
def test_bad_explains_get_one_line_and_status_2(args, message):
    result = run("explain", "--shape", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"clearhead: {message}\n"


@pytest.mark.parametrize(
    "args, words",
    [
        (["--kv-heads", "3"], "3"),
        (["--device", "toaster"], "--device is toaster, which torch cannot use here"),
        (["--backend", "magic"], "magic"),
        (["--window=-3,0"], "window"),
        (["--softcap", "-1"], "softcap"),
        (["--dropout", "1.5"], "dropout"),
    ],
)
def test_what_the_library_refuses_is_one_line_too(args, words):
    result = run("explain", "--shape", "1,4,5,5,8", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("clearhead: ") and words in result.stderr
    assert result.stderr.count("\n") == 1


# ---- the command as a whole ----


def test_traceback_is_there_for_those_who_ask():
    result = run("--traceback", "walkthrough", "")
    assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize("args", [["walk"], ["explain"], ["walkthrough", "--heads", "two"]])
def test_usage_errors_have_status_2(args):
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == "" and "Error" in result.stderr


def test_help_names_every_command():
    text = "\n".join(lines_of("--help"))
    assert "walkthrough" in text and "explain" in text
    assert "--head-dim" in "\n".join(lines_of("walkthrough", "--help"))


def test_help_loads_no_torch():
    program = (
        "import sys, types\n"
        "package = types.ModuleType('clearhead')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['clearhead'] = package\n"
        "from clearhead.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "sys.exit(5 if 'torch' in sys.modules or 'transformers' in sys.modules else 0)\n"
    )
    folder = str(Path(clearhead.__file__).parent)
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_pipe_gets_plain_text():
    done = process("walkthrough", "a b")
    assert (done.returncode, done.stderr) == (0, "")
    assert ESCAPE not in done.stdout and "largest difference" in done.stdout


def test_forced_colours_are_blue_and_teal_and_no_color_wins():
    colours = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    blue, teal = (
        ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5)) for colour in HEAD_COLOURS[:2]
    )
    coloured = process("walkthrough", "a b", **colours).stdout
    assert f"1;38;2;{blue}m head 1" in coloured and f"1;38;2;{teal}m head 2" in coloured
    plain = process("walkthrough", "a b", NO_COLOR="1", **colours).stdout
    assert "38;2" not in plain and "head 2" in plain


def test_a_terminal_without_the_letters_still_gets_the_numbers():
    done = process("walkthrough", "犬 б " * 20, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    # The last step; whether torch's two sums differ at all depends on the processor.
    assert "largest difference" in done.stdout or "no difference at all" in done.stdout


def test_errors_of_the_real_command():
    done = process("walkthrough", "")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "clearhead: the text is empty; give at least one word\n"


def test_version():
    assert lines_of("--version") == [f"clearhead {clearhead.__version__}"]

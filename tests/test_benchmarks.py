"""The benchmark: right before it times, its figures are what they say, and bad options are told."""

import dataclasses
import functools
import io
import json
import re
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from clearhead import attention
from clearhead.benchmarks import chart, command, measure, peers, report, run
from clearhead.benchmarks.shapes import CASES, GROWTH, KINDS, Case
from clearhead.cli import app
from clearhead.view.bench import show_changes, show_errors, show_results
from clearhead.view.terminal import make_console

ABOUT = {"processor": "P", "native": "N", "torch": "T", "date": "D"}
SMALL = (
    Case("prefill", "prefill", H=3, L=7, D=5, causal=True),
    Case("full batch", "prefill", H=3, L=7, D=5, B=2),
    Case("grouped", "prefill", H=6, L=7, D=5, Hkv=2, causal=True),
    Case("piece", "chunked prefill", H=3, L=4, D=5, S=11, causal=True),
    Case("token", "decode", H=4, L=1, D=5, Hkv=2, S=13, causal=True),
    Case("window", "window", H=3, L=11, D=5, causal=True, window=4),
    Case("padded", "padding", H=3, L=12, D=5, B=2, padded=True),
    Case("packed", "packed", H=3, L=20, D=5, causal=True, packed=4),
    Case("mask", "mask", H=3, L=7, D=5, mask=True),
    Case("weights", "weights", H=3, L=7, D=5, causal=True),
    Case("statistics", "statistics", H=3, L=7, D=5, causal=True),
    Case("deterministic", "deterministic", H=3, L=4, D=5, S=11, causal=True),
    Case("layer", "layer", H=3, L=7, D=5, B=2, causal=True),
    Case("full layer", "layer", H=3, L=7, D=5),
    Case("length", "lengths", H=3, L=7, D=5, causal=True),
    Case("heads", "heads", H=2, L=7, D=5, causal=True),
)
# flex compiles for seconds and is no part of the suite; x-transformers need not be there.
NAMES = ("sdpa", "eager", "without", "nn.MultiheadAttention", "series", "stitched")
# What the machine can do at best is measured once here: some have no fast product of bfloat16.
gemm_flops = functools.cache(functools.partial(measure.gemm_flops, seconds=0.01))
read_bytes = functools.cache(functools.partial(measure.read_bytes, seconds=0.01))


@pytest.fixture(autouse=True)
def _measured_once(monkeypatch):
    monkeypatch.setattr(run, "gemm_flops", gemm_flops)
    monkeypatch.setattr(run, "read_bytes", read_bytes)


def visible(case):
    """The pairs by the masks of the definition, counted one by one."""
    count = 0
    lengths = case.lengths().tolist()
    bounds = case.offsets().tolist() if case.packed else [0, case.L]
    for b in range(case.B):
        for i in range(case.L):
            own = i + case.keys - case.L
            for j in range(case.keys):
                if case.packed:
                    piece = max(n for n, start in enumerate(bounds[:-1]) if start <= i)
                    if not bounds[piece] <= j < bounds[piece + 1]:
                        continue
                if case.causal and j > own or case.window and j <= own - case.window:
                    continue
                count += j < lengths[b]
    return count


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_pairs_are_those_that_the_rules_leave(case):
    assert case.pairs() == visible(case)
    assert case.flops() == visible(case) * case.H * 4 * case.D


def test_the_small_cases_cover_every_kind_and_names_are_told_apart():
    assert {case.kind for case in SMALL} == set(KINDS) == {c.kind for c in (*CASES, *GROWTH)}
    keys = [run.Row(case, "float32", 1).key for case in (*CASES, *GROWTH)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("dtype", run.DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_peer_computes_the_same(case, dtype):
    (row,) = run.measure([case], dtypes=[dtype], names=NAMES, seconds=1e-4, memory=False)
    wanted = {
        "layer": 3,
        "heads": 3,
        "weights": 2,
        "statistics": 3,
        "deterministic": 3,
        "packed": 1,
    }
    expected = wanted.get(case.kind, 2) - (case.is_layer and not case.causal)
    assert len(row.ratios) == expected, row.reasons
    assert set(row.reasons) | set(row.ratios) == {
        name for name in NAMES if name in (peers.LAYER_PEERS if case.is_layer else peers.CALL_PEERS)
    }
    assert 0 <= row.error <= 1 and row.seconds > 0 and row.share > 0
    assert row.bound == ("memory" if case.L <= run.FEW_ROWS else "gemm")
    for ratio in row.ratios.values():
        assert 0 < ratio.low <= ratio.median <= ratio.high and ratio.pairs >= measure.FEWEST


def test_the_share_is_of_the_faster_product(monkeypatch):
    case = Case("more than a few rows", "prefill", H=3, L=run.FEW_ROWS + 1, D=5)
    for products in (
        {torch.float32: 2e9, torch.bfloat16: 1e9},
        {torch.float32: 1e9, torch.bfloat16: 2e9},
    ):
        monkeypatch.setattr(run, "gemm_flops", products.get)
        (row,) = run.measure([case], dtypes=["bfloat16"], names=[], seconds=1e-4, memory=False)
        assert row.share == pytest.approx(row.case.flops() / row.seconds / 2e9)


def test_a_wrong_answer_is_not_timed(monkeypatch):
    monkeypatch.setattr(
        peers, "attention", lambda *tensors, **rules: attention(*tensors, **rules) * 1.01
    )
    with pytest.raises(AssertionError, match="prefill, torch.float32: error .* over the budget"):
        list(run.measure(SMALL[:1], names=["sdpa"], seconds=1e-4))


def test_a_peer_that_computes_something_else_is_not_compared(monkeypatch):
    monkeypatch.setitem(peers.CALL_PEERS, "sdpa", lambda call: lambda: torch.zeros(1, 3, 7, 5))
    with pytest.raises(AssertionError, match="prefill: sdpa: Tensor-likes are not close"):
        list(run.measure(SMALL[:1], names=["sdpa"], seconds=1e-4))


def test_a_ratio_is_their_time_over_ours(monkeypatch):
    monkeypatch.setattr(measure, "FEWEST", 3)
    ticks = []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(sum(ticks)))
    ratio, ours = measure.alternate(lambda: ticks.append(2), lambda: ticks.append(6), 20.0)
    assert ratio == measure.Ratio(3, 3, 3, 3) and ours == 2


def test_peak_memory_sees_what_is_held_for_a_moment():
    small = measure.peak_mb(lambda: torch.ones(8))
    large = measure.peak_mb(lambda: torch.ones(16 << 20))  # 64 MB
    assert small is None or small < 16 < 60 < large < 80


def test_the_threads_are_as_before(monkeypatch):
    before = torch.get_num_threads()
    rows = list(run.measure(SMALL[:1], dtypes=["float32"], threads=[1, 2], names=["sdpa"],
                            seconds=1e-4, memory=False))  # fmt: skip
    assert [row.threads for row in rows] == [1, 2] and torch.get_num_threads() == before


def made_up(case=SMALL[0], dtype="float32", median=2.0, **changes):
    ratio = run.Ratio(median * 0.9, median, median * 1.1, 9)
    row = run.Row(case, dtype, 2, "native", 0.5, 1e-3, 0.8, "gemm", {"sdpa": ratio}, {}, {})
    return dataclasses.replace(row, **changes)


def test_results_survive_their_file():
    rows = [made_up(), made_up(dtype="bfloat16", reasons={"flex": "no"}, mb={"clearhead": 3.0})]
    text = json.dumps(run.to_plain(rows, ABOUT))
    assert run.from_plain(json.loads(text)) == rows
    with pytest.raises(ValueError, match="holds no results of `clearhead bench --json`"):
        run.from_plain({"rows": [{"name": "x"}]})


def test_the_tables():
    rows = [made_up(), made_up(SMALL[-1], "bfloat16", 0.5, mb={"clearhead": 2.4})]
    text = report.markdown(rows, ABOUT)
    assert "P; N; torch T; D." in text and "### 2 threads" in text
    assert (
        "| prefill (prefill, causal) | 1 x 3 x 7 x 5 | float32 | 2.00 (1.80 to 2.20) | 80% |  |"
        in (text)
    )
    titles = [(title, names) for title, names, _ in report.tables(rows)]
    assert titles == [
        ("calls, float32, 2 threads", ["F.sdpa"]),
        ("layers, bfloat16, 2 threads", ["F.sdpa"]),
    ]
    assert report.tables(rows)[1][2] == [
        ("heads (heads, causal)", "1 x 2 x 7 x 5", [0.5], "80%", "2")
    ]


def test_what_changed_since():
    old = [made_up(), made_up(SMALL[1])]
    new = [made_up(median=3.0), made_up(SMALL[1], median=2.05), made_up(SMALL[2])]
    found = report.changes(new, old)
    assert [change[2:] for change in found] == [
        ("float32", "F.sdpa", 2.0, 3.0, True),
        ("float32", "F.sdpa", 2.0, 2.05, False),
    ]
    assert report.changes(new[2:], old) == []
    slower = report.changes([made_up(median=1.0)], old)
    shown = on_a_terminal(show_changes, [*found, *slower])
    assert "prefill (prefill," in shown and "2.00 3.00 +50%" in shown
    assert "2.00 2.05 (+2%)" in shown and "2.00 1.00 [-50%]" in shown and "[+" not in shown
    assert "No case stands in both files." in on_a_terminal(show_changes, [])


def on_a_terminal(show, *args, width=80):
    """What is shown, with what is red in brackets and spaces once."""
    file = io.StringIO()
    show(make_console(file=file, force_terminal=True, color_system="standard", width=width), *args)
    shown = re.sub(r"\x1b\[31m\s*(.*?)\s*\x1b\[0m", r"[\1]", file.getvalue())
    return " ".join(re.sub(r"\x1b\[[\d;]*m", "", shown).split())


def test_what_is_worse_is_red():
    rows = [("a case", "1 x 1 x 1 x 1", [1.5, 0.5, None], "80%", "2")]
    shown = on_a_terminal(show_results, "calls", ["F.sdpa", "flex", "eager"], rows)
    assert "1.50 [0.50]" in shown and "[1.50]" not in shown
    shown = on_a_terminal(show_errors, "full", [("D 64", [0.9, 1.1, 1.0, 1e-7, 1e-7])])
    assert "0.90 [1.10] 1.00" in shown


def test_the_kernels_are_named_by_dtype(monkeypatch):
    one = run.machine([torch.float32])["native"]
    assert one.startswith("clearhead's CPU kernels, ") and "float32" not in one
    name = {torch.float32: "wide", torch.bfloat16: "pairs", torch.float16: "wide"}
    monkeypatch.setattr(run, "explain", lambda q, k, v: types.SimpleNamespace(how=name[q.dtype]))
    assert run.machine([torch.float32, torch.float16])["native"] == "wide"
    assert run.machine(list(name))["native"] == "float32 and float16: wide; bfloat16: pairs"


def test_the_chart(tmp_path):
    path = tmp_path / "chart.png"
    growth = [made_up(case) for case in GROWTH]
    chart.draw([made_up(), made_up(SMALL[1], "bfloat16"), *growth], ABOUT, str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        chart.draw([], ABOUT, str(path))


def test_the_command_writes_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CASES", SMALL)
    paths = {name: str(tmp_path / name) for name in ("a.json", "a.md", "a.png")}
    asked = {"names": "sdpa", "seconds": 1e-4, "dtypes": "float32"}
    seen = []
    first = command.bench(
        ["prefill"], **asked, json_path=paths["a.json"], markdown_path=paths["a.md"],
        png_path=paths["a.png"], on_start=lambda *what: seen.append(what),
    )  # fmt: skip
    assert seen[0] == ("prefill, float32", 0, 3) and len(seen) == 3
    assert first.changes is None and len(first.tables) == 1
    assert all((tmp_path / name).stat().st_size > 500 for name in paths)
    again = command.bench(["grouped"], **asked, compare_path=paths["a.json"])
    assert len(again.changes) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"words": ["nothing"]}, "no case is named like nothing; --list shows them"),
        ({"threads": "0"}, "--threads is '0'; it must be whole numbers or all, as in 1,all"),
        ({"dtypes": "float64"}, "--dtypes names 'float64'; it must be of float32, bfloat16"),
        ({"names": "onnx"}, "--peers names 'onnx'; it must be of sdpa, flex"),
        ({"seconds": 0}, "--seconds is 0; it must be above 0 and at most 600"),
        ({"json_path": "/nowhere/at/all.json"}, "is in a folder that does not exist; make it"),
        ({"json_path": "."}, "^. is a folder; name a file in it"),
        ({"png_path": "chart.xyz"}, "--png chart.xyz must end in .png, .pdf or .svg"),
        ({"compare_path": sys.executable}, "cannot be read: .utf-8."),
        ({"compare_path": "/nowhere.json"}, "--compare /nowhere.json cannot be read"),
    ],
)
def test_bad_options_are_told_before_anything_runs(options, text):
    def never(*what):
        raise AssertionError("a case was started")

    with pytest.raises(ValueError, match=text):
        command.bench(**{"words": [], "on_start": never, **options})


def test_a_case_that_the_list_names_is_found():
    """Also one of those that only --growth runs otherwise; no dtypes are all dtypes."""
    for case in (*CASES, *GROWTH):
        assert case.name in {c.name for c in command.select([case.name], growth=False)}
    assert command.select([], growth=False) == list(CASES)


def test_the_list_names_every_case():
    lines = command.listing([])
    assert len(lines) == len(CASES) + len(GROWTH)
    assert all(case.name in line for case, line in zip((*CASES, *GROWTH), lines, strict=True))


def test_the_command_line_shows_what_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "CASES", SMALL)
    path = str(tmp_path / "a.json")
    asked = ["bench", "grouped", "--peers", "sdpa", "--seconds", "0.0001", "--dtypes", "float32"]
    first = CliRunner().invoke(app, [*asked, "--json", path], env={"COLUMNS": "80"})
    again = CliRunner().invoke(app, [*asked, "--compare", path], env={"COLUMNS": "80"})
    assert (first.exit_code, again.exit_code) == (0, 0), first.output + again.output
    assert "then and now" in again.output and "then and now" not in first.output
    (change,) = re.findall(r"[+-]\d+%", again.output)
    assert change and max(map(len, again.output.splitlines())) <= 80

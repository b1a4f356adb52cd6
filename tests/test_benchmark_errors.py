"""`clearhead bench --accuracy`: its errors are against the definition, and bad options are told."""

import json

import pytest
import torch
from typer.testing import CliRunner

from clearhead import attention_by_definition
from clearhead.benchmarks import accuracy, command
from clearhead.cli import app

SETTINGS = tuple(accuracy.Setting(rule, 5, S) for rule in accuracy.RULES for S in (13, 1100))


@pytest.fixture
def small_draws(monkeypatch):
    monkeypatch.setattr(accuracy, "SETTINGS", SETTINGS)
    monkeypatch.setattr(accuracy, "FEWEST_SCORES", 400)
    monkeypatch.setattr(accuracy, "MOST_ROWS", 17)


@pytest.mark.usefixtures("small_draws")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_errors_are_against_the_definition(setting):
    """Square calls and last rows of long ones, and torch's rule where it is aligned otherwise."""
    draw = accuracy.Draw(setting.D, setting.S, torch.float32, 3.0, seed=1)
    query = draw.query[:, :, -8:] if setting.rule == "one row" else draw.query
    causal = {"is_causal": True} if setting.rule == "causal" else {}
    gold = attention_by_definition(query, draw.key, draw.value, **causal)
    assert query.shape[1] == (2 if setting.S == 13 else 1)
    for found, close in (
        (draw.gold(setting.rule), 1e-12),
        (draw.ours(setting.rule), 1e-5),
        (draw.torchs(setting.rule), 1e-5),
    ):
        torch.testing.assert_close(found.double(), gold, rtol=0, atol=close)


@pytest.mark.usefixtures("small_draws")
@pytest.mark.parametrize("dtype", accuracy.DTYPES)
def test_a_ratio_of_errors_is_ours_over_torchs(dtype, monkeypatch):
    """A planted error of known size: 1 in one element of each draw, 3 in another of one."""
    planted = {"ours": iter([3.0, 1.0]), "torchs": iter([1.0, 1.0])}

    def wrong(name):
        def out(draw, rule):
            found = draw.gold(rule)
            found[0, 0, 0, 0] += next(planted[name])
            return found

        return out

    for name in planted:
        monkeypatch.setattr(accuracy.Draw, name, wrong(name))
    setting = accuracy.Setting("full", 5, 7)
    (found,) = accuracy.measure([setting], dtypes=[dtype], draws=2)
    assert (found.draws, found.rows) == (2, 7) and found.heads * 49 <= accuracy.FEWEST_SCORES
    count = found.heads * 7 * 5
    assert found.ours == pytest.approx(((10 / 2 / count) ** 0.5, 2, 3))
    assert found.torch == pytest.approx(((1 / count) ** 0.5, 1, 1))
    assert found.ratios == pytest.approx((5**0.5, 2, 3))


@pytest.mark.usefixtures("small_draws")
def test_the_seeds_count_from_the_first():
    setting = accuracy.Setting("full", 5, 13)

    def error(draws, first):
        return next(accuracy.measure([setting], dtypes=["float32"], draws=draws, first=first)).ours

    parts = [error(1, first) for first in (4, 5, 6)]
    assert len({part.rms for part in parts}) == 3 and error(1, 0) not in parts
    assert error(3, 4) == pytest.approx(
        (
            (sum(part.rms**2 for part in parts) / 3) ** 0.5,
            sum(part.worst for part in parts) / 3,
            max(part.most for part in parts),
        )
    )


@pytest.mark.usefixtures("small_draws")
def test_the_command_writes_its_errors(tmp_path):
    json_path, markdown_path = str(tmp_path / "a.json"), str(tmp_path / "a.md")
    seen = []
    results = command.bench_accuracy(
        ["13 keys"], dtypes="float32,float16", draws=2, spread=2.0, json_path=json_path,
        markdown_path=markdown_path, on_start=lambda *what: seen.append(what),
    )  # fmt: skip
    assert seen == [("D 5, 13 keys, float32", 0, 2), ("D 5, 13 keys, float16", 1, 2)]
    assert [title for title, _ in results.tables] == [
        f"{rule}, {dtype}" for dtype in ("float32", "float16") for rule in accuracy.RULES
    ]
    ((name, figures),) = results.tables[0][1]
    assert name == "D 5, 13 keys" and len(figures) == 5 and all(0 < f < 10 for f in figures)
    assert "2 draws of normal numbers, queries 2 times as large." in results.drawn
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["key"] for row in rows[:2]] == [
        "full, D 5, 13 keys, float32", "causal, D 5, 13 keys, float32"
    ]  # fmt: skip
    assert rows[0]["ratios"]["rms"] == pytest.approx(figures[0])
    text = (tmp_path / "a.md").read_text()
    assert f"| full | 5 | 13 | {rows[0]['heads']} x 13 | {figures[0]:.2f} |" in text
    assert "### float16" in text and "| **one row** | all | all |  |" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"words": ["nothing"]}, "no setting is named like nothing; --accuracy --list shows them"),
        (
            {"dtypes": "float64"},
            "--dtypes names 'float64'; it must be of float32, bfloat16, float16",
        ),
        ({"draws": 0}, "--draws is 0; it must be at least 1"),
        ({"spread": 0.0}, "--spread is 0.0; it must be above 0"),
        ({"markdown_path": "/nowhere/at/all.md"}, "is in a folder that does not exist; make it"),
    ],
)
def test_bad_options_of_errors_are_told_before_anything_runs(options, text):
    def never(*what):
        raise AssertionError("a setting was started")

    with pytest.raises(ValueError, match=text):
        command.bench_accuracy(**{"words": [], "on_start": never, **options})


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "80"})


@pytest.mark.usefixtures("small_draws")
def test_errors_on_a_terminal():
    result = invoke("--accuracy", "full, D 5, 13", "--draws", "2", "--dtypes", "float32")
    assert result.exit_code == 0, result.output
    assert "full, float32" in result.output and "D 5, 13 keys" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert invoke("--accuracy", "--list", "one row").output.splitlines() == [
        "one row, D 5, 13 keys", "one row, D 5, 1100 keys"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--accuracy", "--threads", "1"], "--threads belongs to times, which --accuracy does not"),
        (["--accuracy", "--png", "a.png"], "--png belongs to times, which --accuracy does not"),
        (["--draws", "3"], "--draws belongs to --accuracy; add that, or leave --draws out"),
    ],
)
def test_options_of_times_and_of_errors_are_told_apart(words, text):
    result = invoke(*words)
    assert result.exit_code == 2 and text in result.stderr

"""What `see` and `walkthrough` write: pages and figures of a model's run."""

import json
import math
import re

import pytest
import torch
from typer.testing import CliRunner

from clearhead import hf
from clearhead.cli import app
from clearhead.inspection.report import MOST_TOKENS, Report

SENTENCE = "The king thanked the queen because she had saved the ship."


def facts_of(text):
    return json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])


def report_of(L=7, layers=2, H=4, Hkv=2, D=8, change=None):
    text = " ".join(f"w{n}" for n in range(L))
    ends = [match.end() for match in re.finditer(r"\S+", text)]
    offsets = [(end - 2, end) for end in ends]
    report = Report(text, offsets, [False] * L, ["x"] * L, (layers, H))
    made = []
    for layer in range(layers):
        q, k, v = torch.randn(H, L, D), torch.randn(Hkv, L, D), torch.randn(Hkv, L, D)
        scores = q @ k.repeat_interleave(H // Hkv, 0).transpose(1, 2) / math.sqrt(D)
        weights = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf).softmax(-1)
        if change is not None:
            weights = change(weights)
        report.take(layer, q, k, v, None)
        report.add(layer, weights)
        made.append((weights, v))
    return report, made


def test_steps_are_those_of_the_model():
    report, made = report_of()
    steps = {step.name: step.values for step in report.steps([(0, 3), (1, 0)])}
    torch.testing.assert_close(steps["weights"], torch.stack([made[0][0][3], made[1][0][0]]))
    expected = torch.stack([made[0][0][3] @ made[0][1][1], made[1][0][0] @ made[1][1][0]])
    torch.testing.assert_close(steps["context"], expected)


def test_weights_that_come_about_otherwise_have_no_steps():
    report, _ = report_of(change=lambda weights: weights.sqrt() / weights.sqrt().sum(-1, True))
    assert report.steps([(0, 0)]) == []
    tours = facts_of(report.html("m", ""))["steps"]
    assert [tour["name"] for tour in tours] == ["Five words by hand"]


def test_long_texts_have_no_steps_in_numbers():
    assert report_of(L=MOST_TOKENS)[0].steps([(0, 0)]) != []
    assert report_of(L=MOST_TOKENS + 1)[0].steps([(0, 0)]) == []


def test_a_model_that_shows_no_queries_has_a_page_all_the_same():
    report = Report("a b", [(0, 1), (2, 3)], [False, False], ["a", "b"], (1, 1))
    report.add(0, torch.tensor([[[1.0, 0.0], [0.25, 0.75]]]))
    facts = facts_of(report.html("m", "about"))
    assert facts["attention"]["tokens"] == ["a", " b"] and facts["start"] == "three"
    assert "max_logit" not in facts["attention"]["statistics"]


def test_roles_choose_the_first_panel_and_the_figure(tmp_path):
    report, _ = report_of()
    roles = [("previous token", 1, 3, 0.8, 0.1, 40, 0.8, None)]
    facts = facts_of(report.html("m", "", roles, [("induction", 0, 2, 0.9)]))
    assert [(one["layer"], one["head"]) for one in facts["three"]] == [(1, 3)]
    assert [(b["layer"], b["head"], b["short"]) for b in facts["badges"]] == [(0, 2, "ind")]
    told = report.write("m", "", tmp_path / "a.html", tmp_path / "a.svg", roles=roles)
    assert [line.split(": ")[0] for line in told] == [
        str(tmp_path / "a.html"),
        str(tmp_path / "a.svg"),
    ]
    assert "head 1.3" in (tmp_path / "a.svg").read_text()
    report.write("m", "", picture=tmp_path / "b.svg", head=(0, None))
    drawn = re.findall(r"head \d\.\d", (tmp_path / "b.svg").read_text())
    assert set(drawn) == {"head 0.0", "head 0.1", "head 0.2", "head 0.3"}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "clearhead-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(folder))
        return hf.load()


@pytest.fixture
def command(smollm2, monkeypatch):
    monkeypatch.setattr(hf, "load", lambda name, progress: smollm2)

    def command(*args):
        return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})

    return command


def test_see_writes_a_page_and_a_figure_and_says_their_sizes(command, tmp_path, smollm2):
    html, png = tmp_path / "heads.html", tmp_path / "heads.png"
    result = command("see", SENTENCE, "--html", html, "--png", png)
    assert result.exit_code == 0, result.output
    first, *told = result.output.splitlines()
    assert "30 layers x 9 heads, 12 tokens" in first
    assert re.fullmatch(r".*heads\.html: \d+ kB", told[0])
    assert re.fullmatch(r".*heads\.png: \d+ kB", told[1]) and len(told) == 2
    facts = facts_of(html.read_text())
    assert facts["attention"]["heads"] == [9] * 30
    assert len(facts["steps"]) == 2  # the model's own scores give its own weights
    assert "".join(facts["attention"]["tokens"]) == SENTENCE

    # The page's statistics are the model's: from weights taken by another way.
    model, tokenizer = smollm2
    weights = []
    hf.attentions(model, hf.tokenize(model, tokenizer, SENTENCE), lambda _, w: weights.append(w))
    previous = weights[16].diagonal(-1, 1, 2).mean(1)
    found = facts["attention"]["statistics"]["previous"][16 * 9 : 17 * 9]
    torch.testing.assert_close(torch.tensor(found), previous, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--full", "maps"), "--full is maps; it must be maps or qk, and goes with --html"),
        (("--html", "x.html", "--full", "all"), "--full is all; it must be maps or qk"),
        (("--png", "x.jpg"), "the figure is x.jpg; its name must end in .png, .pdf or .svg"),
        (("--html", "no/x.html"), "no/x.html could not be written: No such file or directory"),
        (("--png", "no/x.png"), "no/x.png could not be written: No such file or directory"),
    ],
)
def test_see_answers_bad_options_with_a_line(command, args, text):
    result = command("see", SENTENCE, *args)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_walkthrough_writes_a_page_that_opens_at_the_steps(command, tmp_path):
    file = tmp_path / "steps.html"
    result = command("walkthrough", "--heads", 3, "--html", file)
    assert re.fullmatch(r".*steps\.html: \d+ kB\n", result.output)
    facts = facts_of(file.read_text())
    assert facts["start"] == "steps" and facts["attention"]["heads"] == [3]

"""The roles of SmolLM2's heads, measured once, and `clearhead see` with them."""

import json
import re
import shutil

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from clearhead import hf
from clearhead.cli import app
from clearhead.cli.known_roles import known_roles

SENTENCE = "The dog fetched the ball because she was fast."


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The default model, in a cache folder that keeps its roles too."""
    folder = tmp_path_factory.getbasetemp() / "clearhead-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLEARHEAD_CACHE", str(folder))
        yield hf.load()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def table(smollm2):
    return known_roles(*smollm2, False, lambda *what: None)


@pytest.fixture
def see(smollm2, table, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hf, "load", lambda name, progress: smollm2)

    def run(*args, width=80):
        monkeypatch.setattr("clearhead.cli.known_roles.roles", None)  # kept, not measured again
        result = CliRunner().invoke(app, ["see", *map(str, args)], env={"COLUMNS": str(width)})
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        return result.stdout

    return run


# What plays each role, the least it must score on texts it was not chosen by, and the most that
# the best simple rule may.
KNOWN = {
    "previous": ((16, 0), 0.7, 0.2),
    "duplicate": ((14, 3), 0.6, 0.2),
    "induction": ((18, 6), 0.8, 0.2),
    "verb_subject": ((13, 8), 0.7, 0.4),
    "object_verb": ((10, 1), 0.7, 0.5),
    "noun_determiner": ((7, 6), 0.8, 0.75),
    "pronoun_noun": ((9, 4), 0.8, 0.5),
}


@pytest.mark.parametrize("role", KNOWN)
def test_heads_that_are_known(table, role):
    row, (head, least, most) = table.row(role), KNOWN[role]
    assert (row.layer, row.head) == head and row.found
    assert row.held_out > least and row.score > least
    assert max(row.chance, row.rule or 0, row.others or 0) <= most
    assert row.median < row.held_out / 2
    assert table.heads[head].role == role
    if row.weight is not None:
        assert row.weight > 0.45


def test_what_was_not_found(table):
    row = table.row("noun_adjective")
    assert not row.found and row.held_out < row.rule


def test_most_heads_rest_past_the_second_layer(table):
    sinks = table.scores["sink"]
    assert sum(score > 0.5 for layer in sinks[2:] for score in layer) > 0.6 * 28 * 9
    assert not any(score > 0.6 for layer in (0, 1, 10, 11) for score in sinks[layer])
    assert table.row("sink").held_out > 0.95


def test_leaders(table):
    heads = [(row.layer, row.head) for row in table.leaders()]
    assert heads[0] == (9, 4) and heads[-1] == (16, 0) and (10, 1) in heads
    assert table.row("local").held_out < 1.3 < 3 < table.row("local").chance


def test_what_the_model_needs_and_what_it_does_not(table):
    induction = table.row("induction").effect
    assert len(induction.heads) == 4 and induction.needed
    assert induction.after - induction.before > 3
    assert max(induction.controls) - induction.before < 2
    before, after = induction.elsewhere  # ordinary sentences do without
    assert abs(after - before) < 0.1
    # Not what one might think: the logits still tell the right noun without the pronoun's head.
    pronoun = table.row("pronoun_noun").effect
    assert not pronoun.needed and pronoun.before > 0.3


# ---- the command ----


def test_see_begins_with_three_heads(see):
    lines = see(SENTENCE).splitlines()
    assert all(cell_len(line) <= 80 for line in lines)
    at = lines.index("Why several heads: each looks for something else")
    titles = [line for line in lines[at + 1 : at + 9] if line and not line.startswith(" ")]
    assert [title.split(":")[0] for title in titles] == [
        "9.4 for pronouns",
        "10.1 for syntax",
        "16.0 for what is near",
    ]
    assert any("ball → fetched .95" in line for line in lines[at : at + 8])
    assert any(re.match(r"ball +fetched .* 10\.1 its verb", line) for line in lines)
    assert any(re.search(r"dog +━.* 11\.1 previous", line) for line in lines)
    assert "Which head does what, on texts made to tell" in lines
    assert lines[-1].startswith("mean .61; most ")
    assert see("Hello").endswith("A text of one token has nothing to look at but itself.\n")


def test_see_only_roles(see):
    told = see("--roles")
    assert "induction" in told and "What the model does without these heads" in told
    assert "Why several heads" not in told and "without 18.6, 17.4" in " ".join(told.split())
    assert all(cell_len(line) <= 50 for line in see("--roles", width=50).splitlines())


def test_see_json_holds_the_roles(see, table):
    seen = json.loads(see(SENTENCE, "--json"))
    assert seen["roles"] == json.loads(json.dumps(table.to_dict()))
    assert [(head["layer"], head["head"]) for head in seen["leaders"]] == [(9, 4), (10, 1), (16, 0)]
    [row] = [row for row in seen["roles"]["rows"] if row["role"] == "induction"]
    assert row["title"] == "induction" and row["effect"]["needed"] is True
    by_verb = next(link for link in seen["links"][4] if (link["layer"], link["head"]) == (10, 1))
    assert by_verb["role"] == "object_verb" and by_verb["is"] == "its verb"
    only = json.loads(see("--roles", "--json"))
    assert only["roles"] == seen["roles"] and "links" not in only


def test_see_a_layer_leaves_the_tables_out(see):
    told = see(SENTENCE, "--layer", 10, "--head", 1)
    assert "Which head does what" not in told and "Why several" not in told
    assert "its verb" in told and "Head 1 of layer 10" in told

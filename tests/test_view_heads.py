"""Roles in a terminal: what a link is called, the heads at work, the table and the effects."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from clearhead.view.heads import explains, show_effects, show_leaders, show_roles


def printed(show, *args, width=80, encoding="utf-8", **options):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(Console(file=out, width=width, highlight=False, markup=False), *args, **options)
    out.flush()
    lines = out.buffer.getvalue().decode(encoding).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    return lines


def row(role="object_verb", title="object to verb", **changes):
    base = {
        "role": role,
        "title": title,
        "layer": 10,
        "head": 1,
        "score": 0.731,
        "held_out": 0.768,
        "n": [48, 47],
        "chance": 0.1,
        "rule": 0.33,
        "others": 0.42,
        "median": 0.0,
        "found": True,
        "effect": {"needed": True, "said": "loss 2.00 -> 3.00"},
        "not_measured": None,
    }
    return base | changes


LOCAL = row("local", "local", layer=2, held_out=1.12, score=1.1, chance=4.0, rule=None, others=None)
MISSING = row("noun_adjective", "noun to adjective", found=False, effect=None, not_measured="why")


@pytest.mark.parametrize(
    ("role", "i", "j", "text", "meaning"),
    [
        ("previous", 2, 1, "a b c", "previous"),
        ("previous", 2, 0, "a b c", ""),
        ("duplicate", 2, 0, "So it so", "same again"),
        ("duplicate", 2, 1, "So it so", ""),
        ("induction", 2, 1, "so it So", "what followed"),
        ("induction", 2, 0, "so it so", ""),
        ("object_verb", 4, 2, "The dog fetched the ball", "its verb"),
        ("object_verb", 3, 2, "The dog fetched the ball", ""),  # an article has no verb
        ("object_verb", 4, 3, "The dog fetched the ball", ""),  # and is none
        ("verb_subject", 1, 0, "she sang", "its subject"),
        ("verb_subject", 1, 0, "because sang", ""),
        ("noun_determiner", 1, 0, "The dog", "its determiner"),
        ("noun_determiner", 2, 1, "a tall dog", ""),
        ("noun_adjective", 2, 1, "a tall dog", "its adjective"),
        ("pronoun_noun", 2, 0, "dogs eat them", "its noun"),
        ("pronoun_noun", 2, 0, "dogs eat meat", ""),
        ("noun_adjective", 1, 0, "tall .", ""),
        ("object_verb", 0, 1, "meat eaten", ""),  # only looks back
        ("sink", 1, 0, "a b", ""),
        ("local", 1, 0, "a b", ""),
        (None, 1, 0, "a b", ""),
    ],
)
def test_what_a_link_is(role, i, j, text, meaning):
    assert explains(role, i, j, text.split()) == meaning


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table(width):
    lines = printed(show_roles, [row(), LOCAL, MISSING], layers=30, width=width)
    told = " ".join(lines)
    assert told.startswith("Which head does what, on texts made to tell")
    start = next(line for line in lines if line.startswith("object to verb"))
    assert start.split()[3:5] == ["10.1", ".73" if width >= 80 else ".77"]
    assert "held" in told and "No head was found for noun to adjective: the baselines" in told
    if width >= 80:
        names = ["head", "score", "held", "chance", "rule", "others", "median", "n", "needed"]
        assert lines[1].split() == names
        assert " ".join(lines[2].split()) == "object to verb 10.1 .73 .77 .10 .33 .42 .00 47 yes"
        assert " ".join(lines[3].split()) == "local 2.1 1.1 1.1 4.0 - - 0.0 47 yes"
        assert lines[4].split()[-1] == "?"
    assert printed(show_roles, [], layers=1)[1] == "No role could be measured in this model."


def test_heads_at_work():
    leaders = [
        (row(), [(4, (2, 0.95, 10, 1))], 0.41),
        (LOCAL, [], 0.2),
        (row("pronoun_noun", "pronoun to noun", rule=0.5, others=0.1), [], 0.5),
    ]
    words = ["The", "dog", "fetched", "the", "ball"]
    lines = printed(show_leaders, words, leaders, layers=30)
    assert lines[1:] == [
        "10.1 for syntax: object to verb, .77 in tests (best simple rule .42)",
        "    ball → fetched .95   (sink .41)",
        "2.1 for what is near: local, 1.1 tokens away in tests (by chance 4.0)",
        "    nothing here that it looks at   (sink .20)",
        "10.1 for pronouns: pronoun to noun, .77 in tests (best simple rule .50)",
        "    nothing here that it looks at   (sink .50)",
    ]
    assert "    ball -> fetched .95   (sink .41)" in printed(
        show_leaders, words, leaders, layers=30, encoding="ascii"
    )
    assert printed(show_leaders, words, [], layers=30)[1] == (
        "No such head was found in this model."
    )


def test_effects():
    lines = printed(show_effects, [row(), MISSING])
    assert lines[1] == "object to verb     loss 2.00 -> 3.00"
    assert lines[2] == "noun to adjective  not measured: why"

"""Roles in words, and the choice of the three heads that a page begins with."""

import pytest

from clearhead.view.roles import ABOUT, THREE, badges, evidence, measured, rows, three

TABLE = [
    ("pronoun to noun", 9, 4, 1.0, 0.5, 128, 0.98, "pronouns right 0.97 -> 0.71"),
    ("verb to subject", 13, 8, 0.66, 0.38, 70, None, None),
    ("object to verb", 10, 1, 0.92, 0.41, 70, 0.9, None),
    ("noun to adjective", 16, 0, 0.83, 0.83, 70, 0.8, None),
    ("previous token", 11, 1, 0.7, 0.1, 400, 0.7, -0.25),
    ("previous token", 16, 0, 0.73, 0.1, 400, 0.72, None),
    ("something new", 0, 0, 0.9, None, None, None, None),
]


def test_rows_keep_the_order_of_roles_and_put_the_best_head_first():
    found = rows(TABLE)
    assert [(row["role"], row["head"]) for row in found][-3:] == [
        ("previous token", 0), ("previous token", 1), ("something new", 0),
    ]  # fmt: skip
    assert [row["colour"] for row in found] == [0, 1, 2, 3, 4, 4, 5]
    assert [row["short"] for row in found] == ["pron", "subj", "obj", "adj", "prev", "prev", "role"]
    assert found[5]["ablation"] == "-0.25"


def test_three_heads_are_the_farthest_past_their_baselines():
    found = three(rows(TABLE), ["The", " king", " saw", " she", " He"])
    assert [(one["layer"], one["head"]) for one in found] == [(9, 4), (10, 1), (16, 0)]
    pronoun = found[0]
    assert pronoun["focus"] == [3, 4]
    assert [bar["value"] for bar in pronoun["bars"]] == [1.0, 0.98, 0.5]
    assert "128 test cases" in pronoun["evidence"] and "0.71" in pronoun["evidence"]
    assert all(one["fails"] and one["does"] and one["title"] for one in found)


def test_a_role_no_better_than_its_baseline_is_none():
    table = [("noun to adjective", 16, 0, 0.83, 0.83, 70, 0.8, None)]
    assert three(rows(table), []) == []
    table = [("pronoun to noun", 1, 1, 0.95, 0.5, 70, 0.55, None)]  # only where it was chosen
    assert three(rows(table), []) == []


def test_the_evidence_says_no_more_than_was_measured():
    (row,) = rows([("induction", 1, 2, 0.5, None, None, None, None)])
    assert evidence(row) == "It reaches 50 %."


def test_badges_share_the_colours_of_rows():
    found = badges([("object to verb", 1, 2, 0.5), ("local", 3, 4, 1.5)], rows(TABLE))
    assert [(one["short"], one["colour"]) for one in found] == [("obj", 2), ("near", 6)]


def test_every_known_role_is_told_in_full():
    for role, about in ABOUT.items():
        assert about.title and about.does and about.fails, role
        assert len(about.short) <= 4
    assert {about.group for about in ABOUT.values()} == {*THREE, ""}


@pytest.mark.parametrize("sink", [[0.1, 0.2, 0.9, 0.3], [0.9, 0.9, 0.9, 0.9]])
def test_without_roles_the_heads_that_stand_out(sink):
    found = measured(
        {
            "sink": sink,
            "previous": [0.1, 0.8, 0.1, 0.2],
            "distance": [5.0, 9.0, 1.0, 2.0],
            "entropy": [0.9, 0.1, 0.0, 0.5],
        },
        [1, 3],
    )
    assert [(one["layer"], one["head"]) for one in found] == [(1, 0), (0, 0), (1, 2)]
    assert "This text alone" in found[0]["evidence"]


def test_a_model_with_few_heads_has_fewer():
    statistics = {name: [0.5] for name in ("sink", "previous", "distance", "entropy")}
    assert len(measured(statistics, [1])) == 1

"""Roles of heads: the sentences say what they claim, planted heads are found, decoys are not."""

import itertools
import json
import re
from collections import Counter, defaultdict

import pytest
import torch

import clearhead
from clearhead.inspection import sentences
from clearhead.inspection.effects import unmeasured
from clearhead.inspection.links import Words, words_of
from clearhead.inspection.role_table import (
    ROLES,
    SYNTAX,
    Effect,
    RoleTable,
    lift,
    tabulate,
)
from clearhead.inspection.sentences import Pair
from clearhead.inspection.tally import Tally, located

TEXTS = list(sentences.syntax())
PRONOUNS = list(sentences.pronouns())


def word(text, span):
    return text[slice(*span)]


def words_between(text, a, b):
    return text[a[1] : b[0]].split()


def tokens_of(text):
    """One token for each word or mark, with its place."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


# ---- the sentences ----


def test_every_mark_is_read_and_no_marked_word_comes_first():
    assert len(TEXTS) == 96 and len(TEXTS) + 2 * len(sentences.PRONOUNS[0]) >= 110
    assert len({sentence.text for sentence in TEXTS}) == 96
    for line, sentence in zip(sentences.SYNTAX.strip().splitlines(), TEXTS, strict=True):
        text = sentence.text
        assert text == re.sub(r"/\w", "", line) + "." and "/" not in text
        marked = {kind: name for name, kind in re.findall(r"([\w']+)/(\w)", line)}
        assert set(marked) >= set("sov") and set(marked) <= set("sovda")
        of_role = {pair.role: pair for pair in sentence.pairs}
        assert word(text, of_role["verb_subject"].source) == marked["v"]
        assert word(text, of_role["verb_subject"].target) == marked["s"]
        assert word(text, of_role["object_verb"].source) == marked["o"]
        assert word(text, of_role["object_verb"].target) == marked["v"]
        for pair in sentence.pairs:
            assert 0 < pair.target[0] < pair.target[1] <= pair.source[0] < pair.source[1]
            assert " " in text[: pair.target[0]] and pair.rival is None


def test_adjectives_that_stand_right_before_their_noun_are_not_counted():
    pairs = [(s, p) for s in TEXTS for p in s.pairs if p.role == "noun_adjective"]
    assert len(pairs) >= 40
    assert all(words_between(s.text, p.target, p.source) for s, p in pairs)
    made = sentences._marked("Now the/d red/a dog/s saw/v a/d red/a wool coat/o.", 0)
    found = [(word(made.text, p.source), p.role) for p in made.pairs]
    assert ("coat", "noun_adjective") in found and ("dog", "noun_adjective") not in found
    assert ("dog", "noun_determiner") in found and ("coat", "noun_determiner") in found


def test_no_fixed_distance_explains_the_sentences():
    for role, most in zip(SYNTAX, (0.4, 0.4, 0.75, 0.7), strict=True):
        for half in (0, 1):
            far = Counter(
                len(words_between(s.text, p.target, p.source))
                for s in TEXTS
                for p in s.pairs
                if p.role == role and s.half == half
            )
            assert sum(far.values()) >= 20
            assert max(far.values()) <= most * sum(far.values()), (role, far)


def test_what_a_pronoun_means_turns_on_its_gender_alone():
    assert len(PRONOUNS) == 128
    nearer, by_frame = Counter(), defaultdict(list)
    for sentence in PRONOUNS:
        [pair] = sentence.pairs
        text = sentence.text
        cue, noun, rival = (word(text, span) for span in (pair.source, pair.target, pair.rival))
        assert text.endswith(" " + cue) and cue in ("he", "she", "his", "her")
        [couple] = [c for people in sentences.PEOPLE for c in people if noun in c]
        assert noun == couple[cue in ("she", "her")] and {noun, rival} == set(couple)
        nearer[sentence.half, pair.target > pair.rival] += 1
        by_frame[text.rpartition(" ")[0]].append((cue, noun, rival))
    assert set(nearer.values()) == {32}
    for twins in by_frame.values():  # the same text but for the pronoun: the answers swap
        [(cue, noun, rival), (other, *answer)] = twins
        assert cue != other and answer == [rival, noun]
    first, second = sentences.PEOPLE
    assert not set(itertools.chain(*first)) & set(itertools.chain(*second))
    assert not set(sentences.PRONOUNS[0]) & set(sentences.PRONOUNS[1])


def test_the_questions_are_balanced():
    asked = list(sentences.continued())
    assert len(asked) == len({text for text, _, _ in asked}) == 32
    first = Counter(
        re.findall(r"\w+", text).index(right) < re.findall(r"\w+", text).index(wrong)
        for text, right, wrong in asked
    )
    assert first == {True: 16, False: 16}
    for text, right, _ in asked:
        she = "she" in text.split()
        assert she != ("he" in text.split())
        assert any(right == couple[she] for people in sentences.PEOPLE for couple in people)


# ---- planted heads ----

ORACLE, DECOY, PERSON, NEARER = (1, 1), (1, 2), (2, 0), (2, 1)


def planted(probe, L, pairs=(), start=0, R=0):
    """Causal weights (3, 3, L, L) of heads whose roles are known.

    0.0 the token before, 0.1 the first token, 0.2 itself; 1.0 all alike, 1.1 whatever a pair's
    right word is, for objects only, 1.2 two words back; 2.0 the person a pronoun means, 2.1 the
    nearer person, 2.2 what followed the last occurrence.
    """
    rows = torch.arange(L)
    first = torch.zeros(L, dtype=torch.long)
    targets = torch.stack([first] * 9).view(3, 3, L)
    targets[0, 0] = (rows - 1).clamp(min=0)
    targets[0, 2] = rows
    targets[1, 2] = (rows - 2).clamp(min=0)
    for role, source, target, rival in pairs:
        token = probe.index(target)
        if role == "object_verb":
            targets[1, 1, source] = token
        if rival is not None:
            targets[2, 0, source] = token
            targets[2, 1, source] = max(token, probe.index(rival))
    if R:
        again = rows[start + R : start + 2 * R]
        targets[2, 2, again] = again - R + 1
    weights = torch.nn.functional.one_hot(targets, L).float()
    weights[1, 0] = torch.ones(L, L).tril() / (rows + 1)[:, None]
    return weights


@pytest.fixture(scope="module")
def tally():
    made = Tally()
    for sentence in [*TEXTS, *PRONOUNS]:
        spans = tokens_of(sentence.text)
        words = words_of(sentence.text, spans)
        pairs = located(sentence.pairs, spans, words)
        assert len(pairs) == len(sentence.pairs)
        weights = planted(words.word_of, len(spans), pairs)
        special = [False] * len(spans)
        made.add_text(weights, words, special, pairs, sentence.half, sentence in TEXTS)
    for number, R in enumerate([5, 7, 8, 11, 13, 13]):
        made.add_repeat(planted([], 2 * R + 3, start=2, R=R, pairs=()), 2, R, number % 2)
    return made


def test_planted_heads_are_found_and_decoys_are_not(tally):
    table = tabulate(tally)
    assert [row.role for row in table.rows] == list(ROLES)
    found = {row.role: (row.layer, row.head) for row in table.rows if row.found}
    assert found == {
        "previous": (0, 0),
        "sink": (0, 1),
        "same": (0, 2),
        "local": (0, 0),
        "induction": (2, 2),
        "object_verb": ORACLE,
        "pronoun_noun": PERSON,
    }
    for role in ("previous", "sink", "same", "induction", "object_verb", "pronoun_noun"):
        row = table.row(role)
        assert row.score == row.held_out == 1 and sum(row.n) > 20
    assert {head: role.role for head, role in table.heads.items()} == {
        (0, 0): "previous",
        (0, 1): "sink",
        (0, 2): "same",
        ORACLE: "object_verb",
        (1, 2): "local",
        PERSON: "pronoun_noun",
        NEARER: "sink",
        (2, 2): "induction",
    }
    assert [row.role for row in table.leaders()] == ["pronoun_noun", "object_verb", "local"]


def test_a_rule_of_distance_scores_what_its_head_scores(tally):
    table = tabulate(tally)
    row = table.row("object_verb")
    distances = Counter(
        len(re.findall(r"\w+|[^\w\s]", word(s.text, (p.target[1], p.source[0])))) + 1
        for s in TEXTS
        for p in s.pairs
        if p.role == "object_verb" and s.half == 1
    )
    assert row.rule == pytest.approx(max(distances.values()) / 48)
    two_back = tally.counts["object_verb"][1].mean[3 * DECOY[0] + DECOY[1]]
    assert float(two_back) == pytest.approx(distances[2] / 48)
    assert float(two_back) <= row.rule < row.held_out
    pronoun = table.row("pronoun_noun")
    assert pronoun.rule == pronoun.chance == 0.5
    assert table.scores["pronoun_noun"][NEARER[0]][NEARER[1]] == 0.5
    assert lift("pronoun_noun", 0.5, pronoun.chance, pronoun.rule) == 0


def test_chance_is_what_looking_at_all_alike_gets(tally):
    rows, before, itself = [], [], []
    for sentence in TEXTS:
        if sentence.half == 1:
            L = len(tokens_of(sentence.text))
            rows += [1 / (i + 1) for i in range(1, L)]
            before += [1 / (i + 1) for i in range(2, L)]
            itself += [1 / (i + 1) for i in range(1, L)]
    table = tabulate(tally)
    for role, some in (("sink", rows), ("previous", before), ("same", itself)):
        mean = sum(some) / len(some)
        assert table.row(role).chance == pytest.approx(mean)
        assert table.row(role).n[1] == len(some)
        assert float(tally.counts[role][1].mean[3]) == pytest.approx(mean)  # head 1.0
    assert float(tally.counts["local"][1].mean[3]) == pytest.approx(table.row("local").chance)
    own = [
        words_of(s.text, tokens_of(s.text)).word_of[len(tokens_of(s.text[: p.source[0]]))]
        for s in TEXTS
        for p in s.pairs
        if p.role == "verb_subject" and s.half == 1
    ]
    assert table.row("verb_subject").chance == pytest.approx(sum(1 / w for w in own) / len(own))


def test_other_words_that_look_at_the_same_one_speak_against_a_head():
    words = Words(["so", "dogs", "often", "eat", "meat", "."], list(range(6)))
    tally = Tally()
    for verb, half in itertools.product((1, 2, 3), (0, 1)):
        weights = torch.zeros(1, 2, 6, 6)
        weights[..., 0] = 1
        weights[0, 0, 4] = torch.eye(6)[verb]  # the object alone looks at the verb
        weights[0, 1, verb + 1 :] = torch.eye(6)[verb]  # and here everything after it
        tally.add_text(weights, words, [False] * 6, [("object_verb", 4, verb, None)], half)
    assert tally.counts["object_verb"][0].by_others.tolist() == [0, 1]
    table = tabulate(tally)
    assert table.row("object_verb").others == 0 and table.row("object_verb").found
    assert table.heads[0, 0].role == "object_verb"
    assert (0, 1) not in table.heads or table.heads[0, 1].role != "object_verb"


# ---- one text at a time ----


def hit(row, word_of=(0, 1, 2, 3), special=(False,) * 4, target=1):
    """Whether the last of four tokens, which looks as in row, hits the target word."""
    weights = torch.zeros(1, 1, 4, 4)
    weights[0, 0, 3] = torch.tensor(row)
    words = Words([str(n) for n in range(max(word_of) + 1)], list(word_of))
    tally = Tally()
    tally.add_text(weights, words, special, [("verb_subject", 3, target, None)])
    return bool(tally.counts["verb_subject"][0].total)


def test_a_hit_is_strict():
    assert hit([0.2, 0.5, 0.3, 0.0])
    assert not hit([0.5, 0.3, 0.2, 0.0])  # the first token counts
    assert not hit([0.0, 0.3, 0.2, 0.5])  # and so does the word itself
    assert not hit([0.0, 0.5, 0.5, 0.0])  # a tie is none
    assert hit([0.4, 0.3, 0.3, 0.0], word_of=(0, 1, 1, 2))  # a word's tokens count together
    assert not hit([0.6, 0.4, 0.0, 0.0], (-1, 0, 1, 2), (True, False, False, False), target=0)


def test_distance_leaves_out_the_sink_and_the_token_itself():
    weights = torch.rand(2, 3, 7, 7).tril()
    weights[0, 1] = torch.eye(7)[0]  # nothing beyond the sink
    weights /= weights.sum(-1, keepdim=True)
    words = Words(list("abcdefg"), list(range(7)))
    tally = Tally()
    for half in (0, 1):
        tally.add_text(weights, words, [False] * 7, half=half)
    far = mass = torch.zeros(2, 3)
    for i, j in itertools.product(range(1, 7), repeat=2):
        if i != j:
            far, mass = far + weights[..., i, j] * (i - j), mass + weights[..., i, j]
    table = tabulate(tally)
    expected = torch.where(mass >= 0.6, far / mass, torch.nan)
    expected[mass / 6 < 0.1] = torch.nan
    told = torch.tensor([[v if v else torch.nan for v in row] for row in table.scores["local"]])
    torch.testing.assert_close(told, expected, equal_nan=True, atol=1e-4, rtol=1e-4)
    assert table.scores["local"][0][1] is None


def test_repeats():
    tally = Tally()
    weights = torch.rand(2, 5, 9, 9).tril()
    tally.add_repeat(weights, 1, 4)
    duplicate = sum(weights[..., t, t - 4] for t in range(5, 9)).flatten() / 4
    induction = sum(weights[..., t, t - 3] for t in range(5, 9)).flatten() / 4
    for role, expected in (("duplicate", duplicate), ("induction", induction)):
        count = tally.counts[role][0]
        torch.testing.assert_close(count.mean.float(), expected)
        assert count.by_chance == pytest.approx(sum(1 / (t + 1) for t in range(5, 9)) / 4)
        assert count.by_rule == 1  # one text has one distance
    tally.add_repeat(torch.rand(2, 5, 8, 8).tril(), 2, 3)
    assert tally.counts["induction"][0].by_rule == pytest.approx(4 / 7)


def test_places_of_words():
    text = "So unbelievable dogs slept"
    spans = [(0, 2), (3, 7), (7, 15), (16, 20), (21, 26)]
    words = words_of(text, spans)
    pairs = (Pair("a", (16, 20), (3, 15)), Pair("b", (21, 26), (16, 20), (3, 15)))
    assert located(pairs, spans, words) == [("a", 3, 1, None), ("b", 4, 2, 1)]
    assert located((Pair("a", (3, 15), (0, 2)),), spans, words) == []  # the first token
    assert located((Pair("a", (21, 26), (16, 20)),), [*spans[:3], spans[4]], words) == []
    joined = [(0, 2), (3, 15), (16, 26)]
    assert located((Pair("a", (21, 26), (16, 20)),), joined, words_of(text, joined)) == []


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.rand(2, 3, 4, 5), "the weights of layer 0 have shape (3, 4, 5); they must be"),
        (torch.rand(3, 4, 4), "the weights of layer 0 have shape (4, 4); they must be"),
        ([], "the weights are of 0 heads in 0 layers; those before were of 6"),
        (torch.rand(2, 1, 4, 4), "the weights are of 2 heads in 2 layers; those before were of 6"),
    ],
)
def test_weights_of_another_shape(weights, message):
    words = Words(list("abcd"), list(range(4)))
    tally = Tally()
    tally.add_text(torch.rand(2, 3, 4, 4), words, [False] * 4)
    with pytest.raises(ValueError) as error:
        tally.add_text(weights, words, [False] * 4)
    assert message in str(error.value)
    with pytest.raises(ValueError, match="0 heads in 0 layers; one is needed"):
        Tally().add_text([], words, [False] * 4)
    with pytest.raises(ValueError, match="3 tokens twice from token 0 on need"):
        tally.add_repeat(torch.rand(2, 3, 7, 7), 0, 3)
    with pytest.raises(ValueError, match="and 8 in all; the weights are of 7"):
        tally.add_repeat(torch.rand(2, 3, 7, 7), 2, 3)


# ---- the table ----


def test_a_table_is_the_same_after_json(tally):
    table = tabulate(tally)
    assert RoleTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table
    without = unmeasured(table, "no time")
    assert all(row.not_measured == "no time" for row in without.rows)
    assert [row[:3] for row in table.summary()][0] == ("previous token", 0, 0)
    assert "local" not in [row[0] for row in table.summary()]
    for broken in ({}, {"version": "0"}, [], None, table.to_dict() | {"rows": [{}]}):
        with pytest.raises(ValueError):
            RoleTable.from_dict(broken)


def test_what_it_takes_to_be_needed():
    def effect(before, after, *controls, is_loss=True):
        made = Effect("loss", is_loss, ((0, 1),), before, after, controls, 3)
        return made.needed

    assert effect(2.0, 2.5, 2.1, 2.4)
    assert not effect(2.0, 2.5, 2.1, 2.6)  # a random head does as much
    assert not effect(2.0, 1.5, 2.1, 1.9)  # better without
    assert not effect(2.0, 2.5)  # nothing to compare with
    assert effect(2.0, 1.5, 2.1, 1.9, is_loss=False)
    assert not effect(2.0, 2.5, 2.1, is_loss=False)


def test_how_far_past_a_baseline():
    assert lift("previous", 0.6, 0.2, None) == pytest.approx(0.5)
    assert lift("object_verb", 0.6, 0.1, 0.2, 0.5) == pytest.approx(0.2)
    assert lift("local", 2.0, 3.0) == pytest.approx(0.5)  # a distance: 1 is perfect
    assert lift("local", float("inf"), 3.0) == lift("same", 1.0, 1.0) == -1


def test_roles_are_public():
    assert clearhead.roles is not None and "roles" in clearhead.__all__

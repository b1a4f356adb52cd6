"""From tokens to words, from weights to links, one number for each head: against plain loops."""

import math

import pytest
import torch

from clearhead.inspection.links import (
    LEAST,
    REMARKABLE,
    STATISTICS,
    Look,
    beyond_habit,
    by_word,
    statistic,
    words_of,
)


def spans(text, *pieces):
    """The places of pieces that follow each other in the text."""
    found, end = [], 0
    for piece in pieces:
        start = text.index(piece, end)
        end = start + len(piece)
        found.append((start, end))
    return found


def random_weights(H, L, causal=False, dtype=torch.float32):
    scores = 3 * torch.randn(H, L, L, dtype=dtype)
    if causal:
        scores.masked_fill_(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


# ---- words ----


@pytest.mark.parametrize(
    ("text", "pieces", "words", "word_of"),
    [
        ("She was fast.", ["She", " was", " fa", "st", "."], "She|was|fast|.", [0, 1, 2, 2, 3]),
        ("fast.", ["fast."], "fast.", [0]),  # no word ends inside a token
        ("of the end", ["of the", " end"], "of the|end", [0, 1]),
        ("don't", ["don", "'", "t"], "don't", [0, 0, 0]),
        ("well-known (yes!)", ["well", "-known", " (", "yes", "!)"], "well-known|(|yes|!)",
         [0, 0, 1, 2, 3]),
        ("a  b", ["a", " ", " b"], "a|b", [0, -1, 1]),  # a token of space is no word
        ("a\n\nb", ["a", "\n\n", "b"], "a|b", [0, -1, 1]),
        ("3.14 + x", ["3", ".", "14", " +", " x"], "3.14|+|x", [0, 0, 0, 1, 2]),
        ("...", ["..", "."], "...", [0, 0]),
        ("犬が好き。", ["犬", "が", "好き", "。"], "犬|が|好き|。", [0, 1, 2, 3]),
        ("हिन्दी में", ["हि", "न्दी", " में"], "हिन्दी|में", [0, 0, 1]),
        ("lost word", ["word"], "word", [0]),  # the tokenizer dropped the first one
        ("a\tb c", ["a\tb", " c"], "a b|c", [0, 1]),
        ("", [], "", []),
    ],
)  # fmt: skip
def test_words_of(text, pieces, words, word_of):
    found = words_of(text, spans(text, *pieces))
    assert found.texts == (words.split("|") if words else [])
    assert found.word_of == word_of


def test_added_tokens_and_bytes_of_one_character():
    # [CLS] has no place; the bytes of a character share theirs.
    found = words_of(
        "hi 🍎s",
        [(0, 0), (0, 2), (3, 4), (3, 4), (3, 4), (4, 5), (0, 0)],
        [True, *[False] * 5, True],
    )
    assert found.texts == ["hi", "🍎", "s"]
    assert found.word_of == [-1, 0, 1, 1, 1, 2, -1]
    # A <s> that stands in the text is a word of it; one that was added is not.
    assert words_of("<s> a", [(0, 3), (4, 5)], [False, False]).texts == ["<s>", "a"]
    assert words_of("<s> a", [(0, 3), (4, 5)], [True, False]).texts == ["a"]


def test_words_keep_every_letter():
    text = "“Quoted,” he said—and left (twice)... ok?!"
    every = [(i, i + 1) for i in range(len(text))]
    words = words_of(text, every)
    assert "".join(words.texts) == text.replace(" ", "")
    assert [words.word_of[i] == -1 for i in range(len(text))] == [c == " " for c in text]


# ---- weights between words ----


def test_by_word_sums_over_keys_and_averages_over_queries():
    word_of = [-1, 0, 1, 1, -1, 2, 2, 2, -1]
    weights = random_weights(3, 9)
    between = by_word(weights, word_of)
    assert between.shape == (3, 3, 3)
    for h in range(3):
        for a in range(3):
            for b in range(3):
                rows = [i for i in range(9) if word_of[i] == a]
                columns = [j for j in range(9) if word_of[j] == b]
                mean = sum(weights[h, i, j] for i in rows for j in columns) / len(rows)
                torch.testing.assert_close(between[h, a, b], mean)


def habit(between, h, i, j, causal):
    """The larger mean of what head h does at this distance and on this word, elsewhere."""
    W = between.shape[-1]
    links = [(a, b) for a in range(W) for b in range(W) if a > b or (not causal and a < b)]
    same = [between[h, a, b] for a, b in links if a - b == i - j and a != i]
    onto = [between[h, a, b] for a, b in links if b == j and a != i]
    return max(sum(part) / len(part) if part else 0.0 for part in (same, onto))


@pytest.mark.parametrize("causal", [True, False])
def test_beyond_habit(causal):
    between = random_weights(2, 6, causal, torch.float64)
    found = beyond_habit(between)
    for h in range(2):
        for i in range(6):
            for j in range(6):
                if i == j or (causal and i < j):
                    continue
                wanted = between[h, i, j] - habit(between, h, i, j, causal)
                torch.testing.assert_close(found[h, i, j], wanted, rtol=0, atol=1e-12)


def test_a_habit_is_no_surprise():
    previous = torch.zeros(1, 7, 7)
    previous[0].diagonal(-1).fill_(0.9)
    assert beyond_habit(previous).max() <= 1e-6
    comma = torch.zeros(1, 7, 7)
    comma[0, 3:, 2] = 0.8
    assert beyond_habit(comma).max() <= 1e-6
    comma[0, 6, 1] = 0.7
    assert beyond_habit(comma)[0, 6, 1] == pytest.approx(0.7)


# ---- the look at a text ----

TEXT = "one two three four five six"
OFFSETS = spans(TEXT, *TEXT.split())
PLAIN = [False] * 6


def test_the_strongest_links_are_the_largest_weights():
    layers = [random_weights(3, 6, causal=True) for _ in range(4)]
    look = Look(TEXT, OFFSETS, PLAIN)
    for layer, weights in enumerate(layers):
        look.add(layer, weights)
    links = look.strongest(2)
    every = torch.stack(layers)  # (layers, H, L, L)
    assert links[0] == [] and links[1] == []  # before word 1 there is only the first token
    for i in range(2, 6):
        assert [link.weight for link in links[i]] == sorted(
            (link.weight for link in links[i]), reverse=True
        )
        largest = every[:, :, i, 1:i].amax((0, 1)).sort(descending=True)
        assert [link.target - 1 for link in links[i]] == largest.indices[:2].tolist()
        for link in links[i]:
            assert link.weight == every[:, :, i, link.target].max() >= LEAST
            assert link.weight == every[link.layer, link.head, i, link.target]
    assert look.causal
    assert len(look.heads) == 4 and all(len(row) == 3 for row in look.heads)


def test_links_lead_neither_to_hidden_tokens_nor_to_the_word_itself():
    # <s> one two three </s>: the first word is no first token here, and the last token was added.
    weights = torch.full((1, 5, 5), 0.02)
    weights[:, :, 0] = weights[:, :, 4] = 0.3
    weights[0].diagonal().fill_(0.5)
    weights[0, 3, 1] = 0.25
    look = Look(
        "one two three",
        [(0, 0), (0, 3), (4, 7), (8, 13), (0, 0)],
        [True, False, False, False, True],
    )
    look.add(0, weights)
    assert look.words.texts == ["one", "two", "three"]
    assert [[link.target for link in row] for row in look.strongest(3)] == [[1, 2], [0, 2], [0, 1]]
    assert look.strongest(1)[2] == [(0, 0.25, 0, 0)]
    assert not look.causal


def test_only_what_was_asked_for_is_linked():
    layers = [(random_weights(3, 6) + 0.1) / 1.6 for _ in range(3)]
    look = Look(TEXT, OFFSETS, PLAIN, layer=1)
    only = Look(TEXT, OFFSETS, PLAIN, layer=1, head=2)
    for layer, weights in enumerate(layers):
        look.add(layer, weights)
        only.add(layer, weights)
    links = [link for row in look.strongest(6) for link in row]
    assert {link.layer for link in links} == {1} and len({link.head for link in links}) == 3
    for i, row in enumerate(only.strongest(6)):
        assert len(row) == 5 - (i > 0)  # all but itself and the first
        for link in row:
            assert (link.layer, link.head) == (1, 2)
            assert link.weight == layers[1][2, i, link.target]
    assert len(only.heads) == 3
    with pytest.raises(ValueError, match=r"^there is no head 3 in layer 1: its heads are 0 to 2$"):
        Look(TEXT, OFFSETS, PLAIN, layer=1, head=3).add(1, layers[1])


def test_what_stands_out_is_no_neighbour_and_no_habit():
    always = torch.zeros(2, 6, 6)
    always[0].diagonal(-1).fill_(0.9)  # a head of habit
    always[1, 5, 2] = 0.6  # one link
    always[1, 4, 3] = 0.9  # to a neighbour
    always[1, 3, 1] = REMARKABLE - 0.01
    look = Look(TEXT, OFFSETS, PLAIN)
    look.add(0, torch.zeros(2, 6, 6))
    look.add(1, always)
    [(word, link)] = look.outstanding(4)
    assert (word, link.target, link.layer, link.head) == (5, 2, 1, 1)
    assert link.weight == pytest.approx(0.6)
    look.add(2, always * 0.9)
    assert len(look.outstanding(4)) == 1


def test_texts_of_one_token_and_of_none():
    look = Look("hello", [(0, 5)], [False], stat="previous")
    look.add(0, torch.ones(4, 1, 1))
    assert look.strongest(3) == [[]] and look.outstanding(3) == [] and look.causal
    assert len(look.heads[0]) == 4 and all(map(math.isnan, look.heads[0]))
    nothing = Look("[]", [(0, 0), (0, 0)], [True, True])
    nothing.add(0, torch.full((1, 2, 2), 0.5))
    assert nothing.strongest(3) == [] and nothing.outstanding(3) == []


def test_an_unknown_statistic():
    with pytest.raises(ValueError) as caught:
        Look(TEXT, OFFSETS, PLAIN, stat="mass")
    assert str(caught.value) == (
        "the statistic is mass; it must be one of sink, previous, self, entropy, distance"
    )


# ---- one number for each head ----


@pytest.mark.parametrize("causal", [True, False])
def test_statistics_are_means_over_rows(causal):
    weights = random_weights(3, 7, causal, torch.float64)
    hidden = [True, False, False, True, False, False, True]
    rows = [i for i in range(7) if not hidden[i]]

    def by_loop(h, name):
        total = 0.0
        for i in rows:
            w = weights[h, i].tolist()
            seen = i + 1 if causal else 7
            total += {
                "sink": sum(w[j] for j in range(7) if hidden[j]),
                "previous": w[i - 1],
                "self": w[i],
                "entropy": sum(-p * math.log(p) for p in w if p) / math.log(seen),
                "distance": sum(p * abs(i - j) for j, p in enumerate(w)),
            }[name]
        return total / len(rows)

    for name in STATISTICS:
        found = statistic(name, weights, hidden)
        assert found == pytest.approx([by_loop(h, name) for h in range(3)], abs=1e-12), name


def test_the_ends_of_each_statistic():
    first = [True] + [False] * 4
    alike = torch.ones(5, 5).tril()
    alike = (alike / alike.sum(-1, keepdim=True))[None]
    onto_first = torch.zeros(1, 5, 5)
    onto_first[..., 0] = 1
    previous = torch.eye(5).roll(1, 0)[None]
    previous[0, 0] = torch.eye(5)[0]
    own = torch.eye(5)[None]
    ends = {name: [] for name in STATISTICS}
    for weights in (alike, onto_first, previous, own):
        for name, values in ends.items():
            values += statistic(name, weights, first)
    assert ends["sink"][1:] == [1, 0.25, 0]
    assert ends["previous"][1:] == [0.25, 1, 0]
    assert ends["self"][1:] == [0, 0, 1]
    assert ends["entropy"] == pytest.approx([1, 0, 0, 0], abs=1e-6)
    assert ends["distance"][1:] == [2.5, 1, 0]

"""What is kept of a model's attention: levels, the strongest links, thumbnails, statistics."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from clearhead.inspection.capture import (
    COARSE,
    EXACT,
    FINE,
    TOPS,
    Capture,
    pieces,
    thumbnails,
    to_levels,
    to_weights,
)
from clearhead.inspection.links import STATISTICS, statistic


def weights_of(H, L, causal=True):
    scores = torch.randn(H, L, L) * 3
    if causal:
        scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -math.inf)
    return scores.softmax(-1)


def captured(weights, full=None, exact=True, hidden=None):
    L = weights[0].shape[-1]
    shape = (len(weights), max(map(len, weights))) if exact else (10**4, 10**4)
    tokens = [f"t{n}" for n in range(L)]
    capture = Capture(tokens, hidden or [n == 0 for n in range(L)], full, shape)
    for layer in weights:
        capture.add(layer)
    return capture


@pytest.mark.parametrize("scale", [FINE, TOPS, COARSE])
def test_levels_come_back_within_half_a_step(scale):
    weights = torch.rand(9973, dtype=torch.float64).pow(4).float()
    back = to_weights(to_levels(weights, scale), scale)
    half = 2 ** (scale.octaves / (scale.levels - 1) / 2)
    floor = 2.0**-scale.octaves
    seen = weights > floor
    ratio = back[seen] / weights[seen]
    assert seen.any() and not bool(back[weights < floor / half].any())
    assert float(ratio.max()) <= half * 1.0001 and float(ratio.min()) >= 0.9999 / half
    ends = to_levels(torch.tensor([0.0, floor, 1.0]), scale)
    assert ends.tolist() == [0, 1, scale.levels]


def test_every_level_comes_back_as_itself():
    for scale in (FINE, TOPS, COARSE):
        levels = torch.arange(scale.levels + 1, dtype=torch.int32)
        assert torch.equal(to_levels(to_weights(levels, scale), scale), levels)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("L", [1, 2, 7, 8, 9, 37, 300])
@pytest.mark.parametrize("kind", ["all", "top", "maps"])
def test_a_map_is_what_was_packed(kind, L, causal):
    weights = [weights_of(3, L, causal), weights_of(2, L, causal)]
    capture = captured(weights, "maps" if kind == "maps" else None, kind == "all")
    assert capture.kind == {"all": "all", "top": "top", "maps": "all"}[kind]
    for layer, given_weights in enumerate(weights):
        for head, expected in enumerate(given_weights):
            if kind == "top":
                least = expected.topk(min(8, L)).values[:, -1:]
                expected = expected.masked_fill(expected < least, 0)
            rounded = to_weights(to_levels(expected, capture.scale), capture.scale)
            found = capture.map(layer, head)
            # log2 and pow differ in their last bit with the shape of a tensor, which now and then
            # takes a weight to the next level.
            step = 2 ** (capture.scale.octaves / (capture.scale.levels - 1)) - 1
            least = 2.0**-capture.scale.octaves
            torch.testing.assert_close(found, rounded, atol=1.01 * least, rtol=step * 1.01)
            same = torch.isclose(found, rounded, atol=1e-9, rtol=1e-5)
            assert float(same.double().mean()) > 0.99


def test_a_short_text_keeps_everything_and_a_long_one_does_not():
    def kind(layers, heads, L, full=None):
        return Capture(["t"] * L, [False] * L, full, (layers, heads)).kind

    assert kind(30, 9, 87) == "all" and EXACT >= 30 * 9 * 87 * 88 // 2
    assert kind(30, 9, 89) == "top" and EXACT < 30 * 9 * 89 * 90 // 2
    assert kind(30, 9, 89, "maps") == "all" and kind(30, 9, 89, "qk") == "qk"
    assert kind(30, 9, 87, "qk") == "all"


def test_kept_is_the_mean_mass_of_the_strongest():
    weights = weights_of(3, 41)
    capture = captured([weights], exact=False)
    expected = weights.topk(8).values.sum(-1)[:, 1:].mean(1)
    torch.testing.assert_close(torch.tensor(capture.data()["kept"]), expected)


def test_statistics_are_those_of_links():
    weights = [weights_of(3, 11), weights_of(2, 11)]
    hidden = [n in (0, 4) for n in range(11)]
    data = captured(weights, hidden=hidden).data()
    assert data["heads"] == [3, 2]
    for name in STATISTICS:
        expected = [v for layer in weights for v in statistic(name, layer, hidden)]
        assert data["statistics"][name] == expected


def test_the_largest_score_is_that_of_visible_pairs():
    q, k = torch.randn(4, 7, 5), torch.randn(2, 7, 5)
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) / math.sqrt(5)
    future = torch.ones(7, 7).triu(1).bool()
    capture = Capture(["t"] * 7, [False] * 7, shape=(1, 4))
    capture.add(scores.masked_fill(future, -math.inf).softmax(-1), q, k)
    expected = scores.masked_fill(future, -math.inf).amax((1, 2))
    torch.testing.assert_close(torch.tensor(capture.data()["statistics"]["max_logit"]), expected)


def test_a_statistic_that_some_layer_lacks_is_left_out():
    capture = Capture(["a", "b"], [True, False], shape=(2, 1))
    capture.add(weights_of(1, 2), extra={"max_logit": [3.0]})
    assert capture.data()["statistics"]["max_logit"] == [3.0]
    capture.add(weights_of(1, 2))
    assert "max_logit" not in capture.data()["statistics"]


@pytest.mark.parametrize("L", [1, 5, 64, 65, 131])
def test_thumbnails_gather_sums_over_keys_and_means_over_queries(L):
    weights = weights_of(2, L)
    small = thumbnails(weights)
    T = min(L, 64)
    stretch = [n * T // L for n in range(L)]
    expected = torch.zeros(2, T, T, dtype=torch.float64)
    for i in range(L):
        for j in range(L):
            expected[:, stretch[i], stretch[j]] += weights[:, i, j] / stretch.count(stretch[i])
    torch.testing.assert_close(small.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(small.sum(-1), torch.ones(2, T))


def test_thumbnails_come_back():
    weights = weights_of(3, 80)
    small = torch.stack(captured([weights]).small())
    expected = to_weights(to_levels(thumbnails(weights), COARSE), COARSE)
    assert torch.equal(small, expected)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: Capture(["a"], [True], "all"), "full is all; it must be maps or qk"),
        (lambda: Capture(["a"], []), "there are 1 tokens and 0 of hidden"),
        (lambda: captured([torch.ones(2, 3, 4)]), "must be (H, 4, 4)"),
        (
            lambda: captured([weights_of(1, 5), weights_of(1, 5, causal=False)]),
            "layer 1 looks ahead and those before it look back only",
        ),
        (lambda: captured([weights_of(1, 5)], "qk", exact=False), 'full="maps" keeps all weights'),
    ],
)
def test_errors_say_what_is_wrong(build, text):
    with pytest.raises(ValueError) as error:
        build()
    assert text in str(error.value)


def test_rows_of_zeros_stay_zero():
    weights = weights_of(2, 20)
    weights[:, :3] = 0  # padding on the left: nothing may be seen
    capture = captured([weights], exact=False)
    assert float(capture.map(0, 1)[:3].abs().max()) == 0
    assert float(capture.map(0, 1)[3:].sum()) > 10


def test_pieces_are_the_text_cut_where_tokens_end():
    text = "A dog,\n 🐕 ran"
    offsets = [(0, 0), (0, 1), (2, 5), (5, 6), (8, 9), (8, 9), (10, 13), (0, 0)]
    special = [True, False, False, False, False, False, False, True]
    names = ["<s>", "A", "Ġdog", ",", "x", "y", "Ġran", "</s>"]
    found = pieces(text, offsets, special, names)
    assert found == ["<s>", "A", " dog", ",", "\n 🐕", "", " ran", "</s>"]


@given(st.text(max_size=40), st.data())
def test_pieces_lose_nothing(text, data):
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8))) + [len(text)]
    offsets = [(max(0, end - 1), end) for end in ends]
    assert "".join(pieces(text, offsets, [False] * len(ends), ["x"] * len(ends))) == text

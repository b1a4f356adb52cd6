"""Statistics by hand, and at their limits."""

import math

import pytest
import torch
from asked import HEADS, ask, draw, same
from torch.testing import assert_close

from clearhead import (
    AuxRequest,
    TopK,
    attention_by_definition,
)
from clearhead.testing.statistics import defined, measured

# -- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_equal_scores_by_hand(backend):
    """Three equal keys, causal: row i shares its attention evenly among i + 1 keys."""
    x = torch.zeros(1, 1, 3, 4)
    aux = ask(x, x, x, is_causal=True, backend=backend)
    expected = {
        "lse": [0, math.log(2), math.log(3)],
        "max_logit": [0, 0, 0],
        "entropy": [0, math.log(2), math.log(3)],
        "first_mass": [1, 1 / 2, 1 / 3],
        "previous_mass": [0, 1 / 2, 1 / 3],
        "self_mass": [1, 1 / 2, 1 / 3],
        "distance": [0, 1 / 2, 1],
        "key_mass": [1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3],
    }
    for name, values in expected.items():
        assert getattr(aux, name).flatten().tolist() == pytest.approx(values), name
    assert aux.top_k.indices[0, 0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert aux.top_k.weights[0, 0, 1].tolist() == [0.5, 0.5, 0.0]
    assert math.copysign(1, aux.entropy[0, 0, 0]) == 1  # and not -0


def test_a_sink_takes_its_share_of_every_sum():
    x, sinks = torch.zeros(1, 1, 2, 4), torch.full((1,), math.log(2.0))
    aux = ask(x, x, x, sinks=sinks)
    assert aux.entropy.flatten().tolist() == pytest.approx([2 * math.log(4) / 4] * 2)
    assert aux.key_mass.flatten().tolist() == pytest.approx([0.5, 0.5])
    assert aux.max_logit.flatten().tolist() == [0, 0]
    assert aux.lse.flatten().tolist() == pytest.approx([math.log(4)] * 2)


def test_the_first_key_is_the_first_of_the_rows_own_sequence():
    """Keys 0 and 3 are padding: the first of all, and the first of the second document."""
    x = torch.zeros(1, 1, 5, 4)
    rules = {"key_mask": torch.tensor([[False, True, True, False, True]]), "is_causal": True}
    assert ask(x, x, x, **rules).first_mass.flatten().tolist() == pytest.approx(
        [0, 1, 1 / 2, 1 / 2, 1 / 3]
    )
    documents = torch.tensor([[0, 0, 0, 7, 7]])
    aux = ask(x, x, x, **rules, documents=documents)
    assert aux.first_mass.flatten().tolist() == pytest.approx([0, 1, 1 / 2, 0, 1])
    aux = ask(x, x, x, window=(1, 0))
    assert aux.first_mass.flatten().tolist() == pytest.approx([1, 1 / 2, 0, 0, 0])


def test_summaries_by_hand():
    """Rows of entropy 0, log 2, ..., log 5, and padded ones beside them that do not count."""
    x = torch.zeros(2, 1, 6, 4)
    key_mask = torch.tensor([[True] * 5 + [False], [False] * 6])
    aux = ask(x, x, x, is_causal=True, key_mask=key_mask, request=HEADS)
    rows = torch.tensor([math.log(n) for n in range(1, 6)])
    assert_close(aux.entropy.mean, torch.tensor([[rows.mean()], [math.nan]]), equal_nan=True)
    assert aux.entropy.min[0, 0] == 0 and aux.entropy.max[0, 0] == pytest.approx(math.log(5))
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    assert_close(aux.entropy.quantiles[0, 0], rows.quantile(levels))
    assert bool(torch.cat([t.reshape(2, -1)[1] for t in (*aux.entropy, *aux.lse)]).isnan().all())
    assert float(aux.key_mass[0].sum()) == pytest.approx(5) and not bool(aux.key_mass[1].any())
    assert aux.top_k.mean.shape == (2, 1, 3) and aux.top_k.quantiles.shape == (2, 1, 3, 5)


def test_which_rows_are_padded():
    """By their own key: in self-attention and in causal calls, but not in cross-attention."""
    query, key, value = draw(L=2, S=5)
    key_mask = torch.tensor([[True] * 4 + [False], [True] * 5])
    causal = ask(query, key, value, is_causal=True, key_mask=key_mask, request=HEADS)
    assert_close(causal.key_mass.sum(-1), torch.tensor([[1.0] * 4, [2.0] * 4]))
    across = ask(query, key, value, key_mask=key_mask, request=HEADS)
    assert_close(across.key_mass.sum(-1), torch.full((2, 4), 2.0))


def test_padded_rows_are_left_out_beside_any_documents():
    """The number that stands for no document is none that is in use, small or large."""
    x = torch.randn(2, 2, 9, 8)
    key_mask = torch.rand(2, 9) < 0.6
    for documents in (
        torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3, 3]]),
        torch.tensor([[2**63 - 1] * 4 + [-(2**63)] * 5]),
        (torch.arange(9, dtype=torch.uint8) // 3)[None].expand(2, 9),
    ):
        rules = {"key_mask": key_mask, "documents": documents}
        found = measured(ask(x, x, x, **rules, request=HEADS))
        out = attention_by_definition(x, x, x, **rules, return_aux=True)
        for name, gold in defined(x, x, rules, out[2], out[1], "head").items():
            assert_close(found[name], gold.float(), equal_nan=True, atol=1e-5, rtol=1e-5)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_of_equal_weights_the_lower_key_comes_first(backend):
    """Scores are small whole numbers, exact in any order of summation, with many ties."""
    query = torch.randint(0, 2, (2, 4, 6, 8)).float()
    key = torch.randint(0, 2, (2, 2, 61, 8)).float()
    request = AuxRequest(top_k=9)
    for rules in ({}, {"is_causal": True}, {"key_mask": torch.rand(2, 61) < 0.7}):
        top = ask(query, key, key, request=request, scale=1.0, **rules, backend=backend).top_k
        out = attention_by_definition(query, key, key, scale=1.0, **rules, return_aux=True)
        gold = defined(query, key, rules, out[2], out[1])
        assert torch.equal(top.indices[..., :3], gold["top_keys"])
        falls = top.weights.diff() < 0
        assert bool((falls | (top.indices.diff() > 0) | (top.indices[..., 1:] < 0)).all())


def test_a_visible_key_of_weight_0_is_a_key():
    """exp(-200) is 0 in float32, but the key is seen; a blocked one is not."""
    query, key = torch.full((1, 1, 1, 1), 200.0), torch.tensor([[[[0.0], [1.0], [0.0], [0.0]]]])
    mask = torch.tensor([True, True, True, False])
    top = ask(query, key, key, attn_mask=mask, request=AuxRequest(top_k=4)).top_k
    assert top.indices.flatten().tolist() == [1, 0, 2, -1]
    assert top.weights.flatten().tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("k", "dtype"), [(1, torch.float32), (17, torch.float32),
                                          (40, torch.float64)], ids=str)  # fmt: skip
def test_any_number_of_largest_weights(k, dtype):
    query, key, value = (t.to(dtype) for t in draw(S=23))
    request = AuxRequest(top_k=k, weights=True)
    aux = ask(query, key, value, request=request, window=(20, 3))
    top, indices = aux.weights.sort(-1, descending=True)
    n = min(k, 23)
    assert isinstance(aux.top_k, TopK) and aux.top_k.weights.dtype == dtype
    assert_close(aux.top_k.weights[..., :n], top[..., :n])
    seen = top[..., :n] > 0
    assert torch.equal(aux.top_k.indices[..., :n][seen], indices[..., :n][seen])
    assert bool((aux.top_k.indices[..., :n][~seen] == -1).all())
    assert not bool(aux.top_k.weights[..., n:].any()) and bool(
        (aux.top_k.indices[..., n:] == -1).all()
    )


@pytest.mark.parametrize("backend", ["chunked", "auto"])
@pytest.mark.parametrize(("sharpness", "limit"), [(1.0, 2e-6), (30.0, 3e-5)])
def test_entropy_is_close(sharpness, limit, backend):
    """Ordinary rows within 2e-6, and rows that look at one key almost alone within 3e-5."""
    query, key, value = draw(L=64, S=257, D=32)
    found = ask(query * sharpness, key, value, backend=backend).entropy
    weights = attention_by_definition(query * sharpness, key, value, return_aux=True)[2]
    gold = torch.special.entr(weights).sum(-1)
    assert float(gold.min()) < 0.1 or sharpness == 1
    assert float((found - gold).abs().max()) < limit


def test_blocked_and_huge_numbers_stay_out():
    """NaN and Inf where nobody may look change no bit; rows that see them are NaN, and no other."""
    query, key, value = draw(L=7)
    rules = {"key_mask": torch.tensor([[True] * 5 + [False] * 2]), "is_causal": True}
    for backend in ("chunked", "sdpa", "auto"):
        expected = ask(query, key, value, **rules, backend=backend)
        spoilt = key.clone()
        spoilt[:, :, 5], spoilt[:, :, 6] = math.nan, math.inf
        same(ask(query, spoilt, value, **rules, backend=backend), expected)
    spoilt = key.clone()
    spoilt[:, :, 3] = math.nan
    aux = ask(query, spoilt, value, is_causal=True, backend="chunked")
    assert bool(aux.entropy[:, :, 3:].isnan().all()) and bool(
        aux.entropy[:, :, :3].isfinite().all()
    )
    blocked = ask(query, spoilt, value, is_causal=True, window=(0, 0), backend="chunked")
    assert bool(blocked.entropy[:, :, 3].isnan().all())
    assert bool(blocked.previous_mass.eq(0).all())  # also of the row whose own key is NaN

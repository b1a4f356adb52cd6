"""The rules read in three ways must say the same, and say it of any tile."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clearhead.testing.planted import visible
from clearhead.visibility import Visibility

limit = st.none() | st.integers(0, 6)


@st.composite
def rules(draw):
    """A Visibility, and its mask written down independently."""
    L, S, B = draw(st.integers(1, 7)), draw(st.integers(1, 7)), draw(st.integers(1, 2))
    torch.manual_seed(draw(st.integers(0, 999)))
    left, right = draw(limit), draw(limit)
    key_mask = torch.rand(B, S) < 0.7 if draw(st.booleans()) else None
    documents = None
    if draw(st.booleans()):
        documents = torch.randint(-1, 3, (B, L)), torch.randint(-1, 3, (B, S))
    mask = torch.rand(B, 2, L, S) < 0.8 if draw(st.booleans()) else None
    doc_q, doc_k = documents or (None, None)
    rules = Visibility(L, S, left, right, key_mask, doc_q, doc_k, mask)
    seen = visible(
        torch.empty(B, 2, L, 1), torch.empty(B, 2, S, 1), attn_mask=mask, window=(left, right),
        key_mask=key_mask, documents=documents,
    )  # fmt: skip
    return rules, seen


@given(drawn=rules())
def test_tiles_are_cut_from_the_whole(drawn):
    rules, seen = drawn
    L, S = rules.L, rules.S
    for i0, i1 in itertools.combinations(range(L + 1), 2):
        for j0, j1 in ((0, S), (S // 2, S), (0, (S + 1) // 2)):
            if j0 == j1:
                continue
            tile = rules.tile(i0, i1, j0, j1, torch.device("cpu"))
            part = seen[:, :, i0:i1, j0:j1]
            assert bool(part.all()) if tile is None else torch.equal(tile.expand(part.shape), part)


@given(drawn=rules())
def test_no_key_outside_its_range_is_visible(drawn):
    rules, seen = drawn
    first, end = (t.expand(seen.shape[0], -1) for t in rules.key_ranges(torch.device("cpu")))
    j = torch.arange(rules.S)
    inside = (first[..., None] <= j) & (j < end[..., None])
    assert not bool((seen & ~inside[:, None]).any())
    if rules.mask is None and rules.key_mask is None and rules.doc_q is None:
        assert torch.equal(seen[:, 0], inside)


@given(drawn=rules())
def test_mask_mod_says_the_same(drawn):
    rules, seen = drawn
    mod = rules.mask_mod()
    if mod is None:
        assert bool(seen.all())
        return
    b, h, i, j = torch.meshgrid(*map(torch.arange, seen.shape), indexing="ij")
    assert torch.equal(mod(b, h, i, j).expand(seen.shape), seen)


@pytest.mark.parametrize(("left", "right", "L", "S", "full"), [
    (None, None, 5, 7, True),
    (None, 0, 1, 7, True),  # a decoding step
    (None, 0, 2, 7, False),
    (6, None, 5, 7, True),
    (5, None, 5, 7, False),
    (6, 4, 5, 7, True),
])  # fmt: skip
def test_limits_that_no_row_feels_are_dropped(left, right, L, S, full):
    assert Visibility(L, S, left, right).full == full

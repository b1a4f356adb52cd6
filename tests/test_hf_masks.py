"""The masks of transformers as rules: equal to the dense ones, entry by entry, and never stale."""

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    find_packed_sequence_indices,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from clearhead.hf import masks
from clearhead.visibility import Visibility, window_of

B = 3
PADDINGS = {
    "none": None,
    "nothing": lambda S: torch.ones(B, S, dtype=torch.bool),
    "left": lambda S: torch.arange(S)[None] >= torch.tensor([[0], [2], [4]]),
    "right": lambda S: torch.arange(S)[None] < torch.tensor([[S], [S - 2], [S - 3]]),
    "holes": lambda S: (torch.arange(S)[None] + torch.arange(B)[:, None]) % 3 > 0,
}
FUNCTIONS = {
    "causal": causal_mask_function,
    "all": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "window of one": sliding_window_causal_mask_function(1),
    "both sides": sliding_window_bidirectional_mask_function(2),
    "chunks": chunked_causal_mask_function(4, torch.tensor([0, 1, 2])),
    "all and window": and_masks(
        bidirectional_mask_function, sliding_window_causal_mask_function(5)
    ),
}
# (L, S, position of the first query, position of the first key)
SHAPES = {
    "prompt": (7, 7, 0, 0),
    "one token": (1, 9, 8, 0),
    "a chunk": (3, 11, 8, 0),
    "empty slots": (4, 13, 0, 0),
    "empty slots later": (3, 13, 5, 0),
    "one token, empty slots": (1, 13, 5, 0),
    "rolling window": (3, 5, 9, 7),
    "rolling window, one token": (1, 3, 9, 7),
}


def dense(rules, L, S):
    """The rules as a mask (B, 1, L, S), by clearhead's own reading of them."""
    end = S if rules.end is None else rules.end
    left, right = window_of(rules.window)
    q, k = rules.documents or (None, None)
    seen = Visibility(L, end, left, 0 if rules.is_causal else right, rules.key_mask, q, k,
                      rules.attn_mask).dense(torch.device("cpu"))  # fmt: skip
    seen = torch.ones((), dtype=torch.bool) if seen is None else seen
    return torch.nn.functional.pad(seen.expand(B, 1, L, end), (0, S - end))


def noted(mask):
    return getattr(mask, masks.NOTE, None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rules_equal_the_dense_mask(function, shape):
    L, S, q_offset, kv_offset = SHAPES[shape]
    for padding in PADDINGS.values():
        given = padding and padding(q_offset + L)
        arguments = (B, L, S, q_offset, kv_offset, FUNCTIONS[function], given)
        truth = sdpa_mask(*arguments, allow_is_causal_skip=False)
        made = masks.make(*arguments)
        assert torch.equal(made, truth)
        rules = masks.read(made, True, L, S)
        assert torch.equal(dense(rules, L, S), truth)
        # Only a window that looks ahead into a cache of fixed size has no words.
        if function != "both sides" or "slots" not in shape:
            assert noted(made) is not None and rules.attn_mask is None


def test_what_is_plain_is_said_plainly():
    def rules(*arguments):
        return masks.read(masks.make(B, *arguments), True, *arguments[:2])

    assert rules(7, 7) == masks.Rules(is_causal=True)
    assert rules(7, 7, 0, 0, causal_mask_function, PADDINGS["nothing"](7)) == masks.Rules(True)
    assert rules(1, 9, 8) == masks.Rules(is_causal=True)
    assert rules(4, 13) == masks.Rules(is_causal=True, end=4)
    assert rules(7, 7, 0, 0, FUNCTIONS["window"]) == masks.Rules(is_causal=True, window=(2, 0))
    assert rules(7, 7, 0, 0, FUNCTIONS["both sides"]) == masks.Rules(window=(2, 2))
    assert rules(7, 7, 0, 0, bidirectional_mask_function) == masks.Rules()


def test_packed_sequences_are_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 0, 1]])
    packed = find_packed_sequence_indices(positions)
    for inner in (causal_mask_function, FUNCTIONS["window"]):
        function = and_masks(
            remap_positions_for_packed_sequence(inner, positions),
            packed_sequence_mask_function(packed),
        )
        truth = sdpa_mask(B, 7, 7, mask_function=function, allow_is_causal_skip=False)
        made = masks.make(B, 7, 7, mask_function=function)
        rules = masks.read(made, True, 7, 7)
        assert torch.equal(made, truth) and torch.equal(dense(rules, 7, 7), truth)
        assert rules.documents is not None and rules.attn_mask is None and rules.is_causal


@pytest.mark.parametrize(
    "function",
    [
        or_masks(causal_mask_function, bidirectional_mask_function),
        lambda b, h, q, k: (k <= q) & (k != 2),
        and_masks(causal_mask_function, lambda b, h, q, k: k != 2),
        # Without the documents that go with it.
        remap_positions_for_packed_sequence(causal_mask_function, torch.zeros(B, 7, dtype=int)),
    ],
)
def test_an_unknown_rule_stays_dense(function):
    made = masks.make(B, 7, 7, mask_function=function)
    truth = sdpa_mask(B, 7, 7, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(made, truth) and noted(made) is None
    assert masks.read(made, True, 7, 7).attn_mask is made


def test_a_rule_that_changes_its_meaning_is_not_known_any_more(monkeypatch):
    def wider(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    assert len(masks._factories()) == 8
    monkeypatch.setattr(masking_utils, "sliding_window_overlay", wider)
    monkeypatch.delattr(masking_utils, "chunked_overlay")
    masks._factories.cache_clear()
    try:
        assert len(masks._factories()) == 6
        function = masking_utils.sliding_window_causal_mask_function(3)
        assert noted(masks.make(B, 7, 7, mask_function=function)) is None
    finally:
        masks._factories.cache_clear()


CHANGES = {
    "cut": lambda mask: mask[:, :, :, :5],
    "written": lambda mask: mask.__setitem__((0, 0, 6, 0), False) or mask,
    "filled": lambda mask: mask.masked_fill_(torch.eye(7, dtype=torch.bool), False),
    "joined": lambda mask: mask & torch.eye(7, dtype=torch.bool),
    "through a view": lambda mask: mask[0].zero_() is None or mask,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_mask_that_was_changed_has_no_rules(change, inference):
    with torch.inference_mode(inference):
        mask = masks.make(1, 7, 7)
        assert masks.read(mask, True, 7, 7) == masks.Rules(is_causal=True)
        changed = CHANGES[change](mask)
        S = changed.shape[3]
        assert torch.equal(dense(masks.read(changed, True, 7, S), 7, S)[:1], changed)
        assert masks.read(changed, True, 7, S).attn_mask is changed


def test_the_mask_of_a_static_cache_keeps_its_rules_through_generate():
    mask = masks.make(B, 4, 13, torch.tensor(0), 0)
    assert mask.contiguous() is mask  # what generate() does with it
    assert masks.read(mask, True, 4, 13) == masks.Rules(is_causal=True, end=4)


def test_a_mask_that_all_rows_share_is_a_key_mask():
    keys = PADDINGS["holes"](7)
    for mask in (keys[:, None, None], keys[:, None, None].expand(B, 4, 5, 7)):
        rules = masks.read(mask, True, 5, 7)
        assert rules.attn_mask is None and torch.equal(rules.key_mask, keys)
    floating = torch.zeros(B, 1, 1, 7)
    assert masks.read(floating, True, 5, 7).attn_mask is floating


@pytest.mark.parametrize(("L", "S"), [(5, 5), (3, 7), (7, 3), (1, 7)])
def test_no_mask(L, S):
    triangle = torch.ones(L, S, dtype=torch.bool).tril()
    everything = torch.ones(L, S, dtype=torch.bool)
    assert torch.equal(dense(masks.read(None, False, L, S), L, S)[0, 0], everything)
    causal = dense(masks.read(None, True, L, S), L, S)[0, 0]
    assert torch.equal(causal, everything if L == 1 else triangle)

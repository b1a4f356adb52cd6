"""Reports C, D and E: causal, windows, packing, and the kinds and shapes of masks."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from clearhead import (
    AuxRequest,
    MultiHeadAttention,
    attention,
    attention_by_definition,
    explain,
    varlen_attention,
)
from clearhead.testing import assert_within_budget, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
WEIGHTS = AuxRequest(weights=True)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def serving(*tensors, **rules):
    """The backends that claim the call; flex compiles for seconds and is tested elsewhere."""
    names = ("sdpa", "chunked")
    return [n for n in names if explain(*tensors, **rules, backend=n).backend is not None]


def weights_of(query, key, **rules):
    """By values that are the identity, from each backend that claims the call."""
    value = torch.eye(key.shape[-2], dtype=key.dtype).expand(*key.shape[:-1], -1)
    return [
        attention(query, key, value, **rules, backend=backend)
        for backend in serving(query, key, value, **rules)
    ]


def module_reference(mha, x, **rules):
    """A module without biases by the definition in float64: its output, and its weights."""
    heads = [
        (x.double() @ linear.weight.double().T).unflatten(-1, (mha.num_heads, -1)).transpose(1, 2)
        for linear in (mha.W_query, mha.W_key, mha.W_value)
    ]
    out, _, weights = attention_by_definition(*heads, **rules, return_aux=True)
    return out.transpose(1, 2).flatten(2) @ mha.out_proj.weight.double().T, weights


# -- causal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_is_aligned_to_the_lower_right(dtype):
    """pytorch#108108: q (1,1,2,4), k, v (1,1,5,4); the rows allow 4 and 5 keys."""
    query, key = torch.randn(1, 1, 2, 5).to(dtype), torch.randn(1, 1, 5, 5).to(dtype)
    for weights in weights_of(query, key, is_causal=True):
        assert (weights[0, 0] > 0).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    query, key, value = (torch.randn(1, 1, n, 4).to(dtype) for n in (2, 5, 5))
    mask = torch.ones(2, 5).tril(diagonal=5 - 2).bool()
    gold = attention_by_definition(query, key, value, mask)
    for backend in ("auto", *serving(query, key, value, is_causal=True)):
        out = attention(query, key, value, is_causal=True, backend=backend)
        assert_within_budget(out, gold, plain(query, key, value, mask)[0])


def test_the_upper_left_alignment_has_to_be_asked_for():
    """pytorch#108108: torch's own flag means tril(0), which is a mask here."""
    query, key, value = (torch.randn(1, 1, n, 4) for n in (2, 5, 5))
    theirs = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert_close(attention(query, key, value, torch.ones(2, 5).tril().bool()), theirs)
    assert not torch.allclose(attention(query, key, value, is_causal=True), theirs, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_decode_step_is_the_last_row_of_the_full_pass(dtype):
    """pytorch#108108: q_len 1, 8 keys."""
    query, key, value = torch.randn(3, 1, 2, 8, 4).to(dtype)
    gold = attention_by_definition(query, key, value, is_causal=True)[:, :, 7:]
    peer = plain(query, key, value, is_causal=True)[0][:, :, 7:]
    for backend in ("auto", "chunked", "sdpa"):
        full = attention(query, key, value, is_causal=True, backend=backend)[:, :, 7:]
        step = attention(query[:, :, 7:], key, value, is_causal=True, backend=backend)
        assert_within_budget(full, gold, peer)
        assert_within_budget(step, gold, peer)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("L", "S"), [(4, 4), (2, 5)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_causal_and_a_mask_are_combined_by_and(kind, L, S, dtype):
    """pytorch#187801: on every path, whether weights are asked for or not."""
    query, key, value = (torch.randn(1, 1, n, 4).to(dtype) for n in (L, S, S))
    mask = torch.rand(L, S) < 0.6
    mask[:, 0] = True
    both = mask & torch.ones(L, S).tril(diagonal=S - L).bool()
    if kind == "float":
        mask = torch.randn(L, S).to(dtype).masked_fill(~mask, -math.inf)
        both = mask.masked_fill(~both, -math.inf)
    out, _, weights = attention_by_definition(query, key, value, both, return_aux=True)
    peers = plain(query, key, value, both)
    for backend in ("auto", *serving(query, key, value, mask, is_causal=True)):
        found = attention(query, key, value, mask, is_causal=True, backend=backend)
        assert_within_budget(found, out, peers[0])
    found, aux = attention(query, key, value, mask, is_causal=True, return_aux=WEIGHTS)
    assert_within_budget(found, out, peers[0])
    assert_within_budget(aux.weights, weights, peers[2], "weights")
    assert not bool(aux.weights[0, 0][both == (False if kind == "bool" else -math.inf)].any())


MASKS = {
    "none": None,
    "zeros": torch.zeros(3, 3),
    "float": torch.tensor([[0.5, 0, 1], [0.25, -1, 2], [-math.inf, 1, 0]]),
    "bool": torch.tensor([[True, True, True], [True, False, True], [True, True, True]]),
}


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_asking_for_weights_does_not_lift_causality(mask, padding):
    """pytorch#99282: embed 8, 2 heads, x (4, 3, 8); flag alone, with a zero mask, with any."""
    rules = {"attn_mask": MASKS[mask]} if MASKS[mask] is not None else {}
    if padding:
        rules["key_mask"] = torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]]).bool()
    x = torch.randn(4, 3, 8)
    future = torch.ones(3, 3).triu(1).bool()
    for dropout, training in itertools.product((0.0, 0.5), (False, True)):
        mha = MultiHeadAttention(8, 4, 2, dropout=dropout).train(training)
        spread = {k: t.expand(4, 2, 3, 3) if k == "attn_mask" else t for k, t in rules.items()}
        gold, gold_weights = module_reference(mha, x, is_causal=True, **spread)
        torch.manual_seed(3)
        out = mha(x, **rules)
        torch.manual_seed(3)
        with_weights, aux = mha(x, **rules, return_aux=WEIGHTS)
        assert_close(with_weights, out)
        assert not bool(aux.weights[..., future].any())
        assert_close(aux.weights.double(), gold_weights, atol=1e-6, rtol=1e-5)
        if dropout == 0 or not training:
            assert_close(out.double(), gold, atol=2e-6, rtol=1e-5)
        changed = x.clone()
        changed[:, 2] = 7.0
        torch.manual_seed(3)
        assert_close(mha(changed, **rules)[:, :2], out[:, :2])


def test_padding_does_not_make_a_bidirectional_call_causal():
    """transformers#36150: T = 4, one padded key, is_causal False and True."""
    query, key, value = torch.randn(3, 1, 1, 4, 4)
    key_mask = torch.tensor([[True, True, True, False]])
    for flag in (False, True):
        gold = attention_by_definition(query, key, value, key_mask=key_mask, is_causal=flag)
        peer = plain(query, key, value, key_mask=key_mask, is_causal=flag)[0]
        rules = {"key_mask": key_mask, "is_causal": flag}
        for backend in ("auto", *serving(query, key, value, **rules)):
            out = attention(query, key, value, **rules, backend=backend)
            assert_within_budget(out, gold, peer)
        for weights in weights_of(query, key, **rules):
            assert (weights[0, 0, 0, 2] == 0).item() is flag


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "chunked"])
@pytest.mark.parametrize("size", [2**31, 2**63 - 1, 2**63, 2**70])
def test_a_window_wider_than_any_sequence_is_no_limit(size, backend):
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    for window, same in (((size, 1), (None, 1)), ((1, size), (1, None)), ((size, size), None)):
        out = attention(query, key, value, window=window, backend=backend)
        expected = attention(query, key, value, window=same, backend=backend)
        assert_close(out, expected, rtol=0, atol=0)


def test_a_window_counts_neighbours_and_a_module_s_counts_keys():
    """transformers#39408: T = 5, W = 2; row 4 sees {3, 4} of the module, {2, 3, 4} of (2, 0)."""
    mha = MultiHeadAttention(6, 3, 2, sliding_window=2)
    weights = mha(torch.randn(5, 6), return_aux=WEIGHTS)[1].weights
    assert weights[:, 4].gt(0).tolist() == [[False, False, False, True, True]] * 2
    query, key = torch.randn(2, 1, 2, 5, 5)
    for weights in weights_of(query, key, window=(2, 0)):
        assert weights[0, :, 4].gt(0).tolist() == [[False, False, True, True, True]] * 2


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7])
def test_row_i_sees_the_smaller_of_i_plus_1_and_w_keys(width):
    """transformers#39408."""
    T = 5
    expected = [min(i + 1, width) for i in range(T)]
    query, key = torch.randn(2, 1, 2, T, T)
    for weights in weights_of(query, key, window=(width - 1, 0)):
        assert weights[0, 0].gt(0).sum(-1).tolist() == expected
    mha = MultiHeadAttention(6, 3, 2, sliding_window=width)
    weights = mha(torch.randn(T, 6), return_aux=WEIGHTS)[1].weights
    assert weights[0].gt(0).sum(-1).tolist() == expected
    both = MultiHeadAttention(6, 3, 2, sliding_window=width, is_causal=False)
    weights = both(torch.randn(T, 6), return_aux=WEIGHTS)[1].weights
    counts = [min(i, width - 1) + 1 + min(T - 1 - i, width - 1) for i in range(T)]
    assert weights[0].gt(0).sum(-1).tolist() == counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_identities_of_windows(dtype):
    """transformers#39408: W >= T is plain causal to the bit; W = 1 gives back the own value."""
    query, key, value = torch.randn(3, 1, 2, 5, 4).to(dtype)
    causal = attention(query, key, value, is_causal=True)
    for width in (5, 6, 100):
        for extra in ({}, {"is_causal": True}):
            out = attention(query, key, value, window=(width - 1, 0), **extra)
            assert torch.equal(out, causal)
    wide = attention(query, key, value, window=(4, 4))
    assert torch.equal(wide, attention(query, key, value))
    for backend in ("auto", *serving(query, key, value, window=(0, 0))):
        assert torch.equal(attention(query, key, value, window=(0, 0), backend=backend), value)
    x = torch.randn(5, 6).to(dtype)
    mha = MultiHeadAttention(6, 3, 2, sliding_window=1).to(dtype)
    assert torch.equal(mha(x), mha.out_proj(mha.W_value(x)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_before_a_window_does_not_matter(dtype):
    """transformers#39408: the last row is the same for contexts of 40, 80, 200 and 400 tokens."""
    query, key, value = torch.randn(3, 1, 2, 400, 8).to(dtype)
    gold = attention_by_definition(query[:, :, -1:], key[:, :, -20:], value[:, :, -20:])
    peer = plain(query[:, :, -1:], key[:, :, -20:], value[:, :, -20:])[0]
    for length in (40, 80, 200, 400):
        parts = [t[:, :, -length:] for t in (query, key, value)]
        for backend in ("auto", *serving(*parts, window=(19, 0))):
            out = attention(*parts, window=(19, 0), backend=backend)
            assert_within_budget(out[:, :, -1:], gold, peer)


# -- packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(3, 3), (1, 5), (5, 1), (0, 6)])
def test_packed_documents_do_not_see_each_other(lengths, causal):
    """nanoVLM PR#204: perturb document 1, and document 2 keeps its bits; its loss sends back 0."""
    first = lengths[0]
    query, key, value = torch.randn(3, 1, 2, 6, 4)
    documents = torch.tensor([[1] * first + [2] * lengths[1]])
    changed = [torch.cat([torch.full_like(t[:, :, :first], 50.0), t[:, :, first:]], 2)
               for t in (query, key, value)]  # fmt: skip
    alone = [t[:, :, first:] for t in (query, key, value)]
    gold = attention_by_definition(*alone, is_causal=causal)
    peer = plain(*alone, is_causal=causal)[0]
    rules = {"documents": documents, "is_causal": causal}
    for backend in ("auto", *serving(query, key, value, **rules)):
        out = attention(query, key, value, **rules, backend=backend)[:, :, first:]
        again = attention(*changed, **rules, backend=backend)[:, :, first:]
        assert torch.equal(out, again)
        assert_within_budget(out, gold, peer)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    for backend in ("auto", *serving(*leaves, **rules)):
        out = attention(*leaves, **rules, backend=backend)[:, :, first:]
        grads = torch.autograd.grad(out.square().sum(), leaves)
        assert not any(bool(grad[:, :, :first].any()) for grad in grads)
        assert bool(grads[2][:, :, first:].any())


def test_sequences_of_length_zero_among_packed_ones():
    """flash-attention#1537: query lengths [0,1,0,1], key lengths [0,3,0,5], 9 and 3 heads."""
    offsets = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 0, 3, 3, 8])
    query, key, value = torch.randn(2, 9, 4), torch.randn(8, 3, 4), torch.randn(8, 3, 5)
    out = varlen_attention(query, key, value, *offsets)
    assert out.shape == (2, 9, 5)
    for row, keys in ((0, slice(0, 3)), (1, slice(3, 8))):
        parts = [t.transpose(0, 1)[None] for t in (query[row : row + 1], key[keys], value[keys])]
        gold = attention_by_definition(*parts)[0].transpose(0, 1)
        assert_close(out[row : row + 1].double(), gold, atol=1e-6, rtol=1e-5)


# -- kinds of masks -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_true_means_may_attend(dtype):
    """LLMs-from-scratch#1061: with keep = tril, weights above the diagonal are 0."""
    keep = torch.ones(4, 4).tril().bool()
    query, key = torch.randn(2, 1, 2, 4, 4).to(dtype)
    for weights in weights_of(query, key, attn_mask=keep):
        assert torch.equal(weights[0, 0].gt(0), keep)
    for weights in weights_of(query, key, key_mask=torch.tensor([[True, False, True, True]])):
        assert weights[0, 0].gt(0).tolist() == [[True, False, True, True]] * 4
    value = torch.randn(1, 2, 4, 4).to(dtype)
    moved = [t.index_fill(2, torch.tensor(3), 9.0) for t in (query, key, value)]
    for backend in ("auto", *serving(query, key, value, keep)):
        out = attention(query, key, value, keep, backend=backend)
        other = attention(*moved, keep, backend=backend)
        assert torch.equal(out[:, :, :3], other[:, :, :3])
        assert not torch.equal(out[:, :, 3], other[:, :, 3])


def test_the_module_s_masks_speak_the_same_language():
    """LLMs-from-scratch#1061."""
    mha, x = MultiHeadAttention(6, 3, 2, is_causal=False), torch.randn(2, 4, 6)
    keep = torch.ones(4, 4).tril().bool()
    weights = mha(x, attn_mask=keep, return_aux=WEIGHTS)[1].weights
    assert torch.equal(weights.gt(0), keep.expand(2, 2, 4, 4))
    key_mask = torch.tensor([[True, True, False, True], [True] * 4])
    weights = mha(x, key_mask=key_mask, return_aux=WEIGHTS)[1].weights
    assert torch.equal(weights.gt(0), key_mask[:, None, None].expand(2, 2, 4, 4))

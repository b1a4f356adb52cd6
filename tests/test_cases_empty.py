"""Reports A: rows that may look at nothing, and arithmetic with minus infinity.

The right values are per-row sums over the keys that are left, in float64, or numbers by hand.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from clearhead import (
    AuxRequest,
    MultiHeadAttention,
    attention,
    attention_by_definition,
    explain,
)
from clearhead.testing import assert_within_budget, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EVERYTHING = AuxRequest(lse=True, weights=True)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def serving(*tensors, **rules):
    """The backends that claim the call; flex compiles for seconds and is tested elsewhere."""
    names = ("sdpa", "chunked")
    return [n for n in names if explain(*tensors, **rules, backend=n).backend is not None]


def in_float64(module, x, **rules):
    """The module by the definition, from float64 copies of its parameters, which are returned."""
    own = {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}

    def project(name, t):
        return t @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0)

    heads = [
        project(name, x.double()).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for name in ("W_query", "W_key", "W_value")
    ]
    out, _, weights = attention_by_definition(*heads, **rules, return_aux=True)
    return project("out_proj", out.transpose(1, 2).flatten(2)), weights, own


@pytest.mark.parametrize("weights", [False, True])
def test_one_empty_row_leaves_the_gradients_of_all_parameters_finite(weights):
    """pytorch#41508: a band mask and padding leave query 2 of item 1 without keys."""
    torch.manual_seed(1)
    mha = MultiHeadAttention(1, 1, 1, is_causal=False, qkv_bias=True, out_bias=True)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.normal_()
    x = torch.randn(2, 3, 1)
    i, j = torch.arange(3)[:, None], torch.arange(3)
    band = torch.zeros(3, 3).masked_fill((j > i) | (j < i - 1), -math.inf)
    key_mask = torch.tensor([[True] * 3, [True, False, False]])
    request = EVERYTHING if weights else None
    result = mha(x, attn_mask=band, key_mask=key_mask, return_aux=request)
    out, aux = result if weights else (result, None)
    gold, gold_weights, own = in_float64(mha, x, attn_mask=band, key_mask=key_mask)
    assert_close(out.double(), gold, atol=1e-6, rtol=1e-6)
    assert torch.equal(out[1, 2], mha.out_proj.bias)
    if weights:
        assert_close(aux.weights.double(), gold_weights, atol=1e-6, rtol=1e-6)
        assert aux.weights[1, 0, 2].tolist() == [0.0, 0.0, 0.0]
        assert aux.lse[1, 0, 2] == -math.inf
    # Of sequence-first output[0], so the empty row is not in the loss.
    out[:, 0].sum().backward()
    gold[:, 0].sum().backward()
    for name, parameter in mha.named_parameters():
        assert_close(parameter.grad.double(), own[name].grad, atol=1e-6, rtol=1e-6)


def test_the_loss_may_contain_the_empty_row():
    """pytorch#41508: its output is a constant, so only out_proj's bias hears of it."""
    mha = MultiHeadAttention(5, 3, 2, is_causal=False, out_bias=True)
    mask = torch.ones(7, 7).bool()
    mask[4] = False
    out = mha(torch.randn(2, 7, 5), attn_mask=mask)
    assert torch.equal(out[:, 4], mha.out_proj.bias.expand(2, 6))
    out[:, 4].sum().backward()
    for name, parameter in mha.named_parameters():
        expected = 2.0 if name == "out_proj.bias" else 0.0
        assert torch.equal(parameter.grad, torch.full_like(parameter, expected))


def test_asking_for_weights_does_not_change_the_output():
    """pytorch#160064: embed 6, 3 heads, head 2 blocked everywhere by a per-head mask (3, 5, 5)."""
    mha, x = MultiHeadAttention(6, 2, 3, is_causal=False), torch.randn(1, 5, 6)
    mask = torch.rand(3, 5, 5) < 0.7
    mask[:, :, 0], mask[2] = True, False
    out = mha(x, attn_mask=mask)
    with_weights, aux = mha(x, attn_mask=mask, return_aux=EVERYTHING)
    assert torch.equal(out, with_weights)
    assert aux.weights.shape == (1, 3, 5, 5) and not bool(aux.weights[:, 2].any())
    gold, gold_weights, _ = in_float64(mha, x, attn_mask=mask.expand(1, 3, 5, 5))
    assert_close(out.double(), gold, atol=1e-6, rtol=1e-5)
    assert_close(aux.weights.double(), gold_weights, atol=1e-6, rtol=1e-5)
    with torch.no_grad():
        mha.out_proj.weight[:, 4:] = 1e6  # what head 2 gives must be nothing, not little
    assert_close(mha(x, attn_mask=mask), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "bias"])
def test_a_row_without_keys_is_exactly_0(kind, dtype):
    """pytorch#103749: lower-triangular mask whose last row allows nothing."""
    query = torch.randn(1, 2, 4, 8).to(dtype)
    key, value = torch.randn(2, 1, 2, 6, 8).to(dtype)
    mask = torch.ones(4, 6).tril().bool()
    mask[3] = False
    if kind != "bool":
        mask = torch.zeros(4, 6).masked_fill(~mask, -math.inf).to(dtype)
    rules = {"bias" if kind == "bias" else "attn_mask": mask}
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    gold, gold_lse, gold_weights = attention_by_definition(*leaves, **rules, return_aux=True)
    gold_grads = torch.autograd.grad(gold.sum(), leaves)
    peers = plain(*leaves, **rules)
    peer_grads = torch.autograd.grad(peers[0].sum(), leaves)
    for backend in ("auto", *serving(query, key, value, **rules)):
        out = attention(*leaves, **rules, backend=backend)
        assert not bool(out[:, :, 3].any())
        assert_within_budget(out, gold, peers[0])
        grads = torch.autograd.grad(out.sum(), leaves)
        assert not bool(grads[0][:, :, 3].any())
        for grad, truth, peer in zip(grads, gold_grads, peer_grads, strict=True):
            assert_within_budget(grad, truth, peer, "gradient")
        # A loss of the empty row alone moves nothing.
        out = attention(*leaves, **rules, backend=backend)
        assert not any(bool(g.any()) for g in torch.autograd.grad(out[:, :, 3].sum(), leaves))
    _, aux = attention(*leaves, **rules, return_aux=EVERYTHING)
    assert not bool(aux.weights[:, :, 3].any()) and bool((aux.lse[:, :, 3] == -math.inf).all())
    assert_within_budget(aux.weights, gold_weights, peers[2], "weights")
    assert_within_budget(aux.lse, gold_lse, peers[1], "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_and_padding_are_combined_before_any_arithmetic(dtype):
    """transformers PR#27114: two masks of finfo.min, when added, overflow and leak a future key."""
    T = 4
    query, key = torch.randn(2, 1, 1, T, T).to(dtype)
    value = torch.eye(T, dtype=dtype)[None, None]  # so that the output is the weights
    key_mask = torch.tensor([[False, False, True, True]])
    gold = attention_by_definition(query, key, value, key_mask=key_mask, is_causal=True)
    triangle = torch.ones(T, T).tril().bool()
    forms = {
        "flags": {"key_mask": key_mask, "is_causal": True},
        "one mask": {"attn_mask": triangle & key_mask},
        "mask and flag": {"attn_mask": key_mask, "is_causal": True},
        "mask and key mask": {"attn_mask": triangle, "key_mask": key_mask},
        "finfo.min beside a flag": {
            "attn_mask": torch.zeros(T, T, dtype=dtype).masked_fill(
                ~triangle, torch.finfo(dtype).min
            ),
            "key_mask": key_mask,
            "is_causal": True,
        },
    }
    for rules in forms.values():
        for backend in ("auto", *serving(query, key, value, **rules)):
            out = attention(query, key, value, **rules, backend=backend)
            assert not bool(out[0, 0, :2].any())  # a pad query may attend to nothing
            assert not bool(out[0, 0, :, :2].any()) and out[0, 0, 2].tolist() == [0, 0, 1, 0]
            peer = plain(query, key, value, key_mask=key_mask, is_causal=True)[0]
            assert_within_budget(out, gold, peer)


def test_the_lowest_half_plus_a_score_does_not_overflow():
    """transformers PR#17306: float16's lowest number - 17 is -inf in float16, a row of them NaN."""
    dtype, lowest = torch.float16, torch.finfo(torch.float16).min
    # Scores -17, -18, -20 in row 0, all biased by the lowest number; row 1 has no bias.
    query = torch.tensor([1.0, 1.0], dtype=dtype).view(1, 1, 2, 1)
    key = torch.tensor([-17.0, -18.0, -20.0], dtype=dtype).view(1, 1, 3, 1)
    value = torch.tensor([1.0, 2.0, 4.0], dtype=dtype).view(1, 1, 3, 1)
    parts = [math.exp(s) for s in (0.0, -1.0, -3.0)]
    expected = sum(w * v for w, v in zip(parts, (1, 2, 4), strict=True)) / sum(parts)
    bias = torch.tensor([[lowest], [0.0]], dtype=dtype)
    for rules in ({"attn_mask": bias}, {"bias": bias}, {"attn_mask": bias, "bias": bias}):
        for backend in ("auto", *serving(query, key, value, **rules)):
            out = attention(query, key, value, **rules, scale=1.0, backend=backend)
            # Whole numbers of this size are exact in float32, so the sums lose nothing.
            assert_close(out.flatten().double(), torch.tensor([expected] * 2).double(),
                         atol=1e-3, rtol=0)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_sentinel_is_comparable_with_a_score(dtype):
    """flashinfer#4267: scores of -20000 and -300000 lose against a finite 'minus infinity'."""
    cases = [
        (-20000.0, [1.0, 0.0], [1.0, 100.0], [True, False]),
        (-300000.0, [1.0, 1.01, 0.0], [1.0, 2.0, 100.0], [True, True, False]),
    ]
    for q, keys, values, mask in cases:
        query = torch.full((1, 1, 1, 1), q, dtype=dtype)
        key, value = (torch.tensor(t, dtype=dtype).view(1, 1, -1, 1) for t in (keys, values))
        mask = torch.tensor(mask)
        numbers = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)
        for rules in ({"attn_mask": mask}, {"key_mask": mask[None]}, {"attn_mask": numbers}):
            for backend in ("auto", *serving(query, key, value, **rules, scale=1.0)):
                out = attention(query, key, value, **rules, scale=1.0, backend=backend)
                assert out.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_huge_negatives_is_an_ordinary_row(dtype):
    """The kind of flashinfer#4267: m + log z rounds to m, and exp(s - lse) would be 1 per key."""
    lowest = torch.finfo(dtype).min
    value = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=dtype).view(1, 1, 4, 1)
    query, key = torch.zeros(1, 1, 2, 1, dtype=dtype), torch.zeros(1, 1, 4, 1, dtype=dtype)
    mask = torch.tensor([[lowest] * 4, [0.0] * 4], dtype=dtype)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    with torch.no_grad():
        for backend in serving(*leaves, attn_mask=mask):
            out = attention(*leaves, attn_mask=mask, backend=backend)
            assert out.flatten().tolist() == [3.0, 3.0]
    for backend in ("auto", *serving(*leaves, attn_mask=mask)):
        out = attention(*leaves, attn_mask=mask, backend=backend)
        dq, dk, dv = torch.autograd.grad(out[0, 0, 0].sum(), leaves)
        assert dv.flatten().tolist() == [0.25] * 4
        assert not bool(dq.any()) and not bool(dk.any())

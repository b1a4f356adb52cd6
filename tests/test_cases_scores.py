"""Reports F and H: scale, softcap, sinks and dtypes, with values by hand or in float64."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from clearhead import AuxRequest, MultiHeadAttention, attention, attention_by_definition, explain
from clearhead.testing import assert_within_budget, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
EVERYTHING = AuxRequest(lse=True, weights=True)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def serving(*tensors, **rules):
    """The backends that claim the call; flex compiles for seconds and is tested elsewhere."""
    names = ("sdpa", "chunked")
    return [n for n in names if explain(*tensors, **rules, backend=n).backend is not None]


def column(*numbers, dtype=torch.float32):
    """One head of numbers, (1, 1, n, 1)."""
    return torch.tensor(numbers, dtype=dtype).view(1, 1, -1, 1)


# -- 30: scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0, 0.0, -1, -1.0, 1e-30, None])
def test_zero_and_negative_scales_with_causal(scale, dtype):
    """pytorch PR#105202: L = 2, q = k = 1, v = [1, 3]; -inf * 0 and -inf * -1 are traps."""
    ones, value = column(1.0, 1.0, dtype=dtype), column(1.0, 3.0, dtype=dtype)
    rules = {"scale": scale, "is_causal": True}
    for backend in ("auto", *serving(ones, ones, value, **rules)):
        out = attention(ones, ones, value, **rules, backend=backend)
        assert out.flatten().tolist() == [1.0, 2.0]
    leaves = [t.clone().requires_grad_() for t in (ones, ones, value)]
    out = attention(*leaves, **rules)
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert dv.flatten().tolist() == [1.5, 0.5]
    # Of row 1, ds = w (v - out) = (-0.5, 0.5); row 0 sees one key, so its score does not matter.
    used = 1.0 if scale is None else scale
    assert_close(dk.flatten(), torch.tensor([-0.5, 0.5], dtype=dtype) * used)
    assert_close(dq.flatten(), torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_is_a_scale_and_none_is_not(dtype):
    """pytorch PR#105202: told apart by keys 0 and 2: uniform weights, or of scores 0 and 2."""
    query, key, value = (column(*n, dtype=dtype) for n in ((1.0,), (0.0, 2.0), (1.0, 3.0)))
    second = 1 / (1 + math.exp(-2))
    expected = ((None, second), (1, second), (0, 0.5), (0.0, 0.5), (1e-30, 0.5), (-1, 1 - second))
    tolerance = {"atol": 2 * torch.finfo(dtype).eps, "rtol": 0}
    for scale, weight in expected:
        for mask in (None, torch.ones(1, 2).bool(), torch.zeros(1, 2, dtype=dtype)):
            for backend in ("auto", *serving(query, key, value, mask, scale=scale)):
                out = attention(query, key, value, mask, scale=scale, backend=backend)
                assert_close(
                    out.flatten(), torch.tensor([1 + 2 * weight], dtype=dtype), **tolerance
                )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-30])
def test_scales_of_other_signs_against_the_definition(scale, dtype):
    """pytorch PR#105202: causal, masked and windowed, in every backend that claims the call."""
    query, key, value = (torch.randn(2, n, 7, 5).to(dtype) for n in (4, 2, 2))
    mask = torch.rand(7, 7) < 0.7
    mask[:, 0] = True
    for rules in ({}, {"is_causal": True}, {"attn_mask": mask}, {"window": (2, 1)}):
        gold = attention_by_definition(query, key, value, **rules, scale=scale)
        peer = plain(query, key, value, **rules, scale=scale)[0]
        for backend in ("auto", *serving(query, key, value, **rules, scale=scale)):
            out = attention(query, key, value, **rules, scale=scale, backend=backend)
            assert_within_budget(out, gold, peer)


# -- 31: which size the scale is made of ----------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("D", "Dv"), [(8, 8), (5, 5), (5, 7), (7, 5), (1, 3)])
def test_the_scale_comes_from_the_query_s_own_head_size(D, Dv, causal):
    """pytorch-image-models#2385: not from the 2 heads, nor the value, nor a padded size."""
    query, key, value = (torch.randn(2, 2, 6, n) for n in (D, D, Dv))
    rules = {"is_causal": causal}
    gold = attention_by_definition(query, key, value, **rules, scale=D**-0.5)
    peer = plain(query, key, value, **rules, scale=D**-0.5)[0]
    for backend in ("auto", *serving(query, key, value, **rules)):
        assert_within_budget(attention(query, key, value, **rules, backend=backend), gold, peer)


def test_every_backend_of_the_module_uses_one_scale():
    """pytorch-image-models#2385: heads 2, head_dim 8, same weights; equal to 1e-6."""
    mha, x = MultiHeadAttention(16, 8, 2), torch.randn(2, 5, 16)
    outs = []
    for backend in ("chunked", "sdpa", "auto"):
        mha.backend = backend
        outs.append(mha(x))
    q, k, v = (f(x).double().unflatten(-1, (2, 8)).transpose(1, 2)
               for f in (mha.W_query, mha.W_key, mha.W_value))  # fmt: skip
    gold = attention_by_definition(q, k, v, is_causal=True, scale=8**-0.5)
    gold = gold.transpose(1, 2).flatten(2) @ mha.out_proj.weight.double().T
    for out in outs:
        assert_close(out.double(), gold, atol=2e-6, rtol=1e-5)


# -- 32: softcap ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_capped_score_is_blocked_after_the_cap(dtype):
    """onnx#7865: cap 1, scores [0, 0], key 1 blocked: weights [1, 0], not [.7311, .2689]."""
    query, key = column(1.0, dtype=dtype), column(0.0, 0.0, dtype=dtype)
    value = column(1.0, 100.0, dtype=dtype)
    mask = torch.tensor([True, False])
    numbers = torch.zeros(2, dtype=dtype).masked_fill(~mask, -math.inf)
    for rules in ({"attn_mask": mask}, {"attn_mask": numbers}, {"bias": numbers},
                  {"key_mask": mask[None]}, {"window": (None, 0), "is_causal": False}):  # fmt: skip
        if "window" in rules:  # row 0 of two: it sees key 0
            both = torch.cat([query, query], 2)
            out, aux = attention(both, key, value, softcap=1.0, **rules, return_aux=EVERYTHING)
        else:
            out, aux = attention(query, key, value, softcap=1.0, **rules, return_aux=EVERYTHING)
        assert aux.weights[0, 0, 0].tolist() == [1.0, 0.0]
        assert out[0, 0, 0].item() == 1.0 and aux.lse[0, 0, 0].item() == 0.0


def test_the_bias_comes_after_the_cap_and_the_gradient_knows_the_cap():
    """onnx#7865: s = cap * tanh(q k / cap) + bias, and ds/dq has the factor 1 - tanh^2."""
    q, k, cap = 3.0, 2.0, 1.5
    tanh = math.tanh(q * k / cap)
    query, key = column(q, dtype=torch.float64), column(k, 0.0, dtype=torch.float64)
    value = column(1.0, 0.0, dtype=torch.float64)
    bias = torch.tensor([-5.0, 0.0], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (query, key, bias)]
    for name in ("bias", "attn_mask"):
        out = attention(query, key, value, scale=1.0, softcap=cap, **{name: bias})
        w = 1 / (1 + math.exp(-(cap * tanh - 5.0)))
        assert out.item() == pytest.approx(w, rel=1e-12)
        dq, dk, dbias = torch.autograd.grad(out.sum(), leaves)
        slope = w * (1 - w)
        assert dq.item() == pytest.approx(slope * (1 - tanh**2) * k, rel=1e-10)
        # The second key's score is 0, where the cap's slope is 1.
        assert dk.flatten().tolist() == pytest.approx([slope * (1 - tanh**2) * q, -slope * q])
        assert dbias.tolist() == pytest.approx([slope, -slope])


def test_a_score_far_beyond_the_cap():
    """onnx#7865: tanh is 1 there, its slope 0, and nothing overflows."""
    query, key = column(1e20), column(1e20, -1e20, 0.0)
    leaves = [t.requires_grad_() for t in (query, key)]
    out = attention(*leaves, column(1.0, 2.0, 3.0), softcap=2.0)
    parts = [math.exp(s) for s in (2.0, -2.0, 0.0)]
    expected = sum(w * v for w, v in zip(parts, (1, 2, 3), strict=True)) / sum(parts)
    assert out.item() == pytest.approx(expected, rel=1e-6)
    dq, dk = torch.autograd.grad(out.sum(), leaves)
    assert bool(dq.isfinite().all()) and dk.flatten()[:2].tolist() == [0.0, 0.0]


# -- 33: sinks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_is_one_more_column_of_the_softmax(dtype):
    """transformers#41026: scores [0, 0], sink 0, v [3, 6]: weights [1/3, 1/3], out 3."""
    query, key, value = (column(*n, dtype=dtype) for n in ((1.0,), (0.0, 0.0), (3.0, 6.0)))
    out, aux = attention(query, key, value, sinks=torch.zeros(1, dtype=dtype),
                         return_aux=EVERYTHING)  # fmt: skip
    assert_close(out.flatten(), torch.tensor([3.0], dtype=dtype))
    assert aux.weights.flatten().tolist() == pytest.approx([1 / 3, 1 / 3], rel=1e-6)
    assert aux.lse.item() == pytest.approx(math.log(3), rel=1e-6)


def test_a_sink_equals_an_appended_key_without_value():
    """transformers#41026: append a column, softmax, drop it; one logit per query head."""
    query, key, value = (torch.randn(2, n, 7, 5, dtype=torch.float64) for n in (4, 2, 2))
    sinks = torch.tensor([-1.0, 0.0, 2.0, 30.0], dtype=torch.float64)
    s = query @ key.repeat_interleave(2, 1).mT / math.sqrt(5)
    s = torch.cat([s, sinks[:, None, None].expand(2, 4, 7, 1)], -1)
    weights = torch.softmax(s, -1)[..., :-1]
    out, aux = attention(query, key, value, sinks=sinks, return_aux=EVERYTHING)
    assert_close(aux.weights, weights, atol=1e-12, rtol=1e-12)
    assert_close(out, weights @ value.repeat_interleave(2, 1), atol=1e-12, rtol=1e-12)
    assert_close(aux.lse, s.logsumexp(-1), atol=1e-12, rtol=1e-12)
    # The identity by which kernels without sinks can have them.
    bare, without = attention(query, key, value, return_aux=AuxRequest(lse=True))
    rescaled = bare * torch.sigmoid(without.lse - sinks[:, None])[..., None]
    assert_close(out, rescaled, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("sink", [0.0, 50.0, -50.0, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_blocked_row_with_a_sink_is_0(dtype, sink):
    """transformers#41026: the sink carries no value, and no NaN comes of it."""
    query, key, value = torch.randn(3, 1, 2, 4, 3).to(dtype)
    sinks = torch.full((2,), sink, dtype=dtype)
    mask = torch.ones(4, 4).bool()
    mask[1] = False
    leaves = [t.clone().requires_grad_() for t in (query, key, value, sinks)]
    out, aux = attention(*leaves[:3], mask, sinks=leaves[3], return_aux=EVERYTHING)
    assert not bool(out[:, :, 1].any()) and not bool(aux.weights[:, :, 1].any())
    assert bool((aux.lse[:, :, 1] == -math.inf).all())
    assert bool(out.isfinite().all())
    grads = torch.autograd.grad(out[:, :, 1].sum() + aux.weights[:, :, 1].sum(), leaves)
    assert not any(bool(g.any()) for g in grads)
    grads = torch.autograd.grad(attention(*leaves[:3], mask, sinks=leaves[3]).sum(), leaves)
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_of_minus_infinity_is_none(dtype):
    """transformers#41026: to the bit."""
    query, key, value = torch.randn(3, 1, 2, 7, 3).to(dtype)
    sinks = torch.full((2,), -math.inf, dtype=dtype)
    rules = {"backend": "chunked", "is_causal": True, "return_aux": EVERYTHING}
    out, aux = attention(query, key, value, sinks=sinks, **rules)
    expected, without = attention(query, key, value, **rules)
    assert torch.equal(out, expected)
    assert torch.equal(aux.lse, without.lse) and torch.equal(aux.weights, without.weights)


def test_the_module_s_sinks_are_per_query_head():
    """transformers#41026: a sink of 30 silences its head and no other."""
    mha, x = MultiHeadAttention(6, 3, 4, num_kv_heads=2, sinks=True), torch.randn(5, 6)
    with torch.no_grad():
        mha.sinks[1] = 60.0
    weights = mha(x, return_aux=EVERYTHING)[1].weights.sum(-1)
    assert bool((weights[1] < 1e-6).all()) and bool((weights[[0, 2, 3]] > 0.05).all())


# -- 38: dtypes of masks, and autocast ------------------------------------------------------------


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [False, True])
def test_autocast_and_a_mask_of_another_dtype(weights, mask_dtype):
    """pytorch#99012: d 16, 2 heads, under autocast to bfloat16; a float32 mask stays float32."""
    mha, x = MultiHeadAttention(16, 8, 2, is_causal=False), torch.randn(2, 5, 16)
    mask = torch.randn(5, 5, dtype=torch.float64).masked_fill(torch.eye(5).bool(), -math.inf)
    expected = mha(x, attn_mask=mask.to(mask_dtype).double())
    with torch.autocast("cpu", torch.bfloat16):
        result = mha(x, attn_mask=mask.to(mask_dtype), return_aux=EVERYTHING if weights else None)
    out = result[0] if weights else result
    assert out.dtype == torch.bfloat16
    assert_close(out.float(), expected, atol=0.06, rtol=0.02)
    if weights:
        assert result[1].weights.dtype == torch.float32


@pytest.mark.parametrize("dtype", (torch.float16, *DTYPES), ids=str)
@pytest.mark.parametrize("mask_dtype", (torch.float16, *DTYPES), ids=str)
def test_every_float_dtype_of_a_mask_goes_with_every_query(mask_dtype, dtype):
    """pytorch#99012: and the output keeps query's dtype."""
    query, key, value = torch.randn(3, 2, 2, 5, 4).to(dtype)
    mask = torch.randn(5, 5).to(mask_dtype)
    gold = attention_by_definition(query, key, value, mask.expand(2, 2, 5, 5))
    peer = plain(query, key, value, mask)[0].to(dtype)
    for name, gradients in itertools.product(("attn_mask", "bias"), (False, True)):
        leaves = [t.clone().requires_grad_(gradients) for t in (query, key, value, mask)]
        out = attention(*leaves[:3], **{name: leaves[3]})
        assert out.dtype == dtype
        assert_within_budget(out, gold, peer)
        if gradients:
            grads = torch.autograd.grad(out.sum(), leaves)
            assert [g.dtype for g in grads] == [dtype] * 3 + [mask_dtype]


def test_under_autocast_attention_takes_autocast_s_dtype():
    """pytorch#99012: as torch's own attention does; float64 stays what it is."""
    query, key, value = torch.randn(3, 2, 2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(query, key, value)
        kept = attention(query.double(), key.double(), value.double())
    assert out.dtype == torch.bfloat16 and kept.dtype == torch.float64
    assert torch.equal(out, attention(query.bfloat16(), key.bfloat16(), value.bfloat16()))


def test_gradients_under_autocast():
    """pytorch#99012: parameters keep their dtype, and their gradients are those of bfloat16."""
    mha, x = MultiHeadAttention(16, 8, 2), torch.randn(2, 5, 16)
    mask = torch.zeros(5, 5, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = mha(x, attn_mask=mask)
    grads = torch.autograd.grad(out.float().sum(), [*mha.parameters(), mask])
    mha(x, attn_mask=mask).sum().backward()
    for grad, leaf in zip(grads, [*mha.parameters(), mask], strict=True):
        assert grad.dtype == torch.float32
        assert_close(grad, leaf.grad, atol=0.05 * float(leaf.grad.abs().max()), rtol=0.05)

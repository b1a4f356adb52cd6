"""Reports E and K: bool against float masks, how masks broadcast, and which heads share keys."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from clearhead import AuxRequest, MultiHeadAttention, attention, attention_by_definition, explain
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


def as_numbers(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)


# -- 24: one mask in two kinds --------------------------------------------------------------------

PADDING = torch.tensor([[True, True, True, False], [True, False, True, True]])
TRIANGLE = torch.ones(4, 4).tril().bool()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_bool_and_minus_infinity_are_the_same_mask(causal, dtype):
    """pytorch#92554: B = 2, L = 4; padding in every kind, alone and with causal, same bits."""
    query, key, value = torch.randn(3, 2, 3, 4, 5).to(dtype)
    padding = PADDING[:, None, None]
    forms = [
        {"key_mask": PADDING},
        {"attn_mask": padding},
        {"attn_mask": as_numbers(padding, dtype)},
        {"bias": as_numbers(padding, dtype)},
    ]
    if causal:
        both = padding & TRIANGLE
        forms = [
            {"attn_mask": both},
            {"attn_mask": as_numbers(both, dtype)},
            {"bias": as_numbers(both, dtype)},
            {"attn_mask": as_numbers(padding, dtype), "bias": as_numbers(TRIANGLE, dtype)},
            *({**form, "is_causal": True} for form in forms),
            *({**form, "attn_mask": TRIANGLE} for form in forms if "attn_mask" not in form),
            *(
                {**form, "bias": as_numbers(TRIANGLE, dtype)}
                for form in forms
                if "bias" not in form
            ),
            {"attn_mask": as_numbers(TRIANGLE, dtype), "key_mask": PADDING},
        ]
    rules = {"key_mask": PADDING, "is_causal": causal}
    gold = attention_by_definition(query, key, value, **rules)
    peer = plain(query, key, value, **rules)[0]
    for backend in ("sdpa", "chunked"):
        claimed = [form for form in forms if backend in serving(query, key, value, **form)]
        outs = [attention(query, key, value, **form, backend=backend) for form in claimed]
        assert_within_budget(outs[0], gold, peer)
        assert len(outs) > 2 and all(torch.equal(out, outs[0]) for out in outs[1:])
    # The native kernels fold the scale into the exponent where nothing is added to the scores, so
    # that there a mask of numbers rounds in other places.
    for form in forms:
        assert_within_budget(attention(query, key, value, **form), gold, peer)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_under_bool_and_minus_infinity(causal):
    """pytorch#92554: they are the same mask to the backward too, bit by bit within a backend."""
    tensors = torch.randn(3, 2, 3, 4, 5)
    found = []
    for form in (
        {"key_mask": PADDING},
        {"attn_mask": PADDING[:, None, None]},
        {"attn_mask": as_numbers(PADDING[:, None, None], torch.float32)},
        {"bias": as_numbers(PADDING[:, None, None], torch.float32)},
    ):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = attention(*leaves, **form, is_causal=causal, backend="chunked")
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_padding_as_numbers_is_not_read_the_wrong_way_by_the_module():
    """pytorch#92554."""
    mha, x = MultiHeadAttention(6, 3, 2, is_causal=False), torch.randn(2, 4, 6)
    expected = mha(x, key_mask=PADDING)
    numbers = as_numbers(PADDING[:, None, None], torch.float32)
    assert_close(mha(x, attn_mask=numbers), expected)
    weights = mha(x, attn_mask=numbers, return_aux=WEIGHTS)[1].weights
    assert torch.equal(weights.gt(0), PADDING[:, None, None].expand(2, 2, 4, 4))


# -- 26: masks per item and head ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padded", [1, 2])
def test_an_expanded_mask_is_the_mask(padded, dtype):
    """pytorch#63271: N = 2, L = 5, H = 2; causal as (L, L) and (N, H, L, L), padding at the end."""
    query, key, value = torch.randn(3, 2, 2, 5, 4).to(dtype)
    causal = torch.ones(5, 5).tril().bool()
    key_mask = torch.arange(5) < torch.tensor([[5], [5 - padded]])
    gold = attention_by_definition(query, key, value, causal, key_mask=key_mask)
    peer = plain(query, key, value, causal, key_mask=key_mask)[0]
    for mask in (causal, as_numbers(causal, dtype)):
        for shape in ((5, 5), (1, 5, 5), (2, 5, 5), (1, 1, 5, 5), (2, 1, 5, 5), (2, 2, 5, 5)):
            spread = mask.expand(shape)
            for backend in ("auto", *serving(query, key, value, spread, key_mask=key_mask)):
                out = attention(query, key, value, spread, key_mask=key_mask, backend=backend)
                assert_within_budget(out, gold, peer)


ONE_FOR_ALL = {
    "key_mask": torch.tensor([[True], [False]]),
    "key_mask without axes": torch.tensor(True),
    "documents": torch.tensor([[3], [5]]),
    "pair of documents": (torch.tensor([[0]]), torch.tensor([[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]])),
}


@pytest.mark.parametrize("backend", ["native", "chunked"])
@pytest.mark.parametrize("name", ONE_FOR_ALL)
def test_one_entry_for_all_keys_or_rows(name, backend):
    """It broadcasts along S and L as well: under rules that cut the keys, with gradients, and in
    summaries, which look for padded rows."""
    given, L = ONE_FOR_ALL[name], 5
    argument = "documents" if "documents" in name else "key_mask"
    whole = tuple(t.expand(2, L) for t in given) if isinstance(given, tuple) else given.expand(2, L)
    tensors = torch.randn(3, 2, 3, L, 4).unbind()
    asked = AuxRequest(entropy=True, first_mass=True, reduce="head")
    results = []
    for rule in (given, whole):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        rules = {argument: rule, "is_causal": True, "window": (2, None), "backend": backend}
        out, aux = attention(*leaves, **rules, return_aux=asked)
        out.square().sum().backward()
        results.append((out, *(leaf.grad for leaf in leaves), *aux.entropy, *aux.first_mass))
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    gold = attention_by_definition(*tensors, is_causal=True, window=(2, None), **{argument: whole})
    assert_close(results[0][0], gold.float(), rtol=1e-5, atol=1e-6)


def test_gradients_of_a_known_kind_with_one_entry_for_all_keys():
    """In a window that leaves keys in front, of which the backward pass reads none."""
    query, key, value = torch.randn(2, 3, 13, 4), *torch.randn(2, 2, 3, 23, 4)
    mask, found = torch.tensor([[True], [False]]), []
    for key_mask in (mask.expand(2, 23), mask, mask):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        attention(*leaves, key_mask=key_mask, window=(0, 1)).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for gradients in found[1:]:
        for grad, expected in zip(gradients, found[0], strict=True):
            assert_close(grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_items_and_heads_of_a_mask_are_not_exchanged(kind):
    """pytorch#63271: the mask differs per item and head; N = H, so only numbers can tell."""
    query, key, value = torch.randn(3, 2, 2, 5, 4)
    allowed = torch.rand(2, 2, 5, 5) < 0.5
    allowed[..., 0] = True
    mask = allowed if kind == torch.bool else as_numbers(allowed, kind)
    expected = torch.stack([
        torch.stack([
            attention_by_definition(*(t[b : b + 1, h : h + 1] for t in (query, key, value)),
                                    mask[b, h])[0, 0]
            for h in range(2)
        ])
        for b in range(2)
    ])  # fmt: skip
    for backend in ("auto", *serving(query, key, value, mask)):
        out = attention(query, key, value, mask, backend=backend)
        assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    exchanged = attention(query, key, value, mask.transpose(0, 1))
    assert not torch.allclose(exchanged.double(), expected, atol=1e-2)


def test_a_mask_without_a_batch_axis_is_per_head():
    """pytorch#63271: three axes are (H, L, S), also where H = B; the meaning is never guessed."""
    query, key, value = torch.randn(3, 3, 3, 5, 4)
    mask = torch.rand(3, 5, 5) < 0.5
    mask[..., 0] = True
    out = attention(query, key, value, mask)
    assert_close(out, attention(query, key, value, mask[None].expand(3, 3, 5, 5)))
    assert not torch.allclose(out, attention(query, key, value, mask[:, None]), atol=1e-2)


# -- 28: weights after masking --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_allowed_keys_sum_to_1(dtype):
    """pytorch-image-models PR#2236: T = 3, key 2 blocked; the mask comes before the softmax."""
    query, key, value = torch.randn(3, 1, 2, 3, 4).to(dtype)
    mask = torch.tensor([True, True, False])
    gold = attention_by_definition(query, key[:, :, :2], value[:, :, :2], return_aux=True)
    peer = plain(query, key[:, :, :2], value[:, :, :2])
    out, aux = attention(query, key, value, mask, return_aux=WEIGHTS)
    assert_within_budget(out, gold[0], peer[0])
    assert_within_budget(aux.weights[..., :2], gold[2], peer[2], "weights")
    assert not bool(aux.weights[..., 2].any())
    total = aux.weights.sum(-1)
    assert_close(total, torch.ones_like(total), atol=2e-7, rtol=0)
    equal = attention(query * 0, key, torch.eye(3, dtype=dtype).expand(1, 2, 3, 3), mask)
    assert equal[0, 0].tolist() == [[0.5, 0.5, 0.0]] * 3
    for backend in serving(query, key, value, mask):
        out = attention(query, key, value, mask, backend=backend)
        assert_within_budget(out, gold[0], peer[0])


# -- 45: grouped heads ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_key_heads_are_repeated_and_not_tiled(dtype):
    """onnx PR#7274: v heads [10, 20] for four query heads give [10, 10, 20, 20]."""
    query, key = torch.zeros(1, 4, 1, 1, dtype=dtype), torch.zeros(1, 2, 1, 1, dtype=dtype)
    value = torch.tensor([10.0, 20.0], dtype=dtype).view(1, 2, 1, 1)
    for backend in ("auto", *serving(query, key, value)):
        out = attention(query, key, value, backend=backend)
        assert out.flatten().tolist() == [10.0, 10.0, 20.0, 20.0]
    assert attention(query, key, value, deterministic=True).flatten().tolist() == [10, 10, 20, 20]


@pytest.mark.parametrize(("H", "Hkv"), [(4, 2), (6, 3), (5, 1), (6, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_a_shared_head_are_summed_over_its_group(causal, H, Hkv):
    """onnx PR#7274: against float64 attention over heads repeated by repeat_interleave."""
    query, key, value = (torch.randn(2, n, L, 5) for n, L in ((H, 7), (Hkv, 7), (Hkv, 7)))
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    repeated = [t.repeat_interleave(H // Hkv, 1) for t in wide[1:]]
    s = wide[0] @ repeated[0].mT / math.sqrt(5)
    if causal:
        s = s.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf)
    gold = torch.softmax(s, -1) @ repeated[1]
    factor = torch.randn(gold.shape)
    expected = torch.autograd.grad((gold * factor).sum(), wide)
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    for backend in ("auto", *serving(*leaves, is_causal=causal)):
        out = attention(*leaves, is_causal=causal, backend=backend)
        assert_close(out.double(), gold, atol=2e-6, rtol=1e-5)
        for grad, truth in zip(
            torch.autograd.grad((out * factor).sum(), leaves), expected, strict=True
        ):
            assert_close(grad.double(), truth, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("H", "Hkv"), [(3, 2), (2, 3), (2, 4)])
def test_heads_that_do_not_divide_are_refused(H, Hkv):
    """onnx PR#7274: 3 query heads over 2 key heads."""
    query, key = torch.zeros(1, H, 2, 4), torch.zeros(1, Hkv, 2, 4)
    with pytest.raises(ValueError, match=f"query has {H} heads and key has {Hkv}"):
        attention(query, key, key)


def test_the_module_s_groups_are_in_the_same_order():
    """onnx PR#7274: rows of W_value labelled by their head."""
    mha = MultiHeadAttention(1, 1, 4, num_kv_heads=2, is_causal=False)
    with torch.no_grad():
        mha.W_value.weight.copy_(torch.tensor([[10.0], [20.0]]))
        mha.out_proj.weight.copy_(torch.eye(4))
    assert mha(torch.ones(1, 1)).tolist() == [[10.0, 10.0, 20.0, 20.0]]


def test_every_rule_reaches_every_head_of_a_group():
    """The kind of onnx PR#7274: per-head rules go by query head, not by key head."""
    H, Hkv = 6, 2
    query, key, value = (torch.randn(2, n, 5, 4) for n in (H, Hkv, Hkv))
    per_head = torch.rand(1, H, 5, 5) < 0.6
    per_head[..., 0] = True
    rules = (
        {"attn_mask": per_head},
        {"bias": torch.randn(H, 1, 5)},
        {"sinks": torch.randn(H)},
        {"alibi_slopes": torch.rand(H)},
        {"head_mask": torch.randn(H)},
    )
    for first, second in itertools.combinations(rules, 2):
        both = {**first, **second}
        spread = {k: t.expand(2, H, 5, 5) if k in ("attn_mask", "bias") else t
                  for k, t in both.items()}  # fmt: skip
        gold = attention_by_definition(query, key, value, **spread)
        assert_within_budget(
            attention(query, key, value, **both), gold, plain(query, key, value, **spread)[0]
        )

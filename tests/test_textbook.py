"""The textbook classes and the definition: against each other, and against numbers by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from clearhead import (
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    SelfAttention,
    attention_by_definition,
)
from clearhead.textbook import statistics_by_definition

E, D, H, L = 7, 3, 5, 11


def split(x, heads):
    """(..., L, heads * D) -> (B, heads, L, D) in float64."""
    x = x.double().reshape(-1, x.shape[-2], x.shape[-1])
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def test_one_head_by_hand():
    """Two tokens, one number each: the second token's weights are softmax([q k0, q k1])."""
    head = SelfAttention(1, 1)
    with torch.no_grad():
        for linear, weight in ((head.W_query, 1.0), (head.W_key, 2.0), (head.W_value, 3.0)):
            linear.weight.fill_(weight)
    out = head(torch.tensor([[1.0], [0.5]]))
    first, second = math.exp(0.5 * 2.0), math.exp(0.5 * 1.0)
    expected = (first * 3.0 + second * 1.5) / (first + second)
    assert_close(out, torch.tensor([[3.0], [expected]]))


def test_the_square_root_of_the_head_size_divides_the_scores():
    head = SelfAttention(4, 4)
    with torch.no_grad():
        for linear in (head.W_query, head.W_key, head.W_value):
            linear.weight.copy_(torch.eye(4))
    x = torch.tensor([[1.0, 0, 0, 0], [2.0, 0, 0, 0]])
    weight = 1 / (1 + math.exp((2 * 1 - 2 * 2) / 2))
    assert_close(head(x)[1, 0], torch.tensor((1 - weight) * 1.0 + weight * 2.0))


@pytest.mark.parametrize("shape", [(L, E), (3, L, E)])
def test_a_head_is_the_definition(shape):
    head, x = SelfAttention(E, D), torch.randn(shape)
    q, k, v = (split(linear(x), 1) for linear in (head.W_query, head.W_key, head.W_value))
    gold = attention_by_definition(q, k, v, is_causal=True)
    assert_close(head(x).double(), gold[:, 0].reshape(*shape[:-1], D), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(L, E), (3, L, E)])
@pytest.mark.parametrize("mixes", [True, False])
def test_the_wrapper_joins_its_heads_and_mixes_them(shape, mixes):
    wrapper, x = MultiHeadAttentionWrapper(E, D, H, out_proj=mixes), torch.randn(shape)
    joined = torch.cat([head(x) for head in wrapper.heads], -1)
    assert torch.equal(wrapper(x), wrapper.out_proj(joined) if mixes else joined)
    assert (wrapper.out_proj is not None) == mixes
    assert len(wrapper.heads) == H
    if mixes:
        assert wrapper.out_proj.bias is None


@pytest.mark.parametrize("shape", [(L, E), (3, L, E)])
def test_the_stitched_form_gives_the_wrapper_s_result(shape):
    wrapper, x = MultiHeadAttentionWrapper(E, D, H), torch.randn(shape)
    stitched = MultiHeadAttention.from_heads(wrapper)
    assert_close(stitched(x), wrapper(x), atol=2e-6, rtol=1e-5)
    q, k, v = (split(f(x), H) for f in (stitched.W_query, stitched.W_key, stitched.W_value))
    gold = attention_by_definition(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    gold = (gold @ stitched.out_proj.weight.double().T).reshape(*shape[:-1], H * D)
    assert_close(stitched(x).double(), gold, atol=2e-6, rtol=1e-5)
    assert_close(wrapper(x).double(), gold, atol=2e-6, rtol=1e-5)


def test_a_batch_changes_nothing():
    wrapper, x = MultiHeadAttentionWrapper(E, D, H), torch.randn(4, L, E)
    assert_close(wrapper(x), torch.stack([wrapper(item) for item in x]))


def test_no_token_sees_what_comes_after_it():
    wrapper, x = MultiHeadAttentionWrapper(E, D, H), torch.randn(L, E)
    changed = x.clone()
    changed[6:] = 100.0
    assert torch.equal(wrapper(x)[:6], wrapper(changed)[:6])
    assert not torch.allclose(wrapper(x)[6:], wrapper(changed)[6:])


def test_heads_that_differ_give_different_results():
    wrapper, x = MultiHeadAttentionWrapper(E, D, H, out_proj=False), torch.randn(L, E)
    blocks = wrapper(x).split(D, -1)
    assert all(not torch.allclose(blocks[0], other) for other in blocks[1:])


# -- the definition, by hand ----------------------------------------------------------------------

ZEROS = torch.zeros(1, 1, 2, 1)
KEYS = torch.tensor([0.0, math.log(3)]).view(1, 1, 2, 1)
VALUES = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1)
ONES = torch.ones(1, 1, 2, 1)


def run(query=ONES, key=KEYS, value=VALUES, **rules):
    out, lse, weights = attention_by_definition(query, key, value, return_aux=True, **rules)
    return out.flatten().tolist(), lse.flatten().tolist(), weights[0, 0].tolist()


def test_scores_of_0_and_log_3_weigh_one_to_three():
    out, lse, weights = run()
    assert out == pytest.approx([7.0, 7.0])
    assert lse == pytest.approx([math.log(4)] * 2)
    assert weights[0] == pytest.approx([0.25, 0.75])


def test_causal_is_aligned_to_the_lower_right():
    assert run(is_causal=True)[0] == pytest.approx([4.0, 7.0])
    assert run(query=ONES[:, :, :1], is_causal=True)[0] == pytest.approx([7.0])
    out, lse, weights = run(query=torch.ones(1, 1, 3, 1), is_causal=True)
    assert out == pytest.approx([0.0, 4.0, 7.0])
    assert lse[0] == -math.inf and weights[0] == [0.0, 0.0]


def test_rules_are_combined_by_and():
    key_mask = torch.tensor([[False, True]])
    assert run(key_mask=key_mask)[0] == pytest.approx([8.0, 8.0])
    assert run(key_mask=key_mask, is_causal=True)[0] == pytest.approx([0.0, 8.0])
    assert run(window=(0, 0))[0] == pytest.approx([4.0, 8.0])
    assert run(documents=torch.tensor([[1, 2]]))[0] == pytest.approx([4.0, 8.0])
    assert run(attn_mask=torch.tensor([[True, False], [True, True]]))[0] == pytest.approx(
        [4.0, 7.0]
    )


def test_scale_softcap_bias_and_alibi_in_their_order():
    assert run(scale=0.0)[0] == pytest.approx([6.0, 6.0])
    s = 2 * math.tanh(math.log(3) / 2)
    w = 1 / (1 + math.exp(-s))
    assert run(softcap=2.0)[2][0] == pytest.approx([1 - w, w])
    # The bias comes after the cap: it undoes the capped score exactly.
    assert run(softcap=2.0, bias=torch.tensor([s, 0.0]).double())[2][0] == pytest.approx([0.5, 0.5])
    w = 1 / (1 + math.exp(-(math.log(3) - 0.5)))
    assert run(alibi_slopes=torch.tensor([0.5]))[2][0] == pytest.approx([1 - w, w])
    assert run(bias=torch.tensor([0.0, -math.inf]))[0] == pytest.approx([4.0, 4.0])


def test_a_sink_takes_weight_and_gives_no_value():
    out, lse, weights = run(query=ZEROS, sinks=torch.zeros(1))
    assert weights[0] == pytest.approx([1 / 3, 1 / 3])
    assert out == pytest.approx([4.0, 4.0])
    assert lse == pytest.approx([math.log(3)] * 2)


def test_grouped_heads_repeat_and_do_not_tile():
    value = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    out = attention_by_definition(torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1), value)
    assert out.flatten().tolist() == [10.0, 10.0, 20.0, 20.0]


def test_dropout_keeps_what_it_is_told_and_rescales_it():
    keep = torch.tensor([[True, False], [True, True]])
    assert run(keep=keep, dropout_p=0.5)[0] == pytest.approx([0.25 * 4 * 2, 7.0 * 2])
    assert run(keep=torch.zeros(2, 2).bool(), dropout_p=1.0)[0] == [0.0, 0.0]


def test_a_head_mask_multiplies_outputs_and_not_weights():
    out, _, weights = run(head_mask=torch.tensor([0.5]))
    assert out == pytest.approx([3.5, 3.5])
    assert weights[0] == pytest.approx([0.25, 0.75])


def test_a_row_of_huge_negatives_is_an_ordinary_row():
    """Its gradient by the value is the average too, which one rebuilt from lse would not be."""
    value = VALUES.clone().requires_grad_()
    bias = torch.full((2, 2), torch.finfo(torch.float32).min)
    out = attention_by_definition(ONES, KEYS, value, bias=bias)
    assert out.flatten().tolist() == pytest.approx([6.0, 6.0])
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert grad.flatten().tolist() == pytest.approx([1.0, 1.0])


def test_an_empty_row_passes_no_gradient():
    query = ONES.clone().requires_grad_()
    out = attention_by_definition(query, KEYS, VALUES, attn_mask=torch.tensor([[False], [True]]))
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert grad[0, 0, 0].item() == 0.0
    assert grad[0, 0, 1].item() != 0.0


# -- the statistics, by hand ----------------------------------------------------------------------


def test_statistics_by_hand():
    """Three rows over four keys, of which key 0 is padding; own keys are 1, 2 and 3."""
    weights = torch.tensor([[[[0, 1, 0, 0], [0, 0.25, 0.75, 0], [0, 0.25, 0.5, 0.25]]]])
    lse = torch.tensor([[[math.log(2), 0, math.log(4)]]])
    key_mask = torch.tensor([[False, True, True, True]])
    found = statistics_by_definition(weights, lse, weights > 0, key_mask=key_mask, top_k=3)
    expected = {
        "max_logit": [math.log(2), math.log(0.75), math.log(2)],
        "entropy": [0, 0.25 * math.log(4) - 0.75 * math.log(0.75), math.log(2) + 0.5 * math.log(2)],
        "first_mass": [1, 0.25, 0.25],
        "previous_mass": [0, 0.25, 0.5],
        "self_mass": [1, 0.75, 0.25],
        "distance": [0, 0.25, 0.5 + 2 * 0.25],
        "key_mass": [0, 1.5, 1.25, 0.25],
        "top_weights": [1, 0, 0, 0.75, 0.25, 0, 0.5, 0.25, 0.25],
        "top_keys": [1, -1, -1, 2, 1, -1, 2, 1, 3],
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].flatten().tolist() == pytest.approx(values), name


def test_statistics_of_a_row_that_sees_nothing():
    found = statistics_by_definition(
        torch.zeros(1, 1, 1, 2),
        torch.full((1, 1, 1), -math.inf),
        torch.zeros(1, 1, 1, 2).bool(),
        top_k=1,
    )
    assert float(found.pop("max_logit")) == -math.inf and int(found.pop("top_keys")) == -1
    assert not any(bool(tensor.any()) for tensor in found.values())


def test_the_first_key_is_of_the_rows_own_document():
    weights = torch.tensor([[[[1, 0, 0], [0, 0.5, 0], [0, 0.5, 0.25]]]])  # a sink takes the rest
    documents = torch.tensor([[4, 9, 9]])
    found = statistics_by_definition(
        weights, torch.zeros(1, 1, 3), weights > 0, documents=documents
    )
    assert found["first_mass"].flatten().tolist() == [1, 0.5, 0.5]
    assert found["self_mass"].flatten().tolist() == [1, 0.5, 0.25]

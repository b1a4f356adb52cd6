"""Reports L, dropout: when it acts, how often, and that the backward drops what the forward did."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from clearhead import (
    AuxRequest,
    MultiHeadAttention,
    attention,
    attention_by_definition,
    explain,
    varlen_attention,
)
from clearhead.backends import blocks
from clearhead.testing import assert_within_budget, plain

EVERYTHING = AuxRequest(lse=True, weights=True)
B, H, HKV, L, S = 2, 6, 3, 5, 7


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def draw(dtype=torch.float32, value_size=S):
    shapes = (B, H, L, 4), (B, HKV, S, 4), (B, HKV, S, value_size)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def survivors(query, key, seed, p, **rules):
    """Which weights survive with a seed: the output shows them where values are the identity."""
    value = torch.eye(S, dtype=key.dtype).expand(*key.shape[:2], S, S)
    torch.manual_seed(seed)
    return attention(query, key, value, dropout_p=p, **rules) > 0


# -- 46: on and off -------------------------------------------------------------------------------


def test_eval_is_without_dropout():
    """pytorch#124464: module dropout 0.5, eval(): calls are equal to the bit, and to p = 0."""
    mha, x = MultiHeadAttention(6, 3, 2, dropout=0.5), torch.randn(5, 6)
    training = mha(x)
    assert not torch.equal(training, mha(x))
    mha.eval()
    first = mha(x)
    assert torch.equal(first, mha(x))
    never = MultiHeadAttention(6, 3, 2)
    never.load_state_dict(mha.state_dict())
    assert torch.equal(first, never(x)) and not torch.equal(first, training)
    assert torch.equal(never.train()(x), never.eval()(x))


def test_the_function_drops_whenever_it_is_told_to():
    """pytorch#124464: p = 0.5 is random, as torch's is; p = 0 is not, and is the plain call."""
    query, key, value = draw()
    assert not torch.equal(*(attention(query, key, value, dropout_p=0.5) for _ in range(2)))
    with torch.no_grad():
        assert not torch.equal(*(attention(query, key, value, dropout_p=0.5) for _ in range(2)))
    for p in (0, 0.0):
        out = attention(query, key, value, dropout_p=p)
        assert torch.equal(out, attention(query, key, value))


def test_p_0_draws_no_numbers():
    """The kind of pytorch#124464: evaluation does not move the generator."""
    query, key, value = draw()
    mha, x = MultiHeadAttention(6, 3, 2, dropout=0.5).eval(), torch.randn(5, 6)
    state = torch.get_rng_state()
    attention(query, key, value)
    attention(query, key, value, dropout_p=0.0, softcap=1.0)
    mha(x)
    assert torch.equal(torch.get_rng_state(), state)
    mha.train()(x)
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rules", [{}, {"is_causal": True}, {"deterministic": True},
                                   {"sinks": torch.zeros(H)}], ids=str)  # fmt: skip
def test_p_1_gives_exact_zeros(rules, dtype):
    """pytorch#124464: output and gradients are 0, and 1 / (1 - p) makes no NaN of them."""
    leaves = draw(dtype)
    rules = {k: t.to(dtype) if k == "sinks" else t for k, t in rules.items()}
    out = attention(*leaves, dropout_p=1.0, **rules)
    assert not bool(out.any())
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert not bool(grad.any())
    # Weights are returned from before dropout, which chunked alone serves.
    out, aux = attention(*leaves, dropout_p=1.0, **rules, return_aux=EVERYTHING)
    kept = attention(*leaves, **rules, backend="chunked", return_aux=EVERYTHING)[1]
    assert torch.equal(aux.weights, kept.weights) and torch.equal(aux.lse, kept.lse)
    assert not bool(out.any())


def test_p_1_of_the_module():
    """pytorch#124464: nothing is left but out_proj's bias, and only it learns."""
    mha, x = MultiHeadAttention(6, 3, 2, dropout=1.0, out_bias=True), torch.randn(5, 6)
    out = mha(x)
    assert torch.equal(out, mha.out_proj.bias.expand(5, 6))
    out.sum().backward()
    for name, parameter in mha.named_parameters():
        assert bool(parameter.grad.any()) is (name == "out_proj.bias")


# -- 46: how much ---------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_expectation(p):
    """pytorch#124464: kept weights are divided by 1 - p; the mean of many draws is the output."""
    draws = 4000
    query, key, value = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 3)
    many = [t.expand(draws, *t.shape[1:]) for t in (query, key, value)]
    out = attention(*many, dropout_p=p)
    expected, aux = attention(query, key, value, return_aux=EVERYTHING)
    # The variance of sum_j b_j w_j v_j / (1 - p) with b_j 1 or 0 of mean 1 - p.
    variance = p / (1 - p) * (aux.weights**2) @ value**2
    deviation = (out.mean(0, keepdim=True) - expected) / (variance / draws).sqrt()
    assert float(deviation.abs().max()) < 4.5
    assert_close(out.var(0, keepdim=True), variance, rtol=0.25, atol=1e-3)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_every_weight_is_dropped_alike_and_on_its_own(p):
    """pytorch#124464: the share is p in each row, column, head and item, and pairs do not agree."""
    n, wide = 600, torch.zeros(600, 2, 8, 1)
    value = torch.eye(16).expand(n, 1, 16, 16)
    keep = (attention(wide, torch.zeros(n, 1, 16, 1), value, dropout_p=p) > 0).double()
    assert keep.shape == (n, 2, 8, 16)
    for axes in ((0,), (0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)):
        count = keep.numel() / keep.mean(axes).numel()
        deviation = (keep.mean(axes) - (1 - p)) / (p * (1 - p) / count) ** 0.5
        assert float(deviation.abs().max()) < 5
    flat = (keep - (1 - p)).flatten(1) / (p * (1 - p)) ** 0.5
    correlation = flat.T @ flat / n
    correlation.fill_diagonal_(0)
    assert float(correlation.abs().max()) * n**0.5 < 6


# -- 46: the same pattern in the backward ---------------------------------------------------------


RULES = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.tensor([[1, 0, 1, 1, 1, 0, 1]] * 5).bool()},
    "softcap and sinks": {"softcap": 1.5, "sinks": torch.linspace(-1, 1, H)},
    "deterministic": {"deterministic": True, "window": (3, 1)},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_drop_the_same_weights(name, dtype):
    """pytorch#124464: against the definition, which is told what survived."""
    leaves = draw(dtype, value_size=4)
    rules = {k: t.to(dtype) if k == "sinks" else t for k, t in RULES[name].items()}
    keep = survivors(*leaves[:2], 11, 0.3, **rules)
    torch.manual_seed(11)
    out = attention(*leaves, dropout_p=0.3, **rules)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    spread = {k: t.expand(B, H, L, S) if k == "attn_mask" else t for k, t in rules.items()
              if k != "deterministic"}  # fmt: skip
    gold = attention_by_definition(*leaves, **spread, dropout_p=0.3, keep=keep)
    truth = torch.autograd.grad(gold.sum(), leaves)
    weights = plain(*leaves, **spread)[2].to(dtype)
    value = leaves[2].repeat_interleave(H // HKV, 1)
    peer = (weights * keep / 0.7).to(dtype) @ value
    peer_grads = torch.autograd.grad(peer.sum(), leaves)
    assert_within_budget(out, gold, peer)
    for grad, right, rival in zip(grads, truth, peer_grads, strict=True):
        assert_within_budget(grad, right, rival, "gradient")


@pytest.mark.parametrize("name", RULES)
def test_gradients_under_dropout_by_small_steps(name):
    """pytorch#124464: with the seed fixed, dropout is a function like any other."""
    leaves = draw(torch.float64, value_size=4)
    rules = {k: t.double() if k == "sinks" else t for k, t in RULES[name].items()}

    def loss(*tensors):
        torch.manual_seed(5)
        return attention(*tensors, dropout_p=0.4, **rules).sin().sum()

    grads = torch.autograd.grad(loss(*leaves), leaves)
    tangents = [torch.randn_like(t) for t in leaves]
    with torch.no_grad():
        ahead, behind = (
            loss(*(t + s * d for t, d in zip(leaves, tangents, strict=True))) for s in (1e-6, -1e-6)
        )
    slope = sum((g * d).sum() for g, d in zip(grads, tangents, strict=True))
    assert_close(slope, (ahead - behind) / 2e-6, atol=1e-7, rtol=1e-6)


def test_second_derivatives_and_transforms_drop_the_same_weights():
    """pytorch#124464 and pytorch#116350 together: grad, jvp and gradgrad agree on the pattern."""
    leaves = draw(torch.float64, value_size=4)

    def call(*tensors):
        torch.manual_seed(5)
        return attention(*tensors, dropout_p=0.4)

    keep = survivors(*leaves[:2], 5, 0.4)
    gold = attention_by_definition(*leaves, dropout_p=0.4, keep=keep)
    assert_close(call(*leaves), gold, atol=1e-12, rtol=1e-12)
    found = torch.func.grad(lambda *t: call(*t).sin().sum(), (0, 1, 2))(*leaves)
    expected = torch.autograd.grad(gold.sin().sum(), leaves, create_graph=True)
    for grad, right in zip(found, expected, strict=True):
        assert_close(grad, right, atol=1e-12, rtol=1e-10)
    second = torch.autograd.grad(sum(g.square().sum() for g in expected), leaves)
    first = torch.autograd.grad(call(*leaves).sin().sum(), leaves, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    for grad, right in zip(again, second, strict=True):
        assert_close(grad, right, atol=1e-11, rtol=1e-9)


# -- 46: seeds ------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits():
    """pytorch#124464: for function, module and packed rows; and other seeds do not."""
    query, key, value = (t.detach() for t in draw())
    mha, x = MultiHeadAttention(6, 3, 2, dropout=0.5), torch.randn(2, 5, 6)
    rows, offsets = torch.randn(7, 2, 4), torch.tensor([0, 3, 7])
    calls = (
        lambda: attention(query, key, value, dropout_p=0.5),
        lambda: attention(query, key, value, dropout_p=0.5, deterministic=True),
        lambda: mha(x),
        lambda: varlen_attention(rows, rows, rows, offsets, offsets, dropout_p=0.5),
    )
    for call in calls:
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(call())
        assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", RULES)
def test_the_pattern_does_not_depend_on_blocks_rows_or_other_rules(name, monkeypatch):
    """A weight survives by (seed, item, head, row, key), however the call is cut."""
    query, key, _ = draw()
    keep = survivors(query, key, 7, 0.5)
    visible = survivors(query, key, 7, 0.0, **RULES[name])
    for scores, rows in itertools.product((1, 30, 100, 1 << 20), (1, 3)):
        monkeypatch.setattr(blocks, "BLOCK", scores)
        monkeypatch.setattr(blocks, "MIN_ROWS", rows)
        assert torch.equal(survivors(query, key, 7, 0.5, **RULES[name]), keep & visible)


def test_gradients_do_not_depend_on_blocks(monkeypatch):
    """The backward of a call cut into many blocks drops what its forward in one block dropped."""
    leaves = draw(value_size=4)
    torch.manual_seed(7)
    out = attention(*leaves, dropout_p=0.5)
    expected = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    monkeypatch.setattr(blocks, "BLOCK", 20)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    for grad, right in zip(grads, expected, strict=True):
        assert_close(grad, right, atol=1e-5, rtol=1e-5)


def test_dropout_leaves_the_fused_kernel_and_says_so():
    """transformers PR#46960: torch's slow path is not taken in silence."""
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    told = explain(query, key, value, dropout_p=0.1)
    assert told.backend == "chunked" and "slow path" in told.reasons["sdpa"]

"""Reports L, the module: returned weights, and every projection called as a module."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close

from clearhead import AuxRequest, MultiHeadAttention, attention, attention_by_definition

WEIGHTS = AuxRequest(weights=True)
PROJECTIONS = ("W_query", "W_key", "W_value", "out_proj")


# -- 48: returned weights -------------------------------------------------------------------------


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_weights_are_normalised_unsigned_and_of_the_exact_shape(dtype, dropout_p):
    """flash-attention#902: T = 4, with and without dropout; (B, H, L, S), before dropout."""
    query, key, value = torch.randn(3, 2, 3, 4, 8).to(dtype)
    out, aux = attention(query, key, value, dropout_p=dropout_p, is_causal=True, return_aux=WEIGHTS)
    weights = aux.weights
    assert weights.shape == (2, 3, 4, 4)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool((weights >= 0).all()) and aux.lse is None
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), atol=1e-6, rtol=0)
    _, _, gold = attention_by_definition(query, key, value, is_causal=True, return_aux=True)
    assert_close(weights.double(), gold, atol=1e-6, rtol=1e-5)
    if dropout_p == 0:
        product = (weights.double() @ value.double()).to(dtype)
        assert_close(out, product, atol=4 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_weights_of_the_module_are_per_query_head(heads, lead):
    """flash-attention#902: not averaged, not padded, and W @ V through out_proj is the output."""
    mha = MultiHeadAttention(6, 3, heads[0], num_kv_heads=heads[1], dropout=0.5).eval()
    x = torch.randn(*lead, 5, 6)
    out, aux = mha(x, return_aux=WEIGHTS)
    assert aux.weights.shape == (*lead, heads[0], 5, 5)
    value = mha.W_value(x).unflatten(-1, (heads[1], 3)).transpose(-3, -2)
    value = value.repeat_interleave(heads[0] // heads[1], -3)
    assert_close(mha.out_proj((aux.weights @ value).transpose(-3, -2).flatten(-2)), out)
    # Heads differ: an average in their place would show.
    assert not torch.allclose(aux.weights[..., 0, :, :], aux.weights[..., 1, :, :], atol=1e-3)
    assert_close(mha(x), out)


def test_weights_of_cross_attention_are_l_by_s():
    """flash-attention#902: L and S differ, and nothing is rounded up to 128."""
    mha = MultiHeadAttention(6, 3, 2, context_dim=5, is_causal=False)
    out, aux = mha(torch.randn(2, 4, 6), torch.randn(2, 7, 5), return_aux=WEIGHTS)
    assert aux.weights.shape == (2, 2, 4, 7) and out.shape == (2, 4, 6)


def test_weights_carry_gradients():
    """flash-attention#902: a loss on the weights of one head moves that head's projections only."""
    mha, x = MultiHeadAttention(6, 3, 2), torch.randn(5, 6)
    weights = mha(x, return_aux=WEIGHTS)[1].weights
    weights[1, :, 0].sum().backward()
    for linear in (mha.W_query, mha.W_key):
        assert not bool(linear.weight.grad[:3].any()) and bool(linear.weight.grad[3:].any())
    assert mha.out_proj.weight.grad is None or not bool(mha.out_proj.weight.grad.any())


# -- 50: projections are modules ------------------------------------------------------------------

MODES = {
    "train": (True, torch.enable_grad),
    "eval": (False, torch.enable_grad),
    "no_grad": (False, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("weights", [False, True])
def test_hooks_fire_once_per_call_on_every_path(mode, backend, weights):
    """pytorch#128413: on the attention and on each projection, in eval and inference mode too."""
    training, context = MODES[mode]
    mha = MultiHeadAttention(6, 3, 2, backend=backend, dropout=0.5).train(training)
    calls = []
    for name, part in [("self", mha), *((name, getattr(mha, name)) for name in PROJECTIONS)]:
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
        part.register_forward_pre_hook(lambda *_, name=name: calls.append(f"before {name}"))
    with context():
        for count in (1, 2):
            mha(torch.randn(2, 5, 6), return_aux=WEIGHTS if weights else None)
            for name in ("self", *PROJECTIONS):
                assert calls.count(name) == calls.count(f"before {name}") == count


def test_a_hook_may_change_what_passes():
    """pytorch#128413: what a hook returns is what is used."""
    mha, x = MultiHeadAttention(6, 3, 2).eval(), torch.randn(5, 6)
    plain = mha(x)
    for name in PROJECTIONS:
        handle = getattr(mha, name).register_forward_hook(lambda m, i, out: out * 2)
        assert not torch.allclose(mha(x), plain, atol=1e-2)
        handle.remove()
    with mha.out_proj.register_forward_hook(lambda m, i, out: out + 1):
        assert torch.equal(mha(x), plain + 1)
    assert torch.equal(mha(x), plain)


class LowRank(nn.Module):
    """An adapter: the frozen linear map, and a trained product of two thin ones beside it."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_adapter_changes_the_result_and_learns(name):
    """pytorch#128413: wrap a projection with a low-rank adapter and take a step."""
    mha, x = MultiHeadAttention(6, 3, 2), torch.randn(2, 5, 6)
    before = mha(x)
    frozen = getattr(mha, name).weight.detach().clone()
    adapter = LowRank(getattr(mha, name))
    setattr(mha, name, adapter)
    assert torch.equal(mha(x), before)
    mha(x).square().sum().backward()
    assert bool(adapter.up.weight.grad.any()) and adapter.linear.weight.grad is None
    with torch.no_grad():
        adapter.up.weight -= 0.1 * adapter.up.weight.grad
    for training, context in MODES.values():
        with context():
            assert not torch.allclose(mha.train(training)(x), before, atol=1e-4)
    assert torch.equal(adapter.linear.weight, frozen)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_parametrisations_and_pruning_are_obeyed(name):
    """pytorch#128413: the weight that a parametrisation computes is the one that counts."""

    class Zero(nn.Module):
        def forward(self, weight):
            return weight * 0

    mha, x = MultiHeadAttention(6, 3, 2, out_bias=True), torch.randn(5, 6)
    plain = mha(x)
    part = getattr(mha, name)
    parametrize.register_parametrization(part, "weight", Zero())
    zeroed = mha.eval()(x)
    if name in ("W_value", "out_proj"):
        assert not bool(zeroed.any())
    else:  # all scores are 0: each row is the mean of the values it sees
        mean = mha.W_value(x).cumsum(0) / torch.arange(1, 6)[:, None]
        assert_close(zeroed, mha.out_proj(mean))
    parametrize.remove_parametrizations(part, "weight", leave_parametrized=False)
    assert_close(mha(x), plain)
    prune.random_unstructured(part, "weight", amount=0.5)
    assert not torch.allclose(mha(x), plain, atol=1e-3)


def test_a_projection_may_be_replaced_by_any_module():
    """pytorch#128413: nothing reads the weights behind the module's back."""
    mha, x = MultiHeadAttention(6, 3, 2), torch.randn(5, 6)
    expected = mha(x)
    for name in PROJECTIONS:
        setattr(mha, name, nn.Sequential(nn.Identity(), getattr(mha, name), nn.Identity()))
    for training, context in MODES.values():
        with context():
            assert_close(mha.train(training)(x), expected)


def test_the_result_is_the_same_in_every_mode():
    """pytorch#128413: no path is taken for eval or inference that gives something else."""
    mha, x = MultiHeadAttention(6, 3, 2, num_kv_heads=1), torch.randn(2, 5, 6)
    key_mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    rules = ({}, {"key_mask": key_mask}, {"attn_mask": torch.randn(5, 5)})
    for rule, requested in itertools.product(rules, (None, WEIGHTS)):
        outs = []
        for training, context in MODES.values():
            with context():
                result = mha.train(training)(x, **rule, return_aux=requested)
                outs.append(result[0] if requested else result)
        for out in outs[1:]:
            assert_close(out, outs[0])

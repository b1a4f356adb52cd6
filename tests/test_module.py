"""MultiHeadAttention against the definition, computed in float64 from the module's own weights."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from clearhead import (
    AuxRequest,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    attention_by_definition,
)

B, L, S, E, C, D, H = 2, 5, 4, 7, 11, 3, 6
EXACT = {"atol": 1e-12, "rtol": 0}
# For six heads ALiBi takes the four slopes of four heads, then every other slope of eight.
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
OPTIONS = {
    "plain": {},
    "multi-query": {"num_kv_heads": 1},
    "2 kv heads": {"num_kv_heads": 2},
    "3 kv heads": {"num_kv_heads": 3},
    "6 kv heads": {"num_kv_heads": 6},
    "value_head_dim": {"value_head_dim": 5},
    "output_dim": {"output_dim": 13},
    "qkv_bias": {"qkv_bias": True},
    "out_bias": {"out_bias": True},
    "not causal": {"is_causal": False},
    "window": {"sliding_window": 2},
    "window to both sides": {"sliding_window": 2, "is_causal": False},
    "scale": {"scale": 0.3},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -1.5},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "alibi to both sides": {"alibi": True, "is_causal": False},
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer"},
    "gate": {"gate": True},
    "all": {
        "num_kv_heads": 2, "value_head_dim": 5, "output_dim": 13, "qkv_bias": True,
        "out_bias": True, "sliding_window": 3, "scale": 0.9, "softcap": 1.5, "sinks": True,
        "alibi": True, "qk_norm": "rms", "gate": True,
    },
}  # fmt: skip
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def build(dtype=torch.float64, **options):
    """A module in which every number matters."""
    module = MultiHeadAttention(E, D, H, dtype=dtype, **options)
    for name, parameter in module.named_parameters():
        if "bias" in name or "norm" in name or name == "sinks":
            nn.init.normal_(parameter)
    return module


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def by_definition(m, x, context=None, attn_mask=None, key_mask=None):
    """(out, lse, weights), from x (B, L, E) and the weights alone, head by head."""

    def heads(tensor, linear, number, size, norm=None):
        wide = tensor.double() @ linear.weight.double().T
        wide = wide if linear.bias is None else wide + linear.bias.double()
        blocks = torch.stack([wide[..., h * size : (h + 1) * size] for h in range(number)], 1)
        if norm is None:
            return blocks
        if isinstance(norm, nn.LayerNorm):
            blocks = blocks - blocks.mean(-1, keepdim=True)
        smallest = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        eps = smallest if norm.eps is None else norm.eps
        blocks = blocks / (blocks.square().mean(-1, keepdim=True) + eps).sqrt()
        blocks = blocks * norm.weight.double()
        return blocks + norm.bias.double() if isinstance(norm, nn.LayerNorm) else blocks

    source = x if context is None else context
    q = heads(x, m.W_query, m.num_heads, m.head_dim, m.norm_query)
    k = heads(source, m.W_key, m.num_kv_heads, m.head_dim, m.norm_key)
    v = heads(source, m.W_value, m.num_kv_heads, m.value_head_dim)
    W = m.sliding_window
    out, lse, weights = attention_by_definition(
        q,
        k,
        v,
        attn_mask,
        is_causal=m.is_causal,
        scale=m.scale,
        key_mask=key_mask,
        window=W and ((W - 1, 0) if m.is_causal else (W - 1, W - 1)),
        softcap=m.softcap,
        sinks=m.sinks,
        alibi_slopes=torch.tensor(SLOPES) if m.alibi else None,
        return_aux=True,
    )
    out = torch.cat(out.unbind(1), dim=-1)
    if m.W_gate is not None:
        out = out / (1 + torch.exp(-(x.double() @ m.W_gate.weight.double().T)))
    out = out @ m.out_proj.weight.double().T
    return (out if m.out_proj.bias is None else out + m.out_proj.bias.double()), lse, weights


# -- each option against the definition -----------------------------------------------------------


@EVERY
def test_every_option_is_the_definitions(options):
    module, x = build(**options), draw(B, L, E)
    wanted, lse, weights = by_definition(module, x)
    out = module(x)
    assert_close(out, wanted, **EXACT)
    again, aux = module(x, return_aux=AuxRequest(lse=True, weights=True))
    assert_close(again, out, **EXACT)
    assert_close(aux.lse, lse, **EXACT)
    assert_close(aux.weights, weights, **EXACT)
    with torch.no_grad():  # where other kernels may serve
        assert_close(module(x), wanted, **EXACT)
        single = module.float()(x.float())
        assert single.dtype == torch.float32
        assert_close(single.double(), wanted, atol=1e-5, rtol=1e-4)


@EVERY
def test_gradients_are_the_definitions(options):
    module, x = build(**options), draw(B, L, E).requires_grad_()
    sources = [x, *module.parameters()]
    d_out = torch.randn_like(module(x))
    found = torch.autograd.grad(module(x), sources, d_out)
    wanted = torch.autograd.grad(by_definition(module, x)[0], sources, d_out)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "options",
    [o for o in OPTIONS.values() if "is_causal" not in o],
    ids=[name for name, o in OPTIONS.items() if "is_causal" not in o],
)
@pytest.mark.parametrize("context_dim", [E, C])
def test_cross_attention_is_the_definitions(context_dim, options):
    module = build(context_dim=context_dim, is_causal=False, **options)
    x, context = draw(B, L, E), draw(B, S, context_dim)
    key_mask = torch.arange(S) < torch.tensor([[S], [2]])
    for mask in (None, key_mask):
        out = module(x, context, key_mask=mask)
        assert_close(out, by_definition(module, x, context, key_mask=mask)[0], **EXACT)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lead", [(), (H,), (1, H), (B, 1), (B, H)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_broadcast_and_combine(is_causal, lead, kind):
    module, x = build(is_causal=is_causal, out_bias=True), draw(B, L, E)
    keep = torch.rand(*lead, L, L) > 0.3
    mask = keep if kind == torch.bool else torch.randn(*lead, L, L).to(kind)
    mask = mask if kind == torch.bool else mask.masked_fill(~keep, -torch.inf)
    key_mask = torch.arange(L) < torch.tensor([[L], [3]])
    for padding in (None, key_mask):
        out, aux = module(x, attn_mask=mask, key_mask=padding, return_aux=AuxRequest(weights=True))
        wanted, _, weights = by_definition(module, x, None, mask, padding)
        assert_close(out, wanted, **EXACT)
        assert torch.equal(aux.weights > 0, weights > 0)


def test_a_token_that_may_attend_to_nothing_gets_the_bias():
    module, x = build(out_bias=True), draw(B, L, E)
    key_mask = torch.tensor([[True] * L, [False] * L])
    out = module(x, key_mask=key_mask)
    assert torch.equal(out[1], module.out_proj.bias.expand(L, -1))
    for grad in torch.autograd.grad(out.square().sum(), list(module.parameters())):
        assert grad.isfinite().all()
    bare = build()
    assert torch.equal(bare(x, key_mask=key_mask)[1], torch.zeros(L, H * D, dtype=x.dtype))


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_leading_axes_change_nothing(options):
    module, x = build(**options), draw(2, 3, L, E)
    key_mask = torch.rand(2, 3, L) > 0.3
    out = module(x, key_mask=key_mask)
    assert out.shape == (2, 3, L, module.output_dim)
    for a in range(2):
        rows = module(x[a], key_mask=key_mask[a])
        assert_close(rows, out[a], **EXACT)
        for b in range(3):
            assert_close(module(x[a, b], key_mask=key_mask[a, b]), out[a, b], **EXACT)


def test_a_context_has_the_same_leading_axes():
    module = build(is_causal=False, context_dim=C)
    x, context = draw(2, 3, L, E), draw(2, 3, S, C)
    out = module(x, context)
    assert_close(module(x[1, 2], context[1, 2]), out[1, 2], **EXACT)
    shared = module(x[1], context[1, :1])
    assert_close(shared[2], module(x[1, 2], context[1, 0]), **EXACT)


@pytest.mark.parametrize(("items", "length"), [(0, 5), (2, 0), (2, 1), (1, 1)])
def test_short_and_empty_inputs(items, length):
    module = build(**OPTIONS["all"])
    x = draw(items, length, E).requires_grad_()
    out = module(x)
    assert out.shape == (items, length, 13)
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    if length == 1:
        assert_close(out, by_definition(module, x)[0], **EXACT)


def test_an_empty_context_gives_the_bias():
    module = build(is_causal=False, out_bias=True)
    out = module(draw(B, L, E), draw(B, 0, E))
    assert torch.equal(out, module.out_proj.bias.expand(B, L, -1))


def test_it_is_the_wrapper_of_the_textbook():
    wrapper = MultiHeadAttentionWrapper(E, D, H).double()
    x = draw(B, L, E)
    assert_close(MultiHeadAttention.from_heads(wrapper)(x), wrapper(x), **EXACT)


# -- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 6])
def test_a_window_of_one_returns_the_own_value(kv_heads, dtype):
    module = build(dtype, sliding_window=1, num_kv_heads=kv_heads)
    x = draw(B, L, E, dtype=dtype)
    values = module.W_value(x).unflatten(-1, (kv_heads, D))
    values = values.repeat_interleave(H // kv_heads, dim=-2).flatten(-2)
    assert torch.equal(module(x), module.out_proj(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("W", [L, L + 1, 1000])
def test_a_window_of_the_whole_length_is_plain_causal_to_the_bit(W, dtype):
    module, x = build(dtype, sliding_window=W), draw(B, L, E, dtype=dtype)
    plain = build(dtype)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("W", [1, 2, 3, 5, 8])
def test_exactly_w_keys_are_seen(W):
    x, request = draw(B, L, E), AuxRequest(weights=True)
    i = torch.arange(L)
    seen = (build(sliding_window=W)(x, return_aux=request)[1].weights > 0).sum(-1)
    assert torch.equal(seen, (i + 1).clamp(max=W).expand(B, H, L))
    both = build(sliding_window=W, is_causal=False)(x, return_aux=request)[1].weights
    assert torch.equal(both > 0, ((i[:, None] - i).abs() < W).expand(B, H, L, L))


def test_the_last_row_depends_on_its_window_alone():
    module, x = build(sliding_window=20), draw(400, E)
    rows = torch.stack([module(x[-n:])[-1] for n in (20, 40, 80, 200, 400)])
    assert_close(rows, rows[:1].expand_as(rows), **EXACT)


# -- dropout --------------------------------------------------------------------------------------


def test_dropout_works_in_training_only():
    module, x = build(dropout=0.5), draw(B, L, E)
    assert not torch.equal(module(x), module(x))
    torch.manual_seed(5)
    first = module(x)
    torch.manual_seed(5)
    assert torch.equal(module(x), first)
    module.eval()
    assert torch.equal(module(x), module(x))
    plain = build()
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x), plain(x))


def test_dropout_keeps_the_mean_and_returns_weights_from_before():
    module, x = build(dropout=0.25), draw(L, E)
    outs = torch.stack([module(x) for _ in range(600)])
    error = (outs.mean(0) - by_definition(module, x[None])[0][0]).abs()
    assert (error < 6 * outs.std(0) / 600**0.5 + 1e-12).all()
    weights = module(x, return_aux=AuxRequest(weights=True))[1].weights
    assert_close(weights, by_definition(module, x[None])[2][0], **EXACT)


def test_dropout_of_everything_is_zero():
    module, x = build(dropout=1.0), draw(B, L, E)
    out = module(x)
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), list(module.parameters())):
        assert torch.equal(grad, torch.zeros_like(grad))


# -- precision ------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_modules(dtype, options):
    module, x = build(**options).to(dtype), draw(B, L, E).to(dtype)
    out = module(x)
    assert out.dtype == dtype
    wanted = by_definition(module, x)[0]
    eps = torch.finfo(dtype).eps
    assert_close(out.double(), wanted, atol=8 * eps * float(wanted.detach().abs().max()), rtol=0)


@EVERY
def test_autocast(options):
    module, x = build(torch.float32, **options), draw(B, L, E, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
        masked = module(x, attn_mask=torch.zeros(L, L))
    assert out.dtype == masked.dtype == torch.bfloat16
    wanted = by_definition(module, x)[0]
    for result in (out, masked):
        bound = 8 * torch.finfo(torch.bfloat16).eps * float(wanted.detach().abs().max())
        assert_close(result.double(), wanted, atol=bound, rtol=0)
    out.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())

"""The same weights in another class: exact to the bit, and giving the same results."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from clearhead import MultiHeadAttention, MultiHeadAttentionWrapper
from clearhead.convert import from_heads, from_torch, to_heads

B, L, S, E, D, H = 2, 5, 4, 7, 3, 4
EXACT = {"atol": 1e-12, "rtol": 0}


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def same_bits(one, other):
    one, other = one.state_dict(), other.state_dict()
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# -- wrapper and efficient ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_proj", [True, False], ids=["mixed", "concatenated"])
@pytest.mark.parametrize(("head_dim", "num_heads"), [(3, 4), (1, 1), (5, 2)])
def test_wrapper_to_efficient_and_back_keeps_every_bit(head_dim, num_heads, out_proj, dtype):
    wrapper = MultiHeadAttentionWrapper(E, head_dim, num_heads, out_proj=out_proj).to(dtype)
    module = from_heads(wrapper)
    for h, head in enumerate(wrapper.heads):
        rows = slice(h * head_dim, (h + 1) * head_dim)
        for name in ("W_query", "W_key", "W_value"):
            assert torch.equal(getattr(module, name).weight[rows], getattr(head, name).weight)
    back = to_heads(module)
    assert type(back) is MultiHeadAttentionWrapper
    assert same_bits(back, wrapper)
    assert same_bits(from_heads(back), module)
    assert {p.dtype for p in (*module.parameters(), *back.parameters())} == {dtype}


@pytest.mark.parametrize("out_proj", [True, False], ids=["mixed", "concatenated"])
@pytest.mark.parametrize("lead", [(), (B,), (1,)])
def test_both_give_the_same_result(lead, out_proj):
    wrapper = MultiHeadAttentionWrapper(E, D, H, out_proj=out_proj).double()
    module, x = MultiHeadAttention.from_heads(wrapper), draw(*lead, L, E)
    assert module.is_causal
    assert_close(module(x), wrapper(x), **EXACT)
    assert torch.equal(module.to_heads()(x), wrapper(x))


def test_more_leading_axes_are_the_wrappers_batches():
    wrapper = MultiHeadAttentionWrapper(E, D, H).double()
    x = draw(2, 3, L, E)
    out = from_heads(wrapper)(x)
    assert_close(out, torch.stack([wrapper(items) for items in x]), **EXACT)


def test_gradients_are_the_wrappers():
    wrapper = MultiHeadAttentionWrapper(E, D, H).double()
    module, x, d_out = from_heads(wrapper), draw(B, L, E), draw(B, L, H * D)
    (module(x) * d_out).sum().backward()
    (wrapper(x) * d_out).sum().backward()
    for name in ("W_query", "W_key", "W_value"):
        rows = torch.cat([getattr(head, name).weight.grad for head in wrapper.heads])
        assert_close(getattr(module, name).weight.grad, rows, **EXACT)
    assert_close(module.out_proj.weight.grad, wrapper.out_proj.weight.grad, **EXACT)


def test_wrong_layouts_would_be_seen():
    wrapper = MultiHeadAttentionWrapper(E, D, H).double()
    module, x = from_heads(wrapper), draw(B, L, E)
    for name in ("W_query", "W_key", "W_value"):
        wrong = copy.deepcopy(module)
        weight = getattr(wrong, name).weight
        with torch.no_grad():  # rows of one head spread over all of them, the shape unchanged
            weight.copy_(weight.unflatten(0, (H, D)).transpose(0, 1).flatten(0, 1))
        assert (wrong(x) - wrapper(x)).abs().max() > 1e-3


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads_get_copies_of_what_they_share(kv_heads):
    module, x = MultiHeadAttention(E, D, H, num_kv_heads=kv_heads).double(), draw(B, L, E)
    wrapper = to_heads(module)
    for h, head in enumerate(wrapper.heads):
        g = h // (H // kv_heads)
        assert torch.equal(head.W_key.weight, module.W_key.weight[g * D : (g + 1) * D])
        assert torch.equal(head.W_value.weight, module.W_value.weight[g * D : (g + 1) * D])
    assert_close(wrapper(x), module(x), **EXACT)
    whole = from_heads(wrapper)
    assert whole.num_kv_heads == H
    assert_close(whole(x), module(x), **EXACT)


def test_copies_share_no_memory():
    wrapper = MultiHeadAttentionWrapper(E, D, H)
    module = from_heads(wrapper)
    before = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.zero_()
        for parameter in to_heads(module).parameters():
            parameter.zero_()
    assert same_bits(module, before)


OTHERS = {
    "is_causal": {"is_causal": False},
    "sliding_window": {"sliding_window": 2},
    "scale": {"scale": 0.0},
    "qk_norm": {"qk_norm": "rms"},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "W_gate": {"gate": True},
    "dropout": {"dropout": 0.1},
    "W_query": {"qkv_bias": True},
    "out_proj": {"out_bias": True},
    "value_head_dim": {"value_head_dim": 5, "output_dim": 12},
    "context_dim": {"context_dim": 11},
    "output_dim": {"output_dim": 13},
}


@pytest.mark.parametrize(("name", "options"), OTHERS.items(), ids=OTHERS)
def test_options_that_heads_do_not_have_are_named(name, options):
    with pytest.raises(
        ValueError, match=rf"to_heads: the textbook's heads have no .*{name}.*; only"
    ):
        to_heads(MultiHeadAttention(E, D, H, **options))


def test_all_such_options_are_named_at_once():
    module = MultiHeadAttention(E, D, H, is_causal=False, softcap=2.0, sinks=True, output_dim=13)
    with pytest.raises(ValueError, match="have no is_causal, softcap, sinks, output_dim; only a"):
        module.to_heads()


def test_a_wrapper_without_heads_is_refused():
    wrapper = MultiHeadAttentionWrapper(E, D, H)
    wrapper.heads = nn.ModuleList()
    with pytest.raises(ValueError, match="from_heads: the wrapper has no heads; it needs one"):
        from_heads(wrapper)


# -- from torch -----------------------------------------------------------------------------------


TORCHS = {
    "packed": {},
    "no bias": {"bias": False},
    "kdim": {"kdim": 5},
    "vdim": {"vdim": 5},
    "kdim = vdim": {"kdim": 5, "vdim": 5},
    "kdim and vdim": {"kdim": 5, "vdim": 9},
    "kdim and vdim, no bias": {"kdim": 5, "vdim": 9, "bias": False},
    "heads": {"num_heads": 1},
}


def torchs(dtype=torch.float64, **options):
    """torch's module with biases that matter."""
    options = {"embed_dim": 12, "num_heads": 4, "batch_first": True, **options}
    mha = nn.MultiheadAttention(dtype=dtype, **options)
    for name, parameter in mha.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return mha


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("options", TORCHS.values(), ids=TORCHS)
def test_torchs_modules_give_the_same_output(options, is_causal):
    theirs = torchs(**options)
    module = from_torch(theirs, is_causal=is_causal)
    x = draw(B, L, 12)
    if (theirs.kdim, theirs.vdim) == (12, 12):
        future = torch.ones(L, L, dtype=torch.bool).triu(1) if is_causal else None
        padding = torch.arange(L) >= torch.tensor([[L], [3]])
        for mask in (None, padding):
            wanted = theirs(x, x, x, mask, attn_mask=future)[0]
            assert_close(module(x, key_mask=None if mask is None else ~mask), wanted, **EXACT)
    if not is_causal:
        key, value = draw(B, S, theirs.kdim), draw(B, S, theirs.vdim)
        both = torch.cat([key, value], dim=-1)
        context = key if theirs.kdim == theirs.vdim else both
        wanted = theirs(x, key, key if theirs.kdim == theirs.vdim else value)[0]
        assert_close(module(x, context), wanted, **EXACT)


def test_torchs_masks_are_passed_inverted():
    theirs, x = torchs(), draw(B, L, 12)
    blocked = torch.rand(L, L) > 0.6
    blocked.fill_diagonal_(False)
    wanted = theirs(x, x, x, attn_mask=blocked)[0]
    module = from_torch(theirs)
    assert_close(module(x, attn_mask=~blocked), wanted, **EXACT)
    added = draw(L, L)
    assert_close(module(x, attn_mask=added), theirs(x, x, x, attn_mask=added)[0], **EXACT)


def test_the_batch_comes_first_whatever_torchs_order_was():
    first, second = torchs(), torchs(batch_first=False)
    second.load_state_dict(first.state_dict())
    x = draw(B, L, 12)
    out = from_torch(second)(x)
    assert torch.equal(out, from_torch(first)(x))
    assert_close(out.transpose(0, 1), second(*[x.transpose(0, 1)] * 3)[0], **EXACT)
    assert_close(from_torch(first)(x[0]), first(x[0], x[0], x[0])[0], **EXACT)


def test_mode_dropout_device_and_dtype_are_kept():
    theirs = torchs(torch.bfloat16, dropout=0.25).eval()
    module = MultiHeadAttention.from_torch(theirs)
    assert module.dropout == 0.25 and not module.training and not module.is_causal
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert from_torch(theirs.train()).training
    bare = from_torch(nn.MultiheadAttention(12, 4, device="meta"))
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    wrapper = MultiHeadAttentionWrapper(E, D, H).to("meta").eval()
    for converted in (from_heads(wrapper), to_heads(from_heads(wrapper))):
        assert {p.device.type for p in converted.parameters()} == {"meta"}
        assert not converted.training


@pytest.mark.parametrize("options", TORCHS.values(), ids=TORCHS)
def test_weights_of_torch_are_kept_to_the_bit(options):
    theirs = torchs(**options)
    module = from_torch(theirs)
    if theirs.in_proj_weight is not None:
        stacked = [module.W_query.weight, module.W_key.weight, module.W_value.weight]
        assert torch.equal(torch.cat(stacked), theirs.in_proj_weight)
    else:
        k, v = theirs.k_proj_weight, theirs.v_proj_weight
        assert torch.equal(module.W_query.weight, theirs.q_proj_weight)
        if theirs.kdim != theirs.vdim:  # key and value each read their half of the context
            k = torch.cat([k, torch.zeros_like(v)], dim=1)
            v = torch.cat([torch.zeros_like(theirs.k_proj_weight), v], dim=1)
        assert torch.equal(module.W_key.weight, k) and torch.equal(module.W_value.weight, v)
    assert same_bits(module.out_proj, theirs.out_proj)


@pytest.mark.parametrize("name", ["add_bias_kv", "add_zero_attn"])
def test_tokens_of_their_own_are_refused(name):
    text = (
        f"from_torch: {name} adds a token of its own to every context, for which there is no place "
        "in MultiHeadAttention; clearhead.compat.MultiheadAttention serves it"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        from_torch(torchs(**{name: True}))


def test_no_conversion_draws_random_numbers():
    wrapper, theirs = MultiHeadAttentionWrapper(E, D, H), [torchs(), torchs(kdim=5, vdim=9)]
    before = torch.get_rng_state()
    to_heads(from_heads(wrapper))
    for mha in theirs:
        from_torch(mha)
    assert torch.equal(torch.get_rng_state(), before)

"""compat.MultiheadAttention against torch's class, and against the definition where torch errs."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from clearhead import attention_by_definition
from clearhead.compat import MultiheadAttention

N, L, S, H, D = 2, 4, 5, 3, 2
E = H * D
INF, NAN = math.inf, math.nan
EXACT = {"atol": 1e-12, "rtol": 0}
KINDS = {
    "plain": {},
    "kdim and vdim": {"kdim": 7, "vdim": 8},
    "no bias": {"bias": False},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "all at once": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 7, "bias": False},
}


def build(options=None, layout="batch first", dtype=torch.float64, **others):
    """torch's module with biases that matter, and ours with its weights."""
    options = {**(options or {}), **others, "batch_first": layout == "batch first"}
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    mine = MultiheadAttention(E, H, dtype=dtype, **options)
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def inputs(module, layout="batch first", requires_grad=False):
    """Query, key and value."""
    sizes = (L, module.embed_dim), (S, module.kdim), (S, module.vdim)
    lead = {"batch first": lambda n: (N, n), "batch second": lambda n: (n, N)}
    shape = lead.get(layout, lambda n: (n,))
    dtype = module.out_proj.weight.dtype
    return [torch.randn(*shape(n), w, dtype=dtype, requires_grad=requires_grad) for n, w in sizes]


def mask_of(kind, *shape):
    """A mask in torch's language that leaves key 0 to every row, or None."""
    if kind is None:
        return None
    blocked = torch.rand(*shape) > 0.6
    blocked[..., 0] = False
    if kind == "bool":
        return blocked
    return torch.randn(*shape, dtype=torch.float64).masked_fill(blocked, -INF)


def causal():
    return torch.ones(L, S, dtype=torch.bool).triu(1)


def floating(mask):
    """A boolean mask of torch's as the floating one that means the same."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -INF)


def by_definition(m, query, key, value, key_padding_mask=None, attn_mask=None, is_causal=False):
    """(out, weights per head) by the definition in float64, from the module's own parameters."""
    batched = query.ndim == 3
    x = [t.double() for t in (query, key, value)]
    if not batched:
        x = [t[None] for t in x]
    elif not m.batch_first:
        x = [t.transpose(0, 1) for t in x]
    W = m.in_proj_weight
    W = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight) if W is None else W.split(m.embed_dim)
    b = m.in_proj_bias
    b = torch.zeros(3, m.embed_dim).unbind() if b is None else b.split(m.embed_dim)
    q, k, v = (t @ w.double().T + c.double() for t, w, c in zip(x, W, b, strict=True))
    (items, rows, _), keys, heads = q.shape, k.shape[1], m.num_heads
    if m.bias_k is not None:
        k = torch.cat([k, m.bias_k.double().expand(items, 1, -1)], 1)
        v = torch.cat([v, m.bias_v.double().expand(items, 1, -1)], 1)
    if m.add_zero_attn:
        k, v = (torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in (k, v))
    allowed = torch.ones(items, heads, rows, k.shape[1], dtype=torch.bool)
    added = torch.zeros(items, heads, rows, k.shape[1], dtype=torch.float64)
    for n in range(items):
        for h in range(heads):
            rules = []
            if key_padding_mask is not None:
                mask = key_padding_mask[n] if batched else key_padding_mask
                rules.append(mask.expand(rows, keys))
            if attn_mask is not None:
                rules.append(attn_mask[n * heads + h] if attn_mask.ndim == 3 else attn_mask)
            if is_causal:
                rules.append(torch.ones(rows, keys, dtype=torch.bool).triu(1))
            for rule in rules:
                if rule.dtype == torch.bool:
                    allowed[n, h, :, :keys] &= ~rule
                else:
                    added[n, h, :, :keys] += rule
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out, _, weights = attention_by_definition(q, k, v, allowed, bias=added, return_aux=True)
    out = out.transpose(1, 2).flatten(2) @ m.out_proj.weight.double().T
    if m.out_proj.bias is not None:
        out = out + m.out_proj.bias.double()
    if not batched:
        return out[0], weights[0]
    return (out if m.batch_first else out.transpose(0, 1)), weights


FEW = ("plain", "kdim and vdim", "all at once")


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("attn_kind", [None, "bool", "bool 3-D", "float", "float 3-D"])
@pytest.mark.parametrize("padding_kind", [None, "bool", "float"])
@pytest.mark.parametrize("layout", ["batch first", "batch second", "no batch"])
def test_every_combination_of_masks(layout, padding_kind, attn_kind, is_causal):
    """Ours, torch's and the definition's: with mean weights, weights per head, and none."""
    kind, _, each = (attn_kind or "").partition(" ")
    lead = () if layout == "no batch" else (N,)
    attn_mask = mask_of(kind or None, *((H * math.prod(lead),) if each else ()), L, S)
    padding = mask_of(padding_kind, *lead, S)
    for name in KINDS if layout == "batch first" else FEW:
        mine, theirs = build(KINDS[name], layout)
        x = inputs(mine, layout)
        wanted, per_head = by_definition(mine, *x, padding, attn_mask, is_causal)

        out, mean = mine(*x, padding, attn_mask=attn_mask, is_causal=is_causal)
        assert_close(out, wanted, **EXACT)
        assert_close(mean, per_head.mean(-3), **EXACT)
        assert torch.equal(mean > 0, per_head.mean(-3) > 0)
        again, weights = mine(*x, padding, True, attn_mask, False, is_causal)
        assert torch.equal(again, out)
        assert_close(weights, per_head, **EXACT)
        again, weights = mine(*x, padding, False, attn_mask, True, is_causal)
        assert torch.equal(again, out) and weights is None

        if is_causal or (padding_kind and kind and padding_kind != kind):
            # torch takes is_causal for a hint, and warns about masks of two kinds.
            past = torch.zeros(L, S).double() if attn_mask is None else floating(attn_mask)
            past = past.masked_fill(causal(), -INF) if is_causal else past
            theirs_out, theirs_mean = theirs(*x, floating(padding), attn_mask=past)
        else:
            theirs_out, theirs_mean = theirs(*x, padding, attn_mask=attn_mask)
        assert_close(out, theirs_out, **EXACT)
        assert_close(mean, theirs_mean, **EXACT)


@pytest.mark.parametrize("layout", ["batch first", "batch second", "no batch"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_gradients_are_the_definitions(options, layout):
    mine, _ = build(options, layout)
    x = inputs(mine, layout, requires_grad=True)
    padding = mask_of("bool", *(() if layout == "no batch" else (N,)), S)
    attn_mask = mask_of("float", L, S).requires_grad_()
    sources = [*x, attn_mask, *mine.parameters()]
    d_out = torch.randn_like(x[0])
    for use in (0, 1):  # through the output, through the weights
        given = (d_out, torch.randn(*(() if layout == "no batch" else (N,)), H, L, 1).double())[use]
        found = mine(*x, padding, attn_mask=attn_mask, average_attn_weights=False)[use] * given
        wanted = by_definition(mine, *x, padding, attn_mask)[use] * given
        for one, other in zip(
            torch.autograd.grad(found.square().sum(), sources, materialize_grads=True),
            torch.autograd.grad(wanted.square().sum(), sources, materialize_grads=True),
            strict=True,
        ):
            assert_close(one, other, atol=1e-10, rtol=0)


def test_gradients_are_torchs_in_float32():
    mine, theirs = build(dtype=torch.float32)
    x = torch.randn(N, 7, E)
    padding = torch.zeros(N, 7, dtype=torch.bool)
    padding[1, 5:] = True
    for module in (mine, theirs):
        module(x, x, x, padding, attn_mask=torch.ones(7, 7, dtype=torch.bool).triu(1))[
            0
        ].square().sum().backward()
    for (name, one), (same, other) in zip(
        mine.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == same
        assert_close(one.grad, other.grad, atol=2e-5, rtol=2e-4)


# -- the cases ------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False])
def test_case_1_an_empty_row_leaves_every_gradient_finite(need_weights):
    for dtype in (torch.float32, torch.float64):
        mine = MultiheadAttention(1, 1, dtype=dtype)
        nn.init.normal_(mine.in_proj_bias)
        nn.init.constant_(mine.out_proj.bias, 0.25)
        x = torch.randn(3, 2, 1, dtype=dtype)
        padding = torch.tensor([[False, False, False], [False, True, True]])
        band = torch.full((3, 3), -INF, dtype=dtype)
        for i in range(3):
            band[i, max(0, i - 1) : i + 1] = 0
        out, weights = mine(x, x, x, padding, need_weights, band)
        wanted, _ = by_definition(mine, x, x, x, padding, band)
        assert_close(out.double(), wanted, atol=1e-6, rtol=0)
        assert out[2, 1, 0] == 0.25
        if need_weights:
            assert torch.equal(weights[1, 2], torch.zeros(3, dtype=dtype))
        found = torch.autograd.grad(out[0].sum(), list(mine.parameters()))
        expected = torch.autograd.grad(wanted[0].sum(), list(mine.parameters()))
        for one, other in zip(found, expected, strict=True):
            assert one.isfinite().all()
            assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_case_2_a_head_that_sees_nothing():
    mine = MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    mask = torch.zeros(3, 5, 5, dtype=torch.bool)
    mask[2] = True
    out, weights = mine(x, x, x, attn_mask=mask, average_attn_weights=False)
    assert torch.equal(out, mine(x, x, x, attn_mask=mask, need_weights=False)[0])
    assert torch.equal(weights[0, 2], torch.zeros(5, 5, dtype=torch.float64))
    assert_close(out, by_definition(mine, x, x, x, None, mask)[0], **EXACT)
    mean = mine(x, x, x, attn_mask=mask)[1]
    assert_close(mean.sum(-1), torch.full((1, 5), 2 / 3, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_case_9_an_item_of_padding_only(mode, bias):
    mine = getattr(build(bias=bias)[0], mode)()
    x = torch.randn(N, L, E, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * L, [True] * L])
    out, weights = mine(x, x, x, padding)
    alone = mine(x[:1], x[:1], x[:1])[0]
    assert_close(out[:1], alone, **EXACT)
    bare = torch.zeros(E, dtype=torch.float64) if mine.out_proj.bias is None else mine.out_proj.bias
    assert torch.equal(out[1], bare.expand(L, E))
    assert torch.equal(weights[1], torch.zeros(L, L, dtype=torch.float64))
    grads = torch.autograd.grad(out.sum() + weights.sum(), [x, *mine.parameters()])
    assert all(grad.isfinite().all() for grad in grads)
    assert torch.equal(grads[0][1], torch.zeros(L, E, dtype=torch.float64))


@pytest.mark.parametrize("bad", [NAN, INF, 1e30])
@pytest.mark.parametrize("need_weights", [True, False])
def test_case_10_blocked_tokens_are_inert(need_weights, bad):
    mine = build()[0]
    query, key, value = inputs(mine)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[:, 3] = True
    clean, _ = mine(query, key, value, padding, need_weights)
    key[:, 3], value[:, 3] = bad, bad
    key.requires_grad_(), value.requires_grad_()
    out, _ = mine(query, key, value, padding, need_weights)
    assert torch.equal(out, clean)
    for grad in torch.autograd.grad(out.sum(), (key, value)):
        assert torch.equal(grad[:, 3], torch.zeros_like(grad[:, 3]))


def test_case_10_the_future_is_inert():
    mine = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    x = torch.randn(N, L, E, dtype=torch.float64)
    clean, _ = mine(x, x, x, is_causal=True)
    x[:, -1] = NAN
    out, _ = mine(x, x, x, is_causal=True)
    assert torch.equal(out[:, :-1], clean[:, :-1]) and out[:, -1].isnan().all()


@pytest.mark.parametrize("rows", [7, 4, 2])
def test_case_16_is_causal_alone_and_with_a_mask(rows):
    mine = MultiheadAttention(8, 2, dtype=torch.float64)
    x, memory = torch.randn(rows, 3, 8).double(), torch.randn(4, 3, 8).double()
    future = torch.ones(rows, 4, dtype=torch.bool).triu(1)
    for mask in (None, torch.zeros(rows, 4).double(), torch.rand(rows, 4) > 0.7):
        out, weights = mine(x, memory, memory, attn_mask=mask, is_causal=True)
        assert torch.equal(weights[:, future], torch.zeros(3, int(future.sum())).double())
        assert torch.equal(out, mine(x, memory, memory, None, False, mask, True, is_causal=True)[0])
        assert_close(out, by_definition(mine, x, memory, memory, None, mask, True)[0], **EXACT)


def test_case_18_without_is_causal_the_future_is_seen():
    mine = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    x = torch.randn(1, 4, E).double()
    padding = torch.tensor([[False, False, False, True]])
    both, weights = mine(x, x, x, padding)
    past, _ = mine(x, x, x, padding, is_causal=True)
    assert (weights[0, 0, :3] > 0).all() and weights[0, 0, 3] == 0
    assert (both - past).abs().max() > 1e-3
    assert_close(both, by_definition(mine, x, x, x, padding)[0], **EXACT)


def test_case_23_true_means_blocked():
    mine = MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(1, 4, E)
    weights = mine(x, x, x, attn_mask=torch.ones(4, 4, dtype=torch.bool).tril(-1))[1]
    assert torch.equal(weights.tril(-1), torch.zeros_like(weights))
    assert (weights.triu() > 0).sum() == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mask", [None, "causal"])
def test_case_24_both_kinds_of_mask_mean_the_same_to_the_bit(mask, dtype):
    mine = build(dtype=dtype)[0]
    x = torch.randn(N, 4, E, dtype=dtype)
    padding = torch.tensor([[False, False, True, False], [False, False, False, True]])
    mask = mask and torch.ones(4, 4, dtype=torch.bool).triu(1)
    (first, weights), *others = (
        mine(x, x, x, padding_form, attn_mask=mask_form)
        for padding_form in (padding, floating(padding).to(dtype), floating(padding).half())
        for mask_form in (mask, floating(mask))
    )
    assert len(others) == 5
    for out, other_weights in others:
        assert torch.equal(out, first) and torch.equal(other_weights, weights)
    assert_close(first.double(), by_definition(mine, x, x, x, padding, mask)[0], atol=1e-5, rtol=0)


def test_case_26_the_heads_of_an_item_lie_side_by_side():
    mine, theirs = build()
    x = torch.randn(N, 5, E, dtype=torch.float64)
    padding = torch.tensor([[False] * 4 + [True], [False] * 3 + [True] * 2])
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    flat, _ = mine(x, x, x, padding, attn_mask=mask)
    assert torch.equal(flat, mine(x, x, x, padding, attn_mask=mask.expand(N * H, 5, 5))[0])
    each = torch.zeros(N * H, 5, 5, dtype=torch.bool)
    for n in range(N):
        for h in range(H):
            each[n * H + h, :, 1 + (n + 2 * h) % 4] = True  # another key for every item and head
    out, weights = mine(x, x, x, padding, attn_mask=each, average_attn_weights=False)
    for n in range(N):
        for h in range(H):
            assert weights[n, h, :, 1 + (n + 2 * h) % 4].eq(0).all()
    assert_close(out, by_definition(mine, x, x, x, padding, each)[0], **EXACT)
    assert_close(out, theirs(x, x, x, padding, attn_mask=each)[0], **EXACT)


@pytest.mark.parametrize("options", [{}, {"bias": False}], ids=["bias", "no bias"])
def test_case_37_eval_equals_train(options):
    mine = MultiheadAttention(10, 1, batch_first=True, **options)
    x = torch.randn(2, 5, 10)
    trained = mine(x, x, x)[0]
    with torch.no_grad():
        assert_close(mine.eval()(x, x, x)[0], trained, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_case_38_autocast_with_float_masks(need_weights, mask_dtype):
    mine = MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    mask, padding = torch.randn(5, 5), torch.randn(2, 5)
    wanted = by_definition(mine, x, x, x, padding.to(mask_dtype), mask.to(mask_dtype))[0]
    arguments = padding.to(mask_dtype), need_weights, mask.to(mask_dtype)
    assert_close(mine(x, x, x, *arguments)[0].double(), wanted, atol=1e-5, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = mine(x, x, x, *arguments)
    assert out.dtype == torch.bfloat16
    assert weights is None or weights.dtype == torch.bfloat16  # as torch's
    assert_close(out.double(), wanted, atol=3e-2, rtol=3e-2)
    out.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in mine.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_half_module_returns_halves(dtype):
    mine = build(dtype=dtype)[0]
    x = torch.randn(2, 5, E, dtype=dtype)
    out, weights = mine(x, x, x, attn_mask=torch.zeros(5, 5))
    assert out.dtype == weights.dtype == dtype
    assert_close(out.double(), by_definition(mine, x, x, x)[0], atol=3e-2, rtol=3e-2)


def test_case_48_weights_are_what_they_say():
    mine = MultiheadAttention(E, H, dropout=0.5, batch_first=True, dtype=torch.float64)
    x = torch.randn(N, 4, E, dtype=torch.float64)
    for module in (mine.train(), mine.eval()):  # from before dropout
        heads = module(x, x, x, average_attn_weights=False)[1]
        mean = module(x, x, x)[1]
        assert heads.shape == (N, H, 4, 4) and mean.shape == (N, 4, 4)
        assert (heads >= 0).all()
        assert_close(heads.sum(-1), torch.ones(N, H, 4, dtype=torch.float64), **EXACT)
        assert_close(mean, heads.mean(1), **EXACT)
        assert_close(heads, by_definition(mine, x, x, x)[1], **EXACT)

"""compat.scaled_dot_product_attention against torch, and the definition where torch errs."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torchs
from torch.testing import assert_close

from clearhead import attention, attention_by_definition
from clearhead.compat import scaled_dot_product_attention as ours

B, H, D, Dv = 2, 3, 5, 7
INF, NAN = math.inf, math.nan
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 2e-5}, torch.float64: {"atol": 1e-12, "rtol": 0}}
HALF = {"atol": 2e-2, "rtol": 2e-2}


def draw(*shape, dtype=torch.float64, requires_grad=False):
    return torch.randn(*shape, dtype=dtype).requires_grad_(requires_grad)


def upper_left(L, S):
    return torch.ones(L, S, dtype=torch.bool).tril()


def mask_of(kind, L, S, lead=(), dtype=torch.float64):
    """A mask that leaves key 0 to every row, or None."""
    if kind is None:
        return None
    keep = torch.rand(*lead, L, S) > 0.4
    keep[..., 0] = True
    if kind == "bool":
        return keep
    return torch.randn(*lead, L, S, dtype=dtype).masked_fill(~keep, -INF)


def combined(mask, is_causal, L, S):
    """The mask and the causal rule in one mask, since torch takes only one of them everywhere."""
    if not is_causal:
        return mask
    triangle = upper_left(L, S)
    if mask is None:
        return triangle
    return mask & triangle if mask.dtype == torch.bool else mask.masked_fill(~triangle, -INF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize(("L", "S"), [(11, 11), (4, 11), (11, 4), (1, 6), (6, 1)])
@pytest.mark.parametrize("lead", [(), (H,), (B, H), (B, 1, 2, H)], ids=len)
def test_equals_torch(lead, L, S, kind, is_causal, dtype):
    q, k = draw(*lead, L, D, dtype=dtype), draw(*lead, S, D, dtype=dtype)
    for v in (draw(*lead, S, Dv, dtype=dtype), draw(*lead, S, D, dtype=dtype)):
        mask = mask_of(kind, L, S, dtype=dtype)
        for scale in (None, 0.3):
            out = ours(q, k, v, mask, 0.0, is_causal, scale=scale)
            wanted = torchs(q, k, v, combined(mask, is_causal, L, S), scale=scale)
            assert_close(out, wanted, **TOLERANCE[dtype])
            if kind is None and is_causal:
                assert_close(out, torchs(q, k, v, is_causal=True, scale=scale), **TOLERANCE[dtype])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    "lead", [(), (H,), (1, H), (B, 1), (B, H)], ids=lambda lead: f"mask{len(lead) + 2}"
)
@pytest.mark.parametrize("columns", [9, 1])
def test_masks_of_every_shape_broadcast_as_in_torch(lead, columns, kind, is_causal):
    q, k, v = draw(B, H, 4, D), draw(B, H, 9, D), draw(B, H, 9, D)
    mask = mask_of(kind, 4, columns, lead)
    wanted = torchs(q, k, v, combined(mask.expand(*lead, 4, 9), is_causal, 4, 9))
    assert_close(ours(q, k, v, mask, is_causal=is_causal), wanted, **TOLERANCE[q.dtype])


@pytest.mark.parametrize(
    ("lead_q", "lead_k", "lead_v"),
    [
        ((B, H), (1, H), (1, H)),
        ((1, H), (B, H), (B, H)),
        ((B, H), (B, 1), (B, 1)),
        ((B, 1), (B, H), (B, H)),
        ((B, H), (B, H), (B, 1)),
        ((B, H), (H,), (H,)),
        ((H,), (B, H), (B, H)),
        ((), (B, H), (B, H)),
    ],
)
def test_leading_axes_broadcast_as_in_torch(lead_q, lead_k, lead_v):
    q, k, v = draw(*lead_q, 4, D), draw(*lead_k, 9, D), draw(*lead_v, 9, Dv)
    assert_close(ours(q, k, v), torchs(q, k, v), **TOLERANCE[q.dtype])
    assert_close(
        ours(q, k, v, is_causal=True), torchs(q, k, v, upper_left(4, 9)), **TOLERANCE[q.dtype]
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("Hk", "Hv"), [(2, 2), (1, 1), (6, 6), (2, 3), (3, 1)])
def test_grouped_heads_equal_torch(Hk, Hv, is_causal):
    for lead in ((), (B,), (B, 2)):
        q, k, v = draw(*lead, 6, 4, D), draw(*lead, Hk, 9, D), draw(*lead, Hv, 9, D)
        mask = combined(None, is_causal, 4, 9)
        out = ours(q, k, v, is_causal=is_causal, enable_gqa=True)
        wanted = torchs(q, k, v, mask, enable_gqa=True)
        assert_close(out, wanted, **TOLERANCE[q.dtype])


def test_the_arguments_stand_where_torchs_stand():
    q, k, v = draw(B, H, 4, D), draw(B, H, 9, D), draw(B, H, 9, D)
    mask = mask_of("bool", 4, 9)
    for call in (ours, torchs):
        with pytest.raises(TypeError, match="positional"):
            call(q, k, v, mask, 0.0, False, 0.5)
    named = {"attn_mask": mask, "dropout_p": 0.0, "is_causal": False, "scale": 0.5}
    wanted = torchs(query=q, key=k, value=v, **named, enable_gqa=False)
    out = ours(query=q, key=k, value=v, **named, enable_gqa=False)
    assert_close(out, wanted, **TOLERANCE[q.dtype])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize(("L", "S"), [(7, 7), (4, 7), (7, 4)])
def test_gradients_equal_torchs(L, S, kind, is_causal):
    inputs = [draw(B, H, n, D, requires_grad=True) for n in (L, S, S)]
    mask = mask_of(kind, L, S)
    inputs += [mask.requires_grad_()] if kind == "float" else []
    d_out = draw(B, H, L, D)
    found = torch.autograd.grad(ours(*inputs[:3], mask, is_causal=is_causal), inputs, d_out)
    both = combined(mask, is_causal, L, S)
    wanted = torch.autograd.grad(torchs(*inputs[:3], both), inputs, d_out)
    for mine, theirs in zip(found, wanted, strict=True):
        assert_close(mine, theirs, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "mask_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_a_float_mask_of_any_dtype_goes_with_any_query(dtype, mask_dtype):
    q, k, v = draw(B, H, 4, D), draw(B, H, 9, D), draw(B, H, 9, D)
    mask = mask_of("float", 4, 9)
    out = ours(q.to(dtype), k.to(dtype), v.to(dtype), mask.to(mask_dtype))
    assert out.dtype == dtype
    assert_close(out.double(), torchs(q, k, v, mask), **HALF)


def test_autocast_gives_torchs_dtype():
    q, k, v = draw(3, B, H, 4, D, dtype=torch.float32)
    mask = mask_of("float", 4, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(q, k, v, mask)
        assert out.dtype == torchs(q, k, v).dtype == torch.bfloat16
    assert_close(out.float(), torchs(q, k, v, mask), **HALF)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("scale", "wanted"), [(0.0, [1, 2]), (0, [1, 2]), (-1.0, [1, 2]), (1e-30, [1, 2])]
)
def test_case_30_scales_of_zero_and_below(scale, wanted, dtype):
    """torch gives NaN in all rows but the last."""
    q = k = torch.ones(1, 1, 2, 1, dtype=dtype)
    v = torch.tensor([1.0, 3.0], dtype=dtype)[:, None]
    out = ours(q, k, v, is_causal=True, scale=scale)
    assert_close(out[0, 0, :, 0], torch.tensor(wanted, dtype=dtype), atol=0, rtol=0)


def test_a_scale_of_zero_is_not_the_default():
    q, k, v = draw(B, H, 4, D), draw(B, H, 9, D), draw(B, H, 9, Dv)
    assert_close(ours(q, k, v, scale=0), v.mean(-2, keepdim=True).expand(B, H, 4, Dv))
    assert_close(ours(q, k, v, scale=None), torchs(q, k, v), **TOLERANCE[q.dtype])


@pytest.mark.parametrize("scale", [0.0, -0.7, -3.0])
@pytest.mark.parametrize(("L", "S"), [(7, 7), (4, 7), (7, 4)])
def test_such_scales_equal_the_definition(L, S, scale):
    q, k, v = draw(B, H, L, D), draw(B, H, S, D), draw(B, H, S, Dv)
    wanted = attention_by_definition(q, k, v, upper_left(L, S).expand(B, H, L, S), scale=scale)
    assert_close(ours(q, k, v, is_causal=True, scale=scale), wanted, **TOLERANCE[q.dtype])


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_case_3_a_row_without_keys_is_zero(kind):
    q, k, v = (draw(1, 2, n, 8, requires_grad=True) for n in (4, 6, 6))
    keep = torch.ones(4, 6, dtype=torch.bool).tril()
    keep[-1] = False
    mask = keep if kind == "bool" else torch.zeros(4, 6).masked_fill(~keep, -INF)
    out = ours(q, k, v, mask)
    assert torch.equal(out[..., -1, :], torch.zeros_like(out[..., -1, :]))
    assert_close(out, attention_by_definition(q, k, v, keep), **TOLERANCE[q.dtype])
    grads = torch.autograd.grad(out[..., -1, :].sum(), (q, k, v))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("rule", ["mask", "float mask", "causal", "short"])
def test_case_10_what_is_blocked_is_inert(rule, where, bad):
    """torch lets NaN and Inf through, in causal calls too."""
    q, k, v = (draw(1, 1, n, 4, requires_grad=True) for n in (2, 3, 3))
    keep = torch.tensor([[True, False, True], [False, False, True]])
    arguments = {
        "mask": {"attn_mask": keep},
        "float mask": {"attn_mask": torch.zeros(2, 3).masked_fill(~keep, -INF)},
        "causal": {"is_causal": True},
        "short": {"is_causal": True, "attn_mask": keep[:, :1]},
    }[rule]
    blocked = 1 if "mask" in rule else 2
    spoilt = {"key": k, "value": v}
    spoilt[where] = spoilt[where].detach().clone()
    spoilt[where][..., blocked, :] = bad
    spoilt[where].requires_grad_()
    out, clean = ours(q, **spoilt, **arguments), ours(q, k, v, **arguments)
    assert torch.equal(out, clean)
    d_q, d_spoilt = torch.autograd.grad(out.sum(), (q, spoilt[where]))
    assert torch.equal(d_q, torch.autograd.grad(clean.sum(), q)[0])
    assert torch.equal(d_spoilt[..., blocked, :], torch.zeros(1, 1, 4, dtype=q.dtype))


def test_case_10_a_causal_row_does_not_see_the_next_value():
    q = k = draw(1, 1, 2, 4)
    v = torch.tensor([1.0, NAN], dtype=q.dtype)[:, None]
    out = ours(q, k, v, is_causal=True)
    assert out[0, 0, 0, 0] == 1 and out[0, 0, 1, 0].isnan()


def test_case_13_both_alignments_by_name():
    q, k, v = draw(1, 1, 2, 4), draw(1, 1, 5, 4), draw(1, 1, 5, 4)
    upper = attention_by_definition(q, k, v, torch.ones(2, 5, dtype=torch.bool).tril(0))
    lower = attention_by_definition(q, k, v, torch.ones(2, 5, dtype=torch.bool).tril(3))
    assert_close(ours(q, k, v, is_causal=True), upper, **TOLERANCE[q.dtype])
    assert_close(attention(q, k, v, is_causal=True), lower, **TOLERANCE[q.dtype])
    assert (upper - lower).abs().max() > 0.1
    one = q[..., :1, :]
    assert torch.equal(ours(one, k, v, is_causal=True), v[..., :1, :])


@pytest.mark.parametrize(("L", "S"), [(4, 4), (2, 5), (5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_case_15_a_mask_and_is_causal_are_both_obeyed(L, S, dtype):
    """torch's fused kernel does the same, its other path raises."""
    q, k, v = (draw(1, 1, n, 4, dtype=dtype) for n in (L, S, S))
    mask = torch.rand(L, S) > 0.4
    both = torch.logical_and(mask, upper_left(L, S))
    wanted = attention_by_definition(q, k, v, both).to(dtype)
    assert_close(ours(q, k, v, mask, is_causal=True), wanted, **TOLERANCE[dtype])


def test_case_23_true_means_may_attend():
    q, k, v = draw(1, 1, 4, 4), draw(1, 1, 4, 4), torch.eye(4, dtype=torch.float64)[None, None]
    weights = ours(q, k, v, torch.ones(4, 4, dtype=torch.bool).tril())
    assert torch.equal(weights.triu(1), torch.zeros_like(weights))
    assert (weights.tril() > 0).sum() == 10


def test_case_28_what_is_left_sums_to_one():
    q, k, v = draw(1, 1, 3, 4), draw(1, 1, 3, 4), torch.eye(3, dtype=torch.float64)[None, None]
    weights = ours(q, k, v, torch.tensor([True, True, False]).expand(3, 3))
    assert torch.equal(weights[..., 2], torch.zeros(1, 1, 3, dtype=torch.float64))
    assert_close(weights.sum(-1), torch.ones(1, 1, 3, dtype=torch.float64), atol=1e-15, rtol=0)
    assert_close(weights[..., :2], torch.softmax(q @ k[..., :2, :].mT / 2, -1), atol=1e-14, rtol=0)


def test_case_45_groups_are_repeated_and_not_tiled():
    q, k = torch.zeros(1, 4, 1, 1), torch.zeros(1, 2, 1, 1)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).requires_grad_()
    out = ours(q, k, v, enable_gqa=True)
    assert out.flatten().tolist() == [10, 10, 20, 20]
    assert torch.autograd.grad(out.sum(), v)[0].flatten().tolist() == [2, 2]
    with pytest.raises(ValueError, match="query has 3 heads and key has 2"):
        ours(q[:, :3], k, v, enable_gqa=True)


def test_dropout_is_always_on_and_keeps_the_mean():
    q, k, v = draw(1, 1, 3, 4), draw(1, 1, 8, 4), torch.ones(1, 1, 8, 1).double()
    v.requires_grad_()
    rows = torch.cat([ours(q, k, v, dropout_p=0.25) for _ in range(400)])
    assert rows.std() > 0.05
    assert (rows.mean() - 1).abs() < 0.02
    gone = ours(q, k, v, dropout_p=1.0)
    assert torch.equal(gone, torch.zeros_like(gone))
    assert torch.equal(torch.autograd.grad(gone.sum(), v)[0], torch.zeros_like(v))


@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_axes_of_size_zero(sizes, is_causal):
    lead_b, lead_h, L, S = sizes
    q, k = draw(lead_b, lead_h, L, D), draw(lead_b, lead_h, S, D)
    v = draw(lead_b, lead_h, S, Dv, requires_grad=True)
    out = ours(q, k, v, is_causal=is_causal)
    assert torch.equal(out, torch.zeros(lead_b, lead_h, L, Dv, dtype=out.dtype))
    assert torch.equal(torch.autograd.grad(out.sum(), v)[0], torch.zeros_like(v))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"query": (5,)},
            ValueError,
            r"query has shape \(5,\); it needs at least 2 axes, \(length",
        ),
        ({"key": (2, 2, 9, 5), "value": (2, 2, 9, 5)}, ValueError, "pass enable_gqa=True"),
        ({"key": (7, 3, 9, 5), "value": (7, 3, 9, 5)}, ValueError, r"query \(2, 3\), key \(7, 3\)"),
        ({"key": (2, 3, 9, 4)}, ValueError, "must equal query's head size D = 5"),
        ({"value": (2, 3, 8, 5)}, ValueError, "same length"),
        ({"attn_mask": (4, 8)}, ValueError, r"attn_mask has shape \(4, 8\)"),
        ({"attn_mask": (4, 4), "is_causal": True}, ValueError, "must be S = 9 or 1"),
        ({"dropout_p": -0.1}, ValueError, "must lie between 0 and 1"),
        ({"query": (4, 5), "enable_gqa": True}, ValueError, r"at least 3 axes, \(heads, length"),
        ({"value": (2, 2, 9, 5), "enable_gqa": True}, ValueError, "3 heads and value has 2"),
    ],
)
def test_errors_say_what_was_got_and_what_is_needed(change, error, text):
    arguments = {"query": (2, 3, 4, 5), "key": (2, 3, 9, 5), "value": (2, 3, 9, 5), **change}
    arguments = {n: draw(*a) if isinstance(a, tuple) else a for n, a in arguments.items()}
    with pytest.raises(error, match=text):
        ours(**arguments)


def test_a_mask_of_whole_numbers_is_refused():
    x = draw(B, H, 4, D)
    with pytest.raises(TypeError, match="pass attn_mask.bool()"):
        ours(x, x, x, torch.ones(4, 4, dtype=torch.int64))

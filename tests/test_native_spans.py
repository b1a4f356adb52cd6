"""Keys beyond one span (16 blocks of 96 keys), whose sums are joined; and the head mask."""

import pytest
import torch
from native_call import ROWS, STATISTICS, run
from torch.testing import assert_close

SPAN = 16 * 96
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same_bits(one, other):
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def draw(L, S, dtype=torch.float32, H=4, Hkv=2, D=16):
    return [torch.randn(1, n, size, D).to(dtype) for n, size in ((H, L), (Hkv, S), (Hkv, S))]


def nan(S, dtype):
    return torch.full((1, 2, S, 16), torch.nan, dtype=dtype)


def gold(query, key, value, seen, sinks=None):
    """out, weights, scores in float64; seen is (L, S)."""
    G = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(G, 1) for t in (key, value))
    s = (query.double() @ key.mT * query.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(1, -1, s.shape[2], 1)], 3)
    w = s.softmax(3)[..., : key.shape[2]]
    return w @ value, w, s[..., : key.shape[2]]


def positions(L, S, window):
    apart = torch.arange(S) - (torch.arange(L)[:, None] + S - L)
    left, right = window
    return (apart >= -left) & (apart <= right)


@pytest.mark.parametrize("S", [SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 97, 5003])
@pytest.mark.parametrize("window", [(9999, 9999), (9999, 0), (1600, 40), (70, 0)], ids=str)
def test_statistics_over_spans(S, window):
    L, sinks = 150, torch.randn(4)
    query, key, value = draw(L, S)
    found = run(query, key, value, window=window, sinks=sinks, wanted=STATISTICS, top_k=7)
    out, w, s = gold(query, key, value, positions(L, S, window), sinks)
    own = torch.arange(L) + S - L
    apart = (own[:, None] - torch.arange(S)).abs()
    expected = {
        "out": out,
        "max_logit": s.amax(3),
        "entropy": torch.special.entr(w).sum(3),
        "first_mass": w[..., 0],
        "previous_mass": w.gather(3, (own - 1).expand(1, 4, L)[..., None])[..., 0],
        "self_mass": w.gather(3, own.expand(1, 4, L)[..., None])[..., 0],
        "key_mass": w.sum(2),
        "top_weights": w.topk(7, dim=3).values,
    }
    for name, right in expected.items():
        assert_close(
            getattr(found, name).double(), right, rtol=0, atol=4e-6, msg=lambda t, n=name: n + t
        )
    assert_close(found.distance.double(), (w * apart).sum(3), rtol=4e-6, atol=1e-4)
    same_bits(w.gather(3, found.top_keys), w.topk(7, dim=3).values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_know_how_its_prompt_was_cut(dtype):
    """Nor what stands behind its keys, nor which rows share its panels."""
    S = 2 * SPAN + 200
    query, key, value = draw(S, S, dtype)
    rules = {"is_causal": True, "wanted": STATISTICS[:-1], "top_k": 3}
    at_once = run(query, key, value, **rules)
    for start, end in (
        (S - 90, S),
        (2 * SPAN - 7, 2 * SPAN + 7),
        (SPAN - 5, SPAN + 1),
        (SPAN, SPAN + 1),
    ):
        part = run(query[:, :, start:end], key[:, :, :end], value[:, :, :end], **rules)
        for name in ("out", "m", "z", *ROWS, "top_weights", "top_keys"):
            same_bits(getattr(part, name), getattr(at_once, name)[:, :, start:end])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("S", [SPAN - 3, SPAN, SPAN + 40])
def test_a_span_in_which_nothing_is_seen_changes_nothing(S, dtype):
    """Padding to the right that crosses spans, and to the left by whole spans but for one sum."""
    query, key, value = draw(60, S, dtype)
    alone = run(query, key, value)
    for more in (5, SPAN, 3 * SPAN):
        longer = [torch.cat([t, nan(more, dtype)], 2) for t in (key, value)]
        seen = torch.arange(S + more)[None] < S
        same_bits(run(query, *longer, key_mask=seen).out, alone.out)
    for spans in (1, 2):
        longer = [torch.cat([nan(spans * SPAN, dtype), t], 2) for t in (key, value)]
        seen = torch.arange(S + spans * SPAN)[None] >= spans * SPAN
        found = run(query, *longer, key_mask=seen)
        for name in ("out", "m", "z"):
            same_bits(getattr(found, name), getattr(alone, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_mask(dtype):
    """It multiplies the output in float32, before it is rounded, and nothing else."""
    query, key, value = draw(60, 130, dtype)
    head_mask = torch.tensor([[0.0, 1.0, 0.3, -2.0]])
    plain = run(query, key, value, wanted=STATISTICS, top_k=2)
    found = run(query, key, value, wanted=STATISTICS, top_k=2, head_mask=head_mask)
    same_bits(found.out[:, :2], plain.out[:, :2] * torch.tensor([0, 1]).view(1, 2, 1, 1).to(dtype))
    out, _, _ = gold(query, key, value, torch.ones(60, 130, dtype=torch.bool))
    eps = torch.finfo(dtype).eps
    out = out * head_mask.double()[..., None, None]
    atol = max(2e-6, eps * float(out.abs().max()))
    assert_close(found.out.double(), out, rtol=eps, atol=atol)
    for name in (*ROWS, "m", "z", "top_weights", "top_keys", "key_mass"):
        same_bits(getattr(found, name), getattr(plain, name))
    value[:, :, 3] = torch.inf  # 0 * inf is nan, as in out * head_mask
    assert bool(run(query, key, value, head_mask=head_mask).out[:, 0].isnan().all())

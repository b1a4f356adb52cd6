"""Reports B: what may not be attended has no influence, whatever it holds.

In each call one key or value that some rows cannot see holds NaN, an infinity or a huge number. The
rows that cannot see it, and all that depends on them alone, must have the very bits that the same
call with 0 there gives. Huge numbers are as dangerous as NaN: their products overflow.
"""

import itertools
import math

import pytest
import torch

from clearhead import attention, explain
from clearhead.testing.planted import visible

B, H, HKV, L, S, D = 2, 4, 2, 5, 7, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def poisons(dtype):
    """What to put there, and whether in the whole row or in one place of it."""
    return (
        (math.nan, True),
        (math.nan, False),
        (math.inf, True),
        (-math.inf, False),
        (1e30, True),
        (torch.finfo(dtype).max, False),
    )


def spotted(*blocked):
    """A mask (B, H, L, S) with the given (rows, keys) blocked in all heads of item 0."""
    mask = torch.ones(B, H, L, S, dtype=torch.bool)
    for rows, keys in blocked:
        mask[0, :, rows, keys] = False
    return mask


ROWS, ALL = slice(1, 4), slice(None)
MASK = spotted((ROWS, 2), (ALL, 4), (0, 0))
KEY_MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]).bool()
ROW_DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 1, 1]])
KEY_DOCUMENTS = torch.tensor([[0, 9, 0, 1, 1, 1, 1], [1, 1, 2, 2, 2, 1, 9]])


def minus_infinity(mask):
    """The bool mask as numbers: random where visible."""
    numbers = torch.linspace(-1, 1, mask.numel(), dtype=torch.float64).view(mask.shape)
    return numbers.masked_fill(~mask, -math.inf)


RULES = {
    "causal": {"is_causal": True},
    "window": {"window": (1, 1)},
    "causal window": {"is_causal": True, "window": (2, 0)},
    "key mask": {"key_mask": KEY_MASK},
    "documents": {"documents": (ROW_DOCUMENTS, KEY_DOCUMENTS)},
    "bool mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": minus_infinity(MASK)},
    "bias": {"bias": minus_infinity(MASK)},
    "key mask and causal": {"key_mask": KEY_MASK, "is_causal": True},
}
MODES = {
    "auto": {},
    "chunked": {"backend": "chunked"},
    "sdpa": {"backend": "sdpa"},
    "deterministic": {"deterministic": True},
    "dropout": {"dropout_p": 0.25},
    "softcap, sinks, slopes": {
        "softcap": 1.5,
        "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
    },
}


def draw(dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, H, L, D), (B, HKV, S, D), (B, HKV, S, D), (B, H, L, D))
    return [(3 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


def in_dtype(rules, dtype):
    return {
        name: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for name, t in rules.items()
    }


def serves(backend, tensors, rules):
    return explain(*tensors, **{**rules, "backend": backend}).backend is not None


def targets(rules, query, key):
    """Places (b, g, j): one that no row sees and one that some rows see, where there are such.

    With each the rows (B, H, L) that see it.
    """
    names = ("attn_mask", "bias", "is_causal", "window", "key_mask", "documents")
    seen = visible(query, key, **{name: rules[name] for name in names if name in rules})
    groups = seen.unflatten(1, (HKV, H // HKV))
    chosen = {}
    for b, g, j in itertools.product(range(B), range(HKV), range(S)):
        rows = groups[b, g, :, :, j]
        if not bool(rows.all()):
            chosen.setdefault("some" if bool(rows.any()) else "none", (b, g, j))
    for b, g, j in chosen.values():
        sees = torch.zeros(B, HKV, H // HKV, L, dtype=torch.bool)
        sees[b, g] = groups[b, g, :, :, j]
        yield (b, g, j), sees.flatten(1, 2), seen


def results(tensors, d_out, rules, gradients):
    """Out, and then the gradients of query, key and value."""
    torch.manual_seed(7)
    leaves = [t.clone().requires_grad_(gradients) for t in tensors]
    out = attention(*leaves, **rules)
    if not gradients:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def assert_inert(actual, expected, sees, seen, place):
    """Equal bits wherever no row that sees the poisoned place has a say."""
    assert torch.equal(actual[0][~sees], expected[0][~sees])
    if len(actual) == 1:
        return
    assert torch.equal(actual[1][~sees], expected[1][~sees])
    # A key is touched when a row that sees the place sees this key too.
    touched = (sees[..., None] & seen).unflatten(1, (HKV, H // HKV)).any(2).any(2)
    for found, wanted in zip(actual[2:], expected[2:], strict=True):
        assert torch.equal(found[~touched], wanted[~touched])
        if not bool(sees.any()):
            assert not bool(found[place].any())


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


@pytest.mark.parametrize(("mode", "dtype"), [
    (mode, dtype) for mode, dtype in itertools.product(MODES, DTYPES)
    if mode in ("auto", "chunked", "sdpa") or dtype in (torch.float32, torch.bfloat16)
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", RULES)
def test_poison_in_a_blocked_key_or_value(name, mode, dtype):
    """pytorch#101967: 0 * NaN, inf - inf and overflow, where only a weight of 0 stands before."""
    rules = in_dtype({**RULES[name], **MODES[mode]}, dtype)
    query, *kv, d_out = draw(dtype)
    for place, sees, seen in targets(rules, query, kv[0]):
        quiet = d_out.masked_fill(sees[..., None], 0)
        clean = [query, *(t.clone() for t in kv)]
        for t in clean[1:]:
            t[place] = 0
        for gradients in (False, True):
            leaves = [t.clone().requires_grad_(gradients) for t in clean]
            if not serves(rules.get("backend", "auto"), leaves, rules):
                continue
            expected = results(clean, quiet, rules, gradients)
            for where, (value, whole) in itertools.product((1, 2), poisons(dtype)):
                dirty = [t.clone() for t in clean]
                dirty[where][place if whole else (*place, 1)] = value
                actual = results(dirty, quiet, rules, gradients)
                assert_inert(actual, expected, sees, seen, place)


def test_sdpa_is_among_those_that_were_poisoned():
    """The test above proves nothing for a backend that refuses everything."""
    query, key, value, _ = draw(torch.float32)
    key[0, 0, 2] = math.nan
    for name in ("causal", "window", "key mask", "documents", "bool mask", "float mask"):
        assert serves("sdpa", (query, key, value), in_dtype(RULES[name], torch.float32))

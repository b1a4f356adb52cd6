"""The native kernels to the bit: batch, padding, threads, cuts; and keys that are inert."""

import math
import threading

import pytest
import torch
from torch.testing import assert_close

from clearhead import AuxRequest, attention, attention_by_definition, explain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend(*tensors, **rules):
    return attention(*tensors, **rules, backend="native")


def draw(B=2, H=4, Hkv=2, L=70, S=70, D=16, Dv=16, dtype=torch.float32):
    return torch.randn(B, H, L, D, dtype=dtype), *(
        torch.randn(B, Hkv, S, size, dtype=dtype) for size in (D, Dv)
    )


def same_bits(one, other):
    """To the bit, NaN at the same places included."""
    assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# -- to the bit -----------------------------------------------------------------------------------

RULES = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (33, 11)},
    "softcap, alibi, sinks": {
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "sinks": torch.tensor([0.5, -0.25, 1.0, 0.0]),
    },
}
every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


@every_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_know_the_batch(rules, dtype):
    query, key, value = draw(B=5, L=130, S=130, dtype=dtype)
    together = attend(query, key, value, **rules)
    for b in range(5):
        same_bits(attend(query[b], key[b], value[b], **rules), together[b])


@every_rule
@pytest.mark.parametrize("L", [20, 130])
def test_a_row_does_not_know_its_padding(rules, L):
    """Neither rows nor keys that are added to the right, whatever stands in them."""
    query, key, value = draw(L=L, S=L)
    alone = attend(query, key, value, **rules)
    for more in (1, 7, 96, 200):
        longer = [torch.cat([t, torch.full_like(t[..., :1, :], math.nan).expand(
            *t.shape[:2], more, t.shape[3])], 2) for t in (query, key, value)]  # fmt: skip
        key_mask = torch.arange(L + more)[None] < L
        same_bits(attend(*longer, **rules, key_mask=key_mask)[:, :, :L], alone)


@every_rule
def test_a_row_does_not_know_the_threads(rules):
    query, key, value = draw(L=300, S=300)
    results = []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        results += [attend(query, key, value, **rules) for _ in range(3)]
    for result in results[1:]:
        same_bits(result, results[0])


@every_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_know_how_its_prompt_was_cut(rules, dtype):
    """At once, in pieces and row by row: what deterministic=True promises, and what this backend
    does without it."""
    query, key, value = draw(L=203, S=203, dtype=dtype)
    rules = {**rules, "is_causal": True}
    at_once = attend(query, key, value, **rules)
    for cuts in ([203, 202, 190, 100, 3, 1], [203, 150], list(range(203, 0, -3))):
        for start, end in zip([*cuts[1:], 0], cuts, strict=True):
            part = attention(query[:, :, start:end], key[:, :, :end], value[:, :, :end], **rules,
                             deterministic=True)  # fmt: skip
            same_bits(part, at_once[:, :, start:end])
    assert explain(query[:, :, :1], key, value, **rules, deterministic=True).backend == "native"


def test_threads_of_python_do_not_meet():
    inputs = [draw(L=90 + n, S=150 + n) for n in range(4)]
    expected = [attend(*each, is_causal=True) for each in inputs]
    found = [None] * 4

    def work(n):
        for _ in range(20):
            found[n] = attend(*inputs[n], is_causal=True)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, right in zip(found, expected, strict=True):
        same_bits(result, right)


# -- what may not be seen -------------------------------------------------------------------------

POISON = (math.nan, math.inf, -math.inf, 1e30)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("how", ["key mask", "causal", "window", "bool mask", "float mask",
                                 "documents", "softcap, alibi"])  # fmt: skip
def test_blocked_keys_are_inert(how, poison):
    L = 101
    query, key, value = draw(L=L, S=L, dtype=torch.float32)
    blocked = torch.zeros(L, dtype=torch.bool)
    blocked[[3, 60, 97, 99]] = True
    rows = slice(None)
    rules = {
        "key mask": lambda: {"key_mask": ~blocked[None]},
        "causal": lambda: {"is_causal": True},
        "window": lambda: {"window": (5, 4)},
        "bool mask": lambda: {"attn_mask": (~blocked).expand(L, L)},
        "float mask": lambda: {
            "attn_mask": torch.randn(L, L).masked_fill(blocked.expand(L, L), -math.inf)
        },
        "documents": lambda: {"documents": (torch.zeros(1, L).long(), blocked[None].long())},
        "softcap, alibi": lambda: {
            "softcap": 2.0,
            "alibi_slopes": torch.rand(4),
            "key_mask": ~blocked[None],
        },
    }[how]()
    if how == "causal":
        blocked, rows = torch.arange(L) >= 60, slice(0, 60)
    elif how == "window":
        blocked, rows = torch.arange(L) >= 60, slice(0, 56)
    spoiled = [t.masked_fill(blocked[:, None], poison) for t in (key, value)]
    clean = [t.masked_fill(blocked[:, None], 0) for t in (key, value)]
    out = attend(query, *spoiled, **rules)[:, :, rows]
    same_bits(out, attend(query, *clean, **rules)[:, :, rows])
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("poison", POISON)
def test_a_blocked_bias_is_inert(poison):
    query, key, value = draw()
    bias = torch.randn(70, 70)
    blocked = torch.ones(70, 70).triu(1).bool()
    out = attend(query, key, value, bias=bias.masked_fill(blocked, poison), is_causal=True)
    same_bits(out, attend(query, key, value, bias=bias, is_causal=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_what_is_seen_and_not_finite_arrives(where, poison):
    query, key, value = draw(L=101, S=101)
    query = query.abs()
    (key if where == "key" else value)[:, :, 50] = poison
    out = attend(query, key, value, is_causal=True)
    assert bool(out[:, :, :50].isfinite().all())
    assert not bool(out[:, :, 50:].isfinite().any())
    gold = attention_by_definition(query, key, value, is_causal=True)
    assert_close(out.isnan(), gold.isnan())


def test_a_query_that_is_not_finite_spoils_its_row_only():
    query, key, value = draw()
    expected = attend(query, key, value)
    query[:, :, 33] = math.nan
    out = attend(query, key, value)
    assert bool(out[:, :, 33].isnan().all())
    out[:, :, 33] = expected[:, :, 33]
    same_bits(out, expected)


def test_empty_rows():
    query, key, value = draw(L=101, S=40)
    query.requires_grad_()
    out, aux = attend(query, key, value, is_causal=True, return_aux=AuxRequest(lse=True),
                      sinks=torch.randn(4))  # fmt: skip
    empty = 101 - 40
    same_bits(out[:, :, :empty], torch.zeros(2, 4, empty, 16))
    same_bits(aux.lse[:, :, :empty], torch.full((2, 4, empty), -math.inf))
    (grad,) = torch.autograd.grad(out.square().sum(), query)
    same_bits(grad[:, :, :empty], torch.zeros(2, 4, empty, 16))

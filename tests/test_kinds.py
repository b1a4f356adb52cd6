"""Calls of a kind that came before: the same bits, the same errors, and who takes which path."""

import math
from contextlib import nullcontext

import pytest
import torch
from kind_calls import HKV, RULES, B, D, H, L, S, draw, quick_calls, same_bits
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead import AuxRequest, attention, attention_by_definition, functional, kinds
from clearhead.testing import ERRORS, assert_within_budget, plain


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    return quick_calls(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_the_second_call_is_not_checked_and_gives_the_same_bits(name, dtype, monkeypatch, quick):
    tensors = draw(dtype=dtype)
    first = attention(*tensors, **RULES[name], backend="native")
    monkeypatch.setattr(functional, "make_problem", None)
    same_bits(attention(*tensors, **RULES[name], backend="native"), first)
    with torch.no_grad():
        same_bits(attention(*tensors, **RULES[name], backend="native"), first)
    with torch.inference_mode():
        inside = [tensor.clone() for tensor in tensors]
        same_bits(attention(*inside, **RULES[name], backend="native"), first)
    assert len(quick) == 3


def test_numbers_that_change_from_call_to_call_are_looked_at(quick):
    """A kind rests on no contents: the same mask tensor, filled anew."""
    tensors, mask, bias = draw(), torch.ones(B, S).bool(), torch.zeros(H, 1, S)
    for step in range(4):
        mask[:, step], bias[0, 0, step] = False, -math.inf
        tensors[0].mul_(1.5)
        gold = attention_by_definition(*tensors, key_mask=mask, bias=bias)
        peer = plain(*tensors, key_mask=mask, bias=bias)[0]
        found = attention(*tensors, key_mask=mask, bias=bias, backend="native")
        assert_within_budget(found, gold, peer)
    assert len(quick) == 3


def test_decoding_is_of_one_kind(quick):
    """S grows, in views of a cache and in tensors of their own, with masks that grow too."""
    keys, values = torch.randn(2, B, HKV, 40, D)
    seen = torch.rand(B, 40) < 0.8
    for length in range(1, 40):
        query = torch.randn(B, H, 1, D)
        key, value, mask = keys[:, :, :length], values[:, :, :length], seen[:, :length]
        if length % 2:
            key, value = key.clone(), value.clone()
        found = attention(query, key, value, is_causal=True, key_mask=mask, backend="native")
        gold = attention_by_definition(query, key, value, is_causal=True, key_mask=mask)
        peer = plain(query, key, value, is_causal=True, key_mask=mask)[0]
        assert_within_budget(found, gold, peer)
    assert len(kinds._known) == 1 and len(quick) == 38


def test_the_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(kinds, "MOST", 5)
    for length in range(1, 20):
        attention(*draw(L=length), backend="native")
        assert 1 <= len(kinds._known) <= 5


def test_calls_for_other_backends_are_remembered_as_such(quick):
    for _ in range(3):
        attention(*draw(), backend="chunked")
    assert list(kinds._known.values()) == [None] and not quick


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Mine(torch.Tensor):
    pass


def _under(context):
    def call(*tensors):
        with context():
            return attention(*tensors)

    return call


def _with_first(change):
    return lambda query, key, value: attention(change(query), key, value)


def _traced(*tensors):
    return torch.jit.trace(attention, tensors, check_trace=False)(*draw_again(tensors))


def draw_again(tensors):
    """The same numbers elsewhere in memory."""
    return tuple(tensor.clone() for tensor in tensors)


ORDINARY = {
    "dispatch mode": _under(Dispatched),
    "autocast": _under(lambda: torch.autocast("cpu", dtype=torch.float16)),
    "profiler": _under(lambda: torch.profiler.profile()),
    "forward AD": _under(torch.autograd.forward_ad.dual_level),
    "vmap": lambda *tensors: torch.vmap(attention)(*(t[None] for t in tensors))[0],
    "jit.trace": _traced,
    "make_fx": lambda *t: make_fx(_under(nullcontext))(*t)(*draw_again(t)),
    "make_fx before dispatch": lambda *t: make_fx(_under(nullcontext), pre_dispatch=True)(*t)(
        *draw_again(t)
    ),
    "compile": lambda *t: torch.compile(attention, backend="eager", fullgraph=True)(*t),
    "negated in place": _with_first(lambda t: torch._neg_view(-t)),
    "a mask of its own class": lambda *t: attention(*t, torch.ones(L, S).bool().as_subclass(Mine)),
    "one batch item of keys for all": lambda q, k, v: torch.cat(
        [
            attention(q[n : n + 1].expand(B, -1, -1, -1), k[n : n + 1], v[n : n + 1])[:1]
            for n in range(B)
        ]
    ),
    "one batch item of values for all": lambda q, k, v: torch.cat(
        [attention(q, k, v[n : n + 1])[n : n + 1] for n in range(B)]
    ),
    "one batch item of queries for all": lambda q, k, v: torch.cat(
        [attention(q[n : n + 1], k, v)[n : n + 1] for n in range(B)]
    ),
    "three axes": lambda *t: torch.stack([attention(*each) for each in zip(*t, strict=True)]),
    "weights": lambda *t: attention(*t, return_aux=AuxRequest(weights=True))[0],
    "nothing more": lambda *t: attention(*t, return_aux=AuxRequest())[0],
    "documents": lambda *t: attention(
        *t, documents=(torch.zeros(B, L).long(), torch.zeros(B, S).long())
    ),
    "a whole number": lambda *t: attention(*t, softcap=10**9),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ORDINARY)
def test_who_takes_the_ordinary_path(name, quick):
    tensors = draw()
    expected = [attention(*tensors) for _ in range(2)][1]
    assert len(quick) == 1
    for _ in range(2):  # the second of a kind would be quick
        found = ORDINARY[name](*tensors)
    assert len(quick) == 1
    tolerance = 2e-3 if name == "autocast" else 2e-6
    assert found.dtype == (torch.float16 if name == "autocast" else torch.float32)
    found = found.detach().as_subclass(torch.Tensor).float()
    assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_function_modes_and_subclasses_get_the_call_itself():
    """They are asked before anything else; what they then call may be quick."""
    query, key, value = tensors = draw()
    expected = attention(*tensors)
    with Seen() as mode:
        found = attention(*tensors)
    assert_close(found, expected, rtol=0, atol=0)
    assert mode.seen == [attention]
    found = attention(query.as_subclass(Mine), key, value)
    assert type(found) is Mine
    assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=0)


def test_modes_and_profilers_see_the_op():
    tensors = draw()
    attention(*tensors)
    with Dispatched() as mode:
        attention(*tensors)
    assert "clearhead.native.default" in mode.names
    with torch.profiler.profile() as profile:
        attention(*tensors)
    assert "clearhead::native" in {event.key for event in profile.key_averages()}


def test_a_default_device_changes_nothing():
    tensors = draw()
    expected = attention(*tensors)
    with torch.device("meta"):
        same_bits(attention(*tensors), expected)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_what_is_wrong_stays_wrong(error):
    """Whatever is known: every call of the table twice, after a right one."""
    attention(*draw())
    before = dict(kinds._known)
    for _ in range(2):
        with pytest.raises(error.kind) as raised:
            error.call()
        assert str(raised.value) == error.text
    assert kinds._known == before


SQUARE = torch.randn(1, 4, 9, 8), torch.randn(1, 4, 4, 8)


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ({"scale": 1.0}, {"scale": True}, TypeError),
        ({"softcap": 1.0}, {"softcap": True}, TypeError),
        ({"window": (1, 0)}, {"window": (True, 0)}, TypeError),
        ({"window": (1, 0)}, {"window": (1.0, 0)}, TypeError),
        ({}, {"dropout_p": False}, TypeError),
        ({"key_mask": torch.ones(1, 4).bool()}, {"key_mask": torch.ones(1, 4)}, TypeError),
        ({"attn_mask": torch.ones(4)}, {"attn_mask": torch.ones(4).int()}, TypeError),
        ({"attn_mask": torch.ones(4)}, {"attn_mask": torch.ones(5)}, ValueError),
        ({"attn_mask": torch.ones(4)}, {"attn_mask": [1.0] * 4}, TypeError),
        ({"backend": "native"}, {"backend": ["native"]}, Exception),
    ],
)  # fmt: skip
def test_what_is_equal_is_not_the_same(right, wrong, error):
    """1, 1.0 and True are equal, and so are their hashes."""
    query, key = SQUARE
    attention(query, key, key, **right)
    with pytest.raises(error):
        attention(query, key, key, **wrong)


def test_a_size_that_happens_to_be_the_number_of_keys():
    """H = S = 4, so sinks of four are right; with S = 5, sinks of five are wrong."""
    query, key = SQUARE
    attention(query, key, key, sinks=torch.zeros(4), alibi_slopes=torch.zeros(4))
    longer = torch.randn(1, 4, 5, 8)
    for name in ("sinks", "alibi_slopes", "head_mask"):
        with pytest.raises(ValueError, match=name):
            attention(query, longer, longer, **{name: torch.zeros(5)})
    for mask in (torch.ones(4).bool(), torch.ones(9, 4).bool()):
        attention(query, key, key, mask)
        with pytest.raises(ValueError, match="attn_mask"):
            attention(query, longer, longer, mask)


def test_sizes_that_do_not_fit_are_of_no_known_kind():
    query, key = (tensor.expand(2, -1, -1, -1) for tensor in SQUARE)
    attention(query, key, key)
    heads, length, size = key[:, :2], key[:, :, :2], key[..., :2]
    batch, dtype = key[:1].expand(3, -1, -1, -1), key.double()
    for one in (heads, length, size, batch, dtype):
        with pytest.raises((ValueError, TypeError)):
            attention(query, one, key)
    for one in (heads, length, batch, dtype):  # values may have a size of their own
        with pytest.raises((ValueError, TypeError)):
            attention(query, key, one)
    for one in (key[:, :3], size, batch, dtype):
        with pytest.raises((ValueError, TypeError)):
            attention(query, one, one)
    assert len(kinds._known) == 1

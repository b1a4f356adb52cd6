"""Calls of a kind that came before with statistics or gradients: the same bits, the same errors."""

import pytest
import torch
from kind_calls import HKV, RULES, B, D, H, L, S, draw, quick_calls, same_bits
from torch.testing import assert_close

from clearhead import AuxRequest, attention, functional, kinds
from clearhead.backends import native


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    return quick_calls(monkeypatch)


# With fields of every sort: per row, per key, two tensors, one that rests on the first key.
REQUESTS = {
    "lse": AuxRequest(lse=True),
    "entropy": AuxRequest(max_logit=True, entropy=True, distance=True),
    "top": AuxRequest(top_k=3, key_mass=True, first_mass=True, self_mass=True),
    "head": AuxRequest(entropy=True, top_k=2, key_mass=True, reduce="head"),
    "head, with lse": AuxRequest(lse=True, reduce="head"),
}


def parts(aux):
    """All tensors of an Aux by name."""
    found = {}
    for name, value in vars(aux).items():
        values = value if isinstance(value, tuple) else [value]
        found |= {f"{name} {n}": part for n, part in enumerate(values) if part is not None}
    return found


# Under a key mask the rows that count are looked for each time.
PAIRS = [(name, asked) for name, rules in RULES.items() for asked, request in REQUESTS.items()
         if not (request.reduce and "key_mask" in rules)]  # fmt: skip


@pytest.mark.parametrize(("name", "asked"), PAIRS)
def test_statistics_of_the_second_call(name, asked, monkeypatch, quick):
    """Not checked, with the bits of the first, and the output of a call without them."""
    tensors, rules = draw(), {**RULES[name], "backend": "native"}
    request = REQUESTS[asked]
    alone = attention(*tensors, **rules)
    first, first_aux = attention(*tensors, **rules, return_aux=request)
    monkeypatch.setattr(functional, "make_problem", None)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            out, aux = attention(*tensors, **rules, return_aux=request)
        same_bits(out, first)
        same_bits(out, alone)
        assert parts(aux).keys() == parts(first_aux).keys() != set()
        for part, tensor in parts(aux).items():
            same_bits(tensor, parts(first_aux)[part])
            assert not tensor.requires_grad
    assert len(quick) == 3


@pytest.mark.parametrize("head_mask", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_gradients_of_the_second_call(name, head_mask, monkeypatch, quick):
    """Its bits, and those of its first and second derivatives, are the first call's."""
    rules = {**RULES[name], "backend": "native"}
    if head_mask:
        rules["head_mask"] = torch.linspace(-1, 1, H)
    tensors = draw()
    upstream = torch.randn(B, H, L, D)
    leaves = [t.requires_grad_() for t in tensors]
    for key, rule in rules.items():
        if isinstance(rule, torch.Tensor) and rule.is_floating_point():
            rules[key] = rule.clone().requires_grad_()
            leaves.append(rules[key])

    def derivatives():
        out, aux = attention(*tensors, **rules, return_aux=AuxRequest(lse=True, entropy=True))
        assert aux.lse.requires_grad and not aux.entropy.requires_grad
        plain_out = attention(*tensors, **rules)
        same_bits(plain_out, out)
        first = torch.autograd.grad(plain_out, leaves, upstream, create_graph=True)
        again = torch.autograd.grad(plain_out, leaves, upstream, retain_graph=True)
        for one, other in zip(first, again, strict=True):
            same_bits(one, other)
        both = torch.autograd.grad(out.sum() + aux.lse.sum(), leaves)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)
        return plain_out, *first, *both, *second

    expected = derivatives()
    assert not quick
    monkeypatch.setattr(functional, "make_problem", None)
    for one, other in zip(derivatives(), expected, strict=True):
        same_bits(one, other)
    assert len(quick) == 2


@pytest.mark.parametrize("place", ["query", "key", "value", "bias", "sinks", "head_mask"])
def test_one_gradient_is_a_kind_of_its_own(place, quick):
    """Of the same tensors, with and without; and no gradient is asked for where none is wanted."""
    named = dict(zip(("query", "key", "value"), draw(), strict=True))
    named |= {"bias": torch.zeros(H, L, S), "sinks": torch.zeros(H), "head_mask": torch.ones(H)}
    expected = attention(**named, backend="native")
    for _ in range(2):
        named[place].requires_grad_()
        out = attention(**named, backend="native")
        same_bits(out, expected)
        (grad,) = torch.autograd.grad(out.square().sum(), named[place])
        assert float(grad.abs().max()) > 0
        with torch.no_grad():
            assert not attention(**named, backend="native").requires_grad
        named[place].requires_grad_(False)
        assert not attention(**named, backend="native").requires_grad
    assert len(kinds._known) == 2 and len(quick) == 5


def test_statistics_while_decoding_are_of_one_kind(quick):
    """S grows, and with it the first key that counts stays or moves."""
    keys, values = torch.randn(2, B, HKV, 20, D)
    seen = torch.rand(B, 20) < 0.5
    request = AuxRequest(first_mass=True, key_mass=True, self_mass=True)
    for length in range(1, 20):
        call = torch.randn(B, H, 1, D), keys[:, :, :length], values[:, :, :length]
        rules = {"is_causal": True, "key_mask": seen[:, :length]}
        _, found = attention(*call, **rules, backend="native", return_aux=request)
        _, expected = attention(*call, **rules, backend="chunked", return_aux=request)
        for part, tensor in parts(found).items():
            assert_close(tensor, parts(expected)[part], rtol=0, atol=2e-6)
    assert len(quick) == 18


def test_what_native_does_not_give_is_asked_for_each_time(quick):
    """More of the largest weights than its kernels keep, and sums over rows that are padded."""
    tensors = draw(L=S)
    mask = torch.ones(B, S).bool()
    mask[:, :2] = False
    many = AuxRequest(top_k=native.MAX_TOP_K + 1)
    padded = AuxRequest(key_mass=True, entropy=True, reduce="head")
    for request, rules in ((many, {}), (padded, {"key_mask": mask})):
        found = [
            attention(*tensors, **rules, backend=backend, return_aux=request)[1]
            for backend in ("native", "native", "chunked")
        ]
        for part, tensor in parts(found[2]).items():
            same_bits(parts(found[0])[part], parts(found[1])[part])
            assert_close(parts(found[1])[part], tensor, rtol=0, atol=2e-5)
    assert not quick


class MyRequest(AuxRequest):
    pass


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (AuxRequest(lse=True, top_k=True), TypeError),
        (AuxRequest(lse=True, top_k=1.0), TypeError),
        (AuxRequest(lse=True, reduce="rows"), ValueError),
        (AuxRequest(lse=True, reduce=["head"]), ValueError),
        (AuxRequest(lse=True, top_k=-1), ValueError),
        (AuxRequest(lse=True, weights=True, reduce="head"), ValueError),
        ((True, 1), TypeError),
    ],
)  # fmt: skip
def test_requests_that_are_equal_are_not_the_same(wrong, error):
    tensors = draw()
    for reduce in (None, "head"):
        attention(*tensors, return_aux=AuxRequest(lse=True, top_k=1, reduce=reduce))
    for _ in range(2):
        with pytest.raises(error):
            attention(*tensors, return_aux=wrong)


def test_requests_of_a_class_of_their_own_are_looked_at(quick):
    tensors = draw()
    for _ in range(2):
        _, aux = attention(*tensors, return_aux=MyRequest(lse=True))
        assert aux.lse.shape == (B, H, L)
    assert not quick

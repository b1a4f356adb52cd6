"""attention() under all rules at once, drawn by hypothesis, and its derivatives to second order."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from clearhead import AuxRequest, attention, attention_by_definition, explain
from clearhead.backends import blocks
from clearhead.testing import CASES, Case, check

RULES = {
    "is_causal": lambda d: True,
    "scale": lambda d: float(d.normal(1)),
    "softcap": lambda d: float(d.normal(1).abs()) + 0.1,
    "window": lambda d: tuple(
        None if side == 4 else side for side in d.numbers(5, 2).tolist()
    ),
    "key_mask": lambda d: d.chosen(0.7, d.case.B, d.case.S),
    "documents": lambda d: (
        d.numbers(2, d.case.B, d.case.L),
        d.numbers(2, d.case.B, d.case.S),
    ),
    "attn_mask": lambda d: d.chosen(0.7, d.case.B, 1, d.case.L, d.case.S),
    "bias": lambda d: d.holes(d.normal(d.case.H, d.case.L, 1), 0.1),
    "sinks": lambda d: d.normal(d.case.H),
    "alibi_slopes": lambda d: d.normal(d.case.B, d.case.H),
    "head_mask": lambda d: d.normal(d.case.H),
}  # fmt: skip


@st.composite
def cases(draw):
    """Any sizes, 0 among them, with any rules at once."""
    chosen = draw(st.sets(st.sampled_from(sorted(RULES))))
    float_mask = draw(st.booleans())

    def rules(d):
        made = {name: RULES[name](d) for name in sorted(chosen)}
        if float_mask and "attn_mask" in made:
            made["attn_mask"] = d.holes(d.normal(1, d.case.H, d.case.L, d.case.S))
        return made

    Hkv = draw(st.integers(1, 3))
    L, S = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    kinds = ["normal", "large", "constant row", "ties"] if min(L, S) else ["normal"]
    return Case(
        f"drawn: {', '.join(sorted(chosen))}",
        B=draw(st.integers(1, 2)),
        H=Hkv * draw(st.integers(1, 3)),
        Hkv=Hkv,
        L=L,
        S=S,
        D=draw(st.integers(0, 5)),
        Dv=draw(st.integers(0, 5)),
        rules=rules,
        inputs=draw(st.sampled_from(kinds)),
    )


@given(case=cases(), block=st.sampled_from([2, 30, 1 << 20]), seed=st.integers(0, 2**20))
def test_chunked_under_all_rules(case, block, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        patch.setattr(blocks, "MIN_ROWS", 2)
        check(case, dtype=torch.float64, backend="chunked", seed=seed, atol=1e-10)


@given(case=cases(), seed=st.integers(0, 2**20), gradients=st.booleans())
def test_explain_is_never_wrong(case, seed, gradients):
    """Whatever it names runs, gives the definition's answer, and is what `auto` gives."""
    query, key, value, rules = case.make(seed=seed)
    query.requires_grad_(gradients)
    chosen = explain(query, key, value, **rules)
    out = attention(query, key, value, **rules)
    assert torch.equal(out, attention(query, key, value, **rules, backend=chosen.backend))
    gold = attention_by_definition(query, key, value, **rules)
    assert_close(out.double(), gold, atol=2e-5, rtol=1e-5)


SECOND_ORDER = (
    *("plain", "causal with a past", "causal, rows without keys", "key mask", "scale 0"),
    *("softcap", "sinks", "alibi", "bias and float mask", "everything"),
)


# Forward-mode AD loads torch's scripted decompositions, which warn of their own age.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", SECOND_ORDER)
def test_derivatives(name):
    """First, second and forward-mode derivatives of out and lse, in float64."""
    case = next(case for case in CASES if case.name == name)
    case = Case(**{**vars(case), "H": 2, "Hkv": 1, "L": 3, "S": 4, "D": 2, "Dv": 3, "B": 1})
    if name == "causal, rows without keys":
        case = Case(**{**vars(case), "L": 4, "S": 2})
    query, key, value, rules = _small(case)
    names = [k for k, v in rules.items() if torch.is_tensor(v) and v.is_floating_point()]
    inputs = [t.requires_grad_() for t in (query, key, value, *(rules[name] for name in names))]

    def function(query, key, value, *tensors):
        changed = {**rules, **dict(zip(names, tensors, strict=True))}
        request = AuxRequest(lse=True)
        out, aux = attention(query, key, value, **changed, backend="chunked", return_aux=request)
        return out, aux.lse.masked_fill(aux.lse == -math.inf, 0)

    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)
    assert gradcheck(function, inputs, check_forward_ad=True, check_backward_ad=False)


def _small(case):
    """The case's numbers for its changed sizes; rules that were drawn for fixed ones fit them."""
    if case.name == "key mask":
        rules = {"key_mask": torch.tensor([[True, False, True, True]])}
        case = Case(**{**vars(case), "rules": lambda d: rules})
    elif case.name == "bias and float mask":
        case = Case(**{**vars(case), "rules": lambda d: {
            "bias": d.normal(1, 2, 1, 4), "attn_mask": d.holes(d.normal(1, 1, 3, 4))}})  # fmt: skip
    elif case.name in ("sinks", "alibi"):
        key = "sinks" if case.name == "sinks" else "alibi_slopes"
        case = Case(**{**vars(case), "rules": lambda d: {key: d.normal(2)}})
    return case.make(torch.float64)


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(), (1,), (2,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_any_leading_axes(lead):
    """Each item gives what it gives alone, with rules that differ per item."""
    query, key, value = (torch.randn(*lead, h, n, 5) for h, n in ((4, 3), (2, 7), (2, 7)))
    key_mask = torch.rand(*lead, 7) < 0.7
    mask = torch.rand(*lead, 4, 1, 7) < 0.8
    documents = torch.randint(2, (*lead, 3)), torch.randint(2, (*lead, 7))
    slopes, head_mask = torch.rand(*lead, 4), torch.rand(*lead, 4)
    request = AuxRequest(lse=True, weights=True)
    out, aux = attention(
        query, key, value, mask, is_causal=True, key_mask=key_mask, documents=documents,
        alibi_slopes=slopes, head_mask=head_mask, return_aux=request,
    )  # fmt: skip
    assert out.shape == (*lead, 4, 3, 5)
    assert aux.lse.shape == (*lead, 4, 3)
    assert aux.weights.shape == (*lead, 4, 3, 7)
    for i in itertools.product(*map(range, lead)):
        alone = attention(
            query[i], key[i], value[i], mask[i], is_causal=True, key_mask=key_mask[i],
            documents=(documents[0][i], documents[1][i]), alibi_slopes=slopes[i],
            head_mask=head_mask[i],
        )  # fmt: skip
        assert_close(out[i], alone)


def test_leading_axes_of_size_one_are_shared():
    query, key, value = torch.randn(3, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    shared = attention(query, key, value)
    assert_close(shared, attention(query, key.expand(3, -1, -1, -1), value.expand(3, -1, -1, -1)))


def test_masks_broadcast_from_the_right():
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    per_key = torch.rand(7) < 0.7
    expected = attention(query, key, key, per_key.expand(2, 4, 5, 7))
    for mask in (per_key, per_key[None], per_key[None, None], per_key[None, None, None]):
        assert_close(attention(query, key, key, mask), expected)
    everything = torch.tensor(True)
    assert_close(attention(query, key, key, everything), attention(query, key, key))


def _layouts(x):
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.transpose(-1, -2).contiguous().transpose(-1, -2)
    wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    yield wide[..., ::2]
    yield torch.cat([torch.randn_like(x[:1]), x])[1:]


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_the_layout_in_memory_does_not_matter(backend):
    query, key, value = (torch.randn(2, 4, n, 8) for n in (5, 7, 7))
    expected = attention(query, key, value, backend=backend)
    for layouts in zip(_layouts(query), _layouts(key), _layouts(value), strict=True):
        assert_close(attention(*layouts, backend=backend), expected)


def test_an_expanded_key_gets_the_sum_of_its_gradients():
    query, value = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 7, 4)
    key = torch.randn(1, 1, 7, 4, requires_grad=True)
    out = attention(query, key.expand(3, 2, 7, 4), value, backend="chunked")
    (grad,) = torch.autograd.grad(out.square().sum(), key)
    copies = key.detach().repeat(3, 2, 1, 1).requires_grad_()
    (each,) = torch.autograd.grad(attention(query, copies, value).square().sum(), copies)
    assert_close(grad, each.sum((0, 1), keepdim=True))

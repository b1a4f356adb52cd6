"""varlen_attention: each packed sequence gets what the definition gives it alone."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from clearhead import (
    Aux,
    AuxRequest,
    attention,
    attention_by_definition,
    explain,
    varlen_attention,
)
from clearhead.testing import assert_within_budget, plain

H, HKV, D, DV = 6, 3, 5, 7
LSE = AuxRequest(lse=True)
# Lengths of (queries, keys): equal, more keys, fewer, one, none of either, none of both.
LENGTHS = ((3, 3), (2, 7), (5, 2), (1, 1), (0, 4), (3, 0), (0, 0), (1, 11))
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "causal window": {"is_causal": True, "window": (1, None)},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, H)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.6, H)},
    "alibi per sequence": {"alibi_slopes": torch.linspace(-1, 1, len(LENGTHS) * H).view(-1, H)},
    "head mask": {"head_mask": torch.linspace(-1, 1, H)},
    "head mask per sequence": {"head_mask": torch.linspace(-1, 1, len(LENGTHS) * H).view(-1, H)},
    "deterministic": {"deterministic": True, "is_causal": True},
    "everything": {
        "is_causal": True,
        "window": (4, 2),
        "scale": 0.4,
        "softcap": 2.0,
        "sinks": torch.linspace(-1, 2, H),
        "alibi_slopes": torch.linspace(-1, 1, len(LENGTHS) * H).view(-1, H),
        "head_mask": torch.linspace(-1, 1, H),
    },
}


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def offsets(lengths):
    """Cumulative offsets of queries and of keys."""
    columns = zip(*lengths, strict=True)
    return tuple(torch.tensor([0, *itertools.accumulate(column)]) for column in columns)


def draw(lengths=LENGTHS, dtype=torch.float32, value_size=DV):
    rows, keys = (sum(column) for column in zip(*lengths, strict=True))
    shapes = (rows, H, D), (keys, HKV, D), (keys, HKV, value_size)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def alone(function, tensors, lengths, options):
    """function for each sequence on its own, packed again: out (total, H, Dv), lse (total, H)."""
    outs, lses, i, j = [], [], 0, 0
    for n, (rows, keys) in enumerate(lengths):
        own = {k: t[n] if isinstance(t, torch.Tensor) and t.ndim == 2 else t
               for k, t in options.items()}  # fmt: skip
        parts = (tensors[0][i : i + rows], tensors[1][j : j + keys], tensors[2][j : j + keys])
        out, lse, _ = function(*(t.transpose(0, 1)[None] for t in parts), **own)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].transpose(0, 1))
        i, j = i + rows, j + keys
    return torch.cat(outs), torch.cat(lses)


def definition(*tensors, **rules):
    rules.pop("deterministic", None)
    return attention_by_definition(*tensors, **rules, return_aux=True)


def rival(*tensors, **rules):
    rules.pop("deterministic", None)
    return plain(*tensors, **rules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_sequence_gets_what_it_gets_alone(name, dtype):
    """Output, lse and all gradients, empty sequences included."""
    options = {k: t.to(dtype) if isinstance(t, torch.Tensor) else t
               for k, t in OPTIONS[name].items()}  # fmt: skip
    leaves = draw(dtype=dtype)
    out, aux = varlen_attention(*leaves, *offsets(LENGTHS), **options, return_aux=LSE)
    assert isinstance(aux, Aux) and aux.weights is None
    gold, gold_lse = alone(definition, leaves, LENGTHS, options)
    peer, peer_lse = alone(rival, leaves, LENGTHS, options)
    assert_within_budget(out, gold, peer)
    assert_within_budget(aux.lse, gold_lse, peer_lse, "lse")
    factor = torch.randn(gold.shape, dtype=torch.float64)
    grads = torch.autograd.grad(out, leaves, factor.to(dtype))
    truth = torch.autograd.grad((gold * factor.to(dtype)).sum(), leaves)
    peers = torch.autograd.grad(peer, leaves, factor.to(dtype))
    for grad, right, other in zip(grads, truth, peers, strict=True):
        assert_within_budget(grad, right, other, "gradient")
    bare = varlen_attention(*leaves, *offsets(LENGTHS), **options)
    tolerance = 4 * torch.finfo(dtype).eps
    assert_close(bare, out, atol=tolerance * float(gold.detach().abs().max()), rtol=0)


def test_gradients_through_lse():
    """lse is differentiable, also of a sequence whose keys are fewer than its rows."""
    leaves = draw(dtype=torch.float64)
    _, aux = varlen_attention(*leaves, *offsets(LENGTHS), is_causal=True, return_aux=LSE)
    _, gold = alone(definition, leaves, LENGTHS, {"is_causal": True})
    assert torch.equal(aux.lse == -math.inf, gold == -math.inf)
    sums = [t.masked_fill(t == -math.inf, 0).sin().sum() for t in (aux.lse, gold)]
    found, truth = (torch.autograd.grad(total, leaves[:2]) for total in sums)
    for grad, right in zip(found, truth, strict=True):
        assert_close(grad, right, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sequences_without_queries_or_without_keys(dtype):
    """q-empty: no rows, and dk = dv = 0 exactly; k-empty: rows exactly 0, lse -inf, dq = 0."""
    lengths = ((0, 4), (3, 0), (2, 5))
    leaves = draw(lengths, dtype)
    out, aux = varlen_attention(*leaves, *offsets(lengths), return_aux=LSE)
    assert out.shape == (5, H, DV) and aux.lse.shape == (5, H)
    assert not bool(out[:3].any()) and bool((aux.lse[:3] == -math.inf).all())
    assert bool(out[3:].all()) and bool(aux.lse[3:].isfinite().all())
    finite = aux.lse.masked_fill(aux.lse == -math.inf, 0)
    dq, dk, dv = torch.autograd.grad(out.square().sum() + finite.sum(), leaves)
    assert not bool(dq[:3].any()) and bool(dq[3:].any())
    assert not bool(dk[:4].any()) and bool(dk[4:].any())
    assert not bool(dv[:4].any()) and bool(dv[4:].any())


@pytest.mark.parametrize("lengths", [(), ((0, 0),), ((0, 0), (0, 0)), ((0, 3),), ((4, 0),)])
def test_nothing_is_packed(lengths):
    """No sequences at all, or only empty ones; fewer tokens than sequences."""
    rows, keys = (sum(n[axis] for n in lengths) for axis in (0, 1))
    cumulated = [torch.tensor([0, *itertools.accumulate(n[axis] for n in lengths)])
                 for axis in (0, 1)]  # fmt: skip
    query = torch.randn(rows, H, D, requires_grad=True)
    key, value = torch.randn(keys, HKV, D), torch.randn(keys, HKV, DV)
    out, aux = varlen_attention(query, key, value, *cumulated, return_aux=LSE)
    assert out.shape == (rows, H, DV) and aux.lse.shape == (rows, H)
    assert not bool(out.any()) and out.dtype == aux.lse.dtype == torch.float32
    half = [t.bfloat16() for t in (query, key, value)]
    out, aux = varlen_attention(*half, *cumulated, return_aux=LSE)
    assert out.dtype == torch.bfloat16 and aux.lse.dtype == torch.float32


def test_weights_have_no_packed_form():
    rows, cumulated = torch.randn(4, H, D), torch.tensor([0, 4])
    with pytest.raises(NotImplementedError, match="weights have no packed form"):
        varlen_attention(rows, rows, rows, cumulated, cumulated,
                         return_aux=AuxRequest(lse=True, weights=True))  # fmt: skip


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_offsets_are_whole_numbers_of_any_width(kind):
    leaves = draw()
    cumulated = offsets(LENGTHS)
    out = varlen_attention(*leaves, *(t.to(kind) for t in cumulated))
    assert torch.equal(out, varlen_attention(*leaves, *cumulated))


@pytest.mark.parametrize("backend", ["sdpa", "chunked"])
def test_a_named_backend_serves_all_sequences(backend):
    lengths = ((3, 3), (2, 7), (1, 5))
    leaves = [t.detach() for t in draw(lengths, value_size=D)]
    out = varlen_attention(*leaves, *offsets(lengths), backend=backend)
    gold, _ = alone(definition, leaves, lengths, {})
    assert_within_budget(out, gold, alone(rival, leaves, lengths, {})[0])
    with pytest.raises(NotImplementedError, match="torch's fused kernels have no softcap"):
        varlen_attention(*leaves, *offsets(lengths), softcap=1.0, backend="sdpa")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(3, 5, 1, 7), (1, 1, 1), (11,), (2, 0, 4)])
def test_packing_and_documents_say_the_same(lengths, causal):
    """Where L = S: attention over the packed rows with a number per document."""
    total = sum(lengths)
    cumulated = torch.tensor([0, *itertools.accumulate(lengths)])
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    leaves = [torch.randn(total, n, D, requires_grad=True) for n in (H, HKV, HKV)]
    packed, aux = varlen_attention(*leaves, cumulated, cumulated, is_causal=causal, return_aux=LSE)
    folded = [t.transpose(0, 1) for t in leaves]
    out, other = attention(
        *folded, is_causal=causal, documents=documents, return_aux=AuxRequest(lse=True)
    )
    assert_close(packed, out.transpose(0, 1), atol=1e-6, rtol=1e-5)
    assert_close(aux.lse, other.lse.transpose(0, 1), atol=1e-6, rtol=1e-5)
    grads = torch.autograd.grad(packed.square().sum(), leaves)
    expected = torch.autograd.grad(out.square().sum(), leaves)
    for grad, right in zip(grads, expected, strict=True):
        assert_close(grad, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"deterministic": True},
                                     {"dropout_p": 0.5}], ids=str)  # fmt: skip
def test_a_sequence_keeps_its_bits_when_another_changes(options, dtype):
    """Output and gradients, whichever of the others is disturbed."""
    leaves = draw(dtype=dtype)
    queries, keys = (t.tolist() for t in offsets(LENGTHS))
    d_out = torch.randn(queries[-1], H, DV).to(dtype)

    def run(tensors):
        torch.manual_seed(1)
        tensors = [t.detach().requires_grad_() for t in tensors]
        out = varlen_attention(*tensors, *offsets(LENGTHS), **options)
        return [out, *torch.autograd.grad(out, tensors, d_out)]

    expected = run(leaves)
    for n in (0, 1, 2, 4, 7):
        rows, columns = slice(*queries[n : n + 2]), slice(*keys[n : n + 2])
        moved = [t.detach().clone() for t in leaves]
        for t, own in zip(moved, (rows, columns, columns), strict=True):
            t[own] = 100.0
        actual = run(moved)
        for found, right, own in zip(actual, expected, (rows, rows, columns, columns), strict=True):
            others = torch.ones(len(found), dtype=torch.bool)
            others[own] = False
            assert torch.equal(found[others], right[others])


def test_dropout_differs_between_sequences():
    """Two equal sequences do not lose the same weights."""
    rows = torch.zeros(16, 1, 4)
    value = torch.eye(8).repeat(2, 1)[:, None]
    cumulated = torch.tensor([0, 8, 16])
    keep = varlen_attention(rows, rows, value, cumulated, cumulated, dropout_p=0.5) > 0
    assert not torch.equal(keep[:8], keep[8:])
    assert 0.2 < float(keep.double().mean()) < 0.8


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
    causal=st.booleans(),
    window=st.sampled_from((None, (0, 0), (1, None), (None, 1), (2, 2))),
    seed=st.integers(0, 2**16),
)
def test_any_lengths(lengths, causal, window, seed):
    torch.manual_seed(seed)
    leaves = [t.detach() for t in draw(tuple(lengths))]
    options = {"is_causal": causal, "window": window}
    out = varlen_attention(*leaves, *offsets(lengths), **options)
    gold, _ = alone(definition, leaves, lengths, options)
    assert_close(out.double(), gold, atol=2e-6, rtol=1e-5)


def test_explain_takes_a_sequence_as_it_stands():
    """explain has no packed form: one sequence is asked about as attention takes it."""
    query, key, value = (t.detach().transpose(0, 1) for t in draw(((5, 5),), value_size=D))
    assert explain(query, key, value, is_causal=True).backend == "native"

"""Reports B, the small inputs themselves, and inertness seen from every other side.

Through returned weights and lse, packed sequences, masks and biases that hold NaN where another
rule blocks, and the queries and incoming gradients of rows that see nothing.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from clearhead import AuxRequest, attention, attention_by_definition, explain, varlen_attention
from clearhead.testing import assert_within_budget, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
POISONS = (math.nan, math.inf, -math.inf, 1e30)
EVERYTHING = AuxRequest(lse=True, weights=True)


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads wait for each other longer than such small calls take."""
    torch.set_num_threads(1)


def serving(*tensors, **rules):
    """The backends that claim the call; flex compiles for seconds and is tested elsewhere."""
    names = ("sdpa", "chunked")
    return [n for n in names if explain(*tensors, **rules, backend=n).backend is not None]


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- 10: the two inputs of the report -------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_a_blocked_key_is_as_good_as_none(where, poison, dtype):
    """pytorch#101967: mask blocks key 1 for both queries; the call with key 1 removed is right."""
    query, key, value = (normal(1, 1, 2, 4, dtype=dtype, seed=n) for n in range(3))
    mask = torch.tensor([True, False])
    gold = attention_by_definition(query, key[:, :, :1], value[:, :, :1])
    assert torch.equal(gold, value[:, :, :1].double().expand(1, 1, 2, 4))
    (key if where == "key" else value)[..., 1, :] = poison
    leaves = [t.clone().requires_grad_() for t in (query, key, value)]
    for backend in serving(query, key, value, mask):
        assert torch.equal(attention(query, key, value, mask, backend=backend).double(), gold)
    for backend in ("auto", *serving(*leaves, mask)):
        out = attention(*leaves, mask, backend=backend)
        assert torch.equal(out.double(), gold)
        dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
        assert not bool(dq.any()) and not bool(dk.any())
        assert torch.equal(dv[0, 0], torch.tensor([[2.0] * 4, [0.0] * 4], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_row_0_does_not_see_what_stands_in_the_future(where, poison, dtype):
    """pytorch#101967, causal: S = 2, and row 0 is exactly its own value."""
    query, key, value = (normal(1, 1, 2, 4, dtype=dtype, seed=n) for n in range(3))
    (key if where == "key" else value)[..., 1, :] = poison
    for backend in ("auto", *serving(query, key, value, is_causal=True)):
        out = attention(query, key, value, is_causal=True, backend=backend)
        assert torch.equal(out[..., 0, :], value[..., 0, :])
        if where == "value" and not math.isfinite(poison):
            assert not bool(out[..., 1, :].isfinite().any())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rows_that_do_see_it_get_what_the_definition_says(sign):
    """Inert is for those who may not look. An infinite value that a row sees is in its output."""
    query, key, value = (normal(1, 1, 3, 4, seed=n) for n in range(3))
    value[0, 0, 1, 2] = sign * math.inf
    out = attention(query, key, value, is_causal=True)
    gold = attention_by_definition(query, key, value, is_causal=True)
    assert gold[0, 0, 1:, 2].tolist() == [sign * math.inf] * 2
    assert_close(out.double(), gold, atol=1e-6, rtol=1e-6)
    mapped = torch.vmap(lambda *t: attention(*t, is_causal=True))(query, key, value)
    assert_close(mapped.double(), gold, atol=1e-6, rtol=1e-6)


# -- 11: caches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_unused_slots_of_a_cache(groups, dtype):
    """flash-attention#2374: cache of 8, used 1 and 3; NaN, Inf, 0, 1e30 beyond give the same."""
    query = normal(2, 2 * groups, 1, 4, dtype=dtype)
    key, value = (normal(2, 2, 8, 4, dtype=dtype, seed=n) for n in (1, 2))
    used = torch.tensor([1, 3])
    key_mask = torch.arange(8) < used[:, None]
    gold = torch.cat([
        attention_by_definition(query[b : b + 1], key[b : b + 1, :, :n], value[b : b + 1, :, :n])
        for b, n in enumerate(used)
    ])  # fmt: skip
    unused = ~key_mask[:, None, :, None]
    for backend in ("auto", "chunked", "sdpa"):
        outs = []
        for poison in (0.0, *POISONS):
            filled = key.masked_fill(unused, poison), value.masked_fill(unused, poison)
            if backend == "sdpa" and "sdpa" not in serving(query, *filled, key_mask=key_mask):
                continue
            outs.append(attention(query, *filled, key_mask=key_mask, backend=backend))
        peer = plain(query, key, value, key_mask=key_mask)[0]
        assert_within_budget(outs[0], gold, peer)
        assert len(outs) > 1 and all(torch.equal(out, outs[0]) for out in outs)


# -- 12: rows that belong to no sequence ----------------------------------------------------------


def test_packed_rows_beyond_the_last_offset_are_refused():
    """pytorch#176793: 6 rows, offsets [0, 2, 4]; ValueError before any work."""
    rows, offsets = normal(6, 2, 4), torch.tensor([0, 2, 4])
    with pytest.raises(ValueError, match="Cut off rows that belong to no sequence"):
        varlen_attention(rows, rows, rows, offsets, offsets)
    with pytest.raises(ValueError, match="end at the 6 rows of key"):
        varlen_attention(rows[:4], rows, rows, offsets, offsets)


# -- weights and lse ------------------------------------------------------------------------------

RULES = {
    "causal": {"is_causal": True},
    "window": {"window": (1, 0)},
    "key mask": {"key_mask": torch.tensor([[True, True, False, True, True]])},
    "documents": {"documents": torch.tensor([[0, 0, 1, 0, 0]])},
    "bool mask": {"attn_mask": torch.eye(5).bool().logical_not()},
    "float mask": {"attn_mask": torch.eye(5).masked_fill(torch.eye(5).bool(), -math.inf)},
    "bias": {"bias": torch.eye(5).masked_fill(torch.eye(5).bool(), -math.inf)},
}
FLOAT_OPTIONS = {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 0.0, 1.0])}


@pytest.mark.parametrize("options", [{}, FLOAT_OPTIONS], ids=["plain", "softcap and sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_weights_and_lse_of_rows_that_cannot_see_it(name, dtype, options):
    """Weights there are exactly 0, and those of the other keys keep their bits, as lse does."""
    query = normal(1, 4, 5, 3, dtype=dtype)
    key, value = (normal(1, 2, 5, 3, dtype=dtype, seed=n) for n in (1, 2))
    rules = {**RULES[name], **options}
    rules = {k: t.to(dtype) if k in ("bias", "sinks") else t for k, t in rules.items()}
    key[:, :, 2] = 0
    clean, expected = attention(query, key, value, **rules, return_aux=EVERYTHING)
    sees = expected.weights[..., 2] > 0
    assert not bool(sees.all())
    for poison in POISONS:
        dirty = key.clone()
        dirty[:, 1, 2] = poison
        out, aux = attention(query, dirty, value, **rules, return_aux=EVERYTHING)
        assert torch.equal(out[~sees], clean[~sees])
        assert torch.equal(aux.lse[~sees], expected.lse[~sees])
        assert torch.equal(aux.weights[~sees], expected.weights[~sees])
        assert not bool(aux.weights[~sees][:, 2].any())
        assert torch.equal(aux.weights[:, :2], expected.weights[:, :2])


def test_gradients_through_weights_and_lse():
    """A padded NaN key gets gradient 0 through them too, and so does a query that sees nothing."""
    query, key, value = (normal(2, 2, 5, 3, seed=n) for n in range(3))
    key_mask = torch.tensor([[True, True, False, True, True], [False] * 5])
    found = []
    for poison in (0.0, math.nan, math.inf):
        leaves = [query.clone(), key.clone(), value.clone()]
        leaves[1][:, :, 2] = poison
        leaves[2][:, :, 2] = poison
        leaves[0][1] = poison
        leaves = [t.requires_grad_() for t in leaves]
        out, aux = attention(*leaves, key_mask=key_mask, return_aux=EVERYTHING)
        assert not bool(out[1].any()) and not bool(aux.weights[1].any())
        assert bool((aux.lse[1] == -math.inf).all())
        total = out.sum() + (aux.weights * torch.arange(5)).sum() + aux.lse[0].square().sum()
        found.append(torch.autograd.grad(total, leaves))
        dq, dk, dv = found[-1]
        assert not bool(dk[:, :, 2].any()) and not bool(dv[:, :, 2].any())
        assert not bool(dq[1].any()) and bool(dq[0].any())
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


# -- masks and biases that hold NaN where another rule blocks -------------------------------------


@pytest.mark.parametrize("argument", ["attn_mask", "bias"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "key mask", "documents", "bool mask", "bias"])
def test_a_mask_holds_anything_where_another_rule_blocks(name, dtype, poison, argument):
    """Its entries there do not reach the output, and get gradient 0."""
    rules = dict(RULES[name])
    if argument in rules:  # one argument holds the rule, the other the poison
        other = "bias" if argument == "attn_mask" else "attn_mask"
        if rules[argument].dtype == torch.bool:
            argument = other
        else:
            rules[other] = rules.pop(argument)
    blocked = attention(
        torch.zeros(1, 1, 5, 1), torch.zeros(1, 1, 5, 1), torch.eye(5)[None, None], **rules
    )
    blocked = blocked == 0
    assert bool(blocked.any())
    query = normal(1, 4, 5, 3, dtype=dtype)
    key, value = (normal(1, 2, 5, 3, dtype=dtype, seed=n) for n in (1, 2))
    added = normal(1, 4, 5, 5, dtype=dtype, seed=3)
    rules = {k: t.to(dtype) if k in ("bias", "attn_mask") and t.is_floating_point() else t
             for k, t in rules.items()}  # fmt: skip

    def run(fill, backend, gradients):
        leaves = [query, key, value, added.masked_fill(blocked, fill)]
        leaves = [t.clone().requires_grad_(gradients) for t in leaves]
        rules[argument] = leaves[3]
        out = attention(*leaves[:3], **rules, backend=backend)
        return [out, *(torch.autograd.grad(out.sum(), leaves) if gradients else ())]

    backends = serving(query, key, value, **{**rules, argument: added})
    for backend, gradients in [("auto", False), ("auto", True), *((b, False) for b in backends)]:
        expected = run(0.0, backend, gradients)
        actual = run(poison, backend, gradients)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
        if gradients:
            assert not bool(actual[4][blocked.expand(1, 4, 5, 5)].any())


# -- rows that see nothing ------------------------------------------------------------------------

EMPTY_ROWS = {
    "causal": {"is_causal": True},  # with three keys the first two of five rows see none
    "window": {"window": (1, 0)},
    "key mask": {"key_mask": torch.tensor([[False] * 3, [True] * 3])},
    "documents": {"documents": (torch.tensor([[0, 1, 0, 2, 2]]), torch.tensor([[2, 2, 1]]))},
    "bool mask": {"attn_mask": torch.tensor([1, 0, 1, 1, 0]).bool()[:, None]},
    "float mask": {"attn_mask": torch.tensor([0, -math.inf, 0, 0, -math.inf])[:, None]},
    "bias": {"bias": torch.tensor([0, -math.inf, 0, 0, -math.inf])[:, None]},
}


@pytest.mark.parametrize("extra", [{}, {"sinks": torch.tensor([0.5, -1.0, 0.0, 1.0])},
                                   {"deterministic": True}, {"softcap": 2.0}], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_queries_and_incoming_gradients_of_rows_that_see_nothing(name, dtype, extra):
    """They may hold anything: the row is exactly 0, passes exactly 0, and changes no other bit."""
    rules = {k: t.to(dtype) if k in ("bias", "sinks") else t
             for k, t in {**EMPTY_ROWS[name], **extra}.items()}  # fmt: skip
    query, d_out = (normal(2, 4, 5, 3, dtype=dtype, seed=n) for n in (0, 3))
    key, value = (normal(2, 2, 3, 3, dtype=dtype, seed=n) for n in (1, 2))
    lse = attention(query, key, value, **rules, return_aux=AuxRequest(lse=True))[1].lse
    empty = lse == -math.inf
    assert bool(empty.any()) and not bool(empty.all())

    def run(fill_query, fill_gradient):
        leaves = [query.masked_fill(empty[..., None], fill_query), key, value]
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = attention(*leaves, **rules)
        upstream = d_out.masked_fill(empty[..., None], fill_gradient)
        return [out, *torch.autograd.grad(out, leaves, upstream)]

    expected = run(0.0, 0.0)
    for poison in POISONS:
        for actual in (run(poison, 0.0), run(0.0, poison), run(poison, poison)):
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
            assert not bool(actual[0][empty].any()) and not bool(actual[1][empty].any())


@pytest.mark.parametrize("poison", [*POISONS, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("name", ["causal", "bool mask"])
def test_incoming_gradients_pass_only_to_what_the_row_sees(name, poison):
    """What row 0 is told, however bad, is no matter of a key that row 0 may not attend."""
    leaves = [normal(1, n, 5, 3, seed=s).requires_grad_() for s, n in enumerate((4, 2, 2))]
    found = []
    for fill in (0.0, poison):
        d_out = normal(1, 4, 5, 3, seed=3)
        d_out[:, :, 0] = fill
        out = attention(*leaves, **RULES[name], backend="chunked")
        found.append(torch.autograd.grad(out, leaves, d_out))
    untouched = slice(1, None) if name == "causal" else slice(0, 1)
    assert torch.equal(found[1][0][:, :, 1:], found[0][0][:, :, 1:])
    for grad, clean in zip(found[1][1:], found[0][1:], strict=True):
        assert torch.equal(grad[:, :, untouched], clean[:, :, untouched])


# Forward-mode AD loads torch's scripted decompositions, which warn of their own age.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, FLOAT_OPTIONS], ids=["plain", "softcap and sinks"])
@pytest.mark.parametrize("where", ["key", "value"])
def test_derivatives_of_every_kind_pass_by_what_is_blocked(where, options):
    """torch.func.grad, jvp, and second derivatives, with the worst in a padded key or value."""
    tensors = [3 * normal(1, n, 5, 3, seed=s) for s, n in enumerate((4, 2, 2))]
    key_mask = torch.tensor([[True, True, True, True, False]])

    def loss(*own):
        return attention(*own, key_mask=key_mask, **options).sin().sum()

    def derivatives(fill):
        own = [t.clone() for t in tensors]
        own[1 if where == "key" else 2][:, :, 4] = fill
        tangents = tuple(torch.ones_like(t) for t in own)
        first = torch.func.grad(loss, (0, 1, 2))(*own)
        slope = torch.func.jvp(loss, tuple(own), tangents)[1]
        leaves = [t.requires_grad_() for t in own]
        out = attention(*leaves, key_mask=key_mask, **options, backend="chunked").sin().sum()
        grads = torch.autograd.grad(out, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        return [*first, slope, *second]

    expected = derivatives(0.0)
    for poison in (*POISONS, torch.finfo(torch.float32).max):
        found = derivatives(poison)
        assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))
        assert not bool(found[1][:, :, 4].any()) and not bool(found[2][:, :, 4].any())


# -- packed sequences -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"window": (1, 0)}, {"deterministic": True, "is_causal": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_in_another_sequence(dtype, options):
    """All of one sequence is NaN, Inf or huge; the others keep every bit, gradients included."""
    offsets = torch.tensor([0, 3, 3, 5, 10])
    query, d_out = (normal(10, 4, 3, dtype=dtype, seed=n) for n in (0, 3))
    key, value = (normal(10, 2, 3, dtype=dtype, seed=n) for n in (1, 2))
    mine = torch.ones(10, dtype=torch.bool)
    mine[3:5] = False

    def run(fill):
        leaves = [t.clone() for t in (query, key, value)]
        for t in leaves:
            t[~mine] = fill
        leaves = [t.requires_grad_() for t in leaves]
        out = varlen_attention(*leaves, offsets, offsets, **options)
        return [out, *torch.autograd.grad(out, leaves, d_out)]

    expected = run(0.0)
    for poison in POISONS:
        actual = run(poison)
        assert all(torch.equal(a[mine], e[mine]) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_in_the_future_of_a_packed_sequence(dtype):
    """Causal within the sequence: the row before it keeps its bits, and so do its gradients."""
    offsets = torch.tensor([0, 4, 7])
    query, key, value = (normal(7, 2, 3, dtype=dtype, seed=n) for n in range(3))
    rows = [0, 1, 2, 4, 5, 6]
    for which in (1, 2):
        results = []
        for fill in (0.0, *POISONS):
            leaves = [query.clone(), key.clone(), value.clone()]
            leaves[which][3] = fill
            leaves = [t.requires_grad_() for t in leaves]
            out = varlen_attention(*leaves, offsets, offsets, is_causal=True)
            (dq,) = torch.autograd.grad(out[rows].sum(), leaves[0])
            results.append((out[rows], dq[rows]))
        for out, dq in results[1:]:
            assert torch.equal(out, results[0][0]) and torch.equal(dq, results[0][1])

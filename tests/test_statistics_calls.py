"""Statistics by hand, at their limits, and through every door: packed, module, compiled, vmap."""

import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from clearhead import (
    Aux,
    AuxRequest,
    MultiHeadAttention,
    Summary,
    TopK,
    attention,
    attention_by_definition,
    explain,
    varlen_attention,
)
from clearhead.backends import BACKENDS, chunked, native
from clearhead.backends import statistics as ops
from clearhead.problem import Problem
from clearhead.testing.statistics import ALL, defined, measured

HEADS = dataclasses.replace(ALL, reduce="head")
ROWS = ("max_logit", "entropy", "first_mass", "previous_mass", "self_mass", "distance")


def ask(*tensors, request=ALL, **rules):
    return attention(*tensors, **rules, return_aux=request)[1]


def draw(B=2, H=4, Hkv=2, L=5, S=7, D=8):
    return torch.randn(B, H, L, D), torch.randn(B, Hkv, S, D), torch.randn(B, Hkv, S, D)


def same(found: Aux, other: Aux):
    """To the bit, NaN where NaN."""
    first, second = measured(found), measured(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert_close(tensor, second[name], atol=0, rtol=0, equal_nan=True)


# -- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_equal_scores_by_hand(backend):
    """Three equal keys, causal: row i shares its attention evenly among i + 1 keys."""
    x = torch.zeros(1, 1, 3, 4)
    aux = ask(x, x, x, is_causal=True, backend=backend)
    expected = {
        "lse": [0, math.log(2), math.log(3)],
        "max_logit": [0, 0, 0],
        "entropy": [0, math.log(2), math.log(3)],
        "first_mass": [1, 1 / 2, 1 / 3],
        "previous_mass": [0, 1 / 2, 1 / 3],
        "self_mass": [1, 1 / 2, 1 / 3],
        "distance": [0, 1 / 2, 1],
        "key_mass": [1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3],
    }
    for name, values in expected.items():
        assert getattr(aux, name).flatten().tolist() == pytest.approx(values), name
    assert aux.top_k.indices[0, 0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert aux.top_k.weights[0, 0, 1].tolist() == [0.5, 0.5, 0.0]
    assert math.copysign(1, aux.entropy[0, 0, 0]) == 1  # and not -0


def test_a_sink_takes_its_share_of_every_sum():
    x, sinks = torch.zeros(1, 1, 2, 4), torch.full((1,), math.log(2.0))
    aux = ask(x, x, x, sinks=sinks)
    assert aux.entropy.flatten().tolist() == pytest.approx([2 * math.log(4) / 4] * 2)
    assert aux.key_mass.flatten().tolist() == pytest.approx([0.5, 0.5])
    assert aux.max_logit.flatten().tolist() == [0, 0]
    assert aux.lse.flatten().tolist() == pytest.approx([math.log(4)] * 2)


def test_the_first_key_is_the_first_of_the_rows_own_sequence():
    """Keys 0 and 3 are padding: the first of all, and the first of the second document."""
    x = torch.zeros(1, 1, 5, 4)
    rules = {"key_mask": torch.tensor([[False, True, True, False, True]]), "is_causal": True}
    assert ask(x, x, x, **rules).first_mass.flatten().tolist() == pytest.approx(
        [0, 1, 1 / 2, 1 / 2, 1 / 3]
    )
    documents = torch.tensor([[0, 0, 0, 7, 7]])
    aux = ask(x, x, x, **rules, documents=documents)
    assert aux.first_mass.flatten().tolist() == pytest.approx([0, 1, 1 / 2, 0, 1])
    aux = ask(x, x, x, window=(1, 0))
    assert aux.first_mass.flatten().tolist() == pytest.approx([1, 1 / 2, 0, 0, 0])


def test_summaries_by_hand():
    """Rows of entropy 0, log 2, ..., log 5, and padded ones beside them that do not count."""
    x = torch.zeros(2, 1, 6, 4)
    key_mask = torch.tensor([[True] * 5 + [False], [False] * 6])
    aux = ask(x, x, x, is_causal=True, key_mask=key_mask, request=HEADS)
    rows = torch.tensor([math.log(n) for n in range(1, 6)])
    assert_close(aux.entropy.mean, torch.tensor([[rows.mean()], [math.nan]]), equal_nan=True)
    assert aux.entropy.min[0, 0] == 0 and aux.entropy.max[0, 0] == pytest.approx(math.log(5))
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    assert_close(aux.entropy.quantiles[0, 0], rows.quantile(levels))
    assert bool(torch.cat([t.reshape(2, -1)[1] for t in (*aux.entropy, *aux.lse)]).isnan().all())
    assert float(aux.key_mass[0].sum()) == pytest.approx(5) and not bool(aux.key_mass[1].any())
    assert aux.top_k.mean.shape == (2, 1, 3) and aux.top_k.quantiles.shape == (2, 1, 3, 5)


def test_which_rows_are_padded():
    """By their own key: in self-attention and in causal calls, but not in cross-attention."""
    query, key, value = draw(L=2, S=5)
    key_mask = torch.tensor([[True] * 4 + [False], [True] * 5])
    causal = ask(query, key, value, is_causal=True, key_mask=key_mask, request=HEADS)
    assert_close(causal.key_mass.sum(-1), torch.tensor([[1.0] * 4, [2.0] * 4]))
    across = ask(query, key, value, key_mask=key_mask, request=HEADS)
    assert_close(across.key_mass.sum(-1), torch.full((2, 4), 2.0))


def test_padded_rows_are_left_out_beside_any_documents():
    """The number that stands for no document is none that is in use, small or large."""
    x = torch.randn(2, 2, 9, 8)
    key_mask = torch.rand(2, 9) < 0.6
    for documents in (
        torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3, 3]]),
        torch.tensor([[2**63 - 1] * 4 + [-(2**63)] * 5]),
        (torch.arange(9, dtype=torch.uint8) // 3)[None].expand(2, 9),
    ):
        rules = {"key_mask": key_mask, "documents": documents}
        found = measured(ask(x, x, x, **rules, request=HEADS))
        out = attention_by_definition(x, x, x, **rules, return_aux=True)
        for name, gold in defined(x, x, rules, out[2], out[1], "head").items():
            assert_close(found[name], gold.float(), equal_nan=True, atol=1e-5, rtol=1e-5)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_of_equal_weights_the_lower_key_comes_first(backend):
    """Scores are small whole numbers, exact in any order of summation, with many ties."""
    query = torch.randint(0, 2, (2, 4, 6, 8)).float()
    key = torch.randint(0, 2, (2, 2, 61, 8)).float()
    request = AuxRequest(top_k=9)
    for rules in ({}, {"is_causal": True}, {"key_mask": torch.rand(2, 61) < 0.7}):
        top = ask(query, key, key, request=request, scale=1.0, **rules, backend=backend).top_k
        out = attention_by_definition(query, key, key, scale=1.0, **rules, return_aux=True)
        gold = defined(query, key, rules, out[2], out[1])
        assert torch.equal(top.indices[..., :3], gold["top_keys"])
        falls = top.weights.diff() < 0
        assert bool((falls | (top.indices.diff() > 0) | (top.indices[..., 1:] < 0)).all())


def test_a_visible_key_of_weight_0_is_a_key():
    """exp(-200) is 0 in float32, but the key is seen; a blocked one is not."""
    query, key = torch.full((1, 1, 1, 1), 200.0), torch.tensor([[[[0.0], [1.0], [0.0], [0.0]]]])
    mask = torch.tensor([True, True, True, False])
    top = ask(query, key, key, attn_mask=mask, request=AuxRequest(top_k=4)).top_k
    assert top.indices.flatten().tolist() == [1, 0, 2, -1]
    assert top.weights.flatten().tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(("k", "dtype"), [(1, torch.float32), (17, torch.float32),
                                          (40, torch.float64)], ids=str)  # fmt: skip
def test_any_number_of_largest_weights(k, dtype):
    query, key, value = (t.to(dtype) for t in draw(S=23))
    request = AuxRequest(top_k=k, weights=True)
    aux = ask(query, key, value, request=request, window=(20, 3))
    top, indices = aux.weights.sort(-1, descending=True)
    n = min(k, 23)
    assert isinstance(aux.top_k, TopK) and aux.top_k.weights.dtype == dtype
    assert_close(aux.top_k.weights[..., :n], top[..., :n])
    seen = top[..., :n] > 0
    assert torch.equal(aux.top_k.indices[..., :n][seen], indices[..., :n][seen])
    assert bool((aux.top_k.indices[..., :n][~seen] == -1).all())
    assert not bool(aux.top_k.weights[..., n:].any()) and bool(
        (aux.top_k.indices[..., n:] == -1).all()
    )


@pytest.mark.parametrize("backend", ["chunked", "auto"])
@pytest.mark.parametrize(("sharpness", "limit"), [(1.0, 2e-6), (30.0, 3e-5)])
def test_entropy_is_close(sharpness, limit, backend):
    """Ordinary rows within 2e-6, and rows that look at one key almost alone within 3e-5."""
    query, key, value = draw(L=64, S=257, D=32)
    found = ask(query * sharpness, key, value, backend=backend).entropy
    weights = attention_by_definition(query * sharpness, key, value, return_aux=True)[2]
    gold = torch.special.entr(weights).sum(-1)
    assert float(gold.min()) < 0.1 or sharpness == 1
    assert float((found - gold).abs().max()) < limit


def test_blocked_and_huge_numbers_stay_out():
    """NaN and Inf where nobody may look change no bit; rows that see them are NaN, and no other."""
    query, key, value = draw(L=7)
    rules = {"key_mask": torch.tensor([[True] * 5 + [False] * 2]), "is_causal": True}
    for backend in ("chunked", "sdpa", "auto"):
        expected = ask(query, key, value, **rules, backend=backend)
        spoilt = key.clone()
        spoilt[:, :, 5], spoilt[:, :, 6] = math.nan, math.inf
        same(ask(query, spoilt, value, **rules, backend=backend), expected)
    spoilt = key.clone()
    spoilt[:, :, 3] = math.nan
    aux = ask(query, spoilt, value, is_causal=True, backend="chunked")
    assert bool(aux.entropy[:, :, 3:].isnan().all()) and bool(
        aux.entropy[:, :, :3].isfinite().all()
    )
    blocked = ask(query, spoilt, value, is_causal=True, window=(0, 0), backend="chunked")
    assert bool(blocked.entropy[:, :, 3].isnan().all())
    assert bool(blocked.previous_mass.eq(0).all())  # also of the row whose own key is NaN


# -- doors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "sdpa", "chunked"])
@pytest.mark.parametrize("name", ALL.asked)
def test_each_alone_is_what_it_is_among_all(name, backend):
    """To the budget of rounding, and nothing else comes back."""
    query, key, value = draw(L=7)
    rules = {"key_mask": torch.tensor([[True] * 5 + [False] * 2, [True] * 7]), "backend": backend}
    for request in (ALL, HEADS):
        alone = ask(query, key, value, **rules, request=request.only([name]))
        every = measured(ask(query, key, value, **rules, request=request))
        found = measured(alone)
        assert {n for n, v in vars(alone).items() if v is not None} == {name}
        for part, tensor in found.items():
            assert_close(tensor, every[part], equal_nan=True)


@pytest.mark.parametrize("request_", [ALL, HEADS], ids=str)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 2)])
def test_leading_axes(lead, request_):
    """Any number of them, for everything that comes back."""
    query, key, value = (torch.randn(*lead, heads, 7, 8) for heads in (4, 2, 2))
    key_mask = torch.rand(*lead, 7) < 0.7
    found = measured(ask(query, key, value, key_mask=key_mask, request=request_))
    flat = [t.reshape(-1, *t.shape[-3:]) for t in (query, key, value)]
    folded = measured(ask(*flat, key_mask=key_mask.reshape(-1, 7), request=request_))
    for name, tensor in found.items():
        assert tensor.shape[: len(lead) + 1] == (*lead, 4)
        assert_close(tensor, folded[name].view(tensor.shape), equal_nan=True)


@pytest.mark.parametrize("backend", ["native", "sdpa", "chunked"])
def test_gradients_flow_through_the_output_as_before(backend):
    leaves = [t.requires_grad_() for t in draw()]
    factor = torch.randn(2, 4, 5, 8)
    alone = torch.autograd.grad((attention(*leaves, backend=backend) * factor).sum(), leaves)
    out, aux = attention(*leaves, backend=backend, return_aux=ALL)
    beside = torch.autograd.grad((out * factor).sum(), leaves, retain_graph=True)
    for grad, other in zip(beside, alone, strict=True):
        assert torch.equal(grad, other)
    assert aux.lse.requires_grad and bool(torch.autograd.grad(aux.lse.sum(), leaves[:2])[0].any())
    for name in set(ALL.asked) - {"lse"}:
        value = getattr(aux, name)
        assert not (value.weights if name == "top_k" else value).requires_grad, name
    reduced = attention(*leaves, backend=backend, return_aux=HEADS)[1]
    assert not reduced.lse.mean.requires_grad and not reduced.key_mass.requires_grad


def test_autocast():
    """The statistics are of the tensors in autocast's dtype, in float32."""
    query, key, value = draw()
    with torch.autocast("cpu", torch.bfloat16):
        out, aux = attention(query, key, value, return_aux=ALL)
    half = attention(*(t.bfloat16() for t in (query, key, value)), return_aux=ALL)
    assert out.dtype == torch.bfloat16 and aux.entropy.dtype == torch.float32
    assert torch.equal(out, half[0])
    same(aux, half[1])


def test_dropout_is_not_in_them():
    """They are of the weights from before it, and asking draws no other numbers."""
    query, key, value = draw()
    torch.manual_seed(3)
    alone = attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(3)
    out, aux = attention(query, key, value, dropout_p=0.5, return_aux=ALL)
    assert torch.equal(out, alone)
    same(aux, ask(query, key, value, backend="chunked"))


@pytest.mark.parametrize("request_", [ALL, HEADS], ids=str)
def test_packed_sequences(request_):
    """Each as alone; of N sequences and of none; empty ones are without rows that count."""
    lengths, H = [(3, 4), (0, 2), (2, 0), (5, 5)], 4
    total_q, total_k = (sum(n) for n in zip(*lengths, strict=True))
    query, key, value = (torch.randn(n, H, 8) for n in (total_q, total_k, total_k))
    bounds = [torch.tensor(n).cumsum(0).tolist() for n in zip(*lengths, strict=True)]
    offsets = [torch.tensor([0, *b]) for b in bounds]
    out, aux = varlen_attention(query, key, value, *offsets, is_causal=True, return_aux=request_)
    assert torch.equal(out, varlen_attention(query, key, value, *offsets, is_causal=True))
    found, i, j = measured(aux), 0, 0
    for n, (L, S) in enumerate(lengths):
        parts = query[i : i + L], key[j : j + S], value[j : j + S]
        alone = ask(*(t.transpose(0, 1) for t in parts), is_causal=True, request=request_)
        for name, gold in measured(alone).items():
            if name == "key_mass":
                part, gold = found[name][j : j + S], gold.transpose(0, 1)
            elif request_.reduce is None:
                part, gold = found[name][i : i + L], gold.transpose(0, 1)
            else:
                part = found[name][n]
            assert_close(part, gold, equal_nan=True)
        i, j = i + L, j + S
    assert (i, j) == (total_q, total_k)

    none, zero = torch.randn(0, H, 8), torch.tensor([0])
    empty = measured(varlen_attention(none, none, none, zero, zero, return_aux=request_)[1])
    assert empty.keys() == found.keys()
    for name, tensor in empty.items():
        assert tensor.shape == (0, *found[name].shape[1:]) and tensor.dtype == found[name].dtype


def test_module():
    module, x = MultiHeadAttention(16, 4, 4, is_causal=True), torch.randn(2, 7, 16)
    key_mask = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    out, aux = module(x, key_mask=key_mask, return_aux=ALL)
    assert torch.equal(out, module(x, key_mask=key_mask))
    weights = module(x, key_mask=key_mask, return_aux=AuxRequest(weights=True))[1].weights
    assert_close(aux.entropy, torch.special.entr(weights).sum(-1).detach())
    _, heads = module(x, key_mask=key_mask, return_aux=HEADS)
    assert isinstance(heads.entropy, Summary) and heads.entropy.mean.shape == (2, 4)
    assert_close(heads.self_mass.mean[1], aux.self_mass[1, :, :5].mean(-1))
    assert module(x[0], return_aux=ALL)[1].top_k.indices.shape == (4, 7, 3)


@pytest.mark.parametrize("request_", [ALL, HEADS], ids=str)
@pytest.mark.parametrize("backend", ["native", "chunked"])
def test_compiled_in_one_graph(backend, request_):
    torch._dynamo.reset()
    query, key, value = draw(L=7)
    rules = {"key_mask": torch.tensor([[True] * 5 + [False] * 2, [True] * 7]), "is_causal": True}

    def call(query, key, value):
        return attention(query, key, value, **rules, backend=backend, return_aux=request_)

    out, aux = torch.compile(call, fullgraph=True, backend="aot_eager")(query, key, value)
    expected = call(query, key, value)
    assert_close(out, expected[0])
    for name, tensor in measured(aux).items():
        assert_close(tensor, measured(expected[1])[name], equal_nan=True)


@pytest.mark.parametrize("names", [",".join(ALL.asked), "key_mass", "top_k,distance"])
def test_opcheck(names):
    query, key, value = draw()
    p = Problem(query, key, value, mask=torch.rand(2, 1, 5, 7) < 0.7, sinks=torch.randn(4), right=0)
    others = p.float_mask, p.bias, p.sinks, p.alibi_slopes, p.mask, p.key_mask, p.doc_q, p.doc_k
    numbers = p.left, p.right, p.scale, p.softcap, names, 3
    torch.library.opcheck(ops.measure, (query, key, *others, *numbers))


def test_under_vmap_and_grad():
    query, key, value = draw()
    slopes = torch.rand(3, 4)

    def call(slopes):
        out, aux = attention(query, key, value, alibi_slopes=slopes, return_aux=ALL)
        return out, measured(aux)

    out, found = torch.func.vmap(call)(slopes)
    for n in range(3):
        expected = call(slopes[n])
        assert_close(out[n], expected[0])
        for name, tensor in expected[1].items():
            assert_close(found[name][n], tensor)

    def total(slopes):
        out, found = call(slopes)
        return out.sum() + sum(found[name].sum() for name in ROWS)

    def of_the_output(slopes):
        return call(slopes)[0].sum()

    grad = torch.func.grad(total)(slopes[0])
    assert_close(grad, torch.func.grad(of_the_output)(slopes[0]))


# -- who gives what -------------------------------------------------------------------------------


def test_explain_says_where_each_comes_from():
    query, key, value = draw(L=64, S=64)
    request = AuxRequest(lse=True, entropy=True, top_k=2)
    said = explain(query, key, value, backend="sdpa", return_aux=request)
    assert said.notes == (
        f"lse, entropy and top_k will come from a pass of {helper_of(request)} without values",
    )
    assert explain(query, key, value, backend="chunked", return_aux=request).notes == ()
    one = explain(query, key, value, backend="sdpa", return_aux=AuxRequest(weights=True))
    assert one.notes == ("weights will come from a pass of chunked without values",)


def helper_of(request):
    """native where it gives all of it, else chunked."""
    query, key, value = draw(L=64, S=64)
    problem = Problem(query, key, value, aux=request)
    able = native.why_not(problem) is None and set(request.asked) <= native.gives(problem)
    return "native" if able else "chunked"


def test_the_fastest_backend_that_gives_all_of_it_helps(monkeypatch):
    """Here one that claims to give entropy, and is not asked for what it does not give."""
    query, key, value = draw(L=64, S=64)
    asked = []

    def forward(problem):
        asked.append(problem.aux.asked)
        assert problem.value.shape[-1] == 1 and problem.dropout_p == 0
        return chunked.forward(problem)

    monkeypatch.setattr(native, "gives", lambda problem: {"lse", "entropy"})
    monkeypatch.setattr(native, "why_not", lambda problem: None)
    monkeypatch.setattr(native, "forward", forward)
    aux = ask(query, key, value, backend="sdpa", request=AuxRequest(entropy=True))
    assert asked == [["entropy"]] and aux.entropy.shape == (2, 4, 64)
    ask(query, key, value, backend="sdpa", request=AuxRequest(entropy=True, distance=True))
    assert asked == [["entropy"]]


def test_every_backend_gives_only_what_there_is():
    query, key, value = draw()
    problem = Problem(query, key, value, aux=ALL)
    known = {field.name for field in dataclasses.fields(Aux)}
    for backend in BACKENDS.values():
        assert set(backend.gives(problem)) <= known
    assert chunked.gives(problem) == known


def test_the_request_shows_what_it_asks_for():
    assert repr(HEADS.only(["top_k", "lse"])) == "AuxRequest(lse=True, top_k=3, reduce='head')"
    assert ALL.only([]) == AuxRequest() and AuxRequest(weights=True).asked == ["weights"]

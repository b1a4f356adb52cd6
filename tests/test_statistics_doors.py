"""Statistics through every door: gradients, packed, module, compiled, vmap; who gives what."""

import dataclasses

import pytest
import torch
from asked import HEADS, ROWS, ask, draw, same
from torch.testing import assert_close

from clearhead import (
    Aux,
    AuxRequest,
    MultiHeadAttention,
    Summary,
    attention,
    explain,
    varlen_attention,
)
from clearhead.backends import BACKENDS, chunked, native
from clearhead.backends import statistics as ops
from clearhead.problem import Problem
from clearhead.testing.statistics import ALL, measured

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


@pytest.mark.parametrize("reduce", [None, "head"])
def test_an_aux_may_be_what_a_function_returns(reduce):
    """vmap, torch.export and tracers ask of what they return where its tensors are."""

    class Layer(torch.nn.Module):
        def forward(self, query, key, value):
            asked = AuxRequest(entropy=True, top_k=2, reduce=reduce)
            return attention(query, key, value, return_aux=asked)

    tensors = torch.randn(3, 2, 3, 5, 4).unbind()
    expected = measured(Layer()(*tensors)[1])
    exported = torch.export.export(Layer(), tensors).module()
    for function in (torch.vmap(Layer()), exported):
        found = measured(function(*tensors)[1])
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_explain_says_where_each_comes_from():
    query, key, value = draw(L=64, S=64)
    request = AuxRequest(lse=True, entropy=True, top_k=2)
    said = explain(query, key, value, backend="sdpa", return_aux=request)
    assert said.notes == (
        f"lse, entropy and top_k will come from a pass of {helper_of(request)} without values",
    )
    assert explain(query, key, value, backend="chunked", return_aux=request).notes == ()
    one = AuxRequest(weights=True)
    for keys, other in (key, helper_of(one)), (key.clone().requires_grad_(), "chunked"):
        said = explain(query, keys, value, backend="sdpa", return_aux=one)
        assert said.notes == (f"weights will come from a pass of {other} without values",)


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
        assert problem.value.shape[-1] == 0 and problem.dropout_p == 0
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
    assert chunked.gives(problem) == known
    for backend in BACKENDS.values():
        assert set(backend.gives(problem)) <= {*known, "head_mask"}  # or that it multiplies by it


def test_the_request_shows_what_it_asks_for():
    assert repr(HEADS.only(["top_k", "lse"])) == "AuxRequest(lse=True, top_k=3, reduce='head')"
    assert ALL.only([]) == AuxRequest() and AuxRequest(weights=True).asked == ["weights"]

"""watch on packed sequences: a record of each, and one call of the kernels for all of them."""

import dataclasses

import pytest
import torch
from test_varlen import OPTIONS, offsets
from test_varlen_native import LENGTHS, calls, draw  # noqa: F401, calls is a fixture
from torch import nn

import clearhead
from clearhead import AuxRequest, Summary, attention, varlen_attention
from clearhead.inspection.watch import DEFAULT
from clearhead.testing.statistics import ALL

N = len(LENGTHS)
REQUESTS = {
    "a summary per head": DEFAULT,
    "every statistic": ALL,
    "summaries of every statistic": dataclasses.replace(ALL, reduce="head"),
    "without lse": AuxRequest(entropy=True),
    "more than the kernels give": AuxRequest(top_k=17),
}


class Packed(nn.Module):
    """A layer that attends within packed sequences."""

    def forward(self, *tensors, **rules):
        return varlen_attention(*tensors, *offsets(LENGTHS), **rules)


class Alone(nn.Module):
    """The same, sequence by sequence; those without rows or keys, too."""

    def forward(self, *tensors, **rules):
        starts = [t.tolist() for t in offsets(LENGTHS)]
        for n in range(N):
            rows, keys = (slice(*bounds[n : n + 2]) for bounds in starts)
            parts = tensors[0][rows], tensors[1][keys], tensors[2][keys]
            own = {k: t[n] if isinstance(t, torch.Tensor) and t.ndim == 2 else t
                   for k, t in rules.items()}  # fmt: skip
            attention(*(t.transpose(0, 1) for t in parts), **own)


def flat(aux):
    """All tensors of an Aux by name."""
    for field in dataclasses.fields(aux):
        value = getattr(aux, field.name)
        if isinstance(value, tuple):
            yield from ((f"{field.name}.{n}", part) for n, part in enumerate(value))
        elif value is not None:
            yield field.name, value


def assert_same(records, others):
    """To the bit."""
    assert len(records) == len(others) > 0
    for record, other in zip(records, others, strict=True):
        for name in ("layer", "number", "step", "kind", "heads", "L", "S"):
            assert getattr(record, name) == getattr(other, name)
        assert (record.rows is None) == (other.rows is None)
        if record.rows is not None:
            assert torch.equal(record.rows, other.rows)
        mine, theirs = dict(flat(record.aux)), dict(flat(other.aux))
        assert mine.keys() == theirs.keys() and mine
        for name, tensor in mine.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True)


def watched(module, tensors, rules, **asked):
    with clearhead.watch(module, **asked) as seen:
        out = module(*tensors, **rules)
    return out, seen


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_has_the_record_that_it_has_alone(name, request_, calls):  # noqa: F811
    tensors, rules, aux = draw(), OPTIONS[name], REQUESTS[request_]
    plain = Packed()(*tensors, **rules)
    del calls[:]
    out, seen = watched(Packed(), tensors, rules, aux=aux)
    assert torch.equal(out, plain)
    if aux.top_k <= 16:
        assert calls == [N, N]
    _, expected = watched(Alone(), tensors, rules, aux=aux)
    for record in expected:  # only the name of the class is another
        object.__setattr__(record, "layer", record.layer.replace("Alone", "Packed"))
    assert_same(seen.records, expected.records)
    assert seen.layers == ["Packed", *(f"Packed#{n}" for n in range(1, N))]


def test_some_heads_of_some_sequences(calls):  # noqa: F811
    tensors, rules = draw(), OPTIONS["everything"]
    _, whole = watched(Packed(), tensors, rules, aux=ALL)
    del calls[:]
    _, seen = watched(Packed(), tensors, rules, aux=ALL, heads=[5, 1], layers=[2, "Packed#6"])
    assert calls == [N, N]
    assert [record.number for record in seen] == [2, 6]
    for record in seen:
        other = whole.records[record.number]
        assert torch.equal(record.aux.entropy, other.aux.entropy[:, [5, 1]])
        assert torch.equal(record.aux.key_mass, other.aux.key_mass[:, [5, 1]])


def test_weights_and_heads_taken_out_are_each_one_s(calls):  # noqa: F811
    tensors = draw()
    plain = Packed()(*tensors)
    out, seen = watched(Packed(), tensors, {}, aux=AuxRequest(weights=True))
    assert torch.equal(out, plain)
    for n, (rows, keys) in enumerate(LENGTHS):
        assert seen.maps(n).shape == (1, plain.shape[1], rows, keys)
    out, _ = watched(Packed(), tensors, {}, ablate={"Packed#2": [3]})
    gone = out != plain
    start = sum(rows for rows, _ in LENGTHS[:2])
    assert not out[start : start + LENGTHS[2][0], 3].any()
    gone[start : start + LENGTHS[2][0], 3] = False
    assert not gone.any()


def test_gradients_keep_their_bits():
    tensors = [t.requires_grad_() for t in draw()]

    def gradients():
        return torch.autograd.grad(Packed()(*tensors).square().sum(), tensors)

    plain = gradients()
    with clearhead.watch() as seen:
        assert all(map(torch.equal, gradients(), plain))
    assert len(seen) == N
    assert all(isinstance(record.aux.entropy, Summary) for record in seen)


def test_calls_without_values_ask_for_statistics_and_are_not_recorded():
    query, key, value = draw()
    with clearhead.watch() as seen:
        varlen_attention(query, key, value[..., :0], *offsets(LENGTHS), return_aux=ALL)
        with pytest.raises(ValueError, match="^varlen_attention: cu_seqlens_q is"):
            varlen_attention(query, key, value, torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert len(seen) == 0


def test_a_trace_takes_one_of_them():
    tensors = draw()
    steps = clearhead.trace(Packed(), tensors, layer="Packed#3", heads=[4])
    made = {step.name: step.values for step in steps}
    out = Packed()(*tensors)
    start = sum(rows for rows, _ in LENGTHS[:3])
    expected = out[start : start + LENGTHS[3][0], 4]
    torch.testing.assert_close(made["context"][0], expected, atol=2e-6, rtol=0)

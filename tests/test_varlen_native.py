"""varlen_attention on the native kernels: one call for all sequences, and nobody can tell."""

import dataclasses

import pytest
import torch
from test_varlen import DV, HKV, OPTIONS, D, H, alone, definition, offsets, rival
from torch.overrides import TorchFunctionMode

from clearhead import AuxRequest, attention, explain, functional, kinds, varlen_attention
from clearhead.backends import fields, library
from clearhead.testing import assert_within_budget
from clearhead.testing.statistics import ALL, measured

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (queries, keys): eight sequences, as the slopes and head masks of OPTIONS have rows. In each with
# both a key serves more than four rows, as native has them by itself in float32 too.
LENGTHS = ((5, 5), (0, 4), (70, 190), (7, 3), (3, 0), (0, 0), (130, 130), (48, 1100))
LSE = AuxRequest(lse=True)


def draw(lengths=LENGTHS, dtype=torch.float32):
    rows, keys = (sum(column) for column in zip(*lengths, strict=True))
    shapes = (rows, H, D), (keys, HKV, D), (keys, HKV, DV)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def of_each(tensors, lengths, request=None, **rules):
    """What attention gives each sequence that has rows and keys: (rows, keys, out, statistics by
    name, as packed), where rows and keys are slices of the packed ones."""
    starts = [t.tolist() for t in offsets(lengths)]
    for n, size in enumerate(lengths):
        if not all(size):
            continue
        rows, keys = (slice(*bounds[n : n + 2]) for bounds in starts)
        parts = tensors[0][rows], tensors[1][keys], tensors[2][keys]
        own = {k: t[n] if isinstance(t, torch.Tensor) and t.ndim == 2 else t
               for k, t in rules.items()}  # fmt: skip
        out = attention(*(t.transpose(0, 1) for t in parts), **own, return_aux=request)
        out, aux = out if request is not None else (out, None)
        found = {} if aux is None else measured(aux)
        yield rows, keys, out.transpose(0, 1), {k: t.transpose(0, 1) for k, t in found.items()}


@pytest.fixture
def calls(monkeypatch):
    """How many sequences each call of the library had."""
    lib, counted = library.find_library(), []

    def forward(call):
        status = lib.forward(call)
        if status == 0:  # not one that asks for a larger workspace
            counted.append(fields.CALL.unpack(call)[8])
        return status

    monkeypatch.setattr(library, "_loaded", [lib._replace(forward=forward)])
    return counted


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# -- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_one_call_gives_each_the_bits_that_it_has_alone(name, dtype, calls):
    """With and without statistics, native named or not; what sees no key is 0."""
    tensors, rules = draw(dtype=dtype), OPTIONS[name]
    out, aux = varlen_attention(*tensors, *offsets(LENGTHS), **rules, return_aux=ALL)
    assert calls == [len(LENGTHS)]
    assert torch.equal(out, varlen_attention(*tensors, *offsets(LENGTHS), **rules))
    named = varlen_attention(*tensors, *offsets(LENGTHS), **rules, backend="native")
    assert torch.equal(out, named)
    assert calls == [len(LENGTHS)] * 3
    assert out.is_contiguous() and out.dtype == dtype
    found = measured(aux)
    used = torch.zeros(len(out), dtype=torch.bool)
    for rows, keys, right, statistics in of_each(tensors, LENGTHS, ALL, **rules):
        assert torch.equal(out[rows], right)
        used[rows] = True
        assert statistics.keys() == found.keys()
        for key, other in statistics.items():
            where = keys if key == "key_mass" else rows
            assert torch.equal(found[key][where], other), key
            assert found[key].is_contiguous() and not found[key].requires_grad
    assert int((~used).sum()) == 3 and not bool(out[~used].any())
    assert bool((aux.lse[~used] == -torch.inf).all())
    assert bool((aux.top_k.indices[~used] == -1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_what_the_definition_says(name, dtype):
    rules = {k: t.to(dtype) if isinstance(t, torch.Tensor) else t
             for k, t in OPTIONS[name].items()}  # fmt: skip
    tensors = draw(dtype=dtype)
    out, aux = varlen_attention(*tensors, *offsets(LENGTHS), **rules, return_aux=LSE)
    gold, gold_lse = alone(definition, tensors, LENGTHS, rules)
    peer, peer_lse = alone(rival, tensors, LENGTHS, rules)
    assert_within_budget(out, gold, peer)
    assert_within_budget(aux.lse, gold_lse, peer_lse, "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_nothing(dtype, two_threads, calls):
    tensors, rules = draw(dtype=dtype), OPTIONS["everything"]
    two = varlen_attention(*tensors, *offsets(LENGTHS), **rules, return_aux=ALL)
    torch.set_num_threads(1)
    one = varlen_attention(*tensors, *offsets(LENGTHS), **rules, return_aux=ALL)
    assert calls == [len(LENGTHS)] * 2
    assert torch.equal(two[0], one[0])
    for name, tensor in measured(two[1]).items():
        assert torch.equal(tensor, measured(one[1])[name]), name


@pytest.mark.parametrize("change", [
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),  # heads first
    lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],  # columns of a wider tensor
    lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),  # the last axis is not dense
    lambda t: torch.cat([t, t])[len(t) :],
], ids=["heads first", "columns", "size before heads", "rows"])  # fmt: skip
def test_however_the_rows_lie_in_memory(change, calls):
    tensors = draw()
    expected = varlen_attention(*tensors, *offsets(LENGTHS), is_causal=True)
    out = varlen_attention(*map(change, tensors), *offsets(LENGTHS), is_causal=True)
    assert torch.equal(out, expected) and out.is_contiguous()
    assert calls == [len(LENGTHS)] * 2


@pytest.mark.parametrize("lengths", [((9, 9),), ((0, 0), (6, 5)), ((6, 5), (0, 7), (4, 0))])
def test_few_sequences(lengths, calls):
    tensors = draw(lengths)
    out, aux = varlen_attention(*tensors, *offsets(lengths), return_aux=ALL)
    assert calls == [len(lengths)]
    for rows, keys, right, statistics in of_each(tensors, lengths, ALL):
        assert torch.equal(out[rows], right)
        assert torch.equal(aux.key_mass[keys], statistics["key_mass"])


def test_autocast(calls):
    tensors = draw()
    with torch.autocast("cpu", torch.bfloat16):
        out, aux = varlen_attention(*tensors, *offsets(LENGTHS), return_aux=LSE)
    half = [t.bfloat16() for t in tensors]
    expected, other = varlen_attention(*half, *offsets(LENGTHS), return_aux=LSE)
    assert calls == [len(LENGTHS)] * 2
    assert torch.equal(out, expected) and torch.equal(aux.lse, other.lse)


@pytest.fixture
def no_kinds(monkeypatch):
    monkeypatch.setattr(kinds, "_known", {})


@pytest.mark.parametrize("name", OPTIONS)
def test_the_second_call_of_a_kind_is_not_checked_and_gives_the_same_bits(
    name, no_kinds, monkeypatch, calls
):
    """However long its sequences are, and wherever they lie."""
    short, rules = [(3, 4)] * len(LENGTHS), OPTIONS[name]
    tensors = draw()
    first = varlen_attention(*tensors, *offsets(LENGTHS), **rules)
    few = draw(short)
    expected = [(rows, right) for rows, _, right, _ in of_each(few, short, **rules)]
    monkeypatch.setattr(functional, "make_problem", None)
    again = varlen_attention(*tensors, *offsets(LENGTHS), **rules)
    assert torch.equal(again, first) and again.is_contiguous()
    out = varlen_attention(*few, *offsets(short), **rules)
    for rows, right in expected:
        assert torch.equal(out[rows], right)
    assert calls.count(len(LENGTHS)) == 3


def test_statistics_of_the_second_call_of_a_kind(no_kinds, monkeypatch):
    request = dataclasses.replace(ALL, reduce=None)
    tensors = draw()
    first, expected = varlen_attention(*tensors, *offsets(LENGTHS), return_aux=request)
    monkeypatch.setattr(functional, "make_problem", None)
    out, aux = varlen_attention(*tensors, *offsets(LENGTHS), return_aux=request)
    assert torch.equal(out, first)
    for (name, found), (_, other) in zip(
        sorted(measured(aux).items()), sorted(measured(expected).items()), strict=True
    ):
        assert torch.equal(found, other), name


def test_what_is_wrong_stays_wrong_after_a_call_of_its_kind(no_kinds):
    tensors = draw()
    cu_q, cu_k = offsets(LENGTHS)
    slopes = torch.rand(len(LENGTHS), H)
    varlen_attention(*tensors, cu_q, cu_k, alibi_slopes=slopes)
    assert len(kinds._known) == 1
    joined_q, joined_k = (torch.cat([t[:1], t[2:]]) for t in (cu_q, cu_k))
    with pytest.raises(ValueError, match="alibi_slopes has shape"):
        varlen_attention(*tensors, joined_q, joined_k, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="it must start at 0, never fall"):
        varlen_attention(*tensors, cu_q.flip(0), cu_k, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="they must count the same"):
        varlen_attention(*tensors, cu_q, joined_k, alibi_slopes=slopes)
    with pytest.raises(TypeError, match="scale is a bool"):
        varlen_attention(*tensors, cu_q, cu_k, scale=True)
    with pytest.raises(TypeError, match="value has dtype torch.float16, query has torch.float32"):
        varlen_attention(*tensors[:2], tensors[2].half(), cu_q, cu_k, alibi_slopes=slopes)


# -- when each has its own call -------------------------------------------------------------------


REQUESTS = ALL, dataclasses.replace(ALL, top_k=17), dataclasses.replace(ALL, reduce="head")


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_what_else_is_asked_for_changes_no_bit_of_the_output(request_, calls):
    tensors = draw()
    alone = varlen_attention(*tensors, *offsets(LENGTHS), is_causal=True)
    del calls[:]
    out, aux = varlen_attention(*tensors, *offsets(LENGTHS), is_causal=True, return_aux=request_)
    assert torch.equal(out, alone) and aux.top_k is not None
    assert calls == [len(LENGTHS)] if request_ == ALL else set(calls) == {1}


@pytest.mark.parametrize("which", ["query", "key", "value", "sinks", "alibi_slopes", "head_mask"])
def test_gradients(which, calls):
    """Each sequence has its own calls then, with the same bits, and the gradients of attention."""
    tensors, rules = draw(), OPTIONS["everything"]
    named = dict(zip(("query", "key", "value"), tensors, strict=True)) | {
        k: t for k, t in rules.items() if isinstance(t, torch.Tensor)
    }
    expected = varlen_attention(*tensors, *offsets(LENGTHS), **rules)
    assert calls == [len(LENGTHS)]
    leaf = named[which].clone().requires_grad_()
    given = {**rules, **named, which: leaf}
    cumulated = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets(LENGTHS), strict=True))
    out = varlen_attention(**given, **cumulated)
    assert torch.equal(out, expected) and set(calls[1:]) == {1}
    d_out = torch.randn(out.shape)
    (grad,) = torch.autograd.grad(out, leaf, d_out)
    packed = [given.pop(name) for name in ("query", "key", "value")]
    total = sum((right * d_out[rows]).sum() for rows, _, right, _ in
                of_each(packed, LENGTHS, **given))  # fmt: skip
    torch.testing.assert_close(grad, torch.autograd.grad(total, leaf)[0], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        del calls[:]
        assert torch.equal(varlen_attention(*packed, **cumulated, **given), expected)
    assert calls == [len(LENGTHS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_has_the_backend_that_it_has_alone(dtype, calls):
    """Native is each one's by itself, steps of decoding too, so they share one call of it."""
    lengths = ((1, 30), (40, 40), (1, 7))
    tensors = draw(lengths, dtype)
    out = varlen_attention(*tensors, *offsets(lengths))
    assert calls == [3]
    for rows, keys, right, _ in of_each(tensors, lengths):
        assert torch.equal(out[rows], right)
        parts = tensors[0][rows], tensors[1][keys], tensors[2][keys]
        assert explain(*(t.transpose(0, 1) for t in parts)).backend == "native"
    del calls[:]
    for rules in ({"backend": "native"}, {"deterministic": True}):
        out = varlen_attention(*tensors, *offsets(lengths), **rules)
        assert calls == [3]
        for rows, _, right, _ in of_each(tensors, lengths, **rules):
            assert torch.equal(out[rows], right)
        del calls[:]


@pytest.mark.parametrize("rules", [{"backend": "sdpa"}, {"backend": "chunked"},
                                   {"dropout_p": 0.5}], ids=str)  # fmt: skip
def test_other_backends_have_a_call_each(rules, calls):
    lengths = ((6, 6), (9, 12))
    tensors = [t[..., :D] for t in draw(lengths)]
    torch.manual_seed(4)
    out = varlen_attention(*tensors, *offsets(lengths), **rules)
    torch.manual_seed(4)
    for rows, _, right, _ in of_each(tensors, lengths, **rules):
        assert torch.equal(out[rows], right)
    assert calls == []


def test_a_mode_sees_the_call_of_all(calls):
    """And may hand it on as a call of each, as watch does where each must be seen."""
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (attention, varlen_attention):
                seen.append(func)
            if func is varlen_attention and self.takes_apart:
                with self:
                    return func.__wrapped__(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    tensors = draw()
    expected = varlen_attention(*tensors, *offsets(LENGTHS))
    for apart, functions in ((False, []), (True, [attention] * len(LENGTHS))):
        del seen[:], calls[:]
        mode = Mode()
        mode.takes_apart = apart
        with mode:
            assert torch.equal(varlen_attention(*tensors, *offsets(LENGTHS)), expected)
        assert seen == [varlen_attention, *functions]
        assert set(calls) == {1 if apart else len(LENGTHS)}


def test_under_vmap(calls):
    """Over slopes: the kernels have no rule for that, so other backends serve."""
    tensors, slopes = draw(), torch.rand(3, H)

    def call(slopes):
        return varlen_attention(*tensors, *offsets(LENGTHS), alibi_slopes=slopes)

    out = torch.func.vmap(call)(slopes)
    assert calls == []
    for n in range(3):
        torch.testing.assert_close(out[n], call(slopes[n]))


# -- empty ones and errors ------------------------------------------------------------------------


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, ((0, 3), (2, 0)), ((0, 0),), ()], ids=str)
def test_empty_sequences_do_not_stop_a_named_backend(lengths, needs_grad):
    sizes = lengths or ((0, 0),)
    tensors = [t.requires_grad_(needs_grad) for t in draw(sizes)]
    cumulated = offsets(lengths) if lengths else (torch.tensor([0]), torch.tensor([0]))
    out, aux = varlen_attention(*tensors, *cumulated, backend="native", return_aux=ALL)
    expected, other = varlen_attention(*tensors, *cumulated, backend="chunked", return_aux=ALL)
    torch.testing.assert_close(out, expected)
    assert out.shape == (len(tensors[0]), H, DV)
    for name, tensor in measured(aux).items():
        if name != "indices":
            torch.testing.assert_close(tensor, measured(other)[name], atol=2e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="backend is 'nativ'; it must be one of"):
        varlen_attention(*tensors, *cumulated, backend="nativ")


@pytest.mark.parametrize("more", [-1, 1])
def test_as_many_values_as_keys(more):
    query, key = torch.randn(2, 7, 2, 8)
    cumulated = torch.tensor([0, 3, 7])
    with pytest.raises(ValueError, match=f"end at the {7 + more} rows of value"):
        varlen_attention(query, key, torch.randn(7 + more, 2, 8), cumulated, cumulated)


def test_errors_are_those_of_the_first_sequence():
    query, key = torch.randn(7, 4, 8), torch.randn(7, 3, 8)
    cumulated = torch.tensor([0, 5, 7])
    with pytest.raises(ValueError, match="query has 4 heads and key has 3"):
        varlen_attention(query, key, key, cumulated, cumulated)
    with pytest.raises(ValueError, match=r"key has shape \(4, 5, 6\)"):
        varlen_attention(query, query[..., :6], query, cumulated, cumulated)
    with pytest.raises(TypeError, match="sinks has dtype torch.int64"):
        varlen_attention(query, query, query, cumulated, cumulated, sinks=torch.ones(4).long())
    with pytest.raises(NotImplementedError, match="its kernels compute in float32"):
        rows = query.double()
        varlen_attention(rows, rows, rows, cumulated, cumulated, backend="native")

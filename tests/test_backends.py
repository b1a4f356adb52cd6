"""Every backend on every case it claims, in every dtype: output, lse, weights, gradients."""

import itertools

import pytest
import torch

from clearhead import AuxRequest, attention, attention_by_definition, explain
from clearhead.backends import BACKENDS, blocks
from clearhead.testing import CASES, PLANTED_BUGS, assert_within_budget, check, plain

HALF = (torch.bfloat16, torch.float16)
FULL = (torch.float32, torch.float64)
NAMES = {case.name: case for case in CASES}


def claims(backend, case, dtype, gradients):
    """Whether explain says that the backend serves the case."""
    query, key, value, rules = case.make(dtype)
    query.requires_grad_(gradients)
    for tensor in rules.values():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.requires_grad_(gradients)
    return explain(query, key, value, **rules, backend=backend).backend is not None


CLAIMED_BY_SDPA = [
    (case.name, dtype, gradients)
    for case, dtype, gradients in itertools.product(CASES, FULL + HALF, (False, True))
    if claims("sdpa", case, dtype, gradients)
]


def test_names_of_cases_are_unique():
    assert len(NAMES) == len(CASES)


@pytest.mark.parametrize("dtype", FULL + HALF, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_chunked(name, dtype):
    check(NAMES[name], dtype=dtype, backend="chunked")


@pytest.mark.parametrize("scores", [1, 40, 300])
@pytest.mark.parametrize("name", NAMES)
def test_chunked_in_small_blocks(name, scores, monkeypatch):
    """With small blocks the small cases are cut by rows, heads and items as large calls are."""
    monkeypatch.setattr(blocks, "BLOCK", scores)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    check(NAMES[name], backend="chunked")


@pytest.mark.parametrize("name", NAMES)
def test_chunked_deterministic(name):
    def attend(**arguments):
        return attention(**arguments, deterministic=True)

    check(NAMES[name], attend, backend="chunked")


@pytest.mark.parametrize(("name", "dtype", "gradients"), CLAIMED_BY_SDPA, ids=str)
def test_sdpa(name, dtype, gradients):
    check(NAMES[name], dtype=dtype, backend="sdpa", gradients=gradients, aux=False)


def test_sdpa_claims_what_it_is_there_for():
    claimed = {name for name, dtype, gradients in CLAIMED_BY_SDPA if dtype == torch.float32}
    assert {"plain", "causal square", "causal with a past", "key mask", "bool mask"} <= claimed
    assert ("float mask", torch.float32, False) in CLAIMED_BY_SDPA


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gradients", [False, True])
def test_auto_runs_what_explain_names(name, gradients):
    """The same bits as the named backend, and nothing raises."""
    query, key, value, rules = NAMES[name].make()
    query.requires_grad_(gradients)
    chosen = explain(query, key, value, **rules)
    out = attention(query, key, value, **rules)
    assert torch.equal(out, attention(query, key, value, **rules, backend=chosen.backend))
    assert set(chosen.reasons) == set(BACKENDS) - {chosen.backend}
    for other, reason in chosen.reasons.items():
        serves = explain(query, key, value, **rules, backend=other)
        if reason.startswith("would serve"):
            assert serves.backend == other
        else:
            assert serves.backend is None and serves.reasons[other] == reason
            with pytest.raises(NotImplementedError) as raised:
                attention(query, key, value, **rules, backend=other)
            assert str(raised.value).startswith(f'attention(backend="{other}"): {reason}; ')


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal square", "everything", "documents"])
def test_asking_for_more_does_not_change_the_output(name, dtype):
    """Neither lse, weights, nor gradients do, beyond the budget; within a backend not one bit."""
    query, key, value, rules = NAMES[name].make(dtype)
    alone = attention(query, key, value, **rules, backend="chunked")
    request = AuxRequest(lse=True, weights=True)
    out, aux = attention(query, key, value, **rules, backend="chunked", return_aux=request)
    assert torch.equal(out, alone)
    assert aux.lse.dtype == aux.weights.dtype == torch.float32
    query.requires_grad_()
    assert torch.equal(attention(query, key, value, **rules, backend="chunked").detach(), alone)
    request = AuxRequest(lse=True)
    only_lse = attention(query, key, value, **rules, backend="chunked", return_aux=request)[1]
    assert torch.equal(only_lse.lse, aux.lse) and only_lse.weights is None


@pytest.mark.parametrize("backend", ["native", "sdpa", "chunked", "auto"])
@pytest.mark.parametrize("name", ["plain", "causal square", "key mask"])
def test_every_backend_returns_lse_and_weights_beside_the_same_output(backend, name):
    """What it has not itself is computed beside it, and explain says so."""
    query, key, value, rules = NAMES[name].make()
    alone = attention(query, key, value, **rules, backend=backend)
    request = AuxRequest(lse=True, weights=True)
    out, aux = attention(query, key, value, **rules, backend=backend, return_aux=request)
    assert torch.equal(out, alone)
    _, lse, weights = attention_by_definition(query, key, value, **rules, return_aux=True)
    assert_within_budget(aux.lse, lse, plain(query, key, value, **rules)[1], "lse")
    assert_within_budget(aux.weights, weights, plain(query, key, value, **rules)[2], "weights")
    notes = explain(query, key, value, **rules, backend=backend, return_aux=request).notes
    said = [note for note in notes if note.endswith("from a pass of native without values")]
    assert len(said) == (backend == "sdpa")


# Bugs in what sdpa does not serve: it has no case in which they could show.
HIDDEN_FROM_SDPA = {
    *("softcap after mask", "sinks ignored", "weights renormalised beside a sink"),
    *("lse in base 2", "empty rows average", "scale 0 taken for none"),
    *("no gradient to a mask", "no gradient to a bias", "no gradient to sinks"),
    *("no gradient to slopes",),
}


def notices(bug, backend, gradients, aux):
    """Whether one of the cases that the real backend passes above fails with the bug in place."""
    broken = PLANTED_BUGS[bug](attention)
    for case in CASES:
        if not claims(backend, case, torch.float32, gradients):
            continue
        try:
            check(case, broken, backend=backend, gradients=gradients, aux=aux)
        except AssertionError:
            return True
        except NotImplementedError:
            continue  # the bug turned the call into one that the backend does not serve
    return False


@pytest.mark.parametrize("backend", ["native", "chunked"])
@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_every_planted_bug_is_caught(bug, backend):
    assert notices(bug, backend, gradients=True, aux=True)


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_every_planted_bug_that_sdpa_could_have_is_caught(bug):
    caught = any(notices(bug, "sdpa", gradients, aux=False) for gradients in (True, False))
    assert caught == (bug not in HIDDEN_FROM_SDPA)

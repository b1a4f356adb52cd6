"""Every statistic on every backend, held to the definition case by case."""

import dataclasses

import pytest
import torch

from clearhead import attention, explain
from clearhead.backends import blocks, flex
from clearhead.testing import CASES, PLANTED_STATISTICS, check_statistics

NAMES = {case.name: case for case in CASES}
WIDER = {name: dataclasses.replace(case, D=16, Dv=16) for name, case in NAMES.items()}
DTYPES = (torch.float64, torch.bfloat16, torch.float16)
REDUCE = pytest.mark.parametrize("reduce", [None, "head"])


def claims(backend, case):
    query, key, value, rules = case.make()
    return explain(query, key, value, **rules, backend=backend).backend is not None


def claimed_by(*backends):
    return [(n, b) for n, case in NAMES.items() for b in backends if claims(b, case)]


@REDUCE
@pytest.mark.parametrize(("name", "backend"), claimed_by("native", "sdpa", "chunked"))
def test_every_backend(name, backend, reduce):
    check_statistics(NAMES[name], backend=backend, reduce=reduce)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes(name, dtype):
    """Of half types the statistics are those of the rounded inputs, in float32."""
    check_statistics(NAMES[name], dtype=dtype)


@REDUCE
@pytest.mark.parametrize("scores", [1, 300])
@pytest.mark.parametrize("name", NAMES)
def test_in_small_blocks(name, scores, reduce, monkeypatch):
    """With small blocks the small cases are cut by rows, heads and items as large calls are."""
    monkeypatch.setattr(blocks, "BLOCK", scores)
    monkeypatch.setattr(blocks, "MIN_ROWS", 2)
    check_statistics(NAMES[name], backend="chunked", reduce=reduce)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic(name):
    def attend(**arguments):
        return attention(**arguments, deterministic=True)

    check_statistics(NAMES[name], attend)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["plain", "everything, square", "key mask", "sinks", "documents"])
def test_flex_uncompiled(name, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    monkeypatch.setattr(flex, "_why_not_on_cpu", lambda problem: None)
    monkeypatch.setattr(flex, "gives", lambda problem: {"lse"})
    check_statistics(WIDER[name], backend="flex")


# -- planted bugs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "huge row", "everything, square"])
@pytest.mark.parametrize("statistic", ["entropy", "key_mass", "distance", "lse"])
def test_two_orders_of_a_sum_in_float64_still_tell_a_wrong_digit(name, statistic):
    """The budget of float64 is that of the worse of two peers: far below one part in 10^13."""

    def broken(**arguments):
        if "return_aux" not in arguments:
            return attention(**arguments)
        out, aux = attention(**arguments)
        return out, dataclasses.replace(aux, **{statistic: getattr(aux, statistic) * (1 + 1e-13)})

    with pytest.raises(AssertionError, match="over the budget"):
        check_statistics(NAMES[name], broken, dtype=torch.float64)


def notices(bug, backend):
    """Whether one of the cases that the real backend passes above fails with the bug in place."""
    broken = PLANTED_STATISTICS[bug](attention)
    for case in CASES:
        for reduce in (None, "head"):
            try:
                if claims(backend, case):
                    check_statistics(case, broken, backend=backend, reduce=reduce)
            except AssertionError:
                return True
    return False


@pytest.mark.parametrize("backend", ["native", "chunked"])
@pytest.mark.parametrize("bug", PLANTED_STATISTICS)
def test_every_planted_bug_is_caught(bug, backend):
    assert notices(bug, backend)


def test_a_changed_output_is_caught():
    def changes(*, return_aux=None, **arguments):
        if return_aux is None:
            return attention(**arguments)
        out, aux = attention(**arguments, return_aux=return_aux)
        return out * (1 + 1e-6), aux

    with pytest.raises(AssertionError, match="asking for statistics changed the output"):
        check_statistics(NAMES["plain"], changes)


def test_a_missing_statistic_is_caught():
    def forgets(*, return_aux=None, **arguments):
        result = attention(**arguments, return_aux=return_aux)
        if return_aux is None:
            return result
        return result[0], dataclasses.replace(result[1], entropy=None)

    with pytest.raises(AssertionError, match="returned .*, not .*entropy"):
        check_statistics(NAMES["plain"], forgets)


def test_a_key_listed_twice_is_caught():
    def doubles(*, return_aux=None, **arguments):
        result = attention(**arguments, return_aux=return_aux)
        if return_aux is None:
            return result
        indices = result[1].top_k.indices[..., :1].expand(-1, -1, -1, 3)
        return result[0], dataclasses.replace(
            result[1], top_k=result[1].top_k._replace(indices=indices)
        )

    with pytest.raises(AssertionError, match="the same key twice"):
        check_statistics(NAMES["ties"], doubles)

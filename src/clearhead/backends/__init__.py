"""Which backend runs a call, and why not each other one.

A backend is a module with NAME, why_not(problem) -> a sentence or None, describe(problem) -> how
it would run the call, forward(problem) -> (out, Aux), gives(problem) -> what of an AuxRequest is in
that Aux, and "head_mask" if out has that factor, and leaks(problem) -> whether NaN or Inf could
reach rows that must not see it. It never imports another backend.
"""

import dataclasses
from types import ModuleType

import torch
from torch import Tensor

from ..problem import Problem
from ..results import Aux
from . import chunked, flex, native, sdpa

BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (native, sdpa, flex, chunked)}


def preference(problem: Problem) -> list[ModuleType]:
    """The backends from the fastest to the slowest for a call, whether they can serve it or not."""
    if problem.device.type == "cpu":
        # What is decided about native must rest on no length and no contents: clearhead.kinds keeps
        # it for decoding, and varlen_attention for sequences of any length.
        # flex compiles for seconds per kind of call, so on a CPU it runs only when asked for.
        torchs = [chunked, sdpa] if _passes_over(problem) else [sdpa, chunked]
        return [native, *torchs, flex]
    if problem.visibility.limits == (None, 0) and not problem.visibility.by_data:
        return [sdpa, flex, chunked, native]
    fused = [sdpa, flex] if problem.visibility.full else [flex, sdpa]
    return [*fused, chunked, native]


def _passes_over(p: Problem) -> bool:
    """Whether, on a CPU, chunked beats a fused kernel that computes the whole square.

    Measured with torch 2.13 on two x86-64 cores, 2026-11: a window of half the keys from S = 1024
    on 1.1 times, an eighth 1.5, 256 of 4096 four times; four packed documents at 1024 two times;
    one row of grouped heads 1.2 times in float32, 2.9 in bfloat16.
    """
    if torch.compiler.is_compiling():
        return False
    if p.L == 1 and p.G > 1:
        return True
    left, right = p.visibility.limits
    narrow = left is not None and 2 * (left + 1 + (p.S if right is None else right)) <= p.S
    return p.S >= 1024 and (narrow or p.doc_q is not None)


def why_later(problem: Problem, backend: ModuleType, chosen: ModuleType) -> str:
    """Why a backend that could serve a call is not the one that does."""
    if problem.device.type == "cpu" and backend is flex:
        return "would serve, but compiles for seconds, so on a CPU it runs only when asked for"
    order = preference(problem)
    if chosen.why_not(problem) is not None:
        return "would serve"
    if order.index(backend) < order.index(chosen):
        return f"would serve, and is faster for this kind of call, but {chosen.NAME} was asked for"
    return f"would serve, but {chosen.NAME} is faster for this kind of call"


def run(problem: Problem, name: str = "auto") -> tuple[Tensor, Aux]:
    """Run a call on the backend that `choose` gives: out (B, H, L, Dv), and what aux asks for.

    What it cannot return beside its output comes from a pass without values (`helper`), so that
    asking for more never changes the output.
    Where that backend would leak NaN, Inf or overflow, it gets 0 in their place, so that rows which
    may not see them keep their bits; rows that may are chunked's.
    """
    backend = choose(problem, name)
    out, aux = _guarded(backend, problem)
    if problem.head_mask is not None and "head_mask" not in backend.gives(problem):
        out = out * problem.head_mask[..., None, None].to(out.dtype)
    if lacks(problem, backend):
        other, beside = helper(problem, backend)
        aux = other.forward(beside)[1].beside(aux)
    return out, aux


def lacks(problem: Problem, backend: ModuleType) -> list[str]:
    """What a call asks for beside its output that the backend does not give."""
    asked = problem.aux.asked
    if not asked:
        return []
    given = backend.gives(problem)
    if problem.aux.reduce is not None and problem.padded_rows is not None:
        given = given - {"key_mass"}  # it would sum the padded rows too
    return [name for name in asked if name not in given]


def helper(problem: Problem, backend: ModuleType) -> tuple[ModuleType, Problem]:
    """The backend that gives all that this one lacks, and the call that it gets: without values or
    dropout, without gradients unless lse or weights need them, and under reduce with padded rows
    that see no key."""
    names = lacks(problem, backend)
    beside = problem
    if problem.aux.reduce is not None:
        beside = beside.without_padded_rows()
    if problem.aux.reduce is not None or not {"lse", "weights"} & set(names):
        beside = beside.detached()
    asks = dataclasses.replace(problem.aux.only(names), reduce=None)
    value = problem.key.new_empty(problem.B, problem.Hkv, problem.S, 0)
    beside = dataclasses.replace(beside, value=value, dropout_p=0.0, aux=asks)
    able = (b for b in preference(beside) if not lacks(beside, b) and b.why_not(beside) is None)
    return next(able), beside


def _guarded(backend: ModuleType, problem: Problem) -> tuple[Tensor, Aux]:
    if not backend.leaks(problem) or not problem.wild:
        return backend.forward(problem)
    out, aux = backend.forward(problem.tamed())
    rows = problem.touched
    if bool(rows.any()):
        true_out, true_aux = chunked.forward(problem)
        out = torch.where(rows[..., None], true_out, out)
        if isinstance(aux.lse, Tensor) and isinstance(true_aux.lse, Tensor):
            aux.lse = torch.where(rows, true_aux.lse, aux.lse)
    return out, aux


def choose(problem: Problem, name: str = "auto") -> ModuleType:
    """The backend that runs a call.

    Raises:
        ValueError: there is no backend of that name. NotImplementedError: the named one cannot
        serve this call; the sentence says why, and what would.
    """
    if name == "auto":
        return next(b for b in preference(problem) if b.why_not(problem) is None)
    backend = named(name)
    reason = backend.why_not(problem)
    if reason is not None:
        raise NotImplementedError(
            f'attention(backend="{name}"): {reason}; backend="auto" runs this call with '
            f"{choose(problem).NAME}"
        )
    return backend


def named(name: str) -> ModuleType:
    """The backend of a name; raises ValueError for a name that there is not."""
    if name not in BACKENDS:
        known = ", ".join(f'"{known}"' for known in ("auto", *BACKENDS))
        raise ValueError(f"attention: backend is {name!r}; it must be one of {known}")
    return BACKENDS[name]

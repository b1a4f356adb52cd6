"""explain(): which backend a call would use, and why not each other one."""

from dataclasses import dataclass, field

from torch import Tensor

from . import backends
from .arguments import make_problem
from .problem import Problem
from .results import AuxRequest
from .visibility import Window


@dataclass(frozen=True)
class Explanation:
    """Which backend a call uses, and why not each other one.

    Attributes:
        backend: its name; None if the named one cannot serve the call.
        how: how it would run the call, a sentence.
        reasons: for every other backend (and for a named one that cannot serve), the reason.
        notes: what else to know about the answer.
    """

    backend: str | None
    how: str
    reasons: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.backend or 'no backend'}: {self.how}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    window: Window | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    head_mask: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
    return_aux: AuxRequest | None = None,
) -> Explanation:
    """Say which backend `attention` would use for this very call, and why not each other one.

    Takes attention's arguments, raises its errors for sizes and kinds, and computes nothing but the
    checks that choosing needs (some look at the numbers, since NaN decides too).

    >>> import torch
    >>> x = torch.randn(1, 2, 5, 8)
    >>> print(explain(x, x, x, softcap=30.0).reasons["sdpa"])
    torch's fused kernels have no softcap
    """
    problem = make_problem(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, bias=bias,
        key_mask=key_mask, window=window, documents=documents, softcap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes, head_mask=head_mask, deterministic=deterministic,
        return_aux=return_aux,
    )  # fmt: skip
    found = {name: b.why_not(problem) for name, b in backends.BACKENDS.items()}
    chosen = backends.choose(problem) if backend == "auto" else backends.named(backend)
    reasons = {
        name: reason or backends.why_later(problem, backends.BACKENDS[name], chosen)
        for name, reason in found.items()
        if name != chosen.NAME
    }
    refusal = found[chosen.NAME]
    if refusal is not None:
        auto = backends.choose(problem).NAME
        how = f'"{backend}" cannot serve this call; backend="auto" would run {auto}'
        return Explanation(None, how, {backend: refusal, **reasons})
    return Explanation(chosen.NAME, chosen.describe(problem), reasons, _notes(problem, chosen.NAME))


def _notes(problem: Problem, name: str) -> tuple[str, ...]:
    p, notes, backend = problem, [], backends.BACKENDS[name]
    lacking = backends.lacks(p, backend)
    if lacking:
        listed = ", ".join(lacking[:-1]) + " and " * (len(lacking) > 1) + lacking[-1]
        other, _ = backends.helper(p, backend)
        notes.append(f"{listed} will come from a pass of {other.NAME} without values")
    if backend.leaks(p) and p.wild:
        notes.append(
            "query, key or value hold NaN, Inf or numbers whose products could overflow: this "
            "backend gets 0 in their place, and rows that may see them are computed by chunked"
        )
    if p.device.type == "cuda" and name != "chunked" and not p.visibility.full:
        notes.append(
            "NaN or Inf in a key or value that only some rows may attend spoils other rows in "
            'torch\'s GPU kernels; backend="chunked" keeps it out'
        )
    return tuple(notes)

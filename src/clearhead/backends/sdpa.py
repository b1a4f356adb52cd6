"""torch's fused kernels, by F.scaled_dot_product_attention, for calls that they get right.

They are aligned to the upper left, so causal calls with L != S go as a mask. They multiply blocked
weights of 0 with whatever stands in the values, so on a CPU a call with any rule is handed over
only after a look at its numbers. What else they get wrong, or serve by a slow path without a word,
is a reason below (measured with torch 2.13 on x86-64 CPUs, 2026-11).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..problem import Problem, in_transform
from ..results import Aux

NAME = "sdpa"
# Rules go as a dense mask of L * S entries (times B or H where these have rules of their own).
MAX_MASK = 1 << 26
ONE_KEY = (
    "no row sees two keys, so its scores have gradient 0, which torch's kernels miss by rounding"
)


def why_not(problem: Problem) -> str | None:
    """Why torch's fused kernels would not give this call's right answer at full speed, or None."""
    return _by_kind(problem) or _by_rules(problem) or _by_numbers(problem)


def gives(problem: Problem) -> set[str]:
    """What this backend can return beside the output, by the names of AuxRequest."""
    return set()


def leaks(problem: Problem) -> bool:
    """Whether NaN or Inf could reach rows that must not see it: on a CPU, with any rule. (On a GPU
    a look at the numbers would wait for the device: `explain` says what holds there.)"""
    return problem.device.type == "cpu" and not _plain(problem)


def describe(problem: Problem) -> str:
    """How this backend would run the call."""
    if _plain(problem):
        return "torch's fused kernel without a mask"
    if _causal_square(problem):
        return "torch's fused kernel with is_causal"
    return "torch's fused kernel with the rules as one dense mask"


def forward(problem: Problem) -> tuple[Tensor, Aux]:
    """Compute out (B, H, L, Dv); there is nothing to return beside it."""
    p = problem
    key, value, mask = p.key, p.value, None
    is_causal = _causal_square(p)
    if not is_causal and not _plain(p):
        mask = _dense_mask(p)
        if p.device.type != "cpu":
            key, value = _hide_unreachable(p, mask)
    groups = {"enable_gqa": True} if p.Hkv != p.H else {}  # a traced graph knows no bool to pass
    out = scaled_dot_product_attention(
        p.query, key, value, attn_mask=mask, dropout_p=p.dropout_p, is_causal=is_causal,
        scale=p.scale, **groups,
    )  # fmt: skip
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.register_prehook(_refuse_second_derivative)
    return out, Aux()


def _refuse_second_derivative(grads: tuple) -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError(
            'attention(backend="sdpa"): torch\'s fused kernels have no second derivative; '
            'backend="chunked" has'
        )


def _plain(p: Problem) -> bool:
    return p.visibility.full and not p.added and p.alibi_slopes is None


def _causal_square(p: Problem) -> bool:
    rules = p.visibility
    only_causal = rules.limits == (None, 0) and not rules.by_data
    return only_causal and p.L == p.S and not p.added and p.alibi_slopes is None


def _by_kind(p: Problem) -> str | None:
    """What these kernels have not, whatever the rules and numbers."""
    if p.deterministic:
        return "torch's kernels do not promise one answer for every way a prompt is cut"
    if p.softcap is not None:
        return "torch's fused kernels have no softcap"
    if p.sinks is not None:
        return "torch's fused kernels have no sinks"
    if p.device.type not in ("cpu", "cuda"):
        return f"its answers on {p.device.type} have not been checked"
    if in_transform():
        return "torch's fused kernels lack the derivatives that a torch.func transform may ask for"
    if p.needs_grad and p.dtype == torch.float64:
        return "torch's fused kernels have no second derivatives, which float64 is used to check"
    if 0 in (p.B, p.H, p.L, p.S, p.D, p.Dv):  # min() would order them in a traced graph
        return "an axis of size 0 takes torch's slow path"
    if p.S == 1 and p.needs_grad:
        return ONE_KEY
    if p.Dv != p.D:
        return f"value head size {p.Dv} differs from query's {p.D}, which takes torch's slow path"
    if p.device.type == "cpu" and p.dropout_p > 0:
        return "dropout takes torch's slow path on a CPU, with all L * S weights in memory"
    if p.device.type == "cuda" and p.dtype == torch.float64:
        return "float64 takes torch's slow path on a GPU"
    return None


def _by_rules(p: Problem) -> str | None:
    """What these kernels get wrong, or slowly, with masks and biases."""
    if p.scale <= 0 and not _plain(p):
        return f"with scale {p.scale:g} torch's kernels compute -inf * scale where blocked: NaN"
    biases = [*p.added, *([] if p.alibi_slopes is None else [p.alibi_slopes])]
    if not biases:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in biases):
        return "a mask or bias that needs a gradient takes torch's slow path"
    if p.needs_grad:
        return "torch rebuilds the weights from lse alone, which spoils gradients of large biases"
    if p.dtype != p.compute_dtype and (len(biases) > 1 or p.alibi_slopes is not None):
        return f"biases would be summed in {p.dtype}, which rounds them"
    if any(t.dtype != p.dtype for t in p.added):
        return f"a mask or bias in another dtype would be rounded to {p.dtype}"
    return None


def _by_numbers(p: Problem) -> str | None:
    """What only the numbers can tell."""
    if _plain(p):
        return None
    if not _causal_square(p) and p.L * p.S > MAX_MASK:
        return f"a mask of L * S = {p.L * p.S} entries would take more memory than all else"
    if p.device.type == "cpu" and torch.compiler.is_compiling():
        return "numbers cannot be seen while tracing, and torch's kernels let blocked NaN through"
    if _causal_square(p):
        return None
    if torch.compiler.is_compiling():
        return "whether every row has a key cannot be looked at while tracing"
    if p.allowed is not None and not bool(p.allowed.any(-1).all()):
        return "some row may attend to no key, and torch's answers there differ between versions"
    if p.allowed is not None and p.needs_grad and int(p.allowed.sum(-1).max()) == 1 < p.S:
        return ONE_KEY
    return None


def _dense_mask(p: Problem) -> Tensor:
    """Rules and biases as one mask that broadcasts to (B, H, L, S): bool, or in query's dtype."""
    allowed, added = p.allowed, p.bias_tile(0, p.L, 0, p.S)
    if added is None:
        assert allowed is not None
        mask = allowed
    else:
        mask = added if allowed is None else torch.where(allowed, added, -math.inf)
        mask = mask.to(p.dtype)
    return mask.expand(*mask.shape[:2], p.L, p.S)


def _hide_unreachable(p: Problem, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value with 0 where no row may look, so that what stands there reaches nothing."""
    allowed = mask if mask.dtype == torch.bool else mask != -math.inf
    unreachable = ~allowed.any(-2).any(1)[:, None, :, None]
    return p.key.masked_fill(unreachable, 0), p.value.masked_fill(unreachable, 0)

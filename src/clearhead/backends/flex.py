"""torch's FlexAttention, compiled: fused kernels for almost any rule, where it pays, on a GPU.

Rules become a mask_mod, from which blocks that nobody may see are skipped; softcap, biases and
ALiBi become a score_mod; a sink is applied to the result by way of lse, out * sigmoid(lse - sink),
which is the same as one more logit in the softmax.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..problem import Problem, in_transform
from ..results import Aux
from ..visibility import at

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "flex"
MIN_HEAD_SIZE = 16  # smaller ones are refused by FlexAttention's kernels


def why_not(problem: Problem) -> str | None:
    """Why compiled FlexAttention would not give this call's right answer, or None."""
    p = problem
    if p.device.type not in ("cpu", "cuda"):
        return f"FlexAttention's answers on {p.device.type} have not been checked"
    if p.deterministic:
        return "FlexAttention does not promise one answer for every way a prompt is cut"
    if p.dropout_p > 0:
        return "FlexAttention has no dropout"
    if in_transform():
        return "FlexAttention has no derivatives under torch.func transforms"
    if p.dtype == torch.float64:
        return "FlexAttention's kernels do not compute in float64"
    if min(p.B, p.H, p.L, p.S) == 0:
        return "an axis of size 0 cannot be compiled"
    if min(p.D, p.Dv) < MIN_HEAD_SIZE:
        return f"head size {min(p.D, p.Dv)} is below FlexAttention's {MIN_HEAD_SIZE}"
    biases = [*p.added, *([] if p.alibi_slopes is None else [p.alibi_slopes])]
    if biases and p.needs_grad:
        return (
            "FlexAttention rebuilds weights from lse alone, which spoils gradients of large biases"
        )
    if p.device.type == "cpu":
        return _why_not_on_cpu(p)
    return None


def _why_not_on_cpu(p: Problem) -> str | None:
    if p.needs_grad:
        return "FlexAttention has no backward on a CPU"
    if p.sinks is not None:
        return "FlexAttention returns no lse on a CPU, by which sinks are applied"
    if leaks(p) and torch.compiler.is_compiling():
        return "numbers cannot be seen while tracing, and blocked NaN and Inf would pass"
    return None


def gives(problem: Problem) -> set[str]:
    """What this backend can return beside the output, by the names of AuxRequest."""
    return set() if problem.device.type == "cpu" else {"lse"}


def leaks(problem: Problem) -> bool:
    """Whether NaN or Inf could reach rows that must not see it: on a CPU, with any rule. (On a GPU
    a look at the numbers would wait for the device: `explain` says what holds there.)"""
    return problem.device.type == "cpu" and not (problem.visibility.full and not problem.added)


def describe(problem: Problem) -> str:
    """How this backend would run the call."""
    return "compiled FlexAttention; the first call of a kind compiles for some seconds"


def forward(problem: Problem) -> tuple[Tensor, Aux]:
    """Compute out (B, H, L, Dv), and lse if problem.aux asks for it."""
    from torch.nn.attention.flex_attention import AuxRequest as FlexAuxRequest

    p = problem
    key, value = _hide_unreachable(p)
    wants_lse = (p.aux.lse and "lse" in gives(p)) or p.sinks is not None
    found = _compiled()(
        p.query, key, value, score_mod=_score_mod(p), block_mask=_block_mask(p), scale=p.scale,
        enable_gqa=p.Hkv != p.H, return_aux=FlexAuxRequest(lse=True) if wants_lse else None,
    )  # fmt: skip
    if not wants_lse:
        return found, Aux()
    out, lse = found[0], found[1].lse
    if p.sinks is not None:
        sinks = p.sinks.to(lse.dtype)[:, None]
        empty = lse == -torch.inf
        out = (out * torch.sigmoid(lse - sinks)[..., None]).to(p.dtype)
        lse = torch.where(empty, lse, torch.logaddexp(lse, sinks))
    return out, Aux(lse=lse if p.aux.lse else None)


@functools.cache
def _compiled() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: past its limit of recompilations torch raises instead of running eagerly, silent.
    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(p: Problem) -> "BlockMask | None":
    from torch.nn.attention.flex_attention import create_block_mask

    allowed = _mask_mod(p)
    if allowed is None:
        return None
    rules = (p.key_mask, p.doc_q, p.doc_k, p.mask, *p.added)
    B = max((t.shape[0] for t in rules if t is not None), default=1)
    H = max((t.shape[1] for t in (p.mask, *p.added) if t is not None), default=1)
    return create_block_mask(allowed, B, H, p.L, p.S, device=p.device)


def _mask_mod(p: Problem) -> Callable | None:
    """The rules, the -inf entries of float masks among them."""
    mask_mod, added = p.visibility.mask_mod(), p.added
    if not added:
        return mask_mod

    def with_float_masks(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = j >= 0 if mask_mod is None else mask_mod(b, h, i, j)
        for tensor in added:
            allowed = allowed & (_entry(tensor, b, h, i, j) != -torch.inf)
        return allowed

    return with_float_masks


def _score_mod(p: Problem) -> Callable | None:
    softcap, slopes, shift, added = p.softcap, p.alibi_slopes, p.S - p.L, p.added
    if softcap is None and slopes is None and not added:
        return None

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        for tensor in added:
            s = s + _entry(tensor, b, h, i, j)
        if slopes is not None:
            s = s - slopes[at(b, slopes, 0), h] * (i + shift - j).abs()
        return s

    return score_mod


def _entry(tensor: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return tensor[at(b, tensor, 0), at(h, tensor, 1), at(i, tensor, 2), at(j, tensor, 3)]


def _hide_unreachable(p: Problem) -> tuple[Tensor, Tensor]:
    """Key and value with 0 where no row may look, so that what stands there reaches nothing."""
    allowed = None
    if p.device.type != "cpu" and (p.visibility.by_data or p.added or p.visibility.limits[0]):
        allowed = p.allowed_tile(0, p.L, 0, p.S)
    if allowed is None:
        return p.key, p.value
    unreachable = ~allowed.any(-2).any(1)[:, None, :, None]
    return p.key.masked_fill(unreachable, 0), p.value.masked_fill(unreachable, 0)

"""The arithmetic of `chunked` in one piece, for derivatives that its blocks do not have."""

import math

import torch
from torch import Tensor

from ..problem import Problem
from .blocks import keep_tile, spoil, survivors_scale


def dense(problem: Problem, seed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and weights (B, H, L, S) in one piece, by ops that torch can differentiate again.

    What is not finite in key and value is taken out of the products and put back only where a row
    may see it, since 0 * NaN would reach every row otherwise.
    """
    p = problem
    weights, lse, _, allowed = dense_weights(p)
    kept = weights
    if seed is not None:
        keep = keep_tile(p, seed, slice(None), slice(None), 0, p.L, 0, p.S)
        kept = weights * keep * survivors_scale(p.dropout_p)
    kept = torch.where(allowed, kept, 0)  # their gradients overflow where a blocked value is huge
    v = p.value.to(p.compute_dtype).repeat_interleave(p.G, dim=1)
    out = kept @ torch.where(v.isfinite(), v, 0)
    out = out + spoil(torch.matmul, allowed.expand_as(weights).to(v.dtype), v.detach())
    return out.to(p.dtype), lse, weights


def dense_weights(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, lse and each row's largest score in one piece, and who may look at whom, which
    broadcasts to (B, H, L, S)."""
    p, dtype = problem, problem.compute_dtype
    L, S = p.L, p.S
    q, k = p.query.to(dtype), p.key.to(dtype).repeat_interleave(p.G, dim=1)
    allowed = p.allowed_tile(0, L, 0, S)
    if allowed is None:
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=p.device)

    finite_q, finite_k = (t.isfinite().all(-1, keepdim=True) for t in (q, k))
    products = torch.where(finite_q, q, 0) @ torch.where(finite_k, k, 0).mT
    raw = q.detach() @ k.detach().mT
    s = torch.where(finite_q & finite_k.mT, products, raw) * p.scale
    s = torch.where(allowed, s, 0)  # tanh has no slope at NaN, not even times 0
    if p.softcap is not None:
        s = p.softcap * torch.tanh(s / p.softcap)
    added = p.bias_tile(0, L, 0, S)
    if added is not None:
        s = s + torch.where(allowed, added, 0)

    sinks = None if p.sinks is None else p.sinks.to(dtype)[:, None, None]
    seen = torch.where(allowed, s.detach(), -math.inf)
    largest = seen.amax(-1, keepdim=True) if S else seen.sum(-1, keepdim=True) - math.inf
    empty = largest == -math.inf
    m = largest if sinks is None else torch.maximum(largest, sinks.detach())
    m = torch.where(m == -math.inf, 0, m)
    e = torch.where(allowed, torch.exp(torch.where(allowed, s, 0) - m), 0)
    z = e.sum(-1, keepdim=True)
    z = z if sinks is None else z + torch.exp(sinks - m)
    z = torch.where(empty, 1, z)
    weights = e / z
    lse = torch.where(empty, -math.inf, m + torch.log(z)).squeeze(-1)
    return weights, lse, largest.squeeze(-1), allowed

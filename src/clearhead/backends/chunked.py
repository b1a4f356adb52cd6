"""Attention in plain torch, a block of rows at a time: any device, any dtype, every feature.

    for a group of heads, for a block of rows i, with all the keys j that these rows may see:
    1   s_ij = scale * (q_i . k_j), cap, bias; -inf where blocked
    2   m_i  = max_j s_ij, and sink_h       the block holds whole rows, so this is the true maximum
    3   p_ij = exp(s_ij - m_i)              and nothing is ever rescaled
    4   z_i  = sum_j p_ij + exp(sink_h - m_i)
    5   out_i = (sum_j dropout(p_ij) v_j) / z_i

One block of scores is all the memory it takes: O(L + S) per head. The backward rebuilds p from the
saved m and z and takes the same steps in reverse. Second derivatives, forward-mode AD and
torch.func transforms use `dense`: the same arithmetic without blocks, all L * S scores in memory.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ..problem import Problem, all_tame, in_transform
from ..results import Aux
from ..visibility import cut
from .blocks import (
    Block,
    cut_into_blocks,
    inert,
    seen,
    survivors_scale,
    times,
    times_across,
)
from .dense import dense, dense_weights
from .statistics import STATISTICS, dense_statistics, statistics

NAME = "chunked"


def why_not(problem: Problem) -> str | None:
    """None: this backend serves every call."""
    return None


def gives(problem: Problem) -> set[str]:
    """What this backend can return beside the output, by the names of AuxRequest."""
    return {"lse", "weights", *STATISTICS}


def leaks(problem: Problem) -> bool:
    """Whether NaN or Inf could reach rows that must not see it: never."""
    return False


def describe(problem: Problem) -> str:
    """How this backend would run the call."""
    if in_transform():
        return "plain torch with all scores at once, because a torch.func transform is at work"
    return "plain torch, a block of rows at a time, memory O(L + S) per head"


def forward(problem: Problem) -> tuple[Tensor, Aux]:
    """Compute out (B, H, L, Dv), in query's dtype, and what problem.aux asks for."""
    p, wanted = problem, problem.aux
    seed = draw_seed(p)
    if in_transform():
        out, lse, weights = dense(p, seed)
        aux = dense_statistics(p)
        aux.weights = weights if wanted.weights else None
    elif p.Dv == 0 and not (p.needs_grad or p.deterministic or wanted.weights):
        return p.query.new_zeros(p.B, p.H, p.L, 0), statistics(p, ("lse", *STATISTICS))
    else:
        out, lse, m, z = attend(*flat(p, seed))
        aux = statistics(p)
        if wanted.weights:
            traced = p.needs_grad or torch.compiler.is_compiling()
            aux.weights = dense_weights(p)[0] if traced else block_weights(p, m, z)
    aux.lse = lse if wanted.lse else None
    return out, aux


def draw_seed(problem: Problem) -> Tensor | None:
    """One number per batch item from torch's generator, or None without dropout."""
    if problem.dropout_p == 0:
        return None
    return torch.randint(0, 2**31, (problem.B,), device=problem.device)


# -- block by block -------------------------------------------------------------------------------


def _stabilizer(m: Tensor) -> Tensor:
    """m, and 0 for a row that sees nothing, whose scores are all -inf."""
    return m.masked_fill(m == -math.inf, 0)


@torch.library.custom_op("clearhead::chunked", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    float_mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    key_mask: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    seed: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward pass as an op: out, lse, m and z (B, H, L); m = -inf and z = 0 where empty."""
    p = Problem(query, key, value, float_mask, bias, sinks, alibi_slopes, mask, key_mask, doc_q,
                doc_k, left, right, scale, softcap, dropout_p, deterministic)  # fmt: skip
    out = query.new_zeros(p.B, p.H, p.L, p.Dv)
    m = query.new_full((p.B, p.H, p.L, 1), -math.inf, dtype=p.compute_dtype)
    z = torch.zeros_like(m)
    with torch.autocast(p.device.type, enabled=False):
        safe = all_tame(value)
        for block in cut_into_blocks(p):
            parts = _forward_block(block, seed, safe)
            for whole, part in zip((out, m, z), parts, strict=True):
                block.put_rows(whole, part)
    lse = torch.where(m == -math.inf, m, m + z.log())
    return out, lse.squeeze(-1), m.squeeze(-1), z.squeeze(-1)


def _forward_block(block: Block, seed: Tensor | None, safe: bool) -> tuple[Tensor, Tensor, Tensor]:
    p = block.problem
    q_i = block.rows(p.query)
    s_ij, see = [], []
    for tile in block.tiles:
        allowed = block.allowed(tile)
        s_ij.append(block.scores(q_i, block.keys(p.key, tile), tile, allowed)[0])
        see.append(None if safe else seen(allowed, s_ij[-1]))

    m_i = torch.cat([s.amax(-1, keepdim=True) for s in s_ij], -1).amax(-1, keepdim=True)
    empty = m_i == -math.inf
    if p.sinks is not None:
        m_i = torch.maximum(m_i, block.sinks(p.sinks))
    base = _stabilizer(m_i)
    z_i = torch.zeros_like(m_i) if p.sinks is None else (block.sinks(p.sinks) - base).exp()
    out_i = q_i.new_zeros(*q_i.shape[:-1], p.Dv)
    for tile, s, see_ij in zip(block.tiles, s_ij, see, strict=True):
        p_ij = s.sub_(base).exp_()
        z_i = z_i + p_ij.sum(-1, keepdim=True)
        if seed is not None:
            p_ij *= block.keep(seed, tile)
        out_i += inert(times, p_ij, block.keys(p.value, tile), see_ij)
    if seed is not None:
        out_i *= survivors_scale(p.dropout_p)
    out_i /= z_i.masked_fill(empty, 1)
    return out_i, m_i.masked_fill(empty, -math.inf), z_i.masked_fill(empty, 0)


def block_weights(problem: Problem, m: Tensor, z: Tensor) -> Tensor:
    """The weights (B, H, L, S) from the m and z of a forward pass, a block at a time."""
    p = problem
    weights = m.new_zeros(p.B, p.H, p.L, p.S)
    with torch.autocast(p.device.type, enabled=False):
        for block in cut_into_blocks(dataclasses.replace(p, deterministic=False)):
            (tile,) = block.tiles
            allowed = block.allowed(tile)
            s_ij, _ = block.scores(block.rows(p.query), block.keys(p.key, tile), tile, allowed)
            m_i, z_i = (block.rows(t.unsqueeze(-1)) for t in (m, z))
            w_ij = s_ij.sub_(_stabilizer(m_i)).exp_().div_(z_i.masked_fill(z_i == 0, 1))
            # A row whose maximum is NaN has NaN everywhere, also where it may not look.
            w_ij = _erase(w_ij, None if allowed is None else ~allowed)
            block.put_rows(weights[..., tile[0] : tile[1]], w_ij)
    return weights


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, ...]:
    B, H, L, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    row = query.new_empty(B, H, L, dtype=dtype)
    out = query.new_empty(B, H, L, value.shape[-1])
    return out, row, torch.empty_like(row), torch.empty_like(row)


@torch.library.custom_op("clearhead::chunked_backward", mutates_args=())
def attend_backward(
    d_out: Tensor,
    d_lse: Tensor,
    m: Tensor,
    z: Tensor,
    needs: list[bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    float_mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    mask: Tensor | None,
    key_mask: Tensor | None,
    doc_q: Tensor | None,
    doc_k: Tensor | None,
    seed: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the seven differentiable tensors; an empty tensor where not needed."""
    p = Problem(query, key, value, float_mask, bias, sinks, alibi_slopes, mask, key_mask, doc_q,
                doc_k, left, right, scale, softcap, dropout_p, deterministic)  # fmt: skip
    grads = [
        torch.zeros_like(t, dtype=p.compute_dtype) if t is not None and need else query.new_empty(0)
        for t, need in zip(p.differentiable, needs, strict=True)
    ]
    with torch.autocast(p.device.type, enabled=False):
        # A row whose maximum is not finite has NaN in places that its blocked keys must not get.
        safe = all_tame(query, key, value, d_out, d_lse) and bool((m < math.inf).all())
        for block in cut_into_blocks(p):
            _backward_block(block, d_out, d_lse, m, z, seed, safe, grads)
    inputs = [t if t is not None else query for t in p.differentiable]
    dq, dk, dv, d_mask, d_bias, d_sinks, d_slopes = (
        g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)
    )
    return dq, dk, dv, d_mask, d_bias, d_sinks, d_slopes


def _backward_block(
    block: Block,
    d_out: Tensor,
    d_lse: Tensor,
    m: Tensor,
    z: Tensor,
    seed: Tensor | None,
    safe: bool,
    grads: list[Tensor],
) -> None:
    """Add one block to the gradients, by steps 5 to 1 of the forward in reverse."""
    p = block.problem
    dq, dk, dv, d_mask, d_bias, d_sinks, d_slopes = grads
    q_i, dout_i = block.rows(p.query), block.rows(d_out)
    m_i, z_i, dlse_i = (block.rows(t.unsqueeze(-1)) for t in (m, z, d_lse))
    base, empty = _stabilizer(m_i), z_i == 0
    # z is summed again: m and z may come from kernels whose scores round differently, and only with
    # the sum of these very p do the weights of a row sum to 1.
    z_i = torch.zeros_like(m_i) if p.sinks is None else (block.sinks(p.sinks) - base).exp()
    delta_i, again, held = -dlse_i, [], []

    for tile in block.tiles:
        # Steps 1 to 4 again.
        allowed = block.allowed(tile)
        s_ij, tanh_ij = block.scores(q_i, block.keys(p.key, tile), tile, allowed)
        p_ij = s_ij.sub_(base).exp_()
        z_i = z_i + p_ij.sum(-1, keepdim=True)
        again.append((tile, allowed, tanh_ij, p_ij))
    z_i = z_i.masked_fill(empty, 1)

    for tile, allowed, tanh_ij, p_ij in again:
        blocked = None if safe or allowed is None else ~allowed
        w_ij = _erase(p_ij.div_(z_i), blocked)
        see = None if safe else seen(allowed, w_ij)

        # 5   out_i = sum_j dropout(w_ij) v_j
        dw_ij = _erase(times(dout_i, block.keys(p.value, tile).mT), blocked)
        kept_ij = w_ij
        if seed is not None:
            survive = block.keep(seed, tile).to(w_ij.dtype) * survivors_scale(p.dropout_p)
            kept_ij, dw_ij = w_ij * survive, dw_ij.mul_(survive)
        if dv.numel():
            block.add_keys(dv, inert(times_across, kept_ij, dout_i, see), tile)
        delta_i = delta_i + (w_ij * dw_ij).sum(-1, keepdim=True)
        held.append((tile, blocked, tanh_ij, w_ij, dw_ij, see))

    if d_sinks.numel():
        assert p.sinks is not None
        w_sink = (block.sinks(p.sinks) - base).exp().div(z_i)
        ds_sink = (-delta_i * w_sink).masked_fill(empty, 0)
        _add_reduced(block.heads(d_sinks[None, :, None, None]), ds_sink)

    for tile, blocked, tanh_ij, w_ij, dw_ij, see in held:
        # 4, 3   w_ij = exp(s_ij - lse_i): the maximum cancels, so it is never differentiated
        ds_ij = _erase(dw_ij.sub_(delta_i).mul_(w_ij), blocked)

        # 1   s_ij = softcap * tanh(scale * (q_i . k_j) / softcap) + bias_ij
        inner, cut_tile = block.crop(ds_ij, tile)
        for d_added in (d_mask, d_bias):
            if d_added.numel():
                _add_reduced(block.heads(cut(d_added, block.i0, block.i1, *cut_tile)), inner)
        if d_slopes.numel():
            distance = p.distance(block.i0, block.i1, *cut_tile)
            _add_reduced(block.heads(d_slopes[..., None, None]), inner * -distance)
        if tanh_ij is not None:
            ds_ij.mul_(_erase(tanh_ij.square_().neg_().add_(1), blocked))
        if dq.numel():
            block.put_rows(
                dq, inert(times, ds_ij, block.keys(p.key, tile), see).mul_(p.scale), True
            )
        if dk.numel():
            block.add_keys(dk, inert(times_across, ds_ij, q_i, see).mul_(p.scale), tile)


def _erase(x: Tensor, blocked: Tensor | None) -> Tensor:
    return x if blocked is None else x.masked_fill_(blocked, 0)


def _add_reduced(whole: Tensor, part: Tensor) -> None:
    """Add to a view what was broadcast from it, summed over the axes it was broadcast along."""
    whole += part.sum_to_size(whole.shape)


@attend_backward.register_fake
def _(d_out: Tensor, d_lse: Tensor, m: Tensor, z: Tensor, needs: list[bool], *inputs: Any) -> tuple:
    return tuple(
        torch.empty_like(t) if t is not None and need else d_out.new_empty(0)
        for t, need in zip(inputs[:7], needs, strict=True)
    )


# -- derivatives ----------------------------------------------------------------------------------


def flat(problem: Problem, seed: Tensor | None) -> tuple:
    """The arguments of the op for a call."""
    p = problem
    return (*p.differentiable, p.mask, p.key_mask, p.doc_q, p.doc_k, seed, p.left, p.right, p.scale,
            p.softcap, p.dropout_p, p.deterministic)  # fmt: skip


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, _, m, z = output
    ctx.save_for_backward(*inputs[:12], m, z)
    ctx.numbers = inputs[12:]


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor, *_: Tensor) -> tuple:
    *tensors, m, z = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:7])
    grads = attend_backward(d_out, d_lse, m, z, needs, *tensors, *ctx.numbers)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), *[None] * 11)


attend.register_autograd(_backward, setup_context=_save)


def _save_again(ctx: Any, inputs: tuple, output: tuple) -> None:
    d_out, d_lse, _, _, ctx.needs, *rest = inputs
    ctx.save_for_backward(d_out, d_lse, *rest[:12])
    ctx.numbers = rest[12:]


def _backward_again(ctx: Any, *grads: Tensor) -> tuple:
    """The derivative of the gradients, by torch's own derivatives of `dense`."""
    d_out, d_lse, *tensors = ctx.saved_tensors
    wanted = [n for n, need in enumerate(ctx.needs) if need]

    def outputs(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        full: list[Any] = list(tensors)
        for n, tensor in zip(wanted, inputs, strict=True):
            full[n] = tensor
        out, lse, _ = dense(Problem(*full[:11], *ctx.numbers), seed=full[11])
        return out, lse

    def gradients(d_out: Tensor, d_lse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(outputs, *inputs)[1]((d_out, d_lse))

    pull = torch.func.vjp(gradients, d_out, d_lse, *(tensors[n] for n in wanted))[1]
    dd_out, dd_lse, *found = pull(tuple(grads[n] for n in wanted))
    result: list[Tensor | None] = [None] * 7
    for n, grad in zip(wanted, found, strict=True):
        result[n] = grad
    return (dd_out, dd_lse, None, None, None, *result, *[None] * 11)


attend_backward.register_autograd(_backward_again, setup_context=_save_again)

"""Calls of a kind that came before: what was checked once is not checked again.

To check a call and to choose who runs it takes ten times as long as the smallest call does. Both
look at sizes, dtypes and rules and, where the native kernels are chosen, at nothing else. So the
first call of a kind takes the ordinary path, `make_problem` and `backends.run`; what that found is
kept here, and the next ones of its kind go straight to the kernels, or to their op where gradients
are needed.

Only plain tensors in plain eager code have a kind, see `kind_of`. All other calls take the ordinary
path each time, which gives the same bits.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from . import backends
from .backends import native
from .problem import Problem
from .results import AuxRequest
from .visibility import Window

Kind = tuple

# A model has a few kinds per length of its prompts, and one for decoding.
MOST = 512
_known: dict[Kind | None, native.Again | None] = {}

# Memory on a CPU and nothing more: no subclass or wrapper, nothing to negate, not nested or sparse.
_key, _set_of = torch._C.DispatchKey, torch._C.DispatchKeySet
_INFERENCE = _set_of(_key.CPU) | _set_of(_key.AutocastCPU)
_ORDINARY = _INFERENCE | _set_of(_key.ADInplaceOrView) | _set_of(_key.AutogradCPU)
_PLAIN = frozenset({_INFERENCE.raw_repr(), _ORDINARY.raw_repr()})
_keys_of = torch._C._dispatch_keys

# What torch adds to the keys of all tensors while no mode, transform or tracer is at work, outside
# inference_mode and under it; and what it takes from them unless autocast is on. Two calls, not one
# for each of these: where a long call came before, what is called has left the caches, and to fetch
# it again takes longer than to run it.
_added, _taken = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
_UNDER_INFERENCE = _set_of(_key.BackendSelect)
_NOTHING_AT_WORK = frozenset(
    {_UNDER_INFERENCE.raw_repr(), (_UNDER_INFERENCE | _set_of(_key.ADInplaceOrView)).raw_repr()}
)
_USUAL = frozenset({bool, int, str, type(None)})  # types of what an AuxRequest holds
_AUTOCAST = _set_of(_key.AutocastCPU).raw_repr()


def kind_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    bias: Tensor | None,
    key_mask: Tensor | None,
    window: Window | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    head_mask: Tensor | None,
    deterministic: bool,
    backend: str,
    return_aux: AuxRequest | None,
) -> Kind | None:
    """All that checking and choosing rest on, or None for a call that must be looked at anew.

    A call has a kind if
    - nothing wants to see or to change what it does: no compiler or tracer, no mode of torch's, no
      transform, autocast or profiler (the caller has asked query, key and value about
      __torch_function__),
    - all its tensors are plain ones in a CPU's memory,
    - query, key and value have four axes, and as many batch items each (one that is shared has not
      the strides that the kernels want),
    - its numbers are of the usual types (1, 1.0 and True are equal as parts of a kind, and not all
      are allowed),
    - what it asks for beside the output, if anything, are statistics that do not rest on padding.
    How many keys there are is no part of it, so that all steps of a decoding are of one kind.
    """
    if (
        torch.compiler.is_compiling()
        or _added().raw_repr() not in _NOTHING_AT_WORK
        or not _taken().raw_repr() & _AUTOCAST
        or forward_ad._current_level >= 0
        or torch._C._autograd._profiler_enabled()
    ):
        return None
    alone = attn_mask is bias is key_mask is sinks is alibi_slopes is head_mask is None
    tensors: tuple = (query, key, value)
    if not alone:
        more = (attn_mask, bias, key_mask, sinks, alibi_slopes, head_mask)
        tensors += tuple(tensor for tensor in more if tensor is not None)
        if has_torch_function(more):
            return None
    needs_grad = False
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or _keys_of(tensor).raw_repr() not in _PLAIN:
            return None
        needs_grad = needs_grad or tensor.requires_grad
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if not len(of_query) == len(of_key) == len(of_value) == 4:
        return None
    B, Hkv, S, D = of_key
    if (
        of_value[2] != S
        or S == 0
        or not of_query[0] == B == of_value[0]
        or (scale is not None and type(scale) is not float)
        or (softcap is not None and type(softcap) is not float)
        or (window is not None and not _is_window(window))
        or dropout_p != 0
        or type(dropout_p) not in (int, float)
        or type(backend) is not str
    ):
        return None
    asked = None if return_aux is None else _asked(return_aux, key_mask)
    if asked == ():
        return None
    return (
        of_query, query.dtype, B, Hkv, D, key.dtype, of_value[1], of_value[3], value.dtype,
        bool(is_causal), window, scale, softcap, bool(deterministic), backend,
        needs_grad and torch.is_grad_enabled(), asked, None if alone else _facts(S, *more),
    )  # fmt: skip


def _is_window(window: Window) -> bool:
    return type(window) is tuple and all(side is None or type(side) is int for side in window)


def _asked(request: AuxRequest, key_mask: Tensor | None) -> tuple:
    """What is asked for beside the output; nothing if a call with this request has no kind."""
    if type(request) is not AuxRequest or type(request.top_k) is not int or request.weights:
        return ()
    if request.reduce is not None and (type(request.reduce) is not str or key_mask is not None):
        return ()
    asked = tuple(vars(request).values())
    return asked if any(asked[:-1]) and _USUAL.issuperset(map(type, asked)) else ()


def _facts(S: int, *tensors: Tensor | None) -> tuple:
    """The dtype and shape of each; -1 stands for S on the last axis of those that lie over keys,
    the first three."""
    facts: list = []
    for n, tensor in enumerate(tensors):
        shape = () if tensor is None else tuple(tensor.shape)
        if n < 3 and shape and shape[-1] == S:
            shape = (*shape[:-1], -1)
        facts += [None if tensor is None else tensor.dtype, shape]
    return tuple(facts)


def known(kind: Kind | None) -> native.Again | None:
    """What is kept of a kind, if a call of it may go straight to the kernels."""
    return _known.get(kind)


def keep(kind: Kind | None, problem: Problem, backend: str) -> None:
    """Keep what the ordinary path made of the first call of a kind."""
    if kind is None or kind in _known:
        return
    serves = backends.choose(problem, backend) is native and not backends.lacks(problem, native)
    if len(_known) >= MOST:
        _known.clear()
    _known[kind] = native.again_of(problem) if serves else None

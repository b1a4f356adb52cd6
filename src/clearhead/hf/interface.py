"""The attention function that transformers calls for attn_implementation="clearhead".

register()  makes the name known.
use()       gives it to a model.
attend()    one layer's attention: transformers' conventions in, clearhead.attention, and back.

What a family passes beside query, key, value and mask is served, ignored for a reason that IGNORED
gives, or refused with an error: nothing is swallowed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import attention
from ..results import AuxRequest
from . import masks
from .families import NAME, check, missing_extra, refuse_when_built

# Keyword arguments that change nothing here, and why.
IGNORED = {
    "sliding_window": "the mask holds the window; eager attention does not read it either",
    "max_length_q": "cu_seq_lens_q says it",
    "max_length_k": "cu_seq_lens_k says it",
    "position_ids": "rotary embeddings are applied, and the mask separates packed sequences",
    "deterministic": "for the backward pass of flash attention; clearhead repeats itself anyway",
    "num_items_in_batch": "for the loss",
    "output_hidden_states": "for the model around the layers",
    "output_router_logits": "for the experts",
    "return_dict": "for the model around the layers",
    "use_cache": "key and value hold the cached ones",
    "seq_idx": "for state-space layers",
}
# What eager attention would compute and clearhead does not, and what each is.
REFUSED = {
    "sinks": "one sink per query row; clearhead has one per head (s_aux)",
    "block_indices": "a choice of key blocks per query row",
}

# Whoever listens gets each call's weights at once, so that no layer waits in memory for the next.
_listener: ContextVar[Callable[..., None] | None] = ContextVar("_listener", default=None)


def register() -> None:
    """Make attn_implementation="clearhead" known to transformers: its attention and its masks.

    From then on a model that cannot be served raises NotImplementedError when it is built with that
    name. Calling it again changes nothing. Raises ValueError where transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as error:
        raise missing_extra(error) from error
    AttentionInterface.register(NAME, attend)
    # Without a mask function of the same name every mask would be None, with no error.
    AttentionMaskInterface.register(NAME, masks.make)
    refuse_when_built(PreTrainedModel)


def use(model: Any) -> Any:
    """Give a transformers model clearhead's attention, and return it.

    The same as attn_implementation="clearhead" when it is loaded, after `register()`.

    Raises:
        NotImplementedError: a part of the model computes attention in code of its own.
        ValueError: transformers is not installed.
    """
    register()
    check(model)
    model.set_attn_implementation(NAME)
    return model


@contextmanager
def listening(listener: Callable[..., None]) -> Iterator[None]:
    """While it lasts, every call hands its weights (B, H, L, S), the query, key and value of its
    first batch item, positions applied, and its scale to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """One layer's attention, as transformers calls it.

    Args:
        module: the layer; its `training` turns dropout on, its `is_causal` says what no mask means.
        query: (B, H, L, D); key: (B, Hkv, S, D), value: (B, Hkv, S, Dv), not repeated, with rotary
            embeddings applied and the cache included.
        attention_mask: broadcasts to (B, H, L, S), bool (True = attend) or added to the scores.
            None, with L > 1 and is_causal, is the upper left triangle: keys past L are empty slots.
        is_causal: instead of the module's. s_aux: (H,) sinks. position_bias: added to the scores.
        cu_seq_lens_q, cu_seq_lens_k: offsets of packed sequences, for B = 1.
        indices: (B, L, K) keys that each row may see, whatever else may be.
        output_attentions: whether to return the weights.

    Returns:
        out (B, L, H, Dv), contiguous; a row that sees no key is 0. The weights (B, H, L, S) in
        query's dtype, from before dropout, or None.
    Raises:
        TypeError, NotImplementedError: an argument that is not served.
    """
    if others:
        _refuse(module, others)
    L, S = query.shape[-2], key.shape[-2]
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    rules = masks.read(attention_mask, causal, L, S)
    bias = position_bias
    if cu_seq_lens_q is not None:
        rules = _within_documents(rules, query, key, cu_seq_lens_q, cu_seq_lens_k)
    if indices is not None:
        chosen = torch.zeros(query.shape[0], 1, L, S, dtype=torch.bool, device=query.device)
        chosen = chosen.scatter(-1, indices.long()[:, None], True)
        if rules.attn_mask is not None and rules.attn_mask.dtype != torch.bool:
            bias = rules.attn_mask if bias is None else bias + rules.attn_mask
        elif rules.attn_mask is not None:
            chosen = chosen & rules.attn_mask
        rules = dataclasses.replace(rules, attn_mask=chosen)
    if rules.end is not None and rules.end != S:
        key, value = key[..., : rules.end, :], value[..., : rules.end, :]
        bias = bias if bias is None else bias[..., : rules.end]
        if rules.attn_mask is not None:
            rules = dataclasses.replace(rules, attn_mask=rules.attn_mask[..., : rules.end])

    options = {
        **rules.arguments,
        "dropout_p": dropout if module.training else 0.0,
        "scale": scaling,
        "bias": bias,
        "softcap": softcap,
        "sinks": s_aux,
    }
    wanted = bool(output_attentions) or _captured()
    listener = None if torch.compiler.is_compiling() else _listener.get()
    if not wanted and listener is None:
        # Without a request, so that a call of a known kind is repeated without being read anew.
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
    out, aux = attention(query, key, value, **options, return_aux=AuxRequest(weights=True))
    assert aux.weights is not None
    weights = F.pad(aux.weights, (0, S - aux.weights.shape[-1]))
    if listener is not None:
        listener(weights, query[0], key[0], value[0], scaling)
    out = out.transpose(1, 2).contiguous()
    return out, weights.to(query.dtype) if wanted else None


def _refuse(module: torch.nn.Module, others: dict[str, Any]) -> None:
    """Raise for the first keyword argument that asks for something and that nothing here serves."""
    layer = type(module).__name__
    instead = 'load the model with attn_implementation="eager"'
    for name, value in others.items():
        if value is None or name in IGNORED:
            continue
        if name in REFUSED:
            raise NotImplementedError(
                f"clearhead.hf: {layer} passes {name}, {REFUSED[name]}; {instead}"
            )
        raise TypeError(
            f"clearhead.hf: {layer} passes {name}, and nothing is known about what that means for "
            f"its attention; do not pass it to the model, or {instead}"
        )


def _within_documents(
    rules: masks.Rules, query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor | None
) -> masks.Rules:
    """The rules, and that packed sequences do not see each other."""
    if query.shape[0] != 1:
        raise ValueError(
            f"clearhead.hf: cu_seq_lens_q comes with a batch of {query.shape[0]}; sequences that "
            "are packed one behind the other need a batch of 1"
        )
    end = key.shape[-2] if rules.end is None else rules.end
    pair = []
    for length, offsets in ((query.shape[-2], cu_q), (end, cu_q if cu_k is None else cu_k)):
        position = torch.arange(length, device=query.device)
        pair.append(torch.bucketize(position, offsets[1:].to(position), right=True)[None])
    if rules.documents is not None:  # the mask knows of them already, or of others
        pair = [a * len(cu_q) + b for a, b in zip(rules.documents, pair, strict=True)]
    return dataclasses.replace(rules, documents=(pair[0], pair[1]))


def _captured() -> bool:
    # Most families pass output_attentions on to here, but GPT-2 and others leave it to the hooks
    # that transformers sets; what those collect is only told by this private name.
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return False  # a context variable cannot be traced
    return any("attentions" in name for name in _active_collector.get() or ())

"""The same weights in another class: wrapper <-> efficient, and torch.nn.MultiheadAttention."""

import torch
from torch import Tensor, nn

from .module import MultiHeadAttention
from .textbook import MultiHeadAttentionWrapper, SelfAttention

# What a textbook head cannot do: the attribute, and the value with which the module is one.
_PLAIN = {
    "is_causal": True,
    "sliding_window": None,
    "scale": None,
    "qk_norm": None,
    "softcap": None,
    "sinks": None,
    "alibi": False,
    "W_gate": None,
    "dropout": 0.0,
}


def from_heads(wrapper: MultiHeadAttentionWrapper) -> MultiHeadAttention:
    """Stitch the heads of a wrapper together: head h becomes rows h*D ... (h+1)*D - 1.

    The weights are copied to the bit and the result is the wrapper's. A wrapper without out_proj
    gives a module whose out_proj is nn.Identity.

    >>> wrapper = MultiHeadAttentionWrapper(input_dim=6, head_dim=3, num_heads=2)
    >>> x = torch.randn(5, 6)
    >>> torch.allclose(from_heads(wrapper)(x), wrapper(x), atol=1e-6)
    True
    """
    heads = list(wrapper.heads)
    if not heads:
        raise ValueError("from_heads: the wrapper has no heads; it needs one or more")
    first: SelfAttention = heads[0]  # type: ignore[assignment]
    weight: Tensor = first.W_query.weight
    module = nn.utils.skip_init(
        MultiHeadAttention, first.input_dim, first.head_dim, len(heads),
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        for name in ("W_query", "W_key", "W_value"):
            rows = torch.cat([getattr(head, name).weight for head in heads])
            getattr(module, name).weight.copy_(rows)
        if wrapper.out_proj is None:
            module.out_proj = nn.Identity()
        else:
            module.out_proj.weight.copy_(wrapper.out_proj.weight)
    return module.train(wrapper.training)


def to_heads(module: MultiHeadAttention) -> MultiHeadAttentionWrapper:
    """Cut a module into independent heads, the way back from `from_heads`, exact to the bit.

    Grouped heads each get a copy of the keys and values that they share: the same function, though
    the sharing is gone from the weights.

    Raises:
        ValueError: the module has options that the textbook's heads do not have; it names them.

    >>> module = MultiHeadAttention(input_dim=6, head_dim=3, num_heads=2)
    >>> x = torch.randn(5, 6)
    >>> torch.allclose(to_heads(module)(x), module(x), atol=1e-6)
    True
    """
    m, width = module, module.num_heads * module.head_dim
    other = [name for name, plain in _PLAIN.items() if getattr(m, name) != plain]
    other += [
        name
        for name in ("W_query", "out_proj")
        if getattr(getattr(m, name), "bias", None) is not None
    ]
    other += ["value_head_dim"] if m.value_head_dim != m.head_dim else []
    other += ["context_dim"] if m.context_dim != m.input_dim else []
    mixes = not isinstance(m.out_proj, nn.Identity)
    other += ["output_dim"] if mixes and m.output_dim != width else []
    if other:
        raise ValueError(
            f"to_heads: the textbook's heads have no {', '.join(other)}; only a causal module of "
            "the first three arguments (and num_kv_heads) can be cut into them"
        )
    with torch.device("meta"):  # weights that are about to be replaced are not drawn
        wrapper = MultiHeadAttentionWrapper(m.input_dim, m.head_dim, m.num_heads, out_proj=mixes)
    weight = m.W_query.weight
    wrapper = wrapper.to(weight.dtype).to_empty(device=weight.device)
    group = m.num_heads // m.num_kv_heads
    with torch.no_grad():
        for h, head in enumerate(wrapper.heads):
            for name, block in (("W_query", h), ("W_key", h // group), ("W_value", h // group)):
                rows = slice(block * m.head_dim, (block + 1) * m.head_dim)
                getattr(head, name).weight.copy_(getattr(m, name).weight[rows])
        if mixes:
            wrapper.out_proj.weight.copy_(m.out_proj.weight)  # type: ignore[union-attr, arg-type]
    return wrapper.train(module.training)


def from_torch(mha: nn.MultiheadAttention, *, is_causal: bool = False) -> MultiHeadAttention:
    """A MultiHeadAttention with the weights of torch's module, giving its outputs.

    Three things are said differently afterwards. The batch always comes first. A boolean mask means
    True = may attend, so torch's masks are passed inverted (`attn_mask=~mask`,
    `key_mask=~key_padding_mask`); `clearhead.compat.MultiheadAttention` keeps torch's language. Key
    and value come from one `context`; where torch's kdim and vdim differ, the context is the two
    side by side, `torch.cat([key, value], dim=-1)`.

    Args:
        mha: any nn.MultiheadAttention without add_bias_kv and add_zero_attn.
        is_causal: what torch's caller says in each call; False, as there, by default.

    Raises:
        ValueError: add_bias_kv or add_zero_attn, with the remedy.

    >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(3, 5, 8)
    >>> torch.allclose(from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    if mha.bias_k is not None or mha.add_zero_attn:
        name = "add_zero_attn" if mha.bias_k is None else "add_bias_kv"
        raise ValueError(
            f"from_torch: {name} adds a token of its own to every context, for which there is no "
            "place in MultiHeadAttention; clearhead.compat.MultiheadAttention serves it"
        )
    E, kdim, vdim = mha.embed_dim, mha.kdim, mha.vdim
    context_dim = kdim if kdim == vdim else kdim + vdim
    weights = _projections(mha)
    module = nn.utils.skip_init(
        MultiHeadAttention, E, mha.head_dim, mha.num_heads, context_dim=context_dim, output_dim=E,
        qkv_bias=mha.in_proj_bias is not None, out_bias=mha.out_proj.bias is not None,
        is_causal=is_causal, dropout=mha.dropout, device=weights[0].device, dtype=weights[0].dtype,
    )  # fmt: skip
    with torch.no_grad():
        starts = (0, 0, 0 if kdim == vdim else kdim)
        for name, weight, start in zip(
            ("W_query", "W_key", "W_value"), weights, starts, strict=True
        ):
            target = getattr(module, name).weight.zero_()
            target[:, start : start + weight.shape[1]] = weight
        if mha.in_proj_bias is not None:
            for name, bias in zip(
                ("W_query", "W_key", "W_value"), mha.in_proj_bias.chunk(3), strict=True
            ):
                getattr(module, name).bias.copy_(bias)
        module.out_proj.load_state_dict(mha.out_proj.state_dict())
    return module.train(mha.training)


def _projections(mha: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value weights of torch's module, packed or separate."""
    if mha.in_proj_weight is not None:
        query, key, value = mha.in_proj_weight.chunk(3)
        return query, key, value
    return mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight

"""Drop-ins for torch's own attention, in torch's own arguments, alignment and mask language.

Where torch's answer is right this one equals it. Where torch gives NaN, or an answer that depends
on which of its paths runs, this one is what docs/spec.md defines.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .functional import attention
from .problem import in_transform
from .results import AuxRequest


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, right where torch's gives NaN too.

        w_ij  = softmax over the visible j of scale * q_i . k_j + attn_mask_ij
        out_i = sum_j dropout(w_ij) v_j

    It differs from torch's in this: is_causal and attn_mask may be given together, and a row sees
    what both allow (torch raises or not, depending on the kernel); a float mask may have any
    floating dtype; NaN and Inf that a row may not see do not reach it; a scale of 0 or below is
    right together with is_causal.

    Args:
        query: (..., L, D), key: (..., S, D), value: (..., S, Dv): float16, bfloat16, float32 or
            float64, one dtype for all. Leading axes broadcast, the one of the heads among them.
        attn_mask: broadcasts to (..., L, S); bool, True = may attend, or floating, added to the
            scores (-inf blocks).
        dropout_p: chance that a weight is dropped, 0 to 1; always on when above 0.
        is_causal: row i sees key j when j <= i: aligned to the UPPER left, as torch does it.
            (`clearhead.attention` aligns to the lower right; they are one when L == S.)
        scale: factor of q . k; 1 / sqrt(D) by default, 0 and negative numbers are numbers.
        enable_gqa: query head h reads key head h // (H // Hk) and value head h // (H // Hv), axis
            -3 being the heads; Hk and Hv must divide H.

    Returns:
        out (..., L, Dv) in query's dtype (under autocast, in autocast's); a row that sees no key is
        exactly 0 and passes no gradient.
    Raises:
        ValueError, TypeError: sizes or kinds do not fit.
    Half types accumulate in float32. Source: Vaswani et al. 2017, equation 1.

    >>> q, k, v = torch.randn(3, 2, 4, 7, 8)
    >>> scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.0).isfinite().all()
    tensor(True)
    """
    least = 3 if enable_gqa else 2
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim < least:
            axes = "(heads, length, head size)" if enable_gqa else "(length, head size)"
            raise ValueError(
                f"scaled_dot_product_attention: {name} has shape {tuple(tensor.shape)}; it needs "
                f"at least {least} axes, {axes}"
            )
    L, S = query.shape[-2], key.shape[-2]
    query, key, value = (_with_heads if enable_gqa else _broadcast)(query, key, value)
    if is_causal and L < S:  # the keys from L on are seen by nobody
        if attn_mask is not None:
            attn_mask = _first_keys(attn_mask, L, S)
        key, value = key[..., :L, :], value[..., :L, :]
    window = (None, max(0, L - S)) if is_causal else None
    bare = query.ndim == 2
    if bare:
        query, key, value = query[None], key[None], value[None]
    out = attention(query, key, value, attn_mask, dropout_p, scale=scale, window=window)
    return out[0] if bare else out


def _with_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for grouped heads, key and value with one number of heads that divides query's."""
    H, Hk, Hv = (t.shape[-3] for t in (query, key, value))
    for name, heads in (("key", Hk), ("value", Hv)):
        if (heads == 0 and H != 0) or (heads != 0 and H % heads != 0):
            raise ValueError(
                f"scaled_dot_product_attention: query has {H} heads and {name} has {heads}; with "
                "enable_gqa=True the second must divide the first"
            )
    if Hk != Hv:
        key, value = (t.repeat_interleave(H // t.shape[-3], dim=-3) for t in (key, value))
    return query, key, value


def _broadcast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with equal leading axes, the heads being one of them."""
    leading = tuple(query.shape[:-2]), tuple(key.shape[:-2]), tuple(value.shape[:-2])
    if leading[0] == leading[1] == leading[2]:
        return query, key, value
    try:
        shape = torch.broadcast_shapes(*leading)
    except RuntimeError:
        raise ValueError(
            f"scaled_dot_product_attention: the leading axes of query {leading[0]}, key "
            f"{leading[1]} and value {leading[2]} do not broadcast; where key/value heads are "
            "shared by groups of query heads, pass enable_gqa=True"
        ) from None
    return (
        query.expand(*shape, *query.shape[-2:]),
        key.expand(*shape, *key.shape[-2:]),
        value.expand(*shape, *value.shape[-2:]),
    )


def _first_keys(mask: Tensor, L: int, S: int) -> Tensor:
    """The mask of the first L keys."""
    if mask.ndim == 0 or mask.shape[-1] == 1:
        return mask
    if mask.shape[-1] != S:
        raise ValueError(
            f"scaled_dot_product_attention: attn_mask has shape {tuple(mask.shape)}; its last axis "
            f"must be S = {S} or 1"
        )
    return mask[..., :L]


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with a forward that has one meaning on every path.

    Constructor, parameters, state dicts and `isinstance` are torch's; only `forward` is new. It
    differs from torch's in this: a token that may attend to nothing gets the bias of `out_proj`
    and not NaN; the output is the same whether weights are asked for or not; boolean and floating
    masks may be mixed; is_causal is a rule and not a hint; returned weights are from before
    dropout; `out_proj` is called as a module, so that its hooks, adapters and parametrisations run.

    torch's encoder layers compute attention themselves, past any module, when they may: this class
    says through torch's own flag that they may not. nn.TransformerEncoder, when built from a layer
    that holds one, therefore warns that it will not use nested tensors; enable_nested_tensor=False
    says the same without a warning. In a finished model use `replace_torch_attention`.

    Args:
        embed_dim: width E of query and output. num_heads: H, a divisor of E.
        dropout: chance that a weight is dropped, in training only.
        bias: whether the projections have biases.
        add_bias_kv: whether a learned token is added to keys and values, for every row to see.
        add_zero_attn: whether a token of zeros is added, for every row to see.
        kdim, vdim: widths of key and value; E by default.
        batch_first: whether the batch axis comes first; second by default.
        device, dtype: of the parameters.

    Source: Vaswani et al. 2017, section 3.2.2.

    >>> mha = MultiheadAttention(8, 2, batch_first=True)
    >>> x = torch.randn(3, 5, 8)
    >>> out, weights = mha(x, x, x, key_padding_mask=torch.ones(3, 5, dtype=torch.bool))
    >>> torch.equal(out, mha.out_proj.bias.expand(3, 5, 8)), weights.count_nonzero().item()
    (True, 0)
    """

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # nn.TransformerEncoderLayer runs a fused kernel in place of this forward where this flag is
        # true, and nn.TransformerEncoder makes nested tensors for it. Nothing here reads it.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value, in torch's arguments and torch's mask language.

        All masks are combined: what any of them blocks is blocked, and what is left has the
        floating ones added to its score.

        Args:
            query: (L, N, E), with batch_first (N, L, E), without a batch (L, E).
            key: (S, N, kdim), value: (S, N, vdim), or with the axes as in query.
            key_padding_mask: (N, S), without a batch (S,); bool, True = BLOCKED, or floating,
                added.
            need_weights: whether to return the weights, which takes memory for all L * S of them.
            attn_mask: (L, S), or (N * H, L, S) with the heads of one item side by side; bool, True
                = BLOCKED, or floating, added. Without a batch (L, S) or (H, L, S).
            average_attn_weights: whether to return the mean over the heads.
            is_causal: whether row i sees key j only when j <= i, aligned to the upper left. torch
                takes it for a hint about attn_mask and wants one; here it is a rule, with a mask
                or without. Tokens of add_bias_kv and add_zero_attn stay visible.

        Returns:
            (out, weights). out has query's shape; a token that may attend to nothing gets the bias
            of out_proj, or 0. weights: (N, L, S), per head (N, H, L, S), without a batch the same
            without N, S counting the tokens of add_bias_kv and add_zero_attn; in the dtype of the
            computation, as in torch; exactly 0 where blocked, and in all of an empty row; None
            where not needed.
        Raises:
            ValueError, TypeError: sizes or kinds do not fit, or a tensor is nested.
        Half types accumulate in float32.
        """
        self._check_inputs(query, key, value)
        batched = query.ndim == 3
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = q[None], k[None], v[None]
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        (N, L, _), S = q.shape, k.shape[1]
        self._check_mask("attn_mask", attn_mask, (L, S), (N * self.num_heads, L, S))
        self._check_mask("key_padding_mask", key_padding_mask, (N, S) if batched else (S,))

        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(N, -1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.expand(N, -1, -1)], dim=1)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra = k.shape[1] - S

        mask, bias, key_mask = self._masks(attn_mask, key_padding_mask, N, extra)
        window = None
        if is_causal and (extra or L < S):  # no window says this
            past = torch.ones(L, S, dtype=torch.bool, device=q.device).tril()
            mask = _both(mask, F.pad(past, (0, extra), value=True))
        elif is_causal:
            window = (None, L - S)

        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        out = attention(q, k, v, mask, dropout, bias=bias, key_mask=key_mask, window=window)
        weights = None
        if need_weights:
            # A call of its own, without values: the one above must not know what is asked for.
            _, aux = attention(
                q, k, v[..., :0], mask, bias=bias, key_mask=key_mask, window=window,
                return_aux=AuxRequest(weights=True),
            )  # fmt: skip
            assert aux.weights is not None
            weights = (aux.weights.mean(1) if average_attn_weights else aux.weights).to(out.dtype)

        batch_first = self.batch_first or not batched
        out = self.out_proj(out.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(2))
        if batched:
            return out, weights
        return out[0], None if weights is None else weights[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.in_proj_weight is None:
            W_q, W_k, W_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        else:
            if query is key and key is value:
                q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
                return q, k, v
            W_q, W_k, W_v = self.in_proj_weight.chunk(3)
        b = self.in_proj_bias
        b_q, b_k, b_v = (None, None, None) if b is None else b.chunk(3)
        return F.linear(query, W_q, b_q), F.linear(key, W_k, b_k), F.linear(value, W_v, b_v)

    def _masks(
        self, attn_mask: Tensor | None, padding: Tensor | None, N: int, extra: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Mask, bias and key mask in the language of `attention`: True = may attend."""
        mask = bias = key_mask = None
        if attn_mask is not None:
            mask = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (N, self.num_heads))
            mask = _allowed(F.pad(mask, (0, extra)) if extra else mask)  # padding blocks nothing
        if padding is not None:
            padding = padding if padding.ndim == 2 else padding[None]
            padding = _allowed(F.pad(padding, (0, extra)) if extra else padding)
            if padding.dtype == torch.bool:
                key_mask = padding
            else:
                bias = padding[:, None, None, :]
        return mask, bias, key_mask

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        inputs = {"query": query, "key": key, "value": value}
        for name, tensor in inputs.items():
            if tensor.is_nested:
                raise TypeError(
                    f"MultiheadAttention: {name} is a nested tensor; pass a padded one with "
                    "key_padding_mask. If an nn.TransformerEncoder made it, set its "
                    "use_nested_tensor to False, as replace_torch_attention does"
                )
        axes = ("N", "length") if self.batch_first else ("length", "N")
        for (name, tensor), width in zip(
            inputs.items(), (self.embed_dim, self.kdim, self.vdim), strict=True
        ):
            if tensor.ndim not in (2, 3) or tensor.shape[-1] != width:
                raise ValueError(
                    f"MultiheadAttention: {name} has shape {tuple(tensor.shape)}; it must be "
                    f"({', '.join(axes)}, {width}), or (length, {width}) without a batch"
                )
        batch = 0 if self.batch_first else 1
        if (
            query.ndim != key.ndim
            or key.shape[:-1] != value.shape[:-1]
            or (query.ndim == 3 and query.shape[batch] != key.shape[batch])
        ):
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in inputs.items())
            raise ValueError(
                f"MultiheadAttention: the shapes are {shapes}; all three must have the same batch, "
                "and key and value the same length"
            )

    def _check_mask(self, name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
        if mask is None:
            return
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"MultiheadAttention: {name} has dtype {mask.dtype}; it must be bool (True = "
                f"blocked) or floating (added to the scores). For 0/1 numbers pass {name}.bool()"
            )
        if tuple(mask.shape) not in shapes:
            raise ValueError(
                f"MultiheadAttention: {name} has shape {tuple(mask.shape)}; it must be "
                f"{' or '.join(map(str, shapes))}"
            )


def _allowed(mask: Tensor) -> Tensor:
    """A mask of torch's as one of ours: bool, True = may attend, or floating, added.

    A floating one of 0 and -inf alone becomes the boolean that it means, where its numbers may be
    looked at: both forms then give the same bits, and fused kernels serve both. torch's own
    transformer layers make floating masks of all that they are given.
    """
    if mask.dtype == torch.bool:
        return ~mask
    if mask.requires_grad or mask.is_meta or torch.compiler.is_compiling() or in_transform():
        return mask
    allowed = mask == 0
    return allowed if bool((allowed | (mask == -math.inf)).all()) else mask


def _both(mask: Tensor | None, allowed: Tensor) -> Tensor:
    """A mask (True = may attend, or added) that also blocks what is not allowed."""
    if mask is None:
        return allowed
    return mask & allowed if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)


def replace_torch_attention(model: nn.Module) -> int:
    """Turn every nn.MultiheadAttention in a model, in place, into this file's; say how many.

    The modules themselves stay: parameters, state dict, hooks and optimizers go on as they were.
    nn.TransformerEncoders that hold one stop making nested tensors. Subclasses with a forward of
    their own are left alone.

    Args:
        model: any module, an nn.MultiheadAttention itself among them.

    Returns:
        The number of modules that were turned, 0 if there were none.
    Raises:
        TypeError: one of them has parametrisations, which bind its class.

    >>> replace_torch_attention(nn.TransformerDecoderLayer(8, 2))
    2
    """
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
    ]
    for module in found:
        if type(module) is not nn.MultiheadAttention:
            raise TypeError(
                f"replace_torch_attention: the model holds a {type(module).__name__}, a class made "
                f"from nn.MultiheadAttention; replace before you parametrise"
            )
    for module in found:
        module.__class__ = MultiheadAttention
        module._qkv_same_embed_dim = False  # as _reset_parameters does
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, MultiheadAttention) for module in encoder.modules()
        ):
            encoder.use_nested_tensor = False
    return len(found)

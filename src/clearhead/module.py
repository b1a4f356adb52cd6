"""MultiHeadAttention: the textbook's heads stitched together, with what models need around them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .functional import attention
from .positions import alibi_slopes
from .results import Aux, AuxRequest

if TYPE_CHECKING:
    from .textbook import MultiHeadAttentionWrapper


class MultiHeadAttention(nn.Module):
    """Several heads computed at once: one wide projection, split into heads, attended, recombined.

        1 project     x (L, E) -> queries (L, H*D), keys (S, Hkv*D), values (S, Hkv*Dv)
        2 split       (L, H*D) -> (H, L, D): no number changes, only the grouping
        3 attend      each head on its own block
        4 recombine   (H, L, Dv) -> (L, H*Dv), then out_proj

    With the first three arguments alone it is the textbook's class and gives what
    `MultiHeadAttentionWrapper` gives with the same weights (`from_heads`, `to_heads`). Rows
    h*D ... (h+1)*D - 1 of each projection belong to head h.

    Args:
        input_dim: width E of x. head_dim: size D of each head's queries and keys.
        num_heads: number H of query heads.
        num_kv_heads: number Hkv of key/value heads, a divisor of H; H by default, 1 is
            multi-query attention.
        context_dim: width of the context in cross-attention; input_dim by default.
        value_head_dim: size Dv of each head's values; head_dim by default.
        output_dim: width of the output; num_heads * value_head_dim by default.
        qkv_bias, out_bias: whether the projections have biases.
        is_causal: whether a token sees only itself and what came before; True by default, as in
            the textbook. Cross-attention needs False.
        sliding_window: number of keys a token sees, its own one counted; None for all. Without
            is_causal it counts to both sides.
        scale: factor of q . k; 1 / sqrt(head_dim) by default.
        rope: comes with a later version.
        qk_norm: "rms" or "layer": queries and keys are normalised per head, over D, with learned
            weights (Henry et al. 2020; RMS as in Qwen3); None for none.
        softcap: c for c * tanh(score / c), as in Gemma 2; None for none.
        sinks: whether each head learns one logit that takes part in its softmax and carries no
            value, as in gpt-oss.
        alibi: whether scores fall linearly with distance (Press et al. 2022).
        gate: whether each head's output is multiplied by sigmoid(W_gate x), number by number,
            before out_proj (Qiu et al. 2025).
        dropout: chance that a weight is dropped, in training only.
        backend: "auto", or a name that `clearhead.explain` lists.

    Initialisation: weights are normal with variance 1 / fan_in and biases are 0, so that an input
    of unit variance gives queries and keys of unit variance and scores of unit variance after the
    division by sqrt(D), which is what that division is for. Fan-in alone does not change when heads
    are stitched together or share keys; Xavier's mean of both fans would. A sink starts at 0: it
    weighs as much as a key with score 0.

    Shape: (L, E), (B, L, E) or more leading axes -> the same with output_dim as the last axis.
    Source: Vaswani et al. 2017, section 3.2.2; grouped heads: Ainslie et al. 2023.

    >>> mha = MultiHeadAttention(input_dim=6, head_dim=3, num_heads=2)
    >>> mha(torch.randn(5, 6)).shape
    torch.Size([5, 6])
    """

    # After prune_heads: how many heads there were, and which are left; their slopes stay theirs.
    alibi_of: tuple[int, list[int]] | None = None

    def __init__(
        self,
        input_dim: int,
        head_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        context_dim: int | None = None,
        value_head_dim: int | None = None,
        output_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        is_causal: bool = True,
        sliding_window: int | None = None,
        scale: float | None = None,
        rope: object | None = None,
        qk_norm: str | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        gate: bool = False,
        dropout: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if rope is not None:
            raise NotImplementedError(
                "MultiHeadAttention: rope comes with a later version; until then rotate queries "
                "and keys yourself and call clearhead.attention"
            )
        self.input_dim = _positive("input_dim", input_dim)
        self.head_dim = _positive("head_dim", head_dim)
        self.num_heads = _positive("num_heads", num_heads)
        self.num_kv_heads = _positive("num_kv_heads", num_kv_heads, num_heads)
        self.context_dim = _positive("context_dim", context_dim, input_dim)
        self.value_head_dim = _positive("value_head_dim", value_head_dim, head_dim)
        self.output_dim = _positive("output_dim", output_dim, num_heads * self.value_head_dim)
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"MultiHeadAttention: num_heads = {num_heads} must be a multiple of num_kv_heads = "
                f"{self.num_kv_heads}"
            )
        if qk_norm not in (None, "rms", "layer"):
            raise ValueError(
                f'MultiHeadAttention: qk_norm is {qk_norm!r}; it must be "rms", "layer" or None'
            )
        if not 0 <= dropout <= 1:
            raise ValueError(f"MultiHeadAttention: dropout is {dropout}; it must lie in 0 ... 1")
        if softcap is not None and not softcap > 0:
            raise ValueError(
                f"MultiHeadAttention: softcap is {softcap}; it must be positive, None for none"
            )
        self.is_causal = is_causal
        self.sliding_window = _positive("sliding_window", sliding_window, None)
        self.scale, self.softcap, self.alibi = scale, softcap, alibi
        self.dropout, self.backend, self.qk_norm = dropout, backend, qk_norm

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        heads, kv_heads, Dv = self.num_heads, self.num_kv_heads, self.value_head_dim
        self.W_query = nn.Linear(input_dim, heads * head_dim, bias=qkv_bias, **made)
        self.W_key = nn.Linear(self.context_dim, kv_heads * head_dim, bias=qkv_bias, **made)
        self.W_value = nn.Linear(self.context_dim, kv_heads * Dv, bias=qkv_bias, **made)
        self.out_proj: nn.Module = nn.Linear(heads * Dv, self.output_dim, bias=out_bias, **made)
        self.W_gate = nn.Linear(input_dim, heads * Dv, bias=False, **made) if gate else None
        norm = {None: nn.Identity, "rms": nn.RMSNorm, "layer": nn.LayerNorm}[qk_norm]
        self.norm_query = norm(head_dim, **made) if qk_norm else None
        self.norm_key = norm(head_dim, **made) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(heads, **made)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights anew, as the class's description says."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: object | None = None,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, Aux]:
        """Attend from x to itself, or to a context.

        Args:
            x: (L, E), (B, L, E) or more leading axes.
            context: (S, context_dim) with x's leading axes, for cross-attention.
            attn_mask: broadcasts to (B, H, L, S): bool, True = may attend, or floating, added.
            key_mask: (B, S) bool, True = may be attended; for padding.
            positions, cache: come with a later version.
            return_aux: an AuxRequest, to get (out, aux).

        Returns:
            (..., L, output_dim), and an Aux if asked for. A token that may attend to nothing gets
            out_proj's bias, or 0.
        Raises:
            ValueError: sizes do not fit, or is_causal with a context.
        """
        if cache is not None or positions is not None:
            name = "cache" if cache is not None else "positions"
            raise NotImplementedError(
                f"MultiHeadAttention: {name} comes with a later version; until then pass all "
                "tokens at once"
            )
        self._check(x, context)
        source = x if context is None else context

        layers: Any = self._modules  # nn.Module finds an attribute there only after 0.8 us
        q = self._split(layers["W_query"](x), self.num_heads, self.norm_query)
        k = self._split(layers["W_key"](source), self.num_kv_heads, self.norm_key)
        v = self._split(layers["W_value"](source), self.num_kv_heads, None)
        result = attention(
            q,
            k,
            v,
            attn_mask,
            self.dropout if self.training else 0.0,
            self.is_causal,
            scale=self.scale,
            key_mask=key_mask,
            window=self._window(),
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self._slopes(x.device),
            backend=self.backend,
            return_aux=return_aux,
        )
        out, aux = result if isinstance(result, tuple) else (result, None)
        out = out.transpose(-3, -2).flatten(-2)
        if self.W_gate is not None:
            out = out * torch.sigmoid(self.W_gate(x))
        out = layers["out_proj"](out)
        return out if aux is None else (out, aux)

    def _split(
        self, projected: Tensor, heads: int, norm: nn.RMSNorm | nn.LayerNorm | None
    ) -> Tensor:
        """(..., L, heads * size) -> (..., heads, L, size): no number changes, only the grouping."""
        blocks = torch.unflatten(projected, -1, (heads, -1))
        if norm is not None:  # in the precision of its weights, which autocast leaves alone
            blocks = norm(blocks.to(norm.weight.dtype)).to(blocks.dtype)
        return blocks.transpose(-3, -2)

    def _slopes(self, device: torch.device) -> Tensor | None:
        if not self.alibi:
            return None
        if self.alibi_of is None:
            return alibi_slopes(self.num_heads, device)
        total, heads = self.alibi_of
        return alibi_slopes(total, device)[heads]

    def _window(self) -> tuple[int | None, int | None] | None:
        if self.sliding_window is None:
            return None
        side = self.sliding_window - 1
        return (side, 0) if self.is_causal else (side, side)

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        if x.ndim < 2 or x.shape[-1] != self.input_dim:
            raise ValueError(
                f"MultiHeadAttention: x has shape {tuple(x.shape)}; it must be (..., length, "
                f"input_dim) with input_dim = {self.input_dim}"
            )
        if context is None:
            if self.context_dim != self.input_dim:
                raise ValueError(
                    f"MultiHeadAttention: context_dim = {self.context_dim} differs from input_dim "
                    f"= {self.input_dim}, so a context must be passed"
                )
            return
        if self.is_causal:
            raise ValueError(
                "MultiHeadAttention: a context has no order to be causal in; build the module with "
                "is_causal=False for cross-attention"
            )
        if context.ndim != x.ndim or context.shape[-1] != self.context_dim:
            raise ValueError(
                f"MultiHeadAttention: context has shape {tuple(context.shape)}; it must have x's "
                f"{x.ndim} axes and end in context_dim = {self.context_dim}"
            )

    def extra_repr(self) -> str:
        """The sizes, and the options that differ from the defaults, in the constructor's words."""
        has = {
            "qkv_bias": getattr(self.W_query, "bias", None) is not None,
            "out_bias": getattr(self.out_proj, "bias", None) is not None,
            "sinks": self.sinks is not None,
            "gate": self.W_gate is not None,
        }
        usual = {
            "num_kv_heads": self.num_heads,
            "context_dim": self.input_dim,
            "value_head_dim": self.head_dim,
            "output_dim": self.num_heads * self.value_head_dim,
            "qkv_bias": False,
            "out_bias": False,
            "is_causal": True,
            "sliding_window": None,
            "scale": None,
            "qk_norm": None,
            "softcap": None,
            "sinks": False,
            "alibi": False,
            "gate": False,
            "dropout": 0.0,
            "backend": "auto",
        }
        options = {name: has[name] if name in has else getattr(self, name) for name in usual}
        parts = [f"{name}={getattr(self, name)}" for name in ("input_dim", "head_dim", "num_heads")]
        parts += [f"{name}={is_!r}" for name, is_ in options.items() if is_ != usual[name]]
        return ", ".join(parts)

    @classmethod
    def from_heads(cls, wrapper: MultiHeadAttentionWrapper) -> MultiHeadAttention:
        """The module that holds the wrapper's weights, to the bit, and gives its result."""
        from .convert import from_heads

        return from_heads(wrapper)

    def to_heads(self) -> MultiHeadAttentionWrapper:
        """The wrapper that holds this module's weights, to the bit, and gives its result.

        Grouped heads each get a copy of the keys and values they share. Raises ValueError naming
        the options that the textbook's heads do not have.
        """
        from .convert import to_heads

        return to_heads(self)

    def prune_heads(self, heads: Iterable[int]) -> MultiHeadAttention:
        """A module without these heads, see `clearhead.surgery.prune_heads`; this one stays."""
        from .surgery import prune_heads

        return prune_heads(self, heads)

    def merge_kv_heads(self, num_kv_heads: int) -> MultiHeadAttention:
        """A module with so many key/value heads, each the mean of a group; see
        `clearhead.surgery.merge_kv_heads`. This one stays."""
        from .surgery import merge_kv_heads

        return merge_kv_heads(self, num_kv_heads)

    @classmethod
    def from_torch(
        cls, mha: nn.MultiheadAttention, *, is_causal: bool = False
    ) -> MultiHeadAttention:
        """A module with the weights of torch's nn.MultiheadAttention, giving its outputs.

        See `clearhead.convert.from_torch` for what is different in the call.
        """
        from .convert import from_torch

        return from_torch(mha, is_causal=is_causal)


def _positive(name: str, value: int | None, default: int | None = None) -> int:
    """The value, or the default where it is None; raises unless it is a whole number above 0."""
    if value is None:
        return default  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"MultiHeadAttention: {name} is {value!r}; it must be a whole number")
    if value < 1:
        raise ValueError(f"MultiHeadAttention: {name} is {value}; it must be 1 or more")
    return value

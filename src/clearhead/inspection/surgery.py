"""Heads taken out: while a model runs (`watch(ablate=...)`)."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .calls import Call
from .names import is_layer


class Ablation:
    """Which heads of which layers are replaced, by 0 or by their mean over the rows."""

    def __init__(self, layers: Mapping[int | str, Iterable[int]], mode: str) -> None:
        if mode not in ("zero", "mean"):
            raise ValueError(f'watch: mode is {mode!r}; it must be "zero" or "mean"')
        self.layers = {layer: [int(h) for h in heads] for layer, heads in layers.items()}
        self.mode = mode

    def heads(self, name: str, number: int, H: int) -> list[int]:
        """The heads of a layer to be replaced, checked against the H it has."""
        wanted = [
            h for layer, its in self.layers.items() if is_layer(layer, name, number) for h in its
        ]
        wrong = [h for h in wanted if not 0 <= h < H]
        if wrong:
            raise ValueError(
                f"watch: ablate names head {wrong[0]} of layer {name}, which has {H}, from 0 to "
                f"{H - 1}"
            )
        return wanted

    def of_outputs(self, name: str, number: int, call: Call, out: Any) -> Any:
        """The result of an attention call, (B, H, L, Dv) or with an Aux, its heads replaced."""
        heads = self.heads(name, number, call.sizes[1])
        if not heads:
            return out
        if call.kind == "multi_head_attention_forward":
            raise NotImplementedError(
                f"watch: {name} is an nn.MultiheadAttention, which mixes its heads before watch "
                "sees them; turn it into clearhead's with compat.replace_torch_attention(model)"
            )
        if isinstance(out, tuple):
            return (self._replaced(out[0], heads, call.sizes[1]), *out[1:])
        return self._replaced(out, heads, call.sizes[1])

    def of_weights(self, name: str, number: int, call: Call, weights: Tensor) -> Tensor:
        """The weights of a call that multiplies them with the values itself, heads replaced.

        Their mean over the rows gives the mean of the outputs.
        """
        heads = self.heads(name, number, call.sizes[1])
        return self._replaced(weights, heads, call.sizes[1]) if heads else weights

    def _replaced(self, tensor: Tensor, heads: list[int], H: int) -> Tensor:
        """(..., H, L, any), with these heads 0, or their mean over L."""
        axes = tuple(tensor.shape)
        if tensor.ndim == 4 and axes[1] * axes[2] == H != axes[1]:
            tensor = tensor.flatten(1, 2).unsqueeze(2)  # one row of grouped heads, packed
        if tensor.ndim < 3 or tensor.shape[-3] != H:
            raise NotImplementedError(
                f"watch: a result of shape {axes} does not show its {H} heads on the third axis "
                "from the right, so none can be ablated"
            )
        gone = torch.zeros(H, 1, 1, dtype=torch.bool, device=tensor.device)
        gone[heads] = True
        other = tensor.mean(-2, keepdim=True) if self.mode == "mean" else tensor.new_zeros(())
        return torch.where(gone, other, tensor).reshape(axes)

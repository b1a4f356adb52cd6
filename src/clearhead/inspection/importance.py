"""How much each head of a model matters to its loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..module import MultiHeadAttention


def head_importance(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], batches: int = 1
) -> dict[str, Tensor]:
    """How much each head matters: |d loss / d m_h| at m_h = 1, m_h multiplying the head's output.

    A head whose output the loss would not miss has 0 (Michel et al. 2019, equation 2). The absolute
    value is taken of each batch's sum, then the mean over the batches.

    Args:
        model: any module with MultiHeadAttention in it; its gradients stay as they are.
        loss: called as loss(model), to run the model and give one number; once for each batch.
        batches: how often to call it.

    Returns:
        For the path of each MultiHeadAttention its H numbers, on its device.
    Raises:
        ValueError: the model has no MultiHeadAttention, or the loss is no number that depends on
        one.
    """
    layers = {p: m for p, m in model.named_modules() if isinstance(m, MultiHeadAttention)}
    if not layers:
        raise ValueError(
            f"head_importance: {type(model).__name__} holds no MultiHeadAttention; for other "
            "models watch(ablate=...) shows what a head is worth"
        )
    masks = {}
    for path, layer in layers.items():
        like = layer.W_query.weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        ones = torch.ones(layer.num_heads, 1, device=like.device, dtype=dtype)
        masks[path] = ones.requires_grad_()
    total = {path: torch.zeros_like(mask[:, 0]) for path, mask in masks.items()}
    handles = [
        layer.out_proj.register_forward_pre_hook(_masking(masks[path], layer.num_heads))
        for path, layer in layers.items()
    ]
    try:
        with torch.enable_grad():
            for _ in range(batches):
                value = loss(model)
                if value.numel() != 1 or not value.requires_grad:
                    raise ValueError(
                        f"head_importance: loss gave a tensor of shape {tuple(value.shape)}; it "
                        "must be one number computed from the model's output, with its graph"
                    )
                grads = torch.autograd.grad(value, list(masks.values()), allow_unused=True)
                for path, grad in zip(masks, grads, strict=True):
                    if grad is not None:
                        total[path] += grad[:, 0].abs() / batches
    finally:
        for handle in handles:
            handle.remove()
    return {path: t.detach() for path, t in total.items()}


def _masking(mask: Tensor, H: int) -> Callable:
    """A hook that multiplies what each head hands to out_proj."""

    def hook(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return ((args[0].unflatten(-1, (H, -1)) * mask.to(args[0].dtype)).flatten(-2),)

    return hook

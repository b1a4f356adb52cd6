"""`clearhead explain`: which backend a call would use, and why not each other one."""

import math
from typing import Annotated, Any

import typer

from .checks import numbers, within

# Choosing a backend looks at numbers, and at the pairs a rule allows: seconds at these sizes.
MOST_NUMBERS, MOST_PAIRS = 2**33, 2**30


def explain(
    shape: Annotated[
        str, typer.Option(help="Batch, heads, queries, keys, head size.", metavar="B,H,L,S,D")
    ],
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads; must divide the heads.", show_default="H")
    ] = None,
    value_dim: Annotated[
        int | None, typer.Option(help="Size of a value head.", show_default="D")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float64, float16 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the tensors live, such as cuda.")] = "cpu",
    causal: Annotated[bool, typer.Option("--causal", help="No query sees later keys.")] = False,
    window: Annotated[
        str | None,
        typer.Option(help="Keys seen left and right of the own one, or none.", metavar="L,R"),
    ] = None,
    mask: Annotated[str, typer.Option(help="none, bool or float: an (L, S) mask.")] = "none",
    key_mask: Annotated[bool, typer.Option("--key-mask", help="The last key is padding.")] = False,
    documents: Annotated[
        bool, typer.Option("--documents", help="Two documents packed in one row.")
    ] = False,
    softcap: Annotated[float | None, typer.Option(help="Bound on the scores.")] = None,
    sinks: Annotated[bool, typer.Option("--sinks", help="One extra logit for each head.")] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="Scores fall with distance.")] = False,
    dropout: Annotated[float, typer.Option(help="Share of the weights dropped.")] = 0.0,
    grad: Annotated[bool, typer.Option("--grad", help="A backward pass will follow.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Return the weights too.")] = False,
    lse: Annotated[bool, typer.Option("--lse", help="Return each row's log sum too.")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits on every run.")
    ] = False,
    backend: Annotated[str, typer.Option(help="Ask for one backend by name.")] = "auto",
) -> None:
    """Name the backend that a call of this shape would use, and why not each other one."""
    sizes = numbers("--shape", shape, "B,H,L,S,D")
    B, H, L, S, D = sizes
    Hkv = H if kv_heads is None else kv_heads
    Dv = D if value_dim is None else value_dim
    for size in (*sizes, Hkv, Dv):
        within("a size", size, 0, MOST_NUMBERS)
    for name, size in (("query", H * L * D), ("key", Hkv * S * D), ("value", Hkv * S * Dv)):
        within(f"the count of numbers in {name}", B * size, 0, MOST_NUMBERS)
    if window or key_mask or documents or mask != "none" or (causal and L != S):
        within("batch times queries times keys, with a rule,", B * L * S, 0, MOST_PAIRS)
    sides = None if window is None else numbers("--window", window, "L,R", allow_none=True)
    if mask not in ("none", "bool", "float"):
        raise ValueError(f"--mask is {mask}; it must be none, bool or float")

    import torch

    import clearhead
    from clearhead.view.terminal import make_console, print_wrapped, show_choice

    float_type: Any = getattr(torch, dtype, None)
    if not isinstance(float_type, torch.dtype) or not float_type.is_floating_point:
        raise ValueError(f"--dtype is {dtype}; it must be float32, float64, float16 or bfloat16")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device is {device}, which torch cannot use here: {error}") from None

    def filled(*sizes: int, value: float = 0, dtype: Any = float_type) -> Any:
        """A constant that owns only as many trailing axes as are small: only its shape matters."""
        start = 0
        while math.prod(sizes[start:]) > 2**24:
            start += 1
        return torch.full(sizes[start:], value, dtype=dtype, device=device).expand(sizes)

    def halves(length: int) -> Any:
        return (torch.arange(length, device=device) * 2 // max(length, 1)).expand(B, length)

    query, key, value = filled(B, H, L, D), filled(B, Hkv, S, D), filled(B, Hkv, S, Dv)
    if grad:
        for tensor in (query, key, value):
            tensor.requires_grad_()
    places = torch.arange(S, device=device)
    slopes = 2.0 ** (-8 * torch.arange(1, H + 1, device=device) / max(H, 1))
    attn_mask = None
    if mask == "bool":
        attn_mask = filled(L, S, value=True, dtype=torch.bool)
    elif mask == "float":
        attn_mask = filled(L, S)
    explanation = clearhead.explain(
        query,
        key,
        value,
        attn_mask,
        dropout,
        causal,
        window=sides,
        key_mask=(places < max(S - 1, 1)).expand(B, S) if key_mask else None,
        documents=(halves(L), halves(S)) if documents else None,
        softcap=softcap,
        sinks=filled(H) if sinks else None,
        alibi_slopes=slopes if alibi else None,
        deterministic=deterministic,
        backend=backend,
        return_aux=clearhead.AuxRequest(lse=lse, weights=weights) if lse or weights else None,
    )
    console = make_console()
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    print_wrapped(console, f"{shapes}, {dtype} on {device}", indent=0)
    console.print()
    show_choice(
        console, explanation.backend, explanation.how, explanation.reasons, explanation.notes
    )

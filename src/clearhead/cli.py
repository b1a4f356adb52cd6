"""The `clearhead` command: see attention at work, walk through it, explain a choice.

Every command answers bad input with one line, `clearhead: ...`, on stderr and exit status 2. torch
and everything else that is slow to load is imported inside the commands that need it.
"""

import contextlib
import io
import math
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# What the library raises for input it cannot take, and what a missing extra raises.
BAD_INPUT = (ValueError, TypeError, NotImplementedError, ImportError)


class _OneLineErrors(TyperGroup):
    """A group whose commands answer bad input with one line and exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BAD_INPUT as error:
            if ctx.params.get("traceback"):
                raise
            line = " ".join(str(error).split()) or type(error).__name__
            typer.echo(f"clearhead: {line}", err=True)
            raise typer.Exit(2) from None


# The walkthrough prints every number it computes: more than this is a slip, not a lesson.
MOST_WORDS, WIDEST = 256, 1024
# Choosing a backend looks at numbers, and at the pairs a rule allows: seconds at these sizes.
MOST_NUMBERS, MOST_PAIRS = 2**33, 2**30

app = typer.Typer(
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Multi-head attention: see it at work, walk through it by hand, know which path runs.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import clearhead

        typer.echo(f"clearhead {clearhead.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from, for a bug report.")
    ] = False,
) -> None:
    pass


@app.command()
def see(
    text: Annotated[
        str, typer.Argument(help="What the model reads; - for standard input.")
    ] = "The dog fetched the ball because she was fast.",
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder or a name that transformers can load.", show_default="SmolLM2-135M"
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="How many links to show for each word.")] = 3,
    stat: Annotated[
        str, typer.Option(help="The map: sink, previous, self, entropy or distance.")
    ] = "sink",
    layer: Annotated[
        int | None, typer.Option(help="Links of this layer only, from 0.", show_default="all")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="And of this head of it only.", show_default="all")
    ] = None,
    html: Annotated[
        str | None, typer.Option(help="Write a page of all heads to this file instead.")
    ] = None,
    full: Annotated[
        str | None,
        typer.Option(
            help="What the page keeps of a long text: maps or qk (queries and keys).",
            show_default="the strongest links",
        ),
    ] = None,
    png: Annotated[
        str | None, typer.Option(help="Draw all heads into this .png, .pdf or .svg instead.")
    ] = None,
) -> None:
    """What the heads of a real model look at in a text: the strongest links, a map of all heads."""
    from clearhead.view.links import TITLES, show_links, show_map, show_outstanding
    from clearhead.view.terminal import make_console, print_wrapped

    text = (sys.stdin.read() if text == "-" else text).strip()
    if not text:
        raise ValueError("the text is empty; give a sentence")
    if stat not in TITLES:
        raise ValueError(f"--stat is {stat}; it must be one of {', '.join(TITLES)}")
    if head is not None and layer is None:
        raise ValueError("--head needs --layer: heads are numbered within a layer")
    _within("--top", top, 1, 1000)
    _within("--layer", layer or 0, 0, 10**6)
    _within("--head", head or 0, 0, 10**6)
    if full is not None and (full not in ("maps", "qk") or html is None):
        raise ValueError(f"--full is {full}; it must be maps or qk, and goes with --html")

    with _progress("loading") as progress:
        from clearhead import hf
        from clearhead.inspection.links import Look
        from clearhead.inspection.report import Report

        network, tokenizer = hf.load(
            model, lambda done, total: progress("converting the model, once", done, total)
        )
        tokens = hf.tokenize(network, tokenizer, text)
        look = Look(text, tokens.offsets, tokens.special, stat, layer, head)
        layers = getattr(network.config.get_text_config(), "num_hidden_layers", None)
        report = None
        if html or png:
            shape = network.config.get_text_config().num_attention_heads, layers or 1
            report = Report(text, tokens.offsets, tokens.special, tokens.texts, shape, full)

        def on_layer(number: int, weights: Any) -> None:
            if report:
                report.add(number, weights)
            look.add(number, weights)
            progress("reading", number + 1, layers)

        ran = hf.attentions(network, tokens, on_layer, report.take if report else None)
    if layer is not None:
        _within("--layer", layer, 0, len(look.heads) - 1)

    sizes = [len(row) for row in look.heads]
    heads = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    part = "" if hf.reader(network) is network.base_model else " (its encoder)"
    length = f"{len(tokens.texts)} token{'s' * (len(tokens.texts) != 1)}"
    by = "clearhead" if ran == hf.NAME else "the model's own code"
    name = f"{model or hf.DEFAULT_MODEL}{part}"
    summary = f"{name}: {len(sizes)} layers x {heads} heads, {length}; attention by {by}"
    if layer is not None:
        summary += f"; links of layer {layer}" + ("" if head is None else f", head {head}")
    console = make_console()
    print_wrapped(console, summary, indent=0)
    if report:
        for line in report.write(
            name, summary, html, png, None if layer is None else (layer, head)
        ):
            typer.echo(line)  # never wrapped: a path is to be copied
        return
    console.print()
    if len(tokens.texts) == 1:
        print_wrapped(console, "A text of one token has nothing to look at but itself.", indent=0)
        return
    left_out = (
        name if added else "the first token"
        for i, (name, added) in enumerate(zip(tokens.texts, tokens.special, strict=True))
        if added or i == 0
    )
    hidden = " and ".join(dict.fromkeys(left_out))
    depth, words = len(look.heads), look.words.texts
    show_links(console, words, look.strongest(top), layers=depth, causal=look.causal, hidden=hidden)
    console.print()
    show_outstanding(console, words, look.outstanding(6), layers=depth)
    console.print()
    show_map(console, look.heads, stat, hidden)


@contextlib.contextmanager
def _progress(start: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on stderr while something takes its time: progress(what, done, total)."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from clearhead.view.terminal import make_console

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(start, total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


@app.command()
def walkthrough(
    text: Annotated[
        str, typer.Argument(help="The words to walk through, apart by spaces.")
    ] = "the dog fetched the ball",
    heads: Annotated[int, typer.Option(help="How many heads look at the words.")] = 2,
    head_dim: Annotated[int, typer.Option(help="How many numbers each head works with.")] = 3,
    input_dim: Annotated[
        int | None,
        typer.Option(help="How long each word's vector is.", show_default="heads x head-dim"),
    ] = None,
    seed: Annotated[int, typer.Option(help="What the random numbers are drawn from.")] = 0,
    precision: Annotated[int, typer.Option(help="Digits behind the decimal point.")] = 2,
    html: Annotated[
        str | None, typer.Option(help="Write a page with these steps to this file instead.")
    ] = None,
) -> None:
    """Multi-head attention by hand: every matrix of a small example, and the line that makes it."""
    words = text.split()
    if not words:
        raise ValueError("the text is empty; give at least one word")
    _within("the number of words", len(words), 1, MOST_WORDS)
    _within("--heads", heads, 1, WIDEST)
    _within("--head-dim", head_dim, 1, WIDEST)
    _within("--heads times --head-dim", heads * head_dim, 1, WIDEST)
    if input_dim is not None:
        _within("--input-dim", input_dim, 1, WIDEST)
    _within("--seed", seed, 0, 2**63 - 1)
    _within("--precision", precision, 0, 12)

    from clearhead.inspection.trace import worked_example
    from clearhead.view.terminal import (
        make_console,
        print_wrapped,
        show_comparison,
        show_step,
    )

    steps = worked_example(words, heads, head_dim, input_dim, seed)
    console = make_console()
    if html is not None:
        typer.echo(steps.write(html))
        return
    *path, plain, difference = steps
    sizes = f"words {len(words)}, heads {heads} of size {head_dim}, vectors of size"
    print_wrapped(console, f"{sizes} {path[0].shape[1]}, random numbers of seed {seed}", indent=0)
    console.print()
    for number, step in enumerate(path, start=1):
        show_step(console, number, step, precision)
    show_comparison(console, len(path) + 1, path[-1], plain, difference, precision)


@app.command()
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
    sizes = _numbers("--shape", shape, "B,H,L,S,D")
    B, H, L, S, D = sizes
    Hkv = H if kv_heads is None else kv_heads
    Dv = D if value_dim is None else value_dim
    for size in (*sizes, Hkv, Dv):
        _within("a size", size, 0, MOST_NUMBERS)
    for name, size in (("query", H * L * D), ("key", Hkv * S * D), ("value", Hkv * S * Dv)):
        _within(f"the count of numbers in {name}", B * size, 0, MOST_NUMBERS)
    if window or key_mask or documents or mask != "none" or (causal and L != S):
        _within("batch times queries times keys, with a rule,", B * L * S, 0, MOST_PAIRS)
    sides = None if window is None else _numbers("--window", window, "L,R", allow_none=True)
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


def _within(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError where a number from the command line is out of bounds."""
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise ValueError(f"{name} is {value}; it must be {bound}")


def _numbers(name: str, text: str, form: str, allow_none: bool = False) -> tuple[Any, ...]:
    """Whole numbers apart by commas, as many as `form` has; "none" is None where it is allowed."""
    parts = [part.strip() for part in text.split(",")]
    try:
        numbers = tuple(None if allow_none and p.lower() == "none" else int(p) for p in parts)
    except ValueError:
        numbers = ()
    if len(numbers) != form.count(",") + 1:
        kind = "whole numbers or none" if allow_none else "whole numbers"
        raise ValueError(f"{name} is {text!r}; it must be {kind} in the form {form}")
    return numbers


def main() -> None:
    """Run the command line: the entry point of `clearhead` and of `python -m clearhead`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that cannot be printed becomes "?"
            stream.reconfigure(errors="replace")
    app(prog_name="clearhead")

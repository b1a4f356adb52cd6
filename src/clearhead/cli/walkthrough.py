"""`clearhead walkthrough`: a small example of attention, every matrix of it."""

from typing import Annotated

import typer

from .checks import within

# The walkthrough prints every number it computes: more than this is a slip, not a lesson.
MOST_WORDS, WIDEST = 256, 1024


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
    within("the number of words", len(words), 1, MOST_WORDS)
    within("--heads", heads, 1, WIDEST)
    within("--head-dim", head_dim, 1, WIDEST)
    within("--heads times --head-dim", heads * head_dim, 1, WIDEST)
    if input_dim is not None:
        within("--input-dim", input_dim, 1, WIDEST)
    within("--seed", seed, 0, 2**63 - 1)
    within("--precision", precision, 0, 12)

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

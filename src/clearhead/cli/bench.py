"""`clearhead bench`: how much faster it is, on this machine, now."""

from typing import Annotated

import typer


def bench(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Only cases whose name holds one of these, or of that kind."),
    ] = None,
    threads: Annotated[
        str, typer.Option(help="Numbers of threads, as in 1,all.", show_default="all")
    ] = "",
    dtypes: Annotated[str, typer.Option(help="Of float32 and bfloat16.")] = "float32,bfloat16",
    peers: Annotated[
        str,
        typer.Option(
            help="Of sdpa, flex, eager, x-transformers, without, nn.MultiheadAttention, series "
            "and stitched; or all.",
            show_default="all but flex, eager and x-transformers",
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(help="For each pair of ours and a peer.")] = 2.0,
    growth: Annotated[
        bool, typer.Option("--growth", help="Also how time grows with length and heads.")
    ] = False,
    only_list: Annotated[bool, typer.Option("--list", help="Name the cases and stop.")] = False,
    json: Annotated[str | None, typer.Option(help="Write the results to this file.")] = None,
    markdown: Annotated[str | None, typer.Option(help="Write the tables to this file.")] = None,
    png: Annotated[str | None, typer.Option(help="Draw a chart into this file.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Say what changed since the --json of an earlier run.")
    ] = None,
) -> None:
    """How much faster clearhead is than what else there is: ratios of alternating runs."""
    from clearhead.benchmarks import command
    from clearhead.view.bench import show_lines, show_reading, show_results
    from clearhead.view.progress import progress_bar
    from clearhead.view.terminal import make_console

    console = make_console()
    if only_list:
        show_lines(console, command.listing(words or []))
        return
    with progress_bar("measuring the machine") as progress:
        results = command.bench(
            words or [],
            threads=threads,
            dtypes=dtypes,
            names=peers,
            seconds=seconds,
            growth=growth,
            json_path=json,
            markdown_path=markdown,
            png_path=png,
            compare_path=compare,
            on_start=progress,
        )
    show_reading(console, results.about)
    for table in results.tables:
        console.print()
        show_results(console, *table)
    show_lines(console, results.changes)

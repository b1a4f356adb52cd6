"""`clearhead bench`: how much faster it is, and how exact, on this machine, now."""

from typing import Annotated

import typer

# Options that belong to one kind of measurement alone.
OF_TIMES = ("threads", "peers", "seconds", "growth", "png", "compare")
OF_ERRORS = ("draws", "spread")


def bench(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Only cases whose name holds one of these, or of that kind."),
    ] = None,
    threads: Annotated[
        str, typer.Option(help="Numbers of threads, as in 1,all.", show_default="all")
    ] = "",
    dtypes: Annotated[
        str,
        typer.Option(
            help="Of float32, bfloat16 and, with --accuracy, float16.", show_default="all of them"
        ),
    ] = "",
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
    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy",
            help="Not times but errors: ours / F.sdpa's on the same numbers, against float64.",
        ),
    ] = False,
    draws: Annotated[int, typer.Option(help="Of each setting of --accuracy.")] = 10,
    spread: Annotated[
        float, typer.Option(help="Queries of --accuracy are so many times normal numbers.")
    ] = 1.0,
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
    from clearhead.view.bench import (
        show_changes,
        show_errors,
        show_lines,
        show_reading,
        show_results,
    )
    from clearhead.view.progress import progress_bar
    from clearhead.view.terminal import make_console

    for name in OF_TIMES if accuracy else OF_ERRORS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                f"--{name} belongs to times, which --accuracy does not measure; leave one out"
                if accuracy
                else f"--{name} belongs to --accuracy; add that, or leave --{name} out"
            )
    console = make_console()
    if only_list:
        list_names = command.accuracy_listing if accuracy else command.listing
        show_lines(console, list_names(words or []))
        return
    if accuracy:
        with progress_bar("drawing numbers") as progress:
            errors = command.bench_accuracy(
                words or [],
                dtypes=dtypes,
                draws=draws,
                spread=spread,
                json_path=json,
                markdown_path=markdown,
                on_start=progress,
            )
        show_reading(console, errors.about, errors.drawn)
        for title, rows in errors.tables:
            console.print()
            show_errors(console, title, rows)
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
    if results.changes is not None:
        console.print()
        show_changes(console, results.changes)

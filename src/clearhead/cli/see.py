"""`clearhead see`: what the heads of a real model look at in a text."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .checks import within

MOST_WEIGHTS = 2**28  # of one layer, over all heads: a gigabyte, of which some copies are made


def see(
    text: Annotated[
        str | None,
        typer.Argument(help="What the model reads; - for standard input.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Read the text from a file.", show_default=False)
    ] = None,
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
        int | None,
        typer.Option(help="And of this head of it only, as a picture too.", show_default="all"),
    ] = None,
    hide_sink: Annotated[
        bool,
        typer.Option(
            "--hide-sink/--show-sink", help="Leave out links to the first and to added tokens."
        ),
    ] = True,
    roles: Annotated[
        bool | None,
        typer.Option(
            "--roles/--no-roles",
            help="Only the table of what each head does, or all but that. It is measured once for "
            "each model and takes a minute for the default one.",
            show_default="with the text",
        ),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure the roles again, and keep them.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="All that would be shown, for a program.")
    ] = False,
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
    """What the heads of a real model look at in a text, and what each head does in general."""
    from clearhead.view.links import TITLES
    from clearhead.view.progress import progress_bar

    words = "" if roles else _text(text, file)
    if stat not in TITLES:
        raise ValueError(f"--stat is {stat}; it must be one of {', '.join(TITLES)}")
    if head is not None and layer is None:
        raise ValueError("--head needs --layer: heads are numbered within a layer")
    within("--top", top, 1, 1000)
    within("--layer", layer or 0, 0, 10**6)
    within("--head", head or 0, 0, 10**6)
    if full is not None and (full not in ("maps", "qk") or html is None):
        raise ValueError(f"--full is {full}; it must be maps or qk, and goes with --html")
    if roles and (html or png):
        raise ValueError("--roles shows no text; leave it out for --html and --png")

    with progress_bar("loading") as progress:
        from clearhead import hf

        network, tokenizer = hf.load(
            model, lambda done, total: progress("converting the model, once", done, total)
        )
        tokens = None if roles else hf.tokenize(network, tokenizer, words)
        if tokens is not None:
            _check_length(network, len(tokens.texts))
        table = None
        if roles is not False:
            from .known_roles import known_roles

            table = known_roles(network, tokenizer, refresh, progress)
        name = model or hf.DEFAULT_MODEL
        seen: dict[str, Any] = {"model": name}
        report = None
        if tokens is not None:
            from .sight import look_at, report_of

            progress("reading", 0, None)
            report = report_of(network, tokens, words, full) if html or png else None
            seen |= look_at(
                network, tokens, words, table, stat, top, layer, head, hide_sink, report
            )
        seen["roles"] = None if table is None else table.to_dict()

    if report is not None:
        from .showing import tell_written

        tell_written(seen, report, html, png, table)
    elif as_json:
        typer.echo(json.dumps(_finite(seen), ensure_ascii=False, allow_nan=False))
    else:
        from .showing import show

        show(seen, only_roles=bool(roles))


def _text(text: str | None, file: Path | None) -> str:
    if file is not None and text is not None:
        raise ValueError("there is a text and a --file; give one of them")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--file {file} cannot be read as text: {error}") from error
    elif text == "-":
        text = sys.stdin.read()
    elif text is None:
        text = "The dog fetched the ball because she was fast."
    if not text.strip():
        raise ValueError("the text is empty; give a sentence")
    return text.strip()


def _check_length(network: Any, length: int) -> None:
    H = getattr(network.config.get_text_config(), "num_attention_heads", None) or 1
    most = math.isqrt(MOST_WEIGHTS // H)
    if length > most:
        raise ValueError(
            f"the text has {length} tokens, and with {H} heads in a layer at most {most} can be "
            "looked at; shorten it"
        )


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

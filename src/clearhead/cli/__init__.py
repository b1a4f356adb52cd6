"""The `clearhead` command: see attention at work, walk through it, explain a choice.

Each command is a function in a file of its own. Every one answers bad input with one line,
`clearhead: ...`, on stderr and exit status 2. torch and everything else that is slow to load is
imported inside the commands that need it.
"""

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .bench import bench
from .explain import explain
from .see import see
from .walkthrough import walkthrough

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


for command in (see, walkthrough, explain, bench):
    app.command()(command)


def main() -> None:
    """Run the command line: the entry point of `clearhead` and of `python -m clearhead`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a letter that cannot be printed becomes "?"
            stream.reconfigure(errors="replace")
    app(prog_name="clearhead")

"""The command line as a whole: its groups, how a command is added to it, how one ends, and what may reach stdout.

Exit codes: 0 done; 1 bad input or a failed run, with one line that names it, or nobody reads what is printed; 2 wrong
usage; 130 ended by Ctrl-C. With --json, stdout has {"error": ...} for all of them but 0.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import Annotated, Any, ParamSpec, TextIO

import typer
from typer.core import TyperGroup

from ... import __version__
from ...datasets import ForetuneError
from ...datasets.errors import printable

P = ParamSpec("P")
#: What typer raises for wrong usage: its own copy of click's UsageError, or click's, by its version.
WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
#: The exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130
#: Where a context keeps the words of the command line.
GIVEN = "foretune.given"
#: The order of commands in `--help`: the one in which users need them.
ORDER = (
    "quickstart", "collect", "train", "adapt", "evaluate", "report", "replay", "predict", "cover", "warmup", "device",
    "export", "bench", "datasets", "cache",
)  # fmt: skip
_result: TextIO | None = None  # where a result is printed under --json


class Commands(TyperGroup):
    """The whole command line: what happens when a command does not simply end."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[GIVEN] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        given = ctx.meta[GIVEN]
        try:
            _refuse_empty(given)
            with warnings.catch_warnings(), _result_alone() if "--json" in given else nullcontext():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except WrongUsage as error:  # typer prints it, and ends with 2
            _print_error(error.format_message() if hasattr(error, "format_message") else str(error), given)
            raise
        except BrokenPipeError:  # as `| head` does: typer ends with 1, and prints nothing
            raise
        except (ForetuneError, OSError) as error:
            _print_error(str(error), given)
            typer.echo(f"Error: {printable(str(error))}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _print_error("interrupted", given)
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(cls=Commands, help="Know the fast configs of a Triton kernel before you tune.", no_args_is_help=True)
bench = typer.Typer(help="Measure kernels next to what people have.", no_args_is_help=True)
app.add_typer(bench, name="bench")
datasets = typer.Typer(help="List, describe, merge and seal datasets.", invoke_without_command=True)
app.add_typer(datasets, name="datasets")
cache = typer.Typer(help="Show, clear, carry and freeze what tuning remembers.", no_args_is_help=True)
app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretune {__version__}")
        raise typer.Exit


@app.callback()
def command_line(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Know the fast configs of a Triton kernel before you tune."""


def command(
    name: str, example: str, into: typer.Typer = app, **settings: Any
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a command."""
    return into.command(name, epilog=f"Example: {example}", **settings)


def result_file() -> TextIO | None:
    """Return where a result is printed; None for stdout."""
    return _result


def leave_to_stderr() -> None:
    """Send all that is printed from now on to stderr."""
    if _are_descriptors():
        with suppress(OSError):
            sys.stdout.flush()
            os.dup2(2, 1)


@contextmanager
def _result_alone() -> Iterator[None]:
    """Send what is printed in the block to stderr, except what is written to `result_file`: a family's module, a
    compiler or a child process may print too."""
    global _result
    own: int | None = None
    if _are_descriptors():
        sys.stdout.flush()
        own = os.dup(1)
        os.dup2(2, 1)
    _result = sys.stdout if own is None else os.fdopen(own, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        written, _result = _result, None
        if own is not None:
            os.dup2(own, 1)
            written.close()


def _are_descriptors() -> bool:
    """Return whether stdout and stderr are the descriptors 1 and 2: not in a test, or where one of them is closed."""
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except (OSError, ValueError, AttributeError):
        return False


def _refuse_empty(given: Sequence[str]) -> None:
    """Refuse empty words, which an unset shell variable leaves and no command has a use for."""
    for before, word in zip(("", *given), given, strict=False):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if equals and not value.strip():
            where = option if option.startswith("-") else "an argument"
            raise typer.BadParameter("is empty: is a shell variable unset?", param_hint=where)


def _print_error(text: str, given: Sequence[str]) -> None:
    if "--json" in given:
        with suppress(OSError):  # it may be stdout that cannot be written
            typer.echo(json.dumps({"error": text}))


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print one line, without the place in the code, which a person at a terminal cannot do anything about."""
    typer.echo(f"Warning: {printable(str(message))}", err=True)

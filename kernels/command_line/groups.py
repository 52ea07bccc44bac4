"""The command line as a whole: its groups, how a command is added to it, and how one ends."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, ParamSpec

import typer
from typer.core import TyperGroup

from ...datasets import ForetuneError
from ...datasets.console import printable
from .stdout import result_alone

P = ParamSpec("P")
#: What typer raises for wrong usage: its own copy of click's UsageError, or click's, by its version.
WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
#: The exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130
#: Where a context keeps the words of the command line.
GIVEN = "foretune.given"
#: As `--help` lists them: in the order in which people come to need them.
ORDER = (
    "quickstart", "collect", "train", "adapt", "evaluate", "report", "replay", "predict", "cover", "warmup", "device",
    "export", "bench", "datasets", "cache",
)  # fmt: skip


class Commands(TyperGroup):
    """The whole command line: how a command ends that does not just end."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[GIVEN] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        given = ctx.meta[GIVEN]
        try:
            _refuse_empty(given)
            with warnings.catch_warnings(), result_alone() if "--json" in given else nullcontext():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except WrongUsage as error:  # typer says it, and ends with 2
            _say_error(error.format_message() if hasattr(error, "format_message") else str(error), given)
            raise
        except BrokenPipeError:  # as `| head` does: typer ends with 1, and says nothing
            raise
        except (ForetuneError, OSError) as error:
            _say_error(str(error), given)
            typer.echo(f"Error: {printable(str(error))}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _say_error("interrupted", given)
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(cls=Commands, help="Know the fast configs of a Triton kernel before you tune.", no_args_is_help=True)
bench = typer.Typer(help="Measure kernels next to what people have.", no_args_is_help=True)
app.add_typer(bench, name="bench")
datasets = typer.Typer(help="List, describe, merge and seal datasets.", invoke_without_command=True)
app.add_typer(datasets, name="datasets")
cache = typer.Typer(help="Show, clear, carry and freeze what tuning remembers.", no_args_is_help=True)
app.add_typer(cache, name="cache")


def command(
    name: str, example: str, into: typer.Typer = app, **settings: Any
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Registers a command."""
    return into.command(name, epilog=f"Example: {example}", **settings)


def _refuse_empty(given: Sequence[str]) -> None:
    """An unset shell variable leaves an empty word, and nothing here has a use for one."""
    for before, word in zip(("", *given), given, strict=False):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if equals and not value.strip():
            where = option if option.startswith("-") else "an argument"
            raise typer.BadParameter("is empty: is a shell variable unset?", param_hint=where)


def _say_error(text: str, given: Sequence[str]) -> None:
    if "--json" in given:
        with suppress(OSError):  # it may be stdout that cannot be written
            typer.echo(json.dumps({"error": text}))


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """One line, without the place in the code that a person at a terminal cannot do anything about."""
    typer.echo(f"Warning: {printable(str(message))}", err=True)

"""The command line itself: its groups, how commands are registered, show help, fail, and print results.

Exit codes: 0 success; 1 bad input, a failed run, or a closed output; 2 wrong usage; 130 interrupted by Ctrl-C. With
--json, a command that fails prints {"error": ...} to stdout. `foretune run` prints and ends as its program does.

Help and errors are plain text, without rich: rich would read "[report]" as markup, break paragraphs where the source
breaks its lines, and truncate options on narrow terminals.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from ... import __version__
from ...datasets import ForetuneError
from ...datasets.errors import printable

if TYPE_CHECKING:
    from ...datasets import Problem
    from ...datasets.dataset import Dataset

P = ParamSpec("P")
#: The exception that typer raises for wrong usage: its own copy of click's UsageError or click's, by version.
WrongUsage: type[Exception] = typer.BadParameter.__mro__[1]
#: The exit code after Ctrl-C, as in shells.
INTERRUPTED = 130
#: Key of the command line's words in a context's `meta`.
GIVEN = "foretune.given"
#: The order of commands in `--help`, by when users need them.
ORDER = (
    "quickstart", "predict", "run", "cover", "collect", "train", "evaluate", "report", "adapt", "warmup", "pin",
    "export", "device", "replay", "bench", "datasets", "cache",
)  # fmt: skip
#: Where a result is printed under --json; None for stdout.
_result: TextIO | None = None
#: Longer than any first paragraph: click cuts a command's short help at this length.
_UNCUT = 1000


def _write_example(epilog: str | None, formatter: Any) -> None:
    """Write a command's example (its `epilog`), broken into lines before options, to be pasted into a shell."""
    if not epilog:
        return
    before, after = "Example: ", "    "
    width = max(formatter.width - formatter.current_indent - 4, 40)
    lines: list[str] = []
    line = ""
    for part in epilog.removeprefix(before).replace(" --", "\n--").splitlines():
        if line and len(before if not lines else after) + len(line) + len(part) + 3 > width:
            lines.append(f"{line} \\")
            line = part
        else:
            line = f"{line} {part}".strip()
    text = f"\n{after}".join([*lines, line])
    formatter.write_paragraph()
    with formatter.indentation():
        indent = " " * formatter.current_indent
        formatter.write("".join(f"{indent}{one}\n" for one in f"{before}{text}".split("\n")))


#: The modules of the extra "train" that a minimal installation lacks, and their packages.
_TRAIN = {name: name for name in ("lightgbm", "pandas", "pyarrow", "joblib")} | {"sklearn": "scikit-learn"}

#: Stands for a hyphen while click wraps text, so that no option name is broken at one.
_NO_BREAK = "\u2011"


class _Formatter(typer.Context.formatter_class):  # type: ignore[valid-type,misc]
    """A formatter of help texts that breaks lines only at spaces."""

    def write(self, string: str) -> None:
        """Append formatted text, with its non-breaking hyphens replaced by ordinary ones."""
        super().write(string.replace(_NO_BREAK, "-"))

    def write_text(self, text: str) -> None:
        """Append paragraphs, wrapped and indented."""
        super().write_text(text.replace("-", _NO_BREAK))

    def write_dl(self, rows: Sequence[tuple[str, str]], *settings: Any, **more: Any) -> None:
        """Append a list of terms and their descriptions."""
        super().write_dl([(term, text.replace("-", _NO_BREAK)) for term, text in rows], *settings, **more)


class _Helpful:
    """Common base of commands and groups: the help shows the example below the usage line."""

    epilog: str | None

    def get_help(self, ctx: Any) -> str:
        """Return the help as text."""
        formatter = _Formatter(width=ctx.terminal_width, max_width=ctx.max_content_width)
        self.format_help(ctx, formatter)  # type: ignore[attr-defined]
        return str(formatter.getvalue()).rstrip("\n")

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the example and the help text."""
        self.write_dimensions(ctx, formatter)
        _write_example(self.example(ctx), formatter)
        super().format_help_text(ctx, formatter)  # type: ignore[misc]

    def write_dimensions(self, ctx: Any, formatter: Any) -> None:
        """Write the options for a family's dimensions; here none, because only `DimensionsCommand` has such options."""

    def example(self, ctx: Any) -> str | None:
        """Return the example to show, or None."""
        return self.epilog

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write nothing, because `format_help_text` has written the example (the epilog) above the help text."""


class Command(_Helpful, TyperCommand):
    """A command whose help shows the example directly below the usage line."""


class Group(_Helpful, TyperGroup):
    """A group of commands whose help shows each command's whole summary."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with its summary, which click would cut to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(_UNCUT)) for name, one in commands if one is not None and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class Commands(Group):
    """The whole command line: reports errors and interruptions of any command."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands' names in the order of `ORDER`."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, and store it in `ctx.meta` without the program that `foretune run` starts."""
        ctx.meta[GIVEN] = _own_words(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; turn errors into one line on stderr, JSON with --json, and an exit code."""
        given = ctx.meta[GIVEN]
        try:
            _refuse_empty(given)
            with warnings.catch_warnings(), _result_alone() if "--json" in given else nullcontext():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except WrongUsage as error:  # typer prints it, and ends with 2
            _print_error(error.format_message() if hasattr(error, "format_message") else str(error), given)
            raise
        except BrokenPipeError:  # for example `| head`: typer ends with 1, and prints nothing
            raise
        except (ForetuneError, OSError, ModuleNotFoundError) as error:
            text = str(error)
            if isinstance(error, ModuleNotFoundError):
                if error.name not in _TRAIN:
                    raise
                packages = " ".join(_TRAIN.values())
                text = f"this command needs {error.name}: pip install {packages} (Foretune's extra 'train')"
            _print_error(text, given)
            typer.echo(f"Error: {printable(text)}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _print_error("interrupted", given)
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None


def _own_words(args: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line up to, but not including, the program that `foretune run` starts."""
    end = 1 if args[:1] == ["run"] else len(args)
    while end < len(args) and args[end].startswith("-"):
        has_value = args[end].startswith("--") and "=" not in args[end]
        end += 2 if has_value else 1
    return tuple(args[:end])


def _group(help: str, **settings: Any) -> typer.Typer:
    return typer.Typer(cls=Group, help=help, rich_markup_mode=None, **settings)


SUMMARY = "Predict the fast configs of a Triton kernel before you tune."
app = typer.Typer(cls=Commands, help=SUMMARY, no_args_is_help=True, rich_markup_mode=None)
bench = _group("Measure how fast kernels, tuning and predictions are on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
datasets = _group("List (without a command), describe, merge and seal datasets.", invoke_without_command=True)
app.add_typer(datasets, name="datasets")
cache = _group("Show, clear, export, import and freeze the tuning results in the choice cache.", no_args_is_help=True)
app.add_typer(cache, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foretune {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: foretune quickstart", help=SUMMARY)
def command_line(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Declare the options of `foretune` itself."""


def command(
    name: str, example: str, into: typer.Typer = app, **settings: Any
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that registers a function as a command.

    Args:
        name: The command's name in its group.
        example: A complete command line, shown in the help.
        into: The group.
        settings: More settings of typer's `command`.
    """
    return into.command(name, epilog=f"Example: {example}", **{"cls": Command, **settings})


def leave_to_stderr() -> None:
    """Redirect everything that is printed from now on to stderr."""
    if _are_descriptors():
        with suppress(OSError):
            sys.stdout.flush()
            os.dup2(2, 1)


@contextmanager
def _result_alone() -> Iterator[None]:
    """Redirect stdout to stderr in the block, except what is written to `_result`.

    Under --json, stdout must hold nothing but JSON, while a family's module, a compiler or a child process may print.
    """
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
    """Return whether Python's stdout and stderr write to the file descriptors 1 and 2.

    They do not if a test captures them, or if one of them is closed.
    """
    try:
        return (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
    except (OSError, ValueError, AttributeError):
        return False


def _refuse_empty(given: Sequence[str]) -> None:
    """Raise `typer.BadParameter` if a word or an option's value is empty, as an unset shell variable leaves it."""
    for before, word in zip(("", *given), given, strict=False):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if equals and not value.strip():
            where = option if option.startswith("-") else "an argument"
            raise typer.BadParameter("is empty: is a shell variable unset?", param_hint=where)


def _print_error(text: str, given: Sequence[str]) -> None:
    if "--json" in given:
        with suppress(OSError):  # stdout itself may be what failed
            typer.echo(json.dumps({"error": text}))


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning in one line, without the line of code, which does not help a user at a terminal."""
    typer.echo(f"Warning: {printable(str(message))}", err=True)


# Printing results.


@dataclass(frozen=True)
class Printed:
    """A result made of a JSON value, and a line of text or an object that rich can print."""

    value: Any
    shown: Any

    def to_json(self) -> Any:
        """Return the value that --json prints."""
        return self.value

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(printable(self.shown)) if isinstance(self.shown, str) else self.shown


@dataclass(frozen=True)
class ByFamily:
    """A result that consists of the results of several families, by name, and further fields of the JSON value.

    Each result has a method `table`. The caption that explains rows and columns is printed below the last table only.
    """

    families: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the value that --json prints."""
        return {"families": {name: one.to_json() for name, one in self.families.items()}, **self.more}

    def __rich__(self) -> Any:
        from rich.console import Group

        last = [*self.families][-1]
        return Group(*(one.table(caption=name == last) for name, one in self.families.items()))


@dataclass(frozen=True)
class ByProduct:
    """A result that consists of the results of a layer's products and their problems, both by the product's name."""

    products: Mapping[str, Any]
    problems: Mapping[str, Problem]

    def to_json(self) -> dict[str, Any]:
        """Return the value that --json prints."""
        return {"products": {name: one.to_json() for name, one in self.products.items()}}

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(
            *(part for name, one in self.products.items() for part in (f"{name}, {self.problems[name]}:", one))
        )


def emit(result: Any, as_json: bool, caption: str = "", /, **places: Path) -> None:
    """Print a result as a table, or as JSON.

    Args:
        result: The result: its `to_json` returns the value for JSON, and rich can print it.
        as_json: Whether to print JSON.
        caption: One line below the tables that defines their rows and columns.
        places: Files and folders that the command wrote, by the field of the JSON that names them.
    """
    if as_json:
        value = result.to_json()
        added = {what: str(path) for what, path in places.items()}
        typer.echo(json.dumps(dict(value) | added if added else value, indent=1), file=_result)
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file or pipe has no width
    console.print(result)
    if caption:
        console.print(caption, markup=False, emoji=False, highlight=False)
    for path in places.values():
        typer.echo(f"Written to {printable(str(path))}")


def left_out_of(dataset: Dataset) -> dict[str, Any]:
    """Return a JSON field "left_out" that names the rows of a dataset's files that cannot be read."""
    return {"left_out": [one.to_json() for one in dataset.left_out]}

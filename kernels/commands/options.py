"""Options and arguments that several commands take, and how each kind of option is declared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ...datasets import DeviceSpec, ForetuneError, Problem
from ...datasets.console import duration_s, number, whole_number
from ...datasets.errors import MOST
from .. import families

T = TypeVar("T")

#: The family that examples are about, and its layer.
FAMILY = "grouped_gemm_fwd"
EXAMPLE = Problem.of(FAMILY, groups=64, rows=8192, n=2048, k=1024)
#: The dataset that quickstart and evaluate take where none is named.
SHIPPED = "h200"
#: More than any machine has.
MOST_SMS = 10_000


def read_by(read: Callable[..., T], *bounds: float) -> Callable[[Any], T]:
    """Return a parser of an option's text, whose errors say what would be right."""

    def parse(text: Any) -> T:  # a default is a number already
        try:
            return read(str(text), *bounds)
        except ForetuneError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def given_as(option: str, read: Callable[..., T], text: str, *bounds: float) -> T:
    """Return an option's value from its text. Errors name the option."""
    try:
        return read(text, *bounds)
    except ForetuneError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def family_names(incomplete: str) -> list[str]:
    return [name for name in families() if name.startswith(incomplete)]


def dataset_names(incomplete: str) -> list[str]:
    from ...datasets import names

    return [name for name in names() if name.startswith(incomplete)]


def device_names(incomplete: str) -> list[str]:
    return [name for name in DeviceSpec.names() if name.startswith(incomplete)]


def option(
    help: str, unset: bool | str = True, names: Callable[[str], list[str]] | None = None, *flags: str, **settings: Any
) -> Any:
    """Declare an option: its help, what its default means to people, and what completes its value."""
    return typer.Option(*flags, help=help, show_default=unset, autocompletion=names, **settings)


def argument(metavar: str, help: str, names: Callable[[str], list[str]] | None = None, unset: bool | str = True) -> Any:
    """Declare an argument, as `option` does an option."""
    return typer.Argument(metavar=metavar, help=help, show_default=unset, autocompletion=names)


def count(help: str, low: int, high: int, unset: bool | str = True) -> Any:
    """Declare an option that is a whole number."""
    return option(help, unset, parser=read_by(whole_number, low, high), metavar=f"{low}..{high}")


def amount(help: str, low: float, high: float, unset: bool | str = True, metavar: str | None = None) -> Any:
    """Declare an option that is a number."""
    return option(help, unset, parser=read_by(number, low, high), metavar=metavar or f"{low:g}..{high:g}")


def shortlist_length(text: Any) -> Any:
    """Return a shortlist's length from an option's text."""
    return "auto" if text == "auto" else read_by(whole_number, 1, MOST)(text)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
FamilyName = Annotated[
    str,
    argument("FAMILY", f"A kernel family, as {FAMILY}, or package.module:attribute.", family_names),
]
OnlyFamilies = Annotated[
    list[str] | None, option("Only this family, as for collect; may be repeated.", "all in the data", family_names)
]
Data = Annotated[list[str] | None, option("Dataset folder or shipped name; may be repeated.", SHIPPED, dataset_names)]
Device = Annotated[
    str | None, option("A shipped device, for example h200, or a spec's JSON file.", "this GPU", device_names)
]
Dtype = Annotated[str | None, option("Element type, one of the family's.", "the family's first")]
Budget = Annotated[
    float | None,
    option("Stop in time, for example 90s, 20m or 1h.", "none", parser=read_by(duration_s), metavar="DURATION"),
]
#: The bundle that predicts; `ToJudge` is one that is judged.
Predictor = Annotated[
    Path | None, option("Who predicts: a bundle of `foretune train`.", "the shipped bundle", None, "--bundle")
]
ToJudge = Annotated[Path | None, option("Judge this bundle as it is.", "cross-validate", None, "--bundle")]

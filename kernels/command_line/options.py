"""Options and arguments that several commands take."""

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
    """What makes an option's value from its text, or says what would be right."""

    def parse(text: Any) -> T:  # a default is a number already
        try:
            return read(str(text), *bounds)
        except ForetuneError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def given_as(option: str, read: Callable[..., T], text: str, *bounds: float) -> T:
    """An option's value from its text; what is wrong with it is said with the option's name."""
    try:
        return read(text, *bounds)
    except ForetuneError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def count(help: str, low: int, high: int, **settings: Any) -> Any:
    """An option that is a whole number."""
    return typer.Option(help=help, parser=read_by(whole_number, low, high), metavar=f"{low}..{high}", **settings)


def amount(help: str, low: float, high: float, **settings: Any) -> Any:
    """An option that is a number."""
    return typer.Option(help=help, parser=read_by(number, low, high), metavar=f"{low:g}..{high:g}", **settings)


def shortlist_length(text: Any) -> Any:
    """A shortlist's length from an option's text."""
    return "auto" if text == "auto" else read_by(whole_number, 1, MOST)(text)


def family_names(incomplete: str) -> list[str]:
    return [name for name in families() if name.startswith(incomplete)]


def dataset_names(incomplete: str) -> list[str]:
    from ...datasets import names

    return [name for name in names() if name.startswith(incomplete)]


def device_names(incomplete: str) -> list[str]:
    return [name for name in DeviceSpec.names() if name.startswith(incomplete)]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
FamilyName = Annotated[
    str,
    typer.Argument(
        metavar="FAMILY",
        help=f"A kernel family, as {FAMILY}, or package.module:attribute.",
        autocompletion=family_names,
    ),
]
OnlyFamilies = Annotated[
    list[str] | None,
    typer.Option(
        help="Only this family, as for collect; may be repeated.",
        show_default="all in the data",
        autocompletion=family_names,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Dataset folder or shipped name; may be repeated.", show_default=SHIPPED, autocompletion=dataset_names
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="A shipped device, for example h200, or a spec's JSON file.",
        show_default="this GPU",
        autocompletion=device_names,
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="Element type, one of the family's.", show_default="the family's first")
]
Budget = Annotated[
    float | None,
    typer.Option(
        help="Stop in time, for example 90s, 20m or 1h.",
        parser=read_by(duration_s),
        metavar="DURATION",
        show_default="none",
    ),
]
#: The bundle that predicts; `ToJudge` is one that is judged.
Predictor = Annotated[
    Path | None,
    typer.Option("--bundle", help="Who predicts: a bundle of `foretune train`.", show_default="the shipped bundle"),
]
ToJudge = Annotated[
    Path | None, typer.Option("--bundle", help="Judge this bundle as it is.", show_default="cross-validate")
]

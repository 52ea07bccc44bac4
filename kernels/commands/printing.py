"""How results are printed: a table, or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from ...datasets.errors import printable
from .app import result_file

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset


class Result(Protocol):
    """What a command prints: a JSON value, and something that rich can print."""

    def to_json(self) -> Any: ...


@dataclass(frozen=True)
class Printed:
    """A result of which the two are given: a JSON value, and something that rich can print, or a line of text."""

    value: Any
    shown: Any

    def to_json(self) -> Any:
        return self.value

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(printable(self.shown)) if isinstance(self.shown, str) else self.shown


@dataclass(frozen=True)
class ByFamily:
    """A result for each family, and what else the JSON has."""

    families: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"families": {name: one.to_json() for name, one in self.families.items()}, **self.more}

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.families.values())


def emit(result: Result, as_json: bool, **places: Path) -> None:
    """Print a result, and where on the disk things are now."""
    if as_json:
        value = result.to_json()
        added = {what: str(path) for what, path in places.items()}
        typer.echo(json.dumps(dict(value) | added if added else value, indent=1), file=result_file())
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 200  # a file has no edge to wrap at
    console.print(result)
    for path in places.values():
        typer.echo(f"It lies in {printable(str(path))}")


def listed(described: list[Mapping[str, Any]]) -> Printed:
    """Return descriptions of datasets as one table."""
    from ...datasets.contents import contents_table

    return Printed(described, contents_table(described))


def counted(dataset: Dataset, *, dropped: int = 0) -> Printed:
    """Return what was written, and what was not: rows that were `dropped`, and those that cannot be read."""
    rows = len(dataset.measurements)
    line = f"{dataset.name}: {rows} measurements."
    line += f" {dropped} more are left out: exact repeats, or named in a warning." * bool(dropped)
    return Printed({"measurements": rows, "dropped": dropped} | left_out_of(dataset), line)


def left_out_of(dataset: Dataset) -> dict[str, Any]:
    """Return the rows of a dataset's files that cannot be read, for `--json`; a warning has told people."""
    return {"left_out": [one.to_json() for one in dataset.left_out]}

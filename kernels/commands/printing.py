"""Print a command's result as a table or as JSON."""

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
    from ...datasets import Problem
    from ...datasets.dataset import Dataset


class Result(Protocol):
    """A result of a command: it has a JSON value, and rich can print it."""

    def to_json(self) -> Any:
        """Return the value that --json prints."""


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

    Each result has a method `table`; the rows and columns are defined below the last table only.
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
    """The results of the products of one layer, and their problems, by name."""

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


def emit(result: Result, as_json: bool, caption: str = "", /, **places: Path) -> None:
    """Print a result as a table, or as JSON.

    Args:
        result: The result.
        as_json: Whether to print JSON.
        caption: One line below the tables that defines their rows and columns.
        places: Files and folders that the command wrote, by the field of the JSON that names them.
    """
    if as_json:
        value = result.to_json()
        added = {what: str(path) for what, path in places.items()}
        typer.echo(json.dumps(dict(value) | added if added else value, indent=1), file=result_file())
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


def listed(described: list[Mapping[str, Any]]) -> Printed:
    """Return descriptions of datasets as a result that prints one table."""
    from ...datasets.contents import contents_table

    return Printed(described, contents_table(described))


def counted(dataset: Dataset, *, dropped: int = 0) -> Printed:
    """Return a result that counts the rows of a written dataset, those dropped, and those that could not be read."""
    rows = len(dataset.measurements)
    line = f"{dataset.name}: {rows} measurements."
    line += f" {dropped} more were left out: exact duplicates, or rows that a warning names." * bool(dropped)
    return Printed({"measurements": rows, "dropped": dropped} | left_out_of(dataset), line)


def left_out_of(dataset: Dataset) -> dict[str, Any]:
    """Return the rows of a dataset's files that cannot be read, for --json; a warning names them too."""
    return {"left_out": [one.to_json() for one in dataset.left_out]}

"""How results are printed: a table, or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from ...datasets.console import printable
from .stdout import result_file

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset


class Result(Protocol):
    """What a command prints: a JSON value, and something that rich can print."""

    def to_json(self) -> Any: ...


def emit(result: Result, as_json: bool, **places: Path) -> None:
    """Prints a result, and where on the disk things lie now."""
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


@dataclass(frozen=True)
class Said:
    """A result that is a line."""

    value: Mapping[str, Any]
    line: str

    def to_json(self) -> Mapping[str, Any]:
        return self.value

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(printable(self.line))


@dataclass(frozen=True)
class ByFamily:
    """A result for each family."""

    families: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"families": {name: one.to_json() for name, one in self.families.items()}}

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.families.values())


@dataclass(frozen=True)
class Held:
    """Evaluations, held against the largest regret@1 that is allowed."""

    judged: ByFamily
    max_regret1: float
    error: str | None  # which families fall short

    def to_json(self) -> dict[str, Any]:
        held = self.judged.to_json() | {"max_regret1": self.max_regret1}
        return held if self.error is None else held | {"error": self.error}

    def __rich__(self) -> Any:
        return self.judged.__rich__()


@dataclass(frozen=True)
class Listed:
    """Datasets, in one table."""

    described: Sequence[Mapping[str, Any]]

    def to_json(self) -> list[Any]:
        return list(self.described)

    def __rich__(self) -> Any:
        from ...datasets.contents import contents_table

        return contents_table(self.described)


def counted(dataset: Dataset, *, dropped: int = 0) -> Said:
    """What was written, and what was not: rows that were `dropped`, and those that cannot be read."""
    rows = len(dataset.measurements)
    line = f"{dataset.name}: {rows} measurements."
    line += f" {dropped} more are left out: exact repeats, or named in a warning." * bool(dropped)
    return Said({"measurements": rows, "dropped": dropped} | left_out_of(dataset), line)


def left_out_of(dataset: Dataset) -> dict[str, Any]:
    """The rows of a dataset's files that cannot be read, for `--json`; a warning has said so to people."""
    return {"left_out": [one.to_json() for one in dataset.left_out]}

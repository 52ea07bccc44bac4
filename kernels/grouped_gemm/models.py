"""The table of real MoE models whose layers are measured (models.csv)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ...datasets import DatasetError


@dataclass(frozen=True)
class Model:
    """The MoE dimensions of one published model."""

    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int

    def projections(self) -> dict[str, tuple[int, int]]:
        """(N, K) of both grouped GEMMs of a layer: w13 (gate and up fused) and w2 (down)."""
        hidden, inter = self.hidden_size, self.moe_intermediate_size
        return {"w13": (2 * inter, hidden), "w2": (hidden, inter)}


def load_models(path: Path | str | None = None) -> tuple[Model, ...]:
    """The models of a CSV file; of the shipped table where no path is given.

    Raises `DatasetError` naming the file, line and value that is wrong.

    >>> load_models()[0].projections()["w13"]
    (28672, 4096)
    """
    shipped = resources.files(__package__) / "models.csv"
    try:
        text = Path(path).read_text() if path is not None else shipped.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as a CSV file: {error}") from None
    name = str(path or "models.csv")
    columns = ("model", "num_experts", "top_k", "hidden_size", "moe_intermediate_size")
    reader = csv.DictReader(text.splitlines())
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise DatasetError(f"{name}: columns missing: {', '.join(missing)}; expected {', '.join(columns)}")
    models = []
    for row in reader:
        sizes = {column: _positive(row[column], f"{name}, line {reader.line_num}, {column}") for column in columns[1:]}
        models.append(Model(model=row["model"], **sizes))
    if not models:
        raise DatasetError(f"{name}: no models in it")
    return tuple(models)


def _positive(text: str | None, where: str) -> int:
    if text is None or not text.strip().isdecimal() or int(text) == 0:
        raise DatasetError(f"{where}: must be a positive integer but got {text!r}")
    return int(text)

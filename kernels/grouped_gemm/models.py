"""The table of real MoE models whose layers are measured (models.csv)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..model_tables import MOST_WIDTH, count_in, table_rows

COLUMNS = ("model", "num_experts", "top_k", "hidden_size", "moe_intermediate_size")
#: Far beyond any model, which has a few hundred.
MOST_EXPERTS = 65536
#: TMA moves rows of multiples of 16 bytes: 8 elements of 16 bits.
WIDTH_STEP = 8


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
    """The models of a CSV file; of the shipped table where no path is given. Empty lines are passed over.

    Raises `DatasetError` naming the file, line, column and value that is wrong, and what would be right.

    >>> load_models()[0].projections()["w13"]
    (28672, 4096)
    """
    file = Path(__file__).with_name("models.csv") if path is None else Path(path)
    return tuple(_model(fields, where) for where, fields in table_rows(file, COLUMNS))


def _model(fields: dict[str, str], where: str) -> Model:
    # A layer of one expert is no grouped GEMM.
    experts = count_in(fields, "num_experts", where, 2, MOST_EXPERTS)
    top_k = count_in(fields, "top_k", where, 1, experts)
    hidden, inner = (count_in(fields, column, where, WIDTH_STEP, MOST_WIDTH, WIDTH_STEP) for column in COLUMNS[-2:])
    return Model(fields["model"], experts, top_k, hidden, inner)

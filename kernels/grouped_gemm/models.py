"""The table of real MoE models whose layers are measured (models.csv).

A row has the figures of the model's published `config.json`. Two columns are for what few models have: experts that
work on a hidden size of their own (`expert_hidden_size`: Nemotron's `moe_latent_size`, Kimi's
`routed_expert_hidden_size`), and experts without a gate (`gated` is "no"), whose first product is half as wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...datasets import DatasetError
from ...datasets.errors import abridged
from ..model_tables import MOST_WIDTH, count_in, table_rows

COLUMNS = ("model", "num_experts", "top_k", "hidden_size", "moe_intermediate_size")
#: May be left out, or empty: the experts' hidden size is then the model's, and they are gated.
OPTIONAL_COLUMNS = ("expert_hidden_size", "gated")
_GATED = {"": True, "yes": True, "no": False}
#: Far beyond any model, which has a few hundred.
MOST_EXPERTS = 65536
#: TMA moves rows of multiples of 16 bytes: 8 elements of 16 bits.
WIDTH_STEP = 8


@dataclass(frozen=True)
class Model:
    """The MoE dimensions of one published model. `expert_hidden_size` is the width of what experts read and write."""

    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    expert_hidden_size: int
    is_gated: bool = True

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return (N, K) of both grouped GEMMs of a layer: w13 (gate and up fused, or up alone) and w2 (down)."""
        hidden, inter = self.expert_hidden_size, self.moe_intermediate_size
        return {"w13": ((1 + self.is_gated) * inter, hidden), "w2": (hidden, inter)}


def load_models(path: Path | str | None = None) -> tuple[Model, ...]:
    """The models of a CSV file; of the shipped table where no path is given. Empty lines are passed over.

    Raises `DatasetError` naming the file, line, column and value that is wrong, and what would be right.

    >>> load_models()[0].projections()["w13"]
    (28672, 4096)
    """
    file = Path(__file__).with_name("models.csv") if path is None else Path(path)
    return tuple(_model(fields, where) for where, fields in table_rows(file, COLUMNS, OPTIONAL_COLUMNS))


def _model(fields: dict[str, str], where: str) -> Model:
    # A layer of one expert is no grouped GEMM.
    experts = count_in(fields, "num_experts", where, 2, MOST_EXPERTS)
    top_k = count_in(fields, "top_k", where, 1, experts)
    widths = [*COLUMNS[-2:], *(["expert_hidden_size"] if fields["expert_hidden_size"].strip() else [])]
    sizes = {column: count_in(fields, column, where, WIDTH_STEP, MOST_WIDTH, WIDTH_STEP) for column in widths}
    hidden, inter = sizes["hidden_size"], sizes["moe_intermediate_size"]
    gated = fields["gated"].strip()
    if gated not in _GATED:
        raise DatasetError(f"{where}, gated: must be yes or no but is {abridged(gated, 60)!r}")
    return Model(fields["model"], experts, top_k, hidden, inter, sizes.get("expert_hidden_size", hidden), _GATED[gated])

"""The table of real dense language models (dense_llms.csv), whose layers the families of dense kernels measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..datasets import ForetuneError
from .model_tables import MOST_WIDTH, count_in, table_rows

COLUMNS = ("model", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
#: Far beyond any model, which has some hundreds.
MOST_HEADS, MOST_HEAD_DIM = 4096, 4096
#: Widths of layers are multiples of 16 bytes: 8 elements of 16 bits.
WIDTH_STEP = 8


@dataclass(frozen=True)
class DenseModel:
    """The dimensions of one published dense model: attention, and a gated MLP."""

    model: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def splits(self, degree: int) -> bool:
        """Whether `degree` ranks can share its heads and its intermediate size in whole parts, as tensor parallelism
        needs it (key and value heads are repeated where there are fewer of them than ranks)."""
        kv_heads_fit = self.num_kv_heads % degree == 0 or degree % self.num_kv_heads == 0
        return self.num_heads % degree == 0 and self.intermediate_size % (degree * WIDTH_STEP) == 0 and kv_heads_fit

    def heads_on_rank(self, degree: int = 1) -> tuple[int, int]:
        """Query heads, and key (or value) heads, of one of `degree` tensor-parallel ranks.

        Raises `ForetuneError` for a degree that does not split the model.
        """
        if degree < 1 or not self.splits(degree):
            raise ForetuneError(f"{self.model} cannot be split over {degree} ranks: see DenseModel.splits")
        return self.num_heads // degree, max(self.num_kv_heads // degree, 1)

    def linear_layers(self, degree: int = 1) -> dict[str, tuple[int, int]]:
        """(N, K) of each product with a weight, y (M, N) = x (M, K) @ w.T, on one of `degree` tensor-parallel ranks:
        query, key and value in one, attention's output, gate and up in one, down, and the head over the vocabulary
        (padded to a multiple of 64 on each rank, as serving engines pad it).

        >>> load_dense_models()[2].linear_layers(2)["gate_up"]
        (14336, 4096)
        """
        heads, kv_heads = self.heads_on_rank(degree)
        inner = self.intermediate_size // degree
        return {
            "qkv": ((heads + 2 * kv_heads) * self.head_dim, self.hidden_size),
            "o": (self.hidden_size, heads * self.head_dim),
            "gate_up": (2 * inner, self.hidden_size),
            "down": (self.hidden_size, inner),
            "lm_head": (-(-self.vocab_size // (64 * degree)) * 64, self.hidden_size),
        }


def load_dense_models(path: Path | str | None = None) -> tuple[DenseModel, ...]:
    """The models of a CSV file; of the shipped table where no path is given. Empty lines are passed over.

    Raises `DatasetError` naming the file, line, column and value that is wrong, and what would be right.

    >>> load_dense_models()[2].model
    'Llama-3.1-8B'
    """
    file = Path(__file__).with_name("dense_llms.csv") if path is None else Path(path)
    return tuple(_model(fields, where) for where, fields in table_rows(file, COLUMNS))


def _model(fields: dict[str, str], where: str) -> DenseModel:
    hidden, inner = (count_in(fields, column, where, WIDTH_STEP, MOST_WIDTH, WIDTH_STEP) for column in COLUMNS[1:3])
    heads = count_in(fields, "num_heads", where, 1, MOST_HEADS)
    kv_heads = count_in(fields, "num_kv_heads", where, 1, heads)
    head_dim = count_in(fields, "head_dim", where, WIDTH_STEP, MOST_HEAD_DIM, WIDTH_STEP)
    vocabulary = count_in(fields, "vocab_size", where, 1, MOST_WIDTH)
    return DenseModel(fields["model"], hidden, inner, heads, kv_heads, head_dim, vocabulary)

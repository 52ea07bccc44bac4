"""Real models (dense_llms.csv, grouped_gemm/models.csv), and how workloads sample problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..datasets import Case, DatasetError, Family, ForetuneError
from ..datasets.errors import abridged, shown
from .model_config import count_in, is_config, name_of_model, read_moe_config, table_rows

COLUMNS = ("model", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
#: The largest width of a layer, far above those of real models.
MOST_WIDTH = 1 << 20
#: The most heads and the largest head dimension; models have a few hundred.
MOST_HEADS, MOST_HEAD_DIM = 4096, 4096
#: Widths of layers must be multiples of 16 bytes: 8 elements of 16 bits.
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
        """Return whether `degree` tensor-parallel ranks can share heads and intermediate size evenly.

        If there are fewer key and value heads than ranks, they are repeated.
        """
        kv_heads_fit = self.num_kv_heads % degree == 0 or degree % self.num_kv_heads == 0
        return self.num_heads % degree == 0 and self.intermediate_size % (degree * WIDTH_STEP) == 0 and kv_heads_fit

    def heads_on_rank(self, degree: int = 1) -> tuple[int, int]:
        """Return (query heads, key or value heads) of one of `degree` tensor-parallel ranks.

        Raises:
            ForetuneError: The model cannot be split over so many ranks.
        """
        if degree < 1 or not self.splits(degree):
            raise ForetuneError(f"{self.model} cannot be split over {degree} ranks: see DenseModel.splits")
        return self.num_heads // degree, max(self.num_kv_heads // degree, 1)

    def linear_layers(self, degree: int = 1) -> dict[str, tuple[int, int]]:
        """Return (N, K) of each linear layer, y (M, N) = x (M, K) @ w.T, on one of `degree` tensor-parallel ranks.

        The layers are query, key and value in one, attention's output, gate and up in one, down, and the head over the
        vocabulary, padded to a multiple of 64 on each rank as serving engines do.

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
    """Return the models of a CSV file; those of the shipped table if no path is given.

    Raises:
        DatasetError: As for `table_rows`; or it is a config.json.

    >>> load_dense_models()[2].model
    'Llama-3.1-8B'
    """
    file = Path(__file__).with_name("dense_llms.csv") if path is None else Path(path)
    if is_config(file):
        raise DatasetError(
            f"{file}: only families of MoE layers read a config.json: use a CSV file with columns {','.join(COLUMNS)}"
        )
    return tuple(_model(fields, where) for where, fields in table_rows(file, COLUMNS))


def _model(fields: dict[str, str], where: str) -> DenseModel:
    hidden, inner = (count_in(fields, column, where, WIDTH_STEP, MOST_WIDTH, WIDTH_STEP) for column in COLUMNS[1:3])
    heads = count_in(fields, "num_heads", where, 1, MOST_HEADS)
    kv_heads = count_in(fields, "num_kv_heads", where, 1, heads)
    head_dim = count_in(fields, "head_dim", where, WIDTH_STEP, MOST_HEAD_DIM, WIDTH_STEP)
    vocabulary = count_in(fields, "vocab_size", where, 1, MOST_WIDTH)
    return DenseModel(fields["model"], hidden, inner, heads, kv_heads, head_dim, vocabulary)


MOE_COLUMNS = ("model", "num_experts", "top_k", "hidden_size", "moe_intermediate_size")
#: Optional columns. By default the experts' hidden size is the model's, and they are gated.
OPTIONAL_COLUMNS = ("expert_hidden_size", "gated")
_GATED = {"": True, "yes": True, "no": False}
#: The most experts; models have a few hundred.
MOST_EXPERTS = 65536


@dataclass(frozen=True)
class Model:
    """The MoE dimensions of one published model; `expert_hidden_size` is the input and output width of experts."""

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

    def on_rank(self, tp: int) -> Model:
        """Return one rank's part if `tp` tensor-parallel ranks share each expert.

        Raises:
            ForetuneError: They cannot share the intermediate size.
        """
        inter, rest = divmod(self.moe_intermediate_size, tp)
        if rest:
            raise ForetuneError(f"tp must divide the intermediate size, {self.moe_intermediate_size}, but is {tp}")
        return replace(self, moe_intermediate_size=inter)

    def dims_of(self, family: Family) -> dict[str, dict[str, int]]:
        """Return the sizes that a layer determines in a family's problems, by product.

        Raises:
            ForetuneError: The family is not of MoE layers, or is for gated experts and these have no gate.

        >>> from . import find_family
        >>> load_models()[0].dims_of(find_family("grouped_gemm_fwd"))["w2"]
        {'groups': 8, 'n': 4096, 'k': 14336}
        """
        dims = set(family.dims)
        if dims in ({"groups", "rows", "n", "k"}, {"groups", "m", "n", "k"}):
            return {name: {"groups": self.num_experts, "n": n, "k": k} for name, (n, k) in self.projections().items()}
        if dims != {"experts", "topk", "hidden", "inter", "tokens"}:
            raise ForetuneError(f"{family.name} is not a family of MoE layers, so a model does not give its sizes")
        if not self.is_gated:
            raise ForetuneError(f"the experts of {self.model} have no gate, but {family.name} is for gated experts")
        sizes = {"experts": self.num_experts, "topk": self.top_k, "hidden": self.expert_hidden_size}
        return {"": {**sizes, "inter": self.moe_intermediate_size}}


def find_model(word: str) -> Model:
    """Return an MoE model by its name in the shipped table, or by its config.json (a file, or a folder that holds it).

    Raises:
        ForetuneError: There is no such model, or its config cannot be read; the message lists the known ones.

    >>> find_model("DeepSeek-V3").num_experts  # in the table as DeepSeek-V3/R1
    256
    """
    known = {one.model: one for one in load_models()}
    called = {name.partition("/")[0]: one for name, one in known.items()} | known
    if word in called:
        return called[word]
    if is_config(word):
        return load_models(word)[0]
    raise ForetuneError(
        f"unknown model {shown(word)}; known: {', '.join(known)}; pass its config.json or dimensions for others"
    )


def load_models(path: Path | str | None = None) -> tuple[Model, ...]:
    """Return the MoE models of a CSV file, or the one of a config.json; those of the shipped table without a path.

    Raises:
        DatasetError: As for `table_rows` and `read_moe_config`.

    >>> load_models()[0].projections()["w13"]
    (28672, 4096)
    """
    file = Path(__file__).parent / "grouped_gemm" / "models.csv" if path is None else Path(path)
    if is_config(file):
        config = read_moe_config(file)
        name = name_of_model(config.fields["model"], f"{config.file}, the model's name")
        return (_moe_model({**config.fields, "model": name}, str(config.file)),)
    return tuple(_moe_model(fields, where) for where, fields in table_rows(file, MOE_COLUMNS, OPTIONAL_COLUMNS))


def _moe_model(fields: dict[str, str], where: str) -> Model:
    # A layer with one expert is not a grouped GEMM.
    experts = count_in(fields, "num_experts", where, 2, MOST_EXPERTS)
    top_k = count_in(fields, "top_k", where, 1, experts)
    widths = [*MOE_COLUMNS[-2:], *(["expert_hidden_size"] if fields["expert_hidden_size"].strip() else [])]
    sizes = {column: count_in(fields, column, where, WIDTH_STEP, MOST_WIDTH, WIDTH_STEP) for column in widths}
    hidden, inter = sizes["hidden_size"], sizes["moe_intermediate_size"]
    gated = fields["gated"].strip()
    if gated not in _GATED:
        raise DatasetError(f"{where}, gated: must be yes or no but is {abridged(gated, 60)!r}")
    return Model(fields["model"], experts, top_k, hidden, inter, sizes.get("expert_hidden_size", hidden), _GATED[gated])


T = TypeVar("T")

#: Token counts of one call, from decoding to training.
TOKENS = tuple(2**exponent for exponent in range(15))
#: The largest token count; above it, hardly any layer is within the limits of a problem.
MOST_TOKENS = 1 << 22
#: Draws of a random shape in a row that may exceed the limits before drawing fails.
_MOST_DRAWS = 10_000
#: Tensor-parallel degrees: ranks that share a layer.
TENSOR_PARALLEL = (1, 2, 4, 8)


def check_drawn(tokens: Sequence[int] | None, **counts: int) -> None:
    """Check the arguments of a workload's sampling.

    Args:
        tokens: Token counts; the workload's own if None.
        counts: Numbers by name, such as `per_layer` and `random`.

    Raises:
        ForetuneError: A number is negative, or a token count is out of range.

    >>> check_drawn([16, 0], per_layer=2)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: token counts must be between 1 and 4194304 but got [16, 0]
    """
    for name, value in counts.items():
        if value < 0:
            raise ForetuneError(f"{name} must be >= 0 but got {value}")
    if tokens is not None and not (tokens and all(1 <= count <= MOST_TOKENS for count in tokens)):
        raise ForetuneError(f"token counts must be between 1 and {MOST_TOKENS} but got {abridged(str(list(tokens)))}")


class Draws:
    """The options of drawing a workload's problems (how many, token counts, size limit), and the random generator.

    The order of the drawn cases is random, so that a run cut short by its budget has a representative sample. The same
    arguments give the same cases.

    Args:
        max_tflop: The maximum size of a problem, in 1e12 floating-point operations; the workload's own if None.
        tokens: Token counts; the workload's own if None.
        per_layer: The number of problems per layer of the models.
        random: The number of random shapes.
        invented: The number of layers of synthetic models, in workloads that have these.
        seed: The random seed.

    Raises:
        ForetuneError: An argument is invalid.
    """

    def __init__(
        self,
        max_tflop: float | None = None,
        *,
        tokens: Sequence[int] | None = None,
        per_layer: int = 2,
        random: int = 40,
        invented: int = 0,
        seed: int = 0,
    ) -> None:
        check_drawn(tokens, per_layer=per_layer, random=random, invented=invented, seed=seed)
        self.max_tflop, self.tokens, self.per_layer = max_tflop, tokens, per_layer
        self.random, self.invented, self.seed = random, invented, seed
        self.rng = np.random.default_rng(seed)
        self.drawn: list[Case] = []

    def limit(self, own: float) -> float:
        """Return `max_tflop`; the first call sets it to the workload's `own` limit if it is None."""
        self.max_tflop = own if self.max_tflop is None else self.max_tflop
        return self.max_tflop

    def between(self, counts: Sequence[int]) -> int:
        """Return a log-uniform number between the smallest and the largest of these counts."""
        return int(np.exp(self.rng.uniform(np.log(min(counts)), np.log(max(counts) + 1))))

    def cases(
        self,
        layers: Iterable[T],
        of_layer: Callable[[T], Case | None],
        of_chance: Sequence[Callable[[], Case | None]],
        tries: int = 50,
    ) -> tuple[Case, ...]:
        """Return the cases of all layers and those of random shapes, in random order.

        Args:
            layers: The layers.
            of_layer: Draws one case of a layer, or returns None if the case exceeds the limits or repeats an earlier
                one; it is then called again.
            of_chance: Functions that each draw one case of a random shape, or return None in the same cases.
            tries: How often `of_layer` is called for one case; the layer gets fewer if all are None.

        Raises:
            ForetuneError: One of `of_chance` returns None 10,000 times in a row.
        """
        for layer in layers:
            for _ in range(self.per_layer):
                self._add(partial(of_layer, layer), tries)
        for draw in of_chance:
            if not self._add(draw, _MOST_DRAWS):
                raise ForetuneError(
                    f"found no random shape with at most {self.max_tflop} TFLOP: raise the TFLOP limit or lower the "
                    "token counts"
                )
        return shuffled(self.drawn, self.rng)

    def _add(self, draw: Callable[[], Case | None], tries: int) -> bool:
        """Add the first case that `draw` returns to `drawn`; return whether there was one."""
        found = next((case for _ in range(tries) if (case := draw()) is not None), None)
        self.drawn += [] if found is None else [found]
        return found is not None


class Deck:
    """Values in random order; each occurs once before any of them is repeated.

    >>> deck = Deck([1, 2], np.random.default_rng(0))
    >>> sorted([deck.draw(), deck.draw()])
    [1, 2]
    """

    def __init__(self, values: Sequence[int], rng: np.random.Generator) -> None:
        self._values, self._rng = values, rng
        self._left: list[int] = []

    def draw(self) -> int:
        """Return the next value, and start a new random order after the last one."""
        self._left = self._left or [int(value) for value in self._rng.permutation(self._values)]
        return self._left.pop()


def chosen(shares: Mapping[T, float], rng: np.random.Generator) -> T:
    """Return one of the keys at random, with probabilities proportional to their shares.

    >>> chosen({"bf16": 1.0, "fp16": 0.0}, np.random.default_rng(0))
    'bf16'
    """
    weights = np.array(list(shares.values()))
    return list(shares)[int(rng.choice(len(shares), p=weights / weights.sum()))]


def shuffled(values: Sequence[T], rng: np.random.Generator) -> tuple[T, ...]:
    """Return values in random order, so that a truncated run has a fair sample.

    >>> sorted(shuffled("abc", np.random.default_rng(0)))
    ['a', 'b', 'c']
    """
    return tuple(values[place] for place in rng.permutation(len(values)))

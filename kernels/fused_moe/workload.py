"""Problems to measure, and the layer that a caller requests by a model's name or by dimensions.

Problems are the layers of real MoE models as serving engines run them, and random layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...datasets.errors import check_integer, shown
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, Deck, Draws, Model, find_model, load_models
from .engines import BATCH_SIZES, SCALED_BLOCK, Layer
from .family import DTYPES, LARGEST
from .launching import Product

#: The least `inter` of one rank.
LEAST_INTER = 64
#: Fraction of problems in block-scaled fp8, among layers that have entire scale blocks.
FP8_SHARE = 0.35
#: Limits of one problem: a few milliseconds on an H200, and weights that fit into memory with all other tensors.
MOST_TFLOP = 2.5
MOST_WEIGHT_BYTES = 30e9
_EXPERTS, _TOPKS = (8, 16, 32, 60, 64, 128, 160, 256, 384, 512), (1, 2, 4, 6, 8, 10)
_TRIES = 1000


def draw(
    family: str, down: bool, engines: Sequence[str], draws: Draws, *, models: Path | str | None = None
) -> tuple[Case, ...]:
    """Draw problems of one product, for the kernel of each engine in turn.

    Args:
        family: The name of the product's family.
        down: Whether it is the second product.
        engines: Engines whose kernels run the problems.
        draws: What to draw, per distinct layer on a rank. Token counts are by default the batch sizes of the engines'
            tuners. Random layers have log-uniform counts in the same range.
        models: A CSV file of models; the shipped table by default.

    Raises:
        ForetuneError: Almost no random layer is within the limits.

    >>> len(draw("fused_moe", False, ["sglang"], Draws(per_layer=1, random=3)))
    98
    """
    rng, most_tflop = draws.rng, draws.limit(MOST_TFLOP)
    batches = [int(count) for count in draws.tokens or BATCH_SIZES]
    deck = Deck(batches, rng)
    taken: set[tuple[tuple[str, ...], Problem]] = set()

    def case(layer: Layer, count: int, sources: tuple[str, ...]) -> Case | None:
        problem = layer.problem(family, engines[len(draws.drawn) % len(engines)], count)
        return Case(problem, sources) if _affordable(Product(problem, down), most_tflop) else None

    def of_layer(item: tuple[tuple[int, int], list[tuple[Model, int]]]) -> Case | None:
        (experts, inter), found = item
        model = found[int(rng.integers(len(found)))][0]
        count, hidden = deck.draw(), model.expert_hidden_size
        layer = Layer(experts, model.top_k, hidden, inter, _dtype(hidden, inter, rng))
        made = case(layer, count, tuple(dict.fromkeys(f"{model.model}/tp{degree}" for model, degree in found)))
        if made is None or (made.sources, made.problem) in taken:
            return None
        taken.add((made.sources, made.problem))
        return made

    def of_chance() -> Case | None:
        layer = _random_layer(rng)
        return case(layer, draws.between(batches), (RANDOM,))

    return draws.cases(layers_on_ranks(load_models(models)).items(), of_layer, [of_chance] * draws.random, _TRIES)


def layers_on_ranks(models: Sequence[Model]) -> dict[tuple[int, int], list[tuple[Model, int]]]:
    """Return the models and tensor-parallel degrees of each layer, by (experts, inter) as in the engines' file names.

    Models with ungated experts are skipped: the families are for gated experts.

    >>> len(layers_on_ranks(load_models()))
    95
    """
    found: dict[tuple[int, int], list[tuple[Model, int]]] = {}
    for model in (model for model in models if model.is_gated):
        for degree in TENSOR_PARALLEL:
            inter, rest = divmod(model.moe_intermediate_size, degree)
            if not rest and inter >= LEAST_INTER:
                found.setdefault((model.num_experts, inter), []).append((model, degree))
    return found


def _dtype(hidden: int, inter: int, rng: np.random.Generator) -> str:
    """Draw the dtype of a layer with these sizes: bf16, or fp8e4m3 if its scale blocks are complete."""
    has_blocks = hidden % 128 == 0 and inter % 128 == 0
    return "fp8e4m3" if rng.uniform() < FP8_SHARE and has_blocks else "bf16"


def _random_layer(rng: np.random.Generator) -> Layer:
    """Draw a layer of random sizes."""
    experts = int(rng.choice(_EXPERTS))
    topk = int(rng.choice([count for count in _TOPKS if count <= experts // 2]))
    step = int(rng.choice((64, 128, 256)))
    hidden, inter = (
        max(step, int(np.exp(rng.uniform(*np.log(widths)))) // step * step) for widths in ((1024, 8192), (128, 8192))
    )
    return Layer(experts, topk, hidden, inter, _dtype(hidden, inter, rng))


def _affordable(product: Product, most_tflop: float) -> bool:
    """Return whether a product needs at most `most_tflop` TFLOP and has at most `MOST_WEIGHT_BYTES` of weights."""
    weights = float(product.problem["experts"]) * product.n * product.k * product.problem.itemsize
    return 2e-12 * product.rows * product.n * product.k <= most_tflop and weights <= MOST_WEIGHT_BYTES


def requested_layer(
    model: str | None = None,
    *,
    experts: int | None = None,
    topk: int | None = None,
    hidden: int | None = None,
    inter: int | None = None,
    tp: int = 1,
    dtype: str = "bf16",
) -> Layer:
    """Return one rank's part of an MoE layer, by a model's name or by dimensions.

    Args:
        model: A model of the shipped table, or the path of a config.json. Exclusive with the four dimensions.
        experts: Number of experts.
        topk: Experts per token.
        hidden: Hidden size.
        inter: Intermediate size of one expert after the activation, over all ranks.
        tp: Number of tensor-parallel ranks; it must divide `inter`.
        dtype: "bf16", "fp16" or "fp8e4m3".

    Raises:
        ForetuneError: The model is unknown or its experts have no gate, a dimension is missing or invalid, or `inter`
            cannot be divided by `tp`.

    >>> requested_layer("Qwen3-30B-A3B", tp=2)
    Layer(experts=128, topk=8, hidden=2048, inter=384, dtype='bf16')
    """
    given = {"experts": experts, "topk": topk, "hidden": hidden, "inter": inter}
    if model is not None:
        if both := [name for name, value in given.items() if value is not None]:
            raise ForetuneError(f"{model} has its own {both[0]}: pass either a model or dimensions")
        one = find_model(model)
        if not one.is_gated:
            raise ForetuneError(
                f"the experts of {model} have no gate, but the engines' tuned files are for gated experts"
            )
        sizes = (one.num_experts, one.top_k, one.expert_hidden_size, one.moe_intermediate_size)
        given = dict(zip(given, sizes, strict=True))
    if missing := [name for name, value in given.items() if value is None]:
        raise ForetuneError(
            f"{' and '.join(missing)} missing: pass a model, or experts, topk, hidden and inter (topk and hidden are "
            "not part of a file's name, but the times depend on them)"
        )
    layer = {name: check_integer(name, value, 1, LARGEST[name]) for name, value in given.items()}
    check_integer("tp", tp, 1, 1024)
    if dtype not in DTYPES:
        raise ForetuneError(f"dtype must be one of {', '.join(DTYPES)} but is {shown(dtype)}")
    if layer["topk"] > layer["experts"]:
        raise ForetuneError(f"topk must be at most experts, {layer['experts']}, but is {layer['topk']}")
    part, rest = divmod(layer["inter"], tp)
    if rest:
        raise ForetuneError(f"tp must divide inter, {layer['inter']}, but is {tp}")
    if dtype == "fp8e4m3" and part % SCALED_BLOCK:
        raise ForetuneError(
            f"with fp8e4m3, inter / tp must be a multiple of {SCALED_BLOCK}, but {layer['inter']} / {tp} is {part}: "
            "use fewer ranks or expert parallelism"
        )
    return Layer(**layer | {"inter": part}, dtype=dtype)

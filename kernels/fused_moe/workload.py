"""Which problems to measure: the layers of real MoE models as serving engines run them, and random ones besides; and
the layer that a caller requests, by a model's name or by its dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...datasets.errors import check_integer, shown
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, Deck, Model, check_drawn, load_models, shuffled
from .engines import BATCH_SIZES, SCALED_BLOCK, Layer
from .family import DTYPES, LARGEST
from .launching import Product

#: A rank's part is at least this wide.
LEAST_INTER = 64
#: The share of the problems in block-scaled fp8, where the layer has whole blocks.
FP8_SHARE = 0.35
#: Limits of one problem: a few milliseconds on an H200, and weights that fit beside everything else.
MOST_TFLOP = 2.5
MOST_WEIGHT_BYTES = 30e9
_EXPERTS, _TOPKS = (8, 16, 32, 60, 64, 128, 160, 256, 384, 512), (1, 2, 4, 6, 8, 10)
_TRIES = 1000


def draw(
    family: str,
    down: bool,
    engines: Sequence[str],
    *,
    models: Path | str | None = None,
    tokens: Sequence[int] | None = None,
    per_layer: int = 2,
    random: int = 40,
    most_tflop: float = MOST_TFLOP,
    seed: int = 0,
) -> tuple[Case, ...]:
    """Problems of one product: `per_layer` of each distinct layer on a rank, and `random` layers that nobody has, with
    batches of the engines' tuners (or `tokens`), for each of the engines in turn; shuffled. The same arguments give the
    same cases.

    Raises `ForetuneError` for numbers that cannot be.

    >>> len(draw("fused_moe", False, ["sglang"], per_layer=1, random=3))
    98
    """
    check_drawn(tokens, per_layer=per_layer, random=random, seed=seed)
    rng = np.random.default_rng(seed)
    batches = [int(count) for count in tokens or BATCH_SIZES]
    drawn: list[Case] = []
    deck = Deck(batches, rng)
    for (experts, inter), found in layers_on_ranks(load_models(models)).items():
        taken: set[Problem] = set()
        for _ in range(per_layer):
            for _ in range(_TRIES):  # a draw over the limits, or a repeated one, is drawn again
                model = found[int(rng.integers(len(found)))][0]
                count, hidden = deck.draw(), model.expert_hidden_size
                layer = Layer(experts, model.top_k, hidden, inter, _dtype(hidden, inter, rng))
                problem = layer.problem(family, engines[len(drawn) % len(engines)], count)
                if problem not in taken and _affordable(Product(problem, down), most_tflop):
                    taken.add(problem)
                    sources = tuple(dict.fromkeys(f"{model.model}/tp{degree}" for model, degree in found))
                    drawn.append(Case(problem, sources))
                    break
    for _ in range(random):
        for _ in range(_TRIES):
            layer = _random_layer(rng)
            count = int(np.exp(rng.uniform(np.log(min(batches)), np.log(max(batches) + 1))))
            problem = layer.problem(family, engines[len(drawn) % len(engines)], count)
            if _affordable(Product(problem, down), most_tflop):
                drawn.append(Case(problem, (RANDOM,)))
                break
        else:
            raise ForetuneError(f"no random layer has at most {most_tflop} TFLOP: allow more, or fewer tokens")
    return shuffled(drawn, rng)


def layers_on_ranks(models: Sequence[Model]) -> dict[tuple[int, int], list[tuple[Model, int]]]:
    """Return the models and tensor-parallel degrees of each layer, by (experts, inter) as engines name files.

    Models whose experts have no gate are left out: the families are of gated experts.

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
    whole = hidden % 128 == 0 and inter % 128 == 0
    return "fp8e4m3" if rng.uniform() < FP8_SHARE and whole else "bf16"


def _random_layer(rng: np.random.Generator) -> Layer:
    experts = int(rng.choice(_EXPERTS))
    topk = int(rng.choice([count for count in _TOPKS if count <= experts // 2]))
    step = int(rng.choice((64, 128, 256)))
    hidden, inter = (
        max(step, int(np.exp(rng.uniform(*np.log(widths)))) // step * step) for widths in ((1024, 8192), (128, 8192))
    )
    return Layer(experts, topk, hidden, inter, _dtype(hidden, inter, rng))


def _affordable(product: Product, most_tflop: float) -> bool:
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
    """One of `tp` ranks' part of a model's MoE layer: of a model in the shipped table, by its name, or of the whole
    layer's dimensions, of which `inter` is the intermediate size of one expert, after the activation.

    Raises `ForetuneError` for a model that is not in the table or whose experts have no gate, dimensions that are
    missing or no whole numbers, and an `inter` that `tp` ranks cannot share.

    >>> requested_layer("Qwen3-30B-A3B", tp=2)
    Layer(experts=128, topk=8, hidden=2048, inter=384, dtype='bf16')
    """
    given = {"experts": experts, "topk": topk, "hidden": hidden, "inter": inter}
    if model is not None:
        if both := [name for name, value in given.items() if value is not None]:
            raise ForetuneError(f"{model} has its own {both[0]}: give a model, or dimensions without one")
        known = {one.model: one for one in load_models()}
        called = {name.partition("/")[0]: one for name, one in known.items()} | known  # "DeepSeek-V3/R1" by its first
        if model not in called:
            raise ForetuneError(f"unknown model {shown(model)}; known: {', '.join(known)}; others by their dimensions")
        one = called[model]
        if not one.is_gated:
            raise ForetuneError(f"the experts of {model} have no gate, and the engines' tuned files are for gated ones")
        sizes = (one.num_experts, one.top_k, one.expert_hidden_size, one.moe_intermediate_size)
        given = dict(zip(given, sizes, strict=True))
    if missing := [name for name, value in given.items() if value is None]:
        raise ForetuneError(
            f"{' and '.join(missing)} missing: a layer is a model's, or has experts, topk, hidden and inter (topk and "
            "hidden are in no file's name, but decide the times)"
        )
    whole = {name: check_integer(name, value, 1, LARGEST[name]) for name, value in given.items()}
    check_integer("tp", tp, 1, 1024)
    if dtype not in DTYPES:
        raise ForetuneError(f"dtype must be one of {', '.join(DTYPES)} but is {shown(dtype)}")
    if whole["topk"] > whole["experts"]:
        raise ForetuneError(f"topk must be at most experts, {whole['experts']}, but is {whole['topk']}")
    part, rest = divmod(whole["inter"], tp)
    if rest:
        raise ForetuneError(f"tp must divide inter, {whole['inter']}, but is {tp}")
    if dtype == "fp8e4m3" and part % SCALED_BLOCK:
        raise ForetuneError(
            f"a rank must have whole blocks of {SCALED_BLOCK} in fp8e4m3, but {whole['inter']} / {tp} is {part}: fewer "
            "ranks, or expert parallelism"
        )
    return Layer(**whole | {"inter": part}, dtype=dtype)

"""Which problems to measure: the layers of real MoE models as serving engines run them, and random ones besides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..drawing import TENSOR_PARALLEL, check_drawn, shuffled
from ..grouped_gemm.models import Model, load_models
from .engines import BATCH_SIZES, Layer
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
    deck: list[int] = []
    for (experts, inter), found in layers_on_ranks(load_models(models)).items():
        taken: set[Problem] = set()
        for _ in range(per_layer):
            for _ in range(_TRIES):  # a draw over the limits, or a repeated one, is drawn again
                model = found[int(rng.integers(len(found)))][0]
                deck = deck or [int(count) for count in rng.permutation(batches)]
                hidden = model.expert_hidden_size
                layer = Layer(experts, model.top_k, hidden, inter, _dtype(hidden, inter, rng))
                problem = layer.problem(family, engines[len(drawn) % len(engines)], deck.pop())
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

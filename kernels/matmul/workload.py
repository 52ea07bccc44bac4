"""Which products to measure: the linear layers of real dense models, forward and backward, their attention as batched
products, and random shapes that fill the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, check_drawn, chosen, shuffled
from .layouts import A_KM, B_KN, BIAS

#: With fewer tokens nothing is trained: such calls are forward passes.
LEAST_TRAINED = 128
#: Shares of the passes, where there are tokens enough to train: forward, the gradient of the input, of the weight.
PASSES: dict[tuple[str, ...], float] = {(): 0.5, (B_KN,): 0.25, (A_KM, B_KN): 0.25}
#: Shares of the dtypes, and of what follows a forward product in bf16. (Each kind is binaries of its own: what the
#: epilogue costs is learned from bf16.)
DTYPE_SHARES = {"bf16": 0.74, "fp16": 0.1, "fp32": 0.08, "int8": 0.08}
EPILOGUES: dict[tuple[str, ...], float] = {
    (): 0.72,
    (BIAS,): 0.1,
    (BIAS, "gelu"): 0.08,
    ("silu",): 0.06,
    ("relu",): 0.04,
}
#: Random shapes: the ranges of tokens and of both widths, and what the widths are multiples of, with shares.
RANDOM_SIZES = ((1, 16384), (16, 32768), (16, 32768))
RANDOM_STEPS = {1: 0.15, 8: 0.25, 64: 0.3, 256: 0.3}
#: One in so many random shapes is of a batch, of up to so many matrices.
BATCHED_ONE_IN, MOST_MATRICES = 8, 128
#: Limits of one problem: on an H200 a few milliseconds at the best config, and tensors that fit beside everything else.
MOST_TFLOP = 2.5
MOST_BYTES = 8e9
#: So many draws over the limits in a row: there is hardly one within.
MOST_DRAWS = 10_000


@dataclass(frozen=True)
class Layer:
    """One product of a model on one rank: (N, K) of a linear layer, or the heads and their size of attention."""

    name: str
    sizes: tuple[int, int]


def draw(
    models: Sequence[DenseModel],
    *,
    tokens: Sequence[int] | None = None,
    per_layer: int = 2,
    random: int = 40,
    most_tflop: float = MOST_TFLOP,
    seed: int = 0,
) -> tuple[Case, ...]:
    """Problems of the dense GEMM: `per_layer` of each layer of each model, and `random` random ones, none of more than
    `most_tflop` times 1e12 floating-point operations.

    Layers are crossed with token counts (`tokens`, or TOKENS and what is between them), tensor-parallel degrees,
    passes, dtypes and epilogues by stratified sampling, so that every count appears equally often. A shape that
    several model families have is "random": nobody's layer, which would tie those families together when some of them
    are held out. The order is shuffled, so that a run cut short by its budget has a fair sample. The same arguments
    give the same cases.

    >>> from ..workloads import load_dense_models
    >>> len(draw(load_dense_models()[:2], random=3))
    27
    """
    check_drawn(tokens, per_layer=per_layer, random=random, seed=seed)
    rng = np.random.default_rng(seed)
    owners = _owners(models)
    counts = _Counts(tokens, rng)
    drawn: dict[Problem, Case] = {}
    for model in models:
        for name in (*model.linear_layers(), "attention"):
            for _ in range(per_layer):
                for _ in range(50):  # a draw over the limits, or a repeated one, is drawn again
                    layer = _on_rank(model, name, _degree(model, rng))
                    problem = _problem_of(layer, counts.draw(), rng)
                    if problem not in drawn and _affordable(problem, most_tflop):
                        shared = len(owners[layer]) > 1
                        source = f"{RANDOM if shared else model.model}/{name}"
                        drawn[problem] = Case(problem, (source,), _pass_of(problem))
                        break
    for _ in range(random):
        for _ in range(MOST_DRAWS):
            problem = _random_problem(counts if tokens else None, rng)
            if problem not in drawn and _affordable(problem, most_tflop):
                drawn[problem] = Case(problem, (RANDOM,), _pass_of(problem))
                break
        else:
            raise ForetuneError(f"no random shape has at most {most_tflop} TFLOP: allow more")
    return shuffled(list(drawn.values()), rng)


class _Counts:
    """Token counts, each as often as the others; where none are given half of them are moved to what is between."""

    def __init__(self, tokens: Sequence[int] | None, rng: np.random.Generator) -> None:
        self._given, self._rng, self._deck = tokens, rng, Deck(tokens or TOKENS, rng)

    def draw(self) -> int:
        count = self._deck.draw()
        if self._given is None and self._rng.uniform() < 0.5:
            return max(1, int(count * 2 ** self._rng.uniform(-0.5, 0.5)))
        return count


def _owners(models: Sequence[DenseModel]) -> dict[Layer, set[tuple[str, ...]]]:
    """The model families that have a layer of this shape on some rank, under whatever name."""
    by_sizes: dict[tuple[bool, tuple[int, int]], set[tuple[str, ...]]] = {}
    layers = {}
    for model in models:
        families = Case(Problem.of("matmul", m=1), (model.model,)).model_families
        for degree in filter(model.splits, TENSOR_PARALLEL):
            for name in (*model.linear_layers(), "attention"):
                layer = _on_rank(model, name, degree)
                shape = name == "attention", layer.sizes
                by_sizes.setdefault(shape, set()).add(families)
                layers[layer] = shape
    return {layer: by_sizes[shape] for layer, shape in layers.items()}


def _degree(model: DenseModel, rng: np.random.Generator) -> int:
    """1 as often as all others."""
    degrees = [degree for degree in TENSOR_PARALLEL[1:] if model.splits(degree)]
    return int(rng.choice(degrees)) if degrees and rng.uniform() < 0.5 else 1


def _on_rank(model: DenseModel, name: str, degree: int) -> Layer:
    if name == "attention":
        return Layer(name, (model.heads_on_rank(degree)[0], model.head_dim))
    return Layer(name, model.linear_layers(degree)[name])


def _problem_of(layer: Layer, tokens: int, rng: np.random.Generator) -> Problem:
    """A layer in one of its passes; of attention its scores (queries by keys) or its values (scores by values)."""
    if layer.name == "attention":
        heads, head_dim = layer.sizes
        dtype = chosen({"bf16": 0.8, "fp16": 0.2}, rng)
        keys = max(tokens, 16) // 8 * 8  # scores have rows as long as there are keys
        if rng.uniform() < 0.5:
            return Problem.of("matmul", dtype=dtype, batch=heads, m=tokens, n=keys, k=head_dim)
        return Problem.of("matmul", dtype=dtype, flags=(B_KN,), batch=heads, m=tokens, n=head_dim, k=keys)
    n, k = layer.sizes
    dtype = chosen(DTYPE_SHARES, rng)
    passing: tuple[str, ...] = ()
    if dtype != "int8" and tokens >= LEAST_TRAINED:
        passing = chosen(PASSES, rng)
    if passing == (B_KN,):
        return Problem.of("matmul", dtype=dtype, flags=passing, batch=1, m=tokens, n=k, k=n)
    if passing:
        return Problem.of("matmul", dtype=dtype, flags=passing, batch=1, m=n, n=k, k=tokens)
    return Problem.of("matmul", dtype=dtype, flags=_epilogue(dtype, rng), batch=1, m=tokens, n=n, k=k)


def _random_problem(counts: _Counts | None, rng: np.random.Generator) -> Problem:
    tokens, n, k = (int(size) for size in np.exp(rng.uniform(*np.log(np.transpose(RANDOM_SIZES)))))
    tokens = tokens if counts is None else counts.draw()
    step = chosen(RANDOM_STEPS, rng)
    n, k = (max(step, size // step * step) for size in (n, k))
    batch = 1
    if rng.integers(BATCHED_ONE_IN) == 0:
        batch = int(np.exp(rng.uniform(np.log(2), np.log(MOST_MATRICES + 1))))
    dtype = chosen(DTYPE_SHARES, rng)
    flags: tuple[str, ...] = () if dtype == "int8" else chosen(PASSES, rng)
    m, k = (k, tokens) if A_KM in flags else (tokens, k)
    return Problem.of("matmul", dtype=dtype, flags=flags or _epilogue(dtype, rng), batch=batch, m=m, n=n, k=k)


def _epilogue(dtype: str, rng: np.random.Generator) -> tuple[str, ...]:
    return chosen(EPILOGUES, rng) if dtype == "bf16" else ()


def _affordable(problem: Problem, most_tflop: float) -> bool:
    batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
    touched = 4.0 * batch * (m * k + n * k + m * n)
    return 2e-12 * batch * m * n * k <= most_tflop and touched <= MOST_BYTES


def _pass_of(problem: Problem) -> str:
    """The scenario of a case: which pass the product is of."""
    if problem["batch"] > 1:
        return "batched"
    return {(): "forward", (B_KN,): "dx"}.get(tuple(f for f in problem.flags if f in (A_KM, B_KN)), "dw")

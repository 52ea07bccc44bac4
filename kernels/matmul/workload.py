"""The products to measure.

These are the linear layers of real dense models, forward and backward, their attention as batched products, and random
shapes in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...datasets import Case, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, Draws, chosen
from .space import A_KM, B_KN, BIAS

#: The fewest tokens of a training step; calls with fewer are forward passes.
LEAST_TRAINED = 128
#: The share of each pass, given enough tokens to train: forward, gradient of the input, gradient of the weight.
PASSES: dict[tuple[str, ...], float] = {(): 0.5, (B_KN,): 0.25, (A_KM, B_KN): 0.25}
#: The share of each dtype, and of each epilogue of a forward product in bf16. (Every combination needs binaries of its
#: own, so the cost of epilogues is learned from bf16 only.)
DTYPE_SHARES = {"bf16": 0.74, "fp16": 0.1, "fp32": 0.08, "int8": 0.08}
EPILOGUES: dict[tuple[str, ...], float] = {
    (): 0.72,
    (BIAS,): 0.1,
    (BIAS, "gelu"): 0.08,
    ("silu",): 0.06,
    ("relu",): 0.04,
}
#: Random shapes: the ranges of tokens and of both widths; and the values whose multiples the widths are, with shares.
RANDOM_SIZES = ((1, 16384), (16, 32768), (16, 32768))
RANDOM_STEPS = {1: 0.15, 8: 0.25, 64: 0.3, 256: 0.3}
#: One in this many random shapes is batched; and the most matrices of a batch.
BATCHED_ONE_IN, MOST_MATRICES = 8, 128
#: Limits of one problem: a few milliseconds on an H200 with the best config, and tensors that fit in memory.
MOST_TFLOP = 2.5
MOST_BYTES = 8e9


@dataclass(frozen=True)
class Layer:
    """One layer of a model on one rank: its name, and its sizes.

    The sizes of a linear layer are (N, K), and those of "attention" are the number of heads and their dimension.
    """

    name: str
    sizes: tuple[int, int]


def draw(models: Sequence[DenseModel], draws: Draws) -> tuple[Case, ...]:
    """Draw problems of the dense GEMM.

    Layers are crossed with token counts, tensor-parallel degrees, passes, dtypes and epilogues by stratified sampling,
    so that every count appears equally often. The source of a shape that several model families share is "random":
    with their names, cross-validation would have to hold out these families together.

    Args:
        models: The models whose layers are drawn.
        draws: What to draw. Without token counts, they are TOKENS and values in between.

    Raises:
        ForetuneError: Too few random shapes are within the limits.

    >>> from ..workloads import load_dense_models
    >>> len(draw(load_dense_models()[:2], Draws(random=3)))
    27
    """
    rng, most_tflop = draws.rng, draws.limit(MOST_TFLOP)
    owners = _owners(models)
    counts = _Counts(draws.tokens, rng)
    drawn: set[Problem] = set()

    def case(problem: Problem, source: str) -> Case | None:
        if problem in drawn or not _affordable(problem, most_tflop):
            return None
        drawn.add(problem)
        return Case(problem, (source,), _pass_of(problem))

    def of_layer(named: tuple[DenseModel, str]) -> Case | None:
        model, name = named
        layer = _on_rank(model, name, _degree(model, rng))
        source = f"{RANDOM if len(owners[layer]) > 1 else model.model}/{name}"
        return case(_problem_of(layer, counts.draw(), rng), source)

    def of_chance() -> Case | None:
        return case(_random_problem(counts if draws.tokens else None, rng), RANDOM)

    layers = [(model, name) for model in models for name in (*model.linear_layers(), "attention")]
    return draws.cases(layers, of_layer, [of_chance] * draws.random)


class _Counts:
    """Draws token counts, each of the given ones equally often.

    If none are given, TOKENS are used, and half of the draws are shifted to values between them.
    """

    def __init__(self, tokens: Sequence[int] | None, rng: np.random.Generator) -> None:
        self._given, self._rng, self._deck = tokens, rng, Deck(tokens or TOKENS, rng)

    def draw(self) -> int:
        """Return the next token count."""
        count = self._deck.draw()
        if self._given is None and self._rng.uniform() < 0.5:
            return max(1, int(count * 2 ** self._rng.uniform(-0.5, 0.5)))
        return count


def _owners(models: Sequence[DenseModel]) -> dict[Layer, set[tuple[str, ...]]]:
    """Return for each layer of the models the model families that have a layer of the same shape on some rank.

    The layers are those at all tensor-parallel degrees. Each tuple in a set has the families of one model, as
    `Case.model_families` returns them.
    """
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
    """Draw a tensor-parallel degree that a model's layers allow: 1 in half of the cases."""
    degrees = [degree for degree in TENSOR_PARALLEL[1:] if model.splits(degree)]
    return int(rng.choice(degrees)) if degrees and rng.uniform() < 0.5 else 1


def _on_rank(model: DenseModel, name: str, degree: int) -> Layer:
    """Return a model's layer on one of `degree` ranks."""
    if name == "attention":
        return Layer(name, (model.heads_on_rank(degree)[0], model.head_dim))
    return Layer(name, model.linear_layers(degree)[name])


def _problem_of(layer: Layer, tokens: int, rng: np.random.Generator) -> Problem:
    """Draw a problem of a layer and a number of tokens: one of its passes, its dtype and its epilogue.

    For attention it is one of two batched products: queries by keys (the scores), or scores by values.
    """
    if layer.name == "attention":
        heads, head_dim = layer.sizes
        dtype = chosen({"bf16": 0.8, "fp16": 0.2}, rng)
        keys = max(tokens, 16) // 8 * 8  # rows of the scores are this long
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
    """Draw a product of random shape; `counts` gives its number of tokens, if it is not None."""
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
    """Draw the flags of a forward product's epilogue (bias, activation); none unless the dtype is bf16."""
    return chosen(EPILOGUES, rng) if dtype == "bf16" else ()


def _affordable(problem: Problem, most_tflop: float) -> bool:
    """Return whether a problem needs at most `most_tflop` TFLOP, and its tensors are small enough to measure."""
    batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
    touched = 4.0 * batch * (m * k + n * k + m * n)
    return 2e-12 * batch * m * n * k <= most_tflop and touched <= MOST_BYTES


def _pass_of(problem: Problem) -> str:
    """Return the pass that a product belongs to, which is its case's scenario: "forward", "dx", "dw" or "batched"."""
    if problem["batch"] > 1:
        return "batched"
    return {(): "forward", (B_KN,): "dx"}.get(tuple(f for f in problem.flags if f in (A_KM, B_KN)), "dw")

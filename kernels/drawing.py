"""What the workloads of all families draw from, and how they draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from ..datasets import ForetuneError
from ..datasets.errors import abridged

T = TypeVar("T")

#: Tokens of one call, from decode to training.
TOKENS = tuple(2**exponent for exponent in range(15))
#: With more tokens than this hardly any layer is within the limits of a problem.
MOST_TOKENS = 1 << 22
#: Tensor-parallel degrees: ranks that share a layer.
TENSOR_PARALLEL = (1, 2, 4, 8)


def check_drawn(tokens: Sequence[int] | None, **counts: int) -> None:
    """Raises `ForetuneError` naming what a workload is asked for and cannot be: `per_layer`, `random` and other counts
    that are negative, or token counts that no call has.

    >>> check_drawn([16, 0], per_layer=2)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: token counts must be between 1 and 4194304 but got [16, 0]
    """
    for name, value in counts.items():
        if value < 0:
            raise ForetuneError(f"{name} must be >= 0 but got {value}")
    if tokens is not None and not (tokens and all(1 <= count <= MOST_TOKENS for count in tokens)):
        raise ForetuneError(f"token counts must be between 1 and {MOST_TOKENS} but got {abridged(str(list(tokens)))}")


def chosen(shares: Mapping[T, float], rng: np.random.Generator) -> T:
    """One of some values, each as often as its share of them all.

    >>> chosen({"bf16": 1.0, "fp16": 0.0}, np.random.default_rng(0))
    'bf16'
    """
    weights = np.array(list(shares.values()))
    return list(shares)[int(rng.choice(len(shares), p=weights / weights.sum()))]


def shuffled(values: Sequence[T], rng: np.random.Generator) -> tuple[T, ...]:
    """In another order: a run that is cut short has a fair sample.

    >>> sorted(shuffled("abc", np.random.default_rng(0)))
    ['a', 'b', 'c']
    """
    return tuple(values[place] for place in rng.permutation(len(values)))

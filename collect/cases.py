"""Which cases a run measures: those of a dataset, those that a family draws, and how many of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import Case, Measurable

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset


def cases_like(dataset: Dataset, family: str, *, seed: int = 0) -> tuple[Case, ...]:
    """The problems that a dataset has of one family, for who wants to compare cards; shuffled by `seed`.

    >>> from foretune.datasets import load
    >>> dataset = load("h200")
    >>> {case.problem.family for case in cases_like(dataset, dataset.families[0])} == {dataset.families[0]}
    True
    """
    found = [case for case in dataset.cases if case.problem.family == family]
    return tuple(found[i] for i in np.random.default_rng(seed).permutation(len(found)))


def first_cases(
    family: Measurable, cases: Iterable[Case], limit: int | None = None, *, max_tflop: float | None = None
) -> tuple[Case, ...]:
    """The first `limit` of these cases, all if None: each problem once, and none of more than `max_tflop` x 1e12
    floating-point operations."""
    once: Mapping[object, Case] = {case.problem: case for case in cases}
    most = float("inf") if max_tflop is None else 1e12 * max_tflop
    return tuple(islice((case for case in once.values() if family.flops(case.problem) <= most), limit))

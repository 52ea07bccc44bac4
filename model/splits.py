"""Which problems may be tested on which training problems: never a model family on itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import Case, DeviceSpec, ForetuneError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The source of a shape that belongs to no model.
RANDOM = "random"


def split_groups(cases: Sequence[Case]) -> NDArray[np.intp]:
    """A label for each case, (n_cases,): cases with one label must stay on one side of a split.

    Together belong the cases of one model family, all families that share a case, and cases with the same
    dimensions. A random shape is a group of its own.

    >>> from foretune.datasets import Problem
    >>> def case(n, *sources): return Case(Problem.of("f", rows=8, n=n), sources, "balanced")
    >>> split_groups([case(1, "Qwen3/w2"), case(2, "Mixtral/w2"), case(3, "Qwen2/w2", "OLMoE/w2"), case(4, "OLMoE/w13"),
    ...               case(5, "random"), case(6, "random"), case(6, "random")]).tolist()
    [0, 1, 0, 0, 2, 3, 3]
    """
    parent: dict[Hashable, Hashable] = {}

    def root(key: Hashable) -> Hashable:
        while (above := parent.setdefault(key, key)) != key:
            key = above
        return key

    for case in cases:
        shape = root(case.problem.dims)
        for name in case.model_families:
            if name != RANDOM:
                parent[root(name)] = root(shape)
    labels: dict[Hashable, int] = {}
    return np.array([labels.setdefault(root(case.problem.dims), len(labels)) for case in cases], np.intp)


def split_folds(groups: NDArray[np.intp], folds: int) -> NDArray[np.intp]:
    """The fold of each case, (n_cases,): whole groups, the largest first, each to the emptiest fold, as scikit-learn's
    `GroupKFold` does it.

    There are fewer folds than asked for where there are fewer groups. Raises `ForetuneError` below two of either.

    >>> split_folds(np.array([0, 0, 0, 1, 1, 2]), 2).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    there = np.unique(groups)
    if folds < 2:
        raise ForetuneError(f"folds must be >= 2 but got {folds}")
    if len(there) < 2:
        raise ForetuneError(
            "cross-validation needs problems of at least two unrelated models, but there is one group: --split size "
            "(split='size') tests on larger sizes than it trains on"
        )
    from sklearn.model_selection import GroupKFold

    result = np.empty(len(groups), np.intp)
    splits = GroupKFold(min(folds, len(there))).split(groups, groups=groups)
    for fold, (_, tested) in enumerate(splits):
        result[tested] = fold
    return result


def split_devices(devices: Sequence[DeviceSpec]) -> NDArray[np.intp]:
    """The fold of each case by where it was measured, (n_cases,). Raises `ForetuneError` where that is one device.

    >>> h200 = DeviceSpec.named("h200")
    >>> split_devices([h200, h200.with_sms(64), h200]).tolist()
    [0, 1, 0]
    """
    number = {name: at for at, name in enumerate(dict.fromkeys(device.name for device in devices))}
    if len(number) < 2:
        raise ForetuneError(f"holding out a device needs measurements on two, but all are on {', '.join(number)}")
    return np.array([number[device.name] for device in devices], np.intp)


#: The share of the problems that are held out as the largest in a dimension.
_LARGEST = 0.25


def split_sizes(cases: Sequence[Case]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """What lies outside of what is learned: a fold for each dimension, of the problems in which it is among the largest
    quarter, and -1 for those that are nowhere, (n_cases,); and which are below that, so that the fold's ranker may
    learn from them, (n_folds, n_cases). One of several dimensions' largest is in the first such fold.

    Raises `ForetuneError` where no dimension has two sizes.

    >>> from foretune.datasets import Problem
    >>> cases = [Case(Problem.of("f", rows=rows, n=8), ("random",), "even") for rows in (1, 2, 3, 4)]
    >>> fold, below = split_sizes(cases)
    >>> fold.tolist(), below.tolist()
    ([-1, -1, -1, 0], [[True, True, True, False]])
    """
    fold = np.full(len(cases), -1, np.intp)
    below: list[NDArray[np.bool_]] = []
    for name in sorted({name for case in cases for name, _ in case.problem.dims}):
        sizes = np.array([case.problem[name] for case in cases])
        large = sizes > np.quantile(sizes, 1 - _LARGEST, method="lower")
        if large.any():
            fold[large & (fold < 0)] = len(below)
            below.append(~large)
    if not below:
        raise ForetuneError("holding out the largest sizes needs problems of several, but all are of one size")
    return fold, np.array(below)

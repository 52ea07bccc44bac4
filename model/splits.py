"""Split problems into training and test sets, so that no family of language models, or no device, is in both."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import Case, DeviceSpec, ForetuneError

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The source name of a random shape, which belongs to no model.
RANDOM = "random"


def split_groups(cases: Sequence[Case]) -> NDArray[np.intp]:
    """Return a group label for each case, (n_cases,): a split must not separate cases of one group.

    A group consists of the cases of one model family, of all families that share a case with it, and of all cases with
    the same dimensions as one of these. Each random shape is a group of its own.

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
    """Return the fold of each case, (n_cases,), without splitting a group.

    scikit-learn's `GroupKFold` assigns the groups, the largest first, each to the fold with the fewest cases so far.

    Args:
        groups: The group label of each case, (n_cases,); see `split_groups`.
        folds: The number of folds. With fewer groups, each group is a fold.

    Raises:
        ForetuneError: There are fewer than two folds or groups.

    >>> split_folds(np.array([0, 0, 0, 1, 1, 2]), 2).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    labels = np.unique(groups)
    if folds < 2:
        raise ForetuneError(f"folds must be >= 2 but got {folds}")
    if len(labels) < 2:
        raise ForetuneError(
            "cross-validation needs problems of at least two unrelated models, but there is one group: --split size "
            "(split='size') tests on larger sizes than it trains on"
        )
    from sklearn.model_selection import GroupKFold

    result = np.empty(len(groups), np.intp)
    splits = GroupKFold(min(folds, len(labels))).split(groups, groups=groups)
    for fold, (_, tested) in enumerate(splits):
        result[tested] = fold
    return result


def split_devices(devices: Sequence[DeviceSpec]) -> NDArray[np.intp]:
    """Return the fold of each case, (n_cases,): one fold for each device.

    Raises:
        ForetuneError: All cases were measured on one device.

    >>> h200 = DeviceSpec.named("h200")
    >>> split_devices([h200, h200.with_sms(64), h200]).tolist()
    [0, 1, 0]
    """
    number = {name: at for at, name in enumerate(dict.fromkeys(device.name for device in devices))}
    if len(number) < 2:
        raise ForetuneError(f"holding out a device needs measurements on two, but all are on {', '.join(number)}")
    return np.array([number[device.name] for device in devices], np.intp)


#: The share of the problems that `split_sizes` holds out in each dimension.
_LARGEST = 0.25


def split_sizes(cases: Sequence[Case]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Split by size: hold out the problems in the largest quarter of a dimension, one fold for each dimension.

    This measures extrapolation to sizes beyond the training data. A problem that is among the largest in several
    dimensions is in the fold of the first one (dimensions are sorted by name).

    Returns:
        The fold that tests each case, (n_cases,), -1 where none does; and a mask of the cases that the ranker of each
        fold may learn from, (n_folds, n_cases).

    Raises:
        ForetuneError: No dimension has two sizes.

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

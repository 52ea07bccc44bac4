"""Combine a model's results of several groups of features into one result per problem and config.

The results of a group whose features do not depend on the problem (`FeatureGroup.lasting`) are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from ...datasets.feature_groups import FeatureGroup

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: A table with the result of each kind (a distinct row of a feature group), (n_problems, n_kinds, width), or
#: (1, n_kinds, width) if it is equal for all problems; and the kind of each config, (n_configs,).
Part: TypeAlias = "tuple[NDArray[Any], NDArray[np.intp]]"

T = TypeVar("T")
#: The number of cached groups. Each takes 2 MB for a forest of 450 trees and 1,000 configs.
_MOST_GROUPS = 4


def parts_of(
    groups: Sequence[FeatureGroup], of_kinds: Callable[[FeatureGroup], NDArray[Any]], combine: np.ufunc
) -> list[Part]:
    """Compute each group's results, and return them as parts for `combined`.

    A part is a table with the result of each kind (a distinct row of a group), and the kind of each config. Parts that
    differ between problems come first, and of these the one with the fewest kinds. A part with one kind, which is equal
    for all configs, is combined with the next one at once.

    Args:
        groups: The feature groups of the same problems and configs.
        of_kinds: Returns the results for the kinds of a group, `width` numbers each, (n_problems, n_kinds, width).
        combine: The operation that combines the results of two groups.

    >>> one = FeatureGroup((0,), np.array([[[5.0]], [[6.0]]]), np.array([0, 0, 0]))
    >>> two = FeatureGroup((1,), np.array([[[10.0], [20.0]]]), np.array([1, 0, 1]), lasting=True)
    >>> (table, kind), = parts_of([one, two], lambda group: group.values, np.add)
    >>> table.take(kind, axis=1).tolist()
    [[[25.0], [15.0], [25.0]], [[26.0], [16.0], [26.0]]]
    """
    problems, configs = max(len(group.values) for group in groups), len(groups[0].row_of_config)
    parts = sorted(
        ((of_kinds(group), group.row_of_config) for group in groups),
        key=lambda part: (len(part[0]) < problems, part[0].shape[1]),
    )
    while len(parts) > 1 and parts[0][0].shape[1] == 1 and parts[1][0].shape[1] <= configs:
        (one, _), (other, kind), *rest = parts
        parts = [(combine(one, other), kind), *rest]
    return parts


def combined(parts: Sequence[Part], configs: slice, combine: np.ufunc, buffers: NDArray[Any]) -> NDArray[Any]:
    """Look up the results of some configs in each part, and return them combined, (n_problems, n_configs, width).

    A result consists of `width` numbers. The returned array is in the first of the two buffers.

    Args:
        parts: The parts from `parts_of`.
        configs: The range of configs.
        combine: The operation that combines two parts.
        buffers: Two buffers of the result's shape, or with space for more configs.

    >>> table = np.array([[[1], [2]], [[3], [4]]])
    >>> parts = [(table, np.array([0, 1, 1])), (10 * table[:1], np.array([1, 1, 0]))]
    >>> combined(parts, slice(1, 3), np.add, np.empty((2, 2, 3, 1), int)).tolist()
    [[[22], [12]], [[24], [14]]]
    """
    (table, kind), *others = parts
    kind = kind[configs]
    # With mode="clip", NumPy writes to the buffer without a copy; no index is out of range.
    result = table.take(kind, axis=1, out=buffers[0, :, : len(kind)], mode="clip")
    for table, kind in others:
        kind = kind[configs]
        other = table.take(kind, axis=1, out=buffers[1, : len(table), : len(kind)], mode="clip")
        combine(result, other, out=result)
    return result


class GroupMemo(Generic[T]):
    """A cache of values computed from lasting feature groups, which are recognized by the identity of their `values`.

    >>> group, known = FeatureGroup((0,), np.zeros((1, 5, 1), np.float32), np.zeros(8, np.intp), True), GroupMemo()
    >>> known(group, lambda: 5), known(group, lambda: 6)
    (5, 5)
    """

    def __init__(self) -> None:
        self._known: tuple[tuple[FeatureGroup, T], ...] = ()  # keeps arrays alive, so that no id is reused

    def __call__(self, group: FeatureGroup, make: Callable[[], T]) -> T:
        """Return the cached value of a group; call `make` for it if there is none."""
        for known, value in self._known:
            if known.values is group.values:
                return value
        value = make()
        # Replaced in one assignment, because other threads may predict at the same time.
        self._known = ((group, value), *self._known)[:_MOST_GROUPS]
        return value

"""What scorers combine the rows of problems from, part by part, and what they remember of lasting groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np

from ...datasets.feature_groups import FeatureGroup, problems_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What the kinds of each problem have, (n_problems, n_kinds, width), or (1, n_kinds, width) where that is the same in
#: all of them; and of which kind each config is, (n_configs,).
Part: TypeAlias = "tuple[NDArray[Any], NDArray[np.intp]]"

T = TypeVar("T")
#: Groups that are remembered: 2 MB each in a forest of 450 trees, for 1,000 configs.
_MOST = 4


def parts_of(
    groups: Sequence[FeatureGroup], of_kinds: Callable[[FeatureGroup], NDArray[Any]], combine: np.ufunc
) -> list[Part]:
    """What `of_kinds`, (n_problems, n_kinds, width), makes of each group, those that differ among problems first, and
    of these the one with the fewest kinds. What is the same for all configs of a problem is combined with another part
    already.

    >>> one = FeatureGroup((0,), np.array([[[5.0]], [[6.0]]]), np.array([0, 0, 0]))
    >>> two = FeatureGroup((1,), np.array([[[10.0], [20.0]]]), np.array([1, 0, 1]), lasting=True)
    >>> (table, kind), = parts_of([one, two], lambda group: group.values, np.add)
    >>> table.take(kind, axis=1).tolist()
    [[[25.0], [15.0], [25.0]], [[26.0], [16.0], [26.0]]]
    """
    problems, configs = problems_in(groups), len(groups[0].kind)
    parts = sorted(
        ((of_kinds(group), group.kind) for group in groups),
        key=lambda part: (len(part[0]) < problems, part[0].shape[1]),
    )
    while len(parts) > 1 and parts[0][0].shape[1] == 1 and parts[1][0].shape[1] <= configs:
        (one, _), (other, kind), *rest = parts
        parts = [(combine(one, other), kind), *rest]
    return parts


def combined(parts: Sequence[Part], configs: slice, combine: np.ufunc, buffers: NDArray[Any]) -> NDArray[Any]:
    """What the parts have for some of the configs together, (n_problems, n_configs, width), in the first of two
    buffers, each of that shape or with room for more configs.

    >>> table = np.array([[[1], [2]], [[3], [4]]])
    >>> parts = [(table, np.array([0, 1, 1])), (10 * table[:1], np.array([1, 1, 0]))]
    >>> combined(parts, slice(1, 3), np.add, np.empty((2, 2, 3, 1), int)).tolist()
    [[[22], [12]], [[24], [14]]]
    """
    (table, kind), *others = parts
    kind = kind[configs]
    # (Clipping is what lets NumPy write to the buffer at once; no kind is out of range.)
    result = table.take(kind, axis=1, out=buffers[0, :, : len(kind)], mode="clip")
    for table, kind in others:
        kind = kind[configs]
        other = table.take(kind, axis=1, out=buffers[1, : len(table), : len(kind)], mode="clip")
        combine(result, other, out=result)
    return result


class OfLasting(Generic[T]):
    """What was made of lasting groups: one is known by its `values`.

    >>> group, known = FeatureGroup((0,), np.zeros((1, 5, 1), np.float32), np.zeros(8, np.intp), True), OfLasting()
    >>> known(group, lambda: 5), known(group, lambda: 6)
    (5, 5)
    """

    def __init__(self) -> None:
        self._known: tuple[tuple[FeatureGroup, T], ...] = ()  # kept alive, so that no identity is used twice

    def __call__(self, group: FeatureGroup, make: Callable[[], T]) -> T:
        for known, value in self._known:
            if known.values is group.values:
                return value
        value = make()
        # Replaced in one step: other threads predict meanwhile.
        self._known = ((group, value), *self._known)[:_MOST]
        return value

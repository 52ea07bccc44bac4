"""`OfLasting`: what follows from a lasting group of features, remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ...datasets.feature_groups import FeatureGroup

T = TypeVar("T")
#: Groups that are remembered: 2 MB each in a forest of 450 trees, for 1,000 configs.
_MOST = 4


class OfLasting(Generic[T]):
    """A function of groups, which remembers what it made of the lasting ones: a group is known by its `values`.

    >>> import numpy as np
    >>> count = OfLasting(lambda group: group.values.size)
    >>> count(FeatureGroup((0,), np.zeros((1, 5, 1), np.float32), np.zeros(8, np.intp), lasting=True))
    5
    """

    def __init__(self, make: Callable[[FeatureGroup], T]) -> None:
        self._make = make
        self._known: tuple[tuple[FeatureGroup, T], ...] = ()  # kept alive, so that no identity is used twice

    def __call__(self, group: FeatureGroup) -> T:
        if not group.lasting:
            return self._make(group)
        for known, value in self._known:
            if known.values is group.values:
                return value
        value = self._make(group)
        # Replaced in one step: other threads predict meanwhile.
        self._known = ((group, value), *self._known)[:_MOST]
        return value

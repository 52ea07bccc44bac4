"""`FeatureGroup`: a table of features by what its columns depend on, so that what repeats is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class FeatureGroup(NamedTuple):
    """Some columns of the features of several problems on the same configs: configs of one kind have the same values in
    all of them. What is the same for all configs is a group of one kind.

    `lasting` promises that `values` are one and the same object for the next problems too, and never change: what
    follows from them is remembered.
    """

    columns: tuple[int, ...]  # their places among the family's `feature_names`
    values: NDArray[np.float32]  # (n_problems, n_kinds, n_columns); of a lasting group (1, n_kinds, n_columns)
    kind: NDArray[np.intp]  # (n_configs,) which of the kinds each config is of
    lasting: bool = False

    def holding(self, values: NDArray[Any]) -> FeatureGroup:
        """The same columns and kinds with other values: what was made of these, say."""
        return FeatureGroup(self.columns, values, self.kind, self.lasting)


def joined(groups: Sequence[FeatureGroup], place: int = 0) -> NDArray[np.float32]:
    """The table of the problem in a place, (n_configs, n_features), of groups that have each column once.

    >>> import numpy as np
    >>> one = FeatureGroup((1,), np.array([[[5.0]]], np.float32), np.array([0, 0]))
    >>> two = FeatureGroup((0, 2), np.array([[[1, 2], [3, 4]]], np.float32), np.array([1, 0]))
    >>> joined([one, two]).tolist()
    [[3.0, 5.0, 4.0], [1.0, 5.0, 2.0]]
    """
    import numpy as np

    table = np.empty((len(groups[0].kind), sum(len(group.columns) for group in groups)), np.float32)
    for group in groups:
        values = group.values[0 if group.lasting else place]
        table[:, list(group.columns)] = values.take(group.kind, axis=0)
    return table


def stacked(each: Sequence[Sequence[FeatureGroup]]) -> tuple[FeatureGroup, ...]:
    """The groups of several problems on the same configs, from those of each.

    >>> import numpy as np
    >>> one, two = (FeatureGroup((0,), np.array([[[size]]], np.float32), np.array([0, 0])) for size in (4.0, 8.0))
    >>> stacked([[one], [two]])[0].values.ravel().tolist()
    [4.0, 8.0]
    """
    import numpy as np

    if len(each) == 1:
        return tuple(each[0])
    return tuple(
        same[0] if same[0].lasting else same[0].holding(np.concatenate([group.values for group in same]))
        for same in zip(*each, strict=True)
    )


def narrowed(
    groups: Sequence[FeatureGroup], problems: slice = slice(None), configs: NDArray[np.intp] | None = None
) -> list[FeatureGroup]:
    """The groups of some of their problems, on the configs in these places. The kinds that none of those is of are left
    out, but of a lasting group, whose `values` stay the same object.

    >>> import numpy as np
    >>> group = FeatureGroup((0,), np.array([[[1], [2], [3]]], np.float32), np.array([2, 0, 2]))
    >>> one, = narrowed([group], configs=np.array([0, 2]))
    >>> one.values.ravel().tolist(), one.kind.tolist()
    ([3.0], [0, 0])
    """
    result = []
    for columns, values, kind, lasting in groups:
        if not lasting:
            values = values[problems]
        if configs is not None:
            kind = kind.take(configs)
            if not lasting and values.shape[1] > 1:
                seen, kind = renumbered(kind, values.shape[1])
                values = values.take(seen, axis=1)
        result.append(FeatureGroup(columns, values, kind, lasting))
    return result


def renumbered(codes: NDArray[np.intp], bound: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The codes that there are, of those below `bound`, ascending, and for each one its place among these."""
    import numpy as np

    taken = np.zeros(bound, np.bool_)
    taken[codes] = True
    seen = taken.nonzero()[0]
    place = np.empty(bound, np.intp)
    place[seen] = np.arange(len(seen))
    return seen, place.take(codes)


def problems_in(groups: Sequence[FeatureGroup]) -> int:
    """How many problems groups are of."""
    return max(len(group.values) for group in groups)

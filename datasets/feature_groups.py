"""`FeatureGroup`: columns of a feature table that many configs share, stored and computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class FeatureGroup(NamedTuple):
    """Some feature columns of several problems on the same configs, with repeated rows stored once.

    Configs with the same values in all of these columns share a row. Columns that are equal for all configs form a
    group with a single row.

    Attributes:
        columns: The positions of the columns in the family's `feature_names`.
        values: The distinct rows, (n_problems, n_rows, n_columns); (1, n_rows, n_columns) for a lasting group.
        row_of_config: The row of `values` of each config: an index into its second axis, (n_configs,).
        lasting: Promises that `values` is the same unchanged object for later problems too, so that results computed
            from it may be cached.
    """

    columns: tuple[int, ...]
    values: NDArray[np.float32]
    row_of_config: NDArray[np.intp]
    lasting: bool = False


def joined(groups: Sequence[FeatureGroup], place: int = 0) -> NDArray[np.float32]:
    """Return the feature table of one problem, (n_configs, n_features), from groups that have each column once.

    `place` is the problem's index in the groups.

    >>> import numpy as np
    >>> one = FeatureGroup((1,), np.array([[[5.0]]], np.float32), np.array([0, 0]))
    >>> two = FeatureGroup((0, 2), np.array([[[1, 2], [3, 4]]], np.float32), np.array([1, 0]))
    >>> joined([one, two]).tolist()
    [[3.0, 5.0, 4.0], [1.0, 5.0, 2.0]]
    """
    import numpy as np

    table = np.empty((len(groups[0].row_of_config), sum(len(group.columns) for group in groups)), np.float32)
    for group in groups:
        values = group.values[0 if group.lasting else place]
        table[:, list(group.columns)] = values.take(group.row_of_config, axis=0)
    return table


def stacked(each: Sequence[Sequence[FeatureGroup]]) -> tuple[FeatureGroup, ...]:
    """Concatenate the feature groups of several problems on the same configs along the axis of problems.

    The first groups of all problems must have the same columns, and so must the second ones, and so on. A group
    with `lasting` is the same for all problems, and is kept once.

    >>> import numpy as np
    >>> one, two = (FeatureGroup((0,), np.array([[[size]]], np.float32), np.array([0, 0])) for size in (4.0, 8.0))
    >>> stacked([[one], [two]])[0].values.ravel().tolist()
    [4.0, 8.0]
    """
    import numpy as np

    if len(each) == 1:
        return tuple(each[0])
    return tuple(
        same[0] if same[0].lasting else same[0]._replace(values=np.concatenate([group.values for group in same]))
        for same in zip(*each, strict=True)
    )


def narrowed(
    groups: Sequence[FeatureGroup], problems: slice = slice(None), configs: NDArray[np.intp] | None = None
) -> list[FeatureGroup]:
    """Return the groups restricted to some of their problems and configs.

    Rows that none of these configs has are dropped, except in lasting groups, whose `values` stay the same object.

    Args:
        groups: The groups to select from.
        problems: The problems to keep.
        configs: The indices of the configs to keep; None keeps all.

    >>> import numpy as np
    >>> group = FeatureGroup((0,), np.array([[[1], [2], [3]]], np.float32), np.array([2, 0, 2]))
    >>> one, = narrowed([group], configs=np.array([0, 2]))
    >>> one.values.ravel().tolist(), one.row_of_config.tolist()
    ([3.0], [0, 0])
    """
    result = []
    for columns, values, rows, lasting in groups:
        if not lasting:
            values = values[problems]
        if configs is not None:
            rows = rows.take(configs)
            if not lasting and values.shape[1] > 1:
                seen, rows = renumbered(rows, values.shape[1])
                values = values.take(seen, axis=1)
        result.append(FeatureGroup(columns, values, rows, lasting))
    return result


def renumbered(codes: NDArray[np.intp], bound: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the distinct codes (all below `bound`) in ascending order, and each code's index among them."""
    import numpy as np

    taken = np.zeros(bound, np.bool_)
    taken[codes] = True
    seen = taken.nonzero()[0]
    place = np.empty(bound, np.intp)
    place[seen] = np.arange(len(seen))
    return seen, place.take(codes)

"""`FeatureGroup`: a table of features by what its columns depend on, so that what repeats is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class FeatureGroup:
    """Some columns of the features of several problems on the same configs: configs of one kind have the same values in
    all of them. What is the same for all configs is a group of one kind.

    `lasting` promises that the group is one and the same object for the next problems too, and never changes: what
    follows from it is remembered.
    """

    columns: tuple[int, ...]  # their places among the family's `feature_names`
    values: NDArray[np.float32]  # (n_problems, n_kinds, n_columns); of a lasting group (1, n_kinds, n_columns)
    kind: NDArray[np.intp]  # (n_configs,) which of the kinds each config is of
    lasting: bool = False


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
        same[0] if same[0].lasting else replace(same[0], values=np.concatenate([group.values for group in same]))
        for same in zip(*each, strict=True)
    )


def problems_in(groups: Sequence[FeatureGroup], chosen: slice = slice(None)) -> int:
    """How many problems groups are of, or those of them that are chosen."""
    return len(range(max(len(group.values) for group in groups))[chosen])

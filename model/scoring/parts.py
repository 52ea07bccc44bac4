"""What scorers combine the rows of problems from, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...datasets.feature_groups import FeatureGroup, problems_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What the kinds of all problems have, (n, width), and which of them each row of each problem is of, (n_problems *
#: n_rows,).
Part: TypeAlias = "tuple[NDArray[Any], NDArray[np.intp]]"


def parts_of(
    groups: Sequence[FeatureGroup], of_kinds: Callable[[FeatureGroup], NDArray[Any]], combine: np.ufunc
) -> list[Part]:
    """What `of_kinds`, (n_problems, n_kinds, width), makes of each group, those with the fewest kinds first. What is
    the same for all rows of a problem is combined with another part already.

    >>> one = FeatureGroup((0,), np.array([[[5.0]], [[6.0]]]), np.array([0, 0, 0]))
    >>> two = FeatureGroup((1,), np.array([[[10.0], [20.0]]]), np.array([1, 0, 1]), lasting=True)
    >>> (table, row), = parts_of([one, two], lambda group: group.values, np.add)
    >>> table.take(row).tolist()
    [25.0, 15.0, 25.0, 26.0, 16.0, 26.0]
    """
    problems, configs = problems_in(groups), len(groups[0].kind)
    tables = sorted(((of_kinds(group), group.kind) for group in groups), key=lambda part: part[0].shape[1])
    while len(tables) > 1 and tables[0][0].shape[1] == 1 and tables[1][0].shape[1] <= configs:
        (one, _), (other, kind), *rest = tables
        tables = [(combine(one, other), kind), *rest]
    parts = []
    for table, kind in tables:
        if len(table) == problems > 1:
            kind = kind + (table.shape[1] * np.arange(problems))[:, None]
        rows = np.broadcast_to(kind, (problems, configs)).ravel()
        parts.append((table.reshape(-1, table.shape[2]), rows))
    return parts

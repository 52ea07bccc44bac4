"""The training table: every measured config of every problem, seen as the ranker will see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import Family, ForetuneError
from ..datasets.grid import Grid

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainingRows:
    """Features and targets; the rows of one problem in one view are one query, and lie together."""

    features: NDArray[np.float32]  # (n_rows, n_features)
    log_slowdown: NDArray[np.float64]  # (n_rows,) natural log of time over the problem's best
    query_sizes: NDArray[np.int64]  # (n_queries,)


def training_rows(grid: Grid, family: Family, *, slow: float, keep_slow: float, seed: int) -> TrainingRows:
    """Each problem twice: with its group sizes, and as the host sees it at call time, without them.

    Configs that failed are left out. Of those slower than `slow` times the best only a share `keep_slow` stays,
    drawn by `seed`: a third of a wide space is hopeless, and telling 20x from 30x apart helps nobody.
    """
    random = np.random.default_rng(seed)
    slowdowns = grid.slowdowns
    keep = np.isfinite(slowdowns) & ((slowdowns <= slow) | (random.random(slowdowns.shape) < keep_slow))
    features, targets, sizes = [], [], []
    for row, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
        columns = np.flatnonzero(keep[row])
        configs = [grid.configs[column] for column in columns]
        for problem in dict.fromkeys((case.problem, case.problem.without_sizes())):
            features.append(family.features(problem, device, configs))
            targets.append(np.log(slowdowns[row, columns]))
            sizes.append(len(columns))
    if not features:
        raise ForetuneError(f"no measurements of {family.name} to learn from")
    return TrainingRows(np.concatenate(features), np.concatenate(targets), np.array(sizes))

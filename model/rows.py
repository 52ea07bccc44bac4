"""The training table: every measured config of every problem, seen as the ranker will see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import Family, ForetuneError, KernelConfig
from ..datasets.grid import Grid

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Subsets:
    """Configs by mask, each subset one and the same tuple: families remember what depends on a list of configs alone,
    and most problems have the same list.

    >>> configs = (KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=32))
    >>> Subsets(configs)[np.array([False, True])]
    (KernelConfig(meta=(('BLOCK', 32),), num_warps=4, num_stages=3, num_ctas=1, maxnreg=None, ir_override=None),)
    """

    def __init__(self, configs: tuple[KernelConfig, ...]) -> None:
        self._configs = configs
        self._made: dict[bytes, tuple[KernelConfig, ...]] = {}

    def __getitem__(self, mask: NDArray[np.bool_]) -> tuple[KernelConfig, ...]:
        key = mask.tobytes()
        if key not in self._made:
            self._made[key] = tuple(config for config, chosen in zip(self._configs, mask, strict=True) if chosen)
        return self._made[key]


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
    subsets = Subsets(grid.configs)
    for row, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
        ran = np.isfinite(slowdowns[row])
        kept = keep[row, ran]
        for problem in dict.fromkeys((case.problem, case.problem.without_sizes())):
            features.append(family.features(problem, device, subsets[ran])[kept])
            targets.append(np.log(slowdowns[row, ran][kept]))
            sizes.append(int(kept.sum()))
    if not features:
        raise ForetuneError(f"no measurements of {family.name} to learn from")
    return TrainingRows(np.concatenate(features), np.concatenate(targets), np.array(sizes))

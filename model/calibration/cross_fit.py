"""A ranker's calibration from cross-validation on what it learns from: every problem is predicted by a ranker that
never saw its model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import Family
from ...datasets.grid import Grid
from ...datasets.progress import advance, share_of, side_by_side
from ..gbdt import LightGBMRanker
from ..ranker import Ranker
from ..rows import Subsets, supported
from ..sources import candidates_of, eligible_of, measured_whole
from ..splits import split_folds, split_groups
from .conformal import COVERAGE, Calibration, calibrate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...datasets.dataset import Dataset

#: Folds, and trees of each fold's ranker: less than the shipped one has, so that training on everything takes three
#: minutes. README.md says what that does to the lengths.
FOLDS, TREES = 3, 200
#: So many problems that were measured whole are enough for the others not to calibrate; and of so many, the standard
#: error of what they say of one in twenty is 1.3 points, so that further folds are not worth their training.
_ENOUGH, _PLENTY = 100, 300
#: Fewer problems than this say nothing about one in twenty, and more make training longer and little else better.
LEAST, MOST = round(1 / (1 - COVERAGE)), 1000


def calibrated_on(dataset: Dataset, grid: Grid, family: Family, ranker: Callable[[], Ranker]) -> Calibration | None:
    """`cross_fitted` on the dataset's `measured_grid`, by what it says may be on a shortlist.

    >>> calibrated_on(dataset, grid, family, LightGBMRanker).level()  # doctest: +SKIP
    0.21
    """
    eligible = eligible_of(dataset, grid, family)
    whole = measured_whole(candidates_of(dataset, grid, eligible), supported(grid, family))
    return cross_fitted(grid, eligible, whole, family, ranker)


def cross_fitted(
    grid: Grid,
    eligible: NDArray[np.bool_],
    whole: NDArray[np.bool_],
    family: Family,
    ranker: Callable[[], Ranker],
    *,
    jobs: int = 2,
) -> Calibration | None:
    """The calibration of such a ranker trained on this grid, where those that are `eligible`, (n_problems, n_configs),
    may be on a shortlist. Where enough problems were measured `whole`, (n_problems,), the others do not calibrate: the
    best config of one may be none of those that were tried. None where there are too few problems, or all are of one
    model: then nothing can be said. Folds past the first `_PLENTY` problems that calibrate are left out.

    `ranker` makes the unfitted ranker; of a `LightGBMRanker` those of the folds have at most `TREES` trees. The same
    grid and parameters give the same calibration.

    >>> cross_fitted(grid, eligible, whole, family, LightGBMRanker).level()  # doctest: +SKIP
    0.21
    """
    rows = np.flatnonzero((eligible & np.isfinite(grid.times_us)).any(axis=1))
    if len(rows) > MOST:
        rows = np.sort(np.random.default_rng(0).choice(rows, MOST, replace=False))
    grid, eligible, judged = grid.select(rows), eligible[rows], whole[rows]
    groups = split_groups(grid.cases)
    if judged.sum() < _ENOUGH:
        judged[:] = True
    if len(grid) < LEAST or len(np.unique(groups)) < 2:
        return None
    fold, subsets = split_folds(groups, FOLDS), Subsets(grid.configs)
    calibrating = np.bincount(fold[judged]).cumsum()
    numbers = np.arange(1 + np.searchsorted(calibrating, min(_PLENTY, calibrating[-1]))).tolist()

    def predicted(number: int) -> dict[int, NDArray[np.float64]]:
        with share_of(0.9 / len(numbers)):
            fitted = _smaller(ranker()).fit(grid.select(np.flatnonzero(fold != number)), family)
        logs, tested = {}, np.flatnonzero((fold == number) & judged)
        for row in tested.tolist():
            advance(0.1 / len(numbers) / len(tested))
            problem = family.at_call_time(grid.cases[row].problem)
            logs[row] = np.log(fitted.predict(family, problem, grid.devices[row], subsets[eligible[row]]))
        return logs

    logs = {row: of_it for part in side_by_side([partial(predicted, number) for number in numbers], jobs)
            for row, of_it in part.items()}  # fmt: skip
    return calibrate(
        [
            (logs[row], grid.first_us[row, mask], grid.second_us[row, mask])
            for row, mask in ((row, eligible[row]) for row in sorted(logs))
        ]
    )


def _smaller(ranker: Ranker) -> Ranker:
    if isinstance(ranker, LightGBMRanker) and ranker.trees > TREES:
        return type(ranker)(**{**ranker.get_params(), "trees": TREES})
    return ranker

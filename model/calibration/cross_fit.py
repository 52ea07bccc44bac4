"""A ranker's calibration from cross-validation on what it learns from: every problem is predicted by a ranker that
never saw its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...datasets.progress import advance, share_of, side_by_side
from ..gbdt import LightGBMRanker
from ..ranker import Ranker
from ..splits import split_folds
from ..training_set import TrainingSet
from .conformal import COVERAGE, Calibration, Judged, calibrate

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Folds, and trees of each fold's ranker: less than the shipped one has, so that training on everything takes three
#: minutes. README.md says what that does to the lengths.
FOLDS, TREES = 3, 200
#: With this many exhaustively measured problems the others do not calibrate; and with this many, the standard error of
#: what they say of one in twenty is 1.3 points, so that further folds are not worth their training.
_ENOUGH, _PLENTY = 100, 300
#: Fewer problems than this say nothing about one in twenty, and more make training longer and little else better.
LEAST, MOST = round(1 / (1 - COVERAGE)), 1000


def cross_fitted(data: TrainingSet, ranker: Callable[[], Ranker], *, jobs: int = 2) -> Calibration | None:
    """Return the calibration of such a ranker trained on this data.

    Where enough problems were measured exhaustively, the others do not calibrate: the best config of one may be none of
    those that were tried. Folds past the first `_PLENTY` problems that calibrate are left out. The same data and
    parameters give the same calibration.

    Args:
        data: What the ranker learns from.
        ranker: Makes the unfitted ranker; of a `LightGBMRanker` those of the folds have at most `TREES` trees.
        jobs: How many folds run side by side.

    Returns:
        None where there are too few problems, or all are of one model: then nothing can be said.

    >>> cross_fitted(TrainingSet.of(dataset, family), LightGBMRanker).level()  # doctest: +SKIP
    0.21
    """
    rows = np.flatnonzero((data.candidate & np.isfinite(data.grid.times_us)).any(axis=1))
    if len(rows) > MOST:
        rows = np.sort(np.random.default_rng(0).choice(rows, MOST, replace=False))
    data = data.select(rows)
    judged = data.exhaustive if data.exhaustive.sum() >= _ENOUGH else np.ones(len(data), np.bool_)
    if len(data) < LEAST or len(np.unique(data.groups)) < 2:
        return None
    fold = split_folds(data.groups, FOLDS)
    calibrating = np.bincount(fold[judged]).cumsum()
    numbers = np.arange(1 + np.searchsorted(calibrating, min(_PLENTY, calibrating[-1]))).tolist()

    def predicted(number: int) -> dict[int, NDArray[np.float64]]:
        with share_of(0.9 / len(numbers)):
            fitted = _smaller(ranker()).fit(data.grid.select(np.flatnonzero(fold != number)), data.family)
        logs, tested = {}, np.flatnonzero((fold == number) & judged)
        for row in tested.tolist():
            advance(0.1 / len(numbers) / len(tested))
            logs[row] = np.log(data.predict(fitted, row, data.family.at_call_time))
        return logs

    parts = side_by_side([partial(predicted, number) for number in numbers], jobs)
    logs = {row: of_it for part in parts for row, of_it in part.items()}
    return calibrate(calibrating_problems(data, sorted(logs), [logs[row] for row in sorted(logs)]))


def calibrating_problems(data: TrainingSet, rows: Sequence[int], logs: Sequence[NDArray[np.float64]]) -> list[Judged]:
    """Return problems as a calibration takes them, from the predicted logs of slowdowns of each one's candidates."""
    passes = data.grid.first_us, data.grid.second_us
    return [
        (predicted, *(times[row, data.candidate[row]] for times in passes))
        for row, predicted in zip(rows, logs, strict=True)
    ]


def _smaller(ranker: Ranker) -> Ranker:
    if isinstance(ranker, LightGBMRanker) and ranker.trees > TREES:
        return type(ranker)(**{**ranker.get_params(), "trees": TREES})
    return ranker

"""Calibrate a ranker by cross-fitting: each problem is predicted by a ranker that was not trained on its model.

`Coverage` measures how many shortlists of calibrated length contain a good config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.progress import advance, share_of, side_by_side
from ..gbdt import LightGBMRanker
from ..ranker import Ranker
from ..splits import split_folds
from ..training_set import TrainingSet
from .conformal import COVERAGE, GOOD, Calibration, Judged, calibrate, most_tried, needed_length, ranked

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The number of folds, and the most trees of each fold's ranker: fewer than the shipped one has, so that training on
#: all shipped data takes three minutes. README.md explains the effect on lengths.
FOLDS, TREES = 3, 200
#: With at least `ENOUGH` exhaustively measured problems, sparse ones are not used for calibration. With `_PLENTY`, the
#: standard error of the coverage of 95 % is 1.3 points, so that further folds are not worth their training time.
ENOUGH, _PLENTY = 100, 300
#: The fewest problems to calibrate on, because a 95 % quantile needs at least 20, and the most, to limit training time.
LEAST, MOST = round(1 / (1 - COVERAGE)), 1000


def cross_fitted(data: TrainingSet, ranker: Callable[[], Ranker], *, jobs: int = 2) -> Calibration | None:
    """Return the calibration of the rankers that a factory makes, from cross-validation on their training data.

    If enough problems were measured exhaustively, only they calibrate: the best config of a sparsely measured problem
    may not be among those that were tried. Folds are skipped once `_PLENTY` problems calibrate. The same data and
    parameters give the same calibration.

    Args:
        data: The training data.
        ranker: Returns an unfitted ranker. A `LightGBMRanker` is trained with at most `TREES` trees in each fold.
        jobs: The number of folds that run concurrently.

    Returns:
        The calibration, or None if there are fewer than `LEAST` problems or all are of one model.

    >>> cross_fitted(TrainingSet.of(dataset, family), LightGBMRanker).threshold()  # doctest: +SKIP
    0.21
    """
    rows = np.flatnonzero((data.candidate & np.isfinite(data.grid.times_us)).any(axis=1))
    if len(rows) > MOST:
        rows = np.sort(np.random.default_rng(0).choice(rows, MOST, replace=False))
    data = data.select(rows)
    judged = data.exhaustive if data.exhaustive.sum() >= ENOUGH else np.ones(len(data), np.bool_)
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
    logs = {row: predictions for part in parts for row, predictions in part.items()}
    return calibrate(calibrating_problems(data, sorted(logs), [logs[row] for row in sorted(logs)]))


def calibrating_problems(data: TrainingSet, rows: Sequence[int], logs: Sequence[NDArray[np.float64]]) -> list[Judged]:
    """Return the predicted log slowdowns and the times in both timing passes of each row's problem, for `calibrate`.

    Args:
        data: The measurements.
        rows: The rows, (n_problems,).
        logs: The predicted log slowdowns of each row's candidates, (n_candidates,) each.
    """
    passes = data.grid.first_us, data.grid.second_us
    return [
        (predicted, *(times[row, data.candidate[row]] for times in passes))
        for row, predicted in zip(rows, logs, strict=True)
    ]


def _smaller(ranker: Ranker) -> Ranker:
    """Return the ranker, or a copy with `TREES` trees if it has more."""
    if isinstance(ranker, LightGBMRanker) and ranker.trees > TREES:
        ranker = copy(ranker)
        ranker.trees = TREES
    return ranker


@dataclass(frozen=True)
class Coverage:
    """Lengths of problems' shortlists with k="auto", and whether each has a good config, (n_problems,) arrays."""

    covered: NDArray[np.bool_]
    length: NDArray[np.intp]
    capped: NDArray[np.bool_]  # whether the cap made it shorter than the calibration requires

    @classmethod
    def of(cls, problems: Sequence[Judged], calibrations: Sequence[Calibration], growths: Sequence[float]) -> Coverage:
        """Return the coverage of problems, given the calibration and growth (see `Distance.growth`) of each."""
        found = []
        for problem, calibration, growth in zip(problems, calibrations, growths, strict=True):
            scores, loss, _ = ranked(problem)
            wanted = int(np.searchsorted(scores, calibration.threshold() + math.log(growth), side="right"))
            length = max(1, min(wanted, most_tried(growth)))
            found.append((needed_length(loss) <= length, length, length < wanted))
        covered, lengths, capped = zip(*found, strict=True)
        return cls(np.array(covered), np.array(lengths), np.array(capped))

    def to_json(self) -> dict[str, Any]:
        """Return the values that `foretune evaluate --json` prints.

        `within` is the excess time up to which a config counts as good: 0.01 = 1 % slower than the best.
        """
        return {
            "nominal": COVERAGE,
            "within": round(GOOD - 1, 4),
            "coverage": round(float(self.covered.mean()), 4),
            "mean_k": round(float(self.length.mean()), 1),
            "median_k": float(np.median(self.length)),
            "capped": round(float(self.capped.mean()), 4),
            "problems": len(self.covered),
        }

    def __str__(self) -> str:
        summary = self.to_json()
        return (
            f"{100 * summary['coverage']:.1f} % contain a config within {100 * summary['within']:.0f} % of the best; k "
            f"is {summary['mean_k']:.0f} on average (median {summary['median_k']:.0f}), and capped in "
            f"{100 * summary['capped']:.0f} %"
        )


def within_distribution(problems: Sequence[Judged], *, draws: int = 20, seed: int = 0) -> Coverage:
    """Return the coverage on problems like the calibrating ones: a random half calibrates the rest, `draws` times."""
    random, parts = np.random.default_rng(seed), []
    for _ in range(draws):
        order = random.permutation(len(problems))
        half = calibrate([problems[place] for place in order[: len(order) // 2]])
        rest = [problems[place] for place in order[len(order) // 2 :]]
        parts.append(Coverage.of(rest, [half] * len(rest), [1.0] * len(rest)))
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in ("covered", "length", "capped"))
    return Coverage(*arrays)


def across_folds(problems: Sequence[Judged], fold: NDArray[np.intp], growths: Sequence[float]) -> Coverage:
    """Return the coverage of all problems, where those of each fold are calibrated with those of the other folds.

    Args:
        problems: The problems.
        fold: The fold of each problem, (n_problems,).
        growths: The growth of each problem's shortlist; see `Distance.growth`.
    """
    by_fold = {
        number: calibrate([problem for problem, its in zip(problems, fold, strict=True) if its != number])
        for number in np.unique(fold).tolist()
    }
    return Coverage.of(problems, [by_fold[number] for number in fold.tolist()], growths)

"""A ranker's calibration by cross-fitting: every problem is predicted by a ranker that never saw its model.

And `Coverage`: how many shortlists of the length that a calibration wants hold a good config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

    >>> cross_fitted(TrainingSet.of(dataset, family), LightGBMRanker).threshold()  # doctest: +SKIP
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


@dataclass(frozen=True)
class Coverage:
    """Lengths of shortlists of k="auto", and whether they held a good config, (n_problems,) each."""

    covered: NDArray[np.bool_]
    length: NDArray[np.intp]
    capped: NDArray[np.bool_]  # the cap made it shorter than the calibration wants

    @classmethod
    def of(cls, problems: Sequence[Judged], calibrations: Sequence[Calibration], growths: Sequence[float]) -> Coverage:
        """That of each problem by a calibration and a growth of its own."""
        found = []
        for problem, calibration, growth in zip(problems, calibrations, growths, strict=True):
            scores, loss, _ = ranked(problem)
            wanted = int(np.searchsorted(scores, calibration.threshold() + math.log(growth), side="right"))
            length = max(1, min(wanted, most_tried(growth)))
            found.append((needed_length(loss) <= length, length, length < wanted))
        covered, lengths, capped = zip(*found, strict=True)
        return cls(np.array(covered), np.array(lengths), np.array(capped))

    def to_json(self) -> dict[str, Any]:
        """As `foretune evaluate --json` prints it: shares of 1, of configs within `within` of the best."""
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
        told = self.to_json()
        return (
            f"{100 * told['coverage']:.1f} % hold a config within {100 * told['within']:.0f} % of the best; k is "
            f"{told['mean_k']:.0f} on average, {told['median_k']:.0f} in the median, at the cap in "
            f"{100 * told['capped']:.0f} %"
        )


def within_distribution(problems: Sequence[Judged], *, draws: int = 20, seed: int = 0) -> Coverage:
    """The coverage of problems drawn as those that were calibrated on: of random halves one calibrates the other."""
    random, parts = np.random.default_rng(seed), []
    for _ in range(draws):
        order = random.permutation(len(problems))
        half = calibrate([problems[place] for place in order[: len(order) // 2]])
        rest = [problems[place] for place in order[len(order) // 2 :]]
        parts.append(Coverage.of(rest, [half] * len(rest), [1.0] * len(rest)))
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in ("covered", "length", "capped"))
    return Coverage(*arrays)


def across_folds(problems: Sequence[Judged], fold: NDArray[np.intp], growths: Sequence[float]) -> Coverage:
    """The coverage of each fold, (n_problems,) labels, by a calibration on the others."""
    by_fold = {
        number: calibrate([problem for problem, its in zip(problems, fold, strict=True) if its != number])
        for number in np.unique(fold).tolist()
    }
    return Coverage.of(problems, [by_fold[number] for number in fold.tolist()], growths)

"""The coverage of cross-validation: every problem's shortlist by a ranker and a calibration that never saw its like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import Family
from ...datasets.grid import Grid
from ...datasets.progress import share_of
from ..ranker import Ranker
from .conformal import Judged
from .coverage import Coverage, across_folds, within_distribution
from .cross_fit import LEAST, cross_fitted
from .extent import Extent, distance_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..bundle import Bundle


@dataclass(frozen=True)
class HeldOut:
    """Scores of problems by rankers that were fitted without their fold."""

    grid: Grid
    eligible: NDArray[np.bool_]  # (n_problems, n_configs)
    whole: NDArray[np.bool_]  # (n_problems,)
    scores: NDArray[np.float64]  # (n_problems, n_configs) predicted slowdowns at call time
    rows: NDArray[np.intp]  # (n_judged,) the problems that are judged
    fold: NDArray[np.intp]  # (n_problems,)
    learned: Mapping[int, NDArray[np.intp]]  # what the ranker of a fold was fitted on

    def models(self) -> dict[str, Coverage]:
        """That of models that were held out, calibrated on the other folds' scores; and that of problems like those
        that calibrate. Nothing where there are too few."""
        problems, fold = _judged(self.grid, self.eligible, self.scores, self.rows), self.fold[self.rows]
        if len(problems) < 2 * LEAST or len(self.learned) < 2:
            return {}
        return {
            "problems like those it learned from": within_distribution(problems),
            "models it never saw": across_folds(problems, fold, self._growths()),
        }

    def calibrated_apart(self, family: Family, ranker: Callable[[], Ranker], jobs: int) -> Coverage | None:
        """That of each fold by the calibration that a bundle without it would have: what is in no fold's training is
        new to its calibration as well. None where one of them has too few problems."""
        calibrations = {}
        for number, learned in self.learned.items():
            with share_of(1 / len(self.learned)):
                known = self.grid.select(learned)
                found = cross_fitted(known, self.eligible[learned], self.whole[learned], family, ranker, jobs=jobs)
            if found is None:
                return None
            calibrations[number] = found
        problems = _judged(self.grid, self.eligible, self.scores, self.rows)
        return Coverage.of(problems, [calibrations[n] for n in self.fold[self.rows].tolist()], self._growths())

    def _growths(self) -> list[float]:
        """What the distance of each judged problem from its fold's training data does to its shortlist."""
        extents = {number: Extent.of([self.grid.cases[row].problem for row in rows.tolist()])
                   for number, rows in self.learned.items()}  # fmt: skip
        devices = {number: tuple(dict.fromkeys(self.grid.devices[row] for row in rows.tolist()))
                   for number, rows in self.learned.items()}  # fmt: skip
        return [
            distance_of(self.grid.cases[row].problem, self.grid.devices[row], extents[number], devices[number]).growth
            for row, number in zip(self.rows.tolist(), self.fold[self.rows].tolist(), strict=True)
        ]


def coverage_of_bundle(
    grid: Grid,
    eligible: NDArray[np.bool_],
    scores: NDArray[np.float64],
    rows: NDArray[np.intp],
    bundle: Bundle,
) -> dict[str, Coverage]:
    """That of a bundle's own calibration on these `rows` of the grid, by its scores at call time; nothing where it has
    none."""
    calibration = bundle.calibration(grid.family)
    if calibration is None:
        return {}
    growths = [bundle.distance(grid.family, grid.cases[row].problem, grid.devices[row]).growth for row in rows.tolist()]
    problems = _judged(grid, eligible, scores, rows)
    return {"this bundle": Coverage.of(problems, [calibration] * len(problems), growths)}


def _judged(
    grid: Grid, eligible: NDArray[np.bool_], scores: NDArray[np.float64], rows: NDArray[np.intp]
) -> list[Judged]:
    """These problems as a calibration takes them."""
    return [
        (np.log(scores[row, mask]), grid.first_us[row, mask], grid.second_us[row, mask])
        for row, mask in ((row, eligible[row]) for row in rows.tolist())
    ]

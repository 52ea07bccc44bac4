"""`Coverage`: whether shortlists of the length that a calibration says hold a good config, on problems it never saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .conformal import COVERAGE, GOOD, Calibration, Judged, calibrate, most_tried, needed_length, ranked

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
            levels, loss, _ = ranked(problem)
            wanted = int(np.searchsorted(levels, calibration.level() + math.log(growth), side="right"))
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

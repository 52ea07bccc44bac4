"""`Calibration`: how long a shortlist must be, by split conformal prediction on models that the ranker never saw.

The nonconformity score of a config says how much has to be tried to reach it: the natural log of its place in the
ranking, plus `STEEPNESS` times the log of its predicted slowdown against the first. A problem's score is that of the
config at which its shortlist was good. Of n problems that were calibrated on, whole model families apart from what the
ranker learned, the ceil((n + 1) * coverage)-th smallest score covers the next problem with at least that probability,
if that one is drawn as they were (Vovk et al., Algorithmic Learning in a Random World, 2005; Angelopoulos and Bates,
arXiv:2107.07511, section 1). So a list that many near-equals lead is long, and one with clear winners is short.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...datasets import BundleError, ForetuneError
from ...datasets.errors import check_integer, shown
from ..metrics import growing_regret

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: How often a shortlist is to hold a good config, and what is good: that much slower than a search of everything finds.
COVERAGE, GOOD = 0.95, 1.01
#: What is good of a problem of which less than this share of the configs ran (as `training_set.EXHAUSTIVE`, which
#: predicting does not import): the best of them may not be the best of all. README.md has the effect on the coverage.
_FEW, _GOOD_OF_FEW = 0.5, 1.005
#: No shortlist of a problem in the training domain is longer; outside, it grows as the threshold does. Where it binds,
#: the reason says so.
MOST_TRIED = 64
#: What is tried of a ranker that is not calibrated.
UNCALIBRATED = 8
#: How much a predicted slowdown counts beside the place: at 10, what is 7 % slower counts as twice as far down.
#: README.md names what compares it with others.
STEEPNESS = 10.0
#: At which scores the expected regret is kept; straight lines between.
_SCORES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 8.0)
#: More problems than any data will have, and more than any score or regret is.
_MOST_PROBLEMS, _MOST_SCORE, _MOST_REGRET = 1 << 20, 1e4, 1e6

#: One problem to calibrate on: predicted logs of slowdowns of all configs that may be on its shortlist, and their times
#: in both passes, (n_configs,) each, NaN where a config did not run, or was not tried.
Judged: TypeAlias = tuple["ArrayLike", "ArrayLike", "ArrayLike"]


@dataclass(frozen=True)
class Calibration:
    """What a family's ranker was worth on problems of models that it never saw.

    >>> calibration = Calibration(problems=40, scores=(0.0,) * 30 + (2.0,) * 10, regret=(0.02,) * len(_SCORES))
    >>> calibration.length([0.0, 0.01, 0.02, 0.2]), calibration.length([0.0, 0.2, 0.3, 0.4])
    (3, 1)
    """

    problems: int  # that it was calibrated on
    scores: tuple[float, ...]  # sorted; of those that at most MOST_TRIED configs solved
    regret: tuple[float, ...]  # (len(_SCORES),) expected loss where all up to that score are tried: 0.02 = 2 % slower

    def threshold(self, coverage: float = COVERAGE) -> float:
        """Return the score up to which to try; infinite where problems were too few, or too many had no short list."""
        place = math.ceil((self.problems + 1) * coverage)
        return self.scores[place - 1] if place <= len(self.scores) else math.inf

    def wanted(self, logs: ArrayLike, *, growth: float = 1.0, coverage: float = COVERAGE) -> int:
        """How many to try, if there were no cap, of configs with these logs of predicted slowdowns against the first,
        ascending, (n_configs,): at least 1. `growth` is how many times as long lists are: see `Distance.growth`."""
        threshold = self.threshold(coverage) + math.log(growth)
        return max(1, int(np.searchsorted(scores_of(logs), threshold, side="right")))

    def length(self, logs: ArrayLike, *, growth: float = 1.0, coverage: float = COVERAGE) -> int:
        """`wanted`, but at most `most_tried(growth)`."""
        return min(self.wanted(logs, growth=growth, coverage=coverage), most_tried(growth))

    def expected_regret(self, logs: ArrayLike, *, growth: float = 1.0) -> NDArray[np.float64]:
        """What a call is expected to lose when the first 1, 2, ... are tried, never rising: 0.02 = 2 % slower. `logs`
        are as for `wanted`, (n_configs,); the result has at most `most_tried(growth)` entries.

        The first k try all scores below that of the next config, so a clear winner loses less than one of many."""
        most = most_tried(growth)
        beyond = np.append(scores_of(logs)[1 : most + 1], np.inf)[:most]
        return np.interp(beyond - math.log(growth), _SCORES, self.regret)

    def to_json(self) -> dict[str, Any]:
        return {"problems": self.problems, "levels": list(self.scores), "regret": list(self.regret)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`. Raises `ForetuneError`, `KeyError` or `TypeError` for what is none."""
        problems = check_integer("calibrated problems", value["problems"], 1, _MOST_PROBLEMS)
        scores = _ascending("levels", value["levels"], problems, _MOST_SCORE)
        regret = _ascending("regret", value["regret"][::-1], len(_SCORES), _MOST_REGRET)[::-1]
        if len(regret) != len(_SCORES):
            raise BundleError(f"the regret of a calibration must have {len(_SCORES)} figures but has {len(regret)}")
        return cls(problems, scores, regret)


def scores_of(logs: ArrayLike) -> NDArray[np.float64]:
    """Return the nonconformity score of each config, (n_configs,), from the logs of the predicted slowdowns against the
    first, ascending.

    >>> scores_of([0.0, 0.1]).round(2).tolist()
    [0.0, 1.69]
    """
    logs = np.asarray(logs, np.float64)
    result: NDArray[np.float64] = np.log(1 + np.arange(len(logs))) + STEEPNESS * logs
    return result


def most_tried(growth: float = 1.0) -> int:
    """The length that no shortlist exceeds.

    >>> most_tried(), most_tried(1.5)
    (64, 96)
    """
    return int(MOST_TRIED * growth)


def calibrate(problems: Sequence[Judged]) -> Calibration:
    """The calibration from problems that a ranker predicted without having seen their model. Where few configs of one
    were tried, good is what is close to the best of these, and its place is that among all configs.

    >>> round(calibrate([([0.0, 0.1, 0.2], [5.0, 4.0, 4.1], [5.1, 4.0, 4.1])] * 30).threshold(), 2)
    1.69
    """
    if not problems:
        raise ForetuneError("a calibration needs problems but there are none")
    solved, losses = [], []
    for problem in problems:
        scores, loss, ran = ranked(problem)
        first = int(np.argmax(ran))  # before it there is nothing to lose or to gain
        place = needed_length(loss, GOOD if ran.mean() >= _FEW else _GOOD_OF_FEW) - 1
        if place < MOST_TRIED:
            solved.append(float(scores[place]))
        lengths = np.minimum(np.searchsorted(scores, _SCORES, side="right"), MOST_TRIED)
        losses.append(loss[np.maximum(lengths - 1, first)])
    regret = np.maximum(np.minimum.accumulate(np.mean(losses, axis=0)), 0.0)
    return Calibration(len(problems), tuple(sorted(_rounded(solved))), tuple(_rounded(regret.tolist())))


def ranked(problem: Judged) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Nonconformity score and `excess` of each config, and whether it ran, best prediction first, (n_configs,) each."""
    logs, choose_us, report_us = (np.asarray(part, np.float64) for part in problem)
    order = np.argsort(logs, kind="stable")
    ascending, choose_us, report_us = logs[order], choose_us[order], report_us[order]
    ran: NDArray[np.bool_] = np.isfinite(choose_us) & np.isfinite(report_us)
    return scores_of(ascending - ascending[0]), excess(choose_us, report_us), ran


def excess(choose_us: ArrayLike, report_us: ArrayLike) -> NDArray[np.float64]:
    """What the first 1, 2, ... configs lose against a search of them all, (n_configs,): 0.02 = 2 % slower. Chosen on
    one pass and reported on the other, the search as well; so below 0 is luck."""
    regret = growing_regret(choose_us, report_us)
    result: NDArray[np.float64] = regret / regret[-1] - 1
    return result


def needed_length(loss: NDArray[np.float64], good: float = GOOD) -> int:
    """From which length on all shortlists hold a good config; `loss` is that of `excess`.

    >>> needed_length(np.array([0.3, 0.004, 0.02, 0.003, 0.0]))
    4
    """
    bad = np.flatnonzero(loss > good - 1)
    return int(bad[-1]) + 2 if len(bad) else 1


def _ascending(name: str, values: Any, most: int, largest: float) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) > most:
        raise BundleError(f"{name} of a calibration must be a list of at most {most} numbers but is {shown(values)}")
    if not all(type(value) in (int, float) and 0 <= value <= largest for value in values):
        raise BundleError(f"{name} of a calibration must be numbers from 0 to {largest:g} but is {shown(values)}")
    if values != sorted(values):
        raise BundleError(f"{name} of a calibration must be in order but is {shown(values)}")
    return tuple(map(float, values))


def _rounded(values: Sequence[float]) -> list[float]:
    """As JSON keeps them: to six digits."""
    return [float(f"{value:.6g}") for value in values]

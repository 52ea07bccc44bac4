"""Shortlists: their length with k="auto" (`Calibration`), and an order that diversifies them (`diversified_order`).

The length follows from split conformal prediction on held-out models.

The nonconformity score of a config is the natural log of its place in the ranking plus `STEEPNESS` times the log of its
predicted slowdown relative to the first config. A problem has the score of the config that makes its shortlist
good. Of n calibrating problems, whose model families were not in the training data, the
ceil((n + 1) * coverage)-th smallest score is the threshold. A shortlist of all configs with scores up to it is good
with at least that probability, if the problem is drawn from the same distribution (Vovk et al., Algorithmic Learning in
a Random World, 2005; Angelopoulos and Bates, arXiv:2107.07511, section 1). The list is long if many configs are
predicted to be about equal, and short if there are clear winners.

Similar configs share prediction errors: if the first choice is wrong, the second one, which often differs in only one
knob, is often wrong too. So the list is chosen greedily, as in maximal marginal relevance (Carbonell and Goldstein,
SIGIR 1998): each config has a penalty for each similar config before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ...datasets import BundleError, ForetuneError, KernelConfig
from ...datasets.config import remembered
from ...datasets.errors import check_integer, shown
from ..metrics import growing_regret

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: The probability that a shortlist contains a good config, and the largest regret of a good one relative to a full
#: search.
COVERAGE, GOOD = 0.95, 1.01
#: If less than this share of a problem's configs ran, the bound for a good config is stricter, because the best of
#: these may not be the best of all. (The share equals `training_set.EXHAUSTIVE`, which is not imported for predicting.)
_FEW, _GOOD_OF_FEW = 0.5, 1.005
#: The most configs of a shortlist in the training domain. Out of distribution it is multiplied by `Distance.growth`.
MOST_TRIED = 64
#: The length of shortlists with k="auto" if the ranker has no calibration.
UNCALIBRATED = 8
#: The weight of a predicted slowdown relative to the place: at 10, a config that is 7 % slower counts as twice as far
#: down. README.md names the study that compares it with other scores.
STEEPNESS = 10.0
#: The scores at which `Calibration.regret` is stored. Values between them are interpolated linearly.
_SCORES = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 8.0)
#: Bounds for the values in a file: problems, scores and regrets.
_MOST_PROBLEMS, _MOST_SCORE, _MOST_REGRET = 1 << 20, 1e4, 1e6
#: The penalty, in log slowdown, for an equal config earlier in the list. It is halved for each knob that differs
#: between the two configs. model/NOTES.md has the figures behind it.
_LIKENESS = 0.08
#: The number of configs that are chosen so, and the number of first configs in the ranking that they are chosen from.
#: The others follow in predicted order, because a long list needs near-equal configs to contain the very best one.
_CHOSEN, AMONG = 16, 32

#: A problem to calibrate on: the predicted log slowdowns of all candidates for its shortlist, and their times in both
#: passes, (n_configs,) each. NaN marks a config that did not run or was not measured.
Judged: TypeAlias = tuple["ArrayLike", "ArrayLike", "ArrayLike"]


@dataclass(frozen=True)
class Calibration:
    """Determines the length of shortlists, from a ranker's results on held-out models.

    It has the number of calibrating problems, their nonconformity scores, and the mean excess time by score.

    >>> calibration = Calibration(problems=40, scores=(0.0,) * 30 + (2.0,) * 10, regret=(0.02,) * len(_SCORES))
    >>> calibration.length([0.0, 0.01, 0.02, 0.2]), calibration.length([0.0, 0.2, 0.3, 0.4])
    (3, 1)
    """

    problems: int  # the number of calibrating problems
    scores: tuple[float, ...]  # ascending; of the problems for which MOST_TRIED configs or fewer are enough
    regret: tuple[float, ...]  # (len(_SCORES),) mean excess if all configs up to the score are tried: 0.02 = 2 % slower

    def threshold(self, coverage: float = COVERAGE) -> float:
        """Return the highest nonconformity score that a config on a shortlist may have, for a probability `coverage`.

        Such a list contains a good config with at least this probability. The score is infinite if there are not enough
        problems.
        """
        place = math.ceil((self.problems + 1) * coverage)
        return self.scores[place - 1] if place <= len(self.scores) else math.inf

    def wanted(self, logs: ArrayLike, *, growth: float = 1.0, coverage: float = COVERAGE) -> int:
        """Return the length of a shortlist before it is capped, at least 1.

        Args:
            logs: Predicted log slowdowns relative to the first config, ascending, (n_configs,).
            growth: The factor that makes the list longer out of distribution; see `Distance.growth`.
            coverage: The probability that the shortlist contains a good config.
        """
        threshold = self.threshold(coverage) + math.log(growth)
        return max(1, int(np.searchsorted(scores_of(logs), threshold, side="right")))

    def length(self, logs: ArrayLike, *, growth: float = 1.0, coverage: float = COVERAGE) -> int:
        """Return the length of a shortlist: `wanted`, but at most `most_tried(growth)`."""
        return min(self.wanted(logs, growth=growth, coverage=coverage), most_tried(growth))

    def expected_regret(self, logs: ArrayLike, *, growth: float = 1.0) -> NDArray[np.float64]:
        """Return the expected excess time of the choice among the first 1, 2, ... configs; 0.02 = 2 % slower.

        The arguments are those of `wanted`. The result has at most `most_tried(growth)` entries and never increases.
        The value for k configs depends on the nonconformity score of config k + 1: it is small if that config is
        predicted to be much slower, and large if many configs are predicted to be about equally fast.
        """
        most = most_tried(growth)
        beyond = np.append(scores_of(logs)[1 : most + 1], np.inf)[:most]
        return np.interp(beyond - math.log(growth), _SCORES, self.regret)

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as JSON values."""
        return {"problems": self.problems, "levels": list(self.scores), "regret": list(self.regret)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Calibration:
        """Return the calibration in a dict from `to_json`.

        Raises `ForetuneError`, `KeyError` or `TypeError` for invalid values.
        """
        problems = check_integer("calibrated problems", value["problems"], 1, _MOST_PROBLEMS)
        scores = _ascending("levels", value["levels"], problems, _MOST_SCORE)
        regret = _ascending("regret", value["regret"][::-1], len(_SCORES), _MOST_REGRET)[::-1]
        if len(regret) != len(_SCORES):
            raise BundleError(f"the regret of a calibration must have {len(_SCORES)} numbers but has {len(regret)}")
        return cls(problems, scores, regret)


def scores_of(logs: ArrayLike) -> NDArray[np.float64]:
    """Return the nonconformity score of each config, (n_configs,).

    Args:
        logs: Predicted log slowdowns relative to the first config, ascending, (n_configs,).

    >>> scores_of([0.0, 0.1]).round(2).tolist()
    [0.0, 1.69]
    """
    logs = np.asarray(logs, np.float64)
    result: NDArray[np.float64] = np.log(1 + np.arange(len(logs))) + STEEPNESS * logs
    return result


def most_tried(growth: float = 1.0) -> int:
    """Return the maximum length of a shortlist with k="auto"; `growth` is as for `Calibration.wanted`.

    >>> most_tried(), most_tried(1.5)
    (64, 96)
    """
    return int(MOST_TRIED * growth)


def calibrate(problems: Sequence[Judged]) -> Calibration:
    """Return the calibration from problems whose models the ranker was not trained on.

    Each problem consists of three arrays, (n_configs,): the predicted log slowdowns of its candidates, and their times
    in two timing passes.

    If few configs of a problem were measured, a good config is one that is close to the best of these. Its place counts
    all configs, measured or not.

    >>> round(calibrate([([0.0, 0.1, 0.2], [5.0, 4.0, 4.1], [5.1, 4.0, 4.1])] * 30).threshold(), 2)
    1.69
    """
    if not problems:
        raise ForetuneError("a calibration needs problems but there are none")
    solved, losses = [], []
    for problem in problems:
        scores, loss, ran = ranked(problem)
        first = int(np.argmax(ran))  # no configs before it were measured
        place = needed_length(loss, GOOD if ran.mean() >= _FEW else _GOOD_OF_FEW) - 1
        if place < MOST_TRIED:
            solved.append(float(scores[place]))
        lengths = np.minimum(np.searchsorted(scores, _SCORES, side="right"), MOST_TRIED)
        losses.append(loss[np.maximum(lengths - 1, first)])
    regret = np.maximum(np.minimum.accumulate(np.mean(losses, axis=0)), 0.0)
    return Calibration(len(problems), tuple(sorted(_rounded(solved))), tuple(_rounded(regret.tolist())))


def ranked(problem: Judged) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return nonconformity scores, `excess` times and which configs ran, best prediction first, (n_configs,) each."""
    logs, choose_us, report_us = (np.asarray(part, np.float64) for part in problem)
    order = np.argsort(logs, kind="stable")
    ascending, choose_us, report_us = logs[order], choose_us[order], report_us[order]
    ran: NDArray[np.bool_] = np.isfinite(choose_us) & np.isfinite(report_us)
    return scores_of(ascending - ascending[0]), excess(choose_us, report_us), ran


def excess(choose_us: ArrayLike, report_us: ArrayLike) -> NDArray[np.float64]:
    """Return how much slower the choice among the first 1, 2, ... configs is than that of a full search, (n_configs,).

    0.02 means 2 % slower. Both choose by `choose_us` and are judged by `report_us`; a negative value is noise.
    """
    regret = growing_regret(choose_us, report_us)
    result: NDArray[np.float64] = regret / regret[-1] - 1
    return result


def needed_length(loss: NDArray[np.float64], good: float = GOOD) -> int:
    """Return the smallest length such that every shortlist of at least this length contains a good config.

    Args:
        loss: The `excess` of each length, (n_configs,).
        good: The largest regret of a good config.


    >>> needed_length(np.array([0.3, 0.004, 0.02, 0.003, 0.0]))
    4
    """
    bad = np.flatnonzero(loss > good - 1)
    return int(bad[-1]) + 2 if len(bad) else 1


def _ascending(name: str, values: Any, most: int, largest: float) -> tuple[float, ...]:
    """Return a list of at most `most` ascending numbers from 0 to `largest` as a tuple.

    Raises `BundleError`, which calls the list `name`, for any other value.
    """
    if not isinstance(values, list) or len(values) > most:
        raise BundleError(f"{name} of a calibration must be a list of at most {most} numbers but is {shown(values)}")
    if not all(type(value) in (int, float) and 0 <= value <= largest for value in values):
        raise BundleError(f"{name} of a calibration must be numbers from 0 to {largest:g} but is {shown(values)}")
    if values != sorted(values):
        raise BundleError(f"{name} of a calibration must be sorted but is {shown(values)}")
    return tuple(map(float, values))


def _rounded(values: Sequence[float]) -> list[float]:
    """Return the values rounded to six significant digits."""
    return [float(f"{value:.6g}") for value in values]


# The order of a shortlist.


@remembered(maxsize=64)
def knob_table(configs: tuple[KernelConfig, ...]) -> NDArray[np.float32]:
    """Return a one-hot table of knob values, (n_configs, n_values).

    The dot product of two rows is the number of knobs on which the configs agree.

    >>> table = knob_table((KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=32), KernelConfig.of(BLOCK=32)))
    >>> (table @ table.T)[:, 1].tolist() == [table[1].sum() - 1, table[1].sum(), table[1].sum()]
    True
    """
    knobs = [config.to_json() for config in configs]
    names = sorted({name for one in knobs for name in one})
    columns: dict[object, int] = {}
    taken = [[columns.setdefault((name, one.get(name)), len(columns)) for name in names] for one in knobs]
    table = np.zeros((len(configs), len(columns)), np.float32)
    for row, places in zip(table, taken, strict=True):
        row[places] = 1.0
    return table


def diversified_order(logs: ArrayLike, table: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the positions of configs in the order of trying them, so that similar configs are apart, (n_configs,).

    The config that is predicted fastest is first. Each of the next ones has a penalty for every similar config before
    it. Ties go to the earlier config.

    Args:
        logs: Predicted log slowdowns, (n_configs,).
        table: The configs' rows of a `knob_table`, (n_configs, n_values).

    >>> configs = [KernelConfig.of(BLOCK=b, GROUP=g, num_stages=s) for b, g, s in ((64, 1, 3), (64, 1, 4), (128, 8, 4))]
    >>> diversified_order([0.0, 0.01, 0.02], knob_table(tuple(configs))).tolist()
    [0, 2, 1]
    """
    logs = np.asarray(logs, np.float64)
    order = np.argsort(logs, kind="stable")
    among = order[:AMONG]
    rows = table[among]
    agreement = rows @ rows.T
    penalties = np.ldexp(_LIKENESS, (agreement - agreement.diagonal()[:, None]).astype(np.int32))
    penalized = logs[among]
    chosen = []
    for _ in range(min(_CHOSEN, len(among))):
        place = int(penalized.argmin())
        chosen.append(place)
        penalized += penalties[place]
        penalized[place] = np.inf
    rest = np.ones(len(order), np.bool_)
    rest[chosen] = False
    return np.concatenate([among[chosen], order[rest]])


def diversified_places(scores: NDArray[np.float64], configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """Return each config's position in its problem's diversified order, from 0, (n_problems, n_configs).

    Args:
        scores: Predicted slowdowns, (n_problems, n_configs). NaN marks a config that is no candidate, and its position
            is NaN.
        configs: The configs, (n_configs,).

    >>> configs = [KernelConfig.of(BLOCK=size) for size in (16, 32, 64)]
    >>> diversified_places(np.array([[1.3, np.nan, 1.0]]), configs).tolist()
    [[1.0, nan, 0.0]]
    """
    table = knob_table(tuple(configs))
    places = np.full(scores.shape, np.nan)
    for row, row_places in zip(scores, places, strict=True):
        candidates = np.flatnonzero(~np.isnan(row))
        with np.errstate(divide="ignore"):  # a baseline may score its first choice as 0
            logs = np.log(row[candidates])
        row_places[candidates[diversified_order(logs, table[candidates])]] = np.arange(len(candidates))
    return places

"""Measure how good a ranking is: pure functions of arrays.

They take the times of two timing passes. The best config of a shortlist is chosen on the first pass, and its time is
taken from the second, so that a lucky first measurement does not count: the argmin of one pass takes 3-5 % longer when
it is measured again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import ForetuneError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def top_k_regret(scores: ArrayLike, choose_us: ArrayLike, report_us: ArrayLike, k: int) -> NDArray[np.float64]:
    """Return the regret of benchmarking only the k configs with the lowest scores; 1.0 is the best config's time.

    Of these k configs the one that is fastest in `choose_us` is chosen. The regret is its time in `report_us` over the
    lowest time in `report_us`.

    Args:
        scores: Scores of the configs, lower is better, (n_configs,) or (n_problems, n_configs). NaN marks a config
            that is no candidate. Ties go to the earlier config.
        choose_us: Times of the first pass, of the same shape, in microseconds. NaN: the config did not run.
        report_us: Times of the second pass, of the same shape, in microseconds. NaN: the config did not run.
        k: The number of configs on the shortlist.

    Returns:
        The regret of each problem, () or (n_problems,). If no config on the shortlist ran, it is the regret of the
        slowest config that ran, so that a failure is never better than any choice.

    Raises:
        ForetuneError: k is less than 1, the shapes differ, or no config ran on a problem.

    >>> float(top_k_regret([1.0, 1.1, 1.2], [9.0, 8.0, 5.0], [9.0, 7.5, 6.0], k=2))  # chooses the second
    1.25
    """
    if k < 1:
        raise ForetuneError(f"k must be >= 1 but got {k}")
    shape = np.shape(scores)[:-1]
    scores, choose, report = (np.atleast_2d(np.asarray(a, np.float64)) for a in (scores, choose_us, report_us))
    if not scores.shape == choose.shape == report.shape:
        raise ForetuneError(f"shapes differ: scores {scores.shape}, times {choose.shape} and {report.shape}")
    ran = np.isfinite(choose) & np.isfinite(report)
    if not ran.any(axis=1).all():
        raise ForetuneError(f"no config ran on problem {int(np.argmin(ran.any(axis=1)))}")
    shortlist = np.argsort(scores, axis=1, kind="stable")[:, :k]  # NaN sorts last
    usable = np.take_along_axis(ran & ~np.isnan(scores), shortlist, axis=1)
    chosen = np.where(usable, np.take_along_axis(choose, shortlist, axis=1), np.inf).argmin(axis=1)
    rows = np.arange(len(scores))
    best = np.where(ran, report, np.inf).min(axis=1)
    worst = np.where(ran, report, -np.inf).max(axis=1)
    result: NDArray[np.float64] = np.where(usable.any(axis=1), report[rows, shortlist[rows, chosen]], worst) / best
    return result.reshape(shape)


def growing_regret(choose_us: ArrayLike, report_us: ArrayLike) -> NDArray[np.float64]:
    """Return `top_k_regret` of one problem for every k, (n_configs,): entry k - 1 is the regret of the first k configs.

    Args:
        choose_us: Times of the first pass in microseconds, in the order of trying the configs, (n_configs,).
        report_us: Times of the second pass in the same order, (n_configs,), in microseconds.

    Raises:
        ForetuneError: The arrays differ in shape or are not one-dimensional, or no config ran.

    >>> growing_regret([9.0, 8.0, 5.0], [9.0, 7.5, 6.0]).tolist()
    [1.5, 1.25, 1.0]
    """
    choose, report = np.asarray(choose_us, np.float64), np.asarray(report_us, np.float64)
    if not choose.shape == report.shape or choose.ndim != 1:
        raise ForetuneError(f"shapes must be equal, with one axis, but are {choose.shape} and {report.shape}")
    ran = np.isfinite(choose) & np.isfinite(report)
    if not ran.any():
        raise ForetuneError("no config ran")
    choose = np.where(ran, choose, np.inf)
    fastest = np.minimum.accumulate(choose)
    is_new = choose < np.append(np.inf, fastest[:-1])
    chosen = np.maximum.accumulate(np.where(is_new, np.arange(len(choose)), 0))
    worst = report[ran].max()
    result: NDArray[np.float64] = np.where(np.isfinite(fastest), report[chosen], worst) / report[ran].min()
    return result


def geomean(values: ArrayLike) -> float:
    """Return the geometric mean of the values.

    >>> geomean([1.0, 4.0])
    2.0
    """
    return math.exp(float(np.mean(np.log(values))))


def noise_floor(choose_us: ArrayLike, report_us: ArrayLike) -> float:
    """Return the geometric mean regret of a search that measures every config.

    Configs are chosen by `choose_us` and judged by `report_us`: times of two passes in microseconds, (n_problems,
    n_configs).

    It is above 1.0 because of timing noise alone, so no ranking can be expected to score less.

    >>> noise_floor([[5.0, 5.1], [7.0, 8.0]], [[5.2, 5.0], [7.0, 8.0]]) == geomean([1.04, 1.0])
    True
    """
    choose = np.atleast_2d(np.asarray(choose_us, np.float64))
    return geomean(top_k_regret(np.zeros(choose.shape), choose, np.atleast_2d(report_us), k=choose.shape[1]))


@dataclass(frozen=True)
class Summary:
    """A summary of the regrets of many problems; 1.0 = the best config on every problem.

    `ci95` is the 95 % bootstrap confidence interval of the geometric mean.
    """

    geomean: float
    p95: float
    max: float
    ci95: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as `foretune evaluate --json` prints it, rounded to four decimals."""
        return {
            "geomean": round(self.geomean, 4),
            "p95": round(self.p95, 4),
            "max": round(self.max, 4),
            "ci95": [round(edge, 4) for edge in self.ci95],
        }


def summarise(regrets: ArrayLike, groups: ArrayLike | None = None, *, resamples: int = 1000, seed: int = 0) -> Summary:
    """Summarize regrets of many problems.

    Args:
        regrets: The regret of each problem, (n_problems,).
        groups: Labels of related problems, (n_problems,); if left out, each problem is its own group. The bootstrap
            draws whole groups: problems of one model resemble each other, and drawing single problems would make the
            interval too narrow.
        resamples: The number of bootstrap samples.
        seed: The random seed of the bootstrap.

    >>> summarise([1.0, 1.0, 1.0]).ci95
    (1.0, 1.0)
    """
    logs = np.log(np.asarray(regrets, np.float64))
    labels = np.arange(len(logs)) if groups is None else np.asarray(groups)
    _, members = np.unique(labels, return_inverse=True)
    sums, counts = np.bincount(members, logs), np.bincount(members)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    means = np.exp(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1))
    low, high = np.quantile(means, (0.025, 0.975))
    values = np.exp(logs)
    return Summary(geomean(values), float(np.quantile(values, 0.95)), float(values.max()), (float(low), float(high)))

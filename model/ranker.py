"""`Ranker`: the interface of learned rankers and baselines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.grid import Grid

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Self

#: `trust_in_estimate` uses configs up to this many times slower than the best, of at most this many problems.
_NEAR, _MOST_PROBLEMS = 1.5, 64


class Ranker(ABC):
    """Base class: learns from a `Grid` of measurements which configs are fast.

    It follows scikit-learn's conventions: the constructor takes and validates hyper-parameters, and attributes with
    learned state end in "_". `foretune.model.testing.RankerContract` tests an implementation.

    >>> from foretune.model import StaticRanker
    >>> StaticRanker(size=8).get_params()
    {'size': 8}
    """

    #: Whether `fit` uses the measurements.
    learns: ClassVar[bool] = True
    #: The exponent of the family's analytic estimate on cards without measurements; see `UnseenCardRanker`.
    trust_: float = 0.0

    @abstractmethod
    def fit(self, grid: Grid, family: Family) -> Self:
        """Learn from the measurements in a grid, and return this ranker."""

    @abstractmethod
    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return the predicted slowdown of each config, (n_configs,): its time over the best config's time.

        Slowdowns are finite and positive. That of a config does not depend on the other configs in the list or on their
        order.

        Raises:
            ForetuneError: The ranker was not fitted.
        """

    def fastest(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig], count: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the `count` configs with the lowest predicted slowdowns, lowest first.

        Subclasses may override it to avoid predicting every config. They may then return more than `count` configs, and
        the last ones may differ from those that `predict` puts there.

        Args:
            family: The family of the problem.
            problem: The problem to predict.
            device: The device to predict for.
            configs: The configs to choose from.
            count: The number of configs.

        Returns:
            The configs' positions in `configs` and their slowdowns, (n,) each. Ties keep the order of `configs`; n is
            smaller than `count` if there are fewer configs.

        Raises:
            ForetuneError: `predict` did not return one finite positive slowdown for each config.

        >>> from foretune.model import RandomRanker
        >>> configs = tuple(KernelConfig.of(BLOCK=size) for size in (16, 32, 64))
        >>> places, slowdowns = RandomRanker().fastest(None, Problem.of("toy"), DeviceSpec.named("h200"), configs, 2)
        >>> places.tolist()
        [1, 0]
        """
        slowdowns = checked_slowdowns(self.predict(family, problem, device, configs), len(configs))
        order = np.argsort(slowdowns, kind="stable")[:count]
        return order, slowdowns[order]

    def get_params(self) -> dict[str, Any]:
        """Return the hyper-parameters by name; calling the class with them makes an unfitted copy."""
        return {name: value for name, value in vars(self).items() if not name.endswith("_")}

    def _check_fitted(self, attribute: str) -> None:
        """Check that `fit` has set an attribute. Raises `ForetuneError`."""
        if not hasattr(self, attribute):
            raise ForetuneError(f"this {type(self).__name__} is not fitted: call fit first")


class FixedRanker(Ranker):
    """Base class of rankers that do not learn from measurements."""

    learns = False

    def fit(self, grid: Grid, family: Family) -> Self:
        """Return this ranker unchanged."""
        return self


class DelegatingRanker(Ranker):
    """Base class of rankers whose `fit` sets `ranker_`, another fitted ranker, which predicts."""

    ranker_: Ranker

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return the slowdowns that `ranker_` predicts, (n_configs,); see `Ranker.predict`."""
        self._check_fitted("ranker_")
        return self.ranker_.predict(family, problem, device, configs)


def checked_slowdowns(predicted: ArrayLike, count: int) -> NDArray[np.float64]:
    """Return a ranker's predictions as a float64 array, (count,), after checking them.

    The check is needed because users write rankers, and bundles can be manipulated.

    Raises:
        ForetuneError: There is not one finite positive number for each of the `count` configs.

    >>> checked_slowdowns([1.5, 1.0], 2).tolist()
    [1.5, 1.0]
    """
    slowdowns = np.asarray(predicted, np.float64)
    if slowdowns.shape != (count,):
        raise ForetuneError(
            f"the ranker must return {count} slowdowns but returned an array of shape {slowdowns.shape}"
        )
    if not (np.isfinite(slowdowns) & (slowdowns > 0)).all():
        raise ForetuneError("the ranker returned slowdowns that are not finite positive numbers")
    return slowdowns


class UnseenCardRanker(FixedRanker):
    """Rank for a card without measurements: multiply a fitted ranker's slowdowns by a power of the analytic estimate.

    The power is the ranker's `trust_`, from 0 to 1 (see `trust_in_estimate`). A ranker that learned on other cards
    sometimes puts a config first that is very slow on this one, which the estimate prevents (model/NOTES.md has
    figures). Without an estimate of the family nothing changes.

    >>> from foretune.model import RandomRanker
    >>> UnseenCardRanker(RandomRanker()).ranker.trust_
    0.0
    """

    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return scores, (n_configs,), that are comparable only within one problem; see `Ranker.predict`."""
        learned = self.ranker.predict(family, problem, device, configs)
        estimate_us = np.asarray(family.estimate_us(problem, device, configs), np.float64)
        result: NDArray[np.float64] = learned * estimate_us**self.ranker.trust_
        return result


def trust_in_estimate(grid: Grid, family: Family) -> float:
    """Return how well the family's analytic estimate predicts the measured times, from 0 to 1.

    It is the least-squares slope of log time over log estimate within problems, clipped to 0..1, over the configs that
    take up to 1.5 times the best config's time. Each problem has the same weight. It is 0 without an estimate.
    """
    products = squares = 0.0
    times = grid.times_us
    known = np.flatnonzero(np.isfinite(times).any(axis=1))
    for row in known[np.linspace(0, len(known) - 1, min(len(known), _MOST_PROBLEMS)).astype(np.intp)]:
        slowdowns = times[row] / np.nanmin(times[row])
        near = np.flatnonzero(slowdowns <= _NEAR)
        # Estimates of all configs, because families cache what depends only on the tuple of configs.
        estimates = np.log(family.estimate_us(grid.cases[row].problem, grid.devices[row], grid.configs)[near])
        estimates = estimates - estimates.mean()
        products += float(estimates @ np.log(slowdowns[near])) / len(near)
        squares += float(estimates @ estimates) / len(near)
    return min(max(products / squares, 0.0), 1.0) if squares > 0 else 0.0


def ranker_on(device: DeviceSpec, ranker: Ranker, learned_on: Iterable[DeviceSpec]) -> Ranker:
    """Return the ranker to use on a device: the given one, or an `UnseenCardRanker` around it for an unmeasured card.

    Args:
        device: The device to rank for.
        ranker: A fitted ranker.
        learned_on: The devices that it was trained on. A part of a card counts as the card.

    >>> from foretune.model import RandomRanker
    >>> h200 = DeviceSpec.named("h200")
    >>> type(ranker_on(h200.with_sms(64), RandomRanker(), [h200])).__name__
    'RandomRanker'
    """
    return ranker if any(spec.card == device.card for spec in learned_on) else UnseenCardRanker(ranker)

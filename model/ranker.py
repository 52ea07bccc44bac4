"""`Ranker`: what learned predictors and baselines have in common."""

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

# What the estimate is held against: configs up to so much slower than the best, of so many problems at most.
_NEAR, _ASKED = 1.5, 64


class Ranker(ABC):
    """Learns from a `Grid` which configs are fast. scikit-learn's habits: hyper-parameters in the constructor,
    which validates them; learned state in attributes that end in "_".

    >>> from foretune.model import StaticRanker
    >>> StaticRanker(size=8).get_params()
    {'size': 8}
    """

    #: Whether `fit` looks at the measurements at all.
    learns: ClassVar[bool] = True
    #: How far the family's estimate counts on a card without a measurement, see `UnseenCardRanker`.
    trust_: float = 0.0

    @abstractmethod
    def fit(self, grid: Grid, family: Family) -> Self:
        """Learns from these measurements; returns itself."""

    @abstractmethod
    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Predicted slowdown of each config, (n_configs,): time over the best config's time; lower is faster.

        Finite and positive. A config's figure does not depend on which others are in the list, nor on their
        order. Raises `ForetuneError` before `fit`.
        """

    def fastest(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig], count: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the places of the `count` configs with the least predicted slowdowns, least first, ties in the given
        order, and these slowdowns, both (n,); fewer where there are fewer configs.

        A ranker that need not predict all configs may be quicker than `predict`. It may then miss some of the last
        ones, and may return more than `count`, as many as it knows. Raises `ForetuneError` for predictions that are no
        slowdowns, one for each config.

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
        """The hyper-parameters by name; a constructor called with them makes the same ranker, unfitted."""
        return {name: value for name, value in vars(self).items() if not name.endswith("_")}

    def _check_fitted(self, attribute: str) -> None:
        if not hasattr(self, attribute):
            raise ForetuneError(f"this {type(self).__name__} has learned nothing yet: call fit first")


def checked_slowdowns(predicted: ArrayLike, count: int) -> NDArray[np.float64]:
    """What a ranker predicted for so many configs, (count,). Raises `ForetuneError` for what are no slowdowns, one for
    each: anybody may write a ranker, or a bundle.

    >>> checked_slowdowns([1.5, 1.0], 2).tolist()
    [1.5, 1.0]
    """
    slowdowns = np.asarray(predicted, np.float64)
    if slowdowns.shape != (count,):
        raise ForetuneError(f"{count} slowdowns were due but the ranker gave {slowdowns.shape}")
    if not (np.isfinite(slowdowns) & (slowdowns > 0)).all():
        raise ForetuneError("the ranker gave slowdowns that are not positive numbers")
    return slowdowns


class UnseenCardRanker(Ranker):
    """A fitted ranker on a card that it has no measurement of: its slowdowns, times the family's analytic estimate to
    the power of its `trust_`.

    What was learned elsewhere now and then ranks a config first that is hopeless on this card, and the estimate knows
    better (model/README.md). Where a family has no estimate nothing changes.

    >>> from foretune.model import RandomRanker
    >>> UnseenCardRanker(RandomRanker()).ranker.trust_
    0.0
    """

    learns = False

    def __init__(self, ranker: Ranker) -> None:
        self.ranker = ranker

    def fit(self, grid: Grid, family: Family) -> Self:
        """Nothing to learn: the ranker has."""
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Slowdowns that compare within a problem only; see `Ranker.predict`."""
        learned = self.ranker.predict(family, problem, device, configs)
        estimate_us = np.asarray(family.estimate_us(problem, device, configs), np.float64)
        result: NDArray[np.float64] = learned * estimate_us**self.ranker.trust_
        return result


def trust_in_estimate(grid: Grid, family: Family) -> float:
    """How much of the difference between two configs' estimates there is between their times, from 0 to 1: the slope of
    log time over log estimate, by least squares within problems, each counting alike, over the configs that take up to
    1.5 times as long as the best. 0 where a family has no estimate."""
    products = squares = 0.0
    times = grid.times_us
    known = np.flatnonzero(np.isfinite(times).any(axis=1))
    for row in known[np.linspace(0, len(known) - 1, min(len(known), _ASKED)).astype(np.intp)]:
        slowdowns = times[row] / np.nanmin(times[row])
        near = np.flatnonzero(slowdowns <= _NEAR)
        # Of all configs, always the same tuple: families remember what depends on the list alone.
        estimates = np.log(family.estimate_us(grid.cases[row].problem, grid.devices[row], grid.configs)[near])
        estimates = estimates - estimates.mean()
        products += float(estimates @ np.log(slowdowns[near])) / len(near)
        squares += float(estimates @ estimates) / len(near)
    return min(max(products / squares, 0.0), 1.0) if squares > 0 else 0.0


def ranker_on(device: DeviceSpec, ranker: Ranker, learned_on: Iterable[DeviceSpec]) -> Ranker:
    """A fitted ranker as it should rank on a device: itself where it learned on that card or a part of it, else as
    `UnseenCardRanker` does.

    >>> from foretune.model import RandomRanker
    >>> h200 = DeviceSpec.named("h200")
    >>> type(ranker_on(h200.with_sms(64), RandomRanker(), [h200])).__name__
    'RandomRanker'
    """
    return ranker if any(spec.card == device.card for spec in learned_on) else UnseenCardRanker(ranker)

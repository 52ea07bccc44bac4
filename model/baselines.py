"""Baselines: simple rankers that a learned ranker must beat, and `choose_rivals`, which selects some by name."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem
from ..datasets.errors import check_integer
from ..datasets.grid import Grid
from .ranker import FixedRanker, Ranker

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

RankerFactory: TypeAlias = Callable[[], Ranker]

#: The score of a config without a measurement. It is far above any slowdown, so that such configs rank last.
_UNKNOWN = 1e6
#: Names that select several baselines: those that cost little time, and every one.
FAST, ALL = "fast", "all"
#: The highest `Baseline.cost` of a baseline that "fast" selects.
_FAST_COST = 0.5


class RandomRanker(FixedRanker):
    """Rank configs in a random order, like pruning without a model. Each seed gives another order.

    >>> RandomRanker(seed=1).get_params()
    {'seed': 1}
    """

    def __init__(self, seed: int = 0) -> None:
        check_integer("seed", seed, 0, 2**31 - 1)
        self.seed = seed

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return random scores from 1 to 2, (n_configs,); see `Ranker.predict`."""
        # Hashes instead of a random generator: a config's score must not depend on its place in the list.
        salt = np.uint64(zlib.crc32(str((self.seed, problem.to_json(), device.name)).encode()))
        keys = np.array([_config_hash(config) for config in configs], np.uint64)
        scores: NDArray[np.float64] = 1.0 + _mix(keys ^ (salt << np.uint64(32))) / 2.0**64
        return scores


@lru_cache(maxsize=1 << 16)
def _config_hash(config: KernelConfig) -> int:
    """Return a hash of a config that is equal in every process."""
    return zlib.crc32(str(config.to_json()).encode())


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a pseudorandom number below 2 ** 64 for each key, by the finalizer of splitmix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.float64] = (keys ^ (keys >> np.uint64(31))).astype(np.float64)
    return result


class StaticRanker(Ranker):
    """Rank configs in one fixed order for every problem: the best short list that a maintainer could hard-code.

    The first `size` places are filled greedily. Each step adds the config that minimizes, as a geometric mean over the
    training problems, the slowdown of the best config on the list so far. The other configs follow in the order of
    their own mean slowdown.
    """

    order_: dict[KernelConfig, int]

    def __init__(self, size: int = 16) -> None:
        check_integer("size", size, 1, 1024)
        self.size = size

    def fit(self, grid: Grid, family: Family) -> Self:
        """Choose the fixed order of the configs from their slowdowns in the grid, and return this ranker."""
        logs = _filled(grid)
        covered = np.full(len(logs), np.inf)
        order: list[int] = []
        for _ in range(min(self.size, logs.shape[1])):
            reached = np.minimum(covered[:, None], logs).mean(axis=0)
            reached[order] = np.inf
            order.append(int(reached.argmin()))
            covered = np.minimum(covered, logs[:, order[-1]])
        rest = logs.mean(axis=0)
        rest[order] = np.inf
        order += np.argsort(rest, kind="stable")[: logs.shape[1] - len(order)].tolist()
        self.order_ = {grid.configs[column]: place for place, column in enumerate(order)}
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return each config's place in the fixed order, counted from 1, (n_configs,); see `Ranker.predict`."""
        self._check_fitted("order_")
        return np.array([1.0 + self.order_.get(config, _UNKNOWN) for config in configs], np.float64)


def _filled(grid: Grid) -> NDArray[np.float64]:
    """Return log slowdowns, (n_problems, n_configs), with failed configs counted as the slowest of their problem."""
    logs = np.log(grid.slowdowns)
    return np.where(np.isnan(logs), np.nanmax(logs, axis=1, keepdims=True), logs)


class RegimeRanker(Ranker):
    """Rank with one `StaticRanker(size)` for each of several ranges (`regimes`, their number) of arithmetic intensity.

    Arithmetic intensity is computed from what the host knows at call time, that is, without ragged sizes (see
    `intensity`). The ranges are split at quantiles over the training problems, so that each has about equally many
    problems. This imitates what serving engines ship: a table of configs by batch size for each kernel (vLLM's and
    SGLang's `E=...,N=....json`).

    >>> RegimeRanker().get_params()
    {'regimes': 3, 'size': 16}
    """

    edges_: NDArray[np.float64]
    lists_: tuple[StaticRanker, ...]

    def __init__(self, regimes: int = 3, size: int = 16) -> None:
        check_integer("regimes", regimes, 1, 64)
        check_integer("size", size, 1, 1024)
        self.regimes = regimes
        self.size = size

    def fit(self, grid: Grid, family: Family) -> Self:
        """Split the problems into regimes, fit one fixed order for each, and return this ranker."""
        known = np.array([intensity(family, case.problem) for case in grid.cases])
        quantiles = np.quantile(known, np.arange(1, self.regimes) / self.regimes)
        # With few distinct intensities, quantiles can coincide or equal the minimum, which would leave a regime empty.
        self.edges_ = np.array([edge for edge in np.unique(quantiles) if edge > known.min()])
        regime = np.searchsorted(self.edges_, known, side="right")
        rows = [np.flatnonzero(regime == number) for number in range(len(self.edges_) + 1)]
        self.lists_ = tuple(StaticRanker(self.size).fit(grid.select(members), family) for members in rows)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return the place, counted from 1, of each config in the order of the problem's regime, (n_configs,)."""
        self._check_fitted("lists_")
        regime = int(np.searchsorted(self.edges_, intensity(family, problem), side="right"))
        return self.lists_[regime].predict(family, problem, device, configs)


def intensity(family: Family, problem: Problem) -> float:
    """Return the arithmetic intensity of a problem without its ragged sizes, in FLOP per byte of minimum traffic.

    If the family defines no FLOPs or bytes, return the product of the dimensions, which separates small problems from
    large ones.
    """
    known = problem.without_sizes()
    if isinstance(family, Measurable):
        moved = float(family.bytes(known))
        if moved > 0 and (done := float(family.flops(known))) > 0:
            return done / moved
    return float(np.prod([max(size, 1) for _, size in known.dims], dtype=np.float64))


class NearestRanker(Ranker):
    """Predict the measured slowdowns of the nearest training problem, as a lookup table of tuned shapes does.

    The distance is Euclidean over the logs of the dimensions, and of the skew of ragged sizes where both are known. A
    problem with another dtype, other flags or another device is further away than any shape.
    """

    dims_: tuple[str, ...]
    sizes_: NDArray[np.float64]  # (n_problems, n_dims)
    skew_: NDArray[np.float64]  # (n_problems,) NaN where the ragged sizes are unknown
    number_: dict[Hashable, int]  # index of each (dtype, flags, device)
    numbers_: NDArray[np.intp]  # (n_problems,) the value of `number_` for each
    slowdowns_: list[dict[KernelConfig, float]]

    def fit(self, grid: Grid, family: Family) -> Self:
        """Store the sizes and slowdowns of the grid's problems, and return this ranker."""
        problems = [case.problem for case in grid.cases]
        self.dims_ = tuple(name for name, _ in problems[0].dims)
        self.sizes_ = np.array([self._sizes(problem) for problem in problems])
        self.skew_ = np.array([_skew(problem) for problem in problems])
        keys = [_signature_on(problem, device) for problem, device in zip(problems, grid.devices, strict=True)]
        self.number_ = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self.numbers_ = np.array([self.number_[key] for key in keys])
        self.slowdowns_ = [
            {config: float(value) for config, value in zip(grid.configs, row, strict=True) if np.isfinite(value)}
            for row in grid.slowdowns
        ]
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return the nearest problem's slowdowns, (n_configs,); 1e6 for configs that did not run on it."""
        self._check_fitted("sizes_")
        steps = np.log((1 + self._sizes(problem)) / (1 + self.sizes_))
        skews = np.nan_to_num(np.log(_skew(problem) / self.skew_))
        foreign = self.numbers_ != self.number_.get(_signature_on(problem, device), -1)
        distances = np.sqrt((steps**2).sum(axis=1) + skews**2) + 1e3 * foreign
        nearest = self.slowdowns_[int(np.argmin(distances))]
        return np.array([nearest.get(config, _UNKNOWN) for config in configs], np.float64)

    def _sizes(self, problem: Problem) -> NDArray[np.float64]:
        """Return the sizes of a problem's dimensions, (n_dims,), in the order of `dims_`."""
        return np.array([problem[name] for name in self.dims_], np.float64)


def _skew(problem: Problem) -> float:
    """Return the skew of a problem's ragged sizes, NaN if they are unknown."""
    return np.nan if problem.ragged is None else problem.ragged.skew


def _signature_on(problem: Problem, device: DeviceSpec) -> Hashable:
    """Return a key that is equal for problems of the same dtype and flags on the same device."""
    return problem.dtype, problem.flags, device


class EstimateRanker(FixedRanker):
    """Rank configs by the family's analytic estimate, `Family.estimate_us`."""

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return estimated times in microseconds, (n_configs,), which order configs as slowdowns would."""
        return np.asarray(family.estimate_us(problem, device, configs), np.float64)


@dataclass(frozen=True)
class Baseline:
    """One baseline of an evaluation: one ranker, or several whose regrets are averaged."""

    rankers: tuple[RankerFactory, ...]
    #: Estimated CPU time to train and evaluate it, as a multiple of that of `LightGBMRanker`.
    cost: float = 0.01
    #: The third-party module that it needs, and the distribution that contains it if it has another name.
    module: str | None = None
    distribution: str | None = None

    @property
    def lacking(self) -> str | None:
        """The reason why this baseline cannot run here, a package that is not installed; None if it can."""
        if self.module is None or find_spec(self.module):
            return None
        return f"it needs {self.distribution or self.module}: pip install {self.distribution or self.module}"


BASELINES: Mapping[str, Baseline] = {
    "random": Baseline(tuple(partial(RandomRanker, seed) for seed in range(10)), cost=0.05),
    "static": Baseline((StaticRanker,)),
    "regimes": Baseline((RegimeRanker,)),
    "nearest": Baseline((NearestRanker,), cost=0.05),
    "estimate": Baseline((EstimateRanker,)),
}


@dataclass(frozen=True)
class Rivals:
    """The baselines of one evaluation, and the requested ones that are left out, each with its reason."""

    baselines: Mapping[str, Baseline]
    left_out: Mapping[str, str]

    @property
    def cost(self) -> float:
        """The estimated CPU time of all baselines, as a multiple of that of `LightGBMRanker`."""
        return sum(one.cost for one in self.baselines.values())


def choose_rivals(names: Sequence[str] = (FAST,), own: Mapping[str, Baseline] | None = None) -> Rivals:
    """Return the baselines with these names.

    Args:
        names: Names of baselines; "fast" and "all" select several.
        own: Baselines that a family adds to those of `BASELINES`, by name.

    Returns:
        The selected baselines. Those that need a package that is not installed are in `left_out`, with the reason.

    Raises:
        ForetuneError: A name is unknown, or `names` is empty.

    >>> list(choose_rivals().baselines)
    ['random', 'static', 'regimes', 'nearest', 'estimate']
    >>> list(choose_rivals(["static", "nearest"]).baselines)
    ['static', 'nearest']
    """
    known = {**BASELINES, **(own or {})}
    if unknown := [name for name in names if name not in (FAST, ALL, *known)]:
        raise ForetuneError(f"baselines must be {FAST}, {ALL} or among {', '.join(known)} but one is {unknown[0]!r}")
    if not names:
        raise ForetuneError(f"baselines must be {FAST}, {ALL} or among {', '.join(known)} but none is given")
    most = np.inf if ALL in names else _FAST_COST if FAST in names else -np.inf
    wanted = {name: one for name, one in known.items() if name in names or one.cost <= most}
    left_out = {name: reason for name, one in wanted.items() if (reason := one.lacking) is not None}
    return Rivals({name: one for name, one in wanted.items() if name not in left_out}, left_out)

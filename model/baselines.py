"""What a learned ranker must beat, behind the same interface: rankers without a model, and the choice among them."""

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
from .ranker import Ranker

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

RankerFactory: TypeAlias = Callable[[], Ranker]

#: The score of a config that a ranker has no measurement of: after all that were measured.
_UNKNOWN = 1e6
#: What stands for several names: those that take no time worth mentioning, and all.
FAST, ALL = "fast", "all"
#: A baseline that takes longer than this is not among the fast ones; see `Baseline.cost`.
_FAST_COST = 0.5


class RandomRanker(Ranker):
    """Any order is as good as another: what pruning without a model amounts to. One seed is one draw.

    >>> RandomRanker(seed=1).get_params()
    {'seed': 1}
    """

    learns = False

    def __init__(self, seed: int = 0) -> None:
        check_integer("seed", seed, 0, 2**31 - 1)
        self.seed = seed

    def fit(self, grid: Grid, family: Family) -> Self:
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        # A hash rather than a generator's next number: a config's score must not depend on its place in the list.
        salt = np.uint64(zlib.crc32(str((self.seed, problem.to_json(), device.name)).encode()))
        keys = np.array([_config_hash(config) for config in configs], np.uint64)
        scores: NDArray[np.float64] = 1.0 + _mix(keys ^ (salt << np.uint64(32))) / 2.0**64
        return scores


@lru_cache(maxsize=1 << 16)
def _config_hash(config: KernelConfig) -> int:
    return zlib.crc32(str(config.to_json()).encode())


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """splitmix64's finaliser: neighbouring keys give unrelated numbers below 2 ** 64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.float64] = (keys ^ (keys >> np.uint64(31))).astype(np.float64)
    return result


class StaticRanker(Ranker):
    """One fixed order for every problem: the best short list of configs that a maintainer could hard-code.

    The first `size` places are chosen greedily: each config is the one that, with those before it, gives the lowest
    geometric mean over the training problems of the best slowdown on the list. The rest follow by their own mean.
    """

    order_: dict[KernelConfig, int]

    def __init__(self, size: int = 16) -> None:
        check_integer("size", size, 1, 1024)
        self.size = size

    def fit(self, grid: Grid, family: Family) -> Self:
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
        """The place in the order, from 1; see `Ranker.predict`."""
        self._check_fitted("order_")
        return np.array([1.0 + self.order_.get(config, _UNKNOWN) for config in configs], np.float64)


def _filled(grid: Grid) -> NDArray[np.float64]:
    """Log slowdowns with a failure counting as the problem's slowest, (n_problems, n_configs)."""
    logs = np.log(grid.slowdowns)
    return np.where(np.isnan(logs), np.nanmax(logs, axis=1, keepdims=True), logs)


class RegimeRanker(Ranker):
    """A `StaticRanker` for each of so many regimes: little work for the bytes that are moved, some, and much.

    Regimes are what the host can tell at call time: quantiles, over the training problems, of the arithmetic intensity
    without the sizes of ragged work (see `intensity`), so that each has equally many problems. The source is what
    serving engines ship: a table of configs by batch size for each kernel (vLLM's and SGLang's `E=...,N=....json`).

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
        known = np.array([intensity(family, case.problem) for case in grid.cases])
        quantiles = np.quantile(known, np.arange(1, self.regimes) / self.regimes)
        # As few problems may have as few intensities: an edge twice, or below all of them, would leave a regime empty.
        self.edges_ = np.array([edge for edge in np.unique(quantiles) if edge > known.min()])
        regime = np.searchsorted(self.edges_, known, side="right")
        rows = [np.flatnonzero(regime == number) for number in range(len(self.edges_) + 1)]
        self.lists_ = tuple(StaticRanker(self.size).fit(grid.select(of_it), family) for of_it in rows)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """The place in the order of the problem's regime, from 1; see `Ranker.predict`."""
        self._check_fitted("lists_")
        regime = int(np.searchsorted(self.edges_, intensity(family, problem), side="right"))
        return self.lists_[regime].predict(family, problem, device, configs)


def intensity(family: Family, problem: Problem) -> float:
    """Floating-point operations per byte that is moved at least, as the host knows the problem; of a family that says
    neither, the product of its dimensions, which tells small problems from large ones."""
    known = problem.without_sizes()
    if isinstance(family, Measurable):
        moved = float(family.bytes(known))
        if moved > 0 and (done := float(family.flops(known))) > 0:
            return done / moved
    return float(np.prod([max(size, 1) for _, size in known.dims], dtype=np.float64))


class NearestRanker(Ranker):
    """The measured slowdowns of the nearest training problem: what a table of tuned shapes does.

    Nearest by Euclidean distance between the logs of the dimensions (and of the skew of ragged sizes, where both are
    known); another dtype, layout or device is further away than any shape.
    """

    dims_: tuple[str, ...]
    sizes_: NDArray[np.float64]  # (n_problems, n_dims)
    skew_: NDArray[np.float64]  # (n_problems,) NaN where the ragged sizes are not known
    number_: dict[Hashable, int]  # of each signature on a device
    numbers_: NDArray[np.intp]  # (n_problems,)
    slowdowns_: list[dict[KernelConfig, float]]

    def fit(self, grid: Grid, family: Family) -> Self:
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
        self._check_fitted("sizes_")
        steps = np.log((1 + self._sizes(problem)) / (1 + self.sizes_))
        skews = np.nan_to_num(np.log(_skew(problem) / self.skew_))
        foreign = self.numbers_ != self.number_.get(_signature_on(problem, device), -1)
        distances = np.sqrt((steps**2).sum(axis=1) + skews**2) + 1e3 * foreign
        nearest = self.slowdowns_[int(np.argmin(distances))]
        return np.array([nearest.get(config, _UNKNOWN) for config in configs], np.float64)

    def _sizes(self, problem: Problem) -> NDArray[np.float64]:
        return np.array([problem[name] for name in self.dims_], np.float64)


def _skew(problem: Problem) -> float:
    return np.nan if problem.ragged is None else problem.ragged.skew


def _signature_on(problem: Problem, device: DeviceSpec) -> Hashable:
    return problem.dtype, problem.flags, device


class EstimateRanker(Ranker):
    """The family's analytic estimate, `Family.estimate_us`.

    Figures are in microseconds: a slowdown would need the best config's time, and the order is the same.
    """

    learns = False

    def fit(self, grid: Grid, family: Family) -> Self:
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        return np.asarray(family.estimate_us(problem, device, configs), np.float64)


@dataclass(frozen=True)
class Baseline:
    """What a learned ranker is compared with: one ranker, or the mean over several."""

    rankers: tuple[RankerFactory, ...]
    #: Processor time over that of `LightGBMRanker`, to train and to judge, as far as one can tell beforehand.
    cost: float = 0.01
    #: The module that it needs, and the distribution that has it, where that is not one of Foretune's own.
    module: str | None = None
    distribution: str | None = None

    @property
    def is_fast(self) -> bool:
        return self.cost <= _FAST_COST

    @property
    def lacking(self) -> str | None:
        """Why it cannot be had here, or None."""
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
    """The baselines of one evaluation, and why others that were asked for are left out."""

    baselines: Mapping[str, Baseline]
    left_out: Mapping[str, str]

    @property
    def cost(self) -> float:
        """See `Baseline.cost`; of all of them."""
        return sum(one.cost for one in self.baselines.values())


def choose_rivals(names: Sequence[str] = (FAST,), own: Mapping[str, Baseline] | None = None) -> Rivals:
    """The baselines of these names, among Foretune's and a family's `own`; "fast" and "all" stand for several.

    Those that need a package that is not installed are left out, with the reason. Raises `ForetuneError` for an unknown
    name, and for none.

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
    wanted = {
        name: one for name, one in known.items() if name in names or ALL in names or (FAST in names and one.is_fast)
    }
    left_out = {name: reason for name, one in wanted.items() if (reason := one.lacking) is not None}
    return Rivals({name: one for name, one in wanted.items() if name not in left_out}, left_out)

"""Baselines that are quick: a draw, a static list, the nearest measured problem, the analytic estimate."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import DeviceSpec, Family, KernelConfig, Problem
from ...datasets.errors import check_integer
from ...datasets.grid import Grid
from ..ranker import Ranker

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

#: The score of a config that a ranker has no measurement of: after all that were measured.
_UNKNOWN = 1e6


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


class NearestRanker(Ranker):
    """The measured slowdowns of the nearest training problem: what a table of tuned shapes does.

    Nearest by Euclidean distance between the logs of the dimensions (and of the skew of ragged sizes, where both are
    known); another dtype, layout or device is further away than any shape.
    """

    dims_: tuple[str, ...]
    sizes_: NDArray[np.float64]  # (n_problems, n_dims)
    skew_: NDArray[np.float64]  # (n_problems,) NaN where the ragged sizes are not known
    kind_: dict[Hashable, int]  # by dtype, flags and device
    kinds_: NDArray[np.intp]  # (n_problems,)
    slowdowns_: list[dict[KernelConfig, float]]

    def fit(self, grid: Grid, family: Family) -> Self:
        problems = [case.problem for case in grid.cases]
        self.dims_ = tuple(name for name, _ in problems[0].dims)
        self.sizes_ = np.array([self._sizes(problem) for problem in problems])
        self.skew_ = np.array([_skew(problem) for problem in problems])
        kinds = [_kind(problem, device) for problem, device in zip(problems, grid.devices, strict=True)]
        self.kind_ = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self.kinds_ = np.array([self.kind_[kind] for kind in kinds])
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
        foreign = self.kinds_ != self.kind_.get(_kind(problem, device), -1)
        distances = np.sqrt((steps**2).sum(axis=1) + skews**2) + 1e3 * foreign
        nearest = self.slowdowns_[int(np.argmin(distances))]
        return np.array([nearest.get(config, _UNKNOWN) for config in configs], np.float64)

    def _sizes(self, problem: Problem) -> NDArray[np.float64]:
        return np.array([problem[name] for name in self.dims_], np.float64)


def _skew(problem: Problem) -> float:
    return np.nan if problem.ragged is None else problem.ragged.skew


def _kind(problem: Problem, device: DeviceSpec) -> Hashable:
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


def _filled(grid: Grid) -> NDArray[np.float64]:
    """Log slowdowns with a failure counting as the problem's slowest, (n_problems, n_configs)."""
    logs = np.log(grid.slowdowns)
    return np.where(np.isnan(logs), np.nanmax(logs, axis=1, keepdims=True), logs)

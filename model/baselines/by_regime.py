"""A static list of configs for each regime of work: what a maintainer hard-codes who knows the kernel well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...datasets import DeviceSpec, Family, KernelConfig, Measurable, Problem
from ...datasets.errors import check_integer
from ...datasets.grid import Grid
from ..ranker import Ranker
from .plain import StaticRanker

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self


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

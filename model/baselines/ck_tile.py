"""CK Tile's recipe: LightGBM, which learns the throughput of each config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import DeviceSpec, Family, KernelConfig, Measurable, Problem
from ...datasets.errors import check_integer
from ...datasets.grid import Grid
from ...datasets.progress import advance, share_of
from ..ranker import Ranker
from ..rows import features_of
from .peer_table import all_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

#: `DEFAULT_PARAMS` of ROCm/rocm-libraries, projects/composablekernel/dispatcher/heuristics/train.py (2026), by
#: LightGBM's own names; one thread, because folds run side by side.
_OPTIONS: Mapping[str, Any] = {
    "objective": "regression",
    "max_depth": 15,
    "learning_rate": 0.02,
    "min_data_in_leaf": 10,
    "bagging_fraction": 0.85,
    "feature_fraction": 0.85,
    "lambda_l1": 0.05,
    "lambda_l2": 0.5,
    "deterministic": True,
    "force_row_wise": True,
    "num_threads": 1,
    "verbosity": -1,
}


class CKTileRanker(Ranker):
    """`LGBMRegressor` on log(1 + TFLOP/s), with the parameters of CK Tile's heuristics, for all devices and dtypes.

    Its features are dimensions, knobs, tile counts, how full tiles are, and the hardware. Here it has the family's
    own instead, which say the same and more, and it learns from a problem with its ragged sizes and without: both in
    its favour. Like there, the model that is used has all trees, and `GroupKFold` by shape only judges it, which
    `cross_validate` does here. A family that says no floating-point operations counts one per launch.

    >>> CKTileRanker().get_params()
    {'trees': 2000, 'leaves': 255, 'seed': 42}
    """

    booster_: Any

    def __init__(self, trees: int = 2000, leaves: int = 255, seed: int = 42) -> None:
        check_integer("trees", trees, 1, 100_000)
        check_integer("leaves", leaves, 2, 131_072)
        check_integer("seed", seed, 0, 2**31 - 1)
        self.trees = trees
        self.leaves = leaves
        self.seed = seed

    def fit(self, grid: Grid, family: Family) -> Self:
        import lightgbm

        with share_of(0.1):
            rows = all_rows(grid, family)
        best_us = np.nanmin(grid.times_us, axis=1)
        tflop = np.array([_tflop(family, case.problem) for case in grid.cases])
        best = np.repeat((tflop / (best_us * 1e-6))[rows.query_rows], rows.query_sizes)
        data = lightgbm.Dataset(rows.features, label=np.log1p(best * np.exp(-rows.log_slowdown)))
        told = [lambda _: advance(0.9 / self.trees)]
        options = {**_OPTIONS, "num_leaves": self.leaves, "seed": self.seed}
        self.booster_ = lightgbm.train(options, data, num_boost_round=self.trees, callbacks=told)
        self._binaries_ = dict(grid.binaries) if family.reads_binaries else {}
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """See `Ranker.predict`; figures compare within a problem only."""
        self._check_fitted("booster_")
        if not len(configs):
            return np.empty(0)
        binaries = self._binaries_.get((problem.dtype, problem.flags))
        table = features_of(family, problem, device, configs, binaries)
        result: NDArray[np.float64] = np.exp(-self.booster_.predict(table, num_threads=1))
        return result


def _tflop(family: Family, problem: Problem) -> float:
    """Of one launch, in units of 1e12 operations."""
    flops = float(family.flops(problem)) if isinstance(family, Measurable) else 0.0
    return (flops or 1e12) * 1e-12

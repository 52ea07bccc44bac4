"""FlagTune's recipe: XGBoost, which learns the order of configs within each problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import check_integer
from ...datasets.grid import Grid
from ...datasets.problem import Dtype
from ...datasets.progress import advance, share_of
from ..ranker import Ranker
from ..rows import features_of
from .peer_table import all_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

#: What a model is for.
_Key = tuple[str, Dtype]
#: `XGBoostTrainingOptions` of flagos-ai/FlagTree, python/triton/flagtune/training/ranker.py (August 2026), and what
#: `train_xgboost_ranker` there fixes; one thread, because folds run side by side.
_OPTIONS: Mapping[str, Any] = {
    "objective": "rank:pairwise",
    "tree_method": "hist",
    "learning_rate": 0.03,
    "subsample": 0.95,
    "colsample_bytree": 0.95,
    "reg_lambda": 1.5,
    "reg_alpha": 0.0,
    "min_child_weight": 1.0,
    "gamma": 0.0,
    "max_bin": 512,
    "n_jobs": 1,
}
#: Scores are logarithms here, and e to the power of more is no number.
_FURTHEST = 300.0


class FlagTuneRanker(Ranker):
    """`XGBRanker` on rank labels, one model for each (device, dtype), with FlagTune's parameters.

    The label of a config is how many of its problem's are slower. FlagTune declares features for each operation: its
    dimensions and knobs, their logarithms and products, tile counts and what is left over. Here it has the family's
    own instead, which say the same and more, and it learns from a problem with its ragged sizes and without. It would
    refuse a problem whose device or dtype it has no model of: here the model of the dtype on another device
    answers, or else any. All three are in its favour. Its genetic search, which measures as it goes, is left out.

    Needs xgboost: without it `fit` raises `ForetuneError`.

    >>> FlagTuneRanker().get_params()
    {'trees': 1200, 'depth': 8, 'seed': 2026}
    """

    models_: dict[_Key, Any]

    def __init__(self, trees: int = 1200, depth: int = 8, seed: int = 2026) -> None:
        check_integer("trees", trees, 1, 100_000)
        check_integer("depth", depth, 1, 64)
        check_integer("seed", seed, 0, 2**31 - 1)
        self.trees = trees
        self.depth = depth
        self.seed = seed

    def fit(self, grid: Grid, family: Family) -> Self:
        problems: dict[_Key, list[int]] = {}
        for row, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
            problems.setdefault((device.name, case.problem.dtype), []).append(row)
        self._binaries_ = dict(grid.binaries) if family.reads_binaries else {}
        models = {}
        # The largest first: it answers where no model is for the dtype.
        for key, rows in sorted(problems.items(), key=lambda item: -len(item[1])):
            with share_of(len(rows) / len(grid)):
                models[key] = self._trained(grid.select(rows), family)
        self.models_ = models
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """See `Ranker.predict`; figures compare within a problem only."""
        self._check_fitted("models_")
        if not len(configs):
            return np.empty(0)
        binaries = self._binaries_.get((problem.dtype, problem.flags))
        score = self._model(problem, device).predict(features_of(family, problem, device, configs, binaries))
        result: NDArray[np.float64] = np.exp(-np.clip(score.astype(np.float64), -_FURTHEST, _FURTHEST))
        return result

    def _model(self, problem: Problem, device: DeviceSpec) -> Any:
        for name, dtype in ((device.name, problem.dtype), *self.models_):
            if dtype == problem.dtype and (name, dtype) in self.models_:
                return self.models_[name, dtype]
        return next(iter(self.models_.values()))

    def _trained(self, grid: Grid, family: Family) -> Any:
        try:
            import xgboost
        except ImportError as error:
            raise ForetuneError("FlagTune's recipe needs xgboost: pip install xgboost") from error

        trees = self.trees

        class Told(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # where it is not installed
            def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
                advance(0.9 / trees)
                return False

        with share_of(0.1):
            rows = all_rows(grid, family)
        parts = np.split(rows.log_slowdown, np.cumsum(rows.query_sizes)[:-1])
        labels = np.concatenate([_slower(part) for part in parts])
        model = xgboost.XGBRanker(
            n_estimators=trees, max_depth=self.depth, random_state=self.seed, callbacks=[Told()], **_OPTIONS
        )
        return model.fit(rows.features, labels, group=rows.query_sizes)


def _slower(times: NDArray[np.float64]) -> NDArray[np.float32]:
    """How many are slower than each; of equals, the later ones.

    >>> _slower(np.array([3.0, 1.0, 2.0])).tolist()
    [0.0, 2.0, 1.0]
    """
    labels = np.empty(len(times), np.float32)
    labels[np.argsort(times, kind="stable")] = np.arange(len(times) - 1, -1, -1)
    return labels

"""The recipes of other projects as rankers, and what they score against ours without a GPU.

`python tests/studies/recipes.py grouped_gemm_fwd --data h100` prints the regret of the best of the first k. Training
takes 13 (CK Tile) and 19 (FlagTune) times as long as ours, and FlagTune needs xgboost. Both take the features of our
own ranker, and every measurement: what is compared is the recipe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from foretune.datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem, load
from foretune.datasets.errors import check_integer
from foretune.datasets.grid import Grid
from foretune.datasets.problem import Dtype
from foretune.datasets.progress import advance, share_of
from foretune.model import Ranker, cross_validate
from foretune.model.baselines import Baseline, Rivals
from foretune.model.rows import TrainingRows, features_of, training_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self


class _AsItIs:
    """A family that does not say what a call of unknown group sizes is likely to be, so that it is learned as well."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def plausible(self, problem: Problem) -> tuple[tuple[float, Problem], ...]:
        return ((1.0, problem),)


def all_rows(grid: Grid, family: Family) -> TrainingRows:
    """Return `training_rows` without leaving any out: each problem twice where its ragged sizes are known, since these
    recipes rank a call as it is, and not averaged over plausible group sizes."""
    view: Any = _AsItIs(family)
    return training_rows(grid, view, slow=float("inf"), keep_slow=1.0, seed=0)


#: `DEFAULT_PARAMS` of ROCm/rocm-libraries, projects/composablekernel/dispatcher/heuristics/train.py (2026), by
#: LightGBM's own names; one thread, because folds run side by side.
_CK_TILE: Mapping[str, Any] = {
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
        options = {**_CK_TILE, "num_leaves": self.leaves, "seed": self.seed}
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


#: What a model is for.
_Key = tuple[str, Dtype]
#: `XGBoostTrainingOptions` of flagos-ai/FlagTree, python/triton/flagtune/training/ranker.py (August 2026), and what
#: `train_xgboost_ranker` there fixes; one thread, because folds run side by side.
_FLAGTUNE: Mapping[str, Any] = {
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
            n_estimators=trees, max_depth=self.depth, random_state=self.seed, callbacks=[Told()], **_FLAGTUNE
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


#: Processor time of one fold of h200's largest family, extrapolated from 30 trees (2026-11): 35 s for `LightGBMRanker`,
#: 670 s for `FlagTuneRanker`, 450 s for `CKTileRanker`.
RECIPES: Mapping[str, Baseline] = {
    "flagtune": Baseline((FlagTuneRanker,), cost=19.0, module="xgboost"),
    "ck_tile": Baseline((CKTileRanker,), cost=13.0),
}


def main() -> None:
    from foretune.kernels import find_family

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--data", default="h200", help="a dataset")
    parser.add_argument("--recipe", action="append", choices=tuple(RECIPES), help="both if left out")
    given = parser.parse_args()
    recipes = {name: RECIPES[name] for name in given.recipe or RECIPES}
    left_out = {name: why for name, one in recipes.items() if (why := one.lacking) is not None}
    rivals = Rivals({name: one for name, one in recipes.items() if name not in left_out}, left_out)
    found = cross_validate(load(given.data), find_family(given.family), rivals=rivals).to_json()
    for view in ("", "_sizes_unknown"):
        for name, by_k in {"foretune": found["regret" + view], **found["baselines" + view]}.items():
            figures = ", ".join(f"{k}: {100 * (one['geomean'] - 1):.1f} %" for k, one in by_k.items())
            sys.stdout.write(f"{name}{view.replace('_', ' ')}: {figures}\n")
    for name, why in left_out.items():
        sys.stdout.write(f"{name} is left out: {why}\n")


if __name__ == "__main__":
    main()

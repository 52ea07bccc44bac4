"""`LightGBMRanker`: gradient-boosted trees over the family's features. LightGBM trains; NumPy predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BinaryFacts, BundleError, DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_between, check_integer
from ..datasets.grid import BinaryKind, Grid
from ..datasets.progress import advance, share_of, side_by_side
from .ranker import Ranker
from .rows import TrainingRows, features_of, training_rows
from .trees import MAX_LEAVES, MAX_TREES, Forest

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

#: The logarithm of no slowdown is larger, nor its negative: the quotient of two slowdowns is a number still. The leaves
#: of the shipped trees add up to 4.
MAX_LOG_SLOWDOWN = 300.0
OBJECTIVES = ("regression", "lambdarank", "blend")

#: What a log slowdown of 1 is in lambdarank's scores when it goes on from known trees. Its gradients end where pairs
#: are a few units apart: with 20 what was learned before is harder to turn over, with 5 it is forgotten too easily.
_RANKS_PER_LOG = 20.0

# Upper edges of slowdown for the grades that lambdarank sorts by: the best (within the noise) have grade 9.
_GRADE_EDGES = np.log([1.01, 1.02, 1.04, 1.07, 1.12, 1.2, 1.35, 1.7, 3.0])


class LightGBMRanker(Ranker):
    """Gradient-boosted trees on the log of the slowdown, on its order within a problem, or on both.

    `objective` is "regression" (least squares on the log slowdown), "lambdarank" (order within a problem, scaled to
    log slowdowns afterwards, so that its figures compare within a problem only) or "blend" (half the trees each,
    predictions averaged).

    `emphasis` weighs a training row by slowdown ** -emphasis: above 0, being right about fast configs counts more.

    `slow` and `keep_slow` thin out what nobody chooses: see `rows.training_rows`. model/README.md has the figures that
    decided on the defaults.

    The same data, parameters and seed give the same trees.

    >>> LightGBMRanker(trees=0)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: trees must be between 1 and 2000 but got 0
    """

    forest_: Forest
    feature_names_: tuple[str, ...]
    #: What the binaries of the training data say, where the family's features want to know.
    binaries_: Mapping[BinaryKind, Mapping[KernelConfig, BinaryFacts]]

    def __init__(
        self,
        objective: str = "blend",
        *,
        trees: int = 450,
        leaves: int = 31,
        learning_rate: float = 0.08,
        min_rows: int = 20,
        feature_fraction: float = 0.7,
        row_fraction: float = 0.7,
        l2: float = 1.0,
        emphasis: float = 1.5,
        clip: float = 8.0,
        slow: float = 1.4,
        keep_slow: float = 0.1,
        seed: int = 0,
    ) -> None:
        if objective not in OBJECTIVES:
            raise ForetuneError(f"objective must be one of {', '.join(OBJECTIVES)} but got {objective!r}")
        for name, value, low, high in (
            ("trees", trees, 1, 2000),
            ("leaves", leaves, 2, MAX_LEAVES),
            ("learning_rate", learning_rate, 1e-4, 1.0),
            ("min_rows", min_rows, 1, 100_000),
            ("feature_fraction", feature_fraction, 0.01, 1.0),
            ("row_fraction", row_fraction, 0.01, 1.0),
            ("l2", l2, 0.0, 1e6),
            ("emphasis", emphasis, 0.0, 10.0),
            ("clip", clip, 1.01, 1e6),
            ("slow", slow, 1.0, 1e6),
            ("keep_slow", keep_slow, 0.0, 1.0),
            ("seed", seed, 0, 2**31 - 1),
        ):
            check_between(name, value, low, high)
        for name, count in (("trees", trees), ("leaves", leaves), ("min_rows", min_rows), ("seed", seed)):
            if type(count) is not int:
                raise ForetuneError(f"{name} must be an integer but got {count!r}")
        self.objective = objective
        self.trees = trees
        self.leaves = leaves
        self.learning_rate = learning_rate
        self.min_rows = min_rows
        self.feature_fraction = feature_fraction
        self.row_fraction = row_fraction
        self.l2 = l2
        self.emphasis = emphasis
        self.clip = clip
        self.slow = slow
        self.keep_slow = keep_slow
        self.seed = seed

    def fit(self, grid: Grid, family: Family) -> Self:
        with share_of(0.2):
            rows = training_rows(grid, family, slow=self.slow, keep_slow=self.keep_slow, seed=self.seed)
        target = np.minimum(rows.log_slowdown, np.log(self.clip))
        if self.objective == "blend":
            half = max(self.trees // 2, 1)
            # Side by side, but each on one thread: OpenMP's threads spin while they wait for each other, and two of
            # them on two busy cores made a fit of 11 s last 190 s (2026-11).
            trainings = (partial(train, rows, target, half, 0.4) for train in (self._regression, self._lambdarank))
            values, order = side_by_side(tuple(trainings), jobs=2)
            self.forest_ = values.affine(0.5) + order.affine(0.5)
        elif self.objective == "regression":
            self.forest_ = self._regression(rows, target, self.trees, 0.8)
        else:
            self.forest_ = self._lambdarank(rows, target, self.trees, 0.8)
        if self.forest_.reach > MAX_LOG_SLOWDOWN:
            raise ForetuneError(
                f"learning_rate {self.learning_rate} with {self.trees} trees makes leaves that add up to "
                f"{self.forest_.reach:.3g}, and e to the power of that is no slowdown: learn more slowly"
            )
        self.feature_names_ = family.feature_names
        self.binaries_ = dict(grid.binaries) if family.reads_binaries else {}
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """See `Ranker.predict`. Raises `BundleError` where the family's features are not those it learned from."""
        self._check_features(family)
        if not len(configs):
            return np.empty(0)
        binaries = self.binaries_.get((problem.dtype, problem.flags)) if family.reads_binaries else None
        table = features_of(family, problem, device, configs, binaries)
        logs = self.forest_.predict(table)
        slowdowns: NDArray[np.float64] = np.exp(logs)
        return slowdowns

    def adapted(self, grid: Grid, family: Family, *, trees: int = 100) -> LightGBMRanker:
        """Another ranker: this one's trees, and so many more that put right how these order the configs of the grid's
        problems. It needs none of the measurements that this one learned from, and a few of the new device are enough.

        The new trees are lambdarank's, and begin where these trees are: an order is what carries over, and the levels
        of two devices' slowdowns differ. The same grid, trees and seed give the same trees. Raises `BundleError` as
        `predict` does, and `ForetuneError` for more trees than a ranker can have.
        """
        self._check_features(family)
        check_integer("trees", trees, 1, MAX_TREES - len(self.forest_))
        with share_of(0.2):
            rows = training_rows(grid, family, slow=self.slow, keep_slow=self.keep_slow, seed=self.seed)
        target = np.minimum(rows.log_slowdown, np.log(self.clip))
        known = self.forest_.affine(-_RANKS_PER_LOG)
        start = _in_blocks(known, rows.features)
        result = LightGBMRanker(**self.get_params())
        result.forest_ = self._ranked(rows, target, trees, 0.8, known, init_score=start)
        result.feature_names_ = self.feature_names_
        result.binaries_ = dict(self.binaries_)
        for kind, facts in (grid.binaries if family.reads_binaries else {}).items():
            result.binaries_[kind] = {**self.binaries_.get(kind, {}), **facts}
        if result.forest_.reach > MAX_LOG_SLOWDOWN:
            raise ForetuneError(f"{trees} trees make leaves that add up to {result.forest_.reach:.3g}: take fewer")
        return result

    def _check_features(self, family: Family) -> None:
        self._check_fitted("forest_")
        if family.feature_names != self.feature_names_:
            changed = sorted(set(family.feature_names) ^ set(self.feature_names_)) or ["their order"]
            raise BundleError(
                f"the ranker of {family.name} was trained on other features than the family has now "
                f"(differing: {', '.join(changed)}): retrain it"
            )

    def _regression(self, rows: TrainingRows, target: NDArray[np.float64], trees: int, share: float) -> Forest:
        weight = np.exp(-self.emphasis * target) if self.emphasis else None
        if rows.weights is not None:
            weight = rows.weights if weight is None else weight * rows.weights
        return self._train({"objective": "regression"}, trees, share, rows.features, label=target, weight=weight)

    def _lambdarank(self, rows: TrainingRows, target: NDArray[np.float64], trees: int, share: float) -> Forest:
        return self._ranked(rows, target, trees, share)

    def _ranked(
        self,
        rows: TrainingRows,
        target: NDArray[np.float64],
        trees: int,
        share: float,
        known: Forest | None = None,
        **columns: Any,
    ) -> Forest:
        """So many trees that order configs, with those `known` before them, as log slowdowns."""
        grade = len(_GRADE_EDGES) - np.searchsorted(_GRADE_EDGES, target)
        options = {
            "objective": "lambdarank",
            "label_gain": [float(2**g - 1) for g in range(len(_GRADE_EDGES) + 1)],
            "lambdarank_truncation_level": 20,
        }
        forest = self._train(
            options, trees, share, rows.features, label=grade, group=rows.query_sizes, weight=rows.weights, **columns
        )
        if known is not None:
            forest = known + forest
        # Ranking leaves scale and zero open: the line through log slowdowns, fitted within each problem, fixes both.
        score = _in_blocks(forest, rows.features)
        query = np.repeat(np.arange(len(rows.query_sizes)), rows.query_sizes)
        centred = score - (np.bincount(query, score) / rows.query_sizes)[query]
        slope = float(centred @ target) / max(float(centred @ centred), 1e-12)
        return forest.affine(slope, float(target.mean() - slope * score.mean()))

    def _train(
        self, options: dict[str, Any], trees: int, share: float, features: NDArray[np.float32], **columns: Any
    ) -> Forest:
        """So many trees, which are this share of the current task."""
        import lightgbm

        parameters = options | {
            "num_leaves": self.leaves,
            "learning_rate": self.learning_rate,
            "min_data_in_leaf": self.min_rows,
            "feature_fraction": self.feature_fraction,
            "bagging_fraction": self.row_fraction,
            "bagging_freq": 1,
            "lambda_l2": self.l2,
            "use_missing": False,  # features are finite; every split is then a plain x <= threshold
            "deterministic": True,
            "force_row_wise": True,
            "seed": self.seed,
            "num_threads": 1,  # see fit
            "verbosity": -1,
        }
        data = lightgbm.Dataset(features, **columns)
        told = [lambda _: advance(share / trees)]
        booster = lightgbm.train(parameters, data, num_boost_round=trees, callbacks=told)
        return Forest.from_lightgbm(booster.dump_model())


def _in_blocks(forest: Forest, features: NDArray[np.float32], size: int = 4096) -> NDArray[np.float64]:
    """`forest.predict` for a long table: the scorer's working set grows with the rows it is given."""
    blocks = [forest.predict(features[start : start + size]) for start in range(0, len(features), size)]
    return np.concatenate(blocks)

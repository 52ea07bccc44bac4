"""`LightGBMRanker`: gradient-boosted trees over the family's features, and a small network beside them. LightGBM and
torch train; NumPy predicts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BinaryFacts, BundleError, DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_between, check_integer, warn
from ..datasets.feature_groups import FeatureGroup, narrowed
from ..datasets.grid import BinarySignature, Grid
from ..datasets.progress import share_of, side_by_side
from .ranker import Ranker, trust_in_estimate
from .rows import TrainingRows, training_rows
from .scoring.network import Network
from .scoring.network_training import train_network
from .scoring.tree_training import TreeTraining
from .scoring.trees import MAX_LEAVES, MAX_TREES, Forest, check_finite

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

# So many configs, and so many more for each that is asked for, go on from the network to the trees in `fastest`.
# `python tests/model/two_stages.py` says what that misses on the shipped measurements.
_KEPT, _KEPT_PER_CONFIG = 192, 5


class LightGBMRanker(Ranker):
    """Gradient-boosted trees on the log of the slowdown, on its order within a problem, or on both.

    `objective` is "regression" (least squares on the log slowdown), "lambdarank" (order within a problem, scaled to
    log slowdowns afterwards, so that its figures compare within a problem only) or "blend" (half the trees each,
    predictions averaged).

    `emphasis` weighs a training row by slowdown ** -emphasis: above 0, being right about fast configs counts more.

    `epochs` is how often the network, whose predictions are averaged with the trees', sees the data in training; with 0
    there is none. Without torch there is none either, and a `ForetuneWarning` says so.

    Where a problem's ragged sizes are unknown, predictions are marginalized over plausible ones (`Family.likely`).

    `slow` and `keep_slow` thin out what nobody chooses: see `rows.training_rows`. model/README.md has the figures that
    decided on the defaults.

    The same data, parameters and seed give the same trees.

    >>> LightGBMRanker(trees=0)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: trees must be between 1 and 2000 but got 0
    """

    forest_: Forest
    network_: Network | None
    feature_names_: tuple[str, ...]
    #: What the binaries of the training data say, where the family's features want to know.
    binaries_: Mapping[BinarySignature, Mapping[KernelConfig, BinaryFacts]]

    def __init__(
        self,
        objective: str = "blend",
        *,
        trees: int = 450,
        epochs: int = 24,
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
            ("epochs", epochs, 0, 1000),
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
            if type(low) is int and type(value) is not int:
                raise ForetuneError(f"{name} must be an integer but got {value!r}")
        self.objective = objective
        self.trees = trees
        self.epochs = epochs
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
        epochs = self.epochs
        if epochs and not find_spec("torch"):
            warn("there is no torch to train the network with: trees alone, which rank a little worse")
            epochs = 0
        training = self._training(rows)
        kinds = ("lambdarank", "regression") if self.objective == "blend" else (self.objective,)
        trees, share = max(self.trees // len(kinds), 1), 0.8 / (len(kinds) + bool(epochs))

        def ranked() -> Forest:
            forest, slope, offset = training.lambdarank(trees, share=share)
            return forest.affine(slope, offset)

        regressed = partial(training.regression, trees, emphasis=self.emphasis, share=share)
        ways: dict[str, Callable[[], Forest]] = {"lambdarank": ranked, "regression": regressed}
        trainings: list[Callable[[], Forest | Network]] = [ways[kind] for kind in kinds]
        if epochs:
            trainings.append(partial(train_network, rows, seed=self.seed, epochs=epochs, share=share))
        # Side by side, but each on one thread: OpenMP's threads spin while they wait for each other, and two of them on
        # two busy cores made a fit of 11 s last 190 s (2026-11).
        parts = side_by_side(trainings, jobs=2)
        forests = [part for part in parts if isinstance(part, Forest)]
        networks = [part for part in parts if isinstance(part, Network)]
        # The trees' mean, and of that and the network's figures the mean again.
        weight = 1 / (1 + len(networks))
        self.forest_ = reduce(operator.add, [forest.affine(weight / len(forests)) for forest in forests]).compact()
        self.network_ = networks[0].affine(weight) if networks else None
        if self.reach > MAX_LOG_SLOWDOWN:
            raise ForetuneError(
                f"learning_rate {self.learning_rate} with {self.trees} trees makes logarithms of slowdowns of up to "
                f"{self.reach:.3g}, and e to the power of that is no slowdown: learn more slowly"
            )
        self.feature_names_ = family.feature_names
        self.binaries_ = dict(grid.binaries) if family.reads_binaries else {}
        self.trust_ = trust_in_estimate(grid, family)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """See `Ranker.predict`. Raises `BundleError` where the family's features are not those it learned from."""
        self._check_features(family)
        if not len(configs):
            return np.empty(0)
        weights, groups = self._marginal(family, problem, device, configs)
        slowdowns: NDArray[np.float64] = np.exp(_mean(weights, self._logs_of(groups)))
        return slowdowns

    def fastest(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig], count: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the first configs, more than `count`; see `Ranker.fastest`.

        The network predicts all configs, and the trees, which take longer, only those that it puts first: `_KEPT` and
        so many more for each that is asked for. The slowdowns are those of `predict`.
        """
        self._check_features(family)
        kept = _KEPT + _KEPT_PER_CONFIG * count
        if self.network_ is None or len(configs) <= kept:
            return super().fastest(family, problem, device, configs, count)
        weights, groups = self._marginal(family, problem, device, configs)
        check_finite(groups)
        logs = self.network_.predict_groups(groups)
        near = np.sort(_mean(weights, logs).argsort(kind="stable")[:kept])
        logs = logs.take(near, axis=1) + self.forest_.predict_groups(narrowed(groups, configs=near))
        mean = _mean(weights, logs)
        order = mean.argsort(kind="stable")
        return near[order], np.exp(mean[order])

    def _marginal(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> tuple[tuple[float, ...], Sequence[FeatureGroup]]:
        """Return the weights of the problems that this one may turn out to be, and their features."""
        binaries = self.binaries_.get((problem.dtype, problem.flags), {}) if family.reads_binaries else None
        weights, problems = zip(*family.likely(problem), strict=True)
        return weights, family.feature_groups(problems, device, configs, binaries)

    def _logs_of(self, groups: Sequence[FeatureGroup]) -> NDArray[np.float64]:
        """Log slowdowns, (n_problems, n_rows)."""
        logs = self.forest_.predict_groups(groups)
        return logs if self.network_ is None else logs + self.network_.predict_groups(groups)

    def _logs(self, table: NDArray[np.float32], size: int = 4096) -> NDArray[np.float64]:
        """Log slowdowns, (n_rows,), of features, (n_rows, n_features), in blocks: the scorer's working set grows with
        the rows it is given."""
        blocks = [table[start : start + size] for start in range(0, len(table), size)]
        logs = np.concatenate([self.forest_.predict(block) for block in blocks])
        return logs if self.network_ is None else logs + np.concatenate(list(map(self.network_.predict, blocks)))

    @property
    def reach(self) -> float:
        """What no predicted logarithm of a slowdown is larger than, nor its negative."""
        return self.forest_.reach + (0.0 if self.network_ is None else self.network_.reach)

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
        known = -_RANKS_PER_LOG * self._logs(rows.features)
        new, slope, offset = self._training(rows).lambdarank(trees, share=0.8, known=known)
        result = LightGBMRanker(**self.get_params())
        result.forest_ = (new.affine(slope, offset) + self.forest_.affine(-_RANKS_PER_LOG * slope)).compact()
        result.network_ = self.network_ and self.network_.affine(-_RANKS_PER_LOG * slope)
        result.feature_names_, result.trust_ = self.feature_names_, self.trust_
        result.binaries_ = dict(self.binaries_)
        for kind, facts in (grid.binaries if family.reads_binaries else {}).items():
            result.binaries_[kind] = {**self.binaries_.get(kind, {}), **facts}
        if result.reach > MAX_LOG_SLOWDOWN:
            raise ForetuneError(f"{trees} trees make logarithms of slowdowns of up to {result.reach:.3g}: take fewer")
        return result

    def _check_features(self, family: Family) -> None:
        self._check_fitted("forest_")
        if family.feature_names != self.feature_names_:
            changed = sorted(set(family.feature_names) ^ set(self.feature_names_)) or ["their order"]
            raise BundleError(
                f"the ranker of {family.name} was trained on other features than the family has now "
                f"(differing: {', '.join(changed)}): retrain it"
            )

    def _training(self, rows: TrainingRows) -> TreeTraining:
        target = np.minimum(rows.log_slowdown, np.log(self.clip))
        parameters = {
            "num_leaves": self.leaves,
            "learning_rate": self.learning_rate,
            "min_data_in_leaf": self.min_rows,
            "feature_fraction": self.feature_fraction,
            "bagging_fraction": self.row_fraction,
            "lambda_l2": self.l2,
            "seed": self.seed,
        }
        return TreeTraining(rows, target, parameters)


class AdaptedRanker(Ranker):
    """`LightGBMRanker.adapted` as something that is fitted, for cross-validation: what `base` makes of a grid.

    >>> AdaptedRanker(LightGBMRanker(), trees=20).trees
    20
    """

    ranker_: LightGBMRanker

    def __init__(self, base: LightGBMRanker, trees: int = 100) -> None:
        self.base, self.trees = base, trees

    def fit(self, grid: Grid, family: Family) -> Self:
        self.ranker_ = self.base.adapted(grid, family, trees=self.trees)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        self._check_fitted("ranker_")
        return self.ranker_.predict(family, problem, device, configs)


def _mean(weights: Sequence[float], logs: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """The mean over the problems, (n_rows,), of (n_problems, n_rows)."""
    mean: NDArray[np.float64] = np.add.reduce(np.array(weights)[:, None] * logs, axis=0)
    return mean

"""`LightGBMRanker`: gradient-boosted trees and a small network over a family's features.

LightGBM and torch train them; predicting needs NumPy alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial, reduce
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BinaryFacts, BundleError, DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_between, check_integer, warn
from ..datasets.feature_groups import FeatureGroup, narrowed
from ..datasets.grid import BinarySignature, Grid
from ..datasets.progress import share_of, side_by_side
from .ranker import DelegatingRanker, Ranker, trust_in_estimate
from .rows import TrainingRows, training_rows
from .scoring.network import Network
from .scoring.training import TreeTraining, train_network
from .scoring.trees import MAX_LEAVES, MAX_TREES, Forest, check_finite

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

#: The largest absolute log slowdown that a ranker may predict, so that the quotient of two slowdowns does not overflow.
#: The shipped trees predict at most 4.
MAX_LOG_SLOWDOWN = 300.0
OBJECTIVES = ("regression", "lambdarank", "blend")

#: The lambdarank score of a log slowdown of 1 when `adapted` continues from known trees. Lambdarank's gradients vanish
#: where two scores are a few units apart, so a larger value makes the known order harder to change. At 5 it is
#: forgotten too easily.
RANKS_PER_LOG = 20.0

#: `fastest` predicts this many configs with the trees: a constant, and a number for each config that is requested. The
#: network selects them. `python tests/model/two_stages.py` measures what that changes on the shipped measurements.
_KEPT, _KEPT_PER_CONFIG = 192, 5


@dataclass(eq=False, repr=False)
class LightGBMRanker(Ranker):
    """Ranks configs with gradient-boosted trees and a small network, whose log slowdowns are averaged.

    If a problem's ragged sizes are unknown, predictions are marginalized over plausible ones (`Family.plausible`). The
    same data, parameters and seed give the same trees. model/NOTES.md has the figures behind the defaults.

    Args:
        objective: "regression" (least squares on the log slowdown), "lambdarank" (the order within a problem, scaled to
            log slowdowns afterwards, so that predictions are comparable within a problem only) or "blend" (half the
            trees each, predictions averaged).
        trees: The number of trees.
        epochs: The number of passes over the data for training the network; 0 trains no network. Without torch there is
            none either, with a `ForetuneWarning`.
        leaves: The maximum number of leaves of a tree.
        learning_rate: LightGBM's learning rate.
        min_rows: The minimum number of training rows in a leaf.
        feature_fraction: The share of the features that each tree may use.
        row_fraction: The share of the rows that each tree is trained on.
        l2: The L2 regularization of leaf values.
        emphasis: The weight of a training row is slowdown ** -emphasis: a larger value makes errors on fast configs
            count more.
        clip: Slowdowns above this value are reduced to it.
        slow: A config is slow if it takes more than this many times the best config's time.
        keep_slow: The share of slow configs that are trained on; see `rows.training_rows`.
        seed: The random seed.

    Raises:
        ForetuneError: A parameter is out of range.

    >>> LightGBMRanker(trees=0)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: trees must be between 1 and 2000 but got 0
    """

    objective: str = "blend"
    _: KW_ONLY
    trees: int = 450
    epochs: int = 24
    leaves: int = 31
    learning_rate: float = 0.08
    min_rows: int = 20
    feature_fraction: float = 0.7
    row_fraction: float = 0.7
    l2: float = 1.0
    emphasis: float = 1.5
    clip: float = 8.0
    slow: float = 1.4
    keep_slow: float = 0.1
    seed: int = 0
    forest_: Forest = field(init=False)
    network_: Network | None = field(init=False)
    feature_names_: tuple[str, ...] = field(init=False)
    #: Facts about the training data's binaries by signature, if the family's features read them.
    binaries_: Mapping[BinarySignature, Mapping[KernelConfig, BinaryFacts]] = field(init=False)

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ForetuneError(f"objective must be one of {', '.join(OBJECTIVES)} but got {self.objective!r}")
        for name, low, high in (
            ("trees", 1, 2000),
            ("epochs", 0, 1000),
            ("leaves", 2, MAX_LEAVES),
            ("learning_rate", 1e-4, 1.0),
            ("min_rows", 1, 100_000),
            ("feature_fraction", 0.01, 1.0),
            ("row_fraction", 0.01, 1.0),
            ("l2", 0.0, 1e6),
            ("emphasis", 0.0, 10.0),
            ("clip", 1.01, 1e6),
            ("slow", 1.0, 1e6),
            ("keep_slow", 0.0, 1.0),
            ("seed", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            check_between(name, value, low, high)
            if type(low) is int and type(value) is not int:
                raise ForetuneError(f"{name} must be an integer but got {value!r}")

    def fit(self, grid: Grid, family: Family) -> Self:
        """Train the trees and the network on a grid of measurements, and return this ranker.

        Raises:
            ForetuneError: The parameters allow predicted slowdowns above the maximum, as a high `learning_rate` does.
        """
        with share_of(0.2):
            rows = training_rows(grid, family, slow=self.slow, keep_slow=self.keep_slow, seed=self.seed)
        epochs = self.epochs
        if epochs and not find_spec("torch"):
            warn("torch is not installed, so the ranker has trees but no network and ranks a little worse")
            epochs = 0
        training = self._training(rows)
        objectives = ("lambdarank", "regression") if self.objective == "blend" else (self.objective,)
        trees, share = max(self.trees // len(objectives), 1), 0.8 / (len(objectives) + bool(epochs))

        def ranked() -> Forest:
            forest, slope, offset = training.lambdarank(trees, share=share)
            return forest.affine(slope, offset)

        regressed = partial(training.regression, trees, emphasis=self.emphasis, share=share)
        trainer_of: dict[str, Callable[[], Forest]] = {"lambdarank": ranked, "regression": regressed}
        trainings: list[Callable[[], Forest | Network]] = [trainer_of[one] for one in objectives]
        if epochs:
            trainings.append(partial(train_network, rows, seed=self.seed, epochs=epochs, share=share))
        # They run concurrently, but each on one thread: OpenMP's threads spin while they wait for each other, and two
        # of them on two busy cores made a fit of 11 s last 190 s (2026-11).
        parts = side_by_side(trainings, jobs=2)
        forests = [part for part in parts if isinstance(part, Forest)]
        networks = [part for part in parts if isinstance(part, Network)]
        # First the mean of the forests, then the mean of that and the network.
        weight = 1 / (1 + len(networks))
        self.forest_ = reduce(operator.add, [forest.affine(weight / len(forests)) for forest in forests]).compact()
        self.network_ = networks[0].affine(weight) if networks else None
        self._check_reach()
        self.feature_names_ = family.feature_names
        self.binaries_ = dict(grid.binaries) if family.reads_binaries else {}
        self.trust_ = trust_in_estimate(grid, family)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """Return the predicted slowdown of each config, (n_configs,); see `Ranker.predict`.

        Raises:
            BundleError: The family's features are not those that the ranker was trained on.
        """
        self._check_features(family)
        if not len(configs):
            return np.empty(0)
        weights, groups = self.marginal(family, problem, device, configs)
        slowdowns: NDArray[np.float64] = np.exp(_mean(weights, self._logs_of(groups)))
        return slowdowns

    def fastest(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig], count: int
    ) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the configs predicted fastest, `count` or more; see `Ranker.fastest`.

        The network predicts all configs. The trees, which take longer, predict only its first `_KEPT` +
        `_KEPT_PER_CONFIG` * `count`. The slowdowns equal those of `predict`.
        """
        self._check_features(family)
        kept = _KEPT + _KEPT_PER_CONFIG * count
        if self.network_ is None or len(configs) <= kept:
            return super().fastest(family, problem, device, configs, count)
        weights, groups = self.marginal(family, problem, device, configs)
        check_finite(groups)
        logs = self.network_.predict_groups(groups)
        near = np.sort(_mean(weights, logs).argsort(kind="stable")[:kept])
        logs = logs.take(near, axis=1) + self.forest_.predict_groups(narrowed(groups, configs=near))
        mean = _mean(weights, logs)
        order = mean.argsort(kind="stable")
        return near[order], np.exp(mean[order])

    def marginal(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> tuple[tuple[float, ...], Sequence[FeatureGroup]]:
        """Return the weights and the features of the problem's plausible variants (see `Family.plausible`)."""
        weights, problems = zip(*family.plausible(problem), strict=True)
        return weights, family.feature_groups(problems, device, configs, self.known_binaries(family, problem))

    def known_binaries(self, family: Family, problem: Problem) -> Mapping[KernelConfig, BinaryFacts] | None:
        """Return the `BinaryFacts` known for a problem's dtype and flags, by config.

        None if the family's features do not read them.
        """
        return self.binaries_.get((problem.dtype, problem.flags), {}) if family.reads_binaries else None

    def _logs_of(self, groups: Sequence[FeatureGroup]) -> NDArray[np.float64]:
        """Return predicted log slowdowns, (n_problems, n_configs), from feature groups."""
        logs = self.forest_.predict_groups(groups)
        return logs if self.network_ is None else logs + self.network_.predict_groups(groups)

    def _logs(self, table: NDArray[np.float32], size: int = 4096) -> NDArray[np.float64]:
        """Return predicted log slowdowns, (n_rows,), of a table of features, (n_rows, n_features).

        The rows are scored in blocks of `size`, which limits the memory.
        """
        blocks = [table[start : start + size] for start in range(0, len(table), size)]
        logs = np.concatenate([self.forest_.predict(block) for block in blocks])
        return logs if self.network_ is None else logs + np.concatenate(list(map(self.network_.predict, blocks)))

    @property
    def reach(self) -> float:
        """An upper bound on the absolute value of predicted log slowdowns."""
        return self.forest_.reach + (0.0 if self.network_ is None else self.network_.reach)

    def adapted(self, grid: Grid, family: Family, *, trees: int = 100) -> LightGBMRanker:
        """Return a ranker adapted to new measurements: this one plus further trees that correct its order.

        It does not need the measurements that this ranker was trained on, and a few from a new device are enough.
        Lambdarank trains the new trees, starting from this ranker's scores, because the order of configs carries over
        between devices and the values of slowdowns do not. The same grid, trees and seed give the same result.

        Args:
            grid: The new measurements.
            family: The family of the grid's problems.
            trees: The number of further trees.

        Raises:
            BundleError: The family's features are not those that the ranker was trained on.
            ForetuneError: The ranker would have too many trees, or could predict slowdowns above the maximum.
        """
        self._check_features(family)
        check_integer("trees", trees, 1, MAX_TREES - len(self.forest_))
        with share_of(0.2):
            rows = training_rows(grid, family, slow=self.slow, keep_slow=self.keep_slow, seed=self.seed)
        known = -RANKS_PER_LOG * self._logs(rows.features)
        new, slope, offset = self._training(rows).lambdarank(trees, share=0.8, known=known)
        result = LightGBMRanker(**self.get_params())
        result.forest_ = (new.affine(slope, offset) + self.forest_.affine(-RANKS_PER_LOG * slope)).compact()
        result.network_ = self.network_ and self.network_.affine(-RANKS_PER_LOG * slope)
        result.feature_names_, result.trust_ = self.feature_names_, self.trust_
        result.binaries_ = dict(self.binaries_)
        for signature, facts in (grid.binaries if family.reads_binaries else {}).items():
            result.binaries_[signature] = {**self.binaries_.get(signature, {}), **facts}
        if result.reach > MAX_LOG_SLOWDOWN:
            raise ForetuneError(
                f"{trees} trees give log slowdowns of up to {result.reach:.3g}, but at most {MAX_LOG_SLOWDOWN:.0f} is "
                "allowed: use fewer trees"
            )
        return result

    def _check_features(self, family: Family) -> None:
        """Check that the family has the features that the ranker was trained on. Raises `BundleError`."""
        self._check_fitted("forest_")
        if family.feature_names != self.feature_names_:
            changed = sorted(set(family.feature_names) ^ set(self.feature_names_)) or ["their order"]
            raise BundleError(
                f"the ranker of {family.name} was trained on other features than the family has now "
                f"(differences: {', '.join(changed)}): retrain it"
            )

    def _check_reach(self) -> None:
        """Check that trained parts cannot predict slowdowns above the maximum. Raises `ForetuneError`."""
        if self.reach > MAX_LOG_SLOWDOWN:
            raise ForetuneError(
                f"learning_rate {self.learning_rate} with {self.trees} trees gives log slowdowns of up to "
                f"{self.reach:.3g}, but at most {MAX_LOG_SLOWDOWN:.0f} is allowed: use a lower learning_rate"
            )

    def _training(self, rows: TrainingRows) -> TreeTraining:
        """Return a `TreeTraining` on these rows, with this ranker's parameters."""
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


class AdaptedRanker(DelegatingRanker):
    """Wraps `LightGBMRanker.adapted` as a ranker whose `fit` adapts `base`, for cross-validation.

    >>> AdaptedRanker(LightGBMRanker(), trees=20).trees
    20
    """

    def __init__(self, base: LightGBMRanker, trees: int = 100) -> None:
        self.base, self.trees = base, trees

    def fit(self, grid: Grid, family: Family) -> Self:
        """Adapt `base` to a grid of measurements, and return this ranker."""
        self.ranker_ = self.base.adapted(grid, family, trees=self.trees)
        return self


def _mean(weights: Sequence[float], logs: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return the weighted mean over the first axis, (n_configs,), of log slowdowns, (n_problems, n_configs)."""
    mean: NDArray[np.float64] = np.add.reduce(np.array(weights)[:, None] * logs, axis=0)
    return mean

"""Compute everything that a report says about one family; nothing is drawn here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import Family, KernelConfig
from ...datasets.console import percent
from ...datasets.errors import abridged, check_between
from ...datasets.grid import Grid
from ...datasets.progress import share_of
from ..baselines import Rivals
from ..contributions import tree_shap
from ..cross_validation import cross_validate, evaluate_bundle
from ..evaluation import Evaluation
from ..gbdt import LightGBMRanker
from ..metrics import Summary, summarise
from ..ranker import DelegatingRanker
from ..rows import training_rows
from ..training_set import TrainingSet

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ...datasets.dataset import Dataset
    from ..bundle import Bundle

#: A shortlist covers a problem if it has a config within this factor of the best time.
WITHIN = 1.01
#: The longest shortlist for which coverage is computed.
LONGEST = 32
#: Length of the shortlist in the headline, as in the README.
HEADLINE_K = 8
#: Milliseconds that an autotuner takes to time one config: the default warm-up (25 ms) and repetitions (100 ms) of
#: Triton's `do_bench`.
TIMING_MS = 125.0
#: A shorter compile time, in milliseconds, is that of a binary from the cache.
_CACHED_MS = 20.0
#: Number of problems whose training rows are the background of the Shapley values, and number of these rows whose
#: predictions are explained. With 450 trees that takes 2 s.
_BACKGROUND_PROBLEMS, _EXPLAINED_ROWS = 60, 300
#: The largest number of trees of a ranker in the learning curve. Fewer trees than in a bundle take less time, and the
#: slope of the curve is what matters.
TREES = 150
#: Shares of the training problems, for the learning curve.
SHARES = (0.125, 0.25, 0.5, 1.0)
#: Number of folds, of five, on which the learning curve is evaluated: the fold with the most model families.
_FOLDS_TESTED = 1
#: The smallest number of training problems in the learning curve; results of fewer are chance.
_FEWEST = 4


@dataclass(frozen=True)
class Findings:
    """The results for one family in a report, made by `find`."""

    evaluation: Evaluation
    knobs: tuple[str, ...]  # of the family
    #: The factor by which each feature moves a prediction on average, largest first: exp of the mean absolute
    #: Shapley value, because the trees predict logarithms.
    contributions: Mapping[str, float]
    curve: tuple[Point, ...] = ()  # the learning curve; () if it was left out
    #: Milliseconds to compile and time each config, (n_configs,), in the order of the evaluation's grid.
    trial_ms: NDArray[np.float64] | None = None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The evaluation as JSON, computed once: its bootstrap intervals take a while."""
        return self.evaluation.to_json()

    @cached_property
    def headline(self) -> Headline:
        """The benefit of a shortlist for this family, in one line."""
        judged = self.evaluation
        k = max((one for one in judged.regret if one <= HEADLINE_K), default=min(judged.regret))
        is_candidate = np.isfinite(judged.predicted[0])
        trial_ms = np.full(is_candidate.shape[1], TIMING_MS) if self.trial_ms is None else self.trial_ms
        rows = np.arange(len(self.places))[:, None]
        listed = self.places[:, :k]
        ours = (trial_ms[listed] * is_candidate[rows, listed]).sum()
        return Headline(
            family=judged.family,
            k=k,
            configs=int(is_candidate.any(axis=0).sum()),
            regret=self.summary["regret"][str(k)]["geomean"],
            tuning_ratio=float((is_candidate * trial_ms).sum() / ours),
        )

    @cached_property
    def places(self) -> NDArray[np.intp]:
        """The columns of each problem's configs, best predicted first, with sizes known, (n_problems, n_configs).

        Configs that are not candidates come last.
        """
        order: NDArray[np.intp] = np.argsort(self.evaluation.places[0], axis=1, kind="stable")
        return order

    @cached_property
    def first_predicted(self) -> NDArray[np.float64]:
        """The predicted slowdown of each problem's first choice, (n_problems,)."""
        predicted: NDArray[np.float64] = np.nanmin(self.evaluation.predicted[0], axis=1)
        return predicted

    def coverage_by_k(self, *, sizes_known: bool = True) -> NDArray[np.float64]:
        """Return the share of problems whose first k configs include one at most `WITHIN` times as slow as the best.

        The result is (n_ks,), for k from 1 to `LONGEST` or to the number of configs. `sizes_known` is whether the sizes
        of groups are known when configs are ranked.
        """
        predicted = self.evaluation.predicted[0 if sizes_known else 1]
        slowdowns = np.where(np.isnan(predicted), np.inf, _slowdowns(self.evaluation.grid, predicted))
        order = np.argsort(self.evaluation.places[0 if sizes_known else 1], axis=1, kind="stable")[:, :LONGEST]
        good = np.take_along_axis(slowdowns, order, axis=1) <= WITHIN
        shares: NDArray[np.float64] = np.logical_or.accumulate(good, axis=1).mean(axis=0)
        return shares

    def worst(self, most: int = 10) -> list[Choice]:
        """Return up to `most` problems, those whose first choices have the largest regret, largest first."""
        regret = self.evaluation.regret[min(self.evaluation.regret)]
        return [self.choice(int(row)) for row in np.argsort(-regret, kind="stable")[:most]]

    def choice(self, row: int) -> Choice:
        """Return the first choice and the best config of the problem in a row."""
        judged, grid = self.evaluation, self.evaluation.grid
        predicted, times = judged.predicted[0][row], grid.second_us[row]
        first, best = int(self.places[row, 0]), int(np.nanargmin(times))
        case, device = judged.cases[row], judged.devices[row]
        rank = int(np.flatnonzero(self.places[row] == best)[0]) + 1
        return Choice(
            problem=str(case.problem.without_sizes()),
            source=" ".join((*case.sources[:2], *(["..."] * (len(case.sources) > 2)), case.scenario)).strip(),
            device=device.name,
            regret=float(judged.regret[min(judged.regret)][row]),
            first=grid.configs[first],
            first_predicted=float(predicted[first]),
            first_us=float(times[first]) if np.isfinite(times[first]) else None,
            best=grid.configs[best],
            best_predicted=float(predicted[best]) if np.isfinite(predicted[best]) else None,
            best_us=float(times[best]),
            best_rank=rank if np.isfinite(predicted[best]) else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the family's entry of `foretune evaluate --json`, and the numbers that only the report has."""
        return self.summary | {
            "headline": self.headline.to_json(),
            "within_1_percent": {str(k + 1): round(float(share), 4) for k, share in enumerate(self.coverage_by_k())},
            "learning_curve": [point.to_json() for point in self.curve],
            "contributions": {name: round(factor, 4) for name, factor in self.contributions.items()},
            "worst": [choice.to_json() for choice in self.worst()],
        }


@dataclass(frozen=True)
class Headline:
    """The benefit of a shortlist in one line.

    >>> str(Headline("matmul", 8, 948, 1.0042, 40.3))
    '8 of 948 configs: 0.4 % off the best, tuning 40 times shorter'
    """

    family: str
    k: int
    configs: int  # number of configs that are candidates for any problem
    regret: float  # geometric mean of the best of the first k; 1.0 = the best config
    #: Time to compile and time all candidates of each problem, over that of the first k; see `TIMING_MS`.
    tuning_ratio: float

    def __str__(self) -> str:
        return (
            f"{self.k} of {self.configs} configs: {percent(self.regret)} % off the best, "
            f"tuning {self.tuning_ratio:.{0 if self.tuning_ratio >= 9.5 else 1}f} times shorter"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the "headline" of a family in `foretune report --json`."""
        return {
            "text": str(self),
            "best_of": self.k,
            "configs": self.configs,
            "regret": round(self.regret, 4),
            "tuning_ratio": round(self.tuning_ratio, 2),
        }


@dataclass(frozen=True)
class Choice:
    """The first choice and the best config of one problem. Times are from the second timing pass, as in regrets."""

    problem: str
    source: str
    device: str
    regret: float  # time of the first choice over that of the best config; 1.0 = the best
    first: KernelConfig
    first_predicted: float  # predicted slowdown
    first_us: float | None  # None: it did not run
    best: KernelConfig
    best_predicted: float | None  # predicted slowdown; None: it is not a candidate
    best_us: float
    best_rank: int | None  # its rank in the predicted order, from 1; None: it is not a candidate

    @property
    def first_predicted_us(self) -> float:
        """The predicted slowdown of the first choice times the best measured time, in microseconds."""
        return self.first_predicted * self.best_us

    @property
    def best_predicted_us(self) -> float | None:
        """The predicted slowdown of the best config times the best time, in microseconds; None if not a candidate."""
        return None if self.best_predicted is None else self.best_predicted * self.best_us

    @property
    def differences(self) -> list[tuple[str, str, str]]:
        """The knobs that differ: the name, the value of the first choice, and that of the best config."""
        first, best = self.first.to_json(), self.best.to_json()
        names = dict.fromkeys((*first, *best))
        pairs = [(name, _value(first.get(name)), _value(best.get(name))) for name in names]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def to_json(self) -> dict[str, Any]:
        """Return an entry of "worst" in `foretune report --json`."""
        return {
            "problem": self.problem,
            "source": self.source,
            "device": self.device,
            "regret": round(self.regret, 4),
            "first": self.first.to_json(),
            "first_predicted": round(self.first_predicted, 4),
            "first_us": self.first_us,
            "best": self.best.to_json(),
            "best_predicted": None if self.best_predicted is None else round(self.best_predicted, 4),
            "best_us": self.best_us,
            "best_rank": self.best_rank,
        }


@dataclass
class _RankerFactory:
    """A factory of unfitted rankers for cross-validation, which keeps the rankers it makes."""

    ranker: Callable[[], LightGBMRanker]
    made: list[LightGBMRanker] = field(default_factory=list)

    def __call__(self) -> LightGBMRanker:
        self.made.append(self.ranker())
        return self.made[-1]

    def one_fitted(self) -> LightGBMRanker:
        """Return a fitted ranker; always the same one, although threads fit them in any order."""
        fitted = [ranker for ranker in self.made if hasattr(ranker, "forest_")]
        return min(fitted, key=lambda ranker: ranker.forest_.leaf_value.tobytes())


def find(
    dataset: Dataset,
    family: Family,
    bundle: Bundle | None = None,
    *,
    ranker: Callable[[], LightGBMRanker] = LightGBMRanker,
    quick: bool = False,
) -> Findings:
    """Evaluate a bundle on one family, or a ranker by cross-validation, and explain the predictions.

    Args:
        dataset: The measurements.
        family: The family.
        bundle: The bundle to evaluate; cross-validate if None.
        ranker: A factory of unfitted rankers.
        quick: Leave out the learning curve, which takes a few more fits.

    Raises:
        ForetuneError: As for `cross_validate` and `evaluate_bundle`.

    >>> find(load("h200"), family).worst(1)[0].regret  # doctest: +SKIP
    1.196
    """
    factory, data = _RankerFactory(ranker), TrainingSet.of(dataset, family)
    with share_of(0.95 if quick else 0.7):
        evaluation = cross_validate(data, family, factory) if bundle is None else evaluate_bundle(data, bundle, family)
    curve: Sequence[Point] = ()
    if not quick:
        with share_of(0.25):
            curve = learning_curve(data, family, ranker)
    fitted = factory.one_fitted() if bundle is None else bundle.ranker(family.name)
    return Findings(
        evaluation=evaluation,
        knobs=tuple(family.knobs),
        contributions=_contributions(fitted, evaluation.grid, family),
        curve=tuple(curve),
        trial_ms=_trial_ms(dataset, family.name, evaluation.grid.configs),
    )


def _trial_ms(dataset: Dataset, family: str, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """Return the milliseconds that compiling and timing takes for each config, (n_configs,).

    A config's compile time is the median over its problems, without binaries from a cache; a config without such a time
    gets the median of the others.
    """
    rows = dataset.rows(family)
    compiled = rows[rows["compile_ms"] > _CACHED_MS].groupby("config")["compile_ms"].median()
    usual = float(compiled.median()) if len(compiled) else 0.0
    known = {dataset.configs[int(at)]: float(compile_ms) for at, compile_ms in compiled.items()}
    return TIMING_MS + np.array([known.get(config, usual) for config in configs])


def _contributions(ranker: LightGBMRanker, grid: Grid, family: Family) -> dict[str, float]:
    """Return the mean effect of each feature on predictions, as a factor, largest first.

    The effects are `tree_shap` values of sampled training rows.
    """
    some = grid.select(np.unique(np.linspace(0, len(grid) - 1, _BACKGROUND_PROBLEMS).astype(int)))
    background = training_rows(some, family, slow=ranker.slow, keep_slow=ranker.keep_slow, seed=0).features
    explained = background[np.unique(np.linspace(0, len(background) - 1, _EXPLAINED_ROWS).astype(int))]
    values, _ = tree_shap(ranker.forest_, explained, background)
    factors = np.exp(np.abs(values).mean(axis=0))
    order = np.argsort(-factors, kind="stable")
    return {family.feature_names[at]: float(factors[at]) for at in order}


def _value(knob: object) -> str:
    return "-" if knob is None else abridged(str(knob), 24)


def _slowdowns(grid: Grid, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return times over that of the best candidate, (n_problems, n_configs); infinite for a config that did not run."""
    times = np.where(np.isnan(grid.times_us), np.inf, grid.times_us)
    best = np.where(np.isnan(predicted), np.inf, times).min(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        slowdowns = times / best
    result: NDArray[np.float64] = np.where(np.isfinite(slowdowns), slowdowns, np.inf)
    return result


@dataclass(frozen=True)
class Point:
    """A point of the learning curve: the regret on held-out problems after training on a number of others."""

    problems: int  # in training
    trees: int
    regret: dict[int, Summary]  # by k

    def to_json(self) -> dict[str, Any]:
        """Return an entry of "learning_curve" in `foretune report --json`."""
        return {
            "problems": self.problems,
            "trees": self.trees,
            "regret": {str(k): one.to_json() for k, one in self.regret.items()},
        }


def learning_curve(
    dataset: Dataset | TrainingSet,
    family: Family,
    ranker: Callable[[], LightGBMRanker] = LightGBMRanker,
    *,
    shares: Sequence[float] = SHARES,
) -> list[Point]:
    """Return a point for each share of the training problems, all evaluated on the same held-out model families.

    The problems are sampled at random; a smaller sample is part of the larger ones.

    Args:
        dataset: The measurements, or a training set.
        family: The family.
        ranker: A factory of unfitted rankers. They are trained with at most `TREES` trees.
        shares: The shares of the training problems.

    Raises:
        ForetuneError: As for `cross_validate`.

    >>> [point.problems for point in learning_curve(load("h200"), family)]  # doctest: +SKIP
    [36, 73, 146, 291]
    """
    parameters = ranker().get_params()
    parameters["trees"] = min(parameters["trees"], TREES)
    points = []
    for share in shares:
        learned: list[int] = []
        with share_of(share / sum(shares)):
            judged = cross_validate(
                dataset,
                family,
                partial(_OnShare, share, parameters, learned),
                ks=(1, 8),
                tested=_FOLDS_TESTED,
                rivals=Rivals({}, {}),
            )
        regret = {k: summarise(values, judged.groups) for k, values in judged.regret.items()}
        points.append(Point(max(learned), parameters["trees"], regret))
    # With few problems, several shares give the same sample.
    return list({point.problems: point for point in points}.values())


class _OnShare(DelegatingRanker):
    """A ranker that is trained on a share of the problems, and records how many those are."""

    def __init__(self, share: float, parameters: Mapping[str, Any], learned: list[int]) -> None:
        check_between("share", share, 0.0, 1.0)
        self.share, self.parameters, self.learned = share, parameters, learned

    def fit(self, grid: Grid, family: Family) -> Self:
        """Train on a random share of the problems of a grid."""
        order = np.random.default_rng(0).permutation(len(grid))
        chosen = np.sort(order[: max(round(self.share * len(grid)), _FEWEST)])
        self.learned.append(len(chosen))
        self.ranker_ = LightGBMRanker(**self.parameters).fit(grid.select(chosen), family)
        return self

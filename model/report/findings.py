"""What a report says of one family, found before anything is drawn: figures, without pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import DeviceSpec, Family, KernelConfig, Problem
from ...datasets.errors import abridged, check_between
from ...datasets.grid import Grid
from ...datasets.progress import share_of
from ..baselines import Rivals
from ..cross_validation import cross_validate, evaluate_bundle
from ..evaluation import Evaluation
from ..gbdt import LightGBMRanker
from ..metrics import Summary, summarise
from ..ranker import Ranker
from ..rows import training_rows
from ..training_set import TrainingSet
from .shapley import tree_shap

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ...datasets.dataset import Dataset
    from ..bundle import Bundle

#: A shortlist serves a problem that has a config on it within so much of the best.
WITHIN = 1.01
#: How long shortlists are looked at.
LONGEST = 32
#: Of how many problems the rows are taken that stand for all, and of how many of these rows the predictions are
#: explained: 450 trees take 2 s.
_BACKGROUND_PROBLEMS, _EXPLAINED_ROWS = 60, 300
#: Fewer trees than a bundle has, so that the curve takes less time: what counts is how it falls.
TREES = 150
SHARES = (0.125, 0.25, 0.5, 1.0)
#: Of five, the one with the most families.
_FOLDS_TESTED = 1
#: What fewer problems teach is chance.
_FEWEST = 4


@dataclass(frozen=True)
class Findings:
    """One family in a report. Made by `find`."""

    evaluation: Evaluation
    knobs: tuple[str, ...]  # the family's
    #: How far each feature moves a prediction in the mean, as a factor, the largest first: e to the power of the mean
    #: absolute Shapley value, since the trees add up logarithms.
    contributions: Mapping[str, float]
    curve: tuple[Point, ...] = ()  # () where it was left out

    @cached_property
    def told(self) -> dict[str, Any]:
        """`Evaluation.to_json()`, which draws its intervals anew at each call."""
        return self.evaluation.to_json()

    @cached_property
    def places(self) -> NDArray[np.intp]:
        """The configs as a shortlist has them, with sizes known, (n_problems, n_configs); no candidates come last."""
        order: NDArray[np.intp] = np.argsort(self.evaluation.places[0], axis=1, kind="stable")
        return order

    @cached_property
    def first_predicted(self) -> NDArray[np.float64]:
        """The slowdown that was predicted for each problem's first choice, (n_problems,)."""
        predicted: NDArray[np.float64] = np.nanmin(self.evaluation.predicted[0], axis=1)
        return predicted

    def served(self, *, sizes_known: bool = True) -> NDArray[np.float64]:
        """The share of the problems that have a config within `WITHIN` of the best on a shortlist of k, (n_ks,) for k
        from 1 to `LONGEST`, or to the number of configs."""
        predicted = self.evaluation.predicted[0 if sizes_known else 1]
        slowdowns = np.where(np.isnan(predicted), np.inf, _slowdowns(self.evaluation.grid, predicted))
        order = np.argsort(self.evaluation.places[0 if sizes_known else 1], axis=1, kind="stable")[:, :LONGEST]
        good = np.take_along_axis(slowdowns, order, axis=1) <= WITHIN
        shares: NDArray[np.float64] = np.logical_or.accumulate(good, axis=1).mean(axis=0)
        return shares

    def worst(self, most: int = 10) -> list[Choice]:
        """The problems with the slowest first choices, the slowest first."""
        regret = self.evaluation.regret[min(self.evaluation.regret)]
        return [self.choice(int(row)) for row in np.argsort(-regret, kind="stable")[:most]]

    def choice(self, row: int) -> Choice:
        """The first choice on a problem beside the best config."""
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
        """The entry of `foretune evaluate --json`, and what the report has besides."""
        return self.told | {
            "within_1_percent": {str(k + 1): round(float(share), 4) for k, share in enumerate(self.served())},
            "learning_curve": [point.to_json() for point in self.curve],
            "contributions": {name: round(factor, 4) for name, factor in self.contributions.items()},
            "worst": [choice.to_json() for choice in self.worst()],
        }


@dataclass(frozen=True)
class Choice:
    """The first choice on a problem beside the best config. Times are of the second pass, as regrets are."""

    problem: str
    source: str
    device: str
    regret: float  # time of the first choice over the best: 1.0 = the best
    first: KernelConfig
    first_predicted: float  # slowdown
    first_us: float | None  # None: it did not run
    best: KernelConfig
    best_predicted: float | None  # slowdown; None: it is no candidate
    best_us: float
    best_rank: int | None  # its place in the predicted order, from 1

    @property
    def first_predicted_us(self) -> float:
        """The predicted slowdown, times the measured best time: rankers predict no times."""
        return self.first_predicted * self.best_us

    @property
    def best_predicted_us(self) -> float | None:
        """As `first_predicted_us`."""
        return None if self.best_predicted is None else self.best_predicted * self.best_us

    @property
    def differences(self) -> list[tuple[str, str, str]]:
        """The knobs in which the two differ: name, the first choice's value, the best config's."""
        first, best = self.first.to_json(), self.best.to_json()
        names = dict.fromkeys((*first, *best))
        pairs = [(name, _value(first.get(name)), _value(best.get(name))) for name in names]
        return [pair for pair in pairs if pair[1] != pair[2]]

    def to_json(self) -> dict[str, Any]:
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
class _Keeping:
    """Makes rankers for cross-validation, and keeps them."""

    ranker: Callable[[], LightGBMRanker]
    made: list[LightGBMRanker] = field(default_factory=list)

    def __call__(self) -> LightGBMRanker:
        self.made.append(self.ranker())
        return self.made[-1]

    def one(self) -> LightGBMRanker:
        """One of those that were fitted; always the same, whichever thread was the first."""
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
    """Judges one family of a dataset, by cross-validation or a bundle as it is, and looks into what was learned.

    `ranker` makes the unfitted rankers; `quick` leaves out the learning curve, which takes a few more fits. Raises as
    `cross_validate` and `evaluate_bundle`.

    >>> find(load("h200"), family).worst(1)[0].regret  # doctest: +SKIP
    1.196
    """
    keeping, data = _Keeping(ranker), TrainingSet.of(dataset, family)
    with share_of(0.95 if quick else 0.7):
        evaluation = cross_validate(data, family, keeping) if bundle is None else evaluate_bundle(data, bundle, family)
    curve: Sequence[Point] = ()
    if not quick:
        with share_of(0.25):
            curve = learning_curve(data, family, ranker)
    fitted = keeping.one() if bundle is None else bundle.ranker(family.name)
    return Findings(
        evaluation=evaluation,
        knobs=tuple(family.knobs),
        contributions=_contributions(fitted, evaluation.grid, family),
        curve=tuple(curve),
    )


def _contributions(ranker: LightGBMRanker, grid: Grid, family: Family) -> dict[str, float]:
    """See `Findings.contributions`: over rows as the ranker sees them in training."""
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
    """Times over the best candidate's, (n_problems, n_configs); infinite where a config did not run."""
    times = np.where(np.isnan(grid.times_us), np.inf, grid.times_us)
    best = np.where(np.isnan(predicted), np.inf, times).min(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        slowdowns = times / best
    result: NDArray[np.float64] = np.where(np.isfinite(slowdowns), slowdowns, np.inf)
    return result


@dataclass(frozen=True)
class Point:
    """Regret on held-out problems of a ranker that learned from so many others."""

    problems: int  # learned from
    trees: int
    regret: dict[int, Summary]  # by k

    def to_json(self) -> dict[str, Any]:
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
    """A point for each share of the training problems, drawn at random, the smaller draws within the larger ones.

    `ranker` makes the unfitted rankers, which learn with at most `TREES` trees. All are judged on the same held-out
    model families. Raises as `cross_validate`.

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
                partial(_Thinned, share, parameters, learned),
                ks=(1, 8),
                tested=_FOLDS_TESTED,
                rivals=Rivals({}, {}),
            )
        regret = {k: summarise(values, judged.groups) for k, values in judged.regret.items()}
        points.append(Point(max(learned), parameters["trees"], regret))
    # Of a few problems, several shares are the same draw.
    return list({point.problems: point for point in points}.values())


class _Thinned(Ranker):
    """Learns from a share of the problems that it is given, and notes how many that were."""

    ranker_: LightGBMRanker

    def __init__(self, share: float, parameters: Mapping[str, Any], learned: list[int]) -> None:
        check_between("share", share, 0.0, 1.0)
        self.share, self.parameters, self.learned = share, parameters, learned

    def fit(self, grid: Grid, family: Family) -> Self:
        order = np.random.default_rng(0).permutation(len(grid))
        chosen = np.sort(order[: max(round(self.share * len(grid)), _FEWEST)])
        self.learned.append(len(chosen))
        self.ranker_ = LightGBMRanker(**self.parameters).fit(grid.select(chosen), family)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        return self.ranker_.predict(family, problem, device, configs)

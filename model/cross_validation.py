"""Evaluate rankers on held-out model families, devices or sizes, next to baselines and the noise floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..datasets import Family, ForetuneError, Problem
from ..datasets.errors import warn
from ..datasets.progress import advance, share_of, side_by_side
from .baselines import Baseline, RankerFactory, Rivals, choose_rivals
from .calibration.conformal import Judged, diversified_places
from .calibration.cross_fit import (
    LEAST,
    Coverage,
    across_folds,
    calibrating_problems,
    cross_fitted,
    within_distribution,
)
from .calibration.training_domain import TrainingDomain, distance_of
from .evaluation import Evaluation, in_percent
from .gbdt import LightGBMRanker
from .metrics import top_k_regret
from .ranker import Ranker, ranker_on
from .splits import split_devices, split_folds, split_sizes
from .training_set import TrainingSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..datasets.dataset import Dataset
    from .bundle import Bundle

#: Regrets by k, each (n_rankers, n_problems).
_Curve: TypeAlias = "dict[int, NDArray[np.float64]]"

KS = (1, 2, 4, 8, 16)
#: What cross-validation can hold out: model families, devices, or the largest sizes.
SPLITS = ("model", "device", "size")
#: The cost of evaluating a trained ranker, in the unit of `Baseline.cost`.
_JUDGING_COST = 0.05


def cross_validate(
    dataset: Dataset | TrainingSet,
    family: Family,
    ranker: RankerFactory = LightGBMRanker,
    *,
    ks: Sequence[int] = KS,
    split: str = SPLITS[0],
    folds: int = 5,
    tested: int | None = None,
    jobs: int = 2,
    rivals: Rivals | None = None,
) -> Evaluation:
    """Cross-validate a ranker and baselines on one family's measurements; each problem is tested once.

    Args:
        dataset: The measurements.
        family: The family to evaluate.
        ranker: Returns an unfitted ranker; called for each fold.
        ks: The lengths of shortlists whose regret is computed.
        split: What is held out. "model": model families. "device": one device in each fold, which shows how predictions
            carry over to a card without measurements (the same problems may be known from other devices). "size": the
            largest quarter of each dimension's sizes; only those problems are tested.
        folds: The number of folds for "model".
        tested: Test only this many of the folds, the last ones, which have the most families. One of five takes a fifth
            of the time.
        jobs: The number of folds that run concurrently. It does not change the result.
        rivals: The baselines, from `choose_rivals`; the fast ones if left out.

    Raises:
        ForetuneError: An argument is out of range, or nothing can be split because all problems are of one model
            family, one device or one size.

    >>> from functools import partial
    >>> lambdarank = partial(LightGBMRanker, "lambdarank")
    >>> cross_validate(dataset, family, lambdarank).to_json()["regret"]["8"]  # doctest: +SKIP
    {'geomean': 1.0051, 'p95': 1.0198, 'max': 1.0412, 'ci95': [1.0033, 1.0072]}
    """
    rivals = choose_rivals() if rivals is None else rivals
    split_data = _Split(dataset, family, ks, folds, jobs, tested, split)
    ours = 1 / (1 + rivals.cost)
    with share_of(0.7 * ours):
        scores = split_data.held_out(ranker)
    with share_of(0.3 * ours):
        coverage = split_data.coverage(ranker, scores[1])
    return replace(split_data.evaluation(scores, rivals, 1 - ours), coverage=coverage)


def evaluate_bundle(
    dataset: Dataset | TrainingSet,
    bundle: Bundle,
    family: Family,
    *,
    ks: Sequence[int] = KS,
    folds: int = 5,
    jobs: int = 2,
    rivals: Rivals | None = None,
) -> Evaluation:
    """Evaluate a bundle's ranker, without training it, on the measurements of one family.

    Problems that were measured sparsely are not evaluated unless all are sparse. The baselines are cross-validated on
    the dataset; those that learn are left out if all problems are of one model family. A `ForetuneWarning` reports
    measurements that the bundle was trained on, because they make its regret too low.

    Args:
        dataset: The measurements.
        bundle: The bundle to evaluate.
        family: The family to evaluate.
        ks: The lengths of shortlists whose regret is computed.
        folds: The number of folds for the baselines.
        jobs: The number of folds that run concurrently.
        rivals: The baselines, from `choose_rivals`; the fast ones if left out.

    Raises:
        BundleError: The bundle has no such family.

    >>> evaluate_bundle(load("b200"), load_bundle(), family).frame().head()  # doctest: +SKIP
    """
    ranker = bundle.ranker(family.name)
    rivals = choose_rivals() if rivals is None else rivals
    data = TrainingSet.of(dataset, family)
    split_data = _Split(data, family, ks, folds, jobs)
    seen = data.share_in(bundle.trained[family.name].origin)
    if seen:
        warn(
            f"the bundle was trained on {in_percent(seen)} of the measurements of {family.name} in {dataset.label}, "
            "so its regrets are too low: evaluate it on other measurements"
        )
    ours = _JUDGING_COST / (_JUDGING_COST + rivals.cost)
    with share_of(ours):
        scores = split_data.scores_of(ranker)
    coverage = split_data.coverage_of(bundle, scores[1])
    return replace(split_data.evaluation(scores, rivals, 1 - ours), seen_in_training=seen, coverage=coverage)


class _Split:
    """One family's measurements, split into folds, with methods that evaluate rankers on the held-out problems."""

    def __init__(
        self,
        dataset: Dataset | TrainingSet,
        family: Family,
        ks: Sequence[int],
        folds: int,
        jobs: int,
        tested: int | None = None,
        split: str = SPLITS[0],
    ) -> None:
        if tested is not None and tested < 1:
            raise ForetuneError(f"tested must be >= 1 fold but got {tested}")
        if split not in SPLITS:
            raise ForetuneError(f"split must be one of {', '.join(SPLITS)} but is {split!r}")
        self.data = TrainingSet.of(dataset, family).ordered()
        self.ks, self._folds, self.jobs, self._split = tuple(ks), folds, jobs, split
        #: Convert a problem to what a ranker is given: as measured, and as at call time.
        self._views: tuple[Callable[[Problem], Problem], ...] = (lambda problem: problem, family.at_call_time)
        # Sparse problems are only used for training: regret among few configs says little.
        exhaustive = self.data.exhaustive
        self.sparse = int((~exhaustive).sum()) if exhaustive.any() else 0
        tested_at_all = exhaustive if self.sparse else np.ones(len(self.data), bool)
        self.rows = np.flatnonzero(tested_at_all if split != "size" else tested_at_all & (self.fold >= 0))
        if tested is not None:
            self.rows = np.flatnonzero(tested_at_all & (self.fold > self.fold.max() - tested))

    @cached_property
    def fold(self) -> NDArray[np.intp]:
        """The fold that tests each problem, (n_problems,), -1 if none does.

        Raises `ForetuneError` if nothing can be split.
        """
        if self._split == "size":
            return split_sizes(self.data.grid.cases)[0]
        if self._split == "device":
            return split_devices(self.data.grid.devices)
        return split_folds(self.data.groups, self._folds)

    def learned_from(self, number: int) -> NDArray[np.intp]:
        """Return the rows of the problems that the ranker of the fold `number` is trained on."""
        if self._split == "size":
            return np.flatnonzero(split_sizes(self.data.grid.cases)[1][number])
        return np.flatnonzero(self.fold != number)

    def held_out(self, factory: RankerFactory) -> NDArray[np.float64]:
        """Return scores of every problem by a ranker trained on the other folds, (2, n_problems, n_configs).

        The ranker is given each problem as measured, with its ragged sizes, and as at call time
        (`Family.at_call_time`), with rounded sizes and without ragged ones.

        NaN marks problems that are not tested and configs that are no candidates.
        """
        data = self.data
        if not factory().learns:
            return self.scores_of(factory().fit(data.grid, data.family))
        tested = {number: self.rows[self.fold[self.rows] == number] for number in self._tested_folds}

        def test(number: int) -> NDArray[np.float64]:
            with share_of(0.9 / len(tested)):
                known = data.select(self.learned_from(number))
                ranker = factory().fit(known.grid, data.family)
            if self._split == "device" and isinstance(ranker, LightGBMRanker):  # as shortlists do on such a device
                ranker = ranker_on(data.grid.devices[int(np.argmax(self.fold == number))], ranker, known.devices)
            with share_of(0.1 / len(tested)):
                return self._scores(ranker, tested[number])

        # Threads suffice, because LightGBM and NumPy release the GIL, and they need no copies of the data.
        parts = side_by_side([partial(test, number) for number in tested], self.jobs)
        scores = np.full((len(self._views), *data.judged.shape), np.nan)
        for number, part in zip(tested, parts, strict=True):
            scores[:, tested[number]] = part
        return scores

    def scores_of(self, ranker: Ranker) -> NDArray[np.float64]:
        """Return the scores of every tested problem by one fitted ranker, with the axes of `held_out`."""
        scores = np.full((len(self._views), *self.data.judged.shape), np.nan)
        scores[:, self.rows] = self._scores(ranker, self.rows)
        return scores

    def _scores(self, ranker: Ranker, rows: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return a ranker's predictions for rows, (2, n_rows, n_configs); NaN where a config is no candidate."""
        data, views = self.data, self._views
        scores = np.full((len(views), len(rows), len(data.grid.configs)), np.nan)
        for place, row in enumerate(rows):
            for number, view in enumerate(views):
                advance(1 / (len(rows) * len(views)))
                scores[number, place, data.candidate[row]] = data.predict(ranker, row, view)
        return scores

    @property
    def _tested_folds(self) -> list[int]:
        """The numbers of the folds that have problems to test."""
        return [int(number) for number in np.unique(self.fold[self.rows])]

    def evaluation(self, scores: NDArray[np.float64], rivals: Rivals, share: float) -> Evaluation:
        """Return the evaluation of a ranker, from its scores, and of the baselines.

        Args:
            scores: The ranker's scores of problems as measured and as at call time, (2, n_problems, n_configs).
            rivals: The baselines, which are scored here.
            share: The share of the current task's progress that the baselines take.
        """
        data, rows = self.data, self.rows
        scores = np.where(data.judged, scores, np.nan)
        places = np.stack(
            [diversified_places(view, data.grid.configs) for view in scores]
        )  # in the order of a shortlist
        found, left_out = {}, dict(rivals.left_out)
        for name, baseline in rivals.baselines.items():
            if data.groups.max() == 0 and baseline.rankers[0]().learns:
                left_out[name] = "it needs problems of at least two model families to be trained"
            else:
                with share_of(share * baseline.cost / rivals.cost):
                    found[name] = self._baseline(baseline)
        judged = data.select(rows)
        return Evaluation(
            family=data.family.name,
            cases=judged.grid.cases,
            devices=judged.grid.devices,
            groups=data.groups[rows],
            tried=_tried(judged),
            full_search=self._regret(np.zeros(data.judged.shape), len(data.grid.configs)),
            regret={k: self._regret(places[0], k) for k in self.ks},
            regret_sizes_unknown={k: self._regret(places[1], k) for k in self.ks},
            baselines={name: known for name, (known, _) in found.items()},
            baselines_sizes_unknown={name: unknown for name, (_, unknown) in found.items()},
            left_out=left_out,
            grid=judged.grid,
            predicted=scores[:, rows],
            sparse=self.sparse,
        )

    def _baseline(self, baseline: Baseline) -> tuple[_Curve, _Curve]:
        """Return a baseline's regrets on problems as measured and as at call time."""
        draws = []
        for factory in baseline.rankers:
            with share_of(1 / len(baseline.rankers)):
                draws.append(self.held_out(factory))
        known, unknown = (
            {k: np.stack([self._regret(scores[view], k) for scores in draws]) for k in self.ks}
            for view in range(len(self._views))
        )
        return known, unknown

    def _regret(self, scores: NDArray[np.float64], k: int) -> NDArray[np.float64]:
        """Return the regret of the first k judged configs by score, for each tested problem, (n_tested,)."""
        rows, grid = self.rows, self.data.grid
        scores = np.where(self.data.judged[rows], scores[rows], np.nan)
        return top_k_regret(scores, grid.first_us[rows], grid.second_us[rows], k)

    def coverage(self, factory: RankerFactory, scores: NDArray[np.float64]) -> dict[str, Coverage]:
        """Return `Evaluation.coverage` of a cross-validated ranker; nothing if there are too few problems.

        With held-out models, the scores of the other folds calibrate each fold. With held-out devices or sizes, each
        fold's training data are calibrated separately by cross-fitting, because the device or size must be new to the
        calibration.

        Args:
            factory: Returns an unfitted ranker.
            scores: The ranker's scores at call time, (n_problems, n_configs).
        """
        problems, fold = self._calibrating(scores), self.fold[self.rows]
        learned = {number: self.data.select(self.learned_from(number)) for number in self._tested_folds}
        if self._split == "model":
            if len(problems) < 2 * LEAST or len(learned) < 2:
                return {}
            return {
                "problems like those it learned from": within_distribution(problems),
                "models it never saw": across_folds(problems, fold, self._growths(learned)),
            }
        calibrations = {}
        for number, known in learned.items():
            with share_of(1 / len(learned)):
                found = cross_fitted(known, factory, jobs=self.jobs)
            if found is None:
                return {}
            calibrations[number] = found
        by_fold = [calibrations[number] for number in fold.tolist()]
        return {f"{self._split}s it never saw": Coverage.of(problems, by_fold, self._growths(learned))}

    def coverage_of(self, bundle: Bundle, scores: NDArray[np.float64]) -> dict[str, Coverage]:
        """Return `Evaluation.coverage` of a bundle's own calibration; nothing if it has none.

        `scores` are those of the bundle's ranker at call time, (n_problems, n_configs).
        """
        grid, family = self.data.grid, self.data.family.name
        calibration = bundle.calibration(family)
        if calibration is None:
            return {}
        growths = [bundle.distance(family, grid.cases[row].problem, grid.devices[row]).growth for row in self.rows]
        return {"this bundle": Coverage.of(self._calibrating(scores), [calibration] * len(self.rows), growths)}

    def _calibrating(self, scores: NDArray[np.float64]) -> list[Judged]:
        """Return each tested problem's predicted log slowdowns and times in both timing passes, for `calibrate`."""
        rows = self.rows.tolist()
        return calibrating_problems(self.data, rows, [np.log(scores[row, self.data.candidate[row]]) for row in rows])

    def _growths(self, learned: Mapping[int, TrainingSet]) -> list[float]:
        """Return the factor that lengthens each tested problem's shortlist if the problem is out of distribution.

        `learned` has the training set of each fold, from which the distance is measured.
        """
        grid = self.data.grid
        domains = {number: (TrainingDomain.of(known.problems), known.devices) for number, known in learned.items()}
        return [
            distance_of(grid.cases[row].problem, grid.devices[row], *domains[number]).growth
            for row, number in zip(self.rows.tolist(), self.fold[self.rows].tolist(), strict=True)
        ]


def _tried(data: TrainingSet) -> float:
    """Return the share of all supported configs of the problems, in the family's current space, that was measured."""
    column_of = {config: column for column, config in enumerate(data.grid.configs)}
    tried = could = 0
    for device in data.devices:
        rows = np.array([row for row, there in enumerate(data.grid.devices) if there == device], np.intp)
        space = data.family.space(device)
        columns = np.array([column_of[config] for config in space if config in column_of], np.intp)
        tried += int(data.judged[np.ix_(rows, columns)].sum())
        could += int(data.supported[np.ix_(rows, columns)].sum())
        others = [config for config in space if config not in column_of]
        for row in rows:
            problem = data.grid.cases[row].problem
            could += sum(data.family.supports(config, problem, device) is None for config in others)
    return tried / could if could else 0.0

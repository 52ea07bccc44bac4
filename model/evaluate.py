"""Regret on problems whose model family the ranker never saw, next to the baselines and the noise floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..datasets import Family, ForetuneError, Problem
from ..datasets.default_knobs import with_default_knobs
from ..datasets.errors import warn
from ..datasets.progress import advance, share_of, side_by_side
from .baselines.registry import Baseline, RankerFactory, Rivals, choose_rivals
from .calibration.held_out import HeldOut, coverage_of_bundle
from .calibration.spread import spread_places
from .evaluation import Evaluation, in_percent
from .gbdt import LightGBMRanker
from .metrics import top_k_regret
from .origin import seen_in_training
from .ranker import Ranker, ranker_on
from .rows import Subsets, supported
from .sources import candidates_of, eligible_of, measured_grid, measured_whole
from .splits import split_devices, split_folds, split_groups, split_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..datasets.dataset import Dataset
    from .bundle import Bundle
    from .calibration.coverage import Coverage

#: How much of a problem a ranker is told.
_View: TypeAlias = Callable[[Problem], Problem]
#: Regrets by k, each (n_rankers, n_problems).
_Curve: TypeAlias = "dict[int, NDArray[np.float64]]"

KS = (1, 2, 4, 8, 16)
#: What is held out: the layers of some models at a time, all that was measured on a device, or the largest sizes.
SPLITS = ("model", "device", "size")
#: What judging a ranker takes that is trained already, as `Baseline.cost` counts.
_JUDGING_COST = 0.05


def _sizes_known(problem: Problem) -> Problem:
    return problem


_BOTH: tuple[_View, ...] = (_sizes_known, Problem.without_sizes)


def cross_validate(
    dataset: Dataset,
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
    """Regret of a ranker and of the baselines on model families that were held out, each problem once.

    With `split="device"` each device is held out instead, one a fold: what is predicted for a card nobody measured on,
    where the same problems may be known from others. With `split="size"` the largest quarter of each dimension's sizes
    is, and only they are judged.

    `ranker` makes a fresh ranker for each fold; `jobs` folds run side by side, and do not change the result.
    With `tested`, only the last so many folds are judged, which hold the most families: one takes a fifth of the time.
    `rivals` are the baselines that it is compared with: the fast ones, unless `choose_rivals` chose others.
    Raises `ForetuneError` where all problems are of one model family, or of one device, so that nothing can be split.

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
    dataset: Dataset,
    bundle: Bundle,
    family: Family,
    *,
    ks: Sequence[int] = KS,
    folds: int = 5,
    jobs: int = 2,
    rivals: Rivals | None = None,
) -> Evaluation:
    """Regret of a bundle's ranker, as it is, on every problem of a dataset; the baselines are cross-validated on it.

    Data that the bundle was trained on flatter it: where some are, a `ForetuneWarning` says so. Where all problems are
    of one model family the baselines that learn are left out. Raises `BundleError` where the bundle has no such family.

    >>> evaluate_bundle(load("b200"), load_bundle(), family).frame().head()  # doctest: +SKIP
    """
    ranker = bundle.ranker(family.name)
    rivals = choose_rivals() if rivals is None else rivals
    split_data = _Split(dataset, family, ks, folds, jobs)
    seen = seen_in_training(dataset, split_data.grid, bundle.trained[family.name].origin)
    if seen:
        warn(
            f"the bundle was trained on {in_percent(seen)} of the measurements of {family.name} in {dataset.name}, "
            "which flatter it: judge it on others"
        )
    ours = _JUDGING_COST / (_JUDGING_COST + rivals.cost)
    with share_of(ours):
        scores = split_data.as_it_is(ranker)
    coverage = coverage_of_bundle(split_data.grid, split_data.eligible, scores[1], split_data.judged, bundle)
    return replace(split_data.evaluation(scores, rivals, 1 - ours), seen_in_training=seen, coverage=coverage)


class _Split:
    """One family's measurements, split, and what was a candidate on each problem."""

    def __init__(
        self,
        dataset: Dataset,
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
        dataset = with_default_knobs(dataset, family)
        self.grid = measured_grid(dataset, family)
        self._possible = supported(self.grid, family)
        self.family = family
        self.ks, self._folds, self.jobs, self._split = tuple(ks), folds, jobs, split
        self.groups = split_groups(self.grid.cases)
        self.eligible = eligible_of(dataset, self.grid, family)
        self.candidates = candidates_of(dataset, self.grid, self.eligible)
        self.whole = measured_whole(self.candidates, self._possible)
        self._subsets = Subsets(self.grid.configs)
        # What was measured thinly is learned from: how good a choice among few configs is says little.
        self.thin = int((~self.whole).sum()) if self.whole.any() else 0
        judged = self.whole if self.thin else np.ones(len(self.grid), bool)
        self.judged = np.flatnonzero(judged if split != "size" else judged & (self.fold >= 0))
        if tested is not None:
            self.judged = np.flatnonzero(judged & (self.fold > self.fold.max() - tested))

    @cached_property
    def fold(self) -> NDArray[np.intp]:
        """The fold of each problem, (n_problems,); -1 where none tests it. Raises `ForetuneError` where there is
        nothing to split."""
        if self._split == "size":
            return split_sizes(self.grid.cases)[0]
        return split_folds(self.groups, self._folds) if self._split == "model" else split_devices(self.grid.devices)

    def learned_from(self, number: int) -> NDArray[np.intp]:
        """The problems that the ranker of a fold learns from."""
        if self._split == "size":
            return np.flatnonzero(split_sizes(self.grid.cases)[1][number])
        return np.flatnonzero(self.fold != number)

    def held_out(self, factory: RankerFactory, views: Sequence[_View] = _BOTH) -> NDArray[np.float64]:
        """Scores of every problem by a ranker that was fitted without its group, (n_views, n_problems, n_configs);
        NaN for those that are not judged."""
        if not factory().learns:
            return self.as_it_is(factory().fit(self.grid, self.family), views)
        numbers = np.unique(self.fold[self.judged]).tolist()

        tested = {number: self.judged[self.fold[self.judged] == number] for number in numbers}

        def test(number: int) -> NDArray[np.float64]:
            with share_of(0.9 / len(numbers)):
                known = self.grid.select(self.learned_from(number))
                ranker = factory().fit(known, self.family)
            if self._split == "device" and isinstance(ranker, LightGBMRanker):  # as a shortlist is made there
                ranker = ranker_on(self.grid.devices[int(np.argmax(self.fold == number))], ranker, known.devices)
            with share_of(0.1 / len(numbers)):
                return self.scores(ranker, tested[number], views)

        # Threads: LightGBM and NumPy release the GIL, and nothing needs to be copied or pickled.
        parts = side_by_side([partial(test, number) for number in numbers], self.jobs)
        scores = np.full((len(views), *self.candidates.shape), np.nan)
        for number, part in zip(numbers, parts, strict=True):
            scores[:, tested[number]] = part
        return scores

    def as_it_is(self, ranker: Ranker, views: Sequence[_View] = _BOTH) -> NDArray[np.float64]:
        """Scores of every problem by one ranker, as `held_out` has them."""
        scores = np.full((len(views), *self.candidates.shape), np.nan)
        scores[:, self.judged] = self.scores(ranker, self.judged, views)
        return scores

    def scores(self, ranker: Ranker, rows: NDArray[np.intp], views: Sequence[_View] = _BOTH) -> NDArray[np.float64]:
        """Predictions for these problems, (n_views, n_rows, n_configs); NaN where a config is not eligible."""
        scores = np.full((len(views), len(rows), len(self.grid.configs)), np.nan)
        for place, row in enumerate(rows):
            mask = self.eligible[row]
            for number, view in enumerate(views):
                advance(1 / (len(rows) * len(views)))
                problem = view(self.grid.cases[row].problem)
                predicted = ranker.predict(self.family, problem, self.grid.devices[row], self._subsets[mask])
                scores[number, place, mask] = predicted
        return scores

    def evaluation(self, scores: NDArray[np.float64], rivals: Rivals, share: float) -> Evaluation:
        """The ranker's regrets from its scores with sizes known and unknown, and its rivals', whose scores are this
        share of the current task."""
        scores = np.where(self.candidates, scores, np.nan)
        places = np.stack([spread_places(view, self.grid.configs) for view in scores])  # as a shortlist has them
        found, left_out = {}, dict(rivals.left_out)
        for name, baseline in rivals.baselines.items():
            if self.groups.max() == 0 and baseline.rankers[0]().learns:
                left_out[name] = "all problems are of one model family, and it has to learn from others"
            else:
                with share_of(share * baseline.cost / rivals.cost):
                    found[name] = self._baseline(baseline)
        return Evaluation(
            family=self.family.name,
            cases=tuple(self.grid.cases[row] for row in self.judged),
            devices=tuple(self.grid.devices[row] for row in self.judged),
            groups=self.groups[self.judged],
            tried=self._tried(),
            full_search=self._regret(np.zeros(self.candidates.shape), len(self.grid.configs)),
            regret={k: self._regret(places[0], k) for k in self.ks},
            regret_sizes_unknown={k: self._regret(places[1], k) for k in self.ks},
            baselines={name: known for name, (known, _) in found.items()},
            baselines_sizes_unknown={name: unknown for name, (_, unknown) in found.items()},
            left_out=left_out,
            grid=self.grid.select(self.judged),
            predicted=scores[:, self.judged],
            thin=self.thin,
        )

    def coverage(self, factory: RankerFactory, scores: NDArray[np.float64]) -> dict[str, Coverage]:
        """See `Evaluation.coverage`; `scores` are those at call time, (n_problems, n_configs)."""
        rows, numbers = self.judged, np.unique(self.fold[self.judged]).tolist()
        learned = {number: self.learned_from(number) for number in numbers}
        held_out = HeldOut(self.grid, self.eligible, self.whole, scores, rows, self.fold, learned)
        if self._split == "model":
            return held_out.models()
        found = held_out.calibrated_apart(self.family, factory, self.jobs)
        return {} if found is None else {f"{self._split}s it never saw": found}

    def _tried(self) -> float:
        """Of the space as it is now."""
        column_of = {config: column for column, config in enumerate(self.grid.configs)}
        tried = could = 0
        for device in dict.fromkeys(self.grid.devices[row] for row in self.judged):
            rows = [row for row in self.judged if self.grid.devices[row] == device]
            space = self.family.space(device)
            columns = [column_of[config] for config in space if config in column_of]
            inside = np.ix_(np.array(rows, np.intp), np.array(columns, np.intp))
            tried += int(self.candidates[inside].sum())
            could += int(self._possible[inside].sum())
            problems = [self.grid.cases[row].problem for row in rows]
            others = [config for config in space if config not in column_of]
            could += sum(self.family.supports(config, one, device) is None for one in problems for config in others)
        return tried / could if could else 0.0

    def _baseline(self, baseline: Baseline) -> tuple[_Curve, _Curve]:
        """Its regrets with ragged sizes known, and without."""
        draws = []
        for factory in baseline.rankers:
            with share_of(1 / len(baseline.rankers)):
                draws.append(self.held_out(factory))
        known, unknown = (
            {k: np.stack([self._regret(scores[view], k) for scores in draws]) for k in self.ks}
            for view in range(len(_BOTH))
        )
        return known, unknown

    def _regret(self, scores: NDArray[np.float64], k: int) -> NDArray[np.float64]:
        rows = self.judged
        scores = np.where(self.candidates[rows], scores[rows], np.nan)
        return top_k_regret(scores, self.grid.first_us[rows], self.grid.second_us[rows], k)

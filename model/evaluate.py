"""Regret on problems whose model family the ranker never saw, next to the baselines and the noise floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..datasets import Case, DeviceSpec, Family, ForetuneError, Problem
from ..datasets.console.tables import percent, table
from ..datasets.errors import warn
from ..datasets.grid import Grid
from ..datasets.progress import advance, share_of, side_by_side
from .baselines import EstimateRanker, NearestRanker, RandomRanker, StaticRanker
from .gbdt import LightGBMRanker
from .metrics import geomean, summarise, top_k_regret
from .origin import seen_in_training
from .ranker import Ranker
from .rows import Subsets
from .sources import measured_grid
from .splits import RANDOM, split_devices, split_folds, split_groups

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from ..datasets.dataset import Dataset
    from .bundle import Bundle

RankerFactory: TypeAlias = Callable[[], Ranker]
#: How much of a problem a ranker is told.
_View: TypeAlias = Callable[[Problem], Problem]

KS = (1, 2, 4, 8, 16)
#: What is held out: the layers of some models at a time, or all that was measured on a device.
SPLITS = ("model", "device")
#: What the learned ranker is compared with; a baseline of several rankers is the mean over all of them.
BASELINES: Mapping[str, tuple[RankerFactory, ...]] = {
    "random": tuple(partial(RandomRanker, seed) for seed in range(10)),
    "static": (StaticRanker,),
    "nearest": (NearestRanker,),
    "estimate": (EstimateRanker,),
}


def _sizes_known(problem: Problem) -> Problem:
    return problem


_BOTH: tuple[_View, ...] = (_sizes_known, Problem.without_sizes)


@dataclass(frozen=True)
class Evaluation:
    """Regrets by k, each (n_problems,); those of a baseline (n_rankers, n_problems)."""

    family: str
    cases: tuple[Case, ...]  # (n_problems,)
    devices: tuple[DeviceSpec, ...]  # (n_problems,)
    groups: NDArray[np.intp]  # (n_problems,) what was split by
    tried: float  # the share of the configs that could run that was measured: the best is the best of these
    full_search: NDArray[np.float64]  # (n_problems,) regret of measuring every config: noise alone
    regret: dict[int, NDArray[np.float64]]
    regret_sizes_unknown: dict[int, NDArray[np.float64]]
    baselines: dict[str, dict[int, NDArray[np.float64]]]
    grid: Grid  # the measurements of these problems
    #: What the ranker said, (2, n_problems, n_configs): with ragged sizes known, and without; NaN = no candidate.
    predicted: NDArray[np.float64]
    seen_in_training: float | None = 0.0  # the share of the measurements that the ranker learned from; None: unknown

    def to_json(self) -> dict[str, Any]:
        """One family's entry of `foretune evaluate --json`; 1.0 = the best config."""
        return {
            "problems": len(self.cases),
            "tried": round(self.tried, 4),
            "noise_floor": round(geomean(self.full_search), 4),
            "seen_in_training": None if self.seen_in_training is None else round(self.seen_in_training, 4),
            "regret": self._summaries(self.regret),
            "regret_sizes_unknown": self._summaries(self.regret_sizes_unknown),
            "regret_by_origin": self._by_origin(),
            "regret_by_device": self._by_device(),
            "baselines": {name: self._summaries(regret) for name, regret in self.baselines.items()},
        }

    def __rich__(self) -> Any:
        """What `rich.print` and a notebook show: percent slower than the best config that was tried."""
        told = self.to_json()
        regret, ks = told["regret"], list(told["regret"])
        rows = [["foretune", *(percent(regret[k]["geomean"]) for k in ks)]]
        rows += [["  95 % interval", *("..".join(map(percent, regret[k]["ci95"])) for k in ks)]]
        rows += [[f"  {key}", *(percent(regret[k][key]) for k in ks)] for key in ("p95", "max")]
        devices = told["regret_by_device"] if len(told["regret_by_device"]) > 1 else {}
        for apart, part in (told["regret_by_origin"] | devices).items():
            label = f"  {apart} only ({part['problems']}, noise {percent(part['noise_floor'])} %)"
            rows += [[label, *(percent(part["regret"][k]["geomean"]) for k in ks)]]
        if any(case.problem.ragged for case in self.cases):
            unknown = told["regret_sizes_unknown"]
            rows += [["  ragged sizes unknown", *(percent(unknown[k]["geomean"]) for k in ks)]]
        for baseline, curve in told["baselines"].items():
            rows += [[baseline, *(percent(curve[k]["geomean"]) for k in ks)]]
        title = (
            f"{self.family}: % slower than the best config that was tried ({100 * self.tried:.0f} % of them were), "
            f"over {len(self.cases)} problems (noise {percent(told['noise_floor'])} %)"
        )
        seen = self.seen_in_training
        below = [f"It was trained on {_share(seen)} of these measurements, which flatter it."] if seen else []
        return table(title, ("best of first", *ks), rows, below=below)

    def _by_origin(self) -> dict[str, Any]:
        """The same, apart for the layers of real models and for random shapes, which are odder."""
        drawn = np.array([RANDOM in case.sources for case in self.cases])
        return {name: self._part(rows) for name, rows in (("models", ~drawn), ("random", drawn)) if rows.any()}

    def _by_device(self) -> dict[str, Any]:
        """The same, apart for each device."""
        names = np.array([device.name for device in self.devices])
        return {name: self._part(names == name) for name in dict.fromkeys(names.tolist())}

    def _part(self, rows: NDArray[np.bool_]) -> dict[str, Any]:
        return {
            "problems": int(rows.sum()),
            "noise_floor": round(geomean(self.full_search[rows]), 4),
            "regret": {
                str(k): summarise(values[rows], self.groups[rows]).to_json() for k, values in self.regret.items()
            },
        }

    def frame(self) -> pd.DataFrame:
        """One row a problem, the worst first choice first: for finding out what a ranker gets wrong."""
        import pandas as pd

        columns: dict[str, Any] = {
            "problem": [str(case.problem) for case in self.cases],
            "source": [" ".join(case.sources) for case in self.cases],
            "scenario": [case.scenario for case in self.cases],
            "device": [device.name for device in self.devices],
            "group": self.groups,
            "full_search": self.full_search,
        }
        columns |= {f"regret@{k}": regret for k, regret in self.regret.items()}
        columns |= {f"sizes_unknown@{k}": regret for k, regret in self.regret_sizes_unknown.items()}
        frame = pd.DataFrame(columns)
        worst_first: pd.DataFrame = frame.sort_values(
            f"regret@{min(self.regret)}", ascending=False, kind="stable", ignore_index=True
        )
        return worst_first

    def _summaries(self, regret: Mapping[int, NDArray[np.float64]]) -> dict[str, Any]:
        summaries = {}
        for k, values in regret.items():
            draws = np.atleast_2d(values)
            summaries[str(k)] = summarise(draws.ravel(), np.tile(self.groups, len(draws))).to_json()
        return summaries


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
    baselines: Mapping[str, tuple[RankerFactory, ...]] = BASELINES,
) -> Evaluation:
    """Regret of a ranker and of the baselines on model families that were held out, each problem once.

    With `split="device"` each device is held out instead, one a fold: what is predicted for a card nobody measured on,
    where the same problems may be known from others.

    `ranker` makes a fresh ranker for each fold; `jobs` folds run side by side, and do not change the result.
    With `tested`, only the last so many folds are judged, which hold the most families: one takes a fifth of the time.
    `baselines` are the rankers that it is compared with.
    Raises `ForetuneError` where all problems are of one model family, or of one device, so that nothing can be split.

    >>> from functools import partial
    >>> lambdarank = partial(LightGBMRanker, "lambdarank")
    >>> cross_validate(dataset, family, lambdarank).to_json()["regret"]["8"]  # doctest: +SKIP
    {'geomean': 1.0051, 'p95': 1.0198, 'max': 1.0412, 'ci95': [1.0033, 1.0072]}
    """
    split_data = _Split(dataset, family, ks, folds, jobs, tested, split)
    with share_of(0.85):
        scores = split_data.held_out(ranker)
    return split_data.evaluation(scores, 0.15, baselines)


def evaluate_bundle(
    dataset: Dataset, bundle: Bundle, family: Family, *, ks: Sequence[int] = KS, folds: int = 5, jobs: int = 2
) -> Evaluation:
    """Regret of a bundle's ranker, as it is, on every problem of a dataset; the baselines are cross-validated on it.

    Data that the bundle was trained on flatter it: where some are, a `ForetuneWarning` says so. Where all problems are
    of one model family the baselines that learn are left out. Raises `BundleError` where the bundle has no such family.

    >>> evaluate_bundle(load("b200"), load_bundle(), family).frame().head()  # doctest: +SKIP
    """
    ranker = bundle.ranker(family.name)
    split_data = _Split(dataset, family, ks, folds, jobs)
    seen = seen_in_training(dataset, split_data.grid, bundle.trained[family.name].origin)
    if seen:
        warn(
            f"the bundle was trained on {_share(seen)} of the measurements of {family.name} in {dataset.name}, which "
            "flatter it: judge it on others"
        )
    with share_of(0.2):
        scores = split_data.scores(ranker, np.arange(len(split_data.grid)))
    return replace(split_data.evaluation(scores, 0.8), seen_in_training=seen)


def prediction_ms(ranker: Ranker, family: Family, device: DeviceSpec, *, repeats: int = 20) -> float:
    """Milliseconds of one prediction over the family's whole space, features included: the median of `repeats`.

    Every repeat is a problem of its own, so that nothing remembered of the last one helps; the first is a rehearsal,
    because it makes the tables that all later ones use.

    >>> prediction_ms(load_bundle().ranker(family.name), family, DeviceSpec.named("h200"))  # doctest: +SKIP
    2.7
    """
    space = family.space(device)
    spent = []
    for size in range(1000, 1000 + 8 * (repeats + 1), 8):
        problem = Problem(family.name, tuple((dim, size) for dim in sorted(family.dims)))
        start = time.perf_counter()
        ranker.predict(family, problem, device, space)
        spent.append((time.perf_counter() - start) * 1e3)
    return float(np.median(spent[1:]))


def _share(share: float) -> str:
    """All, or so many percent, of which there is at least one."""
    return "all" if share == 1 else f"{max(1, min(99, round(100 * share)))} %"


def _wrong(dataset: Dataset, grid: Grid) -> NDArray[np.bool_]:
    """What no shortlist has because its result was wrong, (n_problems, n_configs)."""
    wrong, mask = dataset.wrong_results(grid.family), np.zeros((len(grid), len(grid.configs)), bool)
    for row, case in zip(mask, grid.cases, strict=True):
        if configs := wrong.get((case.problem.dtype, case.problem.flags)):
            row[:] = [config in configs for config in grid.configs]
    return mask


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
        self.grid, possible = measured_grid(dataset, family)
        self.family = family
        self.ks, self._folds, self.jobs, self._split = tuple(ks), folds, jobs, split
        self.groups = split_groups(self.grid.cases)
        # A run cut short by its budget, or guided by a plan, says nothing about what it did not try.
        self.candidates = (dataset.counts(self.grid) > 0) & possible & ~_wrong(dataset, self.grid)
        self._subsets = Subsets(self.grid.configs)
        self.judged = np.arange(len(self.grid))
        if tested is not None:
            self.judged = np.flatnonzero(self.fold > self.fold.max() - tested)

    @cached_property
    def fold(self) -> NDArray[np.intp]:
        """The fold of each problem, (n_problems,). Raises `ForetuneError` where there is nothing to split."""
        return split_folds(self.groups, self._folds) if self._split == "model" else split_devices(self.grid.devices)

    def held_out(self, factory: RankerFactory, views: Sequence[_View] = _BOTH) -> NDArray[np.float64]:
        """Scores of every problem by a ranker that was fitted without its group, (n_views, n_problems, n_configs);
        NaN in folds that are not tested."""
        if not factory().learns:
            return self.scores(factory().fit(self.grid, self.family), np.arange(len(self.grid)), views)
        numbers = np.unique(self.fold[self.judged]).tolist()

        def test(number: int) -> NDArray[np.float64]:
            with share_of(0.9 / len(numbers)):
                ranker = factory().fit(self.grid.select(np.flatnonzero(self.fold != number)), self.family)
            with share_of(0.1 / len(numbers)):
                return self.scores(ranker, np.flatnonzero(self.fold == number), views)

        # Threads: LightGBM and NumPy release the GIL, and nothing needs to be copied or pickled.
        parts = side_by_side([partial(test, number) for number in numbers], self.jobs)
        scores = np.full((len(views), *self.candidates.shape), np.nan)
        for number, part in zip(numbers, parts, strict=True):
            scores[:, self.fold == number] = part
        return scores

    def scores(self, ranker: Ranker, rows: NDArray[np.intp], views: Sequence[_View] = _BOTH) -> NDArray[np.float64]:
        """Predictions for these problems, (n_views, n_rows, n_configs); NaN where a config is no candidate."""
        scores = np.full((len(views), len(rows), len(self.grid.configs)), np.nan)
        for place, row in enumerate(rows):
            mask = self.candidates[row]
            for number, view in enumerate(views):
                advance(1 / (len(rows) * len(views)))
                problem = view(self.grid.cases[row].problem)
                predicted = ranker.predict(self.family, problem, self.grid.devices[row], self._subsets[mask])
                scores[number, place, mask] = predicted
        return scores

    def evaluation(
        self,
        scores: NDArray[np.float64],
        share: float,
        baselines: Mapping[str, tuple[RankerFactory, ...]] = BASELINES,
    ) -> Evaluation:
        """The ranker's regrets from its scores with sizes known and unknown, and the baselines', whose scores are this
        share of the current task."""
        trainable = self.groups.max() > 0
        full = np.where(self.candidates, 0.0, np.nan)
        share /= max(sum(map(len, baselines.values())), 1)
        return Evaluation(
            family=self.family.name,
            cases=tuple(self.grid.cases[row] for row in self.judged),
            devices=tuple(self.grid.devices[row] for row in self.judged),
            groups=self.groups[self.judged],
            tried=self._tried(),
            full_search=self._regret(full, len(self.grid.configs)),
            regret={k: self._regret(scores[0], k) for k in self.ks},
            regret_sizes_unknown={k: self._regret(scores[1], k) for k in self.ks},
            baselines={
                name: self._baseline(factories, share)
                for name, factories in baselines.items()
                if trainable or not factories[0]().learns
            },
            grid=self.grid.select(self.judged),
            predicted=scores[:, self.judged],
        )

    def _tried(self) -> float:
        """Of the space as it is now."""
        tried = could = 0
        for row in self.judged:
            problem, device = self.grid.cases[row].problem, self.grid.devices[row]
            configs = set(self._subsets[self.candidates[row]])
            runs = [c for c in self.family.space(device) if self.family.supports(c, problem, device) is None]
            tried, could = tried + sum(config in configs for config in runs), could + len(runs)
        return tried / could if could else 0.0

    def _baseline(self, factories: Sequence[RankerFactory], share: float) -> dict[int, NDArray[np.float64]]:
        draws = []
        for factory in factories:
            with share_of(share):
                draws.append(self.held_out(factory, (_sizes_known,))[0])
        return {k: np.stack([self._regret(scores, k) for scores in draws]) for k in self.ks}

    def _regret(self, scores: NDArray[np.float64], k: int) -> NDArray[np.float64]:
        rows = self.judged
        return top_k_regret(scores[rows], self.grid.first_us[rows], self.grid.second_us[rows], k)

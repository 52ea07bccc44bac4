"""What a plan is worth, without a GPU: an exhaustive dataset plays the card, and serves what the plan asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import DeviceSpec, Family, KernelConfig, Problem
from ..datasets.console import percent, table
from ..datasets.grid import Grid
from ..datasets.progress import advance, share_of
from ..model import EstimateRanker, Evaluation, LightGBMRanker, Ranker, cross_validate, summarise
from .plan import MakePlan

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ..datasets.dataset import Dataset

KS = (1, 2, 4, 8)


def chosen(
    grid: Grid, family: Family, make_plan: MakePlan, ranker: Callable[[], Ranker] = LightGBMRanker
) -> NDArray[np.bool_]:
    """Which cells of a grid a plan measures where the grid's times are what it gets to see, (n_problems, n_configs).

    One device after the other, the one with the most problems first. There the prior is the family's estimate, and not
    the shipped bundle, which may know the grid; on the next a `ranker` of all before it, as a campaign on a further
    card has a bundle.
    """
    column_of = {config: column for column, config in enumerate(grid.configs)}
    cells = np.zeros((len(grid), len(grid.configs)), np.bool_)
    prior: Ranker = EstimateRanker()
    devices = [device for device, _ in Counter(grid.devices).most_common()]
    for device in devices:
        plan = make_plan(family, device, prior=prior)
        todo = {case: row for row, case in enumerate(grid.cases) if grid.devices[row] == device}
        done: list[int] = []
        while True:
            with share_of(0.0):  # how far a plan's own training is says nothing of how many there will be
                steps = plan.next(tuple(todo), only(grid, cells, done) if done else None)
            if not steps:
                break
            advance(len(steps) / len(grid))
            for step in steps:
                row = todo.pop(step.case)
                cells[row, [column_of[config] for config in step.configs if config in column_of]] = True
                done.append(row)
        if device != devices[-1]:
            with share_of(0.0):
                prior = ranker().fit(only(grid, cells), family)
    return cells


def only(grid: Grid, cells: NDArray[np.bool_], rows: Sequence[int] | None = None) -> Grid:
    """The grid with NaN in all other cells, and without problems of which nothing is left."""
    cut = replace(
        grid, first_us=np.where(cells, grid.first_us, np.nan), second_us=np.where(cells, grid.second_us, np.nan)
    )
    left = np.flatnonzero(np.isfinite(cut.times_us).any(axis=1))
    return cut.select(left if rows is None else [row for row in rows if row in left])


class PlannedRanker(Ranker):
    """A ranker that learns from what a plan would have measured of the grid it is given, and from nothing else."""

    grid_: Grid  # that it could learn from
    cells_: NDArray[np.bool_]  # (n_problems, n_configs) what of the grid it did learn from
    ranker_: Ranker

    def __init__(self, plan: MakePlan, ranker: Callable[[], Ranker] = LightGBMRanker) -> None:
        self.plan = plan
        self.ranker = ranker

    def fit(self, grid: Grid, family: Family) -> Self:
        self.grid_ = grid
        with share_of(0.9):
            self.cells_ = chosen(grid, family, self.plan, self.ranker)
        with share_of(0.1):
            self.ranker_ = self.ranker().fit(only(grid, self.cells_), family)
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        self._check_fitted("ranker_")
        return self.ranker_.predict(family, problem, device, configs)


@dataclass(frozen=True)
class Replay:
    """A ranker of all measurements, and one of those that a plan takes, on the same held-out problems."""

    everything: Evaluation
    planned: Evaluation
    configs: float  # the share of the (problem, config) pairs that the plan tries
    measurements: float  # the share of the measurements, so with the confirming passes of what it tries

    def to_json(self) -> dict[str, Any]:
        """One family's entry of `foretune replay --json`; regrets 1.0 = the best config. `ratio` is the geometric mean
        of the planned ranker's regret over the other's, with its interval: 1.0 = the plan loses nothing."""
        wholes, plans = self.everything.to_json(), self.planned.to_json()
        kept = ("regret", "regret_sizes_unknown")
        return {
            "problems": wholes["problems"],
            "noise_floor": wholes["noise_floor"],
            "everything": {"configs": 1.0, "measurements": 1.0} | {name: wholes[name] for name in kept},
            "planned": {"configs": round(self.configs, 4), "measurements": round(self.measurements, 4)}
            | {name: plans[name] for name in kept},
            "ratio": {name: self._ratios(name) for name in kept},
        }

    def __rich__(self) -> Any:
        entry = self.to_json()
        ks = list(entry["everything"]["regret"])
        views = {"regret": ""}
        if any(case.problem.ragged for case in self.everything.cases):
            views["regret_sizes_unknown"] = "  sizes unknown"
        rows = []
        for label, key in (("everything", "everything"), ("the plan", "planned")):
            one = entry[key]
            configs, measurements = (f"{100 * one[share]:.1f} %" for share in ("configs", "measurements"))
            whole = f"{label}: {configs} of the configs, {measurements} of the measurements"
            for view, short in views.items():
                rows.append([short or whole, *(percent(one[view][k]["geomean"]) for k in ks)])
        for view, short in views.items():
            ratio = entry["ratio"][view]
            rows.append([short or "the plan loses", *(percent(ratio[k]["geomean"]) for k in ks)])
            rows.append(["  95 % interval", *("..".join(map(percent, ratio[k]["ci95"])) for k in ks)])
        return table(
            f"{self.everything.family}: % slower than the best config, over {entry['problems']} problems "
            f"(noise {percent(entry['noise_floor'])} %)",
            ("best of first", *ks),
            rows,
        )

    def _ratios(self, name: str) -> dict[str, Any]:
        ours, theirs = getattr(self.planned, name), getattr(self.everything, name)
        summaries = {k: summarise(ours[k] / theirs[k], self.planned.groups) for k in ours}
        return {
            str(k): {"geomean": round(one.geomean, 4), "ci95": [round(edge, 4) for edge in one.ci95]}
            for k, one in summaries.items()
        }


def replay_plan(
    dataset: Dataset,
    family: Family,
    make_plan: MakePlan,
    *,
    ranker: Callable[[], Ranker] = LightGBMRanker,
    jobs: int = 2,
) -> Replay:
    """Cross-validates, by model family, a ranker that has what a plan measures against one that has everything.

    For each fold the plan runs anew, on the training problems alone. The held-out problems are judged exhaustively.

    >>> replay_plan(load("h200"), family, Adaptive).to_json()["planned"]["configs"]  # doctest: +SKIP
    0.1002
    """
    made: list[PlannedRanker] = []

    def planned() -> Ranker:
        made.append(PlannedRanker(make_plan, ranker))
        return made[-1]

    with share_of(0.75):  # first: a plan may refuse its parameters
        evaluation = cross_validate(dataset, family, planned, ks=KS, jobs=jobs)
    with share_of(0.25):
        everything = cross_validate(dataset, family, ranker, ks=KS, jobs=jobs)
    tried, there = np.zeros(2), np.zeros(2)  # configs and measurements, over all folds
    for one in made:
        if hasattr(one, "cells_"):  # else it was not fitted
            mine = dataset.counts(one.grid_)
            tried += ((mine > 0) & one.cells_).sum(), mine[one.cells_].sum()
            there += (mine > 0).sum(), mine.sum()
    configs, measurements = (tried / there).tolist()
    return Replay(everything, evaluation, configs, measurements)

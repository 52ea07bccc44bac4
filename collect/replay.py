"""`replay_plan`: evaluate a plan without a GPU, on a dataset that was measured exhaustively."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import Family
from ..datasets.console import Table, percent, table
from ..datasets.grid import Grid
from ..datasets.progress import advance, share_of
from ..model import EstimateRanker, Evaluation, LightGBMRanker, Ranker, cross_validate, summarise
from ..model.ranker import DelegatingRanker
from .plan import MakePlan

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

    from ..datasets.dataset import Dataset

#: The lengths of the shortlists whose regret is reported.
KS = (1, 2, 4, 8)
#: Defines the rows and columns of the table of a replay.
_CAPTION = (
    "Columns: the fastest of the first k configs, in % over the best measured one, for each k. Rows: geometric "
    "means for rankers trained on all configs of the space (everything) and on those that the plan would have "
    "measured (the plan), then how much slower the second ranker's choices are (the plan loses), with its 95 % "
    "interval."
)


def chosen(
    grid: Grid, family: Family, make_plan: MakePlan, ranker: Callable[[], Ranker] = LightGBMRanker
) -> NDArray[np.bool_]:
    """Run a plan on a grid's times instead of a GPU; return the mask of cells it measures, (n_problems, n_configs).

    The devices come one after the other, the one with the most problems first. On the first device the prior is the
    family's estimate, and not the shipped bundle, which may have learned from the grid. On each later device it is a
    ranker that was trained on the earlier ones, just as a run on a new GPU uses a bundle trained on other GPUs.

    Args:
        grid: The exhaustive measurements of a family.
        family: The family.
        make_plan: Makes the plan.
        ranker: Makes the prior of the later devices.
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
            with share_of(0.0):  # not part of the progress: how often a plan trains is unknown
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
    """Return a grid with NaN in all cells outside of the mask `cells`, without problems that have no time left.

    Args:
        grid: The grid.
        cells: The cells to keep, (n_problems, n_configs).
        rows: The problems to keep, in this order; all if None.
    """
    cut = replace(
        grid, first_us=np.where(cells, grid.first_us, np.nan), second_us=np.where(cells, grid.second_us, np.nan)
    )
    left = np.flatnonzero(np.isfinite(cut.times_us).any(axis=1))
    return cut.select(left if rows is None else [row for row in rows if row in left])


class PlannedRanker(DelegatingRanker):
    """A ranker that is given a complete grid, and learns only from the cells that a plan would have measured.

    Args:
        plan: Makes the plan.
        ranker: Makes the ranker that learns.

    Attributes:
        grid_: The grid that it was given.
        cells_: The cells that it learned from, (n_problems, n_configs).
        ranker_: The ranker that learned.
    """

    grid_: Grid
    cells_: NDArray[np.bool_]

    def __init__(self, plan: MakePlan, ranker: Callable[[], Ranker] = LightGBMRanker) -> None:
        self.plan = plan
        self.ranker = ranker

    def fit(self, grid: Grid, family: Family) -> Self:
        """Train a new `ranker_` on only those cells of the grid that the plan would measure, and return this object."""
        self.grid_ = grid
        with share_of(0.9):
            self.cells_ = chosen(grid, family, self.plan, self.ranker)
        with share_of(0.1):
            self.ranker_ = self.ranker().fit(only(grid, self.cells_), family)
        return self


@dataclass(frozen=True)
class Replay:
    """The evaluations of two rankers on the same held-out problems.

    Attributes:
        everything: The evaluation of the ranker that learned from all measurements.
        planned: The evaluation of the ranker that learned from the measurements that a plan makes.
        configs: The share of the (problem, config) pairs that the plan tries.
        measurements: The share of the measurements that the plan makes, including confirming passes.
    """

    everything: Evaluation
    planned: Evaluation
    configs: float
    measurements: float

    def to_json(self) -> dict[str, Any]:
        """Return one family's entry of `foretune replay --json`.

        A regret of 1.0 is that of the best config. `ratio` is the geometric mean of the planned ranker's regret over
        the other's, with its 95 % confidence interval; at 1.0 the plan loses nothing.
        """
        everything, planned = self.everything.to_json(), self.planned.to_json()
        kept = ("regret", "regret_sizes_unknown")
        return {
            "problems": everything["problems"],
            "noise_floor": everything["noise_floor"],
            "everything": {"configs": 1.0, "measurements": 1.0} | {name: everything[name] for name in kept},
            "planned": {"configs": round(self.configs, 4), "measurements": round(self.measurements, 4)}
            | {name: planned[name] for name in kept},
            "ratio": {name: self._ratios(name) for name in kept},
        }

    def __rich__(self) -> Table:
        return self.table()

    def table(self, *, caption: bool = True) -> Table:
        """Return the table that `foretune replay` prints; with `caption`, text below it explains rows and columns."""
        entry = self.to_json()
        ks = list(entry["everything"]["regret"])
        views = {"regret": ""}
        if self.everything.is_ragged:
            views["regret_sizes_unknown"] = "  sizes unknown"
        rows = []
        for label, key in (("everything", "everything"), ("the plan", "planned")):
            one = entry[key]
            configs, measurements = (f"{100 * one[share]:.1f} %" for share in ("configs", "measurements"))
            full = f"{label}: {configs} of the configs, {measurements} of the measurements"
            for view, short in views.items():
                rows.append([short or full, *(percent(one[view][k]["geomean"]) for k in ks)])
        for view, short in views.items():
            ratio = entry["ratio"][view]
            rows.append([short or "the plan loses", *(percent(ratio[k]["geomean"]) for k in ks)])
            rows.append(["  95 % interval", *("..".join(map(percent, ratio[k]["ci95"])) for k in ks)])
        return table(
            f"{self.everything.family}: % slower than the best config, over {entry['problems']} problems "
            f"(noise {percent(entry['noise_floor'])} %)",
            ("best of first", *ks),
            rows,
            below=[_CAPTION] if caption else [],
        )

    def _ratios(self, name: str) -> dict[str, Any]:
        """Return, by k, the geometric mean ratio of the planned ranker's regret to the other's, with its interval.

        `name` is the attribute that holds the regret by k.
        """
        planned, everything = getattr(self.planned, name), getattr(self.everything, name)
        summaries = {k: summarise(planned[k] / everything[k], self.planned.groups) for k in planned}
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
    """Compare a ranker trained on what a plan measures with one trained on everything, by cross-validation.

    Model families are held out. For each fold the plan runs again, on the training problems only. The held-out problems
    are evaluated with all measurements. Configs that are not in the family's space any more are left out, as no plan
    would measure them.

    Args:
        dataset: A dataset that was measured exhaustively.
        family: The family.
        make_plan: Makes the plan.
        ranker: Makes the rankers.
        jobs: How many folds are trained at the same time.

    Raises:
        ForetuneError: The dataset cannot be split by model family, or the plan raises this error.

    >>> replay_plan(load("h200"), family, Adaptive).to_json()["planned"]["configs"]  # doctest: +SKIP
    0.1002
    """
    made: list[PlannedRanker] = []
    dataset = of_space(dataset, family)

    def planned() -> Ranker:
        made.append(PlannedRanker(make_plan, ranker))
        return made[-1]

    with share_of(0.75):  # first, because a plan may refuse its parameters
        evaluation = cross_validate(dataset, family, planned, ks=KS, jobs=jobs)
    with share_of(0.25):
        everything = cross_validate(dataset, family, ranker, ks=KS, jobs=jobs)
    tried, total = np.zeros(2), np.zeros(2)  # configs and measurements, over all folds
    for one in made:
        if hasattr(one, "cells_"):  # else it was not fitted
            counts = dataset.counts(one.grid_)
            tried += ((counts > 0) & one.cells_).sum(), counts[one.cells_].sum()
            total += (counts > 0).sum(), counts.sum()
    configs, measurements = (tried / total).tolist()
    return Replay(everything, evaluation, configs, measurements)


def of_space(dataset: Dataset, family: Family) -> Dataset:
    """Return a dataset with only the family's measurements of configs in its space, for its current kernel."""
    complete, space = dataset.of_family(family), set(family.space())
    rows = complete.rows(family.name)
    kept = [number for number, config in enumerate(complete.configs) if config in space]
    return replace(complete, measurements=rows[rows["config"].isin(kept)].reset_index(drop=True))

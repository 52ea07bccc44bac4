"""`Evaluation`: the regrets of a ranker and its baselines, as JSON, tables and a data frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import Case, DeviceSpec
from ..datasets.console import Table, percent, table
from ..datasets.grid import Grid
from .calibration.conformal import diversified_places
from .metrics import geomean, summarise
from .splits import RANDOM

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from .calibration.cross_fit import Coverage

#: Why a table of regrets is not monotonic.
CAN_RISE = (
    "A value can rise with k: one timing pass chooses among the k configs, and another one, with its own noise, gives "
    "the time of the chosen config."
)
#: Defines the rows and columns of the table of an evaluation.
_CAPTION = (
    "Columns: the fastest of the first k configs, in % over the best measured one, for each k. Rows: the "
    "geometric mean over all problems, its 95 % interval, the 95th percentile (p95) and the maximum; then the "
    "mean over parts of the problems, as at call time (ragged sizes unknown, sizes that vary from call to call "
    "rounded) where that differs, and of baselines: random configs, static (one list for all problems), "
    "regimes (a list for each arithmetic intensity), nearest (the configs of the nearest measured problem), "
    f"estimate (the analytic model). {CAN_RISE}"
)


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating a ranker on one family's measurements.

    Regrets are by k: those of the ranker (n_problems,), those of a baseline (n_rankers, n_problems). A regret is the
    time of the best of the first k configs over the time of the best config; 1.0 = the best. "Sizes unknown" stands for
    problems as at call time (`Family.at_call_time`): without ragged sizes, and with rounded sizes.
    """

    family: str
    cases: tuple[Case, ...]  # (n_problems,)
    devices: tuple[DeviceSpec, ...]  # (n_problems,)
    groups: NDArray[np.intp]  # (n_problems,) labels of related problems; see `split_groups`
    tried: float  # the share of the supported configs that was measured; "best" means the best of these
    full_search: NDArray[np.float64]  # (n_problems,) regret of measuring every config, which is timing noise
    regret: dict[int, NDArray[np.float64]]
    regret_sizes_unknown: dict[int, NDArray[np.float64]]
    baselines: dict[str, dict[int, NDArray[np.float64]]]
    baselines_sizes_unknown: dict[str, dict[int, NDArray[np.float64]]]
    left_out: Mapping[str, str]  # baselines that could not be evaluated, with the reason
    grid: Grid  # the measurements of these problems
    #: Predicted slowdowns, (2, n_problems, n_configs), for problems as measured and as at call time; NaN = not judged.
    predicted: NDArray[np.float64]
    seen_in_training: float | None = 0.0  # the share of the measurements that the ranker was trained on; None: unknown
    sparse: int = 0  # the number of further problems, measured sparsely: not evaluated, but trained on
    #: How often shortlists with k="auto" contain a good config, by kind of problem; empty without a calibration.
    coverage: Mapping[str, Coverage] = field(default_factory=dict)

    def __repr__(self) -> str:
        regrets = ", ".join(f"{percent(geomean(values))} % at k={k}" for k, values in self.regret.items())
        return f"Evaluation({self.family}: {len(self.cases)} problems; regret {regrets})"

    def _repr_html_(self) -> str:
        """Return the table of regrets as HTML, for a notebook."""
        return self.table()._repr_html_()

    @cached_property
    def places(self) -> NDArray[np.float64]:
        """The position of each config on a diversified shortlist, from 0, with the shape of `predicted`."""
        return np.stack([diversified_places(view, self.grid.configs) for view in self.predicted])

    def to_json(self) -> dict[str, Any]:
        """Return the family's entry of `foretune evaluate --json`; a regret of 1.0 is the best config."""
        of_all = self._part(slice(None))
        return {
            "problems": of_all.pop("problems"),
            "sparse_problems": self.sparse,
            "tried": round(self.tried, 4),
            "noise_floor": of_all.pop("noise_floor"),
            "seen_in_training": None if self.seen_in_training is None else round(self.seen_in_training, 4),
            "regret": of_all.pop("regret"),
            "regret_sizes_unknown": of_all.pop("regret_sizes_unknown"),
            "regret_by_origin": self._by_origin(),
            "regret_by_device": self._by_device(),
            **of_all,
            "baselines_left_out": dict(self.left_out),
            "better_baselines": [one.to_json() for one in self.better_baselines()],
            "coverage": {where: coverage.to_json() for where, coverage in self.coverage.items()},
        }

    def better_baselines(self) -> list[Better]:
        """Return each baseline and k with a lower geometric mean regret than the ranker's."""
        views = [("sizes known", self.regret, self.baselines)]
        if self.is_ragged:
            views += [("sizes unknown", self.regret_sizes_unknown, self.baselines_sizes_unknown)]
        pairs = [
            Better(name, view, k, geomean(theirs[k].ravel()), geomean(values), geomean(self.full_search))
            for view, ours, baselines in views
            for name, theirs in baselines.items()
            for k, values in ours.items()
        ]
        return [pair for pair in pairs if round(pair.baseline_regret, 4) < round(pair.regret, 4)]

    @property
    def is_ragged(self) -> bool:
        """True if any problem has ragged sizes."""
        return any(case.problem.ragged for case in self.cases)

    def __rich__(self) -> Table:
        return self.table()

    def table(self, *, caption: bool = True) -> Table:
        """Return a table of regrets, in percent above the best config's time, of the ranker and the baselines by k.

        Args:
            caption: Whether the text below the table defines its rows and columns.
        """
        summary = self.to_json()
        regret, ks = summary["regret"], list(summary["regret"])

        def means(label: str, curve: Mapping[str, Any]) -> list[str]:
            return [label, *(percent(curve[k]["geomean"]) for k in ks)]

        def at_call_time(curve: Mapping[str, Any], as_measured: list[str], indent: str) -> list[list[str]]:
            row = means(f"{indent}as at call time", curve)
            return [row] if row[1:] != as_measured[1:] else []

        rows = [means("foretune", regret)]
        rows += [["  95 % interval", *("..".join(map(percent, regret[k]["ci95"])) for k in ks)]]
        rows += [[f"  {key}", *(percent(regret[k][key]) for k in ks)] for key in ("p95", "max")]
        devices = summary["regret_by_device"] if len(summary["regret_by_device"]) > 1 else {}
        for subset, part in (summary["regret_by_origin"] | devices).items():
            label = f"  {subset} only ({part['problems']}, noise {percent(part['noise_floor'])} %)"
            rows += [means(label, part["regret"])]
            rows += at_call_time(part["regret_sizes_unknown"], rows[-1], "    ")
        rows += at_call_time(summary["regret_sizes_unknown"], rows[0], "  ")
        for baseline, curve in summary["baselines"].items():
            rows += [means(baseline, curve)]
            rows += at_call_time(summary["baselines_sizes_unknown"][baseline], rows[-1], "  ")
        title = (
            f"{self.family}: % slower than the best config that was measured ({100 * self.tried:.0f} % were), "
            f"over {len(self.cases)} problems (noise {percent(summary['noise_floor'])} %)"
        )
        seen = self.seen_in_training
        below = [*self._compared(), *(f"{name} is left out: {why}." for name, why in self.left_out.items())]
        below += (
            [f"The ranker was trained on {in_percent(seen)} of these measurements, so its regrets are too low."]
            if seen
            else []
        )
        below += (
            [f"Not evaluated: problems of which less than half of the configs were measured ({self.sparse})."]
            if self.sparse
            else []
        )
        below += [f'Shortlists with k="auto", {where}: {coverage}.' for where, coverage in self.coverage.items()]
        below += [_CAPTION] if caption else []
        return table(title, ("best of first", *ks), rows, below=below)

    def _compared(self) -> list[str]:
        """Return sentences that name the baselines that are better than the ranker, if any, and those as good."""
        if not self.baselines:
            return []
        better: dict[tuple[str, str, bool], list[str]] = {}
        for one in self.better_baselines():
            result = f"{one.k} ({percent(one.baseline_regret)} against {percent(one.regret)})"
            better.setdefault((one.baseline, one.view, one.is_within_noise), []).append(result)
        if not better:
            return ["Lower than every baseline at every k."]
        views = {name: f", {name}" if self.is_ragged else "" for name in ("sizes known", "sizes unknown")}
        return [
            f"{baseline} is {'as good, within the noise' if is_noise else 'better'}{views[view]}, at the best of "
            f"{', '.join(found)}."
            for (baseline, view, is_noise), found in better.items()
        ]

    def _by_origin(self) -> dict[str, Any]:
        """Return the regret summaries of layers of real models, and those of random shapes, which are more unusual."""
        is_random = np.array([RANDOM in case.model_families for case in self.cases])
        return {name: self._part(rows) for name, rows in (("models", ~is_random), ("random", is_random)) if rows.any()}

    def _by_device(self) -> dict[str, Any]:
        """Return the regret summaries of each device's problems."""
        names = np.array([device.name for device in self.devices])
        return {name: self._part(names == name) for name in dict.fromkeys(names.tolist())}

    def _part(self, rows: NDArray[np.bool_] | slice) -> dict[str, Any]:
        """Return the count, noise floor and regret summaries of the problems that a mask, (n_problems,), selects."""
        both = ((self.baselines, "baselines"), (self.baselines_sizes_unknown, "baselines_sizes_unknown"))
        return {
            "problems": len(self.full_search[rows]),
            "noise_floor": round(geomean(self.full_search[rows]), 4),
            "regret": self._summaries(self.regret, rows),
            "regret_sizes_unknown": self._summaries(self.regret_sizes_unknown, rows),
            **{key: {name: self._summaries(one, rows) for name, one in curves.items()} for curves, key in both},
        }

    def frame(self) -> pd.DataFrame:
        """Return a frame with the regrets of a problem in each row, sorted by that of the first choice, worst first."""
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

    def _summaries(self, regret: Mapping[int, NDArray[np.float64]], rows: NDArray[np.bool_] | slice) -> dict[str, Any]:
        """Return the summary of the regrets for each k, of the problems that `rows` selects."""
        summaries = {}
        for k, values in regret.items():
            draws = np.atleast_2d(values)[:, rows]
            summaries[str(k)] = summarise(draws.ravel(), np.tile(self.groups[rows], len(draws))).to_json()
        return summaries


@dataclass(frozen=True)
class Better:
    """A baseline with a lower regret than the ranker at one k. Regrets are geometric means; 1.0 = the best config."""

    baseline: str
    view: str  # "sizes known" or "sizes unknown", as in `Evaluation`
    k: int
    baseline_regret: float
    regret: float
    noise_floor: float  # the geometric mean regret of measuring every config

    @property
    def is_within_noise(self) -> bool:
        """Whether the two regrets differ by less than the noise floor."""
        return bool(self.regret < self.baseline_regret * self.noise_floor)

    def to_json(self) -> dict[str, Any]:
        """Return an entry of "better_baselines" of `foretune evaluate --json`."""
        return {
            "baseline": self.baseline,
            "view": self.view,
            "best_of": self.k,
            "baseline_regret": round(self.baseline_regret, 4),
            "regret": round(self.regret, 4),
            "is_within_noise": self.is_within_noise,
        }


def in_percent(share: float) -> str:
    """Return a share from 0 to 1 as text: "all" for 1, otherwise a percentage from 1 to 99."""
    return "all" if share == 1 else f"{max(1, min(99, round(100 * share)))} %"

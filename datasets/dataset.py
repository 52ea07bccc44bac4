"""`Dataset`: what a store holds, in memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .config import KernelConfig
from .contents import LeftOut, contents_table, described, kernel_sources
from .device import DeviceSpec
from .errors import DatasetError
from .family import Family, check_attributes, with_defaults
from .grid import BinarySignature, Grid
from .measurement import TIMED, BinaryFacts, Case, Status, flagged, flagged_names, on_one_clock
from .tables import DRIFT

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: What a time counts for in training that was not taken as `Measurement.time_us` says. It may be off by what a warm L2
#: (18 % on the smallest kernels) or the gaps between launches do to it, and by more than the confirming passes' noise.
OTHERWISE_TIMED = 0.5


@dataclass(frozen=True)
class Dataset:
    """Cases, configs and their measurements. Made by `foretune.datasets.load`.

    `measurements` has the columns of `schema.MEASUREMENTS`; `problem` and `config` are positions in `cases`
    and `configs`. `drift` has the columns of `tables.DRIFT`: how the device did meanwhile. `ignored` names the
    half-written parts that a killed run left behind, and parts with rows that are none; `left_out` says which rows.
    """

    name: str
    schema_version: int
    devices: tuple[DeviceSpec, ...]
    provenance: dict[str, Any]
    cases: tuple[Case, ...]
    configs: tuple[KernelConfig, ...]
    measurements: pd.DataFrame
    drift: pd.DataFrame = field(default_factory=lambda: DRIFT.empty_table().to_pandas())
    ignored: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def __repr__(self) -> str:
        """A line: of a million measurements nobody wants to see each."""
        on = ", ".join(device.name for device in self.devices)
        return f"<Dataset {self.name}: {len(self.measurements):,} measurements of {', '.join(self.families)} on {on}>"

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(sorted({case.problem.family for case in self.cases}))

    def drifted(self) -> dict[Case, float]:
        """The cases during which the device was slower than usual, and how much: their times may be off."""
        worst = flagged(self.drift)
        return {self.cases[problem]: slowdown for problem, slowdown in zip(worst.index, worst, strict=True)}

    def kernel_sources(self, family: str) -> set[str]:
        """The hashes of the kernel's sources with which a family was measured, as far as its runs recorded them."""
        return kernel_sources(self.provenance, family)

    def plans(self, family: str) -> set[str]:
        """What said which configs of a family to try: with an adaptive plan, that was a share of them. Runs that
        recorded no plan are of before there were others than the exhaustive one."""
        runs = self.provenance.get("runs", {}).values()
        return {str(run.get("plan", "exhaustive")) for run in runs if run.get("family", family) == family}

    def rows(self, family: str) -> pd.DataFrame:
        """The measurements of one family. Raises `DatasetError` listing the families that are in it."""
        if family not in self.families:
            raise DatasetError(
                f"{self.name}: no measurements of {family!r}; it has {', '.join(self.families) or 'none'}"
            )
        wanted = np.array([case.problem.family == family for case in self.cases])
        rows: pd.DataFrame = self.measurements.loc[wanted[self.measurements["problem"].to_numpy()]]
        return rows

    def without_runs(self, run_ids: Collection[str]) -> Dataset:
        """This dataset without what these runs measured, and without the problems of which then nothing is left."""
        rows = self.measurements[~self.measurements["run_id"].isin(list(run_ids))]
        left = np.union1d(rows["problem"], self.drift["problem"]).astype(np.int32)
        place = np.zeros(len(self.cases), np.int32)
        place[left] = np.arange(len(left), dtype=np.int32)
        runs = {run: facts for run, facts in self.provenance.get("runs", {}).items() if run not in run_ids}
        return replace(
            self,
            provenance=self.provenance | {"runs": runs},
            cases=tuple(self.cases[problem] for problem in left),
            measurements=rows.assign(problem=place[rows["problem"]]).reset_index(drop=True),
            drift=self.drift.assign(problem=place[self.drift["problem"]]),
        )

    def of_family(self, family: Family) -> Dataset:
        """Return the dataset with the family's configs as they would be named today.

        A config that lacks a knob of `Family.default_knobs`, which the kernel got after the measurement, has its
        default. Nothing else changes, and a dataset without such configs is returned as it is.

        Raises:
            FamilyError: The family declares what cannot be right.
        """
        check_attributes(family)
        if not family.default_knobs or family.name not in self.families:
            return self
        rows = self.rows(family.name)
        configs = list(self.configs)
        number_of = {config: number for number, config in enumerate(configs)}
        today = np.arange(len(configs), dtype=np.int32)  # (n_configs,) the number of each config as it is named today
        for number in rows["config"].unique():
            if (complete := with_defaults(family, configs[number])) != configs[number]:
                if complete not in number_of:
                    number_of[complete] = len(configs)
                    configs.append(complete)
                today[number] = number_of[complete]
        if (today == np.arange(len(today))).all():
            return self
        numbers = self.measurements["config"].to_numpy().copy()
        is_of_family = self.measurements.index.isin(rows.index)
        numbers[is_of_family] = today[numbers[is_of_family]]
        return replace(self, configs=tuple(configs), measurements=self.measurements.assign(config=numbers))

    def grid(self, family: Family | str) -> Grid:
        """One family as dense arrays; given the family itself and not its name, with its configs as `of_family` names
        them. Problems on which nothing ran are left out, and what several runs timed of one
        problem is brought to one clock (see `one_clock`).

        Times that were taken otherwise than `Measurement.time_us` says (a run's "timed" in the provenance: those that
        production logged) fill only the cells that have no other. They are scaled by the median ratio of a problem's
        cells that have both, and count for `OTHERWISE_TIMED` when a ranker learns: their clock is another, but the
        order of configs within a problem is much the same.
        """
        if not isinstance(family, str):
            return self.of_family(family).grid(family.name)
        rows = self.rows(family)
        timed = rows[rows["status"].isin([status.value for status in TIMED])]
        if not (timed["timing_pass"] == 1).any():
            raise DatasetError(f"{self.name}: no config of {family!r} ran, so there is nothing to learn from")
        specs = {spec.name: spec for spec in self.devices}
        runs = self.provenance.get("runs", {})
        otherwise = timed["run_id"].isin([run for run, facts in runs.items() if facts.get("timed", "cold") != "cold"])
        alike = on_one_clock(timed[~otherwise])
        # One row a (problem, device), one column a config; a re-measured cell keeps its last value.
        scan, *confirmed = (_cells(alike[alike["timing_pass"] == timing_pass]) for timing_pass in (1, 2, 3))
        weights = None
        if otherwise.any():
            scan, weights = _filled(scan, _cells(timed[otherwise]))
        first, second = (times.reindex(index=scan.index, columns=scan.columns) for times in confirmed)
        drift = _usual((first + second) / 2 / scan)
        rest = scan.mul(drift, axis=0)
        first, second = first.fillna(rest), second.fillna(rest)
        return Grid(
            family=family,
            cases=tuple(self.cases[problem] for problem, _ in scan.index),
            devices=tuple(specs[device] for _, device in scan.index),
            configs=tuple(self.configs[int(config)] for config in scan.columns),
            first_us=first.to_numpy(dtype=np.float64),
            second_us=second.to_numpy(dtype=np.float64),
            binaries=self._binaries(rows),
            weights=weights,
            measured=_tried(rows, scan),
        )

    def _binaries(self, rows: pd.DataFrame) -> dict[BinarySignature, dict[KernelConfig, BinaryFacts]]:
        """See `Grid.binaries`; of a config whose problems have binaries of their own the median."""
        signatures: dict[BinarySignature, int] = {}
        keys = ((case.problem.dtype, case.problem.flags) for case in self.cases)
        number = [signatures.setdefault(key, len(signatures)) for key in keys]
        facts = rows[["config", *BinaryFacts._fields]].assign(signature=np.array(number)[rows["problem"].to_numpy()])
        facts = facts.dropna().groupby(["signature", "config"], observed=True).median().astype(int)
        found: dict[BinarySignature, dict[KernelConfig, BinaryFacts]] = {}
        names = list(signatures)
        for (signature, config), *values in facts.itertuples():
            found.setdefault(names[signature], {})[self.configs[config]] = BinaryFacts(*values)
        return found

    def counts(self, grid: Grid) -> NDArray[np.int64]:
        """How many measurements each cell of a grid of this dataset has, (n_problems, n_configs): failed ones too, but
        none of a config that was refused unmeasured (`Status.INVALID`)."""
        row_of = {(case, spec.name): row for row, (case, spec) in enumerate(zip(grid.cases, grid.devices, strict=True))}
        column_of = {config: column for column, config in enumerate(grid.configs)}
        columns = np.array([column_of.get(config, -1) for config in self.configs])
        counts = np.zeros((len(grid), len(grid.configs)), np.int64)
        rows = self.rows(grid.family)
        by_row: Any = rows[rows["status"] != Status.INVALID.value].groupby(["problem", "device"], observed=True)
        for (problem, device), of_it in by_row:
            row = row_of.get((self.cases[problem], device))
            if row is not None:
                found = columns[of_it["config"].to_numpy()]
                np.add.at(counts[row], found[found >= 0], 1)
        return counts

    def wrong_results(self, family: str) -> dict[BinarySignature, frozenset[KernelConfig]]:
        """The configs of a family that computed a wrong result, on whatever device, by dtype and flags: what they were
        compared for."""
        rows = self.rows(family)
        wrong: dict[BinarySignature, set[KernelConfig]] = {}
        pairs = rows.loc[rows["status"] == Status.WRONG_RESULT.value, ["problem", "config"]].drop_duplicates()
        for number, config in pairs.itertuples(index=False):
            problem = self.cases[number].problem
            wrong.setdefault((problem.dtype, problem.flags), set()).add(self.configs[config])
        return {signature: frozenset(configs) for signature, configs in wrong.items()}

    def _noise_floor(self, family: str) -> float | None:
        """None where nothing ran."""
        try:
            noise = self.grid(family).noise
        except DatasetError:
            return None
        return round(float(np.exp(np.log(noise).mean())), 4)

    def to_json(self) -> dict[str, Any]:
        """What it is, not the measurements themselves: see `describe`."""
        return self.describe()

    def __rich__(self) -> Any:
        """What `rich.print` and a notebook show: counts of each family on each device."""
        return contents_table([self.describe()])

    def describe(self) -> dict[str, Any]:
        """Counts and origin, as `foretune datasets --json` prints them."""
        return described(
            self.name, self.devices, self.schema_version, self.contents(), self.provenance, self.ignored, self.left_out
        )

    def contents(self) -> dict[str, Any]:
        """What a sealed dataset's manifest says of its rows. `noise_floor` is the geometric mean of `Grid.noise`."""
        families = {}
        for family in self.families:
            rows = self.rows(family)
            families[family] = {
                "problems": int(rows["problem"].nunique()),
                "measurements": len(rows),
                "configs": int(rows["config"].nunique()),
                "plans": sorted(self.plans(family)),
                "noise_floor": self._noise_floor(family),
                "devices": {
                    str(device): {"problems": int(of_it["problem"].nunique()), "measurements": len(of_it)}
                    for device, of_it in rows.groupby("device", observed=True)
                },
                "statuses": {str(status): int(n) for status, n in rows["status"].value_counts().items() if n},
            }
        names = [str(self.cases[number].problem) for number in self.drift["problem"]]
        return {"families": families, "drifted": flagged_names(self.drift.assign(problem=names))}


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Times by (problem, device) and config, the last of each."""
    cells: pd.DataFrame = (
        rows.groupby(["problem", "device", "config"], observed=True)["time_us"].last().unstack("config")
    )
    return cells


def _tried(rows: pd.DataFrame, cells: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which of the cells have a measurement, failed ones included, but not those refused unmeasured."""
    rows = rows[rows["status"] != Status.INVALID.value]
    at = cells.index.get_indexer(pd.MultiIndex.from_frame(rows[["problem", "device"]]))
    column = cells.columns.get_indexer(pd.Index(rows["config"]))
    is_cell = (at >= 0) & (column >= 0)
    tried = np.zeros(cells.shape, np.bool_)
    tried[at[is_cell], column[is_cell]] = True
    return tried


def _filled(scan: pd.DataFrame, others: pd.DataFrame) -> tuple[pd.DataFrame, NDArray[np.float64]]:
    """The cells of a scan with those that were timed otherwise in between, on the scan's scale; and what each counts
    for."""
    index, columns = scan.index.union(others.index), scan.columns.union(others.columns)
    scan, others = (cells.reindex(index=index, columns=columns) for cells in (scan, others))
    scale = _usual(scan / others)
    weights = np.where(scan.isna() & others.notna(), OTHERWISE_TIMED, 1.0)
    return scan.fillna(others.mul(scale, axis=0)), weights


def _usual(ratios: pd.DataFrame) -> pd.Series[float]:
    """The median ratio of each problem; 1 where it has none, as where a run ended before anything was confirmed."""
    known: pd.Series[float] = ratios.dropna(how="all").median(axis=1)
    return known.reindex(ratios.index).fillna(1.0)

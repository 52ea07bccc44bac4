"""`Dataset`: the measurements of a folder, in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .config import KernelConfig
from .console import Table
from .contents import LeftOut, LogLine, contents_table, described, kernel_sources, since
from .device import DeviceSpec
from .errors import DatasetError, FamilyError, shown
from .family import Family, KernelChange, Measurable, roofline_us
from .family_checks import check_attributes, with_defaults
from .files import few
from .grid import BinarySignature, Grid
from .measurement import TIMED, BinaryFacts, Case, Status, flagged, flagged_names, on_one_clock
from .tables import DRIFT

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: The sample weight, in training, of times that were not taken as `Measurement.time_us` says. A warm L2 (18 % on the
#: smallest kernels) or the gaps between launches change them by more than the noise of the confirming passes.
OTHERWISE_TIMED = 0.5


@dataclass(frozen=True)
class Dataset:
    """Measurements of configs on problems, as `foretune.datasets.load` returns them.

    Attributes:
        name: The dataset's name.
        schema_version: The version of the file format that it was read from.
        devices: The devices that it was measured on.
        provenance: Facts about each run, in `provenance["runs"][run_id]`: date, versions, kernel sources and more.
        cases: The problems, each once.
        configs: The configs, each once.
        measurements: A row for each measurement, with the columns of `tables.MEASUREMENTS`. `problem` and `config` are
            indices into `cases` and `configs`.
        drift: Readings of the drift probe, with the columns of `tables.DRIFT`; see `measurement.py`.
        ignored: Names of the part files that are incomplete, damaged, or have rows that could not be read.
        left_out: The rows that could not be read, and why.
        log_lines: For each (family, config) that a log has (see `log_part.py`), the first place that has it.
        given: The name or path that the user passed to `load`, if it differs from `name`; "" otherwise.

    >>> from foretune.datasets import load
    >>> load("h200_cover")
    <Dataset h200_cover: 1 device (NVIDIA H200), 2 families (...), 128 problems, 154,067 rows>
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
    log_lines: Mapping[tuple[str, KernelConfig], LogLine] = field(default_factory=dict)
    given: str = ""

    def __repr__(self) -> str:
        """Return one line with the devices, the families, and the numbers of problems and rows."""
        devices = _counted("device", "devices", [device.name for device in self.devices])
        families = _counted("family", "families", self.families)
        n_problems, n_rows = len(self.cases), len(self.measurements)
        counts = f"{n_problems:,} problem{'s' * (n_problems != 1)}, {n_rows:,} row{'s' * (n_rows != 1)}"
        return f"<Dataset {self.name}: {devices}, {families}, {counts}>"

    def _repr_html_(self) -> str:
        """Return the counts of each family on each device as an HTML table, for notebooks."""
        return self._table()._repr_html_()

    @property
    def label(self) -> str:
        """The dataset's name in messages: the path that the user loaded, or its own name."""
        return self.given or self.name

    @property
    def families(self) -> tuple[str, ...]:
        """The names of the families that it has problems of, sorted."""
        return tuple(sorted({case.problem.family for case in self.cases}))

    def drifted(self) -> dict[Case, float]:
        """Return the cases during which the drift probe (a fixed launch) was slower than usual, each with its slowdown.

        The times of these cases may be wrong.
        """
        worst = flagged(self.drift)
        return {self.cases[problem]: slowdown for problem, slowdown in zip(worst.index, worst, strict=True)}

    def kernel_sources(self, family: str) -> set[str]:
        """Return the recorded hashes of the kernel sources that a family was measured with."""
        return kernel_sources(self.provenance, family)

    def plans(self, family: str) -> set[str]:
        """Return the names of the plans of a family's runs. A plan selects the configs to measure.

        A run without a recorded plan measured all configs, so its plan is "exhaustive".
        """
        runs = self.provenance.get("runs", {}).values()
        return {str(run.get("plan", "exhaustive")) for run in runs if run.get("family", family) == family}

    def rows(self, family: str) -> pd.DataFrame:
        """Return the measurements of one family; raise `DatasetError` that lists the families if it has none."""
        if family not in self.families:
            raise DatasetError(
                f"{self.label} has no measurements of {family!r}; its families: {', '.join(self.families) or 'none'}"
            )
        wanted = np.array([case.problem.family == family for case in self.cases])
        rows: pd.DataFrame = self.measurements.loc[wanted[self.measurements["problem"].to_numpy()]]
        return rows

    def without_runs(self, run_ids: Collection[str]) -> Dataset:
        """Return the dataset without the rows of these runs, and without problems that then have no rows."""
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
            log_lines={of: line for of, line in self.log_lines.items() if line.run_id not in run_ids},
        )

    def of_family(self, family: Family) -> Dataset:
        """Return the dataset for the family's current kernel: with defaults for new knobs, and without `outdated` rows.

        Times are reduced by what changes of the kernel have saved (`KernelChange.saved_us`). A config lacks a knob of
        `Family.default_knobs` if the kernel got the knob after the measurement. Once their outdated rows are removed,
        runs of earlier kernels get the current kernel's source hash, so that they can be merged with newer runs.
        Nothing else changes; a dataset that needs no change is returned itself.

        Raises:
            FamilyError: The family's declarations are wrong.
        """
        complete, runs = self._completed(family), self.provenance.get("runs", {})
        today = {
            run: runs[run] | {"kernel_source": latest}
            for run, (latest, _) in self._changes(family).items()
            if latest != runs[run]["kernel_source"]
        }
        if not today:
            return complete
        rows = complete.measurements.drop(complete.outdated(family).index).reset_index(drop=True)
        provenance = complete.provenance | {"runs": runs | today}
        return replace(complete, provenance=provenance, measurements=complete._reduced(rows, family))

    def outdated(self, family: Family, *, kept: bool = False) -> pd.DataFrame:
        """Return the rows of configs whose kernel has changed since they were measured (`Family.kernel_changes`).

        With `kept`, this includes those whose times still count (`KernelChange.keeps_times`).
        """
        rows = self.rows(family.name)
        knobs = [with_defaults(family, config).to_json().items() for config in self.configs]
        is_outdated = np.zeros(len(rows), np.bool_)
        for run, (_, changes) in self._changes(family).items():
            for changed in changes:
                if changed.knobs is None or (changed.keeps_times and not kept):
                    continue
                numbers = [number for number, its in enumerate(knobs) if changed.knobs.items() <= its]
                is_outdated |= ((rows["run_id"] == run) & rows["config"].isin(numbers)).to_numpy()
        found: pd.DataFrame = rows[is_outdated]
        return found

    def _reduced(self, rows: pd.DataFrame, family: Family) -> pd.DataFrame:
        """Return rows, numbered from 0, with times reduced by what changes of the kernel have saved since.

        No time is reduced by more than half, or to less than the roofline: what a program waits for is hidden where
        other programs keep the memory or the matrix units busy.
        """
        devices, saved, least = {spec.name: spec for spec in self.devices}, np.zeros(len(rows)), np.zeros(len(rows))
        for run, (_, changes) in self._changes(family).items():
            savings = [change.saved_us for change in changes if change.saved_us is not None]
            if not savings:
                continue
            of_run = rows[rows["run_id"] == run]
            numbers, places = np.unique(of_run["config"], return_inverse=True)
            configs = tuple(self.configs[number] for number in numbers)  # the same for all problems: tables are cached
            for (number, device), here in of_run.groupby(["problem", "device"], observed=True).indices.items():
                given, spec = self.cases[number].problem, devices[device]
                rows_here = of_run.index[here]
                least[rows_here] = roofline_us(family, given, spec) if isinstance(family, Measurable) else 0
                for saved_us in savings:
                    found = np.asarray(saved_us(family, given, spec, configs))
                    if found.shape != (len(configs),) or not (np.isfinite(found) & (found >= 0)).all():
                        raise FamilyError(
                            f"saved_us of family {family.name} must return {len(configs)} finite times of at least 0 "
                            f"for {len(configs)} configs of {given} but returned {shown(found)}"
                        )
                    saved[rows_here] += found[places[here]]
        if not saved.any():
            return rows
        times = rows["time_us"].to_numpy()
        least = np.minimum(np.maximum(least, times / 2), times)
        reduced: pd.DataFrame = rows.assign(time_us=np.maximum(times - saved, least).astype(times.dtype))
        return reduced

    def _changes(self, family: Family) -> dict[str, tuple[str, list[KernelChange]]]:
        """Return by run of the family what `since` tells of its kernels."""
        return {
            run: since(family.kernel_changes, facts["kernel_source"])
            for run, facts in self.provenance.get("runs", {}).items()
            if facts.get("family") == family.name and "kernel_source" in facts
        }

    def _completed(self, family: Family) -> Dataset:
        """Return the dataset with default values for knobs that configs of the family lack."""
        check_attributes(family)
        if not family.default_knobs or family.name not in self.families:
            return self
        rows = self.rows(family.name)
        configs = list(self.configs)
        number_of = {config: number for number, config in enumerate(configs)}
        today = np.arange(len(configs), dtype=np.int32)  # (n_configs,) index of each completed config
        log_lines = dict(self.log_lines)
        for number in rows["config"].unique():
            if (complete := with_defaults(family, configs[number])) != configs[number]:
                if complete not in number_of:
                    number_of[complete] = len(configs)
                    configs.append(complete)
                today[number] = number_of[complete]
                if (line := self.log_lines.get((family.name, configs[number]))) is not None:
                    log_lines.setdefault((family.name, complete), line)
        if (today == np.arange(len(today))).all():
            return self
        numbers = self.measurements["config"].to_numpy().copy()
        is_of_family = self.measurements.index.isin(rows.index)
        numbers[is_of_family] = today[numbers[is_of_family]]
        measurements = self.measurements.assign(config=numbers)
        return replace(self, configs=tuple(configs), measurements=measurements, log_lines=log_lines)

    def place_of(self, family: str, config: KernelConfig) -> str:
        """Return where a config of a family was read, for error messages.

        It is the file and the line if a log has the config, else the dataset's name and the runs that measured it.
        """
        if (line := self.log_lines.get((family, config))) is not None:
            return str(line)
        rows = self.rows(family)
        runs = rows.loc[rows["config"] == self.configs.index(config), "run_id"].unique()
        return f"{self.label} (run {few([str(run) for run in runs])})" if len(runs) else self.label

    def grid(self, family: Family | str) -> Grid:
        """Return one family's times as dense arrays.

        Problems without any time are left out. Times of several runs are scaled to be comparable (see
        `measurement.on_one_clock`).

        Times measured in another way than `Measurement.time_us`, such as those logged in production (see "timed" in a
        run's provenance), are used only for cells without another time. They are scaled by the median ratio of the
        problem's cells that have both, and get the weight `OTHERWISE_TIMED`: absolute times differ, but the order of
        the configs of a problem is nearly the same.

        Args:
            family: The family or its name. For a `Family`, configs are completed as `of_family` does.

        Raises:
            DatasetError: There are no measurements of the family, or none of them has a time.

        >>> from foretune.datasets import load
        >>> load("h200_cover").grid("matmul").times_us.shape
        (64, 1133)
        """
        if not isinstance(family, str):
            return self.of_family(family).grid(family.name)
        rows = self.rows(family)
        timed = rows[rows["status"].isin([status.value for status in TIMED])]
        if not (timed["timing_pass"] == 1).any():
            raise DatasetError(f"{self.label}: no measurement of {family!r} has a time")
        specs = {spec.name: spec for spec in self.devices}
        runs = self.provenance.get("runs", {})
        otherwise = timed["run_id"].isin([run for run, facts in runs.items() if facts.get("timed", "cold") != "cold"])
        alike = on_one_clock(timed[~otherwise])
        # One row for each (problem, device), one column for each config; a re-measured cell keeps its last value.
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
        """Return the `BinaryFacts` of these rows by (dtype, flags) and config, each the median of its rows."""
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
        """Return the number of measurements of each cell of a grid of this dataset, (n_problems, n_configs).

        Failed measurements count, refused configs (`Status.INVALID`) do not.
        """
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
        """Return the configs of a family that computed a wrong result on any device, by (dtype, flags)."""
        rows = self.rows(family)
        wrong: dict[BinarySignature, set[KernelConfig]] = {}
        pairs = rows.loc[rows["status"] == Status.WRONG_RESULT.value, ["problem", "config"]].drop_duplicates()
        for number, config in pairs.itertuples(index=False):
            problem = self.cases[number].problem
            wrong.setdefault((problem.dtype, problem.flags), set()).add(self.configs[config])
        return {signature: frozenset(configs) for signature, configs in wrong.items()}

    def _noise_floor(self, family: str) -> float | None:
        """Return the noise floor of a family, the geometric mean of its `Grid.noise`; None if it has no times."""
        try:
            noise = self.grid(family).noise
        except DatasetError:
            return None
        return round(float(np.exp(np.log(noise).mean())), 4)

    def to_json(self) -> dict[str, Any]:
        """Return `describe()`: counts and provenance, but not the measurements themselves."""
        return self.describe()

    def __rich__(self) -> Any:
        """Return the numbers of problems, configs and rows by family and device, as a table for `rich.print`."""
        return self._table()

    def _table(self) -> Table:
        """Return the numbers of problems, configs and rows by family and device, as a table."""
        families = {family: self._counts(family) for family in self.families}
        return contents_table([{"name": self.name, "families": families, "ignored": self.ignored}])

    def describe(self) -> dict[str, Any]:
        """Return counts and provenance as `foretune datasets --json` prints them."""
        return described(
            self.name, self.devices, self.schema_version, self.contents(), self.provenance, self.ignored, self.left_out
        )

    def contents(self) -> dict[str, Any]:
        """Return the counts of each family and the worst drift of each problem, for the manifest of a sealed dataset.

        A family's `noise_floor` is the geometric mean of its `Grid.noise`.
        """
        families = {family: self._counts(family, noise_floor=True) for family in self.families}
        names = [str(self.cases[number].problem) for number in self.drift["problem"]]
        return {"families": families, "drifted": flagged_names(self.drift.assign(problem=names))}

    def _counts(self, family: str, *, noise_floor: bool = False) -> dict[str, Any]:
        """Return counts of one family's problems, configs and rows; its noise floor, which is slow, only on request."""
        rows = self.rows(family)
        return {
            "problems": int(rows["problem"].nunique()),
            "measurements": len(rows),
            "configs": int(rows["config"].nunique()),
            "plans": sorted(self.plans(family)),
            **({"noise_floor": self._noise_floor(family)} if noise_floor else {}),
            "devices": {
                str(device): {"problems": int(of_it["problem"].nunique()), "measurements": len(of_it)}
                for device, of_it in rows.groupby("device", observed=True)
            },
            "statuses": {str(status): int(n) for status, n in rows["status"].value_counts().items() if n},
        }


def _counted(one: str, several: str, names: Sequence[str]) -> str:
    """Return the number of names, the noun `one` or `several`, and the first names: "2 families (a, b)"."""
    noun = one if len(names) == 1 else several
    return f"{len(names)} {noun} ({few(names)})" if names else f"0 {noun}"


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last time of each config (column) on each problem and device (row), as a table of times."""
    cells: pd.DataFrame = (
        rows.groupby(["problem", "device", "config"], observed=True)["time_us"].last().unstack("config")
    )
    return cells


def _tried(rows: pd.DataFrame, cells: pd.DataFrame) -> NDArray[np.bool_]:
    """Return the mask of the entries of `cells` that were measured, failed ones included but not refused (INVALID)."""
    rows = rows[rows["status"] != Status.INVALID.value]
    at = cells.index.get_indexer(pd.MultiIndex.from_frame(rows[["problem", "device"]]))
    column = cells.columns.get_indexer(pd.Index(rows["config"]))
    is_cell = (at >= 0) & (column >= 0)
    tried = np.zeros(cells.shape, np.bool_)
    tried[at[is_cell], column[is_cell]] = True
    return tried


def _filled(scan: pd.DataFrame, others: pd.DataFrame) -> tuple[pd.DataFrame, NDArray[np.float64]]:
    """Fill the gaps of a table of times (`scan`) with times measured in another way, scaled to those of the table.

    Returns:
        The filled table, and the training weight of each entry.
    """
    index, columns = scan.index.union(others.index), scan.columns.union(others.columns)
    scan, others = (cells.reindex(index=index, columns=columns) for cells in (scan, others))
    scale = _usual(scan / others)
    weights = np.where(scan.isna() & others.notna(), OTHERWISE_TIMED, 1.0)
    return scan.fillna(others.mul(scale, axis=0)), weights


def _usual(ratios: pd.DataFrame) -> pd.Series[float]:
    """Return the median of each row of `ratios`; 1 if it has none, e.g. because no config was timed both ways."""
    known: pd.Series[float] = ratios.dropna(how="all").median(axis=1)
    return known.reindex(ratios.index).fillna(1.0)

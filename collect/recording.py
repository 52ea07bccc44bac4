"""`Recording`: the measurements of a dataset, to be replayed by a run instead of new ones on a GPU.

Replayed times stay what they are, measurements of the recorded device: a run stores nothing for a config that has no
recorded result, keeps the device and what the recorded runs agree on in their provenance, and marks itself as a replay
(`replay_of`). A folder has either replayed or measured times, and replayed ones are not merged with others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem, Status
from ..datasets.contents import REPLAY_OF
from ..datasets.measurement import on_one_clock
from .cases import CONFIRMING, SCAN
from .plan import Plan, Step
from .runner import LaunchFailedError, Trial

if TYPE_CHECKING:
    import pandas as pd

    from ..datasets.dataset import Dataset
    from ..datasets.grid import Grid

#: The columns of a measurement that a `Trial` has in addition to its status: counts, and others.
_COUNTS, _OTHERS = ("samples", "registers", "spills", "smem_bytes"), ("time_us", "spread", "error")
#: Facts of a run that a replay has of its own.
_OWN_FACTS = ("plan", "share", REPLAY_OF)
#: How many problems keep their results ready to be looked up.
_CASES_KEPT = 8


@dataclass
class RecordedCase:
    """The recorded results of one problem on one device.

    Attributes:
        scanned: The result of each config in the scan.
        confirmed: The result by config and confirming pass.
    """

    scanned: dict[KernelConfig, Trial] = field(default_factory=dict)
    confirmed: dict[tuple[KernelConfig, int], Trial] = field(default_factory=dict)

    @cached_property
    def drift(self) -> float:
        """The median ratio of confirmed to scanned times; 1.0 if nothing was confirmed.

        A config that leads only among those that a plan tries was not confirmed in the recorded run: its scanned time
        is multiplied by this ratio, as in `Dataset.grid`.
        """
        ratios = sorted(
            trial.time_us / scanned_us
            for (config, _), trial in self.confirmed.items()
            if trial.time_us and config in self.scanned and (scanned_us := self.scanned[config].time_us)
        )
        return ratios[len(ratios) // 2] if ratios else 1.0


class Recording:
    """The measurements of some families in a dataset.

    Measurements from production (FORETUNE_LOG) are left out, because they were timed in another way. If several runs
    measured the same problem, their times are scaled to be comparable, as in `Dataset.grid`.

    Args:
        dataset: The dataset to replay.
        families: The families whose measurements are replayed.

    Raises:
        ForetuneError: The dataset has no measurement of one of the families.

    >>> from foretune.datasets import load
    >>> from foretune.kernels import find_family
    >>> Recording(load("h200_rms_norm_rope"), [find_family("rms_norm_rope_bwd")])
    <Recording of h200_rms_norm_rope: 320 problems on NVIDIA H200>
    """

    def __init__(self, dataset: Dataset, families: Sequence[Measurable]) -> None:
        self.name, self.label = dataset.name, dataset.label
        self._runs: dict[str, Mapping[str, Any]] = dict(dataset.provenance.get("runs", {}))
        production = [run for run, facts in self._runs.items() if facts.get("timed", "cold") != "cold"]
        self._rows: dict[tuple[Problem, str], tuple[pd.DataFrame, Dataset]] = {}  # by problem and device name
        self._run_ids: dict[tuple[str, str], set[str]] = {}  # by family and device name
        cases: dict[Problem, Case] = {}
        for family in families:
            complete = dataset.of_family(family)
            # Of runs of earlier kernels, today's source hash: their times are those of today's kernel.
            facts = complete.provenance.get("runs", {})
            self._runs |= {run: own for run, own in facts.items() if own.get("family") == family.name}
            rows = complete.rows(family.name)
            rows = rows[~rows["run_id"].isin(production)]
            rows = rows.assign(time_us=on_one_clock(rows[rows["time_us"].notna()])["time_us"])
            for (number, device), of_case in rows.groupby(["problem", "device"], observed=True, sort=False):
                case = complete.cases[number]
                cases[case.problem] = case
                self._rows[case.problem, str(device)] = of_case, complete
                self._run_ids.setdefault((family.name, str(device)), set()).update(of_case["run_id"])
        names = {device for _, device in self._rows}
        self.devices: tuple[DeviceSpec, ...] = tuple(spec for spec in dataset.devices if spec.name in names)
        self.cases: tuple[Case, ...] = tuple(cases.values())
        self._case = lru_cache(maxsize=_CASES_KEPT)(self._made)

    def __repr__(self) -> str:
        """Name the dataset, the devices and the number of problems."""
        on = ", ".join(spec.name for spec in self.devices) or "no device"
        return f"<Recording of {self.name}: {len(self.cases)} problems on {on}>"

    def has(self, problem: Problem, device: DeviceSpec) -> bool:
        """Return whether the problem was measured on the device."""
        return (problem, device.name) in self._rows

    def case(self, problem: Problem, device: DeviceSpec) -> RecordedCase:
        """Return the results of one problem on one device.

        Raises:
            ForetuneError: It was not measured there.
        """
        if not self.has(problem, device):
            raise ForetuneError(f"{self.label} has no times of {problem} on {device.name} to replay")
        return self._case(problem, device.name)

    def on(self, device: DeviceSpec) -> RecordedTimes:
        """Return the times on one device, for a `ReplayRunner`."""
        return RecordedTimes(self, device)

    def check_cases(self, cases: Collection[Case]) -> None:
        """Check that each case was measured on at least one device.

        Raises:
            ForetuneError: One was not.
        """
        known = {problem for problem, _ in self._rows}
        if missing := [case.problem for case in cases if case.problem not in known]:
            raise ForetuneError(f"{self.label} has no times of {missing[0]} to replay")

    def provenance(self, family: Measurable, device: DeviceSpec) -> dict[str, Any]:
        """Return the provenance to store with replayed measurements of a family on a device.

        It has the facts that are equal in all recorded runs, such as the kernel's source hash and the Triton version,
        and the names of the dataset and of these runs.
        """
        run_ids = sorted(self._run_ids.get((family.name, device.name), ()))
        runs = [self._runs.get(run_id, {}) for run_id in run_ids]
        first = runs[0] if runs else {}
        common = {
            name: value
            for name, value in first.items()
            if name not in _OWN_FACTS and all(facts.get(name) == value for facts in runs)
        }
        replay_of = {"dataset": self.name, "runs": run_ids}
        return {**common, "family": family.name, "device": device.name, REPLAY_OF: replay_of}

    def is_of(self, replay_of: Mapping[str, Any]) -> bool:
        """Return whether a run's `replay_of` (what it replays) names this dataset and only runs that it has."""
        return replay_of.get("dataset") == self.name and set(replay_of.get("runs", ())) <= self._runs.keys()

    def _made(self, problem: Problem, device: str) -> RecordedCase:
        rows, dataset = self._rows[problem, device]
        case = RecordedCase()
        known = [name for name in (*_COUNTS, *_OTHERS) if name in rows]
        counts = {name: "Int64" for name in _COUNTS if name in rows}  # floats, because some are unknown
        table = rows.astype(counts).astype(object)
        for row in table.where(table.notna(), None).to_dict("records"):
            config, timing_pass = dataset.configs[row["config"]], int(row["timing_pass"])
            trial = Trial(Status(row["status"]), **{name: row[name] for name in known if row[name] is not None})
            if timing_pass == SCAN:
                case.scanned[config] = trial
            else:
                case.confirmed[config, timing_pass] = trial
        return case


class RecordedTimes:
    """The times of a `Recording` on one device, which a `ReplayRunner` looks up (see `runner.Times`)."""

    def __init__(self, recording: Recording, device: DeviceSpec) -> None:
        self._recording, self._device = recording, device
        self._case = RecordedCase()

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Look up the problem that the following calls are about; raise `ForetuneError` if it was not measured."""
        self._case = self._recording.case(problem, self._device)

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Return the recorded result of a config in the scan, even if it is much slower than `best_us` microseconds.

        Raises:
            ForetuneError: There is none.
        """
        if config not in self._case.scanned:
            raise ForetuneError(f"{self._recording.label} has no time of {config} to replay")
        return self._case.scanned[config]

    def confirm(self, config: KernelConfig, number: int) -> list[float]:
        """Return the recorded time of a config, in microseconds, in the confirming pass that round `number` is part of.

        Raises:
            LaunchFailedError: The config failed in that pass.
        """
        recorded = self._case.confirmed.get((config, CONFIRMING[number % len(CONFIRMING)]))
        if recorded is not None and recorded.time_us is not None:
            return [recorded.time_us]
        scanned_us = self._case.scanned[config].time_us
        if recorded is not None or scanned_us is None:
            raise LaunchFailedError((recorded and recorded.error) or "it failed in the recorded run")
        return [scanned_us * self._case.drift]


class RecordedPlan:
    """A plan that wraps another one, and leaves out all configs and problems without a recorded result."""

    def __init__(self, plan: Plan, recording: Recording, device: DeviceSpec) -> None:
        self._plan, self._recording, self._device = plan, recording, device
        self.learns = plan.learns

    def next(self, todo: Sequence[Case], measured: Grid | None) -> list[Step]:
        """Return the wrapped plan's next steps, only with configs that have a recorded result.

        `Plan.next` describes the arguments. A case without any recorded result gets a step without configs.
        """
        known = [case for case in todo if self._recording.has(case.problem, self._device)]
        unknown = [case for case in todo if not self._recording.has(case.problem, self._device)]
        steps = self._plan.next(known, measured) if known else []
        return [*(self._kept(step) for step in steps), *(Step(case, tuple) for case in unknown)]

    def _kept(self, step: Step) -> Step:
        def choose() -> tuple[KernelConfig, ...]:
            scanned = self._recording.case(step.case.problem, self._device).scanned
            return tuple(config for config in step.configs if config in scanned)

        return Step(step.case, choose)

"""The cases of a run: choosing and checking them, and the measurements of each so far (`CaseState`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import (
    Case,
    ForetuneError,
    KernelConfig,
    Measurable,
    Problem,
    Status,
    check_attributes,
    check_problem_of,
)
from ..datasets.contents import REPLAY_OF, other_sources
from ..datasets.errors import abridged, check_between, shown
from ..datasets.store import MANIFEST, read
from .row_writer import triton_version

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset
    from .recording import Recording

#: The longest budget in seconds: thirty years.
_LONGEST_BUDGET = 1e9


def cases_like(dataset: Dataset, family: str, *, seed: int = 0) -> tuple[Case, ...]:
    """Return the cases of one family in a dataset, shuffled, for example to measure the same ones on another GPU.

    Args:
        dataset: The dataset.
        family: The family's name.
        seed: The random seed of the order.

    >>> from foretune.datasets import load
    >>> dataset = load("h200")
    >>> {case.problem.family for case in cases_like(dataset, dataset.families[0])} == {dataset.families[0]}
    True
    """
    found = [case for case in dataset.cases if case.problem.family == family]
    return tuple(found[i] for i in np.random.default_rng(seed).permutation(len(found)))


def draw_cases(family: Measurable, **options: Any) -> tuple[Case, ...]:
    """Return the cases (problems to measure) that `family.cases` returns for the options, checked.

    Args:
        family: The family.
        options: Arguments of `Measurable.cases`. None stands for the family's default.

    Raises:
        ForetuneError: The family's `cases` fails, or returns something else. The message names the family.
    """
    return tuple(family.cases(**{name: value for name, value in options.items() if value is not None}))


def first_cases(
    family: Measurable,
    cases: Iterable[Case],
    limit: int | None = None,
    *,
    max_tflop: float | None = None,
    dtypes: Collection[str] = (),
) -> tuple[Case, ...]:
    """Return the first cases that satisfy the given limits, each problem only once.

    Args:
        family: The family of the cases.
        cases: The cases.
        limit: How many to return at most; all if None.
        max_tflop: Leave out problems of more than this many TFLOP.
        dtypes: Leave out problems of other dtypes; none if empty.

    Raises:
        ForetuneError: The family has none of the dtypes, or its `flops` fails.
    """
    if dtypes and not set(dtypes) & set(family.dtypes):
        wrong = abridged(", ".join(dtypes), 60)
        raise ForetuneError(f"dtype must be one of {', '.join(family.dtypes)} for {family.name} but is {wrong}")
    once = {case.problem: case for case in cases if not dtypes or case.problem.dtype in dtypes}

    def small() -> Iterator[Case]:
        for case in once.values():
            flops = family.flops(case.problem)
            if max_tflop is None or flops <= 1e12 * max_tflop:
                yield case

    return tuple(islice(small(), limit))


def check_request(families: Mapping[str, Measurable], cases: Collection[Case], budget_s: float | None = None) -> None:
    """Check the arguments of a run.

    Args:
        families: The families by name.
        cases: The cases.
        budget_s: The budget in seconds; None without a budget.

    Raises:
        ForetuneError: There is no family, one declares something wrong, a case is of another family, or the budget is
            no duration.
    """
    if not families:
        raise ForetuneError("there must be at least one kernel family to collect")
    for family in families.values():
        check_attributes(family)
    if budget_s is not None:
        check_between("budget_s", budget_s, 0, _LONGEST_BUDGET)
    if not isinstance(cases, Collection) or isinstance(cases, (str, bytes)):
        raise ForetuneError(f"cases must be a list of Cases but is {shown(cases)}")
    for case in cases:
        if not isinstance(case, Case):
            raise ForetuneError(f"each of cases must be a Case but one is {shown(case)}")
        if case.problem.family not in families:
            raise ForetuneError(
                f"each case must be of one of the families {', '.join(families)} but one is of {case.problem.family}: "
                f"{case}"
            )
        check_problem_of(families[case.problem.family], case.problem)


#: The numbers of the timing passes.
SCAN, CONFIRMING = 1, (2, 3)
#: Configs whose time is at most this many times the scan's best are confirmed, with these limits on how many they are.
LEADING_SLOWDOWN = 1.15
LEADING_LEAST, LEADING_MOST = 20, 64


@dataclass
class CaseState:
    """The measurements so far of one case's configs on one device.

    Attributes:
        scanned_us: The time of each scanned config in microseconds; None if it failed.
        best_us: The best time in the scan; inf if there is none.
        confirmed: The configs that were timed in a confirming pass.
        unconfirmable: The configs that ran in the scan and failed in a confirming pass.
    """

    scanned_us: dict[KernelConfig, float | None] = field(default_factory=dict)
    best_us: float = float("inf")
    confirmed: set[KernelConfig] = field(default_factory=set)
    unconfirmable: set[KernelConfig] = field(default_factory=set)

    def add(self, config: KernelConfig, timing_pass: int, time_us: float | None) -> None:
        """Add a config's time in pass number `timing_pass`, in microseconds, or None if the config failed."""
        if timing_pass == SCAN:
            # Rounded as the store rounds it, or a resumed run would see other configs leading.
            self.scanned_us[config] = time_us = None if time_us is None else float(np.float32(time_us))
            self.best_us = min(self.best_us, time_us or self.best_us)
        elif time_us is None:
            self.unconfirmable.add(config)
        else:
            self.confirmed.add(config)

    def leading(self) -> list[KernelConfig]:
        """Return the fastest scanned configs, to be timed again, fastest first; the order of the scan has no effect."""
        times = {config: time_us for config, time_us in self.scanned_us.items() if time_us is not None}
        near = sum(time_us <= LEADING_SLOWDOWN * self.best_us for time_us in times.values())
        ranked = sorted(times, key=lambda config: (times[config], str(config)))
        return ranked[: min(max(near, LEADING_LEAST), LEADING_MOST)]

    def unconfirmed(self) -> list[KernelConfig]:
        """Return the leading configs that have no result of a confirming pass yet.

        A case that an adaptive run has confirmed may have new leading configs once more configs are scanned, so only
        some of the leading ones may be left.
        """
        return [c for c in self.leading() if c not in self.confirmed and c not in self.unconfirmable]


@dataclass(frozen=True)
class Earlier:
    """The results of earlier runs in a dataset.

    Attributes:
        states: The state of each measured case, by device name and problem.
        uncompilable: What the installed Triton could not compile: device name, problem, config and error.
    """

    states: dict[tuple[str, Problem], CaseState] = field(default_factory=dict)
    uncompilable: tuple[tuple[str, Problem, KernelConfig, str], ...] = ()


def earlier(out: Path | str, families: Mapping[str, Measurable], recording: Recording | None = None) -> Earlier:
    """Read the results of earlier runs from the dataset in `out`; they are empty if there is no dataset.

    Args:
        out: The dataset's folder.
        families: The families of the run that starts, by name.
        recording: What the run replays; None if it measures.

    Raises:
        ForetuneError: The kernel of a family has changed since, so that old and new times cannot be compared; or the
            dataset has replayed times and this run measures, or the other way round.
    """
    if not (Path(out) / MANIFEST).exists():
        return Earlier()
    dataset = read(out)
    _check_replay(dataset, recording)
    if recording is None:
        _check_sources(dataset, families)
    states: dict[tuple[str, Problem], CaseState] = {}
    by_case: Any = dataset.measurements.groupby(["device", "problem"], observed=True, sort=False)
    for (device, problem), rows in by_case[["config", "timing_pass", "time_us"]]:
        entry = states.setdefault((device, dataset.cases[problem].problem), CaseState())
        for config, timing_pass, time_us in zip(*(rows[name].tolist() for name in rows), strict=True):
            entry.add(dataset.configs[config], timing_pass, None if math.isnan(time_us) else time_us)
    return Earlier(states, () if recording else _uncompilable(dataset))


def _check_replay(dataset: Dataset, recording: Recording | None) -> None:
    """Check that measured and replayed times are not mixed in a dataset, nor replays of different datasets.

    `recording` is what the run replays; None if it measures.

    Raises:
        ForetuneError: It would mix them.
    """
    for facts in dataset.provenance.get("runs", {}).values():
        replay_of = facts.get(REPLAY_OF)
        if recording is None and replay_of:
            raise ForetuneError(
                f"{dataset.label} has times that were replayed from {replay_of.get('dataset')}: measure into another "
                "folder"
            )
        if recording is not None and not (replay_of and recording.is_of(replay_of)):
            raise ForetuneError(
                f"{dataset.label} has times that were not replayed from {recording.label}: replay into another folder"
            )


def _check_sources(dataset: Dataset, families: Mapping[str, Measurable]) -> None:
    """Raise `ForetuneError` if the dataset was measured with another version of a family's kernel."""
    for family in families.values():
        sources = dataset.kernel_sources(family.name)
        if other_sources(sources, family.source_hash()):
            raise ForetuneError(
                f"{dataset.label} was measured with another version of {family.name}'s kernel (source hash "
                f"{', '.join(sorted(sources))}; now {family.source_hash()}): collect into another folder"
            )


def _uncompilable(dataset: Dataset) -> tuple[tuple[str, Problem, KernelConfig, str], ...]:
    """Return (device name, problem, config, error) of each config that the installed Triton failed to compile earlier.

    Failures of other Triton versions are left out, because this one may compile the config.
    """
    same = [run for run, facts in dataset.provenance["runs"].items() if facts.get("triton") == triton_version()]
    rows = dataset.measurements
    rows = rows[(rows["status"] == Status.COMPILE_FAILED.value) & rows["run_id"].isin(same)]
    return tuple(
        (device, dataset.cases[problem].problem, dataset.configs[config], error or "")
        for device, problem, config, error in rows[["device", "problem", "config", "error"]].itertuples(index=False)
    )

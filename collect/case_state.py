"""`CaseState`: the measurements of one case so far, from this run and earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import ForetuneError, KernelConfig, Measurable, Problem, Status
from ..datasets.contents import other_sources
from ..datasets.store import MANIFEST, read
from .row_writer import triton_version

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset

SCAN, CONFIRMING = 1, (2, 3)
#: Configs within this of the scan's best are confirmed, at least and at most so many.
LEADING_SLOWDOWN = 1.15
LEADING_LEAST, LEADING_MOST = 20, 64


@dataclass
class CaseState:
    """The measurements so far of one case's configs on one device."""

    scanned_us: dict[KernelConfig, float | None] = field(default_factory=dict)  # None where it failed
    best_us: float = float("inf")  # of the scan
    confirmed: set[KernelConfig] = field(default_factory=set)
    unconfirmable: set[KernelConfig] = field(default_factory=set)  # ran in the scan, failed afterwards

    def add(self, config: KernelConfig, timing_pass: int, time_us: float | None) -> None:
        if timing_pass == SCAN:
            # As the store will give it back, or a resumed run would see other configs leading.
            self.scanned_us[config] = time_us = None if time_us is None else float(np.float32(time_us))
            self.best_us = min(self.best_us, time_us or self.best_us)
        elif time_us is None:
            self.unconfirmable.add(config)
        else:
            self.confirmed.add(config)

    def leading(self) -> list[KernelConfig]:
        """The configs to confirm, fastest first. Depends on the times alone, not on the order they came in."""
        times = {config: time_us for config, time_us in self.scanned_us.items() if time_us is not None}
        near = sum(time_us <= LEADING_SLOWDOWN * self.best_us for time_us in times.values())
        ranked = sorted(times, key=lambda config: (times[config], str(config)))
        return ranked[: min(max(near, LEADING_LEAST), LEADING_MOST)]

    def unconfirmed(self) -> list[KernelConfig]:
        """What is left to confirm: all, or what leads since more configs are known than an adaptive run tried."""
        return [c for c in self.leading() if c not in self.confirmed and c not in self.unconfirmable]


@dataclass(frozen=True)
class Earlier:
    """What earlier runs left in a dataset."""

    states: dict[tuple[str, Problem], CaseState] = field(default_factory=dict)  # by device name and problem
    #: What the Triton that is here could not compile: device name, problem, config and error.
    uncompilable: tuple[tuple[str, Problem, KernelConfig, str], ...] = ()


def earlier(out: Path | str, families: Mapping[str, Measurable]) -> Earlier:
    """What the dataset in `out` holds already; nothing where there is none. Raises `ForetuneError` where a kernel
    of these families was another one then: its times say nothing of today's."""
    if not (Path(out) / MANIFEST).exists():
        return Earlier()
    dataset = read(out)
    _check_sources(dataset, families)
    states: dict[tuple[str, Problem], CaseState] = {}
    by_case: Any = dataset.measurements.groupby(["device", "problem"], observed=True, sort=False)
    for (device, problem), rows in by_case[["config", "timing_pass", "time_us"]]:
        entry = states.setdefault((device, dataset.cases[problem].problem), CaseState())
        for config, timing_pass, time_us in zip(*(rows[name].tolist() for name in rows), strict=True):
            entry.add(dataset.configs[config], timing_pass, None if math.isnan(time_us) else time_us)
    return Earlier(states, _uncompilable(dataset))


def _check_sources(dataset: Dataset, families: Mapping[str, Measurable]) -> None:
    for family in families.values():
        sources = dataset.kernel_sources(family.name)
        if other_sources(sources, family.source_hash()):
            raise ForetuneError(
                f"{dataset.name} was measured with other sources of {family.name} ({', '.join(sorted(sources))}; they "
                f"are {family.source_hash()} now): collect into another folder"
            )


def _uncompilable(dataset: Dataset) -> tuple[tuple[str, Problem, KernelConfig, str], ...]:
    """Another Triton may compile what the one of an earlier run could not."""
    same = [run for run, facts in dataset.provenance["runs"].items() if facts.get("triton") == triton_version()]
    rows = dataset.measurements
    rows = rows[(rows["status"] == Status.COMPILE_FAILED.value) & rows["run_id"].isin(same)]
    return tuple(
        (device, dataset.cases[problem].problem, dataset.configs[config], error or "")
        for device, problem, config, error in rows[["device", "problem", "config", "error"]].itertuples(index=False)
    )

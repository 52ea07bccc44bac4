"""`merge_datasets`: what several runs, machines or people measured, as one dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from .contents import replayed_from, same_source
from .dataset import Dataset
from .device import DeviceSpec
from .errors import DatasetError, warn
from .log_part import LOGGED
from .manifest import SCHEMA_VERSION
from .measurement import Case
from .problem import Problem


def merge_datasets(datasets: Sequence[Dataset], *, name: str, allow_other_sources: bool = False) -> Dataset:
    """One dataset with the measurements of all, in memory: `store.seal_dataset` writes it to the disk.

    A problem that several have is one case, of all their sources, and exact repeats of a row are dropped: merged with
    itself, a dataset is itself. Of a cell that was measured differently all rows stay, in the order of their runs' ids,
    which begin with the date: `Dataset.grid` takes the last, so the latest run wins whatever the order of the datasets,
    and brings a problem's runs to one clock.

    Of a family that was collected, what a log of production (FORETUNE_LOG) has of other sources of its kernel, as
    somebody's own kernel with the family's knobs, is left out with a `ForetuneWarning`: what is fast may differ.

    Raises `DatasetError` for two specs of one device name, a run id that stands for two runs, and for datasets of which
    a family was collected with different sources of its kernel. With `allow_other_sources` both are merged.

    >>> from foretune.datasets import load
    >>> merge_datasets([load("h200"), load("my-h100")], name="both").name  # doctest: +SKIP
    'both'
    """
    if not datasets:
        raise DatasetError(f"{name}: there must be at least one dataset to merge but there is none")
    _check_no_replays(datasets)
    if not allow_other_sources:
        datasets = _without_other_logs(datasets)
        _check_sources(datasets)
    devices = _devices(datasets)
    runs = _runs(datasets)
    cases, configs = _cases(datasets), tuple(dict.fromkeys(config for one in datasets for config in one.configs))
    case_at = {case.problem: place for place, case in enumerate(cases)}
    config_at = {config: place for place, config in enumerate(configs)}
    rows, drift = [], []
    for one in datasets:
        problems = np.array([case_at[case.problem] for case in one.cases], np.int32)
        columns = np.array([config_at[config] for config in one.configs], np.int32)
        measured, readings = one.measurements, one.drift
        rows.append(measured.assign(problem=problems[measured["problem"]], config=columns[measured["config"]]))
        drift.append(readings.assign(problem=problems[readings["problem"]]))
    return Dataset(
        name=name,
        schema_version=SCHEMA_VERSION,
        devices=devices,
        provenance={key: value for one in reversed(datasets) for key, value in one.provenance.items()}
        | ({"runs": runs} if runs else {}),
        cases=cases,
        configs=configs,
        measurements=_together(rows).sort_values("run_id", kind="stable", ignore_index=True),
        drift=_together(drift),
        ignored=tuple(dict.fromkeys(part for one in datasets for part in one.ignored)),
        left_out=tuple(dict.fromkeys(part for one in datasets for part in one.left_out)),
        log_lines={of: line for one in reversed(datasets) for of, line in one.log_lines.items()},
    )


def _check_no_replays(datasets: Sequence[Dataset]) -> None:
    """Raises `DatasetError` where replayed times would be merged with others: they would count twice."""
    for one in datasets if len(datasets) > 1 else ():
        if names := replayed_from(one.provenance):
            raise DatasetError(f"{one.name} has times that were replayed from {names[0]}: merge {names[0]} instead")


def _together(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    # Texts stay categories, in alphabetical order, only if all frames have the same ones.
    for name in frames[0].columns[frames[0].dtypes == "category"]:
        texts = sorted({text for frame in frames for text in frame[name].astype("category").cat.categories})
        frames = [frame.assign(**{name: frame[name].astype(pd.CategoricalDtype(texts))}) for frame in frames]
    joined: pd.DataFrame = pd.concat(list(frames), ignore_index=True)
    # To look for repeats takes longer than all else, and only what several have of one run can be one.
    runs = Counter(run for frame in frames for run in frame["run_id"].unique())
    return joined.drop_duplicates(ignore_index=True) if max(runs.values(), default=0) > 1 else joined


def _cases(datasets: Sequence[Dataset]) -> tuple[Case, ...]:
    merged: dict[Problem, Case] = {}
    for case in (case for one in datasets for case in one.cases):
        known = merged.setdefault(case.problem, case)
        sources = tuple(dict.fromkeys((*known.sources, *case.sources)))
        merged[case.problem] = replace(known, sources=sources, scenario=known.scenario or case.scenario)
    return tuple(merged.values())


def _devices(datasets: Sequence[Dataset]) -> tuple[DeviceSpec, ...]:
    found: dict[str, tuple[DeviceSpec, str]] = {}
    for one in datasets:
        for spec in one.devices:
            known, where = found.setdefault(spec.name, (spec, one.name))
            if known != spec:
                mine, theirs = known.to_json(), spec.to_json()
                fields = [key for key in mine | theirs if mine.get(key) != theirs.get(key)]
                raise DatasetError(
                    f"{spec.name} is another device in {one.name} than in {where} (differing: "
                    + ", ".join(f"{key} {theirs.get(key)} and {mine.get(key)}" for key in fields)
                    + "): give one of them another name"
                )
    return tuple(spec for spec, _ in found.values())


def _runs(datasets: Sequence[Dataset]) -> dict[str, Any]:
    found: dict[str, tuple[Any, str]] = {}
    for one in datasets:
        for run, facts in one.provenance.get("runs", {}).items():
            known, where = found.setdefault(run, (facts, one.name))
            if known != facts:
                raise DatasetError(f"run {run} of {one.name} is another than that of {where}: rename one of them")
    return {run: facts for run, (facts, _) in found.items()}


def _without_other_logs(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The datasets without what was logged of other sources of a kernel than those that its family was collected
    with."""
    collected: dict[str, set[str]] = {}
    for facts in (facts for one in datasets for facts in one.provenance.get("runs", {}).values()):
        if facts.get("plan") != LOGGED and "kernel_source" in facts:
            collected.setdefault(facts.get("family", ""), set()).add(facts["kernel_source"])
    kept = []
    for one in datasets:
        others = {
            run: f"{facts['family']} ({facts['kernel_source']})"
            for run, facts in one.provenance.get("runs", {}).items()
            if facts.get("plan") == LOGGED and facts.get("family") in collected and "kernel_source" in facts
            if not any(same_source(facts["kernel_source"], source) for source in collected[facts["family"]])
        }
        kept.append(one.without_runs(others) if others else one)
        if others:
            warn(
                f"{one.name}: {len(one.measurements) - len(kept[-1].measurements)} logged times are left out, of other "
                f"kernels than were collected: {', '.join(sorted(set(others.values())))}. The log alone can be learned "
                "from"
            )
    return kept


def _all_in(sources: set[str], others: set[str]) -> bool:
    return all(any(same_source(one, other) for other in others) for one in sources)


def _check_sources(datasets: Sequence[Dataset]) -> None:
    for one, other in combinations(datasets, 2):
        for family in sorted({*one.families} & {*other.families}):
            mine, theirs = one.kernel_sources(family), other.kernel_sources(family)
            if mine and theirs and not (_all_in(mine, theirs) and _all_in(theirs, mine)):
                raise DatasetError(
                    f"{family} was measured with other sources of its kernel in {one.name} ({', '.join(sorted(mine))}) "
                    f"than in {other.name} ({', '.join(sorted(theirs))}): their times do not compare. Merge them only "
                    "where you know that they do (allow_other_sources)"
                )

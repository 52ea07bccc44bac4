"""`merge_datasets`: one dataset from several, e.g. of different machines or people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from .contents import replayed_from, same_source, since
from .dataset import Dataset
from .device import DeviceSpec
from .errors import DatasetError, warn
from .family import Family, KernelChange
from .log_part import LOGGED
from .manifest import SCHEMA_VERSION
from .measurement import Case
from .problem import Problem

#: The declared changes of families' kernels, by family.
_Changes: TypeAlias = Mapping[str, Sequence[KernelChange]]


def merge_datasets(
    datasets: Sequence[Dataset], *, name: str, allow_other_sources: bool = False, families: Iterable[Family] = ()
) -> Dataset:
    """Merge datasets in memory; `store.seal_dataset` writes the result to the disk.

    A problem that several datasets have becomes one case with all of its sources. Exact repeats of a row are dropped,
    so a dataset merged with itself does not change. If a cell was measured several times, all rows stay, in the order
    of their run ids, which start with the date. `Dataset.grid` uses the last row, so the latest run wins whatever the
    order of the datasets is, and makes times of different runs comparable.

    Logged rows (FORETUNE_LOG) of a family that was also collected are left out, with a `ForetuneWarning`, if their
    kernel has other sources than the collected one, e.g. because it is a user's kernel with the family's knobs.

    Args:
        datasets: The datasets, at least one.
        name: The name of the result.
        allow_other_sources: Merge even if a family's kernel sources differ.
        families: Families whose declared changes (`kernel_changes`) do not count as differences. All rows stay as they
            were measured; `Dataset.of_family` makes them comparable.

    Raises:
        DatasetError: Two devices have one name, two runs have one id, or a family was collected with different kernel
            sources.

    >>> from foretune.datasets import load
    >>> merge_datasets([load("h200"), load("my-h100")], name="both").name  # doctest: +SKIP
    'both'
    """
    if not datasets:
        raise DatasetError(f"{name}: merging needs at least one dataset but got none")
    _check_no_replays(datasets)
    if not allow_other_sources:
        changes = {family.name: family.kernel_changes for family in families}
        datasets = _without_other_logs(datasets, changes)
        _check_sources(datasets, changes)
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
        measurements=_concatenated(rows).sort_values("run_id", kind="stable", ignore_index=True),
        drift=_concatenated(drift),
        ignored=tuple(dict.fromkeys(part for one in datasets for part in one.ignored)),
        left_out=tuple(dict.fromkeys(part for one in datasets for part in one.left_out)),
        log_lines={of: line for one in reversed(datasets) for of, line in one.log_lines.items()},
    )


def _check_no_replays(datasets: Sequence[Dataset]) -> None:
    """Raise `DatasetError` if one of several datasets has replayed times: copies of others, which would count twice."""
    for one in datasets if len(datasets) > 1 else ():
        if recorded := replayed_from(one.provenance):
            is_there = {*recorded} <= {other.name for other in datasets}
            remedy = f"leave {one.label} out" if is_there else f"replace {one.label} by the data that were replayed"
            raise DatasetError(
                f"{one.label} was collected with --replay: its times are copies of other data (named "
                f"{' and '.join(recorded)} in their manifest), and must not count twice. Use it alone, or {remedy}"
            )


def _concatenated(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of several frames, without exact repeats."""
    # pandas keeps texts as categories only if all frames have the same ones.
    for name in frames[0].columns[frames[0].dtypes == "category"]:
        texts = sorted({text for frame in frames for text in frame[name].astype("category").cat.categories})
        frames = [frame.assign(**{name: frame[name].astype(pd.CategoricalDtype(texts))}) for frame in frames]
    joined: pd.DataFrame = pd.concat(list(frames), ignore_index=True)
    # Only rows of a run that several frames have can be repeats, and looking for these takes longest.
    runs = Counter(run for frame in frames for run in frame["run_id"].unique())
    return joined.drop_duplicates(ignore_index=True) if max(runs.values(), default=0) > 1 else joined


def _cases(datasets: Sequence[Dataset]) -> tuple[Case, ...]:
    """Return one case for each problem, with the sources of all datasets."""
    merged: dict[Problem, Case] = {}
    for case in (case for one in datasets for case in one.cases):
        known = merged.setdefault(case.problem, case)
        sources = tuple(dict.fromkeys((*known.sources, *case.sources)))
        merged[case.problem] = replace(known, sources=sources, scenario=known.scenario or case.scenario)
    return tuple(merged.values())


def _devices(datasets: Sequence[Dataset]) -> tuple[DeviceSpec, ...]:
    """Return the devices of all datasets; raise `DatasetError` if one name stands for two specs."""
    found: dict[str, tuple[DeviceSpec, str]] = {}
    for one in datasets:
        for spec in one.devices:
            known, where = found.setdefault(spec.name, (spec, one.label))
            if known != spec:
                mine, theirs = known.to_json(), spec.to_json()
                fields = [key for key in mine | theirs if mine.get(key) != theirs.get(key)]
                raise DatasetError(
                    f"{spec.name} has different specs in {one.label} and in {where} (differing: "
                    + ", ".join(f"{key} {theirs.get(key)} and {mine.get(key)}" for key in fields)
                    + "): give one of them another name"
                )
    return tuple(spec for spec, _ in found.values())


def _runs(datasets: Sequence[Dataset]) -> dict[str, Any]:
    """Return the facts of all runs by id; raise `DatasetError` if one id stands for two runs."""
    found: dict[str, tuple[Any, str]] = {}
    for one in datasets:
        for run, facts in one.provenance.get("runs", {}).items():
            known, where = found.setdefault(run, (facts, one.label))
            if known != facts:
                raise DatasetError(f"{one.label} and {where} have different runs with the id {run}: rename one of them")
    return {run: facts for run, (facts, _) in found.items()}


def _latest(changes: _Changes, family: str, source: str) -> str:
    """Return the hash of a family's kernel source after all declared changes since `source`."""
    return since(changes.get(family, ()), source)[0]


def _without_other_logs(datasets: Sequence[Dataset], changes: _Changes) -> list[Dataset]:
    """Return the datasets without logged rows whose kernel sources differ from those that were collected."""
    collected: dict[str, set[str]] = {}
    for facts in (facts for one in datasets for facts in one.provenance.get("runs", {}).values()):
        if facts.get("plan") != LOGGED and "kernel_source" in facts:
            name = facts.get("family", "")
            collected.setdefault(name, set()).add(_latest(changes, name, facts["kernel_source"]))
    kept = []
    for one in datasets:
        others = {
            run: f"{facts['family']} ({facts['kernel_source']})"
            for run, facts in one.provenance.get("runs", {}).items()
            if facts.get("plan") == LOGGED and facts.get("family") in collected and "kernel_source" in facts
            if not any(
                same_source(_latest(changes, facts["family"], facts["kernel_source"]), source)
                for source in collected[facts["family"]]
            )
        }
        kept.append(one.without_runs(others) if others else one)
        if others:
            warn(
                f"{one.label}: {len(one.measurements) - len(kept[-1].measurements)} logged times are left out, because "
                f"their kernels differ from those collected: {', '.join(sorted(set(others.values())))}. To learn from "
                "them, use the log alone"
            )
    return kept


def _all_in(sources: set[str], others: set[str]) -> bool:
    """Return whether each hash in `sources` can belong to the same kernel source as one in `others` (`same_source`)."""
    return all(any(same_source(one, other) for other in others) for one in sources)


def _check_sources(datasets: Sequence[Dataset], changes: _Changes) -> None:
    """Raise `DatasetError` if a family was measured with different kernel sources in two datasets."""
    for one, other in combinations(datasets, 2):
        for family in sorted({*one.families} & {*other.families}):
            mine, theirs = (
                {_latest(changes, family, source) for source in each.kernel_sources(family)} for each in (one, other)
            )
            if mine and theirs and not (_all_in(mine, theirs) and _all_in(theirs, mine)):
                raise DatasetError(
                    f"{family} was measured with different kernel sources in {one.label} ({', '.join(sorted(mine))}) "
                    f"and in {other.label} ({', '.join(sorted(theirs))}), so their times may not be comparable. If you "
                    "know that they are, merge with allow_other_sources"
                )

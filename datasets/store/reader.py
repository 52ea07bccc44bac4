"""Reading a dataset from the disk: its sealed tables, and the parts of runs that went on from there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from ..config import KernelConfig
from ..contents import LeftOut, summary_of_left_out
from ..dataset import Dataset
from ..device import DeviceSpec
from ..errors import DatasetError, ForetuneError, abridged, warn
from ..files import open_regular, why_irregular
from ..log_part import LOG_SUFFIX, LogPart, read_log_part
from ..manifest import MANIFEST, read_manifest
from ..measurement import Case
from ..problem import Problem
from ..tables import (
    CONFIGS,
    DRIFT,
    DRIFT_PART,
    MEASUREMENTS,
    PART,
    PROBLEMS,
    UnreadableError,
    as_read,
    check_drift,
    check_rows,
    coded,
    contradicted,
    joined,
    read_table,
    upgraded_problem,
)
from .writer import part_table

#: A part's rows without the columns of their case.
_ROWS = pa.schema([field for field in PART if field.name not in ("sources", "scenario")])
_Named = TypeVar("_Named", bound=Hashable)


def read(directory: Path | str) -> Dataset:
    """The dataset in a directory. Raises `DatasetError` naming the file that is wrong, and how."""
    directory = Path(directory)
    sealed = read_manifest(directory)["sealed"]
    parts, torn, unreadable = _read_parts(directory / "parts", PART)
    logs, torn_logs, left_out = _read_logs(directory / "parts")
    logs = _kept_apart(read_manifest(directory)["devices"], logs)
    parts |= {path: _table_of(log) for path, log in logs.items()}
    drift, torn_drift, unreadable_drift = _read_parts(directory / "drift", DRIFT_PART)
    left_out = [*unreadable, *left_out, *unreadable_drift]
    if left_out:
        warn(f"{directory}: {summary_of_left_out(left_out)}")
    for path, table in parts.items():
        check_rows(table, path)
    for path, table in drift.items():
        check_drift(table, path)
    documented = [table.select(PROBLEMS.names) for table in parts.values()]
    rows = [table.select(_ROWS.names) for table in parts.values()]
    readings = list(drift.values())
    if sealed:
        problems = _read_vouched(directory, "problems", PROBLEMS, sealed)
        documented, rows = [problems, *documented], [_read_sealed(directory, problems, sealed), *rows]
        readings = [_read_sealed_drift(directory, problems, sealed), *readings]
    # Again: a run may have begun meanwhile, and what it is on is written before its first part.
    manifest = _with_logs(read_manifest(directory), logs.values())
    return _assemble(
        directory,
        manifest,
        _frame(rows, _ROWS),
        _frame(documented, PROBLEMS).drop_duplicates("problem"),
        _frame(readings, DRIFT_PART),
        torn + torn_logs + torn_drift,
        left_out,
    )


def _read_parts(folder: Path, schema: pa.Schema) -> tuple[dict[Path, pa.Table], list[str], list[LeftOut]]:
    """Whole parts; the names of what is none: torn by a power cut, it is no more than one that was never finished; and
    why those that have a part's name are none."""
    whole: dict[Path, pa.Table] = {}
    torn, left_out = [], []
    for path in (path for path in sorted(folder.glob("*")) if path.suffix != LOG_SUFFIX):
        if path.suffix != ".parquet":
            torn.append(path.name)
            continue
        try:
            os.close(open_regular(path, follow=True))  # reading Parquet would wait for a pipe
            whole[path] = joined([read_table(path, schema)])
        except (ForetuneError, IsADirectoryError, UnreadableError) as error:
            torn.append(path.name)
            left_out.append(LeftOut(f"{folder.name}/{path.name}", abridged(why_irregular(error))))
    return whole, torn, left_out


def _read_logs(folder: Path) -> tuple[dict[Path, LogPart], list[str], list[LeftOut]]:
    """Likewise of the parts that are lines of JSON; one with lines that are no rows is read without them, and named."""
    logs: dict[Path, LogPart] = {}
    torn, left_out = [], []
    for path in sorted(folder.glob(f"*{LOG_SUFFIX}")):
        log, wrong = read_log_part(path)
        left_out += wrong
        if log is not None:
            logs[path] = log
        if log is None or not log.is_whole:
            torn.append(path.name)
    return logs, torn, left_out


def _kept_apart(devices: Sequence[Any], logs: Mapping[Path, LogPart]) -> dict[Path, LogPart]:
    """The logs, in which a device that has the name of another one, but not its limits, is called by what differs."""
    named = {spec["name"]: spec for spec in devices if isinstance(spec, Mapping) and isinstance(spec.get("name"), str)}
    return {path: _renamed(log, named.setdefault(log.device.name, log.device.to_json())) for path, log in logs.items()}


def _renamed(log: LogPart, known: Mapping[str, Any]) -> LogPart:
    limits = log.device.limits
    differing = [f"{name} {limit}" for name, limit in limits.items() if known.get(name) != limit]
    if not differing:
        return log
    device = replace(log.device, name=f"{log.device.name} ({', '.join(differing)})")
    return replace(log, device=device, rows=tuple(replace(row, device=device.name) for row in log.rows))


def _table_of(log: LogPart) -> pa.Table:
    """Its rows as `read_table` gives those of a part, which must be joined with them."""
    return as_read(part_table(log.rows, log.run_id, ("production",)), PART)


def _with_logs(manifest: Mapping[str, Any], logs: Iterable[LogPart]) -> dict[str, Any]:
    """The manifest of a dataset with the runs of its logs, which say themselves what they are and were on."""
    devices, runs = list(manifest["devices"]), dict(manifest["provenance"].get("runs", {}))
    named = [spec.get("name") for spec in devices if isinstance(spec, Mapping)]  # anything else `_assemble` refuses
    for log in logs:
        if log.device.name not in named:
            devices.append(log.device.to_json())
            named.append(log.device.name)
        runs.setdefault(log.run_id, dict(log.facts))
    provenance = manifest["provenance"] | ({"runs": runs} if runs else {})
    return dict(manifest) | {"devices": devices, "provenance": provenance}


def _read_sealed(directory: Path, problems: pa.Table, digests: Mapping[str, str]) -> pa.Table:
    """The rows, with the problems and configs that they point to in place of their positions."""
    path = directory / "measurements.parquet"
    configs = _read_vouched(directory, "configs", CONFIGS, digests)
    rows = _read_vouched(directory, "measurements", MEASUREMENTS, digests)
    check_rows(rows, path)
    return _pointed(_pointed(rows, "problem", problems, path), "config", configs, path)


def _read_sealed_drift(directory: Path, problems: pa.Table, digests: Mapping[str, str]) -> pa.Table:
    if "drift.parquet" not in digests:  # sealed before there were readings
        return _empty(DRIFT_PART)
    drift = _read_vouched(directory, "drift", DRIFT, digests)
    check_drift(drift, directory / "drift.parquet")
    return _pointed(drift, "problem", problems, directory / "drift.parquet")


def _read_vouched(directory: Path, table: str, schema: pa.Schema, digests: Mapping[str, str]) -> pa.Table:
    path = directory / f"{table}.parquet"
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            content = file.read()
    except ForetuneError as error:
        raise DatasetError(f"{path}: {error}") from None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise DatasetError(f"{path}: {'the file is missing' if missing else error.strerror}") from None
    # The digest comes first: a parser need not see bytes that no manifest vouches for.
    if hashlib.sha256(content).hexdigest() != digests.get(path.name):
        raise DatasetError(f"{path}: truncated or altered: its SHA-256 is not the one in {MANIFEST}")
    try:
        return joined([read_table(pa.py_buffer(content), schema)])
    except UnreadableError as error:
        raise DatasetError(f"{path}: {error}") from None


def _pointed(rows: pa.Table, column: str, table: pa.Table, path: Path) -> pa.Table:
    """The rows, whose positions in a table are replaced by what stands there."""
    positions = rows.column(column).to_numpy()
    if len(positions) and not (positions.min() >= 0 and positions.max() < len(table)):
        raise DatasetError(f"{path}: points past the end of {column}s.parquet")
    texts = table.column(column).combine_chunks().dictionary_decode()
    pointing = pa.DictionaryArray.from_arrays(pa.array(positions, pa.int32()), texts)
    return rows.set_column(rows.schema.get_field_index(column), column, pointing)


def _frame(tables: Sequence[pa.Table], schema: pa.Schema) -> pd.DataFrame:
    """Tables of a schema as one frame: texts are categories, in alphabetical order."""
    table = joined(list(tables) or [_empty(schema)])
    columns = {
        name: _categories(*coded(table, name)) if pa.types.is_dictionary(column.type) else column.to_numpy()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    frame: pd.DataFrame = pd.DataFrame(columns, copy=False)
    return frame


def _categories(codes: NDArray[np.int32], texts: Sequence[str]) -> Any:
    """Texts by their number, -1 for none, as a `pandas.Categorical`: only those that are used, each once."""
    used = np.bincount(codes + 1, minlength=len(texts) + 1)[1:] > 0
    sorted_texts = sorted({text for text, needed in zip(texts, used, strict=True) if needed})
    place = {text: number for number, text in enumerate(sorted_texts)}
    small = np.min_scalar_type(-len(sorted_texts) - 1)  # as pandas keeps them
    renumbered = np.array([*(place.get(text, -1) for text in texts), -1], small)  # the last is what -1 points to
    return pd.Categorical.from_codes(renumbered[codes], pd.Index(sorted_texts))


def _empty(schema: pa.Schema) -> pa.Table:
    kinds = [(field.name, pa.dictionary(pa.int32(), field.type) if pa.types.is_string(field.type) else field.type)
             for field in schema]  # fmt: skip
    return pa.schema(kinds).empty_table()


def _assemble(
    directory: Path,
    manifest: Mapping[str, Any],
    rows: pd.DataFrame,
    documented: pd.DataFrame,
    drift: pd.DataFrame,
    ignored: Iterable[str],
    left_out: Iterable[LeftOut],
) -> Dataset:
    try:
        devices = tuple(DeviceSpec.from_json(spec) for spec in manifest["devices"])
    except (ForetuneError, TypeError, AttributeError) as error:
        raise DatasetError(f"{directory / MANIFEST}: {error}") from None
    if strangers := {*rows["device"].cat.categories} - {spec.name for spec in devices}:
        raise DatasetError(f"{directory / MANIFEST}: has no device named {', '.join(sorted(strangers))}")
    try:
        problems, problem_at = _numbered(rows["problem"], Problem.from_json)
        configs, config_at = _numbered(rows["config"], KernelConfig.from_json)
        cases: dict[int, Case] = {}
        for text, sources, scenario in documented.itertuples(index=False):
            if text in problem_at:
                case = Case(problems[problem_at[text]], json.loads(sources), scenario)
                cases.setdefault(problem_at[text], case)
    except (ForetuneError, ValueError, TypeError, RecursionError) as error:
        raise DatasetError(f"{directory}: {abridged(str(error))}") from None
    rows = rows.assign(problem=_numbers(rows["problem"], problem_at), config=_numbers(rows["config"], config_at))
    rows = _unambiguous(rows, directory, bool(manifest["sealed"]))
    drift = drift[drift["problem"].isin(problem_at)]  # a case may have left no row of its own
    return Dataset(
        name=manifest["name"],
        schema_version=manifest["schema_version"],
        devices=devices,
        provenance=manifest["provenance"],
        cases=tuple(cases[number] for number in range(len(problems))),
        configs=tuple(configs),
        measurements=rows[MEASUREMENTS.names],
        drift=drift.assign(problem=_numbers(drift["problem"], problem_at)).astype({"run_id": str, "gpu": str}),
        ignored=tuple(ignored),
        left_out=tuple(left_out),
    )


def _unambiguous(rows: pd.DataFrame, directory: Path, is_sealed: bool) -> pd.DataFrame:
    """The rows without those that their own run takes back. In a sealed dataset there are none, or it was altered."""
    places = contradicted(rows)
    if not len(places):
        return rows
    first = rows.iloc[int(places[0])]
    what = (
        f"{directory}: {len(places)} measurements contradict later ones of their run, such as that of problem "
        f"{first['problem']} with config {first['config']} in pass {first['timing_pass']} of run {first['run_id']}"
    )
    if is_sealed:
        raise DatasetError(what)
    warn(f"{what}: the last one counts")
    kept = np.ones(len(rows), bool)
    kept[places] = False
    left: pd.DataFrame = rows[kept].reset_index(drop=True)
    return left


def _numbered(texts: pd.Series[Any], parse: Callable[[Any], _Named]) -> tuple[list[_Named], dict[str, int]]:
    """What the texts say, each once, in the order in which they come; and the place there of what each text says."""
    at: dict[str, int] = {}
    places: dict[_Named, int] = {}
    first = np.zeros(len(texts.cat.categories), np.intp)
    first[texts.cat.codes.to_numpy()[::-1]] = np.arange(len(texts))[::-1]  # what is written last stays: the first row
    for text in texts.cat.categories[np.argsort(first)]:
        at[text] = places.setdefault(parse(json.loads(upgraded_problem(text))), len(places))
    return list(places), at


def _numbers(texts: pd.Series[Any], at: Mapping[str, int]) -> NDArray[np.int32]:
    by_code = np.array([at.get(text, -1) for text in texts.cat.categories], np.int32)
    numbers: NDArray[np.int32] = by_code[texts.cat.codes.to_numpy()]
    return numbers

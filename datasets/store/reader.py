"""Reading a dataset from the disk: its sealed tables, and the parts that runs appended."""

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
from ..contents import LeftOut, LogLine, summary_of_left_out
from ..dataset import Dataset
from ..device import DeviceSpec
from ..errors import DatasetError, ForetuneError, abridged, warn
from ..files import open_regular, read_regular, why_irregular
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
    part_table,
    read_table,
    upgraded_problem,
)

#: The columns of a part, without those that belong to the case.
_ROWS = pa.schema([field for field in PART if field.name not in ("sources", "scenario")])
_Named = TypeVar("_Named", bound=Hashable)


def read(directory: Path | str) -> Dataset:
    """Read the dataset in a folder.

    Parts and log lines that cannot be read are left out with one `ForetuneWarning` (see `Dataset.left_out`).

    Raises:
        DatasetError: The manifest or a sealed table is missing or damaged, or values are impossible. The message names
            the file.
    """
    directory = Path(directory)
    sealed = read_manifest(directory)["sealed"]
    parts, torn, unreadable = _read_parts(directory / "parts", PART)
    logs, torn_logs, left_out = _read_logs(directory / "parts")
    devices = read_manifest(directory)["devices"]
    named = {spec["name"]: spec for spec in devices if isinstance(spec, Mapping) and isinstance(spec.get("name"), str)}
    # A device of a log is renamed if it has another one's name but other limits.
    logs = {path: _renamed(log, named.setdefault(log.device.name, log.device.to_json())) for path, log in logs.items()}
    parts |= {path: as_read(part_table(log.rows, log.run_id, ("production",)), PART) for path, log in logs.items()}
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
        problems = _read_verified(directory, "problems", PROBLEMS, sealed)
        documented, rows = [problems, *documented], [_read_sealed(directory, problems, sealed), *rows]
        readings = [_read_sealed_drift(directory, problems, sealed), *readings]
    # Read again: a run may have started meanwhile; its devices are in the manifest before its first part is written.
    manifest = _with_logs(read_manifest(directory), logs.values())
    return _assemble(
        directory,
        manifest,
        _frame(rows, _ROWS),
        _frame(documented, PROBLEMS).drop_duplicates("problem"),
        _frame(readings, DRIFT_PART),
        torn + torn_logs + torn_drift,
        left_out,
        _first_lines(logs),
    )


def _first_lines(logs: Mapping[Path, LogPart]) -> dict[tuple[str, KernelConfig], LogLine]:
    """Return, for each (family, config) in the logs, the first line that has it."""
    first: dict[tuple[str, KernelConfig], LogLine] = {}
    for path, log in logs.items():
        for row, line in zip(log.rows, log.lines, strict=True):
            first.setdefault((row.problem.family, row.config), LogLine(log.run_id, str(path), line))
    return first


def _read_parts(folder: Path, schema: pa.Schema) -> tuple[dict[Path, pa.Table], list[str], list[LeftOut]]:
    """Read the parts in a folder as tables of a schema.

    Returns:
        The complete parts; the names of all other files, such as incomplete parts of a killed run; and why those of
        them that are named like parts cannot be read.
    """
    complete: dict[Path, pa.Table] = {}
    torn, left_out = [], []
    for path in (path for path in sorted(folder.glob("*")) if path.suffix != LOG_SUFFIX):
        if path.suffix != ".parquet":
            torn.append(path.name)
            continue
        try:
            os.close(open_regular(path, follow=True))  # reading Parquet would wait for a pipe
            complete[path] = joined([read_table(path, schema)])
        except (ForetuneError, IsADirectoryError, UnreadableError) as error:
            torn.append(path.name)
            left_out.append(LeftOut(f"{folder.name}/{path.name}", abridged(why_irregular(error))))
    return complete, torn, left_out


def _read_logs(folder: Path) -> tuple[dict[Path, LogPart], list[str], list[LeftOut]]:
    """Read the logs in a folder, without the lines that cannot be read.

    Returns:
        The logs; the names of files with such lines; and the rows that are left out.
    """
    logs: dict[Path, LogPart] = {}
    torn, left_out = [], []
    for path in sorted(folder.glob(f"*{LOG_SUFFIX}")):
        log, wrong = read_log_part(path)
        left_out += wrong
        if log is not None:
            logs[path] = log
        if log is None or not log.is_complete:
            torn.append(path.name)
    return logs, torn, left_out


def _renamed(log: LogPart, known: Mapping[str, Any]) -> LogPart:
    """Return the log, with those limits of its device that differ from `known` appended to the device's name."""
    limits = log.device.limits
    differing = [f"{name} {limit}" for name, limit in limits.items() if known.get(name) != limit]
    if not differing:
        return log
    device = replace(log.device, name=f"{log.device.name} ({', '.join(differing)})")
    return replace(log, device=device, rows=tuple(replace(row, device=device.name) for row in log.rows))


def _with_logs(manifest: Mapping[str, Any], logs: Iterable[LogPart]) -> dict[str, Any]:
    """Return the manifest with the devices and runs of the logs, which are only recorded in the logs themselves."""
    devices, runs = list(manifest["devices"]), dict(manifest["provenance"].get("runs", {}))
    named = [spec.get("name") for spec in devices if isinstance(spec, Mapping)]  # `_assemble` refuses anything else
    for log in logs:
        if log.device.name not in named:
            devices.append(log.device.to_json())
            named.append(log.device.name)
        runs.setdefault(log.run_id, dict(log.facts))
    provenance = manifest["provenance"] | ({"runs": runs} if runs else {})
    return dict(manifest) | {"devices": devices, "provenance": provenance}


def _read_sealed(directory: Path, problems: pa.Table, digests: Mapping[str, str]) -> pa.Table:
    """Read the sealed measurements, with the problems and configs themselves in place of their positions.

    `problems` is the table of problems, and `digests` has each file's SHA-256 by its name.
    """
    path = directory / "measurements.parquet"
    configs = _read_verified(directory, "configs", CONFIGS, digests)
    rows = _read_verified(directory, "measurements", MEASUREMENTS, digests)
    check_rows(rows, path)
    return _resolved(_resolved(rows, "problem", problems, path), "config", configs, path)


def _read_sealed_drift(directory: Path, problems: pa.Table, digests: Mapping[str, str]) -> pa.Table:
    """Read the sealed drift readings of a dataset; an empty table if it was sealed without any.

    The arguments are those of `_read_sealed`.
    """
    if "drift.parquet" not in digests:  # sealed before there were readings
        return _empty(DRIFT_PART)
    drift = _read_verified(directory, "drift", DRIFT, digests)
    check_drift(drift, directory / "drift.parquet")
    return _resolved(drift, "problem", problems, directory / "drift.parquet")


def _read_verified(directory: Path, table: str, schema: pa.Schema, digests: Mapping[str, str]) -> pa.Table:
    """Read a sealed table of a dataset; raise `DatasetError` if its SHA-256 is not that in `digests`, by file name."""
    path = directory / f"{table}.parquet"
    try:
        content = read_regular(path, follow=True)
    except ForetuneError as error:
        raise DatasetError(f"{path}: {error}") from None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise DatasetError(f"{path}: {'the file is missing' if missing else error.strerror}") from None
    # Checked before parsing, so that the Parquet parser never sees altered bytes.
    if hashlib.sha256(content).hexdigest() != digests.get(path.name):
        raise DatasetError(f"{path}: truncated or altered: its SHA-256 is not the one in {MANIFEST}")
    try:
        return joined([read_table(pa.py_buffer(content), schema)])
    except UnreadableError as error:
        raise DatasetError(f"{path}: {error}") from None


def _resolved(rows: pa.Table, column: str, table: pa.Table, path: Path) -> pa.Table:
    """Replace the positions in a column of `rows` by the values at these positions of the column in `table`."""
    positions = rows.column(column).to_numpy()
    if len(positions) and not (positions.min() >= 0 and positions.max() < len(table)):
        raise DatasetError(f"{path}: column {column} has positions outside of {column}s.parquet")
    texts = table.column(column).combine_chunks().dictionary_decode()
    values = pa.DictionaryArray.from_arrays(pa.array(positions, pa.int32()), texts)
    return rows.set_column(rows.schema.get_field_index(column), column, values)


def _frame(tables: Sequence[pa.Table], schema: pa.Schema) -> pd.DataFrame:
    """Concatenate tables of a schema into a frame; text columns are categories in alphabetical order."""
    table = joined(list(tables) or [_empty(schema)])
    columns = {
        name: _categories(*coded(table, name)) if pa.types.is_dictionary(column.type) else column.to_numpy()
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    frame: pd.DataFrame = pd.DataFrame(columns, copy=False)
    return frame


def _categories(codes: NDArray[np.int32], texts: Sequence[str]) -> Any:
    """Return codes into `texts` (-1 = missing) as a `pandas.Categorical` of the distinct texts in use."""
    used = np.bincount(codes + 1, minlength=len(texts) + 1)[1:] > 0
    sorted_texts = sorted({text for text, needed in zip(texts, used, strict=True) if needed})
    place = {text: number for number, text in enumerate(sorted_texts)}
    small = np.min_scalar_type(-len(sorted_texts) - 1)  # the type that pandas uses
    renumbered = np.array([*(place.get(text, -1) for text in texts), -1], small)  # index -1 is the last
    return pd.Categorical.from_codes(renumbered[codes], pd.Index(sorted_texts))


def _empty(schema: pa.Schema) -> pa.Table:
    """Return a table without rows that has the columns of a schema, text columns dictionary-encoded."""
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
    log_lines: Mapping[tuple[str, KernelConfig], LogLine],
) -> Dataset:
    """Build the dataset of a manifest from frames with problems and configs as JSON, which are parsed.

    `documented` has each problem's sources and scenario; the last arguments become attributes of the dataset.
    """
    try:
        devices = tuple(DeviceSpec.from_json(spec) for spec in manifest["devices"])
    except (ForetuneError, TypeError, AttributeError) as error:
        raise DatasetError(f"{directory / MANIFEST}: {error}") from None
    if unlisted := {*rows["device"].cat.categories} - {spec.name for spec in devices}:
        raise DatasetError(
            f"{directory / MANIFEST}: measurements are of a device that it does not list: {', '.join(sorted(unlisted))}"
        )
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
    drift = drift[drift["problem"].isin(problem_at)]  # a case may have readings but no rows
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
        log_lines=log_lines,
    )


def _unambiguous(rows: pd.DataFrame, directory: Path, is_sealed: bool) -> pd.DataFrame:
    """Drop rows that a later row of their run contradicts, with a warning; raise if the dataset is sealed."""
    places = contradicted(rows)
    if not len(places):
        return rows
    first = rows.iloc[int(places[0])]
    what = (
        f"{directory}: {len(places)} measurements contradict later ones of the same run, such as that of problem "
        f"{first['problem']} with config {first['config']} in pass {first['timing_pass']} of run {first['run_id']}"
    )
    if is_sealed:
        raise DatasetError(what)
    warn(f"{what}. The last one is used")
    kept = np.ones(len(rows), bool)
    kept[places] = False
    left: pd.DataFrame = rows[kept].reset_index(drop=True)
    return left


def _numbered(texts: pd.Series[Any], parse: Callable[[Any], _Named]) -> tuple[list[_Named], dict[str, int]]:
    """Parse the distinct texts of a column.

    Returns:
        The distinct values in the order of their first row, and the index of each text's value among them.
    """
    at: dict[str, int] = {}
    places: dict[_Named, int] = {}
    first = np.zeros(len(texts.cat.categories), np.intp)
    first[texts.cat.codes.to_numpy()[::-1]] = np.arange(len(texts))[::-1]  # reversed, so that the first row is kept
    for text in texts.cat.categories[np.argsort(first)]:
        at[text] = places.setdefault(parse(json.loads(upgraded_problem(text))), len(places))
    return list(places), at


def _numbers(texts: pd.Series[Any], at: Mapping[str, int]) -> NDArray[np.int32]:
    """Return the index in `at` of each text of a column; -1 if it has none."""
    by_code = np.array([at.get(text, -1) for text in texts.cat.categories], np.int32)
    numbers: NDArray[np.int32] = by_code[texts.cat.codes.to_numpy()]
    return numbers

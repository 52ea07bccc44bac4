"""Reading a dataset from the disk: its sealed tables, and the parts of runs that went on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..case import Case
from ..config import KernelConfig
from ..dataset import Dataset
from ..device import DeviceSpec
from ..errors import DatasetError, ForetuneError
from ..measurement import TIMED, Status
from ..problem import Problem
from ..schema import CONFIGS, DRIFT, DRIFT_PART, MEASUREMENTS, PART, PROBLEMS
from .files import MANIFEST, read_manifest, sha256
from .older import upgraded_columns, upgraded_problems

_SEALED = {"problems": PROBLEMS, "configs": CONFIGS, "measurements": MEASUREMENTS}


def read(directory: Path | str) -> Dataset:
    """The dataset in a directory. Raises `DatasetError` naming the file that is wrong, and how."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    frames, ignored = _read_parts(directory / "parts", PART)
    drift, torn = _read_parts(directory / "drift", DRIFT_PART)
    for path, frame in frames.items():
        _checked(frame, path)
    if manifest["sealed"]:
        frames = {directory: _read_sealed(directory, manifest["sealed"]), **frames}
        drift = {directory: _read_sealed_drift(directory, manifest["sealed"]), **drift}
    return _assemble(directory, manifest, _joined(frames, PART), _joined(drift, DRIFT_PART), ignored + torn)


def _read_parts(folder: Path, schema: pa.Schema) -> tuple[dict[Path, pd.DataFrame], list[str]]:
    """Whole parts, and the names of what is none: torn by a power cut, it is no more than one that was never
    finished."""
    parts = {path: _read_part(path, schema) for path in sorted(folder.glob("*"))}
    whole = {path: frame for path, frame in parts.items() if frame is not None}
    return whole, [path.name for path in parts if path not in whole]


def _read_part(path: Path, schema: pa.Schema) -> pd.DataFrame | None:
    try:
        frame = _read_frame(path, schema) if path.suffix == ".parquet" else None
    except UnreadableError:
        return None
    return frame


def _joined(frames: Mapping[Path, pd.DataFrame], schema: pa.Schema) -> pd.DataFrame:
    joined: pd.DataFrame = pd.concat(list(frames.values()) or [schema.empty_table().to_pandas()], ignore_index=True)
    return joined


def _assemble(
    directory: Path, manifest: dict[str, Any], rows: pd.DataFrame, drift: pd.DataFrame, ignored: list[str]
) -> Dataset:
    cases = rows.drop_duplicates("problem")[["problem", "sources", "scenario"]].reset_index(drop=True)
    drift = drift[drift["problem"].isin(cases["problem"])]  # a case may have left no row of its own
    configs = pd.unique(rows["config"])
    try:
        devices = tuple(DeviceSpec.from_json(spec) for spec in manifest["devices"])
    except (ForetuneError, TypeError) as error:
        raise DatasetError(f"{directory / MANIFEST}: {error}") from None
    if strangers := set(rows["device"].unique()) - {spec.name for spec in devices}:
        raise DatasetError(f"{directory / MANIFEST}: has no device named {', '.join(sorted(strangers))}")
    try:
        return Dataset(
            name=manifest["name"],
            schema_version=manifest["schema_version"],
            devices=devices,
            provenance=manifest["provenance"],
            cases=tuple(
                Case(Problem.from_json(json.loads(problem)), tuple(json.loads(sources)), scenario)
                for problem, sources, scenario in cases.itertuples(index=False)
            ),
            configs=tuple(KernelConfig.from_json(json.loads(config)) for config in configs),
            measurements=rows.drop(columns=["sources", "scenario"]).assign(
                problem=pd.Categorical(rows["problem"], categories=cases["problem"]).codes,
                config=pd.Categorical(rows["config"], categories=configs).codes,
            ),
            drift=drift.assign(problem=pd.Categorical(drift["problem"], categories=cases["problem"]).codes),
            ignored=tuple(ignored),
        )
    except (ForetuneError, json.JSONDecodeError, TypeError) as error:
        raise DatasetError(f"{directory}: {error}") from None


def _read_sealed(directory: Path, digests: Mapping[str, str]) -> pd.DataFrame:
    tables = {table: _read_vouched(directory, table, schema, digests) for table, schema in _SEALED.items()}
    rows = _checked(tables["measurements"], directory / "measurements.parquet")
    for column, table in (("problem", "problems"), ("config", "configs")):
        if not rows[column].between(0, len(tables[table]) - 1).all():
            raise DatasetError(f"{directory / 'measurements.parquet'}: points past the end of {table}.parquet")
    problems = tables["problems"].iloc[rows["problem"]].reset_index(drop=True)
    configs = tables["configs"].iloc[rows["config"]].reset_index(drop=True)
    joined: pd.DataFrame = pd.concat([problems, configs, rows.drop(columns=["problem", "config"])], axis=1)[PART.names]
    return joined


def _read_sealed_drift(directory: Path, digests: Mapping[str, str]) -> pd.DataFrame:
    if "drift.parquet" not in digests:  # sealed before there were readings
        nothing: pd.DataFrame = DRIFT_PART.empty_table().to_pandas()
        return nothing
    problems = _read_vouched(directory, "problems", PROBLEMS, digests)["problem"]
    drift = _read_vouched(directory, "drift", DRIFT, digests)
    if not drift["problem"].between(0, len(problems) - 1).all():
        raise DatasetError(f"{directory / 'drift.parquet'}: points past the end of problems.parquet")
    joined: pd.DataFrame = drift.assign(problem=problems.iloc[drift["problem"]].to_numpy())[DRIFT_PART.names]
    return joined


def _read_vouched(directory: Path, table: str, schema: pa.Schema, digests: Mapping[str, str]) -> pd.DataFrame:
    path = directory / f"{table}.parquet"
    # The digest comes first: a parser need not see bytes that nobody vouches for.
    if path.is_file() and sha256(path) != digests.get(path.name):
        raise DatasetError(f"{path}: truncated or altered: its SHA-256 is not the one in {MANIFEST}")
    try:
        frame = _read_frame(path, schema)
    except UnreadableError as error:
        raise DatasetError(f"{path}: {error}") from None
    return frame


class UnreadableError(Exception):
    """Why a Parquet file cannot be taken as it is."""


def _read_frame(path: Path, schema: pa.Schema) -> pd.DataFrame:
    frame: pd.DataFrame = read_table(path, schema).to_pandas()
    if schema.names[0] == "problem" and pa.types.is_string(schema.field("problem").type):
        frame["problem"] = upgraded_problems(frame["problem"])
    return frame


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    if not path.is_file():
        raise UnreadableError("the file is missing")
    try:
        table = upgraded_columns(pq.read_table(path, partitioning=None))  # else a folder named a=b becomes a column
    except (pa.ArrowException, OSError) as error:
        raise UnreadableError(f"truncated or not a Parquet file ({str(error).splitlines()[0]})") from None
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise UnreadableError(f"not a Foretune table: columns missing: {', '.join(missing)}")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise UnreadableError(f"not a Foretune table: {error}") from None


def _checked(rows: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The rows, if every status is known and a time is there exactly where the status says so."""
    unknown = set(rows["status"].unique()) - {status.value for status in Status}
    if unknown:
        raise DatasetError(f"{path}: unknown measurement status {', '.join(sorted(unknown))}")
    timed = rows["status"].isin([status.value for status in TIMED])
    finite = rows["time_us"].gt(0) & rows["time_us"].lt(float("inf"))
    wrong = int((timed != finite).sum()) + int((~timed & rows["time_us"].notna()).sum())
    if wrong:
        raise DatasetError(
            f"{path}: {wrong} measurements have a time_us that does not go with their status "
            "(ok and hopeless need a positive number, all others null)"
        )
    return rows

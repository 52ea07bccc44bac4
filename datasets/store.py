"""The store: a directory that runs append to, crash-safely, and that can be sealed for shipping.

    DIR/dataset.json        schema version, name, DeviceSpecs, provenance, SHA-256 of the sealed tables
    DIR/parts/*.parquet     appended during a run, each complete and self-contained
    DIR/drift/*.parquet     likewise: how the device did meanwhile
    DIR/{problems,configs,measurements,drift}.parquet   the same rows, sealed: small enough for git

A part is written beside its final name, flushed to the disk and renamed, so a killed run leaves at most one
half-written part. Such a part is ignored on load and named in `Dataset.ignored`; damage to a sealed table is
an error, because the manifest vouches for it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from .case import Case
from .config import KernelConfig
from .dataset import Dataset
from .device import DeviceSpec
from .drift import Reading
from .errors import DatasetError, ForetuneError
from .measurement import TIMED, Measurement, Status
from .problem import Problem
from .schema import CONFIGS, DRIFT, DRIFT_PART, MEASUREMENTS, OLDER_VERSIONS, PART, PROBLEMS, SCHEMA_VERSION
from .upgrade import upgraded_columns, upgraded_problems

MANIFEST = "dataset.json"
_SEALED = {"problems": PROBLEMS, "configs": CONFIGS, "measurements": MEASUREMENTS}


class Writer:
    """Appends measurements to a dataset directory, which it makes if need be.

    >>> import tempfile; folder = tempfile.mkdtemp()
    >>> writer = Writer(folder, "mine", [DeviceSpec.named("h200")], {}, run_id="r1")
    >>> problem = Problem.of("row_softmax", rows=8, columns=8)
    >>> outcome = Measurement(problem, "NVIDIA H200", KernelConfig.of(BLOCK_M=16), Status.OK, time_us=9.0)
    >>> writer.append(Case(problem, ("random",)), [outcome])
    >>> read(folder).describe()["families"]["row_softmax"]["measurements"]
    1
    """

    def __init__(
        self,
        directory: Path | str,
        name: str,
        devices: Sequence[DeviceSpec],
        provenance: Mapping[str, Any],
        *,
        run_id: str,
    ) -> None:
        self.directory, self.run_id = Path(directory), run_id
        (self.directory / "parts").mkdir(parents=True, exist_ok=True)
        manifest = _read_manifest(self.directory) if (self.directory / MANIFEST).exists() else None
        specs = {spec["name"]: spec for spec in (manifest or {}).get("devices", [])}
        specs |= {spec.name: spec.to_json() for spec in devices}
        runs = (manifest or {}).get("provenance", {}).get("runs", {})
        _write_manifest(
            self.directory,
            {
                "name": manifest["name"] if manifest else name,
                "devices": list(specs.values()),
                "provenance": {"runs": runs | {run_id: dict(provenance)}},
                "sealed": manifest["sealed"] if manifest else {},
            },
        )
        # A run that is taken up again under its old id goes on counting: its earlier parts are not replaced.
        taken = [path.stem.rpartition("-")[2] for path in self.directory.glob(f"*/{run_id}-*.parquet")]
        self._sequence = max((int(number) for number in taken if number.isdecimal()), default=-1) + 1

    def append(self, case: Case, measurements: Iterable[Measurement]) -> None:
        """Writes one part; when this returns, the rows are on the disk."""
        rows = [_row(case, measurement, self.run_id) for measurement in measurements]
        if not rows:
            return
        self._append(pa.Table.from_pylist(rows, schema=PART), "parts")

    def append_drift(self, readings: Iterable[Reading]) -> None:
        """Writes what the drift probe took; see `Dataset.drift`."""
        rows = [
            {"problem": _json(reading.problem), "run_id": self.run_id, "gpu": reading.gpu}
            | {"at_s": reading.at_s, "time_us": reading.time_us}
            for reading in readings
        ]
        if rows:
            self._append(pa.Table.from_pylist(rows, schema=DRIFT_PART), "drift")

    def _append(self, table: pa.Table, folder: str) -> None:
        (self.directory / folder).mkdir(exist_ok=True)
        _write_table(table, self.directory / folder / f"{self.run_id}-{self._sequence:06d}.parquet")
        self._sequence += 1


def _row(case: Case, measurement: Measurement, run_id: str) -> dict[str, Any]:
    return {
        "problem": _json(measurement.problem),
        "sources": json.dumps(case.sources),
        "scenario": case.scenario,
        "config": _json(measurement.config),
        "status": measurement.status.value,
        "run_id": run_id,
    } | {
        name: getattr(measurement, name)
        for name in PART.names
        if name not in ("problem", "sources", "scenario", "config", "status", "run_id")
    }


@lru_cache(maxsize=1 << 14)
def _json(value: Problem | KernelConfig) -> str:
    return json.dumps(value.to_json())  # of hundreds of group sizes, say: longer work than all else in a row


def read(directory: Path | str) -> Dataset:
    """The dataset in a directory. Raises `DatasetError` naming the file that is wrong, and how."""
    directory = Path(directory)
    manifest = _read_manifest(directory)
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
    except _UnreadableError:
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


def seal(source: Path | str, target: Path | str, *, name: str) -> None:
    """Writes all rows of one dataset directory as the three sealed tables of another, for shipping.

    Raises `DatasetError` for a target that holds parts: their rows would count twice.
    """
    dataset, target = read(source), Path(target)
    if (target / "parts").exists():
        raise DatasetError(f"{target}: has parts of its own; seal into another directory")
    target.mkdir(parents=True, exist_ok=True)
    problems = [
        {"problem": json.dumps(c.problem.to_json()), "sources": json.dumps(c.sources), "scenario": c.scenario}
        for c in dataset.cases
    ]
    configs = [{"config": json.dumps(config.to_json())} for config in dataset.configs]
    rows = dataset.measurements.sort_values(["problem", "timing_pass", "config"], kind="stable")
    drift = dataset.drift.sort_values(["run_id", "gpu", "at_s"], kind="stable")
    tables = {
        "problems": pa.Table.from_pylist(problems, schema=PROBLEMS),
        "configs": pa.Table.from_pylist(configs, schema=CONFIGS),
        "measurements": pa.Table.from_pandas(rows, schema=MEASUREMENTS, preserve_index=False),
        "drift": pa.Table.from_pandas(drift, schema=DRIFT, preserve_index=False),
    }
    for table, content in tables.items():
        _write_table(content.replace_schema_metadata(None), target / f"{table}.parquet")
    _write_manifest(
        target,
        {
            "name": name,
            "devices": [spec.to_json() for spec in dataset.devices],
            "provenance": dataset.provenance,
            "sealed": {f"{table}.parquet": _sha256(target / f"{table}.parquet") for table in tables},
        },
    )


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
    if path.is_file() and _sha256(path) != digests.get(path.name):
        raise DatasetError(f"{path}: truncated or altered: its SHA-256 is not the one in {MANIFEST}")
    try:
        frame = _read_frame(path, schema)
    except _UnreadableError as error:
        raise DatasetError(f"{path}: {error}") from None
    return frame


class _UnreadableError(Exception):
    """Why a Parquet file cannot be taken as it is."""


def _read_frame(path: Path, schema: pa.Schema) -> pd.DataFrame:
    frame: pd.DataFrame = _read_table(path, schema).to_pandas()
    if schema.names[0] == "problem" and pa.types.is_string(schema.field("problem").type):
        frame["problem"] = upgraded_problems(frame["problem"])
    return frame


def _read_table(path: Path, schema: pa.Schema) -> pa.Table:
    if not path.is_file():
        raise _UnreadableError("the file is missing")
    try:
        table = upgraded_columns(pq.read_table(path, partitioning=None))  # else a folder named a=b becomes a column
    except (pa.ArrowException, OSError) as error:
        raise _UnreadableError(f"truncated or not a Parquet file ({str(error).splitlines()[0]})") from None
    missing = [name for name in schema.names if name not in table.column_names]
    if missing:
        raise _UnreadableError(f"not a Foretune table: columns missing: {', '.join(missing)}")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise _UnreadableError(f"not a Foretune table: {error}") from None


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


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        version = manifest["schema_version"]
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such file, so {directory} is not a Foretune dataset") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as JSON: {error}") from None
    except (KeyError, TypeError):
        raise DatasetError(f"{path}: not a Foretune manifest: it has no schema_version") from None
    if version not in (SCHEMA_VERSION, *OLDER_VERSIONS):
        raise DatasetError(
            f"{path}: schema_version is {version!r} but this Foretune reads {SCHEMA_VERSION} and before"
            + ("; a newer Foretune wrote it" if isinstance(version, int) and version > SCHEMA_VERSION else "")
        )
    missing = [key for key in ("name", "devices", "provenance", "sealed") if key not in manifest]
    if missing:
        raise DatasetError(f"{path}: keys missing: {', '.join(missing)}")
    return dict(manifest)


def _write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=1) + "\n"
    _replace(directory / MANIFEST, lambda path: path.write_text(text))


def _write_table(table: pa.Table, path: Path) -> None:
    _replace(path, lambda temporary: pq.write_table(table, temporary, compression="zstd", compression_level=9))


def _replace(path: Path, write: Any) -> None:
    """Writes a file so that at any moment either the old content or the whole new one is there."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    try:
        write(temporary)
    except OSError:  # a full disk, say
        temporary.unlink(missing_ok=True)
        raise
    for target in (temporary, path.parent):
        handle = os.open(target, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if target is temporary:
            temporary.replace(path)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

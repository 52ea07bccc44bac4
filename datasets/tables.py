"""The Parquet files of a dataset: their columns, and how they are read, checked and written.

Files of older schema versions are converted to the current one when they are read. In version 1 the only ragged
dimension was "rows": a problem had its sizes as "group_sizes", and a case had its scenario as "routing".
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .config import KernelConfig
from .errors import DatasetError, shown
from .files import blaming, flush, replacing
from .manifest import MANIFEST
from .measurement import LONGEST_US, SHORTEST_US, TIMED, TIMING_PASSES, Measurement, Status
from .problem import Problem


def _required(name: str, data_type: pa.DataType) -> pa.Field:
    """Return a column of a schema, with a name and type, that may not have missing values."""
    return pa.field(name, data_type, nullable=False)


_PROBLEM = [
    _required("problem", pa.string()),  # JSON of a Problem
    _required("sources", pa.string()),  # JSON of Case.sources
    _required("scenario", pa.string()),
]
_CONFIG = [_required("config", pa.string())]  # JSON of a KernelConfig
_OUTCOME = [  # see `Measurement`
    _required("device", pa.string()),  # a DeviceSpec's name; the spec is in dataset.json
    _required("status", pa.string()),  # a value of measurement.Status
    pa.field("time_us", pa.float32()),  # null unless the status is one of measurement.TIMED
    pa.field("spread", pa.float32()),  # interquartile range / median of the samples
    _required("samples", pa.int16()),
    _required("timing_pass", pa.int8()),  # 1 = scan of all configs, 2 and 3 = confirming passes
    pa.field("compile_ms", pa.float32()),
    pa.field("registers", pa.int16()),
    pa.field("spills", pa.int32()),
    pa.field("smem_bytes", pa.int32()),
    _required("run_id", pa.string()),
    pa.field("error", pa.string()),
]

#: A reading of the drift probe, a fixed launch that shows whether the device became slower (see measurement.py).
_DRIFT = [
    _required("run_id", pa.string()),
    _required("gpu", pa.string()),  # which of the run's GPUs
    _required("at_s", pa.float32()),  # seconds since the start of the run
    _required("time_us", pa.float32()),
]

#: A part, as appended during a run. Each row has its problem and config; dictionary encoding makes that small.
PART = pa.schema([*_PROBLEM, *_CONFIG, *_OUTCOME])
#: The three sealed tables. Rows of measurements refer to the other two by position.
PROBLEMS = pa.schema(_PROBLEM)
CONFIGS = pa.schema(_CONFIG)
MEASUREMENTS = pa.schema([_required("problem", pa.int32()), _required("config", pa.int32()), *_OUTCOME])
#: Drift readings with the problem that was being measured: as appended, and sealed. A dataset may have none.
DRIFT_PART = pa.schema([_required("problem", pa.string()), *_DRIFT])
DRIFT = pa.schema([_required("problem", pa.int32()), *_DRIFT])


#: Columns of older schema versions that have another name now: old -> new.
_RENAMED = {"routing": "scenario"}


def upgraded_problem(text: str) -> str:
    """Convert a problem's JSON text to the current version; any other text is returned unchanged.

    >>> upgraded_problem('{"family": "f", "dims": {"rows": 3}, "dtype": "bf16", "flags": [], "group_sizes": [1, 2]}')
    '{"family": "f", "dims": {"rows": 3}, "dtype": "bf16", "flags": [], "ragged": {"dim": "rows", "sizes": [1, 2]}}'
    """
    if '"group_sizes"' not in text:
        return text
    try:
        problem = json.loads(text)
        sizes = problem.pop("group_sizes")
    except (ValueError, AttributeError, KeyError, RecursionError):
        return text
    return json.dumps(problem | {"ragged": None if sizes is None else {"dim": "rows", "sizes": sizes}})


#: The type of texts in memory: each text once, and its index in each row. A million rows name only a few devices.
_TEXT = pa.dictionary(pa.int32(), pa.string())


class UnreadableError(Exception):
    """The reason why a Parquet file cannot be read."""


def read_table(source: Path | pa.Buffer, schema: pa.Schema) -> pa.Table:
    """Read the columns of a schema from a Parquet file, with text columns dictionary-encoded.

    Raises:
        UnreadableError: The file is missing or damaged, or lacks a column, has one of another type, or has missing
            values in a required one.
        OSError: The disk failed.
    """
    try:
        # Not pq.read_table, which imports the code for whole folders and parses a folder name a=b as a column.
        with pq.ParquetFile(_opened(source)) as file:
            metadata = file.metadata
            texts = [field.name for field in file.schema_arrow if pa.types.is_string(field.type)]
        with pq.ParquetFile(_opened(source), metadata=metadata, read_dictionary=texts) as file:
            table = file.read()
        table = table.rename_columns([_RENAMED.get(name, name) for name in table.column_names])
        table.validate(full=True)  # checks also that texts are UTF-8, which other code relies on
    except FileNotFoundError:
        raise UnreadableError("the file is missing") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise  # e.g. a failing disk or too many open files: the file may be intact
        raise UnreadableError(f"truncated or not a Parquet file ({str(error).partition(chr(10))[0]})") from None
    if missing := [name for name in schema.names if name not in table.column_names]:
        raise UnreadableError(f"not a Foretune table: columns missing: {', '.join(missing)}")
    return as_read(table, schema)


def as_read(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema, converted to the types that `read_table` returns; raise as that does."""
    return pa.table({field.name: _column(table.column(field.name), field) for field in schema})


def _opened(source: Path | pa.Buffer) -> Path | pa.BufferReader:
    """Return a source in a form that `pq.ParquetFile` accepts: a path, or a reader of the buffer."""
    return pa.BufferReader(source) if isinstance(source, pa.Buffer) else source


def joined(tables: list[pa.Table]) -> pa.Table:
    """Concatenate tables of one schema, each column as a single chunk."""
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _column(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """Return a column with a field's type, text dictionary-encoded; raise `UnreadableError` if it has another type."""
    is_text = pa.types.is_dictionary(column.type) or pa.types.is_string(column.type)
    if is_text and len(column) and not pa.types.is_string(field.type):  # a cast would parse numbers in it
        raise UnreadableError(f"not a Foretune table: {field.name} is text, e.g. {shown(column[0].as_py())}")
    try:
        if not pa.types.is_string(field.type):
            column = column.cast(field.type)
        elif column.type != _TEXT:
            column = column.cast(pa.string()).dictionary_encode()
    except (pa.ArrowException, ValueError) as error:
        raise UnreadableError(f"not a Foretune table: {field.name}: {error}") from None
    if not field.nullable and column.null_count:
        raise UnreadableError(f"not a Foretune table: {field.name} is missing in {column.null_count} rows")
    return column


_COUNTS = ("samples", "registers", "spills", "smem_bytes")


def check_rows(rows: pa.Table, path: Path) -> None:
    """Raise `DatasetError` for an unknown status, a time that does not suit its status, or a number out of bounds.

    The message names the file.
    """
    codes, statuses = coded(rows, "status")
    if unknown := {statuses[code] for code in np.unique(codes)} - {status.value for status in Status}:
        raise DatasetError(f"{path}: unknown measurement status {', '.join(sorted(unknown))}")
    timed = np.isin(codes, [code for code, status in enumerate(statuses) if status in {one.value for one in TIMED}])
    time_us = rows.column("time_us").to_numpy()
    if wrong := int((timed != (time_us > 0)).sum() + (~timed & ~np.isnan(time_us)).sum()):
        raise DatasetError(
            f"{path}: {wrong} measurements have a time_us that is not valid for their status "
            "(a positive number for ok and hopeless, null for all others)"
        )
    _refuse(path, "time_us", time_us[timed], SHORTEST_US, LONGEST_US)
    _refuse(path, "timing_pass", rows.column("timing_pass").to_numpy(), TIMING_PASSES[0], TIMING_PASSES[-1])
    for name in _COUNTS:
        _refuse(path, name, rows.column(name).drop_null().to_numpy(), 0, np.inf)
    for name in ("spread", "compile_ms"):
        _refuse(path, name, rows.column(name).drop_null().to_numpy(), 0, 3e38)


def check_drift(readings: pa.Table, path: Path) -> None:
    """Raise `DatasetError`, naming the file, if times of drift readings are out of bounds."""
    _refuse(path, "time_us", readings.column("time_us").to_numpy(), SHORTEST_US, LONGEST_US)
    _refuse(path, "at_s", readings.column("at_s").to_numpy(), 0, 1e9)


def contradicted(rows: pd.DataFrame) -> NDArray[np.intp]:
    """Return the positions of rows that a later row of the same run contradicts.

    The two rows are of the same problem, device, config and pass, but have another status or time. Rows of different
    runs do not contradict each other: the latest run is used.
    """
    key = np.zeros(len(rows), np.int64)
    for name in ("problem", "timing_pass", "config", "run_id", "device"):
        values = rows[name].cat.codes.to_numpy() if name in ("run_id", "device") else rows[name].to_numpy()
        key = key * (int(values.max(initial=0)) + 1) + values
    if np.diff(np.sort(key, kind="stable")).all():  # fast, because sealed rows are nearly in that order
        return np.empty(0, np.intp)
    repeated = np.flatnonzero(pd.Series(key).duplicated(keep=False))
    outcomes = rows.iloc[repeated].groupby(["status", "time_us"], observed=True, dropna=False).ngroup()
    last = outcomes.groupby(key[repeated]).transform("last")
    places: NDArray[np.intp] = repeated[(outcomes != last).to_numpy()]
    return places


def _refuse(path: Path, name: str, values: NDArray[Any], least: float, most: float) -> None:
    """Raise `DatasetError` unless all values of a column are in [least, most]."""
    wrong = values[~((values >= least) & (values <= most))]
    if len(wrong):
        raise DatasetError(f"{path}: {name} must be {least:g} to {most:g} but is {wrong[0]:g} in {len(wrong)} rows")


def coded(rows: pa.Table, name: str) -> tuple[NDArray[np.int32], list[str]]:
    """Return a text column of `rows` as indices (-1 = missing), and the texts that they refer to."""
    column = rows.column(name).combine_chunks()
    return column.indices.fill_null(-1).to_numpy(), column.dictionary.to_pylist()


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table atomically as Parquet. The same table always gives the same bytes.

    Floats are split into streams of their bytes, which makes measurements smaller.
    """
    floats = [column.name for column in table.schema if pa.types.is_floating(column.type)]
    others = [name for name in table.column_names if name not in floats]
    options = {"use_dictionary": others, "use_byte_stream_split": floats}
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=9, **options)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def part_table(rows: Sequence[Measurement], run_id: str, sources: Sequence[str], scenario: str = "") -> pa.Table:
    """Return measurements of one run, all with the same sources and scenario, as a table of schema `PART`."""
    columns: dict[str, list[Any]] = {
        "problem": [json_of(row.problem) for row in rows],
        "sources": [json.dumps(sources)] * len(rows),
        "scenario": [scenario] * len(rows),
        "config": [json_of(row.config) for row in rows],
        "status": [row.status.value for row in rows],
        "run_id": [run_id] * len(rows),
    }
    others = [name for name in PART.names if name not in columns]
    return pa.table(columns | {name: [getattr(row, name) for row in rows] for name in others}, schema=PART)


@lru_cache(maxsize=1 << 14)
def json_of(value: Problem | KernelConfig) -> str:
    """Return a value as JSON. Cached: with hundreds of segment sizes it takes longer than the rest of a row."""
    return json.dumps(value.to_json())


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder whose files move to `target` when the block ends without an error.

    A new target appears atomically. In an existing one the files are replaced one by one, the manifest last, so a
    concurrent reader sees a checksum that does not match rather than a mixture. Other files of the target stay.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    with blaming(target, staging):
        try:
            yield staging
            staging.chmod(0o755)  # mkdtemp's 0700 would lock out the other users of a shared folder
            if target.is_dir():
                for path in sorted(staging.iterdir(), key=lambda path: path.name == MANIFEST):
                    path.replace(target / path.name)
            else:
                staging.replace(target)
            flush(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

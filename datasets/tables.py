"""The Parquet files of a dataset: their columns, how one is read and checked, and how it is written.

Older schema versions are read as if they were of today's. Version 1 knew one ragged dimension, the rows: a problem had
its sizes as "group_sizes", and a case the word for how they were drawn as "routing"."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .errors import DatasetError, shown
from .files import blaming, flush, replacing
from .manifest import MANIFEST
from .measurement import LONGEST_US, SHORTEST_US, TIMED, TIMING_PASSES, Status


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_PROBLEM = [
    _required("problem", pa.string()),  # JSON of a Problem
    _required("sources", pa.string()),  # JSON of Case.sources
    _required("scenario", pa.string()),
]
_CONFIG = [_required("config", pa.string())]  # JSON of a KernelConfig
_OUTCOME = [
    _required("device", pa.string()),  # a DeviceSpec's name; the spec is in dataset.json
    _required("status", pa.string()),  # a measurement.Status value
    pa.field("time_us", pa.float32()),  # null unless ok or hopeless
    pa.field("spread", pa.float32()),  # interquartile range / median of the samples
    _required("samples", pa.int16()),
    _required("timing_pass", pa.int8()),  # 1 = the scan of every config, 2 and 3 = the leading ones again, interleaved
    pa.field("compile_ms", pa.float32()),
    pa.field("registers", pa.int16()),
    pa.field("spills", pa.int32()),
    pa.field("smem_bytes", pa.int32()),
    _required("run_id", pa.string()),
    pa.field("error", pa.string()),
]

#: One reading of the drift probe, which tells whether the device stayed the same (see measurement.py).
_DRIFT = [
    _required("run_id", pa.string()),
    _required("gpu", pa.string()),  # which one of the run's
    _required("at_s", pa.float32()),  # since the run began
    _required("time_us", pa.float32()),
]

#: A part, as appended during a run: self-contained rows (dictionary encoding makes the repetition free).
PART = pa.schema([*_PROBLEM, *_CONFIG, *_OUTCOME])
#: The three sealed tables: rows of measurements point into the other two by position.
PROBLEMS = pa.schema(_PROBLEM)
CONFIGS = pa.schema(_CONFIG)
MEASUREMENTS = pa.schema([_required("problem", pa.int32()), _required("config", pa.int32()), *_OUTCOME])
#: Readings of the drift probe, while a problem was measured: as appended, and sealed. A dataset may have none.
DRIFT_PART = pa.schema([_required("problem", pa.string()), *_DRIFT])
DRIFT = pa.schema([_required("problem", pa.int32()), *_DRIFT])


#: Columns that had another name: old -> new.
_RENAMED = {"routing": "scenario"}


def upgraded_columns(table: pa.Table) -> pa.Table:
    """A table with today's column names."""
    return table.rename_columns([_RENAMED.get(name, name) for name in table.column_names])


def upgraded_problem(text: str) -> str:
    """One problem as JSON, as today's version writes it; text that is no problem is returned as it is.

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


#: What texts are in memory: each once, and rows have its number. A million rows name a handful of devices.
_TEXT = pa.dictionary(pa.int32(), pa.string())


class UnreadableError(Exception):
    """Why a Parquet file cannot be taken as it is."""


def read_table(source: Path | pa.Buffer, schema: pa.Schema) -> pa.Table:
    """The columns of a schema, texts as dictionaries. Raises `UnreadableError` for a file that has them not, or of
    another type, or nothing where the schema asks for something."""
    try:
        # Not pq.read_table: it loads what reads whole folders, and takes a folder named a=b for a column.
        with pq.ParquetFile(_opened(source)) as file:
            metadata = file.metadata
            texts = [field.name for field in file.schema_arrow if pa.types.is_string(field.type)]
        with pq.ParquetFile(_opened(source), metadata=metadata, read_dictionary=texts) as file:
            table = upgraded_columns(file.read())
        table.validate(full=True)  # also that texts are UTF-8, which other code relies on
    except FileNotFoundError:
        raise UnreadableError("the file is missing") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise  # a disk that fails, too many open files: it may well be whole
        raise UnreadableError(f"truncated or not a Parquet file ({str(error).partition(chr(10))[0]})") from None
    if missing := [name for name in schema.names if name not in table.column_names]:
        raise UnreadableError(f"not a Foretune table: columns missing: {', '.join(missing)}")
    return as_read(table, schema)


def as_read(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema in the form that all tables have in memory. Raises as `read_table` does."""
    return pa.table({field.name: _column(table.column(field.name), field) for field in schema})


def _opened(source: Path | pa.Buffer) -> Path | pa.BufferReader:
    return pa.BufferReader(source) if isinstance(source, pa.Buffer) else source


def joined(tables: list[pa.Table]) -> pa.Table:
    """Tables of one schema as one, each column in one piece."""
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def _column(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    is_text = pa.types.is_dictionary(column.type) or pa.types.is_string(column.type)
    if is_text and len(column) and not pa.types.is_string(field.type):  # which a cast would read where it can
        raise UnreadableError(f"not a Foretune table: {field.name} is text, such as {shown(column[0].as_py())}")
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
    """Raises `DatasetError` naming the file for an unknown status, a time that does not go with it or that no kernel
    takes, and numbers that count nothing."""
    codes, statuses = coded(rows, "status")
    if unknown := {statuses[code] for code in np.unique(codes)} - {status.value for status in Status}:
        raise DatasetError(f"{path}: unknown measurement status {', '.join(sorted(unknown))}")
    timed = np.isin(codes, [code for code, status in enumerate(statuses) if status in {one.value for one in TIMED}])
    time_us = rows.column("time_us").to_numpy()
    if wrong := int((timed != (time_us > 0)).sum() + (~timed & ~np.isnan(time_us)).sum()):
        raise DatasetError(
            f"{path}: {wrong} measurements have a time_us that does not go with their status "
            "(ok and hopeless need a positive number, all others null)"
        )
    _refuse(path, "time_us", time_us[timed], SHORTEST_US, LONGEST_US)
    _refuse(path, "timing_pass", rows.column("timing_pass").to_numpy(), TIMING_PASSES[0], TIMING_PASSES[-1])
    for name in _COUNTS:
        _refuse(path, name, rows.column(name).drop_null().to_numpy(), 0, np.inf)
    for name in ("spread", "compile_ms"):
        _refuse(path, name, rows.column(name).drop_null().to_numpy(), 0, 3e38)


def check_drift(readings: pa.Table, path: Path) -> None:
    """Raises `DatasetError` naming the file for readings of the drift probe that no clock gave."""
    _refuse(path, "time_us", readings.column("time_us").to_numpy(), SHORTEST_US, LONGEST_US)
    _refuse(path, "at_s", readings.column("at_s").to_numpy(), 0, 1e9)


def contradicted(rows: pd.DataFrame) -> NDArray[np.intp]:
    """Places of the rows whose run says something else, later, of the same config, problem, device and pass: nobody
    could tell which holds. (Another run may: the latest counts.)"""
    key = np.zeros(len(rows), np.int64)
    for name in ("problem", "timing_pass", "config", "run_id", "device"):
        values = rows[name].cat.codes.to_numpy() if name in ("run_id", "device") else rows[name].to_numpy()
        key = key * (int(values.max(initial=0)) + 1) + values
    if np.diff(np.sort(key, kind="stable")).all():  # quick, because that is nearly the order in which they are sealed
        return np.empty(0, np.intp)
    repeated = np.flatnonzero(pd.Series(key).duplicated(keep=False))
    outcomes = rows.iloc[repeated].groupby(["status", "time_us"], observed=True, dropna=False).ngroup()
    last = outcomes.groupby(key[repeated]).transform("last")
    places: NDArray[np.intp] = repeated[(outcomes != last).to_numpy()]
    return places


def _refuse(path: Path, name: str, values: NDArray[Any], least: float, most: float) -> None:
    wrong = values[~((values >= least) & (values <= most))]
    if len(wrong):
        raise DatasetError(f"{path}: {name} must be {least:g} to {most:g} but is {wrong[0]:g} in {len(wrong)} rows")


def coded(rows: pa.Table, name: str) -> tuple[NDArray[np.int32], list[str]]:
    """A text column as numbers, -1 where it has none, and the texts that they stand for."""
    column = rows.column(name).combine_chunks()
    return column.indices.fill_null(-1).to_numpy(), column.dictionary.to_pylist()


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a table as Parquet: the same table always gives the same bytes."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=9)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield an empty folder whose files move to `target` when the block ends without an error.

    A new target appears as a whole. In an old one the files are replaced one by one, the manifest last: a concurrent
    reader sees a SHA-256 that does not fit, never a mixture. Files that are not written again stay.
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

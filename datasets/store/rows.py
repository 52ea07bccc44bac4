"""What the rows of a file must hold to be measurements, whoever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from ..errors import DatasetError
from ..measurement import LONGEST_US, SHORTEST_US, TIMED, TIMING_PASSES, Status

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

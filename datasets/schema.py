"""What a file of the store looks like: its columns and types, of the version in `manifest`."""

from __future__ import annotations

import pyarrow as pa


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

#: One reading of the drift probe, which tells whether the device stayed the same (see drift.py).
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

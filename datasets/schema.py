"""What a file of the store looks like: one schema version, its columns and types."""

from __future__ import annotations

import pyarrow as pa

#: Raised by one whenever a column changes meaning, type or name.
SCHEMA_VERSION = 1

_OUTCOME = [
    ("device", pa.string()),  # a DeviceSpec's name; the spec is in dataset.json
    ("status", pa.string()),  # a measurement.Status value
    ("time_us", pa.float32()),  # null unless ok or hopeless
    ("spread", pa.float32()),  # interquartile range / median of the samples
    ("samples", pa.int16()),
    ("timing_pass", pa.int8()),  # 1 = the scan of every config, 2 and 3 = the leading ones again, interleaved
    ("compile_ms", pa.float32()),
    ("registers", pa.int16()),
    ("spills", pa.int32()),
    ("smem_bytes", pa.int32()),
    ("run_id", pa.string()),
    ("error", pa.string()),
]

#: A part, as appended during a run: self-contained rows (dictionary encoding makes the repetition free).
PART = pa.schema(
    [
        ("problem", pa.string()),
        ("sources", pa.string()),
        ("routing", pa.string()),
        ("config", pa.string()),
        *_OUTCOME,
    ]
)
#: The three sealed tables: rows of measurements point into the other two by position.
PROBLEMS = pa.schema([("problem", pa.string()), ("sources", pa.string()), ("routing", pa.string())])
CONFIGS = pa.schema([("config", pa.string())])
MEASUREMENTS = pa.schema([("problem", pa.int32()), ("config", pa.int32()), *_OUTCOME])

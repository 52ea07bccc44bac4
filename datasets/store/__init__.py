"""The store: a folder that runs append to in a crash-safe way, and that can be sealed for shipping.

    DIR/dataset.json        schema version, name, DeviceSpecs, provenance, SHA-256 of the sealed tables
    DIR/parts/*.parquet     measurements, appended during a run; each file is self-contained
    DIR/parts/*.jsonl       measurements logged in production, one in each line (see log_part.py)
    DIR/drift/*.parquet     readings of the drift probe, appended during a run
    DIR/{problems,configs,measurements,drift}.parquet   sealed tables with the same content, small enough for git
    DIR/.collecting, DIR/.writing    locks that exist while a collection runs or a file is written (see locks.py)

A part is written under a temporary name, flushed to the disk and renamed, so a killed run leaves at most one
incomplete part. Such a part is ignored by `read` and named in `Dataset.ignored`. A damaged sealed table is an error,
because the manifest has its checksum.
"""

from __future__ import annotations

from ..manifest import MANIFEST
from .reader import read
from .writer import Writer, check_target, continued, seal_dataset, upgrade_dataset

__all__ = ["MANIFEST", "Writer", "check_target", "continued", "read", "seal_dataset", "upgrade_dataset"]

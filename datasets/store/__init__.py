"""The store: a directory that runs append to, crash-safely, and that can be sealed for shipping.

    DIR/dataset.json        schema version, name, DeviceSpecs, provenance, SHA-256 of the sealed tables
    DIR/parts/*.parquet     appended during a run, each complete and self-contained
    DIR/parts/*.jsonl       likewise, a line a row: what production measured (see log_part.py)
    DIR/drift/*.parquet     likewise: how the device did meanwhile
    DIR/{problems,configs,measurements,drift}.parquet   the same rows, sealed: small enough for git

A part is written under a temporary name, flushed to the disk and renamed, so a killed run leaves at most one
half-written part. Such a part is ignored on load and named in `Dataset.ignored`; damage to a sealed table is
an error, because the manifest vouches for it.

    DIR/.collecting, DIR/.writing    locks: there while a collection, or one write, goes on (see `datasets.locks`)
"""

from __future__ import annotations

from ..manifest import MANIFEST
from .reader import read
from .seal import check_target, seal_dataset, upgrade_dataset
from .writer import Writer, continued

__all__ = ["MANIFEST", "Writer", "check_target", "continued", "read", "seal_dataset", "upgrade_dataset"]

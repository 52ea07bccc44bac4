"""The store: a folder that runs append to in a crash-safe way, and that can be sealed for shipping.

`datasets/README.md` lists its files. A part is written under a temporary name, flushed to the disk and renamed, so a
killed run leaves at most one incomplete part, which `read` ignores and names in `Dataset.ignored`. A damaged sealed
table is an error, because the manifest has its checksum.
"""

from __future__ import annotations

from ..manifest import MANIFEST
from .reader import read
from .writer import Writer, check_target, continued, seal_dataset, upgrade_dataset

__all__ = ["MANIFEST", "Writer", "check_target", "continued", "read", "seal_dataset", "upgrade_dataset"]

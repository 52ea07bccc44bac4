"""Files of a store on the disk: each is there whole or not at all, and what a manifest vouches for is what is read."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..disk.atomic import blaming, flush, replacing
from ..manifest import MANIFEST


def write_table(table: pa.Table, path: Path) -> None:
    """Writes a table as Parquet: the same table always gives the same bytes."""
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", compression_level=9)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """An empty folder beside `target`; what was written there takes its place when all is done, and nothing does where
    anything went wrong.

    A new target appears as a whole. In an old one the files are replaced one by one, the manifest last: who reads
    meanwhile sees a SHA-256 that does not fit, never a mixture. Files that are not written again stay.
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

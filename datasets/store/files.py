"""Files of a store on the disk: each is there whole or not at all, and what a manifest vouches for is what is read."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..atomic import flush, replacing
from ..errors import DatasetError
from ..schema import OLDER_VERSIONS, SCHEMA_VERSION

MANIFEST = "dataset.json"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest in a directory. Raises `DatasetError` naming the file where it is none, or of a version that is not
    read here."""
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


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes a manifest of today's version."""
    version = {"schema_version": SCHEMA_VERSION}
    text = json.dumps(version | dict(content) | version, indent=1) + "\n"  # the version first, whatever it was
    with replacing(directory / MANIFEST) as temporary:
        temporary.write_text(text)


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

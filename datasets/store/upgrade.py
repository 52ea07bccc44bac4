"""`upgrade_dataset`: a dataset of an older schema version, written anew as one of today's."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..disk.locks import alone
from ..manifest import MANIFEST, SCHEMA_VERSION, read_manifest, write_manifest
from ..schema import DRIFT_PART, PART, PROBLEMS
from .files import sha256, staged, write_table
from .older import upgraded_problem
from .parquet import UnreadableError, read_table
from .reader import read


def upgrade_dataset(directory: Path | str) -> list[str]:
    """Brings the dataset in a directory to today's schema version; returns the names of the files that changed.

    Only files whose content is of an older version are written: measurements stay byte for byte as they are. Doing so
    twice changes nothing. Older versions are read as they are, so nobody has to; a shipped dataset should be of one.

    Raises `DatasetError` for a dataset that cannot be read, and `ForetuneError` while a collection writes to it.

    >>> upgrade_dataset("measured")  # doctest: +SKIP
    ['problems.parquet', 'dataset.json']
    """
    directory = Path(directory)
    read_manifest(directory)  # where it raises, there is nothing to upgrade
    with alone(directory):
        return _write_anew(directory)


def _write_anew(directory: Path) -> list[str]:
    read(directory)  # every sealed table is what the manifest vouches for, or this raises
    manifest = read_manifest(directory)
    changed = []
    # Each part stands for itself, whatever its version; a torn one is none, and stays to be told of.
    for folder, schema in (("parts", PART), ("drift", DRIFT_PART)):
        for path in sorted((directory / folder).glob("*.parquet")):
            if (table := _upgraded(path, schema)) is not None:
                write_table(table, path)
                changed.append(f"{folder}/{path.name}")
    problems = _upgraded(directory / "problems.parquet", PROBLEMS) if manifest["sealed"] else None
    if problems is not None or manifest["schema_version"] != SCHEMA_VERSION:
        with staged(directory) as staging:
            if problems is not None:
                write_table(problems, staging / "problems.parquet")
                manifest["sealed"] |= {"problems.parquet": sha256(staging / "problems.parquet")}
                changed.append("problems.parquet")
            write_manifest(staging, manifest)
            changed.append(MANIFEST)
    return changed


def _upgraded(path: Path, schema: pa.Schema) -> pa.Table | None:
    """The table in a file, of today's version; None where it already is, or is no table."""
    try:
        table = read_table(path, schema)
    except UnreadableError:
        return None
    was = table.column("problem").to_pylist()
    new = {text: upgraded_problem(text) for text in set(was)}
    if all(text == now for text, now in new.items()) and set(schema.names) <= set(pq.read_schema(path).names):
        return None
    problems = pa.array([new[text] for text in was], pa.string())
    table = table.set_column(schema.get_field_index("problem"), "problem", problems)
    return table.cast(schema).replace_schema_metadata(None)

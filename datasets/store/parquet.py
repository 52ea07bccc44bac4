"""Reading one Parquet file of the store: the columns that a schema names, of its types, and nothing that is missing."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import shown
from .older import upgraded_columns

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
        table.validate(full=True)  # also that texts are UTF-8, which whoever looks at one relies on
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

"""Tables of real models, as CSV files: the same rules and the same words about a mistake for each of them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..datasets import DatasetError, ForetuneError
from ..datasets.console import whole_number
from ..datasets.errors import abridged

#: Far beyond any model: layers of a few ten thousand.
MOST_WIDTH, MOST_NAME = 1 << 20, 200
#: A table of all models there are takes some kilobytes; reading stops here.
_MOST_BYTES = 256 << 10


def table_rows(
    file: Path, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (where it stands, fields by column) of each row of a CSV file with these columns, the first of which is the
    model's name. `optional` columns that the file does not have are empty. Empty lines are passed over.

    Raises `DatasetError` naming the file, line, column and value that is wrong, and what would be right; also for a
    model with two rows, and for a table without any.
    """
    lines: dict[str, int] = {}
    for line, fields in _rows(file, columns, optional):
        where = f"{file}, line {line}"
        name = _name(fields[columns[0]], f"{where}, {columns[0]}")
        if (earlier := lines.setdefault(name, line)) != line:
            raise DatasetError(f"{where}, {columns[0]}: {name!r} stands in line {earlier} already: give each one row")
        yield where, {**dict.fromkeys(optional, ""), **fields, columns[0]: name}
    if not lines:
        raise DatasetError(f"{file}: no models in it: a row for each is due below the columns' names")


def count_in(fields: Mapping[str, str], column: str, where: str, low: int, high: int, step: int = 1) -> int:
    """A field's whole number, between `low` and `high` and a multiple of `step`; else `DatasetError` says where."""
    try:
        count = whole_number(fields[column].strip(), low, high)
    except ForetuneError as error:
        raise DatasetError(f"{where}, {column}: {error}") from None
    if count % step:
        raise DatasetError(f"{where}, {column}: must be a multiple of {step} but is {count}")
    return count


def _name(name: str, where: str) -> str:
    name = name.strip()
    # Evaluation holds out all models of a family at once, which it knows by the name's first word.
    if not (name[:1].isascii() and name[:1].isalpha() and name.isprintable() and len(name) <= MOST_NAME):
        raise DatasetError(
            f"{where}: must be a name that begins with a letter, A to Z, in at most {MOST_NAME} characters, "
            f"but is {abridged(name, 60)!r}"
        )
    return name


def _rows(file: Path, columns: Sequence[str], optional: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, fields by column) of each row."""
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    names: list[str] | None = None
    try:
        for fields in reader:
            where = f"{file}, line {reader.line_num}"
            if not fields:
                continue
            if names is None:
                names = _columns([name.strip() for name in fields], columns, optional, where)
            elif len(fields) != len(names):
                raise DatasetError(f"{where}: must have {len(names)} fields as the first line has, but {len(fields)}")
            else:
                yield reader.line_num, dict(zip(names, fields, strict=True))
    except csv.Error as error:  # a field of over 131,072 characters, or a quote that nothing ends
        raise DatasetError(f"{file}, line {reader.line_num}: not CSV: {error}") from None
    if names is None:
        _columns([], columns, optional, str(file))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DatasetError(f"{file}: cannot be read as a CSV file: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise DatasetError(f"{file}: larger than any table of models ({_MOST_BYTES >> 10} KiB)")
    try:
        text = content.decode("utf-8-sig")  # Excel begins with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DatasetError(f"{file}, line {line}: must be text in UTF-8: save it as `CSV UTF-8`") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DatasetError(f"{file}, line {line}: must be text in UTF-8 but has a NUL byte")
    return text


def _columns(names: list[str], columns: Sequence[str], optional: Sequence[str], where: str) -> list[str]:
    missing = [column for column in columns if column not in names]
    others = [name for name in names if name not in (*columns, *optional)]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    for wrong, found in (("missing", missing), ("unknown", others), ("there twice", repeated)):
        if found:
            due = ",".join(columns) + (f", and may have {' and '.join(optional)}" if optional else "")
            raise DatasetError(f"{where}: columns {wrong}: {abridged(', '.join(found))}; the first line must be {due}")
    return names

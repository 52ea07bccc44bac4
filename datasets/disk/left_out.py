"""`LeftOut`: rows of a dataset's files that cannot be read, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Lines, and then files, that a message names.
_MOST_NAMED = 3


@dataclass(frozen=True)
class LeftOut:
    """Rows of one file that are left out for one reason. The file stays as it is."""

    file: str  # as parts/NAME, in the dataset's folder
    why: str
    rows: int | None = None  # how many; None where the file does not say
    lines: tuple[int, ...] = ()  # where the first of them are, counted from 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"lines": list(self.lines)}

    @property
    def place(self) -> str:
        """The file, and the first few lines.

        >>> LeftOut("parts/a.jsonl", "not JSON", 5, (2, 3, 7, 9)).place
        'parts/a.jsonl line 2, 3, 7, ...'
        """
        shown = ", ".join(map(str, self.lines[:_MOST_NAMED]))
        more = ", ..." if (self.rows or 0) > _MOST_NAMED else ""
        return f"{self.file} line {shown}{more}" if shown else self.file


def summary(left_out: Sequence[LeftOut]) -> str:
    """Return how many rows are left out, by reason, and where the first of them are.

    >>> summary([LeftOut("parts/a.jsonl", "not JSON", 2, (3, 7)), LeftOut("parts/b.jsonl", "it is a pipe")])
    '2 rows and 1 file are left out: not JSON (2 rows: parts/a.jsonl line 3, 7); it is a pipe (parts/b.jsonl)'
    """
    rows = [one.rows for one in left_out if one.rows is not None]
    files = len(left_out) - len(rows)
    counts = [_plural(sum(rows), "row")] * bool(rows) + [_plural(files, "file")] * bool(files)
    verb = "is" if sum(rows) + files == 1 else "are"
    return f"{' and '.join(counts)} {verb} left out: {'; '.join(_reasons(left_out))}"


def _reasons(left_out: Sequence[LeftOut]) -> Iterator[str]:
    for why in dict.fromkeys(one.why for one in left_out):
        those = [one for one in left_out if one.why == why]
        places = "; ".join(one.place for one in those[:_MOST_NAMED]) + "; ..." * (len(those) > _MOST_NAMED)
        rows = [one.rows for one in those if one.rows is not None]
        yield f"{why} ({_plural(sum(rows), 'row')}: {places})" if rows else f"{why} ({places})"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)

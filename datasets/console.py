"""Tables for terminals and notebooks, and parsers of numbers in command-line options.

Text is shown literally: rich does not interpret it as markup, and control codes are escaped.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import MOST, ForetuneError, abridged
from .errors import printable as printable

if TYPE_CHECKING:
    from rich.text import Text

#: Characters that the frame of a table adds to a line: for each column, and once.
_FRAME, _EDGE = 3, 1
#: The width at which the layout of a table is decided: the same layout serves every wider terminal.
_NARROW = 80


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    below: Sequence[str] = (),
    once: Sequence[str] = (),
    lead: int = 1,
    rest: str = "values",
) -> Table:
    """Return a table that `rich.print` and a notebook show.

    Args:
        title: The title above the table.
        columns: The names of the columns.
        rows: The cells of each row; they are converted to text.
        below: Lines of text below the table.
        once: Columns to report in one line below the table if all rows have the same value there.
        lead: Number of columns that stay columns if the table is wider than 80 characters: the others are then shown as
            name=value in a last column.
        rest: The name of that last column.

    >>> from rich.console import Console
    >>> sizes = table("Sizes", ("name", "bytes", "device"), [("a", 1, "cpu"), ("b", 22, "cpu")], once=("device",))
    >>> Console(width=40).print(sizes)
    Sizes
    ┏━━━━━━┳━━━━━━━┓
    ┃ name ┃ bytes ┃
    ┡━━━━━━╇━━━━━━━┩
    │ a    │ 1     │
    │ b    │ 22    │
    └──────┴───────┘
    All with device=cpu
    >>> Console(width=12).print(sizes)  # doctest: +NORMALIZE_WHITESPACE
    Sizes
    name
    a  bytes=1
    b  bytes=22
    All with
    device=cpu
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    same = [at for at, name in enumerate(columns) if name in once and len({row[at] for row in cells}) == 1]
    common = [f"{printable(columns[at])}={cells[0][at]}" for at in same]
    left = [at for at in range(len(columns)) if at not in same]
    return Table(
        title=printable(title),
        columns=tuple(printable(columns[at]) for at in left),
        rows=tuple(tuple(row[at] for at in left) for row in cells),
        below="\n".join([*(["All with " + " ".join(common)] if common else []), *map(printable, below)]),
        lead=lead,
        rest=rest,
    )


class InNotebooks:
    """Base class of results whose `__rich__` returns a `Table`: notebooks show that table as HTML."""

    def __rich__(self) -> Any:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return str(self.__rich__()._repr_html_())


@dataclass(frozen=True)
class Table:
    """A table made by `table`. No cell is ever cut off.

    A table that fits into 80 characters, or into a narrower terminal, has a frame with all columns. Otherwise the frame
    has the first `lead` columns and one more, which lists the others as name=value. If that does not fit either, or the
    terminal is narrower than 80, there is no frame, and each row is shown as a few lines of name=value.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    below: str
    lead: int = 1
    rest: str = "values"

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks.

        >>> table("Sizes", ("name", "bytes"), [("a<b", 1)])._repr_html_()  # doctest: +ELLIPSIS
        '<table><caption>Sizes</caption><thead><tr><th>name</th>...<td>a&lt;b</td><td>1</td></tr></tbody></table>'
        """
        from html import escape  # imported here, because every launch's process imports this module

        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        below = "".join(f"<p>{escape(line)}</p>" for line in self.below.splitlines())
        caption = f"<caption>{escape(self.title)}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the parts that rich renders: the title, the framed columns or the rows as lines, and `below`."""
        from rich.text import Text

        yield Text(self.title, style="table.title")
        room, narrow = options.max_width, min(options.max_width, _NARROW)
        if _widths(self.columns, self.rows, narrow) is not None:
            yield _framed(self.columns, self.rows, room)
        elif room >= _NARROW and self._folded(narrow) is not None:
            yield _framed(*(self._folded(room) or (self.columns, self.rows)), room)
        else:
            yield Text(self.columns[0], style="table.header")
            for row in self.rows:
                yield from self._lines(row, room)
        if self.below:
            yield Text(self.below)

    def _folded(self, room: int) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]] | None:
        """Return columns and rows, with all columns after the first `lead` folded into one of aligned name=value items.

        Return None if the result is wider than `room` characters.
        """
        from rich.cells import cell_len, set_cell_size

        columns = (*self.columns[: self.lead], self.rest)
        items = [
            [f"{name}={row[at]}" if row[at] else "" for row in self.rows]
            for at, name in enumerate(self.columns[self.lead :], self.lead)
        ]
        sizes = [max(map(cell_len, column)) for column in items]
        lead = [max(map(cell_len, column)) for column in zip(columns, *self.rows, strict=False)][: self.lead]
        left = room - _EDGE - _FRAME * len(columns) - sum(lead)
        if max(sizes, default=0) > left:
            return None
        breaks, used = [], 0  # the items that begin a line
        for at, size in enumerate(sizes):
            used += size + 2
            if used - 2 > left or at == 0:
                breaks.append(at)
                used = size + 2
        spans = list(zip(breaks, [*breaks[1:], len(items)], strict=True))

        def cell(number: int) -> str:
            lines = (" ".join(set_cell_size(items[at][number], sizes[at] + 1) for at in range(*span)) for span in spans)
            return "\n".join(line.rstrip() for line in lines)

        return columns, tuple((*row[: self.lead], cell(number)) for number, row in enumerate(self.rows))

    def _lines(self, row: Sequence[str], room: int) -> Iterator[Text]:
        """Yield a row as lines of name=value, each at most `room` wide if an item fits."""
        from rich.cells import cell_len
        from rich.text import Text

        line, *rest = row
        for name, cell in zip(self.columns[1:], rest, strict=True):
            item = f"  {name}={cell}"
            if not cell:
                continue
            if cell_len(line) + cell_len(item) > room:
                yield Text(line)
                line = ""
            line += item
        yield Text(line)


def _framed(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Any:
    """Return rich's object for a table of these columns and rows, with a frame and at most `room` characters wide."""
    from rich.table import Table as Framed
    from rich.text import Text

    framed, widths = Framed(), _widths(columns, rows, room)
    for name, width in zip(columns, widths or itertools.repeat(None), strict=False):
        framed.add_column(Text(name), width=width)
    for row in rows:
        framed.add_row(*map(Text, row))
    return framed


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Return the columns' widths that fit into `room`, the widest narrowed; None if that would break a word."""
    from rich.cells import cell_len

    cells = list(zip(columns, *rows, strict=True))
    widths = [max(cell_len(line) for cell in column for line in [*cell.splitlines(), ""]) for column in cells]
    least = [max(cell_len(word) for cell in column for word in [*cell.split(), ""]) for column in cells]
    room -= _EDGE + _FRAME * len(cells)
    while sum(widths) > room:
        if not (wider := [at for at in range(len(widths)) if widths[at] > least[at]]):
            return None
        widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def percent(ratio: float) -> str:
    """Return how far a ratio is above 1, as the text of a percentage with one decimal.

    >>> percent(1.034)
    '3.4'
    """
    return f"{(ratio - 1) * 100:.1f}"


#: The longest duration of an option, in hours.
MOST_HOURS = 10_000
#: Seconds of an hour, a minute and a second.
_UNITS_S = 3600, 60, 1


def whole_number(text: str, low: int = 0, high: int = MOST) -> int:
    """Return the integer in [low, high] that is written in a text of digits 0 to 9.

    Signs, underscores and digits of other scripts, which `int` accepts, are refused.

    Raises:
        ForetuneError: The text is not such a number. The message names the bounds.

    >>> whole_number("8192", low=1)
    8192
    >>> whole_number("1e3")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: must be a whole number from 0 to 2147483647 but is '1e3'
    """
    # The length is checked first, because int() raises another error for thousands of digits.
    if re.fullmatch("[0-9]+", text) and len(text.lstrip("0")) <= len(str(high)) and low <= int(text) <= high:
        return int(text)
    _refuse(text, f"a whole number from {low} to {high}")


def whole_numbers(text: str, low: int = 1, high: int = MOST, most: int = 1000) -> tuple[int, ...]:
    """Return 1 to `most` comma-separated integers, each parsed as `whole_number` does.

    >>> whole_numbers("32,64,96")
    (32, 64, 96)
    """
    parts = text.split(",")
    if len(parts) > most:
        raise ForetuneError(f"must be at most {most} numbers but there are {len(parts)}")
    try:
        return tuple(whole_number(part, low, high) for part in parts)
    except ForetuneError:
        _refuse(text, f"a list such as 32,64,96, each number from {low} to {high},")


def span(text: str) -> tuple[int, int]:
    """Return the bounds in a text LOW:HIGH of positive integers with LOW <= HIGH; raise `ForetuneError` otherwise.

    >>> span("64:4096")
    (64, 4096)
    """
    low, colon, high = text.partition(":")
    try:
        if colon and (found := (whole_number(low, 1), whole_number(high, 1)))[0] <= found[1]:
            return found
    except ForetuneError:
        pass
    _refuse(text, "a smallest and a largest size, as in 64:4096,")


def number(text: str, low: float, high: float) -> float:
    """Return the number in [low, high] that a text represents; raise `ForetuneError` for others, nan and inf too.

    >>> number("0.1", 0, 1)
    0.1
    """
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        value = math.nan
    if low <= value <= high:
        return value
    _refuse(text, f"a number from {low:g} to {high:g}")


def duration_s(text: str) -> float:
    """Return the seconds of a duration such as 90s, 20m, 1.5h or 1h30m.

    Raises:
        ForetuneError: The text is not a positive duration of at most `MOST_HOURS`.

    >>> duration_s("1.5h"), duration_s("8m40s")
    (5400.0, 520.0)
    """
    match = re.fullmatch(r"(?:([0-9.]+)h)?(?:([0-9.]+)m)?(?:([0-9.]+)s)?", text)
    parts = match.groups("0") if match else ("0",)
    try:
        seconds = sum(float(part) * unit for part, unit in zip(parts, _UNITS_S, strict=False))
    except ValueError:  # several points
        seconds = 0.0
    if 0 < seconds <= MOST_HOURS * 3600:
        return seconds
    _refuse(text, f"a duration such as 90s, 20m or 1h30m, of at most {MOST_HOURS}h,")


def _refuse(text: str, right: str) -> NoReturn:
    """Raise `ForetuneError` for an option's text; `right` describes what it must be."""
    raise ForetuneError(f"must be {right} but is {abridged(text, 60)!r}")

"""`table`: how results look to a person, on a terminal of any width and in a notebook.

What comes from outside is shown as it is: neither as rich's markup nor as a terminal's codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import printable as printable

if TYPE_CHECKING:
    from rich.text import Text

#: What a frame takes of a line: for each column, and once more.
_FRAME, _EDGE = 3, 1


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    below: Sequence[str] = (),
    once: Sequence[str] = (),
) -> Table:
    """A table that `rich.print` and a notebook show, with lines below it. Columns named in `once` are said in one line
    below where all rows have the same there.

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
    said = [f"{printable(columns[at])}={cells[0][at]}" for at in same]
    left = [at for at in range(len(columns)) if at not in same]
    return Table(
        title=printable(title),
        columns=tuple(printable(columns[at]) for at in left),
        rows=tuple(tuple(row[at] for at in left) for row in cells),
        below="\n".join([*(["All with " + " ".join(said)] if said else []), *map(printable, below)]),
    )


@dataclass(frozen=True)
class Table:
    """Made by `table`. Where the columns do not fit side by side with every word whole, a row is a line or two of
    name=value: nothing is ever cut off."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    below: str

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table as Framed
        from rich.text import Text

        yield Text(self.title, style="table.title")
        widths = self._widths(options.max_width)
        if widths is None:
            yield Text(self.columns[0], style="table.header")
            for row in self.rows:
                yield from self._lines(row, options.max_width)
        else:
            framed = Framed()
            for name, width in zip(self.columns, widths, strict=True):
                framed.add_column(Text(name), width=width)
            for row in self.rows:
                framed.add_row(*map(Text, row))
            yield framed
        if self.below:
            yield Text(self.below)

    def _widths(self, room: int) -> list[int] | None:
        """Those of the columns, the widest narrowed as far as is needed; None where that would cut a word."""
        from rich.cells import cell_len

        columns = list(zip(self.columns, *self.rows, strict=True))
        widths = [max(cell_len(line) for cell in column for line in [*cell.splitlines(), ""]) for column in columns]
        least = [max(cell_len(word) for cell in column for word in [*cell.split(), ""]) for column in columns]
        room -= _EDGE + _FRAME * len(columns)
        while sum(widths) > room:
            if not (wider := [at for at in range(len(widths)) if widths[at] > least[at]]):
                return None
            widths[max(wider, key=widths.__getitem__)] -= 1
        return widths

    def _lines(self, row: Sequence[str], room: int) -> Iterator[Text]:
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


def percent(ratio: float) -> str:
    """How much over 1 a ratio is, in percent.

    >>> percent(1.034)
    '3.4'
    """
    return f"{(ratio - 1) * 100:.1f}"

"""`table`: how results look to a person, on a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, below: str = "") -> Any:
    """A `rich.table.Table` of these rows, which `rich.print` and a notebook show, and a text below it.

    >>> table("Sizes", ("name", "bytes"), [("a", 1)]).row_count
    1
    """
    from rich.markup import escape
    from rich.table import Table

    made = Table(*columns, title=escape(title), caption=escape(below) or None, title_justify="left")
    made.caption_justify = "left"
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    return made


def percent(ratio: float) -> str:
    """How much over 1 a ratio is, in percent.

    >>> percent(1.034)
    '3.4'
    """
    return f"{(ratio - 1) * 100:.1f}"

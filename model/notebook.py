"""Write a table as HTML, for the results that a notebook shows."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..datasets.console import Table


def html_table(table: Table) -> str:
    """Return a table as an HTML fragment: caption, header, rows, and the lines below the table. All text is escaped.

    >>> from foretune.datasets.console import table
    >>> html_table(table("Sizes", ("name", "bytes"), [("a < b", 1)]))
    '<table><caption>Sizes</caption><tr><th>name</th><th>bytes</th></tr><tr><td>a &lt; b</td><td>1</td></tr></table>'
    """
    header = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in table.rows]
    below = "".join(f"<p>{escape(line)}</p>" for line in table.below.splitlines())
    body = "".join(f"<tr>{cells}</tr>" for cells in (header, *rows))
    return f"<table><caption>{escape(table.title)}</caption>{body}</table>{below}"

"""`html_table`: a table for notebooks, which needs neither `rich` nor anything else to be installed."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..datasets.console import Table


def html_table(table: Table) -> str:
    """Return a table of `datasets.console.table` as HTML, with its title above and its lines of text below.

    All text is escaped, because names of kernels and devices come from outside.

    >>> from foretune.datasets.console import table
    >>> html_table(table("Sizes", ("name", "bytes"), [("a<b", 1)]))  # doctest: +ELLIPSIS
    '<p><b>Sizes</b></p><table><thead>...<td>a&lt;b</td><td>1</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    below = "".join(f"<p>{escape(line)}</p>" for line in table.below.splitlines())
    return (
        f"<p><b>{escape(table.title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"
    )

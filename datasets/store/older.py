"""Files of older schema versions, read as if they were of today's.

Version 1 knew one ragged dimension, the rows: a problem had its sizes as "group_sizes", and a case the word for how
they were drawn as "routing".
"""

from __future__ import annotations

import json

import pyarrow as pa

#: Columns that had another name: old -> new.
_RENAMED = {"routing": "scenario"}


def upgraded_columns(table: pa.Table) -> pa.Table:
    """A table with today's column names."""
    return table.rename_columns([_RENAMED.get(name, name) for name in table.column_names])


def upgraded_problem(text: str) -> str:
    """One problem as JSON, as today's version writes it; what is none is left to whoever reads it.

    >>> upgraded_problem('{"family": "f", "dims": {"rows": 3}, "dtype": "bf16", "flags": [], "group_sizes": [1, 2]}')
    '{"family": "f", "dims": {"rows": 3}, "dtype": "bf16", "flags": [], "ragged": {"dim": "rows", "sizes": [1, 2]}}'
    """
    if '"group_sizes"' not in text:
        return text
    try:
        problem = json.loads(text)
        sizes = problem.pop("group_sizes")
    except (ValueError, AttributeError, KeyError, RecursionError):
        return text
    return json.dumps(problem | {"ragged": None if sizes is None else {"dim": "rows", "sizes": sizes}})

"""Descriptions of a dataset: counts of its rows, kernel sources of its runs, and rows that could not be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .console import Table, table
from .device import DeviceSpec

if TYPE_CHECKING:
    from .family import KernelChange


def described(
    name: str,
    devices: Sequence[DeviceSpec],
    schema_version: int,
    contents: Mapping[str, Any],
    provenance: Mapping[str, Any],
    ignored: Sequence[str],
    left_out: Sequence[LeftOut] = (),
) -> dict[str, Any]:
    """Return a dataset's description, the dict that `foretune datasets --json` prints, from its parts.

    `contents` is the result of `Dataset.contents`; the other arguments are attributes of a `Dataset`.
    """
    return {
        "name": name,
        "device": ", ".join(spec.name for spec in devices),
        "schema_version": schema_version,
        "families": dict(contents["families"]),
        "provenance": dict(provenance),
        "drifted": dict(contents["drifted"]),
        "ignored": list(ignored),
        "left_out": [one.to_json() for one in left_out],
    }


#: The fact of a run that replayed recorded measurements (`foretune collect --replay`): the name of their dataset, and
#: the ids of the runs that took them.
REPLAY_OF = "replay_of"


def replayed_from(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the datasets whose recorded times the runs in `provenance` replayed, instead of measuring.

    >>> replayed_from({"runs": {"r1": {"replay_of": {"dataset": "h200", "runs": ["a"]}}, "r2": {}}})
    ('h200',)
    """
    runs = provenance.get("runs", {}).values()
    return tuple(sorted({str(facts[REPLAY_OF].get("dataset")) for facts in runs if facts.get(REPLAY_OF)}))


def kernel_sources(provenance: Mapping[str, Any], family: str) -> set[str]:
    """Return the hashes of a family's kernel source that the runs in a dataset's provenance recorded."""
    runs = provenance.get("runs", {}).values()
    return {str(run["kernel_source"]) for run in runs if run.get("family") == family and "kernel_source" in run}


def same_source(one: str, other: str) -> bool:
    """Return whether two recorded hashes can belong to the same kernel source.

    The hash of a kernel that depends on more than the functions it calls by name has a second part. Older datasets
    lack that part; only the first parts are compared then.

    >>> same_source("037307fb8c7f56d3", "037307fb8c7f56d3+4b1de3aa926b63df")
    True
    >>> same_source("037307fb8c7f56d3+2263e89fede9aba3", "037307fb8c7f56d3+4b1de3aa926b63df")
    False
    """
    if one == other:
        return True
    (first, one_more), (second, other_more) = (_parts(text) for text in (one, other))
    return first == second and not (one_more and other_more)


def other_sources(recorded: Iterable[str], now: str) -> set[str]:
    """Return the recorded hashes that cannot belong to the kernel whose hash is `now`."""
    return {source for source in recorded if not same_source(source, now)}


def since(changes: Iterable[KernelChange], source: str) -> tuple[str, list[KernelChange]]:
    """Apply the declared changes of a kernel since a recorded source hash: return the latest hash and the changes.

    Changes that affect no times are left out.

    Args:
        changes: The family's changes, oldest first (`Family.kernel_changes`).
        source: The recorded hash.

    >>> from foretune.datasets.family import KernelChange
    >>> latest, applied = since([KernelChange("a", "b", {"SPLIT": 2}), KernelChange("b", "c", None)], "a")
    >>> latest, [change.knobs for change in applied]
    ('c', [{'SPLIT': 2}])
    """
    applied = []
    for change in changes:
        if same_source(source, change.before):
            source = change.after
            if change.knobs is not None or change.saved_us is not None:
                applied.append(change)
    return source, applied


def _parts(source: str) -> tuple[str, str]:
    """Split the text of `hash_of_kernel` into its two parts, the second "" if missing; any other text is one part."""
    found = re.fullmatch(r"([0-9a-f]{16})(?:\+([0-9a-f]{16}))?", source)
    return (found[1], found[2] or "") if found else (source, "")


#: Defines the rows and columns of the table of datasets.
_CAPTION = (
    "Rows: a kernel family in a dataset, on a device. Columns: the number of problems, of distinct configs and of "
    "measurements, and the plans that chose the configs of each problem."
)


def contents_table(datasets: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of several datasets with one row for each family and device.

    Args:
        datasets: Descriptions with the fields "name", "families" and "ignored" of `described`. Ignored files are listed
            below the table, which ends with a definition of its rows and columns.
    """
    rows = [
        (
            one["name"],
            name,
            device,
            there["problems"],
            family["configs"],
            there["measurements"],
            ", ".join(family["plans"]),
        )
        for one in datasets
        for name, family in one["families"].items()
        for device, there in family["devices"].items()
    ]
    below = [f"{one['name']}: ignored parts: {', '.join(one['ignored'])}" for one in datasets if one["ignored"]]
    below.append(_CAPTION)
    columns = ("name", "family", "device", "problems", "configs", "measurements", "plan")
    return table("Datasets", columns, rows, below=below, once=("plan",))


#: The most lines of a file, and the most files, that a message names.
_MOST_NAMED = 3


@dataclass(frozen=True)
class LeftOut:
    """Rows of one file that are not read, for one reason. The file itself is not changed.

    Attributes:
        file: The file's path in the dataset's folder, such as parts/NAME.
        why: The reason.
        rows: How many rows; None if the file does not tell.
        lines: The line numbers of the first of them, counted from 1.
    """

    file: str
    why: str
    rows: int | None = None
    lines: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict for `json.dumps`."""
        return asdict(self) | {"lines": list(self.lines)}

    @property
    def place(self) -> str:
        """The file and its first few line numbers, as text.

        >>> LeftOut("parts/a.jsonl", "not JSON", 5, (2, 3, 7, 9)).place
        'parts/a.jsonl line 2, 3, 7, ...'
        """
        shown = ", ".join(map(str, self.lines[:_MOST_NAMED]))
        more = ", ..." if (self.rows or 0) > _MOST_NAMED else ""
        return f"{self.file} line {shown}{more}" if shown else self.file


class LogLine(NamedTuple):
    """The position of a line in a log: run id, file and line number. As `str`: "FILE, line N", for messages."""

    run_id: str
    file: str
    line: int  # counted from 1

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def summary_of_left_out(left_out: Sequence[LeftOut]) -> str:
    """Return a sentence that says how many rows are left out, why, and where the first of them are.

    >>> summary_of_left_out([LeftOut("parts/a.jsonl", "not JSON", 2, (3, 7)), LeftOut("parts/b.jsonl", "it is a pipe")])
    '2 rows and 1 file are left out: not JSON (2 rows: parts/a.jsonl line 3, 7); it is a pipe (parts/b.jsonl)'
    """
    rows = [one.rows for one in left_out if one.rows is not None]
    files = len(left_out) - len(rows)
    counts = [_plural(sum(rows), "row")] * bool(rows) + [_plural(files, "file")] * bool(files)
    verb = "is" if sum(rows) + files == 1 else "are"
    return f"{' and '.join(counts)} {verb} left out: {'; '.join(_reasons(left_out))}"


def _reasons(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Yield one text for each reason: the reason, the number of rows, and the first places."""
    for why in dict.fromkeys(one.why for one in left_out):
        those = [one for one in left_out if one.why == why]
        places = "; ".join(one.place for one in those[:_MOST_NAMED]) + "; ..." * (len(those) > _MOST_NAMED)
        rows = [one.rows for one in those if one.rows is not None]
        yield f"{why} ({_plural(sum(rows), 'row')}: {places})" if rows else f"{why} ({places})"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)

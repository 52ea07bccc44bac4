"""Logs: measurements that tuning in production makes anyway, as lines of JSON. Writing them needs no pyarrow.

    DIR/parts/RUN.jsonl     the first line describes the run, each other line is a row

A log is a part of a dataset; `store.read` reads it like the other parts. One process appends to it, one line at a time,
and each line begins with its line break, so a killed process leaves at most the last line incomplete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from .config import KernelConfig
from .contents import LeftOut
from .device import DeviceSpec
from .errors import ForetuneError, abridged, check_word, shown
from .files import open_regular, why_irregular
from .manifest import check_facts
from .measurement import Measurement, Status
from .problem import Problem

#: The file name suffix of a log.
LOG_SUFFIX = ".jsonl"
#: The plan that the provenance of a logged run has: a tuner decided which configs were timed.
LOGGED = "production"
#: How times were taken. "cold": as `Measurement.time_us` says. "autotuner": by `triton.autotune`, whose benchmark also
#: clears the L2, but includes the gaps between launches. "warm": with the L2 as the previous launch left it.
#: "refined": the estimated mean of an op's own calls in a running program.
TIMED_HOW = ("cold", "autotuner", "warm", "refined")
#: The most bytes of a line: a problem may have a million segment sizes.
_LONGEST_LINE = 1 << 25
_Parsed = TypeVar("_Parsed")


#: The most line numbers that are kept of the rows left out for one reason.
_MOST_LINES = 100
#: The version of the format. A first line without "schema_version" has it.
_VERSION = 1


@dataclass(frozen=True)
class LogPart:
    """The content of one log.

    Attributes:
        run_id: The run's id.
        facts: The run's provenance; "timed" is one of `TIMED_HOW`.
        device: The device.
        rows: The measurements; of repeated ones of a problem and config, the last.
        lines: The line number of each row, counted from 1.
        is_complete: Whether all lines could be read, except possibly the last one.
    """

    run_id: str
    facts: Mapping[str, Any]
    device: DeviceSpec
    rows: tuple[Measurement, ...]
    lines: tuple[int, ...]
    is_complete: bool


class _InvalidLineError(Exception):
    """The reason why a line cannot be read."""


def run_line(run_id: str, facts: Mapping[str, Any], device: DeviceSpec) -> bytes:
    """Return the first line of a log, which describes the run: its id, its provenance (`facts`) and its device."""
    return _line({"run_id": run_id, "facts": dict(facts), "device": device.to_json()})


def row_line(problem: Problem, config: KernelConfig, time_us: float | None) -> bytes:
    """Return the line of one measurement, in microseconds; `time_us=None` means that the launch failed."""
    status = Status.LAUNCH_FAILED if time_us is None else Status.OK
    value = {"problem": problem.to_json(), "config": config.to_json(), "status": status.value, "time_us": time_us}
    return _line(value)


def read_log_part(path: Path) -> tuple[LogPart | None, list[LeftOut]]:
    """Read the valid lines of a log.

    Args:
        path: A file in the folder `parts` of a dataset.

    Returns:
        The content, or None if the first line is not valid; and the rows that are left out, by reason.
    """
    place = f"{path.parent.name}/{path.name}"
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            return _read(file, place)
    except (ForetuneError, IsADirectoryError) as error:
        return None, [LeftOut(place, why_irregular(error))]


def _read(file: BinaryIO, place: str) -> tuple[LogPart | None, list[LeftOut]]:
    """Read an open log as `read_log_part` does; `place` is its path in messages."""
    run, why_none = None, "its first line is missing"
    rows: dict[tuple[Problem, KernelConfig], tuple[Measurement, int]] = {}
    wrong: dict[str, list[int]] = {}
    first = last = count = 0
    for number, line in _lines(file):
        first, last, count = first or number, number, count + 1
        try:
            if number == first:
                run = _run(line)
            elif run is not None:
                row = _row(line, *run)
                rows.pop((row.problem, row.config), None)  # the repeated row takes the later position
                rows[row.problem, row.config] = row, number
        except _InvalidLineError as error:
            if number == first:
                why_none = f"its first line is {error}"
            else:
                wrong.setdefault(str(error), []).append(number)
    if run is None:
        return None, [LeftOut(place, why_none, max(count - 1, 0), (first,) if first else ())]
    run_id, facts, device = run
    is_complete = [number for lines in wrong.values() for number in lines] in ([], [last])
    left_out = [LeftOut(place, why, len(lines), tuple(lines[:_MOST_LINES])) for why, lines in wrong.items()]
    measurements, numbers = tuple(row for row, _ in rows.values()), tuple(number for _, number in rows.values())
    return LogPart(run_id, facts, device, measurements, numbers, is_complete), left_out


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number, counted from 1, and the bytes of each line that is not empty; None for one that is too long."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        is_long = False
        while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            is_long, line = True, file.readline(_LONGEST_LINE)
        if is_long or line.strip():
            yield number, None if is_long else line


def _run(line: bytes | None) -> tuple[str, dict[str, Any], DeviceSpec]:
    """Parse the first line: the run's id, its provenance, and the device."""
    value = _object(line, {"run_id", "facts", "device"})
    if (version := value.get("schema_version", _VERSION)) != _VERSION:
        raise _InvalidLineError(f"of schema_version {shown(version)}, but this Foretune reads {_VERSION}")
    try:
        run_id, facts, spec = (
            check_word("run_id", value["run_id"]),
            value["facts"],
            DeviceSpec.from_json(value["device"]),
        )
        if not isinstance(facts, dict) or facts.get("timed") not in TIMED_HOW:
            raise ForetuneError(f"timed must be one of {', '.join(TIMED_HOW)} but is {shown(facts)}")
        check_facts(facts)
    except (ForetuneError, TypeError, RecursionError) as error:
        raise _InvalidLineError(f"not valid: {abridged(str(error))}") from None
    return run_id, facts, spec


def _row(line: bytes | None, run_id: str, facts: Mapping[str, Any], device: DeviceSpec) -> Measurement:
    """Parse the line of a measurement of the run with this id, provenance (`facts`) and device."""
    value = _object(line, {"problem", "config", "status", "time_us"})
    problem = _valid(_problem, value["problem"], "problem")
    config = _valid(_config, value["config"], "config")
    if problem.family != facts.get("family", problem.family):
        raise _InvalidLineError("of another family than its run")
    try:
        status = Status(value["status"])
    except (ValueError, TypeError):
        raise _InvalidLineError("of an unknown status") from None
    try:
        return Measurement(problem, device.name, config, status, value["time_us"], run_id=run_id)
    except (ForetuneError, TypeError, OverflowError):
        raise _InvalidLineError("with a time that is not valid for the status") from None


def _object(line: bytes | None, keys: Set[str]) -> dict[str, Any]:
    """Parse a line as a JSON object that has these keys, and no key twice."""
    if line is None:
        raise _InvalidLineError(f"longer than {_LONGEST_LINE >> 20} MiB")
    try:
        value = json.loads(line, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):  # also invalid UTF-8, and numbers of 5,000 digits
        raise _InvalidLineError("not JSON") from None
    if not isinstance(value, dict) or not value.keys() >= keys:
        raise _InvalidLineError(f"not an object with {', '.join(sorted(keys))}")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return pairs as a dict; raise `_InvalidLineError` if a key is repeated."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _InvalidLineError("with a key that is given twice")
    return value


def _valid(parse: Callable[[str], _Parsed], value: object, what: str) -> _Parsed:
    """Parse a value of a line; raise `_InvalidLineError` if it is not a valid `what`."""
    try:
        return parse(json.dumps(value))
    except (ValueError, TypeError, RecursionError, OverflowError):  # a ForetuneError is a ValueError
        raise _InvalidLineError(f"with an invalid {what}") from None


# Both are cached, because a run has a few problems with hundreds of configs each.
@lru_cache(maxsize=4096)
def _problem(text: str) -> Problem:
    return Problem.from_json(json.loads(text))


@lru_cache(maxsize=1 << 14)
def _config(text: str) -> KernelConfig:
    return KernelConfig.from_json(json.loads(text))


def _line(value: Mapping[str, Any]) -> bytes:
    """Return a value as a line of JSON that begins with its line break."""
    return b"\n" + json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

"""Rows of benchmarks that production does anyway: a part of a dataset as lines of JSON, written without pyarrow.

    DIR/parts/RUN.jsonl     a line for the run, then a line a row; each begins with its line break

One process appends to a file, one write a line, so that a kill tears at most the last. `store.read` takes it as it
takes the other parts.
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

#: What its name ends with.
LOG_SUFFIX = ".jsonl"
#: The plan of such a run: tuning went before, and decided which configs were timed.
LOGGED = "production"
#: How a time was taken. "cold": as `Measurement.time_us` says. "autotuner": by `triton.autotune`, whose benchmark
#: clears the L2 as well, but counts the gaps between launches. "warm": with the L2 as the launch before left it.
TIMED_HOW = ("cold", "autotuner", "warm")
#: Of ragged sizes, a problem may have a million.
_LONGEST_LINE = 1 << 25
_Parsed = TypeVar("_Parsed")


#: Of the rows that are left out for one reason, so many lines are named.
_MOST_LINES = 100
#: Of a first line that says none: the only one there has been.
_VERSION = 1


@dataclass(frozen=True)
class LogPart:
    """What one file has."""

    run_id: str
    facts: Mapping[str, Any]  # of the run, as provenance has them; "timed" is one of TIMED_HOW
    device: DeviceSpec
    rows: tuple[Measurement, ...]  # of a problem and a config that were timed again, the last
    is_whole: bool  # whether every line but a torn last one was a row


class _NoRowError(Exception):
    """Why a line is no row."""


def run_line(run_id: str, facts: Mapping[str, Any], device: DeviceSpec) -> bytes:
    """The first line of a file."""
    return _line({"run_id": run_id, "facts": dict(facts), "device": device.to_json()})


def row_line(problem: Problem, config: KernelConfig, time_us: float | None) -> bytes:
    """A row: a time, or that the config failed (None)."""
    status = Status.LAUNCH_FAILED if time_us is None else Status.OK
    value = {"problem": problem.to_json(), "config": config.to_json(), "status": status.value, "time_us": time_us}
    return _line(value)


def read_log_part(path: Path) -> tuple[LogPart | None, list[LeftOut]]:
    """Read a file, as far as it is valid.

    Args:
        path: The file, in a dataset's folder of parts.

    Returns:
        What the file has, None if not even its first line is valid; and the rows that are left out, by reason.
    """
    place = f"{path.parent.name}/{path.name}"
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            return _read(file, place)
    except (ForetuneError, IsADirectoryError) as error:
        return None, [LeftOut(place, why_irregular(error))]


def _read(file: BinaryIO, place: str) -> tuple[LogPart | None, list[LeftOut]]:
    run, why_none = None, "its first line is missing"
    rows: dict[tuple[Problem, KernelConfig], Measurement] = {}
    wrong: dict[str, list[int]] = {}
    first = last = count = 0
    for number, line in _lines(file):
        first, last, count = first or number, number, count + 1
        try:
            if number == first:
                run = _run(line)
            elif run is not None:
                row = _row(line, *run)
                rows.pop((row.problem, row.config), None)  # so that it stands where the last one stood
                rows[row.problem, row.config] = row
        except _NoRowError as error:
            if number == first:
                why_none = f"its first line is {error}"
            else:
                wrong.setdefault(str(error), []).append(number)
    if run is None:
        return None, [LeftOut(place, why_none, max(count - 1, 0), (first,) if first else ())]
    run_id, facts, device = run
    is_whole = [number for lines in wrong.values() for number in lines] in ([], [last])
    left_out = [LeftOut(place, why, len(lines), tuple(lines[:_MOST_LINES])) for why, lines in wrong.items()]
    return LogPart(run_id, facts, device, tuple(rows.values()), is_whole), left_out


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Each line that is not empty and its number, counted from 1; None for one that is too long to be read."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        is_long = False
        while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            is_long, line = True, file.readline(_LONGEST_LINE)
        if is_long or line.strip():
            yield number, None if is_long else line


def _run(line: bytes | None) -> tuple[str, dict[str, Any], DeviceSpec]:
    """What a first line says: the run's id, its facts, and the device."""
    value = _object(line, {"run_id", "facts", "device"})
    if (version := value.get("schema_version", _VERSION)) != _VERSION:
        raise _NoRowError(f"of schema_version {shown(version)}, but this Foretune reads {_VERSION}")
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
        raise _NoRowError(f"not valid: {abridged(str(error))}") from None
    return run_id, facts, spec


def _row(line: bytes | None, run_id: str, facts: Mapping[str, Any], device: DeviceSpec) -> Measurement:
    value = _object(line, {"problem", "config", "status", "time_us"})
    problem = _valid(_problem, value["problem"], "problem")
    config = _valid(_config, value["config"], "config")
    if problem.family != facts.get("family", problem.family):
        raise _NoRowError("of another family than its run")
    try:
        status = Status(value["status"])
    except (ValueError, TypeError):
        raise _NoRowError("of an unknown status") from None
    try:
        return Measurement(problem, device.name, config, status, value["time_us"], run_id=run_id)
    except (ForetuneError, TypeError, OverflowError):
        raise _NoRowError("with a time that is none, or does not go with the status") from None


def _object(line: bytes | None, keys: Set[str]) -> dict[str, Any]:
    """The object in a line, which has these keys, and each of its keys once."""
    if line is None:
        raise _NoRowError(f"longer than {_LONGEST_LINE >> 20} MiB")
    try:
        value = json.loads(line, object_pairs_hook=_distinct)
    except (ValueError, RecursionError):  # also bytes that are no text, and numbers of 5,000 digits
        raise _NoRowError("not JSON") from None
    if not isinstance(value, dict) or not value.keys() >= keys:
        raise _NoRowError(f"no object with {', '.join(sorted(keys))}")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _NoRowError("with a key that is given twice")
    return value


def _valid(parse: Callable[[str], _Parsed], value: object, what: str) -> _Parsed:
    try:
        return parse(json.dumps(value))
    except (ValueError, TypeError, RecursionError, OverflowError):  # a ForetuneError among them
        raise _NoRowError(f"with an invalid {what}") from None


# A run has a few problems with hundreds of configs each.
@lru_cache(maxsize=4096)
def _problem(text: str) -> Problem:
    return Problem.from_json(json.loads(text))


@lru_cache(maxsize=1 << 14)
def _config(text: str) -> KernelConfig:
    return KernelConfig.from_json(json.loads(text))


def _line(value: Mapping[str, Any]) -> bytes:
    return b"\n" + json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

"""Rows of benchmarks that production does anyway: a part of a dataset as lines of JSON, written without pyarrow.

    DIR/parts/RUN.jsonl     a line for the run, then a line a row; each begins with its line break

One process appends to a file, one write a line, so that a kill tears at most the last. `store.read` takes it as it
takes the other parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .config import KernelConfig
from .device import DeviceSpec
from .errors import ForetuneError, check_word, shown
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


@dataclass(frozen=True)
class LogPart:
    """What one file has."""

    run_id: str
    facts: Mapping[str, Any]  # of the run, as provenance has them; "timed" is one of TIMED_HOW
    device: DeviceSpec
    rows: tuple[Measurement, ...]  # of a problem and a config that were timed again, the last
    is_whole: bool  # whether every line but a torn last one was a row


def run_line(run_id: str, facts: Mapping[str, Any], device: DeviceSpec) -> bytes:
    """The first line of a file."""
    return _line({"run_id": run_id, "facts": dict(facts), "device": device.to_json()})


def row_line(problem: Problem, config: KernelConfig, time_us: float | None) -> bytes:
    """A row: a time, or that the config failed (None)."""
    status = Status.LAUNCH_FAILED if time_us is None else Status.OK
    value = {"problem": problem.to_json(), "config": config.to_json(), "status": status.value, "time_us": time_us}
    return _line(value)


def read_log_part(path: Path) -> LogPart | None:
    """What a file has, as far as it is right; None where not even its first line is."""
    rows: dict[tuple[Problem, KernelConfig], Measurement] = {}
    with path.open("rb") as file:
        lines = [line for line in iter(lambda: file.readline(_LONGEST_LINE), b"") if line.strip()]
    try:
        first = json.loads(lines[0])
        run_id, facts, device = check_word("run_id", first["run_id"]), first["facts"], first["device"]
        spec = DeviceSpec.from_json(device)
        if not isinstance(facts, dict) or facts.get("timed") not in TIMED_HOW:
            raise ForetuneError(f"timed must be one of {', '.join(TIMED_HOW)} but is {shown(facts)}")
    except (IndexError, KeyError, TypeError, ValueError, RecursionError):
        return None
    wrong = []
    for number, line in enumerate(lines[1:], 1):
        row = _row(line, spec.name, run_id)
        if row is None:
            wrong.append(number)
        else:
            rows.pop((row.problem, row.config), None)  # so that it stands where the last one stood
            rows[row.problem, row.config] = row
    return LogPart(run_id, facts, spec, tuple(rows.values()), not wrong or wrong == [len(lines) - 1])


def _row(line: bytes, device: str, run_id: str) -> Measurement | None:
    try:
        value = json.loads(line)
        problem, config = _problem(json.dumps(value["problem"])), _config(json.dumps(value["config"]))
        return Measurement(problem, device, config, Status(value["status"]), value["time_us"], run_id=run_id)
    except (KeyError, TypeError, ValueError, RecursionError):  # a ForetuneError among them
        return None


# A run has a few problems with hundreds of configs each.
@lru_cache(maxsize=4096)
def _problem(text: str) -> Problem:
    return Problem.from_json(json.loads(text))


@lru_cache(maxsize=1 << 14)
def _config(text: str) -> KernelConfig:
    return KernelConfig.from_json(json.loads(text))


def _line(value: Mapping[str, Any]) -> bytes:
    return b"\n" + json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

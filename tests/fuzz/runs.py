"""Draws inputs of a kind and judges them: a few, the same ones in every run, or many in processes of their own.

`python -m fuzz.runs KIND COUNT SEED FOLDER` is such a process; it prints what came of each input, as JSON.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fuzz.judging import TroubleError
from hypothesis import HealthCheck, Phase, given, seed, settings

KINDS = (
    "bundles",
    "caches",
    "calls",
    "commands",
    "datasets",
    "exports",
    "families",
    "functions",
    "logs",
    "pins",
    "tuners",
)
MOST_SECONDS, MOST_BYTES = 20, 2 << 30
#: So many inputs a process: what one leaves behind does not add up.
CHUNK = 250
#: Of a whole chunk, for what no alarm ends.
_CHUNK_SECONDS = 1800


@dataclass
class Counts:
    """What came of inputs: how many had which outcome, and of each trouble the shortest input."""

    outcomes: Counter[str] = field(default_factory=Counter)
    troubles: dict[str, str] = field(default_factory=dict)

    def add(self, outcome: str, trouble: str = "", given: str = "") -> None:
        self.outcomes[outcome] += 1
        if trouble and len(given) < len(self.troubles.get(trouble, given + "x")):
            self.troubles[trouble] = given

    def update(self, other: Counts) -> None:
        self.outcomes.update(other.outcomes)
        for trouble, given_there in other.troubles.items():
            if len(given_there) < len(self.troubles.get(trouble, given_there + "x")):
                self.troubles[trouble] = given_there


def few(kind: str, count: int, folder: Path) -> Counts:
    """What comes of so many inputs, the same ones in every run, in this process."""
    return _judged(kind, settings(_settings(count), derandomize=True), folder)


def many(kind: str, count: int, first_seed: int, folder: Path) -> Counts:
    """What comes of so many inputs, drawn in processes that may die."""
    counts = Counts()
    for number in range(0, count, CHUNK):
        chunk = folder / f"{kind}-{number}"
        chunk.mkdir(parents=True)
        counts.update(_in_a_process(kind, min(CHUNK, count - number), first_seed + number, chunk))
    return counts


def _in_a_process(kind: str, count: int, its_seed: int, folder: Path) -> Counts:
    command = [sys.executable, "-m", "fuzz.runs", kind, str(count), str(its_seed), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "counts").open("w") as out, (folder / "errors").open("w") as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, start_new_session=True)
        try:
            ended = child.wait(_CHUNK_SECONDS)
        except subprocess.TimeoutExpired:
            ended = None
        finally:
            os.killpg(child.pid, signal.SIGKILL) if child.poll() is None else None
            child.wait()
    lines = (folder / "counts").read_text().splitlines()
    counts = Counts()
    if lines and lines[-1].startswith("{"):
        told = json.loads(lines[-1])
        counts = Counts(Counter(told["outcomes"]), told["troubles"])
    else:
        what = "hang" if ended is None else "traceback"
        why = (folder / "errors").read_text()[-300:]
        counts.add(what, f"{what}: the process ended with {ended}: {why}", (folder / "last").read_text())
    return counts


def _judged(
    kind: str,
    how: settings,
    folder: Path,
    limited: Callable[[Any], AbstractContextManager[None]] = nullcontext,
    its_seed: int | None = None,
) -> Counts:
    """What comes of inputs that are not made smaller: that would take minutes, and the shortest are told."""
    module = import_module(f"fuzz.{kind}")
    counts = Counts()

    @settings(how, phases=[Phase.generate])
    @given(module.inputs)
    def judge(one: Any) -> None:
        try:
            with limited(one):
                outcome = module.check(one, folder)
            counts.add(outcome)
        except MemoryError:
            counts.add("over memory", "over memory: MemoryError", _warned(one))
        except TroubleError as trouble:
            counts.add(trouble.kind, f"{trouble.kind}: {trouble.where}", f"{_warned(one)} -> {trouble.text}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (judge if its_seed is None else seed(its_seed)(judge))()
    return counts


def _settings(count: int) -> settings:
    return settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def _warned(one: Any) -> str:
    return ascii(one)[:2000]


@contextmanager
def _limited(folder: Path, one: Any) -> Iterator[None]:
    """What takes too long is ended, as soon as Python comes to it; what took too much memory is told."""

    def end(*_: Any) -> None:
        raise TroubleError("hang", f"over {MOST_SECONDS} s")

    (folder / "last").write_text(_warned(one))
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    signal.signal(signal.SIGALRM, end)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
    if _peak_bytes() > MOST_BYTES:
        raise TroubleError("over memory", f"{type(one).__name__}", f"{_peak_bytes() >> 20} MiB")


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # torch maps gigabytes that it does not use
    its_kind, its_count, its_seed, its_folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    counted = _judged(its_kind, _settings(its_count), its_folder, partial(_limited, its_folder), its_seed)
    print(json.dumps({"outcomes": counted.outcomes, "troubles": counted.troubles}))  # noqa: T201

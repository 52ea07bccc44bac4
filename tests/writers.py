"""What writes to a dataset, alone or as a process of its own: `python writers.py NAME` writes to each folder that it
reads the name of, as two runs in two threads, each on a device of its own."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

from foretune.datasets import Case, DeviceSpec, KernelConfig, Measurement, Problem, Status
from foretune.datasets.measurement import Reading
from foretune.datasets.store import Writer

DEVICE = DeviceSpec.named("h200")
PROBLEMS = [Problem.of("toy", rows=rows, columns=64) for rows in (8, 16)]
CONFIG = KernelConfig.of(BLOCK=64)


def row(problem, device=DEVICE.name):
    return Case(problem, ("random",)), [Measurement(problem, device, CONFIG, Status.OK, time_us=7.0)]


def append(folder, name):
    """What a run on a device of that name measures: two parts and two readings. Returns the folder."""
    writer = Writer(folder, "mine", [replace(DEVICE, name=name)], {"by": name}, run_id=f"run-{name}")
    for problem in PROBLEMS:
        writer.append(*row(problem, name))
        writer.append_drift([Reading(problem, "0", 1.0, 100.0)])
    return folder


def devices_of(name):
    """Those of a process of that name."""
    return [f"{name}{thread}" for thread in range(2)]


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        threads = [threading.Thread(target=append, args=(Path(line.strip()), name)) for name in devices_of(sys.argv[1])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.stdout.write("done\n")
        sys.stdout.flush()

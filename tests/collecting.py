"""A collection as a process of its own, to be killed: `python collecting.py OUT GPUS SECONDS ENDLESS`.

Replays the fake family's times on so many GPUs, each a process, at SECONDS a config; the last ENDLESS cases never end.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from fakes import fake_cases
from faulty import FaultyGpu
from foretune.collect import campaign, row_writer, worker
from foretune.collect.processes import Child, Watch
from foretune.collect.run_state import RunState, folder_of_run
from foretune.collect.summary import Summary
from replay import FAMILIES, ReplayPool

CASES = fake_cases()[:7]
#: Of a run that nobody made, for what shows one.
SUMMARY = Summary(
    plan="exhaustive",
    cases=3,
    measurements=100,
    statuses={"ok": 90, "hopeless": 10},
    seconds=61.0,
    gpus=2,
    configs_per_s=1.64,
    gpu_busy_share=0.83,
    compile_s=120.0,
    lost_s=4.0,
    drifted={},
    skipped=(),
    complete=True,
    interrupted=False,
)


def collect(out, gpus, *, limits=None, cases=CASES):
    """The summary of one run on these GPUs, each with a process of its own."""
    row_writer.run_provenance = lambda family, device: {"family": family.name, "kernel_source": family.source_hash()}
    with folder_of_run(out), Watch() as watch:
        starts = [partial(Child, worker.serve, gpu, FAMILIES) for gpu in gpus]
        options = [limits] if limits else []
        return campaign.Campaign(RunState(FAMILIES, cases, out), [starts], ReplayPool(), watch, *options).measure()


if __name__ == "__main__":
    out, gpus, seconds, endless = sys.argv[1:]
    row_writer.FLUSH_SECONDS = 0.05
    faults = {case.problem: "never ends" for case in CASES[len(CASES) - int(endless) :]}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    summary = collect(Path(out), [FaultyGpu(faults, float(seconds))] * int(gpus))
    sys.stdout.write(json.dumps(summary.to_json()))

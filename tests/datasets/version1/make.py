"""Made the dataset beside this file, of schema version 1: `PYTHONPATH=PARENT python make.py FOLDER` with the code of
e97a7af in PARENT/foretune. Sealed tables of one run, and the parts of a second that went on from there."""

import sys
import tempfile

from foretune.datasets import Case, DeviceSpec, KernelConfig, Measurement, Problem, Status
from foretune.datasets.measurement import Reading
from foretune.datasets.store import Writer, seal

H200 = DeviceSpec.named("h200")
PART = H200.with_sms(64)
CONFIGS = [KernelConfig.of(BLOCK_M=block, num_warps=warps) for block in (16, 32) for warps in (4, 8)]
CASES = [
    Case(Problem.of("toy", groups=2, rows=8, n=64, group_sizes=(2, 6)), ("A-1B/w2", "B-7B/w2"), "zipf"),
    Case(Problem.of("toy", groups=3, rows=9, n=64, dtype="fp16", flags=("permute_x",), group_sizes=(3, 3, 3)),
         ("random",), "balanced"),
    Case(Problem.of("toy", groups=2, rows=8, n=64), ("A-1B/w13",), "uniform"),
    Case(Problem.of("other", m=4, n=5), ("random",), ""),
]  # fmt: skip


def outcomes(problem, device, base_us):
    ok, slow, failing, lost = CONFIGS
    facts = {"registers": 40, "spills": 0, "smem_bytes": 4096, "compile_ms": 12.5, "spread": 0.01}
    yield Measurement(problem, device.name, ok, Status.OK, time_us=base_us, samples=7, **facts)
    yield Measurement(problem, device.name, slow, Status.EARLY_STOPPED, time_us=9.5 * base_us, samples=1)
    yield Measurement(problem, device.name, failing, Status.COMPILE_FAILED, error="no such layout")
    yield Measurement(problem, device.name, lost, Status.WRONG_RESULT, error="relative error 0.3")
    for timing_pass in (2, 3):
        time_us = base_us + timing_pass / 8
        yield Measurement(problem, device.name, ok, Status.OK, time_us=time_us, samples=9, timing_pass=timing_pass)


def write(folder, run_id, device, cases, base_us):
    origin = {"family": "toy", "kernel_source": "toy-1", "triton": "3.6.0", "date": "2026-11-21T04:40:37+00:00"}
    writer = Writer(folder, "mine", [device], origin | {"plan": "exhaustive"}, run_id=run_id)
    for place, case in enumerate(cases):
        writer.append(case, outcomes(case.problem, device, base_us + place))
    writer.append_drift(
        Reading(case.problem, "0", 10.0 * place + second, 100.0 + 30.0 * (place == 1))
        for place, case in enumerate(cases)
        for second in range(2)
    )


if __name__ == "__main__":
    out, parts = sys.argv[1], tempfile.mkdtemp()
    write(parts, "20261121-044037-aaaa", H200, CASES[:3], 10.0)
    seal(parts, out, name="version1")
    write(out, "20261121-054037-bbbb", PART, CASES[1:], 20.0)

"""Collects a dataset of both families without a GPU: `python replayed.py OUT`.

Times are a model's; what is small enough is also launched, in Triton's interpreter, and its result compared. So it
needs TRITON_INTERPRET=1, and `replay.py` of Foretune's own tests on the path.
"""

from __future__ import annotations

import math
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from foretune.collect.runner import Trial
from foretune.datasets import Case, DeviceSpec, Problem, Status
from foretune.kernels import find_family
from interpreting import patch_once_a_launch
from replay import run
from replay_runner import ReplayRunner

H200 = DeviceSpec.named("h200")
CPU = replace(H200, backend="cpu")


def model_us(family, problem, config, timing_pass):
    """Bytes at the card's bandwidth and elements by how many a thread has, in waves over the SMs; 1 % of noise."""
    (programs,) = family.grid(problem, config)
    columns = math.ceil(problem["columns"] / config["BLOCK"]) * config["BLOCK"]
    each = config["BLOCK"] * config["ROWS"] / (32 * config.num_warps)
    wave_us = columns * config["ROWS"] / 4e3 * (1 + 0.2 * abs(math.log2(each / 16))) + 0.3
    waves = math.ceil(programs / (132 * min(64 // config.num_warps, 32)))
    seed = zlib.crc32(f"{problem} {config}".encode())
    noise = np.random.default_rng([seed, timing_pass]).normal(1, 0.01)
    return float((2 + waves * wave_us + family.bytes(problem) / (H200.copy_bandwidth_gbs * 1e3)) * noise)


class CheckingRunner(ReplayRunner):
    """Serves the model's times. Problems of at most `small` elements are launched too, and wrong results told."""

    def __init__(self, small=3_000):
        super().__init__()
        self.small = small

    def prepare(self, family, problem):
        self.family, self.problem = Timed(family), problem
        super().prepare(self.family, problem)
        self.inputs = None
        if problem["rows"] * problem["columns"] <= self.small:
            self.inputs = family.inputs(problem, CPU)
            self.expected = family.reference(self.inputs)

    def scan(self, config, best_us):
        facts = {"registers": 24 + config["BLOCK"] // 256, "spills": 0, "smem_bytes": 128 * config.num_warps}
        if self.inputs is not None:
            y = self.family.launch(self.inputs, config)
            error = float((y.float() - self.expected).norm() / self.expected.norm())
            y.fill_(float("nan"))
            if not error <= self.family.tolerance(self.problem):
                return Trial(Status.WRONG_RESULT, error=f"relative error {error:.2g}", **facts)
        return replace(super().scan(config, best_us), **facts)

    def probe(self, family, problem, config):
        return 100.0


class Timed:
    """A family that has times."""

    def __init__(self, family):
        self.family = family

    def __getattr__(self, name):
        return getattr(self.family, name)

    def time_us(self, problem, config, *, timing_pass):
        return model_us(self.family, problem, config, timing_pass)


def collect(out: Path, *names: str):
    families = {name: find_family(name) for name in names}
    small = [(1, 16), (9, 300)]
    cases = [
        case
        for family in families.values()
        for case in (
            *family.cases(random=12),
            *(Case(Problem.of(family.name, rows=r, columns=c, dtype="fp16"), ("random",)) for r, c in small),
        )
    ]
    return run(cases, out, CheckingRunner(), families=families)


if __name__ == "__main__":
    patch_once_a_launch()
    summary = collect(Path(sys.argv[1]), "row_softmax", "layer_norm")
    sys.stdout.write(f"{summary}\n")

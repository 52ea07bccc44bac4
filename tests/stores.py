"""A small store for tests of datasets: made, damaged, and vouched for again."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from foretune.datasets import Case, DeviceSpec, KernelConfig, Measurement, Problem, Status
from foretune.datasets.measurement import Reading
from foretune.datasets.store import Writer

H200 = DeviceSpec.named("h200")
CONFIGS = [KernelConfig.of(BLOCK_M=block, num_warps=warps) for block in (16, 32, 64) for warps in (4, 8)]
PROBLEMS = [
    Problem.of("toy", segments=2, rows=rows, n=64, k=64, ragged={"rows": (rows // 2,) * 2}) for rows in (8, 16, 32)
]
SEALED = ("problems.parquet", "configs.parquet", "measurements.parquet", "drift.parquet")


def outcomes(problem: Problem) -> list[Measurement]:
    """Three passes; one config fails, one is hopeless and is not measured again."""
    first = [
        Measurement(problem, H200.name, config, Status.OK, time_us=10.0 + i, spread=0.01, samples=5, registers=100)
        for i, config in enumerate(CONFIGS[:4])
    ]
    second = [
        Measurement(problem, H200.name, CONFIGS[0], Status.OK, time_us=time_us, samples=9, timing_pass=timing_pass)
        for timing_pass, time_us in ((2, 10.5), (3, 11.5))
    ]
    hopeless = Measurement(problem, H200.name, CONFIGS[4], Status.EARLY_STOPPED, time_us=900.0, samples=1)
    failed = Measurement(problem, H200.name, CONFIGS[5], Status.OUT_OF_RESOURCES, error="shared memory")
    return [*first, hopeless, failed, *second]


def write(folder: Path, run_id: str = "r1", problems: list[Problem] = PROBLEMS) -> Path:
    writer = Writer(folder, "mine", [H200], {"torch": "2.13.0"}, run_id=run_id)
    for problem in problems:
        writer.append(Case(problem, ("Mixtral-8x7B/w2",), "balanced"), outcomes(problem))
    writer.append_drift(readings(problems))
    return folder


def readings(problems: list[Problem]) -> list[Reading]:
    """Two for each problem and one more; the second problem's were taken on a card that did something else, too."""
    return [
        Reading(problem, "0", 10.0 * i + second, 130.0 if i == 1 else 100.0 + second)
        for i, problem in enumerate(problems)
        for second in (range(3) if i == 0 else range(2))
    ]


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def vouch(folder: Path) -> None:
    """Makes the manifest vouch for the tables as they are: what a writer with a bug would leave."""
    edit_manifest(folder, sealed={name: sha256((folder / name).read_bytes()).hexdigest() for name in SEALED})


def rewrite(path: Path, **columns: pa.Array) -> None:
    table = pq.read_table(path)
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, values)
    pq.write_table(table, path)

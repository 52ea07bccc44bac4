"""`Writer`: a run's rows and readings, appended to a dataset on the disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..case import Case
from ..config import KernelConfig
from ..device import DeviceSpec
from ..drift import Reading
from ..manifest import MANIFEST, read_manifest, write_manifest
from ..measurement import Measurement
from ..problem import Problem
from ..schema import DRIFT_PART, PART
from .files import write_table


class Writer:
    """Appends measurements to a dataset directory, which it makes if need be.

    >>> import tempfile; folder = tempfile.mkdtemp()
    >>> from foretune.datasets.measurement import Status
    >>> from foretune.datasets.store import read
    >>> writer = Writer(folder, "mine", [DeviceSpec.named("h200")], {}, run_id="r1")
    >>> problem = Problem.of("row_softmax", rows=8, columns=8)
    >>> outcome = Measurement(problem, "NVIDIA H200", KernelConfig.of(BLOCK_M=16), Status.OK, time_us=9.0)
    >>> writer.append(Case(problem, ("random",)), [outcome])
    >>> read(folder).describe()["families"]["row_softmax"]["measurements"]
    1
    """

    def __init__(
        self,
        directory: Path | str,
        name: str,
        devices: Sequence[DeviceSpec],
        provenance: Mapping[str, Any],
        *,
        run_id: str,
    ) -> None:
        self.directory, self.run_id = Path(directory), run_id
        (self.directory / "parts").mkdir(parents=True, exist_ok=True)
        manifest = read_manifest(self.directory) if (self.directory / MANIFEST).exists() else None
        specs = {spec["name"]: spec for spec in (manifest or {}).get("devices", [])}
        specs |= {spec.name: spec.to_json() for spec in devices}
        runs = (manifest or {}).get("provenance", {}).get("runs", {})
        write_manifest(
            self.directory,
            {
                "name": manifest["name"] if manifest else name,
                "devices": list(specs.values()),
                "provenance": {"runs": runs | {run_id: dict(provenance)}},
                "sealed": manifest["sealed"] if manifest else {},
            },
        )
        # A run that is taken up again under its old id goes on counting: its earlier parts are not replaced.
        taken = [path.stem.rpartition("-")[2] for path in self.directory.glob(f"*/{run_id}-*.parquet")]
        self._sequence = max((int(number) for number in taken if number.isdecimal()), default=-1) + 1

    def append(self, case: Case, measurements: Iterable[Measurement]) -> None:
        """Writes one part; when this returns, the rows are on the disk."""
        rows = [_row(case, measurement, self.run_id) for measurement in measurements]
        if not rows:
            return
        self._append(pa.Table.from_pylist(rows, schema=PART), "parts")

    def append_drift(self, readings: Iterable[Reading]) -> None:
        """Writes what the drift probe took; see `Dataset.drift`."""
        rows = [
            {"problem": _json(reading.problem), "run_id": self.run_id, "gpu": reading.gpu}
            | {"at_s": reading.at_s, "time_us": reading.time_us}
            for reading in readings
        ]
        if rows:
            self._append(pa.Table.from_pylist(rows, schema=DRIFT_PART), "drift")

    def _append(self, table: pa.Table, folder: str) -> None:
        (self.directory / folder).mkdir(exist_ok=True)
        write_table(table, self.directory / folder / f"{self.run_id}-{self._sequence:06d}.parquet")
        self._sequence += 1


def _row(case: Case, measurement: Measurement, run_id: str) -> dict[str, Any]:
    return {
        "problem": _json(measurement.problem),
        "sources": json.dumps(case.sources),
        "scenario": case.scenario,
        "config": _json(measurement.config),
        "status": measurement.status.value,
        "run_id": run_id,
    } | {
        name: getattr(measurement, name)
        for name in PART.names
        if name not in ("problem", "sources", "scenario", "config", "status", "run_id")
    }


@lru_cache(maxsize=1 << 14)
def _json(value: Problem | KernelConfig) -> str:
    return json.dumps(value.to_json())  # of hundreds of ragged sizes, say: longer work than all else in a row

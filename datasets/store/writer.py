"""`Writer`: a run's rows and readings, appended to a dataset on the disk; `continued`: the folder that a run has for
itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..config import KernelConfig
from ..device import DeviceSpec
from ..errors import DatasetError
from ..files import check_folder, remove_leftovers
from ..locks import taken, writing
from ..manifest import MANIFEST, check_ours, read_manifest, write_manifest
from ..measurement import Case, Measurement, Reading
from ..problem import Problem
from ..tables import DRIFT_PART, PART, write_table


@contextmanager
def continued(directory: Path | str) -> Iterator[None]:
    """The folder of a dataset, old or new, for one run to write to while its block goes on: what a killed one left
    half written is removed, and a folder that was made for nothing, too.

    Raises `ForetuneError` that says who has it where another run does, where it is no folder or cannot be written, and
    where it holds something other than a dataset.
    """
    directory = Path(directory)
    check_folder(directory)
    check_ours(directory)
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with taken(directory):
            with writing(directory) as is_alone:
                for folder in (directory, directory / "parts", directory / "drift") if is_alone else ():
                    remove_leftovers(folder)
            yield
    finally:
        if is_new:
            with suppress(OSError):  # it holds something
                directory.rmdir()


class Writer:
    """Appends measurements to a dataset directory, which it makes if need be. Several may do so at once, in threads and
    processes: none loses what another wrote, and who reads meanwhile sees all rows of the parts that are there.

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
        self.directory.mkdir(parents=True, exist_ok=True)
        with writing(self.directory):  # or another writer's run is lost that reads the manifest meanwhile
            check_ours(self.directory)
            new: dict[str, Any] = {"name": name, "devices": [], "provenance": {}, "sealed": {}}
            manifest = read_manifest(self.directory) if (self.directory / MANIFEST).exists() else new
            specs = {spec["name"]: spec for spec in manifest["devices"]}
            for one in devices:
                check_same_card(one, specs.get(one.name, {}), self.directory)
                specs[one.name] = one.to_json()
            runs = manifest["provenance"].get("runs", {}) | {run_id: dict(provenance)}
            provenance = manifest["provenance"] | {"runs": runs}
            write_manifest(self.directory, manifest | {"devices": list(specs.values()), "provenance": provenance})
        # A run that is taken up again under its old id goes on counting: its earlier parts are not replaced.
        numbers = [path.stem.rpartition("-")[2] for path in self.directory.glob(f"*/{run_id}-*.parquet")]
        self._sequence = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1

    def append(self, case: Case, measurements: Iterable[Measurement]) -> None:
        """Writes one part; when this returns, the rows are on the disk."""
        if rows := list(measurements):
            self._append(part_table(rows, self.run_id, case.sources, case.scenario), "parts")

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
        with writing(self.directory):
            (self.directory / folder).mkdir(exist_ok=True)
            while (path := self.directory / folder / f"{self.run_id}-{self._sequence:06d}.parquet").exists():
                self._sequence += 1  # another process goes on with the same run
            write_table(table, path)
        self._sequence += 1


def check_same_card(device: DeviceSpec, known: Mapping[str, Any], where: Path) -> None:
    """Refuse to mix the times of two cards that have one name.

    Raises:
        DatasetError: The spec that a dataset has by this name is of other hardware; names what differs.
    """
    for name, limit in device.limits.items():
        if known.get(name, limit) != limit:
            raise DatasetError(
                f"{where} has measurements of another {device.name}, whose {name} is {known[name]} and not {limit}: "
                "choose another folder"
            )


def part_table(rows: Sequence[Measurement], run_id: str, sources: Sequence[str], scenario: str = "") -> pa.Table:
    """Return the measurements of a run, of cases with these sources and this scenario, as a table of `tables.PART`."""
    columns: dict[str, list[Any]] = {
        "problem": [_json(row.problem) for row in rows],
        "sources": [json.dumps(sources)] * len(rows),
        "scenario": [scenario] * len(rows),
        "config": [_json(row.config) for row in rows],
        "status": [row.status.value for row in rows],
        "run_id": [run_id] * len(rows),
    }
    others = [name for name in PART.names if name not in columns]
    return pa.table(columns | {name: [getattr(row, name) for row in rows] for name in others}, schema=PART)


@lru_cache(maxsize=1 << 14)
def _json(value: Problem | KernelConfig) -> str:
    return json.dumps(value.to_json())  # of hundreds of ragged sizes, say: longer work than all else in a row

"""`Writer` appends a run's measurements to a dataset on the disk; `continued` locks the folder for one collection."""

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
    """Lock a dataset's folder, new or existing, for one collection while the block runs.

    Incomplete files of killed runs are removed first. A folder that was created and stays empty is removed at the end.

    Raises:
        ForetuneError: Another collection is writing to the folder (the message names its process), the folder cannot be
            written, or it holds something other than a dataset.
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
            with suppress(OSError):  # it is not empty
                directory.rmdir()


class Writer:
    """Appends measurements to a dataset's folder, which is created if it does not exist.

    Several writers, in threads and processes, may append at the same time, and the dataset may be read meanwhile:
    readers see complete parts only.

    Args:
        directory: The dataset's folder.
        name: The name of a new dataset.
        devices: The devices of the run.
        provenance: Facts about the run, such as its date and versions.
        run_id: The run's id. Ids start with the date and time, because rows are read in their order.

    Raises:
        DatasetError: The folder holds something other than a dataset, or measurements of another card of the same name.

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
        with writing(self.directory):  # so that no other writer updates the manifest at the same time
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
        # A resumed run continues the numbering, so that its earlier parts are not replaced.
        numbers = [path.stem.rpartition("-")[2] for path in self.directory.glob(f"*/{run_id}-*.parquet")]
        self._sequence = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1

    def append(self, case: Case, measurements: Iterable[Measurement]) -> None:
        """Write the measurements of a case as one part; they are on the disk when this returns."""
        if rows := list(measurements):
            self._append(part_table(rows, self.run_id, case.sources, case.scenario), "parts")

    def append_drift(self, readings: Iterable[Reading]) -> None:
        """Write readings of the drift probe as one part; see `Dataset.drift`."""
        rows = [
            {"problem": _json(reading.problem), "run_id": self.run_id, "gpu": reading.gpu}
            | {"at_s": reading.at_s, "time_us": reading.time_us}
            for reading in readings
        ]
        if rows:
            self._append(pa.Table.from_pylist(rows, schema=DRIFT_PART), "drift")

    def _append(self, table: pa.Table, folder: str) -> None:
        """Write a table as the run's next part in a subfolder."""
        with writing(self.directory):
            (self.directory / folder).mkdir(exist_ok=True)
            while (path := self.directory / folder / f"{self.run_id}-{self._sequence:06d}.parquet").exists():
                self._sequence += 1  # another process continues the same run
            write_table(table, path)
        self._sequence += 1


def check_same_card(device: DeviceSpec, known: Mapping[str, Any], where: Path) -> None:
    """Refuse to mix times of two different cards of one name.

    Args:
        device: The device to add.
        known: The spec, as JSON, that the dataset has by that name; {} if it has none.
        where: The dataset's folder.

    Raises:
        DatasetError: The two specs are of different hardware. The message names the differing field.
    """
    for name, limit in device.limits.items():
        if known.get(name, limit) != limit:
            raise DatasetError(
                f"{where} has measurements of another {device.name}, whose {name} is {known[name]} and not {limit}: "
                "choose another folder"
            )


def part_table(rows: Sequence[Measurement], run_id: str, sources: Sequence[str], scenario: str = "") -> pa.Table:
    """Return a run's measurements of cases with these sources and this scenario as a table of schema `tables.PART`."""
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
    """Return a value as JSON. Cached: with hundreds of segment sizes it takes longer than the rest of a row."""
    return json.dumps(value.to_json())

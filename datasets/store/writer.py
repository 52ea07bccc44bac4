"""Writing a dataset: parts during a run (`Writer`, `continued`), or all of it at once (`seal_dataset`).

A sealed dataset has four tables and a manifest with their checksums, and is small enough to ship.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..dataset import Dataset
from ..device import DeviceSpec
from ..errors import DatasetError
from ..files import check_folder, remove_leftovers
from ..locks import alone, check_free, taken, writing
from ..manifest import MANIFEST, SCHEMA_VERSION, check_ours, read_manifest, write_manifest
from ..measurement import Case, Measurement, Reading
from ..tables import (
    CONFIGS,
    DRIFT,
    DRIFT_PART,
    MEASUREMENTS,
    PART,
    PROBLEMS,
    UnreadableError,
    json_of,
    part_table,
    read_table,
    sha256,
    staged,
    upgraded_problem,
    write_table,
)
from .reader import read


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
    >>> from foretune.datasets import Case, DeviceSpec, KernelConfig, Measurement, Problem, Status
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
        """Write the measurements of a case as one part, a file; they are on the disk when this returns."""
        if rows := list(measurements):
            self._append(part_table(rows, self.run_id, case.sources, case.scenario), "parts")

    def append_drift(self, readings: Iterable[Reading]) -> None:
        """Write readings of the drift probe (see `Dataset.drift`) as one part, a file."""
        rows = [
            {"problem": json_of(reading.problem), "run_id": self.run_id, "gpu": reading.gpu}
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


def seal_dataset(source: Dataset | Path | str, target: Path | str, *, name: str) -> Dataset:
    """Write all rows of a dataset as sealed tables in another folder, and return the dataset.

    The same rows give the same bytes. A new target folder appears atomically. The tables of an existing target are
    replaced if the new ones have all of its rows; its other files, such as a CARD.md, stay. A process that is killed
    leaves the target unchanged, and at most a hidden temporary folder next to it.

    Args:
        source: The dataset, or its folder.
        target: The folder to write.
        name: The name of the sealed dataset.

    Returns:
        The dataset. Its `left_out` lists rows of the source that could not be read.

    Raises:
        ForetuneError: A collection is writing to the source or the target, rows of an existing target would be lost, or
            `check_target` refuses the target.

    >>> import tempfile
    >>> from foretune.datasets import load
    >>> h200 = load("h200")  # or merge_datasets([...], name="mine")
    >>> seal_dataset(h200, tempfile.mkdtemp() + "/mine", name="mine")  # doctest: +SKIP
    """
    target = Path(target)
    check_target(target, source)
    if not isinstance(source, Dataset):
        check_free(Path(source))
    with alone(target) if target.is_dir() else nullcontext():
        dataset = source if isinstance(source, Dataset) else read(source)
        if target.is_dir():
            _check_kept(dataset, target)
        _seal(dataset, target, name)
    return dataset


def check_target(target: Path | str, source: Dataset | Path | str | None = None) -> None:
    """Raise `ForetuneError` unless a dataset can be sealed into the target folder.

    Refused are a folder that cannot be written, that is the source itself, that holds something other than a dataset,
    or that has parts, because their rows would be counted twice.
    """
    target = Path(target)
    if source is not None and not isinstance(source, Dataset) and Path(source).resolve() == target.resolve():
        raise DatasetError(f"{target} is the source itself: seal into another folder")
    for folder in ("parts", "drift"):
        if (target / folder).exists():
            raise DatasetError(f"{target} has unsealed {folder}: seal into another folder")
    check_folder(target)
    check_ours(target)


def _check_kept(dataset: Dataset, target: Path) -> None:
    """Raise `DatasetError` unless the dataset has every row of the sealed dataset in `target`, which it replaces."""
    if not (target / MANIFEST).exists():
        return
    old = read(target)
    for what, mine, theirs in (
        ("measurements", _row_hashes(dataset, dataset.measurements), _row_hashes(old, old.measurements)),
        ("drift readings", _row_hashes(dataset, dataset.drift), _row_hashes(old, old.drift)),
    ):
        if lost := int((~np.isin(theirs, mine)).sum()):
            raise DatasetError(
                f"{target}: {lost} of its {len(theirs)} {what} are not in the new dataset and would be lost: "
                "seal into another folder, or merge both first"
            )


def _row_hashes(dataset: Dataset, rows: pd.DataFrame) -> NDArray[np.uint64]:
    """Return a hash of each row's values, independent of the types of the columns, (n_rows,)."""
    texts = {
        "problem": [json.dumps(case.problem.to_json()) for case in dataset.cases],
        "config": [json.dumps(config.to_json(), sort_keys=True) for config in dataset.configs],
    }
    named = rows.astype({name: float for name in rows if pd.api.types.is_numeric_dtype(rows[name])})
    for name in texts.keys() & set(rows):
        named[name] = pd.util.hash_array(np.array(texts[name], object))[rows[name].to_numpy()]
    hashes: NDArray[np.uint64] = pd.util.hash_pandas_object(named, index=False).to_numpy()
    return hashes


def _seal(dataset: Dataset, target: Path, name: str) -> None:
    """Write the sealed tables and the manifest of a dataset, with this name, to the folder `target`."""
    tables = _tables(dataset)
    with staged(target) as staging:
        for table, content in tables.items():
            write_table(content.replace_schema_metadata(None), staging / f"{table}.parquet")
        write_manifest(
            staging,
            {
                "name": name,
                "devices": [spec.to_json() for spec in dataset.devices],
                "provenance": dataset.provenance,
                "contents": dataset.contents(),
                "sealed": {f"{table}.parquet": sha256(staging / f"{table}.parquet") for table in tables},
            },
        )


def _tables(dataset: Dataset) -> dict[str, pa.Table]:
    """Return the four sealed tables by name, with rows in a canonical order."""
    problems = [
        {"problem": json.dumps(c.problem.to_json()), "sources": json.dumps(c.sources), "scenario": c.scenario}
        for c in dataset.cases
    ]
    configs = [{"config": json.dumps(config.to_json())} for config in dataset.configs]
    rows = dataset.measurements.sort_values(["problem", "timing_pass", "config"], kind="stable")
    drift = dataset.drift.sort_values(["run_id", "gpu", "at_s"], kind="stable")
    return {
        "problems": pa.Table.from_pylist(problems, schema=PROBLEMS),
        "configs": pa.Table.from_pylist(configs, schema=CONFIGS),
        "measurements": pa.Table.from_pandas(rows, schema=MEASUREMENTS, preserve_index=False),
        "drift": pa.Table.from_pandas(drift, schema=DRIFT, preserve_index=False),
    }


def upgrade_dataset(directory: Path | str) -> list[str]:
    """Rewrite the files of a dataset that have an older schema version in the current one.

    Other files do not change by a byte, and a second call changes nothing. Older versions can be read without this, but
    a shipped dataset should have a single version.

    Returns:
        The names of the files that changed.

    Raises:
        DatasetError: The dataset cannot be read.
        ForetuneError: A collection is writing to it.

    >>> upgrade_dataset("measured")  # doctest: +SKIP
    ['problems.parquet', 'dataset.json']
    """
    directory = Path(directory)
    read_manifest(directory)  # raises if this is not a dataset
    with alone(directory):
        return _write_upgraded(directory)


def _write_upgraded(directory: Path) -> list[str]:
    """Rewrite the outdated files of a dataset and return their names."""
    read(directory)  # raises if a sealed table does not have the checksum in the manifest
    manifest = read_manifest(directory)
    changed = []
    # Parts are independent of each other. Damaged ones are skipped here and reported when the dataset is read.
    for folder, schema in (("parts", PART), ("drift", DRIFT_PART)):
        for path in sorted((directory / folder).glob("*.parquet")):
            if (table := _upgraded(path, schema)) is not None:
                write_table(table, path)
                changed.append(f"{folder}/{path.name}")
    problems = _upgraded(directory / "problems.parquet", PROBLEMS) if manifest["sealed"] else None
    if problems is not None or manifest["schema_version"] != SCHEMA_VERSION:
        with staged(directory) as staging:
            if problems is not None:
                write_table(problems, staging / "problems.parquet")
                manifest["sealed"] |= {"problems.parquet": sha256(staging / "problems.parquet")}
                changed.append("problems.parquet")
            write_manifest(staging, manifest)
            changed.append(MANIFEST)
    return changed


def _upgraded(path: Path, schema: pa.Schema) -> pa.Table | None:
    """Return a file's table in the current version, which has `schema`.

    None if the file already has the current version, or cannot be read.
    """
    try:
        table = read_table(path, schema)
    except UnreadableError:
        return None
    was = table.column("problem").to_pylist()
    new = {text: upgraded_problem(text) for text in set(was)}
    if all(text == now for text, now in new.items()) and set(schema.names) <= set(pq.read_schema(path).names):
        return None
    problems = pa.array([new[text] for text in was], pa.string())
    table = table.set_column(schema.get_field_index("problem"), "problem", problems)
    return table.cast(schema).replace_schema_metadata(None)

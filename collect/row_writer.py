"""`RowWriter`: writes a run's measurements and drift readings to the disk in parts, with their provenance."""

from __future__ import annotations

import datetime
import errno
import platform
import subprocess
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..datasets import Case, DeviceSpec, ForetuneError, Measurable, Measurement
from ..datasets.measurement import Reading, flagged_names
from ..datasets.store import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator


def run_provenance(family: Measurable, device: DeviceSpec) -> dict[str, Any]:
    """Return the versions, driver, clocks, kernel source hash and date of a run that starts now on this machine."""
    import torch

    return {
        "family": family.name,
        "kernel_source": family.source_hash(),
        "device": device.name,
        **_first_gpu(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def prepare(families: Iterable[Measurable]) -> None:
    """Do the slow parts of the first `run_provenance` ahead of time.

    It imports Triton and the families' kernels, and runs nvidia-smi. Call it while the GPUs are being opened, so that
    they need not wait for it later.
    """
    for family in families:
        family.source_hash()
    triton_version()
    _first_gpu()


def triton_version() -> str:
    """Return the version of the installed Triton."""
    import triton

    return str(triton.__version__)


#: Names in the provenance -> names of nvidia-smi's queries.
_QUERIES = {"driver": "driver_version", "clocks_sm_mhz": "clocks.sm", "clocks_max_sm_mhz": "clocks.max.sm"}


@cache  # nvidia-smi takes a second or more
def _first_gpu() -> dict[str, str | None]:
    """Return the driver version and clocks of the first GPU at the start of the run; None without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIES.values())}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        printed = ""
    values = printed.partition("\n")[0].split(", ") if printed.strip() else []
    return dict(zip_longest(_QUERIES, values))


#: The longest time in seconds before rows are written; they are also written when their case is done. Readings of the
#: drift probe are written less often.
FLUSH_SECONDS, FLUSH_DRIFT_SECONDS = 10.0, 60.0
#: Returns the provenance of a run that measures a family on a device: see `run_provenance`.
Origin: TypeAlias = Callable[[Measurable, DeviceSpec], dict[str, Any]]


class RowWriter:
    """Appends measurements and drift probe readings to a dataset, with a separate run id for each family and device.

    A method that writes raises `ForetuneError` if the disk is full; rows that were written are kept.

    Args:
        out: The dataset's folder.
        families: The families by name.
        clock: Returns the time in seconds.
        noted: More facts for the provenance: how the configs were chosen.

    Attributes:
        origin: Returns the provenance of a family's measurements on a device; by default that of this machine.
        statuses: How many rows of each status were added.
    """

    def __init__(
        self,
        out: Path | str,
        families: Mapping[str, Measurable],
        clock: Callable[[], float],
        noted: Mapping[str, Any],
    ) -> None:
        self._out, self._families, self._noted = Path(out), families, noted
        self._clock, self._start = clock, clock()
        self._writers: dict[tuple[str, str], Writer] = {}  # by family and device name
        self._pending: dict[tuple[Case, str], list[Measurement]] = {}  # by case and device name
        self._due: dict[tuple[Case, str], float] = {}  # when to write them, by the same keys
        self._readings: list[tuple[Writer, Reading]] = []
        self._unwritten = 0  # the place of the first reading that is not written yet
        self._drift_due = self._start + FLUSH_DRIFT_SECONDS
        self.origin: Origin = run_provenance
        self.statuses: Counter[str] = Counter()

    def add(self, case: Case, device: DeviceSpec, rows: Sequence[Measurement]) -> None:
        """Add rows of one case and device, to be written later."""
        self._writer(case, device)
        self.statuses.update(row.status.value for row in rows)
        self._due.setdefault((case, device.name), self._clock() + FLUSH_SECONDS)
        self._pending.setdefault((case, device.name), []).extend(rows)

    def read(self, case: Case, device: DeviceSpec, gpu: str, time_us: float, ago_s: float = 0.0) -> None:
        """Add a reading of the drift probe, to be written later.

        Args:
            case: The case that was being measured.
            device: The device.
            gpu: Which GPU of that name.
            time_us: The probe's time in microseconds.
            ago_s: How many seconds ago it was read.
        """
        reading = Reading(case.problem, gpu, self._clock() - self._start - ago_s, time_us)
        self._readings.append((self._writer(case, device), reading))

    def done(self, case: Case) -> None:
        """Record that a case has all its rows for now, so that the next `flush_due` writes its rows."""
        for key in self._due:
            if key[0] == case:
                self._due[key] = self._start

    def flush_due(self) -> None:
        """Write the rows of complete cases, and the rows and readings that have waited for their maximum time."""
        now = self._clock()
        for key in [key for key, due in self._due.items() if due <= now]:
            self._flush(key)
        if now >= self._drift_due:
            self._flush_drift()

    def flush(self) -> None:
        """Write all rows and readings."""
        for key in list(self._due):
            self._flush(key)
        self._flush_drift()

    def drifted(self) -> dict[str, float]:
        """Return problems (as text) during which the drift probe was slow, with its worst time over its usual time."""
        import pandas as pd

        rows = [(writer.run_id, one.gpu, str(one.problem), one.time_us) for writer, one in self._readings]
        return flagged_names(pd.DataFrame(rows, columns=["run_id", "gpu", "problem", "time_us"]))

    def _flush(self, key: tuple[Case, str]) -> None:
        # Removed before the write: if that fails, the rows are measured again, and never written twice.
        rows = self._pending.pop(key)
        del self._due[key]
        with self._writing():
            self._writers[key[0].problem.family, key[1]].append(key[0], rows)

    def _flush_drift(self) -> None:
        self._drift_due = self._clock() + FLUSH_DRIFT_SECONDS
        fresh, self._unwritten = self._readings[self._unwritten :], len(self._readings)
        with self._writing():
            for writer in dict.fromkeys(writer for writer, _ in fresh):
                writer.append_drift(reading for of, reading in fresh if of is writer)

    def _writer(self, case: Case, device: DeviceSpec) -> Writer:
        family = self._families[case.problem.family]
        key = (family.name, device.name)
        if key not in self._writers:
            run_id = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"
            facts = {**self.origin(family, device), **self._noted}
            with self._writing():
                self._writers[key] = Writer(self._out, self._out.name, [device], facts, run_id=run_id)
        return self._writers[key]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            room = "free some space, and " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise ForetuneError(
                f"cannot write to {self._out}: {error}. What was written before is kept: {room}run the same command "
                "again to continue"
            ) from error

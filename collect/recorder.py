"""Keeps a run's rows: counts them, and brings them to the disk in parts."""

from __future__ import annotations

import datetime
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ..datasets import Case, DeviceSpec, Family, Measurement
from ..datasets.store import Writer
from .provenance import provenance

#: Rows reach the disk at least this often, and whenever a case is done.
FLUSH_SECONDS = 10.0


class Recorder:
    """Appends to the dataset in `out`, under a run id of its own for each family and device.

    `clock` gives seconds.
    """

    def __init__(self, out: Path | str, clock: Callable[[], float]) -> None:
        self._out, self._clock = Path(out), clock
        self._writers: dict[tuple[str, str], Writer] = {}
        self._pending: dict[Case, list[Measurement]] = {}
        self._flushed: dict[Case, float] = {}
        self.statuses: Counter[str] = Counter()

    def add(self, case: Case, family: Family, device: DeviceSpec, rows: Sequence[Measurement]) -> None:
        """Takes rows of one case and device: all or none of them, whenever Ctrl-C comes."""
        if (family.name, device.name) not in self._writers:
            self._writers[family.name, device.name] = self._writer(family, device)
        self.statuses.update(row.status.value for row in rows)
        self._flushed.setdefault(case, self._clock())
        self._pending.setdefault(case, []).extend(rows)

    def flush(self, case: Case) -> None:
        """Brings the rows of one case to the disk."""
        # Taken out first: rows that an interrupted write left behind are measured again, never written twice.
        rows = self._pending.pop(case, [])
        self._flushed.pop(case, None)
        for device in dict.fromkeys(row.device for row in rows):
            writer = self._writers[case.problem.family, device]
            writer.append(case, [row for row in rows if row.device == device])

    def flush_old(self) -> None:
        """Brings those rows to the disk that have waited for long enough."""
        now = self._clock()
        for case in [case for case, since in self._flushed.items() if now - since > FLUSH_SECONDS]:
            self.flush(case)

    def flush_all(self) -> None:
        for case in list(self._pending):
            self.flush(case)

    def _writer(self, family: Family, device: DeviceSpec) -> Writer:
        run_id = f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"
        return Writer(self._out, self._out.name, [device], provenance(family, device), run_id=run_id)

"""`ChoiceCache`: what is known of one kernel on one device, from one process to the next.

It is a file for each kernel and device, in `FORETUNE_CACHE_DIR/choices`, else `~/.cache/foretune/choices`. Each
config's time is a record of its own, so that another list of configs, or another pruner, measures only what is new.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from ....datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ....datasets.errors import LONGEST_WORD, check_word, shown
from ....datasets.measurement import LONGEST_US, SHORTEST_US
from ...arguments import warn_once
from ...node_copies import near_copy
from ...timing.flywheel import Software
from .document import (
    FAILED_AT,
    Places,
    check_choices,
    forget_oldest,
    is_launch,
    merge_launches,
    new_document,
    times_of,
)
from .shared_file import Document, SharedFile

VARIABLE = "FORETUNE_CACHE_DIR"
#: A failed config is tried again after a day: what refused it may have been the machine, not the compiler.
FAILURES_LAST_S = 86_400
#: So many times of a problem are written one by one, and so large a share of all of them together after that.
_AT_ONCE, _WAITING_SHARE = 64, 0.125
_caches: weakref.WeakSet[ChoiceCache] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for cache in list(_caches):
        cache.flush()


class ChoiceCache:
    """Times and choices of one kernel, of this source, on this device, under this driver, torch and Triton.

    Times of another source or version stay in the file, and are not returned. The caller passes the problem that stands
    for a launch at call time (`Family.at_call_time`), and checks that a choice is among the configs at hand, because a
    file may say anything. Never raises for a bad disk or file: then what is measured stays in memory, with one warning.
    A file has at most half a MiB (some 40,000 times); the problems that were touched longest ago go first.

    >>> import tempfile; os.environ["FORETUNE_CACHE_DIR"] = tempfile.mkdtemp()
    >>> cache = ChoiceCache.of("package.module.kernel", "a1b2", DeviceSpec.named("h200"))
    >>> del os.environ["FORETUNE_CACHE_DIR"]
    >>> problem, fast, failing = Problem.of("softmax", rows=64), KernelConfig.of(BLOCK=64), KernelConfig.of(BLOCK=128)
    >>> cache.record(problem, fast, 12.5)
    >>> cache.record(problem, failing, None)
    >>> dict(cache.times(problem)) == {fast: 12.5, failing: None}
    True
    >>> cache.choose(problem, "", fast)
    >>> cache.choice(problem, "") == fast, cache.choice(problem, "another bundle")
    (True, None)
    """

    def __init__(self, file: SharedFile, kernel: str, source_hash: str, device: DeviceSpec) -> None:
        self.file, self.kernel, self.source_hash, self.device = file, kernel, source_hash, device
        self._software = Software.here()
        self._recorded: Counter[Problem] = Counter()
        self._waiting: dict[Problem, dict[KernelConfig, float | None]] = {}  # recorded, but not written yet
        _caches.add(self)

    @classmethod
    def of(cls, kernel: str, source_hash: str, device: DeviceSpec) -> ChoiceCache:
        """Return the cache of a kernel of that name, "module.qualname" or a family's.

        Raises:
            ForetuneError: An argument is no name, hash or device.
        """
        kernel = check_word("a kernel's name", kernel, 4 * LONGEST_WORD)
        check_word("a kernel's source hash", source_hash)
        if not isinstance(device, DeviceSpec):
            raise ForetuneError(f"device must be a DeviceSpec but is {shown(device)}")
        folder = choices_folder()
        return cls(shared_file(folder, kernel, device), kernel, source_hash, device)

    def times(self, problem: Problem) -> Mapping[KernelConfig, float | None]:
        """Return a problem's times, in microseconds by config; None for a config that failed less than a day ago."""
        self.flush()
        document = self.file.read()
        entry = self._entry(document, problem)
        if entry is None:
            return {}
        times, fails = times_of(document, entry), _failures_last(entry)
        return {config: time_us for config, time_us in times.items() if fails or time_us is not None}

    def problems(self) -> Sequence[Problem]:
        """Return the problems that have times, the one that was touched longest ago first."""
        self.flush()
        return [Problem.from_json(entry["problem"]) for entry in self._entries(self.file.read()) if entry["times"]]

    def record(self, problem: Problem, config: KernelConfig, time_us: float | None) -> None:
        """Keep the time of a config, or that it failed: None, or a time that no clock gives, such as Triton's inf.

        The first `_AT_ONCE` times of a problem are on the disk when this returns. After that an eighth is written at a
        time, because the file is written as a whole; the last ones with the choice or when the process ends.
        """
        waiting = self._waiting.setdefault(problem, {})
        waiting[config] = time_us
        self._recorded[problem] += 1
        if self._recorded[problem] <= _AT_ONCE or len(waiting) > _WAITING_SHARE * self._recorded[problem]:
            self.flush()

    def flush(self) -> None:
        """Write the times that are not on the disk yet."""
        while self._waiting:
            self.record_all(*self._waiting.popitem())

    def record_all(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Keep several times; the file is written once."""
        kept = {config: _time(time_us) for config, time_us in times.items()}

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            places = Places(document["configs"])
            if None in kept.values() and not _failures_last(entry):
                entry["times"] = {place: time_us for place, time_us in entry["times"].items() if time_us is not None}
                entry[FAILED_AT] = int(time.time())
            entry["times"] |= {str(places.of(config.to_json())): time_us for config, time_us in kept.items()}

        self.file.update(change)

    def choice(self, problem: Problem, bundle: str) -> KernelConfig | None:
        """Return what was chosen for a problem with the bundle of that digest ("" for none), or None."""
        document = self.file.read()
        entry = self._entry(document, problem)
        place = None if entry is None else entry["chosen"].get(bundle)
        return None if place is None else KernelConfig.from_json(document["configs"][place])

    def choose(self, problem: Problem, bundle: str, config: KernelConfig) -> None:
        """Keep a choice; it is on the disk when this returns."""
        self.flush()

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            entry["chosen"][bundle] = Places(document["configs"]).of(config.to_json())

        self.file.update(change)

    def saw_launch(
        self,
        problem: Problem,
        names: Sequence[str],
        key: Sequence[Any],
        arguments: Mapping[str, Any] | None = None,
        config: KernelConfig | None = None,
    ) -> None:
        """Keep a launch of a problem, for a warm-up and for tables that have Triton's own keys.

        Args:
            problem: The problem.
            names: The arguments that begin the key.
            key: As `Autotuner.cache` has it: the values of these arguments, then the dtypes of its tensors. A launch
                with a key that JSON cannot express is left out.
            arguments: As `kept_arguments` returns them.
            config: What the launch runs, where that need not be the problem's best.
        """
        launch: Document = {"names": list(names), "key": list(key)}
        if arguments is not None:
            launch["arguments"] = dict(arguments)
        if config is not None:
            launch["config"] = config.to_json()
        if not is_launch(launch):
            return
        entry = self._entry(self.file.read(), problem)
        if entry is not None and launch in entry["launches"]:
            return

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            entry["launches"] = merge_launches(entry["launches"], [launch])

        self.file.update(change)

    def _entries(self, document: Document) -> list[Document]:
        mine = self.source_hash, asdict(self._software)
        return [one for one in document.get("entries", []) if (one["source"], one["software"]) == mine]

    def _entry(self, document: Document, problem: Problem) -> Document | None:
        wanted = problem.to_json()
        return next((entry for entry in self._entries(document) if entry["problem"] == wanted), None)

    def _touched(self, document: Document, problem: Problem) -> Document:
        """Return the problem's entry, made if need be, and moved to the end, as the newest."""
        if not document:
            document |= new_document(self.kernel, self.device)
        entry = self._entry(document, problem)
        if entry is None:
            entry = {"source": self.source_hash, "software": asdict(self._software), "problem": problem.to_json()}
            entry |= {"times": {}, "chosen": {}, "launches": []}
        else:
            document["entries"] = [one for one in document["entries"] if one is not entry]
        document["entries"].append(entry)
        return entry


def choices_folder() -> Path | None:
    """Return where the files of choices are, or would be; None where there is no home folder."""
    try:
        cache = os.environ.get(VARIABLE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "foretune")
        return Path(cache).expanduser().absolute() / "choices"
    except (RuntimeError, OSError, ValueError):  # no home; a working directory that is gone
        return None


def shared_file(folder: Path | None, kernel: str, device: DeviceSpec) -> SharedFile:
    """Return the one file of a kernel and a device in a folder, by both names and a digest of them."""
    names = (kernel, f"{device.name} {device.arch} {device.sm_count}")
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    words = [re.sub(r"[^A-Za-z0-9.]+", "_", name)[-80:].strip("._") for name in (kernel, device.name)]
    return _shared(folder, f"{words[0]}-{words[1]}-{digest}.json")


# One for each file, so that what lives in memory lives on; a process meets as many as it has kernels.
@lru_cache(maxsize=4096)
def _shared(folder: Path | None, name: str) -> SharedFile:
    if folder is None:
        warn_once("no home folder was found", f": choices are kept in this process alone; {VARIABLE} names another")
    path = None if folder is None else near_copy(folder / name, writes=True)
    return SharedFile(path, check=check_choices, forget=forget_oldest)


def _failures_last(entry: Document) -> bool:
    """Return whether the failures in an entry still count. (A clock may have been set back since.)"""
    age_s = time.time() - float(entry.get(FAILED_AT, -FAILURES_LAST_S))
    return 0 <= age_s < FAILURES_LAST_S


def _time(time_us: float | None) -> float | None:
    """Return a time as it is kept: rounded to 6 digits, far below any noise; None for one that no kernel takes."""
    if time_us is None or not SHORTEST_US <= time_us <= LONGEST_US:
        return None
    return float(f"{time_us:.6g}")

"""`ChoiceCache`: what is known of one kernel on one device, from one process to the next.

On the disk it is a file for each kernel and device, in `FORETUNE_CACHE_DIR/choices`, else `~/.cache/foretune/choices`.
Each config's time is kept by itself, so that another list of configs, or another pruner, measures only what is new.
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
from .choice_document import FAILED_AT, check_choices, forget_oldest, is_launch, joined_launches, new_document, times_of
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
    """Times and choices of one kernel, of this source, on this device, under this driver, torch and Triton. A time of
    another source or version is another time: it is kept beside, and not seen.

    A problem is taken as it is: whoever asks hands in what stands for it at call time (`Family.at_call_time`), and
    whoever reads a choice checks that it is among the configs at hand, because a file may say anything. Never raises
    for a bad disk or a bad file: then what is found out lives in memory, with one warning. A file has at most half a
    MiB (some 40,000 times); the problems that were touched longest ago go first.

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
        """What is known of the kernel of that name ("module.qualname", or a family's). Raises `ForetuneError` for what
        is no name, no hash or no device, and for nothing else."""
        kernel = check_word("a kernel's name", kernel, 4 * LONGEST_WORD)
        check_word("a kernel's source hash", source_hash)
        if not isinstance(device, DeviceSpec):
            raise ForetuneError(f"device must be a DeviceSpec but is {shown(device)}")
        folder = choices_folder()
        return cls(shared_file(folder, kernel, device), kernel, source_hash, device)

    def times(self, problem: Problem) -> Mapping[KernelConfig, float | None]:
        """Return the times that were measured of a problem, in microseconds by config; None for a config that failed
        less than a day ago."""
        self.flush()
        document = self.file.read()
        entry = self._entry(document, problem)
        if entry is None:
            return {}
        times, fails = times_of(document, entry), _failures_last(entry)
        return {config: time_us for config, time_us in times.items() if fails or time_us is not None}

    def problems(self) -> Sequence[Problem]:
        """Those that have times, the one that was touched longest ago first."""
        self.flush()
        return [Problem.from_json(entry["problem"]) for entry in self._entries(self.file.read()) if entry["times"]]

    def record(self, problem: Problem, config: KernelConfig, time_us: float | None) -> None:
        """Keep the time of a config, or that it failed: None, or what no clock gives (inf, as Triton has it).

        The first `_AT_ONCE` times of a problem are on the disk when this returns. The file is written as a whole, so
        that of more of them an eighth is written at a time, the last ones with the choice or when the process ends."""
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
        """Several at once: the file is written once."""
        kept = {config: _time(time_us) for config, time_us in times.items()}

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            places = _Places(document["configs"])
            if None in kept.values() and not _failures_last(entry):
                entry["times"] = {place: time_us for place, time_us in entry["times"].items() if time_us is not None}
                entry[FAILED_AT] = int(time.time())
            entry["times"] |= {str(places.of(config)): time_us for config, time_us in kept.items()}

        self.file.update(change)

    def choice(self, problem: Problem, bundle: str) -> KernelConfig | None:
        """What was chosen for a problem with the bundle of that digest ("" for none); None where nothing was."""
        document = self.file.read()
        entry = self._entry(document, problem)
        place = None if entry is None else entry["chosen"].get(bundle)
        return None if place is None else KernelConfig.from_json(document["configs"][place])

    def choose(self, problem: Problem, bundle: str, config: KernelConfig) -> None:
        """Keeps a choice. On the disk when it returns."""
        self.flush()

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            entry["chosen"][bundle] = _Places(document["configs"]).of(config)

        self.file.update(change)

    def saw_launch(
        self,
        problem: Problem,
        names: Sequence[str],
        key: Sequence[Any],
        arguments: Mapping[str, Any] | None = None,
        config: KernelConfig | None = None,
    ) -> None:
        """Keeps Triton's own key of a launch of this problem: the values of the arguments of those names, then the
        dtypes of its tensors, as `Autotuner.cache` has it. What other projects' tables are keyed by. A key that JSON
        has no words for is left out. `arguments`, as `kept_arguments` gives them, are what a warm-up goes by.
        `config` is what it runs, where that need not be the problem's best."""
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
            entry["launches"] = joined_launches(entry["launches"], [launch])

        self.file.update(change)

    def _entries(self, document: Document) -> list[Document]:
        software = asdict(self._software)
        return [
            entry
            for entry in document.get("entries", [])
            if entry["source"] == self.source_hash and entry["software"] == software
        ]

    def _entry(self, document: Document, problem: Problem) -> Document | None:
        wanted = problem.to_json()
        return next((entry for entry in self._entries(document) if entry["problem"] == wanted), None)

    def _touched(self, document: Document, problem: Problem) -> Document:
        """The problem's entry, made if need be, moved to the end: what is last is the newest."""
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
    """Where the files of choices are, or would be; None where there is no home to have them in."""
    try:
        cache = os.environ.get(VARIABLE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "foretune")
        return Path(cache).expanduser().absolute() / "choices"
    except (RuntimeError, OSError, ValueError):  # no home; a working directory that is gone
        return None


def shared_file(folder: Path | None, kernel: str, device: DeviceSpec) -> SharedFile:
    """The one file of a kernel and a device in a folder: its name says both, and a digest tells alike names apart."""
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


class _Places:
    """Where each config stands in a document's list, to which new ones are added."""

    def __init__(self, configs: list[Document]) -> None:
        self._configs = configs
        self._known = {_hashable(config): place for place, config in enumerate(configs)}

    def of(self, config: KernelConfig) -> int:
        value = config.to_json()
        place = self._known.setdefault(_hashable(value), len(self._configs))
        if place == len(self._configs):
            self._configs.append(value)
        return place


def _hashable(config: Mapping[str, Any]) -> tuple[tuple[str, str, Any], ...]:
    return tuple(sorted((name, type(value).__name__, value) for name, value in config.items()))


def _time(time_us: float | None) -> float | None:
    """A time as it is kept: rounded to 6 digits, far below any noise; None for what no kernel takes."""
    if time_us is None or not SHORTEST_US <= time_us <= LONGEST_US:
        return None
    return float(f"{time_us:.6g}")

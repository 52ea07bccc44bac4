"""`ChoiceCache`: store the measured times and chosen configs of one kernel on one device across processes.

There is one file per kernel and device, in `FORETUNE_CACHE_DIR/choices` or else `~/.cache/foretune/choices`. Each
config's time is a record of its own, so that another list of configs, or another pruner, measures only new configs.
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
    REFINED,
    Places,
    Refined,
    check_choices,
    forget_oldest,
    is_sound,
    is_stored_launch,
    merge_launches,
    new_document,
    refined_of,
    times_of,
)
from .shared_file import Document, SharedFile

VARIABLE = "FORETUNE_CACHE_DIR"
#: Seconds after which a failed config is tried again: the machine may have been the reason, not the compiler.
FAILURES_LAST_S = 86_400
#: The number of times of a problem that are written one by one; after that, new times are written once they are this
#: share of all of the problem's times.
_AT_ONCE, _WAITING_SHARE = 64, 0.125
_caches: weakref.WeakSet[ChoiceCache] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    """Write the times that are not on disk yet, of all caches, when the process ends."""
    for cache in list(_caches):
        cache.flush()


class ChoiceCache:
    """Times and choices of one kernel with one source, on one device, under one driver, torch and Triton.

    Times of other sources or versions stay in the file, but are not returned. The caller passes the problem that
    represents a launch at call time (`Family.at_call_time`), and must check that a choice is among its configs, because
    a file may contain anything. Methods never raise for a broken disk or file: then times stay in memory, with one
    warning. A file has at most half a MiB (some 40,000 times); the least recently used problems are dropped first.

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
        self._waiting: dict[Problem, dict[KernelConfig, float | None]] = {}  # recorded but not written yet
        _caches.add(self)

    @classmethod
    def of(cls, kernel: str, source_hash: str, device: DeviceSpec) -> ChoiceCache:
        """Return the cache of a kernel's times and choices on a device.

        Args:
            kernel: The kernel's name, "module.qualname", or a family's name.
            source_hash: The hash of the kernel's source.
            device: The device.

        Raises:
            ForetuneError: An argument is not a valid name, hash or device.
        """
        kernel = check_word("a kernel's name", kernel, 4 * LONGEST_WORD)
        check_word("a kernel's source hash", source_hash)
        if not isinstance(device, DeviceSpec):
            raise ForetuneError(f"device must be a DeviceSpec but is {shown(device)}")
        folder = choices_folder()
        return cls(shared_file(folder, kernel, device), kernel, source_hash, device)

    def times(self, problem: Problem) -> Mapping[KernelConfig, float | None]:
        """Return a problem's times in microseconds by config; None marks a config that failed.

        Failures that are older than a day are not returned.
        """
        self.flush()
        document = self.file.read()
        entry = self._entry(document, problem)
        if entry is None:
            return {}
        times, fails = times_of(document, entry), _failures_last(entry)
        return {config: time_us for config, time_us in times.items() if fails or time_us is not None}

    def problems(self) -> Sequence[Problem]:
        """Return the problems that have times, the least recently used first."""
        self.flush()
        return [Problem.from_json(entry["problem"]) for entry in self._entries(self.file.read()) if entry["times"]]

    def record(self, problem: Problem, config: KernelConfig, time_us: float | None) -> None:
        """Store a config's time.

        The first `_AT_ONCE` times of a problem are on disk when this returns. Each write replaces the whole file, so
        later times are written only when there are an eighth more, when a choice is stored (`choose`), or when the
        process ends.

        Args:
            problem: The problem.
            config: The config.
            time_us: Microseconds. None for a failure, as is any value outside the valid range, such as Triton's inf.
        """
        waiting = self._waiting.setdefault(problem, {})
        waiting[config] = time_us
        self._recorded[problem] += 1
        if self._recorded[problem] <= _AT_ONCE or len(waiting) > _WAITING_SHARE * self._recorded[problem]:
            self.flush()

    def flush(self) -> None:
        """Write the times that are not on disk yet."""
        while self._waiting:
            self.record_all(*self._waiting.popitem())

    def record_all(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Store the times of several configs of a problem with a single write; None for a config that failed."""
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
        """Return the config chosen for a problem with the bundle of this digest ("" for none); None if none was."""
        document = self.file.read()
        entry = self._entry(document, problem)
        place = None if entry is None else entry["chosen"].get(bundle)
        return None if place is None else KernelConfig.from_json(document["configs"][place])

    def choose(self, problem: Problem, bundle: str, config: KernelConfig) -> None:
        """Store the config chosen for a problem with the bundle of this digest; it is on disk when this returns."""
        self.flush()

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            entry["chosen"][bundle] = Places(document["configs"]).of(config.to_json())

        self.file.update(change)

    def refined(self, problem: Problem) -> Refined | None:
        """Return the stored results of mode `refine` for a problem; None if there are none."""
        document = self.file.read()
        entry = self._entry(document, problem)
        return None if entry is None else refined_of(document, entry)

    def refine(self, problem: Problem, refined: Refined, bundle: str) -> None:
        """Store the results of mode `refine` for a problem; a decided config also becomes its choice (see `choose`)."""

        def change(document: Document) -> None:
            entry, places = self._touched(document, problem), Places(document["configs"])
            times = {one: time for one, time in refined.times.items() if is_sound(time)}
            decided = places.of(refined.decided.to_json()) if refined.decided in times else None
            entry[REFINED] = {
                "times": {str(places.of(one.to_json())): list(time) for one, time in times.items()},
                "decided": decided,
            }
            if decided is not None:
                entry["chosen"][bundle] = decided

        self.file.update(change)

    def saw_launch(
        self,
        problem: Problem,
        names: Sequence[str],
        key: Sequence[Any],
        arguments: Mapping[str, Any] | None = None,
        config: KernelConfig | None = None,
    ) -> None:
        """Store how a problem was launched, which warm-ups and tables with Triton's own keys need.

        Args:
            problem: The problem.
            names: The names of the arguments that the key begins with.
            key: The launch's key in `Autotuner.cache`: the values of these arguments, then the dtypes of its tensors. A
                launch whose key JSON cannot express is skipped.
            arguments: As `kept_arguments` returns them.
            config: The config that the launch runs, if that need not be the problem's best.
        """
        launch: Document = {"names": list(names), "key": list(key)}
        if arguments is not None:
            launch["arguments"] = dict(arguments)
        if config is not None:
            launch["config"] = config.to_json()
        if not is_stored_launch(launch):
            return
        entry = self._entry(self.file.read(), problem)
        if entry is not None and launch in entry["launches"]:
            return

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            entry["launches"] = merge_launches(entry["launches"], [launch])

        self.file.update(change)

    def _entries(self, document: Document) -> list[Document]:
        """Return a document's entries of this kernel source and these software versions."""
        mine = self.source_hash, asdict(self._software)
        return [one for one in document.get("entries", []) if (one["source"], one["software"]) == mine]

    def _entry(self, document: Document, problem: Problem) -> Document | None:
        """Return a document's entry of the problem; None if there is none."""
        wanted = problem.to_json()
        return next((entry for entry in self._entries(document) if entry["problem"] == wanted), None)

    def _touched(self, document: Document, problem: Problem) -> Document:
        """Return a document's entry of the problem, created if necessary and moved to the end as the newest."""
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
    """Return the folder of the choice files, which need not exist; None without a home folder."""
    try:
        cache = os.environ.get(VARIABLE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "foretune")
        return Path(cache).expanduser().absolute() / "choices"
    except (RuntimeError, OSError, ValueError):  # no home, or the working directory was deleted
        return None


def shared_file(folder: Path | None, kernel: str, device: DeviceSpec) -> SharedFile:
    """Return the file of a kernel and a device; its name has both names and a digest of them."""
    identity = f"{kernel}\n{device.name} {device.arch} {device.sm_count}"
    return _shared(folder, file_name(identity, kernel, device.name))


def file_name(identity: str, *names: str) -> str:
    """Return the name of a cache file: `names`, with invalid characters replaced, and a digest of `identity`."""
    words = [re.sub(r"[^A-Za-z0-9.]+", "_", name)[-80:].strip("._") for name in names]
    return f"{'-'.join(words)}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.json"


# One object per file, so that documents held in memory persist; a process uses at most one file per kernel.
@lru_cache(maxsize=4096)
def _shared(folder: Path | None, name: str) -> SharedFile:
    if folder is None:
        warn_once(
            "no home folder was found", f": choices are kept in this process only; set {VARIABLE} to a folder for them"
        )
    path = None if folder is None else near_copy(folder / name, writes=True)
    return SharedFile(path, check=check_choices, forget=forget_oldest)


def _failures_last(entry: Document) -> bool:
    """Return whether an entry's failures still count: they are less than a day old, and not in the future."""
    age_s = time.time() - float(entry.get(FAILED_AT, -FAILURES_LAST_S))
    return 0 <= age_s < FAILURES_LAST_S


def _time(time_us: float | None) -> float | None:
    """Return a time in microseconds as it is stored: rounded to 6 digits; None if it is out of range."""
    if time_us is None or not SHORTEST_US <= time_us <= LONGEST_US:
        return None
    return float(f"{time_us:.6g}")

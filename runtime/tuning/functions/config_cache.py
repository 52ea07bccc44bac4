"""`ConfigCache`: stores the results of tuning functions, shared by processes; `KeyRecord`: the results of one key."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError, Problem, Status
from ....datasets.errors import check_path, check_word, shown
from ..cache.kernel_cache import FAILURES_LAST_S, choices_folder, file_name
from ..cache.shared_file import MOST_BYTES, Document, SharedFile, size_of
from ..session import Measured
from .config_space import Candidate
from .plain_values import text_of

#: A record is written when this many seconds, and this share of the tuning time so far, have passed since the last
#: write. A killed process loses the measurements since then, or at least one config. With the share, the bytes written
#: in total grow as the number of configs times its logarithm.
_WRITE_EVERY_S, _WRITE_EVERY_SHARE = 1.0, 0.125
#: A record in a full file is shortened if it has more than this share of all configs in it, and more than this many.
_LARGE_SHARE, _FEW = 0.25, 32
#: Upper bound of a valid time, in microseconds; files may contain anything.
_MOST_US = 1e18
#: Upper bound of a valid time of day, in seconds since 1970.
_LATEST_S = 1e15


def record_key(function: str, digest: str, place: str, key: str) -> str:
    """Return the cache key of a record.

    Args:
        function: The function's name.
        digest: The digest of its source.
        place: The name of the device.
        key: The key of the call.
    """
    return f"{function}#{digest} on {place}: {key}"


def function_of(key: str) -> str:
    """Return the function's name in a `record_key`.

    >>> function_of(record_key("package.scale", "a1b2", "NVIDIA H200", "64"))
    'package.scale'
    """
    return key.partition("#")[0]


def parts_of(key: str) -> tuple[str, str, str, str]:
    """Return the function's name, the digest of its source, the device and the call's key in a `record_key`.

    >>> parts_of(record_key("package.scale", "a1b2", "NVIDIA H200", "64"))
    ('package.scale', 'a1b2', 'NVIDIA H200', '64')
    """
    function, _, rest = key.partition("#")
    digest, _, rest = rest.partition(" on ")
    place, _, call = rest.partition(": ")
    return function, digest, place, call


def may_pass(failure: Measured) -> bool:
    """Return whether a failed config may work later: after lack of memory, or an error of the function itself.

    Errors of the compiler or of CUDA and HIP would occur again, and some make the device unusable for the process.
    """
    error = failure.error or ""
    if error.startswith(("OutOfMemoryError", "MemoryError")):
        return True
    return failure.status is Status.LAUNCH_FAILED and not re.search("CUDA|HIP|cuda|hip", error)


@dataclass
class KeyRecord:
    """The stored results of tuning one key of a function or kernel: the measurements and the chosen config.

    Attributes:
        problem: The key as a `Problem`, if it has numbers.
        software: The versions that measured.
        measured: Measurements by a config's text.
        chosen: The text of the chosen config.
        done: Identifies the list of configs and the search after which `chosen` was the result; "" if unfinished.
        failed_at: The time of the first failure in `measured`, in seconds since 1970.
    """

    problem: Problem | None
    software: Mapping[str, str]
    measured: dict[str, Measured] = field(default_factory=dict)
    chosen: str | None = None
    done: str = ""
    failed_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {
            "problem": None if self.problem is None else self.problem.to_json(),
            "software": dict(self.software),
            "outcomes": {text: [one.status.value, *one[1:]] for text, one in self.measured.items()},
            "chosen": self.chosen,
            "done": self.done,
            "failed_at": self.failed_at,
        }

    @property
    def digest(self) -> str:
        """A digest of times and choice, which must be equal on all ranks; spreads and errors may differ."""
        times = {text: one.time_us for text, one in self.measured.items()}
        return hashlib.sha256(text_of([times, self.chosen, self.done]).encode()).hexdigest()

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> KeyRecord | None:
        """Return the record in a JSON object; None if it is not a valid one, since files may contain anything."""
        try:
            assert value is not None
            measured = {str(text): _measured(*one) for text, one in value["outcomes"].items()}
            problem = None if value["problem"] is None else Problem.from_json(value["problem"])
            failed_at = value.get("failed_at")  # files of earlier versions do not have it
            assert failed_at is None or (type(failed_at) in (int, float) and 0 <= failed_at < _LATEST_S)
            software, chosen, done = dict(value["software"]), value["chosen"], value["done"]
            texts = (*software, *software.values(), done, *([] if chosen is None else [chosen]))
            if not all(isinstance(text, str) for text in texts):
                return None
            return cls(problem, software, measured, chosen, done, failed_at)
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def of(self, candidates: Sequence[Candidate]) -> dict[Candidate, Measured]:
        """Return the measurements of those candidates that were measured."""
        return {one: self.measured[one.text] for one in candidates if one.text in self.measured}

    def times(self, candidates: Sequence[Candidate]) -> dict[Candidate, float | None]:
        """Return the times of those candidates that were measured, in microseconds; None for failures."""
        return {one: measured.time_us for one, measured in self.of(candidates).items()}

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest working candidate, the first of equals; None if none works."""
        timed = {one: time_us for one, time_us in self.times(candidates).items() if time_us is not None}
        return min(timed, key=timed.__getitem__, default=None)

    def retry_failures(self, candidates: Sequence[Candidate], now: float) -> None:
        """Remove failures so that they are tried again.

        If no candidate has a time, all failures are removed. Otherwise those that may work later (`may_pass`) are, once
        `FAILURES_LAST_S` seconds have passed since the first failure.

        Args:
            candidates: The configs of the call.
            now: Seconds since 1970.
        """
        failures = [text for text, one in self.measured.items() if one.time_us is None]
        if self.fastest(candidates) is not None:
            if self.failed_at is None or 0 <= now - self.failed_at < FAILURES_LAST_S:
                return
            failures = [text for text in failures if may_pass(self.measured[text])]
        for text in failures:
            del self.measured[text]
        self.failed_at = None
        if failures:
            self.done = ""


def records_of(entry: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], KeyRecord]]:
    """Yield the label, the JSON object and the `KeyRecord` of each valid record in a cache entry.

    The entry of a tuned function has one record, with the label ""; that of a contextual function one for each kernel.
    """
    sites = entry.get("sites", {"": entry})
    for label, value in sites.items() if isinstance(sites, dict) else ():
        if (record := KeyRecord.from_json(value)) is not None:
            yield label, value, record


def shorten_largest(records: Sequence[dict[str, Any]]) -> bool:
    """Drop the slower half of the largest record if it has a large share of all results; return whether it did."""
    largest: dict[str, Any] = max(records, key=lambda value: len(value["outcomes"]), default={"outcomes": {}})
    outcomes, total = largest["outcomes"], sum(len(value["outcomes"]) for value in records)
    if len(outcomes) <= max(_FEW, _LARGE_SHARE * total):
        return False
    by_time = sorted(outcomes, key=lambda text: (text != largest["chosen"], outcomes[text][1] or math.inf))
    kept = set(by_time[: len(by_time) // 2])
    largest["outcomes"] = {text: outcome for text, outcome in outcomes.items() if text in kept}
    return True


class RecordTimes:
    """Adapts a record to the `Known` interface of a `TuningSession`, and writes it from time to time.

    Args:
        record: The record that receives the measurements.
        save: Writes the record.
        clock: Returns monotonic seconds, which decide when to write.
        now: Returns the time of day, in seconds since 1970.
    """

    def __init__(
        self, record: KeyRecord, save: Callable[[], object], clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self._record, self.flush, self._clock, self._now = record, save, clock, now
        self._began = self._saved = clock()

    def recall(self, candidates: Sequence[Candidate]) -> dict[Candidate, Measured]:
        """Return the record's measurements of these candidates; see `Known.recall`."""
        return self._record.of(candidates)

    def record(self, candidate: Candidate, measured: Measured, error: Exception | None) -> None:
        """Add a candidate's measurement to the record, which is saved if that is due; see `Known.record`."""
        self._record.measured[candidate.text] = measured
        if measured.time_us is None and self._record.failed_at is None:
            self._record.failed_at = self._now()
        if self._clock() - self._saved >= max(_WRITE_EVERY_S, _WRITE_EVERY_SHARE * (self._saved - self._began)):
            self.flush()
            self._saved = self._clock()


def _measured(status: Any, time_us: Any, spread: Any, samples: Any, error: Any) -> Measured:
    status = Status(status)
    is_timed = status is Status.OK
    if is_timed != (time_us is not None) or (is_timed and not (_is_number(time_us) and time_us > 0)):
        raise ForetuneError("a measurement must have a positive time if its status is ok, and none otherwise")
    if not (spread is None or _is_number(spread)) or not _is_number(samples) or not isinstance(error, str | None):
        raise ForetuneError("spread and samples must be numbers, and error must be a string or null")
    return Measured(status, time_us, spread, int(samples), error)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST_US


#: The format entry of a file; a file with another format is replaced.
FORMAT = "foretune functions 1"
#: Longest key in characters: more than the names of function and device and the longest `text_of` together.
_LONGEST_KEY = 4000


class ConfigCache:
    """A mapping from keys (strings) to JSON objects, in a file or in memory.

    Threads and processes share the file (see `SharedFile`): disk errors never raise, and a full file forgets its
    oldest keys first. If one key takes a large part of a full file, only its fastest configs are kept.

    Args:
        path: The file. If None, entries are kept in this process's memory.

    Raises:
        ForetuneError: `path` is not a path.

    >>> cache = ConfigCache()
    >>> cache.set("scale: 64", {"chosen": {"tile": 16}})
    >>> cache.get("scale: 64"), cache.keys(), len(cache)
    ({'chosen': {'tile': 16}}, ['scale: 64'], 1)
    >>> cache.clear()
    >>> cache.get("scale: 64") is None
    True
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = None if path is None else check_path("a cache's file", path).expanduser().absolute()
        self._file = SharedFile(self.path, check=check_document, forget=_make_room)
        #: Increases when entries were removed or imported, so that choices read earlier may be outdated.
        self.generation = 0

    @classmethod
    def of(cls, function: str) -> ConfigCache:
        """Return the cache of a function ("module.qualname"), in FORETUNE_CACHE_DIR or else ~/.cache/foretune."""
        return _opened(functions_folder(), function)

    @classmethod
    def for_function(cls, function: str, cache: Any) -> ConfigCache:
        """Return the cache that an option `cache` selects.

        Args:
            function: The function's name, "module.qualname".
            cache: True for the function's default file (see `of`), False for memory, a path, or a `ConfigCache`.

        Raises:
            ForetuneError: `cache` is something else.
        """
        if isinstance(cache, ConfigCache):
            return cache
        if isinstance(cache, bool):
            return cls.of(function) if cache else cls()
        return cls(check_path("cache", cache))

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a copy of the entry of a key; None if there is none."""
        found = self._entries().get(key)
        return None if found is None else deepcopy(found)

    def set(self, key: str, value: dict[str, Any]) -> None:
        """Store a JSON object under a key; it is on disk when this returns.

        Raises:
            ForetuneError: The value is not a JSON object, or the key is not a string of at most 4000 characters.
        """
        check_word("a cache's key", key, _LONGEST_KEY)
        if not isinstance(value, dict):
            raise ForetuneError(f"a cache's value must be a JSON object but is {shown(value)}")

        def change(document: Document) -> None:
            document.setdefault("format", FORMAT)
            entries = document.setdefault("entries", {})
            entries.pop(key, None)  # so that it is the newest
            entries[key] = deepcopy(value)

        try:
            self._file.update(change)
        except (TypeError, ValueError) as error:
            raise ForetuneError(f"a cache's value must be a JSON object but is {shown(value)} ({error})") from None

    def add(self, entries: Mapping[str, Mapping[str, Any]]) -> bool:
        """Import entries, as the oldest ones, as far as the file has room; existing entries stay.

        Args:
            entries: JSON objects by key, the oldest first.

        Returns:
            Whether the file is on disk; False if the cache is in memory or the disk refused.
        """

        def change(document: Document) -> None:
            document.setdefault("format", FORMAT)
            here = document.get("entries", {})
            room, new = MOST_BYTES - size_of(document), {}
            for key, value in reversed(list(entries.items())):  # the newest first, as far as there is room
                size = size_of({key: value})
                if key not in here and size <= room:
                    new[key] = deepcopy(dict(value))
                    room -= size
            document["entries"] = dict(reversed(new.items())) | here

        self._file.update(change)
        self.generation += 1
        return self._file.is_on_disk

    def clear(self, key: str | None = None) -> None:
        """Remove a key; all keys if None."""

        def change(document: Document) -> None:
            if key is None:
                document.clear()
            else:
                document.get("entries", {}).pop(key, None)

        self._file.update(change)
        self.generation += 1

    def keys(self) -> list[str]:
        """Return all keys, the oldest first."""
        return list(self._entries())

    def __contains__(self, key: object) -> bool:
        return key in self._entries()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        return f"<ConfigCache of {len(self)} keys, {self.path or 'in memory'}>"

    def _entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = self._file.read().get("entries", {})
        return entries


def functions_folder() -> Path | None:
    """Return the folder of the cache files of tuned functions; None if there is no home directory to put them in."""
    folder = choices_folder()
    return None if folder is None else folder.with_name("functions")


@lru_cache(maxsize=4096)  # one object for each file, so that functions of one name, and copies, share it
def _opened(folder: Path | None, function: str) -> ConfigCache:
    return ConfigCache(None if folder is None else folder / file_name(function, function))


def check_document(document: Document) -> int:
    """Remove entries that are not JSON objects from a document; return how many were removed.

    Raises:
        ForetuneError: The document is not one of a `ConfigCache`, or none of its entries is an object.
    """
    if document.get("format") != FORMAT or set(document) != {"format", "entries"}:
        raise ForetuneError(f"its format is not {FORMAT!r}")
    entries = document["entries"]
    kept = {key: one for key, one in entries.items() if _is_entry(key, one)} if isinstance(entries, dict) else {}
    if not isinstance(entries, dict) or (entries and not kept):
        raise ForetuneError(f"entries must be objects but are {shown(entries)}")
    document["entries"] = kept
    return len(entries) - len(kept)


def _is_entry(key: str, entry: Any) -> bool:
    try:
        check_word("a cache's key", key, _LONGEST_KEY)
        size_of(entry)
    except ValueError:  # it contains NaN or an infinite number
        return False
    return isinstance(entry, dict)


def _make_room(document: Document) -> bool:
    """Free space: shorten a record that takes much of the file to its fastest configs, or else remove the oldest keys.

    The newest key, which is being written, stays. Return False if there is nothing to remove.
    """
    entries = document.get("entries", {})
    records = [value for entry in entries.values() for _, value, _ in records_of(entry)]
    if shorten_largest(records):
        return True
    if len(entries) < 2:
        return False
    for key in list(entries)[: max(len(entries) // 4, 1)]:
        del entries[key]
    return True

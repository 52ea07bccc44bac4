"""`KeyRecord`: the measurements and the choice of one key of a function, as the cache stores them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....datasets import ForetuneError, Problem, Status
from ..cache.kernel_cache import FAILURES_LAST_S
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
    """The measurements and the choice of one key.

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

        If no candidate has a time, all failures are removed; otherwise, `FAILURES_LAST_S` after the first one, those
        that may work later (`may_pass`).

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

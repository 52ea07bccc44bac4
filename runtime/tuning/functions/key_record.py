"""`KeyRecord`: what is known of one key of a function, as the cache keeps it."""

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

#: A process that is killed loses what it measured since it last wrote: at most this much, this share of the time spent
#: so far, or one config. The share keeps the bytes written proportional to the number of configs, up to a logarithm.
_WRITE_EVERY_S, _WRITE_EVERY_SHARE = 1.0, 0.125
#: A record in a full file is shortened where it has more than this share of all configs, and more than this many.
_LARGE_SHARE, _FEW = 0.25, 32
#: No call takes so long, in microseconds; a file may say that one did.
_MOST_US = 1e18
#: Later than any clock, in seconds.
_LATEST_S = 1e15


def record_key(function: str, digest: str, place: str, key: str) -> str:
    """What the cache keeps a key's record under: `digest` is that of the function's source, `place` where it runs."""
    return f"{function}#{digest} on {place}: {key}"


def function_of(key: str) -> str:
    """The function of a `record_key`.

    >>> function_of(record_key("package.scale", "a1b2", "NVIDIA H200", "64"))
    'package.scale'
    """
    return key.partition("#")[0]


def may_pass(failure: Measured) -> bool:
    """Whether a config that failed so may work later. What the compiler or the device refused, they refuse again, and
    some such errors end the process's use of the device."""
    error = failure.error or ""
    if error.startswith(("OutOfMemoryError", "MemoryError")):
        return True
    return failure.status is Status.LAUNCH_FAILED and not re.search("CUDA|HIP|cuda|hip", error)


@dataclass
class KeyRecord:
    """What was measured, by a config's text; the config that was `chosen`, and for which list of configs and which
    search that was the end (`done`); and when the first of the kept failures was (`failed_at`, seconds since 1970)."""

    problem: Problem | None
    software: Mapping[str, str]
    measured: dict[str, Measured] = field(default_factory=dict)
    chosen: str | None = None
    done: str = ""
    failed_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": None if self.problem is None else self.problem.to_json(),
            "software": dict(self.software),
            "outcomes": {text: [one.status.value, *one[1:]] for text, one in self.measured.items()},
            "chosen": self.chosen,
            "done": self.done,
            "failed_at": self.failed_at,
        }

    @property
    def gist(self) -> str:
        """What ranks must have in common to choose the same; each has its own spread and errors."""
        times = {text: one.time_us for text, one in self.measured.items()}
        return hashlib.sha256(text_of([times, self.chosen, self.done]).encode()).hexdigest()

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> KeyRecord | None:
        """None for what is none: a file may say anything."""
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
        """What was measured of those of the candidates that were."""
        return {one: self.measured[one.text] for one in candidates if one.text in self.measured}

    def times(self, candidates: Sequence[Candidate]) -> dict[Candidate, float | None]:
        """The times of those that were measured."""
        return {one: measured.time_us for one, measured in self.of(candidates).items()}

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest of those that work; the first of equals; None where none does."""
        timed = {one: time_us for one, time_us in self.times(candidates).items() if time_us is not None}
        return min(timed, key=timed.__getitem__, default=None)

    def retry_failures(self, candidates: Sequence[Candidate], now: float) -> None:
        """Forget failures that are to be tried again: all of them where no candidate has a time, and after
        `FAILURES_LAST_S` those that may pass."""
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
    """Yield a cache entry's records by label, each as JSON and as read: one, with the label "", of a function; one for
    each kernel of a contextual function. Anything else is left out."""
    sites = entry.get("sites", {"": entry})
    for label, value in sites.items() if isinstance(sites, dict) else ():
        if (record := KeyRecord.from_json(value)) is not None:
            yield label, value, record


def shorten_largest(records: Sequence[dict[str, Any]]) -> bool:
    """Drop the slower half of the record with the most outcomes, where these are a large share of all; False if not."""
    largest: dict[str, Any] = max(records, key=lambda value: len(value["outcomes"]), default={"outcomes": {}})
    outcomes, total = largest["outcomes"], sum(len(value["outcomes"]) for value in records)
    if len(outcomes) <= max(_FEW, _LARGE_SHARE * total):
        return False
    by_time = sorted(outcomes, key=lambda text: (text != largest["chosen"], outcomes[text][1] or math.inf))
    kept = set(by_time[: len(by_time) // 2])
    largest["outcomes"] = {text: outcome for text, outcome in outcomes.items() if text in kept}
    return True


class RecordTimes:
    """A record as the `Known` of a `TuningSession`.

    Args:
        record: What is filled in.
        save: Writes the record.
        clock: Seconds, for how often it is written.
        now: The time of day, in seconds.
    """

    def __init__(
        self, record: KeyRecord, save: Callable[[], object], clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self._record, self.flush, self._clock, self._now = record, save, clock, now
        self._began = self._saved = clock()

    def recall(self, candidates: Sequence[Candidate]) -> dict[Candidate, Measured]:
        """See `Known`."""
        return self._record.of(candidates)

    def record(self, candidate: Candidate, measured: Measured, error: Exception | None) -> None:
        """See `Known`."""
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
        raise ForetuneError("a time goes with a config that works")
    if not (spread is None or _is_number(spread)) or not _is_number(samples) or not isinstance(error, str | None):
        raise ForetuneError("spread and samples must be numbers and an error a text")
    return Measured(status, time_us, spread, int(samples), error)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST_US

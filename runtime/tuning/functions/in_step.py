"""Coordinate tuning: one thread of a process tunes at a time (`TuningLock`), ranks tune in lockstep (`Ranks`)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from ....datasets import ForetuneError
from ....datasets.errors import abridged, reason_of, shown
from ....datasets.forking import renew_in_children
from ...launching.source_hash import digest_of
from ..ranks.agreement import number_of, rendezvous_of
from ..ranks.rendezvous import RankMismatchError, Rendezvous
from .config_space import Candidate

#: A thread that waits for a tuning checks the tuning thread every `_LOOK_EVERY_S` seconds. It gives up once that thread
#: has waited for other threads for `_PATIENCE_S`, or has stayed at one instruction (a compile, a long launch) for
#: `_LONG_PATIENCE_S`.
_LOOK_EVERY_S, _PATIENCE_S, _LONG_PATIENCE_S = 1.0, 5.0, 60.0
#: Top-level modules of Python's library whose code waits for other threads.
_WAITING = ("threading", "queue", "concurrent", "multiprocessing")

_here = threading.local()


class TuningLock:
    """A lock for tuning that does not deadlock.

    A tuning may run code in other threads and wait for them, while they need the same lock. A thread therefore stops
    waiting once the holder itself has waited for a while (`_PATIENCE_S`); it continues without the lock, and neither
    tunes nor remembers anything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0
        self._is_stuck = False  # then other threads do not wait for this holder

    @contextmanager
    def turn(self, is_waiting: bool | None = None) -> Iterator[bool]:
        """Try to hold the lock during the block; yield whether it is held.

        Args:
            is_waiting: Whether to wait for another thread that holds the lock, as long as it makes progress. By default
                a thread waits unless it is timing a config, since the holder might be waiting for that thread.
        """
        waits = not is_on_trial() if is_waiting is None else is_waiting
        is_held = self._lock.acquire(blocking=False) or (waits and self._wait())
        if is_held:
            self._holder = threading.get_ident()
        try:
            yield is_held
        finally:
            if is_held:
                self._is_stuck = False
                self._lock.release()

    def _wait(self) -> bool:
        frame, at, looks = None, -1, 0
        while not self._is_stuck:
            if self._lock.acquire(timeout=_LOOK_EVERY_S):
                return True
            holder = self._holder
            now = sys._current_frames().get(holder)  # a reference, so that its id is not reused
            looks = looks + 1 if now is not None and now is frame and now.f_lasti == at else 0
            frame, at = now, -1 if now is None else now.f_lasti
            patience_s = _PATIENCE_S if _is_waiting(now) else _LONG_PATIENCE_S
            if looks * _LOOK_EVERY_S >= patience_s and holder == self._holder:
                self._is_stuck = True
        return False


def _is_waiting(frame: FrameType | None) -> bool:
    """Return whether a thread in this frame waits for others: in a lock of Python's library, or in an event loop."""
    if frame is None:
        return False
    own, caller = (str(one.f_globals.get("__name__")).partition(".")[0] for one in (frame, frame.f_back or frame))
    return own in _WAITING or "asyncio" in (own, caller)


class _Contexts:
    """The context (`Sites`) being tuned and its thread (`now`), and the lock that this thread holds (`taken`).

    A context chooses the configs of kernels while a contextual function is tuned.
    """

    now: tuple[int, Any] | None = None

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        """Forget another thread's context and lock in a forked process, which lacks that thread."""
        if self.now is None or self.now[0] != threading.get_ident():
            self.now, self.taken = None, TuningLock()


_contexts = _Contexts()


@contextmanager
def on_trial(function: Any, candidate: Candidate) -> Iterator[None]:
    """Record, during the block, that this thread is timing a config of a function."""
    stack = _stack()
    stack.append((function, candidate))
    try:
        yield
    finally:
        stack.pop()


def is_on_trial() -> bool:
    """Return whether this thread is timing a config."""
    return bool(_stack()) or context_now() is not None


def config_on_trial(function: Any) -> Candidate | None:
    """Return the config of this function that this thread is timing; None if there is none."""
    return next((candidate for one, candidate in reversed(_stack()) if one is function), None)


@contextmanager
def in_context(context: Any) -> Iterator[None]:
    """Let a context (`Sites`) choose the configs of this thread's launches during the block.

    The caller holds `context_turn`.

    The context also applies to threads that Python did not start, such as those of torch's backward passes.
    """
    _contexts.now = (threading.get_ident(), context)
    try:
        yield
    finally:
        _contexts.now = None


def context_now() -> Any:
    """Return the context (`Sites`) that chooses configs in this thread; None if no contextual tuning runs there."""
    found = _contexts.now
    if found is None:
        return None
    is_its_own = found[0] == threading.get_ident()
    return found[1] if is_its_own or isinstance(threading.current_thread(), threading._DummyThread) else None


def context_turn() -> AbstractContextManager[bool]:
    """Return a context manager that waits until no other thread tunes a contextual function (has a context).

    It yields whether this thread may do so (see `TuningLock.turn`). Threads that are timing a config wait too, which
    cannot deadlock, because contexts do not take the locks of keys that are being tuned.
    """
    return _contexts.taken.turn(is_waiting=True)


def _stack() -> list[tuple[Any, Candidate]]:
    stack: list[tuple[Any, Candidate]] = _here.__dict__.setdefault("stack", [])
    return stack


class Ranks:
    """Exchange of values between the ranks of a torch process group; for None, a single rank.

    Every rank must make the same exchanges in the same order. Each exchange has a topic, so that ranks at different
    steps are detected. Values go through the group's key-value store, not through collectives: if a rank is elsewhere
    in the program, these would be matched with the user's own. A rank waits for the others as long as the group's
    collectives do (its `timeout`).

    Raises:
        ForetuneError: `group` is neither a torch process group nor None.

    >>> Ranks(None).exchange("the time of a config", 2.0)
    [2.0]
    """

    def __init__(self, group: Any = None) -> None:
        self._group, self._what = group, ""
        if group is None:
            self.rank, self.size = 0, 1
            return
        try:
            self.rank, self.size = int(group.rank()), int(group.size())
        except (AttributeError, TypeError, ValueError):
            raise ForetuneError(f"autotune_pg must be a torch process group but is {shown(group)}") from None

    @property
    def alone(self) -> bool:
        """Whether there is only one rank."""
        return self.size == 1

    @property
    def number(self) -> int:
        """A number that identifies the group in this process, for remembering choices."""
        return number_of(self._group)

    @contextmanager
    def together(self, what: str, terms: Mapping[str, object]) -> Iterator[None]:
        """Make all ranks begin and end a tuning, the block, together.

        No rank enters the block before all have begun. If a rank raises inside it, the others, which are inside too,
        get an error instead of waiting for a rank that has left.

        Args:
            what: The function's name.
            terms: Values that must be equal on all ranks, as for `check_alike`.

        Raises:
            RankMismatchError: A rank tunes something else, did not arrive in time, or has left.
            ForetuneError: The ranks cannot reach each other.
        """
        if self.alone:
            yield
            return
        steps = self._steps()
        steps.depth += 1
        self._what = what
        try:
            if steps.depth == 1:
                with _reached():
                    steps.begin()
            self.check_alike(terms)
            yield
            self.exchange("the end", None)
        except RankMismatchError:
            raise  # all ranks raise it
        except BaseException as error:
            if steps.depth == 1:
                with suppress(Exception):
                    steps.leave(f"{steps.rendezvous.named([self.rank])} left {what}: {reason_of(error)}")
            raise
        finally:
            steps.depth -= 1

    def exchange(self, about: str, mine: Any, failure: str | None = None) -> list[Any]:
        """Return the values of all ranks, by rank.

        Args:
            about: The topic, equal on all ranks.
            mine: This rank's value, a JSON value.
            failure: The error of this rank, if it failed: reported as a possible cause if other ranks do not arrive.

        Raises:
            RankMismatchError: A rank has another topic, did not arrive in time, or has left. All ranks raise it.
            ForetuneError: The ranks cannot reach each other.
        """
        if self.alone:
            return [mine]
        with _reached():
            return self._steps().next(f"{self._what}: {about}", mine, failure)

    def check_alike(self, terms: Mapping[str, object]) -> None:
        """Raise `RankMismatchError`, which names the difference, on all ranks if their terms are not equal."""
        everyones = self.exchange(", ".join(terms), {name: str(term) for name, term in terms.items()})
        for name in terms:
            if len(set(values := [of_rank[name] for of_rank in everyones])) > 1:
                there = self._steps().rendezvous.by_value(values)
                raise RankMismatchError(f"{self._what}: the ranks of autotune_pg differ in {name}: {there}")

    def failures_by_rank(self, failures: Sequence[str]) -> str:
        """Return a text that lists the failure of each rank, given all of them by rank ("" for none)."""
        named = self._steps().rendezvous.named
        return "; ".join(f"{named([rank])}: {text}" for rank, text in enumerate(failures) if text)

    def _steps(self) -> _Steps:
        found = _steps_of.get(self._group)
        if found is None:
            with _reached():
                rendezvous = rendezvous_of(self._group, "autotune_pg", _timeout_s(self._group), is_patient=True)
            found = _steps_of.setdefault(self._group, _Steps(rendezvous))
        return found


class _Steps:
    """The numbered exchanges (steps) between the ranks of one group; each rank counts them alike."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous, self.depth = rendezvous, 0
        self._number, self._lock = 0, threading.Lock()

    def begin(self) -> None:
        """Advance to the first step that no rank has finished or abandoned, so that all ranks restart at it."""
        while self.rendezvous.is_over(f"step {self._number}"):
            self._number += 1

    def next(self, about: str, mine: Any, failure: str | None) -> list[Any]:
        with self._lock:
            number, self._number = self._number, self._number + 1
        aside = f", while {self.rendezvous.named([self.rendezvous.rank])} failed with {failure}" if failure else ""
        everyones = self.rendezvous.meet(f"step {number}", lambda: [about, mine], about=about, aside=aside)
        if len({there for there, _ in everyones}) > 1:
            where = self.rendezvous.by_value([there for there, _ in everyones])
            raise RankMismatchError(f"the ranks of autotune_pg are at different places: {where}")
        return [value for _, value in everyones]

    def leave(self, reason: str) -> None:
        self.rendezvous.leave(f"step {self._number}", reason)


_steps_of: WeakKeyDictionary[Any, _Steps] = WeakKeyDictionary()


@contextmanager
def _reached() -> Iterator[None]:
    """Convert exceptions of the store to a `ForetuneError` that names the cause."""
    try:
        yield
    except ForetuneError:
        raise
    except Exception as error:
        raise ForetuneError(f"the ranks of autotune_pg cannot reach each other: {reason_of(error)}") from error


def listed(configs: Sequence[str]) -> str:
    """Return a short text that identifies a list of configs, so that ranks can compare their lists.

    >>> listed(["tile=1", "tile=2"])
    '2 configs (tile=1, tile=2) #e8cfd8c53f1f37ee'
    """
    return f"{len(configs)} configs ({abridged(', '.join(configs))}) #{digest_of(configs)}"


def _timeout_s(group: Any) -> float:
    """Return the timeout in seconds that a process group was created with."""
    try:
        timeout = group._get_backend(group._device_types[0]).options._timeout
    except Exception:  # noqa: BLE001 - a backend without options
        timeout = group.get_group_store().timeout
    return float(timeout.total_seconds())

"""`Refinement`: find an op's fastest config by timing its own calls (mode `refine`); `refining` shows the results.

The first call of a problem runs the predicted config. Later calls run other configs of the shortlist in turn, as `Race`
decides, and each is timed with two CUDA events that are read once they have completed. No call waits for a compilation,
a lock, a file or the device: binaries are compiled, and files read and written, in threads.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from ....datasets import KernelConfig, Problem
from ....datasets.errors import abridged, reason_of
from ....datasets.forking import renew_in_children
from ...arguments import harmless, warn_once
from ...launching.ahead import in_background
from ..cache.document import Refined, RefinedTime, Refining, is_sound
from ..cache.kernel_cache import ChoiceCache
from ..ranks.agreement import agreed, choose_together, epoch, scope
from ..session import is_capturing
from .calls import CudaEvents, check_cost, is_deterministic, why_paused
from .race import CALLS, MARGIN, Race

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")
_log = logging.getLogger("foretune")

#: The number of configs that take part; `tests/studies/refine_replay.py` compares 8, 12, 16 and 32. Without a
#: prediction, any config may be the fastest.
CANDIDATES, UNPREDICTED = 12, 48
#: Candidates of one problem that compile at the same time.
_COMPILING = 2
#: Results are stored after this many timed calls, and at the decision.
_STORED_EACH = 50
#: Calls that rest where nothing can be timed or compared: the choice runs, and nothing is looked up. While the device
#: waits for the host, more calls rest, and the last few are timed, to see whether that is still so.
_REST, _REST_IDLE = 3, 40
#: No further calls are planned while more timed calls than `_MOST_LATE` have not completed, and none is timed while
#: `_MOST_UNREAD` have not.
_MOST_LATE, _MOST_UNREAD = 8, 64
#: Ranks decide after this many meetings even if some config has no time on some rank. They meet every `CALLS` calls.
_MEETINGS = 5


class Refinement(Generic[C]):
    """Chooses the config of each call of one problem, until it has decided on `final`.

    Args:
        name: The kernel's name.
        problem: The problem, or a text for it.
        candidates: The shortlist; the predicted config first.
        slowdowns: The candidates' predicted slowdowns, (n_candidates,).
        watch: Times the calls.
        store: Keeps the results; None for memory only.
        limit: As `check_cost` returns it.
        predicted_us: The predicted microseconds of a call of `problem`: the value of `scale` in `run` for such a call.
    """

    def __init__(
        self,
        name: str,
        problem: Problem | str,
        candidates: Sequence[C],
        slowdowns: Sequence[float],
        *,
        watch: CudaEvents,
        store: Store[C] | None = None,
        limit: dict[str, float] | None = None,
        predicted_us: float = 1.0,
    ) -> None:
        count = CANDIDATES if len(set(slowdowns)) > 1 else UNPREDICTED
        self.name, self.problem, self.candidates = name, problem, tuple(candidates[:count])
        #: The config of all further calls, once it is decided.
        self.final: C | None = None
        self.race = Race(slowdowns[:count], **(limit or check_cost()))
        self.race.unit_us = predicted_us
        self._watch, self._store = watch, store
        self._ranks = scope()
        self._left = list(range(1, len(self.candidates)))  # not compiled yet, in this order
        self._compiling: dict[int, Sequence[Future[Any]]] = {}
        self._joined = {0}
        self._known: int | None = None  # the choice of an earlier process
        self._planned: list[int] = []  # the configs of the next calls, last one first
        self._resting = 0  # so many calls run the choice before anything is looked up
        self._unread = 0  # timed calls that have not been read
        self._is_idle = False  # whether the device waited for the host in most of the calls that were read last
        self._unstored = 0  # times that have not been stored
        self._epoch = epoch()
        # Times that other ranks do not know yet: the configs, and the logarithms of the times.
        self._held: tuple[list[int], list[float]] = ([], [])
        self._why_paused = ""
        self._loading = None if store is None or self._ranks else in_background(store.load)
        if self._ranks:  # ranks must pick the same configs, whatever is compiled on each of them
            self.race.ready[:] = True
        if len(self.candidates) == 1:
            self.final = self.candidates[0]
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock, at construction and in forked processes (see `renew_in_children`)."""
        self._lock = threading.Lock()

    def run(self, launch: Callable[[C], R], compile_one: Callable[[C], Sequence[Future[Any]]], scale: float = 1.0) -> R:
        """Launch a call with the final config, or before the decision with the one to try next; return its result.

        Args:
            launch: Launches a config.
            compile_one: Starts to compile a config for calls like this one, and returns the jobs.
            scale: The predicted time of this call with the first config, in the unit of `predicted_us`.
        """
        if self.final is not None:
            return launch(self.final)
        if not self._lock.acquire(blocking=False):  # another thread is at it
            return launch(self.candidates[0 if self._ranks else self.race.best])
        mark = None
        try:
            at, is_timed = self._due(compile_one)
            if is_timed:
                mark = self._watch.begin()
                self._unread += 1
        finally:
            self._lock.release()
        try:
            result = launch(self.candidates[at])
        except Exception as error:
            if mark is not None:
                self._watch.cancel(mark)
                self._unread -= 1
            if at == 0:
                raise
            result = launch(self.candidates[0])  # raises an error that is not the config's fault
            self.race.drop(at)
            self._epoch = -1  # plan anew, without it
            warn_once(f"{self.name}: {self.candidates[at]} failed ({reason_of(error)})", ": it is not tried again")
            return result
        if mark is not None:
            self._watch.end(mark, (at, scale))
        return result

    def _chosen(self) -> int:
        """Return the position of the config that calls run now if they do not explore."""
        if self.final is not None:
            return self.candidates.index(self.final)
        return 0 if self._why_paused else self.race.best

    def _due(self, compile_one: Callable[[C], Sequence[Future[Any]]]) -> tuple[int, bool]:
        """Return the position of the config that this call runs, and whether the call is timed.

        `compile_one` starts to compile a config, as for `run`.
        """
        if is_capturing():  # not even events may be queried
            return self._chosen(), False
        reviews = is_deterministic() or self._epoch != epoch() or not (self._resting or self._planned)
        if reviews:
            self._review(compile_one)
        if self._resting or self.final is not None:
            self._resting -= 1
            return self._chosen(), self._is_idle and self._resting < _REST and not self._why_paused
        if reviews:  # not timed, because the device may have had nothing to do meanwhile; `_review` has counted it
            return self._chosen(), False
        at = self._planned.pop()
        if at not in self._joined:  # counted, because the other ranks count it
            return self._chosen(), False
        return at, self._unread < _MOST_UNREAD

    def _review(self, compile_one: Callable[[C], Sequence[Future[Any]]]) -> None:
        """Read the times of past calls, decide on a config if possible, else plan which configs the next calls run.

        If there is nothing to explore now, a number of calls without exploring is planned. This method is slow, so it
        is called once in many calls. `compile_one` is as for `run`.
        """
        race = self.race
        if self._planned:
            race.undo(self._planned)
        self._planned, self._resting, self._epoch = [], _REST, epoch()
        if (why := why_paused()) != self._why_paused:
            self._why_paused = why
            if why:
                _log.info("foretune: %s for %s is not refined: %s", self.name, self.problem, why)
        if why or bool(self._ranks) != choose_together():
            return
        self._read()
        if self._ranks:
            if (calls := int(race.calls.sum())) and calls % CALLS == 0:
                self._meet(calls)
        else:
            self._recall()
        self._compile(compile_one)
        if not self._ranks:
            if self._known in self._joined:
                self._decide(self._known or 0)
            elif race.is_over:
                self._decide(race.best)
            elif len(self._joined) == 1 or self._is_idle or self._unread > _MOST_LATE:  # nothing to compare, or no news
                self._resting = _REST_IDLE if self._is_idle else _REST
                race.calls[self._chosen()] += self._resting
                return
        self._resting = 0
        if self.final is None:
            race.count([self._chosen()])  # this call
            most = -int(race.calls.sum()) % CALLS if self._ranks else CALLS
            self._planned = race.plan(most)[::-1]

    def _read(self) -> None:
        """Read the times of completed calls, and add them to the race; with several ranks, keep them until `_meet`."""
        configs, logs = self._held
        known, waited = len(configs), 0
        for (at, scale), time_us in self._watch.read():
            self._unread -= 1
            if time_us > 0:
                configs.append(at)
                logs.append(math.log(time_us / scale))
            else:
                waited += 1
        if self._ranks:
            return
        if waited or len(configs) > known:
            self._is_idle = waited > len(configs) - known
        if not configs:
            return
        self._held = ([], [])
        self.race.see(configs, logs)
        self._unstored += len(configs)
        if self._store is not None and self._unstored >= _STORED_EACH:
            self._unstored = 0
            in_background(self._saving(None))

    def _compile(self, compile_one: Callable[[C], Sequence[Future[Any]]]) -> None:
        """Add the configs whose binaries are ready to the race, and start to compile the next ones."""
        for at, jobs in list(self._compiling.items()):
            if all(job.done() for job in jobs):
                del self._compiling[at]
                if any(job.exception() for job in jobs):
                    self._left_out(at)
                else:
                    self._joined.add(at)
                    if not self._ranks:
                        self.race.join(at)
        while self._left and len(self._compiling) < _COMPILING:
            at = self._left.pop(0)
            if self.race.alive[at]:
                try:
                    self._compiling[at] = compile_one(self.candidates[at])
                except Exception:  # noqa: BLE001 - a config that does not compile does not take part
                    self._left_out(at)

    def _left_out(self, at: int) -> None:
        """Remove the config at a position, which cannot be compiled, from the race.

        If several ranks decide together it stays, without a time, so that all of them choose the same config.
        """
        if not self._ranks:
            self.race.drop(at)

    def _recall(self) -> None:
        """Add the results of earlier processes to the race, once they have been read from the disk."""
        if self._loading is None or not self._loading.done():
            return
        loading, self._loading = self._loading, None
        assert self._store is not None
        if loading.exception() is not None or (refined := loading.result()) is None:
            return
        values = [self._store.values.get(one) for one in self.candidates]
        for at, value in enumerate(values):
            if at and value is not None and (time := refined.times.get(value)) is not None:
                self.race.recall(at, time.slowdown, time.deviation, time.calls)
        if refined.decided in values:
            self._known = values.index(refined.decided)
            self._left = [at for at in self._left if at == self._known]

    def _meet(self, calls: int) -> None:
        """Exchange times with all ranks, after `calls` calls of each, and decide on the same config if possible.

        A config's time is that on its slowest rank.
        """
        own = copy.deepcopy(self.race)
        if self._held[0]:
            own.see(*self._held)
        # A candidate's time is the upper end of its interval, because the first must be beaten for certain.
        times = [
            own.time_us(at) * math.exp(own.slowdown(at)[1]) if own.seen[at] else None
            for at in range(len(self.candidates))
        ]
        texts = [{"": str(one)} for one in self.candidates]
        shared = agreed(times, self.name, f"{self.problem} after {calls} calls", texts)
        self.race.calls[0] += 1  # the next meeting is a round later
        if None in shared and any(shared) and calls < _MEETINGS * CALLS:
            return
        known = {at: time_us for at, time_us in enumerate(shared) if time_us is not None}
        best = min(known, key=known.__getitem__, default=0)
        self.race = own
        self._decide(best if 0 in known and known[best] < known[0] * (1 - MARGIN) else 0)

    def _decide(self, at: int) -> None:
        """Choose the config at a position for all further calls, log that, and store it."""
        race, self.final = self.race, self.candidates[at]
        slowdown, deviation = race.slowdown(at)
        _log.info(
            "foretune: %s for %s: %s after %d timed calls of %d configs, %s; exploring changed the time by %+.2f %%",
            self.name,
            self.problem,
            abridged(str(self.final)),
            int(race.seen.sum()),
            int((race.seen > 0).sum()),
            f"{100 * (1 - slowdown):.1f} % (+-{196 * deviation:.1f}) faster than predicted" if at else "as predicted",
            100 * race.cost(),
        )
        if self._store is not None and not self._ranks:
            in_background(self._saving(self.final))

    def _saving(self, decided: C | None) -> Callable[[], None]:
        """Return a function, to be run in a thread, that stores the present results; `decided` is the final config."""
        store, times = self._store, self.times()
        assert store is not None

        def save() -> None:
            with harmless(f"{self.name}: results cannot be stored", ": they are kept in memory"):
                store.save(times, decided)

        return save

    def times(self) -> dict[C, RefinedTime]:
        """Return the results of each config that has been timed."""
        race = self.race
        return {
            one: RefinedTime(int(race.seen[at]), race.time_us(at), *race.slowdown(at))
            for at, one in enumerate(self.candidates)
            if race.seen[at]
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each timed config, as `Refining` shows it."""
        about = {"kernel": self.name, "problem": str(self.problem)}
        rows = []
        for at, (one, time) in enumerate(self.times().items()):
            state = "exploring" if self.final is None else "chosen" if one == self.final else "dropped"
            if self._why_paused and at == 0:
                state = f"paused: {self._why_paused}"
            rows.append({**about, "state": state, "config": str(one), **time.row()})
        return rows


_all: dict[Hashable, Refinement[Any]] = {}


def refinement_of(key: Hashable, make: Callable[[], Refinement[C]]) -> Refinement[C]:
    """Return this process's `Refinement` for a key; `make` creates it at the first call."""
    found = _all.get(key)
    return found if found is not None else _all.setdefault(key, make())


def refining() -> Refining:
    """Return the results of this process's calls in mode `refine`: a row for each kernel, problem and config.

    Each row has the number of timed calls, the mean time of a call, the 95 % interval of its difference from the
    predicted config, and the microseconds that the config saves in each call. `foretune cache show --refining` shows
    the stored results of earlier processes.

    Returns:
        A table with `rows`, which notebooks and `rich.print` show, and `to_json()`.

    >>> refining()
    <Refining of 0 problems, 0 configs>
    """
    return Refining([row for one in list(_all.values()) for row in one.rows()])


@dataclass
class Store(Generic[C]):
    """Stores the results of mode `refine` for one problem in the choice cache and in the log of FORETUNE_LOG.

    Attributes:
        problem: The problem that represents the calls.
        open: Returns the kernel's choice cache; called once.
        values: The `KernelConfig` of each candidate; candidates without one are not stored.
        log: Logs the mean time of a candidate in microseconds; called at the decision.
        bundle: Returns the digest of the bundle that predicted, "" for none.
    """

    problem: Problem
    open: Callable[[], ChoiceCache]
    values: Mapping[C, KernelConfig]
    log: Callable[[C, float], object]
    bundle: Callable[[], str]

    def load(self) -> Refined | None:
        """Return the results that earlier processes stored; None if there are none."""
        return self._cache.refined(self.problem)

    def save(self, times: dict[C, RefinedTime], decided: C | None) -> None:
        """Store the results so far: times by candidate, and the chosen one, None before the decision.

        At the decision the mean times are logged, too.
        """
        kept = {self.values[one]: time for one, time in times.items() if one in self.values}
        chosen = None if decided is None else self.values.get(decided)
        self._cache.refine(self.problem, Refined(kept, chosen), self.bundle())
        for one, time in times.items() if decided is not None else ():
            if is_sound(time):
                self.log(one, time.mean_us)

    @cached_property
    def _cache(self) -> ChoiceCache:
        """The kernel's choice cache, opened at the first use only.

        Opening it hashes the kernel's source, which can take 50 ms of Python, during which other threads wait.
        """
        return self.open()

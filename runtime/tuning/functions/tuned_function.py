"""`TunedFunction`: any Python function, run with the fastest of its configs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....datasets import DeviceSpec, Family, ForetuneError, Status
from ....datasets.errors import MOST, check_flag, check_integer
from ...arguments import warn_once
from ...forking import renew_in_children
from ...launching.source_hash import digest_of
from ...launching.stub_driver import measures
from .call_timer import CallTimer, check_timer, timer_for
from .calls import Call, CallReader
from .config_cache import ConfigCache
from .config_space import Candidate
from .in_step import Ranks, listed
from .key_record import KeyRecord, Outcome, Tuning, record_key
from .plain_values import plain, text_of
from .results import Failures, Trial, TuneResult, all_failed
from .reuse import Reuse, is_capturing, resolve_reuse, software
from .running import TuningLock, Turn, config_on_trial, context_now, on_trial
from .search import Search
from .side_effects import SideEffects
from .verbose import teller
from .work import Work
from .wrapped import WrappedFunction


class TunedFunction(WrappedFunction):
    """A function with its configs; `foretune.tune`, which says what the options are, makes one. It is called as the
    function is, without the knobs, which it fills in; a knob that a call gives all the same stays as given.

    >>> def scale(values, tile, unroll=1):
    ...     return [2 * value for value in values]
    >>> tuned = TunedFunction(scale, {"tile": [1, 2], "unroll": [1, 4]}, key=lambda values: len(values), cache=False)
    >>> tuned([1, 2, 3]), tuned([1, 2, 3], tile=2)
    ([2, 4, 6], [2, 4, 6])
    >>> result = tuned.tune([1, 2, 3])
    >>> result.key, len(result.trials), sorted(result.best_config)
    ('3', 4, ['tile', 'unroll'])
    """

    def __init__(
        self,
        function: Callable[..., Any],
        space: Any,
        *,
        key: Callable[..., Any] | Sequence[str] | None = None,
        prune: Callable[..., Any] | None = None,
        family: Family | None = None,
        n_warmup: int = 3,
        n_repeat: int = 10,
        search: Any = "exhaustive",
        budget_s: float | None = None,
        max_trials: int | None = None,
        reset: Callable[..., Any] | None = None,
        restore: Sequence[str] = (),
        work: Callable[..., Work | Mapping[str, Any]] | None = None,
        device: DeviceSpec | Path | str | None = None,
        cache: ConfigCache | Path | str | bool = True,
        timer: CallTimer | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(function)
        resolve_reuse()  # a value that does not exist is refused here, not in a launch
        self._calls = CallReader(function, space, key, prune, family, work, device, self.name)
        self.n_warmup = check_integer("n_warmup", n_warmup, 1, MOST)  # the first call compiles
        self.n_repeat = check_integer("n_repeat", n_repeat, 1, MOST)
        self._search, self._effects = Search(search, budget_s, max_trials), SideEffects(reset, restore)
        self._timer, self._clock, self._now = check_timer(timer), clock, now
        self.cache = ConfigCache.for_function(self.name, cache)
        self._chosen: dict[tuple[str, str, int], Candidate] = {}
        self._tuned_here: set[str] = set()
        self._generation = self.cache.generation
        renew_in_children(self)

    def renew(self) -> None:
        """See `renew_in_children`."""
        self._guard = threading.Lock()
        self._locks: dict[str, TuningLock] = {}

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The whole space, as keyword arguments."""
        return [dict(candidate.knobs) for candidate in self._calls.space.candidates()]

    def __call__(
        self, *args: Any, autotune: bool = True, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> Any:
        """The function's result. A key that is new is tuned first, unless `autotune` is False: then the best known
        config runs, or the first. Raises what the function raises; where no config works, the exception that all of
        them raised if it is of one type, else `TuningFailed` with the first one as its cause. The next call tries
        again."""
        call, tunes = self._calls.read(args, kwargs, Ranks(autotune_pg).size), check_flag("autotune", autotune)
        candidate = config_on_trial(self)  # as in recursion
        if candidate is None:
            if (context := context_now()) is not None:
                return context.run_function(self, call)
            candidate = self._choice(call, tunes, autotune_verbose, autotune_pg)
        return self.run(call, candidate)

    def tune(
        self, *args: Any, force: bool = False, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> TuneResult:
        """What is found out about the configs for a call with these arguments: what is known, and the rest measured
        now; all of it with `force`. Raises as calling does."""
        group = autotune_pg
        call = self._calls.read(args, kwargs, Ranks(group).size)
        if (reason := self._effects.used_up(call.named)) is not None:
            raise ForetuneError(f"{self.name}: {reason}: pass a list, or what opens it")
        with self._lock(call) as is_mine:
            if not is_mine:
                raise ForetuneError(f"{self.name} is being tuned for {call.key}, by what calls it now")
            candidate, result = self._tuned(call, check_flag("force", force), autotune_verbose, Ranks(group))
            self.remember(call, candidate, group)
        return result

    def candidates(self, call: Call) -> tuple[Candidate, ...]:
        """Those worth trying for a call. Raises as `CallReader.candidates` does."""
        return self._calls.candidates(call)[1]

    def run(self, call: Call, candidate: Candidate) -> Any:
        """Calls the function with a config."""
        knobs = {name: value for name, value in candidate.knobs.items() if name not in call.fixed}
        return self.function(*call.args, **call.kwargs, **knobs)

    def remember(self, call: Call, candidate: Candidate, group: Any = None) -> None:
        """Has calls of this key run this config from now on, in this process."""
        self._chosen[self._memory_key(call, group)] = candidate

    def _choice(self, call: Call, tunes: bool, verbose: bool, group: Any) -> Candidate:
        if self._generation != self.cache.generation:
            self._generation = self.cache.generation
            self._chosen.clear()
        memory_key = self._memory_key(call, group)
        if (known := self._chosen.get(memory_key)) is not None:
            return known
        if not tunes:
            return self._untuned(call)
        if is_capturing():
            warn_once(f"{self.name}: a CUDA graph is being captured", ": the best known config runs, or the first")
            return self._untuned(call)
        if (reason := self._effects.used_up(call.named)) is not None:
            warn_once(f"{self.name}: {reason}", ": the best known config runs, or the first")
            return self._untuned(call)
        with self._lock(call) as is_mine:
            if not is_mine:
                return self._untuned(call)
            if (known := self._chosen.get(memory_key)) is None:  # another thread may have tuned it meanwhile
                ranks = Ranks(group)
                left = self.candidates(call) if ranks.alone else ()
                known = left[0] if len(left) == 1 else self._tuned(call, False, verbose, ranks)[0]
                self.remember(call, known, group)
            return known

    def _untuned(self, call: Call) -> Candidate:
        """What runs where nothing is to be measured: the best that is known, else the first."""
        left, record = self.candidates(call), self._record(call)
        return (None if record is None else record.fastest(left)) or left[0]

    def _tuned(self, call: Call, force: bool, verbose: bool, ranks: Ranks) -> tuple[Candidate, TuneResult]:
        runs = f"{self.n_warmup} + {self.n_repeat}"
        terms = {"key": call.key, "source": self._code, "search": self._search, "runs": runs}
        with ranks.together(self.name, terms):
            return self._tuned_in_step(call, force, verbose, ranks)

    def _tuned_in_step(self, call: Call, force: bool, verbose: bool, ranks: Ranks) -> tuple[Candidate, TuneResult]:
        began = self._clock()
        refused, left = self._calls.candidates(call)
        texts = [one.text for one in left]
        done = f"{self._search} {digest_of(texts)}"
        record = None if force else self._record(call)
        if record is not None:
            record.retry_failures(left, self._now())
        ranks.check_alike({"configs": listed(texts)})
        if len(set(ranks.exchange("what is known", "" if record is None else record.gist))) > 1:
            record = None  # what only some of them know is measured again, in step
        is_known = (
            record is not None and record.done == done and record.chosen in texts and record.chosen in record.outcomes
        )
        record = record or KeyRecord(call.problem, software())
        failures = Failures()
        if is_known:
            reason = f"{len(left)} configs were known"
        else:
            reason = self._measure(call, record, left, verbose, ranks, failures)
        outcomes = {one: Outcome(Status.INVALID, error=why) for one, why in refused.items()}
        outcomes |= {one: record.outcomes[one.text] for one in left if one.text in record.outcomes}
        metrics = self._calls.metrics(call)
        trials = tuple(
            Trial(dict(one.knobs), *outcomes[one], metrics(outcomes[one].time_us))
            for one in self._calls.space.candidates()
            if one in outcomes
        )
        best = left[texts.index(str(record.chosen))] if is_known else record.fastest(left)
        if best is None:
            raise failures.error(all_failed(self.name, trials))
        if not is_known:
            record.chosen, record.done = best.text, done
            self._keep(call, record)
        self._tuned_here.add(self._record_key(call))
        self._search.learn(self._record_key(call), call.problem, record.times(left))
        return best, TuneResult(
            function=self.name,
            key=call.key,
            problem=call.problem,
            device=call.place.name,
            software=dict(record.software),
            best_config=dict(best.knobs),
            best_time_us=record.outcomes[best.text].time_us,
            trials=trials,
            untried=len(refused) + len(left) - len(trials),
            tuned_s=0.0 if is_known else self._clock() - began,
            reason=reason,
        )

    def _measure(
        self,
        call: Call,
        record: KeyRecord,
        left: Sequence[Candidate],
        verbose: bool,
        ranks: Ranks,
        failures: Failures,
    ) -> str:
        self._learn_earlier(call)
        undo = self._effects.undo(call.args, call.kwargs, call.named)

        def run(candidate: Candidate) -> Any:
            with on_trial(self, candidate):
                return self.run(call, candidate)

        tuning = Tuning(
            name=self.name,
            run=run,
            timer=self._timer or timer_for(call.place.on_gpu, in_step=not ranks.alone),
            undo=undo,
            ranks=ranks,
            n_warmup=self.n_warmup,
            n_repeat=self.n_repeat,
            save=lambda: self._keep(call, record),
            say=teller(verbose, self.name, call.key, ranks),
            clock=self._clock,
            now=self._now,
            failures=failures,
        )
        try:
            return tuning.measure(record, left, self._search)
        finally:
            if undo is not None:
                undo()

    def _keep(self, call: Call, record: KeyRecord) -> None:
        """Keeps what was measured of a key, if it was (see `measures`)."""
        if self._timer is not None or measures():
            self.cache.set(self._record_key(call), record.to_json())

    def _learn_earlier(self, call: Call) -> None:
        """Tells a model what other processes, and earlier ones, found out of other keys."""
        if not self._search.is_guided:
            return
        prefix = record_key(self.name, self._digest, call.place.name, "")
        for key in self.cache:
            record = KeyRecord.from_json(self.cache.get(key)) if key.startswith(prefix) else None
            if record is not None and record.done:
                self._search.learn(key, record.problem, record.times(self._calls.space.candidates()))

    def _record(self, call: Call) -> KeyRecord | None:
        """What is known of a call's key, and may be used."""
        reuse, key = resolve_reuse(), self._record_key(call)
        if reuse is Reuse.ALWAYS and key not in self._tuned_here:
            return None
        record = KeyRecord.from_json(self.cache.get(key))
        if record is None or dict(record.software) == software():
            return record
        if reuse is Reuse.STRICT:
            return None
        then = " ".join(f"{name}={version}" for name, version in record.software.items())
        warn_once(f"{self.name}: was tuned with {then}", ": that choice runs; FORETUNE_TUNE=strict tunes again")
        return record

    def _record_key(self, call: Call) -> str:
        return record_key(self.name, self._digest, call.place.name, call.key)

    def _memory_key(self, call: Call, group: Any) -> tuple[str, str, int]:
        fixed = text_of(plain(call.fixed, str)) if call.fixed else ""
        return self._record_key(call), fixed, Ranks(group).number

    def _lock(self, call: Call) -> Turn:
        with self._guard:
            return Turn(self._locks.setdefault(self._record_key(call), TuningLock()))

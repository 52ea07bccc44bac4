"""`TunedFunction`: wraps a Python function, and calls it with its fastest config, which is tuned at the first call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from ....datasets import DeviceSpec, Family, ForetuneError, Status
from ....datasets.errors import check_flag
from ....datasets.forking import renew_in_children
from ...arguments import Mode, resolve_mode, warn_once
from ...launching.source_hash import digest_of
from ..session import Measured, is_capturing
from .calls import CallReader, FunctionCall, Work
from .config_cache import KeyRecord, record_key
from .config_space import Candidate, Search
from .function_tuner import CallTuning, FunctionTuner, Reuse, resolve_reuse, trials_of
from .in_step import Ranks, TuningLock, config_on_trial, context_now, listed, on_trial
from .results import TuneResult, all_failed
from .wrapped import P, R


class TunedFunction(FunctionTuner[P, R]):
    """A function and its configs, as `foretune.tune` returns it; the options are documented there.

    Call it as the original function, without the knobs: it fills them in from the chosen config. A knob that a call
    passes explicitly keeps that value. For type checkers, it takes the parameters of the original function (`P`) and
    returns its result (`R`).

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
        function: Callable[P, R],
        space: Any,
        *,
        key: Callable[..., Any] | Sequence[str] | None = None,
        prune: Callable[..., Any] | None = None,
        family: Family | None = None,
        search: Any = "exhaustive",
        budget_s: float | None = None,
        max_trials: int | None = None,
        work: Callable[..., Work | Mapping[str, Any]] | None = None,
        device: DeviceSpec | Path | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(function, **options)
        self._calls = CallReader(function, space, key, prune, family, work, device, self.name)
        self._search = Search(search, budget_s, max_trials)
        self._tuned_here: set[str] = set()
        renew_in_children(self)

    def renew(self) -> None:
        """Create new locks, at construction and in forked processes (see `renew_in_children`)."""
        self._guard = threading.Lock()
        self._locks: dict[str, TuningLock] = {}

    @property
    def configs(self) -> list[dict[str, Any]]:
        """All configs of the space, as keyword arguments."""
        return [dict(candidate.knobs) for candidate in self._calls.space.candidates()]

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tunes: bool, verbose: bool, group: Any) -> Any:
        call = self._calls.read(args, kwargs, Ranks(group).size)
        candidate = config_on_trial(self)  # the function called itself while a config is timed
        if candidate is None:
            if (context := context_now()) is not None:
                return context.run_function(self, call)
            candidate = self._choice(call, tunes, verbose, group)
        return self.run(call, candidate)

    def tune(
        self, *args: Any, force: bool = False, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> TuneResult:
        """Tune the function for a call with these arguments; return all measurements.

        Args:
            args: Arguments of the function.
            force: Measure all configs again. Otherwise known times are reused and only the others are measured.
            autotune_verbose: Print the progress of tuning to stderr.
            autotune_pg: A torch process group whose ranks tune together.
            kwargs: Keyword arguments of the function; they may include knobs.

        Returns:
            The result for the key of this call.

        Raises:
            ForetuneError: An argument is used up by the first run, or an outer call is tuning this key already; and
                as for a call.
            TuningFailed: As for a call.
        """
        group = autotune_pg
        call = self._calls.read(args, kwargs, Ranks(group).size)
        self._is_repeatable(call)
        with self._turn(call) as is_mine:
            if not is_mine:
                raise ForetuneError(f"{self.name} is already being tuned for {call.key} by an outer call")
            candidate, result = self._tuned(call, check_flag("force", force), autotune_verbose, group)
            self.remember(call, candidate, group)
        return result

    def candidates(self, call: FunctionCall) -> tuple[Candidate, ...]:
        """Return the configs worth trying for a call. Raises as `CallReader.candidates` does."""
        return self._calls.candidates(call)[1]

    def run(self, call: FunctionCall, candidate: Candidate) -> Any:
        """Call the function with a config, and return its result."""
        knobs = {name: value for name, value in candidate.knobs.items() if name not in call.fixed}
        return self.function(*call.args, **call.kwargs, **knobs)

    def remember(self, call: FunctionCall, candidate: Candidate, group: Any = None) -> None:
        """Use this config in this process for all further calls with the key of `call` and the same process group.

        `group` is that process group; None for calls that tune without one. Other ranks are told nothing.
        """
        self._chosen[self._memory_key(call, group)] = candidate

    def _choice(self, call: FunctionCall, tunes: bool, verbose: bool, group: Any) -> Candidate:
        memory_key = self._memory_key(call, group)
        known: Candidate | None = self._remembered(memory_key)
        if resolve_mode() is Mode.OFF:
            return self.candidates(call)[0]
        if known is not None:
            return known
        if (pinned := self._pinned(call)) is not None:
            self.remember(call, candidate := self._candidate_of(call, pinned.get("")), group)
            return candidate
        if not tunes:
            return self._untuned(call)
        consequence = ": the best known config runs, or the first"
        if is_capturing():
            warn_once(f"{self.name}: a CUDA graph is being captured", consequence)
            return self._untuned(call)
        if not self._is_repeatable(call, consequence):
            return self._untuned(call)
        with self._turn(call) as is_mine:
            if not is_mine:
                return self._untuned(call)
            if (known := self._chosen.get(memory_key)) is None:  # another thread may have tuned it meanwhile
                left = self.candidates(call) if Ranks(group).alone else ()
                known = left[0] if len(left) == 1 else self._tuned(call, False, verbose, group)[0]
                self.remember(call, known, group)
            return known

    def _candidate_of(self, call: FunctionCall, text: str | None) -> Candidate:
        """Return the config that a pin file identifies by `text`; if `text` is None, the one that runs without tuning.

        Raises:
            PinError: The call has no such config.
        """
        found = next((candidate for candidate in self.candidates(call) if candidate.text == text), None)
        if found is None and text is not None:
            self._fall_back(f"has {text} for {self.name}, which is not a config of this call")
        return found or self._untuned(call)

    def _untuned(self, call: FunctionCall) -> Candidate:
        """Return the config that runs without tuning: the fastest known one, else the first."""
        left, record = self.candidates(call), self._record(call)
        return (None if record is None else record.fastest(left)) or left[0]

    def _tuned(self, call: FunctionCall, force: bool, verbose: bool, group: Any) -> tuple[Candidate, TuneResult]:
        with self._tuning(call, group, verbose, search=self._search) as tuning:
            return self._tuned_in_step(tuning, force)

    def _tuned_in_step(self, tuning: CallTuning, force: bool) -> tuple[Candidate, TuneResult]:
        began, call = self._clock(), tuning.call
        refused, left = self._calls.candidates(call)
        texts = [one.text for one in left]
        done = f"{self._search} {digest_of(texts)}"
        record = None if force else self._record(call)
        if record is not None:
            record.retry_failures(left, self._now())
        tuning.ranks.check_alike({"configs": listed(texts)})
        if not tuning.is_shared("" if record is None else record.digest):
            record = None
        record = record or self._new_record(call.problem)
        is_known = record.done == done and record.chosen in texts and record.chosen in record.measured
        session, reason = None, f"{len(left)} configs were known"
        if not is_known:
            self._learn_earlier(call)
            with tuning.undone():
                session, reason = tuning.measure(
                    record,
                    left,
                    self._search,
                    partial(self._run_on_trial, call),
                    save=lambda: self._keep(call, record.to_json()),
                )
        measured = {one: Measured(Status.INVALID, error=why) for one, why in refused.items()} | record.of(left)
        trials = trials_of(self._calls.space.candidates(), measured, self._calls.metrics(call))
        best = left[texts.index(str(record.chosen))] if is_known else record.fastest(left)
        if best is None:
            failed = all_failed(self.name, trials)
            raise failed if session is None else session.failures.error(failed)
        if not is_known:
            record.chosen, record.done = best.text, done
            self._keep(call, record.to_json())
        self._tuned_here.add(self._record_key(call))
        self._search.learn(self._record_key(call), call.problem, record.times(left))
        untried, tuned_s = len(refused) + len(left) - len(trials), 0.0 if is_known else self._clock() - began
        return best, tuning.result(
            self.name, call.key, record, best, trials, untried=untried, tuned_s=tuned_s, reason=reason
        )

    def _run_on_trial(self, call: FunctionCall, candidate: Candidate) -> Any:
        with on_trial(self, candidate):
            return self.run(call, candidate)

    def _learn_earlier(self, call: FunctionCall) -> None:
        """Train the search's model on the times of other keys, measured by other or earlier processes."""
        if not self._search.is_guided:
            return
        prefix = record_key(self.name, self.digest, call.place.name, "")
        for key in self.cache:
            record = KeyRecord.from_json(self.cache.get(key)) if key.startswith(prefix) else None
            if record is not None and record.done:
                self._search.learn(key, record.problem, record.times(self._calls.space.candidates()))

    def _record(self, call: FunctionCall) -> KeyRecord | None:
        """Return the usable cached record of a call's key, or None."""
        key = self._record_key(call)
        if resolve_reuse() is Reuse.ALWAYS and key not in self._tuned_here:
            return None
        record = KeyRecord.from_json(self.cache.get(key))
        return None if record is None else self._usable({"": record}).get("")

    def _turn(self, call: FunctionCall) -> AbstractContextManager[bool]:
        with self._guard:
            return self._locks.setdefault(self._record_key(call), TuningLock()).turn()

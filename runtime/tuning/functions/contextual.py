"""`ContextualFunction`: a function whose autotuned kernels are timed in the context of the whole function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import check_flag, check_path
from ....datasets.forking import renew_in_children
from ...arguments import Mode, resolve_mode, warn_once
from ..session import is_capturing
from .call_timer import CallTimer
from .calls import FunctionCall, place_of, problem_of_key
from .config_cache import ConfigCache, KeyRecord
from .config_space import Search
from .function_tuner import CallTuning, FunctionTuner, Reuse, resolve_reuse, trials_of
from .in_step import Ranks, TuningLock, context_now, context_turn, in_context
from .plain_values import text_of
from .results import TuneResult, all_failed, check_finished
from .sites import Site, Sites, forced
from .wrapped import CallKey, P, R

#: The kernels that a function launches may depend on the configs. It is searched for new ones at most this often, so
#: that tuning ends.
_ROUNDS = 3


class ContextualFunction(FunctionTuner[P, R]):
    """A function as `foretune.contextual_autotune` returns it; the options are documented there.

    For type checkers, it takes the parameters of the original function (`P`) and returns its result (`R`).

    >>> from foretune.runtime.tuning.functions.tuned_function import TunedFunction
    >>> twice = TunedFunction(lambda values, tile: [2 * value for value in values], {"tile": [1, 2]}, cache=False)
    >>> layer = ContextualFunction(lambda values: twice(twice(values)), cache=False)
    >>> layer([1, 2])
    [4, 8]
    >>> [(result.key, len(result.trials)) for result in layer.tune([1, 2])]  # a list's items are part of the key
    [('{"values":[1,2]}', 2), ('{"values":[2,4]}', 2)]
    """

    def __init__(
        self,
        function: Callable[P, R],
        *,
        key: Callable[..., Any] | Sequence[str] | None = None,
        logs: Path | str | None = None,
        n_repeat: int = 5,
        **options: Any,
    ) -> None:
        super().__init__(function, n_repeat=n_repeat, **options)
        self._key = CallKey(function, key)
        self._logs = None if logs is None else check_path("logs", logs)
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock for tuning, at construction and in forked processes (see `renew_in_children`)."""
        self._lock = TuningLock()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tunes: bool, verbose: bool, group: Any) -> Any:
        tunes = tunes and context_now() is None
        if tunes and is_capturing():
            warn_once(f"{self.name}: a CUDA graph is being captured", ": nothing in it is tuned")
            tunes = False
        if tunes and resolve_mode() is not Mode.OFF:
            call = self._read(args, kwargs, group)
            key = self._memory_key(call, group)
            if not self._remembered(key) and (pinned := self._pinned(call)) is not None:
                return self._run_pinned(call, key, pinned)
            if not self._remembered(key) and self._is_repeatable(call, ": it is not tuned as a whole"):
                with self._lock.turn() as is_mine:  # another thread may tune it meanwhile
                    if is_mine and not self._remembered(key):
                        with context_turn() as has_turn:
                            if has_turn:  # else the function runs untuned
                                self._tune(call, False, verbose, group)
        return self.function(*args, **kwargs)

    def _run_pinned(self, call: FunctionCall, key: tuple[str, str, int], pinned: Mapping[str, str]) -> Any:
        """Call the function with the pinned configs of the kernels in it, by label, and return its result.

        The configs are kept for further calls.

        Raises:
            PinError: The function ran a kernel that the file does not cover.
        """
        if not pinned:  # it may run what is predicted
            return self.function(*call.args, **call.kwargs)
        with context_turn() as has_turn:
            if not has_turn:
                return self.function(*call.args, **call.kwargs)
            sites = Sites({label: (text, None) for label, text in pinned.items()})
            with in_context(sites), forced():
                result = self.function(*call.args, **call.kwargs)
        for site in sites.found:
            if not site.is_tuned:
                self._fall_back(f"does not cover {site.label} in {self.name}")
            site.settle(site.now)
        self._chosen[key] = True
        return result

    def tune(
        self, *args: Any, force: bool = False, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> tuple[TuneResult, ...]:
        """Tune all kernels in the function for a call with these arguments; return all measurements.

        Args:
            args: Arguments of the function.
            force: Measure all configs again. Otherwise known choices are kept and only the other kernels are tuned.
            autotune_verbose: Print the progress of tuning to stderr.
            autotune_pg: A torch process group whose ranks tune together.
            kwargs: Keyword arguments of the function.

        Returns:
            A result for each kernel and key that the function ran, in the order of their first launches.

        Raises:
            ForetuneError: An argument is used up by the first run, or an outer call is being tuned.
            TuningFailed: As for a call.
        """
        if context_now() is not None:
            raise ForetuneError(f"{self.name} is run by a function that is being tuned as a whole")
        call = self._read(args, kwargs, autotune_pg)
        self._is_repeatable(call)
        with self._lock.turn() as is_mine:
            if not is_mine:
                raise ForetuneError(f"{self.name} is already being tuned by an outer call")
            with context_turn() as has_turn:
                if not has_turn:
                    raise ForetuneError(f"{self.name} is run by a function that is being tuned as a whole")
                return self._tune(call, check_flag("force", force), autotune_verbose, autotune_pg)

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], group: Any) -> FunctionCall:
        named = self._key.named(args, kwargs, {})
        key = text_of(self._key.of(args, kwargs, named))
        return FunctionCall(args, kwargs, named, {}, key, None, place_of(named.values(), Ranks(group).size))

    def _tune(self, call: FunctionCall, force: bool, verbose: bool, group: Any) -> tuple[TuneResult, ...]:
        with self._tuning(call, group, verbose, self._logs) as tuning:
            results = self._tune_in_step(tuning, force)
        self._chosen[self._memory_key(call, group)] = True
        return results

    def _tune_in_step(self, tuning: CallTuning, force: bool) -> tuple[TuneResult, ...]:
        call, began = tuning.call, self._clock()
        records = {} if force else self._records(call)
        if not tuning.is_shared(text_of({label: record.digest for label, record in records.items()})):
            records = {}
        sites = Sites({label: (record.chosen, record.done) for label, record in records.items()})
        with in_context(sites), forced(), tuning.undone():
            result = self._once(tuning)  # finds the kernels
            if sites.found:
                check_finished(self.name, result)
            del result  # it may be large
            reasons = self._tune_sites(tuning, sites, records)
        for site in sites.found:
            site.settle(site.now)
        if not sites.found:
            warn_once(f"{self.name}: nothing in it is autotuned", ": there is nothing to tune")
        spent_s = self._clock() - began
        results = []
        for site in sites.found:
            record, reason = records.get(site.label) or self._new_record(None), reasons.get(site.label)
            trials = trials_of(site.candidates, record.of(site.candidates))
            rest: dict[str, Any] = {
                "untried": len(site.candidates) - len(trials),
                "tuned_s": spent_s if reason else 0.0,
            }
            rest["reason"] = f"in {self.name}: {reason or 'nothing was left to measure'}"
            results.append(tuning.result(site.name, site.key, record, site.now, trials, **rest))
        return tuple(results)

    def _tune_sites(self, tuning: CallTuning, sites: Sites, records: dict[str, KeyRecord]) -> dict[str, str]:
        """Tune the function's kernels (sites) one after the other, while the others run their best config so far.

        `records` receives the measurements of each site, by its label.

        Returns:
            A text about the measurements of each site, by its label.
        """
        reasons: dict[str, str] = {}
        for _ in range(_ROUNDS):
            pending = [site for site in sites.found if site.is_reached and not site.is_tuned]
            tuning.ranks.check_alike({"kernels": "; ".join(site.terms for site in pending)})
            if not pending:
                return reasons
            for site in pending:
                reasons[site.label] = self._tune_site(tuning, site, records)
            for site in sites.found:
                site.is_reached = False
            self._once(tuning)  # other configs may lead to other kernels
        warn_once(f"{self.name}: every run launches new kernels or keys", ": the remaining ones are not tuned")
        return reasons

    def _tune_site(self, tuning: CallTuning, site: Site, records: dict[str, KeyRecord]) -> str:
        record = records[site.label] = self._new_record(problem_of_key(site.name, [site.key]))
        search, run = Search("exhaustive", None, None), partial(self._run, tuning.call, site)
        label = f"{site.label}: "
        session, reason = tuning.measure(record, site.candidates, search, run, label=label, check=site.check)
        best = record.fastest(site.candidates)
        if best is None:
            trials = trials_of(site.candidates, record.of(site.candidates))
            raise session.failures.error(all_failed(site.name, trials))
        site.now, record.chosen, record.done = best, best.text, site.done
        site.is_tuned = True
        self._keep(tuning.call, {"sites": {name: one.to_json() for name, one in records.items()}})
        return reason

    def _run(self, call: FunctionCall, site: Site, candidate: Any) -> Any:
        site.now = candidate
        return self.function(*call.args, **call.kwargs)

    def _once(self, tuning: CallTuning) -> Any:
        if tuning.undo is not None:
            tuning.undo()
        return self.function(*tuning.call.args, **tuning.call.kwargs)

    def _records(self, call: FunctionCall) -> dict[str, KeyRecord]:
        """Return the cached records of the kernels (sites) for a call's key that may be reused, by label."""
        if resolve_reuse() is Reuse.ALWAYS:
            return {}
        kept = (self.cache.get(self._record_key(call)) or {}).get("sites", {})
        found = {name: KeyRecord.from_json(one) for name, one in kept.items()} if isinstance(kept, dict) else {}
        return self._usable({name: record for name, record in found.items() if record and record.chosen is not None})


def contextual_autotune(
    *,
    key: Callable[..., Any] | Sequence[str] | None = None,
    n_warmup: int = 3,
    n_repeat: int = 5,
    reset: Callable[..., Any] | None = None,
    restore: Sequence[str] = (),
    logs: Path | str | None = None,
    cache: ConfigCache | Path | str | bool = True,
    timer: CallTimer | None = None,
) -> Callable[[Callable[P, R]], ContextualFunction[P, R]]:
    """Decorate a function so that the first call of each key tunes the autotuned kernels in it by the function's time.

    Use it where kernels cannot be timed alone: with collectives, or updates in place, between them. The kernels are
    `triton.autotune` objects of any package and `tune`d functions. They are tuned one after the other: each config of
    a kernel runs in the whole function, whose time decides, while the other kernels run their best config so far. A
    config that fails is replaced by a working one for that run, so that the function always completes. Finally each
    kernel keeps its choice in its own cache, and on disk for the next process.

    A call accepts the options `autotune`, `autotune_verbose` and `autotune_pg`, as a call of a function under
    `foretune.tune` does. With `autotune_pg=group`, all ranks of the group run the same configs in lockstep and choose
    the config that is fastest on its slowest rank. They must make the same calls with the same keys; otherwise a
    `ForetuneError` names the difference. Type checkers check calls of the result by the function's own signature.

    Args:
        key: A function of the call's arguments, or the names of those that form the key. If None all do: tensors by
            shape, dtype and layout, objects by type.
        n_warmup: Calls of the function with each config before it is timed.
        n_repeat: Timed calls of the function with each config.
        reset: Called with the call's arguments before every run, to undo what the function changes.
        restore: Names of arguments whose contents, however deep, are put back in place before every run.
        logs: A folder where each rank writes its measurements, as rank-N.log.
        cache: Where results are kept: True in the function's file on disk, False in memory, a path in that file.
        timer: Replaces the clock that times calls.

    Returns:
        The decorator.

    Raises:
        ForetuneError: An option is not valid. If no config of a kernel works, calls raise as under `foretune.tune`.

    >>> from foretune import tune
    >>> twice = tune({"tile": [1, 2]}, cache=False)(lambda values, tile: [2 * value for value in values])
    >>> @contextual_autotune(cache=False)
    ... def layer(values):
    ...     return twice(twice(values))
    >>> layer([1, 2])
    [4, 8]
    """
    return partial(
        ContextualFunction,
        key=key,
        n_warmup=n_warmup,
        n_repeat=n_repeat,
        reset=reset,
        restore=restore,
        logs=logs,
        cache=cache,
        timer=timer,
    )

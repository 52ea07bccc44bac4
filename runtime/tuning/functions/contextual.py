"""Tune a function as a whole, with the autotuned kernels in it: `ContextualFunction`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import check_flag, check_path
from ....datasets.forking import renew_in_children
from ...arguments import warn_once
from ..session import is_capturing
from .call_timer import CallTimer
from .calls import Call, place_of, problem_of_key
from .config_cache import ConfigCache
from .function_tuner import CallTuning, FunctionTuner, Reuse, resolve_reuse, trials_of
from .in_step import Ranks
from .key_record import KeyRecord
from .plain_values import text_of
from .results import TuneResult, all_failed, check_finished
from .running import TuningLock, context_now, context_turn, in_context
from .search import Search
from .sites import Site, Sites, forced
from .wrapped import CallKey

#: The maximum number of rounds: the kernels that a function runs may depend on the configs, so after each round new
#: ones are looked for.
_ROUNDS = 3


class ContextualFunction(FunctionTuner):
    """A function that `foretune.contextual_autotune` decorates; see there for the options.

    >>> from foretune.runtime.tuning.functions.tuned_function import TunedFunction
    >>> twice = TunedFunction(lambda values, tile: [2 * value for value in values], {"tile": [1, 2]}, cache=False)
    >>> layer = ContextualFunction(lambda values: twice(twice(values)), cache=False)
    >>> layer([1, 2])
    [4, 8]
    >>> [(result.key, len(result.trials)) for result in layer.tune([1, 2])]  # lists count by their items
    [('{"values":[1,2]}', 2), ('{"values":[2,4]}', 2)]
    """

    def __init__(
        self,
        function: Callable[..., Any],
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
        """Create the lock; see `renew_in_children`."""
        self._lock = TuningLock()

    def __call__(
        self, *args: Any, autotune: bool = True, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> Any:
        """Return the function's result; at the first call of a key, tune the kernels in it first.

        Exceptions of the function are passed on; the tuning raises those of `TunedFunction`.

        Args:
            args: The function's arguments.
            autotune: Whether to tune. Nothing is tuned either while an enclosing function is being tuned.
            autotune_verbose: Whether to report each config on stderr.
            autotune_pg: The process group whose ranks tune together; None for this process alone.
            kwargs: The function's keyword arguments.
        """
        tunes = check_flag("autotune", autotune) and context_now() is None
        if tunes and is_capturing():
            warn_once(f"{self.name}: a CUDA graph is being captured", ": nothing in it is tuned")
            tunes = False
        if tunes:
            call = self._read(args, kwargs, autotune_pg)
            key = self._memory_key(call, autotune_pg)
            if not self._remembered(key) and self._can_repeat(call, ": it is not tuned as a whole"):
                with self._lock.turn() as is_mine:  # another thread may tune it meanwhile
                    if is_mine and not self._remembered(key):
                        with context_turn() as has_turn:
                            if has_turn:  # otherwise the function runs untuned
                                self._tune(call, False, autotune_verbose, autotune_pg)
        return self.function(*args, **kwargs)

    def tune(
        self, *args: Any, force: bool = False, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> tuple[TuneResult, ...]:
        """Return the results for a call with these arguments, one for each kernel and key, tuning if necessary.

        It raises the exceptions that calling raises.

        Args:
            args: The function's arguments.
            force: Whether to measure everything again.
            autotune_verbose: Whether to report each config on stderr.
            autotune_pg: The process group whose ranks tune together; None for this process alone.
            kwargs: The function's keyword arguments.
        """
        if context_now() is not None:
            raise ForetuneError(f"{self.name} is run by a function that is being tuned as a whole")
        call = self._read(args, kwargs, autotune_pg)
        self._can_repeat(call)
        with self._lock.turn() as is_mine:
            if not is_mine:
                raise ForetuneError(f"{self.name} is already being tuned by its caller")
            with context_turn() as has_turn:
                if not has_turn:
                    raise ForetuneError(f"{self.name} is run by a function that is being tuned as a whole")
                return self._tune(call, check_flag("force", force), autotune_verbose, autotune_pg)

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], group: Any) -> Call:
        """Return the description of a call."""
        named = self._key.named(args, kwargs, {})
        key = text_of(self._key.of(args, kwargs, named))
        return Call(args, kwargs, named, {}, key, None, place_of(named.values(), Ranks(group).size))

    def _tune(self, call: Call, force: bool, verbose: bool, group: Any) -> tuple[TuneResult, ...]:
        """Tune a call and remember that its key is tuned."""
        with self._tuning(call, group, verbose, self._logs) as tuning:
            results = self._tune_in_step(tuning, force)
        self._chosen[self._memory_key(call, group)] = True
        return results

    def _tune_in_step(self, tuning: CallTuning, force: bool) -> tuple[TuneResult, ...]:
        """Tune a call on all ranks, from the records that all of them have, and return the results."""
        call, began = tuning.call, self._clock()
        records = {} if force else self._records(call)
        if not tuning.is_shared(text_of({label: record.gist for label, record in records.items()})):
            records = {}
        sites = Sites({label: (record.chosen, record.done) for label, record in records.items()})
        with in_context(sites), forced(), tuning.undone():
            result = self._once(tuning)  # this run finds the kernels
            if sites.found:
                check_finished(self.name, result)
            del result  # it may be large
            reasons = self._tune_sites(tuning, sites, records)
        for site in sites.found:
            site.settle(site.now)
        if not sites.found:
            warn_once(f"{self.name}: nothing in it is autotuned", ": it runs unchanged")
        spent_s = self._clock() - began
        results = []
        for site in sites.found:
            record, reason = records.get(site.label) or self._new_record(None), reasons.get(site.label)
            trials = trials_of(site.candidates, record.of(site.candidates))
            rest: dict[str, Any] = {
                "untried": len(site.candidates) - len(trials),
                "tuned_s": spent_s if reason else 0.0,
            }
            rest["reason"] = f"in {self.name}: {reason or 'all configs were known'}"
            results.append(tuning.result(site.name, site.key, record, site.now, trials, **rest))
        return tuple(results)

    def _tune_sites(self, tuning: CallTuning, sites: Sites, records: dict[str, KeyRecord]) -> dict[str, str]:
        """Tune each site in turn, the others at their best so far; return what was measured, by label."""
        reasons: dict[str, str] = {}
        for _ in range(_ROUNDS):
            pending = [site for site in sites.found if site.is_met and not site.is_tuned]
            tuning.ranks.check_alike({"kernels": "; ".join(site.terms for site in pending)})
            if not pending:
                return reasons
            for site in pending:
                reasons[site.label] = self._tune_site(tuning, site, records)
            for site in sites.found:
                site.is_met = False
            self._once(tuning)  # with other configs, it may run other kernels
        warn_once(f"{self.name}: every run has new kernels or keys", ": the latest ones are not tuned")
        return reasons

    def _tune_site(self, tuning: CallTuning, site: Site, records: dict[str, KeyRecord]) -> str:
        """Tune one site and store its record; return a text that says what was measured."""
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

    def _run(self, call: Call, site: Site, candidate: Any) -> Any:
        """Run the function with a config at one site."""
        site.now = candidate
        return self.function(*call.args, **call.kwargs)

    def _once(self, tuning: CallTuning) -> Any:
        """Undo the changes of the last run and run the function once."""
        if tuning.undo is not None:
            tuning.undo()
        return self.function(*tuning.call.args, **tuning.call.kwargs)

    def _records(self, call: Call) -> dict[str, KeyRecord]:
        """Return the stored records of sites that may be used, by label."""
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
) -> Callable[[Callable[..., Any]], ContextualFunction]:
    """Return a decorator that tunes a function as a whole, with the autotuned kernels in it.

    It is for functions with several autotuned kernels, and collectives or in-place updates between them. The kernels
    are `triton.autotune` objects of any package, and `tune`d functions. At the first call of each key, one kernel after
    the other has its configs run in turn, each `n_warmup` and then `n_repeat` times in the whole function, whose time
    decides, while the others run their best so far. A config that fails is replaced for that run, so that the function
    always completes. Then each kernel stores its choice in its own cache, and on disk for later processes.

    With `autotune_pg=group` in a call, all ranks of the group must make the same calls with the same keys. They run the
    same configs in step, and choose those that are fastest on the slowest rank; ranks that differ get a `ForetuneError`
    that names the difference. If no config of a kernel works, calls raise as those of `tune` do.

    Args:
        key: A function of the arguments, or the names of those, that determine the best configs; None for all.
        n_warmup: Runs of each config before the timed ones.
        n_repeat: Timed runs of each config.
        reset: Called with the arguments before every run, untimed.
        restore: The names of arguments whose contents are restored before every run.
        logs: A folder for what each rank measured, in rank-N.log.
        cache: True for the default cache, False for memory only, or a file.
        timer: A timer to use instead of Foretune's.

    Raises:
        ForetuneError: An option is not valid.

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

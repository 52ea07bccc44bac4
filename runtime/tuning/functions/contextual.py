"""`ContextualFunction`: a function that is tuned as a whole, with the autotuned kernels in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import MOST, check_flag, check_integer, check_path
from ...arguments import warn_once
from ...forking import renew_in_children
from ...launching.stub_driver import measures
from .call_problem import problem_of_key
from .call_timer import CallTimer, check_timer, timer_for
from .config_cache import ConfigCache
from .forced_autotuners import forced
from .in_step import Ranks
from .key_record import KeyRecord, Tuning, record_key
from .plain_values import text_of
from .results import Trial, TuneResult, all_failed, check_finished
from .reuse import Place, Reuse, is_capturing, place_of, resolve_reuse, software
from .running import TuningLock, Turn, context_now, context_turn, in_context
from .search import Search
from .side_effects import SideEffects
from .sites import Site, Sites
from .verbose import teller
from .wrapped import CallKey, WrappedFunction

#: What a function runs may depend on the configs, but not without end: so often it is looked for what is new.
_ROUNDS = 3


class ContextualFunction(WrappedFunction):
    """What `foretune.contextual_autotune` makes of a function, and where its options are explained.

    >>> from foretune.runtime.tuning.functions.tuned_function import TunedFunction
    >>> twice = TunedFunction(lambda values, tile: [2 * value for value in values], {"tile": [1, 2]}, cache=False)
    >>> layer = ContextualFunction(lambda values: twice(twice(values)), cache=False)
    >>> layer([1, 2])
    [4, 8]
    >>> [(result.key, len(result.trials)) for result in layer.tune([1, 2])]  # lists count by what is in them
    [('{"values":[1,2]}', 2), ('{"values":[2,4]}', 2)]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        key: Callable[..., Any] | Sequence[str] | None = None,
        n_warmup: int = 3,
        n_repeat: int = 5,
        reset: Callable[..., Any] | None = None,
        restore: Sequence[str] = (),
        logs: Path | str | None = None,
        cache: ConfigCache | Path | str | bool = True,
        timer: CallTimer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(function)
        resolve_reuse()
        self._key = CallKey(function, key)
        self.n_warmup = check_integer("n_warmup", n_warmup, 1, MOST)  # the first call compiles
        self.n_repeat = check_integer("n_repeat", n_repeat, 1, MOST)
        self._effects = SideEffects(reset, restore)
        self._logs = None if logs is None else check_path("logs", logs)
        self.cache = ConfigCache.for_function(self.name, cache)
        self._timer, self._clock = check_timer(timer), clock
        self._settled: set[tuple[str, int]] = set()
        self._generation = self.cache.generation
        renew_in_children(self)

    def renew(self) -> None:
        """See `renew_in_children`."""
        self._lock = TuningLock()

    def __call__(
        self, *args: Any, autotune: bool = True, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> Any:
        """The function's result. With a key that is new, all that is tuned in it is tuned first, unless `autotune` is
        False, or something around it is being tuned. Raises what the function raises, and as `TunedFunction` does."""
        tunes = check_flag("autotune", autotune) and context_now() is None
        if tunes and is_capturing():
            warn_once(f"{self.name}: a CUDA graph is being captured", ": nothing in it is tuned")
            tunes = False
        if tunes:
            call, ranks = _Call(self, args, kwargs, autotune_pg), Ranks(autotune_pg)
            if not self._is_settled(call, ranks) and self._bears_trials(call):
                with Turn(self._lock) as is_mine:  # another thread may settle it meanwhile
                    if is_mine and not self._is_settled(call, ranks):
                        with context_turn() as has_turn:
                            if has_turn:  # else the function runs untuned
                                self._tune(call, False, autotune_verbose, autotune_pg)
        return self.function(*args, **kwargs)

    def tune(
        self, *args: Any, force: bool = False, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> tuple[TuneResult, ...]:
        """What is found out for a call with these arguments, a result for each kernel and key: what is known, or all
        measured now; the latter also with `force`. Raises as calling does."""
        if context_now() is not None:
            raise ForetuneError(f"{self.name} is run by a function that is being tuned as a whole")
        call = _Call(self, args, kwargs, autotune_pg)
        if (reason := self._effects.used_up(call.named)) is not None:
            raise ForetuneError(f"{self.name}: {reason}: pass a list, or what opens it")
        with Turn(self._lock) as is_mine:
            if not is_mine:
                raise ForetuneError(f"{self.name} is being tuned by what calls it now")
            with context_turn() as has_turn:
                if not has_turn:
                    raise ForetuneError(f"{self.name} is run by a function that is being tuned as a whole")
                return self._tune(call, check_flag("force", force), autotune_verbose, autotune_pg)

    def _bears_trials(self, call: _Call) -> bool:
        if (reason := self._effects.used_up(call.named)) is not None:
            warn_once(f"{self.name}: {reason}", ": it is not tuned as a whole")
        return reason is None

    def _is_settled(self, call: _Call, ranks: Ranks) -> bool:
        if self._generation != self.cache.generation:
            self._generation = self.cache.generation
            self._settled.clear()
        return call.memory_key(ranks) in self._settled

    def _tune(self, call: _Call, force: bool, verbose: bool, group: Any) -> tuple[TuneResult, ...]:
        ranks = Ranks(group)
        runs = f"{self.n_warmup} + {self.n_repeat}"
        with ranks.together(self.name, {"key": call.key, "source": self._code, "runs": runs}):
            results = self._tune_in_step(call, force, verbose, ranks)
        self._settled.add(call.memory_key(ranks))
        return results

    def _tune_in_step(self, call: _Call, force: bool, verbose: bool, ranks: Ranks) -> tuple[TuneResult, ...]:
        say = teller(verbose, self.name, call.key, ranks, self._logs)
        undo = self._effects.undo(call.args, call.kwargs, call.named)
        records = {} if force else self._records(call)
        gist = text_of({label: record.gist for label, record in records.items()})
        if len(set(ranks.exchange("what is known", gist))) > 1:
            records = {}  # what only some of them know is measured again, in step
        sites = Sites({label: (record.chosen, record.done) for label, record in records.items()})
        began = self._clock()
        with in_context(sites), forced(), _undone_after(undo):
            result = self._once(call, undo)  # which meets the kernels
            if sites.found:
                check_finished(self.name, result)
            del result  # which may be large
            reasons = self._tune_sites(call, sites, records, undo, ranks, say)
        for site in sites.found:
            site.settle(site.now)
        if not sites.found:
            warn_once(f"{self.name}: nothing in it is autotuned", ": it runs as it is")
        spent = self._clock() - began
        return tuple(self._result(call, site, records, reasons.get(site.label, ""), spent) for site in sites.found)

    def _tune_sites(
        self,
        call: _Call,
        sites: Sites,
        records: dict[str, KeyRecord],
        undo: Callable[[], None] | None,
        ranks: Ranks,
        say: Callable[[str], None],
    ) -> dict[str, str]:
        """Tunes each site in turn, the others running their best so far; says of each, by label, what was done."""
        reasons: dict[str, str] = {}
        for _ in range(_ROUNDS):
            pending = [site for site in sites.found if site.is_met and not site.is_tuned]
            ranks.check_alike({"kernels": "; ".join(site.terms for site in pending)})
            if not pending:
                return reasons
            for site in pending:
                reasons[site.label] = self._tune_site(call, site, records, undo, ranks, say)
            for site in sites.found:
                site.is_met = False
            self._once(call, undo)  # other configs may lead to other kernels
        warn_once(f"{self.name}: what it runs is new in every run", ": what is left of that is not tuned")
        return reasons

    def _tune_site(
        self,
        call: _Call,
        site: Site,
        records: dict[str, KeyRecord],
        undo: Callable[[], None] | None,
        ranks: Ranks,
        say: Callable[[str], None],
    ) -> str:
        record = records[site.label] = KeyRecord(problem_of_key(site.name, [site.key]), software())
        tuning = Tuning(
            name=self.name,
            run=partial(self._run, call, site),
            timer=self._timer or timer_for(call.place.on_gpu, in_step=not ranks.alone),
            undo=undo,
            ranks=ranks,
            n_warmup=self.n_warmup,
            n_repeat=self.n_repeat,
            save=lambda: None,
            say=partial(_say_of, say, site),
            clock=self._clock,
            check=site.check,
        )
        reason = tuning.measure(record, site.candidates, Search("exhaustive", None, None))
        best = record.fastest(site.candidates)
        if best is None:
            raise tuning.failures.error(all_failed(site.name, _trials(site, record)))
        site.now, record.chosen, record.done = best, best.text, site.done
        site.is_tuned = True
        self._keep(call, records)
        return reason

    def _run(self, call: _Call, site: Site, candidate: Any) -> Any:
        site.now = candidate
        return self.function(*call.args, **call.kwargs)

    def _once(self, call: _Call, undo: Callable[[], None] | None) -> Any:
        if undo is not None:
            undo()
        return self.function(*call.args, **call.kwargs)

    def _records(self, call: _Call) -> dict[str, KeyRecord]:
        """What is known of each site, by label, and may be used."""
        if resolve_reuse() is Reuse.ALWAYS:
            return {}
        kept = (self.cache.get(call.record_key) or {}).get("sites", {})
        found = {name: KeyRecord.from_json(one) for name, one in kept.items()} if isinstance(kept, dict) else {}
        records = {name: record for name, record in found.items() if record is not None and record.chosen is not None}
        others = [record for record in records.values() if dict(record.software) != software()]
        if others and resolve_reuse() is Reuse.STRICT:
            return {}
        if others:
            then = " ".join(f"{name}={version}" for name, version in others[0].software.items())
            warn_once(f"{self.name}: was tuned with {then}", ": that choice runs; FORETUNE_TUNE=strict tunes again")
        return records

    def _keep(self, call: _Call, records: Mapping[str, KeyRecord]) -> None:
        if self._timer is None and not measures():
            return
        self.cache.set(call.record_key, {"sites": {name: record.to_json() for name, record in records.items()}})

    def _result(
        self, call: _Call, site: Site, records: Mapping[str, KeyRecord], reason: str, spent_s: float
    ) -> TuneResult:
        record = records.get(site.label) or KeyRecord(None, software())
        outcome = record.outcomes.get(site.now.text)
        trials = _trials(site, record)
        return TuneResult(
            function=site.name,
            key=site.key,
            problem=record.problem,
            device=call.place.name,
            software=dict(record.software),
            best_config=dict(site.now.knobs),
            best_time_us=None if outcome is None else outcome.time_us,
            trials=tuple(trials),
            untried=len(site.candidates) - len(trials),
            tuned_s=spent_s if reason else 0.0,
            reason=f"in {self.name}: {reason or 'nothing was left to measure'}",
        )


class _Call:
    """A call of a contextual function."""

    def __init__(
        self, function: ContextualFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any], group: Any
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self.named = function._key.named(args, kwargs, {})
        self.key = text_of(function._key.of(args, kwargs, self.named))
        self.place: Place = place_of(self.named.values(), Ranks(group).size)
        self.record_key = record_key(function.name, function._digest, self.place.name, self.key)

    def memory_key(self, ranks: Ranks) -> tuple[str, int]:
        return self.record_key, ranks.number


def _trials(site: Site, record: KeyRecord) -> list[Trial]:
    return [
        Trial(dict(one.knobs), *record.outcomes[one.text]) for one in site.candidates if one.text in record.outcomes
    ]


def _say_of(say: Callable[[str], None], site: Site, text: str) -> None:
    say(f"{site.label}: {text}")


@contextmanager
def _undone_after(undo: Callable[[], None] | None) -> Iterator[None]:
    try:
        yield
    finally:
        if undo is not None:
            undo()


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
    """A decorator: a function with several autotuned kernels in it, and collectives or in-place updates between them,
    is tuned as a whole at the first call of each key.

    The kernels are `triton.autotune` objects, wherever they come from, and `tune`d functions. One after the other has
    its configs run in turn, each `n_warmup` and then `n_repeat` times in the whole function, whose time decides, while
    the others run their best so far. A config that fails is replaced for that run, so that the function always comes
    to its end. Then each kernel keeps what was chosen: in its own cache, and on the disk for the next process.

    Options are those of `tune`. With `autotune_pg=group` in a call, all ranks of the group, which make the same calls
    with the same keys, run the same configs in step, and choose what is fastest on the slowest of them; ranks that
    differ get a `ForetuneError` that names the difference. `logs` is a folder for what each rank measured, in
    rank-N.log.

    Raises `ForetuneError` for options that are not valid. Where no config of a kernel works, calls raise as those of
    `tune` do.

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

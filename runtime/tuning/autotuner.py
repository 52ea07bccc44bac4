"""`foretune.autotune`: an autotuner that times a predicted shortlist and skips configs that fail."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton
from triton.runtime import Autotuner, driver
from triton.runtime.errors import AutotunerError

from ...datasets import DeviceSpec, Family, ForetuneError, Problem
from ...datasets.errors import check_between, check_flag, check_integer, check_words, reason_of, shown
from ...datasets.forking import renew_in_children
from ..arguments import Mode, is_pinned, resolve_mode, warn_once
from ..how_many import Length, check_length
from ..launching.ahead import hash_triton
from ..launching.kernel import Kernel
from ..prune import Pruner, in_full, warn_if_not_restored
from .isolation import IsolatedTimer, NoIsolationError
from .known_times import KnownTimes
from .one_launch import OneLaunch, launch_undecided, own_key, restore_tensors, save_tensors, times_one
from .ranks.agreement import choose_together, epoch, may_tune, scope
from .refine.calls import check_cost
from .refine.refinement import Refinement
from .session import Measured, ProgressLine, TuningSession, checked_time, is_capturing, none_launched, search
from .shortlisters import FamilyShortlister, OwnShortlister, Shortlister, TracedPrune

if TYPE_CHECKING:
    from ...model import Bundle

#: Further options of `triton.autotune`, as of Triton 3.6 to 3.9.
_OPTIONS = {"reset_to_zero", "restore_value", "pre_hook", "post_hook", "warmup", "rep"}
_OPTIONS |= {"use_cuda_graph", "do_bench", "cache_results"}
#: The options that name tensor arguments.
_TENSORS = ("reset_to_zero", "restore_value")


class PredictedAutotuner(Autotuner):  # type: ignore[misc] # Triton has no types
    """The autotuner that `foretune.autotune` returns: a `triton.runtime.Autotuner` with its own `run`.

    As in Triton, `cache` maps each key to its config, `best_config` is the config of the last launch, and
    `configs_timings` has the milliseconds of the last tuning (lists of one time, inf for a failed config), which took
    `bench_time` seconds.
    """

    def __init__(
        self,
        fn: Any,
        configs: Sequence[triton.Config],
        key: Sequence[str],
        shortlister: Shortlister | None,
        *,
        k: Length,
        bucket: tuple[str, ...],
        isolate: bool,
        budget_s: float | None,
        workers: int | None,
        device: DeviceSpec | None,
        mode: str | None,
        limit: dict[str, float] | None,
        prune_configs_by: Mapping[str, Any] | None,
        **options: Any,
    ) -> None:
        kernel, configs = Kernel(fn), list(configs or ())  # Triton replaces an empty list by one default config
        if (odd := next((config for config in configs if not isinstance(config, triton.Config)), None)) is not None:
            raise ForetuneError(f"configs must be triton.Configs but one is {shown(odd)}")
        for option, names in (("key", key), *((option, options.get(option)) for option in _TENSORS)):
            if unknown := [name for name in names or () if name not in fn.arg_names]:  # Triton checks it from 3.9
                known = ", ".join(fn.arg_names)
                raise ForetuneError(f"{option} names {unknown[0]}, but the kernel's arguments are {known}")
        super().__init__(fn, fn.arg_names, configs, list(key), prune_configs_by=prune_configs_by, **options)
        alters = bool(self.reset_to_zero or self.restore_value)
        if alters and not self.user_defined_pre_hook:
            self.pre_hook = partial(save_tensors, self)
        if self.restore_value and not self.user_defined_post_hook:
            self.post_hook = partial(restore_tensors, self)
        self.name = f"{self.base_fn.__module__}.{self.base_fn.__qualname__}"
        self._isolate, self._budget_s, self._workers = isolate, budget_s, workers
        self._mode, self._limit = mode, limit
        self._is_interpreted = kernel.is_interpreted
        self._shortlister = shortlister or OwnShortlister(self, k, bucket)
        self._shortlister.mode = mode
        warn_if_not_restored(self._shortlister.family, self)
        self._own_prune = (prune_configs_by or {}).get("early_config_prune")
        timed = "cold" if self._do_bench is None else "autotuner"
        is_pruned = bool(self._own_prune or self.perf_model)
        self._known = KnownTimes(self, self.name, self._shortlister, device, timed=timed, is_pruned=is_pruned)
        # Only Dynamo, which traces it, and `Autotuner.warmup` call this.
        self.early_config_prune = TracedPrune(
            self.name, self._own_prune, self._shortlister, self._best_known, alters=alters
        )
        # The chosen config by stand-in problem, `scope()`, and the configs that the kernel's own callbacks allowed.
        self._tuned: dict[tuple[Problem | None, int, frozenset[triton.Config]], triton.Config] = {}
        # The keys whose config is not decided yet in mode `refine`, and the predicted time of such a launch.
        self._refining: dict[tuple[Any, ...], tuple[Refinement[triton.Config], float]] = {}
        self._epoch = epoch()
        self._launched: set[tuple[Any, ...]] = set()  # keys launched in an earlier epoch of `agree`
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock, at construction and in forked processes (see `renew_in_children`)."""
        self._lock = threading.RLock()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch with the config of the launch's key, and return the launch's result; tune a key at its first launch.

        Raises:
            TuningFailed: No config can be launched.
            PinError: The pin file in force does not cover the launch.
        """
        if len(self.configs) == 1:
            config = self.configs[0]
        else:
            if self._epoch != epoch():
                self._epoch = epoch()
                self._launched |= self.cache.keys() | self._refining.keys()
                self.cache.clear()
                self._refining.clear()
            key = own_key(self, args, kwargs)
            found = self.cache.get(key)
            if found is None:
                if (undecided := self._refining.get(key)) is not None:
                    return self._refined_run(key, undecided, OneLaunch(self, args, kwargs))
                return self._first_run(key, args, kwargs)
            config = found
        self.best_config = config
        if config.pre_hook is not None:
            return OneLaunch(self, args, kwargs).launch(config)
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def _first_run(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Choose a config for a new key, launch, and return the result; if a launch fails, try the next best config."""
        call = OneLaunch(self, args, kwargs)
        if not self._is_interpreted:
            driver.active.get_current_device()  # raises Triton's error if there is no GPU; not a config's failure
            hash_triton()
            call.prepare()
        with self._lock:
            if key not in self.cache and key not in self._refining:  # otherwise another thread has tuned it
                tuning = _Tuning(self, key, call)
                resets = key not in self._launched and (len(tuning.allowed) > 1 or times_one()) and not is_capturing()
                while True:
                    config, was_launched = tuning.choose()
                    if resets or call.was_timed:  # as Triton does after timing a new key
                        call.reset(config)
                    try:
                        result = call.launch(config)
                    except Exception as error:
                        if was_launched:
                            raise  # it ran when it was timed, so the config is not the cause
                        tuning.session.refuse(config, error)
                        continue
                    self.best_config = config
                    if tuning.refining is not None and tuning.refining[0].final is None:
                        self._refining[key] = tuning.refining
                    elif was_launched or not (is_capturing() or tuning.ran_out):
                        self.cache[key] = config
                    return result
        return self.run(*args, **kwargs)

    def _refined_run(
        self, key: tuple[Any, ...], found: tuple[Refinement[triton.Config], float], call: OneLaunch
    ) -> Any:
        """Launch, in mode `refine`, with the config that the key's `Refinement` picks; return the launch's result.

        `found` has the key's `Refinement`, and the predicted time of the launch.
        """

        def launch(config: triton.Config) -> Any:
            self.best_config = config
            return call.launch(config)

        return launch_undecided(self, self._refining, key, found, call.arguments, launch)

    def _allowed(self, call: OneLaunch) -> list[triton.Config]:
        """Return the configs that the kernel's own pruning callbacks keep.

        Exceptions of the callbacks are passed on, as in Triton.
        """
        allowed = list(self.configs)
        if own_prune := in_full(self._own_prune):
            allowed = list(own_prune(self.configs, call.named, **call.kwargs))
            if not allowed:
                raise AutotunerError("early_config_prune should return at least one config but returned none")
        if self.perf_model:
            top_k = self.configs_top_k
            if isinstance(top_k, float) and top_k <= 1.0:
                top_k = max(1, int(len(allowed) * top_k))
            if not isinstance(top_k, int):
                raise TypeError(f"top_k must be a float <= 1.0 or an integer but is {top_k!r}")
            allowed.sort(key=lambda config: self.perf_model(**call.arguments, **config.all_kwargs()))
            allowed = allowed[:top_k]
        return allowed

    def _best_known(self, problem: Problem, configs: tuple[triton.Config, ...]) -> int | None:
        """Return the position of the config that is known to be the fastest for a problem.

        None if the problem was not tuned yet, or if some shortlisted configs were not measured.
        """
        stand_in = self._shortlister.stand_in(problem)
        if is_pinned() and (pinned := self._pinned(problem, stand_in, configs)) is not None:
            return configs.index(pinned)
        if resolve_mode(self._mode) is not Mode.SHORTLIST:
            return None
        tuned = self._tuned.get((stand_in, scope(), frozenset(configs)))
        if tuned is not None and self._shortlister.supports(tuned, problem):
            return configs.index(tuned)
        if scope():  # other ranks do not know what this rank measured alone
            return None
        self._known.open()
        positions = self._shortlister.positions(problem, configs)
        known = self._known.of(stand_in).recall([configs[position] for position in positions])
        times = {at: known[configs[at]].time_us or math.inf for at in positions if configs[at] in known}
        best = min(times, key=times.__getitem__, default=None)
        return best if best is not None and len(known) == len(positions) and times[best] < math.inf else None

    def _pinned(
        self,
        problem: Problem | None,
        stand_in: Problem | None,
        configs: Sequence[triton.Config],
        key: Sequence[Any] | None = None,
    ) -> triton.Config | None:
        """Return the pin file's config for `stand_in`, the problem that represents `problem`; None without a file.

        Raises:
            PinError: The file does not cover the launch, or its config cannot run `problem`.
        """

        def supports(config: triton.Config) -> bool:
            return problem is None or bool(self._query(self._shortlister.supports, config, problem))

        return self._known.pinned(stand_in, configs, key, supports)

    def _query(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the shortlister; if it raises, warn and return None, so that the launch goes on."""
        try:
            return method(*arguments)
        except Exception as error:  # noqa: BLE001 - a failed prediction must not stop a launch
            then = f": it is tuned over all {len(self.configs)} configs"
            warn_once(f"{self.name}: no prediction ({reason_of(error)})", then)
            return None


class _Tuning:
    """The tuning of one key of a `PredictedAutotuner`, with a `TuningSession` for the launch that started it."""

    def __init__(self, tuner: PredictedAutotuner, key: tuple[Any, ...], call: OneLaunch) -> None:
        self._tuner, self._key, self._call, shortlister = tuner, key, call, tuner._shortlister
        self._problem = tuner._query(shortlister.problem, call.arguments)
        stand_in = None if self._problem is None else tuner._query(shortlister.stand_in, self._problem)
        if stand_in is None:
            self._problem = None
        else:
            tuner._query(shortlister.expect, stand_in, call.arguments)
        self._known = tuner._known.of(stand_in, key)
        self._over = ""  # the limit that ended the last measurement
        self.session = TuningSession(
            self._known,
            self._time_one,
            compile_one=None if tuner._is_interpreted else call.compile,
            workers=tuner._workers,
            budget_s=tuner._budget_s,
        )
        self.ran_out = False  # whether budget_s ended before any config was timed
        self.refining: tuple[Refinement[triton.Config], float] | None = None  # for `PredictedAutotuner._refining`
        # Computed for every new key: a config chosen for another launch of the same bucket may not be allowed here.
        self.allowed = tuner._allowed(call)

    def choose(self) -> tuple[triton.Config, bool]:
        """Return the config to launch, and whether it is final, so that no other config is tried if its launch fails.

        Raises:
            TuningFailed: All configs have failed.
            PinError: The pin file in force does not cover the launch.
        """
        tuner, session, problem = self._tuner, self.session, self._problem
        if is_pinned():
            pinned = tuner._pinned(problem, self._known.problem, self.allowed, self._key)
            if pinned is not None:
                return pinned, True  # if its launch fails, no other config is tried
        memo = None if problem is None else (self._known.problem, scope(), frozenset(self.allowed))
        tuned = None if memo is None else tuner._tuned.get(memo)
        is_usable = tuned is not None and tuned not in session.failed
        if is_usable and tuner._query(tuner._shortlister.supports, tuned, problem):
            return tuned, False
        mode = resolve_mode(tuner._mode)
        if mode is not Mode.REFINE:  # a refinement reads the cache in a thread
            tuner._known.open()
        while left := [config for config in self.allowed if config not in session.failed]:
            positions = None if problem is None else tuner._query(tuner._shortlister.positions, problem, tuple(left))
            chosen = [left[position] for position in positions or range(len(left))]
            if mode is Mode.REFINE and len(chosen) > 1:
                return self._refined(left, chosen), False
            is_one = len(chosen) == 1 or mode in (Mode.PREDICT, Mode.REFINE)
            if is_one or not may_tune() or not self._call.can_be_timed():
                return chosen[0], False
            with ExitStack() as self._stack:
                self._isolated: IsolatedTimer | None = None
                chosen, best = search(chosen, self._measure_agreed, partial(self._more, left))
            times = session.times(chosen)
            if best is not None:
                if memo is not None:
                    tuner._tuned[memo] = best
                    self._known.choose(best, [self._key], self._call.arguments)
                return best, True
            if times:  # no agreement: every rank runs the first config
                return chosen[0], chosen[0] in times
            if untried := [config for config in chosen if config not in session.failed]:  # budget_s has ended
                self.ran_out = bool(tuner._budget_s)  # with a budget of 0, later calls cannot time anything either
                return untried[0], False
        raise none_launched(tuner.name, session)

    def _refined(self, left: Sequence[triton.Config], chosen: Sequence[triton.Config]) -> triton.Config:
        """Return the config to launch first in mode `refine`; later launches try the configs in `chosen` in turn.

        `left` are the configs that the kernel's own pruning keeps; `chosen` is their shortlist, best first.
        """
        tuner, problem, first = self._tuner, self._problem, chosen[0]
        shortlister, slowdowns, scale = tuner._shortlister, (1.0,) * len(chosen), 1.0
        if problem is not None:
            slowdowns = tuner._query(shortlister.slowdowns, problem, tuple(left), len(chosen)) or slowdowns
            scale = tuner._query(shortlister.scale, problem, first) or scale
        limit = tuner._limit or check_cost()
        found = tuner._query(self._known.refinement, chosen, slowdowns, self._call.arguments, limit)
        if found is None:
            return first
        self.refining = found, scale
        return found.final or first

    def _more(self, left: Sequence[triton.Config]) -> list[triton.Config] | None:
        """Return one list with the configs that were timed, then those to time next; None ends the search.

        `left` are the configs of this key that have not failed.
        """
        tuner = self._tuner
        ends = self._over or (tuner._budget_s is not None and choose_together())  # or ranks would take other steps
        if ends or self._problem is None or not tuner._shortlister.searches:
            return None
        positions = tuner._query(tuner._shortlister.positions, self._problem, tuple(left), self.session.cost_s)
        return [left[position] for position in positions or ()]

    def _measure_agreed(self, configs: Sequence[triton.Config]) -> triton.Config | None:
        """Measure the configs without a known time; return the fastest one, on which the ranks agree, or None."""
        tuner, session, began = self._tuner, self.session, time.monotonic()
        session.recall(configs)
        if n_new := sum(config not in session.measured for config in configs):
            with ExitStack() as stack:
                progress = stack.enter_context(ProgressLine(tuner.base_fn.__name__, n_new))
                session.report = lambda config, measured: progress.advance(measured.time_us)
                if tuner._isolate and self._isolated is None:
                    self._isolated = self._stack.enter_context(IsolatedTimer(tuner, self._call))
                self._over = session.measure(configs)
        tuner.bench_time = time.monotonic() - began
        tuner.configs_timings = {
            config: [(session.measured[config].time_us or math.inf) / 1e3]
            for config in dict.fromkeys((*session.failed, *configs))  # a search no longer lists those that failed
            if config in session.measured
        }
        times = session.times(configs)
        if not times and not choose_together():  # otherwise other ranks wait, even if all configs failed here
            return None
        return self._known.agree(configs, [times.get(config) for config in configs])[0]

    def _time_one(self, config: triton.Config) -> Measured | Exception:
        """Time a config, and return its result or the exception that it raised; with `isolate` in another process."""
        try:
            if self._isolated is not None:
                try:
                    return checked_time(self._isolated.time_us(config))
                except NoIsolationError as error:
                    warn_once(f"{self._tuner.name}: {error}", ": its configs are timed in this process")
            return checked_time(self._call.time_us(config, self.session.best_us))
        except Exception as error:  # noqa: BLE001 - a failing config is skipped
            return error


def autotune(
    configs: Sequence[triton.Config],
    key: Sequence[str],
    family: Family | None = None,
    *,
    k: Length = "auto",
    problem: Callable[[Mapping[str, Any]], Problem] | None = None,
    knobs: Mapping[str, str] | None = None,
    fixed: Mapping[str, Any] | None = None,
    device: DeviceSpec | Path | str | None = None,
    bundle: Bundle | Path | str | None = None,
    bucket: Sequence[str] = (),
    budget_s: float | None = None,
    isolate: bool = False,
    workers: int | None = None,
    mode: str | None = None,
    max_cost: float | str | None = None,
    prune_configs_by: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[Any], PredictedAutotuner]:
    """Return a decorator that tunes a kernel over a shortlist; see `foretune.autotune` for the arguments."""
    k = check_length(k)
    if budget_s is not None:
        check_between("budget_s", budget_s, 0.0, math.inf)
    if workers is not None:
        check_integer("workers", workers, 1)
    check_flag("isolate", isolate)
    if prune_configs_by is not None and not isinstance(prune_configs_by, Mapping):
        raise ForetuneError(f"prune_configs_by must be a dict of functions but is {shown(prune_configs_by)}")
    key, bucket = check_words("key", key), check_words("bucket", bucket)
    if unknown := sorted(options.keys() - _OPTIONS):
        known = ", ".join(sorted(_OPTIONS))
        raise ForetuneError(f"unknown option {unknown[0]}; the options of triton.autotune are {known}")
    if not isinstance(configs, Iterable) and configs is not None:
        raise ForetuneError(f"configs must be a list of triton.Configs but is {shown(configs)}")
    configs = tuple(configs or ())  # a generator may be used for several kernels
    options |= {name: check_words(name, options[name]) for name in _TENSORS if options.get(name) is not None}
    resolve_mode(mode)  # raise for an invalid FORETUNE_MODE here, not in a launch
    limit = None if max_cost is None else check_cost(max_cost)
    if family is None:
        given = {"problem": problem, "knobs": knobs, "fixed": fixed, "bundle": bundle}
        if idle := [name for name, value in given.items() if value is not None]:
            raise ForetuneError(f"{idle[0]} needs a family, but family is None")
        spec = None if device is None else DeviceSpec.find(device)
        shortlister = None
    else:
        pruner = Pruner(
            family, k, problem=problem, knobs=knobs, fixed=fixed, configs=configs, device=device, bundle=bundle
        )
        spec, shortlister = pruner.device, FamilyShortlister(pruner, bucket)
    return partial(
        PredictedAutotuner,
        configs=configs,
        key=key,
        shortlister=shortlister,
        k=k,
        bucket=bucket,
        isolate=isolate,
        budget_s=budget_s,
        workers=workers,
        device=spec,
        mode=mode,
        limit=limit,
        prune_configs_by=prune_configs_by,
        **dict.fromkeys(_TENSORS) | options,
    )

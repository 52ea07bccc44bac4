"""`@foretune.autotune`: an autotuner that measures a predicted shortlist, and survives what it measures."""

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
from ..arguments import Mode, resolve_mode, warn_once
from ..how_many import Length, check_length
from ..launching.kernel import Kernel
from ..prune import Pruner
from .isolation import IsolatedTimer, NoIsolationError
from .known_times import KnownTimes
from .one_launch import OneLaunch, times_one
from .progress import ProgressLine
from .ranks.agreement import choose_together, epoch, may_tune, scope
from .session import Measured, TuningSession, checked_time, is_capturing, none_launched
from .shortlisters import FamilyShortlister, OwnShortlister, Shortlister, TracedPrune

if TYPE_CHECKING:
    from ...model import Bundle

#: What `triton.autotune` takes besides (3.6 to 3.9).
_OPTIONS = {"reset_to_zero", "restore_value", "pre_hook", "post_hook", "warmup", "rep"}
_OPTIONS |= {"use_cuda_graph", "do_bench", "cache_results"}
#: Those that name arguments.
_TENSORS = ("reset_to_zero", "restore_value")


class PredictedAutotuner(Autotuner):  # type: ignore[misc] # Triton has no types
    """What `@foretune.autotune` makes of a kernel: Triton's own `Autotuner` for whoever asks, with another `run`.

    As in Triton, `cache` has the config of each key, `best_config` the last launch's, and `configs_timings` the
    milliseconds of the last tuning (a list of one, inf for what failed), which took `bench_time` seconds.
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
        prune_configs_by: Mapping[str, Any] | None,
        **options: Any,
    ) -> None:
        kernel, configs = Kernel(fn), list(configs or ())  # of none, Triton makes one
        if (odd := next((config for config in configs if not isinstance(config, triton.Config)), None)) is not None:
            raise ForetuneError(f"configs must be triton.Configs but one is {shown(odd)}")
        for option, names in (("key", key), *((option, options.get(option)) for option in _TENSORS)):
            if unknown := [name for name in names or () if name not in fn.arg_names]:  # before Triton 3.9 nobody looks
                known = ", ".join(fn.arg_names)
                raise ForetuneError(f"{option} names {unknown[0]}, but the kernel's arguments are {known}")
        super().__init__(fn, fn.arg_names, configs, list(key), prune_configs_by=prune_configs_by, **options)
        alters = bool(self.reset_to_zero or self.restore_value)
        if alters and not self.user_defined_pre_hook:
            self.pre_hook = self._save_tensors
        if self.restore_value and not self.user_defined_post_hook:
            self.post_hook = self._restore_tensors
        self.name = f"{self.base_fn.__module__}.{self.base_fn.__qualname__}"
        self._isolate, self._budget_s, self._workers = isolate, budget_s, workers
        self._is_interpreted = kernel.is_interpreted
        self._shortlister = shortlister or OwnShortlister(self, k, bucket)
        self._own_prune = (prune_configs_by or {}).get("early_config_prune")
        timed = "cold" if self._do_bench is None else "autotuner"
        self._known = KnownTimes(self, self.name, self._shortlister, device, timed=timed)
        # Who asks for this is Dynamo, which traces it, and `Autotuner.warmup`.
        self.early_config_prune = TracedPrune(
            self.name, self._own_prune, self._shortlister, self._best_known, alters=alters
        )
        # By stand-in, whom it was agreed on with, and what the kernel's own callbacks had allowed.
        self._tuned: dict[tuple[Problem | None, int, frozenset[triton.Config]], triton.Config] = {}
        self._epoch = epoch()
        self._met: set[tuple[Any, ...]] = set()  # keys that were launched in an earlier epoch
        renew_in_children(self)

    def renew(self) -> None:
        """See `renew_in_children`."""
        self._lock = threading.RLock()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launches with the config of this key; the first time, finds it. Raises `TuningFailed` where no config can be
        launched."""
        if len(self.configs) == 1:
            config = self.configs[0]
        else:
            if self._epoch != epoch():
                self._epoch = epoch()
                self._met |= self.cache.keys()
                self.cache.clear()
            key = self._key(args, kwargs)
            found = self.cache.get(key)
            if found is None:
                return self._first_run(key, args, kwargs)
            config = found
        self.best_config = config
        if config.pre_hook is not None:
            return OneLaunch(self, args, kwargs).launch(config)
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """As Triton's, but in the kernel's order: keyword arguments in another order are not another key."""
        given = dict(zip(self.arg_names, args, strict=False))
        given.update(kwargs)
        key = [given[name] for name in self.keys if name in given]
        for name in self.arg_names:
            dtype = getattr(given.get(name), "dtype", None)
            if dtype is not None:
                key.append(str(dtype))
        return tuple(key)

    def _first_run(self, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Finds a config and launches it. One that cannot be launched is a config less, and the next best is taken."""
        call = OneLaunch(self, args, kwargs)
        if not self._is_interpreted:
            driver.active.get_current_device()  # where there is no GPU, Triton says so: it is no config's failure
            call.prepare()
        with self._lock:
            if key not in self.cache:  # else another thread was first
                tuning = _Tuning(self, key, call)
                resets = key not in self._met and (len(tuning.allowed) > 1 or times_one()) and not is_capturing()
                while True:
                    config, was_launched = tuning.choose()
                    if resets or call.was_timed:  # as Triton does, which times every new key
                        call.reset(config)
                    try:
                        result = call.launch(config)
                    except Exception as error:
                        if was_launched:
                            raise  # it ran when it was timed, so this is not the config's doing
                        tuning.session.refuse(config, error)
                        continue
                    self.best_config = config
                    if was_launched or not (is_capturing() or tuning.ran_out):
                        self.cache[key] = config
                    return result
        return self.run(*args, **kwargs)

    def _save_tensors(self, arguments: Mapping[str, Any], reset_only: bool = False) -> None:
        """The `pre_hook` of a kernel without one: as Triton's, but a tensor that is None or left out is passed over,
        which before 3.9 was an error."""
        for name in self.reset_to_zero:
            if arguments.get(name) is not None:
                arguments[name].zero_()
        if not reset_only:
            saved = [name for name in self.restore_value if arguments.get(name) is not None]
            self.restore_copies = {name: arguments[name].clone() for name in saved}

    def _restore_tensors(self, arguments: Mapping[str, Any], exception: BaseException | None) -> None:
        """The `post_hook` that goes with `_save_tensors`."""
        copies, self.restore_copies = self.restore_copies, {}
        for name, value in copies.items():
            arguments[name].copy_(value)

    def _allowed(self, call: OneLaunch) -> list[triton.Config]:
        """What the kernel's own callbacks leave of its configs. What they raise is theirs, as in Triton."""
        allowed = list(self.configs)
        if self._own_prune:
            allowed = list(self._own_prune(self.configs, call.named, **call.kwargs))
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
        """The position of the config that was found for this problem; None where none was, or others were not tried."""
        if resolve_mode() is not Mode.SHORTLIST:
            return None
        stand_in = self._shortlister.stand_in(problem)
        tuned = self._tuned.get((stand_in, scope(), frozenset(configs)))
        if tuned is not None and self._shortlister.supports(tuned, problem):
            return configs.index(tuned)
        if scope():  # what this rank measured alone, no other rank knows
            return None
        self._known.open()
        positions = self._shortlister.positions(problem, configs)
        known = self._known.of(stand_in).recall([configs[position] for position in positions])
        times = {at: known[configs[at]].time_us or math.inf for at in positions if configs[at] in known}
        best = min(times, key=times.__getitem__, default=None)
        return best if best is not None and len(known) == len(positions) and times[best] < math.inf else None

    def _asked(self, ask: Callable[..., Any], *about: Any) -> Any:
        """What a shortlister answers; None, and a warning, where it cannot: no trouble of ours stops a launch."""
        try:
            return ask(*about)
        except Exception as error:  # noqa: BLE001 - as above
            then = f": it is tuned over all {len(self.configs)} configs"
            warn_once(f"{self.name}: no prediction ({reason_of(error)})", then)
            return None


class _Tuning:
    """The tuning of one key: what a `TuningSession` has to know of a launch of a `PredictedAutotuner`."""

    def __init__(self, tuner: PredictedAutotuner, key: tuple[Any, ...], call: OneLaunch) -> None:
        self._tuner, self._key, self._call, shortlister = tuner, key, call, tuner._shortlister
        self._problem = tuner._asked(shortlister.problem, call.arguments)
        stand_in = None if self._problem is None else tuner._asked(shortlister.stand_in, self._problem)
        if stand_in is None:
            self._problem = None
        self._known = tuner._known.of(stand_in, key)
        self._isolated: IsolatedTimer | None = None
        self.session = TuningSession(
            self._known,
            self._time_one,
            compile_one=None if tuner._is_interpreted else call.compile,
            workers=tuner._workers,
            budget_s=tuner._budget_s,
        )
        self.ran_out = False  # whether the time was over before any config was timed
        # For every new key: what was chosen for another launch of its bucket may not be allowed here.
        self.allowed = tuner._allowed(call)

    def choose(self) -> tuple[triton.Config, bool]:
        """The config to launch, and whether it has been launched before. Raises `TuningFailed` where none is left."""
        tuner, session, problem = self._tuner, self.session, self._problem
        memo = None if problem is None else (self._known.problem, scope(), frozenset(self.allowed))
        tuned = None if memo is None else tuner._tuned.get(memo)
        is_usable = tuned is not None and tuned not in session.failed
        if is_usable and tuner._asked(tuner._shortlister.supports, tuned, problem):
            return tuned, False
        tuner._known.open()
        while left := [config for config in self.allowed if config not in session.failed]:
            positions = None if problem is None else tuner._asked(tuner._shortlister.positions, problem, tuple(left))
            chosen = [left[position] for position in positions or range(len(left))]
            is_one = len(chosen) == 1 or resolve_mode() is Mode.PREDICT
            if is_one or not may_tune() or not self._call.can_be_timed():
                return chosen[0], False
            self._measure(chosen)
            times = session.times(chosen)
            best = None
            if times or choose_together():  # other ranks wait for what this one found, even if that is nothing
                best, _ = self._known.agree(chosen, [times.get(config) for config in chosen])
            if best is not None:
                if memo is not None:
                    tuner._tuned[memo] = best
                    is_pruned = bool(tuner._own_prune or tuner.perf_model)
                    self._known.choose(best, [self._key], self._call.arguments, is_pruned=is_pruned)
                return best, True
            if times:  # other ranks are elsewhere: they run the first too
                return chosen[0], chosen[0] in times
            if untried := [config for config in chosen if config not in session.failed]:  # the time is over
                self.ran_out = bool(tuner._budget_s)  # of a budget of 0 there will never be more
                return untried[0], False
        raise none_launched(tuner.name, session)

    def _measure(self, configs: Sequence[triton.Config]) -> None:
        """Measures those of the configs that are not known."""
        tuner, session, began = self._tuner, self.session, time.monotonic()
        session.recall(configs)
        if n_new := sum(config not in session.measured for config in configs):
            with ExitStack() as stack:
                progress = stack.enter_context(ProgressLine(tuner.base_fn.__name__, n_new))
                session.report = lambda config, measured: progress.advance(measured.time_us)
                if tuner._isolate:
                    self._isolated = stack.enter_context(IsolatedTimer(tuner, self._call))
                session.measure(configs)
        tuner.bench_time = time.monotonic() - began
        tuner.configs_timings = {
            config: [(session.measured[config].time_us or math.inf) / 1e3]
            for config in configs
            if config in session.measured
        }

    def _time_one(self, config: triton.Config) -> Measured | Exception:
        """In a process of its own where that was asked for, and can be."""
        try:
            if self._isolated is not None:
                try:
                    return checked_time(self._isolated.time_us(config))
                except NoIsolationError as error:
                    warn_once(f"{self._tuner.name}: {error}", ": its configs are timed in this process")
            return checked_time(self._call.time_us(config))
        except Exception as error:  # noqa: BLE001 - a config that fails is one config less
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
    prune_configs_by: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[Any], PredictedAutotuner]:
    """See `foretune.autotune`."""
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
        raise ForetuneError(f"there is no option {unknown[0]}; of Triton's there are {', '.join(sorted(_OPTIONS))}")
    if not isinstance(configs, Iterable) and configs is not None:
        raise ForetuneError(f"configs must be a list of triton.Configs but is {shown(configs)}")
    configs = tuple(configs or ())  # a generator may be used for several kernels
    options |= {name: check_words(name, options[name]) for name in _TENSORS if options.get(name) is not None}
    resolve_mode()  # a value that does not exist is refused where the kernel is declared, not in a launch
    if family is None:
        given = {"problem": problem, "knobs": knobs, "fixed": fixed, "bundle": bundle}
        if idle := [name for name, value in given.items() if value is not None]:
            raise ForetuneError(f"{idle[0]} says something of a family, but no family was given")
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
        prune_configs_by=prune_configs_by,
        **dict.fromkeys(_TENSORS) | options,
    )

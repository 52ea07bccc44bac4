"""`Attachment`: connects a `TuningSession` to an autotuner of Triton, whose own loop over configs stays in use."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, ForetuneError, Problem
from ...datasets.errors import reason_of
from ...datasets.forking import renew_in_children
from ..arguments import Mode, is_pinned, resolve_mode, warn_once
from ..how_many import Length
from ..launching.ahead import hash_triton
from ..launching.kernel import Kernel
from ..launching.stub_driver import device_here, measures
from ..prune import Pruner, in_full
from .attached_key import CoarseKeys, KeyTuning
from .known_times import KnownTimes
from .launches import LaunchFamily
from .one_launch import ForcedCache, OneLaunch, key_of_launch, launch_undecided, microseconds, times_one
from .ranks.agreement import choose_together, epoch, may_tune, scope
from .refine.calls import check_cost
from .refine.refinement import Refinement
from .session import Measured, is_capturing, search
from .shortlisters import FamilyShortlister, OwnShortlister, PinnedPrune, Shortlister

if TYPE_CHECKING:
    import triton


class Attachment:
    """The hooks that Foretune places on one attached autotuner: four attributes that override methods of its class.

    - `prune_configs` selects the configs to time: the kernel's own `early_config_prune` first, then Foretune's
      shortlist, and `perf_model` last. `early_config_prune` itself is not replaced, because other code calls it: FLA,
      to check a config from a file; and Dynamo (torch 2.13), which makes an autotuner of what it returns, but without
      `reset_to_zero` and `restore_value`, so that compiled code would compute wrong results. Only while a pin file is
      in force is it replaced, since the pinned config is not timed and needs neither.
    - `_bench` times one config, with Foretune's timer unless the kernel has its own `do_bench` or its class its own
      `_bench`. Each time is learned and stored at once, so that a killed process loses none. Known times are not
      measured again, and the other configs are first compiled in parallel.
    - `run` launches, one thread at a time, because Triton keeps a launch's arguments on the autotuner, where threads
      would mix them up. While a CUDA graph is captured nothing is timed: a new key runs the predicted config, or else
      the first allowed one, and that choice is not remembered. While a pin file is in force, its config runs.
    - `__getstate__` gives copies and pickles the autotuner without the hooks.

    `holders` counts the open `attached` blocks that hold it; 0 for `attach`. Where ranks choose together (`agree`),
    `prune_configs` times the configs and returns the agreed one, which Triton then remembers. With FORETUNE_MODE=off,
    all hooks do what Triton does.
    """

    holders, is_on = 0, False
    is_automatic = False  # attached by FORETUNE_ATTACH, so that `attach` replaces it

    def __init__(
        self,
        tuner: triton.runtime.Autotuner,
        pruner: Pruner | None,
        k: Length,
        mode: str | None = None,
        limit: dict[str, float] | None = None,
    ) -> None:
        from triton.runtime import Autotuner

        own = LaunchFamily(tuner)
        self.name, self.tuner = own.name, tuner
        self._bench, self.own_run = tuner._bench, tuner.run
        as_triton_does = tuner._do_bench is None and getattr(self._bench, "__func__", None) is Autotuner._bench
        self._how_timed = "cold" if as_triton_does else "autotuner"
        self._pruner = pruner
        if self._pruner is not None:
            self._pruner.timed, self._pruner.mode = self._how_timed, mode
            self._pruner.is_pinnable = False
        self._mode, self._limit = mode, limit
        # The keys whose config is not decided yet in mode `refine`, and the predicted time of such a launch.
        self._refining: dict[Any, tuple[Refinement[triton.Config], float]] = {}
        self._k, self._is_interpreted = k, Kernel(tuner).is_interpreted
        self._known: dict[DeviceSpec, KnownTimes] = {}
        self._epoch = -1 if is_pinned() else epoch()  # a pin file also replaces choices made before
        self._was_pinned = False  # whether the choices in Triton's `cache` are those of a pin file
        self._chosen_together: dict[int, dict[Any, triton.Config]] = {}  # Triton's `cache` by `scope()`
        self._launched: set[Any] = set()  # keys launched before the cache was cleared
        self._coarse = CoarseKeys(self.name)
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock and forget a running launch, also in forked processes (see `renew_in_children`)."""
        self.lock = threading.RLock()
        self._tuning: KeyTuning | None = None
        self._pinned_now: triton.Config | None = None  # the running launch's config in a pin file
        self._is_running = False

    @staticmethod
    def of(tuner: triton.runtime.Autotuner) -> Attachment | None:
        """Return an autotuner's attachment; None if it is not attached."""
        bench = getattr(tuner.__dict__.get("_bench"), "__self__", None)
        return bench if isinstance(bench, Attachment) else None

    def begin(self) -> None:
        """Place the hooks on the autotuner."""
        # A lambda that looks `run` up at each launch, so that `forced` can replace it.
        run = lambda *args, **kwargs: self.run(*args, **kwargs)  # noqa: E731
        self._hooks: dict[str, Any] = {"prune_configs": self.prune_configs, "_bench": self.bench, "run": run}
        self._hooks["__getstate__"] = self.state
        self._own_prune = self.tuner.early_config_prune
        if is_pinned():
            self._hooks["early_config_prune"] = PinnedPrune(
                self.name, self._own_prune, self._shortlister(), self._best_pinned, alters=True
            )
        self._hidden = {name: self.tuner.__dict__[name] for name in self._hooks if name in self.tuner.__dict__}
        self.tuner.__dict__.update(self._hooks)
        self.is_on = True

    def end(self) -> None:
        """Remove the hooks; raise `ForetuneError` if other code has replaced one of them meanwhile."""
        here = self.tuner.__dict__
        with self.lock:  # wait for a running launch
            if changed := [name for name, hook in self._hooks.items() if here.get(name) is not hook]:
                raise ForetuneError(
                    f"{self.name} cannot be detached: its {changed[0]} was replaced by other code after it was attached"
                )
            self._put_back(here)
            self.is_on = False

    def state(self) -> Any:
        """Return the state to copy or pickle the autotuner with: its attributes without the hooks."""
        get_state = getattr(type(self.tuner), "__getstate__", None)  # every class has it from Python 3.11
        state = self.tuner.__dict__ if get_state is None else get_state(self.tuner)
        return self._put_back(dict(state)) if isinstance(state, dict) else state

    def _put_back(self, attributes: dict[str, Any]) -> dict[str, Any]:
        """Replace the hooks in a dict of the autotuner's attributes by the values they override; return the dict."""
        for name, hook in self._hooks.items():
            if attributes.get(name) is hook:
                del attributes[name]
                if name in self._hidden:
                    attributes[name] = self._hidden[name]
        return attributes

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Launch through Triton's own `run`, one thread at a time; record the chosen config, and return the result."""
        with self.lock:
            if self._epoch != epoch() and not self._is_in(Mode.OFF):
                self._epoch, ranks = epoch(), scope()
                was_pinned, self._was_pinned = self._was_pinned, is_pinned()
                if ranks or was_pinned or self._was_pinned:
                    self._launched |= self.tuner.cache.keys()
                    self.tuner.cache.clear()
                    self.tuner.cache.update({} if self._was_pinned else self._chosen_together.get(ranks, {}))
                self._refining.clear()
            if self._refining:
                arguments = {**dict(zip(self.tuner.arg_names, args, strict=False)), **kwargs}
                key = key_of_launch(self.tuner, arguments)
                if (found := self._refining.get(key)) is not None:
                    launch = lambda config: self._run_once(config, args, kwargs)  # noqa: E731
                    return launch_undecided(self.tuner, self._refining, key, found, arguments, launch)
            if self._coarse.watched:
                self._or_warn(self._coarse.check, self.tuner, args, kwargs)
            before, self._is_running = self.tuner.__dict__.get("configs_timings"), True
            try:
                result = self.own_run(*args, **kwargs)
                if self._tuning is not None:
                    self._or_warn(self._finish, self._tuning, before)
                return result
            except _CapturedError as captured:
                return self._run_once(captured.config, args, kwargs)
            except Exception:
                if self._tuning is not None and self._tuning.session.best is None:
                    for key in self.tuner.cache.keys() - self._tuning.keys:  # all configs failed: try them again
                        del self.tuner.cache[key]
                raise
            finally:
                self._tuning, self._pinned_now, self._is_running = None, None, False

    def _is_in(self, mode: Mode) -> bool:
        """Return whether launches run in this mode; False if FORETUNE_MODE is not valid."""
        return self._or_warn(resolve_mode, self._mode) is mode

    def _run_once(self, config: triton.Config, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch with a config without storing it as the choice for the launch's key; return the launch's result."""
        real = self.tuner.cache
        self.tuner.cache = ForcedCache(real, lambda key: config)
        try:
            return self.own_run(*args, **kwargs)
        finally:
            self.tuner.cache = real

    def bench(self, *args: Any, config: triton.Config, **meta: Any) -> Any:
        """Time a config and return the result as Triton's `_bench` does; a known time is returned without timing."""
        if self._is_in(Mode.OFF):
            return self._bench(*args, config=config, **meta)
        if config is self._pinned_now:  # Triton before 3.8 times even a single config
            return [0.0] * 3
        tuning = self._tuning if self._tuning is not None and config in self._tuning.allowed else None
        if tuning is None:
            timing = self._bench(*args, config=config, **meta)
        elif (known := tuning.session.measured.get(config)) is not None:
            # Three quantiles, as Triton's benchmarker returns them.
            return [math.inf if known.time_us is None else known.time_us / 1e3] * 3
        else:
            if tuning.uncompiled:
                self._or_warn(tuning.compile, args, meta)
            timing = self._timed(args, config, meta)
        try:
            time_us = microseconds(timing)
        except ForetuneError as error:
            if tuning is not None:
                tuning.session.refuse(config, error)
            warn_once(f"{self.name}: {error}", ": that config counts as failed")
            return math.inf if isinstance(timing, (int, float)) else [math.inf] * 3
        if tuning is not None:
            tuning.session.keep(config, Measured.of(time_us))
        return timing

    def _timed(self, args: tuple[Any, ...], config: triton.Config, meta: Mapping[str, Any]) -> Any:
        """Return the timing of a config, in milliseconds, from Foretune's timer where possible, else from Triton's."""
        if self._how_timed == "cold" and measures(self.tuner):
            try:
                best_us = None if self._tuning is None else self._tuning.session.best_us
                return [OneLaunch(self.tuner, args, meta).time_us(config, best_us) / 1e3] * 3
            except Exception:  # noqa: BLE001 - Triton tells a config's failure from the launch's
                pass
        return self._bench(*args, config=config, **meta)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        """Return the configs that Triton should time for this launch; a single one where nothing may be timed."""
        if self._is_in(Mode.OFF):
            return type(self.tuner).prune_configs(self.tuner, kwargs)  # type: ignore[no-any-return]
        view = copy(self.tuner)  # the class's prune_configs with our early_config_prune, on a copy
        view.early_config_prune = self._prune
        self._n_allowed = 0
        pruned: list[triton.Config] = type(self.tuner).prune_configs(view, kwargs)
        if not self._is_running:
            return pruned
        if not self._is_interpreted:
            hash_triton()
        if is_capturing():
            raise _CapturedError(pruned[0])
        if self._is_in(Mode.PREDICT) and self._searches() and not self._is_interpreted:
            pruned = self._or_warn(self._compiled, pruned, kwargs) or pruned
        resets = len(pruned) == 1 and self._would_be_timed(kwargs)
        if len(pruned) > 1 and self._is_in(Mode.REFINE):
            resets = self._would_be_timed(kwargs)
            pruned = [self._or_warn(self._refined, pruned) or pruned[0]]
        if len(pruned) > 1 and (choose_together() or self._searches()):
            pruned = self._searched(pruned, kwargs)
            resets = resets or choose_together() or len(pruned) == 1
        if resets and not times_one():  # as Triton does after it has timed configs
            self.tuner.pre_hook({**self.tuner.nargs, **kwargs, **pruned[0].all_kwargs()}, reset_only=True)
        return pruned

    def _refined(self, configs: Sequence[triton.Config]) -> triton.Config:
        """Return the config to launch first in mode `refine`; later launches of the key try the others in turn."""
        if (tuning := self._tuning) is None:
            return configs[0]
        first, slowdowns = configs[0], [tuning.slowdowns[config] for config in configs]
        found = tuning.times.refinement(configs, slowdowns, tuning.arguments, self._limit or check_cost())
        if found is not None:
            tuning.refining, first = (found, tuning.scale), found.final or first
        tuning.session.measured[first] = Measured.of(1.0)  # Triton 3.6 times even a single config
        return first

    def _would_be_timed(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether Triton alone would time configs for this launch: several are allowed, and the key is new."""
        tuner, left = self.tuner, self._n_allowed
        if tuner.perf_model is not None:
            top_k = tuner.configs_top_k
            left = min(left, max(1, int(left * top_k)) if isinstance(top_k, float) else top_k)
        return left > 1 and key_of_launch(tuner, {**tuner.nargs, **kwargs}) not in self._launched

    def _searches(self) -> bool:
        """Return whether a model of the kernel's timings picks configs: there is no family and no `perf_model`."""
        return self._pruner is None and self.tuner.perf_model is None

    def _compiled(self, configs: list[triton.Config], kwargs: Mapping[str, Any]) -> list[triton.Config]:
        """Return `configs`; if it is a single config, which no autotuner times, replace it until one compiles.

        The replacements are the next best configs.
        """
        given, tuning = tuple(self.tuner.nargs.values()), self._tuning
        while tuning is not None and len(configs) == 1 and not tuning.compiled(configs[0], given, kwargs):
            configs = tuning.more()
        return configs

    def _searched(self, configs: list[triton.Config], kwargs: Mapping[str, Any]) -> list[triton.Config]:
        """Time these configs, and then those that the model of the kernel's timings proposes, until it proposes none.

        Returns:
            The timed configs. If ranks choose together, only the config that they agree on, or else the first, which is
            the same on all ranks.
        """
        tuning = self._tuning
        if tuning is None:
            return configs[:1] if choose_together() else configs
        given = tuple(self.tuner.nargs.values())

        def times_us(configs: list[triton.Config]) -> list[float | None]:
            return [microseconds(self.bench(*given, config=config, **kwargs)) for config in configs]

        def measure(configs: list[triton.Config]) -> triton.Config | None:
            if not choose_together():
                times_us(configs)
                return configs[0]
            best, time_us = tuning.times.agree(configs, partial(times_us, configs))
            if best is not None:
                tuning.session.measured[best] = Measured.of(time_us)  # Triton 3.6 times even a single config
            return best

        if not choose_together() and (cached := self._or_warn(tuning.in_tritons_cache)):
            return [cached]
        configs, best = search(configs, measure, lambda: self._or_warn(tuning.more) if self._searches() else None)
        return [best or configs[0]] if choose_together() else configs

    def _prune(
        self, configs: Sequence[triton.Config], named_args: Mapping[str, Any], /, **kwargs: Any
    ) -> Sequence[triton.Config]:
        """Return the configs that the kernel's `early_config_prune` keeps, reduced to a shortlist if there is one."""
        theirs = self._own_prune
        if self._is_running and is_pinned():  # otherwise Triton only compiles, or the caller chooses
            pinned = self._pinned(in_full(theirs), configs, named_args, kwargs)
            if pinned is not None:
                self._pinned_now = pinned
                return [pinned]
        allowed = configs if theirs is None else theirs(configs, named_args, **kwargs)
        self._n_allowed = len(allowed)
        kept = self._or_warn(self._shortlisted, allowed, named_args, kwargs) if allowed else None
        return allowed if kept is None else kept

    def _pinned(
        self, theirs: Any, configs: Sequence[triton.Config], named_args: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> triton.Config | None:
        """Return the config that the pin file in force has for a launch; None without a pin file.

        `theirs` is the kernel's own prune callback, if any, which must allow the config.

        Raises:
            PinError: The file does not cover the launch.
        """
        known, arguments = self._known_here(opens=False), {**named_args, **kwargs}
        allowed = configs if theirs is None else theirs(configs, named_args, **kwargs)
        self._n_allowed = len(allowed)
        problem = self._or_warn(lambda: known.shortlister.stand_in(known.shortlister.problem(arguments)))
        return known.pinned(problem, allowed, key_of_launch(self.tuner, arguments))

    def _shortlisted(
        self, allowed: Sequence[triton.Config], named_args: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> list[triton.Config]:
        """Return the configs to time first, best first; all allowed ones for a `perf_model` to choose from."""
        known, arguments = self._known_here(), {**named_args, **kwargs}
        problem = known.shortlister.problem(arguments)
        times = known.of(stand_in := known.shortlister.stand_in(problem))
        if self._pruner is not None:
            kept = self._pruner(allowed, named_args, **kwargs)
            if not may_tune() and not self._is_in(Mode.OFF):
                kept = kept[:1]
        else:
            kept = list(allowed)
            if self._searches():
                known.shortlister.expect(stand_in, arguments)
                kept = [allowed[position] for position in known.shortlister.positions(problem, tuple(allowed))]
        if self._is_running:  # otherwise Triton only compiles
            self._tuning = KeyTuning(self.tuner, known.shortlister, times, tuple(allowed), problem, arguments)
            self._or_warn(self._tuning.prepare, kept)
            if self._is_in(Mode.REFINE):
                slowdowns = known.shortlister.slowdowns(problem, tuple(allowed), len(kept))
                self._tuning.slowdowns = dict(zip(kept, slowdowns, strict=True))
                self._tuning.scale = known.shortlister.scale(problem, kept[0])
        return kept

    def _finish(self, tuning: KeyTuning, before: Any) -> None:
        """Store the config chosen in a tuned launch, and learn the times that Triton read from its own cache.

        `before` is the autotuner's `configs_timings` before the launch.
        """
        tuner, session = self.tuner, tuning.session
        if tuning.refining is not None and tuning.refining[0].final is None:
            for key in tuner.cache.keys() - tuning.keys:
                self._refining[key] = tuning.refining
                del tuner.cache[key]
        if self._is_in(Mode.REFINE):  # nothing was timed
            return
        after = tuner.__dict__.get("configs_timings")
        if after is not None and after is not before:
            for config, timing in after.items():
                if config in tuning.allowed and config not in session.measured:
                    session.keep(config, Measured.of(microseconds(timing)))
        new = tuner.cache.keys() - tuning.keys
        if choose_together():
            self._chosen_together.setdefault(scope(), {}).update((key, tuner.cache[key]) for key in new)
        if tuner.best_config in tuning.allowed:
            for key in new:
                self._coarse.watch(key, tuning)
            tuning.times.choose(tuner.best_config, new, tuning.arguments, bundle="")

    def _known_here(self, opens: bool = True) -> KnownTimes:
        """Return the known times on the current device; with `opens`, also load those stored on disk, once."""
        device = device_here()
        with self.lock:
            if device not in self._known:
                shortlister = self._shortlister()
                shortlister.mode = self._mode
                # With a family, its pruner does the logging.
                self._known[device] = KnownTimes(
                    self.tuner,
                    self.name,
                    shortlister,
                    device,
                    timed=self._how_timed,
                    logs=self._pruner is None,
                    is_pruned=bool(self._own_prune or self.tuner.perf_model),
                )
            known = self._known[device]
            if opens:
                known.open()
            return known

    def _shortlister(self) -> Shortlister:
        """Return a new shortlister for this kernel: by the family's ranker, or without one by the kernel's timings."""
        if self._pruner is not None:
            return FamilyShortlister(self._pruner)
        # Ranks that choose together need the same shortlist, so their model learns from agreed times alone.
        return OwnShortlister(self.tuner, self._k, ranks=lambda: scope() if choose_together() else 0)

    def _best_pinned(self, problem: Problem, configs: tuple[triton.Config, ...]) -> int | None:
        """Return the position of the config that the pin file in force has for a problem; None without a pin file."""
        known = self._known_here(opens=False)
        pinned = known.pinned(known.shortlister.stand_in(problem), configs)
        return None if pinned is None else configs.index(pinned)

    def _or_warn(self, function: Any, *arguments: Any) -> Any:
        """Call a function; if it raises, warn once and return None, so that the launch goes on."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001
            warn_once(f"{self.name}: {reason_of(error)}", ": its autotuner goes on without that")


class _CapturedError(Exception):
    """Raised to end a launch with a new key during CUDA graph capture, before Triton times anything."""

    def __init__(self, config: triton.Config) -> None:
        self.config = config

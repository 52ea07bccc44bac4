"""`KnownTimes`: remember the measured times of a kernel's configs, in this process and in the choice cache on disk."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ..arguments import harmless
from ..launching.kernel import Kernel, kept_arguments
from ..launching.stub_driver import device_here, measures
from ..pins import pinned_config
from .ranks.agreement import agreed, choose_together, scope
from .ranks.rendezvous import Times
from .refine.calls import stopwatch
from .refine.refinement import Refinement, Store, refinement_of
from .session import Measured

if TYPE_CHECKING:
    import triton

    from .cache.kernel_cache import ChoiceCache
    from .shortlisters import Shortlister


class KnownTimes:
    """The known times of one kernel on one device; `of` returns those of one key.

    Some times are kept in memory only: those of a launch that is not a `Problem`, of a config that a `KernelConfig`
    cannot express, and times that no GPU measured. Methods never raise for trouble with the cache.

    Args:
        tuner: The kernel's autotuner.
        name: The kernel's name.
        shortlister: Learns from each time.
        device: The device; if left out, the current one when `open` is first called.
        timed: How `tuner` measures times ("cold" or "autotuner"), for the log.
        logs: Whether times are written to FORETUNE_LOG.
        is_pruned: Whether the kernel prunes its configs itself, so that launches of one problem may have different
            lists.
    """

    def __init__(
        self,
        tuner: triton.runtime.Autotuner,
        name: str,
        shortlister: Shortlister,
        device: DeviceSpec | None = None,
        *,
        timed: str,
        logs: bool = True,
        is_pruned: bool = False,
    ) -> None:
        self.tuner, self.name, self.shortlister, self.device = tuner, name, shortlister, device
        self._kernel, self._timed, self._logs, self._is_pruned = Kernel(tuner), timed, logs, is_pruned
        self._configs = tuple(tuner.configs)
        self._values = values_of(self._configs)
        self._here: dict[Hashable, dict[triton.Config, Measured]] = {}
        self._on_disk: ChoiceCache | None = None
        self._is_open = False

    def open(self) -> None:
        """Load the times that earlier processes stored on disk; later calls do nothing."""
        if self._is_open or not measures(self.tuner):
            return
        self._is_open = True
        with self.quietly():
            self.device = self.device or device_here()
            self._on_disk = self.cache(self.device)
            for problem in self._on_disk.problems():
                # The kernel may also have been tuned with another family.
                if problem.family == self.shortlister.family.name:
                    self.shortlister.learn(problem, self._on_disk.times(problem))
                    if not self._is_pruned and self._on_disk.choice(problem, self.shortlister.bundle) is not None:
                        self.shortlister.finish(problem)

    def cache(self, device: DeviceSpec) -> ChoiceCache:
        """Return the choice cache of the kernel on a device."""
        from .cache.kernel_cache import ChoiceCache

        return ChoiceCache.of(self.name, self._kernel.tuned_hash(), device)

    def of(self, stand_in: Problem | None, key: Hashable = None) -> KeyTimes:
        """Return the times for a launch: those of its stand-in (the problem that represents it), else of its `key`."""
        return KeyTimes(self, stand_in, self._here.setdefault(key if stand_in is None else stand_in, {}), str(key))

    def values(self, configs: Sequence[triton.Config]) -> dict[triton.Config, KernelConfig]:
        """Return the `KernelConfig` under which times are stored, for each config that has one."""
        values = self._values
        if any(config not in values for config in configs):  # made by a prune callback, or sharing a value
            values = values_of([*self._configs, *configs])
        return {config: values[config] for config in configs if config in values}

    def pinned(
        self,
        problem: Problem | None,
        configs: Sequence[triton.Config],
        key: Sequence[Any] | None = None,
        supports: Callable[[triton.Config], bool] = lambda config: True,
    ) -> triton.Config | None:
        """Return the config that the pin file in force has for a launch; None if no file is in force.

        Args:
            problem: The problem that represents the launch; None if the launch is not a problem.
            configs: The configs that the launch may run.
            key: Triton's key of the launch.
            supports: Returns whether a config can run the launch itself.

        Raises:
            PinError: The file does not cover the launch.
        """
        config_of = {value: config for config, value in self.values(configs).items()}

        def reason(value: KernelConfig) -> str | None:
            if value not in config_of:
                return f"it is not among the {len(configs)} configs of the launch"
            return None if supports(config_of[value]) else f"{self.shortlister.family.name} does not support it"

        device, source = self.device or device_here(), self._kernel.tuned_hash
        value = pinned_config(self.name, source, device, problem, reason, None if key is None else list(key))
        return None if value is None else config_of[value]

    def log(self, problem: Problem, config: triton.Config, time_us: float | None, timed: str = "") -> None:
        """Log a config's time in microseconds, or a failure (`time_us` is None), if FORETUNE_LOG is set.

        `timed` says how the time was measured, if not by the kernel's autotuner.
        """
        if not (self._logs or timed) or self.device is None:
            return
        from ..timing.flywheel import is_logging, log_row, source_that_ran

        if is_logging():
            with self.quietly():
                family, value = self.shortlister.family, self.shortlister.value(config)
                source = source_that_ran(family, self._kernel.jit)
                log_row(family, problem, value, time_us, self.device, timed=timed or self._timed, source_hash=source)

    def quietly(self) -> AbstractContextManager[None]:
        """Return a context manager that turns an exception of its block into a warning: see `harmless`."""
        return harmless(f"{self.name}: times cannot be stored", ": they are kept in memory only")


class KeyTimes:
    """The times of one key of a kernel, which a `TuningSession` reads and adds to (see `Known`).

    It also lets the ranks of a job agree on a config, and stores the choice.

    On disk and for the shortlister, the key is represented by `problem`, which is None if the launch is not a
    `Problem`.
    """

    def __init__(
        self, kernel: KnownTimes, problem: Problem | None, here: dict[triton.Config, Measured], key: str
    ) -> None:
        self._kernel, self.problem, self._here, self._key = kernel, problem, here, key

    def recall(self, configs: Sequence[triton.Config]) -> Mapping[triton.Config, Measured]:
        """Return the known results among these configs, from memory and the disk; see `Known.recall`."""
        if (disk := self._kernel._on_disk) is not None and self.problem is not None:
            with self._kernel.quietly():
                kept = disk.times(self.problem)
                for config, value in self._kernel.values(configs).items():
                    if config not in self._here and value in kept:
                        self._here[config] = Measured.of(kept[value])
        return {config: self._here[config] for config in configs if config in self._here}

    def record(self, config: triton.Config, measured: Measured, error: Exception | None = None) -> None:
        """Store, learn and log a config's result; see `Known.record`.

        The disk gets only successes and lasting failures (see `is_lasting`), before this returns.
        """
        kernel, problem, time_us = self._kernel, self.problem, measured.time_us
        self._here[config] = measured
        value = kernel.values([config]).get(config)
        if problem is None or value is None:
            return
        is_measured = measures(kernel.tuner)
        with kernel.quietly():
            if is_measured and kernel._on_disk is not None and (error is None or is_lasting(error)):
                kernel._on_disk.record(problem, value, time_us)
            kernel.shortlister.learn(problem, {value: time_us})
        if is_measured:
            kernel.log(problem, config, time_us)

    def refinement(
        self,
        configs: Sequence[triton.Config],
        slowdowns: Sequence[float],
        arguments: Mapping[str, Any],
        limit: dict[str, float],
    ) -> Refinement[triton.Config] | None:
        """Return the object that chooses the config of each launch of this key in mode `refine`; None without a GPU.

        Launches share it if their problems are rounded to the same sizes and they run the same binaries.

        Args:
            configs: The configs to choose from, the predicted one first.
            slowdowns: Their predicted slowdowns, (n_configs,).
            arguments: The arguments of a launch.
            limit: What exploring may cost, as `check_cost` returns it.
        """
        if (watch := stopwatch()) is None:
            return None
        kernel, problem, configs = self._kernel, self.problem, tuple(configs)
        device = kernel.device or device_here()

        def make() -> Refinement[triton.Config]:
            store, unit_us = None, 1.0
            if problem is not None:
                unit_us = kernel.shortlister.scale(problem, configs[0])
            if problem is not None and measures(kernel.tuner):
                kernel.device = device
                store = Store(
                    problem,
                    lambda: kernel.cache(device),
                    kernel.values(configs),
                    lambda config, time_us: kernel.log(problem, config, time_us, "refined"),
                    lambda: kernel.shortlister.bundle,
                )
            return Refinement(
                kernel.name,
                problem or self._key,
                configs,
                slowdowns,
                watch=watch,
                store=store,
                limit=limit,
                predicted_us=unit_us,
            )

        binaries = kernel._kernel.specialisation(arguments)
        return refinement_of((kernel, device, problem or self._key, configs, binaries, scope()), make)

    def agree(
        self, configs: Sequence[triton.Config], times_us: Times | Callable[[], Times]
    ) -> tuple[triton.Config | None, float]:
        """Exchange times with the other ranks; return the config that is fastest on its slowest rank, and its time.

        Args:
            configs: The configs, the same on each rank.
            times_us: This rank's times, or a function that measures them.

        Returns:
            The config and its time in microseconds; None and inf if no config works or the ranks do not agree.
        """
        texts = [{"": str(config)} for config in configs]
        shared = agreed(times_us, self._kernel.name, self.problem or self._key, texts)
        timed = [(time_us, at) for at, time_us in enumerate(shared) if time_us is not None]
        if self.problem is not None and timed and choose_together():
            known = {value: shared[configs.index(config)] for config, value in self._kernel.values(configs).items()}
            with self._kernel.quietly():
                self._kernel.shortlister.learn(self.problem, known, scope())
        time_us, at = min(timed, default=(math.inf, None))
        return None if at is None else configs[at], time_us

    def choose(
        self,
        config: triton.Config,
        keys: Iterable[Sequence[Any]],
        arguments: Mapping[str, Any],
        bundle: str | None = None,
    ) -> None:
        """Store the chosen config and its launches on disk, where `foretune cache freeze` and warm-ups read them.

        Args:
            config: The chosen config.
            keys: Triton's keys of launches that it was chosen for.
            arguments: The arguments of such a launch.
            bundle: The digest of the bundle that predicted, "" for none. If left out, the shortlister's.
        """
        kernel, problem, tuner = self._kernel, self.problem, self._kernel.tuner
        value = kernel.values([config]).get(config)
        if kernel._on_disk is None or problem is None or value is None or not measures(tuner):
            return
        with kernel.quietly():
            kernel._on_disk.choose(problem, kernel.shortlister.bundle if bundle is None else bundle, value)
            names = [name for name in tuner.keys if name in arguments]
            own = value if kernel._is_pruned else None  # other launches of the same problem may run other configs
            for key in keys:
                kernel._on_disk.saw_launch(problem, names, key, kept_arguments(arguments), own)


def values_of(configs: Sequence[triton.Config]) -> dict[triton.Config, KernelConfig]:
    """Return the `KernelConfig` of each config.

    Configs that differ only in their `pre_hook`, and those that a `KernelConfig` cannot express, are left out.
    """
    found: dict[triton.Config, KernelConfig] = {}
    for config in configs:
        with suppress(ForetuneError):
            found[config] = KernelConfig.from_triton(config)
    shared = Counter(found.values())
    return {config: value for config, value in found.items() if shared[value] == 1}


def is_lasting(error: Exception) -> bool:
    """Return whether a config that failed with this error will always fail: the compiler or the device refuses it.

    Errors such as out-of-memory or a missing argument are not the config's fault.
    """
    from triton.errors import TritonError

    from .isolation import CrashError

    return isinstance(error, (TritonError, CrashError))

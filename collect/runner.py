"""Runners: they check and time single configs on a GPU, and turn every failure into a status; or replay results.

Importing this imports neither pandas nor torch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..datasets import DeviceSpec, FamilyError, ForetuneError, KernelConfig, Measurable, Problem, Status
from ..datasets.errors import abridged, cause_of
from ..runtime.launching.results import described, outputs_of, poison, why_wrong
from ..runtime.timing.timer import resetting

if TYPE_CHECKING:
    from ..runtime.timing.timer import Timer

#: A config that is this many times slower than the best so far is stopped early: after one launch, whose time is kept.
#: (With a limit of 4, an H200 computed for 838 s to get the shipped rows: 88 s on configs more than 4x slower, and
#: 310 s on configs 2 to 4x slower, in three launches each. Training keeps a tenth of the latter.)
EARLY_STOP_SLOWDOWN = 2.5
#: A config that is this many times slower gets only `ALSO_RAN_SAMPLES` samples, because no shortlist will contain it.
ALSO_RAN_SLOWDOWN = 1.5
ALSO_RAN_SAMPLES = 3
#: The kernel time in microseconds that the scan of one config may take, and the most samples.
SCAN_BUDGET_US, SCAN_SAMPLES = 3_000.0, 7
#: The same for one round of a confirming pass, with the fewest samples.
CONFIRM_BUDGET_US, CONFIRM_SAMPLES, LEAST_CONFIRM_SAMPLES = 2_000.0, 10, 2
#: For kernels below 6 us, where a sample's error counts for more: as many samples as take this many microseconds
#: together, and the most samples.
SHORT_US, MOST_CONFIRM_SAMPLES = 60.0, 25
#: Samples of one reading of the drift probe.
PROBE_SAMPLES = 10
#: How many check problems keep their inputs and reference, the most recently used ones. A family may have one for each
#: dtype, set of flags and block size.
CHECKS_KEPT = 32
#: A config and the key of its binary. Configs that share a binary may still be launched in different ways.
_Launched: TypeAlias = tuple[KernelConfig, Hashable]


class DeviceLostError(ForetuneError):
    """The process cannot use the GPU any more, for example after an illegal memory access; a new process can."""


class LaunchFailedError(ForetuneError):
    """One launch failed; the process and the GPU still work."""


class OutOfMemoryError(ForetuneError):
    """The prepared problem does not fit into the free memory of the GPU; another one may."""


@dataclass(frozen=True)
class Trial:
    """The result of running one config: the fields of a `Measurement` that the GPU decides.

    It is also a worker's answer to a task. A trial without a status makes no row: it says that inputs were made, or has
    the `times_us` of one round of a confirming pass.
    """

    status: Status | None = None
    time_us: float | None = None
    spread: float | None = None
    samples: int = 0
    registers: int | None = None
    spills: int | None = None
    smem_bytes: int | None = None
    error: str | None = None
    times_us: tuple[float, ...] = ()
    seconds: float = 0.0  # how long the task took
    probe_us: float | None = None  # the drift probe's time, if it was read after the task

    def measured(self) -> dict[str, Any]:
        """Return a dict of those fields of the trial that a `Measurement` has too."""
        return {name: value for name, value in vars(self).items() if name not in ("times_us", "seconds", "probe_us")}


class Runner(Protocol):
    """Runs configs on one device: `GpuRunner` on a real one, `ReplayRunner` from recorded times.

    Each method raises `DeviceLostError` if the GPU cannot be used any more.
    """

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Make the inputs of the problem that the following calls run.

        Raises:
            OutOfMemoryError: The inputs do not fit into the GPU's memory.
            ForetuneError: The problem is not one of the family.
        """

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Check and time a config on the prepared problem, for the first time, and return the trial.

        Args:
            config: The config to run.
            best_us: The best time of a config on this problem so far, in microseconds; inf if there is none. A config
                that is much slower gets fewer samples.
        """

    def confirm(self, config: KernelConfig, best_us: float, is_clean: bool = False) -> list[float]:
        """Return a few measured times, in microseconds, of a config that the scan has run.

        Args:
            config: The config to run.
            best_us: The best time found so far, in microseconds; there are more samples if it is short.
            is_clean: Whether the L2 has no dirty lines when a launch starts, as for `Timer`.

        Raises:
            LaunchFailedError: The launch failed.
        """

    def probe(self, family: Measurable, problem: Problem, config: KernelConfig) -> float:
        """Return the time of the drift probe in microseconds; the prepared problem stays prepared.

        Raises:
            LaunchFailedError: The probe cannot be launched.
        """


class GpuRunner:
    """Runs configs on the process's current CUDA or HIP device."""

    def __init__(self, device: DeviceSpec) -> None:
        from ..runtime.timing.timer import Timer

        self._device = device
        self._timer: Timer = Timer()
        self._clean_timer: Timer = Timer(clean=True)
        self._family: Measurable
        self._problem: Problem
        self._inputs: Any = None
        self._probe: tuple[Problem, Any] | None = None  # with its inputs
        self._checked: dict[Problem, dict[_Launched, Trial]] = {}  # by check problem
        self._check_inputs: dict[Problem, tuple[Any, Any]] = {}  # with the reference; the most recently used one last

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Make the inputs of the problem that the following calls run, as `Runner.prepare` describes."""
        if self._inputs is not None:
            # Free the last problem's memory first. No other problem uses what was checked on it.
            for checks in (self._check_inputs, self._checked):
                checks.pop(self._problem, None)
            self._inputs = None
        self._family, self._problem = family, problem
        try:
            self._inputs = self._made()
        except OutOfMemoryError:
            if not self._check_inputs:
                raise
            self._check_inputs.clear()  # they can be made again
            self._inputs = self._made()

    def _made(self) -> Any:
        """Create and return inputs of the prepared problem. Raises `OutOfMemoryError` if they do not fit on the GPU."""
        try:
            return self._family.inputs(self._problem, self._device)
        except Exception as error:
            failure = _failure(error)
            if failure.status is Status.OUT_OF_RESOURCES:
                raise OutOfMemoryError(failure.error) from error
            raise

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Check a config's result on the prepared problem, and time it, as `Runner.scan` describes."""
        binary = self._check(config)
        if binary.status is not Status.OK:
            return binary

        def samples(first_us: float) -> int:
            if first_us > EARLY_STOP_SLOWDOWN * best_us:
                return 1
            if first_us > ALSO_RAN_SLOWDOWN * best_us:
                return ALSO_RAN_SAMPLES
            return max(ALSO_RAN_SAMPLES, min(SCAN_SAMPLES, int(SCAN_BUDGET_US / first_us)))

        family, inputs = self._family, self._inputs
        try:
            timing = self._timer.time(
                partial(family.launch, inputs, config), samples=samples, **resetting(family, inputs)
            )
        except Exception as error:  # noqa: BLE001 - a launch can fail in any way; each is a row
            return _failure(error)
        status = Status.EARLY_STOPPED if timing.samples == 1 else Status.OK
        return replace(binary, status=status, **vars(timing))

    def confirm(self, config: KernelConfig, best_us: float, is_clean: bool = False) -> list[float]:
        """Return a few more times of a config that was scanned, as `Runner.confirm` describes."""
        family, inputs, timer = self._family, self._inputs, self._clean_timer if is_clean else self._timer
        try:
            return timer.sample(
                partial(family.launch, inputs, config), samples_a_round(best_us), **resetting(family, inputs)
            )
        except Exception as error:
            raise LaunchFailedError(_failure(error).error) from error

    def probe(self, family: Measurable, problem: Problem, config: KernelConfig) -> float:
        """Return the time of the drift probe in microseconds, as `Runner.probe` describes."""
        try:
            if self._probe is None or self._probe[0] != problem:
                self._probe = (problem, family.inputs(problem, self._device))
            inputs = self._probe[1]
            launch = partial(family.launch, inputs, config)
            # The mean: a second process on the GPU alternates with this one, and a median would not show it.
            return statistics.fmean(self._timer.sample(launch, PROBE_SAMPLES, **resetting(family, inputs)))
        except Exception as error:
            raise LaunchFailedError(_failure(error).error) from error

    def _check(self, config: KernelConfig) -> Trial:
        """Load a config's binary, compare its result with the reference, and return the trial.

        This is done once for all problems that share the binary and have the same check problem.
        """
        try:
            key = (config, self._binary_key(config, self._problem))
            problem = self._checked_on(config, key)
        except Exception as error:  # noqa: BLE001 - as above
            return _failure(error)
        trials = self._checked.setdefault(problem, {})
        if key not in trials:
            try:
                trials[key] = self._load_and_compare(config, problem)
            except Exception as error:  # noqa: BLE001 - as above
                failure = _failure(error)
                if failure.status is Status.OUT_OF_RESOURCES:
                    return failure  # not kept: there may be memory when another problem is prepared
                trials[key] = failure
        return trials[key]

    def _binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        return self._family.binary_key(config, problem.without_sizes())

    def _checked_on(self, config: KernelConfig, key: _Launched) -> Problem:
        """Return the problem on which a config's result is checked.

        It is the family's check problem. If the config does not support that, or has another binary for it, which would
        prove nothing about the binary to be timed, it is the measured problem itself.
        """
        problem = self._family.check_problem(config, self._problem)
        if problem == self._problem:
            return problem
        is_same = (config, self._binary_key(config, problem)) == key
        return problem if is_same and self._family.supports(config, problem, self._device) is None else self._problem

    def _load_and_compare(self, config: KernelConfig, problem: Problem) -> Trial:
        """Return a trial with the facts of the config's binary, and whether its result is correct."""
        family = self._family
        binary = family.compile(config, self._problem)
        binary._init_handles()
        facts = {"registers": binary.n_regs, "spills": binary.n_spills, "smem_bytes": binary.metadata.shared}
        inputs, reference = self._check_of(problem)
        family.reset(inputs)
        y = family.launch(inputs, config)
        if described(y) != described(reference):  # which might be broadcast
            wanted = f"{described(reference)}, as reference()"
            raise FamilyError(f"family {family.name}: launch() must return {wanted} but returned {described(y)}")
        wrong = why_wrong(y, reference, family.tolerance(problem))
        for output in outputs_of(y):
            poison(output)
        return Trial(Status.OK if wrong is None else Status.WRONG_RESULT, error=wrong, **facts)

    def _check_of(self, problem: Problem) -> tuple[Any, Any]:
        """Return inputs and reference result of a check problem; if it is the prepared problem, its existing inputs."""
        pair = self._check_inputs.pop(problem, None)
        if pair is None:
            while len(self._check_inputs) >= CHECKS_KEPT:
                del self._check_inputs[next(iter(self._check_inputs))]
            is_prepared = problem == self._problem
            inputs = self._inputs if is_prepared else self._family.inputs(problem, self._device, seed=1)
            self._family.reset(inputs)
            pair = (inputs, self._family.reference(inputs))
        self._check_inputs[problem] = pair
        return pair


def samples_a_round(best_us: float) -> int:
    """Return how many samples each config gets in one round of a confirming pass.

    Args:
        best_us: The time of the case's best config in microseconds.

    >>> [samples_a_round(us) for us in (2.0, 5.0, 10.0, 500.0, 5000.0)]
    [25, 12, 10, 4, 2]
    """
    affordable = max(LEAST_CONFIRM_SAMPLES, min(CONFIRM_SAMPLES, int(CONFIRM_BUDGET_US / best_us)))
    return max(affordable, min(MOST_CONFIRM_SAMPLES, int(SHORT_US / best_us)))


def _failure(error: BaseException) -> Trial:
    """Return an exception as a trial with the status that fits it.

    Raises:
        DeviceLostError: The CUDA context cannot be used any more.
    """
    import torch
    from triton.runtime.errors import OutOfResources

    error = cause_of(error)
    text = abridged(f"{type(error).__name__}: {error}")
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()  # so that only this config fails
    if isinstance(error, (OutOfResources, torch.OutOfMemoryError)):
        return Trial(Status.OUT_OF_RESOURCES, error=text)
    if "CompilationError" in type(error).__name__ or "PTXASError" in type(error).__name__:
        return Trial(Status.COMPILE_FAILED, error=text)
    if not _device_answers():
        raise DeviceLostError(text) from error
    return Trial(Status.LAUNCH_FAILED, error=text)


def _device_answers() -> bool:
    """Return whether the CUDA context still works."""
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any failure here means the same
        return False
    return True


class Times(Protocol):
    """The interface of the source of a `ReplayRunner`'s times; `recording.RecordedTimes` reads them from a dataset."""

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Select the problem that the following calls are about; raise `ForetuneError` if it has no times."""

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Return the trial of a config on the prepared problem in the first pass; the arguments are `Runner.scan`'s."""

    def confirm(self, config: KernelConfig, number: int) -> list[float]:
        """Return the times of a config, in microseconds, in the round of that number, counted from 0.

        The rounds of the two confirming passes alternate. Raises `LaunchFailedError` if the config failed in that pass.
        """


class ReplayRunner:
    """A `Runner` without a GPU, which looks up the times of configs on the prepared problem.

    >>> from foretune.collect.recording import Recording
    >>> from foretune.datasets import load
    >>> from foretune.kernels import find_family
    >>> family, dataset = find_family("rms_norm_rope_bwd"), load("h200_rms_norm_rope")
    >>> recording = Recording(dataset, [family])
    >>> runner = ReplayRunner(recording.on(recording.devices[0]))
    >>> problem = recording.cases[0].problem
    >>> runner.prepare(family, problem)
    >>> trial = runner.scan(family.default(problem, recording.devices[0]), float("inf"))
    >>> trial.status.value, trial.time_us > 0
    ('ok', True)
    """

    def __init__(self, times: Times) -> None:
        self.times = times
        self._rounds: Counter[KernelConfig] = Counter()  # of the prepared problem's confirming passes

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Select the problem that the following calls are about; raise `ForetuneError` if it has no times."""
        self.times.prepare(family, problem)
        self._rounds.clear()

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Return the recorded result of a config's first run, even if it is much slower than `best_us` microseconds."""
        return self.times.scan(config, best_us)

    def confirm(self, config: KernelConfig, best_us: float, is_clean: bool = False) -> list[float]:
        """Return the recorded times of one more round, as `Runner.confirm` describes.

        They do not depend on `best_us` and `is_clean`.
        """
        self._rounds[config] += 1
        return self.times.confirm(config, self._rounds[config] - 1)

    def probe(self, family: Measurable, problem: Problem, config: KernelConfig) -> float:
        """Raise `LaunchFailedError`, so that no reading is stored: a replay says nothing about the state of a GPU."""
        raise LaunchFailedError("a replay has no drift probe")

"""Runs single configs on the GPU: checks their results, times them, and turns every failure into a status."""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..datasets import DeviceSpec, FamilyError, ForetuneError, KernelConfig, Measurable, Problem, Status
from ..datasets.errors import abridged, cause_of, shown
from ..runtime.launching.kernel import poison

if TYPE_CHECKING:
    from ..runtime.timing.timer import Timer

#: A config this much slower than the best so far is stopped early: one launch, whose time is kept. (With a limit of 4,
#: an H200 computed for 838 s to get the shipped rows: 88 s on what is more than 4x slower, and 310 s on what is 2 to 4x
#: slower, in three launches each, of which training keeps a tenth.)
EARLY_STOP_SLOWDOWN = 2.5
#: One that is this much slower gets a few samples: it will never be a candidate.
ALSO_RAN_SLOWDOWN = 1.5
ALSO_RAN_SAMPLES = 3
#: Kernel microseconds to spend on a candidate's scan, and the most samples.
SCAN_BUDGET_US, SCAN_SAMPLES = 3_000.0, 7
#: The same for one round of a confirming pass, of which there are several.
CONFIRM_BUDGET_US, CONFIRM_SAMPLES, LEAST_CONFIRM_SAMPLES = 2_000.0, 10, 2
#: Below 6 us, where a sample's error counts for more, as many as take so long together, and at most these.
SHORT_US, MOST_CONFIRM_SAMPLES = 60.0, 25
PROBE_SAMPLES = 10
#: Of so many check problems the inputs and the reference are kept, those used last: a family has one for each dtype and
#: flags, say, and each size of a block.
CHECKS_KEPT = 32
#: What an error is relative to where the reference is all zeros.
_LEAST_NORM = 1e-12
#: A config and the key of its binary. Configs may share a binary, and be launched in ways of their own.
_Launched: TypeAlias = tuple[KernelConfig, Hashable]


class DeviceLostError(ForetuneError):
    """The process cannot use the GPU any more (an illegal memory access, say); a new one can go on."""


class LaunchFailedError(ForetuneError):
    """One launch failed; the process and the device are fine."""


class OutOfMemoryError(ForetuneError):
    """The prepared problem does not fit into what is left of the GPU's memory; another one may."""


@dataclass(frozen=True)
class Trial:
    """One config being timed: what running it showed, which are the fields of a `Measurement` that the GPU decides.

    It is also the answer of a worker to a task. One without a status makes no row: inputs were made, or a round of a
    confirming pass gave `times_us`.
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
    seconds: float = 0.0  # that the task took
    probe_us: float | None = None  # the drift probe's time, if that was due thereafter

    def measured(self) -> dict[str, Any]:
        """Return the fields of a `Measurement`."""
        return {name: value for name, value in vars(self).items() if name not in ("times_us", "seconds", "probe_us")}


class Runner(Protocol):
    """Runs configs on one device. `GpuRunner` is the real one; tests replay recorded times.

    Each call raises `DeviceLostError` where the GPU is gone with it.
    """

    def prepare(self, family: Measurable, problem: Problem) -> None:
        """Makes the inputs of the problem that the following calls run. Raises `OutOfMemoryError` where they do
        not fit, and `ForetuneError` where the problem is not one of the family."""

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        """Runs one config on the prepared problem; `best_us` is the best time so far (inf if none)."""

    def confirm(self, config: KernelConfig, best_us: float) -> list[float]:
        """A few times of a config that the scan has run, in microseconds. Raises `LaunchFailedError`."""

    def probe(self, family: Measurable, problem: Problem, config: KernelConfig) -> float:
        """The time of the drift probe, in microseconds, next to the prepared problem. Raises `LaunchFailedError`."""


class GpuRunner:
    """The current CUDA or HIP device."""

    def __init__(self, device: DeviceSpec) -> None:
        from ..runtime.timing.timer import Timer

        self._device = device
        self._timer: Timer = Timer()
        self._family: Measurable
        self._problem: Problem
        self._inputs: Any = None
        self._probe: tuple[Problem, Any] | None = None  # and its inputs
        self._checked: dict[Problem, dict[_Launched, Trial]] = {}  # by check problem
        self._check_inputs: dict[Problem, tuple[Any, Any]] = {}  # with the reference, the one used last at the end

    def prepare(self, family: Measurable, problem: Problem) -> None:
        if self._inputs is not None:
            # Free the last problem's memory first. What was checked on it no other problem asks for.
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
        try:
            return self._family.inputs(self._problem, self._device)
        except Exception as error:
            failure = _failure(error)
            if failure.status is Status.OUT_OF_RESOURCES:
                raise OutOfMemoryError(failure.error) from error
            raise

    def scan(self, config: KernelConfig, best_us: float) -> Trial:
        binary = self._check(config)
        if binary.status is not Status.OK:
            return binary

        def samples(first_us: float) -> int:
            if first_us > EARLY_STOP_SLOWDOWN * best_us:
                return 1
            if first_us > ALSO_RAN_SLOWDOWN * best_us:
                return ALSO_RAN_SAMPLES
            return max(ALSO_RAN_SAMPLES, min(SCAN_SAMPLES, int(SCAN_BUDGET_US / first_us)))

        try:
            timing = self._timer.time(lambda: self._family.launch(self._inputs, config), samples=samples)
        except Exception as error:  # noqa: BLE001 - a launch can fail in any way; each is a row
            return _failure(error)
        status = Status.EARLY_STOPPED if timing.samples == 1 else Status.OK
        return replace(binary, status=status, **vars(timing))

    def confirm(self, config: KernelConfig, best_us: float) -> list[float]:
        try:
            return self._timer.sample(lambda: self._family.launch(self._inputs, config), samples_a_round(best_us))
        except Exception as error:
            raise LaunchFailedError(_failure(error).error) from error

    def probe(self, family: Measurable, problem: Problem, config: KernelConfig) -> float:
        try:
            if self._probe is None or self._probe[0] != problem:
                self._probe = (problem, family.inputs(problem, self._device))
            inputs = self._probe[1]
            # The mean: a second process on the card alternates with this one, and a median would not see it.
            return statistics.fmean(self._timer.sample(lambda: family.launch(inputs, config), PROBE_SAMPLES))
        except Exception as error:
            raise LaunchFailedError(_failure(error).error) from error

    def _check(self, config: KernelConfig) -> Trial:
        """Loads the config's binary and compares its result with the reference: once for all problems that share the
        binary and are checked on the same one."""
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
                    return failure  # there may be memory next to another problem
                trials[key] = failure
        return trials[key]

    def _binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        return self._family.binary_key(config, problem.without_sizes())

    def _checked_on(self, config: KernelConfig, key: _Launched) -> Problem:
        """The family's check problem; the measured one where the config does not support that, or has another binary
        for it: that would say nothing of the one to be timed."""
        problem = self._family.check_problem(config, self._problem)
        if problem == self._problem:
            return problem
        is_same = (config, self._binary_key(config, problem)) == key
        return problem if is_same and self._family.supports(config, problem, self._device) is None else self._problem

    def _load_and_compare(self, config: KernelConfig, problem: Problem) -> Trial:
        import torch

        family = self._family
        binary = family.compile(config, self._problem)
        binary._init_handles()
        facts = {"registers": binary.n_regs, "spills": binary.n_spills, "smem_bytes": binary.metadata.shared}
        inputs, reference = self._check_of(problem)
        y = family.launch(inputs, config)
        if getattr(y, "shape", None) != reference.shape:  # which might be broadcast
            what = f"a tensor of shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else shown(y)
            wanted = f"a tensor of shape {tuple(reference.shape)}, as reference()"
            raise FamilyError(f"family {family.name}: launch() must return {wanted} but returned {what}")
        error = float((y.float() - reference).norm() / reference.norm().clamp_min(_LEAST_NORM))
        poison(y)
        if error <= family.tolerance(problem):  # never true of NaN
            return Trial(Status.OK, **facts)
        return Trial(Status.WRONG_RESULT, error=f"relative error {error:.2g}", **facts)

    def _check_of(self, problem: Problem) -> tuple[Any, Any]:
        """Inputs and reference to check on; of the prepared problem its own inputs."""
        pair = self._check_inputs.pop(problem, None)
        if pair is None:
            while len(self._check_inputs) >= CHECKS_KEPT:
                del self._check_inputs[next(iter(self._check_inputs))]
            own = problem == self._problem
            inputs = self._inputs if own else self._family.inputs(problem, self._device, seed=1)
            pair = (inputs, self._family.reference(inputs))
        self._check_inputs[problem] = pair
        return pair


def samples_a_round(best_us: float) -> int:
    """Samples of each config in one round of a confirming pass of a case whose best config takes so long.

    >>> [samples_a_round(us) for us in (2.0, 5.0, 10.0, 500.0, 5000.0)]
    [25, 12, 10, 4, 2]
    """
    affordable = max(LEAST_CONFIRM_SAMPLES, min(CONFIRM_SAMPLES, int(CONFIRM_BUDGET_US / best_us)))
    return max(affordable, min(MOST_CONFIRM_SAMPLES, int(SHORT_US / best_us)))


def _failure(error: BaseException) -> Trial:
    """The status of an exception. Raises `DeviceLostError` where the CUDA context is gone with it."""
    import torch
    from triton.runtime.errors import OutOfResources

    error = cause_of(error)
    text = abridged(f"{type(error).__name__}: {error}")
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()  # so that it costs this config alone
    if isinstance(error, (OutOfResources, torch.OutOfMemoryError)):
        return Trial(Status.OUT_OF_RESOURCES, error=text)
    if "CompilationError" in type(error).__name__ or "PTXASError" in type(error).__name__:
        return Trial(Status.COMPILE_FAILED, error=text)
    if not _device_answers():
        raise DeviceLostError(text) from error
    return Trial(Status.LAUNCH_FAILED, error=text)


def _device_answers() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any failure here means the same
        return False
    return True

"""`choose`: the config that an op's call runs. A failed prediction never makes a call fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ..datasets import DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem, not_empty, wrong_knobs
from ..datasets.errors import shown
from .arguments import Mode, warn_once
from .how_many import HowMany
from .launching.collector import collecting_later
from .launching.stub_driver import measures
from .shortlist import chooser_of
from .timing.timer import timer_of
from .tuning.ranks.agreement import agreed_choice, may_tune, scope

#: The number of configs that the mode `shortlist` benchmarks.
K = 8

Launch = Callable[[KernelConfig], Any]
# The winners of benchmarks by (family, bucket, configs, device, ranks): each process measures a bucket once. The key
# has the configs, because problems at a bucket's edge may support different ones.
_measured: dict[tuple[str, Problem, tuple[KernelConfig, ...], DeviceSpec, int], KernelConfig] = {}


def choose(
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
    mode: Mode,
    launch: Launch,
) -> KernelConfig:
    """Return the config to run a problem with; the family's default if nothing can be predicted.

    In mode `shortlist`, the first call of a bucket times the `K` best configs. It does not while a CUDA graph is
    captured, when nothing may wait for the device, nor in a job of several ranks without `agree`; then the config that
    is predicted to be fastest runs.

    Args:
        family: The kernel's family.
        problem: The call's problem.
        device: The device that the call runs on.
        mode: How predictions are used.
        launch: Runs a config on the call's own tensors; used in mode `shortlist` only.
    """
    if mode is Mode.OFF:
        return family.default(problem, device)
    # Predict for the bucket, so that another number of rows costs microseconds; check support for the problem itself.
    near = family.at_call_time(not_empty(family, problem))
    ranked = _ranked(family, near, device, 1 if mode is Mode.PREDICT else K)
    configs = tuple(config for config in ranked if family.supports(config, problem, device) is None)
    if not configs:
        return family.default(problem, device)
    if mode is Mode.PREDICT or len(configs) == 1:
        return configs[0]
    key = (family.name, near, configs, device, scope())
    if key not in _measured:
        if not (_can_wait() and may_tune()):
            return configs[0]
        time_them = partial(_logged_times_us, family, problem, device, configs, launch)
        best = agreed_choice(family.name, near, configs, time_them)
        _measured[key] = configs[best]
    return _measured[key]


def given(config: KernelConfig, family: Measurable, problem: Problem, device: DeviceSpec) -> KernelConfig:
    """Return the caller's config, completed with the family's default for knobs that it does not name.

    Raises `ForetuneError` for anything but a config, and, with the reason, for one that the family does not support.
    """
    if not isinstance(config, KernelConfig):
        raise ForetuneError(f"config must be a KernelConfig but is {shown(config)}")
    config = KernelConfig.from_json(family.default(problem, device).to_json() | config.to_json())
    reason = family.supports(config, problem, device) or wrong_knobs(family, config)
    if reason is not None:
        raise ForetuneError(f"this config cannot run {problem} on {device.name}: {reason} ({config})")
    return config


def _ranked(family: Measurable, problem: Problem, device: DeviceSpec, k: int) -> tuple[KernelConfig, ...]:
    """Return the `k` configs predicted to be fastest; (), with a warning, if nothing is predicted."""
    try:
        with collecting_later():  # the first call reads a bundle
            ranked = chooser_of(family, device).choose(problem, HowMany(k))
        if ranked.predicted:
            return ranked.configs
        reason = ranked.reason
    except Exception as error:  # noqa: BLE001 - a failed prediction never stops a call
        reason = f"{family.name}: no prediction ({type(error).__name__}: {error})"
    warn_once(reason, ": the family's default config runs")
    return ()


def _logged_times_us(
    family: Measurable, problem: Problem, device: DeviceSpec, configs: tuple[KernelConfig, ...], launch: Launch
) -> list[float | None]:
    """Launch and time each config, and append the times to the FORETUNE_LOG dataset if that is set.

    Returns:
        Microseconds by config, in their order; None for one that cannot be timed.
    """
    from .timing.flywheel import log_row  # imported late, because predictions do not need it

    times = _times_us(family, configs, launch)
    for config, time_us in zip(configs, times, strict=True) if measures() else ():
        log_row(family, problem, config, time_us, device, timed="cold")
    return times


def _times_us(family: Measurable, configs: tuple[KernelConfig, ...], launch: Launch) -> list[float | None]:
    """Return the time of each config's launch in microseconds; None for one that cannot be timed."""
    times: dict[KernelConfig, float] = {}
    for config in configs:
        with suppress(Exception):  # a config that fails has no time
            launch(config)  # compiles and loads
            times[config] = timer_of(torch.cuda.current_device()).time(partial(launch, config)).time_us
    if len(times) < len(configs):
        warn_once(f"{family.name}: {len(configs) - len(times)} of {len(configs)} configs could not be timed")
    return [times.get(config) for config in configs]


def _can_wait() -> bool:
    """Return whether the host may wait for the device."""
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()

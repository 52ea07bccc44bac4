"""`choose`: the config that a call runs. A prediction never makes it fail."""

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

#: How many configs the mode `shortlist` benchmarks.
K = 8

Launch = Callable[[KernelConfig], Any]
# The winners of benchmarks, (family, bucket, configs, device, ranks): every process measures a bucket once. At its
# edges it has other configs, so that what one of its problems was agreed on does not answer for them all.
_measured: dict[tuple[str, Problem, tuple[KernelConfig, ...], DeviceSpec, int], KernelConfig] = {}


def choose(
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
    mode: Mode,
    launch: Launch,
) -> KernelConfig:
    """The config to run a problem with; the family's default where nothing can be predicted.

    `launch` runs one config on the call's own tensors and is called in mode `shortlist` only: there the `K` best are
    timed the first time that a problem of this bucket is met, though not while a CUDA graph is captured, when
    the device cannot be waited for, and in a job of several ranks only where `agree` is in force.
    """
    if mode is Mode.OFF:
        return family.default(problem, device)
    # Predicted for the bucket, so that one more number of rows costs microseconds, and checked for the problem.
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
    """The config that the caller gives, with the family's default for knobs that it does not name.

    Raises `ForetuneError`, with the reason, for a config that the family does not support there, or what is none.
    """
    if not isinstance(config, KernelConfig):
        raise ForetuneError(f"config must be a KernelConfig but is {shown(config)}")
    config = KernelConfig.from_json(family.default(problem, device).to_json() | config.to_json())
    reason = family.supports(config, problem, device) or wrong_knobs(family, config)
    if reason is not None:
        raise ForetuneError(f"this config cannot run {problem} on {device.name}: {reason} ({config})")
    return config


def _ranked(family: Measurable, problem: Problem, device: DeviceSpec, k: int) -> tuple[KernelConfig, ...]:
    """Return the `k` configs predicted to be fastest; none, with a warning, where nothing is predicted."""
    try:
        with collecting_later():  # the first time a bundle is read
            ranked = chooser_of(family, device).choose(problem, HowMany(k))
        if ranked.predicted:
            return ranked.configs
        reason = ranked.reason
    except Exception as error:  # noqa: BLE001 - no trouble of ours stops a call
        reason = f"{family.name}: no prediction ({type(error).__name__}: {error})"
    warn_once(reason, ": the family's default config runs")
    return ()


def _logged_times_us(
    family: Measurable, problem: Problem, device: DeviceSpec, configs: tuple[KernelConfig, ...], launch: Launch
) -> list[float | None]:
    """Return `_times_us`, and log them as rows to learn from where FORETUNE_LOG asks for them."""
    from .timing.flywheel import log_row  # which no prediction needs

    times = _times_us(family, configs, launch)
    for config, time_us in zip(configs, times, strict=True) if measures() else ():
        log_row(family, problem, config, time_us, device, timed="cold")
    return times


def _times_us(family: Measurable, configs: tuple[KernelConfig, ...], launch: Launch) -> list[float | None]:
    """Return what the launch of each config takes; None for one that cannot be timed."""
    times: dict[KernelConfig, float] = {}
    for config in configs:
        with suppress(Exception):  # a config that fails is one config less
            launch(config)  # compiles and loads
            times[config] = timer_of(torch.cuda.current_device()).time(partial(launch, config)).time_us
    if len(times) < len(configs):
        warn_once(f"{family.name}: {len(configs) - len(times)} of {len(configs)} configs could not be timed")
    return [times.get(config) for config in configs]


def _can_wait() -> bool:
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()

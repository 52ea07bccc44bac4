"""`choose`: the config that an op's call runs. A failed prediction never makes a call fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..datasets import DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem, not_empty, wrong_knobs
from ..datasets.errors import shown
from .arguments import Mode, harmless, is_pinned, warn_once
from .how_many import HowMany, predicted_us
from .launching.collector import collecting_later
from .launching.stub_driver import measures
from .shortlist import bundle_in_force, chooser_of
from .timing.timer import timer_of
from .tuning.ranks.agreement import agreed_choice, may_tune, scope

if TYPE_CHECKING:
    from .tuning.refine.refinement import Refinement

#: The number of configs that the mode `shortlist` benchmarks.
K = 8

Launch = Callable[[KernelConfig], Any]
# The winners of benchmarks by (family, bucket, configs, device, ranks): each process measures a bucket once. The key
# has the configs, because problems at a bucket's edge may support different ones.
_measured: dict[tuple[str, Problem, tuple[KernelConfig, ...], DeviceSpec, int], KernelConfig] = {}
# What is in the run's choice cache, by (family, bucket, device).
_recorded: dict[tuple[str, Problem, DeviceSpec], KernelConfig] = {}


def choose(
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
    mode: Mode,
    launch: Launch,
) -> KernelConfig:
    """Return the config to run a problem with; the family's default if nothing can be predicted.

    Problems whose sizes round to the same ones (`Family.at_call_time`) form a bucket and share a choice. In mode
    `shortlist`, the first call of a bucket times the few configs predicted to be fastest. While a CUDA graph is
    captured, when the host must not wait for the device, and in a job of several ranks without `agree`, nothing is
    timed, and the config predicted to be fastest runs. While a pin file is in force, its config runs, and nothing is
    predicted or timed. Otherwise, if FORETUNE_CACHE_DIR names a choice cache, the choice of each bucket is stored
    there.

    Args:
        family: The kernel's family.
        problem: The call's problem.
        device: The device that the call runs on.
        mode: How predictions are used. `REFINE` is the same as `PREDICT` here; see `refinement`.
        launch: Runs a config on the call's own tensors; used in mode `shortlist` only.

    Raises:
        PinError: The pin file in force does not cover the call.
    """
    if mode is Mode.OFF:
        return family.default(problem, device)
    # Predict for the bucket, so that another number of rows costs microseconds; check support for the problem itself.
    near = family.at_call_time(not_empty(family, problem))
    if is_pinned():
        from .pins import pinned_config  # imported late, because predictions do not need it

        reason = partial(_refusal, family, problem, device)
        if (config := pinned_config(family.name, family.source_hash, device, near, reason)) is not None:
            return config
        mode = Mode.PREDICT
    config = _choice(family, problem, near, device, mode, launch)
    _record(family, near, device, config)
    return config


def _choice(
    family: Measurable, problem: Problem, near: Problem, device: DeviceSpec, mode: Mode, launch: Launch
) -> KernelConfig:
    """Return the config for a problem, predicted or measured as `mode` says; the default one without a prediction.

    `near` is the problem with rounded sizes (`Family.at_call_time`) that predictions and measurements are made for.
    """
    is_timed = mode is Mode.SHORTLIST
    configs = tuple(_ranked(family, problem, near, device, K if is_timed else 1))
    if not configs:
        return family.default(problem, device)
    if not is_timed or len(configs) == 1:
        return configs[0]
    key = (family.name, near, configs, device, scope())
    if key not in _measured:
        if not (_can_wait() and may_tune()):
            return configs[0]
        time_them = partial(_logged_times_us, family, problem, device, configs, launch)
        best = agreed_choice(family.name, near, configs, time_them)
        _measured[key] = configs[best]
    return _measured[key]


def refinement(family: Measurable, problem: Problem, device: DeviceSpec) -> Refinement[KernelConfig] | None:
    """Return the `Refinement` that chooses the config of each call of this problem in mode `refine`.

    Problems whose sizes round to the same ones (`Family.at_call_time`) share it. Returns None if calls cannot be timed
    (without a GPU) or there are fewer than two configs to choose from; the caller then gets the config from `choose`.
    """
    from .pins import source_of  # imported late, because the other modes do not need these
    from .timing.flywheel import log_row
    from .tuning.cache.kernel_cache import ChoiceCache
    from .tuning.refine.calls import stopwatch
    from .tuning.refine.refinement import CANDIDATES, Refinement, Store, refinement_of

    if (watch := stopwatch()) is None:
        return None
    near = family.at_call_time(not_empty(family, problem))
    ranked = _ranked(family, problem, near, device, CANDIDATES)
    if len(ranked) < 2:
        return None
    configs = tuple(ranked)
    key = (family.name, near, configs, device, scope())
    store = Store(
        near,
        lambda: ChoiceCache.of(family.name, source_of(family.source_hash), device),
        {one: one for one in configs},
        lambda config, time_us: log_row(family, near, config, time_us, device, timed="refined"),
        lambda: bundle_in_force(None).digest,
    )
    return refinement_of(
        key,
        lambda: Refinement(
            family.name,
            near,
            configs,
            tuple(ranked.values()),
            watch=watch,
            store=store if measures() else None,
            predicted_us=predicted_us(family, near, device, configs[0]),
        ),
    )


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


def _record(family: Measurable, near: Problem, device: DeviceSpec, config: KernelConfig) -> None:
    """Store the config chosen for `near`, the problem with rounded sizes, so that `foretune pin` can read it.

    Does nothing unless FORETUNE_CACHE_DIR is set; a failure to store gives a warning.
    """
    key = (family.name, near, device)
    if not os.environ.get("FORETUNE_CACHE_DIR") or _recorded.get(key) == config or not measures():
        return
    _recorded[key] = config
    with harmless(f"{family.name}: its choices cannot be stored"):
        from .pins import source_of
        from .tuning.cache.kernel_cache import ChoiceCache

        ChoiceCache.of(family.name, source_of(family.source_hash), device).choose(near, "", config)


def _refusal(family: Measurable, problem: Problem, device: DeviceSpec, config: KernelConfig) -> str | None:
    """Return the reason why a config from a pin file cannot run a problem; None if it can."""
    return wrong_knobs(family, config) or family.supports(config, problem, device)


def _ranked(
    family: Measurable, problem: Problem, near: Problem, device: DeviceSpec, k: int
) -> dict[KernelConfig, float]:
    """Return the configs predicted to be fastest for a problem, best first, each with its predicted slowdown.

    The prediction is made for `near`, the problem with rounded sizes (`Family.at_call_time`). Of its `k` best configs,
    those that can run `problem` are returned. If none of them can, the prediction is made for `problem` itself. If
    nothing can be predicted, the function warns and returns {}.
    """
    for one in dict.fromkeys((near, not_empty(family, problem))):
        try:
            with collecting_later():  # the first call reads a bundle
                ranked = chooser_of(family, device).choose(one, HowMany(k))
            reason = "" if ranked.predicted else ranked.reason
        except Exception as error:  # noqa: BLE001 - a failed prediction never stops a call
            reason = f"{family.name}: no prediction ({type(error).__name__}: {error})"
        if reason:
            warn_once(reason, ": the family's default config runs")
            break
        slowdowns = zip(ranked.configs, ranked.predicted_slowdown, strict=True)
        if able := {config: slowdown for config, slowdown in slowdowns if not family.supports(config, problem, device)}:
            return able
    return {}


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
    """Return whether the host may wait for the device: there is a GPU, and no CUDA graph is being captured."""
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()

"""What a first call costs: `triton.autotune` over the full space against a predicted shortlist, from cold.

This is the README's measurement and the GPU half of `foretune quickstart`. Everything here is what a user would
write, on stock Triton.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, KernelConfig, Measurable, Problem
from ..prune import Pruner
from .timer import Timer

if TYPE_CHECKING:
    from ...model import Bundle


#: (family, inputs, configs, early_config_prune) -> (autotuner, call).
Autotuned = Callable[..., tuple[Any, Callable[[], Any]]]


@dataclass(frozen=True)
class FirstCall:
    """One way to choose a config, from an empty cache."""

    label: str
    declared: int  # configs in the autotuner's list
    benchmarked: int  # configs that it compiled and timed
    first_call_s: float  # from the call to the result on the device
    chosen: KernelConfig
    time_us: float  # the chosen config's kernel time afterwards, all ways interleaved


def compare_first_calls(
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
    bundle: Bundle,
    autotuned: Autotuned,
    *,
    ks: tuple[int, ...] = (1, 8),
    rounds: int = 5,
    on_start: Callable[[str], None] = lambda label: None,
) -> list[FirstCall]:
    """First-call seconds and the chosen kernel's time for each k, and for the full space last.

    `autotuned(family, inputs, configs, early_config_prune)` gives a new autotuner and a function that calls it.

    Each first call starts from an empty cache of its own, in memory and on disk. The kernel times are taken
    after that, in `rounds` interleaved rounds (the median), because clocks drift over minutes.
    """
    inputs = family.inputs(problem, device)
    space = [config for config in family.space(device) if family.supports(config, problem, device) is None]
    shortlists: dict[str, Callable[..., Any] | None] = {
        f"k={k}": Pruner(family, k=k, device=device, bundle=bundle) for k in ks
    }
    shortlists["full space"] = None
    tuned = []
    for label, pruner in shortlists.items():
        on_start(label)
        kernel, seconds = _first_call(autotuned, family, inputs, space, pruner)
        tuned.append((label, kernel, seconds))

    timer = Timer()
    chosen = [KernelConfig.from_triton(kernel.best_config) for _, kernel, _ in tuned]
    times: list[list[float]] = [[] for _ in tuned]
    for _ in range(rounds):
        for i, config in enumerate(chosen):
            times[i].append(timer.time(lambda config=config: family.launch(inputs, config)).time_us)  # type: ignore[misc]
    return [
        FirstCall(
            label=label,
            declared=len(kernel.configs),
            # Triton 3.8 and later don't benchmark a single candidate.
            benchmarked=len(getattr(kernel, "configs_timings", None) or [config]),
            first_call_s=seconds,
            chosen=config,
            time_us=statistics.median(samples),
        )
        for (label, kernel, seconds), config, samples in zip(tuned, chosen, times, strict=True)
    ]


def _first_call(
    autotuned: Autotuned,
    family: Measurable,
    inputs: Any,
    space: Sequence[KernelConfig],
    pruner: Callable[..., Any] | None,
) -> tuple[Any, float]:
    """The autotuned kernel after its first call, and how long that call took."""
    import torch
    import triton

    with TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        kernel, call = autotuned(family, inputs, [config.to_triton() for config in space], pruner)
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return kernel, time.perf_counter() - start

"""What a first call costs, from cold: `triton.autotune` over the whole space, over a predicted shortlist, and
`foretune.autotune` over the same.

This is the README's measurement, `foretune bench runtime`, and the GPU half of `foretune quickstart`. Everything here
is what a user would write.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, KernelConfig, Measurable, Problem
from ..datasets.console.tables import table
from .prune import Pruner
from .timing.timer import Timer

if TYPE_CHECKING:
    from ..model import Bundle


#: (configs, key) -> the decorator of a kernel.
Declare = Callable[..., Callable[[Any], Any]]
#: (family, inputs, configs, declare) -> (autotuner, call).
Autotuned = Callable[..., tuple[Any, Callable[[], Any]]]
WHOLE_SPACE = "triton.autotune, whole space"
_VARIABLE = "FORETUNE_CACHE_DIR"


@dataclass(frozen=True)
class FirstCall:
    """One way to choose a config, from an empty cache."""

    label: str
    declared: int  # configs in the autotuner's list
    benchmarked: int  # configs that it compiled and timed
    first_call_s: float  # from the call to the result on the device; the median where there were several
    chosen: KernelConfig
    time_us: float  # the chosen config's kernel time afterwards, all ways interleaved


@dataclass(frozen=True)
class FirstCalls:
    """The first calls of one problem on one device, each way; the whole space last, if it was waited for."""

    device: DeviceSpec
    problem: Problem
    ways: tuple[FirstCall, ...]

    def to_json(self) -> dict[str, Any]:
        ways = [asdict(way) | {"chosen": way.chosen.to_json()} for way in self.ways]
        return {"device": self.device.name, "problem": self.problem.to_json(), "first_call": ways}

    def __rich__(self) -> Any:
        whole = next((way for way in self.ways if way.label == WHOLE_SPACE), None)
        columns = ("label", "declared", "benchmarked", "first_call_s", "time_us")
        rows = [
            [way.label, way.declared, way.benchmarked, f"{way.first_call_s:.2f}", f"{way.time_us:.1f}"]
            + ([] if whole is None else [f"{whole.first_call_s / way.first_call_s:.0f}x"])
            for way in self.ways
        ]
        title = f"The first call from cold, {self.problem} on {self.device.name}"
        return table(title, columns if whole is None else (*columns, "sooner"), rows)


def compare_first_calls(
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
    bundle: Bundle | None,
    autotuned: Autotuned,
    *,
    ks: tuple[int, ...] = (1, 8),
    whole_space: bool = True,
    repeats: int = 1,
    rounds: int = 5,
    on_start: Callable[[str], None] = lambda label: None,
) -> FirstCalls:
    """First-call seconds and the chosen kernel's time for each k, by Triton's autotuner with a prune callback and by
    ours, `repeats` times in turn; and for the whole space, last and once, unless that is not to be waited for.

    `autotuned(family, inputs, configs, declare)` gives a new autotuner, declared as `declare(configs, key)`, and a
    function that calls it. `bundle` predicts (the shipped one if left out).

    Each first call starts from empty caches of its own, in memory and on disk. The kernel times are taken
    after that, in `rounds` interleaved rounds (the median), because clocks drift over minutes.
    """
    import triton

    from .tuning.autotuner import autotune

    inputs = family.inputs(problem, device)
    space = [config for config in family.space(device) if family.supports(config, problem, device) is None]
    ways: dict[str, Declare] = {}
    for k in ks:
        pruned_by = {"early_config_prune": Pruner(family, k=k, device=device, bundle=bundle)}
        ways[f"triton.autotune, k={k}"] = partial(triton.autotune, prune_configs_by=pruned_by)
        ways[f"foretune.autotune, k={k}"] = partial(autotune, family=family, k=k, device=device, bundle=bundle)
    plan = [*ways] * repeats
    if whole_space:
        ways[WHOLE_SPACE] = triton.autotune
        plan.append(WHOLE_SPACE)
    kernels: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    for label in plan:
        on_start(label)
        kernels[label], took_s = _first_call(autotuned, family, inputs, space, ways[label])
        seconds[label].append(took_s)

    timer = Timer()
    chosen = {label: KernelConfig.from_triton(kernel.best_config) for label, kernel in kernels.items()}
    times: dict[str, list[float]] = {label: [] for label in ways}
    for _ in range(rounds):
        for label, config in chosen.items():
            times[label].append(timer.time(partial(family.launch, inputs, config)).time_us)
    return FirstCalls(
        device,
        problem,
        tuple(
            FirstCall(
                label=label,
                declared=len(kernel.configs),
                # Triton 3.8 and later don't benchmark a single candidate.
                benchmarked=len(getattr(kernel, "configs_timings", None) or [chosen[label]]),
                first_call_s=statistics.median(seconds[label]),
                chosen=chosen[label],
                time_us=statistics.median(times[label]),
            )
            for label, kernel in kernels.items()
        ),
    )


def _first_call(
    autotuned: Autotuned, family: Measurable, inputs: Any, space: Sequence[KernelConfig], declare: Declare
) -> tuple[Any, float]:
    """The autotuned kernel after its first call, and how long that call took."""
    import torch
    import triton

    with TemporaryDirectory() as cache, triton.knobs.cache.scope(), _remembering_in(cache):
        triton.knobs.cache.dir = cache
        kernel, call = autotuned(family, inputs, [config.to_triton() for config in space], declare)
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return kernel, time.perf_counter() - start


@contextmanager
def _remembering_in(folder: str) -> Iterator[None]:
    """Where our own autotuner keeps times, and finds none."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before

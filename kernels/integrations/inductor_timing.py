"""What Inductor's choices are timed by while `foretune.use("inductor")` is on: our `Timer`.

Inductor's own benchmarker reads short kernels up to twice as long as they run, ATen's most of all: for 512 x 4096 x
4096 cuBLAS's 25 us as 56 (torch 2.11 on an H200, in the tables that Inductor logs under `tests/inductor_on_gpu.py`). So
it chooses others. `Timer`, which holds the device back until all launches are queued, read 25. What Inductor compares
with its choices, as kernels with a fused epilogue, is timed alike, so that all are on one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ...datasets import ForetuneError
from ...datasets.errors import reason_of
from ...runtime.arguments import warn_once
from ...runtime.timing.timer import Timer, timer_of

#: What callers say that does not ask for more than one time: how long to try, and that a time may decide at all.
_KNOWN = {"warmup", "rep", "is_vetted_benchmarking", "device_type"}


def timed_by_us(theirs: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """A `benchmark_gpu` for Inductor's class of benchmarkers: milliseconds. What is asked for in other ways, on other
    devices or in Inductor's deterministic mode, and a launch that waits for the device, are `theirs`."""

    @wraps(theirs)
    def benchmark_gpu(benchmarker: Any, launch: Callable[[], Any], *more: Any, **how: Any) -> Any:
        from torch._inductor import config

        on_cuda = str(how.get("device_type") or "cuda").startswith("cuda")
        is_known = not more and _KNOWN.issuperset(how) and on_cuda and not config.deterministic
        timer = _timer() if is_known and is_on() else None
        if timer is not None:
            try:
                return timer.time(launch).time_us / 1000
            except ForetuneError:
                pass
        return theirs(benchmarker, launch, *more, **how)

    return benchmark_gpu


def _timer() -> Timer | None:
    """That of the current device, if there is one: no trouble of ours fails a compile."""
    import torch

    try:
        return timer_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
    except Exception as error:  # noqa: BLE001
        warn_once(f"foretune.use('inductor'): no timer ({reason_of(error)})", ": Inductor's own times decide")
        return None

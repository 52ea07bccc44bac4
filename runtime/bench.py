"""The benchmarks behind `foretune bench predictions` and `foretune bench runtime`.

The first measures predictions in CPU time of one thread, so that other processes on the machine matter little. The
second measures kernels' first calls, from empty caches.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Family, KernelConfig, Measurable, Problem
from ..datasets.console import table
from .how_many import HowMany, Length
from .prune import Pruner
from .shortlist import Chooser, bundle_in_force, chooser_of
from .timing.timer import Timer

if TYPE_CHECKING:
    from ..model import Bundle

#: How many predictions of a known problem are timed together: one is as short as the clock's resolution.
_REPEATED = 1000
#: A program for a process of its own that predicts and prints the modules that it imported.
_PREDICTS = """
import sys
before = set(sys.modules)
import foretune
problem = foretune.Problem.of("matmul", m=1024, n=4096, k=4096, batch=1)
foretune.shortlist("matmul", problem, "h200", k=1)
print(*(name for name in sys.modules if name not in before))
"""
#: A program that prints the CPU milliseconds of importing the modules in its arguments.
_IMPORTS = """
import importlib, sys, time
start = time.process_time()
for name in sys.argv[1:]:
    importlib.import_module(name)
print((time.process_time() - start) * 1e3)
"""


@dataclass(frozen=True)
class PredictionTimes:
    """CPU times of predictions for one family.

    `first_ms` is the time of the process's first prediction. The other times are pairs (minimum, median): to predict a
    new problem's best config (`best_ms`) and its shortlist (`auto_ms`), and to repeat a known problem (`repeat_us`).
    """

    family: str
    configs: int
    first_ms: float  # of the process's first prediction, which lays out the space and builds tables
    best_ms: tuple[float, float]  # of the best config of a new problem
    auto_ms: tuple[float, float]  # of a shortlist of a new problem with k="auto"
    repeat_us: tuple[float, float]  # of the best config of a known problem

    @property
    def times(self) -> tuple[tuple[float, float], ...]:
        """The three (minimum, median) pairs in the order of the table's columns: `best_ms`, `auto_ms`, `repeat_us`."""
        return self.best_ms, self.auto_ms, self.repeat_us


@dataclass(frozen=True)
class Predictions:
    """The results of `foretune bench predictions`: the times of each family's predictions and of the imports."""

    device: str
    import_ms: float  # of importing what predictions need, including NumPy; the least of a few processes
    numpy_ms: float  # of importing NumPy alone
    families: tuple[PredictionTimes, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune bench predictions --json` prints them."""
        return {
            "device": self.device,
            "import_ms": round(self.import_ms, 1),
            "numpy_ms": round(self.numpy_ms, 1),
            "families": {
                one.family: {
                    "configs": one.configs,
                    "first_ms": round(one.first_ms, 1),
                    **{
                        name: {"least": round(least, 3), "median": round(median, 3)}
                        for name, (least, median) in zip(("best_ms", "auto_ms", "repeat_us"), one.times, strict=True)
                    },
                }
                for one in self.families
            },
        }

    def __rich__(self) -> Any:
        rows = [
            (one.family, one.configs, f"{one.first_ms:.0f}", *("{:.2f} - {:.2f}".format(*times) for times in one.times))
            for one in self.families
        ]
        return table(
            f"Predictions for {self.device}, in CPU time: least - median",
            ("family", "configs", "first, ms", "best config, ms", 'k="auto", ms', "known problem, us"),
            rows,
            below=[f"Imports take {self.import_ms:.0f} ms, {self.numpy_ms:.0f} of them for NumPy."],
        )


def time_predictions(
    families: Sequence[Family], device: DeviceSpec, bundle: Bundle | None = None, *, repeats: int = 200
) -> Predictions:
    """Measure how long predictions take for each family, as the minimum and median of `repeats` new problems.

    `bundle` predicts, the shipped one if None. The result's `first_ms`, the time of the first prediction of all, is
    meaningful only for families that this process has not predicted before. Raises `BundleError` for a family that is
    not in the bundle.

    >>> time_predictions([family], DeviceSpec.named("h200"))  # doctest: +SKIP
    """
    opened = bundle_in_force(bundle)
    for family in families:
        opened.ranker(family.name)  # raises if the bundle lacks it
    modules = _printed(_PREDICTS).split()
    imports, of_numpy = (min(float(_printed(_IMPORTS, *names)) for _ in range(5)) for names in (modules, ["numpy"]))
    times = []
    for family in families:
        start = time.thread_time()
        choose = partial(chooser_of(family, device, None, bundle).choose, _problem(family, bundle, 0), HowMany(1))
        choose()
        first_ms = (time.thread_time() - start) * 1e3
        times.append(
            PredictionTimes(
                family=family.name,
                configs=len(family.space(device)),
                first_ms=first_ms,
                best_ms=prediction_ms(family, device, bundle, repeats=repeats),
                auto_ms=prediction_ms(family, device, bundle, k="auto", repeats=repeats),
                repeat_us=_least_and_median([_spent_ms(choose, times=_REPEATED) * 1e3 for _ in range(repeats // 10)]),
            )
        )
    return Predictions(device.name, imports, of_numpy, tuple(times))


def prediction_ms(
    family: Family, device: DeviceSpec, bundle: Bundle | None = None, *, k: Length = 1, repeats: int = 200
) -> tuple[float, float]:
    """Return the minimum and median CPU time, in milliseconds, of `repeats` shortlists over the family's full space.

    Each shortlist is for another problem, so that none is returned from memory. A first one, which builds tables for
    the later ones, is not counted.

    >>> prediction_ms(family, DeviceSpec.named("h200"))  # doctest: +SKIP
    (1.8, 2.1)
    """
    chooser, many = Chooser(family, device, None, bundle), HowMany.of(family, k)
    problems = [_problem(family, bundle, place) for place in range(repeats + 1)]
    return _least_and_median([_spent_ms(partial(chooser.choose, problem, many)) for problem in problems][1:])


def _problem(family: Family, bundle: Bundle | None, place: int) -> Problem:
    """Return a problem near the middle of the training domain; each `place`, from 0 on, gives a different one.

    They differ by steps of 16 in the dimension with the largest range, which is not rounded, so that each is predicted
    anew.
    """
    domain = bundle_in_force(bundle).trained[family.name].domain
    sizes = {dim: round(math.sqrt(low * high) / 16 + 1) * 16 for dim, (low, high) in domain.sizes.items()}
    free = (dim for dim in family.dims if dim not in family.bucketed)
    varied = max(
        free, key=lambda dim: (family.largest.get(dim, math.inf), sizes[dim])
    )  # the dimension with the largest range
    sizes[varied] += 16 * place
    return Problem(family.name, tuple(sorted(sizes.items())), family.dtypes[0])


def _printed(program: str, *arguments: str) -> str:
    """Run a Python program in a new process, with these arguments, and return what it prints."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _spent_ms(call: Callable[[], object], times: int = 1) -> float:
    """Return the CPU milliseconds that one call takes in this thread, as the mean of `times` calls."""
    start = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - start) * 1e3 / times


def _least_and_median(values: Iterable[float]) -> tuple[float, float]:
    """Return the minimum and the median of the values."""
    known = list(values)
    return min(known), statistics.median_high(known)


#: (configs, key) -> a decorator of kernels.
Declare = Callable[..., Callable[[Any], Any]]
#: (family, inputs, configs, declare) -> (autotuner, call).
Autotuned = Callable[..., tuple[Any, Callable[[], Any]]]
#: The label of tuning without predictions.
WHOLE_SPACE = "triton.autotune, whole space"
_VARIABLE = "FORETUNE_CACHE_DIR"


@dataclass(frozen=True)
class FirstCall:
    """The duration of a kernel's first call with one way of choosing its config, and the config that was chosen.

    `first_call_s` has the seconds of the call, and `time_us` the microseconds of the `chosen` config's kernel.
    """

    label: str
    declared: int  # configs in the autotuner's list
    benchmarked: int  # configs that it compiled and timed
    first_call_s: float  # from the call to the result on the device; the median of several
    chosen: KernelConfig
    time_us: float  # the chosen config's kernel time, measured afterwards with all ways interleaved


@dataclass(frozen=True)
class FirstCalls:
    """The measured first calls of one problem on one device: one for each way of choosing a config.

    The search of the full space is last, if it was measured.
    """

    device: DeviceSpec
    problem: Problem
    ways: tuple[FirstCall, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune bench runtime --json` prints them."""
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
    """Measure how long a kernel's first call takes and how fast its config is, with shortlists and the full space.

    For each k, Triton's autotuner with a prune callback and `foretune.autotune` are measured in turn, `repeats` times;
    the full space is measured last and once. Each first call starts from its own empty caches, in memory and on disk.
    The kernel times are taken afterwards as medians over interleaved rounds, because clocks drift over minutes.

    Args:
        family: The kernel's family.
        problem: The problem.
        device: The current device.
        bundle: The bundle that predicts; the shipped one if None.
        autotuned: `autotuned(family, inputs, configs, declare)` returns a new autotuner, which it declares with
            `declare(configs, key)`, and a function that calls it.
        ks: The lengths of shortlists.
        whole_space: Whether to measure the full space too, which takes minutes.
        repeats: How often each shortlist is measured.
        rounds: The number of interleaved rounds of kernel times.
        on_start: Called with the label of each first call before it.
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
    """Create an autotuner of the configs in `space` with empty caches, and return it and the seconds of its first call.

    `autotuned` and `declare` are as for `compare_first_calls`.
    """
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
    """Use the empty folder `folder` as the cache of Foretune's choices while the block runs."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before

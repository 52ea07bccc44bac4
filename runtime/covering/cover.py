"""`Cover`: the few configs that together lose least over a range of sizes, and a table that selects one by size."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem, check_problem_of
from ...datasets.console import InNotebooks, table
from ...datasets.errors import check_between, check_integer, shown
from ...datasets.problem import MOST_SIZE, on_grid
from ..arguments import configs_of, family_of
from ..launching.stub_driver import device_here
from ..shortlist import bundle_of
from .dispatch import Dispatch, best_dispatch, fewest_dispatch
from .losses import SizeLosses, at_size, measured_losses, predicted_losses

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset
    from ...model import Bundle

#: Defines the rows and columns of a cover's table.
_CAPTION = (
    "Rows: ranges of sizes. Columns: the largest slowdown of the range's config against the best config of each "
    "size, and the values of its knobs."
)
#: The most configs and ranges of a cover.
MOST_CONFIGS, MOST_RANGES = 16, 256
#: The number of configs if neither `k` nor `within` is given.
CONFIGS = 3
#: The number of ranges if `ranges` and `within` are not given: Dynamo compiles a function at most 8 times
#: (`torch._dynamo.config.recompile_limit`), once for each range of a size.
RANGES = 8
#: The largest value of `within`.
_MOST_LOSS = 100.0
#: The evenly spaced sizes of a range that are looked at, in addition to those evenly spaced in their logarithm.
_EVEN = 64
#: The most observed sizes that `sizes` may have.
MOST_SIZES = 1 << 20
#: Ranges with at most this many sizes are checked at every size with `Family.supports`.
_MOST_CHECKED = 8192


#: A function from losses and weights to a dispatch, as in dispatch.py.
Choose = Callable[[np.ndarray, np.ndarray], Dispatch]


@dataclass(frozen=True, repr=False)
class Cover(InNotebooks):
    """A dispatch table over the sizes of one dimension. Made by `foretune.cover`.

    `config_for(size)` returns a config in a few comparisons of Python integers. The host knows the size, so nothing
    waits for the device, and a CUDA graph is captured with the config of its size. In a function under `torch.compile`,
    a dynamic size stays dynamic: the comparisons become guards, and the function is compiled once for each range that
    occurs. A size outside of the covered range gets the config of the nearest covered size.

    `choices` has the index in `configs` of each range's config, `crossovers` the first size of each range but the
    first, and `losses` the loss against the best config at each of `sizes` (0.02 = 2 %).

    >>> small, large = (KernelConfig.of(BLOCK_M=block) for block in (16, 128))
    >>> problem = Problem.of("linear", m=8, n=4096, k=4096)
    >>> cover = Cover(problem, "m", (small, large), (65,), (0, 1), (8, 512), (0.0, 0.01), "NVIDIA H200", "an example")
    >>> [cover.config_for(m)["BLOCK_M"] for m in (1, 64, 65, 4096)]
    [16, 16, 128, 128]
    >>> cover.worst_loss
    0.01
    """

    problem: Problem  # at the first size
    dynamic: str  # the dimension
    configs: tuple[KernelConfig, ...]  # (n,) without duplicates
    crossovers: tuple[int, ...]  # (n_ranges - 1,) the first size of each range except the first, ascending
    choices: tuple[int, ...]  # (n_ranges,) the index in `configs` of each range's config
    sizes: tuple[int, ...]  # (n_sizes,) the sizes that losses are known for
    losses: tuple[float, ...]  # (n_sizes,) the loss against the best config of each size: 0.02 = 2 %
    device: str
    reason: str  # the source of the losses

    def __repr__(self) -> str:
        count = f"{len(self.configs)} config{'s' if len(self.configs) > 1 else ''}"
        span, lost = f"{self.dynamic} {self.sizes[0]}-{self.sizes[-1]}", f"{100 * self.worst_loss:.1f} %"
        return f"<Cover of {self.problem.family}: {count} for {span} on {self.device}, worst loss {lost}>"

    def index_for(self, size: int) -> int:
        """Return the index in `configs` of a size's config. Raises `ForetuneError` for anything but an integer."""
        if type(size) is not int:
            size = _checked_size(size)
        for crossover, choice in zip(self.crossovers, self.choices, strict=False):
            if size < crossover:
                return choice
        return self.choices[-1]

    def config_for(self, size: int) -> KernelConfig:
        """Return the config for a size. Raises `ForetuneError` for anything but an integer."""
        return self.configs[self.index_for(size)]

    @property
    def mean_loss(self) -> float:
        """The mean loss over `sizes`: the geometric mean of the slowdowns, minus 1."""
        return math.expm1(statistics.fmean(map(math.log1p, self.losses)))

    @property
    def worst_loss(self) -> float:
        """The largest loss over `sizes`."""
        return max(self.losses)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune cover --json` prints them."""
        return {
            "problem": self.problem.to_json(),
            "dynamic": self.dynamic,
            "configs": [config.to_json() for config in self.configs],
            "crossovers": list(self.crossovers),
            "choices": list(self.choices),
            "sizes": list(self.sizes),
            "losses": [round(loss, 4) for loss in self.losses],
            "mean_loss": round(self.mean_loss, 4),
            "worst_loss": round(self.worst_loss, 4),
            "device": self.device,
            "reason": self.reason,
        }

    def __rich__(self) -> Any:
        listed = [config.to_json() for config in self.configs]
        knobs = [knob for knob in dict.fromkeys(knob for config in listed for knob in config) if knob != "num_ctas"]
        starts = (self.sizes[0], *self.crossovers)
        ends = (*(crossover - 1 for crossover in self.crossovers), self.sizes[-1])
        rows = []
        for start, end, choice in zip(starts, ends, self.choices, strict=True):
            lost = [loss for size, loss in zip(self.sizes, self.losses, strict=True) if start <= size <= end]
            rows.append([f"{start}-{end}", f"{100 * max(lost):.1f} %", *(listed[choice].get(k, "") for k in knobs)])
        worst = self.sizes[self.losses.index(self.worst_loss)]
        return table(
            f"{len(self.configs)} config{'s' if len(self.configs) > 1 else ''} for {self.dynamic} on {self.device}",
            (self.dynamic, "loses at most", *knobs),
            rows,
            below=[
                f"Against the best config of each of {len(self.sizes)} sizes: {100 * self.mean_loss:.1f} % in geometric"
                f" mean, {100 * self.worst_loss:.1f} % at worst ({self.dynamic}={worst}); {self.reason}",
                _CAPTION,
            ],
            once=knobs,
        )


def make_cover(
    family: Family,
    problem: Problem,
    dynamic: str,
    span: Sequence[int],
    k: int | None,
    device: DeviceSpec | Path | str,
    *,
    within: float | None = None,
    ranges: int | None = None,
    sizes: Iterable[int] | None = None,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | Path | str | None = None,
    measure: bool = False,
) -> Cover:
    """Choose a few configs, and which of them runs at each size of a dimension that is known only at run time.

    Times are predicted, or measured on this machine with `measure`.

    `foretune.cover` is this function for a family that may also be given by name, and has an example.

    The cover minimizes the mean logarithm of the slowdown against the best config of each size. It may have more ranges
    than configs, if a config is best in several ranges; each range must reduce the sum of log times by at least 0.01. A
    size between two of `sizes` gets the config of the larger one, because tiles are rounded up. The family supports the
    config of every size (in spans of more than 8,192 sizes: of every size in `sizes`).

    Args:
        family: The kernel's family.
        problem: The problem; its size of the dimension `dynamic` does not matter.
        dynamic: The dimension whose size is only known at run time.
        span: The smallest and the largest size.
        k: The number of configs; 3 if None and without `within`.
        device: A spec, the name of a shipped one, or a spec's JSON file.
        within: Instead of `k`: as few configs as lose at most this at any size (0.02 for 2 %), up to 16.
        ranges: The most ranges; 8 if None, or with `within` as many as needed.
        sizes: The sizes to look at; a size that occurs several times has that weight. If None, 64 evenly spaced ones
            and those that calls are rounded to (`Problem.rounded`).
        configs: The configs to choose from; the family's space on the device if None.
        bundle: The bundle that predicts, or its folder; the shipped one if None.
        measure: Time the three configs predicted to be best at each size, at all sizes, on the current device, which
            must be `device`. Configs are chosen by some timing passes, and losses are those of other passes.

    Raises:
        ForetuneError: An argument is not one of these, nothing is predicted, no `k` configs can run all sizes, or no
            timed config ran at a size.
    """
    family, spec = family_of(family), DeviceSpec.find(device)
    low, high = _checked(family, problem, dynamic, span)
    choose = _chooser(k, within, ranges)
    counts = Counter(_sizes(low, high) if sizes is None else _given_sizes(sizes, low, high))
    space = configs_of(family, spec, configs)
    kernel = _measurable_here(family, spec) if measure else None
    losses = predicted_losses(family, problem, dynamic, sorted(counts), spec, space, bundle_of(bundle))
    if kernel is not None:
        from .losses import timed_losses

        losses = timed_losses(kernel, problem, dynamic, losses, spec)
    return _dispatched(family, problem, dynamic, (low, high), losses, counts, choose, spec)


def measured_cover(
    family: Family,
    problem: Problem,
    dynamic: str,
    span: Sequence[int],
    k: int | None,
    device: DeviceSpec | Path | str,
    data: Dataset,
    *,
    within: float | None = None,
    ranges: int | None = None,
) -> Cover:
    """Return the cover chosen by a dataset's times of the problem on this device, at sizes of `dynamic` within `span`.

    Configs are chosen on the first timing pass, and losses are those of the second. The arguments are as for
    `make_cover`. Raises `ForetuneError` as that function does, and if fewer than two sizes were measured.
    """
    family, spec = family_of(family), DeviceSpec.find(device)
    low, high = _checked(family, problem, dynamic, span)
    choose = _chooser(k, within, ranges)
    losses = measured_losses(family, problem, dynamic, low, high, spec, data)
    return _dispatched(family, problem, dynamic, (low, high), losses, Counter(losses.sizes), choose, spec)


def _dispatched(
    family: Family,
    problem: Problem,
    dynamic: str,
    span: tuple[int, int],
    losses: SizeLosses,
    counts: Counter[int],
    choose: Choose,
    device: DeviceSpec,
) -> Cover:
    """Return the `Cover` of a range of sizes: `choose` it again until each config supports all sizes that it runs for.

    `span` is the smallest and the largest size of the dimension `dynamic`; `counts` has the weight of each size.
    """
    first = losses.first.copy()
    weights = np.array([counts[size] for size in losses.sizes], dtype=np.float64)
    rows = np.arange(len(losses.sizes))
    while True:
        found = choose(first, weights)
        ends = (*found.starts[1:], len(rows))
        path = found.path(len(rows))
        if not np.isfinite(first[rows, path]).all():
            raise ForetuneError(
                f"no cover of {family.name} with so few configs and ranges can run all sizes of {dynamic} from "
                f"{span[0]}: allow more configs or ranges"
            )
        starts = [span[0], *(losses.sizes[start - 1] + 1 for start in found.starts[1:])]
        lasts = [*(start - 1 for start in starts[1:]), span[1]]
        refused = False
        for row, end, column, start, last in zip(found.starts, ends, found.columns, starts, lasts, strict=True):
            checked = range(start, last + 1) if span[1] - span[0] < _MOST_CHECKED else losses.sizes[row:end]
            config = losses.configs[column]
            for size in checked:
                if family.supports(config, at_size(problem, dynamic, size), device) is not None:
                    first[row:end, column], refused = np.inf, True
                    break
        if not refused:
            break
    used = tuple(dict.fromkeys(found.columns))
    return Cover(
        problem=at_size(problem, dynamic, span[0]),
        dynamic=dynamic,
        configs=tuple(losses.configs[column] for column in used),
        crossovers=tuple(starts[1:]),
        choices=tuple(used.index(column) for column in found.columns),
        sizes=losses.sizes,
        losses=tuple(np.expm1(losses.second[rows, path]).tolist()),
        device=device.name,
        reason=losses.reason,
    )


def _measurable_here(family: Family, device: DeviceSpec) -> Measurable:
    """Return the family if it can be timed on this device. Raises `ForetuneError` if not."""
    if not isinstance(family, Measurable):
        raise ForetuneError(f"{family.name} cannot be timed: measure=True needs a Measurable family")
    try:
        here = device_here()
    except ForetuneError as error:
        raise ForetuneError(f"measure=True needs a GPU in this machine: {error}") from None
    if device.name != here.name:
        raise ForetuneError(f"measure=True times on the current device, {here.name}, but device is {device.name}")
    return family


def _checked_size(size: Any) -> int:
    """Return a size that is not an `int`: PyTorch's `SymInt` unchanged, other integers as an `int`.

    Raises `ForetuneError` for any other value.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(size, torch.SymInt):
        return size  # type: ignore[no-any-return]
    if isinstance(size, bool) or not isinstance(size, Integral):
        raise ForetuneError(f"size must be an integer but is {shown(size)} ({type(size).__name__})")
    return int(size)


def _chooser(k: Any, within: Any, ranges: Any) -> Choose:
    """Check `k`, `within` and `ranges` of `make_cover`, and return the function that chooses a cover's configs.

    That function takes losses and weights and returns a `Dispatch`: `fewest_dispatch` with `within`, else
    `best_dispatch`.
    """
    if k is not None and within is not None:
        raise ForetuneError(f"k and within exclude each other but are {k} and {within}")
    if ranges is None:
        ranges = RANGES if within is None else MOST_RANGES
    ranges = check_integer("ranges", ranges, 1, MOST_RANGES)
    if within is not None:
        check_between("within", within, 0.0, _MOST_LOSS)
        return partial(fewest_dispatch, most=math.log1p(within), k=MOST_CONFIGS, ranges=ranges)
    k = check_integer("k, the number of configs,", CONFIGS if k is None else k, 1, MOST_CONFIGS)
    return partial(best_dispatch, k=k, ranges=ranges)


def _checked(family: Family, problem: Problem, dynamic: str, span: Any) -> tuple[int, int]:
    """Check the arguments of a cover, and return the smallest and largest size; `ForetuneError` if invalid."""
    # The problem's own size of the dynamic dimension does not matter.
    check_problem_of(family, at_size(problem, dynamic, 1) if isinstance(problem, Problem) else problem)
    if not isinstance(dynamic, str) or dynamic not in family.dims:
        raise ForetuneError(
            f"dynamic must be a dimension of {family.name}, one of {', '.join(family.dims)}, but is {shown(dynamic)}"
        )
    if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2:
        raise ForetuneError(f"range must be (smallest, largest) size but is {shown(span)}")
    most = family.largest.get(dynamic, MOST_SIZE)
    low = check_integer("the smallest size", span[0], 1, most)
    return low, check_integer("the largest size", span[1], low, most)


def _sizes(low: int, high: int) -> set[int]:
    """Return a cover's default sizes from `low` to `high`: evenly spaced ones, and those that calls are rounded to."""
    sizes, size = {*np.rint(np.linspace(low, high, _EVEN)).astype(int).tolist()}, on_grid(low)
    while size < high:
        sizes.add(size)
        size = on_grid(size + 1)
    return sizes


def _given_sizes(sizes: Iterable[int], low: int, high: int) -> list[int]:
    """Return the caller's sizes as a list; raise `ForetuneError` unless all are integers from `low` to `high`."""
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise ForetuneError(f"sizes must be a list of sizes but is {shown(sizes)}")
    given = list(islice(sizes, MOST_SIZES + 1))  # an iterator may never end
    if not given or len(given) > MOST_SIZES:
        count = f"more than {MOST_SIZES}" if given else "none"
        raise ForetuneError(f"sizes must be a list of sizes, 1 to {MOST_SIZES} of them, but has {count}")
    return [check_integer("each of sizes", size, low, high) for size in given]

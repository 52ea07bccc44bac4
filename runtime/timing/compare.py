"""How fast a family's kernel is next to what people have, its contenders, and next to the card's own limits.

Every figure is kernel time, cold and clean L2 (a goal may be a share of the read bandwidth, and what else must be
written back takes its share of that), with all contenders of a problem interleaved in one run. Which problems, which
contenders and which goals is the family's business: see `Comparison`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem
from ...datasets.console import table
from ...datasets.errors import reason_of, shown, warn
from ...datasets.family import compute_us
from ...model.rows import supported
from ...model.training_set import is_exhaustive
from ..shortlist import make_shortlist
from .timer import Timer

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset
    from ...model import Bundle

ROUNDS, SAMPLES = 5, 3
#: Of the configs that a dataset measured, the first so many compete for "best": its argmin alone has luck in it.
FINALISTS = 2
#: The fastest config of each problem, where a dataset has measured it.
BestConfigs = Mapping[Problem, Sequence[KernelConfig]]


@dataclass(frozen=True)
class Row:
    """One problem of a comparison; times in microseconds."""

    name: str
    family: str
    problem: Problem
    best_us: float | None  # with the best config of the dataset's exhaustive search, where there is one
    predicted_us: float  # with the bundle's first choice, from what the host knows
    others_us: Mapping[str, float]  # by contender
    compute_us: float  # FLOPs at the matrix rate for the dtype
    memory_us: float  # bytes at the measured read bandwidth
    config: KernelConfig

    def __str__(self) -> str:
        times = {"predicted": self.predicted_us, "best": self.best_us, **self.others_us}
        return f"{self.family} {self.name}: " + ", ".join(f"{name} {_us(us)} us" for name, us in times.items() if us)

    @property
    def ours_us(self) -> float:
        """With the best config, where it is known."""
        return self.best_us or self.predicted_us

    @property
    def roofline_us(self) -> float:
        return max(self.compute_us, self.memory_us)

    def to_json(self) -> dict[str, Any]:
        """As `foretune bench kernels --json` prints it: a key NAME_us for each contender."""
        return {
            "name": self.name,
            "family": self.family,
            "problem": self.problem.to_json(),
            "best_us": self.best_us,
            "predicted_us": self.predicted_us,
            **{f"{name}_us": us for name, us in self.others_us.items()},
            "roofline_us": self.roofline_us,
            "config": self.config.to_json(),
        }


@dataclass(frozen=True)
class Goal:
    """One goal and what was reached, over the rows that it is about."""

    goal: str
    aim: str
    figure: str
    met: bool
    rows: int
    worst: str  # the row that is furthest from it


@dataclass(frozen=True)
class LaunchPath:
    """Host time of one hot call, in microseconds, without waiting for the GPU."""

    op: str  # what is called
    op_us: float  # of the op: the choice and all that it launches
    bare_us: float  # kernel[grid](...) alone

    @property
    def ratio(self) -> float:
        return self.op_us / self.bare_us

    @classmethod
    def timed(cls, name: str, op: Callable[[], Any], bare: Callable[[], Any], calls: int = 200) -> LaunchPath:
        """Times an op of this name and a bare launch of its kernel in interleaved turns, without gradients, on work
        that keeps the GPU ahead of the host."""
        import torch

        figures: dict[Callable[[], Any], list[float]] = {bare: [], op: []}
        with torch.no_grad():
            for _ in range(ROUNDS + 1):  # the first round warms up
                for call, seconds in figures.items():
                    torch.cuda.synchronize()
                    for _ in range(calls):
                        began = time.perf_counter()
                        call()
                        seconds.append(time.perf_counter() - began)
        bare_us, op_us = (1e6 * statistics.median(figures[call][calls:]) for call in (bare, op))
        return cls(name, op_us, bare_us)


class Comparison(Protocol):
    """What comparing a family needs beside the family: `contenders.py` in its folder has one."""

    #: The contenders that there may be, the quickest to be ready first; not every problem has all of them.
    others: tuple[str, ...]

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """The problems to compare a family on, by name."""

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Any, device: DeviceSpec, best: BestConfigs
    ) -> Mapping[str, Callable[[], Any]]:
        """Functions that queue the same work, or a part of it, by name; on the inputs that our kernel gets. What takes
        long to be ready, as compiling does, waits for the first call, which is not timed."""

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """What was aimed at, and reached."""

    def launch_path(self, device: DeviceSpec) -> LaunchPath | None:
        """The host's time of a hot call of the op; None where there is none."""


@dataclass(frozen=True)
class Compared:
    """What `foretune bench kernels` shows."""

    device: DeviceSpec
    rows: tuple[Row, ...]
    goals: tuple[Goal, ...]
    launch_paths: tuple[LaunchPath, ...]
    left_out: int = 0  # problems that there was no time for

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "launch_paths": [asdict(path) | {"ratio": path.ratio} for path in self.launch_paths],
            "goals": [asdict(goal) for goal in self.goals],
            "left_out": self.left_out,
        }

    def __rich__(self) -> Any:
        from rich.console import Group

        labels = list(dict.fromkeys(label for row in self.rows for label in row.others_us))
        times = [
            [
                row.family,
                row.name,
                *map(_us, (row.best_us, row.predicted_us, *map(row.others_us.get, labels), row.roofline_us)),
            ]
            for row in self.rows
        ]
        columns = ("family", "problem", "best", "predicted", *labels, "roofline")
        goals = [[g.goal, g.aim, g.figure, "yes" if g.met else "NO", g.worst] for g in self.goals]
        return Group(
            table(f"Kernel time on {self.device.name}, us", columns, times),
            table("Goals", ("goal", "aim", "reached", "met", "worst"), goals),
            *(
                f"A hot call of {path.op} takes {path.op_us:.1f} us of the host, a bare launch of its kernel "
                f"{path.bare_us:.1f} us: {path.ratio:.2f}x"
                for path in self.launch_paths
            ),
            *([f"Problems that there was no time for: {self.left_out}"] if self.left_out else []),
        )


def compare_kernels(
    comparisons: Mapping[Measurable, Comparison],
    device: DeviceSpec,
    dataset: Dataset | None,
    bundle: Bundle | None,
    *,
    only: str = "",
    against: Sequence[str] = (),
    budget_s: float | None = None,
    compile_ahead: Callable[[Measurable, Sequence[tuple[KernelConfig, Problem]], DeviceSpec], None] | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Compared:
    """Measures the problems whose name contains `only` of each family's suite on the current device, which should have
    measured rates; next to the contenders of these names, or to all. `compile_ahead` compiles what will be launched, on
    all cores. No problem is begun after `budget_s` seconds. Raises `ForetuneError` for a contender that no family
    has."""
    known = dict.fromkeys(name for comparison in comparisons.values() for name in comparison.others)
    if unknown := [name for name in against if name not in known]:
        raise ForetuneError(f"against must be one of {', '.join(known)} but is {shown(unknown[0])}")
    timer, left_out = Timer(clean=True), 0
    end = math.inf if budget_s is None else time.monotonic() + budget_s
    goals: list[Goal] = []
    paths: list[LaunchPath] = []
    judged: dict[Comparison, list[Row]] = {}  # families may share a comparison
    for family, comparison in comparisons.items():
        rows = judged.setdefault(comparison, [])
        best = dict(_best_configs(family, dataset, device))
        cases = {name: case.problem for name, case in comparison.suite(family).items() if only in name}
        chosen = {name: _chosen(family, problem, device, bundle, best) for name, problem in cases.items()}
        if compile_ahead is not None:
            pairs = [(config, problem) for name, problem in cases.items() for config in chosen[name]]
            compile_ahead(family, list(dict.fromkeys(pairs)), device)
        for name, problem in cases.items():
            if time.monotonic() > end:
                left_out += 1
                continue
            rows.append(_row(name, comparison, family, problem, chosen[name], best, device, timer, against))
            on_row(rows[-1])
    for comparison, rows in judged.items():
        goals += comparison.goals(rows)
        if (path := comparison.launch_path(device)) is not None:
            paths.append(path)
    everything = tuple(row for rows in judged.values() for row in rows)
    return Compared(device, everything, tuple(goals), tuple(paths), left_out)


def time_side_by_side(
    launches: Mapping[str, Callable[[], Any]], timer: Timer, *, rounds: int = ROUNDS, samples: int = SAMPLES
) -> dict[str, float]:
    """The median time of each launch in microseconds, all of them in turn, `rounds` times.

    >>> from types import SimpleNamespace
    >>> fake = SimpleNamespace(sample=lambda launch, samples: [launch()] * samples)
    >>> time_side_by_side({"ours": lambda: 2.0, "theirs": lambda: 3.0}, fake)
    {'ours': 2.0, 'theirs': 3.0}
    """
    times: dict[str, list[float]] = {label: [] for label in launches}
    for _ in range(rounds):
        for label, launch in launches.items():
            times[label] += timer.sample(launch, samples)
    return {label: statistics.median(sampled) for label, sampled in times.items()}


def judge_least(
    goal: str, rows: Sequence[Row], ratios: Sequence[float], each: float, mean: float | None = None
) -> list[Goal]:
    """The goal that every ratio is at least `each` and their geometric mean at least `mean`; none without rows."""
    return _judge(goal, rows, ratios, ">=", each, mean, min)


def judge_most(goal: str, rows: Sequence[Row], ratios: Sequence[float], each: float) -> list[Goal]:
    """The goal that no ratio is more than `each`; none without rows."""
    return _judge(goal, rows, ratios, "<=", each, None, max)


def _judge(
    goal: str,
    rows: Sequence[Row],
    ratios: Sequence[float],
    sign: str,
    each: float,
    mean: float | None,
    worst_of: Callable[[Sequence[float]], float],
) -> list[Goal]:
    if not rows:
        return []
    geomean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    worst = worst_of(ratios)
    met = (worst >= each if sign == ">=" else worst <= each) and (mean is None or geomean >= mean)
    row = rows[list(ratios).index(worst)]
    reached = Goal(
        goal=goal,
        aim=f"{sign} {each:g} each" + (f", {sign} {mean:g} geomean" if mean else ""),
        figure=f"worst {worst:.3f}, geomean {geomean:.3f}",
        met=met,
        rows=len(rows),
        worst=f"{row.family} {row.name}",
    )
    return [reached]


def _best_configs(
    family: Measurable, dataset: Dataset | None, device: DeviceSpec
) -> Iterator[tuple[Problem, list[KernelConfig]]]:
    """The fastest configs of each problem that the dataset measured whole on this device: the fastest of a few says
    little."""
    if dataset is None or family.name not in dataset.families:
        return
    grid = dataset.grid(family)
    exhaustive = is_exhaustive(grid.measured, supported(grid, family))
    for case, measured_on, times, is_known in zip(grid.cases, grid.devices, grid.times_us, exhaustive, strict=True):
        if measured_on.name == device.name and is_known:
            order = np.argsort(times)[:FINALISTS]
            yield case.problem, [grid.configs[i] for i in order if math.isfinite(times[i])]


def _chosen(
    family: Measurable,
    problem: Problem,
    device: DeviceSpec,
    bundle: Bundle | None,
    best: BestConfigs,
) -> list[KernelConfig]:
    """The predicted config, then the best ones."""
    return [make_shortlist(family, problem, device, k=1, bundle=bundle).configs[0], *best.get(problem, ())]


def _row(
    name: str,
    comparison: Comparison,
    family: Measurable,
    problem: Problem,
    configs: Sequence[KernelConfig],
    best: BestConfigs,
    device: DeviceSpec,
    timer: Timer,
    against: Sequence[str],
) -> Row:
    inputs = family.inputs(problem, device)
    launches: dict[str, Callable[[], Any]] = {
        f"ours {i}": (lambda config=config: family.launch(inputs, config))  # type: ignore[misc]
        for i, config in enumerate(configs)
    }
    for other, launch in comparison.contenders(family, problem, inputs, device, best).items():
        if other in against or not against:
            try:
                launch()
            except Exception as error:  # noqa: BLE001 - a contender that fails is one contender less
                warn(f"{problem} is not compared with {other}: {reason_of(error)}")
            else:
                launches[other] = launch
    us = time_side_by_side(launches, timer)
    finalists = {i: us[f"ours {i}"] for i in range(1, len(configs))}
    fastest = min(finalists, key=lambda i: finalists[i], default=0)
    return Row(
        name=name,
        family=family.name,
        problem=problem,
        best_us=finalists.get(fastest),
        predicted_us=us["ours 0"],
        others_us={label: time for label, time in us.items() if not label.startswith("ours ")},
        compute_us=compute_us(family, problem, device),
        memory_us=family.bytes(problem) / ((device.read_bandwidth_gbs or device.copy_bandwidth_gbs) * 1e3),
        config=configs[fastest],
    )


def _us(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:.1f}"

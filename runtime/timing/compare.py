"""Comparisons of a family's kernel with other implementations (contenders) and with the card's limits.

All figures are kernel times with a cold and clean L2, with all contenders of a problem interleaved in one run. The L2
is clean because a goal may be a share of the read bandwidth, of which writing back dirty lines would take a part. The
family provides the problems, contenders and goals; see `Comparison`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem
from ...datasets.console import table
from ...datasets.errors import reason_of, shown, warn
from ...datasets.family import compute_us
from ...model.rows import supported
from ...model.training_set import is_exhaustive
from ..shortlist import make_shortlist
from .timer import Timer, resetting

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset
    from ...model import Bundle

#: The interleaved rounds, and the samples of each launch in a round.
ROUNDS, SAMPLES = 5, 3
#: How many of a dataset's fastest configs are timed for "best": the single fastest may owe its rank to noise.
FINALISTS = 2
#: The fastest configs of the problems that a dataset has measured exhaustively.
BestConfigs = Mapping[Problem, Sequence[KernelConfig]]


@dataclass(frozen=True)
class Row:
    """The times of one problem of a comparison, in microseconds: our kernel's, the contenders' and the roofline's."""

    name: str
    family: str
    problem: Problem
    best_us: float | None  # with the best config of a dataset's exhaustive search; None without one
    predicted_us: float  # with the bundle's first choice, from what the host knows
    others_us: Mapping[str, float]  # by contender
    compute_us: float  # the FLOPs at the matrix rate for the dtype
    memory_us: float  # the bytes at the measured read bandwidth
    config: KernelConfig  # the best one, or the predicted one without a dataset
    kind: str = ""  # rows of one kind are summarized together

    def __str__(self) -> str:
        times = {"predicted": self.predicted_us, "best": self.best_us, **self.others_us}
        return f"{self.family} {self.name}: " + ", ".join(f"{name} {_us(us)} us" for name, us in times.items() if us)

    @property
    def ours_us(self) -> float:
        """Our kernel's time in microseconds: with the best config if it is known, else with the predicted one."""
        return self.best_us or self.predicted_us

    @property
    def roofline_us(self) -> float:
        """The roofline time: the larger of the compute time and the memory time, in microseconds."""
        return max(self.compute_us, self.memory_us)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values with a key NAME_us for each contender, as `foretune bench kernels --json` prints them."""
        return {
            "name": self.name,
            "family": self.family,
            "kind": self.kind,
            "problem": self.problem.to_json(),
            "best_us": self.best_us,
            "predicted_us": self.predicted_us,
            **{f"{name}_us": us for name, us in self.others_us.items()},
            "roofline_us": self.roofline_us,
            "config": self.config.to_json(),
        }


@dataclass(frozen=True)
class Goal:
    """A performance goal as text, whether the rows (compared problems) reach it, and the row furthest from it."""

    goal: str
    aim: str
    figure: str
    met: bool
    rows: int
    worst: str  # the row that is furthest from the goal


@dataclass(frozen=True)
class Summary:
    """Ratios of a contender's time to our kernel's with the predicted config, over a family's rows of one kind.

    A row is a compared problem; rows have the same kind if they have the same scenario and flags.
    """

    family: str
    kind: str
    other: str  # the contender
    rows: int
    mean: float  # geometric; above 1 ours is faster
    least: float
    worst: str  # the name of the row with the least

    @classmethod
    def of(cls, rows: Sequence[Row]) -> list[Summary]:
        """Return a summary for each family, kind of row and contender, in the order of the rows."""
        found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
        for row in rows:
            for other, us in row.others_us.items():
                found.setdefault((row.family, row.kind, other), []).append((us / row.predicted_us, row.name))
        return [
            cls(*key, len(ratios), statistics.geometric_mean(ratio for ratio, _ in ratios), *min(ratios))
            for key, ratios in found.items()
        ]


@dataclass(frozen=True)
class LaunchPath:
    """Host time of one repeated call of an op, and of a bare launch of its kernel, in microseconds; no GPU time."""

    op: str  # the op's name
    op_us: float  # of the op: choosing a config and all launches
    bare_us: float  # of kernel[grid](...) alone

    @property
    def ratio(self) -> float:
        """The op's time over that of the bare launch."""
        return self.op_us / self.bare_us

    @classmethod
    def timed(cls, name: str, op: Callable[[], Any], bare: Callable[[], Any], calls: int = 200) -> LaunchPath:
        """Return the host times of an op and of a bare launch of its kernel, in interleaved rounds without gradients.

        Args:
            name: The op's name.
            op: Calls the op, on work so small that the GPU stays ahead of the host.
            bare: Launches its kernel alone.
            calls: The calls in each round.
        """
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
    """The interface of a family's `contenders.py`: the problems, contenders and goals of its comparison."""

    #: The names of all contenders, those that are ready first in front; a problem may lack some of them.
    others: tuple[str, ...]

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the problems to compare a family on, by name."""

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Any, device: DeviceSpec, best: BestConfigs
    ) -> Mapping[str, Callable[[], Any]]:
        """Return for each contender a function that queues the work of our kernel, or a part of it, on the same inputs.

        Args:
            family: The family of our kernel.
            problem: The problem.
            inputs: The inputs of our kernel.
            device: The current device.
            best: The known best configs of problems.

        The first call of each function is not timed, so that it can do slow preparations, such as compiling.
        """

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the performance goals, judged by the times in these rows."""

    def launch_path(self, device: DeviceSpec) -> LaunchPath | None:
        """Return the host time of a repeated call of the family's op; None if the family has no op."""


@dataclass(frozen=True)
class Compared:
    """The results of `foretune bench kernels`: times by problem, goals, and host times of calls."""

    device: DeviceSpec
    rows: tuple[Row, ...]
    goals: tuple[Goal, ...]
    launch_paths: tuple[LaunchPath, ...]
    left_out: int = 0  # problems that did not fit into the budget

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune bench kernels --json` prints them."""
        return {
            "device": self.device.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "summaries": [asdict(summary) for summary in Summary.of(self.rows)],
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
        ratios = [
            [s.family, s.kind, s.other, s.rows, f"{s.mean:.2f}", f"{s.least:.2f}", s.worst]
            for s in Summary.of(self.rows)
        ]
        columns = ("family", "problem", "best", "predicted", *labels, "roofline")
        goals = [[g.goal, g.aim, g.figure, "yes" if g.met else "NO", g.worst] for g in self.goals]
        return Group(
            table(f"Kernel time on {self.device.name}, us", columns, times),
            table(
                f"Time over ours with the predicted config on {self.device.name}",
                ("family", "rows", "other", "problems", "mean", "worst", "worst problem"),
                ratios,
            ),
            table("Goals", ("goal", "aim", "reached", "met", "worst"), goals),
            *(
                f"A hot call of {path.op} takes {path.op_us:.1f} us of host time, a bare launch of its kernel "
                f"{path.bare_us:.1f} us: {path.ratio:.2f}x"
                for path in self.launch_paths
            ),
            *([f"Problems left out because the budget was spent: {self.left_out}"] if self.left_out else []),
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
    """Compare families with their contenders on the current device.

    Args:
        comparisons: The comparison of each family.
        device: The spec of the current device, with measured rates.
        dataset: Measurements that name the best configs; None without.
        bundle: The bundle that predicts; the shipped one if None.
        only: Compare only problems whose name contains this text.
        against: The contenders; all if empty.
        budget_s: Seconds after which no further problem starts.
        compile_ahead: Compiles pairs of config and problem of a family in parallel, before they are launched.
        on_row: Called with each row when it is complete.

    Raises:
        ForetuneError: A contender in `against` that no family has.
    """
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
        suite = {name: case for name, case in comparison.suite(family).items() if only in name}
        cases = {name: case.problem for name, case in suite.items()}
        chosen: dict[str, list[KernelConfig]] = {}  # the predicted config, and the best ones of the dataset
        for name, problem in cases.items():
            predicted = make_shortlist(family, problem, device, k=1, bundle=bundle).configs[0]
            chosen[name] = [predicted, *best.get(problem, ())]
        if compile_ahead is not None:
            pairs = [(config, problem) for name, problem in cases.items() for config in chosen[name]]
            compile_ahead(family, list(dict.fromkeys(pairs)), device)
        for name, problem in cases.items():
            if time.monotonic() > end:
                left_out += 1
                continue
            row = _row(name, comparison, family, problem, chosen[name], best, device, timer, against)
            rows.append(replace(row, kind=" ".join((suite[name].scenario, *problem.flags)).strip()))
            on_row(rows[-1])
    for comparison, rows in judged.items():
        goals += comparison.goals(rows)
        if (path := comparison.launch_path(device)) is not None:
            paths.append(path)
    everything = tuple(row for rows in judged.values() for row in rows)
    return Compared(device, everything, tuple(goals), tuple(paths), left_out)


def time_side_by_side(
    launches: Mapping[str, Callable[[], Any]],
    timer: Timer,
    *,
    rounds: int = ROUNDS,
    samples: int = SAMPLES,
    before: Callable[[], Any] | None = None,
) -> dict[str, float]:
    """Return the median time of each launch in microseconds, over `rounds` rounds through all of them.

    Args:
        launches: Functions that queue the work, by label.
        timer: The timer.
        rounds: How often all launches are timed in turn.
        samples: The samples of each launch in a round.
        before: Called before each sample, to restore what launches overwrite; not timed. See `resetting`.

    >>> from types import SimpleNamespace
    >>> fake = SimpleNamespace(sample=lambda launch, samples, before: [launch()] * samples)
    >>> time_side_by_side({"ours": lambda: 2.0, "theirs": lambda: 3.0}, fake)
    {'ours': 2.0, 'theirs': 3.0}
    """
    times: dict[str, list[float]] = {label: [] for label in launches}
    for _ in range(rounds):
        for label, launch in launches.items():
            times[label] += timer.sample(launch, samples, before)
    return {label: statistics.median(sampled) for label, sampled in times.items()}


def judge_least(
    goal: str, rows: Sequence[Row], ratios: Sequence[float], each: float, mean: float | None = None
) -> list[Goal]:
    """Judge the goal that each row's ratio is at least `each` and their geometric mean, if given, at least `mean`.

    Returns a list of one `Goal`, described by `goal`; an empty list without rows.
    """
    return _judge(goal, rows, ratios, ">=", each, mean)


def judge_most(goal: str, rows: Sequence[Row], ratios: Sequence[float], each: float) -> list[Goal]:
    """Judge the goal that no row's ratio is above `each`.

    Returns a list of one `Goal`, described by `goal`; an empty list without rows.
    """
    return _judge(goal, rows, ratios, "<=", each, None)


def _judge(
    goal: str, rows: Sequence[Row], ratios: Sequence[float], sign: str, each: float, mean: float | None
) -> list[Goal]:
    """Judge the goal that each row's ratio is >= or <= (`sign`) `each`, and the geometric mean, if given, >= `mean`.

    Returns a list of one `Goal`, described by `goal`; an empty list without rows.
    """
    if not rows:
        return []
    geomean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    worst = min(ratios) if sign == ">=" else max(ratios)
    met = (worst >= each if sign == ">=" else worst <= each) and (mean is None or geomean >= mean)
    row = rows[list(ratios).index(worst)]
    return [
        Goal(
            goal=goal,
            aim=f"{sign} {each:g} each" + (f", {sign} {mean:g} geomean" if mean else ""),
            figure=f"worst {worst:.3f}, geomean {geomean:.3f}",
            met=met,
            rows=len(rows),
            worst=f"{row.family} {row.name}",
        )
    ]


def _best_configs(
    family: Measurable, dataset: Dataset | None, device: DeviceSpec
) -> Iterator[tuple[Problem, list[KernelConfig]]]:
    """Yield the fastest configs of each problem that the dataset measured exhaustively on this device."""
    if dataset is None or family.name not in dataset.families:
        return
    grid = dataset.grid(family)
    exhaustive = is_exhaustive(grid.measured, supported(grid, family))
    for case, measured_on, times, is_known in zip(grid.cases, grid.devices, grid.times_us, exhaustive, strict=True):
        if measured_on.name == device.name and is_known:
            order = np.argsort(times)[:FINALISTS]
            yield case.problem, [grid.configs[i] for i in order if math.isfinite(times[i])]


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
    """Time our kernel with each of `configs`, and the comparison's contenders named in `against`; return the `Row`.

    All contenders are timed if `against` is empty; one that fails is left out with a warning.
    """
    inputs = family.inputs(problem, device)
    launches: dict[str, Callable[[], Any]] = {
        f"ours {i}": (lambda config=config: family.launch(inputs, config))  # type: ignore[misc]
        for i, config in enumerate(configs)
    }
    for other, launch in comparison.contenders(family, problem, inputs, device, best).items():
        if other in against or not against:
            try:
                family.reset(inputs)
                launch()
            except Exception as error:  # noqa: BLE001 - a contender that fails is left out
                warn(f"{problem} is not compared with {other}: {reason_of(error)}")
            else:
                launches[other] = launch
    us = time_side_by_side(launches, timer, **resetting(family, inputs))
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
    """Return a time in microseconds as text for a table; "" for None."""
    return "" if time_us is None else f"{time_us:.1f}"

"""How fast the grouped GEMMs are, next to what people have: `torch._grouped_mm`, cuBLAS and the card's own limits.

Every figure is kernel time, cold and clean L2 (one goal is a share of the read bandwidth, and what else must be written
back takes its share of that), with all contenders of a problem interleaved in one run. The tile map is not in it, as
torch's offsets are not in `torch._grouped_mm`'s: both are made once a layer.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import Case, DeviceSpec, Family, KernelConfig, Problem
from ..runtime import Timer, shortlist
from .compiling import compile_all

if TYPE_CHECKING:
    import torch

    from ..datasets.dataset import Dataset
    from ..model import Bundle

ROUNDS, SAMPLES = 5, 3
#: Of the configs that a dataset measured, the first so many compete for "best": its argmin alone has luck in it.
FINALISTS = 2


@dataclass(frozen=True)
class Row:
    """One problem of one operation; times in microseconds, None where there is nothing to compare with."""

    name: str
    family: str
    problem: str
    rows_per_group: float  # of groups that have rows
    best_us: float | None  # with the best config of the dataset's exhaustive search
    predicted_us: float  # with the bundle's first choice, from what the host knows
    torch_us: float | None  # torch._grouped_mm
    dense_us: float | None  # one cuBLAS product of the same FLOPs
    separate_us: float | None  # for a fused permutation: the permutation alone, by torch
    unfused_us: float | None  # and the same GEMM without it, at its best config
    roofline_us: float  # the longer of FLOPs at the measured matrix rate, and bytes at the measured read bandwidth
    compute_share: float  # of the roofline: FLOPs' time over bytes' time
    bytes_touched: float
    config: dict[str, Any]

    @property
    def ours_us(self) -> float:
        """With the best config, where it is known."""
        return self.best_us or self.predicted_us


def compare(
    suites: Mapping[Family, Mapping[str, Case]],
    device: DeviceSpec,
    dataset: Dataset | None,
    bundle: Bundle | None,
    *,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measures every problem of the suites on the current device. `device` should have measured rates."""
    timer = Timer(clean=True)
    rows = []
    for family, cases in suites.items():
        best = dict(_best_configs(family, dataset, device))
        chosen = {name: _contenders(family, case.problem, device, bundle, best) for name, case in cases.items()}
        _compile(family, cases, chosen, device)
        for name, case in cases.items():
            rows.append(_row(name, family, case.problem, chosen[name], best, device, timer))
            on_row(rows[-1])
    return rows


def _best_configs(
    family: Family, dataset: Dataset | None, device: DeviceSpec
) -> Iterator[tuple[Problem, list[KernelConfig]]]:
    """The fastest configs of each problem that the dataset measured on this device."""
    if dataset is None or family.name not in dataset.families:
        return
    grid = dataset.grid(family.name)
    for case, measured_on, times in zip(grid.cases, grid.devices, grid.times_us, strict=True):
        if measured_on.name == device.name:
            order = np.argsort(times)[:FINALISTS]
            yield case.problem, [grid.configs[i] for i in order if math.isfinite(times[i])]


def _contenders(
    family: Family,
    problem: Problem,
    device: DeviceSpec,
    bundle: Bundle | None,
    best: Mapping[Problem, list[KernelConfig]],
) -> list[KernelConfig]:
    """The predicted config, then the best ones."""
    return [shortlist(family, problem, device, k=1, bundle=bundle).configs[0], *best.get(problem, ())]


def _compile(
    family: Family, cases: Mapping[str, Case], chosen: Mapping[str, Sequence[KernelConfig]], device: DeviceSpec
) -> None:
    """Compiles everything ahead, on all cores."""
    by_binary: dict[tuple[str, tuple[str, ...]], tuple[Problem, set[KernelConfig]]] = {}
    for name, case in cases.items():
        key = (case.problem.dtype, case.problem.flags)
        by_binary.setdefault(key, (case.problem, set()))[1].update(chosen[name])
    for problem, configs in by_binary.values():
        for _ in compile_all(family, sorted(configs, key=str), problem, device):
            pass


def _row(
    name: str,
    family: Family,
    problem: Problem,
    configs: Sequence[KernelConfig],
    best: Mapping[Problem, list[KernelConfig]],
    device: DeviceSpec,
    timer: Timer,
) -> Row:
    inputs = family.inputs(problem, device)
    launches: dict[str, Callable[[], Any]] = {
        f"ours {i}": (lambda config=config: family.launch(inputs, config))  # type: ignore[misc]
        for i, config in enumerate(configs)
    }
    launches |= _others(family.name, inputs)
    if problem.flags:
        plain = replace(problem, flags=())
        if plain in best:
            others = family.inputs(plain, device)
            launches["unfused"] = lambda: family.launch(others, best[plain][0])
        launches["separate"] = _permutation(family.name, inputs)
    times: dict[str, list[float]] = {label: [] for label in launches}
    for _ in range(ROUNDS):
        for label, launch in launches.items():
            times[label] += timer.sample(launch, SAMPLES)
    us = {label: statistics.median(samples) for label, samples in times.items()}
    finalists = {i: us[f"ours {i}"] for i in range(1, len(configs))}
    fastest = min(finalists, key=lambda i: finalists[i], default=0)
    flops, touched = _flops(problem), _bytes_touched(family, problem)
    compute_us = flops / (device.matrix_tflops * 1e6)
    memory_us = touched / ((device.read_bandwidth_gbs or device.copy_bandwidth_gbs) * 1e3)
    summary = problem.summary
    return Row(
        name=name,
        family=family.name,
        problem=str(problem),
        rows_per_group=problem["rows"] / max(summary.active if summary else problem["groups"], 1),
        best_us=finalists.get(fastest),
        predicted_us=us["ours 0"],
        torch_us=us.get("torch"),
        dense_us=us.get("dense"),
        separate_us=us.get("separate"),
        unfused_us=us.get("unfused"),
        roofline_us=max(compute_us, memory_us),
        compute_share=compute_us / memory_us,
        bytes_touched=touched,
        config=configs[fastest].to_json(),
    )


def _flops(problem: Problem) -> float:
    return 2.0 * problem["rows"] * problem["n"] * problem["k"]


def _bytes_touched(family: Family, problem: Problem) -> float:
    """Every operand once; of the weights, the groups that have rows (all of them for dW, which writes zeros)."""
    summary = problem.summary
    groups = problem["groups"] if summary is None or family.name.endswith("dw") else summary.active
    n, k = problem["n"], problem["k"]
    return float(problem.itemsize) * (groups * n * k + problem["rows"] * (n + k))


def _others(family: str, inputs: Any) -> dict[str, Callable[[], Any]]:
    """torch's grouped product on the same tensors, and a dense one of the same FLOPs."""
    import torch

    left, right = inputs.left, inputs.right
    offsets = inputs.group_sizes.cumsum(0).to(torch.int32)
    rows = inputs.problem["rows"]
    sorted_left = left if len(left) == rows else left.repeat_interleave(rows // len(left), 0)
    if family.endswith("fwd"):
        return {
            "torch": lambda: torch._grouped_mm(sorted_left, right.transpose(-2, -1), offs=offsets),
            "dense": lambda: torch.mm(sorted_left, right[0].t()),
        }
    if family.endswith("dx"):
        return {
            "torch": lambda: torch._grouped_mm(left, right, offs=offsets),
            "dense": lambda: torch.mm(left, right[0]),
        }
    sorted_right = right if len(right) == rows else right.repeat_interleave(rows // len(right), 0)
    return {
        "torch": lambda: torch._grouped_mm(left.t(), sorted_right, offs=offsets),
        "dense": lambda: torch.mm(left.t(), sorted_right),
    }


def _permutation(family: str, inputs: Any) -> Callable[[], Any]:
    """The permutation that is fused, as a kernel of its own: rows gathered from x (or dy), or y's (or dx's) moved."""
    fwd_or_dw_gathers_x = "permute_x" in inputs.problem.flags
    if family.endswith("fwd"):
        moved = inputs.left if fwd_or_dw_gathers_x else inputs.out
    elif family.endswith("dx"):
        moved = inputs.out if fwd_or_dw_gathers_x else inputs.left
    else:
        moved = inputs.right if fwd_or_dw_gathers_x else inputs.left
    indices = (inputs.indices // inputs.topk).long() if len(moved) < inputs.problem["rows"] else inputs.indices.long()
    return lambda: moved.index_select(0, indices)


@dataclass(frozen=True)
class Goal:
    """One goal and what was reached, over the rows that it is about."""

    goal: str
    aim: str
    figure: str
    met: bool
    rows: int
    worst: str  # the row that is furthest from it


def goals(rows: Sequence[Row]) -> list[Goal]:
    """The project's goals for its kernels, judged on a comparison; those that no row is about are left out."""
    plain = [row for row in rows if row.separate_us is None]
    judged = []
    for label, families, aim in (("fwd and dX", ("fwd", "dx"), 1.25), ("dW", ("dw",), 1.1)):
        chosen = [row for row in plain if row.family.endswith(families) and row.torch_us]
        ratios = [(row.torch_us or 0) / row.ours_us for row in chosen]
        judged.append(_least(f"{label}, best config, over torch._grouped_mm", chosen, ratios, 1.0, aim))
        predicted = [(row.torch_us or 0) / row.predicted_us for row in chosen]
        judged.append(_least(f"{label}, predicted config, over torch._grouped_mm", chosen, predicted, 1.0, aim))
    tall = [row for row in plain if row.rows_per_group >= 1024 and row.dense_us]
    judged.append(
        _least("rows per expert >= 1024, over dense cuBLAS", tall, [(r.dense_us or 0) / r.ours_us for r in tall], 0.88)
    )
    few = [row for row in plain if row.rows_per_group <= 8]
    judged.append(
        _least(
            "<= 8 rows per active expert, over the read bandwidth", few, [r.roofline_us / r.ours_us for r in few], 0.85
        )
    )
    fused = [row for row in rows if row.unfused_us]
    judged.append(
        _most("fused permutation over the unfused GEMM", fused, [r.ours_us / (r.unfused_us or 1) for r in fused], 1.05)
    )
    both = [r for r in fused if r.separate_us]
    judged.append(
        _most(
            "fused permutation over GEMM + permutation",
            both,
            [r.ours_us / ((r.unfused_us or 0) + (r.separate_us or 0)) for r in both],
            1.0,
        )
    )
    even = {(r.family, r.name.rsplit(" ", 1)[0]): r for r in plain if r.name.endswith(" balanced")}
    hot = [
        (row, balanced)
        for row in plain
        if row.name.endswith(" hot")
        and (balanced := even.get((row.family, row.name.rsplit(" ", 1)[0])))
        and row.compute_share > 1
    ]
    judged.append(
        _most(
            "one expert with half the rows, over balanced",
            [r for r, _ in hot],
            [r.ours_us / b.ours_us for r, b in hot],
            1.15,
        )
    )
    return [goal for goal in judged if goal is not None]


def _least(
    goal: str, rows: Sequence[Row], ratios: Sequence[float], each: float, mean: float | None = None
) -> Goal | None:
    return _judge(goal, rows, ratios, ">=", each, mean, min)


def _most(goal: str, rows: Sequence[Row], ratios: Sequence[float], each: float) -> Goal | None:
    return _judge(goal, rows, ratios, "<=", each, None, max)


def _judge(
    goal: str,
    rows: Sequence[Row],
    ratios: Sequence[float],
    sign: str,
    each: float,
    mean: float | None,
    worst_of: Callable[[Sequence[float]], float],
) -> Goal | None:
    if not rows:
        return None
    geomean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    worst = worst_of(ratios)
    met = (worst >= each if sign == ">=" else worst <= each) and (mean is None or geomean >= mean)
    row = rows[list(ratios).index(worst)]
    return Goal(
        goal=goal,
        aim=f"{sign} {each:g} each" + (f", {sign} {mean:g} geomean" if mean else ""),
        figure=f"worst {worst:.3f}, geomean {geomean:.3f}",
        met=met,
        rows=len(rows),
        worst=f"{row.family} {row.name}",
    )


@dataclass(frozen=True)
class LaunchPath:
    """Host time of one hot call, in microseconds, without waiting for the GPU."""

    op_us: float  # foretune.grouped_gemm: the choice, the tile map and the kernel
    bare_us: float  # kernel[grid](...) alone

    @property
    def ratio(self) -> float:
        return self.op_us / self.bare_us


def launch_path(family: Family, device: DeviceSpec, calls: int = 200) -> LaunchPath:
    """Times the op against a bare launch of its main kernel, in interleaved turns, on a problem that keeps the GPU
    ahead of the host."""
    import torch

    from ..kernels.grouped_gemm import grouped_gemm
    from ..kernels.grouped_gemm.gemm import arguments, grouped_gemm_kernel

    problem = Problem.of(family.name, groups=8, rows=64, n=256, k=256)
    inputs = family.inputs(problem, device)
    config = family.default(problem, device)
    constants = {"TRANSPOSED": False, "GATHER": False, "SCATTER": False} | config.to_json()
    tensors = arguments(inputs.left, inputs.right, inputs.out, inputs.tile_map)

    def bare() -> None:
        grouped_gemm_kernel[(device.sm_count,)](*tensors, **constants)

    def op() -> torch.Tensor:
        return grouped_gemm(inputs.left, inputs.right, inputs.group_sizes, config=config)

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
    return LaunchPath(op_us, bare_us)


def as_json(rows: Sequence[Row], device: DeviceSpec, path: LaunchPath) -> dict[str, Any]:
    """What `foretune bench kernels --json` prints."""
    return {
        "device": device.to_json(),
        "rows": [asdict(row) for row in rows],
        "launch_path": asdict(path) | {"ratio": path.ratio},
        "goals": [asdict(goal) for goal in goals(rows)],
    }

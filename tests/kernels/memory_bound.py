"""`python memory_bound.py collect OUT --seconds S`: measure grouped GEMMs that are bound by memory, on all GPUs, for S
seconds each, into OUT/FAMILY. (On 16 cores, compiling takes the first minute: 745 s of a core for forward.)

`python memory_bound.py regret FAMILY... --data DATA... [--extra DATA...]`: how much slower than the best config the
best of the first k is, in percent, on such problems and on others of each device, by rankers that learned from other
models' problems: from `--data` alone, and with `--extra`. Both are judged on the problems of `--data` of which most
configs were measured, and the second also on those of `--extra`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import rich
from foretune import collect_dataset
from foretune.datasets import Case, Measurable, Problem, load
from foretune.datasets.console import table
from foretune.kernels import find_measurable
from foretune.kernels.grouped_gemm.group_sizes import ROUTINGS, drawn_sizes
from foretune.kernels.grouped_gemm.workload import EXPERT_PARALLEL, _layers, _split
from foretune.kernels.learning import datasets_merged
from foretune.kernels.workloads import load_models
from foretune.model import cross_validate, geomean

FAMILIES = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
KS = (1, 2, 4, 8)
ROWS_PER_EXPERT = (16, 32, 64, 128, 256)
#: Bytes of w, so that a launch takes at least 0.1 ms and at most 1 ms.
LEAST_BYTES, MOST_BYTES = 0.3e9, 3.0e9


def is_bound_by_memory(case: Case) -> bool:
    """Whether w is large and each expert has few rows."""
    problem = case.problem
    few = 8 <= problem["rows"] / problem["groups"] <= 300
    return few and problem["groups"] >= 16 and 2 * problem["groups"] * problem["n"] * problem["k"] >= LEAST_BYTES


def drawn(family: str, seed: int) -> list[Case]:
    """Every layer of models.csv for each number of rows per expert, on a random rank, in bf16, in random order."""
    rng = np.random.default_rng(seed)
    cases = []
    for (experts, n, k), layer in _layers(load_models()).items():
        for per_expert in ROWS_PER_EXPERT:
            for _ in range(20):
                groups = experts // int(rng.choice([d for d in EXPERT_PARALLEL if experts % d == 0]))
                on_rank = _split(n, k, layer.sources[0], layer.inter, rng)
                if groups >= 32 and LEAST_BYTES <= 2 * groups * on_rank[0] * on_rank[1] <= MOST_BYTES:
                    rows = groups * per_expert
                    routing = str(rng.choice(list(ROUTINGS), p=list(ROUTINGS.values())))
                    dims = dict(zip(("groups", "rows", "n", "k"), (groups, rows, *on_rank), strict=True))
                    sizes = drawn_sizes(routing, rows, groups, rng)
                    cases.append(Case(Problem.of(family, ragged={"rows": sizes}, **dims), layer.sources, routing))
                    break
    return [cases[place] for place in rng.permutation(len(cases))]


def collect(out: Path, seconds: float, seed: int, families: list[str], plan: str) -> None:
    for name in families:  # a run measures one family after the other, and the last ones would get no time
        rich.print(collect_dataset(name, out=out / name, cases=drawn(name, seed), budget_s=seconds, plan=plan))


def regret(names: list[str], data: list[str], extra: list[str]) -> None:
    rows = []
    for name in names:
        family = find_measurable(name)
        known = {(device, problem) for part in data for device, problem in problems_of(part, family)}
        for parts in (data, data + extra) if extra else (data,):
            found = cross_validate(datasets_merged(parts), family, ks=KS, jobs=1)
            places = defaultdict(list)
            for place, (case, device) in enumerate(zip(found.cases, found.devices, strict=True)):
                kind = "bound by memory" if is_bound_by_memory(case) else "others"
                places[device.name, kind, (device.name, case.problem) not in known].append(place)
            for (device, kind, is_extra), here in sorted(places.items()):
                regrets = [f"{100 * (geomean(found.regret[k][here]) - 1):.1f}" for k in KS]
                label = f"{kind} ({len(here)}{' of --extra' if is_extra else ''})"
                rows.append([name, "with --extra" if parts != data else "--data", device, label, " / ".join(regrets)])
                rich.print(*rows[-1])
    columns = ("family", "learned from", "device", "problems", f"percent, best of the first {' / '.join(map(str, KS))}")
    rich.print(table("Regret on models that were not learned from", columns, rows))


def problems_of(part: str, family: Measurable) -> Iterator[tuple[str, Problem]]:
    """Yield the device's name and the problem of each problem of a dataset."""
    grid = load(part).grid(family)
    for device, case in zip(grid.devices, grid.cases, strict=True):
        yield device.name, case.problem


def parsers(
    text: str | None, families: Sequence[str]
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parser of a program, and those of its commands `collect`, of all `families`, and `regret`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    collecting, regretting = parts.add_parser("collect"), parts.add_parser("regret")
    collecting.add_argument("out", type=Path)
    collecting.add_argument("--seconds", type=float, default=200, help="for each family")
    collecting.add_argument("--seed", type=int, default=0)
    collecting.add_argument("--families", nargs="+", default=list(families))
    regretting.add_argument("families", nargs="+")
    regretting.add_argument("--data", nargs="+", default=["h200", "h200_wide", "h100"])
    return parser, collecting, regretting


def main() -> None:
    parser, collecting, regretting = parsers(__doc__, FAMILIES)
    collecting.add_argument("--plan", default="exhaustive")
    regretting.add_argument("--extra", nargs="*", default=[])
    options = parser.parse_args()
    if options.what == "collect":
        collect(options.out, options.seconds, options.seed, options.families, options.plan)
    else:
        regret(options.families, options.data, options.extra)


if __name__ == "__main__":
    main()

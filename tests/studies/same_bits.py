"""Replay and predict what choosing within one numerics class costs: `python tests/studies/same_bits.py [FAMILY ...]`.

Needs no GPU: it replays measured times, and predicts. Configs are chosen on the first timing pass and judged on the
second. Two tables:

- Measured, by family of each dataset: how many classes the supported configs of a problem have (median), and the
  geometric mean (and worst) slowdown against the best of all configs of the best config under `same_bits`, of the best
  under `invariant`, and of one fixed config for all problems of the same dtype and flags: the one that is best on them.
- By size, 64 sizes of the rows of one layer from decode to prefill: the same, and the class that loses least of those
  that can run every size, next to the class that `invariant` keeps. `h200_cover` has measured layers of 64 to 4,096
  rows; for others, the times of 1 to 16,384 rows are predicted by the shipped bundle. `one config`: the best for all
  sizes. `default`: the default config for many rows at all sizes. `gain`: the times of these two over those under
  `invariant`.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from foretune.datasets import DeviceSpec, Family, KernelConfig, Problem, load
from foretune.kernels import find_family
from foretune.runtime.covering.losses import SizeLosses, measured_losses, predicted_losses
from foretune.runtime.same_bits import keeping

if TYPE_CHECKING:
    from numpy.typing import NDArray

DATA = (
    "h200", "h200_matmul", "h200_scaled_gemm", "h200_gated_mlp", "h200_rms_norm_rope", "h200_fused_moe", "h100",
    "h100_kernels",
)  # fmt: skip
#: A dataset with layers at 64 sizes, and the 64 sizes at which others are predicted.
BY_SIZE = "h200_cover"
SIZES = tuple(sorted({round(16384 ** (i / 71)) for i in range(72)}))
#: A fixed config is judged on at least this many problems; layers to predict for each family.
LEAST_PROBLEMS, LAYERS = 8, 3


def kept(
    family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig], **options: Any
) -> NDArray[np.bool_]:
    """Return which configs a restriction of the family supports, (n_configs,)."""
    view = keeping(family, **options)
    return np.array([view.supports(config, problem, device) is None for config in configs])


def slowdown(first: NDArray[np.float64], second: NDArray[np.float64], allowed: NDArray[np.bool_]) -> float:
    """Return the second time of the config that is best on the first pass, over that of the best of all; nan if none
    of the allowed was measured."""
    timed = np.isfinite(first) & np.isfinite(second)
    if not (timed & allowed).any():
        return math.nan
    best = int(np.where(timed, first, np.inf).argmin())
    chosen = int(np.where(timed & allowed, first, np.inf).argmin())
    return float(second[chosen] / second[best])


def summary(slowdowns: Sequence[float]) -> str:
    """Return the geometric mean and the worst of slowdowns, in percent, and how many there are."""
    known = [one for one in slowdowns if math.isfinite(one)]
    if not known:
        return "-"
    mean = math.exp(sum(map(math.log, known)) / len(known))
    return f"{100 * (mean - 1):.1f} (worst {100 * (max(known) - 1):.0f}, n={len(known)})"


def fixed_slowdowns(grid: Any, rows: Sequence[int]) -> list[float]:
    """Return the slowdowns of the config that is best over these problems on the first pass; [] if none ran on all."""
    first, second = grid.first_us[rows], grid.second_us[rows]
    everywhere = np.isfinite(first).all(axis=0) & np.isfinite(second).all(axis=0)
    if len(rows) < LEAST_PROBLEMS or not everywhere.any():
        return []
    logs = np.log(np.where(everywhere, first, np.inf)).mean(axis=0)
    column = int(logs.argmin())
    return [slowdown(one, two, np.arange(len(one)) == column) for one, two in zip(first, second, strict=True)]


def of_dataset(name: str, only: Sequence[str]) -> None:
    """Print a line for each family of a dataset."""
    dataset = load(name)
    for which in dataset.families:
        if (only and which not in only) or which.startswith("inductor"):
            continue
        family, grid = find_family(which), dataset.grid(which)
        same, rows_alone, fixed, classes = [], [], [], []
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for row, (case, device) in enumerate(zip(grid.cases, grid.devices, strict=True)):
            problem, first, second = case.problem, grid.first_us[row], grid.second_us[row]
            timed = np.isfinite(first) & np.isfinite(second)
            configs = [config for config, is_timed in zip(grid.configs, timed, strict=True) if is_timed]
            if not configs:
                continue
            classes.append(len({family.numerics(config, problem) for config in configs}))
            groups[problem.dtype, problem.flags].append(row)
            of_class = kept(family, problem, device, configs, same_bits=True)
            same.append(slowdown(first[timed], second[timed], of_class))
            if family.independent:
                of_class = kept(family, problem, device, configs, invariant="m")
                rows_alone.append(slowdown(first[timed], second[timed], of_class))
        for rows in groups.values():
            fixed += fixed_slowdowns(grid, rows)
        columns = [f"{np.median(classes):.0f}", *map(summary, (same, rows_alone, fixed))]
        say(name, which, *columns)


def of_sizes(family: Family, losses: SizeLosses, problem: Problem, device: DeviceSpec) -> dict[str, float]:
    """Print how much each restriction loses over the sizes of one layer, and the class that loses least; return the
    mean log losses."""
    dim = family.independent[0]
    problems = [at(problem, dim, size) for size in losses.sizes]
    able = np.isfinite(losses.first)
    first, second = np.where(able, losses.first, np.inf), np.where(able, losses.second, np.inf)
    rows = np.arange(len(problems))
    # A config's class is the same at every size, because the dimension is an independent one.
    classes = [family.numerics(config, problem) for config in losses.configs]
    mean_of_class = {}
    for one in dict.fromkeys(classes):
        allowed = np.array([own == one for own in classes])
        choice = np.where(allowed, first, np.inf).argmin(axis=1)
        mean_of_class[one] = float(second[rows, choice].mean())  # inf if it cannot run every size
    best = min(mean_of_class, key=mean_of_class.__getitem__)
    model = family.same_bits_config(at(problem, dim, 1 << 20), device)
    own = family.numerics(model, problem)
    same = np.stack([kept(family, one, device, losses.configs, same_bits=True) for one in problems])
    many = losses.configs.index(model) if model in losses.configs else None
    loss_of = {
        "same_bits": second[rows, np.where(same, first, np.inf).argmin(axis=1)].mean(),
        "invariant": mean_of_class[own],
        "best class": mean_of_class[best],
        "one config": second.mean(axis=0)[first.mean(axis=0).argmin()],
        "default": math.nan if many is None else second[:, many].mean(),
    }
    found = [f"{100 * math.expm1(loss):.1f}" for loss in loss_of.values()]
    layer = " ".join(f"{name}={size}" for name, size in problem.dims if name != dim)
    gains = [f"{math.exp(loss_of[one] - loss_of['invariant']):.2f}" for one in ("one config", "default")]
    source = losses.reason.partition(" bundle")[0]
    sizes, which = (
        f"{len(rows)} of {losses.sizes[0]}-{losses.sizes[-1]}",
        f"{own}{'' if best == own else f', best {best}'}",
    )
    say(family.name, layer, sizes, *found, *gains, which, source)
    return loss_of


def at(problem: Problem, dim: str, size: int) -> Problem:
    """Return the problem with another size of a dimension."""
    return replace(problem, dims=tuple((name, size if name == dim else own) for name, own in problem.dims), ragged=None)


def by_size(only: Sequence[str], layers: int) -> None:
    """Print a line for each measured layer of `BY_SIZE`, and for the first layers of each family in `DATA`."""
    dataset = load(BY_SIZE)
    for which in dataset.families:
        family, grid = find_family(which), dataset.grid(which)
        if not only or which in only:
            problem, device = grid.cases[0].problem, grid.devices[0]
            losses = measured_losses(family, problem, family.independent[0], 1, 1 << 20, device, dataset)
            of_sizes(family, losses, problem, device)
    device, seen, all_layers = DeviceSpec.named("h200"), set(), []
    for name in DATA:
        dataset = load(name)
        for which in dataset.families:
            family = find_family(which)
            if (only and which not in only) or not family.independent or which in seen:
                continue
            seen.add(which)
            dim = family.independent[0]
            met = dict.fromkeys(at(case.problem, dim, 1) for case in dataset.grid(which).cases)
            for problem in list(met)[:: max(len(met) // layers, 1)][:layers]:
                losses = predicted_losses(family, problem, dim, SIZES, device, family.space(device), None)
                all_layers.append(of_sizes(family, losses, problem, device))
    known = {name: [one[name] for one in all_layers if math.isfinite(one[name])] for name in all_layers[0]}
    means = {name: float(np.mean(losses)) for name, losses in known.items()}
    gains = [f"{math.exp(means[one] - means['invariant']):.2f}" for one in ("one config", "default")]
    found = [f"{100 * math.expm1(loss):.1f}" for loss in means.values()]
    say("all", f"{len(all_layers)} layers", "", *found, *gains, "", "predicted")


def say(*columns: object) -> None:
    """Print a row of a table."""
    sys.stdout.write(f"| {' | '.join(map(str, columns))} |\n")
    sys.stdout.flush()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="only these families")
    parser.add_argument("--data", action="append", help="only these datasets in the first table")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers to predict for each family")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    head = ("data", "family", "classes", "same_bits, %", "invariant, %", "one config, %")
    say(*head)
    say(*["---"] * len(head))
    for name in given.data or DATA:
        of_dataset(name, given.families)
    head = ("same_bits, %", "invariant, %", "best class, %", "one config, %", "default, %", "gain", "gain")
    head = ("family", "layer", "sizes", *head, "class kept", "times")
    sys.stdout.write("\n")
    say(*head)
    say(*["---"] * len(head))
    by_size(given.families, given.layers)


if __name__ == "__main__":
    main()

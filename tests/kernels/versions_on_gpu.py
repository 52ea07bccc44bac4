"""Kernels with CONSUMERS next to those of another version: `python tests/kernels/versions_on_gpu.py FOLDER FAMILY ...`

FOLDER is a checkout of the other version. On layers of training, it runs the specialized configs of both versions, with
equal, zipf and hot groups, after evicting the L2, and prints for each problem the best time over the other version's
best and both configs. Then, over all problems: for each tile, the mean ratio of the times of the same config in both
versions; and how many launches of the same config gave the same bits.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections import defaultdict
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from types import ModuleType
from typing import Any

import foretune
import numpy as np
import torch
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes
from foretune.model import geomean
from foretune.runtime.timing.timer import Timer
from goals_on_gpu import LAYERS, say, times_of

ROUTINGS = ("balanced", "zipf", "hot")
FLAGS = {
    "scaled_grouped_gemm_fwd": (("blockwise",), ("rowwise",)),
    "scaled_grouped_gemm_dw": (("blockwise",), ()),
}
#: Times are summarized by these knobs.
TILE = ("BLOCK_M", "BLOCK_N", "PINGPONG", "IN_FLIGHT", "num_stages")
#: The folder that stands for this package.
OURS = ""


@cache
def version(folder: str) -> ModuleType:
    """Return this package, or that of a checkout, whose modules import each other relatively."""
    if folder == OURS:
        return foretune
    spec = importlib.util.spec_from_file_location(
        "earlier", f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules["earlier"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return package


def part(folder: str, name: str) -> Any:
    """Return a module of a version."""
    return importlib.import_module(f"{version(folder).__name__}.{name}")


def family_of(folder: str, name: str) -> Any:
    return part(folder, "kernels").find_measurable(name)


def problem_of(folder: str, name: str, place: int, routing: str, flags: tuple[str, ...]) -> Any:
    groups, rows, n, k = LAYERS[place]
    sizes = tuple(int(one) for one in drawn_sizes(routing, rows, groups, np.random.default_rng(place)))
    dtype = "fp8e4m3" if "scaled" in name else "bf16"
    return part(folder, "datasets").Problem.of(
        name, dtype=dtype, flags=flags, ragged={"rows": sizes}, groups=groups, rows=rows, n=n, k=k
    )


def configs_of(folder: str, name: str, problem: Any, device: Any) -> list[Any]:
    """Return the specialized configs that a version has for a problem, those with bands of 8 if there are others."""
    family = family_of(folder, name)
    found = [one for one in family.space(device) if one["CONSUMERS"] and family.supports(one, problem, device) is None]
    return [one for one in found if one["GROUP_M"] == 8]


def compile_one(job: tuple[str, str, dict[str, int], list[Any], str]) -> None:
    """Compile one config into Triton's cache."""
    folder, name, knobs, case, device = job
    config = part(folder, "datasets").KernelConfig.from_json(knobs)
    with part(folder, "runtime").use_stub_driver(part(folder, "datasets").DeviceSpec.named(device)):
        family_of(folder, name).compile(config, problem_of(folder, name, *case))


def main() -> None:
    folder, names, began = sys.argv[1], sys.argv[2:], time.perf_counter()
    live = {one: part(one, "datasets").DeviceSpec.live() for one in (OURS, folder)}
    device_name = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    rows = [
        (name, place, routing, flags)
        for name in names
        for place, routing, flags in product(range(len(LAYERS)), ROUTINGS, FLAGS.get(name, ((),)))
    ]
    jobs = {}
    for name, *case in rows:
        for one in (OURS, folder):
            problem = problem_of(one, name, *case)
            for config in configs_of(one, name, problem, live[one]):
                key = one, name, family_of(one, name).binary_key(config, problem)
                jobs.setdefault(key, (one, name, config.to_json(), case, device_name))
    say(f"{torch.cuda.get_device_name()}: {len(rows)} problems, {len(jobs)} binaries")
    with get_context("spawn").Pool(max((os.cpu_count() or 2) - 1, 2)) as pool:
        pool.map(compile_one, jobs.values(), chunksize=1)
    say(f"compiled after {time.perf_counter() - began:.0f} s")
    timer, same, launched = Timer(clean=True), 0, 0
    ratios: dict[Any, list[float]] = defaultdict(list)
    for name, *case in rows:
        launches, outputs = {}, {}
        for one in (OURS, folder):
            problem, family = problem_of(one, name, *case), family_of(one, name)
            inputs = family.inputs(problem, live[one])
            for config in configs_of(one, name, problem, live[one]):
                key = tuple(config.to_json().items())
                inputs.out.fill_(float("nan"))
                out = family.launch(inputs, config)
                launches[one, key] = partial(family.launch, inputs, config)
                if one == OURS:
                    outputs[key] = out.flatten()[::3].clone()
                elif key in outputs:
                    launched += 1
                    same += torch.equal(outputs.pop(key), out.flatten()[::3])
        times = times_of(launches, timer, 5, 2)
        best = {one: min((us, key) for (which, key), us in times.items() if which == one) for one in (OURS, folder)}
        for (one, key), us in times.items():
            if one == OURS and (folder, key) in times:
                knobs = dict(key)
                tile = " ".join(f"{knob}={knobs[knob]}" for knob in TILE if knob in knobs)
                ratios[name, case[-1], case[1], tile].append(us / times[folder, key])
        (ours, config), (theirs, other) = best[OURS], best[folder]
        ratios[name, case[-1], case[1], "best"].append(ours / theirs)
        groups, tokens, n, k = LAYERS[case[0]]
        shown = [" ".join(str(dict(one).get(knob, "-")) for knob in TILE) for one in (config, other)]
        say(
            f"  {name} {' '.join(case[2])} {case[1]:8} {tokens:6} rows {groups} x {n} x {k}: {ours / theirs:.3f} "
            f"({2e-6 * tokens * n * k / ours:.0f} TFLOP/s) with {shown[0]}, theirs {shown[1]}"
        )
        del launches, inputs, outputs
        torch.cuda.empty_cache()
    say(f"after {time.perf_counter() - began:.0f} s; the same bits in {same} of {launched} launches; new over old time")
    for (name, flags, routing, tile), found in sorted(ratios.items()):
        say(
            f"  {name} {' '.join(flags)} {routing:8} {tile}: {geomean(found):.3f} "
            f"({min(found):.3f} to {max(found):.3f}, {len(found)} problems)"
        )


if __name__ == "__main__":
    main()

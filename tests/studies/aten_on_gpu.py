"""Where Inductor's template with the config ranked first beats ATen: `python tests/studies/aten_on_gpu.py`.

With `foretune.use("inductor", k=1)` one of the two runs unmeasured; `is_left_to_aten` in kernels/inductor/choices.py is
the rule. Linear layers of real models are timed in bf16 with a cold L2, both in turns, and each is a line of `--out`.
The table has the geometric mean of template / ATen by rows, and how often the template is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from foretune.datasets import DeviceSpec, Problem
from foretune.kernels import find_family
from foretune.runtime import Timer
from foretune.runtime.shortlist import make_shortlist

ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
#: (n, k) of linear layers.
LAYERS = (
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
    (768, 3072),
    (2048, 2048),
    (2560, 9728),
    (6144, 2560),
    (4096, 4096),
    (1024, 4096),
    (28672, 4096),
    (4096, 14336),
    (5120, 5120),
)
PASSES = {"forward": ("b_transposed",), "bias": ("b_transposed", "bias"), "dx": (), "dw": ("a_transposed",)}
ROUNDS, SAMPLES = 5, 5


def problems() -> list[Problem]:
    """Return the problems in random order: all as forward passes, and every third as one of the other passes."""
    found, drawn = [], random.Random(0)
    for n, k in dict.fromkeys(LAYERS):
        for m in ROWS:
            others = [name for name in PASSES if name == "bias" or (m >= 256 and name != "forward")]
            for name in ["forward", *([drawn.choice(others)] if drawn.random() < 0.4 else [])]:
                sizes = {"forward": (m, n, k), "bias": (m, n, k), "dx": (m, k, n), "dw": (n, k, m)}[name]
                dims = dict(zip("mnk", sizes, strict=True))
                found.append(Problem.of("inductor_mm", batch=1, dtype="bf16", flags=PASSES[name], **dims))
    drawn.shuffle(found)
    return list(dict.fromkeys(found))


def compiled(problem: Problem) -> None:
    """Compile the kernel ranked first into Triton's cache, in a process of a pool."""
    torch.cuda.init()
    family = find_family("inductor:mm")
    first = make_shortlist(family, problem, DeviceSpec.live(), k=1).configs[0]
    family.launch(family.inputs(problem, DeviceSpec.live()), first)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def aten(operands: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run ATen's kernel, with the bias as one row as in Inductor's default mode."""
    if "bias" in operands:
        return torch.addmm(operands["bias"][0], operands["a"], operands["b"])
    return torch.mm(operands["a"], operands["b"])


def timed(timer: Timer, problem: Problem) -> dict[str, Any]:
    """Return a line of the results."""
    family, device = find_family("inductor:mm"), DeviceSpec.live()
    first = make_shortlist(family, problem, device, k=1).configs[0]
    inputs = family.inputs(problem, device)
    calls = {"template": partial(family.launch, inputs, first), "aten": partial(aten, inputs.operands)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in [name for _ in range(ROUNDS) for name in random.sample(list(calls), 2)]:
        times[name] += timer.sample(calls[name], SAMPLES)
    estimate = float(family.estimate_us(problem, device, [first])[0])
    found = {name: statistics.median(each) for name, each in times.items()}
    return {**dict(problem.dims), "flags": problem.flags, **found, "estimate": estimate, "config": first.to_json()}


def main() -> None:
    """Compile, time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="aten.jsonl")
    parser.add_argument("--budget-s", type=float, default=90.0)
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    options = parser.parse_args()
    deadline, lines = time.monotonic() + options.budget_s, []
    pool = ProcessPoolExecutor(options.processes, get_context("spawn"))
    waiting = {pool.submit(compiled, problem): problem for problem in problems()}
    done, _ = wait(waiting, timeout=0.6 * options.budget_s)
    pool.shutdown(cancel_futures=True)  # nothing is timed while others launch
    timer = Timer()
    with open(options.out, "w") as file:
        for future in [one for one in waiting if one in done and one.exception() is None]:
            if time.monotonic() < deadline:
                lines.append(timed(timer, waiting[future]))
                file.write(json.dumps(lines[-1]) + "\n")
    print(f"{torch.cuda.get_device_name()}: {len(lines)} products\n{'rows':>6} {'n':>4} template/ATen  faster")
    for rows in sorted({line["m"] for line in lines}):
        ratios = [line["template"] / line["aten"] for line in lines if line["m"] == rows]
        share = sum(ratio < 1 for ratio in ratios) / len(ratios)
        print(f"{rows:6} {len(ratios):4} {statistics.geometric_mean(ratios):12.3f} {share:8.2f}")


if __name__ == "__main__":
    main()

"""`python exact_float32_on_gpu.py`: ATen against Inductor's templates on products in exact float32, on a GPU.

The problems are those of h200_inductor_mm, each with the configs that were fastest there. Prints the time of the
fastest over ATen's. A minute, most of it for compiling.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from foretune.datasets import DeviceSpec, load
from foretune.kernels import find_family
from foretune.kernels.inductor.matmul import is_exact
from foretune.model import geomean
from foretune.runtime.timing.timer import Timer

#: Interleaved rounds; the median of their times counts.
ROUNDS = 3


def aten(inputs):
    """Return a function that computes the product as Inductor calls ATen."""
    a, b, bias = (inputs.tensors.get(name) for name in ("a", "b", "bias"))
    if bias is None:
        return partial(torch.matmul, a, b, out=inputs.tensors["y"])
    return partial(torch.addmm if a.ndim == 2 else torch.baddbmm, bias, a, b, out=inputs.tensors["y"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=int, default=4, help="of each problem")
    options = parser.parse_args()
    family, device, timer = find_family("inductor:mm"), DeviceSpec.live(), Timer()
    grid = load("h200_inductor_mm").grid(family)
    ratios = []
    print(device.name)
    for case, times in zip(grid.cases, grid.times_us, strict=True):
        if not is_exact(case.problem):
            continue
        order = times.argsort()[: options.configs]  # NaN comes last
        inputs = family.inputs(case.problem, device)
        launches = {grid.configs[place]: partial(family.launch, inputs, grid.configs[place]) for place in order}
        launches["ATen"] = aten(inputs)
        taken = {name: [] for name in launches}
        for _ in range(ROUNDS):
            for name, launch in launches.items():
                taken[name].append(timer.time(launch).time_us)
        us = {name: statistics.median(one) for name, one in taken.items()}
        of_aten = us.pop("ATen")
        ratios.append(min(us.values()) / of_aten)
        print(f"{ratios[-1]:6.3f}  ATen {of_aten:9.1f} us  {case.problem}", flush=True)
    print(f"{geomean(ratios):6.3f}  geometric mean of {len(ratios)}; {sum(one < 1 for one in ratios)} below 1")


if __name__ == "__main__":
    main()

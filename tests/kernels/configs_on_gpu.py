"""`python configs_on_gpu.py OUT [PRODUCT...]`: configs of the grouped GEMMs next to the predicted one and torch, for
rows that are bound by memory or by arithmetic; the products are fwd, dx and dw (all).

Each config's result is compared with torch's. Times are medians of rounds in which all contenders run in random order,
because the first ones after a pause take up to 9 % longer."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import foretune
import numpy as np
import torch
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_measurable
from foretune.kernels.grouped_gemm.contenders import _others
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes

ROUNDS = 15
#: Rows, groups, N, K, routing.
ROWS = [
    (16384, 128, 2816, 4096, "balanced"),
    (8192, 128, 2816, 4096, "balanced"),
    (16384, 128, 4096, 1408, "balanced"),
    (16384, 128, 2816, 4096, "uniform"),
    (8192, 128, 2816, 4096, "zipf"),
    (65536, 64, 2816, 2048, "balanced"),
    (65536, 128, 2816, 2048, "balanced"),
    (65536, 64, 2048, 1408, "balanced"),
    (65536, 64, 2816, 2048, "uniform"),
    (65536, 64, 2816, 2048, "zipf"),
    (65536, 64, 2816, 2048, "hot"),
    (65536, 64, 2048, 1408, "hot"),
]
# CONSUMERS, PINGPONG, BLOCK_M, BLOCK_N, BLOCK_K, PROGRAMS_PER_SM, TMA, num_warps, num_stages, and values of GROUP_M.
OVER_ROWS = [
    (2, 0, 128, 256, 64, 1, (1, 1, 1), 4, 4, (8,)),
    (2, 1, 128, 128, 64, 1, (1, 1, 1), 4, 5, (8,)),
    (0, 0, 128, 128, 128, 1, (1, 1, 0), 8, 3, (8,)),
    (0, 0, 128, 256, 64, 1, (1, 1, 0), 8, 3, (8,)),
    (0, 0, 64, 256, 128, 1, (1, 1, 0), 8, 2, (8,)),
]
OF_DW = [
    (2, 0, 128, 256, 64, 1, (1, 1, 1), 4, 4, (1, 8)),
    (2, 0, 256, 128, 64, 1, (1, 1, 1), 4, 4, (1, 4)),
    (0, 0, 128, 256, 64, 1, (0, 1, 1), 8, 3, (1, 8)),
    (0, 0, 256, 128, 32, 1, (1, 1, 1), 8, 4, (1, 8)),
]


def configs_of(family, product):
    for consumers, pingpong, m, n, k, programs, tma, warps, stages, bands in OF_DW if product == "dw" else OVER_ROWS:
        for band in bands:
            knobs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": band, "PROGRAMS_PER_SM": programs}
            knobs |= dict(zip(family.tma, tma, strict=True)) | {"CONSUMERS": consumers, "PINGPONG": pingpong}
            name = f"{m}x{n}x{k} s{stages} g{band}" + (" ws" if consumers else "") + (" pingpong" if pingpong else "")
            yield name, KernelConfig.of(**knobs, num_warps=warps, num_stages=stages)


def in_random_order(names, rounds):
    """Yield the number of each round, and the names in an order of its own."""
    order, shuffled = list(names), random.Random(0)
    for turn in range(rounds):
        shuffled.shuffle(order)
        yield turn, order


def timed(launches):
    """The median microseconds of each launch."""
    times = {name: [] for name in launches}
    for launch in launches.values():
        launch()
    for _, order in in_random_order(launches, ROUNDS):
        events = []
        for name in order:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(300_000)  # so that the host is ahead
            first.record()
            launches[name]()
            launches[name]()
            last.record()
            events.append((name, first, last))
        torch.cuda.synchronize()
        for name, first, last in events:
            times[name].append(first.elapsed_time(last) * 500)
    return {name: float(np.median(found)) for name, found in times.items()}


def compare(product, rows, groups, n, k, routing, say):
    family, device = find_measurable(f"grouped_gemm_{product}"), DeviceSpec.live()
    sizes = tuple(drawn_sizes(routing, rows, groups, np.random.default_rng(1)))
    problem = Problem.of(family.name, groups=groups, rows=rows, n=n, k=k, ragged={"rows": sizes})
    inputs = family.inputs(problem, device)
    launches = {"torch": _others(family.name, inputs)["torch"]}
    expected = launches["torch"]()[::16].double()
    predicted = foretune.shortlist(family, problem, k=1, device=device).configs[0]
    named = dict(configs_of(family, product))
    named["predicted"] = predicted
    for name, config in named.items():
        inputs.out.fill_(float("nan"))
        family.launch(inputs, config)
        error = float((inputs.out[::16].double() - expected).norm() / expected.norm())
        if not error < 1e-2:
            say(f"{name} is wrong by {error}")
        launches[name] = lambda config=config: family.launch(inputs, config)
    us = timed(launches)
    title = f"{product}: {rows} rows, {groups} x {n} x {k}, {routing}; predicted {predicted}"
    say(title)
    for name in sorted(us, key=us.get):
        rates = (
            f"{family.bytes(problem) / us[name] / 1e6:.2f} TB/s {family.flops(problem) / us[name] / 1e6:.0f} TFLOP/s"
        )
        say(f"  {us[name]:8.1f} us {us[name] / us['predicted']:.3f} {rates} {name}")


def main():
    folder, products = Path(sys.argv[1]), sys.argv[2:] or ["fwd", "dx", "dw"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"configs_{'_'.join(products)}.txt").open("w") as log:

        def say(text):
            print(text, file=log, flush=True)

        say(torch.cuda.get_device_name())
        for row in ROWS:
            for product in products:
                compare(product, *row, say)


if __name__ == "__main__":
    main()

"""Check the goals of mode `refine` on this machine's GPU: `python refine_on_gpu.py [--families F,G] [--searched 256]`.

Layers are those of no model in models.csv. For each, routings drift from call to call, and the three products of a
grouped GEMM are refined with calls on their own tensors. A table has a row for each layer and product, in % over the
best config of a search under the same routings (the `--searched` best predicted configs; 0: all supported ones): the
predicted config, the best of a shortlist of 8 that is timed under one routing, and what refinement chose after 200
calls, each timed again side by side; and what these 200 calls cost over the predicted config alone on the same
routings. The geometric means and the worst are compared with the goals. Then a training step with the op itself runs
under `torch.cuda.set_sync_debug_mode("error")`, and the host time of a call is compared with that in mode `predict`.

`--tiny` runs small layers, also on a CPU with TRITON_INTERPRET=1, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import replace
from typing import Any

import foretune
import numpy as np
import torch
from foretune.datasets import KernelConfig, Problem
from foretune.kernels import find_measurable
from foretune.kernels.op_calls import device_at
from foretune.model.metrics import geomean
from foretune.runtime import choice
from foretune.runtime.timing.timer import timer_of
from foretune.runtime.tuning.refine import calls, refinement
from foretune.runtime.tuning.refine.race import CALLS

#: Groups, rows, N and K of layers that no shipped model has.
LAYERS = [(40, 16384, 2304, 2560), (96, 32768, 2560, 3328), (72, 65536, 1280, 1792), (20, 8192, 12800, 4608)]
TINY = [(4, 64, 32, 32)]
PRODUCTS = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
#: The number of routings that calls and searches see, and how many of them a search times.
ROUTINGS, SEARCHED_ON = 64, 4
GOALS = {"regret, mean": 0.5, "regret, worst": 3.0, "cost, worst": 1.0, "host us": 3.0}


class HostClock:
    """A stopwatch for a machine without a GPU, where launches have ended when they return."""

    def __init__(self) -> None:
        self.ended: list[tuple[Any, float]] = []

    def begin(self) -> float:
        return time.perf_counter()

    def end(self, mark: float, about: Any) -> None:
        self.ended.append((about, 1e6 * (time.perf_counter() - mark)))

    def cancel(self, mark: float) -> None:
        pass

    def read(self) -> Any:
        while self.ended:
            yield self.ended.pop(0)


def time_us(launch: Any) -> float:
    """The time of a launch, in microseconds."""
    if torch.cuda.is_available():
        return timer_of(torch.cuda.current_device()).time(launch).time_us
    began = time.perf_counter()
    launch()
    return 1e6 * (time.perf_counter() - began)


def drifting(groups: int, rows: int, seed: int) -> list[tuple[int, ...]]:
    """Group sizes of successive calls: experts' popularity drifts, and each call draws its rows."""
    random = np.random.default_rng(seed)
    popularity, sizes = random.normal(0, 1.0, groups), []
    for _ in range(ROUTINGS):
        popularity = 0.97 * popularity + random.normal(0, math.sqrt(1 - 0.97**2), groups)
        share = np.exp(popularity)
        sizes.append(tuple(random.multinomial(rows, share / share.sum()).tolist()))
    return sizes


class Layer:
    """One product of a layer, with inputs for each routing."""

    def __init__(self, name: str, layer: tuple[int, int, int, int], seed: int) -> None:
        groups, rows, n, k = layer
        self.family, self.device = find_measurable(name), device_at(0 if torch.cuda.is_available() else -1)
        self.known = Problem.of(name, groups=groups, rows=rows, n=n, k=k)
        self.all_sizes = drifting(groups, rows, seed)
        self.problems = [
            replace(self.known, ragged=foretune.datasets.Ragged("rows", sizes)) for sizes in self.all_sizes
        ]
        self.inputs = [self.family.inputs(problem, self.device) for problem in self.problems]

    def launch(self, config: KernelConfig, routing: int) -> Any:
        return self.family.launch(self.inputs[routing % ROUTINGS], config)

    def mean_us(self, config: KernelConfig, routings: range) -> float:
        return statistics.fmean(time_us(lambda: self.launch(config, routing)) for routing in routings)  # noqa: B023

    def searched(self, count: int) -> KernelConfig:
        """The best config under the routings: all are timed on one, and the best 16 on all that a search sees."""
        listed = foretune.shortlist(
            self.family, self.known, self.device, k=count or len(self.family.space(self.device))
        )
        times: dict[KernelConfig, float] = {}
        for config in listed.configs:
            try:
                self.launch(config, 0)
                times[config] = self.mean_us(config, range(1))
            except Exception as error:  # noqa: BLE001, PERF203 - a config that fails is not the best
                print(f"{self.family.name}: {config} failed: {error}")
        leading = sorted(times, key=times.__getitem__)[:16]
        each = ROUTINGS // SEARCHED_ON
        return min(leading, key=lambda config: self.mean_us(config, range(0, ROUTINGS, each)))

    def refined(self) -> tuple[refinement.Refinement[KernelConfig], list[int]]:
        """Refine with calls on all routings in turn; return the refinement and the config of each timed call."""
        refinement._all.clear()
        chooses = choice.refinement(self.family, self.known, self.device)
        assert chooses is not None
        chooses._store = chooses._loading = None  # start without earlier results
        ran: list[KernelConfig] = []
        call = 0

        def launch(config: KernelConfig) -> Any:
            ran.append(config)
            return self.launch(config, call)

        def compile_one(config: KernelConfig) -> list[Any]:
            return [refinement.in_background(lambda: self.family.compile(config, self.known))]

        while chooses.final is None:
            chooses.run(launch, compile_one)
            call += 1
            while any(not job.done() for jobs in chooses._compiling.values() for job in jobs):
                time.sleep(0.01)  # so that 200 calls are not over before there is anything to compare
        return chooses, ran

    def cost(self, ran: list[KernelConfig]) -> float:
        """The time of these calls over that of the first config on the same routings, both in turn."""
        spent = alone = 0.0
        for call, config in enumerate(ran[:CALLS]):
            spent += (own := self.mean_us(config, range(call, call + 1)))
            alone += own if config == ran[0] else self.mean_us(ran[0], range(call, call + 1))
        return spent / alone


def step_without_waiting(tiny: bool) -> None:
    """Run training steps of the op in mode `refine`, in which anything that synchronizes is an error."""
    groups, rows, n, k = (TINY if tiny else LAYERS)[0]
    where = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, k, device=where, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(groups, n, k, device=where, dtype=torch.bfloat16, requires_grad=True)
    all_sizes = [torch.tensor(sizes, device=where, dtype=torch.int32) for sizes in drifting(groups, rows, 1)]

    def step(mode: str, call: int) -> None:
        foretune.grouped_gemm(x, w, all_sizes[call % ROUTINGS], mode=mode).sum().backward()

    for mode in ("predict", "refine"):
        step(mode, 0)
    if where == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    count = 3 if tiny else 3 * CALLS
    for call in range(count):
        step("refine", call)
        time.sleep(0 if tiny else 0.05)  # candidates compile meanwhile
    if where == "cuda":
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    print(f"{count} training steps without a synchronization; decided:")
    for row in foretune.refining().rows:
        if row["state"] == "chosen":
            print("  ", {name: row[name] for name in ("kernel", "config", "calls", "saved_us")})
    spent: dict[str, list[float]] = {"predict": [], "refine": []}
    with torch.no_grad():
        for _ in range(2 if tiny else 30):
            for mode, of_it in spent.items():
                if where == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
                for call in range(2 if tiny else 100):
                    foretune.grouped_gemm(x, w, all_sizes[call % ROUTINGS], mode=mode)
                of_it.append((time.perf_counter() - began) / (2 if tiny else 100) * 1e6)
    more = statistics.median(spent["refine"]) - statistics.median(spent["predict"])
    print(f"host time of a decided call: {more:+.2f} us over mode predict (goal: {GOALS['host us']:g})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(PRODUCTS))
    parser.add_argument("--searched", type=int, default=256, help="configs of the search; 0: all")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        calls.stopwatch = HostClock  # type: ignore[assignment]
    elif not isinstance(calls.stopwatch(), calls.CudaEvents):
        raise SystemExit("the calls of this machine's GPU cannot be timed")
    rows = []
    for name in given.families.split(","):
        for seed, layer in enumerate(TINY if given.tiny else LAYERS):
            one = Layer(name, layer, seed)
            best = one.searched(2 if given.tiny else given.searched)
            shortlist = foretune.shortlist(one.family, one.known, one.device, k=8).configs
            listed = min(shortlist[: 2 if given.tiny else 8], key=lambda config: one.mean_us(config, range(1)))
            chooses, ran = one.refined()
            columns = {"predicted": chooses.candidates[0], "shortlist": listed, "refined": chooses.final, "best": best}
            times: dict[str, list[float]] = {column: [] for column in columns}
            for routing in range(2 if given.tiny else ROUTINGS):  # side by side
                for column, config in columns.items():
                    times[column].append(one.mean_us(config, range(routing, routing + 1)))
            means = {column: statistics.fmean(of_it) for column, of_it in times.items()}
            losses = {column: means[column] / means["best"] for column in ("predicted", "shortlist", "refined")}
            rows.append({**losses, "cost": one.cost(ran)})
            print(f"{one.known}: " + ", ".join(f"{key} {100 * (value - 1):+.2f} %" for key, value in rows[-1].items()))
    for column in rows[0]:
        values = [row[column] for row in rows]
        print(f"{column}: mean {100 * (geomean(values) - 1):+.2f} %, worst {100 * (max(values) - 1):+.2f} %")
    reached = {
        "regret, mean": 100 * (geomean([row["refined"] for row in rows]) - 1),
        "regret, worst": 100 * (max(row["refined"] for row in rows) - 1),
        "cost, worst": 100 * (max(row["cost"] for row in rows) - 1),
    }
    for goal, value in reached.items():
        print(f"{goal}: {value:.2f} %, goal {GOALS[goal]:g} %: {'reached' if value <= GOALS[goal] else 'missed'}")
    step_without_waiting(given.tiny)


if __name__ == "__main__":
    main()

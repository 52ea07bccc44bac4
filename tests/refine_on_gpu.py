"""Check the goals of mode `refine` on this machine's GPU: `python refine_on_gpu.py OUT [--limit-s 250] [--only PARTS]`.

Layers are those of no model in models.csv, and routings drift from call to call. Parts are the products of each layer,
`fused_moe` if SGLang's files are on the path, and kernels of fla-core if fla is, each call after a matrix product that
keeps the device busy, because nothing is explored while it waits for the host. The table has, in % over the best
config of a search under the same routings (the `--searched` best predicted configs; all of an attached kernel): the
predicted config, the best of a shortlist of 8 timed under one routing, and what refinement chose after 200 calls, timed
side by side; and what these 200 calls cost over the predicted config alone. "calls" runs the op and training steps
under `torch.cuda.set_sync_debug_mode("error")`, and compares the host time of undecided and decided calls with mode
`predict`.

Other processes compile what is searched. Each part writes a file of OUT, and a part whose file is there is skipped, so
run it again to go on. OUT/calls/ has what explains a miss: all timed calls in their order, and for each candidate what
was predicted, estimated and measured side by side. `--only` names the parts to run (`--list` prints them), so that one
process for each GPU of a host can share a folder. It ends before `--limit-s` seconds, whatever runs then, and prints
the table of what is done so far last. `--tiny` runs small layers, also on a CPU with TRITON_INTERPRET=1; its figures
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

BEGAN = time.monotonic()
os.environ["FORETUNE_CACHE_DIR"] = mkdtemp()  # nothing is known from earlier runs

import foretune  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from foretune.datasets import DeviceSpec, KernelConfig, Problem, Ragged  # noqa: E402
from foretune.kernels import find_measurable  # noqa: E402
from foretune.kernels.op_calls import device_at  # noqa: E402
from foretune.model.metrics import geomean  # noqa: E402
from foretune.runtime import choice  # noqa: E402
from foretune.runtime.launching.ahead import compile_ahead, cores  # noqa: E402
from foretune.runtime.launching.stub_driver import use_stub_driver  # noqa: E402
from foretune.runtime.timing.timer import timer_of  # noqa: E402
from foretune.runtime.tuning.refine import calls, refinement  # noqa: E402
from foretune.runtime.tuning.refine.race import CALLS  # noqa: E402
from refine_records import events_us, explained, planned, record, settle  # noqa: E402

#: Groups, rows, N and K of layers that no shipped model has.
LAYERS = [(40, 16384, 2304, 2560), (72, 32768, 1280, 1792), (20, 8192, 6400, 4608)]
TINY = [(4, 64, 32, 32)]
PRODUCTS = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
#: Layers of `fused_moe`: experts, topk, hidden, inter, tokens.
MOE = [(48, 6, 2304, 1152, 4096), (96, 8, 2560, 640, 1024)]
#: Calls of fla-core, and the shapes, as `third_party/autotuners_on_gpu.py` makes them.
FLA = {"matmul": (3072, 2304, 1792), "chunk_gla": (2, 4096, 12, 96, 192), "layer_norm": (24576, 1792)}
#: The number of routings that drift from call to call, and how many of them a search times.
ROUTINGS, SEARCHED_ON = 16, 4
#: The seconds that a part may take, so that none is begun that would not end.
PART_S = 45.0
GOALS = {"refined, mean": 0.5, "refined, worst": 3.0, "cost, worst": 1.0}


def time_us(launch: Callable[[], Any]) -> float:
    """The time of a launch, in microseconds."""
    if torch.cuda.is_available():
        return timer_of(torch.cuda.current_device()).time(launch, budget_us=3000.0).time_us
    began = time.perf_counter()
    launch()
    return 1e6 * (time.perf_counter() - began)


def drifting(groups: int, rows: int, seed: int) -> list[tuple[int, ...]]:
    """Group sizes of successive calls: experts' popularity drifts, and each call draws its rows."""
    random = np.random.default_rng(seed)
    popularity, sizes = random.normal(0, 1.0, groups), []
    for _ in range(ROUTINGS):
        popularity = 0.9 * popularity + random.normal(0, math.sqrt(1 - 0.9**2), groups)
        share = np.exp(popularity)
        sizes.append(tuple(random.multinomial(rows, share / share.sum()).tolist()))
    return sizes


def stay_a_stub(device: DeviceSpec) -> None:
    """Compile for a device in this process from now on."""
    global _stub
    _stub = use_stub_driver(device)
    _stub.__enter__()


def compile_one(name: str, problem: Problem, config: KernelConfig) -> None:
    with suppress(Exception):  # a config that does not compile fails when it is timed
        find_measurable(name).compile(config, problem)


class Layer:
    """One product of a layer, with inputs for each routing. Grouped GEMMs share their operands."""

    def __init__(self, problem: Problem, searched: int, pool: ProcessPoolExecutor | None) -> None:
        self.family, self.device = find_measurable(problem.family), device_at(0 if torch.cuda.is_available() else -1)
        self.known = problem
        count = searched or len(self.family.space(self.device))
        listed = foretune.shortlist(self.family, problem, self.device, k=count)
        self.configs = listed.configs
        submit = (lambda *given: pool.submit(compile_one, *given)) if pool is not None else lambda *given: None
        self.compiles = [submit(problem.family, problem, config) for config in self.configs]

    def prepare(self, seed: int) -> None:
        """Make the inputs."""
        family, device = self.family, self.device
        if self.known.family not in PRODUCTS:
            self.inputs = [family.inputs(self.known, device, seed=seed + at) for at in range(ROUTINGS // 4)] * 4
            return
        from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

        rows, first = self.known["rows"], None
        self.inputs = []
        for sizes in drifting(self.known["groups"], rows, seed):
            problem = replace(self.known, ragged=Ragged("rows", sizes))
            first = first or family.inputs(problem, device)
            given = torch.tensor(sizes, dtype=torch.int32, device=first.left.device)
            tiles = TileMap.build(given, rows, *family._chunks(problem, device))
            self.inputs.append(replace(first, group_sizes=given, tile_map=tiles, problem=problem))

    def launch(self, config: KernelConfig, routing: int) -> Any:
        return self.family.launch(self.inputs[routing % ROUTINGS], config)

    def mean_us(self, config: KernelConfig, routings: Sequence[int]) -> float:
        return statistics.fmean(time_us(lambda: self.launch(config, at)) for at in routings)  # noqa: B023

    def searched(self) -> tuple[KernelConfig, KernelConfig]:
        """The best config under the routings and the best of 8 under one of them.

        All are timed on one routing, and the best 16 on all that a search sees.
        """
        times: dict[KernelConfig, float] = {}
        for config, compiled in zip(self.configs, self.compiles, strict=True):
            if compiled is not None:
                compiled.result()
            try:
                self.launch(config, 0)
                times[config] = self.mean_us(config, [0])
            except Exception as error:  # noqa: BLE001 - a config that fails is not the best
                print(f"{self.family.name}: {config} failed: {error}"[:200])
        leading = sorted(times, key=times.__getitem__)[:16]
        on = range(0, ROUTINGS, ROUTINGS // SEARCHED_ON)
        listed = min(self.configs[:8], key=lambda config: times.get(config, math.inf))
        return min(leading, key=lambda config: self.mean_us(config, on)), listed

    def refined(self) -> tuple[refinement.Refinement[KernelConfig], list[KernelConfig]]:
        """Refine with 200 calls on all routings in turn; return what chooses, and the config of each call."""
        refinement._all.clear()
        chooses = choice.refinement(self.family, self.known, self.device)
        assert chooses is not None
        chooses._store = chooses._loading = None  # start without earlier results
        ran: list[KernelConfig] = []

        def launch(config: KernelConfig) -> Any:
            ran.append(config)
            return self.launch(config, len(ran))

        def compile_config(config: KernelConfig) -> list[Future[Any]]:
            return [refinement.in_background(lambda: self.family.compile(config, self.known))]

        while len(ran) < CALLS and chooses.final is None:
            chooses.run(launch, compile_config)
            settle(chooses)
        return chooses, ran

    def row(self, seed: int) -> tuple[dict[str, float], dict[str, Any]]:
        """The losses and the cost, and what explains them."""
        self.prepare(seed)
        best, listed = self.searched()
        chooses, ran = self.refined()
        refined = chooses.final or chooses.candidates[chooses.race.best]
        columns = {"predict": ran[0], "shortlist": listed, "refined": refined, "best": best}
        times: dict[KernelConfig, list[float]] = defaultdict(list)
        for routing in range(ROUTINGS):  # side by side
            for config in dict.fromkeys([*columns.values(), *ran]):
                times[config].append(self.mean_us(config, [routing]))
        means = {config: statistics.fmean(of_it) for config, of_it in times.items()}
        losses = {column: means[config] / means[best] for column, config in columns.items() if column != "best"}
        numbers = {config: at for at, config in enumerate(chooses.candidates)}
        about = {"ran": [numbers[config] for config in ran], "best": str(best), "best_is": numbers.get(best)}
        return losses | {"cost": cost_of(ran, means), "best_us": means[best]}, explained(chooses, means) | about


def cost_of(ran: Sequence[Any], means: dict[Any, float]) -> float:
    """The time of calls over that of as many calls of the first config."""
    return statistics.fmean(means[config] for config in ran) / means[ran[0]]


def fastest(launch: Any, configs: Sequence[Any]) -> Any:
    """The fastest of all configs of an attached kernel, which are compiled side by side."""
    compile_ahead([partial(launch.compile, config) for config in configs], cores())
    times = {}
    for config in configs:
        with suppress(Exception):  # a config that fails is not the fastest
            times[config] = launch.time_us(config)
    again = sorted(times, key=times.__getitem__)[:3]
    return min(again, key=lambda config: statistics.median(launch.time_us(config) for _ in range(5)))


def attached_rows(workload: str, shape: tuple[int, ...]) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """The losses and the cost of each autotuned kernel in a call of fla-core, attached without a family."""
    sys.path.insert(0, str(Path(__file__).parent / "third_party"))
    from autotuners_on_gpu import call
    from foretune.runtime.tuning.one_launch import OneLaunch
    from triton.runtime.autotuner import Autotuner

    run, seen = Autotuner.run, {}

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen[id(self)] = self, args, kwargs
        return run(self, *args, **kwargs)

    Autotuner.run, one_call = watched, call(workload, shape)
    import fla

    try:
        with foretune.attached(fla):  # times a part of the configs
            one_call()
        tuners = [found for found in seen.values() if len(found[0].configs) > 1]
        best = {id(tuner): fastest(OneLaunch(tuner, args, kwargs), tuner.configs) for tuner, args, kwargs in tuners}
        for tuner, _, _ in tuners:
            tuner.cache.clear()
            foretune.attach(tuner, mode="refine")
        os.environ["FORETUNE_CACHE_DIR"] = mkdtemp()
        refinement._all.clear()
        filler = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) if torch.cuda.is_available() else None
        for _ in range(CALLS):
            if filler is not None:
                torch.mm(filler, filler)  # as the rest of a model does, it keeps the device behind the host
            one_call()
            for chooses in list(refinement._all.values()):
                settle(chooses)
    finally:
        Autotuner.run = run
    rows = []
    for tuner, args, kwargs in tuners:
        found = [one for one in refinement._all.values() if set(one.candidates) <= set(tuner.configs)]
        one = next((one for one in found if one.name.endswith(tuner.base_fn.__name__)), None)
        foretune.detach(tuner)
        if one is None:  # for example, called by another call only
            continue
        launch, refined = OneLaunch(tuner, args, kwargs), one.final or one.candidates[one.race.best]
        ran = {config: calls for config, calls in zip(one.candidates, one.race.calls.tolist(), strict=True) if calls}
        columns = {"predict": one.candidates[0], "refined": refined, "best": best[id(tuner)]}
        times: dict[Any, list[float]] = defaultdict(list)
        for _ in range(5):  # side by side
            for config in dict.fromkeys([*columns.values(), *ran]):
                times[config].append(launch.time_us(config))
        means = {config: statistics.median(of_it) for config, of_it in times.items()}
        spent = [config for config, count in ran.items() for _ in range(count)]
        row = {column: means[config] / means[columns["best"]] for column, config in columns.items() if column != "best"}
        numbers = {config: at for at, config in enumerate(one.candidates)}
        about = {"best": str(columns["best"]), "best_is": numbers.get(columns["best"])}
        rows.append((row | {"cost": cost_of([one.candidates[0], *spent], means)}, explained(one, means) | about))
    return rows


def calls_of_the_op(tiny: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Run calls and steps in mode `refine`, where anything that synchronizes is an error.

    Returns the host time of a call over that in mode `predict`, and that of each call.
    """
    where, many = "cuda" if torch.cuda.is_available() else "cpu", 2 if tiny else 100
    groups, rows, k = (4, 64, 32) if tiny else (8, 1024, 512)
    states = ("undecided", "undecided, median call", "undecided, median call that plans", "two events", "decided")
    more: dict[str, list[float]] = {state: [] for state in states}
    raw: list[dict[str, Any]] = []
    for n in (32,) if tiny else range(256, 256 + 6 * 64, 64):
        x = torch.randn(rows, k, device=where, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(groups, n, k, device=where, dtype=torch.bfloat16, requires_grad=True)
        all_sizes = [torch.tensor(sizes, device=where, dtype=torch.int32) for sizes in drifting(groups, rows, n)]

        def host_us(mode: str) -> list[tuple[float, bool]]:
            """The host time of each call, and whether it planned."""
            if where == "cuda":
                debugged = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode(debugged)
            times, plans = [time.perf_counter()], [len(planned)]
            with torch.no_grad():
                for at in range(many):
                    foretune.grouped_gemm(x, w, all_sizes[at % ROUTINGS], mode=mode)  # noqa: B023
                    times.append(time.perf_counter())
                    plans.append(len(planned))
            each = [round(1e6 * (after - before), 1) for before, after in pairwise(times)]
            return list(zip(each, [after > before for before, after in pairwise(plans)], strict=True))

        host_us("predict")
        refinement._all.clear()
        if where == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            for at in range(4 if tiny else 400):  # until all candidates have joined
                foretune.grouped_gemm(x, w, all_sizes[at % ROUTINGS], mode="refine").sum().backward()
                time.sleep(0 if tiny else 0.05)
                if at > 10 and all(not one._left and not one._compiling for one in refinement._all.values()):
                    break
            chooses = next(iter(refinement._all.values()), None)
            if chooses is not None and chooses.final is None:
                before, spent, after = host_us("predict"), host_us("refine"), host_us("predict")
                raw.append({"n": n, "predict": before + after, "refine": spent})
                usual = statistics.median([us for us, _ in before + after])
                more["undecided"].append(statistics.fmean([us for us, _ in spent]) - usual)
                more["undecided, median call"].append(statistics.median([us for us, _ in spent]) - usual)
                more["undecided, median call that plans"] += [us - usual for us, plans in spent if plans]
                more["two events"].append(events_us(many))
            for at in range(2 if tiny else 400):
                foretune.grouped_gemm(x, w, all_sizes[at % ROUTINGS], mode="refine")
        finally:
            if where == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        if chooses is not None and chooses.final is not None:
            rounds = [
                [statistics.fmean(us for us, _ in host_us(mode)) for mode in ("refine", "predict")] for _ in range(10)
            ]
            more["decided"].append(statistics.median(refine - predict for refine, predict in rounds))
    return {state: statistics.median(of_it) for state, of_it in more.items() if of_it}, raw


def table(out: Path) -> str:
    """The table of all files of a folder."""
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    lines = []
    for path in sorted(out.glob("*.json")):
        found = json.loads(path.read_text())
        if path.stem == "calls":
            lines += [f"host us over mode predict (goal 3), {state}: {value:+.2f}" for state, value in found.items()]
        else:
            rows[found["op"]] += found["rows"]
    columns = ("predict", "shortlist", "refined", "cost")
    lines.append(f"{'% over the best, geometric mean (worst)':40}" + "".join(f"{column:>18}" for column in columns))
    for op, of_it in {**rows, "all": [row for of_op in rows.values() for row in of_op]}.items():
        line = f"{op + f', {len(of_it)}':40}"
        for column in columns:
            values = [row[column] for row in of_it if column in row]
            text = f"{100 * (geomean(values) - 1):+.2f} ({100 * (max(values) - 1):+.2f})" if values else "-"
            line += f"{text:>18}"
        lines.append(line)
    measured = [row for of_op in rows.values() for row in of_op]
    if measured:
        refined, costs = [row["refined"] for row in measured], [row["cost"] for row in measured]
        for goal, value in (
            ("refined, mean", geomean(refined)),
            ("refined, worst", max(refined)),
            ("cost, worst", max(costs)),
        ):
            reached = "reached" if 100 * (value - 1) <= GOALS[goal] else "missed"
            lines.append(f"{goal}: {100 * (value - 1):.2f} %, goal {GOALS[goal]:g} %: {reached}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--limit-s", type=float, default=250.0, help="seconds until no further part begins and it ends")
    parser.add_argument("--searched", type=int, default=256, help="configs of the search; 0: all")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile; 0: none")
    parser.add_argument("--only", metavar="PART,...", help="only parts that begin so, such as calls,fla")
    parser.add_argument("--list", action="store_true", help="print the parts, and measure nothing")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        given.workers = 0
    elif not isinstance(calls.stopwatch(), calls.CudaEvents):
        raise SystemExit("the calls of this machine's GPU cannot be timed")
    record()
    problems = [
        Problem.of(name, groups=groups, rows=rows, n=n, k=k)
        for groups, rows, n, k in (TINY if given.tiny else LAYERS)
        for name in PRODUCTS
    ]
    with suppress(foretune.ForetuneError):  # no engine
        from foretune.kernels.fused_moe import installed

        for experts, topk, hidden, inter, tokens in MOE if installed() and not given.tiny else ():
            sizes = {"experts": experts, "topk": topk, "hidden": hidden, "inter": inter, "tokens": tokens}
            problems.insert(len(PRODUCTS), Problem.of("fused_moe", **sizes))
    parts: dict[str, Callable[[], Any]] = {"calls": lambda: calls_of_the_op(given.tiny)}
    pool = None
    if given.workers:
        device = device_at(0)
        # A fresh interpreter, because CUDA cannot be used in a forked process.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(given.workers, context, initializer=stay_a_stub, initargs=(device,))
    left = [one for one in enumerate(problems) if not (given.out / f"{one[1].family}-{one[0]}.json").exists()]
    layers: dict[int, Layer] = {}

    def measured(at: int, problem: Problem) -> tuple[dict[str, Any], Any]:
        row, about = layers.pop(at).row(at)
        return {"op": problem.family, "problem": str(problem), "rows": [row]}, about

    def attached(workload: str, shape: tuple[int, ...]) -> tuple[dict[str, Any], Any]:
        found = attached_rows(workload, shape)
        return {"op": f"fla {workload}", "rows": [row for row, _ in found]}, [about for _, about in found]

    for at, problem in left:
        parts[f"{problem.family}-{at}"] = lambda at=at, problem=problem: measured(at, problem)
    if find_spec("fla") is not None and not given.tiny:
        for workload, shape in FLA.items():
            parts[f"fla-{workload}"] = lambda workload=workload, shape=shape: attached(workload, shape)
        order = ["calls", *list(parts)[1:5], *(f"fla-{workload}" for workload in FLA)]
        parts = {name: parts[name] for name in dict.fromkeys([*order, *parts])}
    if given.only is not None:
        names = given.only.split(",")
        all_parts = [*parts, *(path.stem for path in given.out.glob("*.json"))]
        if unknown := [name for name in names if not any(part.startswith(name) for part in all_parts)]:
            raise SystemExit(f"--only must have beginnings of {', '.join(all_parts)}, but has {', '.join(unknown)}")
        parts = {name: part for name, part in parts.items() if name.startswith(tuple(names))}
        left = [one for one in left if f"{one[1].family}-{one[0]}" in parts]
    if given.list:
        print("\n".join(parts))
        return

    def end() -> None:
        """Print the table, and end although threads may still compile."""
        print(table(given.out), flush=True)
        for process in list((pool._processes or {}).values()) if pool is not None else ():
            process.kill()
        os._exit(0)

    last = threading.Timer(max(given.limit_s - (time.monotonic() - BEGAN) - 5, 1), end)
    last.daemon = True
    last.start()
    for name, part in parts.items():
        if (given.out / f"{name}.json").exists():
            continue
        if time.monotonic() - BEGAN > given.limit_s - PART_S:
            print(f"{name}: no time left; run it again")
            break
        if not layers and name != "calls":  # the host times are over, so other processes may compile
            layers.update((at, Layer(problem, 2 if given.tiny else given.searched, pool)) for at, problem in left)
        began = time.monotonic()
        try:
            found, about = part()
        except Exception as error:  # noqa: BLE001 - the other parts still count
            print(f"{name} failed: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        (given.out / "calls").mkdir(exist_ok=True)
        (given.out / "calls" / f"{name}.json").write_text(json.dumps(about))
        (given.out / f"{name}.json").write_text(json.dumps(found))
        print(f"{name}: {time.monotonic() - began:.0f} s, {json.dumps(found)}"[:300], flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    end()


if __name__ == "__main__":
    main()

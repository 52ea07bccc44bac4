"""Other people's autotuners, attached: `python attached_on_gpu.py TUNINGS.jsonl OUT [--deadline 480]`.

TUNINGS.jsonl is what `autotuners_on_gpu.py` wrote on such a card: the same shapes, tuned as a whole. Here a process for
each workload tunes them with `foretune.attached` in force from its start, on an empty choice cache and an empty Triton
cache. Printed for the keys after a kernel's eighth: the seconds that a new key took, there and here (waiting for the
other processes of a GPU is in none); the regret of the choice by the times that the full search measured, and measured
again side by side with the full search's best config; and the launches that failed. OUT has a file a workload, of what
is done so far. Needs the same packages.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import mkdtemp

from autotuners_on_gpu import SHAPES, WORKLOADS, call, plain, shapes, tunings_in, turn

#: A key's place among those of its kernel from which on it may have a shortlist.
FIRST = 8
#: What each workload's kernels are found in.
PACKAGES = {
    "chunk_gla": "fla.ops",
    "matmul": "fla.ops.utils",
    "layer_norm": "fla.modules.norm",
    "fused_moe": "liger_kernel.ops",
}


def known_tunings(path: Path) -> dict[tuple[str, str, str], dict]:
    """Each full tuning by workload, kernel and key; the first, where several processes made it."""
    found: dict[tuple[str, str, str], dict] = {}
    for line in tunings_in(path):
        found.setdefault((line["workload"], line["kernel"], json.dumps(line["key"])), line)
    return found


def knobs_of(config) -> dict:
    return {name: plain(value) for name, value in config.all_kwargs().items()}


def watch(out: Path, gpu: str, workload: str, known: dict) -> None:
    """Has each new key of every autotuner written to `out`."""
    from foretune.runtime.tuning.one_launch import OneLaunch
    from triton.runtime.autotuner import Autotuner

    bench, run = Autotuner._bench, Autotuner.run
    state = {"waited": 0.0, "timed": 0}
    seen: dict[str, int] = defaultdict(int)

    def in_turn(time_one):
        def timed(self, *args, **kwargs):
            began = time.perf_counter()
            with turn(gpu):
                state["waited"] += time.perf_counter() - began
                state["timed"] += 1
                return time_one(self, *args, **kwargs)

        return timed

    def watched_run(self, *args, **kwargs):
        before, started = set(self.cache), time.perf_counter()
        state.update(waited=0.0, timed=0)
        result = run(self, *args, **kwargs)
        seconds = time.perf_counter() - started - state["waited"]
        for key in self.cache.keys() - before:
            name = self.base_fn.__name__
            place, seen[name] = seen[name], seen[name] + 1
            full = known.get((workload, name, json.dumps([plain(value) for value in key])))
            line = {"workload": workload, "kernel": name, "place": place, "seconds": seconds, "timed": state["timed"]}
            line |= {"key": [plain(value) for value in key], "chosen": knobs_of(self.cache[key]), "again": None}
            if place >= FIRST and full is not None:
                line["again"] = side_by_side(self, args, kwargs, self.cache[key], best_of(full))
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return result

    def side_by_side(tuner, args, kwargs, chosen, best):
        """The chosen config's time and the best's, each the least of three medians, one after the other in turn."""
        configs = [chosen, next((config for config in tuner.configs if knobs_of(config) == best), chosen)]
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        with turn(gpu):
            times = [[bench(tuner, *args, config=config, **kwargs)[0] for config in configs] for _ in range(3)]
        tuner.nargs = None
        return [min(one) for one in zip(*times, strict=True)]

    Autotuner._bench, Autotuner.run = in_turn(bench), watched_run
    OneLaunch.time_us = in_turn(OneLaunch.time_us)  # which times the attached ones


def best_of(full: dict) -> dict:
    return min((one for one in full["times"] if one[1] is not None and math.isfinite(one[1])), key=lambda one: one[1])[
        0
    ]


def work(tunings: Path, out: Path, workload: str, gpu: str, deadline: float) -> None:
    from importlib import import_module

    import foretune
    import torch

    watch(out, gpu, workload, known_tunings(tunings))
    with foretune.attached(import_module(PACKAGES[workload])) as tuners:
        print(f"{workload}: {len(tuners)} autotuners attached", flush=True)
        for index, shape in enumerate(shapes(workload)):
            if time.time() > deadline:
                print(f"{workload}: stopped before shape {index}", flush=True)
                return
            began = time.perf_counter()
            try:
                call(workload, shape)()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - the other shapes still count
                with out.open("a") as file:
                    file.write(
                        json.dumps({"workload": workload, "failed": f"{type(error).__name__}: {error}"[:300]}) + "\n"
                    )
            print(f"{workload} {index} of {SHAPES} {shape}: {time.perf_counter() - began:.1f} s", flush=True)


def report(known: dict, lines: list[dict]) -> str:
    """The table, a row a kernel and a row a workload."""
    rows: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    timed: dict[str, list[int]] = defaultdict(list)
    failed = [line for line in lines if "failed" in line]
    for line in lines:
        if "failed" in line or line["place"] < FIRST:
            continue
        full = known.get((line["workload"], line["kernel"], json.dumps(line["key"])))
        if full is None:
            continue
        times = {json.dumps(knobs, sort_keys=True): time_ms for knobs, time_ms, *_ in full["times"] if time_ms}
        regret = times.get(json.dumps(line["chosen"], sort_keys=True), math.nan) / min(times.values())
        again = line["again"][0] / line["again"][1] if line["again"] else math.nan
        seconds = sum(compiling + timing for _, _, compiling, timing, _ in full["times"])
        for name in (f"  {line['kernel']}", line["workload"]):
            rows[name].append((seconds, line["seconds"], regret, again))
            timed[name].append(line["timed"])
    head = f"{'after the eighth key':44} {'keys':>4} {'timed':>6} {'full s':>7} {'s':>6} {'share':>6}"
    said = [f"{head} {'regret %':>9} {'worst':>6} {'again %':>8} {'worst':>6}"]
    for name in sorted(rows, key=lambda name: (name.strip() not in WORKLOADS, name)):
        full_s, seconds, regret, again = zip(*rows[name], strict=True)
        said.append(
            f"{name:44} {len(full_s):4} {sum(timed[name]) / len(timed[name]):6.1f} {sum(full_s) / len(full_s):7.2f} "
            f"{sum(seconds) / len(seconds):6.2f} {sum(seconds) / sum(full_s):6.3f} {_mean(regret):9.2f} "
            f"{_worst(regret):6.1f} {_mean(again):8.2f} {_worst(again):6.1f}"
        )
    said += [f"failed launches: {len(failed)}", *(f"  {line['workload']}: {line['failed']}" for line in failed)]
    return "\n".join(said)


def _mean(ratios) -> float:
    logs = [math.log(ratio) for ratio in ratios if math.isfinite(ratio)]
    return 100 * math.expm1(sum(logs) / len(logs)) if logs else math.nan


def _worst(ratios) -> float:
    return max((100 * (ratio - 1) for ratio in ratios if math.isfinite(ratio)), default=math.nan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tunings", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline", type=float, default=480.0, help="seconds after which no shape is begun")
    parser.add_argument("--workloads", nargs="+", default=PACKAGES, choices=PACKAGES, help="which of them")
    parser.add_argument("--work", nargs=2, help="(internal) workload, gpu")
    parser.add_argument("--until", type=float, default=0.0, help="(internal)")
    options = parser.parse_args()
    if options.work:
        work(options.tunings, options.out, *options.work, options.until)
        return
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus, until, running = visible.split(","), time.time() + options.deadline, []
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [options.out / f"{workload}.jsonl" for workload in options.workloads]
    for part in parts:
        part.unlink(missing_ok=True)
    for at, (workload, part) in enumerate(zip(options.workloads, parts, strict=True)):
        gpu = gpus[at % len(gpus)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "TRITON_CACHE_DIR": mkdtemp()}
        environment |= {"FORETUNE_CACHE_DIR": mkdtemp(), "FLA_CACHE_RESULTS": "0"}
        command = [sys.executable, __file__, options.tunings, part, "--until", until]
        command += ["--work", workload, gpu]
        running.append(subprocess.Popen([str(word) for word in command], env=environment))
    for process in running:
        process.wait()
    lines = [line for part in parts if part.exists() for line in part.read_text().splitlines()]
    print(report(known_tunings(options.tunings), [json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()

"""The first eight keys of other people's kernels, attached: `key_search_on_gpu.py OUT [--gpus 4] [--deadline 200]`.

A process for each part of `PARTS` calls the shapes of a workload of `autotuners_on_gpu.py` with `foretune.attached` in
force, on empty caches. For each of the first eight keys of the part's kernels, the search is timed. Then all configs
are compiled side by side and timed for the regret of the choice: the fastest three and the choice again, interleaved.
As many processes run at the same time as there are GPUs; each has its own GPU and its own share of the CPU cores. The
seconds of the authors' search are those of tunings_h200.jsonl.gz. OUT keeps what is done: run it again to continue.
With `--unjudged`, nothing but the search is timed, so that one GPU needs less than four minutes. (Recorded times do not
help to judge: they are those of another launch where keys omit sizes.) Prints a table last, and needs fla-core,
liger-kernel and einops.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import median

from attached_on_gpu import PACKAGES, knobs_of, known_tunings
from autotuners_on_gpu import call, plain, shapes

FIRST = 8
#: The workload of each process, which of the parts of its kernels it judges, and the number of these parts.
PARTS = (("chunk_gla", 0, 1), ("fused_moe", 0, 2), ("fused_moe", 1, 2), ("layer_norm", 0, 1), ("matmul", 0, 1))
#: The same if nothing is judged: halves of a workload would both search all of its kernels.
WHOLE = tuple((workload, 0, 1) for workload in ("layer_norm", "matmul", "chunk_gla", "fused_moe"))
TUNINGS = Path(__file__).with_name("tunings_h200.jsonl.gz")
#: What the first eight keys took of the authors' search while they were tuned fully (issue 46).
BEFORE = 0.25


def regret_of(tuner, args, kwargs, allowed, chosen) -> tuple[float, int]:
    """How much slower the chosen config is than the best of all allowed ones, and how many work."""
    from foretune.runtime.launching.ahead import compile_ahead, cores
    from foretune.runtime.tuning.one_launch import OneLaunch

    launch, times = OneLaunch(tuner, args, kwargs), {}
    compile_ahead([partial(launch.compile, config) for config in allowed], cores())
    for config in allowed:
        with suppress(Exception):  # a config that fails is none to compare with
            times[config] = launch.time_us(config)
    again = list(dict.fromkeys([chosen, *sorted(times, key=times.__getitem__)[:3]]))
    samples = {config: [] for config in again}
    for _ in range(5):
        for config, found in samples.items():
            found.append(launch.time_us(config))
    medians = {config: median(found) for config, found in samples.items()}
    return medians[chosen] / min(medians.values()) - 1, len(times)


def watch(out: Path, workload: str, part: int, parts: int, deadline: float, judged: bool) -> None:
    """Has a line written to `out` for each new key among the first eight of each kernel of the part."""
    from foretune.runtime.tuning import triton_adapter
    from foretune.runtime.tuning.session import TuningSession
    from triton.runtime.autotuner import Autotuner

    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {(line["kernel"], line["key"]) for line in lines}
    seen: dict[str, int] = defaultdict(int)
    state = {"allowed": (), "timed": 0, "failed": 0}
    run, keep, make = Autotuner.run, TuningSession.keep, triton_adapter.KeyTuning

    def kept(self, candidate, measured, error=None):
        state["timed"] += 1
        state["failed"] += measured.time_us is None
        keep(self, candidate, measured, error)

    def made(tuner, shortlister, times, allowed, *rest):
        state["allowed"] = allowed
        return make(tuner, shortlister, times, allowed, *rest)

    def watched_run(self, *args, **kwargs):
        before, began = set(self.cache), time.perf_counter()
        state.update(allowed=(), timed=0, failed=0)
        result = run(self, *args, **kwargs)
        seconds = time.perf_counter() - began
        for key in self.cache.keys() - before:
            name, text = self.base_fn.__name__, json.dumps([plain(value) for value in key])
            place, seen[name] = seen[name], seen[name] + 1
            if list(seen).index(name) % parts != part or len(state["allowed"]) < 2:
                continue
            if place >= FIRST or (name, text) in done or time.time() > deadline:
                continue
            chosen = self.cache[key]
            line = {"workload": workload, "kernel": name, "key": text, "place": place, "seconds": seconds}
            line |= {"timed": state["timed"], "failed": state["failed"], "configs": len(state["allowed"])}
            regret = math.nan
            if judged:
                regret, line["working"] = regret_of(self, args, kwargs, state["allowed"], chosen)
            with out.open("a") as file:
                file.write(json.dumps(line | {"regret": regret, "chosen": knobs_of(chosen)}) + "\n")
        return result

    Autotuner.run, TuningSession.keep, triton_adapter.KeyTuning = watched_run, kept, made


def work(out: Path, workload: str, part: int, parts: int, deadline: float, judged: bool) -> None:
    from importlib import import_module

    import foretune
    import torch

    watch(out, workload, part, parts, deadline, judged)
    with foretune.attached(import_module(PACKAGES[workload])):
        for index, shape in enumerate(shapes(workload)[: FIRST + 4]):  # some shapes share keys
            if time.time() > deadline:
                print(f"{workload}: stopped before shape {index}", flush=True)
                return
            try:
                call(workload, shape)()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - the other shapes still count
                print(f"{workload} {shape}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def report(lines: list[dict]) -> str:
    """A row for each kernel, and rows for long and short lists and for all."""
    known = known_tunings(TUNINGS)
    head = f"{'first eight keys':42} {'keys':>4} {'configs':>7} {'share 1':>7} {'2-8':>5} {'failed':>6}"
    said = [f"{head} {'authors s':>9} {'s':>7} {'ratio':>6} {'regret %':>8} {'worst %':>7}"]
    groups = defaultdict(list)
    for line in lines:
        groups[line["kernel"]].append(line)
    totals = defaultdict(list)
    for name, some in groups.items():
        full = [known.get((one["workload"], name, one["key"])) for one in some]
        each = [sum(c + t for _, _, c, t, _ in one["times"]) for one in full if one]
        authors = sum(each) / len(each) * len(some) if each else math.nan
        seconds = sum(one["seconds"] for one in some)
        logs = [math.log1p(max(one["regret"], 0.0)) for one in some if not math.isnan(one["regret"])] or [math.nan]
        shares = [
            [one["timed"] / one["configs"] for one in some if (one["place"] == 0) is first] for first in (True, False)
        ]
        length = "lists of 16-48" if some[0]["configs"] >= 16 else "lists of 3-9"
        for of in (length, "all"):
            totals[of].append((len(some), *map(_mean, shares), authors, seconds, _mean(logs), max(logs)))
        said.append(
            f"{name:42} {len(some):4} {some[0]['configs']:7} {_mean(shares[0]):7.2f} {_mean(shares[1]):5.2f} "
            f"{sum(one['failed'] for one in some):6} {authors:9.1f} {seconds:7.1f} {seconds / authors:6.3f} "
            f"{100 * math.expm1(_mean(logs)):8.2f} {100 * math.expm1(max(logs)):7.1f}"
        )
    for of, rows in sorted(totals.items(), reverse=True):
        keys, first, then, authors, seconds, lost, worst = zip(*rows, strict=True)
        then, lost = ([one for one in some if not math.isnan(one)] for some in (then, lost))
        said.append(
            f"{f'{of}: {len(rows)} kernels':42} {sum(keys):4} {'':7} {_mean(first):7.2f} {_mean(then):5.2f} {'':6} "
            f"{sum(authors):9.1f} {sum(seconds):7.1f} {sum(seconds) / sum(authors):6.3f} "
            f"{100 * math.expm1(_mean(lost)):8.2f} {100 * math.expm1(max(worst)):7.1f}"
        )
    if totals:
        said.append(f"(seconds of the authors' search when all configs of a key were timed: {BEFORE})")
    return "\n".join(said)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def run_part(
    out: Path, free: SimpleQueue[tuple[str, set[int]]], until: float, options: list[str], part: tuple[str, int, int]
) -> None:
    """Run the process of a part on the next free GPU and its cores."""
    gpu, cores_here = free.get()
    try:
        file = out / f"{part[0]}-{part[1]}.jsonl"
        environment = os.environ | {"FLA_CACHE_RESULTS": "0", "CUDA_VISIBLE_DEVICES": gpu}
        environment["FORETUNE_CACHE_DIR"] = str(file.with_suffix(".cache"))
        environment["TRITON_CACHE_DIR"] = str(file.with_suffix(".triton"))
        command = [sys.executable, __file__, file, "--deadline", until, *options, "--work", *part]
        os.sched_setaffinity(0, cores_here)  # of this thread, whose processes inherit it
        subprocess.run([str(word) for word in command], env=environment, check=False)
    finally:
        free.put((gpu, cores_here))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--deadline", type=float, default=200.0, help="seconds after which no shape is begun")
    parser.add_argument("--gpus", type=int, default=1, help="the number of GPUs to use")
    parser.add_argument("--unjudged", action="store_true", help="do not measure regrets")
    parser.add_argument("--work", nargs=3, help="(internal) a part")
    options = parser.parse_args()
    if options.work:
        workload, part, parts = options.work
        work(options.out, workload, int(part), int(parts), options.deadline, not options.unjudged)
        return
    until = time.time() + options.deadline
    options.out.mkdir(parents=True, exist_ok=True)
    allowed, free = sorted(os.sched_getaffinity(0)), SimpleQueue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.gpus)))).split(",")
    for at, gpu in enumerate(visible[: options.gpus]):
        free.put((gpu, {*allowed[at :: options.gpus]} or {*allowed}))
    with ThreadPoolExecutor(len(PARTS)) as pool:
        parts, given = (WHOLE, ["--unjudged"]) if options.unjudged else (PARTS, [])
        list(pool.map(partial(run_part, options.out, free, until, given), parts))
    files = sorted(options.out.glob("*.jsonl"))
    print(report([json.loads(line) for file in files for line in file.read_text().splitlines()]))


if __name__ == "__main__":
    main()

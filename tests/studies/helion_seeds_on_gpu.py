"""What Foretune's ranking saves in Helion's search: `python tests/studies/helion_seeds_on_gpu.py --out FOLDER`.

Helion (`pip install helion==1.5.0`, the last for torch 2.11) tunes kernels written in its DSL. For each case its search
runs twice, in random order, with the same effort, random seed and time limit: "plain", and "seeded" with the 8 configs
that the family `matmul` ranks first as `autotune_seed_configs`. Each search is a process of its own with empty caches.
Then the configs that a search would have returned at some time, the seeds, and Helion's default run in turns in one
process, with Foretune's timer: all times of the table are measured alike. "To 2 %" is the time until a search held a
config within 2 % of the case's best one, and "to plain's" until one within 1 % of the plain search's result. Results
are lines of FOLDER/results.jsonl; `--table FILE` prints them again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import foretune
from foretune import DeviceSpec, Problem
from foretune.kernels import find_family

K = 8
key = partial(json.dumps, sort_keys=True)  # of a config, for lookups
#: Name, kernel, (batch, m, n, k): layers of models, from decode to training.
CASES = (
    ("Llama-3.1-8B down, 16 tokens", "matmul", (1, 16, 4096, 14336)),
    ("Llama-3.1-8B gate+up, 512 tokens", "matmul", (1, 512, 28672, 4096)),
    ("GPT-2 XL fc, 4096 tokens", "matmul_bias_gelu", (1, 4096, 6400, 1600)),
    ("Qwen2.5-7B scores, 28 heads", "bmm", (28, 2048, 2048, 128)),
    ("Qwen3-8B qkv, 8192 tokens", "matmul", (1, 8192, 6144, 4096)),
    ("Llama-3.2-1B gate+up, 64 tokens", "matmul", (1, 64, 16384, 2048)),
)


def helion_config(config: Mapping[str, Any], kernel: str) -> dict[str, Any]:
    """Return a config of the family `matmul` (no SPLIT_K, no CONSUMERS) as one of the kernels of `helion_searches`.

    Helion's `l2_groupings` is GROUP_M, but without groups its tiles run down M first, and always through a batch first.
    `indexing` has an entry for each load (the operands, then the bias), and one for the store.
    """
    operands, store = ("tensor_descriptor" if config["TMA"] >= least else "pointer" for least in (1, 2))
    order = [0, 1] if config["GROUP_M"] > 1 else [1, 0]
    persistent = {"pid_type": "persistent_interleaved", "num_sm_multiplier": config["PROGRAMS_PER_SM"]}
    return {
        "block_sizes": [1] * (kernel == "bmm") + [config[f"BLOCK_{axis}"] for axis in "MNK"],
        "l2_groupings": [config["GROUP_M"]],
        "loop_orders": [[1 + axis for axis in order] + [0] if kernel == "bmm" else order],
        "indexing": [operands, operands, *["pointer"] * (kernel == "matmul_bias_gelu"), store],
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
        **(persistent if config["PROGRAMS_PER_SM"] else {"pid_type": "flat"}),
    }


def seeds(kernel: str, dims: tuple[int, ...], device: DeviceSpec) -> list[dict[str, Any]]:
    """Return the configs ranked first among those that Helion can express, fastest first."""
    flags = ("bias", "gelu") if kernel == "matmul_bias_gelu" else ()
    problem = Problem.of("matmul", flags=flags, **dict(zip(("batch", "m", "n", "k"), dims, strict=True)))
    space = [c for c in find_family("matmul").space(device) if c["SPLIT_K"] == 1 and not c["CONSUMERS"]]
    ranked = foretune.shortlist("matmul", problem, device, k=K, configs=space).configs
    return [helion_config(config.to_json(), kernel) for config in ranked[:K]]


def trajectory(trace: Path) -> tuple[list[tuple[float, float, dict[str, Any]]], int]:
    """Return when a search found each config that was its best so far (seconds, ms, config), and how many it timed."""
    best, found, trials = math.inf, [], 0
    for line in trace.read_text().splitlines() if trace.exists() else ():
        row = json.loads(line) if line.endswith("}") else {}  # the last line may be cut off
        if row.get("event") == "trial" and row["status"] in ("ok", "deduplicated") and row["perf_ms"]:
            trials += row["status"] == "ok"
            if row["perf_ms"] < best:
                best = row["perf_ms"]
                found.append((row["elapsed_s"], best, row["config"]))
    return found, trials


def child(seconds: float, cache: Path, function: str, *args: Any) -> str | None:
    """Run a function of `helion_searches` in a process of its own that compiles into `cache`; return what was wrong."""

    def run() -> None:
        os.environ |= {"TRITON_CACHE_DIR": str(cache), "TORCHINDUCTOR_CACHE_DIR": f"{cache}.inductor"}
        os.environ |= {"HELION_CACHE_DIR": f"{cache}.helion", "HELION_SKIP_CACHE": "1", "HELION_KEEP_CACHE": "1"}
        os.setpgid(0, 0)
        getattr(importlib.import_module("helion_searches"), function)(*args)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(seconds)
    if (late := process.is_alive()) and process.pid:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return f"killed after {seconds:.0f} s" if late else f"exit code {process.exitcode}" if process.exitcode else None


def compared(case: tuple[str, str, tuple[int, ...]], budget_s: int, folder: Path) -> dict[str, Any]:
    """Run both searches of a case, time what they found, and return a line of the results."""
    name, kernel, dims = case
    line: dict[str, Any] = {"case": name, "kernel": kernel, "dims": dims, "budget_s": budget_s}
    line["versions"] = {name: version(name) for name in ("torch", "triton", "helion")}
    configs: list[dict[str, Any]] = []
    for arm in random.sample(["plain", "seeded"], 2):
        (cache := (at := folder / arm) / "triton").mkdir(parents=True)
        ranking = partial(seeds, kernel, dims) if arm == "seeded" else None
        wrong = child(2 * budget_s + 30, cache, "search", kernel, dims, ranking, budget_s, at)
        found, trials = trajectory(at / "log.trace.jsonl")
        summary = json.loads((at / "summary.json").read_text()) if (at / "summary.json").exists() else {}
        line[arm] = {"wrong": wrong, "trials": trials, "found": found, **summary}
        configs += [config for _, _, config in found]
        configs += [config for config in [summary.get("chosen"), *(summary.get("seeds") or [])] if config]
        shutil.copytree(cache, folder / "both", dirs_exist_ok=True)
    configs = list({key(config): config for config in configs}.values())
    line["judge_wrong"] = child(60, folder / "both", "judge", kernel, dims, configs, folder)
    times = json.loads((folder / "judged.json").read_text()) if (folder / "judged.json").exists() else {}
    return line | {"configs": configs, "times": times}


def row(line: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a line: microseconds, seconds, and numbers of configs."""
    places = {key(config): str(i) for i, config in enumerate(line["configs"])}
    times = {i: time_us for i, time_us in line["times"].items() if isinstance(time_us, float)}

    def time_of(config: Any) -> float:
        return times.get(places.get(key(config), ""), math.nan)

    found = {name: times.get(i, math.nan) for name, i in (("torch", "-1"), ("default", str(len(places))))}
    seeded = [time_of(config) for config in line["seeded"].get("seeds") or [{}]]
    found |= {"k=1": seeded[0], f"k={K}": min([time_us for time_us in seeded if time_us > 0], default=math.nan)}
    arms = {arm: line[arm] for arm in ("plain", "seeded")}
    found |= {arm: time_of(of.get("chosen") or (of["found"] or [(0, 0, {})])[-1][2]) for arm, of in arms.items()}
    goals = {
        "2 %": 1.02 * min((times[i] for i in times if i != "-1"), default=math.nan),
        "plain's": 1.01 * found["plain"],
    }
    for arm, of in arms.items():
        ranked_s = of.get("ranked_s", 0.0)
        found |= {f"{arm} configs": of["trials"], f"{arm} s": of.get("search_s", math.nan) + ranked_s}
        for goal, time_us in goals.items():
            reached = (s + ranked_s for s, _, config in of["found"] if time_of(config) <= time_us)
            found[f"{arm} to {goal}"] = next(reached, math.nan)
    return found


def show(file: Path) -> None:
    """Print the table of a file of results, and the geometric means of ratios."""
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    rows = [(line["case"], row(line)) for line in lines if line["times"]]
    print(f"{'':34}", *(f"{column:>18}" for column in (rows[0][1] if rows else ())))
    for name, found in rows:
        print(f"{name:34}", *(f"{value:18.1f}" for value in found.values()))
    for one in ("seeded", "k=1", f"k={K}", "default", "seeded s", "seeded to 2 %", "seeded to plain's"):
        other = "plain" + one.removeprefix("seeded") * one.startswith("seeded")
        if ratios := [found[one] / found[other] for _, found in rows if found[one] / found[other] > 0]:
            print(f"{one} / {other}: {statistics.geometric_mean(ratios):.3f} in {len(ratios)} cases")


def main() -> None:
    """Parse the options, run the cases until the time is over, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("helion_seeds"), help="Folder of the results.")
    parser.add_argument("--seconds", type=float, default=240, help="No case starts that would end later.")
    parser.add_argument("--budget", type=int, default=24, help="Seconds of one search.")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="Indices of the cases.")
    parser.add_argument("--table", type=Path, help="Only print the table of these results.")
    options = parser.parse_args()
    if options.table:
        return show(options.table)
    if find_spec("sklearn") is None:  # of Helion's default search
        os.environ["HELION_AUTOTUNER"] = "PatternSearch"
    for module in ("torch", "triton", *["sklearn.ensemble"] * bool(find_spec("sklearn"))):
        importlib.import_module(module)  # once for all processes
    options.out.mkdir(parents=True, exist_ok=True)
    start, took, results = time.perf_counter(), 0.0, options.out / "results.jsonl"
    for case in (CASES[i] for i in options.cases):
        if time.perf_counter() - start + took > options.seconds:
            break
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, results.open("a") as file:
            print(json.dumps(compared(case, options.budget, Path(folder))), file=file)
        took = time.perf_counter() - began
        print(f"{case[0]}: {took:.0f} s", flush=True)
    show(results)


if __name__ == "__main__":
    main()

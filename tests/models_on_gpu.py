"""Compare torch.compile's modes with Foretune on ten models: `python tests/models_on_gpu.py`.

The models of model_workloads.py (random weights, two layers each; inference and training; static and dynamic shapes)
are compiled by Inductor's default mode, by its max-autotune, and with `foretune.use("inductor")` for k="auto" and k=1,
with empty caches before each. Then all run interleaved, from Python and as CUDA graphs. The tables show medians of the
run time, the seconds of the first call, and ratios next to their goals. Each GPU (of CUDA_VISIBLE_DEVICES, or `--gpus`)
has a process for its share of the models and of the cores. A result is kept in `--out` when its model is done, so that
a run that is cut off continues there. `--breakdown` also prints where the time of the first call went, and the kernels
of a call; `--tiny` runs small models on the CPU without CUDA graphs, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
#: Rounds in which all modes take turns. Called from Python, a call of a small model waits for the host, whose speed
#: varies far more than the GPU's.
ROUNDS, ROUNDS_OF_GRAPHS, SAMPLES = 40, 7, 5
#: Relative error of the Frobenius norm up to which a mode agrees with eager mode in bf16 after a few layers; it may
#: also be twice that of the default mode, because near ties send a token to other experts.
MOST_OFF = 3e-2
#: Only matrix products are tuned, from all configs that Inductor's templates have.
OURS = {"max_autotune_gemm": True, "max_autotune_gemm_search_space": "EXHAUSTIVE"}
MAX_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}  # mode="max-autotune" without CUDA graphs


class Mode(NamedTuple):
    """Options of `torch.compile`, and the k of `foretune.use`; None without Foretune."""

    options: dict[str, Any]
    k: int | str | None = None


MODES = {
    "default": Mode({}),
    "max-autotune": Mode(MAX_AUTOTUNE),
    "auto": Mode(OURS, "auto"),
    "k=1": Mode(OURS, 1),
    # Other ways to combine them, for `--modes`.
    "k=8": Mode(OURS, 8),
    "k=8, max-autotune": Mode(MAX_AUTOTUNE | OURS, 8),
    "auto, no fusion timed": Mode(OURS | {"benchmark_epilogue_fusion": False}, "auto"),
    "auto, pointwise": Mode(OURS | {"max_autotune_pointwise": True}, "auto"),
}
USUAL = tuple(MODES)[:4]
#: (mode, compared with, "us" or "compile_s") -> the goal for the geometric mean, and for the worst model.
GOALS: dict[tuple[str, str, str], tuple[float, float | None]] = {
    ("auto", "default", "us"): (0.97, 1.01),
    ("auto", "max-autotune", "us"): (0.95, 1.01),
    ("auto", "default", "compile_s"): (1.5, None),
    ("auto", "max-autotune", "compile_s"): (0.4, None),
    ("k=1", "default", "compile_s"): (1.1, None),
}
#: The shortest part of the breakdown, in seconds, and how many kernels it lists.
LEAST_PART_S, MOST_KERNELS = 0.1, 12


def measure(name: str, modes: list[str], tiny: bool, breakdown: bool) -> dict[str, Any]:
    """Return the seconds of the first call and the run times in microseconds, by mode."""
    import torch
    from model_workloads import WORKLOADS

    where, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    workload = WORKLOADS[name].tiny() if tiny else WORKLOADS[name]
    forward, given, parameters = workload.build(where, dtype)

    def step(function: Callable[[Any], Any], x: Any) -> Any:
        if not workload.trains:
            with torch.no_grad():
                return function(x)
        gradients = torch.autograd.grad(function(x), parameters, allow_unused=True)
        return torch.cat([one.flatten()[:4096] for one in gradients if one is not None])

    found: dict[str, Any] = {"name": name, "compile_s": {}, "us": {}, "graph_us": {}, "off": {}, "spent": {}}
    found["device"] = torch.cuda.get_device_name() if where == "cuda" else "CPU"
    calls: dict[str, list[Callable[[], Any]]] = {}
    graphs: dict[str, list[Callable[[], Any]]] = {}
    compiled_by("default", forward, step, given)  # what the first compilation of a model imports
    for mode in modes:
        compiled, found["compile_s"][mode], found["spent"][mode] = compiled_by(mode, forward, step, given)
        calls[mode] = [partial(step, compiled, x) for x in given]
        off = [relative_error(step(compiled, x), step(forward, x)) for x in given]
        found["off"][mode] = max(off)
        if where == "cuda":
            graphs[mode] = [captured(call) for call in calls[mode]]
        print(f"{name}: {mode} {found['compile_s'][mode]:.1f} s, off by {max(off):.2g}", flush=True)
    limit = max(MOST_OFF, 2 * found["off"].get("default", 0.0))
    if wrong := [mode for mode, off in found["off"].items() if not off < limit]:
        raise AssertionError(f"{name}: {wrong[0]} differs from eager mode by {found['off'][wrong[0]]:.3g} of the norm")
    with torch.compiler.set_stance("fail_on_recompile"):
        found["us"] = interleaved(calls, where, 2 if tiny else ROUNDS)
        found["graph_us"] = interleaved(graphs, where, ROUNDS_OF_GRAPHS) if graphs else found["us"]
        if breakdown and where == "cuda":
            found["kernels"] = {mode: kernels_of(of_mode[0]) for mode, of_mode in calls.items()}
    return found


def kernels_of(call: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Return how often a call launches each kernel, and the microseconds of all these launches."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            count, us = found.get(event.name, (0, 0.0))
            found[event.name] = count + 1, us + event.time_range.elapsed_us()
    return found


def measure_all(names: list[str], modes: list[str], out: Path, tiny: bool, breakdown: bool) -> None:
    """Measure models one after the other, and add a line to the file of results for each that succeeds."""
    import torch
    from torch._inductor.async_compile import AsyncCompile

    torch._dynamo.config.recompile_limit = 64
    AsyncCompile.wait_pool_ready()
    warmed_up(*(("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)))
    for name in names:
        try:
            found = measure(name, modes, tiny, breakdown)
        except Exception:  # noqa: BLE001 - the next one may succeed
            traceback.print_exc()
            continue
        finally:
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
        with open(out / "models.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")


def warmed_up(where: str, dtype: Any) -> None:
    """Compile a layer, so that no mode's time contains what a process imports and starts once."""
    import torch
    from model_workloads import DiT

    with torch.device(where):
        layer, x = DiT(64, 2, 1).to(dtype), torch.randn(1, 32, 64, dtype=dtype)
    for options in ({}, {"max_autotune_gemm": True}):
        torch.compiler.reset()
        with torch.no_grad():
            torch.compile(layer, options=options)(x)


def compiled_by(mode: str, forward: Any, step: Any, given: list[Any]) -> tuple[Any, float, dict[str, float]]:
    """Return the compiled function, the seconds of its first call, and parts of these and counts by name."""
    import foretune
    import torch
    from torch._dynamo.utils import compilation_time_metrics, counters
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.utils import fresh_cache

    compilation_time_metrics.clear()
    counters.clear()
    options, k = MODES[mode]

    def backend(*graph_and_inputs: Any) -> Any:  # not "inductor", which Dynamo takes for the same with equal options
        return compile_fx(*graph_and_inputs, config_patches=options)

    with foretune.use("inductor", k=k) if k is not None else nullcontext(), fresh_cache(delete=False):
        compiled = torch.compile(forward, backend=backend, dynamic=True if len(given) > 1 else None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        step(compiled, given[0])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        spent = {part: sum(each) for part, each in compilation_time_metrics.items() if sum(each) > LEAST_PART_S}
        spent |= {f"n {what}": count for what, count in counters["inductor"].items()}
        for x in given[1:]:
            step(compiled, x)
    return compiled, seconds, spent


def relative_error(found: Any, expected: Any) -> float:
    """Return the Frobenius norm of the difference over that of the expected tensor."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of one call, which leaves out the host's time."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def interleaved(calls: dict[str, list[Callable[[], Any]]], where: str, rounds: int) -> dict[str, list[float]]:
    """Return the median time of each mode's calls in microseconds. The calls take turns in random order."""
    import torch

    times: dict[str, list[list[float]]] = {mode: [[] for _ in each] for mode, each in calls.items()}
    for turn in range(rounds + 1):
        for mode in random.Random(turn).sample(list(calls), len(calls)):
            for place, call in enumerate(calls[mode]):
                if where == "cuda":
                    marks = [torch.cuda.Event(enable_timing=True) for _ in range(SAMPLES + 1)]
                    call()  # fills the queue, so that no gap of launching is timed
                    marks[0].record()
                    for mark in marks[1:]:
                        call()
                        mark.record()
                    torch.cuda.synchronize()
                    taken = [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(marks)]
                else:
                    began = time.perf_counter()
                    call()
                    taken = [(time.perf_counter() - began) * 1e6]
                if turn:  # the first turn warms up
                    times[mode][place] += taken
    return {mode: [statistics.median(each) for each in of_mode] for mode, of_mode in times.items()}


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each model in the file of results, without a line that is cut off."""
    path = out / "models.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def value(line: dict[str, Any], what: str, mode: str) -> float:
    """Return a mode's seconds of the first call, or the geometric mean of its run times in microseconds."""
    found = line[what][mode]
    return statistics.geometric_mean(found) if isinstance(found, list) else found


def show(out: Path, breakdown: bool) -> None:
    """Print the times of each model and the ratios of Foretune's modes to the others."""
    from foretune.datasets.console import table
    from rich.console import Console

    print_table = Console(width=200).print
    lines = results(out)
    for name, line in lines.items() if breakdown else ():
        for mode, spent in line["spent"].items():
            parts = sorted(spent.items(), key=lambda part: -part[1])
            print(f"{name}, {mode}: " + ", ".join(f"{part} {amount:.4g}" for part, amount in parts))
        for mode, kernels in line.get("kernels", {}).items():
            print(f"{name}, {mode}: {sum(count for count, _ in kernels.values())} kernels")
            for kernel, (count, us) in sorted(kernels.items(), key=lambda one: -one[1][1])[:MOST_KERNELS]:
                print(f"  {us:8.1f} us, {count:3} x {kernel[:110]}")
    modes = list(dict.fromkeys(mode for line in lines.values() for mode in line["compile_s"]))
    devices = ", ".join(sorted({line["device"] for line in lines.values()}))
    for title, what, unit in (
        ("Run time in ms, called from Python", "us", 1e-3),
        ("Run time in ms as CUDA graphs", "graph_us", 1e-3),
        ("Seconds of the first call", "compile_s", 1.0),
    ):
        rows = [
            (name, *(f"{value(line, what, mode) * unit:.3f}" if mode in line[what] else "" for mode in modes))
            for name, line in lines.items()
        ]
        print_table(table(f"{title} on {devices}", ("model", *modes), rows, lead=len(modes) + 1))
    rows = []
    for (mode, other, what), (goal, worst_goal) in GOALS.items():
        for measured in ("us", "graph_us") if what == "us" else (what,):
            ratios = {
                name: value(line, measured, mode) / value(line, measured, other)
                for name, line in lines.items()
                if {mode, other} <= line[measured].keys()
            }
            if ratios:
                worst = max(ratios, key=ratios.__getitem__)
                mean = f"{statistics.geometric_mean(ratios.values()):.3f} (goal {goal})"
                at_worst = f"{ratios[worst]:.3f}{'' if worst_goal is None else f' (goal {worst_goal})'}, {worst}"
                label = {"us": "run time", "graph_us": "run time, CUDA graphs", "compile_s": "first call"}[measured]
                rows.append((f"{mode} / {other}", label, mean, at_worst, len(ratios)))
    print_table(table("Ratios", ("", "", "geometric mean", "worst", "models"), rows, lead=5))


def main() -> None:
    """Measure the models that the output folder lacks, one process each, and print the tables."""
    from model_workloads import WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="models-out", help="folder of the results; a run continues there")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds after which no model is begun or goes on"
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    parser.add_argument("--gpus", default=visible, help="their numbers, separated by commas")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(USUAL))
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), help="only those whose names begin so")
    parser.add_argument("--threads", type=int, help="compiling processes for each GPU")
    parser.add_argument("--breakdown", action="store_true", help="print the parts of the first call, and the kernels")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.measure:
        measure_all(options.models, options.modes, out, options.tiny, options.breakdown)
        return
    deadline = time.monotonic() + options.budget_s
    known = results(out)
    left = [
        name
        for name in WORKLOADS
        if name.startswith(tuple(options.models)) and not set(options.modes) <= known.get(name, {"us": {}})["us"].keys()
    ]
    gpus = options.gpus.split(",")
    with tempfile.TemporaryDirectory(prefix="models-", ignore_cleanup_errors=True) as caches:
        shares = [(left[place :: len(gpus)], gpu) for place, gpu in enumerate(gpus)]
        cores = sorted(os.sched_getaffinity(0))
        each = max(len(cores) // len(gpus), 1)
        running = [
            start(share, gpu, cores[place * each :][:each] or cores, options, caches)
            for place, (share, gpu) in enumerate(shares)
            if share
        ]
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in running:
            process.kill()
            process.wait()
    show(out, options.breakdown)
    if missing := [name for name in left if name not in results(out)]:
        print(f"Not measured: {', '.join(missing)}; see {out / 'log.txt'}")


def start(
    names: list[str], gpu: str, cores: list[int], options: argparse.Namespace, caches: str
) -> subprocess.Popen[bytes]:
    """Start the process that measures models on a GPU, on cores of its own, as the others' compilations disturb it."""
    from inductor_on_gpu import torchs_ptxas

    environment = {
        **torchs_ptxas(),
        **os.environ,
        "CUDA_VISIBLE_DEVICES": gpu,
        "TORCHINDUCTOR_COMPILE_THREADS": str(options.threads or len(cores)),
        "PYTHONPATH": os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": tempfile.mkdtemp(dir=caches),
    }
    command = [
        sys.executable,
        __file__,
        "--out",
        options.out,
        "--measure",
        "--modes",
        *options.modes,
        "--models",
        *names,
    ]
    command += ["--tiny"] * options.tiny + ["--breakdown"] * options.breakdown
    pin = partial(os.sched_setaffinity, 0, cores)
    with open(Path(options.out) / "log.txt", "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=pin)


if __name__ == "__main__":
    main()

"""Measure how far Inductor's pointwise and reduction kernels are from the best config of a wide list.

Usage: `python tests/studies/generated_kernels_on_gpu.py`.

The layers of generated_layers.py are lowered by Inductor for the device, in processes that launch nothing. Each kernel
that it generates under its heuristics `pointwise`, `reduction` and `persistent_reduction` is compiled there with
Inductor's lists of configs and a wide list (`wide` in generated_kernels.py), and timed here on random data in CUDA
graphs, each config in several rounds of random order. The table compares, by kind, with the best config: Inductor's
list in its default mode (`default`, timed as Inductor does; `first` is its first config, untimed), that of max-autotune
(`list`), and coordinate descent from the best of the default list, over the configs that were timed (`descent`).

A choice is made on one pass and judged on another: the first pass times all configs with the L2 as a producer leaves it
(the same tensors again and again, which is cold for all that does not fit), because that is how these kernels run in a
model; the second times the choices and the fastest few configs, in that way and with a cold L2 (copies of the tensors
in turns, 256 MB in all). Each measurement is a line of `--out`/measured.jsonl; run again, it goes on where it was cut
off. `--tiny` needs no GPU: it compiles a few kernels and invents their times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from generated_kernels import KINDS, Config, absent_gpu, captured, compile_result, compiled, key_of, loaded

#: Configs compiled by a task.
CHUNK = 6
#: Microseconds of a sample, and of all samples of a kernel's first pass; bytes of the copies for a cold L2.
SAMPLE_US, PASS_US, COLD_BYTES = 300.0, 500_000.0, 256 << 20
FINALISTS, FINAL_ROUNDS = 4, 9


class Gpu:
    """Times launches on the current device. Samples are replays of CUDA graphs on one stream."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.name = torch.cuda.get_device_name()
        self._stream = torch.cuda.Stream()

    def arguments(self, kernel: Any, bound: int) -> list[Any]:
        """Return the arguments of a launch: random numbers, integers below `bound`."""

        def random_strided(size: Any, stride: Any, device: Any = None, dtype: Any = None, **_: Any) -> torch.Tensor:
            count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            if dtype.is_floating_point:
                kind = dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.float32
                flat = torch.randn(count, dtype=kind, device="cuda").to(dtype)
            else:
                flat = torch.randint(0, 2 if dtype == torch.bool else max(bound, 1), (count,), device="cuda").to(dtype)
            return flat.as_strided(size, stride)

        kernel.module.rand_strided = random_strided
        return list(kernel.module.get_args())

    def launcher(self, kernel: Any, config: Config, arguments: list[Any]) -> tuple[Any, float]:
        """Return the launcher of a config after a few launches, and about how many microseconds one takes."""
        launcher = compile_result(kernel, config).make_launcher()
        with torch.cuda.stream(self._stream):
            launcher(*arguments, stream=self._stream.cuda_stream)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self._stream)
            for _ in range(2):
                launcher(*arguments, stream=self._stream.cuda_stream)
            end.record(self._stream)
        end.synchronize()
        return launcher, max(500 * begin.elapsed_time(end), 1.0)

    def graph(self, launcher: Any, sets: list[list[Any]], count: int) -> Any:
        """Return a graph of `count` launches, on the sets of arguments in turns, that ran once."""
        graph = torch.cuda.CUDAGraph()
        self._stream.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin()
            try:
                for place in range(count):
                    launcher(*sets[place % len(sets)], stream=self._stream.cuda_stream)
            finally:
                graph.capture_end()
            graph.replay()
        self._stream.synchronize()
        return graph

    def rounds(self, graphs: dict[str, tuple[Any, int]], rounds: int) -> dict[str, list[float]]:
        """Return microseconds per launch in each round; each round is in another random order."""
        times: dict[str, list[float]] = {key: [] for key in graphs}
        with torch.cuda.stream(self._stream):
            for _ in range(rounds):
                order = random.sample(list(graphs), len(graphs))
                events = {}
                for key in order:
                    events[key] = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                    events[key][0].record(self._stream)
                    graphs[key][0].replay()
                    events[key][1].record(self._stream)
                self._stream.synchronize()
                for key, (begin, end) in events.items():
                    times[key].append(1000 * begin.elapsed_time(end) / graphs[key][1])
        return times


class Invented:
    """Stands in for `Gpu` where there is none; times depend on the config alone."""

    name = "invented"

    def arguments(self, kernel: Any, bound: int) -> list[Any]:
        kernel.module.rand_strided = lambda size, stride, dtype=None, **_: torch.empty_strided(
            size, stride, dtype=dtype, device="meta"
        )
        with patch.object(
            torch, "zeros", lambda *size, dtype=None, **_: torch.empty(*size, dtype=dtype, device="meta")
        ):
            return list(kernel.module.get_args())

    def launcher(self, kernel: Any, config: Config, arguments: list[Any]) -> tuple[Any, float]:
        compile_result(kernel, config)
        return SimpleNamespace(n_regs=40, n_spills=0, shared=0, us=10 + random.Random(key_of(config)).random()), 10.0

    def graph(self, launcher: Any, sets: list[list[Any]], count: int) -> Any:
        return launcher

    def rounds(self, graphs: dict[str, tuple[Any, int]], rounds: int) -> dict[str, list[float]]:
        return {key: [graph.us] * rounds for key, (graph, _) in graphs.items()}


def measured(one: dict[str, Any], path: str, failures: dict[str, str], gpu: Any, write: Callable[..., None]) -> None:
    """Time a kernel's configs in two passes, and write a line for each config and pass."""
    kernel, lists = loaded(path), one["lists"]
    arguments = gpu.arguments(kernel, one["bound"])
    configs = {key_of(config): config for label in lists for config in lists[label]}
    launchers, about, graphs = {}, {}, {}
    for key, config in configs.items():
        if key in failures:
            continue
        try:
            launchers[key], about[key] = gpu.launcher(kernel, config, arguments)
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            failures[key] = f"{type(error).__name__}: {error}"[:200]
    fastest = min(about.values(), default=math.inf)
    count = min(max(round(SAMPLE_US / fastest), 1), 100)
    for key in launchers:
        if about[key] < 4 * fastest + 20:
            graphs[key] = gpu.graph(launchers[key], [arguments], count), count
    rounds = min(max(int(PASS_US / (sum(about[key] for key in graphs) * count + 1)), 3), 9)
    times = gpu.rounds(graphs, rounds)
    us = {key: statistics.median(times[key]) for key in graphs} | {
        key: about[key] for key in launchers if key not in graphs
    }
    for key, config in configs.items():
        launcher = launchers.get(key)
        facts = {name: getattr(launcher, name, None) for name in ("n_regs", "n_spills", "shared")} if launcher else {}
        labels = [label for label in lists if config in lists[label]]
        write(
            step="first", kernel=one["kernel"], config=config, labels=labels, us=us.get(key), rounds=times.get(key),
            failure=failures.get(key), **facts,
        )  # fmt: skip
    if not us:
        return
    chosen = choices(one, us, launchers)
    finals = list(dict.fromkeys([*chosen.values(), *sorted(us, key=us.__getitem__)[:FINALISTS]]))
    copies = min(math.ceil(COLD_BYTES / max(one["bytes"], 1)), 400)
    hot = gpu.rounds({key: (gpu.graph(launchers[key], [arguments], count), count) for key in finals}, FINAL_ROUNDS)
    cold = hot
    if copies > 1:
        sets = [arguments, *(gpu.arguments(kernel, one["bound"]) for _ in range(copies - 1))]
        many = len(sets) * -(-min(count, 50) // len(sets))
        cold = gpu.rounds({key: (gpu.graph(launchers[key], sets, many), many) for key in finals}, FINAL_ROUNDS)
    for key in finals:
        labels = [label for label, picked in chosen.items() if picked == key]
        write(
            step="final", kernel=one["kernel"], config=configs[key], labels=labels, hot=hot[key], cold=cold[key],
            hot_us=statistics.median(hot[key]), cold_us=statistics.median(cold[key]),
        )  # fmt: skip


def choices(one: dict[str, Any], us: dict[str, float], launchers: dict[str, Any]) -> dict[str, str]:
    """Return the config that each way of choosing takes, from the times of the first pass."""
    lists = {label: [key for key in map(key_of, configs) if key in us] for label, configs in one["lists"].items()}
    default = list(lists["default"])
    for key in default[:1] if "scaled" in lists else []:
        config, registers = json.loads(key), getattr(launchers[key], "n_regs", None) or 0
        blocks = -(-one["size_hints"]["x"] // config.get("XBLOCK", 1))
        if registers > 32 and blocks > 132 * max(65536 // (registers * 32 * config["num_warps"]), 1):
            default += lists["scaled"][:1]
    best = {"first": default[:1], "default": default, "list": [*default, *lists["list"]], "best": list(us)}
    chosen = {label: min(keys, key=us.__getitem__) for label, keys in best.items() if keys}
    if "default" in chosen:
        chosen["descent"] = descended(chosen["default"], us)
    return chosen


def descended(start: str, us: dict[str, float]) -> str:
    """Return where coordinate descent from `start` ends if only the timed configs exist."""
    best, improved = start, True
    while improved:
        improved = False
        for knob in [name for name in json.loads(best) if name not in ("num_stages", "RSPLIT_SIZE")]:
            value = json.loads(best)[knob]
            steps = (value + 1, value + 2, value - 1, value - 2) if knob == "NUM_STAGES" else (value * 2, value // 2)
            for other in steps:
                key = key_of({**json.loads(best), knob: other})
                if us.get(key, math.inf) < us[best] * 0.999:
                    best, improved = key, True
    return best


def table(folder: Path) -> str:
    """Return the comparison with the best config of the first pass, by kind, from the second pass's times."""
    kinds = {one["kernel"]: one["kind"] for one in lines(folder / "kernels.jsonl")}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for one in lines(folder / "measured.jsonl"):
        if one["step"] == "final":
            for label in one["labels"]:
                rows.setdefault(one["kernel"], {})[label] = one
    text = ["L2    kind                   kernels  way      geomean  worst  weighted  > 5 % off"]
    for state, kind in itertools.product(("hot", "cold"), (*KINDS, "all")):
        of_kind = [row for name, row in rows.items() if kind in ("all", kinds[name])]
        for way in ("first", "default", "list", "descent"):
            pairs = [(row[way][f"{state}_us"], row["best"][f"{state}_us"]) for row in of_kind if way in row]
            if pairs:
                ratios = [us / best for us, best in pairs]
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                weighted = sum(us for us, _ in pairs) / sum(best for _, best in pairs)
                off = sum(ratio > 1.05 for ratio in ratios) / len(ratios)
                start = f"{state:5} {kind:22} {len(pairs):7}  {way:8} {mean:7.3f} {max(ratios):6.2f}"
                text.append(f"{start} {weighted:9.3f} {off:9.0%}")
    halves = [
        abs(statistics.median(row["best"]["hot"][::2]) / statistics.median(row["best"]["hot"][1::2]) - 1)
        for row in rows.values()
        if "best" in row
    ]
    text.append(f"noise: the best config's rounds differ by {statistics.median(halves or [0]):.2%} (median of kernels)")
    return "\n".join(text)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:  # noqa: PERF203 - a line that was cut off
            continue
    return found


def begin_worker(cache: str) -> None:
    """Prepare a process that compiles."""
    os.environ |= {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    torch.set_num_threads(1)


def end_workers(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, whatever they compile."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def captured_all(pool: ProcessPoolExecutor, places: list[int], device: str, folder: Path) -> list[dict[str, Any]]:
    """Return the kernels of all layers, each once, kinds in turns; layers that fail are printed."""
    futures = {pool.submit(captured, place, device, str(folder / "kernels")): place for place in places}
    found: dict[str, dict[str, Any]] = {}
    failed = 0
    for future in as_completed(futures):
        try:
            for one in future.result():
                found.setdefault(one["kernel"], one)
        except Exception as error:  # noqa: BLE001, PERF203 - the other layers go on
            failed += 1
            if failed <= 3:
                traceback.print_exception(error)
    print(f"{len(found)} kernels of {len(places) - failed} layers, {failed} layers failed", flush=True)
    by_kind = [[one for one in found.values() if one["kind"] == kind] for kind in KINDS]
    for kernels in by_kind:
        random.Random(0).shuffle(kernels)
    return [one for turn in itertools.zip_longest(*by_kind) for one in turn if one is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("generated_kernels"), help="Folder of the results.")
    parser.add_argument("--seconds", type=float, default=230.0, help="Start no kernel after this time.")
    parser.add_argument("--device", default="h100", help="The device to compile for, as Foretune names it.")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="Processes that compile."
    )
    parser.add_argument("--tiny", action="store_true", help="Use no GPU, and few kernels.")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    (given.out / "kernels").mkdir(parents=True, exist_ok=True)
    cache = str(Path(tempfile.gettempdir()) / "generated_kernels_triton")
    os.environ["TRITON_CACHE_DIR"] = cache

    from generated_layers import LAYERS

    places = list(range(len(LAYERS)))[:: 20 if given.tiny else 1]
    listed_in, measured_in = given.out / "kernels.jsonl", given.out / "measured.jsonl"
    pool = ProcessPoolExecutor(
        given.workers, mp_context=get_context("spawn"), initializer=begin_worker, initargs=(cache,)
    )
    kernels = lines(listed_in)
    if not kernels:
        kernels = captured_all(pool, places, given.device, given.out)
        listed_in.write_text("".join(json.dumps(one) + "\n" for one in kernels))
    started = {one["kernel"] for one in lines(measured_in) if one["step"] == "start"}
    kernels = [one for one in kernels if one["kernel"] not in started][: 4 if given.tiny else None]
    tasks: dict[str, list[tuple[list[Config], Future[list[str | None]]]]] = {}
    for one in kernels:
        path = str(given.out / "kernels" / f"{one['kernel']}.py")
        if given.tiny:
            one["lists"]["wide"] = one["lists"]["wide"][:3]
        configs = list({key_of(config): config for configs in one["lists"].values() for config in configs}.values())
        chunks = [configs[place : place + CHUNK] for place in range(0, len(configs), CHUNK)]
        tasks[one["kernel"]] = [(chunk, pool.submit(compiled, path, chunk, given.device)) for chunk in chunks]
    gpu: Any = Invented() if given.tiny else Gpu()
    print(f"{gpu.name}, torch {torch.__version__}, {given.seconds - end + time.monotonic():.0f} s", flush=True)
    if not kernels:
        end_workers(pool)
        return 1
    status, done = 0, 0
    with open(measured_in, "a") as file, absent_gpu(given.device) if given.tiny else ExitStack():

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        write(step="run", device=gpu.name, torch=torch.__version__)
        for one in kernels:
            if time.monotonic() > end:
                break
            failures = {}
            for chunk, future in tasks[one["kernel"]]:
                try:
                    reasons = future.result(timeout=max(end - time.monotonic(), 1) + 10)
                except Exception as error:  # noqa: BLE001 - a process that died, or a compilation without end
                    reasons = [f"{type(error).__name__}: {error}"[:200]] * len(chunk)
                failures |= {key_of(config): why for config, why in zip(chunk, reasons, strict=True) if why}
            write(step="start", kernel=one["kernel"])
            try:
                measured(one, str(given.out / "kernels" / f"{one['kernel']}.py"), failures, gpu, write)
                done += 1
            except Exception as error:  # noqa: BLE001 - the other kernels go on, in a new process after CUDA errors
                traceback.print_exc()
                if "CUDA error" in str(error):
                    status = 3
                    break
    print(f"{done} kernels timed, {given.seconds - end + time.monotonic():.0f} s")
    print(table(given.out), flush=True)
    end_workers(pool)
    return status


if __name__ == "__main__":
    code = main()
    os._exit(code)

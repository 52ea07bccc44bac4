"""What `foretune.use("inductor")` is worth on the card: `python inductor_on_gpu.py --out FOLDER --budget-s 430`.

A transformer of two layers (static and dynamic length) and 40 products are compiled under max_autotune with Inductor's
DEFAULT search space and with its EXHAUSTIVE one limited by Foretune, caches empty before each; then they run
interleaved, cold L2, filled queue, medians. All compile with torch's ptxas, as Inductor's workers do. Five of the
products are compiled with the whole of EXHAUSTIVE too, which times 235 to 1,400 configs there: 15 to 120 seconds on 16
cores; with `--exhaustive` the models and all products are, or of these those of `--products 8x4096x4096 ...`. A model
has four such searches, so a run with less time for it goes on after the last that was over, in the same folder. All
GPUs work side by side and share the cores; each result is printed when it is there, and tables of all at the end. A run
that is cut off, or out of time, goes on in the same folder. `--tiny` tries the machinery where there is no GPU.
`--float32` compiles the products in float32, multiplied as TF32 (`torch.set_float32_matmul_precision("high")`), and
none with the whole of EXHAUSTIVE unless it is asked for.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MODES = ("default", "foretune", "exhaustive")
QUICK = MODES[:2]
#: (n, k) of linear layers, and tokens.
LAYERS = (
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (2048, 2048),
    (8192, 2048),
    (3072, 768),
    (16384, 1024),
)
TOKENS = (8, 64, 512, 2048, 8192)
HIDDEN, HEADS, INNER, BATCH, LENGTH = 2048, 16, 8192, 4, 1024
LENGTHS = (LENGTH, 384, 1536)  # of the dynamic one
ROUNDS, SAMPLES = 7, 3
#: Products (m, n, k) that the whole of EXHAUSTIVE is tried on.
WHOLE = ((8, 4096, 4096), (8, 28672, 4096), (64, 6144, 4096), (64, 3072, 768), (512, 2048, 2048))
#: Products of one process, seconds after which a model is given up, and with which a search is begun.
BATCH_JOBS, MODEL_S, SEARCH_S = 8, 180.0, 75.0


def jobs(tiny: bool, float32: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Models and products; these in an order that is fair to be cut."""
    product = {"what": "product", "float32": float32}
    if tiny:
        return [{"what": "dynamic"}], [{**product, "m": m, "n": 48, "k": 16} for m in (32, 16)]
    products = [{**product, "m": m, "n": n, "k": k} for n, k in LAYERS for m in TOKENS]
    random.Random(0).shuffle(products)
    return [{"what": "static"}, {"what": "dynamic"}], products


def name_of(job: dict[str, Any]) -> str:
    if job["what"] != "product":
        return f"2 layers, {job['what']} length"
    return "{m}x{n}x{k}".format(**job) + (" tf32" if job["float32"] else "")


# The jobs of one task, in their process.


def measure(job: dict[str, Any], modes: list[str], k: int, tiny: bool, searches: Path) -> dict[str, Any]:
    """Compile seconds and run microseconds by mode. Searches of EXHAUSTIVE that are over are kept in a folder."""
    import foretune
    import torch
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.compiler.reset()
    torch.set_float32_matmul_precision("high" if job.get("float32") else "highest")
    torch.compile(lambda x: x + 1)(torch.ones(8, device=where))  # what starts once a process
    AsyncCompile.wait_pool_ready()  # and so for all modes, not for the first one later
    calls, compile_s = {}, {}
    for mode in modes:
        options = {"max_autotune": where == "cuda", "max_autotune_gemm_search_space": "EXHAUSTIVE"}
        options["max_autotune_gemm_search_space"] = "DEFAULT" if mode == "default" else "EXHAUSTIVE"
        used = foretune.use("inductor", k=k) if mode == "foretune" else nullcontext()
        function, arguments = prepared(job, layers_of(mode), where, tiny)
        compiled = torch.compile(function, dynamic=job["what"] == "dynamic")
        kept = kept_searches(searches / name_of(job)) if mode == "exhaustive" else nullcontext(0.0)
        with torch.no_grad(), used, fresh_cache(delete=False), config.patch(options), kept as before_s:
            began = time.perf_counter()
            results = [compiled(*given) for given in arguments[:1]]
            if where == "cuda":
                torch.cuda.synchronize()
            compile_s[mode] = before_s + time.perf_counter() - began
            for given in arguments[1:]:
                compiled(*given)
        with torch.no_grad():
            expected = function(*arguments[0]).float()
        off = float((results[0].float() - expected).norm() / expected.norm())
        assert off < 2e-2, f"{mode} is off by {off}"
        calls[mode] = [lambda compiled=compiled, given=given: compiled(*given) for given in arguments]
    return {"compile_s": compile_s, "us": interleaved(calls, where)}


@contextmanager
def kept_searches(folder: Path) -> Iterator[float]:
    """Inside `fresh_cache`, has Inductor keep in a folder what it timed of each product, as it does when a search is
    over, and tells how many seconds earlier runs took until their last one was."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    times, seconds = folder / "times", folder / "seconds"
    times.mkdir(parents=True, exist_ok=True)
    (Path(cache_dir()) / "cache").symlink_to(times, target_is_directory=True)
    before_s = float(seconds.read_text()) if seconds.exists() else 0.0
    began, over = time.perf_counter(), threading.Event()

    def note() -> None:
        last = times.stat().st_mtime_ns  # another one where Inductor has written the file there anew
        while not over.wait(0.5):
            if (now := times.stat().st_mtime_ns) != last:
                last = now
                seconds.write_text(str(before_s + time.perf_counter() - began))

    noting = threading.Thread(target=note, daemon=True)
    noting.start()
    try:
        yield before_s
    finally:
        over.set()
        noting.join()


def layers_of(mode: str) -> ModuleType:
    """compiled_layers.py as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"layers_{mode}", Path(__file__).with_name("compiled_layers.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepared(job: dict[str, Any], layers: ModuleType, where: str, tiny: bool) -> tuple[Any, list[tuple[Any, ...]]]:
    """The function, and the arguments of each call."""
    import torch

    dtype = torch.bfloat16 if where == "cuda" and not job.get("float32") else torch.float32
    torch.manual_seed(1)
    if job["what"] == "product":
        x, w = (torch.randn(rows, job["k"], device=where, dtype=dtype) for rows in (job["m"], job["n"]))
        return layers.product, [(x, w)]
    hidden, heads, inner = (32, 2, 64) if tiny else (HIDDEN, HEADS, INNER)
    with torch.device(where):
        model = layers.TwoLayers(hidden, heads, inner).to(dtype).eval()
    lengths = (LENGTH,) if job["what"] == "static" else LENGTHS
    batches = [torch.randn(BATCH, 16 if tiny else length, hidden, device=where, dtype=dtype) for length in lengths]
    return model, [(batch,) for batch in batches[: 1 if tiny else None]]


def interleaved(calls: dict[str, list[Any]], where: str) -> dict[str, list[float]]:
    """Medians by mode, of each of its calls."""
    import foretune
    import torch

    def host_us(call: Any, samples: int) -> list[float]:
        taken = []
        for _ in range(samples):
            began = time.perf_counter()
            call()
            taken.append((time.perf_counter() - began) * 1e6)
        return taken

    sample = foretune.runtime.Timer().sample if where == "cuda" else host_us
    times: dict[str, list[list[float]]] = {mode: [[] for _ in each] for mode, each in calls.items()}
    with torch.no_grad():
        for turn in range(ROUNDS + 1):
            for mode in random.Random(turn).sample(list(calls), len(calls)):
                for place, call in enumerate(calls[mode]):
                    taken = sample(call, SAMPLES)
                    if turn:  # the first is for warming up
                        times[mode][place] += taken
    return {mode: [statistics.median(each) for each in of_mode] for mode, of_mode in times.items()}


# All tasks, over the GPUs.


class Task(NamedTuple):
    """What one process measures, one job after the other."""

    jobs: list[dict[str, Any]]
    modes: tuple[str, ...]
    least_s: float  # with less time left it is not begun
    limit_s: float  # and with more it is given up


def tasks(options: argparse.Namespace) -> list[Task]:
    """All that is left to do in this folder, what must be there first: the models, then the products. Of these,
    without `--exhaustive`: EXHAUSTIVE where it has few configs; most of them; EXHAUSTIVE of the others, the longest
    first."""
    done = {(line["name"], "exhaustive" in line["compile_s"]) for line in results(Path(options.out)) if "us" in line}

    def left(given: list[dict[str, Any]], *, whole: bool) -> list[dict[str, Any]]:
        return [job for job in given if (name_of(job), whole) not in done]

    models, products = jobs(options.tiny, options.float32)
    products = [job for job in products if not options.products or name_of(job) in options.products]
    if options.exhaustive:
        of_models = [Task([job], MODES, SEARCH_S, 7200) for job in left(models, whole=True)]
        of_products = [Task([job], MODES, SEARCH_S, 600) for job in left(products, whole=True)]
    else:
        whole = () if options.float32 else WHOLE
        searched = [job for job in products if options.tiny or (job["m"], job["n"], job["k"]) in whole]
        searched.sort(key=lambda job: job["m"])
        quick = left(products, whole=False)
        of_models = [Task([job], QUICK, 60, MODEL_S) for job in left(models, whole=False)]
        of_products = [
            *(Task([job], MODES, 90, 300) for job in left(searched[:2], whole=True)),
            *(Task(quick[at : at + BATCH_JOBS], QUICK, 45, 300) for at in range(0, len(quick), BATCH_JOBS)),
            *(Task([job], MODES, 90, 600) for job in reversed(left(searched[2:], whole=True))),
        ]
    return {"all": of_models + of_products, "models": of_models, "products": of_products}[options.only]


def run(options: argparse.Namespace) -> None:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    left, told = tasks(options), len(results(out))
    running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}
    caches = tempfile.mkdtemp(prefix="inductor-")  # a gigabyte a product
    try:
        while (left or running) and time.monotonic() < deadline:
            for gpu in range(options.gpus):
                if gpu in running:
                    process, until = running[gpu]
                    if process.poll() is None and time.monotonic() > until:
                        stop(process)
                        print(f"GPU {gpu}: given up after its time limit", flush=True)
                    if process.poll() is not None:
                        del running[gpu]
                while gpu not in running and left:
                    task = left.pop(0)
                    if deadline - time.monotonic() >= task.least_s:
                        running[gpu] = start(task, gpu, options, caches), time.monotonic() + task.limit_s
            for line in results(out)[told:]:
                told += 1
                print(line_of(line), flush=True)
            time.sleep(0.2)
    finally:
        for process, _ in running.values():
            stop(process)
        shutil.rmtree(caches, ignore_errors=True)
    show(out)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with what it started
    process.wait()


def start(task: Task, gpu: int, options: argparse.Namespace, caches: str) -> subprocess.Popen[bytes]:
    out = Path(options.out)
    threads = max((os.cpu_count() or 1) // options.gpus, 1)
    environment = {
        **torchs_ptxas(),
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": tempfile.mkdtemp(dir=caches),
    }
    command = [sys.executable, __file__, "--out", str(out), "--jobs", json.dumps(task.jobs), "--modes", *task.modes]
    command += ["--k", str(options.k), *(["--tiny"] if options.tiny else [])]
    with open(out / "log.txt", "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def torchs_ptxas() -> dict[str, str]:
    """What makes a process look for binaries under the keys that Inductor's compile workers store them by: these take
    torch's ptxas, and it does so only sometimes (torch 2.11). Else every choice is compiled again when it is timed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    ptxas = Path(spec.origin).parent / "bin" / "ptxas"
    return {"TRITON_PTXAS_PATH": str(ptxas)} if ptxas.exists() else {}


def results(out: Path) -> list[dict[str, Any]]:
    """The whole lines; the last one may be being written, or have been cut."""
    path = out / "results.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def line_of(line: dict[str, Any]) -> str:
    """One result: seconds to compile, microseconds to run, by mode."""
    if "error" in line:
        return f"{line['name']}: {line['error']}"
    figures = (
        f"{mode} {s:.1f} s {statistics.geometric_mean(line['us'][mode]):.1f} us"
        for mode, s in line["compile_s"].items()
    )
    return f"{line['name']}: " + ", ".join(figures)


def show(out: Path) -> None:
    lines = [line for line in results(out) if "error" not in line]
    for line in results(out):
        if "error" in line:
            print(line_of(line))
    latest = {line["name"]: line for line in lines if "exhaustive" not in line["compile_s"]}
    print_table("DEFAULT, and EXHAUSTIVE limited by Foretune", list(latest.values()), QUICK)
    whole = {line["name"]: line for line in lines if "exhaustive" in line["compile_s"]}
    print_table("All three", list(whole.values()), MODES)


def print_table(title: str, lines: list[dict[str, Any]], modes: tuple[str, ...]) -> None:
    """A row each, times of several lengths as their geometric mean; and what the goals are about."""
    print(f"\n{title}: {len(lines)} finished\n{'':28}" + "".join(f"{mode + ' s':>14}{'us':>10}" for mode in modes))
    us = {mode: [statistics.geometric_mean(line["us"][mode]) for line in lines] for mode in modes}
    s = {mode: [line["compile_s"][mode] for line in lines] for mode in modes}
    for place, line in enumerate(lines):
        print(f"{line['name']:28}" + "".join(f"{s[mode][place]:14.1f}{us[mode][place]:10.1f}" for mode in modes))
    for mode in modes if lines else ():
        if mode != "foretune":
            ratio = [ours / theirs for ours, theirs in zip(us["foretune"], us[mode], strict=True)]
            share = sum(s["foretune"]) / sum(s[mode])
            print(
                f"foretune next to {mode}: run time x{statistics.geometric_mean(ratio):.4f} in geometric mean, "
                f"worst x{max(ratio):.3f}, best x{min(ratio):.3f}; compile time x{share:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--budget-s", type=float, default=430.0)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--only", choices=("all", "models", "products"), default="all")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--exhaustive", action="store_true", help="the whole of EXHAUSTIVE for all that is compiled")
    parser.add_argument("--products", nargs="+", metavar="MxNxK", help="only these of the products")
    parser.add_argument("--float32", action="store_true", help="products of float32, as TF32")
    parser.add_argument("--jobs", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--modes", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs is None:
        known = [name_of(job) for job in jobs(options.tiny, options.float32)[1]]
        if unknown := [name for name in options.products or () if name not in known]:
            parser.error(f"there is no product {unknown[0]}; there are {', '.join(known)}")
        run(options)
        return
    for job in options.jobs:
        line: dict[str, Any] = {"name": name_of(job), "k": options.k}
        try:
            line |= measure(job, options.modes, options.k, options.tiny, Path(options.out) / "searches")
        except Exception as error:  # noqa: BLE001 - the next one may do
            traceback.print_exc()
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        with open(Path(options.out) / "results.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

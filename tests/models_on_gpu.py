"""Compare torch.compile's modes with Foretune on whole models of transformers: `python tests/models_on_gpu.py`.

Five architectures with random weights and a few layers each are compiled by Inductor's default mode, by its
max-autotune, and by max-autotune with `foretune.use("inductor")`, with empty caches before each. The CUDA graphs of
all three run interleaved, and the table shows medians of the run time and the seconds of the first call. Each model has
a process of its own; with several GPUs, models run side by side and share the cores. A result is kept in `--out` when
its model is done, so that a run that is cut off continues. `--tiny` runs small models on the CPU without CUDA graphs,
to try the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MODES = ("default", "max-autotune", "foretune")
ROUNDS, SAMPLES = 9, 5
#: Relative error of the Frobenius norm up to which two modes agree in bf16 after a few layers.
MOST_OFF = 3e-2
#: Model -> (class, configuration, shape of its input). Sizes are those of the models, but for the number of layers.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "BERT-large, 16 x 512": (
        "bert",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 4},
        (16, 512),
    ),
    "Llama-3.1-8B, prefill of 2,048": (
        "llama",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "num_hidden_layers": 3,
            "vocab_size": 1024,
        },
        (1, 2048),
    ),
    "Qwen3-4B, 48 tokens": (
        "qwen3",
        {
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 9728,
            "num_hidden_layers": 3,
            "vocab_size": 1024,
        },
        (48, 1),
    ),
    "ViT-L/16, 32 images": (
        "vit",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 3},
        (32, 3, 224, 224),
    ),
    "Gemma-3-1B, 4 x 256": (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 6912,
            "num_hidden_layers": 4,
            "vocab_size": 1024,
        },
        (4, 256),
    ),
}


def model_and_input(name: str, where: str, tiny: bool) -> tuple[Any, Any]:
    """Return a model of random weights, which maps its input to the last hidden state, and an input."""
    import torch
    from transformers import AutoConfig, AutoModel

    kind, sizes, shape = MODELS[name]
    if tiny:
        sizes = {key: {"num_hidden_layers": 1, "vocab_size": 64}.get(key, 64) for key in sizes}
        sizes.update({"num_attention_heads": 2} | ({"num_key_value_heads": 1} if "vocab_size" in sizes else {}))
        sizes.update({"head_dim": 32} if "head_dim" in sizes else {})
        shape = (1, *shape[1:]) if kind == "vit" else (2, 8)
    config = AutoConfig.for_model(kind, **sizes)
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(where):
        model = AutoModel.from_config(config, dtype=torch.float32 if tiny else torch.bfloat16).eval()
        if len(shape) > 2:
            given = torch.randn(shape, dtype=next(model.parameters()).dtype)
        else:
            given = torch.randint(0, 64, shape)

    def forward(x: torch.Tensor) -> torch.Tensor:
        state: torch.Tensor = model(x).last_hidden_state
        return state

    return forward, given


def measure(name: str, k: int | str, tiny: bool) -> dict[str, Any]:
    """Return the seconds of the first call and the run times in microseconds, by mode."""
    import foretune
    import torch
    from torch._inductor import list_mode_options
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    where = "cpu" if tiny else "cuda"
    forward, given = model_and_input(name, where, tiny)
    torch.compile(lambda x: x + 1)(torch.ones(8, device=where))  # starts what a process starts once
    AsyncCompile.wait_pool_ready()
    compile_s: dict[str, float] = {}
    calls: dict[str, Any] = {}
    with torch.no_grad():
        expected = forward(given).float()
        for mode in MODES:
            torch.compiler.reset()
            settings = {} if mode == "default" else list_mode_options("max-autotune-no-cudagraphs")
            if mode == "foretune":
                settings["max_autotune_gemm_search_space"] = "EXHAUSTIVE"
            with foretune.use("inductor", k=k) if mode == "foretune" else nullcontext(), fresh_cache(delete=False):
                compiled = torch.compile(forward, options=settings)
                began = time.perf_counter()
                compiled(given)
                if where == "cuda":
                    torch.cuda.synchronize()
                compile_s[mode] = time.perf_counter() - began
            calls[mode] = captured(compiled, given) if where == "cuda" else (lambda f=compiled: f(given))
        times = interleaved(calls, where)
        for mode, call in calls.items():
            off = float((call().float() - expected).norm() / expected.norm())
            if not off < MOST_OFF:
                raise AssertionError(f"{name}: {mode} differs from eager mode by {off:.3g} of the norm")
    device = torch.cuda.get_device_name() if where == "cuda" else "CPU"
    return {"name": name, "device": device, "k": k, "compile_s": compile_s, "us": times}


def captured(compiled: Any, given: Any) -> Any:
    """Return the replay of a CUDA graph of one call, which leaves out the host's time."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compiled(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = compiled(given)

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def interleaved(calls: dict[str, Any], where: str) -> dict[str, float]:
    """Return the median time of each call in microseconds. The calls take turns in random order."""
    import torch

    times: dict[str, list[float]] = {mode: [] for mode in calls}
    for turn in range(ROUNDS + 1):
        for mode in random.Random(turn).sample(list(calls), len(calls)):
            if where == "cuda":
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(SAMPLES + 1)]
                calls[mode]()  # fills the queue, so that no gap of launching is timed
                marks[0].record()
                for mark in marks[1:]:
                    calls[mode]()
                    mark.record()
                torch.cuda.synchronize()
                taken = [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(marks)]
            else:
                began = time.perf_counter()
                calls[mode]()
                taken = [(time.perf_counter() - began) * 1e6]
            if turn:  # the first turn warms up
                times[mode] += taken
    return {mode: statistics.median(each) for mode, each in times.items()}


def results(out: Path) -> list[dict[str, Any]]:
    """Return the complete lines of the file of results."""
    path = out / "models.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def show(out: Path) -> None:
    """Print one row for each model, and geometric means of the ratios."""
    from foretune.datasets.console import table
    from rich import print as show_table

    lines = {line["name"]: line for line in results(out)}
    devices = ", ".join(sorted({line["device"] for line in lines.values()}))
    rows = [
        (
            name,
            *(f"{line['us'][mode] / 1e3:.3f}" for mode in MODES),
            *(f"{line['compile_s'][mode]:.1f}" for mode in MODES),
        )
        for name, line in lines.items()
    ]
    columns = ("model", *(f"{mode} {unit}" for unit in ("ms", "s") for mode in MODES))
    show_table(table(f"Run time in ms and seconds of the first call on {devices}", columns, rows))
    for mode in MODES[:2] if lines else ():
        for what in ("us", "compile_s"):
            ratios = [line[what]["foretune"] / line[what][mode] for line in lines.values()]
            label = {"us": "run time", "compile_s": "first call"}[what]
            mean, worst = statistics.geometric_mean(ratios), max(ratios)
            print(f"foretune / {mode}, {label}: {mean:.3f} (worst {worst:.3f}, best {min(ratios):.3f})")


def main() -> None:
    """Measure the models that the output folder lacks, one process each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="models-out", help="folder of the results; a run continues there")
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="seconds after which no model is begun or goes on"
    )
    parser.add_argument("--k", default="8", help="configs for each GEMM: a number, or auto")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.model:
        found = measure(options.model, options.k if options.k == "auto" else int(options.k), options.tiny)
        with open(out / "models.jsonl", "a") as file:
            file.write(json.dumps(found) + "\n")
        return
    deadline = time.monotonic() + options.budget_s
    done = {line["name"] for line in results(out)}
    left = [name for name in MODELS if name not in done]
    running: dict[int, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="models-") as caches:
        while (left or running) and time.monotonic() < deadline:
            for gpu in range(options.gpus):
                if gpu in running and running[gpu].poll() is not None:
                    del running[gpu]
                if gpu not in running and left:
                    running[gpu] = start(left.pop(0), gpu, options, caches)
            time.sleep(0.2)
        for process in running.values():
            process.kill()
            process.wait()
    show(out)


def start(name: str, gpu: int, options: argparse.Namespace, caches: str) -> subprocess.Popen[bytes]:
    """Start the process that measures a model on a GPU."""
    from inductor_on_gpu import torchs_ptxas

    environment = {
        **torchs_ptxas(),
        **os.environ,
        "CUDA_VISIBLE_DEVICES": str(gpu),
        "TORCHINDUCTOR_COMPILE_THREADS": str(max((os.cpu_count() or 1) // options.gpus, 1)),
        "PYTHONPATH": os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": tempfile.mkdtemp(dir=caches),
    }
    command = [sys.executable, __file__, "--out", options.out, "--k", options.k, "--model", name]
    command += ["--tiny"] if options.tiny else []
    with open(Path(options.out) / "log.txt", "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


if __name__ == "__main__":
    main()

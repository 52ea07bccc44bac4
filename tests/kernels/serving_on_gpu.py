"""The engines' tuned files on the GPUs that are here, in two steps, each of which keeps what it has in OUT:

    python serving_on_gpu.py collect OUT --budget 420       # measures both products; OUT/measured
    python serving_on_gpu.py verdict OUT --data OUT/measured --deadline 460

`collect` draws no layer of the model families of the five models below. `verdict` trains a bundle on that (and on
nothing of the five), measures the engine tuner's whole space for the five (`--batches` of them), and then times, side
by side, what is predicted and measured in a few seconds (ours), the engine's default, its own file, and the best of the
whole space; last, as far as the deadline lets it, it writes the files for the shapes that engines have one of for an
H100 and none for an H200.

Needs the engine's Python files on the path (`--engine sglang`): pip install --no-deps sglang==0.5.23. Of the wheel
(39 MB; vLLM's has 327 MB) these are enough:

    pip download --no-deps --python-version 3.11 --platform manylinux_2_34_x86_64 sglang==0.5.23
    pip download --no-deps --python-version 3.12 --platform manylinux_2_28_x86_64 vllm==0.32.0
    unzip -d engines sglang-*.whl 'sglang/kernels/ops/moe/fused_moe_triton_kernels.py' \\
        'sglang/srt/layers/moe/moe_runner/triton_utils/*' 'sglang-*/METADATA'
    unzip -d engines vllm-*.whl 'vllm/model_executor/layers/fused_moe/fused_moe.py' \\
        'vllm/model_executor/layers/fused_moe/configs/*' 'vllm-*/METADATA'
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path

from foretune.collect.campaign import collect_on_gpus
from foretune.collect.cases import draw_cases
from foretune.collect.compiling import compile_ahead
from foretune.datasets import Case, DeviceSpec, load
from foretune.kernels import find_measurable
from foretune.kernels.fused_moe import Layer, installed
from foretune.kernels.fused_moe.contenders import LAYERS
from foretune.kernels.fused_moe.engines import BATCH_SIZES, ENGINES
from foretune.kernels.fused_moe.tuned_files import table_in_force
from foretune.kernels.fused_moe.tuning import best_pairs, tune_layer
from foretune.kernels.fused_moe.workload import layers_on_ranks, requested_layer
from foretune.kernels.workloads import MOE_COLUMNS, load_models
from foretune.model.train import train_bundle

FAMILIES = ("fused_moe", "fused_moe_down")
TRITON = "3.6.0"  # shipped files are looked for in any version


def other_models(out: Path) -> Path:
    """A table without the five's model families, as evaluation holds models out."""
    held_out = {model.split("-")[0].rstrip("0123456789.") for model, _ in LAYERS}
    left = [one for one in load_models() if one.model.split("-")[0].rstrip("0123456789.") not in held_out]
    path = out / "models.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = (*MOE_COLUMNS, "expert_hidden_size")  # which all have a gate
        writer.writerow(columns)
        writer.writerows([getattr(model, column) for column in columns] for model in left if model.is_gated)
    return path


def collect(arguments: argparse.Namespace) -> None:
    families = [find_measurable(name) for name in FAMILIES]
    models = other_models(arguments.out)
    drawn = [draw_cases(family, models=models, per_layer=1, random=30) for family in families]
    cases = [case for pair in zip(*drawn, strict=False) for case in pair]
    measured = arguments.out / "measured"
    print(f"{len(cases)} cases", flush=True)
    summary = collect_on_gpus(families, cases, measured, plan="adaptive", budget_s=arguments.budget)
    print(json.dumps(summary.to_json()))


def searched(engine: str, layers: dict[str, Layer], batches: list[int], out: Path, budget_s: float) -> dict:
    """The best pair of the whole space, by layer and batch, as far as the budget went."""
    families = [find_measurable(name) for name in FAMILIES]
    named = [(name, layer, batch) for batch in batches for name, layer in layers.items()]
    cases = [
        Case(layer.problem(family.name, engine, batch), (name.replace(" ", "/"),))
        for name, layer, batch in named
        for family in families
    ]
    print(json.dumps(collect_on_gpus(families, cases, out, plan="exhaustive", budget_s=budget_s).to_json()), flush=True)
    times: dict = defaultdict(dict)
    if not (out / "dataset.json").exists():  # there was no time for a single case
        return {}
    dataset = load(out)
    for family in families:
        if family.name in dataset.families:
            grid = dataset.grid(family.name)
            for case, row in zip(grid.cases, grid.times_us, strict=True):
                times[case.problem] = {c: float(us) for c, us in zip(grid.configs, row, strict=True) if us > 0}
    found: dict = {}
    for _, layer, batch in named:
        up, down = (times.get(layer.problem(family.name, engine, batch)) for family in families)
        if up and down:
            found.setdefault(layer, {})[batch] = best_pairs(engine, up, down)[0][1]
    return found


def without_file() -> dict[str, Layer]:
    """The bf16 layers of models.csv that an engine which is here ships a file for on an H100, and none on an H200."""
    found = {}
    for (experts, inter), users in layers_on_ranks(load_models()).items():
        model, degree = users[0]
        layer = Layer(experts, model.top_k, model.expert_hidden_size, inter)
        h100, h200 = (
            any(table_in_force(engine, layer, DeviceSpec.named(name), TRITON).rows for engine in installed())
            for name in ("h100", "h200")
        )
        if h100 and not h200:
            found[f"{model.model} tp{degree}"] = layer
    return found


def verdict(arguments: argparse.Namespace) -> None:
    began, engine, out = time.monotonic(), arguments.engine, arguments.out
    device = DeviceSpec.live()
    dataset = load(arguments.data)
    bundle = train_bundle(dataset, {name: find_measurable(name) for name in FAMILIES if name in dataset.families})
    bundle.save(out / "bundle")
    print(f"trained after {time.monotonic() - began:.0f} s", flush=True)
    layers = {f"{model} tp{degree}": requested_layer(model, tp=degree) for model, degree in LAYERS}
    best = searched(engine, layers, arguments.batches, out / "searched", arguments.search)
    results, lines = [], []

    def run(name: str, layer: Layer, batches: list[int], others=None) -> None:
        start = time.monotonic()
        files = tune_layer(
            engine,
            layer,
            device,
            bundle=bundle,
            measure=True,
            batches=batches,
            compile_ahead=compile_ahead,
            others=others,
        )
        files.save(out / "files")
        seconds = time.monotonic() - start
        results.append({"layer": name, "seconds": seconds, **files.to_json()})
        (out / "verdict.json").write_text(json.dumps(results, indent=1))
        print(f"{name}: {seconds:.0f} s; {files.verdict}", flush=True)
        for row in files.rows:
            us = {key: f"{value:9.1f}" for key, value in row.times_us.items()}
            columns = " ".join(us.get(key, " " * 9) for key in ("ours", "default", "shipped", "search"))
            lines.append(f"{name:36} {row.tokens:6} {columns} {row.gain:7.3f}x")

    for name, layer in layers.items():
        if time.monotonic() - began < arguments.deadline:
            pairs = best.get(layer, {})
            run(name, layer, arguments.batches, lambda batch, p=pairs: {"search": p[batch]} if batch in p else {})
    for name, layer in {"Qwen3-30B-A3B tp1": layers["Qwen3-30B-A3B tp1"], **without_file()}.items():
        if time.monotonic() - began < arguments.deadline:
            run(f"{name}, whole file", layer, list(BATCH_SIZES))
    print(f"{'us of both products':36} tokens      ours   default   shipped    search    gain")
    print("\n".join(line for line in lines if ", whole file" not in line))
    off = [us["ours"] / us["search"] for one in results for row in one["rows"] if "search" in (us := row["times_us"])]
    if off:
        mean, worst = math.exp(statistics.fmean(map(math.log, off))), max(off)
        print(f"ours over the whole space: {mean:.3f}x in the geometric mean of {len(off)}, {worst:.3f}x at worst")
    whole = [one["seconds"] for one in results if one["layer"].endswith("whole file")]
    print(f"{len(whole)} whole files took {', '.join(f'{seconds:.0f}' for seconds in whole)} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("collect", "verdict"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds to collect for")
    parser.add_argument("--data", type=Path, help="what `collect` measured")
    parser.add_argument("--search", type=float, default=240.0, help="seconds for the whole space; 0: not searched")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--deadline", type=float, default=440.0, help="no layer is begun after so many seconds")
    arguments = parser.parse_args()
    if arguments.engine not in installed():
        raise SystemExit(f"{arguments.engine}'s files are not on the path: see the head of this file")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (collect if arguments.step == "collect" else verdict)(arguments)


if __name__ == "__main__":
    main()

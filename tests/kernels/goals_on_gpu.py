"""Figures behind the goals that kernels do not reach: `python tests/kernels/goals_on_gpu.py [PART ...]`.

- products: dense products, of 16-bit operands and of fp8 with one scale per tensor, with the predicted config, the best
  of many (also outside of the space: SPLIT_K of any number), and cuBLAS. First all configs in few rounds with a cold
  L2, then the fastest again; the last two columns are times in CUDA graphs, where kernels follow each other.
- medium, small: dense products of 4 to 120, and 0.1 to 6, GFLOP, of invented sizes, with the predicted config, the next
  seven, those that are often the fastest, and cuBLAS, with a clean L2; means of the ratios come last.
  `--earlier=FOLDER` also tries the first choice of the bundle in a folder.
- skew: the grouped GEMMs with unequal groups relative to equal ones.
- bands: forward and dX of 1,024 and of 8,192 tokens, with each value of GROUP_M: the time of the best of some tiles
  relative to that of the best with any value.
- quantizing: the kernels that quantize along rows, next to eager PyTorch.
- flushes: large products after the L2 was flushed by writing, by reading, or not, and on a GPU that is kept busy: dense
  ones with the predicted config and all specialized ones, the grouped GEMMs of training with the first three predicted
  ones and others. Means of the ratios come last.

Configs are compiled by all cores first. `--dry` counts the configs without a GPU.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from configs_on_gpu import configs_of, in_random_order
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_measurable
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes
from foretune.kernels.grouped_gemm.space import cdiv
from foretune.kernels.matmul.space import KNOBS, LAYOUTS
from foretune.kernels.registry import comparison_of
from foretune.model import geomean, load_bundle
from foretune.runtime import use_stub_driver
from foretune.runtime.shortlist import make_shortlist

DRY = "--dry" in sys.argv
EARLIER = [arg.partition("=")[2] for arg in sys.argv if arg.startswith("--earlier=")]
BEGAN = time.perf_counter()
FINALISTS, GRAPH_BYTES = 5, 300e6

MATMUL_TILES = [
    *((128, n, k, 4, s) for n, k, s in ((32, 64, 6), (32, 128, 4), (64, 64, 5), (64, 128, 4), (128, 64, 5))),
    *((128, n, k, 8, s) for n, k, s in ((128, 64, 5), (128, 128, 3), (256, 64, 4), (256, 32, 6))),
    *((64, n, k, 4, s) for n, k, s in ((64, 64, 6), (64, 128, 5), (128, 64, 5), (128, 128, 4), (256, 64, 4))),
    (256, 64, 64, 8, 4), (256, 128, 64, 8, 4),
]  # fmt: skip
SCALED_TILES = [
    *((128, n, 4, s) for n, s in ((32, 6), (64, 5), (128, 4))),
    *((128, n, 8, s) for n, s in ((64, 5), (128, 4), (256, 4))),
    *((64, n, 4, s) for n, s in ((64, 6), (128, 5), (256, 4))),
    *((256, n, 8, s) for n, s in ((32, 5), (64, 5), (128, 4))),
]
#: Groups, rows, N, K.
LAYERS = [
    (64, 65536, 2048, 1408), (64, 65536, 2816, 2048), (128, 65536, 1536, 2048), (32, 65536, 1536, 4096),
    (64, 65536, 2048, 1024), (32, 8192, 7168, 2048), (128, 16384, 2816, 4096), (8, 8192, 28672, 4096),
    (128, 65536, 2048, 768), (60, 16384, 2816, 2048), (16, 4096, 2816, 2048), (64, 4096, 2048, 1024),
]  # fmt: skip
#: Of `medium` and `small`: the sizes of problems in TFLOP, how many of each kind, and their numbers of tokens.
DRAWN = {
    "medium": ((0.004, 0.12), 25, (256, 384, 512, 640, 1024, 1536, 2048, 2560, 3072, 4096, 6144)),
    "small": ((0.0001, 0.006), 14, (16, 32, 64, 128, 192, 256, 512, 1024)),
}
#: The dtype and flags of each kind.
KINDS: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("matmul", "forward"): ("bf16", ()),
    ("matmul", "dX"): ("bf16", LAYOUTS[1:]),
    ("matmul", "dW"): ("bf16", LAYOUTS),
    ("scaled_gemm", "tensorwise"): ("fp8e4m3", ()),
    ("scaled_gemm", "rowwise"): ("fp8e4m3", ("rowwise",)),
    ("scaled_gemm", "blockwise"): ("fp8e4m3", ("blockwise",)),
}
BANDS = (1, 2, 4, 8, 16, 32)
ROUTINGS = ("balanced", "uniform", "zipf", "hot", "hot128")


def say(text: str) -> None:
    print(text, flush=True)


def compile_one(job: tuple[str, KernelConfig, Problem, DeviceSpec]) -> str | None:
    """Compile one config into Triton's cache; return what is wrong with it, or None."""
    name, config, problem, device = job
    try:
        with use_stub_driver(device):
            find_measurable(name).compile(config, problem)
    except Exception as error:  # noqa: BLE001 - a config that does not compile is left out
        return f"{type(error).__name__}: {error}"
    return None


def compiled(jobs: list[tuple[str, KernelConfig, Problem, DeviceSpec]]) -> set[Any]:
    """Compile one job per binary in parallel; return the keys of the binaries that exist."""
    unique = {(name, find_measurable(name).binary_key(config, problem)): (name, config, problem, device)
              for name, config, problem, device in jobs}  # fmt: skip
    say(f"{len(jobs)} configs, {len(unique)} binaries, after {time.perf_counter() - BEGAN:.0f} s")
    if DRY:
        keys = random.Random(0).sample(sorted(unique, key=repr), 4)
        say(str([compile_one(unique[key]) for key in keys]))
        return set(unique)
    with get_context("spawn").Pool(max((os.cpu_count() or 2) - 1, 2)) as pool:
        wrong = pool.map(compile_one, unique.values(), chunksize=1)
    for text in sorted({str(one)[:150] for one in wrong if one}):
        say(f"  {text}")
    say(f"compiled after {time.perf_counter() - BEGAN:.0f} s")
    return {key for key, reason in zip(unique, wrong, strict=True) if reason is None}


def times_of(launches: dict[str, Callable[[], Any]], timer: Any, rounds: int, samples: int) -> dict[str, float]:
    """The median time of each launch with a cold L2, in rounds of random order."""
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _, order in in_random_order(launches, rounds):
        for name in order:
            times[name] += timer.sample(launches[name], samples)
    return {name: statistics.median(found) for name, found in times.items()}


def busy_times(launches: dict[str, Callable[[], Any]], alone: dict[str, float]) -> dict[str, float]:
    """Return the median time of each launch on a GPU that is kept busy, in runs of 10 ms of the same launch.

    The card's power limit lowers the clocks only after a while, so the first rounds are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in launches}
    for turn, order in in_random_order(launches, 5):
        runs = []
        for name in order:
            count = max(4, int(5e3 / alone[name]))
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for place in range(2 * count):
                if place == count:
                    first.record()
                launches[name]()
            last.record()
            runs.append((name, first, last, count))
        torch.cuda.synchronize()
        for name, first, last, count in runs if turn > 1 else ():
            times[name].append(first.elapsed_time(last) * 1e3 / count)
    return {name: statistics.median(found) for name, found in times.items()}


def graph_times(candidates: dict[str, list[Callable[[], Any]]]) -> dict[str, float]:
    """The median time of each candidate's launches in a CUDA graph, per launch."""
    graphs, times = {}, {name: [] for name in candidates}
    for name, launches in candidates.items():
        launches[0]()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for launch in launches:
                launch()
    for turn, order in in_random_order(graphs, 9):
        for name in order:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)
            first.record()
            graphs[name].replay()
            last.record()
            last.synchronize()
            if turn > 1:
                times[name].append(first.elapsed_time(last) * 1e3 / len(candidates[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def shown(config: KernelConfig) -> str:
    c = config
    text = f"{c['BLOCK_M']}x{c['BLOCK_N']}x{c['BLOCK_K']} g{c['GROUP_M']} split{c['SPLIT_K']}"
    for name, value in c.to_json().items():
        if name.startswith(("TMA", "SWAP", "CONS", "PING", "PROG", "num")):
            text += f" {name.lower().replace('programs_per_sm', 'p').replace('num_', '')}{value}"
    return text


def product_problems() -> Iterator[tuple[str, Any, Problem]]:
    family = find_measurable("matmul")
    for name, case in comparison_of(family).suite(family).items():
        if name.endswith(("forward 128", "square 1024")) or name.startswith("batched"):
            yield name, family, case.problem
    family = find_measurable("scaled_gemm")
    for name, case in comparison_of(family).suite(family).items():
        if name.endswith("256 tensorwise") or "kv_a 4096 tensor" in name:
            yield name, family, case.problem


def candidates(family: Any, problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
    """The most promising configs, and split contractions of large tiles."""
    found = list(make_shortlist(family, problem, device, k=40).configs)
    if family.name == "matmul":
        tiles = [(m, n, k, warps, stages) for m, n, k, warps, stages in MATMUL_TILES]
    else:
        tiles = [(m, n, 128, warps, stages) for m, n, warps, stages in SCALED_TILES]
    batch = problem["batch"] if family.name == "matmul" else 1
    for (m, n, k, warps, stages), splits in product(tiles, (1, 2, 3, 4, 5, 6, 8)):
        programs = batch * cdiv(problem["m"], m) * cdiv(problem["n"], n) * splits
        if (splits > 1 and not 64 <= programs <= 600) or (splits == 1 and programs < 60):
            continue
        knobs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "SPLIT_K": splits, "PROGRAMS_PER_SM": 0}
        if family.name == "matmul":
            knobs |= {"TMA": 1, "CONSUMERS": 0, "PINGPONG": 0}
        else:
            knobs |= {"SWAP_AB": 0, "TMA_LOAD": 1, "TMA_STORE": 0, "CONSUMERS": 0}
        config = KernelConfig.of(**knobs, num_warps=warps, num_stages=stages)
        if config not in found and family.supports(config, problem, device) is None:
            found.append(config)
    return found


def products(device: DeviceSpec, timer: Any) -> None:
    rows = [
        (name, family, problem, candidates(family, problem, device)) for name, family, problem in product_problems()
    ]
    able = compiled([(f.name, config, problem, device) for _, f, problem, configs in rows for config in configs])
    say("us with a cold L2 (in graphs): cuBLAS, predicted, best of all; cuBLAS over predicted, over best")
    for name, family, problem, configs in rows:
        if DRY:
            say(f"  {name}: {len(configs)} configs; {shown(configs[0])}")
            continue
        inputs = family.inputs(problem, device)
        reference = family.reference(inputs).flatten()[::7]
        launches: dict[str, Callable[[], Any]] = {}
        for place, config in enumerate(configs):
            if (family.name, family.binary_key(config, problem)) not in able:
                continue
            launch = partial(family.launch, inputs, config)
            try:
                out = launch().flatten()[::7].float()
            except Exception as error:  # noqa: BLE001 - such as too much shared memory
                say(f"    {shown(config)}: {type(error).__name__}")
                continue
            error = float((out - reference).norm() / reference.norm())
            if error < 1e-2:
                launches[f"{place}"] = launch
            else:
                say(f"    {shown(config)} is wrong by {error:.2g}")
        predicted, library = "0", "cublas" if family.name == "matmul" else "torch"
        theirs = comparison_of(family).contenders(family, problem, inputs, device, {})[library]
        theirs()
        times = times_of(launches, timer, 3, 2)
        final = sorted(times, key=times.__getitem__)[:FINALISTS]
        final = list(dict.fromkeys([predicted, *final]))
        times = times_of({label: launches[label] for label in final} | {"lib": theirs}, timer, 9, 3)
        copies = max(1, min(40, int(GRAPH_BYTES // family.bytes(problem))))
        all_inputs = [inputs, *(family.inputs(problem, device, seed=seed) for seed in range(1, copies))]
        ways = {label: [partial(family.launch, one, configs[int(label)]) for one in all_inputs] for label in final}
        ways["lib"] = [
            comparison_of(family).contenders(family, problem, one, device, {})[library] for one in all_inputs
        ]
        in_graph = graph_times(ways)
        best = min(final, key=times.__getitem__)
        best_in_graph = min(final, key=in_graph.__getitem__)
        say(
            f"  {name:32} {times['lib']:.1f} ({in_graph['lib']:.1f}), "
            f"{times[predicted]:.1f} ({in_graph[predicted]:.1f}), {times[best]:.1f} ({in_graph[best_in_graph]:.1f}); "
            f"{times['lib'] / times[predicted]:.3f} ({in_graph['lib'] / in_graph[predicted]:.3f}), "
            f"{times['lib'] / times[best]:.3f} ({in_graph['lib'] / in_graph[best_in_graph]:.3f})"
        )
        for label in sorted(final, key=times.__getitem__):
            say(f"    {label:>4} {times[label]:.1f} ({in_graph[label]:.1f}) {shown(configs[int(label)])}")
        del inputs, all_inputs, ways, reference, launches, theirs
        torch.cuda.empty_cache()


def drawn_problems(
    tflop: tuple[float, float], each: int, counts: tuple[int, ...]
) -> Iterator[tuple[str, Any, Problem]]:
    """Yield products of each kind: forward, dX and dW in bf16, and forward in fp8 with each kind of scales."""
    rng = np.random.default_rng(48)
    for (name, kind), (dtype, flags) in KINDS.items():
        family, found = find_measurable(name), 0
        while found < each:
            tokens = int(rng.choice(counts))
            n, k = (128 * int(2 ** rng.uniform(2, 7.5)) for _ in range(2))
            m, n, k = (n, k, tokens) if kind == "dW" else (tokens, n, k)
            batch = {"batch": 1} if name == "matmul" else {}
            problem = Problem.of(name, dtype=dtype, flags=flags, m=m, n=n, k=k, **batch)
            if tflop[0] <= family.flops(problem) / 1e12 <= tflop[1]:
                yield kind, family, problem
                found += 1


def drawn(which: str, device: DeviceSpec, _: Any) -> None:
    from foretune.runtime.timing.timer import Timer
    from training_problems import often_fastest

    often = {name: often_fastest(find_measurable(name), DRAWN[which][0]) for name in ("matmul", "scaled_gemm")}
    rows, bundles = [], [load_bundle(folder) for folder in EARLIER]
    for kind, family, problem in drawn_problems(*DRAWN[which]):
        first = make_shortlist(family, problem, device, k=8).configs
        earlier = [make_shortlist(family, problem, device, k=1, bundle=bundle).configs[0] for bundle in bundles]
        usual = [one for one in often[family.name] if family.supports(one, problem, device) is None]
        rows.append((kind, family, problem, list(dict.fromkeys([*first, *earlier, *usual])), [first[0], *earlier]))
    able = compiled([(f.name, config, problem, device) for _, f, problem, tried, _ in rows for config in tried])
    if DRY:
        return
    timer = Timer(clean=True)
    ratios: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    header = "predicted over the best of those tried, cuBLAS over predicted"
    header += "; the same of the earlier bundle" * len(bundles)
    say(f"us with the predicted config: {header}")
    for kind, family, problem, tried, choices in rows:
        inputs, library = family.inputs(problem, device), "cublas" if family.name == "matmul" else "torch"
        others = comparison_of(family).contenders(family, problem, inputs, device, {})
        launches: dict[Any, Callable[[], Any]] = {
            config: partial(family.launch, inputs, config)
            for config in tried
            if (family.name, family.binary_key(config, problem)) in able
        }
        if library not in others or not launches.keys() >= set(choices):
            say(f"  {problem} is left out: torch cannot compute it, or a predicted config did not compile")
            continue
        times = times_of(launches, timer, 3, 2)
        best = sorted(times, key=times.__getitem__)[:FINALISTS]
        final = {config: launches[config] for config in dict.fromkeys([*choices, *best])}
        final["library"] = others[library]
        times = times_of(final, timer, 7, 3)
        theirs, least = times.pop("library"), min(times.values())
        line = [ratio for one in choices for ratio in (times[one] / least, theirs / times[one])]
        size = "less than 30 GFLOP" if family.flops(problem) < 3e10 else "30 GFLOP and more"
        ratios[family.name, kind].append(line)
        ratios[family.name, size].append(line)
        say(f"  {problem} {times[choices[0]]:.1f}: {', '.join(f'{ratio:.3f}' for ratio in line)}")
        del inputs, others, launches, final
        torch.cuda.empty_cache()
    say(f"geometric mean (worst): {header}")
    for (name, which), lines in ratios.items():
        means = [
            f"{geomean(column):.3f} ({(min if place % 2 else max)(column):.2f})"
            for place, column in enumerate(zip(*lines, strict=True))
        ]
        say(f"  {name}, {which} ({len(lines)}): {', '.join(means)}")


def sizes_of(routing: str, rows: int, groups: int) -> tuple[int, ...]:
    """Group sizes; in "hot128" one expert has about half the rows, and all are multiples of 128."""
    if routing != "hot128":
        return tuple(drawn_sizes(routing, rows, groups, np.random.default_rng(1)))
    least = rows // 2 // groups // 128 * 128
    return (rows - least * (groups - 1), *(least for _ in range(groups - 1)))


def skew(device: DeviceSpec, timer: Any) -> None:
    """Print times with unequal groups over those with equal ones."""
    jobs = []
    for which, (groups, rows, n, k) in product(("fwd", "dx", "dw"), LAYERS):
        one = find_measurable(f"grouped_gemm_{which}")
        problem = Problem.of(one.name, groups=groups, rows=rows, n=n, k=k)
        jobs += [(one.name, config, problem, device) for _, config in chosen_of(which, problem, device)]
    compiled(jobs)
    if DRY:
        return
    for which, (groups, rows, n, k) in [*product(("dw",), LAYERS), *product(("fwd", "dx"), LAYERS[:4])]:
        family, dims = find_measurable(f"grouped_gemm_{which}"), {"groups": groups, "rows": rows, "n": n, "k": k}
        ways: dict[str, Callable[[], Any]] = {}
        for routing in ROUTINGS:
            problem = Problem.of(family.name, ragged={"rows": sizes_of(routing, rows, groups)}, **dims)
            inputs = family.inputs(problem, device)
            reference = None
            for label, config in chosen_of(which, problem, device):
                name = f"{label}/{routing}"
                ways[name] = partial(family.launch, inputs, config)
                inputs.out.fill_(float("nan"))
                ways[name]()
                found = inputs.out.flatten()[::997].double()
                reference = found if reference is None else reference
                error = float((found - reference).norm() / reference.norm())
                if not error < 1e-2:
                    say(f"    {name}: wrong by {error}")
        times = times_of(ways, timer, 7, 2)
        say(f"{which} {groups} x {n} x {k}, {rows} rows: us if balanced; {', '.join(ROUTINGS[1:])} over it")
        for label in dict.fromkeys(name.partition("/")[0] for name in times):
            line = [times[f"{label}/{routing}"] for routing in ROUTINGS]
            say(f"  {line[0]:.0f} us: {', '.join(f'{us / line[0]:.3f}' for us in line[1:])} {label}")
        del inputs, ways
        torch.cuda.empty_cache()


def chosen_of(which: str, problem: Problem, device: DeviceSpec) -> list[tuple[str, KernelConfig]]:
    """The predicted config, and for dW those whose groups share a tile or take tiles in turns."""
    family = find_measurable(problem.family)
    known = configs_of(family, "dw") if which == "dw" else ()
    found = [(label, config) for label, config in known if config["CONSUMERS"]]
    predicted = make_shortlist(family, problem, device, k=1).configs[0]
    return [*found, (f"predicted {tile_of(predicted)}", predicted)]


def tile_of(config: KernelConfig) -> str:
    """The tile of a config and whether its groups take tiles in turns, as text."""
    text = "x".join(str(config[f"BLOCK_{axis}"]) for axis in "MNK")
    return f"{text} g{config['GROUP_M']}" + " ws" * bool(config["CONSUMERS"]) + " pingpong" * config["PINGPONG"]


def quantizing(device: DeviceSpec, timer: Any) -> None:
    from foretune.kernels.scaled_gemm.operators import QUANTIZED
    from foretune.kernels.scaled_gemm.quantize import quantize_w, quantize_x
    from foretune.kernels.scaled_gemm.space import GRANULARITIES
    from foretune.kernels.scaled_gemm.triton_kernels import one_way

    if DRY:
        return
    say("quantizing, us with a cold L2: eager, the kernels (TB/s of reading bf16 and writing fp8 once)")
    shapes = (("x", (65536, 7168)), ("x", (65536, 2048)), ("x", (128, 7168)), ("w", (32, 4096, 7168)))
    for kind, (name, shape) in product(GRANULARITIES, shapes):
        x, weights = torch.randn(shape, device="cuda", dtype=torch.bfloat16), name == "w"
        eager = partial(quantize_w, x, kind) if weights else partial(quantize_x, x, kind)
        kernel = partial(QUANTIZED.call, x, "e4m3", kind, weights)
        (fp8, scale), (expected, expected_scale) = kernel(), eager()
        is_same = torch.equal(scale, expected_scale) and torch.equal(fp8.view(torch.uint8), expected.view(torch.uint8))
        ways = {"eager": eager, "kernel": kernel}
        options = one_way._ROWS, one_way._COLUMNS, one_way._BLOCK_ROWS, dict(one_way._OPTIONS)
        for rows, columns, block, warps in ((4, 1024, 64, 4), (4, 1024, 128, 8), (4, 1024, 32, 4), (2, 1024, 32, 8),
                                            (1, 2048, 64, 8), (8, 512, 16, 4), (2, 2048, 64, 16), (8, 1024, 64, 8),
                                            (1, 1024, 16, 2)):  # fmt: skip

            def varied(rows=rows, columns=columns, block=block, warps=warps, kernel=kernel, options=options) -> None:
                one_way._ROWS, one_way._COLUMNS, one_way._BLOCK_ROWS = rows, columns, block
                one_way._OPTIONS["num_warps"] = warps
                kernel()
                one_way._ROWS, one_way._COLUMNS, one_way._BLOCK_ROWS, before = options
                one_way._OPTIONS.update(before)

            varied()
            ways[f"{rows}/{columns}/{block}/w{warps}"] = varied
        times = times_of(ways, timer, 3, 2)
        rate = x.numel() * 3e-6 / times["kernel"]
        rest = ", ".join(f"{label} {us:.0f}" for label, us in sorted(times.items(), key=lambda one: one[1])[:5])
        say(f"  {kind:10} {name} {shape}: {times['eager']:.0f}, {times['kernel']:.0f} ({rate:.2f} TB/s) {rest}; "
            f"{'same bits' if is_same else 'OTHER BITS'}")  # fmt: skip
        del x, fp8, scale, expected, ways, eager, kernel
        torch.cuda.empty_cache()


def flush_problems(device: DeviceSpec) -> Iterator[tuple[str, Any, Problem, list[KernelConfig], str]]:
    """Yield name, family, problem, configs and contender: dense products, and grouped ones of training.

    The first config is the predicted one. The specialized tiles of dense products are tried with each band, also those
    that are not in the space.
    """
    dense = find_measurable("matmul")
    tiles = [config.to_json() for config in dense.space(device) if config["CONSUMERS"] and config["GROUP_M"] == 1]
    specialized = [KernelConfig.of(**tile | {"GROUP_M": band}) for tile in tiles for band in (4, 8, 16)]
    for name, case in comparison_of(dense).suite(dense).items():
        if name.endswith("8192") and case.problem.dtype == "bf16" and {*case.problem.flags} <= {*LAYOUTS}:
            chosen = make_shortlist(dense, case.problem, device, k=1).configs
            yield name, dense, case.problem, list(dict.fromkeys([*chosen, *specialized])), "cublas"
    for one in grouped_problems(device, ("fwd", "dx", "dw"), ("training",)):
        yield *one, "torch"


def grouped_problems(
    device: DeviceSpec, products: tuple[str, ...], phases: tuple[str, ...]
) -> Iterator[tuple[str, Any, Problem, list[KernelConfig]]]:
    """Yield name, family, problem and configs of grouped GEMMs in the suite: the first three predicted and others."""
    for which in products:
        family = find_measurable(f"grouped_gemm_{which}")
        for name, case in comparison_of(family).suite(family).items():
            if not case.problem.flags and any(f" {phase} " in name for phase in phases):
                chosen = make_shortlist(family, case.problem, device, k=3).configs
                others = dict(configs_of(family, which)).values()
                yield f"{which} {name}", family, case.problem, list(dict.fromkeys([*chosen, *others]))


def flushes(device: DeviceSpec, _: Any) -> None:
    from foretune.runtime.timing.timer import Timer

    rows = list(flush_problems(device))
    compiled([(family.name, config, problem, device) for _, family, problem, configs, _ in rows for config in configs])
    if DRY:
        return
    timers = {"written": Timer(), "read": Timer(clean=True), "as it was": Timer(flush_bytes=0)}
    ratios: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    say(f"us with an L2 that was {', '.join(timers)}; on a busy GPU")
    for name, family, problem, configs, other in rows:
        inputs = family.inputs(problem, device)
        ours = {f"{place} {tile_of(config)}": config for place, config in enumerate(configs)}
        launches: dict[str, Callable[[], Any]] = {n: partial(family.launch, inputs, c) for n, c in ours.items()}
        launches[other] = comparison_of(family).contenders(family, problem, inputs, device, {})[other]
        found = [times_of(launches, timer, 3, 5) for timer in timers.values()]
        found.append(busy_times(launches, found[0]))
        say(f"  {name}")
        for tile in sorted(launches, key=found[0].__getitem__):
            say(f"    {tile:32} {', '.join(f'{us[tile]:.0f}' for us in found)}")
        predicted, kind = next(iter(ours)), (family.name, name.split()[-1] if family.name != "matmul" else "")
        ratios[kind].append(
            [us[predicted] / min(us[tile] for tile in ours) for us in found]
            + [us[other] / us[predicted] for us in found]
        )
        del inputs, launches
        torch.cuda.empty_cache()
    say("geometric means in the same four states: predicted over the best of these; torch or cuBLAS over predicted")
    for kind, lines in ratios.items():
        means = [f"{geomean(column):.3f}" for column in zip(*lines, strict=True)]
        say(f"  {' '.join(kind)} ({len(lines)}): {', '.join(means[:4])}; {', '.join(means[4:])}")


def bands(device: DeviceSpec, _: Any) -> None:
    from foretune.runtime.timing.timer import Timer

    rows = [
        (name, family, problem, [config for config in configs if config["BLOCK_M"] >= 64])
        for name, family, problem, configs in grouped_problems(device, ("fwd", "dx"), ("mid", "training"))
    ]
    compiled([(family.name, config, problem, device) for _, family, problem, configs in rows for config in configs])
    if DRY:
        return
    timer, over_best = Timer(clean=True), defaultdict(list)
    for name, family, problem, configs in rows:
        inputs = family.inputs(problem, device)
        launches: dict[Any, Callable[[], Any]] = {}
        for config, band in product(configs, BANDS):
            changed = KernelConfig.of(**config.to_json() | {"GROUP_M": band})
            launches[changed] = partial(family.launch, inputs, changed)
        times = times_of(launches, timer, 5, 2)
        best = {band: min(us for config, us in times.items() if config["GROUP_M"] == band) for band in BANDS}
        for band, us in best.items():
            over_best[band].append(us / min(best.values()))
        say(f"  {name} {', '.join(f'{band}: {us:.1f}' for band, us in best.items())}")
        del inputs, launches
        torch.cuda.empty_cache()
    say("the best config with each GROUP_M over the best of all, geometric mean (worst):")
    say(", ".join(f"{band}: {geomean(ratios):.3f} ({max(ratios):.3f})" for band, ratios in over_best.items()))


def main() -> None:
    parts = {"quantizing": quantizing, "products": products, "skew": skew, "flushes": flushes, "bands": bands}
    parts |= {which: partial(drawn, which) for which in DRAWN}
    chosen = [name for name in sys.argv[1:] if name in parts] or list(parts)
    if DRY:
        device, timer = DeviceSpec.named("h100"), None
    else:
        from foretune.runtime.timing.timer import Timer

        device, timer = DeviceSpec.live(), Timer()
    say(f"{device.name}, torch {torch.__version__}; knobs of matmul {KNOBS}")
    for name in chosen:
        try:
            parts[name](device, timer)
        except Exception:  # noqa: BLE001 - the other parts are worth their figures
            import traceback

            traceback.print_exc(file=sys.stdout)
        say(f"{name} done after {time.perf_counter() - BEGAN:.0f} s")


if __name__ == "__main__":
    main()

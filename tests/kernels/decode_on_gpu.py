"""Time small batches on a GPU: `python tests/kernels/decode_on_gpu.py [layers|matmul|grouped|profile ...]`.

- layers: one layer of experts of Qwen3-30B-A3B, as transformers calls it, forward alone and with gradients: host time
  (calls without waiting) and wall time (until the device is idle), next to transformers' own implementations.
- matmul, grouped: the kernels for a few rows with each of a list of blocks, next to the tiled kernel with its predicted
  config, cuBLAS and `torch.compile`: kernel times in CUDA graphs, with weights that are not in the L2 cache.
- profile: the kernels of one layer's step.

A table is printed for each, and with --out everything is written as JSON. `--tiny` runs small sizes, also on a CPU with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# `python tests/...` puts tests/kernels on the path; moe_models is above it, and mends the path for transformers.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

TINY = "--tiny" in sys.argv
CUDA = torch.cuda.is_available()
WHERE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float16
#: Name -> (N, K).
LAYERS = {
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B o": (4096, 4096),
    "Llama-3.1-8B gate_up": (28672, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "Llama-3.1-70B qkv": (10240, 8192),
    "Llama-3.1-70B o": (8192, 8192),
    "Llama-3.1-70B down": (8192, 28672),
    "Qwen3-30B qkv": (5120, 2048),
    "Qwen3-30B o": (2048, 4096),
    "k of 8B": (1024, 4096),
}
#: Name -> (experts, topk, hidden, inner).
MOES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14336)}
ROWS, TOKENS, GROUPED_TOKENS = (1, 2), (1, 4, 16, 64, 512), (1, 2, 4, 8, 16)
COLD, ROUNDS = 300e6, 7  # bytes that one graph reads at least; replays
if TINY:
    LAYERS, MOES = {"tiny": (24, 72)}, {"tiny": (5, 2, 16, 24)}
    TOKENS, GROUPED_TOKENS, COLD, ROUNDS = (1, 4), (2,), 1, 1
COMPILED = ("Llama-3.1-70B qkv", "Llama-3.1-8B o")
MATMUL_BLOCKS = [
    *((n, 256, 1) for n in (1, 2, 4, 8, 16)),
    *((n, 512, 1) for n in (1, 2, 4)),
    *((n, 512, 2) for n in (1, 2, 4, 8)),
    *((n, 1024, 2) for n in (1, 2)),
    *((n, 1024, 4) for n in (1, 2, 4, 8)),
    *((n, 2048, 4) for n in (1, 2)),
    *((n, 2048, 8) for n in (1, 2, 4)),
    (4, 256, 1, 3), (8, 256, 1, 3), (4, 512, 2, 3), (2, 1024, 4, 4), (4, 1024, 4, 3), (8, 1024, 4, 3),
]  # fmt: skip
SORTED_BLOCKS = [(4, 256, 1), (4, 512, 2), (2, 1024, 4), (4, 1024, 4)]
SUM_BLOCKS = [(n, k, w) for n in (1, 2, 4) for k in (128, 256, 512, 1024) for w in (1, 2, 4)]
if TINY:
    MATMUL_BLOCKS, SUM_BLOCKS = MATMUL_BLOCKS[3::12], SUM_BLOCKS[::8]
found: dict[str, Any] = {}


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=WHERE, dtype=torch.float32 if TINY else DTYPE) * scale).to(DTYPE)


def captured(launches: list[Callable[[], Any]]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of some launches."""
    if not CUDA:
        return lambda: [launch() for launch in launches]  # type: ignore[return-value]
    launches[0]()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph.replay


def graph_us(candidates: dict[str, list[Callable[[], Any]]]) -> dict[str, float]:
    """Return the median time of each candidate's launches, per launch; candidates take turns."""
    graphs = {}
    for name, launches in candidates.items():
        graphs[name] = captured(launches)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(ROUNDS + 2):
        for name, replay in graphs.items():
            if CUDA:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                replay()
                end.record()
                end.synchronize()
                took = begin.elapsed_time(end) * 1e3
            else:
                start = time.perf_counter()
                replay()
                took = (time.perf_counter() - start) * 1e6
            if turn > 1 or TINY:
                times[name].append(took)
    return {name: statistics.median(taken) / len(candidates[name]) for name, taken in times.items()}


def copies(nbytes: int) -> int:
    return max(1, min(64, -(-int(COLD) // nbytes)))


def error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


def check(name: str, y: torch.Tensor, expected: torch.Tensor) -> None:
    if not error_of(y, expected) < 1e-2:
        print(f"WRONG: {name}: {error_of(y, expected):.3g}")


def write(section: str, key: str, value: Any) -> None:
    found.setdefault(section, {})[key] = value
    if OPTIONS.out:
        Path(OPTIONS.out).write_text(json.dumps(found, indent=1))


def compile_all(launches: list[Callable[[], Any]]) -> None:
    """Compile what these launch, in threads."""
    from foretune.runtime.launching.ahead import only_compiling

    if CUDA:
        with only_compiling(load=True) as jobs:
            for launch in launches:
                launch()
        for job in jobs:
            job.result()


def matmul() -> None:
    import foretune
    from foretune.datasets import Problem
    from foretune.kernels.matmul.triton_kernels.few_rows import Blocks, prepare_few_rows

    blocks = [Blocks(*one) for one in MATMUL_BLOCKS]

    def problem_of(m: int, n: int, k: int) -> Problem:
        return Problem.of("matmul", dtype="bf16" if CUDA else "fp16", batch=1, m=m, n=n, k=k)

    start = time.perf_counter()
    few = {(m, one): prepare_few_rows(problem_of(m, 64, 64), 64, 64, one) for m in ROWS for one in blocks}
    a, b, y = (torch.empty(4, 64, dtype=DTYPE, device="meta") for _ in range(3))
    compile_all([partial(launch, (a, b, y, None)) for launch in few.values()])
    print(f"compiled {len(few)} in {time.perf_counter() - start:.1f} s", flush=True)
    print("| layer | rows | torch us | tiled | compiled | best blocks: us (GB/s) | next ... |")
    for name, (n, k) in LAYERS.items():
        ws = [random(n, k, scale=k**-0.5) for _ in range(copies(2 * n * k))]
        for m in ROWS:
            x, y = random(m, k), torch.empty(m, n, dtype=DTYPE, device=WHERE)
            tiled = predicted(problem_of(m, n, k))
            candidates = {
                "torch": [partial(torch.mm, x, w.T) for w in ws],
                "tiled": [partial(foretune.matmul, x, w.T, config=tiled) for w in ws],
            }
            if m == 1 and CUDA and name in COMPILED:
                torch.compiler.reset()
                compiled = torch.compile(lambda x, w: x @ w.T, dynamic=False)
                candidates["compiled"] = [partial(compiled, x, w) for w in ws]
            expected = x.float() @ ws[0].float().T
            for one in blocks:
                launch = prepare_few_rows(problem_of(m, n, k), k, k, one)
                y.fill_(float("nan"))
                launch((x, ws[0], y, None))
                check(f"{name} {m} {one}", y, expected)
                candidates[str(tuple(one))] = [partial(launch, (x, w, y, None)) for w in ws]
            show("matmul", name, m, graph_us(candidates), 2 * (n * k + m * (n + k)), ("torch", "tiled", "compiled"))
    summary("matmul")


def show(section: str, name: str, m: int, us: dict[str, float], nbytes: int, baselines: tuple[str, ...]) -> None:
    write(section, f"{name}|{m}", {"us": us, "bytes": nbytes})
    ours = sorted((value, key) for key, value in us.items() if key not in baselines)
    rest = " | ".join(f"{key} {value:.1f} ({nbytes / value / 1e3:.0f})" for value, key in ours[:4])
    print(f"| {name} | {m} | {' | '.join(f'{us.get(key, 0):.1f}' for key in baselines)} | {rest} |", flush=True)


def predicted(problem: Any) -> Any:
    """Return the config of the tiled kernel that is predicted to be fastest."""
    import foretune
    from foretune.datasets import DeviceSpec

    return foretune.shortlist(problem.family, problem, DeviceSpec.live(), k=1).configs[0] if CUDA else None


def summed(x: torch.Tensor, w: torch.Tensor, *, topk: int, **options: Any) -> torch.Tensor:
    """Return the down product of the tiled kernel, and the sum over the experts of each token."""
    from foretune.kernels.grouped_gemm import grouped_gemm

    return grouped_gemm(x, w, permute_y=True, **options).view(-1, topk, w.shape[1]).sum(1)


def summary(section: str) -> None:
    """Print for each number of rows the blocks with the least mean slowdown against the best blocks of each layer."""
    for m in sorted({int(key.split("|")[1]) for key in found[section]}):
        tables = [one["us"] for key, one in found[section].items() if int(key.split("|")[1]) == m]
        names = [name for name in tables[0] if name[0] == "(" and all(name in table for table in tables)]
        best = [min(value for key, value in table.items() if key[0] == "(") for table in tables]
        rows = []
        for name in names:
            off = [table[name] / least for table, least in zip(tables, best, strict=True)]
            rows.append((statistics.geometric_mean(off), max(off), name))
        lines = ", ".join(f"{name} {mean:.3f} (worst {worst:.2f})" for mean, worst, name in sorted(rows)[:5])
        print(f"{section} {m}: {lines}", flush=True)


def choices(tokens: int, topk: int, experts: int, count: int) -> list[torch.Tensor]:
    return [torch.rand(tokens, experts, device=WHERE).topk(topk, -1).indices.flatten() for _ in range(count)]


def grouped() -> None:
    from foretune.datasets import Problem
    from foretune.kernels.grouped_gemm import grouped_gemm, route
    from foretune.kernels.grouped_gemm.triton_kernels.few_rows import Blocks, prepare_few_rows

    print("| product | tokens | tiled us | blocks: us (GB/s of distinct experts) ... |")
    for name, (experts, topk, hidden, inner) in MOES.items():
        w_up, w_down = (random(experts, n, k, scale=k**-0.5) for n, k in ((2 * inner, hidden), (hidden, inner)))
        scalar = [Blocks(*one) for one in MATMUL_BLOCKS if len(one) == 3]
        terms = 1 << (topk - 1).bit_length()
        sums = [Blocks(*one) for one in SUM_BLOCKS if 16 <= one[0] * terms * one[1] // (32 * one[2]) <= 128]
        dims = {"groups": experts, "dtype": "bf16" if CUDA else "fp16"}
        meta = [torch.empty(8, 8, dtype=DTYPE, device="meta") for _ in range(3)]
        index = torch.empty(8, dtype=torch.int64, device="meta")
        launches: list[Callable[[], Any]] = []
        for one in scalar:
            flags = {"x_rows": 1, "divisor": topk, "blocks": one}
            few = prepare_few_rows(topk, experts, 8, 8, **flags)
            launches.append(partial(few, (*meta, index, None, None, None)))
            if one in SORTED_BLOCKS:
                few = prepare_few_rows(topk, experts, 8, 8, sizes_at=0, gathers=True, **flags)
                launches.append(partial(few, (*meta, index.to(torch.int32), index.to(torch.int32), None, None)))
        for one in sums:
            few = prepare_few_rows(topk, experts, 8, 8, x_rows=8, divisor=topk, sums=True, blocks=one)
            launches.append(partial(few, (*meta, index, None, meta[0], None)))
        start = time.perf_counter()
        compile_all(launches)
        print(f"compiled {len(launches)} in {time.perf_counter() - start:.1f} s", flush=True)
        for tokens in GROUPED_TOKENS:
            rows = tokens * topk
            if rows > 4 * experts:
                continue
            chosen = choices(tokens, topk, experts, copies(tokens * topk * 2 * inner * hidden))
            distinct = statistics.mean(len(one.unique()) for one in chosen)
            routed = [route(one, experts) for one in chosen]
            weights = torch.rand(rows, device=WHERE, dtype=DTYPE)
            # The up product.
            x, y = random(tokens, hidden), torch.empty(rows, 2 * inner, dtype=DTYPE, device=WHERE)
            expected = torch.stack([w_up[e].float() @ x[i // topk].float() for i, e in enumerate(chosen[0].tolist())])
            problem = Problem.of("grouped_gemm_fwd", rows=rows, n=2 * inner, k=hidden, flags=("permute_x",), **dims)
            tiled = partial(grouped_gemm, x, w_up, topk=topk, permute_x=True, config=predicted(problem))
            tiled_up = [partial(tiled, group_sizes=sizes, gather_indices=order) for order, sizes in routed]
            candidates = {"tiled": tiled_up}
            for one in scalar:
                launch = prepare_few_rows(rows, experts, 2 * inner, hidden, x_rows=tokens, divisor=topk, blocks=one)
                y.fill_(float("nan"))
                launch((x, w_up, y, chosen[0], None, None, None))
                check(f"{name} up {tokens} {one}", y, expected)
                candidates[str(tuple(one))] = [partial(launch, (x, w_up, y, c, None, None, None)) for c in chosen]
            show("up", name, tokens, graph_us(candidates), int(distinct * 4 * inner * hidden), ("tiled",))
            candidates = {"tiled": tiled_up}
            for one in SORTED_BLOCKS:
                at = routed[0][1].numel() - experts
                launch = prepare_few_rows(
                    rows, experts, 2 * inner, hidden, x_rows=tokens, divisor=topk, blocks=one, sizes_at=at, gathers=True
                )
                y.fill_(float("nan"))
                launch((x, w_up, y, routed[0][1], routed[0][0], None, None))
                check(f"{name} sorted {tokens} {one}", y, expected[routed[0][0].long()])
                candidates[str(tuple(one))] = [
                    partial(launch, (x, w_up, y, sizes, order, None, None)) for order, sizes in routed
                ]
            show("sorted", name, tokens, graph_us(candidates), int(distinct * 4 * inner * hidden), ("tiled",))
            # The down product, and the sum over experts.
            h, y = random(rows, inner), torch.empty(tokens, hidden, dtype=DTYPE, device=WHERE)
            each = [w_down[e].float() @ h[i].float() * weights[i] for i, e in enumerate(chosen[0].tolist())]
            expected = torch.stack(each).view(tokens, topk, hidden).sum(1)
            problem = Problem.of("grouped_gemm_fwd", rows=rows, n=hidden, k=inner, flags=("permute_y",), **dims)
            tiled = partial(summed, h, w_down, topk=topk, topk_weights=weights, config=predicted(problem))
            candidates = {"tiled": [partial(tiled, group_sizes=sizes, gather_indices=order) for order, sizes in routed]}
            for one in sums:
                launch = prepare_few_rows(
                    rows, experts, hidden, inner, x_rows=rows, divisor=topk, sums=True, blocks=one
                )
                y.fill_(float("nan"))
                launch((h, w_down, y, chosen[0], None, weights, None))
                check(f"{name} down {tokens} {one}", y, expected)
                candidates[str(tuple(one))] = [partial(launch, (h, w_down, y, c, None, weights, None)) for c in chosen]
            show("down", name, tokens, graph_us(candidates), int(distinct * 2 * inner * hidden), ("tiled",))
    for section in ("up", "sorted", "down"):
        summary(section)


class Layer:
    """The experts of one layer of Qwen3-30B-A3B in transformers."""

    def __init__(self, tokens: int) -> None:
        from moe_models import made

        big = {
            "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        }  # fmt: skip
        if not hasattr(Layer, "model"):
            with torch.device(WHERE):
                model = made("Qwen3Moe", num_hidden_layers=1, **({} if TINY else big))
                Layer.model = model.to(DTYPE if CUDA else torch.float32)
        self.experts, config = Layer.model.model.layers[0].mlp.experts, Layer.model.config
        dtype = next(self.experts.parameters()).dtype
        self.x = torch.randn(tokens, config.hidden_size, device=WHERE, dtype=dtype)
        logits = torch.randn(tokens, config.num_experts, device=WHERE)
        weights, self.chosen = logits.softmax(-1).topk(config.num_experts_per_tok)
        self.weights = weights.to(dtype)

    def use(self, name: str) -> None:
        Layer.model.set_experts_implementation(name)

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.experts(self.x, self.chosen, self.weights)

    def step(self) -> None:
        Layer.model.zero_grad()
        x, weights = self.x.detach().requires_grad_(), self.weights.detach().requires_grad_()
        self.experts(x, self.chosen, weights).sum().backward()


NAMES = ("foretune", "grouped_mm", "batched_mm")


def layers() -> None:
    import foretune

    foretune.use("transformers")
    print(
        "| tokens | pass | host us: foretune | grouped_mm | batched_mm | wall us: foretune | grouped_mm | batched_mm |"
    )
    for tokens in TOKENS:
        layer = Layer(tokens)
        expected = None
        for what in ("forward", "step"):
            call = getattr(layer, what)
            names = NAMES if tokens <= 16 and what == "forward" else NAMES[:2]
            host: dict[str, list[float]] = {name: [] for name in names}
            wall: dict[str, list[float]] = {name: [] for name in names}
            for name in names:
                layer.use(name)
                for _ in range(1 if TINY else 4):
                    y = call()
                if what == "forward":
                    expected = y.float() if expected is None else expected
                    if error_of(y, expected) > 2e-2:
                        print(f"WRONG: {name} {tokens}: {error_of(y, expected):.3g}")
            for _ in range(ROUNDS):
                for name in names:
                    layer.use(name)
                    call()
                    wait()
                    count = 1 if TINY else 5
                    start = time.perf_counter()
                    for _ in range(count):
                        call()
                    host[name].append((time.perf_counter() - start) / count * 1e6)
                    wait()
                    for _ in range(2):
                        start = time.perf_counter()
                        call()
                        wait()
                        wall[name].append((time.perf_counter() - start) * 1e6)
            medians = [statistics.median(table.get(name, [0])) for table in (host, wall) for name in NAMES]
            write("layers", f"{tokens}|{what}", medians)
            cells = " | ".join(f"{value:.0f}" for value in medians)
            print(f"| {tokens} | {what} | {cells} |", flush=True)


def profile() -> None:
    """Print the kernels of a step at 64 tokens."""
    import foretune

    foretune.use("transformers")
    layer = Layer(TOKENS[-2])
    for name in NAMES[:2]:
        layer.use(name)
        for _ in range(3):
            layer.step()
        wait()
        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if CUDA else [])]
        with torch.profiler.profile(activities=kinds) as profiled:
            for _ in range(5):
                layer.step()
            wait()
        events = [e for e in profiled.events() if str(e.device_type).endswith("CUDA")]
        total: dict[str, list[float]] = {}
        for event in events:
            total.setdefault(event.name[:90], []).append(event.time_range.elapsed_us())
        print(f"{name}: {sum(map(sum, total.values())) / 5:.0f} us of kernels, {len(events) / 5:.0f} launches a step")
        rows = sorted(total.items(), key=lambda item: -sum(item[1]))
        for kernel, times in rows[:18]:
            print(f"  {sum(times) / 5:8.1f} us {len(times) / 5:4.1f} x {kernel}")
        write("profile", name, {kernel: [sum(times) / 5, len(times) / 5] for kernel, times in rows})


SECTIONS = {"layers": layers, "matmul": matmul, "grouped": grouped, "profile": profile}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
parser.add_argument("--out", help="a file for all results, as JSON")
parser.add_argument("--tiny", action="store_true", help="small sizes")
OPTIONS = parser.parse_args()

if __name__ == "__main__":
    print(torch.cuda.get_device_name() if CUDA else "CPU", torch.__version__)
    for section in OPTIONS.sections:
        start = time.perf_counter()
        try:
            SECTIONS[section]()
        except Exception:  # noqa: BLE001 - the other sections are still worth their time
            traceback.print_exc()
        print(f"{section}: {time.perf_counter() - start:.1f} s\n", flush=True)

"""The fp8 gradients of grouped layers on a GPU: errors against float64, and times. It takes less than a minute.

    python tests/kernels/scaled_gemm/fp8_gradients_on_gpu.py

It prints, in this order: the errors of dW on ragged groups, which are those of every kernel, as all give the same bits;
a training step by `dw_dtype`; dW of training layers, in TFLOP/s; the kernels that quantize, in GB/s; and the forward
pass and dX on the shapes of DeepGEMM's published figures. All contenders of a line are timed in turns, each after the
L2 was evicted, and the median is shown. `foretune bench kernels --family scaled_grouped_gemm_dw` has further problems.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product

import foretune
import numpy as np
import torch
from foretune.datasets import DeviceSpec, Problem
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes
from foretune.kernels.grouped_gemm.space import chunk_rows
from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
from foretune.kernels.registry import comparison_of
from foretune.kernels.scaled_gemm.quantize import GRADIENTS, quantize_blocks_128, quantize_rows_128
from foretune.kernels.scaled_gemm.triton_kernels.both_ways import quantize_both_ways, quantize_weights_both_ways
from foretune.kernels.scaled_gemm.triton_kernels.launches import prepare_scaled_dw
from foretune.runtime.shortlist import make_shortlist
from foretune.runtime.timing.compare import time_side_by_side
from foretune.runtime.timing.timer import Timer

E4M3 = GRADIENTS["e4m3"]
DW, BF16_DW, FORWARD = (
    find_family(name) for name in ("scaled_grouped_gemm_dw", "grouped_gemm_dw", "scaled_grouped_gemm_fwd")
)
#: (name, groups, rows, N, K, routing) of one rank's experts in training.
LAYERS = (
    ("DeepSeek-V3 w13, 32 experts", 32, 65536, 4096, 7168, "balanced"),
    ("DeepSeek-V3 w2, 32 experts", 32, 65536, 7168, 2048, "balanced"),
    ("DeepSeek-V2-Lite w13", 64, 65536, 2816, 2048, "balanced"),
    ("DeepSeek-V2-Lite w13", 64, 65536, 2816, 2048, "zipf"),
    ("DeepSeek-V2-Lite w2", 64, 65536, 2048, 1408, "balanced"),
    ("8 wide experts", 8, 65536, 4096, 7168, "balanced"),
    ("Qwen3-30B-A3B w13", 128, 65536, 1536, 2048, "balanced"),
)
#: TFLOP/s of DeepGEMM with contiguous groups, from its README (H800, NVCC 12.8), by (groups, rows, N, K).
PUBLISHED = {
    (4, 32768, 4096, 7168): 1297,
    (4, 32768, 7168, 2048): 1099,
    (8, 32768, 4096, 7168): 1288,
    (8, 32768, 7168, 2048): 1093,
}
#: Groups of which some are empty, others one row, or not a multiple of a block.
RAGGED = ((37, 0, 1, 300, 0, 16, 129, 5), (0, 0, 1000, 0), (256, 128, 384), (1, 1, 1))
ROUNDS, SAMPLES = 4, 3


def main() -> None:
    device, timer, began = DeviceSpec.live(), Timer(), time.perf_counter()
    print(f"{device.name}, torch {torch.__version__}")
    for part in (errors, steps, speeds_of_dw, quantizing, forward_and_dx):
        part(device, timer)
        torch.cuda.empty_cache()
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)


def errors(device: DeviceSpec, timer: Timer) -> None:
    """Print the error of dW relative to float64 on the bf16 operands, and check that all configs give the same bits."""
    print("relative errors of dW, and the configs that give the same bits")
    for sizes, blockwise, (name, fp8) in product(RAGGED, (True, False), GRADIENTS.items()):
        flags = ("blockwise",) if blockwise else ()
        dims = {"groups": len(sizes), "rows": sum(sizes), "n": 400, "k": 656}
        problem = Problem.of(DW.name, dtype="fp8e4m3", flags=flags, ragged={"rows": sizes}, **dims)
        x, dy = (torch.randn(sum(sizes), width, device="cuda", dtype=torch.bfloat16) for width in (656, 400))
        most = chunk_rows(sum(sizes), 400, 656, device.sm_count)
        tile_map = TileMap.build(torch.tensor(sizes, dtype=torch.int32, device="cuda"), sum(sizes), most)
        xt, x_scale = quantize_both_ways(x, tile_map, E4M3, blockwise=blockwise)[2:]
        dyt, dy_scale = quantize_both_ways(dy, tile_map, fp8, blockwise=blockwise)[2:]
        parts = zip(dy.double().split(sizes), x.double().split(sizes), strict=True)
        exact = torch.stack([dy.T @ x for dy, x in parts])
        found = []
        for config in [one for one in DW.space(device) if DW.supports(one, problem, device) is None][::3]:
            dw = torch.full_like(exact, float("nan"), dtype=torch.bfloat16)
            rest = config, device.sm_count
            run = prepare_scaled_dw(
                sum(sizes), len(sizes), most, 400, 656, *rest, blockwise=blockwise, gradient=dyt.dtype
            )
            run((dyt, xt, dy_scale, x_scale, dw, tile_map.entries))
            found.append(dw)
        same = sum(torch.equal(found[0], dw) for dw in found)
        error = float((found[0].double() - exact).norm() / exact.norm())
        empty = all(not found[0][group].any() for group, size in enumerate(sizes) if not size)
        is_right = same == len(found) and empty and error < (0.05 if fp8 == E4M3 else 0.07)
        kind = "blockwise" if blockwise else "rowwise"
        print(
            f"  {'ok ' if is_right else 'BAD'} {kind:9} {name} {sizes}: {error:.4f}, {same} of {len(found)}", flush=True
        )


def steps(device: DeviceSpec, timer: Timer) -> None:
    """Print the milliseconds of a forward and backward pass, with quantizing."""
    print("a training step in ms: grouped_gemm in bf16; scaled_grouped_gemm by scales and dw_dtype")
    for name, groups, rows, n, k, _ in LAYERS[:3]:
        sizes = torch.full((groups,), rows // groups, dtype=torch.int32, device="cuda")
        made = {"device": "cuda", "dtype": torch.bfloat16}
        x, w, dy = (torch.randn(*shape, **made) for shape in ((rows, k), (groups, n, k), (rows, n)))
        x.requires_grad_()
        w.requires_grad_()

        def step(op, x=x, w=w, sizes=sizes, dy=dy, **options):
            torch.autograd.grad(op(x, w, sizes, **options), (x, w), dy)

        ways = {"bf16": partial(step, foretune.grouped_gemm)}
        for scales, dtype in product(("blockwise", "rowwise"), ("fp8", "bf16")):
            ways[f"{scales} {dtype}"] = partial(step, foretune.scaled_grouped_gemm, scales=scales, dw_dtype=dtype)
        for way in ways.values():
            way()
        times = time_side_by_side(ways, timer, rounds=3, samples=3)
        print(f"  {name:28} {', '.join(f'{label} {us / 1e3:.2f}' for label, us in times.items())}", flush=True)


def speeds_of_dw(device: DeviceSpec, timer: Timer) -> None:
    """Print TFLOP/s of dW with the default configs, next to bf16 with predicted configs, and to torch."""
    print("dW in TFLOP/s; torch in fp8 (one scale per column of a group), with fast accumulation, and in bf16")
    for name, groups, rows, n, k, routing in LAYERS:
        sizes = (rows // groups,) * groups
        if routing != "balanced":
            sizes = drawn_sizes(routing, rows, groups, np.random.default_rng(0))
        dims, launches = {"groups": groups, "rows": rows, "n": n, "k": k}, {}
        for kind, flags in (("blockwise", ("blockwise",)), ("rowwise", ())):
            problem = Problem.of(DW.name, dtype="fp8e4m3", flags=flags, ragged={"rows": sizes}, **dims)
            inputs = DW.inputs(problem, device)
            launches[kind] = partial(DW.launch, inputs, DW.default(problem, device))
        others = comparison_of(DW).contenders(DW, problem, inputs, device, {})
        problem = Problem.of(BF16_DW.name, dtype="bf16", ragged={"rows": sizes}, **dims)
        chosen = make_shortlist(BF16_DW, problem, device, k=1).configs[0]
        launches["bf16"] = partial(BF16_DW.launch, BF16_DW.inputs(problem, device), chosen)
        launches |= {f"torch {label}": run for label, run in others.items()}
        for launch in launches.values():
            launch()
        times = time_side_by_side(launches, timer, rounds=ROUNDS, samples=SAMPLES)
        shown = ", ".join(f"{label} {2e-6 * rows * n * k / us:.0f}" for label, us in times.items())
        print(f"  {name + ' ' + routing:36} {shown}", flush=True)


def quantizing(device: DeviceSpec, timer: Timer) -> None:
    """Print GB/s of the kernels that quantize: each element is read once, and written twice in fp8."""
    print("quantizing in GB/s of the bytes read and written once, and in microseconds")
    for groups, rows, columns in ((32, 65536, 7168), (64, 65536, 2048)):
        sizes = torch.full((groups,), rows // groups, dtype=torch.int32, device="cuda")
        tile_map, x = TileMap.build(sizes, rows), torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        weights, line = x.view(16, rows // 16, columns), []
        ways = {
            "blockwise": partial(quantize_both_ways, x, tile_map, E4M3, blockwise=True),
            "rowwise": partial(quantize_both_ways, x, tile_map, E4M3, blockwise=False),
            "weights blockwise": partial(quantize_weights_both_ways, weights, blockwise=True),
            "weights rowwise": partial(quantize_weights_both_ways, weights, blockwise=False),
            "eager quantize_rows_128": partial(quantize_rows_128, x),
            "eager quantize_blocks_128": partial(quantize_blocks_128, weights),
            "copy": partial(torch.clone, x),
        }
        for label, way in ways.items():
            way()
            us = timer.time(way, samples=7).time_us
            line.append(f"{label} {rows * columns * 4e-3 / us:.0f} ({us:.0f} us)")
        print(f"  {rows} x {columns}: {', '.join(line)}", flush=True)


def forward_and_dx(device: DeviceSpec, timer: Timer) -> None:
    """Print TFLOP/s of the forward pass and dX with predicted configs, next to torch's with rowwise scales."""
    print("forward and dX in TFLOP/s; torch with rowwise scales, and with fast accumulation; DeepGEMM's on an H800")
    for (groups, rows, n, k), published in PUBLISHED.items():
        for which, wide, deep in (("forward", n, k), ("dX", k, n)):
            launches, ragged = {}, {"rows": (rows // groups,) * groups}
            for kind in ("blockwise", "rowwise"):
                dims = {"groups": groups, "rows": rows, "n": wide, "k": deep}
                problem = Problem.of(FORWARD.name, dtype="fp8e4m3", flags=(kind,), ragged=ragged, **dims)
                inputs = FORWARD.inputs(problem, device)
                chosen = make_shortlist(FORWARD, problem, device, k=1).configs[0]
                launches[kind] = partial(FORWARD.launch, inputs, chosen)
            others = comparison_of(FORWARD).contenders(FORWARD, problem, inputs, device, {})
            launches |= {label: run for label, run in others.items() if label != "bf16"}
            for launch in launches.values():
                launch()
            times = time_side_by_side(launches, timer, rounds=ROUNDS, samples=SAMPLES)
            shown = ", ".join(f"{label} {2e-6 * rows * n * k / us:.0f}" for label, us in times.items())
            more = f"; DeepGEMM {published}" if which == "forward" else ""
            print(f"  {groups} x {rows // groups} rows, {n} x {k} {which:8} {shown}{more}", flush=True)


if __name__ == "__main__":
    main()

"""The fp8 gradients of grouped layers on a GPU: errors against float64, and times next to torch's and to bf16.

    python tests/kernels/scaled_gemm/fp8_gradients_on_gpu.py [--grid] [--out FOLDER]

It prints, in this order: the errors of dW on ragged groups for every kernel; the bandwidth of the kernels that quantize
along both dimensions; dW for training layers, in TFLOP/s; and the forward pass and dX with rowwise scales next to
`torch._scaled_grouped_mm`. All contenders of a line are timed in turns, each after the L2 was evicted, and the median
is shown. --grid times dW with every config instead of the default one. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import foretune
import numpy as np
import torch
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes
from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
from foretune.kernels.grouped_gemm.variants import chunk_rows
from foretune.kernels.scaled_gemm.quantize import quantize_blocks_128, quantize_rows_128
from foretune.kernels.scaled_gemm.triton_kernels import both_ways
from foretune.kernels.scaled_gemm.triton_kernels.both_ways import quantize_both_ways
from foretune.kernels.scaled_gemm.triton_kernels.dw_launches import compile_scaled_dw, prepare_scaled_dw
from foretune.runtime import use_stub_driver
from foretune.runtime.shortlist import make_shortlist
from foretune.runtime.timing.compare import time_side_by_side
from foretune.runtime.timing.timer import Timer

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: name, (groups, rows, N, K, routing) of one rank's experts in training.
LAYERS = {
    "DeepSeek-V3 w13, 32 experts": (32, 65536, 4096, 7168, "balanced"),
    "DeepSeek-V3 w2, 32 experts": (32, 65536, 7168, 2048, "balanced"),
    "DeepSeek-V2-Lite w13": (64, 65536, 2816, 2048, "balanced"),
    "8 wide experts": (8, 65536, 4096, 7168, "balanced"),
}
#: Shapes of DeepGEMM's published figures for contiguous groups.
PUBLISHED = {
    (4, 32768, 4096, 7168): 1297,
    (4, 32768, 7168, 2048): 1099,
    (8, 32768, 4096, 7168): 1288,
    (8, 32768, 7168, 2048): 1093,
}
#: Groups of which some are empty, others one row, or not a multiple of a block.
RAGGED = ((37, 0, 1, 300, 0, 16, 129, 5), (0, 0, 1000, 0), (256, 128, 384), (1, 1, 1))
ROUNDS, SAMPLES, WORKERS = 6, 3, 12


def config(
    m: int, n: int, stages: int, consumers: int = 2, flight: int = 1, band: int = 8, tma: int = 1, warps: int = 4
):
    knobs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "GROUP_M": band, "PROGRAMS_PER_SM": 1, "TMA": tma}
    return KernelConfig.of(**knobs, CONSUMERS=consumers, IN_FLIGHT=flight, num_warps=warps, num_stages=stages)


GRID = [
    *(config(128, 128, stages, 2, flight) for stages, flight in product((4, 5, 6), (1, 2, 3))),
    *(config(256, 128, 4, 2, 1, band) for band in (1, 8)),
]
CHECKED = [
    config(128, 128, 4),
    config(128, 128, 5, 2, 2),
    config(128, 128, 5, 2, 3),
    config(256, 128, 3),
    config(128, 128, 4, 0, warps=8),
    config(64, 128, 3, 0, tma=0),
]


def compiled(each: tuple[KernelConfig, bool, torch.dtype]) -> None:
    with use_stub_driver(DeviceSpec.named("h100")):
        compile_scaled_dw(each[0], blockwise=each[1], gradient=each[2])


def compile_all(grid: list[KernelConfig]) -> None:
    wanted = [(one, blockwise, E4M3) for one, blockwise in product(dict.fromkeys(grid + CHECKED), (True, False))]
    wanted += [(one, True, E5M2) for one in CHECKED]
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, wanted))


class Layer:
    """The operands of dW, in bf16 and quantized."""

    def __init__(self, sizes, n: int, k: int, blockwise: bool, gradient: torch.dtype = E4M3, sms: int = 132) -> None:
        self.sizes, self.rows, self.n, self.k = torch.tensor(sizes, dtype=torch.int32, device="cuda"), sum(sizes), n, k
        self.groups, self.blockwise, self.gradient, self.sms = len(sizes), blockwise, gradient, sms
        random = torch.Generator("cuda").manual_seed(0)
        self.x = torch.randn(self.rows, k, device="cuda", dtype=torch.bfloat16, generator=random)
        self.dy = torch.randn(self.rows, n, device="cuda", dtype=torch.bfloat16, generator=random)
        self.chunk = chunk_rows(self.rows, n, k, sms)
        self.map = TileMap.build(self.sizes, self.rows, self.chunk)
        _, _, self.xt, self.xt_scale = quantize_both_ways(self.x, self.map, E4M3, blockwise=blockwise)
        _, _, self.dyt, self.dyt_scale = quantize_both_ways(self.dy, self.map, gradient, blockwise=blockwise)
        self.dw = torch.full((self.groups, n, k), float("nan"), device="cuda", dtype=torch.bfloat16)

    def launch(self, one: KernelConfig):
        rows, groups, n, k, chunk = self.rows, self.groups, self.n, self.k, self.chunk
        run = prepare_scaled_dw(
            rows, groups, chunk, n, k, one, self.sms, blockwise=self.blockwise, gradient=self.gradient
        )
        return partial(run, (self.dyt, self.xt, self.dyt_scale, self.xt_scale, self.dw, self.map.entries))

    def exact(self) -> torch.Tensor:
        """dW of the bf16 operands in float64."""
        parts, start = [], 0
        for size in self.sizes.tolist():
            rows = slice(start, start + size)
            parts.append(self.dy[rows].double().T @ self.x[rows].double())
            start += size
        return torch.stack(parts)


def errors(device: DeviceSpec) -> None:
    print("errors of dW relative to float64 on the bf16 operands; largest over kernels, and between kernels")
    for sizes, blockwise, gradient in product(RAGGED, (True, False), (E4M3, E5M2)):
        if gradient == E5M2 and not blockwise:
            continue
        layer = Layer(sizes, 400, 656, blockwise, gradient, device.sm_count)
        exact, found = layer.exact(), []
        for one in CHECKED:
            layer.dw.fill_(float("nan"))
            layer.launch(one)()
            found.append(layer.dw.double())
        off = [float((dw - exact).norm() / exact.norm()) for dw in found]
        apart = max(float((dw - found[-1]).norm() / exact.norm()) for dw in found)
        empty = all(not dw[group].any() for dw in found for group, size in enumerate(sizes) if not size)
        ok = max(off) < (0.06 if gradient == E4M3 else 0.1) and apart < 6e-3 and empty
        kind = "blockwise" if blockwise else "rowwise"
        worst = f"{max(off):.4f} apart {apart:.2g}"
        print(f"  {'ok ' if ok else 'BAD'} {kind:9} {str(gradient)[13:]} {sizes}: {worst}", flush=True)


def bandwidth(timer: Timer) -> None:
    print("quantizing along both dimensions: GB/s of bytes read (once) and written, by launch options")
    options = ({"num_warps": 8, "maxnreg": 128}, {"num_warps": 8, "maxnreg": 80})
    for groups, rows, columns in ((32, 65536, 7168), (64, 65536, 2048)):
        sizes = torch.full((groups,), rows // groups, dtype=torch.int32, device="cuda")
        tile_map, x = TileMap.build(sizes, rows), torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        weights = x.view(16, rows // 16, columns)
        moved = rows * columns * (2 + 1 + 1)
        ways = {
            "blockwise": partial(quantize_both_ways, x, tile_map, E4M3, blockwise=True),
            "rowwise": partial(quantize_both_ways, x, tile_map, E4M3, blockwise=False),
            "columns only": partial(quantize_both_ways, x, tile_map, E4M3, blockwise=True, with_rows=False),
            "weights rowwise": partial(both_ways.quantize_weights_both_ways, weights, blockwise=False),
            "weights": partial(both_ways.quantize_weights_both_ways, weights, blockwise=True),
            "eager rows": partial(quantize_rows_128, x),
            "eager weights": partial(quantize_blocks_128, weights),
            "copy": partial(torch.clone, x),
        }
        for label, way in ways.items():
            line = []
            for chosen in options if " " not in label and label != "copy" else options[:1]:
                both_ways._OPTIONS = chosen
                way()
                us = timer.time(way, samples=7).time_us
                line.append(f"{list(chosen.values())} {moved / us / 1e3:.0f} ({us:.0f} us)")
            print(f"  {rows}x{columns} {label:14} {', '.join(line)}", flush=True)
        both_ways._OPTIONS = options[0]


def steps(timer: Timer) -> None:
    print("a training step (forward and backward, with quantizing) in ms, by dw_dtype")
    for name, (groups, rows, n, k, _) in list(LAYERS.items())[1:3]:
        sizes = torch.full((groups,), rows // groups, dtype=torch.int32, device="cuda")
        made = {"device": "cuda", "dtype": torch.bfloat16}
        x, w, dy = (torch.randn(*shape, **made) for shape in ((rows, k), (groups, n, k), (rows, n)))
        x.requires_grad_()
        w.requires_grad_()

        def step(product, *extra, **options):
            y = product(x, w, *extra, **options)  # noqa: B023
            torch.autograd.grad(y, (x, w), dy)  # noqa: B023

        ways = {"bf16 grouped_gemm": partial(step, foretune.grouped_gemm, sizes)}
        for scales, dtype in product(("blockwise", "rowwise"), ("fp8", "bf16")):
            ways[f"{scales} {dtype}"] = partial(
                step, foretune.scaled_grouped_gemm, sizes, scales=scales, dw_dtype=dtype
            )
        for way in ways.values():
            way()
        times = time_side_by_side(ways, timer, rounds=3, samples=3)
        print(f"  {name:34} {', '.join(f'{label} {us / 1e3:.2f}' for label, us in times.items())}", flush=True)


def speeds_of_dw(grid: list[KernelConfig], device: DeviceSpec, timer: Timer, out: Path | None) -> None:
    bf16 = find_family("grouped_gemm_dw")
    print("dW in TFLOP/s: the three best fp8 configs of each kind of scales, bf16, torch in fp8 and in bf16")
    for name, (groups, rows, n, k, routing) in LAYERS.items():
        sizes = [rows // groups] * groups
        if routing != "balanced":
            sizes = drawn_sizes(routing, rows, groups, np.random.default_rng(0))
        dims, tflop = {"groups": groups, "rows": rows, "n": n, "k": k}, 2e-12 * rows * n * k
        launches = {}
        layers = {
            kind: Layer(sizes, n, k, kind == "blockwise", sms=device.sm_count) for kind in ("blockwise", "rowwise")
        }
        for kind, layer in layers.items():
            for one in grid:
                launches[kind, one] = layer.launch(one)
        problem = Problem.of(bf16.name, dtype="bf16", ragged={"rows": tuple(sizes)}, **dims)
        inputs = bf16.inputs(problem, device)
        chosen = make_shortlist(bf16, problem, device, k=1).configs[0]
        launches["bf16", None] = partial(bf16.launch, inputs, chosen)
        if routing == "balanced":  # it takes multiples of 16 rows
            launches |= torch_dw(layers["rowwise"])
        for launch in launches.values():
            launch()
        torch.cuda.synchronize()
        times = time_side_by_side(launches, timer, rounds=ROUNDS, samples=SAMPLES)
        for kind in dict.fromkeys(kind for kind, _ in times):
            ranked = sorted((us, str(one)) for (of, one), us in times.items() if of == kind)
            shown = "; ".join(f"{tflop / us * 1e6:.0f} {short(one)}" for us, one in ranked[:11])
            print(f"  {name:34} {kind:10} {shown}", flush=True)
            if out is not None:
                with (out / "dw.txt").open("a") as file:
                    file.writelines(f"{name}\t{kind}\t{one}\t{us:.2f}\t{tflop / us * 1e6:.1f}\n" for us, one in ranked)


def short(one: str) -> str:
    return (
        " ".join(word for word in one.split() if word[:7] in ("BLOCK_M", "GROUP_M", "IN_FLIG", "num_sta"))
        .replace("BLOCK_", "")
        .replace("GROUP_M=", "g")
        .replace("IN_FLIGHT=", "f")
        .replace("num_stages=", "s")
    )


def torch_dw(layer: Layer):
    """torch's products over groups of rows, if it has them for these operands."""
    ends = layer.sizes.cumsum(0).to(torch.int32)
    dyt, x = layer.dy.t().contiguous(), layer.x
    found = {("torch bf16", None): lambda: torch._grouped_mm(dyt, x, offs=ends)}
    dy8, x8 = dyt.to(E4M3), layer.x.t().contiguous().to(E4M3).t()
    scales = [torch.rand(layer.groups * width, device="cuda") + 0.5 for width in (layer.n, layer.k)]
    for fast in (False, True):
        scaled = partial(
            torch._scaled_grouped_mm, dy8, x8, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        found["torch fast" if fast else "torch fp8", None] = scaled
    working = {}
    for label, run in found.items():
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001, PERF203 - whatever torch raises
            print(f"    {label[0]} cannot: {str(error)[:200]}")
        else:
            working[label] = run
    return working


def forward_and_dx(device: DeviceSpec, timer: Timer) -> None:
    from foretune.kernels.scaled_gemm.contenders import _grouped_contenders, _runs

    family = find_family("scaled_grouped_gemm_fwd")
    print("forward and dX (predicted configs) in TFLOP/s; torch with rowwise scales, exact and fast accumulation")
    for (groups, rows, n, k), published in PUBLISHED.items():
        name = f"{groups} x {rows // groups} {n} {k} ({published})"
        for which, wide, deep in (("forward", n, k), ("dX", k, n)):
            dims = {"groups": groups, "rows": rows, "n": wide, "k": deep}
            tflop, launches = 2e-12 * rows * n * k, {}
            ragged = {"rows": (rows // groups,) * groups}
            for kind in ("rowwise", "blockwise"):
                problem = Problem.of(family.name, dtype="fp8e4m3", flags=(kind,), ragged=ragged, **dims)
                inputs = family.inputs(problem, device)
                chosen = make_shortlist(family, problem, device, k=1).configs[0]
                launches[kind] = partial(family.launch, inputs, chosen)
                if kind == "rowwise":
                    others = _grouped_contenders(inputs)
                    launches |= {label: run for label, run in others.items() if label != "bf16" and _runs(run)}
            for launch in launches.values():
                launch()
            times = time_side_by_side(launches, timer, rounds=ROUNDS, samples=SAMPLES)
            shown = ", ".join(f"{label} {tflop / us * 1e6:.0f}" for label, us in times.items())
            print(f"  {name:34} {which:8} {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--grid", action="store_true", help="Time dW with every config.")
    parser.add_argument("--out", type=Path, help="A folder for the times of all configs.")
    options = parser.parse_args()
    began, device = time.perf_counter(), DeviceSpec.live()
    print(f"{device.name}, torch {torch.__version__}, {torch.cuda.get_device_properties(0).name}")
    grid = GRID
    compile_all(grid)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    timer = Timer()
    for step in (
        partial(errors, device),
        partial(speeds_of_dw, grid, device, timer, options.out),
        partial(steps, timer),
        partial(bandwidth, timer),
        partial(forward_and_dx, device, timer),
    ):
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the others are worth having
            print(f"FAILED {step}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        torch.cuda.empty_cache()
        print(f"after {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""`python tests/kernels/hopper_on_gpu.py OUT PRODUCT...`: configs of the grouped GEMMs, of existing and of experimental
kernels, side by side with the predicted config and `torch._grouped_mm`; for products fwd, dx and dw.

Every variant's result is compared with float64 on small ragged groups, and with torch's on each problem. Times are
medians of interleaved rounds."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import foretune
import hopper_gemm
import hopper_kernels
import numpy as np
import torch
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_measurable
from foretune.kernels.grouped_gemm.group_sizes import drawn_sizes
from foretune.kernels.grouped_gemm.triton_kernels.dw_launches import add_partials, launch_dw, partial_sums
from foretune.kernels.grouped_gemm.triton_kernels.gemm_launches import launch_gemm
from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
from foretune.kernels.grouped_gemm.variants import chunk_rows
from foretune.runtime import use_stub_driver
from foretune.runtime.launching.launcher import ensure_allocator

ROUNDS = 11
#: Rows, groups, N, K, routing.
MEMORY = [
    (16384, 128, 2816, 4096, "balanced"),
    (8192, 64, 2816, 4096, "balanced"),
    (16384, 64, 2816, 4096, "balanced"),
    (16384, 128, 4096, 1408, "balanced"),
    (8192, 128, 2816, 4096, "balanced"),
    (16384, 128, 2816, 4096, "uniform"),
    (8192, 128, 2816, 4096, "zipf"),
]
ARITHMETIC = [
    (65536, 64, 2816, 2048, "balanced"),
    (65536, 64, 2048, 1408, "balanced"),
    (65536, 128, 2816, 2048, "balanced"),
    (65536, 64, 2816, 2048, "uniform"),
    (65536, 64, 2816, 2048, "zipf"),
    (65536, 64, 2816, 2048, "hot"),
    (65536, 64, 2048, 1408, "uniform"),
    (65536, 64, 2048, 1408, "hot"),
]
SMALL = (37, 0, 1, 300, 0, 16, 129, 5, 200)

# PINGPONG, BLOCK_M, BLOCK_N, BLOCK_K, num_stages: the kernel that exists.
OVER_ROWS = [
    (0, 128, 256, 64, 4),
    (1, 128, 128, 64, 5),
    (1, 128, 128, 128, 3),
    (0, 128, 256, 128, 2),
    (0, 128, 128, 128, 3),
    (1, 64, 256, 64, 4),
    (1, 64, 256, 128, 2),
    (1, 64, 128, 128, 4),
]
# ... and LAG, SKIP, EXTRA: the experimental one.
OVER_ROWS_NEW = [
    (0, 128, 256, 64, 4, 0, 1, 0),
    (0, 128, 256, 64, 4, 1, 1, 0),
    (0, 128, 256, 64, 4, 2, 1, 0),
    (0, 128, 256, 128, 2, 0, 1, 0),
    (1, 128, 128, 64, 4, 0, 0, 64),
]
# BLOCK_M, BLOCK_N, BLOCK_K, PROGRAMS_PER_SM, TMA, num_warps, num_stages: the plain kernel.
PLAIN = [
    (128, 128, 128, 1, (1, 1, 0), 8, 3),
    (128, 128, 128, 1, (1, 1, 0), 4, 3),
    (64, 128, 128, 1, (1, 1, 0), 4, 3),
    (64, 128, 128, 2, (0, 0, 0), 4, 2),
    (128, 256, 64, 1, (1, 1, 0), 8, 3),
    (128, 256, 64, 1, (1, 1, 0), 8, 4),
    (64, 256, 128, 1, (1, 1, 0), 8, 2),
]
OF_DW = [
    (0, 128, 256, 64, 4),
    (0, 256, 128, 64, 4),
    (1, 128, 128, 64, 5),
    (0, 128, 256, 128, 2),
]
# PINGPONG, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, CONSUMERS, WIDTH, BUFFERS, LAG, EXTRA.
OF_DW_NEW = [
    (0, 128, 256, 64, 4, 2, 128, 1, 1, 0),
    (0, 128, 256, 64, 4, 2, 128, 1, 2, 0),
    (0, 256, 128, 64, 4, 2, 64, 1, 2, 0),
    (1, 128, 128, 64, 4, 2, 64, 1, 0, 64),
    (0, 192, 256, 64, 3, 3, 128, 1, 0, 0),
    (0, 192, 256, 32, 6, 3, 128, 1, 0, 0),
    (0, 192, 256, 64, 2, 3, 128, 2, 0, 0),
    (0, 128, 256, 64, 3, 2, 128, 2, 0, 0),
    (0, 128, 256, 64, 2, 2, 128, 3, 0, 0),
    (1, 128, 128, 64, 3, 2, 64, 3, 0, 0),
    (0, 128, 256, 32, 4, 2, 128, 3, 0, 0),
]
PLAIN_DW = [
    (128, 128, 32, 2, (0, 1, 1), 4, 4),
    (128, 256, 32, 1, (0, 1, 1), 8, 4),
    (128, 256, 64, 1, (0, 1, 1), 8, 3),
    (256, 128, 32, 1, (1, 1, 1), 8, 4),
    (64, 256, 32, 2, (0, 1, 1), 4, 4),
]


def config_of(product, p, m, n, k, s, band=1, programs=1, tma=(1, 1, 1), consumers=2, warps=4):
    names = ("TMA_DY", "TMA_X", "TMA_DW") if product == "dw" else ("TMA_X", "TMA_W", "TMA_Y")
    knobs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": band, "PROGRAMS_PER_SM": programs}
    knobs |= dict(zip(names, tma, strict=True)) | {"CONSUMERS": consumers, "PINGPONG": p}
    return KernelConfig.of(**knobs, num_warps=warps, num_stages=s)


def named(config):
    knobs = config.to_json()
    tma = "".join(str(knobs[name]) for name in knobs if name.startswith("TMA_"))
    kind = ("pp" if knobs["PINGPONG"] else "ws") if knobs["CONSUMERS"] else "plain"
    tile = f"{knobs['BLOCK_M']}x{knobs['BLOCK_N']}x{knobs['BLOCK_K']}"
    rest = f"w{config.num_warps} p{knobs['PROGRAMS_PER_SM']} t{tma}" if kind == "plain" else ""
    return f"{kind} {tile} s{config.num_stages} g{knobs['GROUP_M']} {rest}".strip()


def existing(product):
    """Configs of the kernels that exist, in the space or not."""
    jobs, plain, bands = (OF_DW, PLAIN_DW, (1, 4, 8, 16)) if product == "dw" else (OVER_ROWS, PLAIN, (1, 8))
    out = [config_of(product, *spec, band) for spec in jobs for band in bands]
    for m, n, k, programs, tma, warps, stages in plain:
        out += [config_of(product, 0, m, n, k, stages, band, programs, tma, 0, warps) for band in (1, 8)]
    return out


def new_variants(product):
    """(name, constants, GROUP_M) of the experimental kernels."""
    out = []
    if product == "dw":
        for p, m, n, k, s, c, w, b, lag, extra in OF_DW_NEW:
            consts = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "STAGES": s, "CONSUMERS": c, "PINGPONG": p, "WIDTH": w}
            consts |= {"BUFFERS": b, "LAG": lag, "EXTRA": extra}
            for band in (1, 8):
                tile = f"{m}x{n + extra}x{k}"
                out.append((f"new {'pp' if p else 'ws'} {tile} s{s} c{c} b{b} lag{lag} g{band}", consts, band))
        return out
    for p, m, n, k, s, lag, skip, extra in OVER_ROWS_NEW:
        consts = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "PINGPONG": p, "STAGES": s}
        consts |= {"LAG": lag, "SKIP": skip, "EXTRA": extra}
        for band in (1, 8):
            tile = f"{m}x{n + extra}x{k}"
            out.append((f"new {'pp' if p else 'ws'} {tile} s{s} lag{lag} skip{skip} g{band}", consts, band))
    return out


GEMM_FLAGS = {"GATHER": False, "SCATTER": False, "TMA_X": 1, "TMA_W": 1, "TMA_Y": 1, "CONSUMERS": 2}


def compile_one(job):
    product, what = job
    element = torch.bfloat16
    try:
        with use_stub_driver(DeviceSpec.named("h100")):
            if isinstance(what, KernelConfig):
                family = find_measurable(f"grouped_gemm_{product}")
                problem = Problem.of(family.name, groups=8, rows=1024, n=1024, k=1024)
                family.compile(what, problem)
            elif product == "dw":
                numbers = (1024, 8, 1, 128, 128, 1)
                hopper_kernels.dw_kernel.warmup(
                    element, element, element, element, torch.int32, *numbers, grid=(1,), num_warps=4, **what
                )
            else:
                numbers = (1024, 1024, 8, 128, 128, 1, 1, 1)
                hopper_gemm.gemm_kernel.warmup(
                    element, element, element, torch.int32, None, None, None, *numbers,
                    grid=(1,), num_warps=4, TRANSPOSED=product == "dx", **GEMM_FLAGS, **what,
                )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - reported
        return f"{product} {what}: {type(error).__name__} {str(error)[:300]}"
    return None


class Call:
    """The tensors of one problem, and its variants."""

    def __init__(self, product, rows, groups, n, k, sizes, sms, chunk=None):
        self.product, self.shape, self.sms = product, (rows, groups, n, k), sms
        random = torch.Generator("cuda").manual_seed(0)

        def made(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=random)

        self.sizes = torch.tensor(sizes, device="cuda", dtype=torch.int32)
        self.ends = torch.cumsum(self.sizes, 0, dtype=torch.int32)
        chunk = chunk or chunk_rows(rows, n, k, sms)
        self.map = TileMap.build(self.sizes, rows, chunk if product == "dw" else None)
        if product == "dw":
            self.left, self.right = made(rows, n), made(rows, k)
            self.out = torch.empty(groups, n, k, device="cuda", dtype=torch.bfloat16)
        else:
            self.left, self.right = made(rows, k if product == "fwd" else n), made(groups, n, k).mul_(k**-0.5)
            self.out = torch.empty(rows, n if product == "fwd" else k, device="cuda", dtype=torch.bfloat16)

    def torch(self):
        if self.product == "dw":
            return torch._grouped_mm(self.left.t(), self.right, offs=self.ends)
        right = self.right.transpose(-2, -1) if self.product == "fwd" else self.right
        return torch._grouped_mm(self.left, right, offs=self.ends)

    def some(self, out):
        """A part of an output: every 16th matrix, or all rows of groups."""
        return out[::16].double() if self.product == "dw" else out[: int(self.ends[-1])].double()

    def exact(self):
        parts, start = [], 0
        for group, size in enumerate(self.sizes.tolist()):
            left = self.left[start : start + size].double()
            if self.product == "dw":
                parts.append((left.T @ self.right[start : start + size].double())[None])
            else:
                right = self.right[group].double()
                parts.append(left @ (right.T if self.product == "fwd" else right))
            start += size
        return torch.cat(parts)

    def existing(self, config):
        if self.product == "dw":
            return lambda: launch_dw(self.left, self.right, self.out, self.map, config, self.sms)
        transposed = self.product == "dx"
        return lambda: launch_gemm(self.left, self.right, self.out, self.map, config, self.sms, transposed=transposed)

    def new(self, constants, band):
        rows, groups, n, k = self.shape
        if self.product == "dw":

            def run():
                partial = partial_sums(self.out, self.map)
                hopper_kernels.dw_kernel[(self.sms,)](
                    self.left, self.right, self.out, partial, self.map.entries, rows, groups, max(self.map.slots, 1),
                    n // 8, k // 8, band, num_warps=4, **constants,
                )  # fmt: skip
                add_partials(partial, self.out, self.map)

            return run
        columns, depth = (n, k) if self.product == "fwd" else (k, n)

        def run():
            hopper_gemm.gemm_kernel[(self.sms,)](
                self.left, self.right, self.out, self.map.entries, None, None, None, rows, rows, groups, columns // 8,
                depth // 8, 1, band, 1, num_warps=4, TRANSPOSED=self.product == "dx", **GEMM_FLAGS, **constants,
            )  # fmt: skip

        return run

    def variants(self, device):
        rows, groups, n, k = self.shape
        family = f"grouped_gemm_{self.product}"
        out = {}
        if device is not None:
            ragged = {"rows": tuple(self.sizes.tolist())}
            problem = Problem.of(family, groups=groups, rows=rows, n=n, k=k, ragged=ragged)
            for place, config in enumerate(foretune.shortlist(family, problem, k=3, device=device).configs[:3]):
                out[f"predicted {place} = {named(config)}"] = self.existing(config)
        out["torch"] = self.torch
        for config in existing(self.product):
            out[named(config)] = self.existing(config)
        for name, constants, band in new_variants(self.product):
            out[name] = self.new(constants, band)
        return out


def error_of(out, reference):
    error = (out.double() - reference).norm() / reference.norm()
    return float(error) if bool(torch.isfinite(out).all()) else float("nan")


def timed(launches, rounds=ROUNDS):
    """Median us per launch by name; failing variants are left out."""
    times = {name: [] for name in launches}
    for launch in launches.values():
        launch()
    torch.cuda.synchronize()
    for _ in range(rounds):
        events = []
        for name, launch in launches.items():
            torch.cuda._sleep(300_000)
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            launch()
            launch()
            last.record()
            events.append((name, first, last))
        torch.cuda.synchronize()
        for name, first, last in events:
            times[name].append(first.elapsed_time(last) * 500)
    return {name: float(np.median(found)) for name, found in times.items()}


def bandwidths():
    big = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda").random_()
    half = big[: len(big) // 2]
    launches = {
        "copy": lambda: big[len(half) :].copy_(half),
        "fill": lambda: big.fill_(3),
        "read": lambda: big.view(torch.float64).max(),
    }
    found = timed(launches, 7)
    return {name: len(big) / us / 1e6 for name, us in found.items()}


def check(product, results, skipped):
    """Compare all variants on small groups with float64, with one program per tile, and with few programs."""
    ensure_allocator()
    with results.open("a") as file:
        for sms, chunk in ((132, None), (5, 128)):
            call = Call(product, sum(SMALL), len(SMALL), 328, 424, SMALL, sms, chunk)
            exact = call.exact()
            for name, launch in call.variants(None).items():
                if (name, sms) in skipped:
                    continue
                file.write(f"{name}\t{sms}\t")
                file.flush()
                error = float("nan")
                try:
                    call.out.fill_(float("nan"))
                    result = launch()
                    torch.cuda.synchronize()
                    error = error_of(call.out if name != "torch" else result, exact)
                except Exception as trouble:  # noqa: BLE001 - reported
                    print(product, name, str(trouble)[:300].replace("\n", " "), flush=True)
                file.write(f"{error}\n")
                file.flush()


def checked(folder, products, say):
    """The variants that are wrong, or hang, by (product, name)."""
    wrong = {}
    for product in products:
        results = folder / f"check_{product}.tsv"
        results.write_text("")
        for _ in range(5):
            try:
                subprocess.run([sys.executable, __file__, "check", product, str(results)], timeout=40, check=False)
            except subprocess.TimeoutExpired:
                results.write_text(results.read_text() + "nan\n")
                continue
            break
        for line in results.read_text().splitlines():
            name, sms, error = line.split("\t")
            if not float(error or "nan") < 1e-2:
                wrong[product, name] = f"{error} with {sms} programs"
    return wrong


def main():
    if sys.argv[1] == "check":
        results = Path(sys.argv[3])
        done = [line.split("\t")[:2] for line in results.read_text().splitlines()]
        check(sys.argv[2], results, {(name, int(sms)) for name, sms in done})
        return
    folder, products = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    started = time.time()
    log = (folder / f"{'_'.join(products)}.txt").open("w")

    def say(text):
        log.write(text + "\n")
        log.flush()

    jobs = []
    for product in products:
        jobs += [(product, config) for config in existing(product) if config["GROUP_M"] == 1]
        jobs += [(product, constants) for _, constants, band in new_variants(product) if band == 1]
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        for trouble in pool.imap_unordered(compile_one, jobs):
            if trouble:
                say(trouble)
    say(f"compiled {len(jobs)} in {time.time() - started:.0f} s")
    ensure_allocator()
    device = DeviceSpec.live()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    say(f"{torch.cuda.get_device_name()}: TB/s {bandwidths()}")
    wrong = checked(folder, products, say)
    say(f"wrong on small groups: {wrong}")
    say(f"checked after {time.time() - started:.0f} s")
    summary = []
    for label, problems in (("memory", MEMORY), ("arithmetic", ARITHMETIC)):
        for rows, groups, n, k, routing in problems:
            for product in products:
                sizes = drawn_sizes(routing, rows, groups, np.random.default_rng(1))
                call = Call(product, rows, groups, n, k, sizes, sms)
                launches = {name: f for name, f in call.variants(device).items() if (product, name) not in wrong}
                reference, errors = call.some(call.torch()), {}
                for name, launch in launches.items():
                    call.out.fill_(float("nan"))
                    launch()
                    errors[name] = error_of(call.some(call.out), reference) if name != "torch" else 0
                del reference
                us = timed(launches)
                least = 2 * (rows * n + rows * k + int((call.sizes > 0).sum() if product != "dw" else groups) * n * k)
                title = f"{product} {label}: {rows} rows, {groups} x {n} x {k}, {routing}"
                base = next(value for name, value in us.items() if name.startswith("predicted 0"))
                say(f"\n{title}")
                for name in sorted(us, key=us.get):
                    bad = "" if errors[name] < 1e-2 else f" ERROR {errors[name]:.3g}"
                    say(
                        f"  {us[name]:8.1f} us {us[name] / base:.3f} {least / us[name] / 1e6:.2f} TB/s "
                        f"{2 * rows * n * k / us[name] / 1e6:.0f} TF {name}{bad}"
                    )
                best = {}
                for name, value in us.items():
                    kind = name.split()[0]
                    kind = "spec" if kind in ("ws", "pp") else kind
                    if kind not in best or value < best[kind][0]:
                        best[kind] = value, name
                line = f"{title}: predicted {base:.0f} us {least / base / 1e6:.2f} TB/s; "
                summary.append(line + "; ".join(f"{v / base:.3f} {name}" for _, (v, name) in best.items()))
                del call, launches
                torch.cuda.empty_cache()
                print(summary[-1], flush=True)
    say(f"done after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()

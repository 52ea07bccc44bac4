"""What calls of the op cost on this machine's GPU: `python calls_on_gpu.py`, about two minutes.

First calls, each in a new process in which torch and CUDA have started, with an empty Triton cache and with binaries
cached; a new shape; the hot call and the two bare launches in it; and a prediction. `foretune bench runtime` has what
`triton.autotune` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

GROUPS, ROWS, N, K = 8, 4096, 1024, 2048


def tensors(rows, n, *, gradients=False):
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16, requires_grad=gradients)
    w = torch.randn(GROUPS, n, K, device="cuda", dtype=torch.bfloat16, requires_grad=gradients)
    return x, w, torch.full((GROUPS,), rows // GROUPS, device="cuda", dtype=torch.int32)


def seconds(run):
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def host_us(run, calls=200, rounds=25):
    """Host time of one call: the median of rounds, each of fewer calls than the GPU's queue holds."""
    spent = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        spent.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(spent)


def first(gradients):
    """Seconds of the first call, the import of the op included."""
    given = tensors(ROWS, N, gradients=gradients)
    dy = torch.randn(ROWS, N, device="cuda", dtype=torch.bfloat16)
    a = torch.ones(2, 2, device="cuda", requires_grad=True)
    (a @ a).backward(torch.ones_like(a))  # torch's own start
    import triton  # noqa: F401 - as torch has it

    def step():
        import foretune

        y = foretune.grouped_gemm(*given)
        if gradients:
            y.backward(dy)

    return {"first_call_s": seconds(step)}


def later():
    import foretune
    from foretune.datasets import DeviceSpec
    from foretune.kernels import find_family
    from foretune.kernels.grouped_gemm.triton_kernels.gemm import launch_gemm
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
    from foretune.model import load_bundle
    from foretune.runtime.timing.predictions import prediction_ms

    known = set(os.listdir(os.environ["TRITON_CACHE_DIR"])) if os.path.isdir(os.environ["TRITON_CACHE_DIR"]) else set()
    new = []
    for step in range(40):
        given = tensors(ROWS + 512 * step, N + 64 * step)
        took = seconds(lambda given=given: foretune.grouped_gemm(*given))
        now = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
        if now == known and step:  # its binary was there
            new.append(took * 1e3)
        known = now
    x, w, sizes = tensors(64, 256)
    family, device = find_family("grouped_gemm_fwd"), DeviceSpec.live(0)
    problem = foretune.Problem.of(family.name, groups=GROUPS, rows=64, n=256, k=K)
    config = foretune.shortlist(family, problem, device, k=1).configs[0]
    y, tiles = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16), TileMap.build(sizes, 64)

    def bare():
        TileMap.build(sizes, 64)
        launch_gemm(x, w, y, tiles, config, device.sm_count)

    ways = {
        "bare": bare,
        "op": lambda: foretune.grouped_gemm(x, w, sizes),
        "op_layer": lambda: foretune.grouped_gemm(x, w, sizes, layer="one"),
    }
    for run in ways.values():
        run()
    hot = {f"hot_{name}_us": host_us(run) for name, run in ways.items()}
    bundle = load_bundle()
    return hot | {
        "new_shape_ms": statistics.median(new) if new else None,
        "new_shapes": len(new),
        "prediction_ms": {name: prediction_ms(find_family(name), device)[0] for name in bundle.families},
    }


def child(what, cache):
    command = [sys.executable, __file__, "--child", what]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=("forward", "both", "later"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(later() if options.child == "later" else first(options.child == "both")))
        return
    for what in ("forward", "both"):
        cold, cached = [], []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(child(what, cache)["first_call_s"])
                cached.append(child(what, cache)["first_call_s"])
        print(
            json.dumps({"first call": what, "cold_s": statistics.median(cold), "cached_s": statistics.median(cached)})
        )
    with tempfile.TemporaryDirectory() as cache:
        print(json.dumps(child("later", cache)))


if __name__ == "__main__":
    main()

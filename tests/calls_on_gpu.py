"""What calls of the op cost on this machine's GPU: `python calls_on_gpu.py`, about two minutes, and a table last.

First calls, each in a new process in which torch and CUDA have started, with an empty Triton cache and with binaries
cached; a new shape, and what of it is its prediction (PyTorch's pool has the memory: none is asked of the driver); the
hot call and the two bare launches in it; and a prediction. `foretune bench runtime` has what `triton.autotune` takes,
`foretune bench kernels` the hot calls of the other ops. `--profile` also shows what the host does in a first call whose
binaries are cached.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from unittest.mock import patch

import torch

GROUPS, ROWS, N, K = 8, 4096, 1024, 2048


def tensors(rows, n, *, gradients=False):
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16, requires_grad=gradients)
    w = torch.randn(GROUPS, n, K, device="cuda", dtype=torch.bfloat16, requires_grad=gradients)
    return x, w, torch.full((GROUPS,), rows // GROUPS, device="cuda", dtype=torch.int32)


def seconds(run):
    """Of a call, and until the device has done what it launched."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    returned = time.perf_counter() - start
    torch.cuda.synchronize()
    return returned, time.perf_counter() - start


def host_us(ways, calls=200, rounds=50):
    """Host time of one call of each: the median and the least of rounds, in turns, each of fewer calls than the GPU's
    queue holds."""
    spent = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            spent[name].append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return {
        key: value
        for name, of_it in spent.items()
        for key, value in ((f"hot_{name}_us", statistics.median(of_it)), (f"hot_{name}_least_us", min(of_it)))
    }


def first(gradients, profiled):
    """Seconds of the first call, the import of the op included."""
    given = tensors(ROWS, N, gradients=gradients)
    dy = torch.randn(ROWS, N, device="cuda", dtype=torch.bfloat16)
    a = torch.ones(2, 2, device="cuda", requires_grad=True)
    (a @ a).backward(torch.ones_like(a))  # torch's own start
    import triton  # noqa: F401 - as torch has it

    parts = {}

    def step():
        start = time.perf_counter()
        import foretune

        op = foretune.grouped_gemm
        parts["import_s"] = time.perf_counter() - start
        y = op(*given)
        parts["forward_s"] = time.perf_counter() - start
        if gradients:
            y.backward(dy)

    profile = cProfile.Profile()
    if profiled:
        profile.enable()
    _, parts["first_call_s"] = seconds(step)
    profile.disable()
    if profiled:  # the main thread alone: what waits for another one is in `acquire`
        pstats.Stats(profile).sort_stats("tottime").print_stats(15).sort_stats("cumtime").print_stats(45)
    return parts


def later():
    import foretune
    from foretune.datasets import DeviceSpec
    from foretune.kernels import find_family
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
    from foretune.model import load_bundle
    from foretune.runtime.bench import prediction_ms
    from foretune.runtime.shortlist import Chooser

    spent, choose = [], Chooser.choose

    def timed_choose(*given):
        start = time.perf_counter()
        answer = choose(*given)
        spent.append((time.perf_counter() - start) * 1e3)
        return answer

    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    known = set(os.listdir(os.environ["TRITON_CACHE_DIR"])) if os.path.isdir(os.environ["TRITON_CACHE_DIR"]) else set()
    new = []
    for step in range(40):
        given = tensors(ROWS + 512 * step, N + 64 * step)
        spent.clear()
        with patch.object(Chooser, "choose", timed_choose):
            returned, took = seconds(lambda given=given: foretune.grouped_gemm(*given))
        now = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
        if now == known and step:  # its binary was there
            new.append((took * 1e3, returned * 1e3, sum(spent), returned * 1e3 - sum(spent)))
        known = now
    from grouped import launch_gemm

    x, w, sizes = tensors(64, 256)
    family, device = find_family("grouped_gemm_fwd"), DeviceSpec.live(0)
    problem = foretune.Problem.of(family.name, groups=GROUPS, rows=64, n=256, k=K)
    config = foretune.shortlist(family, problem, device, k=1).configs[0]
    y, tiles = torch.empty(64, 256, device="cuda", dtype=torch.bfloat16), TileMap.build(sizes, 64)

    def bare():
        TileMap.build(sizes, 64)
        launch_gemm(x, w, y, tiles, config, device.sm_count)

    def bare_into_new():
        torch.empty(64, 256, device="cuda", dtype=torch.bfloat16)
        bare()

    ways = {
        "bare": bare,
        "bare_into_new": bare_into_new,  # which the op has to do as well
        "op": lambda: foretune.grouped_gemm(x, w, sizes),
    }
    for run in ways.values():
        run()
    names = ("new_shape_ms", "new_shape_returned_ms", "new_shape_prediction_ms", "new_shape_beyond_prediction_ms")
    return host_us(ways) | {
        **{name: statistics.median(one[place] for one in new) if new else None for place, name in enumerate(names)},
        "new_shapes": len(new),
        "prediction_ms": {name: prediction_ms(find_family(name), device)[0] for name in load_bundle().families},
    }


def child(what, cache, *more):
    """What a process says of itself, last; what it says before is passed on. Nothing where it fails, which is shown."""
    command = [sys.executable, __file__, "--child", what, *more]
    done = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    *said, last = done.stdout.splitlines() or [""]
    print(*said, sep="\n", end="\n" if said else "", flush=True)
    if done.returncode:
        print(f"{what} failed:", last, done.stderr[-3000:], sep="\n", flush=True)
        return {}
    return json.loads(last)


def median_of(found):
    """Of each figure that children gave."""
    found = [one for one in found if one]
    return {name: statistics.median(one[name] for one in found) for name in found[0]} if found else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=("forward", "both", "later"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="what the host does in a first call, binaries cached")
    options = parser.parse_args()
    if options.child:
        both = options.child == "both"
        print(json.dumps(later() if options.child == "later" else first(both, options.profile)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        child("both", cache)  # not counted: it leaves Python's byte code on the disk
    for what, goals in (("forward", (1.5, 0.3)), ("both", (2.5, 0.3))):
        cold, cached = [], []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as cache:
                cold.append(child(what, cache))
                cached.append(child(what, cache))
                print(json.dumps({"first call": what, "cold": cold[-1], "cached": cached[-1]}), flush=True)
                if options.profile and len(cold) == 1:
                    child(what, cache, "--profile")
        for state, found, goal in (("cold", cold, goals[0]), ("binaries cached", cached, goals[1])):
            for name, value in median_of(found).items():
                rows.append((f"{what}, {state}: {name}", value, goal if name == "first_call_s" else None))
    with tempfile.TemporaryDirectory() as cache:
        found = child("later", cache)
    predictions = found.pop("prediction_ms", {})
    goals = {"new_shape_ms": 4.0, "new_shape_beyond_prediction_ms": 0.7}
    rows += [(name, value, goals.get(name)) for name, value in found.items()]
    rows += [(f"prediction_ms of {name}", value, None) for name, value in predictions.items()]
    if found:
        rows.append(("hot op over bare launches, us", found["hot_op_us"] - found["hot_bare_us"], 5.0))
        rows.append(("... that allocate their output, us", found["hot_op_us"] - found["hot_bare_into_new_us"], None))
    for name, value, goal in rows:
        print(f"{name:44s} {'-' if value is None else f'{value:9.3f}'}" + ("" if goal is None else f"  goal {goal:g}"))


if __name__ == "__main__":
    main()

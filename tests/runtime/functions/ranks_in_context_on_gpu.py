"""Two kernels and an all-reduce between them, tuned as a whole by two ranks in step.

    python tests/runtime/functions/ranks_in_context_on_gpu.py nccl     # 2 GPUs: real times, printed as a table last
    TRITON_INTERPRET=1 python tests/runtime/functions/ranks_in_context_on_gpu.py gloo  # as the test does: times made up

Prints a line of JSON a rank, and ends with 1 where a rank does not end, or the ranks chose differently.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

RANKS, TIMEOUT_S = 2, 240
#: Microseconds of a block size on each rank, where times are made up: each rank alone would choose another one.
COSTS = ({16: 1, 32: 4, 64: 9, 128: 0.5}, {16: 8, 32: 4, 64: 1, 128: 0.5})


def configs(*sizes):
    return [triton.Config({"BLOCK": size}, num_warps=4) for size in sizes]


def once(kernel_call, quantiles):
    raise AssertionError("a kernel tunes itself")


def declare(backend):
    """The two kernels, autotuned; on a GPU by Triton's own means, should anybody ask."""
    sizes = (16, 32, 64) if backend == "gloo" else (256, 1024, 4096, 16384)
    options = {"do_bench": once} if backend == "gloo" else {}
    first = triton.autotune(configs(*sizes, 128), key=["size"], **options)(add_one)
    last = triton.autotune(configs(*sizes), key=["size"], **options)(double)
    return first, last


@triton.jit
def add_one(x_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < size) + 1, mask=at < size)


@triton.jit
def double(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < size) * 2, mask=at < size)


class Stopwatch:
    """A `CallTimer` of what the kernels say that they cost."""

    us = 0.0

    def __reduce__(self):
        return "watch"  # a function that captures it may be known to other processes

    def spend(self, us):
        self.us += us

    def sample(self, call, samples, undo):
        times = []
        for _ in range(samples):
            if undo is not None:
                undo()
            self.us = 0.0
            call()
            times.append(self.us)
        return times


def run(backend, rank, folder):
    import foretune
    from foretune.runtime.tuning.functions.in_step import Ranks

    options = {"timeout": timedelta(seconds=TIMEOUT_S)}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device("cuda", rank)  # so that a mesh splits the group
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, **options
    )
    group, watch, calls = distributed.group.WORLD, Stopwatch(), [0]
    size, device = (128, "cpu") if backend == "gloo" else (1 << 24, "cuda")
    add, twice = declare(backend)

    def grid(kernel):
        def sized(knobs):
            block = knobs["BLOCK"]
            if backend == "gloo" and block == 128 and rank == 1:
                raise RuntimeError("this block is too large for rank 1")
            watch.spend(COSTS[rank].get(block, 1.0))
            return (triton.cdiv(size, block),)

        return sized

    def layer(x, y):
        calls[0] += 1
        add[grid(add)](x, size)
        distributed.all_reduce(x, group=group)
        twice[grid(twice)](x, y, size)
        return y

    def tuned():
        timer = watch if backend == "gloo" else None
        options = {"n_warmup": 2, "n_repeat": 3, "restore": ["x"], "logs": folder / "logs", "timer": timer}
        return foretune.contextual_autotune(**options)(layer)

    said = {"rank": rank, "calls": [], "y": []}
    own_run = triton.runtime.Autotuner.run
    for again in range(3):  # tuned; known; and known from the disk, as in another process
        if again != 1:
            function = tuned()
            add.cache.clear()
            twice.cache.clear()
        x, y = torch.full((size,), rank + 1.0, device=device), torch.zeros(size, device=device)
        calls[0] = 0
        y = function(x, y, autotune_pg=group)
        said["calls"].append(calls[0])
        said["y"].append(sorted(set(y.tolist())))
    results = function.tune(x, y, autotune_pg=group)
    said["chosen"] = [result.best_config["BLOCK"] for result in results]
    said["times_us"] = [[trial.time_us for trial in result.trials] for result in results]
    plain = foretune.tune({"BLOCK": [16, 32, 64]}, n_repeat=1, timer=watch if backend == "gloo" else None)(
        lambda x, BLOCK: watch.spend(COSTS[rank][BLOCK])
    )
    if rank == 0:
        plain(x)  # what one rank knows alone is no choice of all
    plain(x, autotune_pg=group)
    said["plain"] = plain.tune(x, autotune_pg=group).best_config["BLOCK"]
    in_mesh = init_device_mesh(device, (1, RANKS)).get_group(1)
    said["mesh"] = plain.tune(x, autotune_pg=in_mesh).best_config["BLOCK"]
    said["timeouts"] = [Ranks(one)._steps().rendezvous.patience_s for one in (group, in_mesh)]
    said["restored"] = triton.runtime.Autotuner.run is own_run and type(add.cache) is dict
    said["caches"] = [len(add.cache), len(twice.cache)]
    print(json.dumps(said), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def main(backend):
    folder = Path(tempfile.mkdtemp())
    own = {"FORETUNE_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, __file__, backend]
    started = [
        subprocess.Popen([*command, str(rank), str(folder)], env=os.environ | own, stdout=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        said = [json.loads(one.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1]) for one in started]
    finally:
        for one in started:
            one.kill()  # where it has not ended
    for rank in said:
        print(json.dumps(rank))
    logs = {path.name: path.read_text().splitlines() for path in sorted((folder / "logs").iterdir())}
    print(json.dumps(logs))
    if backend == "nccl":
        for kernel, (chosen, times) in enumerate(zip(said[0]["chosen"], said[0]["times_us"], strict=True)):
            shown = [None if time_us is None else round(time_us, 1) for time_us in times]
            print(f"kernel {kernel}: block {chosen}; the whole function on the slowest rank, us: {shown}")
    return 0 if said[0]["chosen"] == said[1]["chosen"] and said[0]["times_us"] == said[1]["times_us"] else 1


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

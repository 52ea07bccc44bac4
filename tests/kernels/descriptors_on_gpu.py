"""The cost of a TMA descriptor that a program makes: `python tests/kernels/descriptors_on_gpu.py`.

A small kernel loads boxes through 1 to 4 descriptors, which its programs make or the host passes. Printed is how much
longer a launch takes if programs make them, in microseconds per descriptor and round of programs, for one, two and four
rounds (of two programs per SM), in CUDA graphs; and the host's time of a launch with descriptors of either kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from foretune.runtime.launching.descriptors import Descriptor
from foretune.runtime.launching.launcher import Launcher, ensure_allocator
from goals_on_gpu import graph_times

SIDE, COUNTS, ROUNDS, WARPS = 32, (1, 2, 3, 4), (1, 2, 4), 32
LAUNCHES, CALLS = 20, 2000


@triton.jit(do_not_specialize=["rows"])
def boxes_kernel(x_ptr, y_ptr, a_desc, b_desc, c_desc, d_desc, rows, COUNT: tl.constexpr, SIDE: tl.constexpr):
    """Add up COUNT boxes of each program's rows of x, loaded through the given descriptors or the program's own."""
    row = tl.program_id(0) * SIDE
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for place in tl.static_range(COUNT):
        if a_desc is None:
            # (They differ in their bases: equal ones would become one.)
            desc = tl.make_tensor_descriptor(x_ptr + place * SIDE, [rows, SIDE], [COUNT * SIDE, 1], [SIDE, SIDE])
        else:
            desc = (a_desc, b_desc, c_desc, d_desc)[place]
        total += desc.load([row, 0 if a_desc is None else place * SIDE]).to(tl.float32)
    at = (row + tl.arange(0, SIDE))[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.store(y_ptr + at, total)


def prepared(count: int, rounds: int, by_host: bool) -> tuple[Callable[[], None], torch.Tensor, torch.Tensor]:
    """Return a launch with `count` descriptors in so many rounds of programs, and what it computes and should."""
    programs = rounds * (2048 // (32 * WARPS)) * torch.cuda.get_device_properties(0).multi_processor_count
    rows = programs * SIDE
    x = torch.randn(rows, count * SIDE, device="cuda").to(torch.bfloat16)
    y = torch.empty(rows, SIDE, device="cuda")
    box = Descriptor(0, tuple(x.shape), (x.shape[1], 1), (SIDE, SIDE))
    given = [box if by_host and place < count else None for place in range(4)]
    launch = Launcher(boxes_kernel).prepare(
        (programs, 1, 1), (rows,), None, given, COUNT=count, SIDE=SIDE, num_warps=WARPS
    )
    return partial(launch, (x, y)), y, x.float().view(rows, count, SIDE).sum(1)


def host_us(launch: Callable[[], None]) -> float:
    """Return the host's time of a launch in microseconds, the least of several runs."""
    least = float("inf")
    for _ in range(9):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS // 9):
            launch()
        least = min(least, (time.perf_counter() - begin) / (CALLS // 9))
    return least * 1e6


def main() -> None:
    ensure_allocator()
    print(f"{torch.cuda.get_device_name()}, Triton {triton.__version__}")
    for rounds in ROUNDS:
        texts = []
        for count in COUNTS:
            ways = {}
            for by_host in (False, True):
                launch, found, expected = prepared(count, rounds, by_host)
                launch()
                torch.testing.assert_close(found, expected)
                ways["host" if by_host else "program"] = [launch] * LAUNCHES
            times = graph_times(ways)
            texts.append(f"{count}: {(times['program'] - times['host']) / count / rounds:.2f}")
        print(f"us per descriptor and round, {rounds} round(s), by number of descriptors: {', '.join(texts)}")
    for count in COUNTS:
        host, program = (host_us(prepared(count, 1, by_host)[0]) for by_host in (True, False))
        print(
            f"us of host time per launch, {count} descriptor(s): made by the host {host:.1f}, by programs {program:.1f}"
        )


if __name__ == "__main__":
    main()

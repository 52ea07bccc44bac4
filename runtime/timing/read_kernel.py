"""A kernel that only reads: what a bandwidth is measured with. Importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

#: float32 elements that one program loads at a time: 4 KiB, two 16-byte loads a thread.
BLOCK = 1024
#: Programs of four warps on one SM: 64 KiB in flight there, more than twice what an H200's memory needs (4.8 TB/s x
#: 0.7 us over 132 SMs is 25 KiB).
PROGRAMS_PER_SM = 16


@triton.jit(do_not_specialize=["blocks", "passes"])
def read_blocks_kernel(x_ptr, sums_ptr, blocks, passes, BLOCK: tl.constexpr):
    """Reads the first `blocks` blocks of x over and over, `passes` times in all.

    The programs take the blocks in turn, across passes too, so that any number of them is shared out evenly. Past
    the L1, which would serve small sets from every SM's own; the sums keep the loads from being dropped. Offsets are
    32 bits: x has fewer than 2**31 elements.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.range(tl.program_id(0), blocks * passes, tl.num_programs(0)):
        total += tl.load(x_ptr + (turn % blocks) * BLOCK + lanes, cache_modifier=".cg")
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))

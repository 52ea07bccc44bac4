"""A kernel that only reads, to measure bandwidths. Importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

#: The float32 elements that one program loads at a time: 4 KiB, two 16-byte loads per thread.
BLOCK = 1024
#: The programs of four warps on one SM. They have 64 KiB in flight, more than twice what an H200's memory needs: 4.8
#: TB/s x 0.7 us over 132 SMs is 25 KiB.
PROGRAMS_PER_SM = 16


@triton.jit(do_not_specialize=["blocks", "passes"])
def read_blocks_kernel(x_ptr, sums_ptr, blocks, passes, BLOCK: tl.constexpr):
    """Read the first `blocks` blocks of x `passes` times.

    The programs take the blocks in turn, also across passes, so that any number of blocks is distributed evenly. The
    loads bypass the L1, which would serve small sets; the sums keep the compiler from dropping the loads. Offsets have
    32 bits, so x must have fewer than 2**31 elements.
    """
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.range(tl.program_id(0), blocks * passes, tl.num_programs(0)):
        total += tl.load(x_ptr + (turn % blocks) * BLOCK + lanes, cache_modifier=".cg")
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))

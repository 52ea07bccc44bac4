"""The shared memory that one program of the dense GEMM takes of an SM."""

from __future__ import annotations

from ...datasets import DeviceSpec
from ..knob_values import Knobs
from ..sm_limits import ASYNC_PRODUCT_ARCHS, exchange_bytes


def smem_bytes(knobs: Knobs, itemsize: int, device: DeviceSpec) -> int:
    """Shared memory of one program whose operands have elements of so many bytes: exactly what Triton 3.9 allots to
    16-bit tiles in the layout of a linear layer on sm_90, a bound for all else (tests compare with binaries).

    wgmma and tcgen05 read their operands from shared memory while the next stage loads, so they need every stage; all
    others copy them to registers first and need one less. A persistent program has room for the output beside the
    stages, because the next tile's loads are in flight when it is stored; others store it where the stages were.
    """
    if knobs["CONSUMERS"]:
        return _specialized_smem_bytes(knobs)
    return tile_smem_bytes(
        knobs["BLOCK_M"],
        knobs["BLOCK_N"],
        knobs["BLOCK_K"],
        knobs["num_stages"],
        knobs["num_warps"],
        knobs["TMA"],
        itemsize,
        persistent=knobs["PROGRAMS_PER_SM"] > 0,
        split=knobs["SPLIT_K"] > 1,
        arch=device.arch,
    )


def tile_smem_bytes(
    m: int,
    n: int,
    k: int,
    stages: int,
    warps: int,
    tma: int,
    itemsize: int,
    *,
    persistent: bool,
    split: bool = False,
    arch: str,
) -> int:
    """The same, of blocks and ways."""
    is_async = m >= 64 and arch in ASYNC_PRODUCT_ARCHS
    buffers = stages if is_async or arch.startswith("gfx") else max(stages - 1, 1)
    staged = buffers * (m + n) * k * itemsize
    barriers = 16 * buffers + 16 if tma else 0
    if is_async and arch != "sm_90":
        barriers += 32  # of the product
    output = m * n * (4 if itemsize == 1 or split else itemsize)
    if tma == 2:
        output += 1024  # what TMA stores from is aligned, and may have the bias beside it
    elif tma == 1 and itemsize == 2 and not split:  # rows that are not aligned are exchanged whole
        output = min(output, exchange_bytes(m, n, warps, arch))
    return staged + output + barriers if persistent else max(staged, output) + barriers


def _specialized_smem_bytes(knobs: Knobs) -> int:
    """Shared memory of a program with CONSUMERS, of 16-bit elements: that of the stages, of the columns that each group
    stores at a time, two barriers a stage, and what Triton keeps for the warps to find (up to 88 bytes less than is
    said here)."""
    m, n, k = (int(knobs[f"BLOCK_{axis}"]) for axis in "MNK")
    stages, groups = int(knobs["num_stages"]), int(knobs["CONSUMERS"])
    rows = m * groups if knobs["PINGPONG"] else m  # of all groups
    columns = n % 64 or 64
    return stages * (2 * (m + n) * k + 16) + 2 * rows * columns + 240

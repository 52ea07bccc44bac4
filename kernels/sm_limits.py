"""What an SM holds, and which archs have what: the same for every family of tiled products."""

from __future__ import annotations

from typing import Any

from ..datasets import DeviceSpec

#: Archs with a tensor memory accelerator.
TMA_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_120")
#: Where the matrix product of a tile is asynchronous, and reads its operands from shared memory: Hopper's wgmma, and
#: Blackwell's tcgen05 (sm_120 has neither).
ASYNC_PRODUCT_ARCHS = ("sm_90", "sm_100", "sm_103")
#: Registers of a thread, and threads and programs of an SM, of any kind so far (CUDA programming guide, table of
#: compute capabilities); and what the driver keeps of each program's shared memory, from 8.x on.
MOST_REGISTERS, MOST_THREADS, MOST_PROGRAMS = 255, 2048, 32
RESERVED_SMEM_BYTES = 1024
# Beside the accumulators a thread holds addresses, masks and loop state (40-70 registers seen on sm_90).
_OTHER_REGISTERS = 56


def accumulator_registers(block_m: Any, block_n: Any, num_warps: Any) -> Any:
    """float32 accumulators per thread, of numbers or of arrays of them."""
    return block_m * block_n / (32 * num_warps)


def programs_that_fit(
    smem_bytes: int, accumulators: float, num_warps: int, sm_smem_bytes: int, sm_registers: int
) -> int:
    """How many programs run on one SM at a time, at least 1, by shared memory, threads and registers. `accumulators`
    are one thread's.

    >>> programs_that_fit(100 * 1024, accumulators=64, num_warps=4, sm_smem_bytes=228 * 1024, sm_registers=65536)
    2
    """
    threads = 32 * num_warps
    registers = min(accumulators + _OTHER_REGISTERS, MOST_REGISTERS)
    by_smem = sm_smem_bytes // (smem_bytes + RESERVED_SMEM_BYTES)
    return max(1, min(by_smem, MOST_THREADS // threads, int(sm_registers / (registers * threads))))


def exchange_bytes(block_m: int, block_n: int, num_warps: int, arch: str) -> int:
    """Where a 16-bit output changes from the product's layout to the store's: so many rows of it at a time as hold, for
    both layouts, all that one instruction of each warp holds."""
    if arch.startswith("gfx"):
        return 0  # stored as the product lays it out
    if arch not in ("sm_90", "sm_100", "sm_103"):
        # All of it, but for these (sm_80; it varies with the shape, and is less for dW).
        return 16 * 1024 if block_n == 256 or (num_warps <= 4 and block_n < 256) else block_m * block_n * 2
    stored = 32 * num_warps * 8 // block_n  # rows that one 16-byte store of each thread covers
    if block_m < 64:
        rows = max(8, stored)  # mma.sync, whose warps are side by side
    elif arch == "sm_90":
        rows = 8 * min(num_warps, block_m // 16) * (2 if stored >= 16 else 1)  # wgmma, whose warps hold 16 rows each
    elif (block_m, block_n) == (64, 32):
        rows = 64
    elif block_n < 32 or num_warps not in (4, 8) or (num_warps == 8 and block_m * block_n < 128 * 128):
        rows = block_m  # all of it: a bound, for no config of the space
    else:
        rows = min(block_m // 4, 8 * num_warps)
    return rows * block_n * 2


def too_much_smem(needed: int, device: DeviceSpec, blocks: str = "BLOCK_M, BLOCK_N, BLOCK_K") -> str | None:
    """The reason why a device cannot run a tile that needs so many bytes of shared memory, or None. It names what
    could be smaller.

    >>> too_much_smem(250_000, DeviceSpec.named("h200"))[:66]
    'needs 250000 bytes of shared memory but NVIDIA H200 has 232448 a b'
    """
    if needed <= device.smem_per_block_bytes:
        return None
    return (
        f"needs {needed} bytes of shared memory but {device.name} has {device.smem_per_block_bytes} a block: "
        f"{blocks} or num_stages must be smaller"
    )

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

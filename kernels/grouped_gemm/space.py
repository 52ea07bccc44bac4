"""The forward kernel's tuning space, and what a config costs on a device."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from ...datasets import DeviceSpec, KernelConfig

BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (32, 64, 128, 256)
BLOCKS_K = (32, 64, 128, 256)
WARPS = (4, 8)
STAGES = (2, 3, 4, 5, 6)
KNOBS = (
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "GROUP_M",  # M tiles side by side in the L2 order; a runtime argument
    "PROGRAMS_PER_SM",  # the persistent grid over the number of SMs; a runtime argument
    "USE_TMA",
    "num_warps",
    "num_stages",
)
# Configs under this many bytes of loads in flight never hide the latency of memory.
_LEAST_BYTES_IN_FLIGHT = 16 * 1024
# The accumulator's registers per thread: past 128 of 255 the kernel spills.
_MOST_ACCUMULATOR_REGISTERS = 128
# Beside the accumulators a thread holds addresses, masks and loop state (40-70 registers seen on sm_90).
_OTHER_REGISTERS = 56
# One SM of the largest kind (sm_90, sm_100); PROGRAMS_PER_SM fills it.
_SM_SMEM_BYTES, _SM_REGISTERS, _SM_THREADS = 228 * 1024, 65536, 2048
# Where the matrix product of a tile is asynchronous: Hopper's wgmma, and Blackwell's tcgen05 (sm_120 has neither).
_ASYNC_PRODUCT_ARCHS = ("sm_90", "sm_100", "sm_103")
# What the driver keeps of each program's shared memory (CUDA programming guide, compute capability 8.x and later).
_RESERVED_SMEM_BYTES = 1024


@lru_cache(maxsize=1)
def full_space() -> tuple[KernelConfig, ...]:
    """The whole grid less what can't be fast: spilling accumulators, idle warps, too little in flight."""
    space = []
    for m, n, k, warps, stages, tma in product(BLOCKS_M, BLOCKS_N, BLOCKS_K, WARPS, STAGES, (0, 1)):
        if (
            accumulator_registers(m, n, warps) > _MOST_ACCUMULATOR_REGISTERS
            or (m * n < 64 * 128 and (warps > 4 or k < 64))
            or (stages - 1) * (m + n) * k * 2 < _LEAST_BYTES_IN_FLIGHT
        ):
            continue
        smem = tile_smem_bytes(m, n, k, stages, tma, 2, arch="sm_90")
        programs = _resident(smem, m, n, warps, _SM_SMEM_BYTES, _SM_REGISTERS)
        # A band of several M tiles matters only where a group has several.
        for band in (1, 8) if m >= 64 else (1,):
            knobs = zip(KNOBS, (m, n, k, band, programs, tma, warps, stages), strict=True)
            space.append(KernelConfig.of(**dict(knobs)))
    return tuple(space)


def accumulator_registers(block_m: int, block_n: int, num_warps: int) -> float:
    """float32 accumulators per thread."""
    return block_m * block_n / (32 * num_warps)


def tile_smem_bytes(
    block_m: int, block_n: int, block_k: int, stages: int, tma: int, itemsize: int, *, arch: str
) -> int:
    """Shared memory of one program, as the compiler allots it or a little more (a test compares with binaries).

    The asynchronous products of sm_90 (wgmma) and sm_100 (tcgen05) read their operands from shared memory while
    the next stage loads, so they need every stage; all others copy them to registers first and need one less, and
    so do tiles of fewer than 64 rows everywhere. With TMA each stage has a barrier, and a tcgen05 product has one.
    NVIDIA's older mma may also take the output tile through shared memory on its way to the store.
    """
    tile = (block_m + block_n) * block_k * itemsize
    if block_m < 64 or arch not in _ASYNC_PRODUCT_ARCHS:
        output = block_m * block_n * itemsize if arch.startswith("sm_") else 0
        return max((stages - 1) * (tile + 8 * tma), output)
    if arch == "sm_90":
        return stages * (tile + 8 * tma)
    return stages * tile + (8 * stages * tma + 15) // 16 * 16 + 16


def smem_bytes(config: KernelConfig, itemsize: int, device: DeviceSpec) -> int:
    """Shared memory of one program on a device."""
    blocks = (config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"])
    return tile_smem_bytes(*blocks, config.num_stages, config["USE_TMA"], itemsize, arch=device.arch)


def resident_programs(config: KernelConfig, itemsize: int, device: DeviceSpec) -> int:
    """How many of the config's PROGRAMS_PER_SM run on one SM of the device at a time."""
    fits = _resident(
        smem_bytes(config, itemsize, device),
        config["BLOCK_M"],
        config["BLOCK_N"],
        config.num_warps,
        device.smem_per_sm_bytes,
        device.registers_per_sm,
    )
    return min(int(config["PROGRAMS_PER_SM"]), fits)


def _resident(smem: int, block_m: int, block_n: int, num_warps: int, sm_smem_bytes: int, sm_registers: int) -> int:
    threads = 32 * num_warps
    registers = min(accumulator_registers(block_m, block_n, num_warps) + _OTHER_REGISTERS, 255)
    by_smem = sm_smem_bytes // (smem + _RESERVED_SMEM_BYTES)
    return max(1, min(by_smem, _SM_THREADS // threads, int(sm_registers / (registers * threads))))

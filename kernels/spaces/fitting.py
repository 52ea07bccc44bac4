"""`fit_configs`: configs of a matrix product scaled down to a problem, pruned to a device, and each once.

For a plain pipelined Triton GEMM, which loads BLOCK_M x BLOCK_K and BLOCK_K x BLOCK_N tiles and accumulates in float32
(int32 for int8). A family that has a kernel says in its `supports` what that kernel needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...datasets import DeviceSpec, ForetuneError, KernelConfig
from ...datasets.errors import check_integer, shown
from ...datasets.problem import MOST_SIZE, Problem
from ..config_limits import ASYNC_PRODUCT_ARCHS, too_much_smem
from .filtered import Filtered

# A lane's accumulators. Blocks are powers of two, so the next number would be 256, beside which no register is left for
# an address (CUDA has 255 a thread, CDNA as many besides its 256 accumulators, Xe at most 256).
_MOST_ACCUMULATORS = 128
# A tile of the CPU backend is unrolled whole. (torch 2.13's Inductor, which has a CPU template, has the same bound.)
_MOST_CPU_TILE = 2**13
#: The smallest side of a matrix instruction's tile, and its product's elements, which every warp has at least.
LEAST_BLOCK, _LEAST_PRODUCT = 16, 256
#: ROCm's kpack = 2 joins two steps of the matrix instruction.
_LEAST_PACKED_K = 32


def fit_configs(
    configs: Iterable[KernelConfig], shape: Sequence[int], device: DeviceSpec | Path | str, dtype: str = "bf16"
) -> Filtered:
    """Configs of a product (m, n, k) of `dtype` operands: no block larger than its dimension (rounded up to a power of
    two), no warp without a matrix instruction of its own, no GROUP_M past the rows of tiles; then without what
    `gemm_limit` refuses, and each once, though several may have been scaled down to one.

    Raises `ForetuneError` for a shape or a device that is none, for what is no config with blocks, and where the
    device can run none of them.

    >>> from foretune.kernels.spaces.matmul_lists import matmul_configs
    >>> h200 = DeviceSpec.named("h200")
    >>> whole = matmul_configs(h200, "exhaustive")
    >>> len(whole), len(fit_configs(whole, (8192, 8192, 8192), h200).configs)
    (1875, 1239)
    >>> len(fit_configs(whole, (1, 4096, 4096), "h200").configs)
    235
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 3:
        raise ForetuneError(f"shape must be (m, n, k) but is {shown(shape)}")
    m, n, k = (check_integer(name, size, 1, MOST_SIZE) for name, size in zip("mnk", shape, strict=True))
    spec = DeviceSpec.find(device)
    scaled = [_scaled(_with_blocks(config), m, n, k, dtype) for config in configs]
    left = Filtered.by(scaled, lambda config: gemm_limit(config, spec, dtype))
    if not left.configs:
        why = left.dropped[0][1] if left.dropped else "there are none"
        raise ForetuneError(f"no config of a product {m} x {n} x {k} in {dtype} is left on {spec.name}: {why}")
    return left


def gemm_limit(config: KernelConfig, device: DeviceSpec, dtype: str = "bf16") -> str | None:
    """The reason why a plain pipelined GEMM of this config cannot be fast on a device, or cannot run at all: its
    accumulators spill, its stages do not fit into shared memory, or the backend's compiler gives up. Else None.

    >>> config = KernelConfig.of(BLOCK_M=256, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=4)
    >>> gemm_limit(config, DeviceSpec.named("h200"))
    'needs 393216 bytes of shared memory but NVIDIA H200 has 232448 a block: a block or num_stages must be smaller'
    """
    m, n, warps = config["BLOCK_M"], config["BLOCK_N"], config.num_warps
    if (reason := compiler_limit(config, device)) is not None or device.backend == "cpu":
        return reason
    if m * n > _MOST_ACCUMULATORS * device.warp_size * warps:
        return (
            f"BLOCK_M x BLOCK_N cannot be {m} x {n} with num_warps = {warps}: at most "
            f"{_MOST_ACCUMULATORS * device.warp_size * warps} elements, which registers hold"
        )
    if device.backend == "xpu":  # its stages are prefetches into the cache
        return None
    return too_much_smem(smem_bytes(config, device, dtype), device, "a block")


def compiler_limit(config: KernelConfig, device: DeviceSpec) -> str | None:
    """The reason why a backend's compiler does not take the config, whatever the device's memories hold, or None."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    options = dict(config.meta)
    if device.backend == "cpu" and m * n > _MOST_CPU_TILE:
        return f"BLOCK_M x BLOCK_N cannot be {m} x {n}: at most {_MOST_CPU_TILE} elements, or compiling takes minutes"
    if device.backend == "hip":
        if (side := int(options.get("matrix_instr_nonkdim", 0))) and (m % side or n % side):
            return f"BLOCK_M and BLOCK_N must be multiples of matrix_instr_nonkdim = {side} but are {m} and {n}"
        if options.get("kpack", 1) == 2 and k < _LEAST_PACKED_K:
            return f"BLOCK_K cannot be {k} with kpack = 2: at least {_LEAST_PACKED_K}, or the compiler fails"
    return None


def itemsize_of(dtype: str) -> int:
    """Bytes of one operand's element. Raises `ForetuneError` for what is no dtype."""
    if not isinstance(dtype, str):
        raise ForetuneError(f"dtype must be the one dtype of what is loaded but is {shown(dtype)}")
    return Problem.of("gemm", dtype=dtype).itemsize


def least_block_k(dtype: str) -> int:
    """The shortest step that a matrix instruction of 8-bit operands takes, or of wider ones."""
    return 32 if itemsize_of(dtype) == 1 else LEAST_BLOCK


def _scaled(config: KernelConfig, m: int, n: int, k: int, dtype: str) -> KernelConfig:
    knobs = config.to_json()
    for knob, size, least in (
        ("BLOCK_M", m, LEAST_BLOCK),
        ("BLOCK_N", n, LEAST_BLOCK),
        ("BLOCK_K", k, least_block_k(dtype)),
    ):
        knobs[knob] = max(min(config[knob], _power_of_two(size)), least)
    if "kpack" in knobs and int(knobs["BLOCK_K"]) < _LEAST_PACKED_K:
        knobs["kpack"] = 1
    rows_of_tiles = math.ceil(m / int(knobs["BLOCK_M"]))
    if "GROUP_M" in knobs:
        knobs["GROUP_M"] = min(config["GROUP_M"], _power_of_two(rows_of_tiles))
    product = int(knobs["BLOCK_M"]) * int(knobs["BLOCK_N"])
    knobs["num_warps"] = max(min(config.num_warps, product // _LEAST_PRODUCT), 1)
    return KernelConfig.from_json(knobs)


def _with_blocks(config: object) -> KernelConfig:
    if not isinstance(config, KernelConfig):
        raise ForetuneError(f"each of configs must be a KernelConfig but one is {shown(config)}")
    if missing := [knob for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if knob not in config.to_json()]:
        raise ForetuneError(f"each of configs must have {', '.join(missing)} but one is {config}")
    return config


def _power_of_two(size: int) -> int:
    """The next power of two, itself if it is one."""
    return 1 << (size - 1).bit_length()


def smem_bytes(config: KernelConfig, device: DeviceSpec, dtype: str) -> int:
    """Shared memory of the loop's stages on CUDA and ROCm, as Triton 3.6 to 3.9 allot it but for some barriers (tests
    compare with binaries): all stages where the product reads shared memory itself, else one less, which registers
    hold. Where the loop takes less than the result does when it is stored, that is what a binary takes."""
    m, n, k, itemsize = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], itemsize_of(dtype)
    reads_smem = device.arch in ASYNC_PRODUCT_ARCHS and m >= 64 and config.num_warps >= 4
    buffers = config.num_stages if reads_smem else max(config.num_stages - 1, 1)
    if device.backend == "hip" and config.num_stages == 1:
        return int(max(m, n) * k * itemsize)  # one operand after the other
    return int(buffers * (m + n) * k * itemsize)

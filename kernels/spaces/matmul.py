"""The configs that compilers tune a matrix product over, for any device, and how to fit them to a problem.

Compilers have these lists as tables. Here they are computed from a device's properties: bytes in flight, accumulators
per lane, and the size of shared memory. tests/kernels/test_spaces_and_inductor.py compares counts and values with the
tables of the installed torch. The limits are those of a plain pipelined Triton GEMM, which loads BLOCK_M x BLOCK_K and
BLOCK_K x BLOCK_N tiles and accumulates in float32 (int32 for int8); a family's `supports` states what its own kernel
needs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ...datasets.config import check_config
from ...datasets.errors import check_integer, shown
from ...datasets.problem import MOST_SIZE
from ..config_limits import ASYNC_PRODUCT_ARCHS, too_much_smem
from .grids import Filtered, checked_values, combinations, generate

# Accumulators per lane. Blocks are powers of two, so the next number would be 256, which leaves no registers for
# addresses (a thread has 255 on CUDA, 256 and 256 accumulators on CDNA, at most 256 on Xe).
_MOST_ACCUMULATORS = 128
# Elements. The CPU backend unrolls a tile completely; Inductor of torch 2.13 has the same bound for its CPU template.
_MOST_CPU_TILE = 2**13
#: The smallest side of a matrix instruction's tile, and the least number of output elements per warp.
LEAST_BLOCK, _LEAST_PRODUCT = 16, 256
#: ROCm's kpack = 2 joins two steps of the matrix instruction.
_LEAST_PACKED_K = 32
#: Accumulators per lane that keep the matrix units busy and leave registers for a second program.
_ACCUMULATORS = 64
#: The usual GROUP_M: this many rows of tiles are computed together and share operands in the L2.
_GROUP_M = 8


@dataclass(frozen=True)
class _Backend:
    """The values of the blocks and launch options in the lists of one backend (CUDA or ROCm)."""

    blocks: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    usual_stages: int  # a list has this many stages, or as many as fit
    further: tuple[tuple[str, tuple[int, ...]], ...] = ()  # options that only this backend has
    usual: tuple[tuple[str, int], ...] = ()  # the values of `further` in lists


_BLOCKS = (16, 32, 64, 128, 256)
_BACKENDS = {
    "cuda": _Backend(_BLOCKS, (2, 4, 8), (1, 2, 3, 4, 5), 4),
    # 64 KiB of LDS hold at most two stages. A workgroup is spread over four SIMDs.
    "hip": _Backend(
        _BLOCKS,
        (4, 8),
        (1, 2),
        2,
        further=(("matrix_instr_nonkdim", (0, 16)), ("waves_per_eu", (0, 2)), ("kpack", (1, 2))),
        usual=(("matrix_instr_nonkdim", 16), ("waves_per_eu", 0), ("kpack", 2)),
    ),
    # Subgroups have 16 lanes, so there are more of them. Stages are prefetches into the cache.
    "xpu": _Backend(_BLOCKS, (4, 8, 16, 32), (1, 2, 3, 4), 2),
    # A program is one thread, without warps or stages.
    "cpu": _Backend((16, 32, 64, 128), (1,), (1,), 1),
}


def matmul_grid(device: DeviceSpec | Path | str) -> dict[str, list[int]]:
    """Return the exhaustive space of a matrix product as a dictionary of each knob's values.

    On CUDA it has 5 x 5 x 5 blocks, 5 pipeline depths and 3 warp counts: the 1,875 configs of Inductor's exhaustive
    search. ROCm additionally has three values of GROUP_M, the size of the matrix instruction, waves per execution unit
    and kpack.

    Args:
        device: A spec, the name of a shipped one, or its JSON file.

    Raises:
        ForetuneError: The device is unknown, or its backend has no Triton.

    >>> grid = matmul_grid("h200")
    >>> grid["BLOCK_M"], grid["num_stages"], grid["GROUP_M"]
    ([16, 32, 64, 128, 256], [1, 2, 3, 4, 5], [8])
    """
    spec = DeviceSpec.find(device)
    backend = _backend(spec)
    groups = (4, 8, 16) if spec.backend == "hip" else (_GROUP_M,)
    grid = {f"BLOCK_{axis}": backend.blocks for axis in "MNK"}
    grid |= {"GROUP_M": groups, **dict(backend.further), "num_warps": backend.warps, "num_stages": backend.stages}
    if not _has_kpack(spec):
        grid.pop("kpack", None)
    return {knob: list(values) for knob, values in grid.items()}


def matmul_configs(
    device: DeviceSpec | Path | str,
    which: str = "default",
    *,
    shape: Sequence[int] | None = None,
    dtype: str | None = None,
    **further: Iterable[Any],
) -> tuple[KernelConfig, ...]:
    """Return one of the `LISTS` of configs that a matrix product is tuned over, for a device.

    - "default": about 20 configs (ROCm: 33), for products of any size.
    - "extra": alternatives to the default list: longer steps, 4 warps in place of 8 and vice versa, narrow tiles.
    - "exhaustive": all of `matmul_grid` except what compilers refuse.
    - "persistent": large tiles for programs that loop over tiles.
    - "int8" and "scaled" (fp8 with scales): for these dtypes.

    Args:
        device: A spec, the name of a shipped one, or its JSON file.
        which: The name of the list.
        shape: (m, n, k): fit the list to this product, as `fit_configs` does.
        dtype: The dtype of the operands; int8 and fp8e4m3 for the lists of these types, else bf16. A step has the same
            length in bytes for all dtypes.
        further: Knobs of a family's own kernel, with their values, which are combined with each config. They replace a
            knob of the list that has the same name.

    Returns:
        The configs, each once.

    Raises:
        ForetuneError: The list, device, shape or dtype is not valid, or no config is left for the shape.

    >>> len(matmul_configs("h200")), len(matmul_configs("h200", shape=(16, 4096, 4096)))
    (20, 14)
    >>> str(matmul_configs("h200", "persistent", TMA=[1])[0])
    'BLOCK_K=64 BLOCK_M=128 BLOCK_N=128 GROUP_M=8 TMA=1 num_warps=4 num_stages=4'
    """
    if not isinstance(which, str) or which not in LISTS:
        raise ForetuneError(f"which must be one of {', '.join(LISTS)} but is {shown(which)}")
    spec = DeviceSpec.find(device)
    dtype = {"int8": "int8", "scaled": "fp8e4m3"}.get(which, "bf16") if dtype is None else dtype
    _backend(spec), itemsize_of(dtype)
    configs = _configs_of(spec, which, dtype)
    if further:
        more = list(combinations({knob: checked_values(knob, values) for knob, values in further.items()}))
        combined = (KernelConfig.from_json(config.to_json() | one) for config in configs for one in more)
        configs = tuple(dict.fromkeys(combined))
    return configs if shape is None else fit_configs(configs, shape, spec, dtype).configs


def fit_configs(
    configs: Iterable[KernelConfig], shape: Sequence[int], device: DeviceSpec | Path | str, dtype: str = "bf16"
) -> Filtered:
    """Return configs fitted to a product (m, n, k), each once, and those that the device cannot run.

    Blocks are limited to their dimension rounded up to a power of two, num_warps to one matrix instruction per warp,
    and GROUP_M to the number of tile rows. Then `gemm_limit` decides which configs are dropped. Several configs can
    become equal; they are counted once.

    Args:
        configs: Configs with BLOCK_M, BLOCK_N and BLOCK_K.
        shape: (m, n, k).
        device: A spec, the name of a shipped one, or its JSON file.
        dtype: The dtype of the operands.

    Raises:
        ForetuneError: The shape, the device or a config is not valid, or the device can run none of the configs.

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
    scaled = [_scaled_down(_with_blocks(config), m, n, k, dtype) for config in configs]
    left = Filtered.by(scaled, lambda config: gemm_limit(config, spec, dtype))
    if not left.configs:
        why = left.dropped[0][1] if left.dropped else "there are none"
        raise ForetuneError(f"no config of a product {m} x {n} x {k} in {dtype} is left on {spec.name}: {why}")
    return left


def gemm_limit(config: KernelConfig, device: DeviceSpec, dtype: str = "bf16") -> str | None:
    """Return why a plain pipelined GEMM cannot be fast with this config, or cannot run at all, or None.

    The reasons are: the accumulators spill, the stages do not fit into shared memory, or the backend's compiler fails.

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
    if device.backend == "xpu":  # stages are prefetches into the cache
        return None
    return too_much_smem(smem_bytes(config, device, dtype), device, "a block")


@lru_cache(maxsize=64)
def _configs_of(device: DeviceSpec, which: str, dtype: str) -> tuple[KernelConfig, ...]:
    if which == "exhaustive":
        return generate(matmul_grid(device), keep=lambda config: compiler_limit(config, device) is None)
    configs = (_config_of(tile, device, dtype) for tile in _TILES[which](device))
    return tuple(dict.fromkeys(config for config in configs if config is not None))


class _Tile(NamedTuple):
    """One entry of a list before its config is made: a tile, its step along K in bytes, and unusual launch options.

    A launch option that is None gets the backend's usual value.
    """

    m: int
    n: int
    step_bytes: int
    warps: int | None = None
    stages: int | None = None


def _default(device: DeviceSpec) -> Iterator[_Tile]:
    """Yield nearly square tiles with steps of 64 and 128 bytes, and narrow ones with long steps for few rows."""
    yield from _tiles(_least(device), 256, 4 if device.backend == "hip" else 2, (64, 128))
    yield from (_Tile(16, n, 256) for n in (64, 128))
    if device.backend == "hip":  # long steps replace the missing deep pipeline
        yield from (_Tile(side, side, 512) for side in (16, 32, 64))


def _extra(device: DeviceSpec) -> Iterator[_Tile]:
    """Yield alternatives to the default list: longer steps, 4 warps in place of 8 and vice versa, and narrow tiles."""
    yield from _tiles(64, 128, 2, (256,))
    for tile in _tiles(64, 128, 2, (128,)):
        yield tile._replace(warps=4 if _usual_warps(device, tile.m, tile.n) == 8 else 8)
    yield from (_Tile(m, n, 128) for m, n in ((16, 32), (32, 16), (64, 16)))


def _persistent(device: DeviceSpec) -> Iterator[_Tile]:
    """Yield large tiles at two pipeline depths, for programs that loop over tiles."""
    deepest = _backend(device).usual_stages
    for tile, fewer in itertools.product(_tiles(4 * _least(device), 256, 2, (128, 256)), (0, 1)):
        for warps in (4, 8) if (tile.m, tile.n) == (128, 128) else (None,):
            yield tile._replace(warps=warps, stages=max(deepest - fewer, 1))


def _int8(device: DeviceSpec) -> Iterator[_Tile]:
    """Yield nearly square tiles with sides of 32 to 256, and steps of 64 and 128 bytes."""
    yield from _tiles(32, 256, 2, (64, 128))


def _scaled(device: DeviceSpec) -> Iterator[_Tile]:
    """Yield tiles of 16 and 32 rows at every pipeline depth, for decoding, and tiles of more rows at the usual depth.

    Decoding is bound by memory, so its depth matters.
    """
    depths = range(2, _backend(device).usual_stages + 3) if device.backend == "cuda" else (None,)
    for m, n, step, stages in itertools.product((16, 32), (32, 64, 128, 256), (64, 128), depths):
        yield _Tile(m, n, step, stages=stages)
    yield from (tile for tile in _tiles(32, 256, 4, (64, 128)) if tile.m >= 64)


_TILES: dict[str, Callable[[DeviceSpec], Iterator[_Tile]]] = {
    "default": _default,
    "extra": _extra,
    "persistent": _persistent,
    "int8": _int8,
    "scaled": _scaled,
}
#: The names of the lists.
LISTS = ("default", "extra", "exhaustive", "persistent", "int8", "scaled")


def _config_of(tile: _Tile, device: DeviceSpec, dtype: str) -> KernelConfig | None:
    """Return a tile's config for operands of a dtype, with as many stages as fit, or None if it cannot run.

    A tile that states its number of stages gets exactly this number.
    """
    backend = _backend(device)
    if max(tile.m, tile.n) > backend.blocks[-1]:
        return None
    k = max(tile.step_bytes // itemsize_of(dtype), least_block_k(dtype))
    knobs = {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": k, "GROUP_M": _GROUP_M, **dict(backend.usual)}
    if not _has_kpack(device) or k <= LEAST_BLOCK:
        knobs.pop("kpack", None)
    warps = _usual_warps(device, tile.m, tile.n) if tile.warps is None else min(tile.warps, backend.warps[-1])
    depths = range(backend.usual_stages, 0, -1) if tile.stages is None else (tile.stages,)
    configs = (KernelConfig.of(**knobs, num_warps=warps, num_stages=depth) for depth in depths)
    return next((config for config in configs if gemm_limit(config, device, dtype) is None), None)


def _usual_warps(device: DeviceSpec, m: int, n: int) -> int:
    warps = _backend(device).warps
    # From 64 rows on, Hopper and Blackwell multiply with groups of four warps.
    least = max(warps[0], 4) if m >= 64 and device.backend != "cpu" else warps[0]
    return min(max(m * n // (device.warp_size * _ACCUMULATORS), least), warps[-1])


def _tiles(least: int, most: int, aspect: int, steps_bytes: Sequence[int]) -> Iterator[_Tile]:
    """Yield all tiles with sides of `least` to `most` that differ by at most a factor of `aspect`.

    Sides are powers of two. Each tile appears once with each of the steps along K, which are in bytes.
    """
    sides = [side for side in _BLOCKS if least <= side <= most]
    tiles = (_Tile(*one) for one in itertools.product(sides, sides, steps_bytes))
    return (tile for tile in tiles if max(tile.m, tile.n) <= aspect * min(tile.m, tile.n))


def _least(device: DeviceSpec) -> int:
    return LEAST_BLOCK if device.backend == "cpu" else 32


def _has_kpack(device: DeviceSpec) -> bool:
    """Return whether the device uses kpack, a compiler option for AMD GPUs; gfx950 and later ignore it."""
    return device.backend == "hip" and device.arch != "gfx950"


def _backend(device: DeviceSpec) -> _Backend:
    if device.backend not in _BACKENDS:
        raise ForetuneError(f"the device's backend must be one of {', '.join(_BACKENDS)} but is {device.backend}")
    return _BACKENDS[device.backend]


def compiler_limit(config: KernelConfig, device: DeviceSpec) -> str | None:
    """Return why a backend's compiler refuses the config, regardless of memory sizes, or None."""
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
    """Return the bytes of one element of an operand.

    Raises:
        ForetuneError: The dtype is unknown.
    """
    if not isinstance(dtype, str):
        raise ForetuneError(f"dtype must be the one dtype of what is loaded but is {shown(dtype)}")
    return Problem.of("gemm", dtype=dtype).itemsize


def least_block_k(dtype: str) -> int:
    """Return the smallest BLOCK_K that matrix instructions allow for operands of this dtype."""
    return 32 if itemsize_of(dtype) == 1 else LEAST_BLOCK


def _scaled_down(config: KernelConfig, m: int, n: int, k: int, dtype: str) -> KernelConfig:
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


def _with_blocks(given: Any) -> KernelConfig:
    config = check_config(given)
    if missing := [knob for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if knob not in config.to_json()]:
        raise ForetuneError(f"each of configs must have {', '.join(missing)} but one is {config}")
    return config


def _power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def smem_bytes(config: KernelConfig, device: DeviceSpec, dtype: str) -> int:
    """Return the shared memory of the loop's stages on CUDA and ROCm, in bytes.

    This is what Triton 3.6 to 3.9 allocate except for some barriers; tests compare it with binaries. All stages are in
    shared memory if the product reads its operands from there; otherwise one stage is in registers. A binary whose loop
    needs less than the stored result takes the size of the result instead.
    """
    m, n, k, itemsize = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], itemsize_of(dtype)
    reads_smem = device.arch in ASYNC_PRODUCT_ARCHS and m >= 64 and config.num_warps >= 4
    buffers = config.num_stages if reads_smem else max(config.num_stages - 1, 1)
    if device.backend == "hip" and config.num_stages == 1:
        return int(max(m, n) * k * itemsize)  # one operand after the other
    return int(buffers * (m + n) * k * itemsize)

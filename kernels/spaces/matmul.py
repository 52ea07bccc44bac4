"""The configs that compilers tune a matrix product over, for any device, and how they are fitted to a problem.

Compilers have these lists as tables. Here each follows from what a device is: bytes in flight, accumulators a lane, and
what shared memory holds. tests/kernels/test_spaces_and_inductor.py compares counts and reach with the tables of the
installed torch. The limits are those of a plain pipelined Triton GEMM, which loads BLOCK_M x BLOCK_K and BLOCK_K x
BLOCK_N tiles and accumulates in float32 (int32 for int8); a family's `supports` says what its own kernel needs.
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
from ...datasets.errors import check_integer, shown
from ...datasets.problem import MOST_SIZE
from ..config_limits import ASYNC_PRODUCT_ARCHS, too_much_smem
from .grids import Filtered, checked_values, combinations, generate

# A lane's accumulators. Blocks are powers of two, so the next number would be 256, beside which no register is left for
# an address (CUDA has 255 a thread, CDNA as many besides its 256 accumulators, Xe at most 256).
_MOST_ACCUMULATORS = 128
# A tile of the CPU backend is unrolled whole. (torch 2.13's Inductor, which has a CPU template, has the same bound.)
_MOST_CPU_TILE = 2**13
#: The smallest side of a matrix instruction's tile, and its product's elements, which every warp has at least.
LEAST_BLOCK, _LEAST_PRODUCT = 16, 256
#: ROCm's kpack = 2 joins two steps of the matrix instruction.
_LEAST_PACKED_K = 32
#: Accumulators of a lane that keep the matrix units busy and leave room for a second program.
_ACCUMULATORS = 64
#: The usual order of tiles: so many rows of them side by side share the operands in the L2.
_GROUP_M = 8


@dataclass(frozen=True)
class _Backend:
    """What a backend's launch options can be."""

    blocks: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    usual_stages: int  # of a list: as many of these as fit
    further: tuple[tuple[str, tuple[int, ...]], ...] = ()  # what only it has
    usual: tuple[tuple[str, int], ...] = ()  # ... and has in a list


_BLOCKS = (16, 32, 64, 128, 256)
_BACKENDS = {
    "cuda": _Backend(_BLOCKS, (2, 4, 8), (1, 2, 3, 4, 5), 4),
    # A second stage is all that 64 KiB of LDS hold. A workgroup is spread over four SIMDs.
    "hip": _Backend(
        _BLOCKS,
        (4, 8),
        (1, 2),
        2,
        further=(("matrix_instr_nonkdim", (0, 16)), ("waves_per_eu", (0, 2)), ("kpack", (1, 2))),
        usual=(("matrix_instr_nonkdim", 16), ("waves_per_eu", 0), ("kpack", 2)),
    ),
    # Its subgroups have 16 lanes, so that there are more of them; its stages are prefetches into the cache.
    "xpu": _Backend(_BLOCKS, (4, 8, 16, 32), (1, 2, 3, 4), 2),
    # A program is a thread, with neither warps nor stages.
    "cpu": _Backend((16, 32, 64, 128), (1,), (1,), 1),
}


def matmul_grid(device: DeviceSpec | Path | str) -> dict[str, list[int]]:
    """The exhaustive space of a matrix product as a plain dictionary of each knob's values.

    On CUDA 5 x 5 x 5 blocks, 5 depths and 3 numbers of warps: the 1,875 configs that compiler users know. ROCm has
    three orders of tiles, and the matrix instruction's size, waves per execution unit and kpack besides. Raises
    `ForetuneError` for what is no device, or of a backend without Triton.

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
    """One of the `LISTS` that a matrix product is tuned over, for a device.

    - "default": about 20 (ROCm: 33), for products of any size; "extra": what that list has only one way of (longer
      steps, the other number of warps, narrow tiles).
    - "exhaustive": all of `matmul_grid`, but for what no compiler takes.
    - "persistent": large tiles for programs that loop over tiles; "int8" and "scaled" (fp8 with scales): theirs.

    With `shape`, (m, n, k), the list is scaled down to it, pruned by shared memory and registers, and has each config
    once (`fit_configs`). `dtype` is that of the operands that are loaded: bf16, or int8 and fp8e4m3 for their lists; a
    list's steps are as long in bytes for all of them. `further` knobs, of a family's own kernel, are combined with
    each config; the values of one that the list has already take the place of its own.

    Raises `ForetuneError` for what is no list, device, shape or dtype.

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
    """Configs of a product (m, n, k) of `dtype` operands: no block larger than its dimension (rounded up to a power of
    two), no warp without a matrix instruction of its own, no GROUP_M past the rows of tiles; then without what
    `gemm_limit` refuses, and each once, though several may have been scaled down to one.

    Raises `ForetuneError` for a shape or a device that is none, for what is no config with blocks, and where the
    device can run none of them.

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


@lru_cache(maxsize=64)
def _configs_of(device: DeviceSpec, which: str, dtype: str) -> tuple[KernelConfig, ...]:
    if which == "exhaustive":
        return generate(matmul_grid(device), keep=lambda config: compiler_limit(config, device) is None)
    configs = (_config_of(tile, device, dtype) for tile in _TILES[which](device))
    return tuple(dict.fromkeys(config for config in configs if config is not None))


class _Tile(NamedTuple):
    """BLOCK_M, BLOCK_N, the step along K in bytes, and the launch options if they are not the usual ones."""

    m: int
    n: int
    step_bytes: int
    warps: int | None = None
    stages: int | None = None


def _default(device: DeviceSpec) -> Iterator[_Tile]:
    """Tiles that are nearly square, with steps of 64 and 128 bytes, and narrow ones for few rows, with long steps."""
    yield from _tiles(_least(device), 256, 4 if device.backend == "hip" else 2, (64, 128))
    yield from (_Tile(16, n, 256) for n in (64, 128))
    if device.backend == "hip":  # where there is no deep pipeline, a long step takes its place
        yield from (_Tile(side, side, 512) for side in (16, 32, 64))


def _extra(device: DeviceSpec) -> Iterator[_Tile]:
    """What the default list has only one way of: longer steps, the other number of warps, narrow tiles."""
    yield from _tiles(64, 128, 2, (256,))
    for tile in _tiles(64, 128, 2, (128,)):
        yield tile._replace(warps=4 if _usual_warps(device, tile.m, tile.n) == 8 else 8)
    yield from (_Tile(m, n, 128) for m, n in ((16, 32), (32, 16), (64, 16)))


def _persistent(device: DeviceSpec) -> Iterator[_Tile]:
    """Large tiles, for programs that loop over tiles, at two depths."""
    deepest = _backend(device).usual_stages
    for tile, fewer in itertools.product(_tiles(4 * _least(device), 256, 2, (128, 256)), (0, 1)):
        for warps in (4, 8) if (tile.m, tile.n) == (128, 128) else (None,):
            yield tile._replace(warps=warps, stages=max(deepest - fewer, 1))


def _int8(device: DeviceSpec) -> Iterator[_Tile]:
    """Tiles that are nearly square."""
    yield from _tiles(32, 256, 2, (64, 128))


def _scaled(device: DeviceSpec) -> Iterator[_Tile]:
    """Few rows at every depth, because a decode step waits for memory alone; tiles of any shape for more."""
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
    """Return a tile's config, with as many stages as fit up to the usual number unless it says how many; None if it
    cannot run."""
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
    # From 64 rows on Hopper's and Blackwell's products are those of four warps.
    least = max(warps[0], 4) if m >= 64 and device.backend != "cpu" else warps[0]
    return min(max(m * n // (device.warp_size * _ACCUMULATORS), least), warps[-1])


def _tiles(least: int, most: int, aspect: int, steps_bytes: Sequence[int]) -> Iterator[_Tile]:
    """Return all tiles of powers of two with no side more than `aspect` times the other, at each step."""
    sides = [side for side in _BLOCKS if least <= side <= most]
    tiles = (_Tile(*one) for one in itertools.product(sides, sides, steps_bytes))
    return (tile for tile in tiles if max(tile.m, tile.n) <= aspect * min(tile.m, tile.n))


def _least(device: DeviceSpec) -> int:
    return LEAST_BLOCK if device.backend == "cpu" else 32


def _has_kpack(device: DeviceSpec) -> bool:
    """gfx950 and later ignore it, with a warning."""
    return device.backend == "hip" and device.arch != "gfx950"


def _backend(device: DeviceSpec) -> _Backend:
    if device.backend not in _BACKENDS:
        raise ForetuneError(f"the device's backend must be one of {', '.join(_BACKENDS)} but is {device.backend}")
    return _BACKENDS[device.backend]


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

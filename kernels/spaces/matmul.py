"""The lists of configs that compilers tune a matrix product over, for any device, by rules: `matmul_configs`.

Compilers have them as tables. Here each follows from what a device is: bytes in flight, accumulators a lane, and what
shared memory holds. tests/kernels/test_spaces_and_inductor.py compares counts and reach with the tables of the
installed torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig
from ...datasets.errors import shown
from .fitting import LEAST_BLOCK, compiler_limit, fit_configs, gemm_limit, itemsize_of, least_block_k
from .knob_grid import checked_values, generate

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
        knobs = {knob: checked_values(knob, values) for knob, values in further.items()}
        more = [dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values())]
        combined = (KernelConfig.from_json(config.to_json() | one) for config in configs for one in more)
        configs = tuple(dict.fromkeys(combined))
    return configs if shape is None else fit_configs(configs, shape, spec, dtype).configs


@lru_cache(maxsize=64)
def _configs_of(device: DeviceSpec, which: str, dtype: str) -> tuple[KernelConfig, ...]:
    return tuple(dict.fromkeys(LISTS[which](device, dtype)))


def _default(device: DeviceSpec, dtype: str) -> Iterator[KernelConfig]:
    """Tiles that are nearly square, with steps of 64 and 128 bytes, and narrow ones for few rows, with long steps."""
    for (m, n), step in itertools.product(_tiles(_least(device), 256, _aspect(device)), (64, 128)):
        yield from _if_it_runs(device, dtype, m, n, step)
    for n in (64, 128):
        yield from _if_it_runs(device, dtype, 16, n, 256)
    if device.backend == "hip":  # where there is no deep pipeline, a long step takes its place
        for side in (16, 32, 64):
            yield from _if_it_runs(device, dtype, side, side, 512)


def _extra(device: DeviceSpec, dtype: str) -> Iterator[KernelConfig]:
    middle = [(m, n) for m, n in _tiles(64, 128, 2)]
    for m, n in middle:
        yield from _if_it_runs(device, dtype, m, n, 256)
    for m, n in middle:
        usual = _usual_warps(device, m, n)
        yield from _if_it_runs(device, dtype, m, n, 128, warps=4 if usual == 8 else 8)
    for m, n in ((16, 32), (32, 16), (64, 16)):
        yield from _if_it_runs(device, dtype, m, n, 128)


def _exhaustive(device: DeviceSpec, dtype: str) -> Iterator[KernelConfig]:
    yield from generate(matmul_grid(device), keep=lambda config: compiler_limit(config, device) is None)


def _persistent(device: DeviceSpec, dtype: str) -> Iterator[KernelConfig]:
    deepest = _backend(device).usual_stages
    for (m, n), step, fewer in itertools.product(_tiles(4 * _least(device), 256, 2), (128, 256), (0, 1)):
        for warps in sorted({4, 8} if (m, n) == (128, 128) else {_usual_warps(device, m, n)}):
            yield from _if_it_runs(device, dtype, m, n, step, warps=warps, stages=max(deepest - fewer, 1))


def _int8(device: DeviceSpec, dtype: str) -> Iterator[KernelConfig]:
    for (m, n), step in itertools.product(_tiles(32, 256, 2), (64, 128)):
        yield from _if_it_runs(device, dtype, m, n, step)


def _scaled(device: DeviceSpec, dtype: str) -> Iterator[KernelConfig]:
    """Few rows at every depth, because a decode step waits for memory alone; tiles of any shape for more."""
    depths = list(range(2, _backend(device).usual_stages + 3)) if device.backend == "cuda" else [None]
    for m, n, step, stages in itertools.product((16, 32), (32, 64, 128, 256), (64, 128), depths):
        yield from _if_it_runs(device, dtype, m, n, step, stages=stages)
    for (m, n), step in itertools.product(_tiles(32, 256, 4), (64, 128)):
        if m >= 64:
            yield from _if_it_runs(device, dtype, m, n, step)


#: The lists, by name.
LISTS: dict[str, Callable[[DeviceSpec, str], Iterator[KernelConfig]]] = {
    "default": _default,
    "extra": _extra,
    "exhaustive": _exhaustive,
    "persistent": _persistent,
    "int8": _int8,
    "scaled": _scaled,
}


def _if_it_runs(
    device: DeviceSpec,
    dtype: str,
    m: int,
    n: int,
    step_bytes: int,
    *,
    warps: int | None = None,
    stages: int | None = None,
) -> Iterator[KernelConfig]:
    """The config of a tile, with as many stages as fit up to the usual number, if any do. With `stages`, so many."""
    backend = _backend(device)
    if max(m, n) > backend.blocks[-1]:
        return
    k = max(step_bytes // itemsize_of(dtype), least_block_k(dtype))
    knobs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": _GROUP_M, **dict(backend.usual)}
    if not _has_kpack(device) or k <= LEAST_BLOCK:
        knobs.pop("kpack", None)
    knobs["num_warps"] = _usual_warps(device, m, n) if warps is None else min(warps, backend.warps[-1])
    depths = range(backend.usual_stages, 0, -1) if stages is None else (stages,)
    for depth in depths:
        config = KernelConfig.of(**knobs, num_stages=depth)
        if gemm_limit(config, device, dtype) is None:
            yield config
            return


def _usual_warps(device: DeviceSpec, m: int, n: int) -> int:
    warps = _backend(device).warps
    # From 64 rows on Hopper's and Blackwell's products are those of four warps.
    least = max(warps[0], 4) if m >= 64 and device.backend != "cpu" else warps[0]
    return min(max(m * n // (device.warp_size * _ACCUMULATORS), least), warps[-1])


def _tiles(least: int, most: int, aspect: int) -> list[tuple[int, int]]:
    """All tiles of powers of two, no side more than `aspect` times the other."""
    sides = [side for side in _BLOCKS if least <= side <= most]
    return [(m, n) for m, n in itertools.product(sides, repeat=2) if max(m, n) <= aspect * min(m, n)]


def _least(device: DeviceSpec) -> int:
    return LEAST_BLOCK if device.backend == "cpu" else 32


def _aspect(device: DeviceSpec) -> int:
    return 4 if device.backend == "hip" else 2


def _has_kpack(device: DeviceSpec) -> bool:
    """gfx950 and later ignore it, with a warning."""
    return device.backend == "hip" and device.arch != "gfx950"


def _backend(device: DeviceSpec) -> _Backend:
    if device.backend not in _BACKENDS:
        raise ForetuneError(f"the device's backend must be one of {', '.join(_BACKENDS)} but is {device.backend}")
    return _BACKENDS[device.backend]

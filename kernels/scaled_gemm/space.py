"""The tuning space of the scaled GEMMs, and what a config costs on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from itertools import product

from ...datasets import DeviceSpec, ForetuneError, KernelConfig
from ..grouped_gemm.space import BLOCKS_M
from ..knob_values import KnobValues
from ..sm_limits import ASYNC_PRODUCT_ARCHS, accumulator_registers, programs_that_fit
from .kinds import SCALED

#: BLOCK_M x BLOCK_N is the output tile and BLOCK_K the contraction's step, which lies inside one block of the scales.
KNOBS = (
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "GROUP_M",  # M tiles side by side in the L2 order; a runtime argument
    "PROGRAMS_PER_SM",  # the persistent grid over the number of SMs, 0 for a program a tile; a runtime argument
    "SWAP_AB",  # computes the transposed tile
    "TMA_LOAD",  # both operands
    "TMA_STORE",
    "num_warps",
    "num_stages",
)
# Fewer bytes of loads in flight never hide the latency of memory.
_LEAST_BYTES_IN_FLIGHT = 24 * 1024
# float32 accumulators per thread. There are two of each, because every step's product is a sum of its own: at 64 none
# spills, at 128 some do a little (42 of 255 registers), and past that a compile takes minutes.
_MOST_ACCUMULATORS, _FREE_ACCUMULATORS = 128, 64
# Rows of an instruction of Hopper's and Blackwell's tensor cores.
_INSTRUCTION_ROWS = 64


@dataclass(frozen=True)
class Ranges:
    """The values that a space is made of."""

    block_m: tuple[int, ...] = BLOCKS_M
    block_n: tuple[int, ...] = (32, 64, 128, 256)
    block_k: tuple[int, ...] = (128,)
    num_warps: tuple[int, ...] = (4, 8)
    num_stages: tuple[int, ...] = (3, 4, 6)
    programs_per_sm: tuple[int, ...] = (0, 1, 2)

    @classmethod
    def of(cls, **ranges: Sequence[int]) -> Ranges:
        """Ranges with these values in place of the usual ones.

        Raises `ForetuneError` naming a range or a value that cannot be.

        >>> Ranges.of(block_m=[64]).block_m
        (64,)
        """
        for name, values in ranges.items():
            if name not in (known := sorted(field.name for field in fields(cls))):
                raise ForetuneError(f"{name} is not a range of the space; there are {', '.join(known)}")
            if not isinstance(values, Sequence) or isinstance(values, str) or not values:
                raise ForetuneError(f"{name} must be a list of values but is {values!r}")
            words, valid = _VALID[name if name.startswith("num_") else name.upper()]
            for value in values:
                if type(value) is not int or value not in valid:
                    raise ForetuneError(f"{name} must be {words} but is {value!r}")
        return replace(cls(), **{name: tuple(values) for name, values in ranges.items()})


_SWITCH = ("0 or 1", (0, 1))
_VALID: dict[str, tuple[str, Sequence[int]]] = {
    "BLOCK_M": ("a power of two between 16 and 256", BLOCKS_M),
    "BLOCK_N": ("a power of two between 16 and 256", (16, 32, 64, 128, 256)),
    "BLOCK_K": ("32, 64 or 128", (32, 64, 128)),
    "GROUP_M": ("between 1 and 1024", range(1, 1025)),
    "PROGRAMS_PER_SM": ("between 0 and 64, 0 for a program a tile", range(65)),
    "SWAP_AB": _SWITCH,
    "TMA_LOAD": _SWITCH,
    "TMA_STORE": _SWITCH,
    "num_warps": ("4 or 8", (4, 8)),
    "num_stages": ("between 1 and 8", range(1, 9)),
}


@cache
def values_of(family: str) -> KnobValues:
    """The values of the knobs of a family of this folder.

    >>> values_of("scaled_gemm").wrong(KernelConfig.of(**dict.fromkeys(KNOBS, 1) | {"BLOCK_M": 24}).to_json())
    'BLOCK_M cannot be 24: a power of two between 16 and 256'
    """
    return KnobValues.in_words(family, _VALID)


def wrong_tile(config: KernelConfig) -> str | None:
    """The reason why the knobs of a config, which are all right one by one, do not go together, or None.

    >>> knobs = {"BLOCK_M": 128, "BLOCK_N": 64, "SWAP_AB": 1, "TMA_STORE": 0, "num_warps": 4}
    >>> wrong_tile(KernelConfig.of(**knobs))
    'SWAP_AB cannot be 1 with BLOCK_M = 128: such rows fill an instruction as they are; 0'
    """
    m, n, warps = config["BLOCK_M"], config["BLOCK_N"], config.num_warps
    if config["SWAP_AB"]:
        if m >= _INSTRUCTION_ROWS:
            return f"SWAP_AB cannot be 1 with BLOCK_M = {m}: such rows fill an instruction as they are; 0"
        if n < _INSTRUCTION_ROWS:
            return f"SWAP_AB cannot be 1 with BLOCK_N = {n}: no more columns than rows fill an instruction; 0"
        if config["TMA_STORE"]:
            return "TMA_STORE cannot be 1 with SWAP_AB = 1, whose tile is stored across; 0"
    if accumulator_registers(m, n, warps) > _MOST_ACCUMULATORS:
        return (
            f"BLOCK_M x BLOCK_N cannot be {m} x {n} with num_warps = {warps}: at most "
            f"{_MOST_ACCUMULATORS * 32 * warps} elements, which registers hold"
        )
    return None


@lru_cache(maxsize=16)
def full_space(r: Ranges) -> tuple[KernelConfig, ...]:
    """The whole grid less what can't be fast: spilling accumulators, idle warps, too little in flight, more than any SM
    of sm_90 or sm_100 holds."""
    space = []
    for m, n, k, warps, stages, programs in product(
        r.block_m, r.block_n, r.block_k, r.num_warps, r.num_stages, r.programs_per_sm
    ):
        if (
            accumulator_registers(m, n, warps) > (_FREE_ACCUMULATORS if warps < 8 else _MOST_ACCUMULATORS)
            or (warps == 8 and m * n < 64 * 128)
            or (warps == 8 and m < _INSTRUCTION_ROWS and n < 256)
            or (stages - 1) * (m + n) * k < _LEAST_BYTES_IN_FLIGHT
        ):
            continue
        for swap, load, store in _ways(m, n):
            # A tile that spills is worth a try where all else is at its best.
            if accumulator_registers(m, n, warps) > _FREE_ACCUMULATORS and not (load and programs == 1):
                continue
            smem = tile_smem_bytes(m, n, k, stages, warps, swap, load, store, blockwise=True, arch="sm_90")
            fits = programs_that_fit(smem, 2 * accumulator_registers(m, n, warps), warps, 228 * 1024, 65536)
            if programs > fits or smem > 227 * 1024:
                continue
            for band in (1, 8) if m >= _INSTRUCTION_ROWS else (1,):
                knobs = (m, n, k, band, programs, swap, load, store, warps, stages)
                space.append(KernelConfig.of(**dict(zip(KNOBS, knobs, strict=True))))
    return tuple(space)


def _ways(m: int, n: int) -> tuple[tuple[int, int, int], ...]:
    """Which of (SWAP_AB, TMA_LOAD, TMA_STORE) are tried."""
    if m >= _INSTRUCTION_ROWS:
        return (0, 0, 0), (0, 1, 0), (0, 1, 1)
    plain: tuple[tuple[int, int, int], ...] = ((0, 0, 0), (0, 1, 0))
    return plain if n < _INSTRUCTION_ROWS else (*plain, (1, 0, 0), (1, 1, 0))


def tile_smem_bytes(
    m: int, n: int, k: int, stages: int, warps: int, swap: int, load: int, store: int, *, blockwise: bool, arch: str
) -> int:
    """Shared memory of one program: exactly what Triton 3.6 to 3.9 allot on sm_90, a bound on other archs.

    Hopper's product (wgmma, from 64 rows of either operand on) reads its operands from shared memory while the next
    stage loads, so it needs every stage; others copy them to registers first and need one less. With TMA each stage has
    a barrier, and each operand has barriers of its own where the product is not asynchronous. The output has room of
    its own beside the stages, because the next tile's loads are in flight when it is stored. Scales of a block that are
    as many as the threads are laid out anew for the product, beside an output that goes by TMA.
    """
    large = m >= _INSTRUCTION_ROWS or bool(swap)
    product_is_async = large and arch in ASYNC_PRODUCT_ARCHS
    buffers = stages if product_is_async else max(stages - 1, 1)
    if arch != "sm_90":
        barriers = 16 * (buffers + 2) * 2
    elif product_is_async:
        barriers = 8 * buffers * load
    else:
        barriers = ((8 * buffers + 15) // 16 * 16 + 8 * buffers) * load
    output = 2 * m * n
    if not store and arch == "sm_90":
        stored = 32 * warps * 8 // n  # rows that one 16-byte store of each thread covers
        if m < _INSTRUCTION_ROWS:
            rows = min(max(8, stored), m)
        else:
            rows = min(8 * min(warps, m // 16) * (2 if stored >= 16 else 1), m)  # warps hold 16 rows each
        output = 2 * rows * n
    relaid = [4 * size for size in (m, n if n > SCALED else 0) if size >= 32 * warps] if blockwise else []
    output = output + sum(relaid) if store else max([output, *relaid])
    return buffers * (m + n) * k + output + barriers


def smem_bytes(config: KernelConfig, device: DeviceSpec, *, blockwise: bool) -> int:
    """Shared memory of one program on a device: what `supports` compares with the device's limit.

    >>> knobs = dict(zip(KNOBS, (128, 128, 128, 8, 1, 0, 1, 1, 8, 4)))
    >>> smem_bytes(KernelConfig.of(**knobs), DeviceSpec.named("h200"), blockwise=True)
    163872
    """
    blocks = (config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"])
    ways = (config["SWAP_AB"], config["TMA_LOAD"], config["TMA_STORE"])
    return tile_smem_bytes(*blocks, config.num_stages, config.num_warps, *ways, blockwise=blockwise, arch=device.arch)

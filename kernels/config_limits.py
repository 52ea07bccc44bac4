"""Validity rules of tiled kernels: knob values, shared memory and registers, TMA, and Hopper's warp-group products.

The knob CONSUMERS selects kernels with separate loading and multiplying warps, which need Hopper's wgmma.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..datasets import DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem
from ..datasets.errors import reason_of
from ..runtime.arguments import warn_once

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")
#: A config, or its knobs by name, which are faster to create and to look up. Functions that work on arrays
#: also take the knobs of several configs as arrays of integers.
Knobs: TypeAlias = KernelConfig | Mapping[str, Any]


class KnobValues:
    """The valid values of each knob of a family, all integers, including the launch options.

    Args:
        family: The family's name, for error messages.
        values: The values of each knob.
        words: Descriptions of the values, for messages about knobs with many values.

    >>> knobs = KnobValues("row_softmax", {"BLOCK": [64, 128], "num_warps": [4], "num_stages": [3]})
    >>> [config["BLOCK"] for config in knobs.grid()]
    [64, 128]
    >>> knobs.wrong(KernelConfig.of(BLOCK=96).to_json())
    'BLOCK cannot be 96: 64, 128'
    """

    def __init__(
        self, family: str, values: Mapping[str, Sequence[int]], words: Mapping[str, str] | None = None
    ) -> None:
        self._family, self._values = family, values
        self._words = {knob: ", ".join(map(str, each)) for knob, each in values.items()} | dict(words or {})
        self._pairs = frozenset((knob, value) for knob, each in values.items() for value in each) | {("num_ctas", 1)}

    @classmethod
    def in_words(cls, family: str, valid: Mapping[str, tuple[str, Sequence[int]]]) -> KnobValues:
        """Return the values of knobs, each given as (a description of the valid values, the values).

        >>> knobs = KnobValues.in_words("row_softmax", {"BLOCK": ("a multiple of 32", range(32, 4096, 32))})
        >>> knobs.wrong({"BLOCK": 48, "num_ctas": 1})
        'BLOCK cannot be 48: a multiple of 32'
        """
        words = {knob: description for knob, (description, _) in valid.items()}
        return cls(family, {knob: values for knob, (_, values) in valid.items()}, words)

    def grid(self, is_of_use: Callable[[Mapping[str, int]], bool] = lambda knobs: True) -> Iterator[KernelConfig]:
        """Yield a config for every combination of values for which `is_of_use` is true."""
        for values in product(*self._values.values()):
            knobs = dict(zip(self._values, values, strict=True))
            if is_of_use(knobs):
                yield KernelConfig.of(**knobs)

    def wrong(self, knobs: Mapping[str, Any]) -> str | None:
        """Return why a config's knobs are not valid, or None; the reason names the knob and its valid values.

        maxnreg and ir_override are refused like any other knob that the family does not have. maxnreg would compile (on
        CUDA), but no measured config has it and the features do not show it, so the prediction would be that of another
        binary. ir_override names a file, which another process may not have.

        Args:
            knobs: The knobs as `KernelConfig.to_json` returns them.
        """
        are_integers = set(map(type, knobs.values())) == {int}  # not True, which is 1, and not 64.0
        if are_integers and len(knobs) == len(self._values) + 1 and knobs.items() <= self._pairs:
            return None
        if type(ctas := knobs.get("num_ctas")) is not int or ctas != 1:
            return f"num_ctas cannot be {ctas!r}: 1"
        if unknown := sorted(knobs.keys() - self._values.keys() - {"num_ctas"}):
            return f"{unknown[0]} is no knob of {self._family}; it has {', '.join(self._values)}"
        for knob, values in self._values.items():
            if knob not in knobs:
                return f"{knob} is missing: {self._words[knob]}"
            if type(knobs[knob]) is not int or knobs[knob] not in values:
                return f"{knob} cannot be {knobs[knob]!r}: {self._words[knob]}"
        return None


#: Archs with a tensor memory accelerator.
TMA_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_120")
#: Archs whose matrix products are asynchronous and read operands from shared memory: Hopper's wgmma and Blackwell's
#: tcgen05 (sm_120 has neither).
ASYNC_PRODUCT_ARCHS = ("sm_90", "sm_100", "sm_103")
#: Limits of all NVIDIA archs so far: registers per thread, threads and programs per SM (CUDA programming guide, table
#: of compute capabilities), and bytes of each program's shared memory that the driver reserves (from 8.x on).
MOST_REGISTERS, MOST_THREADS, MOST_PROGRAMS = 255, 2048, 32
RESERVED_SMEM_BYTES = 1024
# Registers of a thread for addresses, masks and loop state, in addition to accumulators (40-70 seen on sm_90).
_OTHER_REGISTERS = 56


def with_ranges(own: R, given: Mapping[str, Sequence[int]], valid: Mapping[str, tuple[str, Collection[int]]]) -> R:
    """Return a copy of a space's ranges, a dataclass of tuples, with some of them replaced.

    Args:
        own: The ranges.
        given: The new values, by field name.
        valid: The valid values of each field, with their description.

    Raises:
        ForetuneError: A field is unknown, or a value is not valid.
    """
    for name, values in given.items():
        if name not in (known := sorted(field.name for field in fields(own))):
            raise ForetuneError(f"{name} is not a range of the space; the ranges are {', '.join(known)}")
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ForetuneError(f"{name} must be a list of values but is {values!r}")
        words, able = valid[name]
        for value in values:
            if type(value) is not int or value not in able:
                raise ForetuneError(f"{name} must be {words} but is {value!r}")
    return replace(own, **{name: tuple(values) for name, values in given.items()})


def accumulator_registers(block_m: Any, block_n: Any, num_warps: Any) -> Any:
    """Return the number of float32 accumulators per thread for a block_m x block_n tile; takes numbers or arrays."""
    return block_m * block_n / (32 * num_warps)


def programs_that_fit(
    smem_bytes: int, accumulators: float, num_warps: int, sm_smem_bytes: int, sm_registers: int
) -> int:
    """Return how many programs run on one SM at a time, at least 1, by shared memory, threads and registers.

    Args:
        smem_bytes: Shared memory of one program.
        accumulators: 32-bit accumulators of one thread.
        num_warps: Warps of one program.
        sm_smem_bytes: Shared memory of the SM.
        sm_registers: 32-bit registers of the SM.

    >>> programs_that_fit(100 * 1024, accumulators=64, num_warps=4, sm_smem_bytes=228 * 1024, sm_registers=65536)
    2
    """
    threads = 32 * num_warps
    registers = min(accumulators + _OTHER_REGISTERS, MOST_REGISTERS)
    by_smem = sm_smem_bytes // (smem_bytes + RESERVED_SMEM_BYTES)
    return max(1, min(by_smem, MOST_THREADS // threads, int(sm_registers / (registers * threads))))


def exchange_bytes(block_m: int, block_n: int, num_warps: int, arch: str) -> int:
    """Return the bytes of shared memory that a program needs to convert its output tile to the layout of its stores.

    The tile is block_m x block_n, with 16 bits per element. The conversion handles as many rows at a time as one
    instruction of each warp covers, in both layouts.
    """
    if arch.startswith("gfx"):
        return 0  # stored in the product's layout
    if arch not in ("sm_90", "sm_100", "sm_103"):
        # The complete tile, except for these (sm_80; it varies with the shape, and is smaller for dW).
        return 16 * 1024 if block_n == 256 or (num_warps <= 4 and block_n < 256) else block_m * block_n * 2
    stored = 32 * num_warps * 8 // block_n  # rows that one 16-byte store of each thread covers
    if block_m < 64:
        rows = max(8, stored)  # mma.sync: warps are next to each other
    elif arch == "sm_90":
        rows = 8 * min(num_warps, block_m // 16) * (2 if stored >= 16 else 1)  # wgmma: each warp holds 16 rows
    elif (block_m, block_n) == (64, 32):
        rows = 64
    elif block_n < 32 or num_warps not in (4, 8) or (num_warps == 8 and block_m * block_n < 128 * 128):
        rows = block_m  # the complete tile: an upper bound for configs outside the space
    else:
        rows = min(block_m // 4, 8 * num_warps)
    return rows * block_n * 2


def no_tma(knobs: Knobs, names: Iterable[str], device: DeviceSpec) -> str | None:
    """Return why a device without TMA cannot run a config, or None. Triton's interpreter has TMA.

    Args:
        knobs: The config's knobs.
        names: The knobs that select TMA if they are not 0.
        device: The device.

    >>> no_tma({"TMA_X": 0, "TMA_Y": 1}, ("TMA_X", "TMA_Y"), DeviceSpec.named("h200")) is None
    True
    """
    if device.arch in TMA_ARCHS or device.backend == "cpu":
        return None
    for knob in names:
        if value := knobs[knob]:
            return f"{knob} cannot be {value}: {device.arch} has {'none' if knob == 'TMA' else 'no TMA'}"
    return None


def too_much_smem(needed: int, device: DeviceSpec, blocks: str = "BLOCK_M, BLOCK_N, BLOCK_K") -> str | None:
    """Return why a device cannot run a program with `needed` bytes of shared memory, or None.

    The reason names the knobs that could be smaller (`blocks`, and num_stages).

    >>> too_much_smem(250_000, DeviceSpec.named("h200"))[:66]
    'needs 250000 bytes of shared memory but NVIDIA H200 has 232448 a b'
    """
    if needed <= device.smem_per_block_bytes:
        return None
    return (
        f"needs {needed} bytes of shared memory but {device.name} has {device.smem_per_block_bytes} a block: "
        f"{blocks} or num_stages must be smaller"
    )


#: The most shared memory of a warp-specialized program for stages and outputs, in bytes: 1 KiB of Hopper's 227 remains
#: for all else.
SPECIALIZED_BYTES = 226 * 1024


def queue_bytes(fields: int, stages: int) -> int:
    """Return the shared memory of a queue of jobs of so many integers (`warp_jobs.job_queue`).

    >>> queue_bytes(4, 5)
    112
    """
    return 4 * fields * (stages + 2)


#: Values of these knobs in data of kernels without CONSUMERS, for `Family.default_knobs`.
WITHOUT_CONSUMERS = {"CONSUMERS": 0, "PINGPONG": 0}


def no_consumers(knobs: Knobs, device: DeviceSpec) -> str | None:
    """Return why a device cannot run a config with its value of CONSUMERS, or None if it can.

    >>> no_consumers({"CONSUMERS": 2}, DeviceSpec.named("h200")) is None
    True
    """
    interpreted = device.backend == "cpu"
    if not knobs["CONSUMERS"] or (device.arch == "sm_90" and not interpreted):
        return None
    where = "the interpreter" if interpreted else device.arch
    return f"CONSUMERS cannot be {knobs['CONSUMERS']}: {where} has no wgmma; it must be 0"


def wrong_tile_of_all_warps(knobs: Knobs) -> str | None:
    """Return why a tile is not valid for kernels whose warps all load and multiply (no CONSUMERS), or None.

    >>> wrong_tile_of_all_warps({"BLOCK_M": 128, "BLOCK_N": 160})
    'BLOCK_N cannot be 160 with CONSUMERS = 0: a power of two between 16 and 256'
    """
    for block in ("BLOCK_M", "BLOCK_N"):
        if knobs[block].bit_count() > 1:
            return f"{block} cannot be {knobs[block]} with CONSUMERS = 0: a power of two between 16 and 256"
    return None


def wrong_consumers(
    knobs: Knobs,
    decided: Mapping[str, int],
    tiles: Collection[tuple[int, ...]],
    names: Sequence[str] = ("BLOCK_M", "BLOCK_N"),
    given: Sequence[str] = ("CONSUMERS",),
) -> str | None:
    """Return why a config with CONSUMERS is not valid, or None.

    Args:
        knobs: The config's knobs.
        decided: The values that such configs must have, by knob.
        tiles: The valid values of `names` together.
        names: The knobs that decide the tile.
        given: The knobs on which `tiles` depends, for the reason.

    >>> knobs = {"CONSUMERS": 2, "PINGPONG": 1, "BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 4}
    >>> wrong_consumers(knobs, {}, [(128, 128), (64, 256)], given=("CONSUMERS", "PINGPONG"))
    'BLOCK_M x BLOCK_N cannot be 64 x 64 with CONSUMERS = 2 and PINGPONG = 1: 128 x 128, 64 x 256'
    >>> wrong_consumers(knobs, {"num_stages": 3}, [])
    'num_stages cannot be 4 with CONSUMERS = 2: 3'
    """
    consumers = knobs["CONSUMERS"]
    for knob, value in decided.items():
        if knobs[knob] != value:
            return f"{knob} cannot be {knobs[knob]} with CONSUMERS = {consumers}: {value}"
    if (tile := tuple(knobs[name] for name in names)) not in tiles:
        able, found = ", ".join(" x ".join(map(str, one)) for one in tiles), " x ".join(map(str, tile))
        where = " and ".join(f"{name} = {knobs[name]}" for name in given)
        return f"{' x '.join(names)} cannot be {found} with {where}: {able}"
    if knobs["num_stages"] < 2:
        return f"num_stages cannot be {knobs['num_stages']} with CONSUMERS = {consumers}: at least 2"
    return None


def spilled(block_m: int, block_n: int, num_warps: int, most: int, also: str = "") -> str | None:
    """Return why the registers of a tile would spill: a thread has more than `most` accumulators; or None.

    `also` names other knobs on which `most` depends, for the reason, such as "CONSUMERS = 0 and ".

    >>> spilled(256, 128, 4, 128)
    'BLOCK_M x BLOCK_N must be at most 16384 elements with num_warps = 4, or registers spill, but is 256 x 128'
    """
    if accumulator_registers(block_m, block_n, num_warps) <= most:
        return None
    return (
        f"BLOCK_M x BLOCK_N must be at most {most * 32 * num_warps} elements with {also}num_warps = {num_warps}, "
        f"or registers spill, but is {block_m} x {block_n}"
    )


def default_without_gluon(
    config: KernelConfig, family: Measurable, problem: Problem, device: DeviceSpec
) -> KernelConfig:
    """Return a config that this Triton can run: the given one, or the family's default if it needs missing Gluon.

    A config with CONSUMERS needs Gluon. Without Gluon there is one warning instead of an error.
    """
    if not config.to_json().get("CONSUMERS") or (reason := why_no_gluon()) is None:
        return config
    warn_once(f"CONSUMERS cannot run with this Triton ({reason})", "; the family's default config is used")
    return family.default(problem, device)


@cache
def why_no_gluon() -> str | None:
    """Return why Gluon, which is experimental, cannot be imported as Triton 3.6 to 3.9 provide it, or None."""
    try:
        import_module(f"{__package__}.warp_jobs")
    except Exception as error:  # noqa: BLE001 - whatever an import raises
        return reason_of(error)
    return None

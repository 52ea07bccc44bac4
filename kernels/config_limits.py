"""Which configs a tiled kernel takes: the values of its knobs, what an SM holds, and where there is TMA and Hopper's
products (CONSUMERS)."""

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
#: A config, or knobs by name, which are quicker to make and to look up; of several configs, arrays of integers, where
#: what follows from them may be arrays as well.
Knobs: TypeAlias = KernelConfig | Mapping[str, Any]


class KnobValues:
    """The values that each knob of a family may have, all of them integers, launch options among them; `words` says
    which they are of knobs that have many.

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
        words = {knob: said for knob, (said, _) in valid.items()}
        return cls(family, {knob: values for knob, (_, values) in valid.items()}, words)

    def grid(self, is_of_use: Callable[[Mapping[str, int]], bool] = lambda knobs: True) -> Iterator[KernelConfig]:
        """Every combination that is of use."""
        for values in product(*self._values.values()):
            knobs = dict(zip(self._values, values, strict=True))
            if is_of_use(knobs):
                yield KernelConfig.of(**knobs)

    def wrong(self, knobs: Mapping[str, Any]) -> str | None:
        """The reason why knobs, as `KernelConfig.to_json` has them, are none of these, or None; it names the knob and
        the values that would do.

        maxnreg and ir_override are refused like any other knob that is not the family's: maxnreg would compile (on
        CUDA), but no config that was measured has it and features do not show it, so a prediction would be that of
        another binary; ir_override names a file, which the next process may not have.
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
#: Where the matrix product of a tile is asynchronous, and reads its operands from shared memory: Hopper's wgmma, and
#: Blackwell's tcgen05 (sm_120 has neither).
ASYNC_PRODUCT_ARCHS = ("sm_90", "sm_100", "sm_103")
#: Registers of a thread, and threads and programs of an SM, of any kind so far (CUDA programming guide, table of
#: compute capabilities); and what the driver keeps of each program's shared memory, from 8.x on.
MOST_REGISTERS, MOST_THREADS, MOST_PROGRAMS = 255, 2048, 32
RESERVED_SMEM_BYTES = 1024
# Beside the accumulators a thread holds addresses, masks and loop state (40-70 registers seen on sm_90).
_OTHER_REGISTERS = 56


def with_ranges(own: R, given: Mapping[str, Sequence[int]], valid: Mapping[str, tuple[str, Collection[int]]]) -> R:
    """Return the ranges that a space is made of, a dataclass of tuples, with some values in place of its own.

    Args:
        own: The ranges.
        given: The new values, by the names of fields.
        valid: The valid values of each, and their description.

    Raises:
        ForetuneError: There is no such range, or it cannot have a value.
    """
    for name, values in given.items():
        if name not in (known := sorted(field.name for field in fields(own))):
            raise ForetuneError(f"{name} is not a range of the space; there are {', '.join(known)}")
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ForetuneError(f"{name} must be a list of values but is {values!r}")
        words, able = valid[name]
        for value in values:
            if type(value) is not int or value not in able:
                raise ForetuneError(f"{name} must be {words} but is {value!r}")
    return replace(own, **{name: tuple(values) for name, values in given.items()})


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


def no_tma(knobs: Knobs, names: Iterable[str], device: DeviceSpec, words: str = "cannot be {value}") -> str | None:
    """Return why a device cannot run a config that has TMA by one of these knobs, or None. The interpreter has TMA.

    >>> no_tma({"TMA_X": 0, "TMA_Y": 1}, ("TMA_X", "TMA_Y"), DeviceSpec.named("h200")) is None
    True
    """
    if device.arch in TMA_ARCHS or device.backend == "cpu":
        return None
    for knob in names:
        if value := knobs[knob]:
            return f"{knob} {words.format(value=value)}: {device.arch} has {'none' if knob == 'TMA' else 'no TMA'}"
    return None


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


#: What these knobs are of a kernel that has none of this: `Family.default_knobs`.
WITHOUT_CONSUMERS = {"CONSUMERS": 0, "PINGPONG": 0}


def no_consumers(knobs: Knobs, device: DeviceSpec) -> str | None:
    """The reason why a device cannot run a config for its CONSUMERS, or None.

    >>> no_consumers({"CONSUMERS": 2}, DeviceSpec.named("h200")) is None
    True
    """
    interpreted = device.backend == "cpu"
    if not knobs["CONSUMERS"] or (device.arch == "sm_90" and not interpreted):
        return None
    where = "the interpreter" if interpreted else device.arch
    return f"CONSUMERS cannot be {knobs['CONSUMERS']}: {where} has no products of Hopper's; 0"


def undecided(knobs: Knobs, decided: Mapping[str, int]) -> str | None:
    """The reason why a knob is not what CONSUMERS decide, or None.

    >>> undecided({"CONSUMERS": 2, "SPLIT_K": 4}, {"SPLIT_K": 1})
    'SPLIT_K cannot be 4 with CONSUMERS = 2: 1'
    """
    for knob, value in decided.items():
        if knobs[knob] != value:
            return f"{knob} cannot be {knobs[knob]} with CONSUMERS = {knobs['CONSUMERS']}: {value}"
    return None


def wrong_tile_of_all_warps(knobs: Knobs) -> str | None:
    """The reason why a tile is none that kernels without CONSUMERS have, or None.

    >>> wrong_tile_of_all_warps({"BLOCK_M": 128, "BLOCK_N": 160})
    'BLOCK_N cannot be 160 with CONSUMERS = 0: a power of two between 16 and 256'
    """
    for block in ("BLOCK_M", "BLOCK_N"):
        if knobs[block].bit_count() > 1:
            return f"{block} cannot be {knobs[block]} with CONSUMERS = 0: a power of two between 16 and 256"
    return None


def wrong_tile_of_consumers(knobs: Knobs, tiles: Collection[tuple[int, int]]) -> str | None:
    """The reason why a tile is none of those (BLOCK_M, BLOCK_N) that CONSUMERS and PINGPONG have, or has no stages to
    load ahead, or None.

    >>> knobs = {"CONSUMERS": 2, "PINGPONG": 1, "BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 4}
    >>> wrong_tile_of_consumers(knobs, [(128, 128), (64, 256)])
    'BLOCK_M x BLOCK_N cannot be 64 x 64 with CONSUMERS = 2 and PINGPONG = 1: 128 x 128, 64 x 256'
    """
    consumers, m, n = knobs["CONSUMERS"], knobs["BLOCK_M"], knobs["BLOCK_N"]
    if (m, n) not in tiles:
        able = ", ".join(f"{m} x {n}" for m, n in tiles)
        given = f"CONSUMERS = {consumers} and PINGPONG = {knobs['PINGPONG']}"
        return f"BLOCK_M x BLOCK_N cannot be {m} x {n} with {given}: {able}"
    if knobs["num_stages"] < 2:
        return f"num_stages cannot be {knobs['num_stages']} with CONSUMERS = {consumers}: at least 2"
    return None


def default_without_gluon(
    config: KernelConfig, family: Measurable, problem: Problem, device: DeviceSpec
) -> KernelConfig:
    """A config that was chosen, or the family's default with one warning where it has CONSUMERS and this Triton no
    Gluon: a prediction makes no kernel fail."""
    if not config.to_json().get("CONSUMERS") or (reason := why_no_gluon()) is None:
        return config
    warn_once(f"CONSUMERS cannot run with this Triton ({reason})", "; the family's default config is taken")
    return family.default(problem, device)


@cache
def why_no_gluon() -> str | None:
    """The reason why Gluon, which is experimental, is not where Triton 3.6 to 3.9 have it, or None."""
    try:
        import_module(f"{__package__}.warp_jobs")
    except Exception as error:  # noqa: BLE001 - whatever an import raises
        return reason_of(error)
    return None

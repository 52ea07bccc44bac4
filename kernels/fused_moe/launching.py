"""The knobs of the engines' kernel, which values they take, what a config costs on a device, and what the engines pass
to their kernel, by the names of its parameters: shapes on the host, without torch.

The engines differ in what they call things and in what they pass; the parameters of the kernel that is installed are
filled in by name, so each gets what it has, and one that is not known here is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from ...datasets import DeviceSpec, KernelConfig, Problem
from ..config_limits import ASYNC_PRODUCT_ARCHS, TMA_ARCHS, programs_that_fit, too_much_smem
from .engines import SCALED_BLOCK, SGLANG, VLLM, engine_of, swaps, tuner_space

KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
#: SGLang loads both operands of the second product with TMA where its file says so.
TMA = "USE_TMA"
#: Sorted rows are laid out for each of these once; the engines' tuners try no other.
BLOCKS_M = (16, 32, 64, 128, 256)
#: What each knob may be: wider than what the tuners try, as default configs and shipped files are.
_VALID: dict[str, tuple[str, Collection[int]]] = {
    "BLOCK_SIZE_M": ("16, 32, 64, 128 or 256", BLOCKS_M),
    "BLOCK_SIZE_N": ("32, 64, 128 or 256", (32, 64, 128, 256)),
    "BLOCK_SIZE_K": ("32, 64, 128 or 256", (32, 64, 128, 256)),
    "GROUP_SIZE_M": ("between 1 and 1024", range(1, 1025)),
    "num_warps": ("2, 4, 8 or 16", (2, 4, 8, 16)),
    "num_stages": ("between 1 and 8", range(1, 9)),
    TMA: ("0 or 1", (0, 1)),
}
#: The accumulator's registers of one thread: at 512 nothing fits, and compiling took up to a minute (Triton 3.6).
_MOST_ACCUMULATORS = 256


@cache
def full_space(down: bool) -> tuple[KernelConfig, ...]:
    """What SGLang's tuner tries of one product: the 1,920 configs, of the second each with TMA and without.

    >>> len(full_space(False)), len(full_space(True))
    (1920, 3840)
    """
    space = tuner_space(SGLANG, "bf16")
    return tuple(with_tma(config, tma) for tma in (0, 1) for config in space) if down else space


@lru_cache(maxsize=1 << 14)
def with_tma(config: KernelConfig, tma: int) -> KernelConfig:
    """The config as one of the second product."""
    return KernelConfig.of(**config.to_json() | {TMA: tma})


def wrong_knob(named: Mapping[str, Any], down: bool) -> str | None:
    """The reason why knobs are none of a config of the kernel's, or None."""
    knobs = (*KNOBS, TMA) if down else KNOBS
    for knob in knobs:
        if knob not in named:
            return f"a config must have {knob}: it is {_VALID[knob][0]}"
        words, values = _VALID[knob]
        if type(named[knob]) is not int or named[knob] not in values:
            return f"{knob} must be {words} but is {named[knob]!r}"
    unknown = sorted(set(named) - {*knobs, "num_ctas"})
    if unknown or named["num_ctas"] != 1:
        return f"{unknown[0] if unknown else 'num_ctas'} is no knob of the kernel, which has {', '.join(knobs)}"
    return None


def wrong_for(config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
    """The reason why a config with the right knobs cannot run a problem on a device, or None."""
    if uses_tma(config):
        if engine_of(problem) == VLLM:
            return f"{TMA} must be 0: vLLM's kernel has no such path"
        if device.backend != "cuda" or device.arch not in TMA_ARCHS:
            return f"{TMA} must be 0: {device.arch} has no TMA"
        if problem["inter"] * problem.itemsize % 16:
            return f"{TMA} must be 0: rows of {problem['inter']} {problem.dtype_name} are no multiple of 16 bytes"
    return _device_limit(config, problem.dtype_name, device)


@lru_cache(maxsize=1 << 15)  # asked of thousands of configs, for each problem
def _device_limit(config: KernelConfig, dtype: str, device: DeviceSpec) -> str | None:
    """The reason why a device cannot run a config for any problem of a dtype, or None."""
    m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    if dtype == "fp8e4m3" and SCALED_BLOCK % k:
        return f"BLOCK_SIZE_K must divide {SCALED_BLOCK}, the length that a scale is for, but is {k}"
    if accumulators(config, device) > _MOST_ACCUMULATORS:
        return f"num_warps must be more for a tile of BLOCK_SIZE_M={m} by BLOCK_SIZE_N={n}: a thread has 255 registers"
    return too_much_smem(smem_bytes(config, dtype, device), device, "BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K")


def uses_tma(config: KernelConfig) -> bool:
    return dict(config.meta).get(TMA) == 1


def is_asynchronous(config: KernelConfig, dtype: str, device: DeviceSpec) -> bool:
    """Whether the tile's product runs on Hopper's wgmma, which takes 64 rows and four warps, or Blackwell's tcgen05."""
    rows = config["BLOCK_SIZE_N"] if swaps(config, dtype, device) else config["BLOCK_SIZE_M"]
    return device.arch in ASYNC_PRODUCT_ARCHS and rows >= 64 and config.num_warps >= 4


def smem_bytes(config: KernelConfig, dtype: str, device: DeviceSpec) -> int:
    """Shared memory of one program, as binaries of Triton 3.6 and 3.9 say it, rounded up: the loads in flight, of which
    a synchronous product reads the last stage from registers; of fp8 its scales; the barriers of TMA."""
    m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    scaled = dtype == "fp8e4m3"
    stages = config.num_stages if is_asynchronous(config, dtype, device) else max(config.num_stages - 1, 1)
    size = (m + n) * k * (1 if scaled else 2) * stages + 4 * (m + n) * scaled
    return int(size) + (8 * config.num_stages + 16) * uses_tma(config)


def accumulators(config: KernelConfig, device: DeviceSpec) -> float:
    """float32 registers of one thread for the tile."""
    area: int = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"]
    return area / (device.warp_size * config.num_warps)


def residents(config: KernelConfig, dtype: str, device: DeviceSpec) -> int:
    """How many programs one SM holds at a time, by shared memory, registers and threads."""
    return programs_that_fit(
        smem_bytes(config, dtype, device),
        accumulators(config, device),
        config.num_warps,
        device.smem_per_sm_bytes,
        device.registers_per_sm,
    )


def in_engine_words(config: KernelConfig) -> dict[str, Any]:
    """A row of a tuned file: the knobs in the order in which the engines write them, USE_TMA as true or false."""
    row: dict[str, Any] = {knob: config[knob] for knob in KNOBS}
    return row | ({TMA: uses_tma(config)} if TMA in dict(config.meta) else {})


#: vLLM does without sorting where each token's experts are hardly ever another token's as well.
_SPARSITY = 4
#: SGLang's kernel lets the next one start early for at most so many rows of its input.
_EARLY_ROWS = 512


@dataclass(frozen=True)
class Product:
    """One of the two products of a layer: (rows, k) times the chosen experts of (experts, n, k).

    The first has a row of input a token, which `top_k` rows of output share; the second a row of its own for each, and
    multiplies it with the routing weight.
    """

    problem: Problem
    down: bool

    @property
    def n(self) -> int:
        return self.problem["hidden"] if self.down else 2 * self.problem["inter"]

    @property
    def k(self) -> int:
        return self.problem["inter"] if self.down else self.problem["hidden"]

    @property
    def rows(self) -> int:
        """Rows of the output: tokens times topk."""
        return self.problem["tokens"] * self.problem["topk"]

    @property
    def input_rows(self) -> int:
        return self.rows if self.down else self.problem["tokens"]

    @property
    def top_k(self) -> int:
        return 1 if self.down else self.problem["topk"]

    @property
    def is_scaled(self) -> bool:
        return self.problem.dtype == "fp8e4m3"

    @property
    def is_unsorted(self) -> bool:
        """Whether vLLM launches it with a block for each row, in the rows' order."""
        return engine_of(self.problem) == VLLM and self.rows * _SPARSITY <= self.problem["experts"]

    def sorted_length(self, block_m: int) -> int:
        """Entries of the sorted rows' list: room for the most blocks that a routing can make."""
        rows, experts = self.rows, self.problem["experts"]
        if engine_of(self.problem) == VLLM:
            most = rows + experts * (block_m - 1)
            return min(rows * block_m, most) if rows < experts else most
        # SGLang counts one expert more, for rows that are another rank's, and rounds up to four.
        most = rows * block_m if rows < experts + 1 else rows + (experts + 1) * (block_m - 1)
        return -(-most // 4) * 4

    def padded_rows(self, block_m: int) -> int:
        """The kernel's EM with blocks of so many rows: rows that the grid covers, most of which may find nothing to
        do."""
        if self.is_unsorted:
            return self.rows * block_m
        length = self.sorted_length(block_m)
        if engine_of(self.problem) == VLLM and self.input_rows < block_m:
            return min(length, self.rows * block_m)
        return length

    def programs(self, config: KernelConfig) -> int:
        """The size of the grid."""
        block_m, block_n = int(config["BLOCK_SIZE_M"]), int(config["BLOCK_SIZE_N"])
        return -(-self.padded_rows(block_m) // block_m) * -(-self.n // block_n)

    def numbers(self, config: KernelConfig) -> dict[str, int]:
        """The kernel's integers, which Triton specialises on whether they are 1 or multiples of 16. All tensors are
        contiguous: x (input rows, k), w (experts, n, k), y (rows, n), and their scales."""
        n, k, scaled = self.n, self.k, self.is_scaled
        blocks_n, blocks_k = -(-n // SCALED_BLOCK), -(-k // SCALED_BLOCK)
        return {
            "N": n,
            "K": k,
            "EM": self.padded_rows(config["BLOCK_SIZE_M"]),
            "num_valid_tokens": self.rows,
            "stride_am": k,
            "stride_ak": 1,
            "stride_be": n * k,
            "stride_bk": 1,
            "stride_bn": k,
            "stride_cm": n,
            "stride_cn": 1,
            "stride_asm": blocks_k * scaled,
            "stride_ask": int(scaled),
            "stride_bse": blocks_n * blocks_k * scaled,
            "stride_bsk": int(scaled),
            "stride_bsn": blocks_k * scaled,
        } | dict.fromkeys(("stride_bias_e", "stride_bias_n", "stride_bbe", "stride_bbn"), 0)

    def constants(self, config: KernelConfig, device: DeviceSpec) -> dict[str, Any]:
        """The kernel's constants and launch options, less `compute_type`, which is Triton's."""
        swapped = swaps(config, self.problem.dtype_name, device)
        block = SCALED_BLOCK * self.is_scaled
        off = (
            *("use_int8_w8a8", "use_int8_w8a16", "per_channel_quant", "HAS_BIAS", "c_sorted"),
            *("FUSE_ADD_TO_OUTPUT", "MASK_OUTPUT", "FUSE_SUM_ALL_REDUCE"),
        )
        knobs = {name: value for name, value in config.to_json().items() if name != "USE_TMA"}
        values = dict.fromkeys(off, False) | {
            "group_n": block,
            "group_k": block,
            "MUL_ROUTED_WEIGHT": self.down,
            "top_k": self.top_k,
            "ROUTER_TOPK": self.problem["topk"],
            "use_fp8_w8a8": self.is_scaled,
            "even_Ks": self.k % config["BLOCK_SIZE_K"] == 0,
            "swap_ab": swapped,
            "SWAP_AB": swapped,
            "SPLIT_K": 1,
            "naive_block_assignment": self.is_unsorted,
        }
        if engine_of(self.problem) != VLLM and device.backend == "cuda" and int(device.arch.removeprefix("sm_")) >= 90:
            # SGLang lets a kernel's start overlap the end of the one before it.
            values |= {"USE_GDC": True, "GDC_EARLY": self._is_early(config), "launch_pdl": True}
        return values | knobs

    def _is_early(self, config: KernelConfig) -> bool:
        rows = self.input_rows
        if uses_tma(config):  # sorted, with room for the padding of the experts that there may be
            rows += min(rows, self.problem["experts"] + 1) * (config["BLOCK_SIZE_M"] - 1)
        return rows <= _EARLY_ROWS

    def specialisation(self, config: KernelConfig) -> tuple[Hashable, ...]:
        """What decides on the binary, whatever the arch, beside config, dtypes and flags."""
        numbers = tuple((name, _class(value)) for name, value in self.numbers(config).items())
        even = self.k % config["BLOCK_SIZE_K"] == 0
        return numbers, self.top_k, self.problem["topk"], even, self.is_unsorted, self._is_early(config)


def _class(value: int) -> tuple[bool, bool, bool]:
    """What Triton's binaries look at of an integer: whether it is 1, a multiple of 16, or needs 64 bits."""
    return value == 1, value % 16 == 0, value >= 2**31

"""Knobs of the engines' kernel, their limits on a device, and the kernel's arguments by name, without torch.

The engines use different parameter names and pass different arguments. The parameters of the installed kernel are
filled in by name, so each kernel gets the arguments that it has. A kernel with an unknown parameter is refused with an
error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from ...datasets import DeviceSpec, KernelConfig, Problem
from ..config_limits import ASYNC_PRODUCT_ARCHS, TMA_ARCHS, KnobValues, programs_that_fit, too_much_smem
from .engines import SCALED_BLOCK, SGLANG, VLLM, engine_of, swaps, tuner_space

KNOBS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
#: The second product's knob: SGLang loads both operands with TMA if its tuned file has USE_TMA.
TMA = "USE_TMA"
#: All BLOCK_SIZE_M that the engines' tuners measure; inputs hold a list of sorted rows for each of them.
BLOCKS_M = (16, 32, 64, 128, 256)
#: Valid values of each knob. They include values that the tuners do not measure, but default configs and shipped files
#: contain.
_VALID: dict[str, tuple[str, Sequence[int]]] = {
    "BLOCK_SIZE_M": ("16, 32, 64, 128 or 256", BLOCKS_M),
    "BLOCK_SIZE_N": ("32, 64, 128 or 256", (32, 64, 128, 256)),
    "BLOCK_SIZE_K": ("32, 64, 128 or 256", (32, 64, 128, 256)),
    "GROUP_SIZE_M": ("between 1 and 1024", range(1, 1025)),
    "num_warps": ("2, 4, 8 or 16", (2, 4, 8, 16)),
    "num_stages": ("between 1 and 8", range(1, 9)),
    TMA: ("0 or 1", (0, 1)),
}
#: Most accumulator registers per thread: with 512 no config fits, and compiling took up to a minute (Triton 3.6).
_MOST_ACCUMULATORS = 256


@cache
def full_space(down: bool) -> tuple[KernelConfig, ...]:
    """Return the configs that SGLang's tuner measures; for the second product (`down`) each with and without TMA.

    >>> len(full_space(False)), len(full_space(True))
    (1920, 3840)
    """
    space = tuner_space(SGLANG, "bf16")
    return tuple(with_tma(config, tma) for tma in (0, 1) for config in space) if down else space


@lru_cache(maxsize=1 << 14)
def with_tma(config: KernelConfig, tma: int) -> KernelConfig:
    """Return a config of the second product: `config` with USE_TMA set to `tma`."""
    return KernelConfig.of(**config.to_json() | {TMA: tma})


@cache
def values_of(family: str, knobs: tuple[str, ...]) -> KnobValues:
    """Return the valid values of each of these knobs; error messages name the family."""
    return KnobValues.in_words(family, {knob: _VALID[knob] for knob in knobs})


def wrong_for(config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
    """Return why a config with valid knobs cannot run a problem on a device, or None."""
    if uses_tma(config):
        if engine_of(problem) == VLLM:
            return f"{TMA} must be 0: vLLM's kernel does not load with TMA"
        if device.backend != "cuda" or device.arch not in TMA_ARCHS:
            return f"{TMA} must be 0: {device.arch} has no TMA"
        if problem["inter"] * problem.itemsize % 16:
            return f"{TMA} must be 0: rows of {problem['inter']} {problem.dtype_name} are not a multiple of 16 bytes"
    return _device_limit(config, problem.dtype_name, device)


@lru_cache(maxsize=1 << 15)  # called for thousands of configs per problem
def _device_limit(config: KernelConfig, dtype: str, device: DeviceSpec) -> str | None:
    """Return why a device cannot run a config for any problem of a dtype, or None."""
    m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    if dtype == "fp8e4m3" and SCALED_BLOCK % k:
        return f"BLOCK_SIZE_K must divide {SCALED_BLOCK}, the block length of a scale, but is {k}"
    if accumulators(config, device) > _MOST_ACCUMULATORS:
        return (
            f"num_warps must be more than {config.num_warps} for BLOCK_SIZE_M={m} and BLOCK_SIZE_N={n}: a thread "
            "has 255 registers"
        )
    return too_much_smem(smem_bytes(config, dtype, device), device, "BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K")


def uses_tma(config: KernelConfig) -> bool:
    """Return whether a config loads its operands with TMA."""
    return dict(config.meta).get(TMA) == 1


def is_asynchronous(config: KernelConfig, dtype: str, device: DeviceSpec) -> bool:
    """Return whether a tile's product runs on Hopper's wgmma (64 rows and four warps) or Blackwell's tcgen05."""
    rows = config["BLOCK_SIZE_N"] if swaps(config, dtype, device) else config["BLOCK_SIZE_M"]
    return device.arch in ASYNC_PRODUCT_ARCHS and rows >= 64 and config.num_warps >= 4


def smem_bytes(config: KernelConfig, dtype: str, device: DeviceSpec) -> int:
    """Return the shared memory of one program in bytes, rounded up from binaries of Triton 3.6 and 3.9.

    It consists of the loads in flight (a synchronous product reads its last stage from registers), the scales of fp8,
    and TMA's barriers.
    """
    m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    scaled = dtype == "fp8e4m3"
    stages = config.num_stages if is_asynchronous(config, dtype, device) else max(config.num_stages - 1, 1)
    size = (m + n) * k * (1 if scaled else 2) * stages + 4 * (m + n) * scaled
    return int(size) + (8 * config.num_stages + 16) * uses_tma(config)


def accumulators(config: KernelConfig, device: DeviceSpec) -> float:
    """Return the float32 accumulator registers per thread."""
    area: int = config["BLOCK_SIZE_M"] * config["BLOCK_SIZE_N"]
    return area / (device.warp_size * config.num_warps)


def residents(config: KernelConfig, dtype: str, device: DeviceSpec) -> int:
    """Return how many programs fit on one SM, as limited by shared memory, registers and threads."""
    return programs_that_fit(
        smem_bytes(config, dtype, device),
        accumulators(config, device),
        config.num_warps,
        device.smem_per_sm_bytes,
        device.registers_per_sm,
    )


def file_entry(config: KernelConfig) -> dict[str, Any]:
    """Return a config as a row of a tuned file, with the engines' order of knobs and USE_TMA as a bool."""
    row: dict[str, Any] = {knob: config[knob] for knob in KNOBS}
    return row | ({TMA: uses_tma(config)} if TMA in dict(config.meta) else {})


#: vLLM does not sort rows if the number of experts is at least this many times the rows, so that tokens rarely share
#: an expert.
_SPARSITY = 4
#: SGLang's kernel lets the next kernel start early if its input has at most this many rows.
_EARLY_ROWS = 512


@dataclass(frozen=True)
class Product:
    """One of the two matrix products of an MoE layer: inputs (rows, k) times the chosen experts of w (experts, n, k).

    In the first product, `top_k` rows of output share one input row per token. In the second, each row has its own
    input, and is multiplied by its routing weight.
    """

    problem: Problem
    down: bool

    @property
    def n(self) -> int:
        """Columns of the output."""
        return self.problem["hidden"] if self.down else 2 * self.problem["inter"]

    @property
    def k(self) -> int:
        """Columns of the input."""
        return self.problem["inter"] if self.down else self.problem["hidden"]

    @property
    def rows(self) -> int:
        """Rows of the output: tokens times topk."""
        return self.problem["tokens"] * self.problem["topk"]

    @property
    def input_rows(self) -> int:
        """Rows of the input."""
        return self.rows if self.down else self.problem["tokens"]

    @property
    def top_k(self) -> int:
        """Rows of output per row of input."""
        return 1 if self.down else self.problem["topk"]

    @property
    def is_scaled(self) -> bool:
        """True for block-scaled fp8."""
        return self.problem.dtype == "fp8e4m3"

    @property
    def is_unsorted(self) -> bool:
        """True if vLLM does not sort the rows by expert, but launches one block per row, in their given order."""
        return engine_of(self.problem) == VLLM and self.rows * _SPARSITY <= self.problem["experts"]

    def sorted_length(self, block_m: int) -> int:
        """Return the length of the engine's list of sorted rows, padded to blocks of `block_m`, for any routing."""
        rows, experts = self.rows, self.problem["experts"]
        if engine_of(self.problem) == VLLM:
            most = rows + experts * (block_m - 1)
            return min(rows * block_m, most) if rows < experts else most
        # SGLang adds one expert, for rows of other ranks, and rounds up to a multiple of four.
        most = rows * block_m if rows < experts + 1 else rows + (experts + 1) * (block_m - 1)
        return -(-most // 4) * 4

    def padded_rows(self, block_m: int) -> int:
        """Return the kernel's argument EM: the rows that the grid covers, padded to blocks of `block_m`."""
        if self.is_unsorted:
            return self.rows * block_m
        length = self.sorted_length(block_m)
        if engine_of(self.problem) == VLLM and self.input_rows < block_m:
            return min(length, self.rows * block_m)
        return length

    def programs(self, config: KernelConfig) -> int:
        """Return the number of programs that a launch of the kernel with this config starts."""
        block_m, block_n = int(config["BLOCK_SIZE_M"]), int(config["BLOCK_SIZE_N"])
        return -(-self.padded_rows(block_m) // block_m) * -(-self.n // block_n)

    def numbers(self, config: KernelConfig) -> dict[str, int]:
        """Return the kernel's integer arguments by name.

        Triton specializes them on being 1 or multiples of 16. All tensors are contiguous: x (input rows, k), w
        (experts, n, k), y (rows, n), and their scales.
        """
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
        """Return the kernel's constants and launch options, except `compute_type`, which needs Triton."""
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
            # SGLang overlaps a kernel's start with the end of the previous kernel.
            values |= {"USE_GDC": True, "GDC_EARLY": self._is_early(config), "launch_pdl": True}
        return values | knobs

    def _is_early(self, config: KernelConfig) -> bool:
        """Return whether SGLang's kernel lets the next kernel start early (programmatic dependent launch)."""
        rows = self.input_rows
        if uses_tma(config):  # its input is sorted and padded to whole blocks of each expert
            rows += min(rows, self.problem["experts"] + 1) * (config["BLOCK_SIZE_M"] - 1)
        return rows <= _EARLY_ROWS

    def specialisation(self, config: KernelConfig) -> tuple[Hashable, ...]:
        """Return what determines the compiled binary in addition to architecture, config, dtypes and flags."""
        numbers = tuple((name, _class(value)) for name, value in self.numbers(config).items())
        even = self.k % config["BLOCK_SIZE_K"] == 0
        return numbers, self.top_k, self.problem["topk"], even, self.is_unsorted, self._is_early(config)


def _class(value: int) -> tuple[bool, bool, bool]:
    """Return whether an integer is 1, a multiple of 16, or needs 64 bits: Triton specializes on these."""
    return value == 1, value % 16 == 0, value >= 2**31

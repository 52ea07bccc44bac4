"""What the engines pass to their kernel, by the names of its parameters: shapes on the host, without torch.

The engines differ in what they call things and in what they pass; the parameters of the kernel that is installed are
filled in by name, so each gets what it has, and one that nobody here knows is refused by name.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ...datasets import DeviceSpec, KernelConfig, Problem
from .engines import SCALED_BLOCK, VLLM, engine_of, swaps
from .space import uses_tma

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

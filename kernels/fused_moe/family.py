"""The two products of a serving engine's MoE layer as families, without torch.

This file has what predicting and pruning need: the ranker's features of a product and its configs, and an analytic
estimate of its time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup
from ..config_table import L2_OVER_DRAM, ConfigTable, TiledWork
from ..gemm_family import Configs, DeclaredFamily, Groups
from ..grouped_gemm.group_sizes import typical_sizes
from ..numerics import instruction_of
from .engines import SCALED_BLOCK, SGLANG, VLLM, Layer
from .launching import (
    KNOBS,
    TMA,
    Product,
    accumulators,
    full_space,
    is_asynchronous,
    residents,
    smem_bytes,
    uses_tma,
    values_of,
    wrong_for,
)

# Constants of the analytic estimate.
# Rate of Hopper's synchronous products relative to its asynchronous ones (vendor documentation of mma.sync).
_SYNCHRONOUS_RATE = 0.62
# With more accumulator registers per thread than this, kernels spill; they are assumed to run at half the rate.
_SPILLING, _SPILLED_RATE = 200, 0.5
# Approximate times in microseconds: a load from memory, a program without work, and a launch.
_LATENCY_US, _EMPTY_PROGRAM_US, _LAUNCH_US = 0.8, 0.6, 2.0
# Latency of the loads of one step of BLOCK_SIZE_K, in microseconds; shorter, because most of them hit the L2 cache.
_STEP_LATENCY_US = 0.5

_PROBLEM_FEATURES = (
    "log_tokens",
    "log_experts",
    "log_topk",
    "log_n",
    "log_k",
    "log_rows",
    "log_rows_per_expert",
    "log_active",
    "log_flops",
    "intensity",
    "fp8",
    "vllm",
    "unsorted",
    "sm_count",
    "flops_per_byte_limit",
)
CONFIG_FEATURES = (
    "block_m",
    "block_n",
    "block_k",
    "group_m",
    "num_warps",
    "num_stages",
    "tma",
    "tile_area",
    "smem_bytes",
    "residents",
    "accumulators",
    "asynchronous",
    "in_flight_bytes_per_sm",
)
#: The config columns that determine the work and its estimated time.
_DECIDING = (
    "block_m",
    "block_n",
    "block_k",
    "num_stages",
    "residents",
    "accumulators",
    "asynchronous",
    "in_flight_bytes_per_sm",
)
_MIXED_FEATURES = (
    "log_tiles",
    "log_rounds",
    "round_efficiency",
    "log_empty_programs",
    "padding_m",
    "padding_n",
    "padding_k",
    "steps",
    "stages_over_steps",
    "m_blocks_per_expert",
    "n_tiles",
    "log_compute_us",
    "log_dram_us",
    "log_l2_us",
    "log_estimate_us",
)
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


@remembered(maxsize=64)
def _space(configs: tuple[KernelConfig, ...], dtype: str, device: DeviceSpec) -> ConfigTable:
    """Return a table of the feature columns (CONFIG_FEATURES) that depend only on configs, dtype and device."""
    rows = []
    for config in configs:
        m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
        held = residents(config, dtype, device)
        in_flight = held * max(config.num_stages - 1, 1) * (m + n) * k * (1 if dtype == "fp8e4m3" else 2)
        rows.append(
            (
                *(m, n, k, config["GROUP_SIZE_M"], config.num_warps, config.num_stages, uses_tma(config), m * n),
                *(smem_bytes(config, dtype, device), held, accumulators(config, device)),
                *(is_asynchronous(config, dtype, device), in_flight),
            )
        )
    columns = dict(zip(CONFIG_FEATURES, np.array(rows, np.float64).T, strict=True))
    return ConfigTable(len(_PROBLEM_FEATURES), CONFIG_FEATURES, columns, _DECIDING)


def _weights(product: Product) -> tuple[NDArray[np.int64], int]:
    """Return the rows of each expert under uniform routing, (experts,), and the number of experts that have rows."""
    sizes = typical_sizes(product.rows, product.problem["experts"])
    return sizes, max(int((sizes > 0).sum()), 1)


def _work(product: Product, device: DeviceSpec, space: ConfigTable) -> Mapping[str, NDArray[np.float64]]:
    """Return the features that depend on both a product and a config, and "estimate_us", by name, (n_kinds,).

    A kind is a distinct combination of the columns `_DECIDING` of the configs in `space`. The features describe the
    tiles that have rows, and the time of each bottleneck: the products of the busiest SM, weights from memory, and
    tiles from the L2 cache. The bytes in flight limit the memory bandwidth (Little's law).
    """
    block_m, block_n, block_k, stages, held, accumulated, asynchronous, in_flight = space.combinations
    itemsize, n, k = product.problem.itemsize, product.n, product.k
    sizes, active = _weights(product)
    blocks = [int(block) for block in space.ms]
    in_use = [product.rows if product.is_unsorted else np.ceil(sizes / block).sum() for block in blocks]
    m_blocks = np.array(in_use, np.float64)[space.m]
    launched_m = np.array([-(-product.padded_rows(block) // block) for block in blocks], np.float64)[space.m]
    n_tiles, steps = np.ceil(n / block_n), np.ceil(k / block_k)
    empty = np.maximum(launched_m - m_blocks, 0.0) * n_tiles
    work = TiledWork(device, held, np.maximum(m_blocks * n_tiles, 1.0), steps)
    rate = device.matrix_tflops_of("fp8e4m3" if product.is_scaled else "bf16") * 1e6
    rate = (
        rate
        * np.where(asynchronous > 0, 1.0, _SYNCHRONOUS_RATE)
        * np.where(accumulated > _SPILLING, _SPILLED_RATE, 1.0)
    )
    compute_us = work.most_tiles * steps * 2.0 * block_m * block_n * block_k * device.sm_count / rate
    touched = active * float(n) * k * itemsize + product.input_rows * float(k) * itemsize + product.rows * 2.0 * n
    bandwidth = device.copy_bandwidth_gbs * 1e3  # bytes per us
    busy = np.minimum(work.tiles, work.slots) / held
    dram_us = touched / np.minimum(bandwidth, busy * in_flight / _LATENCY_US)
    l2_us = work.moved_us(work.tiles * steps * (block_m + block_n) * block_k * itemsize, L2_OVER_DRAM)
    # Each round first waits for its first loads, and then each step takes its share of the pipelined latency.
    waiting_us = work.rounds * steps * _STEP_LATENCY_US / np.maximum(stages - 1, 1)
    estimate_us = np.maximum(np.maximum(compute_us, waiting_us), np.maximum(l2_us, dram_us))
    estimate_us = estimate_us + _LATENCY_US * work.rounds + empty / work.slots * _EMPTY_PROGRAM_US + _LAUNCH_US
    times_us = {"compute_us": compute_us, "dram_us": dram_us, "l2_us": l2_us, "estimate_us": estimate_us}
    return work.columns((product.rows, n, k), (block_m, block_n, block_k), m_blocks, n_tiles, **times_us) | {
        "estimate_us": estimate_us,
        "log_empty_programs": np.log2(empty + 1.0),
        "steps": steps,
        "stages_over_steps": stages / steps,
        "m_blocks_per_expert": work.tiles / n_tiles / active,
    }


def estimates(product: Product, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """Return an analytic estimate of each config's time for a product in microseconds, (n_configs,).

    It separates good tiles from bad ones, but ignores the order in which tiles share the L2 cache (GROUP_SIZE_M) and
    the quality of the compiled code.
    """
    if not len(configs):
        return np.empty(0)
    space = _space(tuple(configs), product.problem.dtype_name, device)
    return _work(product, device, space)["estimate_us"][space.row_of_config]


def feature_groups(product: Product, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[FeatureGroup, ...]:
    """Return the features in groups: of the problem, of the config, and of the work of both together."""
    problem, n, k = product.problem, product.n, product.k
    space = _space(tuple(configs), problem.dtype_name, device)
    work = _work(product, device, space)
    _, active = _weights(product)
    flops = 2.0 * product.rows * n * k
    touched = active * float(n) * k * problem.itemsize
    of_call = [
        *(np.log2(problem[dim]) for dim in ("tokens", "experts", "topk")),
        *(np.log2(size) for size in (n, k, product.rows, product.rows / problem["experts"], active, flops)),
        np.log2(flops / touched),
        product.is_scaled,
        VLLM in problem.flags,
        product.is_unsorted,
        device.sm_count,
        device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
    ]
    return space.groups([of_call], [work[name] for name in _MIXED_FEATURES])


DTYPES = ("bf16", "fp16", "fp8e4m3")
UP, DOWN = "fused_moe", "fused_moe_down"
#: Largest dimensions: many more experts than any model has, and sizes that the kernel counts in 32 bits.
LARGEST = {"experts": 65536, "topk": 65536, "tokens": 2**24, "hidden": 2**20, "inter": 2**20}


class FusedMoeFamily(DeclaredFamily):
    """Base class of the families of both products of an MoE layer: all that predicting and pruning need.

    A problem has the dimensions of the layer on one rank. `inter` is counted after the activation, so w13 is (experts,
    2 * inter, hidden) and w2 (experts, hidden, inter). Each token chooses `topk` experts at random, as in the engines'
    tuners. fp8e4m3 has a float32 scale per 128 x 128 block of weights and per 128 elements of an activation row, and
    bf16 results. Problems for vLLM's kernel have the flag "vllm"; problems for SGLang's have no flag.
    """

    down: ClassVar[bool]
    dims = ("experts", "hidden", "inter", "tokens", "topk")
    dtypes = DTYPES
    flags = (VLLM,)
    largest: ClassVar[Mapping[str, int]] = LARGEST
    bucketed = ("tokens",)
    independent = ("tokens",)
    feature_names = FEATURE_NAMES

    def __init__(self) -> None:
        self.name = DOWN if self.down else UP  # type: ignore[misc]
        self.knobs = (*KNOBS, TMA) if self.down else KNOBS  # type: ignore[misc]
        self.values = values_of(self.name, self.knobs)

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return the 1,920 configs that SGLang's tuner measures; for the second product each with and without TMA.

        Args:
            device: If given, only configs that can run one of the family's dtypes on this device.

        >>> from foretune.kernels import find_family
        >>> [len(find_family(name).space()) for name in ("fused_moe", "fused_moe_down")]
        [1920, 3840]
        """
        space = full_space(self.down)
        if device is None:
            return space
        able = [Layer(8, 2, 1024, 1024, dtype).problem(self.name, SGLANG, 64) for dtype in ("bf16", "fp8e4m3")]
        return tuple(c for c in space if any(wrong_for(c, problem, device) is None for problem in able))

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, or None."""
        for dim in self.dims:
            if problem[dim] < 1:
                return f"{dim} must be >= 1 but is {problem[dim]}"
        if problem["topk"] > problem["experts"]:
            return f"topk must be at most experts, {problem['experts']}, but is {problem['topk']}"
        return None

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for a problem, or None."""
        if device.backend == "hip":
            return f"the engines run another kernel with other knobs on {device.name}, which is not a CUDA device"
        return wrong_for(config, problem, device)

    def numerics(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return the numerics class (configs of equal classes compute identical bits): BLOCK_SIZE_K and instruction.

        In fp8 the class also includes the instruction of the transposed tile, because the engines swap the operands of
        small tiles on some devices, and whether a tile has several scales of the weights, which are then multiplied in
        another order.
        """
        step, warps = config["BLOCK_SIZE_K"], config.num_warps
        found = step, instruction_of(config["BLOCK_SIZE_M"], warps)
        if problem.dtype != "fp8e4m3":
            return found
        columns = config["BLOCK_SIZE_N"]
        return *found, instruction_of(columns, warps), columns > SCALED_BLOCK

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        """Return the features of a problem and configs, in groups."""
        return feature_groups(Product(problem, self.down), device, configs)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return an analytic estimate of the times in microseconds, (n_configs,)."""
        return estimates(Product(problem, self.down), device, configs)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """Return the problem that a launch of the engine's kernel computes.

        Args:
            arguments: The launch's arguments by the names of the kernel's parameters.

        Raises:
            ForetuneError: An argument is missing, or topk is less than 1.
        """
        topk = "ROUTER_TOPK" if self.down else "top_k"
        needed = ("a_ptr", "b_ptr", "N", "K", "num_valid_tokens", topk)
        self.check_call(arguments, needed)
        n, k = int(arguments["N"]), int(arguments["K"])
        choices = int(arguments[topk])
        if choices < 1:
            raise ForetuneError(f"{topk} must be >= 1 but is {choices}")
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor("a_ptr", arguments["a_ptr"]),
            flags=(VLLM,) if "naive_block_assignment" in arguments else (),
            experts=int(arguments["b_ptr"].shape[0]),
            topk=choices,
            hidden=n if self.down else k,
            inter=k if self.down else n // 2,
            tokens=int(arguments["num_valid_tokens"]) // choices,
        )

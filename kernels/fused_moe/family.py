"""The products of a serving engine's MoE layer as families, without torch: what predicting and pruning need, what the
ranker sees of a product and its configs, and the analytic estimate of its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ...datasets.feature_groups import FeatureGroup
from ...model.configs_memo import remembered
from ..config_table import L2_OVER_DRAM, ConfigTable
from ..gemm_family import Configs, DeclaredFamily, Groups
from ..grouped_gemm.group_sizes import typical_sizes
from .engines import SGLANG, VLLM, Layer
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
    wrong_for,
    wrong_knob,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Of the estimate, before anything is measured.
# Hopper's synchronous products reach so much of the rate of its asynchronous ones (vendor documentation of mma.sync).
_SYNCHRONOUS_RATE = 0.62
# Accumulators of so many registers a thread leave too few for all else: what spills is taken to run at half the rate.
_SPILLING, _SPILLED_RATE = 200, 0.5
# Loading from memory takes about this long, and starting a program that finds nothing to do about that (us).
_LATENCY_US, _EMPTY_PROGRAM_US, _LAUNCH_US = 0.8, 0.6, 2.0
# A step of BLOCK_SIZE_K is loaded from the L2 more often than from memory.
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
#: What of a config the work and its time depend on.
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
    """What depends only on the configs, the dtype and the device: the columns of CONFIG_FEATURES."""
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
    columns = list(np.array(rows, np.float64).T)
    return ConfigTable(len(_PROBLEM_FEATURES), columns, [columns[CONFIG_FEATURES.index(name)] for name in _DECIDING])


@dataclass(frozen=True)
class _Work:
    """One product's work for each kind of config; all are (n_kinds,)."""

    tiles: NDArray[np.float64]
    n_tiles: NDArray[np.float64]
    steps: NDArray[np.float64]  # of BLOCK_SIZE_K, of one tile
    rounds: NDArray[np.float64]
    empty: NDArray[np.float64]  # programs that find nothing to do
    padding_m: NDArray[np.float64]
    compute_us: NDArray[np.float64]
    dram_us: NDArray[np.float64]
    l2_us: NDArray[np.float64]
    estimate_us: NDArray[np.float64]


def _weights(product: Product) -> tuple[NDArray[np.int64], int]:
    """Rows of each expert as uniform routing has them, (experts,), and how many experts have some."""
    sizes = typical_sizes(product.rows, product.problem["experts"])
    return sizes, max(int((sizes > 0).sum()), 1)


def _work(product: Product, device: DeviceSpec, space: ConfigTable) -> _Work:
    """The tiles that have rows, and the time by what holds it up: the busiest SM's products, weights from memory, tiles
    from the L2. Memory is as fast as what is in flight allows (Little's law)."""
    block_m, block_n, block_k, stages, held, accumulated, asynchronous, in_flight = space.kinds
    itemsize, n, k = product.problem.itemsize, product.n, product.k
    sizes, active = _weights(product)
    blocks = [int(block) for block in space.ms]
    in_use = [product.rows if product.is_unsorted else np.ceil(sizes / block).sum() for block in blocks]
    m_blocks = np.array(in_use, np.float64)[space.m]
    launched_m = np.array([-(-product.padded_rows(block) // block) for block in blocks], np.float64)[space.m]
    n_tiles, steps = np.ceil(n / block_n), np.ceil(k / block_k)
    tiles = np.maximum(m_blocks * n_tiles, 1.0)
    empty = np.maximum(launched_m - m_blocks, 0.0) * n_tiles
    slots = device.sm_count * held
    rounds = np.ceil(tiles / slots)
    busiest = np.minimum(rounds * held, np.ceil(tiles / device.sm_count))
    rate = device.matrix_tflops_of("fp8e4m3" if product.is_scaled else "bf16") * 1e6
    rate = (
        rate
        * np.where(asynchronous > 0, 1.0, _SYNCHRONOUS_RATE)
        * np.where(accumulated > _SPILLING, _SPILLED_RATE, 1.0)
    )
    compute_us = busiest * steps * 2.0 * block_m * block_n * block_k * device.sm_count / rate
    touched = active * float(n) * k * itemsize + product.input_rows * float(k) * itemsize + product.rows * 2.0 * n
    bandwidth = device.copy_bandwidth_gbs * 1e3  # bytes a us
    busy = np.minimum(tiles, slots) / held
    dram_us = touched / np.minimum(bandwidth, busy * in_flight / _LATENCY_US)
    l2_us = tiles * steps * (block_m + block_n) * block_k * itemsize / (bandwidth * L2_OVER_DRAM)
    # Each round begins by waiting for its first loads, and no step is quicker than its share of those in flight.
    waiting_us = rounds * steps * _STEP_LATENCY_US / np.maximum(stages - 1, 1)
    estimate_us = np.maximum(np.maximum(compute_us, waiting_us), np.maximum(l2_us, dram_us)) + _LATENCY_US * rounds
    estimate_us = estimate_us + empty / slots * _EMPTY_PROGRAM_US + _LAUNCH_US
    padding_m = m_blocks * block_m / product.rows
    return _Work(tiles, n_tiles, steps, rounds, empty, padding_m, compute_us, dram_us, l2_us, estimate_us)


def estimates(product: Product, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
    """The analytic estimate in microseconds, (n_configs,): it tells a good tile from a bad one, and nothing of the
    order in which tiles share the L2 (GROUP_SIZE_M) or of how well the compiler does."""
    if not len(configs):
        return np.empty(0)
    space = _space(tuple(configs), product.problem.dtype_name, device)
    return _work(product, device, space).estimate_us[space.kind]


def feature_groups(product: Product, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[FeatureGroup, ...]:
    """The features: those of the call, of the config, and of what of both decides on the work."""
    problem, n, k = product.problem, product.n, product.k
    space = _space(tuple(configs), problem.dtype_name, device)
    work = _work(product, device, space)
    _, block_n, block_k, stages, held, *_ = space.kinds
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
    of_kinds = [
        np.log2(work.tiles),
        np.log2(work.rounds),
        work.tiles / (work.rounds * device.sm_count * held),
        np.log2(work.empty + 1.0),
        work.padding_m,
        work.n_tiles * block_n / n,
        work.steps * block_k / k,
        work.steps,
        stages / work.steps,
        work.tiles / work.n_tiles / active,
        work.n_tiles,
        np.log2(work.compute_us),
        np.log2(work.dram_us),
        np.log2(work.l2_us),
        np.log2(work.estimate_us),
    ]
    return space.groups([of_call], of_kinds)


DTYPES = ("bf16", "fp16", "fp8e4m3")
UP, DOWN = "fused_moe", "fused_moe_down"
#: Ten times as many experts as any model has, and rows that the kernel counts in 32 bits.
LARGEST = {"experts": 65536, "topk": 65536, "tokens": 2**24, "hidden": 2**20, "inter": 2**20}


class FusedMoeFamily(DeclaredFamily):
    """What predicting and pruning need, for both products of a layer.

    Problems have the dimensions of the layer on one rank, `inter` after the activation, so that w13 is (experts, 2 *
    inter, hidden) and w2 (experts, hidden, inter). Tokens choose `topk` experts at random, as in the engines' tuners.
    fp8e4m3 has a float32 scale for each 128 x 128 block of weights and each 128 of a row, and bf16 results. The flag
    "vllm" says that vLLM's kernel runs it; without it SGLang's does.
    """

    down: ClassVar[bool]
    dims = ("experts", "hidden", "inter", "tokens", "topk")
    dtypes = DTYPES
    flags = (VLLM,)
    largest: ClassVar[Mapping[str, int]] = LARGEST
    ragged: ClassVar[Mapping[str, str]] = {}
    bucketed = ("tokens",)
    feature_names = FEATURE_NAMES

    def __init__(self) -> None:
        self.name = DOWN if self.down else UP  # type: ignore[misc]
        self.knobs = (*KNOBS, TMA) if self.down else KNOBS  # type: ignore[misc]

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """The configs that SGLang's tuner tries: 1,920, and twice as many of the second product, with TMA or without;
        with a device those that run one of its dtypes there.

        >>> from foretune.kernels import find_family
        >>> [len(find_family(name).space()) for name in ("fused_moe", "fused_moe_down")]
        [1920, 3840]
        """
        space = full_space(self.down)
        if device is None:
            return space
        able = [Layer(8, 2, 1024, 1024, dtype).problem(self.name, SGLANG, 64) for dtype in ("bf16", "fp8e4m3")]
        return tuple(c for c in space if any(wrong_for(c, problem, device) is None for problem in able))

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        return wrong_knob(knobs, self.down)

    def wrong_problem(self, problem: Problem) -> str | None:
        for dim in self.dims:
            if problem[dim] < 1:
                return f"{dim} must be >= 1 but is {problem[dim]}"
        if problem["topk"] > problem["experts"]:
            return f"topk must be at most experts, {problem['experts']}, but is {problem['topk']}"
        return None

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if device.backend == "hip":
            return f"the engines run other kernels and knobs on {device.name}"
        return wrong_for(config, problem, device)

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        return feature_groups(Product(problem, self.down), device, configs)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        return estimates(Product(problem, self.down), device, configs)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        topk = "ROUTER_TOPK" if self.down else "top_k"
        needed = ("a_ptr", "b_ptr", "N", "K", "num_valid_tokens", topk)
        if missing := [name for name in needed if name not in arguments]:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}, by which {self.name} knows its problem: "
                "prune(..., problem=a function of the arguments) says it otherwise"
            )
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

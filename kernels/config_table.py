"""Features of tiled products: of a config, and of how a call's tiles are distributed over a device.

`ConfigTable` groups features by what they depend on, so that repeated values are computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..datasets import DeviceSpec, KernelConfig
from ..datasets.feature_groups import FeatureGroup
from .config_limits import Knobs, accumulator_registers, programs_that_fit

Floats: TypeAlias = NDArray[np.float64]

#: Features of all tiled products, in this order: the block sizes, the config, and a call's tiles.
BLOCKS = ("block_m", "block_n", "block_k", "group_m")
TILE = ("num_warps", "num_stages", "tile_area", "tile_aspect", "smem_bytes", "programs_per_sm")
TILING = (
    "log_tiles",
    "log_rounds",
    "round_efficiency",
    "padding_m",
    "padding_n",
    "padding_k",
    "steps_per_tile",
    "log_steps_per_program",
)
#: L2 delivers about this multiple of the copy bandwidth (H100/H200 microbenchmarks: 5.5-7 TB/s read against 3-4.3).
L2_OVER_DRAM = 1.6


class ConfigTable:
    """Features in three groups: of the call, of the config, and of the call with a few of the config's knobs.

    The columns are in this order. Configs with equal `deciding` values share the features of the last group, which are
    computed once for each distinct combination.

    Args:
        first: The number of columns of the call.
        names: The features of the config alone.
        columns: Values of the configs by name, each (n_configs,).
        deciding: The names of the values that the last group depends on.

    >>> columns = {"a": np.array([4.0, 8.0, 8.0]), "b": np.array([2.0, 3.0, 2.0])}
    >>> table = ConfigTable(1, ["a"], columns, ["b"])
    >>> table.combinations.tolist(), table.row_of_config.tolist()
    ([[2.0, 3.0]], [0, 1, 0])
    >>> from foretune.datasets.feature_groups import joined
    >>> joined(table.groups([[7.0]], [10 * table.combinations[0]])).tolist()
    [[7.0, 4.0, 20.0], [7.0, 8.0, 30.0], [7.0, 8.0, 20.0]]
    """

    def __init__(
        self, first: int, names: Sequence[str], columns: Mapping[str, Floats], deciding: Sequence[str]
    ) -> None:
        own = np.stack([columns[name] for name in names], axis=1).astype(np.float32)  # (n_configs, len(names))
        self.own = FeatureGroup(
            columns=tuple(range(first, first + len(names))),
            values=own[None],
            row_of_config=np.arange(len(own)),
            lasting=True,
        )
        # (len(deciding), n_combinations), and (n_configs,)
        self.combinations, self.row_of_config = distinct(*(columns[name] for name in deciding))
        #: The distinct values of the first `deciding` column, and each combination's index among them.
        self.ms, self.m = np.unique(self.combinations[0], return_inverse=True)
        self.same_row = np.zeros(len(self.row_of_config), np.intp)

    def groups(self, of_calls: Sequence[Sequence[float]], of_kinds: Sequence[Floats]) -> tuple[FeatureGroup, ...]:
        """Return the feature groups of several problems.

        Args:
            of_calls: The features of each call, (n_problems, first).
            of_kinds: The columns of the last group, each (n_problems, n_combinations) or broadcastable to this shape.
        """
        first, last = len(of_calls[0]), len(of_calls[0]) + len(self.own.columns)
        calls = np.array(of_calls, dtype=np.float32)[:, None]
        values = np.empty((len(of_kinds), len(of_calls), self.combinations.shape[1]), np.float32)
        for column, figures in zip(values, of_kinds, strict=True):
            column[:] = figures
        mixed = np.ascontiguousarray(values.transpose(1, 2, 0))
        return (
            FeatureGroup(tuple(range(first)), calls, self.same_row),
            self.own,
            FeatureGroup(tuple(range(last, last + len(values))), mixed, self.row_of_config),
        )


def distinct(*columns: Floats) -> tuple[Floats, NDArray[np.intp]]:
    """Return the distinct combinations of the columns' values, and for each entry the index of its combination.

    The combinations are (n_columns, n_combinations).
    """
    rows, row = np.unique(np.stack(columns), axis=1, return_inverse=True)
    return rows, row.ravel()  # NumPy 2.0 gives it two axes


def resident_programs(
    configs: Sequence[Knobs], smem_bytes: Iterable[float], accumulators: Iterable[float], device: DeviceSpec
) -> Floats:
    """Return how many programs of each config run on one SM of the device at a time, (n_configs,).

    This is the number that fits, limited by PROGRAMS_PER_SM unless that is 0 (one program per tile).

    Args:
        configs: The configs.
        smem_bytes: Shared memory of one program of each config.
        accumulators: 32-bit accumulators of one thread of each config.
        device: The device.

    >>> configs = [{"num_warps": 4, "PROGRAMS_PER_SM": programs} for programs in (0, 1)]
    >>> resident_programs(configs, [100 * 1024] * 2, [64.0] * 2, DeviceSpec.named("h200")).tolist()
    [2.0, 1.0]
    """
    an_sm = device.smem_per_sm_bytes, device.registers_per_sm
    resident = []
    for config, smem, held in zip(configs, smem_bytes, accumulators, strict=True):
        fits = programs_that_fit(int(smem), float(held), config["num_warps"], *an_sm)
        resident.append(min(config["PROGRAMS_PER_SM"] or fits, fits))
    return np.array(resident, dtype=np.float64)


def config_columns(
    configs: Sequence[KernelConfig],
    smem_bytes: Sequence[float],
    device: DeviceSpec,
    *,
    itemsize: int,
    rights: int = 1,
    sums: int = 1,
) -> dict[str, Floats]:
    """Return the features of a tiled product's configs by name, each (n_configs,).

    Args:
        configs: The configs; each knob is a feature with a lower-case name.
        smem_bytes: Shared memory of one program of each config.
        device: The device.
        itemsize: Bytes of one operand element.
        rights: The number of BLOCK_N-wide tiles that a program multiplies its rows with.
        sums: The number of accumulators per output element that a program holds at a time.
    """
    knobs = [config.to_json() for config in configs]
    columns = {name.lower(): np.array([one[name] for one in knobs], dtype=np.float64) for name in knobs[0]}
    m, n, k, stages = (columns[name] for name in ("block_m", "block_n", "block_k", "num_stages"))
    warps = columns["num_warps"]
    if "consumers" in columns:  # only warps that multiply one tile count
        of_a_tile = np.where(columns.get("pingpong", np.zeros_like(m)) > 0, 1, columns["consumers"])
        warps = np.where(columns["consumers"] > 0, 4 * of_a_tile, warps)
    accumulators = rights * accumulator_registers(m, n, warps)
    programs = resident_programs(knobs, smem_bytes, sums * accumulators, device)
    return columns | {
        "programs_asked": columns["programs_per_sm"],
        "num_warps": warps,
        "tile_area": m * n,
        "tile_aspect": m / n,
        "smem_bytes": np.array(smem_bytes, dtype=np.float64),
        "programs_per_sm": programs,
        **dict.fromkeys(("accumulators", "accumulators_per_thread", "accumulator_registers"), accumulators),
        "in_flight_bytes_per_sm": programs * (stages - 1) * (m + rights * n) * k * itemsize,
    }


class TiledWork:
    """The distribution of a call's tiles over a device.

    Arrays are (n_combinations,), or (n_problems, n_combinations) for several problems.

    Args:
        device: The device.
        programs: The number of programs that an SM holds.
        tiles: The number of tiles.
        steps: The number of BLOCK_K steps of one tile.
    """

    def __init__(self, device: DeviceSpec, programs: Floats, tiles: Floats, steps: Floats) -> None:
        self.device, self.tiles, self.steps = device, tiles, steps
        self.slots = device.sm_count * programs
        self.rounds: Floats = np.ceil(tiles / self.slots)
        #: The tiles of the busiest SM, which computes `rounds` tiles for each program that it holds.
        self.most_tiles: Floats = np.minimum(self.rounds * programs, np.ceil(tiles / device.sm_count))

    def compute_us(self, step_flops: Floats, matrix_tflops: float) -> Floats:
        """Return the compute time of the busiest SM in microseconds, (n_combinations,).

        `step_flops` are the FLOPs of one BLOCK_K step, and `matrix_tflops` is the device's matrix rate in TFLOP/s.
        """
        return self.most_tiles * self.steps * step_flops * self.device.sm_count / (matrix_tflops * 1e6)

    def moved_us(self, moved_bytes: Any, faster: float = 1.0) -> Any:
        """Return the time for moving bytes at `faster` times the copy bandwidth, in microseconds."""
        return moved_bytes / (self.device.copy_bandwidth_gbs * 1e3 * faster)

    def columns(
        self, dims: Sequence[Any], blocks: Sequence[Floats], m_tiles: Floats, n_tiles: Floats, **times_us: Floats
    ) -> dict[str, Floats]:
        """Return features by name: numbers and padding of tiles, steps and rounds, and the logarithm of each time.

        `dims` are M, N and K, and `blocks` are BLOCK_M, BLOCK_N and BLOCK_K.
        """
        (m, n, k), (block_m, block_n, block_k) = dims, blocks
        return {
            "log_tiles": np.log2(self.tiles),
            "log_tiles_per_sm": np.log2(self.tiles / self.device.sm_count),
            "log_rounds": np.log2(self.rounds),
            "round_efficiency": self.tiles / (self.rounds * self.slots),
            "padding_m": m_tiles * block_m / m,
            "padding_n": n_tiles * block_n / n,
            "padding_k": self.steps * block_k / k,
            "steps_per_tile": self.steps,
            "log_steps_per_program": np.log2(self.rounds * self.steps),
            "m_tiles": m_tiles,
            "n_tiles": n_tiles,
            **{f"log_{name}": np.log2(us) for name, us in times_us.items()},
        }


def alignment(size: int) -> int:
    """Return the exponent of the largest power of two that divides a size, at most 9.

    Loads and stores of rows depend on it.

    >>> alignment(1000), alignment(4096), alignment(0)
    (3, 9, 9)
    """
    return min((size & -size).bit_length() - 1, 9) if size else 9


#: One line on each feature of the families here, by name, which `foretune predict --explain` shows. Times are estimates
#: of the analytic model; a feature that begins with log_ is the binary logarithm of what its line says.
FEATURE_TEXTS: Mapping[str, str] = {
    # The problem.
    "log_groups": "groups",
    "log_active": "groups (experts) that have rows",
    "log_rows_per_active": "rows for each group that has any",
    "log_rows_per_expert": "rows for each expert",
    "skew": "rows of the largest group over the mean of all groups",
    "sizes_known": "1 if the sizes of the groups are known",
    "log_rows": "rows of the product, over all groups",
    "log_m": "rows of the product",
    "log_n": "columns of the product",
    "log_k": "length of the contraction",
    "fp8": "1 if the operands are fp8",
    "fp16": "1 if the dtype is fp16",
    "fp32": "1 if the dtype is fp32; 2 without TF32",
    "int8": "1 if the dtype is int8",
    "gelu": "1 if the activation is GELU",
    "silu": "1 if the activation is SiLU",
    "relu": "1 if the activation is ReLU",
    "bias": "1 if a bias is added",
    "a_km": "1 if a is stored transposed, as (k, m)",
    "b_kn": "1 if b is stored as (k, n)",
    "unsorted": "1 if the rows are not sorted by expert",
    "tf32_across": "operands that asynchronous fp32 products cannot read as stored",
    "a_alignment": "exponent of the largest power of 2 that divides the rows of a",
    "b_alignment": "exponent of the largest power of 2 that divides the rows of b",
    "y_alignment": "exponent of the largest power of 2 that divides the rows of the output",
    "n_alignment": "exponent of the largest power of 2 that divides n",
    "k_alignment": "exponent of the largest power of 2 that divides k",
    # The config.
    "block_m": "rows of a tile",
    "block_n": "columns of a tile",
    "block_k": "length of one step of the contraction",
    "group_m": "rows of tiles in a band, whose programs share tiles of the right operand in L2",
    "split_k": "parts of the contraction that programs share",
    "consumers": "warp groups that multiply while others load; 0 if no warps are specialized",
    "in_flight": "products that each multiplying warp group has in flight",
    "pingpong": "1 if warp groups multiply different tiles in turn",
    "tma": "1 if tiles are moved by the tensor memory accelerator",
    "tma_left": "1 if the left operand is loaded by the tensor memory accelerator",
    "tma_right": "1 if the right operand is loaded by the tensor memory accelerator",
    "tma_out": "1 if the output is stored by the tensor memory accelerator",
    "tile_area": "elements of an output tile",
    "tile_aspect": "rows over columns of a tile",
    "smem_bytes": "bytes of shared memory of one program",
    "programs_asked": "the knob PROGRAMS_PER_SM; 0 means a program for each tile",
    "programs_per_sm": "programs that an SM holds at a time",
    "residents": "programs that an SM holds at a time",
    "accumulators": "32-bit accumulators of one thread",
    "accumulators_per_thread": "32-bit accumulators of one thread",
    "accumulator_registers": "32-bit accumulators of one thread",
    "asynchronous": "1 if products are asynchronous (wgmma)",
    "in_flight_bytes_per_sm": "bytes that the programs of an SM load ahead",
    # The tiles of the problem.
    "log_tiles": "output tiles, with those of split-K",
    "log_tiles_per_sm": "output tiles for each SM",
    "log_rounds": "tiles that a program computes one after the other",
    "round_efficiency": "tiles over those that all programs could compute in the same time",
    "log_empty_programs": "programs without work, plus 1",
    "padding_m": "rows that are computed over those of the problem",
    "padding_n": "columns that are computed over those of the problem",
    "padding_k": "length of the contraction that is computed over that of the problem",
    "steps": "steps of BLOCK_K for each tile",
    "steps_per_tile": "steps of BLOCK_K for each tile",
    "log_steps_per_program": "steps of BLOCK_K that a program computes",
    "stages_over_steps": "num_stages over the steps of BLOCK_K of a tile",
    "m_tiles": "tiles along the rows",
    "n_tiles": "tiles along the columns",
    "m_tiles_per_group": "tiles along the rows of a group",
    "m_blocks_per_expert": "tiles along the rows of an expert that has any",
    "depth_per_group_over_block_k": "length of a group's contraction over BLOCK_K",
    "longest_over_share": "steps of BLOCK_K of the longest tile over those of an SM",
    "log_rows_per_group_over_block_m": "rows of a group over BLOCK_M",
    "log_m_over_block_m": "rows of the product over BLOCK_M",
    "log_n_over_block_n": "columns of the product over BLOCK_N",
    "busy_share": "share of the SMs that have work",
    "l2_reuse": "log2 of the rows and columns of operands that concurrent programs read",
    "log_l2_footprint": "rows and columns of operands that concurrent programs read",
    "band_over_l2": "log2 of the bytes that concurrent programs read over the size of L2",
    "log_bands_at_once": "bands of tiles that concurrent programs cover",
    "log_groups_at_once": "groups that concurrent programs cover",
    "band_left": "the fraction of the last band that concurrent programs cover",
    "group_left": "the fraction of the last group that concurrent programs cover",
    # Estimated times.
    "log_compute_us": "time of the busiest SM's products, in microseconds",
    "log_dram_us": "time to move the operands and the output through memory, in microseconds",
    "log_l2_us": "time to load all tiles from L2, in microseconds",
    "log_promotion_us": "time to add up the products of the steps, in microseconds",
    "log_partial_us": "time to write and add up partial sums of split-K, in microseconds",
    "roofline_us": "largest of the times of products, memory and L2, in microseconds",
    "latency_us": "time to wait for loads, in microseconds",
    "estimate_us": "estimated time of the kernel, in microseconds",
    "log_estimate_us": "estimated time of the kernel, in microseconds",
    "model_log_us": "log2 of the estimated time of the template, in microseconds",
    "model_resident": "programs that an SM holds at a time, by the analytic model",
    "model_log_rounds": "log2 of the tiles that the busiest SM computes one after the other",
    "model_fill": "share of the last round that has work",
    "model_registers": "registers of a thread, by the analytic model",
    "model_smem": "bytes of shared memory of one program, by the analytic model",
    # RMSNorm with RoPE.
    "elements_per_thread": "elements of a tile for each thread",
    "tile_bytes": "bytes of a tile",
    "head_use": "share of the tiles' heads that are not padding",
    "token_use": "share of the tiles' tokens that are not padding",
    "log_estimated_waves": "programs over those that the device holds at a time, by estimated registers",
    "estimated_wave_fill": "share of these waves' places that have a program",
    "log_partial_bytes": "bytes of the partial sums of all programs",
}

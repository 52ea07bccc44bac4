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
        columns: The features of the config alone, each (n_configs,).
        deciding: The values of the config that the last group depends on, each (n_configs,).

    >>> table = ConfigTable(1, [np.array([4.0, 8.0, 8.0])], [np.array([2.0, 3.0, 2.0])])
    >>> table.combinations.tolist(), table.row_of_config.tolist()
    ([[2.0, 3.0]], [0, 1, 0])
    >>> from foretune.datasets.feature_groups import joined
    >>> joined(table.groups([[7.0]], [10 * table.combinations[0]])).tolist()
    [[7.0, 4.0, 20.0], [7.0, 8.0, 30.0], [7.0, 8.0, 20.0]]
    """

    def __init__(self, first: int, columns: Sequence[Floats], deciding: Sequence[Floats]) -> None:
        self.own = FeatureGroup(
            columns=tuple(range(first, first + len(columns))),
            values=np.stack(columns, axis=1).astype(np.float32)[None],
            row_of_config=np.arange(len(columns[0])),
            lasting=True,
        )
        self.combinations, self.row_of_config = distinct(*deciding)  # (len(deciding), n_combinations); (n_configs,)
        #: The distinct values of the first `deciding` column, and each combination's index among them.
        self.ms, self.m = np.unique(self.combinations[0], return_inverse=True)
        self.same_row = np.zeros(len(self.row_of_config), np.intp)

    @classmethod
    def of(
        cls, first: int, names: Sequence[str], columns: Mapping[str, Floats], deciding: Sequence[str]
    ) -> ConfigTable:
        """Return a table of the features `names` of `columns`; the last group depends on those in `deciding`.

        `first` is the number of columns of the call.
        """
        return cls(first, [columns[name] for name in names], [columns[name] for name in deciding])

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
        """Return features by name: those of the tiles, and the logarithm of each time.

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

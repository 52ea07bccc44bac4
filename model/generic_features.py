"""Features of a kernel that nobody wrote features for: its dimensions, its knobs, its grid, and what its binaries say.

Names are fixed by what a family declares, so that a bundle can tell whether it still fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import BinaryFacts, DeviceSpec, KernelConfig, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What the driver keeps of each program's shared memory (CUDA programming guide, compute capability 8.x and later).
_RESERVED_SMEM_BYTES = 1024
#: Programs and threads that an SM of any kind so far can hold (CUDA programming guide, table of compute capabilities).
_MOST_PROGRAMS, _MOST_THREADS = 32, 2048
_DEVICE = ("sm_count", "flops_per_byte_limit", "smem_per_sm_bytes", "l2_bytes")
_WORK = ("log_flops", "log_bytes", "intensity")
_GRID = ("log_programs", "log_waves", "wave_fill", "log_bytes_per_program")
_BINARY = ("binary_known", "smem_bytes", "registers", "spills", "residency")


@dataclass(frozen=True)
class GenericFeatures:
    """What a family declares of itself, as columns.

    `tiles` says which knob divides which dimension.

    >>> generic = GenericFeatures(dims=("rows", "columns"), dtypes=("fp16",), flags=(), knobs=("BLOCK", "num_warps"),
    ...                           tiles={"BLOCK": "columns"})
    >>> generic.names[:4]
    ('log_rows', 'log_columns', 'log_rows_over_columns', 'itemsize')
    """

    dims: tuple[str, ...]
    dtypes: tuple[str, ...]
    flags: tuple[str, ...]
    knobs: tuple[str, ...]
    tiles: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """The columns, in order."""
        ratios = [f"log_{a}_over_{b}" for a, b in combinations(self.dims, 2)]
        tiled = [f"{what}_{knob}" for knob in self.tiles for what in ("log_tiles", "padding")]
        return (
            *(f"log_{dim}" for dim in self.dims),
            *ratios,
            "itemsize",
            *(f"dtype_{dtype}" for dtype in self.dtypes),
            *(f"flag_{flag}" for flag in self.flags),
            *_DEVICE,
            *_WORK,
            *self.knobs,
            *tiled,
            *_GRID,
            *_BINARY,
        )

    def table(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        programs: NDArray[np.float64],
        binaries: Mapping[KernelConfig, BinaryFacts],
        *,
        flops: float = 0.0,
        touched_bytes: float = 0.0,
    ) -> NDArray[np.float32]:
        """(n_configs, len(names)), finite. `programs` is the size of each config's grid, (n_configs,); `flops` and
        `touched_bytes` are of the whole problem, 0 where nobody said."""
        logs = {dim: np.log2(max(problem[dim], 1)) for dim in self.dims}
        itemsize = problem.itemsize if isinstance(problem.dtype, str) else 0
        of_problem = [
            *logs.values(),
            *(logs[a] - logs[b] for a, b in combinations(self.dims, 2)),
            itemsize,
            *(problem.dtype == dtype for dtype in self.dtypes),
            *(flag in problem.flags for flag in self.flags),
            device.sm_count,
            device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
            device.smem_per_sm_bytes,
            device.l2_bytes,
            np.log2(flops + 1),
            np.log2(touched_bytes + 1),
            flops / touched_bytes if touched_bytes else 0.0,
        ]
        columns = [np.full(len(configs), float(value)) for value in of_problem]
        columns += [np.array([_number(config, knob) for config in configs], float) for knob in self.knobs]
        for knob, dim in self.tiles.items():
            block = np.maximum(np.array([_number(config, knob) for config in configs], float), 1.0)
            size = max(problem[dim], 1)
            tiles = np.ceil(size / block)
            columns += [np.log2(tiles), tiles * block / size]
        facts = binary_columns(configs, binaries, device)
        residency = np.where(facts["binary_known"] > 0, facts["residency"], 1.0)
        slots = device.sm_count * residency
        waves = np.maximum(programs, 1.0) / slots
        columns += [
            np.log2(np.maximum(programs, 1.0)),
            np.log2(waves),
            waves / np.ceil(waves),
            np.log2(touched_bytes / np.maximum(programs, 1.0) + 1),
            *facts.values(),
        ]
        if not len(configs):
            return np.empty((0, len(columns)), np.float32)
        return np.stack(columns, axis=1).astype(np.float32)


def binary_columns(
    configs: Sequence[KernelConfig], binaries: Mapping[KernelConfig, BinaryFacts], device: DeviceSpec
) -> dict[str, NDArray[np.float64]]:
    """What the binaries say, each (n_configs,), and how many programs of each one SM holds at a time, hence; zeros
    where a binary is not known."""
    known = [binaries.get(config) for config in configs]
    facts = np.array([(0, 0, 0) if one is None else one for one in known], float).reshape(len(configs), 3)
    registers, spills, smem = facts.T
    threads = np.array([config.num_warps * device.warp_size for config in configs], float)
    by_registers = np.floor(device.registers_per_sm / np.maximum(registers * threads, 1.0))
    by_smem = np.floor(device.smem_per_sm_bytes / (smem + _RESERVED_SMEM_BYTES))
    fits = np.minimum.reduce(
        [by_registers, by_smem, np.floor(_MOST_THREADS / threads), np.full(len(configs), _MOST_PROGRAMS)]
    )
    there = np.array([one is not None for one in known], float)
    values = (there, smem, registers, spills, np.maximum(fits, 1.0) * there)
    return dict(zip(_BINARY, values, strict=True))


def _number(config: KernelConfig, knob: str) -> float:
    """A knob as a number; of a text its place in no order is any use, so it is hashed to one of a few."""
    value = config[knob]
    if value is None:
        return 0.0
    return float(value) if isinstance(value, (int, float)) else float(sum(str(value).encode()) % 64)

"""Features for kernels without features of their own: dimensions, knobs, grid, and facts about compiled binaries.

The family's declarations determine the feature names, so that a bundle can detect that they changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import BinaryFacts, DeviceSpec, Family, KernelConfig, Problem
from ..datasets.config import remembered
from ..datasets.feature_groups import FeatureGroup, joined

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Shared memory that the driver reserves for each program (CUDA programming guide, compute capability 8.x and later).
_RESERVED_SMEM_BYTES = 1024
#: The most programs and threads per SM of any NVIDIA GPU (CUDA programming guide, table of compute capabilities).
_MOST_PROGRAMS, _MOST_THREADS = 32, 2048
_DEVICE = ("sm_count", "flops_per_byte_limit", "smem_per_sm_bytes", "l2_bytes")
_WORK = ("log_flops", "log_bytes", "intensity")
_GRID = ("log_programs", "log_waves", "wave_fill", "log_bytes_per_program", "log_bytes_per_thread")
_BINARY = ("binary_known", "registers", "spills", "smem_bytes", "residency")

#: One line on each of these features; `feature_text` has those of features that are named after a declaration.
_TEXTS = {
    "itemsize": "bytes of an element; 0 if operands have different dtypes",
    "sm_count": "SMs of the device",
    "flops_per_byte_limit": "floating-point operations that the device does while it copies a byte",
    "smem_per_sm_bytes": "bytes of shared memory of an SM",
    "l2_bytes": "bytes of the L2 cache",
    "log_flops": "log2 of the floating-point operations of the problem",
    "log_bytes": "log2 of the bytes that the problem reads and writes",
    "intensity": "floating-point operations for each byte; log2 of it for matrix products",
    "num_warps": "warps of a program; those that multiply one tile, if others only load",
    "num_stages": "stages of the software pipeline",
    "num_ctas": "blocks of a cluster",
    "log_programs": "log2 of the programs in the grid",
    "log_waves": "log2 of the waves: programs over those that the device holds at a time",
    "wave_fill": "share of the waves' places that have a program",
    "log_bytes_per_program": "log2 of the problem's bytes for each program",
    "log_bytes_per_thread": "log2 of the problem's bytes for each thread",
    "binary_known": "1 if the compiled binary was seen when the bundle was trained",
    "registers": "registers of a thread in the compiled binary; 0 if unknown",
    "spills": "registers that the compiled binary spills to memory",
    "smem_bytes": "bytes of shared memory of one program",
    "residency": "programs that fit on an SM at a time; 0 if unknown",
}


def feature_text(family: Family, name: str) -> str:
    """Return a one-line description of a family's feature; "" if there is none.

    It is the family's own (`Family.feature_texts`), that of a generic feature, or one derived from a name that contains
    a knob, dimension, dtype or flag of the family, such as `log_DIM` or `padding_KNOB`.

    >>> from types import SimpleNamespace
    >>> family = SimpleNamespace(
    ...     feature_texts={}, dims=("m", "n"), knobs=("BLOCK",), flags=("bias",), dtypes=("bf16",)
    ... )
    >>> [feature_text(family, name) for name in ("log_m", "log_m_over_n", "padding_BLOCK", "mine")]
    ['log2 of m', 'log2 of m over n', 'size computed in steps of BLOCK over that of the problem', '']
    """
    if text := family.feature_texts.get(name) or _TEXTS.get(name):
        return f"log2 of the {text}" if name.startswith("log_") and not text.startswith("log2 of ") else text
    declared = {f"log_{dim}": f"log2 of {dim}" for dim in family.dims}
    declared |= {f"log_{a}_over_{b}": f"log2 of {a} over {b}" for a, b in combinations(family.dims, 2)}
    for knob in family.knobs:
        declared |= dict.fromkeys((knob, knob.lower()), f"the knob {knob}")
        declared[f"log_tiles_{knob}"] = f"log2 of the tiles of size {knob}"
        declared[f"padding_{knob}"] = f"size computed in steps of {knob} over that of the problem"
    for flag in family.flags:
        declared |= dict.fromkeys((flag, f"flag_{flag}"), f"1 with the flag {flag}")
    declared |= {f"dtype_{dtype}": f"1 if the dtype is {dtype}" for dtype in family.dtypes}
    return declared.get(name, "")


@dataclass(frozen=True)
class GenericFeatures:
    """Computes generic features from a family's declarations.

    `tiles` maps a knob to the dimension that it tiles.

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

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the feature columns, in order."""
        return (
            *(f"log_{dim}" for dim in self.dims),
            *(f"log_{a}_over_{b}" for a, b in combinations(self.dims, 2)),
            "itemsize",
            *(f"dtype_{dtype}" for dtype in self.dtypes),
            *(f"flag_{flag}" for flag in self.flags),
            *_DEVICE,
            *_WORK,
            *self.knobs,
            *(f"{what}_{knob}" for knob in self.tiles for what in ("log_tiles", "padding")),
            *_GRID,
            *_BINARY,
        )

    def table(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        programs: NDArray[np.float64],
        binaries: Mapping[KernelConfig, BinaryFacts] | None,
        *,
        flops: float = 0.0,
        touched_bytes: float = 0.0,
    ) -> NDArray[np.float32]:
        """Return the features of the configs, (n_configs, len(names)), all finite.

        Args:
            problem: The problem.
            device: The device.
            configs: The configs.
            programs: The number of programs in each config's grid, (n_configs,).
            binaries: Facts about the compiled binaries of some of the configs.
            flops: Floating-point operations of the whole problem, 0 if unknown.
            touched_bytes: Bytes read and written by the whole problem, 0 if unknown.
        """
        return joined(
            self.groups(problem, device, configs, programs, binaries, flops=flops, touched_bytes=touched_bytes)
        )

    def groups(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        programs: NDArray[np.float64],
        binaries: Mapping[KernelConfig, BinaryFacts] | None,
        *,
        flops: float = 0.0,
        touched_bytes: float = 0.0,
    ) -> tuple[FeatureGroup, ...]:
        """Return the columns of `table` in three groups: of the problem, of config and binary, and of both together.

        `binaries` must not be modified afterwards, because what is computed from it is cached.
        """
        own = _own(tuple(configs), self.knobs, device, _ById(binaries or _NO_BINARIES))
        columns: list[NDArray[np.float64]] = []
        for knob, dim in self.tiles.items():
            size, block = max(problem[dim], 1), np.maximum(own.knobs[self.knobs.index(knob)], 1.0)
            tiles = np.ceil(size / block)
            columns += [np.log2(tiles), tiles * block / size]
        launched = np.maximum(programs, 1.0)
        waves = launched / own.slots
        each = touched_bytes / launched
        columns += [np.log2(launched), np.log2(waves), waves / np.ceil(waves), np.log2(each + 1)]
        columns.append(np.log2(each / own.threads + 1))
        of_problem = np.array([[self._of_problem(problem, device, flops, touched_bytes)]], np.float32)
        first, count = of_problem.shape[2], len(self.names)
        second, last = first + len(self.knobs), count - len(_BINARY)
        mixed = np.stack(columns, axis=1).astype(np.float32)[None]
        return (
            FeatureGroup(tuple(range(first)), of_problem, own.same_row),
            FeatureGroup((*range(first, second), *range(last, count)), own.values, own.row_of_config, lasting=True),
            FeatureGroup(tuple(range(second, last)), mixed, own.row_of_config),
        )

    def _of_problem(self, problem: Problem, device: DeviceSpec, flops: float, touched_bytes: float) -> list[float]:
        """Return the columns that are equal for all configs, given a problem's FLOPs and bytes (0 if unknown)."""
        logs = {dim: float(np.log2(max(problem[dim], 1))) for dim in self.dims}
        return [
            *logs.values(),
            *(logs[a] - logs[b] for a, b in combinations(self.dims, 2)),
            problem.itemsize if isinstance(problem.dtype, str) else 0,
            *(problem.dtype == dtype for dtype in self.dtypes),
            *(flag in problem.flags for flag in self.flags),
            device.sm_count,
            device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
            device.smem_per_sm_bytes,
            device.l2_bytes,
            float(np.log2(flops + 1)),
            float(np.log2(touched_bytes + 1)),
            flops / max(touched_bytes, 1.0),
        ]


@dataclass(frozen=True, eq=False)
class _ById:
    """A mapping that is compared by identity, so that it can be the key of a cache."""

    binaries: Mapping[KernelConfig, BinaryFacts]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.binaries is self.binaries

    def __hash__(self) -> int:
        return id(self.binaries)


_NO_BINARIES: Mapping[KernelConfig, BinaryFacts] = {}


class _Own:
    """Features that depend only on the configs, the device and the facts about binaries."""

    def __init__(
        self, configs: tuple[KernelConfig, ...], knobs: tuple[str, ...], device: DeviceSpec, known: _ById
    ) -> None:
        values = [config.to_json() for config in configs]
        self.knobs = np.array([[_number(one.get(knob)) for one in values] for knob in knobs], float)
        self.knobs = self.knobs.reshape(len(knobs), len(configs))
        self.threads = np.array([config.num_warps * device.warp_size for config in configs], float)
        facts = _facts(configs, known.binaries)
        residency = _residency(facts, self.threads, device)
        self.slots = device.sm_count * np.maximum(residency, 1.0)
        self.values = np.stack([*self.knobs, *facts.T, residency], axis=1).astype(np.float32)[None]
        self.row_of_config, self.same_row = np.arange(len(configs)), np.zeros(len(configs), np.intp)


_own = remembered(maxsize=64)(_Own)


def _number(value: Any) -> float:
    """Return a knob value as a number: 0 if it is not set, a hash for a string."""
    if value is None:
        return 0.0
    return float(value) if isinstance(value, (int, float)) else float(zlib.crc32(str(value).encode()) % 4096)


def _facts(configs: Sequence[KernelConfig], binaries: Mapping[KernelConfig, BinaryFacts]) -> NDArray[np.float64]:
    """Return whether each binary is known, its registers, spills and bytes of shared memory, (n_configs, 4)."""
    found = [binaries.get(config) for config in configs] if binaries else [None] * len(configs)
    rows = [(0.0, 0.0, 0.0, 0.0) if one is None else (1.0, *one) for one in found]
    return np.array(rows, float).reshape(len(configs), 4)


def _residency(facts: NDArray[np.float64], threads: NDArray[np.float64], device: DeviceSpec) -> NDArray[np.float64]:
    """Return how many programs of each config fit on an SM, (n_configs,), from the `_facts` of their binaries.

    It is 0 if the binary is unknown.
    """
    known, registers, _, smem = facts.T
    by_registers = np.floor(device.registers_per_sm / np.maximum(registers * threads, 1.0))
    by_smem = np.floor(device.smem_per_sm_bytes / (smem + _RESERVED_SMEM_BYTES))
    fits = np.minimum(np.minimum(by_registers, by_smem), np.minimum(np.floor(_MOST_THREADS / threads), _MOST_PROGRAMS))
    result: NDArray[np.float64] = np.maximum(fits, 1.0) * known
    return result

"""`Prior`: predict which configs of a Triton kernel without measurements are fast, from facts about its source."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import BundleError, DeviceSpec
from ...model import bundle_file
from ...model.scoring.trees import Forest
from ..launching.kernel import Kernel
from .functions import Facts
from .interpreter import facts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Parameters of a launch that the source of a kernel does not see.
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
#: The programs and threads of an SM, registers of a thread, and the shared memory that the driver reserves for each
#: program (CUDA programming guide, compute capability 8.x and later). About 32 registers hold addresses and counters.
_MOST_PROGRAMS, _MOST_THREADS, _MOST_REGISTERS, _RESERVED_SMEM_BYTES, _FEW_REGISTERS = 32, 2048, 255, 1024, 32
_SOME_GRID = (9, 9, 9)


def launch_features(
    kernel: Kernel, arguments: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], device: DeviceSpec
) -> NDArray[np.float64]:
    """Return the features of each config on a launch, (n_configs, 2 * len(NAMES)).

    The first half of the columns has the features `NAMES`, the second half their differences from the mean over
    configs.

    Args:
        kernel: The kernel.
        arguments: The arguments by parameter name, without the config's knobs, and the "grid" if it is known. Tensors
            may be anything with a shape and a dtype.
        configs: The knobs of each config by name, launch options included.
        device: The device.
    """
    found: dict[tuple[Any, ...], tuple[Facts, float]] = {}
    rows = []
    for knobs in configs:
        given = kernel.given({**arguments, **knobs})
        grid = grid_of(given)
        key = (grid, *(repr(value) for name, value in knobs.items() if name not in _OPTIONS))
        if key not in found:
            plain = {name: value for name, value in given.items() if name in kernel.parameters}
            size = max(grid or _SOME_GRID)
            facts = facts_of(kernel.jit, plain, size // 2, size)
            found[key] = facts, float(math.prod(grid)) if grid else _programs_of(facts, given)
        rows.append([*_row(*found[key], knobs, device).values()])
    features = np.array(rows, float)
    return np.hstack([features, features - features.mean(axis=0)])


def grid_of(arguments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the "grid" among a launch's arguments, which include a config; None without one.

    A grid that is a function is called with the arguments.
    """
    grid = arguments.get("grid")
    if callable(grid):
        grid = grid(dict(arguments))
    return None if grid is None else tuple(max(int(size), 1) for size in grid)


def _programs_of(facts: Facts, arguments: Mapping[str, Any]) -> float:
    """Estimate how many programs a launch has: the elements of an output tensor over those that one program stores.

    This assumes that each element is stored once. The largest estimate of all outputs is returned; 1.0 without any.
    """
    sizes = {name: math.prod(one.shape) for name, one in arguments.items() if hasattr(one, "shape")}
    return max([sizes[name] / count for name, count in facts.stored.items() if name in sizes and count], default=1.0)


def _row(facts: Facts, programs: float, knobs: Mapping[str, Any], device: DeviceSpec) -> dict[str, float]:
    """Return the features of one config by name, from the facts about one program and the number of programs."""
    warps, stages = float(knobs.get("num_warps", 4)), float(knobs.get("num_stages", 3))
    threads = device.warp_size * warps
    # The loop that takes longest: its loads are pipelined through shared memory if it multiplies.
    main = max(facts.loops, key=lambda one: (one.dot_flops * one.trips, one.load_bytes * one.trips), default=None)
    loaded = main.load_bytes if main else facts.load_bytes
    smem = loaded * max(stages, 1) if main and main.dot_flops else facts.largest_bytes if facts.reduced else 0.0
    carried = max((one.carried_bytes for one in facts.loops), default=0.0)
    more, less = max(carried, facts.largest_bytes), min(carried, facts.largest_bytes)
    registers = _FEW_REGISTERS + (more + less / 2) / 4 / threads
    residency = max(
        min(
            device.smem_per_sm_bytes / (smem + _RESERVED_SMEM_BYTES),
            device.registers_per_sm / (min(registers, _MOST_REGISTERS) * threads),
            _MOST_THREADS / threads,
            _MOST_PROGRAMS,
        )
        // 1,
        1.0,
    )
    programs = max(programs, 1.0)
    waves = programs / (device.sm_count * residency)
    fill = waves / math.ceil(waves)
    moved = facts.load_bytes + facts.store_bytes + 4 * facts.atomic_bytes
    memory_us = programs * moved / (device.copy_bandwidth_gbs * 1e3)
    dots_us = programs * facts.dot_flops / (device.matrix_tflops * 1e6)
    m, n, k = facts.dot_shape
    logs = {
        "programs": programs,
        "waves": 64 * waves,
        "loaded": programs * facts.load_bytes,
        "stored": programs * facts.store_bytes,
        "atomic": programs * facts.atomic_bytes,
        "dot_flops": programs * facts.dot_flops,
        "operations": programs * facts.operations,
        "special": programs * facts.special,
        "loaded_by_thread": 16 * facts.load_bytes / threads,
        "iteration_by_thread": 16 * (main.load_bytes if main else 0.0) / threads,
        "carried_by_thread": carried / threads,
        "largest_by_thread": facts.largest_bytes / threads,
        "operations_by_thread": facts.operations / threads,
        "reduced_by_thread": facts.reduced / threads,
        "scanned_by_thread": facts.scanned / threads,
        "smem": smem,
        "registers": registers,
        "piece": facts.piece_bytes / max(moved, 1.0),
        "trips": main.trips if main else 1.0,
        "intensity": 64 * facts.dot_flops / max(moved, 1.0),
        "dot_m": m,
        "dot_n": n,
        "dot_k": k,
        "dot_by_warp": m * n / warps,
        "warps": warps,
        "warps_per_sm": residency * warps * min(1.0, waves),
        "in_flight": min(residency, max(programs / device.sm_count, 1.0)) * loaded * max(stages - 1, 1),
        "roofline": 1e3 * max(memory_us, dots_us) / fill,
    }
    return {name: math.log2(max(value, 1.0)) for name, value in logs.items()} | {
        "stages": stages,
        "fill": fill,
        "residency": residency,
        "scattered": facts.scattered_bytes / max(moved, 1.0),
        "is_dot": float(facts.dot_flops > 0),
        "dot_itemsize": float(facts.dot_itemsize),
        "loops": float(len(facts.loops)),
    }


#: The names of the features, the first half of the columns.
NAMES = tuple(_row(Facts(), 1.0, {}, DeviceSpec.named("h200")))
#: One line on each of them, for explanations.
TEXTS = {
    "programs": "log2 of the programs of a launch",
    "waves": "log2 of 64 times the waves of programs",
    "loaded": "log2 of the bytes that all programs load",
    "stored": "log2 of the bytes that all programs store",
    "atomic": "log2 of the bytes that all programs update atomically",
    "dot_flops": "log2 of the operations of all products",
    "operations": "log2 of the elements that all programs compute",
    "special": "log2 of the elements that all programs compute by exp and the like",
    "loaded_by_thread": "log2 of 16 times the bytes that a thread loads",
    "iteration_by_thread": "log2 of 16 times the bytes that a thread loads in one iteration of the main loop",
    "carried_by_thread": "log2 of the bytes that a thread carries from one iteration to the next",
    "largest_by_thread": "log2 of a thread's bytes of the largest tensor",
    "operations_by_thread": "log2 of the elements that a thread computes",
    "reduced_by_thread": "log2 of the elements that a thread reduces",
    "scanned_by_thread": "log2 of the elements that a thread scans or sorts",
    "smem": "log2 of the estimated bytes of shared memory",
    "registers": "log2 of the estimated registers of a thread",
    "piece": "log2 of the mean length in bytes of contiguous loads and stores",
    "trips": "log2 of the iterations of the main loop",
    "intensity": "log2 of 64 times the operations of products per byte moved",
    "dot_m": "log2 of the rows of a product's tile",
    "dot_n": "log2 of the columns of a product's tile",
    "dot_k": "log2 of the depth of a product's tile",
    "dot_by_warp": "log2 of the elements of a product's tile per warp",
    "warps": "log2 of num_warps",
    "warps_per_sm": "log2 of the warps that run on an SM at once",
    "in_flight": "log2 of the bytes that an SM has requested at once",
    "roofline": "log2 of the nanoseconds that memory or products need, whichever is longer, over fill",
    "stages": "num_stages",
    "fill": "share of the SMs that the programs use on average over all waves",
    "residency": "programs that run on an SM at once",
    "scattered": "share of the bytes moved in pieces of less than 32 bytes",
    "is_dot": "1 if the kernel has products",
    "dot_itemsize": "bytes of an element of a product's operands",
    "loops": "loops of the kernel",
}


#: The share of a list that holds a config within 5 % of the best in 90 % of cases, on packages that the prior was not
#: trained on, and the shortest list for which that is known (`kernel_prior.py`).
_SHARE, _SHORTEST = 0.5, 6
COVERAGE = "a config within 5 % of the best in 90 % of cases, as on held-out packages"
_SHIPPED = Path(__file__).parents[2] / "model" / "shipped" / "prior.npz"
_FEATURES = "features.json"


def coverage_length(n_configs: int) -> int:
    """Return how many configs a predicted list needs so that 90 % of such lists hold one within 5 % of the best.

    That is half of `n_configs`, rounded up; all of them if there are fewer than six.

    >>> coverage_length(4), coverage_length(20)
    (4, 10)
    """
    return n_configs if n_configs < _SHORTEST else math.ceil(_SHARE * n_configs)


@dataclass(frozen=True)
class Prior:
    """A ranker for the configs of any Triton kernel, trained on measurements of many kernels.

    `tests/studies/kernel_prior.py` trains it.

    Attributes:
        forest: Predicts log slowdowns, up to a constant for each launch, from `launch_features`.
    """

    forest: Forest

    @classmethod
    @cache
    def shipped(cls) -> Prior:
        """Return the prior that Foretune ships. Raises `BundleError` if it was trained with other features."""
        return cls.loads(bundle_file.read(_SHIPPED) or b"")

    @classmethod
    def loads(cls, content: bytes) -> Prior:
        """Return the prior in a file's content, as `dumps` makes it.

        Raises `BundleError` for other content, or if it was trained with other features than `NAMES`.
        """
        arrays, texts = bundle_file.loads(content)
        if json.loads(texts.get(_FEATURES, b"[]")) != [*NAMES]:
            raise BundleError("the prior was trained with other features")
        return cls(Forest(**arrays))

    def dumps(self) -> bytes:
        """Return this prior as the content of a file, which `loads` reads."""
        return bundle_file.dumps(self.forest.arrays(), {_FEATURES: json.dumps(NAMES).encode()})

    def log_slowdowns(
        self, kernel: Kernel, arguments: Mapping[str, Any], configs: Sequence[Mapping[str, Any]], device: DeviceSpec
    ) -> NDArray[np.float64]:
        """Return the predicted log times of configs on a launch, up to a constant that the configs share, (n_configs,).

        Args:
            kernel: The kernel.
            arguments: See `launch_features`.
            configs: See `launch_features`.
            device: The device.
        """
        return self.forest.predict(launch_features(kernel, arguments, configs, device))

    def contributions(
        self, features: NDArray[np.float64], explained: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what each feature adds to the predicted log times of some configs, by path-dependent TreeSHAP.

        A feature counts together with its difference from the mean over configs. The contributions to a config sum to
        its predicted log time minus the mean of all configs.

        Args:
            features: The result of `launch_features`.
            explained: The positions of the configs to explain, (n_explained,).

        Returns:
            The values of the features `NAMES`, and their contributions, (n_explained, len(NAMES)) each.
        """
        from ...model.contributions import tree_shap

        table, rows = features.astype(np.float32), list(explained)
        parts = np.zeros((len(rows), 2 * len(NAMES)))
        found, _ = tree_shap(self.forest, table[rows], table)
        parts[:, : found.shape[1]] = found
        return features[rows, : len(NAMES)], parts[:, : len(NAMES)] + parts[:, len(NAMES) :]

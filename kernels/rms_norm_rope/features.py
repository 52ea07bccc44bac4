"""What a config's tile is on a problem's heads: what rankers see of the norms besides what generic features say.

How many registers a program takes, and so how many of them an SM holds, depends on the size of a head, by which
`BinaryFacts` are not told apart. So it is estimated here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, Problem
from ..config_limits import MOST_PROGRAMS, MOST_REGISTERS, MOST_THREADS
from .space import block_of, head_blocks

TILE_FEATURES = (
    "elements_per_thread",
    "tile_bytes",
    "head_use",  # shares of the tiles' heads and tokens that are none of the padding
    "token_use",
    "log_estimated_waves",
    "estimated_wave_fill",
    "in_flight_bytes_per_sm",
    "log_partial_bytes",
)
# Registers for each element that a thread holds (backward x, its gradient, and two sums), and beside them: medians over
# the binaries for heads of 128 elements on sm_90, by least squares.
_AN_ELEMENT = {"rms_norm_rope_fwd": 1.5, "rms_norm_rope_bwd": 6.0}
_OTHER_REGISTERS = 22


def tile_features(
    problem: Problem, device: DeviceSpec, knobs: Mapping[str, NDArray[np.int64]], programs: NDArray[np.float64]
) -> NDArray[np.float32]:
    """(n_configs, len(TILE_FEATURES)), finite. `knobs` has each knob of all configs, and `programs` is the size of each
    one's grid, (n_configs,)."""
    rows, heads, warps, stages = (knobs[name] for name in ("ROWS", "HEADS", "num_warps", "num_stages"))
    tokens, head_dim = max(problem["tokens"], 1), problem["head_dim"]
    q_heads, kv_heads = problem["q_heads"], problem["kv_heads"]
    threads = warps * device.warp_size
    elements = rows * heads * 2 * block_of(head_dim) / threads
    registers = np.minimum(_OTHER_REGISTERS + _AN_ELEMENT[problem.family] * elements, MOST_REGISTERS)
    by_threads = np.minimum(MOST_THREADS // threads, MOST_PROGRAMS)
    residency = np.maximum(np.minimum(device.registers_per_sm // (registers * threads), by_threads), 1)
    launched = np.maximum(programs, 1.0)
    waves = launched / (device.sm_count * residency)
    tile_bytes = elements * threads * problem.itemsize
    tile_rows = rows * knobs.get("STEPS", 1)
    columns = (
        elements,
        tile_bytes,
        (q_heads + kv_heads) / (heads * (head_blocks(q_heads, knobs) + head_blocks(kv_heads, knobs))),
        tokens / (-(-tokens // tile_rows) * tile_rows),
        np.log2(waves),
        waves / np.ceil(waves),
        residency * tile_bytes * np.maximum(stages - 1, 1),
        np.log2(launched * head_dim * 4),
    )
    return np.stack(columns, axis=1).astype(np.float32)

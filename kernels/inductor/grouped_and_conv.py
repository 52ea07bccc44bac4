"""grouped_mm and convolution as families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ...datasets import KernelConfig, Problem
from .family import InductorTemplate

if TYPE_CHECKING:
    from .pipeline import Column, TiledLoop

#: Which dimension is split among the groups, by the problem's flag; none where each group has a matrix of its own.
_RAGGED = {"a_ragged": "m", "b_ragged": "n", "both_ragged": "k"}


class _Product(InductorTemplate):
    """Products of BLOCK_M x BLOCK_N tiles, BLOCK_K at a step."""

    tiles: ClassVar[Mapping[str, str]] = {"BLOCK_M": "m", "BLOCK_N": "n", "BLOCK_K": "k"}

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        per_step = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
        return int(config.num_stages * per_step)

    def _loop(
        self, knobs: Mapping[str, Column], tiles: Column, steps: Column, itemsize: int, is_persistent: float
    ) -> TiledLoop:
        from .pipeline import TiledLoop

        block_m, block_n, block_k = (knobs[knob] for knob in self.tiles)
        per_step = (block_m + block_n) * block_k * itemsize
        return TiledLoop(
            tiles=tiles,
            steps=steps,
            rows=block_m,
            columns=block_n,
            step_flops=2 * block_m * block_n * block_k,
            step_bytes=per_step,
            tile_bytes=block_m * block_n * max(itemsize, 2),
            accumulators=block_m * block_n,
            smem_bytes=knobs["num_stages"] * per_step,
            warps=knobs["num_warps"],
            stages=knobs["num_stages"],
            is_persistent=0 * block_m + is_persistent,
        )


class InductorGroupedMM(_Product):
    """grouped_mm and scaled_grouped_mm over `groups` products; m, n and k are the sizes of all groups together along a
    dimension that is split among them ("a_ragged": m, "b_ragged": n, "both_ragged": k), of each group along others.

    How it is split is on the device: evenly, for all that the host knows, which is how Inductor times it too.
    """

    name = "inductor_grouped_mm"
    dims = ("groups", "m", "n", "k")
    flags = tuple(_RAGGED)
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    }

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        import numpy as np

        groups = max(problem["groups"], 1)
        split = {_RAGGED[flag] for flag in problem.flags}
        m, n, k = (problem[dim] / (groups if dim in split else 1) for dim in ("m", "n", "k"))
        tiles = groups * np.ceil(m / knobs["BLOCK_M"]) * np.ceil(n / knobs["BLOCK_N"])
        steps = np.maximum(np.ceil(k / knobs["BLOCK_K"]), 1)
        return self._loop(knobs, tiles, steps, problem.itemsize, 1.0)

    def flops(self, problem: Problem) -> float:
        groups = 1 if problem.flags else problem["groups"]
        return 2.0 * groups * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        groups, m, n, k = (problem[dim] for dim in self.dims)
        shared = {_RAGGED[flag] for flag in problem.flags}
        operands = [(m, k), (k, n), (m, n)]
        dims = [("m", "k"), ("k", "n"), ("m", "n")]
        each = (a * b * (1 if shared & set(names) else groups) for (a, b), names in zip(operands, dims, strict=True))
        return float(problem.itemsize * sum(each))


class InductorConvolution(_Product):
    """convolution as the product that its template computes: m output pixels of all images, n output channels and k
    input channels, each of one of `groups`, and a step for each of the `window` positions of the filter."""

    name = "inductor_convolution"
    dims = ("groups", "m", "n", "k", "window")
    dtypes = ("bf16", "fp16", "fp32")
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128, 256),
        "BLOCK_N": (16, 32, 64, 128, 256),
        "BLOCK_K": (16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
    }

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        import numpy as np

        tiles = problem["groups"] * np.ceil(problem["m"] / knobs["BLOCK_M"]) * np.ceil(problem["n"] / knobs["BLOCK_N"])
        steps = problem["window"] * np.ceil(problem["k"] / knobs["BLOCK_K"])
        return self._loop(knobs, tiles, steps, problem.itemsize, 0.0)

    def flops(self, problem: Problem) -> float:
        return 2.0 * problem["groups"] * problem["m"] * problem["n"] * problem["k"] * problem["window"]

    def bytes(self, problem: Problem) -> float:
        m, n, k = problem["m"], problem["n"], problem["k"]
        return float(problem["groups"] * problem.itemsize * (m * k + m * n + n * k * problem["window"]))

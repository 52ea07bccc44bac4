"""Flex attention as families: forward, backward and decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ...datasets import DeviceSpec, KernelConfig, Problem
from .family import InductorTemplate

if TYPE_CHECKING:
    from .pipeline import Column, TiledLoop

_WARPS = (2, 4, 8)


class _Flex(InductorTemplate):
    """`batch` is batches times query heads; `groups` query heads share a head of keys and values. Nothing is known of
    the mask: all blocks count."""

    dims: ClassVar[tuple[str, ...]] = ("batch", "groups", "queries", "keys", "head_qk", "head_v")
    dtypes = ("bf16", "fp16", "fp32")

    def flops(self, problem: Problem) -> float:
        heads = problem["head_qk"] + problem["head_v"]
        return 2.0 * problem["batch"] * problem["queries"] * problem["keys"] * heads

    def bytes(self, problem: Problem) -> float:
        heads = problem["head_qk"] + problem["head_v"]
        shared = problem["batch"] / max(problem["groups"], 1)
        return float(problem.itemsize * heads * (problem["batch"] * problem["queries"] + shared * problem["keys"]))


class InductorFlexAttention(_Flex):
    """The forward pass: a program has BLOCK_M queries of a head and goes over the keys, BLOCK_N at a step."""

    name = "inductor_flex_attention"
    tiles: ClassVar[Mapping[str, str]] = {"BLOCK_M": "queries", "BLOCK_N": "keys"}
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": _WARPS,
        "num_stages": (1, 2, 3, 4, 5),
    }

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        heads = problem["head_qk"] + problem["head_v"]
        per_step = config["BLOCK_N"] * heads
        return int(problem.itemsize * (config["BLOCK_M"] * problem["head_qk"] + config.num_stages * per_step))

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        import numpy as np

        block_m, block_n, itemsize = knobs["BLOCK_M"], knobs["BLOCK_N"], problem.itemsize
        heads = problem["head_qk"] + problem["head_v"]
        return _loop(
            knobs,
            tiles=problem["batch"] * np.ceil(problem["queries"] / block_m),
            steps=np.ceil(problem["keys"] / block_n),
            rows=block_m,
            columns=block_n,
            step_flops=2 * block_m * block_n * heads,
            step_bytes=block_n * heads * itemsize,
            tile_bytes=block_m * problem["head_v"] * itemsize,
            accumulators=block_m * (problem["head_v"] + block_n),
            kept_bytes=block_m * problem["head_qk"] * itemsize,
        )


class InductorFlexDecoding(InductorFlexAttention):
    """Decode: a program has all queries of a group of heads, and one of `splits` parts of the keys, BLOCK_N at a
    step. BLOCK_M is the number of these queries, rounded up, and no choice."""

    name = "inductor_flex_decoding"
    dims: ClassVar[tuple[str, ...]] = (*InductorFlexAttention.dims, "splits")
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": _WARPS,
        "num_stages": (1, 2, 3, 4, 5),
    }

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        import numpy as np

        block_m, block_n, itemsize = knobs["BLOCK_M"], knobs["BLOCK_N"], problem.itemsize
        heads = problem["head_qk"] + problem["head_v"]
        splits = max(problem["splits"], 1)
        return _loop(
            knobs,
            tiles=0 * block_m + np.ceil(problem["batch"] / max(problem["groups"], 1)) * splits,
            steps=np.maximum(np.ceil(problem["keys"] / splits / block_n), 1),
            rows=block_m,
            columns=block_n,
            step_flops=2 * block_m * block_n * heads,
            step_bytes=block_n * heads * itemsize,
            tile_bytes=block_m * problem["head_v"] * 4,
            accumulators=block_m * (problem["head_v"] + block_n),
            kept_bytes=block_m * problem["head_qk"] * itemsize,
        )


class InductorFlexBackward(_Flex):
    """The backward pass: one launch whose first programs have BLOCK_N1 keys each and go over the queries, BLOCK_M1 at a
    step (dK and dV), and the others BLOCK_M2 queries and go over the keys, BLOCK_N2 at a step (dQ)."""

    name = "inductor_flex_backward"
    tiles: ClassVar[Mapping[str, str]] = {
        "BLOCK_M1": "queries",
        "BLOCK_N1": "keys",
        "BLOCK_M2": "queries",
        "BLOCK_N2": "keys",
    }
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        **dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), (16, 32, 64, 128)),
        "num_warps": _WARPS,
        "num_stages": (1, 3, 4, 5),
    }

    def is_listed(self, config: KernelConfig) -> bool:
        return bool(config["BLOCK_N1"] % config["BLOCK_M1"] == 0 and config["BLOCK_M2"] % config["BLOCK_N2"] == 0)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        reason = super().supports(config, problem, device)
        if reason is None and not self.is_listed(config):
            return "BLOCK_N1 must be a multiple of BLOCK_M1, and BLOCK_M2 one of BLOCK_N2"
        return reason

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        heads = problem["head_qk"] + problem["head_v"]
        of_keys = config["BLOCK_N1"] + config.num_stages * config["BLOCK_M1"]
        of_queries = config["BLOCK_M2"] + config.num_stages * config["BLOCK_N2"]
        return int(problem.itemsize * heads * max(of_keys, of_queries))

    def flops(self, problem: Problem) -> float:
        return 3.5 * super().flops(problem)  # seven products where the forward pass has two: both passes recompute one

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        import numpy as np

        m1, n1, m2, n2 = (knobs[knob] for knob in self.tiles)
        itemsize, heads = problem.itemsize, problem["head_qk"] + problem["head_v"]
        batch, queries, keys = problem["batch"], problem["queries"], problem["keys"]
        of_keys = batch / max(problem["groups"], 1) * np.ceil(keys / n1)
        of_queries = batch * np.ceil(queries / m2)
        key_steps, query_steps = np.ceil(queries / m1) * problem["groups"], np.ceil(keys / n2)
        tiles = of_keys + of_queries
        key_share = of_keys * key_steps / (of_keys * key_steps + of_queries * query_steps)

        def mean(of_a_key_program: Column, of_a_query_program: Column) -> Column:
            """Over all steps."""
            both: Column = key_share * of_a_key_program + (1 - key_share) * of_a_query_program
            return both

        return _loop(
            knobs,
            tiles=tiles,
            steps=(of_keys * key_steps + of_queries * query_steps) / tiles,
            rows=mean(np.minimum(m1, n1), np.minimum(m2, n2)),
            columns=mean(np.maximum(m1, n1), np.maximum(m2, n2)),
            step_flops=mean(4.0 * m1 * n1 * heads, 3.0 * m2 * n2 * heads),
            step_bytes=mean(m1 * heads * itemsize, n2 * heads * itemsize),
            tile_bytes=mean(n1 * heads * itemsize, m2 * problem["head_qk"] * itemsize),
            accumulators=np.maximum(n1 * (heads + m1), m2 * (problem["head_qk"] + n2)),
            kept_bytes=np.maximum(n1, m2) * heads * itemsize,
        )


def _loop(knobs: Mapping[str, Column], *, kept_bytes: Column, **of_tiles: Column) -> TiledLoop:
    """`kept_bytes` stay in shared memory while the steps pass."""
    from .pipeline import TiledLoop

    smem = kept_bytes + knobs["num_stages"] * of_tiles["step_bytes"]
    return TiledLoop(
        **of_tiles,
        smem_bytes=smem,
        warps=knobs["num_warps"],
        stages=knobs["num_stages"],
        is_persistent=0 * smem,
    )

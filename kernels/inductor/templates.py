"""Families of grouped_mm, convolution and flex attention (forward, backward and decode)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from ...datasets import DeviceSpec, KernelConfig, Problem
from .family import InductorTemplate

if TYPE_CHECKING:
    from .family import Column, TiledLoop

#: The dimension that is split among the groups, by flag; without a flag, each group has its own matrices.
_RAGGED = {"a_ragged": "m", "b_ragged": "n", "both_ragged": "k"}


class _Product(InductorTemplate):
    """Base class of families whose templates compute BLOCK_M x BLOCK_N output tiles in steps of BLOCK_K."""

    tiles: ClassVar[Mapping[str, str]] = {"BLOCK_M": "m", "BLOCK_N": "n", "BLOCK_K": "k"}

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Return the shared memory of one program in bytes."""
        per_step = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * problem.itemsize
        return int(config.num_stages * per_step)

    def _loop(
        self, knobs: Mapping[str, Column], tiles: Column, steps: Column, itemsize: int, is_persistent: float
    ) -> TiledLoop:
        from .family import TiledLoop

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
    """The family of grouped_mm and scaled_grouped_mm, which compute `groups` products.

    A dimension that is split among the groups ("a_ragged": m, "b_ragged": n, "both_ragged": k) has the size of all
    groups together; others have the size of each group. The split is only known on the device. It is assumed to be
    even, as Inductor assumes when it times choices.
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
        """Return the tiles and inner-loop steps of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        groups = max(problem["groups"], 1)
        split = {_RAGGED[flag] for flag in problem.flags}
        m, n, k = (problem[dim] / (groups if dim in split else 1) for dim in ("m", "n", "k"))
        tiles = groups * np.ceil(m / knobs["BLOCK_M"]) * np.ceil(n / knobs["BLOCK_N"])
        steps = np.maximum(np.ceil(k / knobs["BLOCK_K"]), 1)
        return self._loop(knobs, tiles, steps, problem.itemsize, 1.0)

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        groups = 1 if problem.flags else problem["groups"]
        return 2.0 * groups * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one call reads and writes."""
        groups, m, n, k = (problem[dim] for dim in self.dims)
        shared = {_RAGGED[flag] for flag in problem.flags}
        operands = [(m, k), (k, n), (m, n)]
        dims = [("m", "k"), ("k", "n"), ("m", "n")]
        each = (a * b * (1 if shared & set(names) else groups) for (a, b), names in zip(operands, dims, strict=True))
        return float(problem.itemsize * sum(each))


class InductorConvolution(_Product):
    """The family of convolution, described as the matrix product that its template computes.

    m is the number of output pixels of all images. n and k are the output and input channels of one of `groups` groups.
    Each of the `window` positions of the filter is a step.
    """

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
        """Return the tiles and inner-loop steps of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        tiles = problem["groups"] * np.ceil(problem["m"] / knobs["BLOCK_M"]) * np.ceil(problem["n"] / knobs["BLOCK_N"])
        steps = problem["window"] * np.ceil(problem["k"] / knobs["BLOCK_K"])
        return self._loop(knobs, tiles, steps, problem.itemsize, 0.0)

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        return 2.0 * problem["groups"] * problem["m"] * problem["n"] * problem["k"] * problem["window"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one call reads and writes."""
        m, n, k = problem["m"], problem["n"], problem["k"]
        return float(problem["groups"] * problem.itemsize * (m * k + m * n + n * k * problem["window"]))


_WARPS = (2, 4, 8)


class _Flex(InductorTemplate):
    """Base class of the flex attention families; all blocks count as work, because the mask is unknown.

    `batch` is the batch size times the number of query heads. `groups` query heads share a head of keys and values.
    """

    dims: ClassVar[tuple[str, ...]] = ("batch", "groups", "queries", "keys", "head_qk", "head_v")
    dtypes = ("bf16", "fp16", "fp32")

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        heads = problem["head_qk"] + problem["head_v"]
        return 2.0 * problem["batch"] * problem["queries"] * problem["keys"] * heads

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one call reads and writes."""
        heads = problem["head_qk"] + problem["head_v"]
        shared = problem["batch"] / max(problem["groups"], 1)
        return float(problem.itemsize * heads * (problem["batch"] * problem["queries"] + shared * problem["keys"]))


class InductorFlexAttention(_Flex):
    """The family of flex attention's forward pass.

    A program has BLOCK_M queries of a head, and loops over the keys in steps of BLOCK_N.
    """

    name = "inductor_flex_attention"
    tiles: ClassVar[Mapping[str, str]] = {"BLOCK_M": "queries", "BLOCK_N": "keys"}
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": _WARPS,
        "num_stages": (1, 2, 3, 4, 5),
    }

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Return the shared memory of one program in bytes."""
        heads = problem["head_qk"] + problem["head_v"]
        per_step = config["BLOCK_N"] * heads
        return int(problem.itemsize * (config["BLOCK_M"] * problem["head_qk"] + config.num_stages * per_step))

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the tiles and inner-loop steps of each config; `knobs` has the values of each knob, (n_configs,)."""
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
    """The family of flex attention for decoding.

    A program has all queries of a group of heads and one of `splits` parts of the keys, over which it loops in steps of
    BLOCK_N. BLOCK_M is not a choice: it is the number of these queries, rounded up.
    """

    name = "inductor_flex_decoding"
    dims: ClassVar[tuple[str, ...]] = (*InductorFlexAttention.dims, "splits")
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": _WARPS,
        "num_stages": (1, 2, 3, 4, 5),
    }

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the tiles and inner-loop steps of each config; `knobs` has the values of each knob, (n_configs,)."""
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
    """The family of flex attention's backward pass, one launch with two kinds of programs.

    The first programs have BLOCK_N1 keys each and loop over the queries in steps of BLOCK_M1 (dK and dV). The others
    have BLOCK_M2 queries and loop over the keys in steps of BLOCK_N2 (dQ).
    """

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
        """Return whether the block sizes divide each other as the template requires."""
        return bool(config["BLOCK_N1"] % config["BLOCK_M1"] == 0 and config["BLOCK_M2"] % config["BLOCK_N2"] == 0)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or None."""
        reason = super().supports(config, problem, device)
        if reason is None and not self.is_listed(config):
            return "BLOCK_N1 must be a multiple of BLOCK_M1, and BLOCK_M2 a multiple of BLOCK_N2"
        return reason

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Return the shared memory of one program in bytes."""
        heads = problem["head_qk"] + problem["head_v"]
        of_keys = config["BLOCK_N1"] + config.num_stages * config["BLOCK_M1"]
        of_queries = config["BLOCK_M2"] + config.num_stages * config["BLOCK_N2"]
        return int(problem.itemsize * heads * max(of_keys, of_queries))

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        return 3.5 * super().flops(problem)  # seven products instead of two, because both parts recompute one

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the tiles and inner-loop steps of each config; `knobs` has the values of each knob, (n_configs,)."""
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
            """Return the mean over all steps of both kinds of programs."""
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
    """Return the work of configs whose programs keep `kept_bytes` in shared memory during all steps.

    `of_tiles` has the fields of `TiledLoop` that do not follow from the knobs.
    """
    from .family import TiledLoop

    smem = kept_bytes + knobs["num_stages"] * of_tiles["step_bytes"]
    return TiledLoop(
        **of_tiles,
        smem_bytes=smem,
        warps=knobs["num_warps"],
        stages=knobs["num_stages"],
        is_persistent=0 * smem,
    )

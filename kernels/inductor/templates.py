"""Families of grouped_mm, convolution and flex attention (forward, backward and decode)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from ...datasets import DeviceSpec, KernelConfig, Problem
from .family import InductorTemplate

if TYPE_CHECKING:
    from .family import Column, TiledLoop

#: The dimension that is split among the groups, by flag; without a flag, each group has its own matrices.
_RAGGED = {"a_ragged": "m", "b_ragged": "n", "both_ragged": "k"}
#: The smallest and largest BLOCK_M that Inductor lists for up to this many rows of a group (mm_grouped.py, torch 2.11).
_BLOCKS_OF_ROWS = {16: (16, 32), 32: (16, 64), 64: (32, 128), math.inf: (64, 128)}


def split_dim(problem: Problem) -> str | None:
    """Return the dimension of a grouped product that is split among the groups, or None."""
    return next((dim for flag, dim in _RAGGED.items() if flag in problem.flags), None)


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


class InductorGroupedMMFamily(_Product):
    """The family of grouped_mm and scaled_grouped_mm, which compute `groups` products.

    A dimension that is split among the groups ("a_ragged": m, "b_ragged": n, "both_ragged": k) has the size of all
    groups together; others have the size of each group. The split is only known on the device. It is assumed to be
    even, as Inductor assumes when it times choices. "a_transposed" and "b_transposed": the operand is stored with its
    columns contiguous.
    """

    name = "inductor_grouped_mm"
    dims = ("groups", "m", "n", "k")
    flags = (*_RAGGED, "a_transposed", "b_transposed")
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (64, 128, 256),
        "BLOCK_K": (64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (3, 4),
    }

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or why Inductor does not list it, or None."""
        if (reason := super().supports(config, problem, device)) is not None:
            return reason
        rows = problem["m"] // max(problem["groups"], 1) if split_dim(problem) == "m" else problem["m"]
        least, most = next(blocks for limit, blocks in _BLOCKS_OF_ROWS.items() if rows <= limit)
        if not least <= config["BLOCK_M"] <= most:
            return f"BLOCK_M must be {least} to {most} for {rows} rows but is {config['BLOCK_M']}"
        return None

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the work (tiles, steps, bytes) of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        groups, split = max(problem["groups"], 1), split_dim(problem)
        m, n, k = (problem[dim] / (groups if dim == split else 1) for dim in ("m", "n", "k"))
        tiles = groups * np.ceil(m / knobs["BLOCK_M"]) * np.ceil(n / knobs["BLOCK_N"])
        steps = np.maximum(np.ceil(k / knobs["BLOCK_K"]), 1)
        return self._loop(knobs, tiles, steps, problem.itemsize, 1.0)

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        groups = 1 if split_dim(problem) else problem["groups"]
        return 2.0 * groups * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one call reads and writes."""
        groups, m, n, k = (problem[dim] for dim in self.dims)
        operands = [(m, k), (k, n), (m, n)]
        dims = [("m", "k"), ("k", "n"), ("m", "n")]
        each = (
            a * b * (1 if split_dim(problem) in names else groups) for (a, b), names in zip(operands, dims, strict=True)
        )
        return float(problem.itemsize * sum(each))


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages and num_warps of the configs that Inductor lists for convolution
#: (template_heuristics/triton.py, torch 2.11). Blocks larger than the problem are reduced to it.
_CONVOLUTIONS = (
    (64, 256, 16, 2, 4),
    (256, 64, 16, 2, 4),
    (1024, 16, 16, 1, 8),
    (128, 128, 32, 2, 8),
    (64, 64, 32, 2, 4),
    (64, 256, 32, 2, 8),
    (256, 64, 32, 2, 8),
    (128, 128, 64, 3, 8),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (256, 128, 64, 2, 8),
    (128, 256, 64, 2, 8),
    (128, 128, 128, 2, 8),
    (128, 128, 128, 3, 8),
    (64, 128, 128, 4, 4),
    (256, 128, 128, 2, 8),
    (128, 256, 128, 2, 8),
)
#: The least accumulators of a warp, 16 x 16.
_LEAST_TILE = 256


class InductorConvolutionFamily(_Product):
    """The family of convolution, described as the matrix product that its template computes.

    m is the number of output pixels of all `images`. n and k are the output and input channels of one of `groups`
    groups. Each of the `window` positions of the filter is a step; neighboring outputs are `stride` inputs apart.
    "channels_last": the channels of the input are contiguous.
    """

    name = "inductor_convolution"
    dims = ("groups", "images", "m", "n", "k", "window", "stride")
    flags = ("channels_last",)
    dtypes = ("bf16", "fp16", "fp32")
    default_dims: ClassVar[Mapping[str, int]] = {"images": 1, "stride": 1}
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128, 256, 512, 1024),
        "BLOCK_N": (16, 32, 64, 128, 256),
        "BLOCK_K": (16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    }

    def is_listed(self, config: KernelConfig) -> bool:
        """Return whether there is a problem size for which Inductor lists the config."""
        blocks = [config[knob] for knob in self.tiles]
        return any(
            config.num_stages == stages
            and config.num_warps == _warps(warps, blocks[0], blocks[1])
            and all(block <= most for block, most in zip(blocks, listed, strict=True))
            for *listed, stages, warps in _CONVOLUTIONS
        )

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or why Inductor does not list it, or None."""
        if (reason := super().supports(config, problem, device)) is not None:
            return reason
        most = _largest_blocks(problem)
        for knob, size in most.items():
            if config[knob] > size:
                return f"{knob} must be at most {size} for {self.tiles[knob]}={problem[self.tiles[knob]]}"
        if config not in self.listed(problem):
            return f"Inductor does not list BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages as in {config}"
        return None

    def listed(self, problem: Problem) -> tuple[KernelConfig, ...]:
        """Return the configs that Inductor lists for a problem, in its order."""
        return _listed_convolutions(*_largest_blocks(problem).values())

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the work (tiles, steps, bytes) of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        tiles = problem["groups"] * np.ceil(problem["m"] / knobs["BLOCK_M"]) * np.ceil(problem["n"] / knobs["BLOCK_N"])
        steps = problem["window"] * np.ceil(problem["k"] / knobs["BLOCK_K"])
        return self._loop(knobs, tiles, steps, problem.itemsize, 0.0)

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        return 2.0 * problem["groups"] * problem["m"] * problem["n"] * problem["k"] * problem["window"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one call reads and writes."""
        m, n, k, window = (problem[dim] for dim in ("m", "n", "k", "window"))
        read = min(problem["stride"] ** 2, window)  # input pixels for each output pixel
        return float(problem["groups"] * problem.itemsize * (m * k * read + m * n + n * k * window))


@lru_cache(maxsize=256)  # `supports` asks for each config
def _listed_convolutions(*most: int) -> tuple[KernelConfig, ...]:
    """Return the configs that Inductor lists if (BLOCK_M, BLOCK_N, BLOCK_K) are limited to `most`, in its order."""
    listed = []
    for *sizes, stages, warps in _CONVOLUTIONS:
        block_m, block_n, block_k = map(min, sizes, most)
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k}
        listed.append(KernelConfig.of(**blocks, num_warps=_warps(warps, block_m, block_n), num_stages=stages))
    return tuple(dict.fromkeys(listed))


def _warps(most: int, block_m: int, block_n: int) -> int:
    """Return the number of warps for a tile: `most`, or fewer so that each warp has at least `_LEAST_TILE` elements."""
    return min(most, max(block_m * block_n // _LEAST_TILE, 1))


def _largest_blocks(problem: Problem) -> dict[str, int]:
    """Return the largest block of each knob: the number of input pixels, or of channels, rounded up to a power of two.

    For n, these are the channels of all groups.
    """
    sizes = problem["m"] * problem["stride"] ** 2, problem["groups"] * problem["n"], problem["k"]
    return {
        knob: max(16, 1 << (size - 1).bit_length())
        for knob, size in zip(InductorConvolutionFamily.tiles, sizes, strict=True)
    }


_WARPS = (2, 4, 8)
#: The flag of attention with a block mask: blocks of keys that no query of a block attends to are left out.
BLOCK_MASK = "block_mask"


def _rounded_heads(problem: Problem) -> tuple[int, int]:
    """Return the head dimensions of keys and values as programs hold them: rounded up to powers of two."""
    head_qk, head_v = (1 << (problem[dim] - 1).bit_length() for dim in ("head_qk", "head_v"))
    return head_qk, head_v


class _Flex(InductorTemplate):
    """Base class of the flex attention families; all blocks count as work, because the mask is unknown.

    `batch` is the batch size times the number of query heads. `groups` query heads share a head of keys and values.
    "block_mask": the call has a block mask, such as a causal one.
    """

    flags: ClassVar[tuple[str, ...]] = (BLOCK_MASK,)
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


class InductorFlexAttentionFamily(_Flex):
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
        head_qk, head_v = _rounded_heads(problem)
        per_step = config["BLOCK_N"] * (head_qk + head_v)
        return int(problem.itemsize * (config["BLOCK_M"] * head_qk + config.num_stages * per_step))

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the work (tiles, steps, bytes) of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        block_m, block_n, itemsize = knobs["BLOCK_M"], knobs["BLOCK_N"], problem.itemsize
        head_qk, head_v = _rounded_heads(problem)
        heads = head_qk + head_v
        return _loop(
            knobs,
            tiles=problem["batch"] * np.ceil(problem["queries"] / block_m),
            steps=np.ceil(problem["keys"] / block_n),
            rows=block_m,
            columns=block_n,
            step_flops=2 * block_m * block_n * heads,
            step_bytes=block_n * heads * itemsize,
            tile_bytes=block_m * head_v * itemsize,
            accumulators=block_m * (head_v + block_n),
            kept_bytes=block_m * head_qk * itemsize,
        )


class InductorFlexDecodingFamily(InductorFlexAttentionFamily):
    """The family of flex attention for decoding.

    A program has all queries of a group of heads and one of `splits` parts of the keys, over which it loops in steps of
    BLOCK_N. BLOCK_M is not a choice: it is the number of these queries, rounded up.
    """

    name = "inductor_flex_decoding"
    dims: ClassVar[tuple[str, ...]] = (*InductorFlexAttentionFamily.dims, "splits")
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": _WARPS,
        "num_stages": (1, 2, 3, 4, 5),
    }

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or None."""
        rows = max(16, 1 << (problem["queries"] - 1).bit_length())
        if (reason := super().supports(config, problem, device)) is not None:
            return reason
        if config["BLOCK_M"] != rows:
            return f"BLOCK_M must be {rows} for queries={problem['queries']} but is {config['BLOCK_M']}"
        return None

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the work (tiles, steps, bytes) of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        block_m, block_n, itemsize = knobs["BLOCK_M"], knobs["BLOCK_N"], problem.itemsize
        head_qk, head_v = _rounded_heads(problem)
        heads = head_qk + head_v
        splits = max(problem["splits"], 1)
        return _loop(
            knobs,
            tiles=0 * block_m + np.ceil(problem["batch"] / max(problem["groups"], 1)) * splits,
            steps=np.maximum(np.ceil(problem["keys"] / splits / block_n), 1),
            rows=block_m,
            columns=block_n,
            step_flops=2 * block_m * block_n * heads,
            step_bytes=block_n * heads * itemsize,
            tile_bytes=block_m * head_v * 4,
            accumulators=block_m * (head_v + block_n),
            kept_bytes=block_m * head_qk * itemsize,
        )


class InductorFlexBackwardFamily(_Flex):
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
        "num_stages": (1, 2, 3, 4, 5),
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
        heads = sum(_rounded_heads(problem))
        of_keys = config["BLOCK_N1"] + config.num_stages * config["BLOCK_M1"]
        of_queries = config["BLOCK_M2"] + config.num_stages * config["BLOCK_N2"]
        return int(problem.itemsize * heads * max(of_keys, of_queries))

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        return 3.5 * super().flops(problem)  # seven products instead of two, because both parts recompute one

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the work (tiles, steps, bytes) of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        m1, n1, m2, n2 = (knobs[knob] for knob in self.tiles)
        head_qk, head_v = _rounded_heads(problem)
        itemsize, heads = problem.itemsize, head_qk + head_v
        batch, queries, keys = problem["batch"], problem["queries"], problem["keys"]
        of_keys = batch / max(problem["groups"], 1) * np.ceil(keys / n1)
        of_queries = batch * np.ceil(queries / m2)
        key_steps, query_steps = np.ceil(queries / m1) * problem["groups"], np.ceil(keys / n2)
        tiles = of_keys + of_queries
        key_share = of_keys * key_steps / (of_keys * key_steps + of_queries * query_steps)

        def mean(of_a_key_program: Column, of_a_query_program: Column) -> Column:
            """Return a quantity's mean over all steps, given its value in both kinds of programs."""
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
            tile_bytes=mean(n1 * heads * itemsize, m2 * head_qk * itemsize),
            accumulators=np.maximum(n1 * (heads + m1), m2 * (head_qk + n2)),
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

"""mm, addmm, bmm, baddbmm and scaled_mm as one family: their templates share a loop, and flags distinguish them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup
from ..config_limits import TMA_ARCHS
from ..gemm_family import Configs, GroupedFeatures, Groups
from ..matmul.features import FEATURE_NAMES, feature_groups
from ..matmul.space import A_KM, B_KN, BIAS, LEAST_COPY_BYTES
from .family import OF_MODEL, InductorTemplate

if TYPE_CHECKING:
    from .family import Column, TiledLoop

#: Accumulators of a thread; Inductor leaves out configs with more, which are certain to spill.
_MOST_ACCUMULATORS = 255
#: The flag of float32 products that are rounded to TF32.
TF32 = "tf32"
#: The least accumulators of a warp, 16 x 16.
_LEAST_TILE = 256
#: TMA needs rows of multiples of this many bytes.
_TMA_BYTES = 16
#: Rows of one warp-group product.
_WARP_GROUP_ROWS = 64
#: Shared memory in addition to operands loaded by TMA: barriers per stage, and float8's exchange of layouts.
_BARRIER_BYTES, _FP8_BYTES = 16, 4096
_WARP = 32
#: Elements per thread of a step's float32 operands that are loaded when they are used, without and with TMA. The others
#: are held in registers and spill, which takes up to 70 times as long (three problems on an H200, torch 2.11).
_STREAMED, _STREAMED_TMA = 600, 40
#: The least depth of a product of 8-bit elements.
_LEAST_DEPTH_FP8 = 32


class InductorMMFamily(GroupedFeatures, InductorTemplate):
    """The family of y = a @ b, with a (batch, m, k) and b (batch, k, n).

    float8 operands have a scale per row and per column.

    Flags: "bias" (addmm and baddbmm: a row is added to each row of y); "a_transposed" and "b_transposed" (the operand
    is stored with its columns contiguous); "tf32" (float32 is rounded to TF32 and multiplied by matrix units, as torch
    does after `torch.set_float32_matmul_precision("high")`; without the flag products are exact). PERSISTENT_TMA=1 is
    the template whose programs loop over tiles and load through TMA; 0 is the one with one program per tile.
    """

    name = "inductor_mm"
    dims = ("batch", "m", "n", "k")
    flags = ("a_transposed", "b_transposed", "bias", TF32)
    tiles: ClassVar[Mapping[str, str]] = {"BLOCK_M": "m", "BLOCK_N": "n", "BLOCK_K": "k"}
    values: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "BLOCK_M": (16, 32, 64, 128, 256),
        "BLOCK_N": (16, 32, 64, 128, 256),
        "BLOCK_K": (16, 32, 64, 128, 256),
        "GROUP_M": (8,),
        "PERSISTENT_TMA": (0, 1),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
    }
    default_dims: ClassVar[Mapping[str, int]] = {"batch": 1}
    largest: ClassVar[Mapping[str, int]] = {"batch": 65535, "m": 2**31 - 1, "n": 2**31 - 1, "k": 2**31 - 1}

    def is_listed(self, config: KernelConfig) -> bool:
        """Return whether Inductor lists a tile of this size with this number of warps."""
        return self._wrong_tile(config) is None

    def _wrong_tile(self, config: KernelConfig) -> str | None:
        """Return why Inductor does not list a tile with this number of warps, or None.

        It lists 2, 4 and 8 warps (TMA: 4 and 8), reduces them to what the tile has work for, and leaves out tiles that
        are certain to spill.
        """
        area, warps = config["BLOCK_M"] * config["BLOCK_N"], config.num_warps
        most = area // _LEAST_TILE
        least = min(4 if config["PERSISTENT_TMA"] else 2, most)
        if not least <= warps <= most:
            return f"num_warps must be {least} to {most} for this tile but is {warps}"
        if area > _MOST_ACCUMULATORS * 32 * warps:
            return f"BLOCK_M or BLOCK_N must be smaller, or num_warps larger: {area} accumulators for {warps} warps"
        return None

    def device_limit(self, config: KernelConfig, device: DeviceSpec) -> str | None:
        """Return why the device cannot run the config for any problem, or None."""
        if config["PERSISTENT_TMA"] and device.arch not in TMA_ARCHS:
            return f"PERSISTENT_TMA must be 0: {device.arch} has no TMA"
        return None

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or None."""
        if (reason := super().supports(config, problem, device)) is not None:
            return reason
        if (reason := self._wrong_tile(config)) is not None:
            return reason
        if unknown := [flag for flag in problem.flags if flag not in self.flags]:
            return f"flag {unknown[0]} is not one of {', '.join(self.flags)}"
        if TF32 in problem.flags and problem.dtype != "fp32":
            return f"flag {TF32} is only valid for fp32, not for {problem.dtype_name}"
        if min(size for _, size in problem.dims) < 1:
            return f"all dimensions must be >= 1 but are {problem}"
        for knob, dim in self.tiles.items():
            most = _largest_block(problem[dim])
            if config[knob] > most:
                return f"{knob} must be at most {most} for {dim}={problem[dim]} but is {config[knob]}"
        if problem.dtype == "fp8e4m3":
            if config["BLOCK_K"] < _LEAST_DEPTH_FP8 or problem["k"] < _LEAST_DEPTH_FP8:
                return f"BLOCK_K and k must be at least {_LEAST_DEPTH_FP8} for fp8e4m3"
            if problem["batch"] > 1 or problem.flags != ("b_transposed",):
                return "scaled_mm takes a row-major a, a transposed b, no batch, and in its templates no bias"
        return _no_tma(problem) if config["PERSISTENT_TMA"] else None

    def supports_by(self, problem: Problem) -> Hashable:
        """Return a key: `supports` gives the same answers for two problems with equal keys."""
        sizes = [problem[dim] for dim in self.dims]
        blocks = [min(_largest_block(problem[dim]), 256) for dim in self.tiles.values()]
        below = min(sizes) < 1, problem["k"] < _LEAST_DEPTH_FP8
        return problem.dtype, problem.flags, *blocks, *below, problem["batch"] > 1, _no_tma(problem)

    @property
    def feature_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features: those of the family `matmul`, and the analytic model's estimates."""
        return (*FEATURE_NAMES, *OF_MODEL)

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        """Return the features that the family `matmul` has for the same work, and those of the analytic model."""
        import numpy as np

        of_call, *others = feature_groups(_as_ours(problem), device, _by_our_knobs(tuple(configs)))
        if is_exact(problem):  # Foretune's own GEMM never is
            of_call.values[..., FEATURE_NAMES.index("fp32")] = 2
        columns = tuple(range(len(FEATURE_NAMES), len(self.feature_names)))
        added = self.of_model(problem, device, self.loop_of(problem, configs))
        return of_call, *others, FeatureGroup(columns, added[None], np.arange(len(configs)))

    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Return the shared memory of one program in bytes."""
        return int(_smem_bytes(problem, config.to_json()))

    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the work (tiles, steps, bytes) of each config; `knobs` has the values of each knob, (n_configs,)."""
        import numpy as np

        from .family import TiledLoop

        block_m, block_n, block_k = (knobs[knob] for knob in self.tiles)
        return TiledLoop(
            tiles=problem["batch"] * np.ceil(problem["m"] / block_m) * np.ceil(problem["n"] / block_n),
            steps=np.ceil(problem["k"] / block_k),
            rows=block_m,
            columns=block_n,
            step_flops=2 * block_m * block_n * block_k,
            step_bytes=(block_m + block_n) * block_k * problem.itemsize,
            tile_bytes=block_m * block_n * max(problem.itemsize, 2),
            accumulators=block_m * block_n + (_held_square(knobs) if is_exact(problem) else _held_rows(problem, knobs)),
            smem_bytes=_smem_bytes(problem, knobs),
            warps=knobs["num_warps"],
            stages=knobs["num_stages"],
            is_persistent=knobs["PERSISTENT_TMA"],
        )

    def multiplied_as(self, problem: Problem) -> str:
        """Return the dtype that decides the speed of products."""
        return TF32 if TF32 in problem.flags else problem.dtype_name

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""
        return 2.0 * problem["batch"] * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one call reads and writes."""
        m, n, k = problem["m"], problem["n"], problem["k"]
        elements = problem.itemsize * (m + n) * k + max(problem.itemsize, 2) * m * n
        return float(problem["batch"] * elements)


def _no_tma(problem: Problem) -> str | None:
    """Return why the template that loads through TMA cannot run the problem, or None."""
    if problem["batch"] > 1:
        return "PERSISTENT_TMA must be 0 in a batch: Inductor has no such template"
    if problem["m"] == 1:  # it silently treats one row as a column (measured on an H200, torch 2.11)
        return "PERSISTENT_TMA must be 0 with m=1: Inductor's template computes wrong results"
    rows = _row_lengths(problem)
    if any(problem[dim] * problem.itemsize % _TMA_BYTES for dim in rows):
        return f"PERSISTENT_TMA must be 0: rows of {rows[0]} and {rows[1]} are not multiples of 16 bytes"
    return None


def _largest_block(size: int) -> int:
    """Return the largest block that Inductor uses for a dimension of this size.

    It is the size rounded up to a power of two, and at least 16.
    """
    return max(16, 1 << (size - 1).bit_length())


def _row_lengths(problem: Problem) -> tuple[str, str]:
    """Return the contiguous dimensions of a and of b."""
    return ("m" if "a_transposed" in problem.flags else "k"), ("k" if "b_transposed" in problem.flags else "n")


def _as_ours(problem: Problem) -> Problem:
    """Convert the problem to one of the family `matmul` with the same work; fp8 becomes int8, its only 8-bit dtype."""
    turned = {A_KM: "a_transposed" in problem.flags, B_KN: "b_transposed" not in problem.flags}
    flags = tuple(flag for flag, is_set in {**turned, BIAS: BIAS in problem.flags}.items() if is_set)
    dtype = "int8" if problem.dtype == "fp8e4m3" else problem.dtype
    return replace(problem, family="matmul", dtype=dtype, flags=flags)


@remembered(maxsize=64)
def _by_our_knobs(configs: tuple[KernelConfig, ...]) -> tuple[KernelConfig, ...]:
    """Convert the configs to configs of the family `matmul` with the same tiles."""
    kept = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")
    return tuple(
        KernelConfig.of(
            **{knob: config[knob] for knob in kept},
            SPLIT_K=1,
            **dict.fromkeys(("TMA", "PROGRAMS_PER_SM"), config["PERSISTENT_TMA"]),
            **dict.fromkeys(("CONSUMERS", "PINGPONG"), 0),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        for config in configs
    )


def is_exact(problem: Problem) -> bool:
    """Return whether the problem is multiplied without matrix units: float32 without TF32."""
    return problem.dtype == "fp32" and TF32 not in problem.flags


def is_unaligned(problem: Problem) -> bool:
    """Return whether n or k is no multiple of 16 bytes, whatever the layout."""
    return any(problem[dim] * problem.itemsize % _TMA_BYTES for dim in ("n", "k"))


def _held_rows(problem: Problem, knobs: Mapping[str, Column]) -> Column:
    """Return the number of operand elements that a program holds in registers before storing them to shared memory.

    These are the elements of operands whose rows do not start at multiples of 4 bytes, the minimum that cp.async copies
    directly (PTX ISA). Each takes a register.
    """
    import numpy as np

    held = np.zeros_like(knobs["BLOCK_K"])
    for block, dim in zip(("BLOCK_M", "BLOCK_N"), _row_lengths(problem), strict=True):
        if problem[dim] * problem.itemsize % LEAST_COPY_BYTES:
            held += knobs[block] * knobs["BLOCK_K"]
    return held


def _held_square(knobs: Mapping[str, Column]) -> Column:
    """Return the number of operand elements that a program holds in registers for products without matrix units.

    In exact float32 products, each thread computes a square of the tile.
    """
    import numpy as np

    threads = _WARP * knobs["num_warps"]
    operands = 2 * np.sqrt(knobs["BLOCK_M"] * knobs["BLOCK_N"] / threads) * knobs["BLOCK_K"]
    streamed = np.where(knobs["PERSISTENT_TMA"] > 0, _STREAMED_TMA, _STREAMED)
    return np.asarray(np.maximum(operands - streamed, 0.0) * threads, dtype=np.float64)


def _smem_bytes(problem: Problem, knobs: Mapping[str, Any]) -> Any:
    """Return the shared memory of a program in bytes, for numbers or columns.

    This is the size of the stages in flight, or of y while its layout changes before the store, if that is larger.
    Kernels compiled for sm_90 by Triton 3.9 have this size or less. Products of whole warp groups read all stages from
    shared memory; others read operands into registers, which saves one stage.
    """
    block_m, block_n, stages = knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["num_stages"]
    by_warp_groups = (block_m >= _WARP_GROUP_ROWS) * (knobs["num_warps"] >= 4) * (not is_exact(problem))
    in_flight = stages - (1 - by_warp_groups) * (stages > 1)
    operands = in_flight * (block_m + block_n) * knobs["BLOCK_K"] * problem.itemsize
    is_wide = (
        problem.dtype in ("fp32", "fp8e4m3") or "bias" in problem.flags
    )  # y is combined with others in its accumulated dtype
    y = block_m * block_n * (4 if is_wide else 2)
    extra = _BARRIER_BYTES * stages + (_FP8_BYTES if problem.dtype == "fp8e4m3" else 0)
    return operands + (y - operands) * (y > operands) + knobs["PERSISTENT_TMA"] * extra

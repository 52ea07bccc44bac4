"""The comparison of the scaled GEMMs with `torch._scaled_mm`, `torch._scaled_grouped_mm` and bf16 products.

torch's fp8 products get the same operands, where this torch and this GPU support the granularity of the scales.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import Case, DeviceSpec, Measurable, Problem
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row
from ..grouped_gemm.group_sizes import drawn_sizes
from ..registry import judge_predicted
from .dw_family import DWInputs, ScaledGroupedGemmDW
from .family import Inputs
from .space import BLOCKWISE, DTYPE, GRANULARITIES, ROWWISE, SCALED, flags_of, granularity_of
from .workload import DEEPSEEK_V3

if TYPE_CHECKING:
    import torch

#: Dense layers: name, (N, K).
_DENSE = {f"DeepSeek-V3/{name}": DEEPSEEK_V3[name] for name in ("q_b", "kv_a", "shared_gate_up", "o", "down")}
_DENSE |= {"Llama-3.1-70B/qkv": (10240, 8192), "Qwen3-8B/down": (4096, 12288)}
_TOKENS = (16, 256, 4096)
#: Layers of experts on one rank: name, (groups, N, K); and phases: routed rows, routing.
_EXPERTS = {
    "DeepSeek-V3/w13": (32, 4096, 7168),
    "DeepSeek-V3/w2": (32, 7168, 2048),
    "Qwen3-30B-A3B/w13": (128, 1536, 2048),
}
_PHASES = {"decode": (256, "uniform"), "mid": (4096, "zipf"), "training": (32768, "uniform")}


class ScaledGemmComparison:
    """The comparison of the scaled GEMMs with other implementations: problems, contenders and goals.

    It implements `runtime.timing.compare.Comparison`; `compare_kernels` times the contenders.
    """

    others = ("torch", "fast", "bf16")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the problems of the comparison, by name."""
        if family.name == ScaledGroupedGemmDW.name:
            return dict(_gradients())
        return dict(_experts(family.name) if "groups" in family.dims else _layers(family.name))

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Inputs | DWInputs, device: DeviceSpec, best: BestConfigs
    ) -> dict[str, Callable[[], Any]]:
        """Return functions by contender that each compute the problem once.

        "torch" is torch's product with these scales, accumulated in float32 as in Foretune's kernel. "fast" accumulates
        in the tensor cores only, which is less exact. "bf16" is the product of the operands in bf16, which has twice
        the bytes.
        """
        if isinstance(inputs, DWInputs):
            ways = _gradient_contenders(inputs)
            return {name: way for name, way in ways.items() if _runs(way)}
        ways = _grouped_contenders(inputs) if inputs.group_sizes is not None else _dense_contenders(inputs)
        return {name: way for name, way in ways.items() if _runs(way)}

    def launch_path(self, device: DeviceSpec) -> LaunchPath | None:
        """Return None, which leaves out the comparison of host times: quantizing would dominate it."""
        return None

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the performance goals for these kernels, judged by the measured `rows`; omit goals without rows."""
        judged: list[Goal] = []
        for family in dict.fromkeys(row.family for row in rows):
            for granularity in GRANULARITIES:
                chosen = [row for row in rows if row.family == family and _kind_of(row.problem) == granularity]
                over = dict.fromkeys(("torch", "fast", "bf16"), (0.9, 1.0))
                judged += judge_predicted(chosen, over, f"{family} {granularity}, predicted config, over {{}}")
        return judged


#: Found by `kernels.registry.comparison_of`.
COMPARISON = ScaledGemmComparison()


def _layers(family: str) -> Iterator[tuple[str, Case]]:
    """Yield (name, case) of the dense family's suite: layers, token counts and granularities of the scales."""
    for layer, (n, k) in _DENSE.items():
        for m in _TOKENS:
            for granularity in GRANULARITIES:
                problem = Problem.of(family, dtype=DTYPE, flags=flags_of(granularity), m=m, n=n, k=k)
                yield f"{layer} {m} {granularity}", Case(problem, (layer,))


def _experts(family: str) -> Iterator[tuple[str, Case]]:
    """Yield (name, case) of the grouped family's suite: layers of experts, phases and granularities of the scales."""
    for layer, (groups, n, k) in _EXPERTS.items():
        for phase, (rows, routing) in _PHASES.items():
            sizes = drawn_sizes(routing, rows, groups, np.random.default_rng(zlib.crc32(f"{layer} {phase}".encode())))
            dims = {"groups": groups, "rows": rows, "n": n, "k": k}
            for granularity in GRANULARITIES:
                problem = Problem.of(family, dtype=DTYPE, flags=flags_of(granularity), ragged={"rows": sizes}, **dims)
                yield f"{layer} {phase} {granularity}", Case(problem, (layer,), routing)


def _gradients() -> Iterator[tuple[str, Case]]:
    """Yield (name, case) of the suite of dW: training layers with equal groups, of sizes that torch's kernel takes."""
    rows, _ = _PHASES["training"]
    for layer, (groups, n, k) in _EXPERTS.items():
        dims = {"groups": groups, "rows": rows, "n": n, "k": k}
        sizes = {"rows": (rows // groups,) * groups}
        for granularity in (ROWWISE, BLOCKWISE):
            flags = tuple(flag for flag in flags_of(granularity) if flag in ScaledGroupedGemmDW.flags)
            problem = Problem.of(ScaledGroupedGemmDW.name, dtype=DTYPE, flags=flags, ragged=sizes, **dims)
            yield f"{layer} training {granularity}", Case(problem, (layer,), "balanced")


def _kind_of(problem: Problem) -> str:
    """Return the granularity of a problem's scales, as text; "rowwise" for dW with one scale per column of a group."""
    is_dw = problem.family == ScaledGroupedGemmDW.name
    return ROWWISE if is_dw and not problem.flags else granularity_of(problem)


def _gradient_contenders(i: DWInputs) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions by contender that each compute dW of these inputs once.

    torch's fp8 product is left out for blockwise scales, which it lacks. There are no contenders at all unless each
    group has a multiple of 16 rows, because torch's kernels fail on the device otherwise.
    """
    import torch

    from .quantize import LARGEST, dequantized_columns

    sizes, blockwise = i.group_sizes.tolist(), BLOCKWISE in i.problem.flags
    if any(size % 16 for size in sizes):
        return {}
    groups = list(enumerate(zip([sum(sizes[:group]) for group in range(len(sizes))], sizes, strict=True)))
    offsets = i.group_sizes.cumsum(0).to(torch.int32)

    def joined(xt: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        parts = [
            dequantized_columns(xt, scale, start, size, group, blockwise, torch.bfloat16)
            for group, (start, size) in groups
        ]
        return torch.cat(parts, 1)

    dy, x = joined(i.dy, i.dy_scale), joined(i.x, i.x_scale).t().contiguous()
    ways: dict[str, Callable[[], torch.Tensor]] = {"bf16": lambda: torch._grouped_mm(dy, x, offs=offsets)}
    if not blockwise:
        n, k = i.out.shape[1:]
        places = [(start // SCALED + group) * SCALED for group, (start, _) in groups]
        dy8, x8 = (
            torch.cat([xt[:, place:][:, :size] for place, size in zip(places, sizes, strict=True)], 1)
            for xt in (i.dy, i.x)
        )
        scales = tuple(
            scale[:, :columns].reshape(-1) / LARGEST[i.x.dtype] for scale, columns in ((i.dy_scale, n), (i.x_scale, k))
        )
        scaled = partial(
            torch._scaled_grouped_mm, dy8, x8.t(), scales[0], scales[1], offs=offsets, out_dtype=torch.bfloat16
        )
        ways |= {"torch": partial(scaled, use_fast_accum=False), "fast": partial(scaled, use_fast_accum=True)}
    return ways


def _dense_contenders(i: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions by contender that each compute the dense product of these inputs once."""
    import torch

    granularity = granularity_of(i.problem)
    x_scale, w_scale = i.x_scale, i.w_scale
    if granularity == ROWWISE:
        w_scale = w_scale.reshape(1, -1)
    elif granularity == BLOCKWISE:
        # cuBLAS requires the scales of each block of N, along K, to begin at a multiple of four floats.
        n_blocks, k_blocks = w_scale.shape
        padded = w_scale.new_zeros(n_blocks, -(-k_blocks // 4) * 4)
        padded[:, :k_blocks] = w_scale
        w_scale = padded[:, :k_blocks].t()
    scaled = partial(torch._scaled_mm, i.x, i.w.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=torch.bfloat16)
    x, w = i.x.bfloat16(), i.w.bfloat16().t()
    ways = {"torch": partial(scaled, use_fast_accum=False)}
    if granularity != BLOCKWISE:
        ways["fast"] = partial(scaled, use_fast_accum=True)
    return ways | {"bf16": lambda: torch.mm(x, w)}


def _grouped_contenders(i: Inputs) -> dict[str, Callable[[], torch.Tensor]]:
    """Return functions by contender that each compute the grouped product of these inputs once."""
    import torch

    assert i.group_sizes is not None
    offsets = i.group_sizes.cumsum(0).to(torch.int32)
    x, w = i.x.bfloat16(), i.w.bfloat16().transpose(-2, -1)
    ways: dict[str, Callable[[], torch.Tensor]] = {"bf16": lambda: torch._grouped_mm(x, w, offs=offsets)}
    if granularity_of(i.problem) == ROWWISE:
        scales = (i.x_scale.reshape(-1), i.w_scale)
        transposed = i.w.transpose(-2, -1)
        scaled = partial(torch._scaled_grouped_mm, i.x, transposed, *scales, offs=offsets, out_dtype=torch.bfloat16)
        ways |= {
            "torch": partial(scaled, use_fast_accum=False),
            "fast": partial(scaled, use_fast_accum=True),
        }
    return ways


def _runs(way: Callable[[], Any]) -> bool:
    """Run a contender, and return whether this torch supports it on this GPU; torch has no other way to find out."""
    try:
        way()
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True

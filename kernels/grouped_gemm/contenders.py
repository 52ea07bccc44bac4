"""The comparison of the grouped GEMMs with other implementations.

The contenders are `torch._grouped_mm`, QuACK if it is installed, a dense cuBLAS product of the same FLOPs, torch's
permutations, and a bare launch. The problems are real layers, from decode to training, with several routings. The
project's goals are defined here too.

No figure includes building the tile map, nor the offsets of the groups' rows for the others: both are built once per
layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row, judge_least, judge_most
from ..registry import judge_predicted
from ..workloads import Model, load_models
from .group_sizes import drawn_sizes
from .measurable import GroupedGemm, GroupedGemmForward, Inputs
from .space import DW, DX, FORWARD
from .workload import PERMUTATION

if TYPE_CHECKING:
    import torch
    import triton

#: Layers: model, projection, expert-parallel degree.
LAYERS = (
    ("Qwen3-30B-A3B", "w13", 1),
    ("Qwen3-30B-A3B", "w2", 1),
    ("Mixtral-8x7B", "w13", 1),
    ("OLMoE-1B-7B", "w2", 1),
    ("DeepSeek-V3/R1", "w2", 8),
    ("Nemotron-3-Nano-30B-A3B", "w13", 1),
)
#: Phases: the tokens of the layer over all ranks, and the routings. Training is also run with a fused permutation.
PHASES = {
    "decode": (64, ("uniform",)),
    "mid": (1024, ("uniform", "zipf")),
    "training": (8192, ("balanced", "zipf", "hot")),
}
#: The number of rows in training is limited so that a launch has at most this many floating-point operations and takes
#: milliseconds.
MOST_FLOPS = 2.0e12


def suite_cases(family: str, models: Sequence[Model]) -> dict[str, Case]:
    """Return the problems to compare one family on, by a name "MODEL/PROJECTION phase routing".

    They are the same in every process.

    Raises:
        ForetuneError: A model of the suite is not among `models`.

    >>> from ..workloads import load_models
    >>> cases = suite_cases("grouped_gemm_dw", load_models())
    >>> cases["OLMoE-1B-7B/w2 training balanced"].problem["rows"]
    65536
    """
    by_name = {model.model: model for model in models}
    cases = {}
    for name, projection, degree in LAYERS:
        if name not in by_name:
            raise ForetuneError(
                f"the suite needs the model {name}, but the given models are {', '.join(sorted(by_name))}"
            )
        model = by_name[name]
        n, k = model.projections()[projection]
        groups = model.num_experts // degree
        for phase, (tokens, routings) in PHASES.items():
            rows = min(tokens * model.top_k // degree, int(MOST_FLOPS / (2 * n * k)) // 1024 * 1024 or 1024)
            for routing in routings:
                layer = f"{name}/{projection}"
                rng = np.random.default_rng(zlib.crc32(f"{layer} {phase} {routing}".encode()))
                sizes = drawn_sizes(routing, rows, groups, rng)
                plain = Problem.of(family, ragged={"rows": sizes}, groups=groups, rows=rows, n=n, k=k)
                cases[f"{layer} {phase} {routing}"] = Case(plain, (layer,), routing)
                if phase == "training" and routing == "balanced":
                    flag = PERMUTATION[projection]
                    fused = replace(plain, flags=(flag,))
                    cases[f"{layer} {phase} {routing} {flag}"] = Case(fused, (layer,), routing)
    return cases


class GroupedGemmComparison:
    """The comparison of the grouped GEMMs with other implementations: problems, contenders and goals.

    It implements `runtime.timing.compare.Comparison`; `compare_kernels` times the contenders.
    """

    others = ("torch", "dense", "quack", "quack_tuned", "separate", "unfused")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the problems of the comparison, by a name "MODEL/PROJECTION phase routing"."""
        return suite_cases(family.name, load_models())

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Inputs, device: DeviceSpec, best: BestConfigs
    ) -> dict[str, Callable[[], Any]]:
        """Return functions by contender that each run the problem once.

        "torch" is `torch._grouped_mm`, with the problem's permutation, "quack" and "quack_tuned" are QuACK's kernel
        with two configs (see `_quack`), and "dense" is one product of the same FLOPs. If a permutation is fused,
        "separate" is the permutation alone, "unfused" the same GEMM without it, with its best config, and QuACK is left
        out.
        """
        launches = _others(family.name, inputs)
        if not problem.flags:
            launches |= _quack(family.name, inputs)
        else:
            plain = replace(problem, flags=())
            if configs := best.get(plain):
                others = family.inputs(plain, device)
                launches["unfused"] = lambda: family.launch(others, configs[0])
        return launches

    def launch_path(self, device: DeviceSpec) -> LaunchPath:
        """Measure the host time of a call of the op and of a bare launch of its kernel."""
        return time_launch_path(GroupedGemmForward(), device)

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the performance goals for these kernels, judged by the measured `rows`; omit goals without rows."""
        plain = [row for row in rows if "separate" not in row.others_us]
        judged: list[Goal] = []
        for label, families, aim in (("fwd and dX", (FORWARD, DX), 1.25), ("dW", (DW,), 1.1)):
            names = [variant.name for variant in families]
            chosen = [row for row in plain if row.family in names and "torch" in row.others_us]
            for which in ("best", "predicted"):
                ours_us = [row.ours_us if which == "best" else row.predicted_us for row in chosen]
                ratios = [row.others_us["torch"] / ours for row, ours in zip(chosen, ours_us, strict=True)]
                judged += judge_least(f"{label}, {which} config, over torch._grouped_mm", chosen, ratios, 1.0, aim)
        training = [row for row in plain if " training " in row.name]
        for label, families, mean in (("fwd and dX", (FORWARD, DX), 1.0), ("dW", (DW,), 0.98)):
            chosen = [row for row in training if row.family in [variant.name for variant in families]]
            aims = dict.fromkeys(("quack", "quack_tuned"), (0.0, mean))
            judged += judge_predicted(chosen, aims, f"{label}, training, predicted config, over {{}}")
        tall = [row for row in plain if _rows_per_expert(row.problem) >= 1024 and "dense" in row.others_us]
        ratios = [row.others_us["dense"] / row.ours_us for row in tall]
        judged += judge_least("rows per expert >= 1024, over dense cuBLAS", tall, ratios, 0.88)
        few = [row for row in plain if _rows_per_expert(row.problem) <= 8]
        ratios = [row.roofline_us / row.ours_us for row in few]
        judged += judge_least("<= 8 rows per active expert, over the read bandwidth", few, ratios, 0.85)
        fused = [row for row in rows if "unfused" in row.others_us]
        ratios = [row.ours_us / row.others_us["unfused"] for row in fused]
        judged += judge_most("fused permutation over the unfused GEMM", fused, ratios, 1.05)
        both = [row for row in fused if "separate" in row.others_us]
        ratios = [row.ours_us / (row.others_us["unfused"] + row.others_us["separate"]) for row in both]
        judged += judge_most("fused permutation over GEMM + permutation", both, ratios, 1.0)
        even = {(row.family, _layer(row)): row for row in plain if row.name.endswith(" balanced")}
        hot = [
            (row, balanced)
            for row in plain
            if row.name.endswith(" hot")
            and (balanced := even.get((row.family, _layer(row))))
            and row.compute_us > row.memory_us
        ]
        ratios = [row.ours_us / balanced.ours_us for row, balanced in hot]
        return judged + judge_most(
            "one expert with half the rows, over balanced", [row for row, _ in hot], ratios, 1.15
        )


#: Found by `kernels.registry.comparison_of`.
COMPARISON = GroupedGemmComparison()


def _layer(row: Row) -> str:
    """Return a row's layer and phase, without its routing."""
    return row.name.rsplit(" ", 1)[0]


def _rows_per_expert(problem: Problem) -> float:
    """Return the mean number of rows per expert that has any."""
    return problem["rows"] / max(problem.ragged.active if problem.ragged else problem["groups"], 1)


def _others(family: str, inputs: Any) -> dict[str, Callable[[], Any]]:
    """Return contenders on the same tensors.

    "torch" is its grouped GEMM, before or after which the rows are permuted if the problem has a permutation, and
    "dense" one product of equal FLOPs. "separate" is the permutation alone.
    """
    import torch

    left, right, rows = inputs.left, inputs.right, inputs.problem["rows"]
    offsets = inputs.group_sizes.cumsum(0).to(torch.int32)
    moved, indices = _permutation(family, inputs)

    def sort(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(0, indices) if name == moved else tensor

    def factors(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return left.t() if family == DW.name else left, right.mT if family == FORWARD.name else right

    def torch_product() -> torch.Tensor:
        pair = factors(sort("left", left), sort("right", right))
        return sort("out", torch._grouped_mm(*pair, offs=offsets))

    full = (one if one.dim() == 3 or len(one) == rows else sort(moved, one) for one in (left, right))
    of_dense = [one[0] if one.dim() == 3 else one for one in factors(*full)]
    launches: dict[str, Callable[[], Any]] = {"torch": torch_product, "dense": lambda: torch.mm(*of_dense)}
    if moved:
        launches["separate"] = lambda: getattr(inputs, moved).index_select(0, indices)
    return launches


def _quack(family: str, inputs: Any) -> dict[str, Callable[[], Any]]:
    """Return contenders that run QuACK's grouped GEMM on the same tensors; none if quack-kernels is not installed.

    "quack" has QuACK's default config, and "quack_tuned" the fastest config of its search space. The first call of the
    latter measures them; QuACK's key contains the shapes but not the sizes of the groups.
    """
    try:
        from quack.gemm_interface import gemm
    except ImportError:
        return {}
    import torch

    ends = torch.nn.functional.pad(inputs.group_sizes.cumsum(0), (1, 0)).to(torch.int32)
    left, right, ragged = inputs.left, inputs.right, "cu_seqlens_m"
    if family == FORWARD.name:
        right = right.mT
    elif family == DW.name:
        left, ragged = left.t(), "cu_seqlens_k"
    given = {ragged: ends}
    return {
        "quack": lambda: gemm(left, right, inputs.out, tuned=False, **given),
        "quack_tuned": lambda: _quack_tuner()(left, right, inputs.out, **given),
    }


@cache
def _quack_tuner() -> Callable[..., Any]:
    """Return QuACK's autotuner of its GEMM, but measure each config for 25 ms; with its own timer, it takes 0.6 s."""
    from quack.autotuner import autotune
    from quack.gemm_interface import gemm_tuned, prune_invalid_gemm_configs
    from triton.testing import do_bench

    tuner: Callable[..., Any] = autotune(
        gemm_tuned.configs,
        gemm_tuned.keys,
        prune_configs_by={"early_config_prune": prune_invalid_gemm_configs},
        do_bench=partial(do_bench, warmup=5, rep=25),
        cache_results=False,
    )(gemm_tuned.fn)
    return tuner


def _permutation(family: str, inputs: Any) -> tuple[str, Any]:
    """Return the tensor that the problem's permutation applies to, and the rows to select from it.

    The tensor is "left", "right" or "out", an attribute of the inputs; the result is ("", None) without a permutation.
    """
    flags = inputs.problem.flags
    if not flags:
        return "", None
    of_x = "permute_x" in flags
    moved = {FORWARD.name: ("out", "left"), DX.name: ("left", "out"), DW.name: ("left", "right")}[family][of_x]
    indices = inputs.indices.long()
    if moved == "out":  # sorted row i is stored as row indices[i]
        return moved, indices.argsort()
    return moved, indices // inputs.topk if of_x else indices


def time_launch_path(family: GroupedGemm, device: DeviceSpec) -> LaunchPath:
    """Measure the host times of the op and of a bare launch of its main kernel, on a small problem of `family`."""
    from .op import grouped_gemm
    from .triton_kernels.gemm import grouped_gemm_kernel

    problem = Problem.of(family.name, groups=8, rows=64, n=256, k=256)
    inputs = family.inputs(problem, device)
    without = dict.fromkeys(family.tma, 0)  # so that no descriptors are needed
    config = KernelConfig.from_json(family.default(problem, device).to_json() | without)
    constants = {"TRANSPOSED": False, "GATHER": False, "SCATTER": False} | config.to_json()
    arguments = family.arguments(inputs)

    def bare() -> None:
        grouped_gemm_kernel[(device.sm_count,)](*arguments, **constants)

    def op() -> torch.Tensor:
        return grouped_gemm(inputs.left, inputs.right, inputs.group_sizes, config=config)

    return LaunchPath.timed("foretune.grouped_gemm", op, bare)


def autotuned(
    family: GroupedGemm,
    inputs: Inputs,
    configs: Sequence[triton.Config],
    declare: Callable[..., Callable[[Any], Any]] | None = None,
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return a new autotuner of the kernel over these configs, and a function that calls it once.

    The autotuner is declared as a user would declare it, with nothing compiled in memory yet. The function runs on
    these inputs, or on those it is given; `runtime.bench` times it.

    Args:
        family: The family of the kernel.
        inputs: The default inputs of the call.
        configs: The configs to tune.
        declare: The decorator, called as `declare(configs, key)`: `triton.autotune` if omitted, or, for example, one
            with a pruning callback.
    """
    import triton

    from ...runtime.launching.launcher import ensure_allocator

    kernel, unspecialized, key = family.kernel()
    fresh = triton.jit(do_not_specialize=unspecialized)(kernel.fn)
    tuner = (declare or triton.autotune)(list(configs), key)(fresh)

    def call(inputs: Inputs = inputs) -> torch.Tensor:
        ensure_allocator()
        arguments, sm_count = family.arguments(inputs), inputs.device.sm_count
        tuner[lambda meta: (sm_count * meta["PROGRAMS_PER_SM"],)](*arguments, **family.constants(inputs.problem))
        family.finish(inputs, arguments)
        return inputs.out

    return tuner, call

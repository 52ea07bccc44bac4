"""What the grouped GEMMs are compared on, and how their goals are judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.kernels import find_family, find_measurable
from foretune.kernels.grouped_gemm import contenders
from foretune.kernels.grouped_gemm.contenders import LAYERS, PHASES, suite_cases
from foretune.kernels.grouped_gemm.space import DW, DX, FORWARD
from foretune.kernels.registry import baselines_of, comparison_of
from foretune.kernels.workloads import load_models
from foretune.runtime.timing.compare import Row
from grouped import CPU

FAMILIES = [variant.name for variant in (FORWARD, DX, DW)]
COMPARISON = comparison_of(find_family(FORWARD.name))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_suite_is_the_same_every_time_and_every_problem_can_run(name):
    kernel, h200 = find_family(name), DeviceSpec.named("h200")
    cases = COMPARISON.suite(kernel)
    assert cases == COMPARISON.suite(kernel) == suite_cases(name, load_models())
    assert len(cases) == len(LAYERS) * (sum(len(routings) for _, routings in PHASES.values()) + 1)
    for case in cases.values():
        assert kernel.supports(kernel.default(case.problem, h200), case.problem, h200) is None


def test_the_suite_says_which_model_it_lacks():
    with pytest.raises(ForetuneError, match="needs the model Qwen3-30B-A3B, but the given models are Mixtral-8x7B"):
        suite_cases("grouped_gemm_fwd", [model for model in load_models() if model.model == "Mixtral-8x7B"])


def problem(family, rows):
    """Of two groups, with so many rows each."""
    return Problem.of(family, groups=2, rows=2 * rows, n=64, k=64, ragged={"rows": (rows, rows)})


ROW = Row(
    name="M/w13 training balanced",
    family=FORWARD.name,
    problem=problem(FORWARD.name, 1024),
    best_us=100.0,
    predicted_us=110.0,
    others_us={"torch": 140.0, "dense": 90.0},
    compute_us=80.0,
    memory_us=40.0,
    config=KernelConfig.of(BLOCK_M=64),
)


def with_others(row, **others_us):
    return replace(row, others_us=dict(row.others_us) | others_us)


def judged(*rows):
    return {goal.goal: goal for goal in COMPARISON.goals(rows)}


def test_each_row_and_the_mean_must_reach_the_aim():
    label = "fwd and dX, best config, over torch._grouped_mm"
    assert judged(ROW)[label].met  # 1.4
    assert judged(ROW, with_others(ROW, torch=112.0))[label].met  # 1.12 and 1.25 in geomean
    missed = judged(ROW, with_others(replace(ROW, name="slow", family=DX.name), torch=99.0))[label]
    assert not missed.met
    assert missed.worst == "grouped_gemm_dx slow"
    assert not judged(with_others(ROW, torch=124.0))[label].met  # over 1.0, but 1.24 in geomean
    assert judged(ROW)["fwd and dX, predicted config, over torch._grouped_mm"].figure.startswith("worst 1.273")


def test_goals_are_about_the_rows_they_are_about():
    few = replace(ROW, name="M/w13 decode uniform", problem=problem(FORWARD.name, 2), memory_us=86.0)
    found = judged(few)
    assert "rows per expert >= 1024, over dense cuBLAS" not in found
    assert found["<= 8 rows per active expert, over the read bandwidth"].met
    assert judged(ROW)["rows per expert >= 1024, over dense cuBLAS"].met
    assert not judged(with_others(ROW, dense=87.0))["rows per expert >= 1024, over dense cuBLAS"].met


def test_a_fused_permutation_is_judged_by_the_unfused_problem_and_not_by_torch():
    fused = replace(ROW, name="M/w13 training balanced permute_x", others_us={"separate": 20.0, "unfused": 96.0})
    found = judged(fused)
    assert found["fused permutation over the unfused GEMM"].met  # 1.042
    assert found["fused permutation over GEMM + permutation"].met
    assert not judged(with_others(fused, unfused=95.0))["fused permutation over the unfused GEMM"].met
    assert not any("torch" in goal for goal in found)


def test_a_hot_expert_is_compared_with_balanced_rows_of_the_same_layer():
    hot = replace(ROW, name="M/w13 training hot", best_us=114.0)
    label = "one expert with half the rows, over balanced"
    assert judged(ROW, hot)[label].met
    assert not judged(ROW, replace(hot, best_us=116.0))[label].met
    assert label not in judged(ROW, replace(hot, family=DW.name))
    assert label not in judged(ROW, replace(hot, memory_us=90.0))  # limited by memory, not by work


def test_baselines_of_a_family_alone_are_found_beside_it(monkeypatch):
    from fakes import FakeFamily
    from foretune.kernels.grouped_gemm import contenders

    family, own = find_family("grouped_gemm_fwd"), {"mine": object()}
    assert baselines_of(family) == baselines_of(FakeFamily()) == {}
    monkeypatch.setattr(contenders, "BASELINES", own, raising=False)
    assert baselines_of(family) == own


def documented_gemm(a, b, out, *, tuned, cu_seqlens_m=None, cu_seqlens_k=None):
    """QuACK's `gemm` as its signature documents it: a (m, k) and b (k, n); the groups split m or k."""
    assert not tuned
    if cu_seqlens_m is not None:
        for group, (start, end) in enumerate(pairwise(cu_seqlens_m.tolist())):
            out[start:end] = a[start:end] @ b[group]
    else:
        for group, (start, end) in enumerate(pairwise(cu_seqlens_k.tolist())):
            out[group] = a[:, start:end] @ b[start:end]


@pytest.mark.parametrize("name", FAMILIES)
def test_quack_gets_the_operands_of_each_product_if_it_is_installed(name, monkeypatch):
    torch = pytest.importorskip("torch")
    sizes, n, k = (3, 0, 5), 4, 6
    dy, w, x = torch.randn(8, n), torch.randn(3, n, k), torch.randn(8, k)
    left, right, shape = {
        FORWARD.name: (x, w, (8, n)),
        DX.name: (dy, w, (8, k)),
        DW.name: (dy, x, (3, n, k)),
    }[name]
    inputs = SimpleNamespace(left=left, right=right, out=torch.full(shape, torch.nan), group_sizes=torch.tensor(sizes))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    assert contenders._quack(name, inputs) == {}
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", SimpleNamespace(gemm=documented_gemm))
    contenders._quack(name, inputs)["quack"]()
    rows = [slice(0, 3), slice(3, 3), slice(3, 8)]
    expected = {
        FORWARD.name: lambda: torch.cat([x[r] @ w[group].t() for group, r in enumerate(rows)]),
        DX.name: lambda: torch.cat([dy[r] @ w[group] for group, r in enumerate(rows)]),
        DW.name: lambda: torch.stack([dy[r].t() @ x[r] for r in rows]),
    }[name]()
    torch.testing.assert_close(inputs.out, expected)


def test_quack_is_judged_on_training_alone():
    goal = "fwd and dX, training, predicted config, over quack"
    row = with_others(ROW, quack=112.0)  # 1.018 of ours
    assert judged(row)[goal].met
    assert not judged(row, with_others(replace(ROW, family=DX.name), quack=107.0))[goal].met  # 0.973, 0.995 in geomean
    assert goal not in judged(replace(row, name="M/w13 decode uniform"))
    assert judged(with_others(replace(ROW, family=DW.name), quack=108.0))[goal.replace("fwd and dX", "dW")].met  # 0.982


@pytest.mark.interpret
@pytest.mark.parametrize("flag", ["permute_x", "permute_y", None])
@pytest.mark.parametrize("name", FAMILIES)
def test_torch_computes_the_same_product_with_the_permutation(name, flag):
    family = find_measurable(name)
    flags = (flag,) if flag else ()
    small = Problem.of(name, groups=3, rows=48, n=32, k=64, flags=flags, ragged={"rows": (16, 0, 32)})
    inputs = family.inputs(small, CPU)
    launches = COMPARISON.contenders(family, small, inputs, CPU, {})
    expected = family.reference(inputs)
    torch.testing.assert_close(launches["torch"]().float(), expected, rtol=0.02, atol=0.02 * float(expected.std()))
    assert launches["dense"]().shape == expected.shape[-2:]
    assert ("separate" in launches) == (flag is not None)

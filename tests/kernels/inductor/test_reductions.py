"""`foretune.use("inductor")` and reductions: what is read from the sources that the installed Inductor writes, and the
configs that are written into them."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace
from unittest.mock import patch

import foretune
import numpy as np
import pytest
import torch
from foretune import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.inductor import choices, reduction
from foretune.kernels.inductor.reduction import InductorPersistentReduction, InductorReduction, ReductionSource
from foretune.kernels.integrations import inductor
from lowered import lowered, tensor

pytestmark = pytest.mark.compile
H200 = DeviceSpec.named("h200")
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)
FAMILIES = InductorReduction(), InductorPersistentReduction()


def softmax(x):
    return torch.softmax(x.float(), -1).to(x.dtype)


def sources(function, *tensors, **options):
    """The sources of the kernels that Inductor writes for a function, by name."""
    written = []
    lowered(function, *tensors, written=written, max_autotune=False, **options)
    return dict(KERNEL.findall(written[0]))


def tuner_of(source, name, folder):
    """Return the autotuner that Inductor's worker makes of a source; None if the source declares none."""
    from torch._inductor.runtime import triton_helpers

    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with patch.object(triton_helpers, "set_driver_to_gpu"):
        spec.loader.exec_module(module)
    return getattr(module, name)


def knobs(tuner):
    return [(one.kwargs, one.num_warps, one.num_stages) for one in tuner.configs]


@pytest.fixture(scope="module")
def looped():
    return sources(softmax, tensor(1024, 20000))


@pytest.fixture(scope="module")
def persistent():
    return sources(softmax, tensor(4096, 500))


def problem_of(found, touched=4096):
    (source,) = found.values()
    return ReductionSource.read(source, lambda: touched)


class Learned:
    """A bundle that has learned both families, and prefers the configs with the most warps."""

    digest = "learned"
    families = tuple(one.name for one in FAMILIES)


def most_warps(problem, configs, device, k, bundle=None):
    order = sorted(range(len(configs)), key=lambda place: -configs[place].num_warps)
    return tuple(order[: 8 if k == "auto" else k])


@pytest.fixture
def learned(monkeypatch):
    monkeypatch.setattr(choices, "best_first", most_warps)
    # The last of Inductor's is the best of them.
    monkeypatch.setattr(
        reduction, "predicted_slowdowns", lambda *given: np.array([1.0, *range(2 + len(given[3]), 3, -1)])
    )
    monkeypatch.setattr(inductor, "bundle_in_force", lambda _: Learned())


def test_a_problem_is_read_from_the_source(looped, persistent):
    found = problem_of(looped)
    assert found.problem.family == "inductor_reduction"
    assert found.problem.dtype == "bf16"
    assert {dim: found.problem[dim] for dim in ("x", "r", "bytes")} == {"x": 1024, "r": 20000, "bytes": 4096}
    assert found.problem["loads"] == looped["triton_red_fused_0"].count("tl.load(")
    assert found.problem["stores"] == 1
    assert found.problem["heavy"] >= 1
    assert found.problem.flags == ("inner",)
    found = problem_of(persistent)
    assert found.problem.family == "inductor_persistent_reduction"
    assert (found.problem["x"], found.problem["r"], found.problem["reductions"]) == (4096, 500, 2)


def test_sums_of_columns_are_outer():
    found = [
        ReductionSource.read(source, lambda: 1) for source in sources(lambda x: x.sum(0), tensor(64, 4096)).values()
    ]
    assert [one.problem.flags for one in found if one is not None] == [("outer",)]


def test_a_dynamic_size_is_inductors_hint():
    (source,) = sources(softmax, tensor(1000, 500), dynamic=(0,)).values()
    found = ReductionSource.read(source, lambda: 1)
    assert found.problem["x"] == 1024
    assert found.problem["r"] == 500


@pytest.mark.parametrize(
    ("had", "has"),
    [
        ("'deterministic': False", "'deterministic': True"),
        ("'are_deterministic_algorithms_enabled': False", "'are_deterministic_algorithms_enabled': True"),
        ("'mutated_arg_names': []", "'RSPLIT_SIZE': 16"),
        ("size_hints={'x': 4096, 'r0_': 512}", "size_hints={'y': 2, 'x': 2048, 'r0_': 512}"),
        ("DeviceProperties(type='cuda'", "DeviceProperties(type='hip'"),
        ("@triton_heuristics.persistent_reduction(", "@triton_heuristics.cooperative_reduction("),
        ("'*bf16'", "'*fp8e4b15'"),
    ],
)
def test_other_kernels_are_left_as_they_are(persistent, had, has, learned):
    ((_, source),) = persistent.items()
    assert had in source
    changed = source.replace(had, has)
    if "fp8" in has:
        changed = re.sub(r"'\*(bf16|fp32)'", "'*fp8e4b15'", source)
    assert inductor.Limits(1, device=H200).of_reduction(changed, lambda: 1) == changed


def test_pointwise_kernels_are_left_as_they_are(learned):
    (source,) = sources(lambda x: x + 1, tensor(4096, 500)).values()
    assert inductor.Limits(1, device=H200).of_reduction(source, lambda: 1) == source


def test_a_bundle_that_has_not_learned_them_changes_nothing(persistent, monkeypatch):
    ((_, source),) = persistent.items()
    monkeypatch.setattr(inductor, "bundle_in_force", lambda _: SimpleNamespace(families=("inductor_mm",), digest="x"))
    assert inductor.Limits(1, device=H200).of_reduction(source, lambda: 1) == source


@pytest.mark.parametrize("found", ["looped", "persistent"])
def test_with_k_1_there_is_one_config(found, learned, tmp_path, request):
    ((name, source),) = request.getfixturevalue(found).items()
    limits = inductor.Limits(1, device=H200)
    changed = tuner_of(limits.of_reduction(source, lambda: 1 << 20), name, tmp_path)
    problem = ReductionSource.read(source, lambda: 1 << 20).problem
    configs = find_family(problem.family).listed(problem)
    best = configs[most_warps(problem, configs, H200, 1)[0]]
    assert knobs(changed) == [(dict(best.meta), best.num_warps, 1)]
    theirs = tuner_of(source, name, tmp_path)
    assert changed.heuristic_type == theirs.heuristic_type
    assert changed.size_hints == theirs.size_hints
    assert changed.inductor_meta["dynamic_scale_rblock"] is False  # or Inductor would add a config


@pytest.mark.parametrize("slower", [1.05, 1.2])
def test_in_doubt_the_one_config_is_inductors(slower, looped, learned, tmp_path, monkeypatch):
    predicted = lambda *given: np.array([1.0] + [slower] * (len(given[3]) - 1))  # noqa: E731
    monkeypatch.setattr(reduction, "predicted_slowdowns", predicted)
    ((name, source),) = looped.items()
    theirs = knobs(tuner_of(source, name, tmp_path))
    changed = knobs(tuner_of(inductor.Limits(1, device=H200).of_reduction(source, lambda: 1), name, tmp_path))
    assert len(changed) == 1
    assert (changed[0] in theirs) == (slower < reduction.DOUBT)


def test_a_loop_over_short_rows_is_left_to_inductor_unless_several_are_timed(looped, learned):
    ((_, source),) = looped.items()
    short = source.replace("r0_numel = 20000", "r0_numel = 197")
    assert short != source
    assert inductor.Limits(1, device=H200).of_reduction(short, lambda: 1) == short
    assert inductor.Limits("auto", device=H200).of_reduction(short, lambda: 1) != short


@pytest.mark.parametrize("found", ["looped", "persistent"])
def test_what_inductor_lists_is_read_without_its_kernel(found, tmp_path, request):
    ((name, source),) = request.getfixturevalue(found).items()
    listed = ReductionSource.read(source, lambda: 1).listed()
    assert [(dict(one.meta), one.num_warps, one.num_stages) for one in listed] == knobs(
        tuner_of(source, name, tmp_path)
    )


@pytest.mark.parametrize("k", [2, 8, "auto"])
@pytest.mark.parametrize("found", ["looped", "persistent"])
def test_with_more_the_best_of_inductors_is_timed_too(found, k, learned, tmp_path, request):
    ((name, source),) = request.getfixturevalue(found).items()
    theirs = knobs(tuner_of(source, name, tmp_path))
    changed = knobs(tuner_of(inductor.Limits(k, device=H200).of_reduction(source, lambda: 1 << 20), name, tmp_path))
    problem = ReductionSource.read(source, lambda: 1 << 20).problem
    configs = find_family(problem.family).listed(problem)
    fastest = [configs[place] for place in most_warps(problem, configs, H200, 2 if k == 2 else reduction.MOST_TIMED)]
    ours = [(dict(best.meta), best.num_warps, 1) for best in fastest]
    assert changed[: len(ours)] == ours
    assert [one for one in changed if one not in ours] == [one for one in theirs[-1:] if one not in ours]


def test_one_config_of_an_unknown_arch_is_left_to_inductor(persistent, learned, monkeypatch):
    monkeypatch.setattr(choices, "best_first", lambda *given, **named: (0, 1, 2))
    ((_, source),) = persistent.items()
    assert inductor.Limits(1, device=H200).of_reduction(source, lambda: 1) == source


def test_use_writes_the_configs_while_it_lasts(persistent, learned):
    from torch._inductor.codegen.triton import TritonScheduling

    theirs = TritonScheduling._emit_kernel_to_wrapper
    with foretune.use("inductor", k=1):
        (source,) = sources(softmax, tensor(4096, 500)).values()
        assert "cached_autotune" in source
        assert "persistent_reduction(" not in source.split("@triton.jit")[0]
    assert TritonScheduling._emit_kernel_to_wrapper is theirs
    assert list(sources(softmax, tensor(4096, 500)).values()) == list(persistent.values())


def test_trouble_leaves_the_source_and_warns_once(persistent, learned, monkeypatch):
    def fails(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr(ReductionSource, "read", fails)
    with pytest.warns(foretune.ForetuneWarning, match="no such thing"), foretune.use("inductor", k=1):
        found = sources(softmax, tensor(4096, 500))
    assert list(found.values()) == list(persistent.values())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.name)
@pytest.mark.parametrize(("x", "r"), [(1, 7), (64, 64), (4096, 5120), (300000, 16), (512, 151936)])
def test_what_is_listed_is_in_the_space_and_runs(family, x, r):
    problem = Problem.of(family.name, x=x, r=r, bytes=2 * x * r, loads=1, stores=1, reductions=1, heavy=0)
    configs = family.listed(problem)
    assert configs
    assert set(configs) <= set(family.space())
    assert [family.supports(config, problem, H200) for config in configs] == [None] * len(configs)
    table = family.features(problem, H200, configs)
    assert table.shape == (len(configs), len(family.feature_names))
    assert np.isfinite(table).all()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"XBLOCK": 128, "R0_BLOCK": 8}, "XBLOCK must be at most 64 but is 128"),
        ({"XBLOCK": 1, "R0_BLOCK": 1024}, "R0_BLOCK must be at most 512 but is 1024"),
        ({"XBLOCK": 1, "R0_BLOCK": 64, "num_stages": 2}, "num_stages must be 1 but is 2"),
    ],
)
def test_a_refusal_names_the_knob(config, reason):
    problem = Problem.of("inductor_reduction", x=50, r=500, bytes=1, loads=1, stores=1, reductions=1, heavy=0)
    found = InductorReduction().supports(KernelConfig.of(**{"num_stages": 1, **config}), problem, H200)
    assert found == reason

"""The problems to measure: all layers of all models, within limits, routed as they say."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from foretune.datasets import ForetuneError
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm.group_sizes import ROUTINGS, drawn_sizes
from foretune.kernels.grouped_gemm.workload import (
    EXPERT_PARALLEL,
    INVENTED_EXPERTS,
    MOST_TFLOP,
    MOST_WEIGHT_BYTES,
    PERMUTATION,
    ROWS,
    TENSOR_PARALLEL,
    draw,
)
from foretune.kernels.workloads import MOST_TOKENS, Draws, Model, load_models

FAMILY = "grouped_gemm_fwd"
MODELS = load_models()
PROJECTIONS = {f"{model.model}/{name}": (model, nk) for model in MODELS for name, nk in model.projections().items()}
DRAWN = draw(FAMILY, MODELS, Draws())
LAYERS = [case for case in DRAWN if case.sources != ("random",)]


def sizes(routing, rows=100_000, groups=64, seed=0):
    return np.array(drawn_sizes(routing, rows, groups, np.random.default_rng(seed)))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("rows", "groups"), [(0, 4), (1, 4), (16, 512), (1000, 7), (131072, 8)])
def test_group_sizes_sum_to_the_rows(routing, rows, groups):
    drawn = sizes(routing, rows, groups)
    assert drawn.sum() == rows
    assert len(drawn) == groups
    assert (drawn >= 0).all()


def test_balanced_is_even():
    assert set(sizes("balanced", 1000, 7)) == {142, 143}


def test_hot_has_about_half_in_one_group():
    drawn = np.sort(sizes("hot"))
    assert drawn[-1] == pytest.approx(50_000 * 65 / 64, rel=0.02)
    assert drawn[:-1].max() < 1.2 * drawn[:-1].mean()


@pytest.mark.parametrize("seed", range(5))
def test_zipf_is_more_skewed_than_uniform(seed):
    assert sizes("zipf", seed=seed).max() > 5 * sizes("uniform", seed=seed).max()


def test_an_unknown_routing_is_named_with_the_known_ones():
    with pytest.raises(ForetuneError, match="uniform, balanced, zipf, hot but got 'even'"):
        sizes("even")


def test_the_same_arguments_give_the_same_cases_and_another_seed_others():
    assert draw(FAMILY, MODELS, Draws()) == DRAWN
    assert draw(FAMILY, MODELS, Draws(seed=1)) != DRAWN


@pytest.mark.parametrize("seed", range(3))
def test_every_model_and_both_its_projections_are_covered(seed):
    drawn = draw(FAMILY, MODELS, Draws(seed=seed))
    assert {source for case in drawn for source in case.sources} == {*PROJECTIONS, "random"}


def test_layers_have_the_shapes_of_their_models_on_one_rank_of_some():
    degrees = Counter()
    for case in LAYERS:
        for source in case.sources:
            model, (n, k) = PROJECTIONS[source]
            here = case.problem["n"], case.problem["k"]
            # The intermediate size is w13's N and w2's K, and the other one is whole.
            whole, part = (n, here[0]) if source.endswith("/w13") else (k, here[1])
            assert here == ((part, k) if source.endswith("/w13") else (n, part))
            degrees[whole // part] += 1
            assert whole == part * (whole // part)
            assert case.problem["groups"] >= 2
            assert model.num_experts % case.problem["groups"] == 0
            assert model.num_experts // case.problem["groups"] in EXPERT_PARALLEL
    assert set(degrees) == set(TENSOR_PARALLEL)
    assert degrees[1] > max(degrees[degree] for degree in TENSOR_PARALLEL[1:])


def test_layers_of_invented_models_are_like_those_of_models_and_belong_to_none():
    drawn = draw(FAMILY, MODELS, Draws(per_layer=0, random=0, invented=200))
    assert len(drawn) == 200
    assert {case.sources for case in drawn} == {("random/w13",), ("random/w2",)}
    assert {case.model_families for case in drawn} == {("random",)}  # each is split from all others
    for case in drawn:
        assert 2 <= case.problem["groups"] <= max(INVENTED_EXPERTS)
        assert case.problem["n"] % 16 == case.problem["k"] % 16 == 0


def test_models_of_one_shape_share_their_cases():
    twins = [Model(name, 64, 8, 2048, 1024, 2048) for name in ("A-1B", "B-1B")]
    drawn = draw(FAMILY, twins, Draws(random=0))
    assert len(drawn) == 4  # two layers, twice each
    assert {case.sources for case in drawn} == {("A-1B/w13", "B-1B/w13"), ("A-1B/w2", "B-1B/w2")}
    assert {case.model_families for case in drawn} == {("A", "B")}


def test_no_case_comes_twice_or_is_over_the_limits():
    problems = [case.problem for case in DRAWN]
    assert len(set(problems)) == len(problems)
    for case in DRAWN:
        p = case.problem
        assert p.ragged.total == p["rows"] > 0
        assert 2 * p["rows"] * p["n"] * p["k"] <= MOST_TFLOP * 1e12
        assert 2 * p["groups"] * p["n"] * p["k"] <= MOST_WEIGHT_BYTES
        assert p["n"] % 8 == p["k"] % 8 == 0
        assert p.family == FAMILY


def test_a_share_is_in_fp16_and_a_share_has_its_layers_permutation_fused():
    many = draw(FAMILY, MODELS, Draws(per_layer=4, random=60))
    assert sum(case.problem.dtype == "fp16" for case in many) / len(many) == pytest.approx(0.15, abs=0.06)
    assert sum(bool(case.problem.flags) for case in many) / len(many) == pytest.approx(0.35, abs=0.08)
    for case in many:
        fused = {PERMUTATION[source.rsplit("/", 1)[1]] for source in case.sources if "/" in source}
        assert set(case.problem.flags) <= (fused or set(PERMUTATION.values()))


def test_rows_go_from_decode_to_training_and_all_routings_occur():
    assert {case.problem["rows"] for case in LAYERS} == set(ROWS)
    assert {case.scenario for case in DRAWN} == set(ROUTINGS)
    balanced = [case.problem for case in DRAWN if case.scenario == "balanced"]
    assert all(p.ragged.max - min(p.ragged.sizes) <= 1 for p in balanced)


def test_a_short_run_has_a_fair_sample():
    first = Counter(case.sources == ("random",) for case in DRAWN[: len(DRAWN) // 3])
    assert first[True] == pytest.approx(40 / 3, abs=8)


def test_tokens_are_routed_to_top_k_experts_each():
    tokens = (7, 100, 3000)
    for case in draw(FAMILY, MODELS, Draws(tokens=tokens, random=10)):
        rows = case.problem["rows"]
        if case.sources == ("random",):
            assert min(tokens) <= rows <= max(tokens)
        else:
            assert any(rows == count * PROJECTIONS[s][0].top_k for count in tokens for s in case.sources)


def test_as_many_as_asked_for():
    few = MODELS[:3]
    assert len(draw(FAMILY, few, Draws(random=5, per_layer=0))) == 5
    assert len(draw(FAMILY, few, Draws(random=0, per_layer=3))) == 3 * 2 * 3
    assert draw(FAMILY, few, Draws(random=0, per_layer=0)) == ()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"per_layer": -1}, "per_layer must be >= 0 but got -1"),
        ({"random": -2}, "random must be >= 0 but got -2"),
        ({"seed": -3}, "seed must be >= 0 but got -3"),
        ({"tokens": ()}, r"between 1 and 4194304 but got \[\]"),
        ({"tokens": (16, 0)}, r"got \[16, 0\]"),
        ({"tokens": (10**9,)}, r"got \[1000000000\]"),  # no shape is small enough: drawing would never end
    ],
)
def test_a_value_that_cannot_be_is_named(options, named):
    with pytest.raises(ForetuneError, match=named):
        draw(FAMILY, MODELS[:2], Draws(**options))


def test_the_most_tokens_can_be_drawn():
    assert len(draw(FAMILY, MODELS[:1], Draws(tokens=(MOST_TOKENS,), random=2))) >= 2


def test_none_is_larger_than_asked_for():
    small = draw(FAMILY, MODELS, Draws(max_tflop=0.01))
    assert len(small) > 100
    assert all(2 * c.problem["rows"] * c.problem["n"] * c.problem["k"] <= 1e10 for c in small)
    with pytest.raises(ForetuneError, match=r"at most 0\.01 TFLOP: raise the TFLOP limit or lower the token counts"):
        draw(FAMILY, MODELS, Draws(per_layer=0, random=1, tokens=(1 << 22,), max_tflop=0.01))


def test_a_family_draws_its_own_with_the_shipped_models_unless_told_otherwise(tmp_path):
    table = tmp_path / "models.csv"
    table.write_text("model,num_experts,top_k,hidden_size,moe_intermediate_size\nMine-1B,16,4,1024,512\n")
    for name in (FAMILY, "grouped_gemm_dw"):
        family = find_family(name)
        assert family.cases() == draw(name, MODELS, Draws())
        options = {"tokens": (16, 4096), "per_layer": 3, "random": 5, "seed": 7}
        mine = family.cases(models=table, max_tflop=0.5, **options)
        assert mine == draw(name, load_models(table), Draws(max_tflop=0.5, **options))
        assert len(mine) == 2 * 3 + 5
        assert all(family.flops(case.problem) <= 0.5e12 for case in mine)

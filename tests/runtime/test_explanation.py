"""Explanations of shortlists: ranks, contributions that add up, knob values that were never measured."""

from __future__ import annotations

import json
from dataclasses import replace

import foretune
import numpy as np
import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.model.contributions import feature_contributions, unmeasured_knobs
from foretune.model.ranker import UnseenCardRanker
from foretune.runtime import make_explanation, make_shortlist, use_stub_driver

H200 = DeviceSpec.named("h200")
LAYER = Problem.of("matmul", batch=1, m=64, n=1024, k=1024)
FP8_EXPERTS = Problem.of("scaled_grouped_gemm_fwd", dtype="fp8e4m3", groups=64, rows=8192, n=2048, k=1024)
EXPERTS = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)


def test_explains_the_configs_of_the_shortlist_in_its_order():
    explained, best = foretune.explain("matmul", LAYER, "h200", k=4), foretune.shortlist("matmul", LAYER, "h200", k=4)
    assert tuple(one.config for one in explained.configs) == best.configs
    assert tuple(one.predicted_slowdown for one in explained.configs) == best.predicted_slowdown
    assert [one.rank for one in explained.configs] == [1, 2, 3, 4]
    first, *others = explained.configs
    assert (first.predicted_rank, first.why) == (1, "predicted fastest")
    assert first.over_average < 1
    assert all(one.predicted_rank > 1 and "slower than the first" in one.why for one in others)
    assert explained.candidates > 1000
    assert explained.reason == best.reason
    assert "TreeSHAP" in explained.method


def test_says_why_a_diversified_list_is_not_in_the_order_of_predicted_times():
    explained = foretune.explain("matmul", LAYER, "h200", k=8)
    places = [one.predicted_rank for one in explained.configs]
    assert places != sorted(places)
    for one in explained.configs[1:]:
        assert ("moved down" in one.why) == (one.predicted_rank < one.rank)
        assert ("moved up" in one.why) == (one.predicted_rank > one.rank)
    automatic = foretune.explain("matmul", LAYER, "h200")
    assert not any("moved" in one.why for one in automatic.configs)


def test_the_device_is_the_current_one_unless_named():
    with use_stub_driver(H200):
        assert foretune.explain("matmul", LAYER, k=1).device == "NVIDIA H200"


@pytest.mark.parametrize(("name", "problem"), [("matmul", LAYER), ("grouped_gemm_fwd", EXPERTS)])
@pytest.mark.parametrize("card", ["h200", "unseen"])
def test_contributions_add_up_to_the_prediction(name, problem, card):
    """Also where routings are unknown, so that the prediction is a mean over several."""
    family, ranker = foretune.kernels.find_family(name), foretune.load_bundle().ranker(name)
    near, candidates = family.at_call_time(problem), family.space(H200)[::40]
    judge = ranker if card == "h200" else UnseenCardRanker(ranker)
    logs = np.log(judge.predict(family, near, H200, candidates))
    places = [0, 5, len(candidates) - 1]
    found = feature_contributions(ranker, family, near, H200, candidates, places, unseen_card=card == "unseen")
    assert found.names[:-2] == family.feature_names
    assert found.logs.sum(axis=1) == pytest.approx(logs[places] - logs.mean(), abs=1e-5)


def test_a_size_of_the_problem_contributes_nothing():
    """It is the same for all candidates, which are compared with each other."""
    explained = foretune.explain("matmul", LAYER, "h200", k=2)
    named = {part.feature for one in explained.configs for part in one.contributions}
    assert named
    assert not named & {"log_m", "log_n", "log_k", "sm_count"}


@pytest.mark.parametrize(
    ("family", "problem", "is_recorded", "why"),
    [
        ("grouped_gemm_fwd", EXPERTS, True, "was never measured"),
        ("scaled_grouped_gemm_fwd", FP8_EXPERTS, True, "was never measured"),
        # As in a bundle of before the measured values were recorded.
        ("scaled_grouped_gemm_fwd", FP8_EXPERTS, False, "is not in the space of scaled_grouped_gemm_fwd"),
    ],
)
def test_names_knob_values_that_were_never_measured_or_that_the_space_does_not_have(family, problem, is_recorded, why):
    """The shipped data of grouped GEMMs have BLOCK_N from 32 to 256 and PROGRAMS_PER_SM 1 and 2."""
    family, bundle = foretune.kernels.find_family(family), foretune.load_bundle()
    if not is_recorded:
        trained = replace(bundle.trained[family.name], measured=None)
        bundle = replace(bundle, trained={**bundle.trained, family.name: trained})
    known = next(one for one in foretune.shortlist(family, problem, H200, k=64).configs if not one["CONSUMERS"])
    odd = KernelConfig.from_json(known.to_json() | {"PROGRAMS_PER_SM": 3})
    explained = foretune.explain(family, problem, "h200", k=2, configs=[known, odd], bundle=bundle)
    unmeasured = {one.config: one.unmeasured for one in explained.configs}
    assert unmeasured == {known: (), odd: (f"PROGRAMS_PER_SM=3 {why}",)}
    assert f"PROGRAMS_PER_SM=3 {why}" in str(explained)
    assert "PROGRAMS_PER_SM=3" in explained.__rich__().below


def test_a_feature_that_only_has_the_name_of_a_knob_is_no_record_of_its_values():
    """The feature programs_per_sm of a matmul is how many programs fit on an SM, and not the knob PROGRAMS_PER_SM."""
    family, ranker = foretune.kernels.find_family("matmul"), foretune.load_bundle().ranker("matmul")
    config = family.space(H200)[0]
    odd = KernelConfig.from_json(config.to_json() | {"PROGRAMS_PER_SM": 11, "BLOCK_M": 1024})
    assert unmeasured_knobs(ranker, family, LAYER, H200, (config, odd), (0, 1)) == [(), ("BLOCK_M",)]


def test_a_record_of_the_measured_values_decides_where_there_is_one():
    family, ranker = foretune.kernels.find_family("matmul"), foretune.load_bundle().ranker("matmul")
    config = family.space(H200)[0]
    odd = KernelConfig.from_json(config.to_json() | {"BLOCK_M": 1024})
    known = {"BLOCK_M": ("1024",), "BLOCK_N": (str(config["BLOCK_N"]),)}
    assert unmeasured_knobs(ranker, family, LAYER, H200, (config, odd), (0, 1), known) == [("BLOCK_M",), ()]


def test_says_what_is_outside_the_training_domain():
    inside = foretune.explain("grouped_gemm_fwd", EXPERTS, "h200", k=1)
    assert (inside.octaves, inside.outside) == (0.0, "")
    assert "within the training domain" in str(inside)
    large = Problem.of("grouped_gemm_fwd", groups=64, rows=1 << 23, n=2048, k=1024)
    outside = foretune.explain("grouped_gemm_fwd", large, "h200", k=1)
    assert outside.octaves > 1
    assert outside.outside.startswith("rows ")
    assert f"outside the training domain: {outside.outside}" in str(outside)


def test_renders_itself():
    explained = foretune.explain("matmul", LAYER, "h200", k=2)
    value = json.loads(json.dumps(explained.to_json(), allow_nan=False))
    assert [one["rank"] for one in value["configs"]] == [1, 2]
    assert value["training_domain"] == {"octaves": 0.0, "outside": ""}
    contribution = value["configs"][0]["contributions"][0]
    assert set(contribution) == {"feature", "value", "factor"}
    assert value["given"] > value["candidates"]
    said = f"{LAYER} on NVIDIA H200: {value['given']} configs, {value['candidates']} usable -> 2"
    assert (repr(explained), str(explained).splitlines()[0]) == (f"<Explanation of {said}>", said)
    assert explained.__rich__().title == said
    assert len(explained.__rich__().rows) == 2
    assert "<table>" in explained._repr_html_()


def test_a_legend_says_what_the_shown_features_are():
    explained = foretune.explain("matmul", LAYER, "h200", k=2)
    shown = {one.feature for config in explained.configs for one in config.main}
    assert {"network", "tile_area"} <= shown
    assert {one.feature for config in explained.configs for one in config.contributions} == set(explained.legend)
    lines = str(explained).splitlines()
    assert [line.split(":")[0].strip() for line in lines[-len(shown) :]] == [n for n in explained.legend if n in shown]
    assert f"  tile_area: {explained.legend['tile_area']}" in explained.__rich__().below
    assert explained.to_json()["legend"]["tile_area"] == explained.legend["tile_area"]


def test_a_bundle_with_rankers_of_its_own_has_no_contributions(toy):
    problem = Problem.of("toy", rows=1000, n=64, k=64)
    explained = make_explanation(toy.ToyFamily(), problem, toy.H200, k=2, bundle=toy.ToyBundle())
    assert [one.predicted_rank for one in explained.configs] == [1, 2]
    assert explained.method == ""
    assert all(one.contributions == () for one in explained.configs)


def test_without_a_prediction_there_is_nothing_to_explain(toy):
    def fails(problem, configs):
        raise ValueError("no features")

    problem = Problem.of("toy", rows=1000, n=64, k=64)
    with pytest.raises(ForetuneError, match=r"no shortlist to explain: toy: no prediction \(.*no features"):
        make_explanation(toy.ToyFamily(), problem, toy.H200, bundle=toy.ToyBundle(fails))


def test_shortlists_have_a_short_repr_and_html(toy):
    problem = Problem.of("toy", rows=1000, n=64, k=64)
    best = make_shortlist(toy.ToyFamily(), problem, toy.H200, k=2, bundle=toy.ToyBundle())
    assert repr(best) == f"<Shortlist of 2 configs for NVIDIA H200, first {best.configs[0]}>"
    assert best._repr_html_().count("<tr>") == 3


def test_text_from_outside_is_escaped_in_html(toy):
    problem = Problem.of("toy", rows=1000, n=64, k=64)
    best = make_shortlist(toy.ToyFamily(), problem, toy.H200, k=1, bundle=toy.ToyBundle(digest="<script>x"))
    assert "<script>" not in best._repr_html_()
    assert "&lt;script&gt;x" in best._repr_html_()

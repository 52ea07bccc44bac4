"""Shortlists of families without data, which the shipped prior predicts from the kernel's source."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import foretune
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from foretune.datasets import BundleError, DeviceSpec, Problem, torch_dtype
from foretune.runtime import ForetuneWarning, TritonFamily, make_shortlist, use_stub_driver
from foretune.runtime.facts.prior import (
    COVERAGE,
    NAMES,
    TEXTS,
    Prior,
    coverage_length,
    grid_of,
    launch_features,
)
from foretune.runtime.launching.kernel import Kernel
from foretune.runtime.tuning.one_launch import times_one
from foretune.runtime.tuning.shortlisters import OwnShortlister
from triton.errors import TritonError

H200 = DeviceSpec.named("h200")
PROBLEM = Problem.of("doubled", n=1 << 24, dtype="bf16")


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


class Doubled(TritonFamily):
    name, kernel, output, in_place = "doubled", double, "x_ptr", ("x_ptr",)
    configs = [triton.Config({"BLOCK": 2**power}, num_warps=warps) for power in range(5, 13) for warps in (1, 4, 16)]
    dims_from, ranges = {"n": "n"}, {"n": (1024, 1 << 24)}

    def arguments(self, problem, where):
        return {
            "x_ptr": torch.randn(problem["n"], device=where, dtype=torch_dtype(problem.dtype_name)),
            "n": problem["n"],
        }

    def grid(self, problem, config):
        return (triton.cdiv(problem["n"], config["BLOCK"]),)

    def eager(self, arguments):
        return 2 * arguments["x_ptr"]


class Refusing(Doubled):
    name = "refusing"

    def supports(self, config, problem, device):
        return "too small" if config["BLOCK"] < 256 else super().supports(config, problem, device)


def test_a_family_without_data_is_predicted_from_its_source():
    best = make_shortlist(Doubled(), PROBLEM, H200, k=5)
    assert best.predicted
    assert best.reason == "no data of doubled: predicted from its source; k=5"
    assert len(best.configs) == 5
    assert best.predicted_slowdown == tuple(sorted(best.predicted_slowdown))
    assert best.predicted_slowdown[0] == 1.0
    # A block of 32 elements for 16 warps leaves nearly all threads idle.
    worst = make_shortlist(Doubled(), PROBLEM, H200, k=24).configs[-6:]
    assert any(config["BLOCK"] == 32 and config.num_warps == 16 for config in worst)


def test_the_automatic_length_has_a_known_coverage():
    best = make_shortlist(Doubled(), PROBLEM, H200)
    assert len(best.configs) == coverage_length(24) < 24
    assert best.reason.endswith(COVERAGE)


def test_only_supported_configs_are_listed():
    best = make_shortlist(Refusing(), Problem.of("refusing", n=4096, dtype="bf16"), H200, k=99)
    assert min(config["BLOCK"] for config in best.configs) == 256
    assert len(best.configs) == 15


def test_a_problem_that_no_config_can_run_is_not_predicted():
    class Large(Doubled):
        name = "large"

        def supports(self, config, problem, device):
            return f"n must be at least {1 << 30}"

    with pytest.warns(
        ForetuneWarning, match=r"large: no prediction \(none of the configs can run this problem: n must"
    ):
        best = make_shortlist(Large(), Problem.of("large", n=4096, dtype="bf16"), H200, k=5)
    assert not best.predicted
    assert len(best.configs) == 24


def test_sizes_outside_of_the_declared_ranges_are_predicted_and_named():
    class Drawn(Doubled):
        name, ranges = "drawn", {"n": {1024, 4096}}

    def reason(family, n):
        return make_shortlist(family, Problem.of(family.name, n=n, dtype="bf16"), H200, k=2).reason

    assert reason(Doubled(), 1 << 24).endswith("k=2")
    assert reason(Doubled(), 1000).endswith("; outside of the declared ranges: n=1000 is not between 1024 and 16777216")
    assert reason(Drawn(), 4096).endswith("k=2")
    assert reason(Drawn(), 2048).endswith("; outside of the declared ranges: n=2048 is not one of 1024, 4096")


def test_a_family_without_data_is_explained_by_the_facts_of_its_source():
    problem = Problem.of("refusing", n=1 << 20, dtype="bf16")
    best = make_shortlist(Refusing(), problem, H200)
    found = foretune.explain(Refusing, problem, "h200")
    assert tuple(one.config for one in found.configs) == best.configs
    assert tuple(one.predicted_slowdown for one in found.configs) == best.predicted_slowdown
    assert [one.predicted_rank for one in found.configs] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (found.given, found.candidates, found.reason) == (24, 15, best.reason)
    assert found.reason.endswith(COVERAGE)
    assert found.domain.startswith("Nothing was measured of refusing: the order comes from the prior")
    assert found.domain in str(found)
    assert found.domain in found.__rich__().below
    assert found.to_json()["training_domain"] == {"octaves": None, "outside": ""}
    assert all(one.unmeasured == () for one in found.configs)
    named = {part.feature for one in found.configs for part in one.contributions}
    assert named == set(found.legend) <= set(NAMES)
    assert "prior" in found.method


def test_an_explanation_says_what_is_outside_of_the_declared_ranges():
    found = foretune.explain(Doubled, Problem.of("doubled", n=1 << 25, dtype="bf16"), "h200", k=2)
    assert found.outside == "outside of the declared ranges: n=33554432 is not between 1024 and 16777216"
    assert str(found).count(found.outside) == 1


@pytest.mark.compile
def test_a_prune_logs_what_is_outside_of_the_declared_ranges(caplog):
    pruner = foretune.prune(Doubled, k=4, device="h200")
    with caplog.at_level("INFO", logger="foretune"):
        for n in (1 << 24, 1 << 25):
            assert len(pruner(Doubled.configs, {"x_ptr": torch.empty(n, device="meta"), "n": n})) == 4
    inside, outside = caplog.messages
    assert inside.endswith(": 24 -> 4 configs")
    assert outside.endswith(
        ": 24 -> 4 configs; outside of the declared ranges: n=33554432 is not between 1024 and 16777216"
    )


def test_contributions_of_facts_add_up_to_the_prediction():
    configs = [{"BLOCK": block, "num_warps": warps} for block in (32, 256, 1024, 4096) for warps in (1, 4, 16)]
    launch = Kernel(double), {"x_ptr": torch.empty(1 << 20), "n": 1 << 20}, configs, H200
    prior = Prior.shipped()
    logs, features = prior.log_slowdowns(*launch), launch_features(*launch)
    values, parts = prior.contributions(features, [0, 7])
    assert values.tolist() == features[[0, 7], : len(NAMES)].tolist()
    assert parts.sum(axis=1) == pytest.approx(logs[[0, 7]] - logs.mean(), abs=1e-5)
    assert np.ptp(parts, axis=0).max() > 0.01


def test_each_fact_is_explained_in_a_line():
    assert list(TEXTS) == list(NAMES)


def test_trouble_lets_all_configs_through(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(Prior, "log_slowdowns", broken)
    with pytest.warns(ForetuneWarning, match=r"doubled: no prediction \(ZeroDivisionError: odd\)"):
        best = make_shortlist(Doubled(), Problem.of("doubled", n=999, dtype="bf16"), H200, k=5)
    assert not best.predicted
    assert len(best.configs) == 24


def test_a_prior_is_saved_and_loaded_unchanged():
    prior = Prior.shipped()
    again = Prior.loads(prior.dumps())
    launch = Kernel(double), {"x_ptr": torch.empty(4096), "n": 4096}, [{"BLOCK": 64}, {"BLOCK": 1024}], H200
    assert np.array_equal(prior.log_slowdowns(*launch), again.log_slowdowns(*launch))
    assert math.prod(prior.forest.n_features.shape) == 1
    assert int(prior.forest.n_features) <= 2 * len(NAMES)


def test_a_prior_of_other_features_is_refused(monkeypatch):
    content = Prior.shipped().dumps()
    monkeypatch.setattr("foretune.runtime.facts.prior.NAMES", NAMES[1:])
    with pytest.raises(BundleError, match="other features"):
        Prior.loads(content)


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache", "disk")
@pytest.mark.parametrize("trouble", [False, True])
def test_an_attached_kernel_is_searched_from_its_best_predicted_configs(toy, elsewhere, monkeypatch, trouble):
    bench, wanted = elsewhere.Bench(), [256, 512, 128, 1024]

    def log_slowdowns(prior, kernel, arguments, configs, device):
        assert arguments["n"] == 1 << 20
        assert grid_of({**arguments, "BLOCK": 1024}) == (1024,)
        if trouble:
            raise ZeroDivisionError("odd")
        return np.array([0.1 * wanted.index(one["BLOCK"]) if one["BLOCK"] in wanted else 3.0 for one in configs])

    monkeypatch.setattr(Prior, "log_slowdowns", log_slowdowns)
    with use_stub_driver(toy.H200), warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        kernel = elsewhere.kernel(bench)
        foretune.attach(kernel)
        elsewhere.launch(kernel, 1 << 20)
    timed = [config.kwargs["BLOCK"] for config, _ in bench.timed]
    assert (256 in timed[:3]) != trouble


@pytest.fixture
def rather_256(monkeypatch):
    """A prior that expects a block of 256 to be the fastest, and the others to be slower the larger they are."""

    def log_slowdowns(prior, kernel, arguments, configs, device):
        return np.array([0.0 if one["BLOCK"] == 256 else one["BLOCK"] / 1000 for one in configs])

    monkeypatch.setattr(Prior, "log_slowdowns", log_slowdowns)


def attached(kernel):
    return foretune.attach(kernel, mode="predict")


def autotuned(kernel):
    return foretune.autotune(kernel.configs, kernel.keys, mode="predict", do_bench=kernel._do_bench)(kernel.fn)


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache", "disk", "rather_256")
@pytest.mark.parametrize("tuner_of", [attached, autotuned])
def test_in_mode_predict_the_best_predicted_config_runs_without_timing(toy, elsewhere, caplog, tuner_of):
    bench = elsewhere.Bench()
    with use_stub_driver(toy.H200), warnings.catch_warnings(), caplog.at_level("INFO", logger="foretune"):
        warnings.simplefilter("error", ForetuneWarning)
        tuner = tuner_of(elsewhere.kernel(bench))
        elsewhere.launch(tuner, 1 << 20)
    assert tuner.best_config.kwargs["BLOCK"] == 256
    assert len(bench.timed) <= (times_one() and tuner_of is attached)
    assert "1 of 8 configs: no timing is known: the fastest as predicted from its source" in caplog.text


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache", "disk")
@pytest.mark.parametrize("tuner_of", [attached, autotuned])
def test_a_predicted_config_that_cannot_run_is_replaced_by_the_next_best(toy, monkeypatch, tuner_of):
    """The first needs more shared memory than the device has, and a block of 24 does not compile."""
    odd = triton.Config({"BLOCK_M": 24, "BLOCK_N": 16, "BLOCK_K": 16}, num_warps=4, num_stages=1)
    configs = [toy.triton_configs()[0], toy.triton_configs()[4], odd, toy.triton_configs()[1]]
    monkeypatch.setattr(Prior, "log_slowdowns", lambda *given: np.array([0.3, 0.0, 0.1, 0.2])[-len(given[3]) :])
    timed = []

    def bench(kernel_call, quantiles=None):
        kernel_call()
        timed.append(kernel_call)
        return [1.0] * 3

    def launch(configs):
        tuner = tuner_of(toy.tuned(None, configs, do_bench=bench))
        tuner[toy.grid](*toy.operands(), 64, 64, 64)
        return tuner.best_config

    with use_stub_driver(replace(toy.H200, smem_per_block_bytes=48 * 1024)):
        assert launch(configs) is configs[3]
        assert len(timed) <= (times_one() and tuner_of is attached)
        with pytest.raises((TritonError, foretune.ForetuneError)):
            launch(configs[1:3])


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache", "disk", "rather_256")
def test_ranks_that_choose_together_do_not_use_what_each_predicts(toy, elsewhere):
    """They may see different sizes, for which the prior expects other configs to be the fastest."""
    with use_stub_driver(toy.H200):
        kernel = elsewhere.kernel(elsewhere.Bench())
        shortlister = OwnShortlister(kernel, "auto", ranks=lambda: 2)
        shortlister.mode = "predict"
        given = {"x_ptr": torch.zeros(4096), "n": 4096, "rows": 3, "SCALE": 1}
        problem = shortlister.problem(given)
        shortlister.expect(problem, given)
        with pytest.warns(ForetuneWarning, match=r"no prediction \(no timing is known\): any of 8 configs may run"):
            assert shortlister.positions(problem, tuple(kernel.configs)) == tuple(range(8))


def attached_family(**options):
    return foretune.attach(triton.autotune(Doubled.configs, ["n"], **options)(double), Doubled)


def autotuned_family(**options):
    return foretune.autotune(Doubled.configs, ["n"], family=Doubled, **options)(double)


def pruned_family(**options):
    pruner = foretune.prune(Doubled, k=2)
    tuner = triton.autotune(Doubled.configs, ["n"], {"early_config_prune": pruner}, do_bench=one_ms, **options)(double)
    with use_stub_driver(H200):
        tuner[(1,)](torch.zeros(4096), 4096)
    return tuner


def one_ms(kernel_call, quantiles=None):
    return [1.0] * 3


TUNERS = pytest.mark.parametrize("tuner_of", [attached_family, autotuned_family, pruned_family])


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache", "disk")
@TUNERS
def test_an_autotuner_that_does_not_restore_what_is_updated_in_place_is_one_warning(tuner_of):
    said = (
        r"^doubled: its kernel updates x_ptr in place, and its autotuner does not restore that: tuning applies the "
        r"kernel several times; pass restore_value=\['x_ptr'\] to the autotuner$"
    )
    with pytest.warns(ForetuneWarning, match=said):
        tuner_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        tuner_of()


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache", "disk")
@TUNERS
@pytest.mark.parametrize(
    "options", [{"restore_value": ["x_ptr"]}, {"reset_to_zero": ["x_ptr"]}, {"pre_hook": lambda *_, **__: None}]
)
def test_an_autotuner_that_restores_or_resets_it_is_none(tuner_of, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        tuner_of(**options)

"""The shortlist: what is in it, in which order, and what happens where nothing can be predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from foretune.datasets import BundleError, ForetuneError, KernelConfig, Problem
from foretune.model import Ranker
from foretune.model.calibration.conformal import Calibration
from foretune.model.calibration.training_domain import Distance
from foretune.runtime import ForetuneWarning, make_shortlist

PROBLEM = Problem.of("toy", rows=1000, n=64, k=64, dtype="fp16")


def test_is_sorted_by_prediction_and_normalised(toy):
    bundle = toy.ToyBundle([6.0, 3.0, 4.0, 3.0, 9.0, 5.0])
    best = make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, k=3, bundle=bundle)
    assert best.positions == (1, 3, 2)  # equals stay in the order given
    assert best.predicted_slowdown == pytest.approx((1.0, 1.0, 4 / 3))
    assert best.configs == tuple(toy.CONFIGS[i] for i in best.positions)
    assert best.predicted
    assert bundle.digest[:12] in best.reason


def test_supports_is_asked_only_until_there_is_a_choice(toy):
    family = toy.ToyFamily(lambda config, problem: "too big" if config["BLOCK_M"] == 64 else None)
    best = make_shortlist(family, PROBLEM, toy.H200, k=1, bundle=toy.ToyBundle())
    assert best.positions == (3,)
    assert best.predicted_slowdown == (1.0,)
    assert len(family.asked) == 3  # two refused, one taken
    several = make_shortlist(family, PROBLEM, toy.H200, k=2, bundle=toy.ToyBundle())
    assert several.positions == (3, 2)
    assert len(family.asked) == 3 + 6  # among all that could be on it, of which there are fewer than `AMONG`


def test_what_is_like_another_on_the_list_comes_later(toy):
    """The first is the fastest one; then a config of another kind that is predicted to be a little slower than one more
    of the first one's kind. Where it is much slower it stays behind, and a list of more begins as one of fewer does."""
    space = tuple(
        KernelConfig.of(BLOCK_M=m, BLOCK_N=n, BLOCK_K=16) for m, n in ((16, 16), (16, 32), (64, 64), (64, 32))
    )

    def positions(*slowdowns, k=3):
        bundle = toy.ToyBundle(slowdowns)
        return make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, k=k, configs=space, bundle=bundle)

    spread = positions(1.0, 1.01, 1.02, 2.0)
    assert spread.positions == (0, 2, 1)
    assert spread.predicted_slowdown == pytest.approx((1.0, 1.02, 1.01))
    assert positions(1.0, 1.01, 1.02, 2.0, k=2).positions == (0, 2)
    assert positions(1.0, 1.01, 1.2, 2.0).positions == (0, 1, 2)


@pytest.mark.parametrize(("k", "taken"), [(1, 7), (8, 7), (40, 7), (40, 2), (5, 60), (200, 2)])
def test_where_many_cannot_run_more_are_ranked(toy, k, taken):
    """The configs that can are every so manieth of the ranking; it is all looked at only where that has to be."""
    space = tuple(KernelConfig.of(BLOCK_M=16 * size, BLOCK_N=16, BLOCK_K=16) for size in range(1, 301))
    family = toy.ToyFamily(lambda config, problem: "odd" if config["BLOCK_M"] // 16 % taken else None)
    bundle, asked = toy.ToyBundle(), []

    def fastest(*args):
        asked.append(args[4])
        return Ranker.fastest(bundle, *args)

    bundle.fastest = fastest
    answer = make_shortlist(family, PROBLEM, toy.H200, k=k, configs=space, bundle=bundle)
    assert answer.positions == tuple(at for at in range(299, -1, -1) if (at + 1) % taken == 0)[:k]
    assert len(asked) <= 4
    if k == 1:
        assert max(asked) < 200


def test_what_computed_a_wrong_result_is_never_on_it(toy):
    bundle = toy.ToyBundle(wrong=frozenset({toy.CONFIGS[5], toy.CONFIGS[0]}))
    assert make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, bundle=bundle).positions == (4, 3, 2, 1)
    elsewhere = make_shortlist(toy.ToyFamily(), PROBLEM, replace(toy.H200, name="A100", arch="sm_80"), bundle=bundle)
    assert elsewhere.positions == (4, 3, 2, 1)


def test_where_all_results_were_wrong_nothing_is_predicted_and_that_is_said(toy):
    bundle = toy.ToyBundle(wrong=frozenset(toy.CONFIGS))
    with pytest.warns(ForetuneWarning, match="none computed a right result"):
        answer = make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, bundle=bundle)
    assert (answer.positions, answer.predicted) == (tuple(range(6)), False)


def test_one_batched_prediction_serves_the_whole_bucket(toy):
    family, bundle = toy.ToyFamily(), toy.ToyBundle()
    answers = {
        make_shortlist(family, Problem.of("toy", rows=rows, n=64, k=64), toy.H200, bundle=bundle).positions
        for rows in (1000, 1001, 1024)
    }
    assert len(answers) == 1
    assert bundle.predicted == [Problem.of("toy", rows=1024, n=64, k=64)]


def test_the_bucket_never_hides_what_the_problem_itself_does_not_support(toy):
    family = toy.ToyFamily(lambda config, problem: "odd" if problem["rows"] % 2 and config["BLOCK_M"] == 64 else None)
    bundle = toy.ToyBundle()
    even, odd = (
        make_shortlist(family, Problem.of("toy", rows=rows, n=64, k=64), toy.H200, k=1, bundle=bundle)
        for rows in (1000, 1001)
    )
    assert (even.positions, odd.positions) == ((5,), (3,))


def test_ragged_sizes_do_not_change_the_answer(toy):
    family, bundle = toy.ToyFamily(), toy.ToyBundle()
    known = Problem.of("toy", rows=64, n=64, k=64, ragged={"rows": (60, 4)})
    assert make_shortlist(family, known, toy.H200, bundle=bundle) is make_shortlist(
        family, known.without_sizes(), toy.H200, bundle=bundle
    )


@pytest.mark.parametrize("k", [0, -1])
def test_k_must_be_positive(toy, k):
    with pytest.raises(ForetuneError, match=f"k must be an integer >= 1 but got {k}"):
        make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, k=k)


def test_there_must_be_a_config(toy):
    with pytest.raises(ForetuneError, match="at least one config"):
        make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, configs=())


def _raise(error):
    raise error


TROUBLES = {
    "NaN": (lambda toy: toy.ToyBundle(np.full(6, np.nan)), "not finite positive numbers"),
    "infinite": (lambda toy: toy.ToyBundle([1, 2, 3, 4, 5, np.inf]), "not finite positive numbers"),
    "negative": (lambda toy: toy.ToyBundle([1, 2, 3, 4, 5, -1]), "not finite positive numbers"),
    "short": (lambda toy: toy.ToyBundle([1.0]), "must return 6 slowdowns"),
    "bundle": (lambda toy: toy.ToyBundle(lambda *_: _raise(BundleError("x.npz: torn"))), "x.npz: torn"),
    "bug": (lambda toy: toy.ToyBundle(lambda *_: _raise(ZeroDivisionError("oops"))), "ZeroDivisionError: oops"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_any_trouble_lets_every_supported_config_through_with_one_warning(toy, trouble):
    make, why = TROUBLES[trouble]
    family, bundle = toy.ToyFamily(lambda config, problem: "no" if config["BLOCK_M"] == 16 else None), make(toy)
    with pytest.warns(ForetuneWarning, match=why) as caught:
        answers = [
            make_shortlist(
                family, replace(PROBLEM, dims=(("k", k), ("n", 64), ("rows", 64))), toy.H200, k=2, bundle=bundle
            )
            for k in (8, 16, 32)
        ]
    assert len([one for one in caught if one.category is ForetuneWarning]) == 1  # others are other tests' garbage
    for answer in answers:
        assert answer.positions == (1, 3, 4, 5)
        assert answer.predicted_slowdown == (1.0,) * 4
        assert not answer.predicted
        assert why in answer.reason


def test_without_a_bundle_everything_goes_through(toy, monkeypatch):
    import foretune.model

    monkeypatch.setattr(
        foretune.model, "open_bundle", lambda path=None: _raise(BundleError("no bundle is shipped")), raising=False
    )
    sys.modules[make_shortlist.__module__]._shipped.cache_clear()
    with pytest.warns(ForetuneWarning, match="no bundle is shipped"):
        assert len(make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200).positions) == 6


@pytest.mark.parametrize("refuses", [lambda config, problem: "never", lambda config, problem: _raise(KeyError("m"))])
def test_is_never_empty(toy, refuses):
    with pytest.warns(ForetuneWarning):
        answer = make_shortlist(toy.ToyFamily(refuses), PROBLEM, toy.H200, bundle=toy.ToyBundle())
    assert answer.positions == tuple(range(6))


def test_a_list_that_changes_is_asked_about_anew(toy):
    family, bundle, configs = toy.ToyFamily(), toy.ToyBundle(), list(toy.CONFIGS)
    assert make_shortlist(family, PROBLEM, toy.H200, k=1, configs=configs, bundle=bundle).positions == (5,)
    configs.pop()
    assert make_shortlist(family, PROBLEM, toy.H200, k=1, configs=configs, bundle=bundle).positions == (4,)


def test_asking_again_asks_neither_the_family_nor_the_bundle(toy):
    family, bundle = toy.ToyFamily(), toy.ToyBundle()
    first = make_shortlist(family, PROBLEM, toy.H200, bundle=bundle)
    family.asked.clear()
    bundle.predicted.clear()
    assert make_shortlist(family, PROBLEM, toy.H200, bundle=bundle) is first
    assert not family.asked
    assert not bundle.predicted


def test_is_the_same_in_every_process():
    script = """
import json, sys
sys.path.insert(0, sys.argv[1])
import toy
from foretune.datasets import Problem
from foretune.runtime import make_shortlist
bundle = toy.ToyBundle(lambda problem, configs: [1.0 + config["BLOCK_M"] // 32 for config in configs], digest="d")
problems = [Problem.of("toy", rows=rows, n=8, k=8) for rows in (1, 77, 5000)]
print(json.dumps([make_shortlist(toy.ToyFamily(), p, toy.H200, k=4, bundle=bundle).positions for p in problems]))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script, str(Path(__file__).parent)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert json.loads(outputs.pop()) == [[0, 2, 1, 3]] * 3  # by BLOCK_M, equals in their order


def test_no_warning_where_all_is_well(toy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, bundle=toy.ToyBundle())


def test_a_config_that_has_no_features_costs_the_others_no_prediction(toy):
    """A list may have one that no kernel takes: the others are ranked without it."""
    family = toy.ToyFamily(lambda config, problem: "BLOCK_M cannot be 64" if config["BLOCK_M"] == 64 else None)

    def slowdowns(problem, configs):
        return [1 / (64 - config["BLOCK_M"]) for config in configs]  # which has none for 64

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        best = make_shortlist(family, PROBLEM, toy.H200, k=3, bundle=toy.ToyBundle(slowdowns))
    assert (best.positions, best.predicted) == ((0, 2, 1), True)
    assert best.predicted_slowdown == pytest.approx((1.0, 1.0, 1.5))


LEVEL_2 = Calibration(problems=40, scores=(0.0,) * 20 + (2.0,) * 20, regret=(0.1, 0.05, 0.01) + (0.0,) * 10)


def auto(toy, slowdowns, distance=Distance(0.0), calibration=LEVEL_2, **more):  # noqa: B008 - it is frozen
    bundle = toy.ToyBundle(slowdowns, calibration=calibration, distance=distance)
    return make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, bundle=bundle, **more)


def test_it_is_as_long_as_the_calibration_wants(toy):
    sure, unsure = auto(toy, [1.0, 2.0, 3.0, 3.0, 3.0, 3.0]), auto(toy, [1.0, 1.01, 1.02, 1.03, 3.0, 3.0])
    assert (len(sure.configs), len(unsure.configs)) == (1, 4)
    assert sure.reason.endswith("; k=1 for a config within 1 % of the best in 95 % of cases")
    assert len(auto(toy, [1.0] * 6, calibration=None).configs) == 6  # of the 8 that there would be
    assert "k=6, because the bundle is not calibrated" in auto(toy, [1.0] * 6, calibration=None).reason


def test_far_from_the_data_it_grows_and_says_so(toy):
    slowdowns = [1.0, 1.2, 1.3, 3.0, 3.0, 3.0]
    near, far = auto(toy, slowdowns), auto(toy, slowdowns, Distance(4.0, "rows 16x above the data"))
    assert len(near.configs) == 1
    assert len(far.configs) == 2
    assert "; rows 16x above the data; k=2 for " in far.reason
    fixed = auto(toy, slowdowns, Distance(4.0, "rows 16x above the data"), k=3)
    assert len(fixed.configs) == 3
    assert fixed.reason.endswith("; rows 16x above the data")


def test_it_counts_the_configs_that_can_run(toy):
    bundle = toy.ToyBundle([1.0, 1.01, 1.02, 1.03, 1.04, 3.0], calibration=LEVEL_2)
    family = toy.ToyFamily(lambda config, problem: "not this one" if config == toy.CONFIGS[0] else None)
    assert sorted(make_shortlist(family, PROBLEM, toy.H200, bundle=bundle).positions) == [1, 2, 3, 4]


def test_as_many_as_pay_for_themselves(toy):
    slowdowns = [1.0, 1.01, 1.02, 1.03, 3.0, 3.0]
    lengths = [len(auto(toy, slowdowns, expected_calls=calls, call_us=100.0).configs) for calls in (0, 1e5, 1e6, 1e9)]
    assert lengths[0] == 1  # nobody calls it: the first will do
    assert lengths == sorted(lengths)
    assert lengths[-1] > 2
    free = auto(toy, slowdowns, expected_calls=1e5, call_us=100.0, trial_s=0.0)
    assert len(free.configs) >= lengths[-1]
    assert "pays for itself over 1e+05 calls of 100 us (0 s a config" in free.reason


def test_what_does_not_say_how_many(toy):
    for message, wrong in (
        ("toy has no estimate of its time: pass the duration of a call", {"expected_calls": 10}),
        ("k must be 'auto' but is 3", {"expected_calls": 10, "call_us": 1.0, "k": 3}),
        ("call_us needs expected_calls", {"call_us": 1.0}),
        ("expected_calls must be between 0 and", {"expected_calls": float("nan"), "call_us": 1.0}),
        ("trial_s must be between 0 and", {"expected_calls": 1, "call_us": 1.0, "trial_s": -1}),
        ("length k must be 'auto' or an integer >= 1 but got 'many'", {"k": "many"}),
        ("length k must be an integer >= 1 but got 0", {"k": 0}),
    ):
        with pytest.raises(ForetuneError, match=message):
            auto(toy, [1.0] * 6, **wrong)

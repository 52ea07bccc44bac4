"""What refinements store in a cache file: read again, checked as untrusted input, merged and renumbered."""

from __future__ import annotations

import copy

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.runtime.tuning.cache.cache_folder import export_choices, import_choices, refined_contents
from foretune.runtime.tuning.cache.document import Refined, RefinedTime, check_choices, forget_oldest
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache, _shared
from foretune.runtime.tuning.cache.known import known_kernels

H200 = DeviceSpec.named("h200")
ONE, TWO, OTHER = (KernelConfig.of(BLOCK=size) for size in (16, 32, 64))
PROBLEM = Problem.of("toy", rows=64)
TIMES = {ONE: RefinedTime(50, 100.0, 1.0, 0.0), TWO: RefinedTime(40, 90.0, 0.9, 0.01)}


@pytest.fixture
def cache():
    cache = ChoiceCache.of("toy", "s1", H200)
    cache.refine(PROBLEM, Refined(TIMES, TWO), "bundle")
    return cache


def test_results_are_there_in_the_next_process(cache):
    _shared.cache_clear()
    again = ChoiceCache.of("toy", "s1", H200)
    assert again.refined(PROBLEM) == Refined(TIMES, TWO)
    assert again.choice(PROBLEM, "bundle") == TWO
    assert again.refined(Problem.of("toy", rows=65)) is None
    assert ChoiceCache.of("toy", "s2", H200).refined(PROBLEM) is None


def test_a_refined_choice_counts_more_than_times_of_single_launches(cache):
    cache.record(PROBLEM, OTHER, 1.0)
    (known,) = known_kernels("toy")
    assert known.problems[0].best == TWO


def test_times_that_cannot_be_stored_are_left_out_and_so_is_a_choice_without_a_time(cache):
    cache.refine(PROBLEM, Refined({ONE: TIMES[ONE], OTHER: RefinedTime(3, float("inf"), 2.0, 0.1)}, OTHER), "bundle")
    assert cache.refined(PROBLEM) == Refined({ONE: TIMES[ONE]}, None)


def test_the_table_shows_what_each_config_saves(cache):
    rows = {row["config"]: row for row in refined_contents("toy").rows}
    assert rows[str(TWO)] == {
        "kernel": "toy",
        "problem": f"{PROBLEM} on NVIDIA H200",
        "state": "chosen",
        "config": str(TWO),
        "calls": 40,
        "mean_us": 90.0,
        "interval_us": "88.236-91.764",
        "saved_us": 10.0,
    }
    assert rows[str(ONE)]["state"] == "dropped"
    assert repr(refined_contents()) == "<Refining of 1 problems, 2 configs>"
    with pytest.raises(ForetuneError, match="no choices of 'other'"):
        refined_contents("other")


def test_an_export_takes_them_along(cache, tmp_path, monkeypatch):
    cache.record(Problem.of("toy", rows=1), OTHER, 5.0)
    export_choices(tmp_path / "choices.json", None)
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "elsewhere"))
    there = ChoiceCache.of("toy", "s1", H200)
    there.record(PROBLEM, OTHER, 5.0)
    import_choices(tmp_path / "choices.json")
    assert there.refined(PROBLEM) == Refined(TIMES, TWO)
    assert there.times(PROBLEM) == {OTHER: 5.0}


def test_configs_that_only_a_refinement_has_stay_when_others_are_dropped(cache):
    old = Problem.of("toy", rows=1)
    cache.record(old, OTHER, 5.0)
    cache.refine(PROBLEM, Refined(TIMES, TWO), "bundle")
    document = copy.deepcopy(cache.file.read())
    assert forget_oldest(document)
    assert len(document["configs"]) == 2
    assert check_choices(document) == 0


SPOILT = {
    "a list": [],
    "no times": {"decided": None},
    "more": {"times": {}, "decided": None, "by": "hand"},
    "a place that is none": {"times": {"7": [1, 1.0, 1.0, 0.0]}, "decided": None},
    "a text as place": {"times": {"x": [1, 1.0, 1.0, 0.0]}, "decided": None},
    "a short time": {"times": {"0": [1, 1.0]}, "decided": None},
    "negative calls": {"times": {"0": [-1, 1.0, 1.0, 0.0]}, "decided": None},
    "a text as time": {"times": {"0": [1, "1", 1.0, 0.0]}, "decided": None},
    "a slowdown of 0": {"times": {"0": [1, 1.0, 0.0, 0.0]}, "decided": None},
    "an undecided choice": {"times": {"0": [1, 1.0, 1.0, 0.0]}, "decided": 1},
    "a text as choice": {"times": {"0": [1, 1.0, 1.0, 0.0]}, "decided": "0"},
}


@pytest.mark.parametrize("refined", SPOILT.values(), ids=SPOILT)
def test_a_malformed_refinement_is_not_read(cache, refined):
    document = copy.deepcopy(cache.file.read())
    document["entries"][0]["refined"] = refined
    with pytest.raises(ForetuneError):
        check_choices(document)

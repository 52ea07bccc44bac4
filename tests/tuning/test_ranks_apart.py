"""Ranks that are not in step, as real processes with gloo: what `ranks_apart.py` looks at in each, side by side."""

from __future__ import annotations

from contextlib import closing

import pytest
from rank_job import Job
from ranks_apart import LOOKS


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_apart_get_errors_that_name_the_difference_and_exact_sums(size, tmp_path):
    with closing(Job(size, tmp_path, "ranks_apart", FORETUNE_CACHE_DIR=str(tmp_path / "cache"))) as job:
        looks = job.looks()
    odd, others = looks[-1], looks[:-1]
    assert all([*of_rank] == LOOKS for of_rank in others)
    assert [*odd] == LOOKS[:-1]  # it has been killed
    assert all(right for of_rank in looks for _, right in of_rank.values())  # the caller's all-reduce after each look

    def of_others(name):
        """What all but the last rank got, alike."""
        first, *more = [of_rank[name][0] for of_rank in others]
        assert more == [first] * len(more), name
        return first

    def of_all(name):
        assert odd[name][0] == of_others(name), name
        return of_others(name)

    last, rest = f"rank {size - 1}", "rank 0" if size == 2 else "ranks 0, 1, 2"
    work, absent = "__main__.work", f"{rest} did not reach __main__"
    differ = f"RankMismatchError: {work}: the ranks of autotune_pg differ in"

    assert of_others("a_key_is_new_on_one_rank") == [64, 64, True, 64]
    late = f"RankMismatchError: {absent}.work: key, source, search, runs within 0 s"
    assert odd["a_key_is_new_on_one_rank"][0] == [64, late, True, 64]
    places = f"{rest}: __main__.first: key, source, search, runs; {last}: __main__.second: key, source, search, runs"
    elsewhere = f"RankMismatchError: the ranks of autotune_pg are at different places: {places}"
    assert of_all("ranks_come_in_another_order") == [elsewhere, True, 64, 64]

    assert of_all("ranks_have_other_shapes") == f'{differ} key: {rest}: {{"key":[0,0,0]}}; {last}: {{"key":[0,0,0,0]}}'
    configs = of_all("ranks_have_other_configs")
    assert configs.startswith(f'{differ} configs: rank 0: 3 configs ({{"tile":16}}, {{"tile":32}}, {{"tile":64}}) #')
    assert f'{last}: 2 configs ({{"tile":16}}, {{"tile":32}}) #' in configs or "ranks 1, 2, 3: 2 configs" in configs
    assert of_all("ranks_run_other_counts") == f"{differ} runs: {rest}: 1 + 2; {last}: 1 + 3"

    refused = f"none of the 3 configs of {work} works:\n  tile=16: invalid: refused by prune"
    assert odd["a_rank_has_no_configs"][0].startswith(f"TuningFailed: {refused}")
    assert of_others("a_rank_has_no_configs").startswith(f"RankMismatchError: {last} left {work}: {refused}")
    assert odd["a_rank_raises_between_runs"][0] == "KeyboardInterrupt: Ctrl-C"
    assert (
        of_others("a_rank_raises_between_runs") == f"RankMismatchError: {last} left {work}: KeyboardInterrupt: Ctrl-C"
    )

    failed = f"failed on another rank: {last}: RuntimeError: too large"
    assert of_others("a_config_fails_on_one_rank") == [16, [None, None, failed]]
    assert odd["a_config_fails_on_one_rank"][0] == [16, [None, None, "RuntimeError: too large"]]

    boom = f"within 0 s, while {last} failed with RuntimeError: boom"
    found = f"RankMismatchError: {absent}.work: the first run of tile=32 {boom}"
    assert of_all("a_trial_raises_before_its_collective") == [found, [True] * 3]
    in_trial = [f"RankMismatchError: {absent}.layer: the first run of tile=16 {boom}", [True] * 2]
    left = f"RankMismatchError: {last} left __main__.layer: RuntimeError: boom"
    assert of_others("a_context_raises_before_its_collective") == [[left, [True]], in_trial]
    assert odd["a_context_raises_before_its_collective"][0] == [["RuntimeError: boom", [True]], in_trial]
    kernels = of_all("contexts_meet_other_kernels")
    assert f"__main__.layer: the ranks of autotune_pg differ in kernels: {rest}: {work} with 2 configs" in kernels
    assert f"{last}: {work} with 3 configs" in kernels
    # 1 to meet the kernel, 1 to warm up and 1 to time each of 3 configs, 1 to meet what is new, and the two calls.
    assert of_all("a_context_that_all_tune") == [[64, 64], True, 1 + 2 * 3 + 1 + 2]

    assert of_all("time_is_over_on_one_rank") == [1, 16, "1 measured of 3 configs, ended by budget_s=5"]
    advised = "3 measured 3 of 3 configs advised: of rank 0"
    assert of_all("each_rank_has_a_model_of_its_own") == [3, 64, advised]
    assert of_all("one_of_them_is_nested") == 64

    assert looks[0]["a_group_of_some"][0] == [64, 3 * 3600.0, None, True]
    alone = f"RankMismatchError: rank 0 did not reach {work}: key, source, search, runs within 0 s"
    assert odd["a_group_of_some"][0] == [64, 3 * 3600.0, alone, True]
    assert of_all("a_group_of_another_world") == [64, 64, True, True]

    choice, (said,) = of_all("agrees_on_other_configs")
    assert choice == 0
    assert f'{rest}: toy for odd with 2 configs ({{"tile": 16}}, {{"tile": 32}})' in said
    assert f'{last}: toy for odd with 2 configs ({{"tile": 16}}, {{"tile": 33}})' in said
    assert of_all("time_is_over_before_a_rank_has_measured") == [1]
    assert of_all("a_rank_is_in_another_mode") == [2]
    assert of_others("ranks_have_tuned_alone") == [1, [4], [4, 4], []]
    assert odd["ranks_have_tuned_alone"][0] == [2, [4], [4, 4], []]
    assert of_all("attached_with_other_configs") == [1, 1, 1]
    killed = [of_rank["a_rank_is_killed"][0] for of_rank in others]
    assert set(killed) == {killed[0]}
    assert f"{size - 1} did not reach {work}: the first run of tile=32 within 0 s" in killed[0]

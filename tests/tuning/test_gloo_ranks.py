"""Real processes with gloo: what `gloo_ranks.py` looks at in each, side by side."""

from __future__ import annotations

from contextlib import closing

import pytest
from foretune.kernels import find_family
from foretune.runtime import choice, make_shortlist
from gloo_ranks import CONFIGS, FAMILIES, LOOKS, WARPS, problem, time_of
from rank_job import Job


def shared(looks, name):
    """What all ranks got alike."""
    first, *others = [of_rank[name] for of_rank in looks if name in of_rank]
    assert others == [first] * len(others), name
    return first


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_get_one_answer(size, tmp_path):
    with closing(Job(size, tmp_path)) as job:
        looks = job.looks()
    assert all([*of_rank] == list(LOOKS) for of_rank in looks[:-1])
    assert [*looks[-1]] == list(LOOKS[:-2])  # it has died

    how_many, _ = shared(looks, "predicts")
    assert how_many == 36
    shortlists = [
        make_shortlist(find_family(family), problem(family, 512), "h200", k=choice.K).configs for family in FAMILIES
    ]
    assert shared(looks, "tunes_not_while_others_wait_in_a_collective") == str(shortlists[0][0])
    fastest = [min(configs, key=lambda c: max(time_of(rank, c) for rank in range(size))) for configs in shortlists]
    assert shared(looks, "tunes_where_it_was_asked_to") == [*map(str, fastest)]
    assert fastest != [configs[0] for configs in shortlists]

    assert shared(looks, "gets_the_longest_times") == longest(range(size))
    assert shared(looks, "is_warm") > 0  # the first failed on one
    assert shared(looks, "is_late") == shared(looks, "dies_after_posting") == fastest_of(longest(range(size)))
    assert shared(looks, "comes_when_others_have_given_up") == 0
    assert shared(looks, "has_another_shape") == [0, 0]
    for half in (0, 1):
        assert shared(looks[half::2], "agrees_in_halves") == (
            longest(range(half, size, 2)) if size > 2 else longest([half])
        )
    alone, *together = zip(*[of_rank["attaches"] for of_rank in looks], strict=True)
    assert [warps for warps, _ in alone] == [min(WARPS, key=lambda w: time_of(rank, w)) for rank in range(size)]
    best = min(WARPS, key=lambda warps: max(time_of(rank, warps) for rank in range(size)))
    n = len(WARPS)  # what was timed alone is not timed again
    assert together == [([best, count],) * size for count in (n, 2 * n, 2 * n, 2 * n)]
    chosen, timed = shared(looks, "searches")
    assert "num_warps: 4" in chosen
    assert "num_stages: 2" in chosen or "num_stages: 3" in chosen
    assert 5 < len(timed) < 24  # more than the first step
    assert shared(looks, "loses_the_store") == [[0, 0, 0], 1]


def longest(ranks):
    return [max(time_of(rank, config) for rank in ranks) for config in CONFIGS]


def fastest_of(times):
    return times.index(min(times))

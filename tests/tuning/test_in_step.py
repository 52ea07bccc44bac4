"""Ranks that tune in step and leave, as threads on a store in memory; in processes: `test_ranks_apart.py`."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from foretune import ForetuneError
from foretune.runtime.tuning.functions import in_step
from foretune.runtime.tuning.functions.in_step import Ranks
from foretune.runtime.tuning.ranks.agreement import number_of
from foretune.runtime.tuning.ranks.rendezvous import RankMismatchError, Rendezvous
from shared_store import SharedStore

LEFT = "rank 1 left work: KeyError: 'odd'"


class Group:
    """One rank's process group, whose ranks wait as long as it takes."""

    def __init__(self, rank, store):
        self._rank = rank
        in_step._steps_of[self] = in_step._Steps(Rendezvous(store, rank, 2, patience_s=1e9))

    def rank(self):
        return self._rank

    def size(self):
        return 2


@pytest.fixture
def ranks():
    store = SharedStore()
    return [Ranks(Group(rank, store)) for rank in range(2)]


def side_by_side(ranks, tune):
    """What each of them returns or raises, in threads."""

    def outcome(one):
        try:
            return tune(one)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is what is looked at
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(outcome, ranks)]


def tune(rank):
    with rank.together("work", {"key": "a"}):
        return rank.exchange("time", float(rank.rank))


def test_each_gets_the_values_of_all(ranks):
    assert side_by_side(ranks, tune) == [[0.0, 1.0]] * 2


def test_a_rank_that_raises_is_named_to_the_others_and_all_can_tune_again(ranks):
    def one_raises(rank):
        with rank.together("work", {"key": "a"}):
            if rank.rank == 1:
                raise KeyError("odd")
            return rank.exchange("time", 1.0)

    for _ in range(2):
        found = side_by_side(ranks, one_raises)
        assert [type(one) for one in found] == [RankMismatchError, KeyError]
        assert str(found[0]) == LEFT
        assert side_by_side(ranks, tune) == [[0.0, 1.0]] * 2


def test_ranks_that_all_raise_can_tune_again(ranks):
    def all_raise(rank):
        with rank.together("work", {"key": "a"}):
            raise KeyError(rank.rank)

    for _ in range(2):
        assert [type(one) for one in side_by_side(ranks, all_raise)] == [KeyError] * 2
        assert side_by_side(ranks, tune) == [[0.0, 1.0]] * 2


def test_a_rank_that_is_interrupted_while_it_waits_for_the_others_to_begin(ranks):
    def interrupted(seconds):
        raise KeyboardInterrupt

    rendezvous = ranks[1]._steps().rendezvous
    sleep, rendezvous.sleep = rendezvous.sleep, interrupted
    with pytest.raises(KeyboardInterrupt):
        tune(ranks[1])
    rendezvous.sleep = sleep
    with pytest.raises(RankMismatchError, match="rank 1 left work: KeyboardInterrupt"):
        tune(ranks[0])  # it begins late
    assert side_by_side(ranks, tune) == [[0.0, 1.0]] * 2


def test_the_values_of_an_inner_tuning_are_its_own(ranks):
    def nested(rank):
        with rank.together("outer", {}):
            inner = Ranks(rank._group)
            with inner.together("inner", {}):
                found = inner.exchange("time", "inner")
            return found, rank.exchange("time", "outer")

    assert side_by_side(ranks, nested) == [(["inner"] * 2, ["outer"] * 2)] * 2


def test_a_rank_whose_inner_tuning_fails_is_at_another_place(ranks):
    def nested(rank):
        with rank.together("outer", {}):
            inner = Ranks(rank._group)
            try:
                with inner.together("inner", {}):
                    if rank.rank == 1:
                        raise KeyError("odd")
            except KeyError:
                pass
            return rank.exchange("time", 1.0)

    found = side_by_side(ranks, nested)
    places = "rank 0: inner: the end; rank 1: outer: time"
    assert [str(one) for one in found] == [f"the ranks of autotune_pg are at different places: {places}"] * 2
    assert side_by_side(ranks, tune) == [[0.0, 1.0]] * 2


def test_a_store_that_is_gone_is_said(ranks):
    def refuse(operation, key):
        raise ConnectionError("the store is gone")

    ranks[0]._steps().rendezvous.store.before = refuse
    with pytest.raises(ForetuneError, match="cannot reach each other: ConnectionError: the store is gone"):
        tune(ranks[0])


def test_a_group_that_is_gone_leaves_its_number_to_none():
    """As its `id` would be: what was chosen in another world is no choice in this one."""
    seen = set()
    for rank in range(100):
        seen.add(number_of(Group(rank, SharedStore())))
        gc.collect(0)
    assert len(seen) == 100
    assert 0 not in seen
    assert number_of(None) == 0

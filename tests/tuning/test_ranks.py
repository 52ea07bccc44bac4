"""Where ranks may tune, and what they then run: with `torch.distributed` and its store played by the test."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import foretune
import pytest
from foretune import ForetuneError, ForetuneWarning, KernelConfig, Problem
from foretune.runtime.tuning.ranks import agreement as module
from foretune.runtime.tuning.ranks.agreement import agree, agreed, agreed_choice, epoch, may_tune, scope
from foretune.runtime.tuning.ranks.rendezvous import Rendezvous, longest_of_ranks
from shared_store import Clock, SharedStore

CONFIGS = [KernelConfig.of(BLOCK=block) for block in (64, 128, 256)]
PROBLEM = Problem.of("toy", rows=8)


def never():
    raise AssertionError("nothing is to be timed")


def refuse(operation, key):
    raise ConnectionError("the store is gone")


class Group:
    """Two ranks, of which this process is the first, unless it has no other."""

    group_name = "pair"

    def __init__(self, size=2):
        self.size, self.store = size, SharedStore()
        self.other = Rendezvous(self.store, 1, 2, patience_s=0)

    def get_group_store(self):
        return self.store


@pytest.fixture
def world(monkeypatch):
    """A job of two ranks: its default group."""
    default = Group()
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        group=SimpleNamespace(WORLD=default),
        get_world_size=lambda group: group.size,
        get_rank=lambda group: 0 if isinstance(group, Group) else group.rank,
        get_process_group_ranks=lambda group: list(range(group.size)),
        PrefixStore=lambda prefix, store: store,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    monkeypatch.setattr(sys.modules["torch"], "distributed", distributed)
    return default


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    import torch.distributed  # noqa: F401 - so that a test can put its own in its place

    monkeypatch.setattr(module, "_in_force", [])
    monkeypatch.setattr(module, "_last", None)
    monkeypatch.setattr("foretune.runtime.arguments._warned", set())
    clock = Clock()
    real = module.Rendezvous
    monkeypatch.setattr(module, "Rendezvous", lambda *a, **more: real(*a, **more, now=clock.now, sleep=clock.sleep))
    return clock


def choice(times, problem=PROBLEM, configs=CONFIGS):
    return agreed_choice("toy", problem, configs, times if callable(times) else lambda: times)


def test_a_process_of_its_own_tunes_as_ever():
    assert may_tune()
    assert choice([3.0, 2.0, 2.0]) == 1
    with agree(timeout_s=0):
        assert choice([3.0, 2.0, 1.0]) == 2
    assert scope() == 0


@pytest.mark.parametrize("times", [[None, None, None], [float("nan"), None, float("inf")]])
def test_where_nothing_could_be_timed_the_first_runs(times):
    assert choice(times) == 0


@pytest.mark.parametrize("times", [lambda: 1 / 0, lambda: [1.0]])
def test_trouble_with_timing_is_a_warning_and_the_first_runs(times):
    with pytest.warns(ForetuneWarning, match="toy: its configs could not be timed"):
        assert choice(times) == 0


def test_among_ranks_nothing_is_timed_unless_it_was_asked_for(world):
    assert not may_tune()
    assert choice(never) == 0
    assert world.store.values == {}


def test_where_it_was_asked_for_the_fastest_on_the_slowest_rank_runs(world, fresh):
    questions = []

    def other_comes():
        question = world.store.values["waits of 0"].decode()
        questions.append(question)
        world.other.meet(question, lambda: [1.0, 9.0, 4.0], longest_of_ranks)

    with agree(timeout_s=30):
        assert may_tune()
        fresh.at = {1: other_comes}
        assert choice([5.0, 1.0, 4.5]) == 2
        assert choice(never) == 2
        assert agreed([9.0, 9.0, 9.0], "toy", PROBLEM, CONFIGS) == [5.0, 9.0, 4.5]
    assert fresh.seconds < 2
    assert not may_tune()
    assert choice(never) == 0


def test_who_does_not_come_leaves_the_prediction(world, fresh):
    agree(timeout_s=30)
    with pytest.warns(ForetuneWarning, match=r"toy: the ranks do not agree .*rank 1 did not reach toy .*within 30 s"):
        assert choice([5.0, 1.0, 4.5]) == 0
    assert fresh.seconds == 30
    assert agreed([5.0, 1.0, 4.5], "toy", PROBLEM, CONFIGS) == [None, None, None]


def test_times_stay_as_they_are_where_nothing_is_to_be_agreed_on(world):
    assert agreed([5.0, None, float("inf")], "toy", PROBLEM, CONFIGS) == [5.0, None, None]


def test_a_rank_that_cannot_time_tells_the_others_and_goes_on(world, fresh):
    def other_comes():
        world.other.meet(world.store.values["waits of 0"].decode(), lambda: [1.0, 2.0, 3.0], longest_of_ranks)

    fresh.at = {1: other_comes}
    with agree(timeout_s=30), pytest.warns(ForetuneWarning, match="could not be timed"):
        assert choice(lambda: 1 / 0) == 0
    assert fresh.seconds < 2


def test_a_store_that_is_gone_is_one_warning_and_the_prediction_from_then_on(world):
    world.store.before = refuse
    with agree():
        with pytest.warns(ForetuneWarning, match=r"store cannot be reached \(ConnectionError: the store is gone\)"):
            assert choice(never) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choice(never) == 0
            world.store.before = lambda operation, key: None
            assert choice(never, problem="another") == 0


def test_a_backend_without_a_store_is_the_same(world):
    world.get_group_store = None
    with agree(), pytest.warns(ForetuneWarning, match="store cannot be reached"):
        assert choice(never) == 0


def test_a_plain_call_stays_in_force_and_blocks_nest(world):
    pair, alone = Group(), Group(size=1)
    agree()
    with agree(pair), agree(alone):
        assert choice([2.0, 1.0, 3.0]) == 1  # a group of one has nobody to ask
        assert pair.store.values == world.store.values == {}
    with agree(pair, timeout_s=0):
        assert choice([2.0, 1.0, 3.0]) == 0
    assert pair.store.values
    assert world.store.values == {}
    assert may_tune()


def test_a_block_ends_also_with_an_error(world):
    with pytest.raises(KeyError), agree():
        raise KeyError
    assert not may_tune()


def test_scopes_are_of_groups_and_outlast_their_blocks(world):
    among_all, pair = scope(), Group()
    assert among_all > 0
    with agree(pair):
        among_two = scope()
    assert scope() == among_two
    assert len({0, among_all, among_two}) == 3
    with agree():
        assert scope() == among_all
    with agree(Group(size=1)):
        assert scope() == 0


def test_an_epoch_ends_where_a_block_begins_and_where_it_ends():
    epochs = [epoch()]
    with agree():
        epochs += [epoch(), epoch()]
    epochs.append(epoch())
    assert len(set(epochs)) == 3
    assert epochs[1] == epochs[2]


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), True, "5", 1e9])
def test_a_timeout_that_is_none_is_refused(timeout_s):
    with pytest.raises(ForetuneError, match="timeout_s must be between 0 and 86400"):
        foretune.agree(timeout_s=timeout_s)
    assert module._in_force == []


@pytest.mark.parametrize("group", [3, "world", -100, SimpleNamespace(rank=-1)])
def test_a_group_that_is_none_is_refused(world, group):
    with pytest.raises(ForetuneError, match="group must be a process group that this process is in"):
        foretune.agree(group)
    assert module._in_force == []


def test_no_group_exists_before_torch_has_made_one():
    with pytest.raises(ForetuneError, match="group must be a process group"):
        foretune.agree(Group())


def test_a_question_is_the_same_for_the_same_and_another_for_another():
    base = module._question("toy", PROBLEM, CONFIGS)
    assert module._question("toy", Problem.of("toy", rows=8), list(CONFIGS)) == base
    assert module._question("toy", "key", [{"a": 1, "b": 2}]) == module._question("toy", "key", [{"b": 2, "a": 1}])
    others = [
        ("other", PROBLEM, CONFIGS),
        ("toy", Problem.of("toy", rows=16), CONFIGS),
        ("toy", PROBLEM, CONFIGS[::-1]),
        ("toy", PROBLEM, [*CONFIGS[:2], KernelConfig.of(BLOCK=256, num_ctas=2)]),
    ]
    assert len({base, *(module._question(*other) for other in others)}) == 5

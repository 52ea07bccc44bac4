"""Which config a call of the op runs, without kernels: the family, the prediction and the timer are toys."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.runtime import ForetuneWarning, Mode, choice
from foretune.runtime.choice import choose, given

H200 = DeviceSpec.named("h200")
SPACE = tuple(KernelConfig.of(BLOCK_M=block, TMA_X=0, num_stages=2) for block in (16, 32, 64, 128))
DEFAULT = KernelConfig.of(BLOCK_M=32, TMA_X=1, num_stages=2)


def problem(rows=4096):
    return Problem.of("toy", rows=rows, n=64, k=64)


class Family:
    name = "toy"
    knobs = ("BLOCK_M", "TMA_X", "num_warps", "num_stages")

    def default(self, problem, device):
        return DEFAULT

    def at_call_time(self, problem):
        return problem.without_sizes().rounded("rows")

    def supports(self, config, problem, device):
        if unknown := [knob for knob, _ in config.meta if knob not in self.knobs]:
            return f"{unknown[0]} is no knob"
        return f"BLOCK_M is {config['BLOCK_M']}" if config["BLOCK_M"] > problem["rows"] else None


class World:
    """What is predicted, what launches take, and what was asked of both."""

    def __init__(self, patch):
        self.ranking, self.asked, self.launched = SPACE, [], []
        self.times = dict.fromkeys(SPACE, 10.0)
        patch.setattr(choice, "chooser_of", lambda family, device: SimpleNamespace(choose=self.ranked))
        patch.setattr(choice, "timer_of", lambda index: self)
        patch.setattr(choice, "_can_wait", lambda: self.can_wait)
        patch.setattr(choice, "_measured", {})
        patch.setattr(choice.torch.cuda, "current_device", lambda: 0)
        patch.setattr("foretune.runtime.arguments._warned", set())
        self.can_wait = True

    def ranked(self, problem, k):
        self.asked.append(k.k)
        if isinstance(self.ranking, Exception):
            raise self.ranking
        configs = self.ranking[: k.k] or SPACE
        return SimpleNamespace(
            configs=configs,
            predicted_slowdown=(1.0,) * len(configs),
            predicted=bool(self.ranking),
            reason="toy: no prediction",
        )

    def launch(self, config):
        self.launched.append(config)
        if isinstance(self.times[config], Exception):
            raise self.times[config]
        return config

    def time(self, launch):
        return SimpleNamespace(time_us=self.times[launch()])

    def choose(self, mode, rows=4096):
        return choose(Family(), problem(rows), H200, mode, self.launch)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def test_predict_takes_the_first_and_launches_nothing(world):
    assert world.choose(Mode.PREDICT) == SPACE[0]
    assert (world.asked, world.launched) == ([1], [])


def test_off_takes_the_default_and_asks_nobody(world):
    assert world.choose(Mode.OFF) == DEFAULT
    assert (world.asked, world.launched) == ([], [])


def test_shortlist_takes_the_fastest_and_remembers_it_for_the_bucket(world):
    world.times[SPACE[2]] = 5.0
    assert world.choose(Mode.SHORTLIST) == SPACE[2]
    assert set(world.launched) == set(SPACE)
    world.launched.clear()
    assert world.choose(Mode.SHORTLIST, rows=4000) == SPACE[2]  # as many rows, on the grid
    assert world.launched == []
    assert world.choose(Mode.SHORTLIST, rows=8192) == SPACE[2]
    assert world.launched != []


def test_a_winner_of_the_bucket_that_cannot_run_this_problem_is_not_run(world):
    world.times[SPACE[2]] = 5.0
    assert world.choose(Mode.SHORTLIST, rows=64) == SPACE[2]
    world.ranking = SPACE[:2]
    assert world.choose(Mode.SHORTLIST, rows=63) in SPACE[:2]


def test_a_config_that_fails_is_left_out_with_a_warning(world):
    world.times[SPACE[0]] = RuntimeError("out of resources")
    world.times[SPACE[3]] = 5.0
    with pytest.warns(ForetuneWarning, match="1 of 4 configs could not be timed"):
        assert world.choose(Mode.SHORTLIST) == SPACE[3]


def test_where_none_can_be_timed_the_prediction_stands(world):
    world.times = dict.fromkeys(SPACE, RuntimeError("out of resources"))
    with pytest.warns(ForetuneWarning, match="4 of 4"):
        assert world.choose(Mode.SHORTLIST) == SPACE[0]


def test_nothing_is_timed_while_the_device_cannot_be_waited_for(world):
    world.can_wait = False
    assert world.choose(Mode.SHORTLIST) == SPACE[0]
    assert world.launched == []
    world.can_wait, world.times[SPACE[1]] = True, 5.0
    assert world.choose(Mode.SHORTLIST) == SPACE[1]  # and nothing was remembered


@pytest.mark.parametrize("mode", [Mode.PREDICT, Mode.SHORTLIST])
def test_without_a_prediction_the_default_runs(world, mode):
    world.ranking = ()
    with pytest.warns(ForetuneWarning, match="toy: no prediction: the family's default config runs"):
        assert world.choose(mode) == DEFAULT
    assert world.launched == []


def test_trouble_with_a_prediction_is_a_warning_said_once(world):
    world.ranking = OSError("the bundle is gone")
    with pytest.warns(ForetuneWarning, match=r"toy: no prediction \(OSError: the bundle is gone\)"):
        assert world.choose(Mode.PREDICT) == DEFAULT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert world.choose(Mode.PREDICT) == DEFAULT


class Ranks:
    """A job of several ranks: whether this one may time, with whom, and what they agree on."""

    def __init__(self, patch):
        self.may_time, self.scope, self.position = False, 1, 0
        patch.setattr(choice, "may_tune", lambda: self.may_time)
        patch.setattr(choice, "scope", lambda: self.scope)
        patch.setattr(choice, "agreed_choice", self.agreed_choice)

    def agreed_choice(self, kernel, problem, configs, times_us):
        self.asked = (kernel, problem, configs, times_us())
        return self.position


@pytest.fixture
def ranks(monkeypatch):
    return Ranks(monkeypatch)


def test_among_ranks_the_prediction_runs_and_nothing_is_timed(world, ranks):
    world.times[SPACE[2]] = 5.0
    assert world.choose(Mode.SHORTLIST) == SPACE[0]
    assert world.launched == []
    ranks.may_time, ranks.position = True, 3
    assert world.choose(Mode.SHORTLIST) == SPACE[3]  # and the prediction was not remembered


def test_what_ranks_agree_on_runs_also_afterwards(world, ranks):
    world.times |= {SPACE[1]: RuntimeError("out of resources"), SPACE[2]: 5.0}
    ranks.may_time, ranks.position = True, 3
    with pytest.warns(ForetuneWarning, match="1 of 4"):
        assert world.choose(Mode.SHORTLIST) == SPACE[3]
    assert ranks.asked == ("toy", Family().at_call_time(problem()), SPACE, [10.0, None, 5.0, 10.0])
    ranks.may_time, ranks.asked = False, None
    assert world.choose(Mode.SHORTLIST) == SPACE[3]
    assert ranks.asked is None


def test_what_was_chosen_alone_does_not_run_among_ranks(world, ranks):
    ranks.scope, ranks.may_time, ranks.position = 0, True, 2
    assert world.choose(Mode.SHORTLIST) == SPACE[2]
    ranks.scope, ranks.may_time = 1, False
    assert world.choose(Mode.SHORTLIST) == SPACE[0]


def test_problems_of_a_bucket_that_have_other_configs_are_chosen_for_apart(world, ranks):
    """Or else which of them a rank meets first would decide."""
    ranks.may_time, ranks.position = True, 1
    assert world.choose(Mode.SHORTLIST, rows=127) == SPACE[1]
    ranks.position = 2
    assert Family().at_call_time(problem(127)) == Family().at_call_time(problem(128))
    assert world.choose(Mode.SHORTLIST, rows=128) == SPACE[2]
    assert world.choose(Mode.SHORTLIST, rows=127) == SPACE[1]


def test_a_given_config_has_the_defaults_for_what_it_does_not_name():
    config = given(KernelConfig.of(BLOCK_M=64, num_stages=4), Family(), problem(), H200)
    assert config == KernelConfig.of(BLOCK_M=64, TMA_X=1, num_stages=4)


def test_a_given_config_always_has_launch_options():
    class Deep(Family):
        def default(self, problem, device):
            return KernelConfig.of(BLOCK_M=64, TMA_X=1, num_warps=8, num_stages=5)

    assert given(KernelConfig.of(TMA_X=0), Deep(), problem(), H200) == KernelConfig.of(BLOCK_M=64, TMA_X=0)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            KernelConfig.of(BLOCK_SIZE_M=64),
            "BLOCK_SIZE_M is no knob",
        ),
        (KernelConfig.of(BLOCK_M=128), "cannot run toy k=64 n=64 rows=64 bf16 on NVIDIA H200: BLOCK_M is 128"),
    ],
)
def test_a_given_config_that_cannot_be_is_refused_with_the_reason(config, why):
    with pytest.raises(ForetuneError, match=why):
        given(config, Family(), problem(rows=64), H200)

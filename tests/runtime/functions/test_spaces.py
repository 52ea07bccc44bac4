"""Spaces, however they are written; and what is refused where they are declared."""

from __future__ import annotations

import itertools
from functools import lru_cache, partial

import foretune
import pytest
import torch
import triton
import triton.language as tl
from foretune import ForetuneError


def run(x, tile=1, num_warps=4, config=None):
    return x


def configs_of(space, function=run):
    return foretune.tune(space, cache=False)(function).configs


def tiles():
    for tile in (1, 2):
        yield {"tile": tile}


@pytest.mark.parametrize(
    "space",
    [
        {"tile": [1, 2]},
        [{"tile": 1}, {"tile": 2}],
        tiles(),
        tiles,
        ({"tile": t} for t in (1, 2, 1)),
        {"tile": range(1, 3)},
    ],
)
def test_a_space_may_be_written_in_many_ways(space):
    assert configs_of(space) == [{"tile": 1}, {"tile": 2}]


def test_a_dict_of_lists_means_all_combinations_the_last_knob_first():
    space = configs_of({"tile": [1, 2], "num_warps": [4, 8]})
    assert [tuple(one.values()) for one in space] == [(1, 4), (1, 8), (2, 4), (2, 8)]


def test_a_function_that_makes_a_space_is_asked_once_and_not_before_it_is_needed():
    asked = []

    def space():
        asked.append(1)
        return [{"tile": 1}]

    tuned = foretune.tune(space, cache=False)(run)
    assert not asked
    assert (tuned(5), tuned(6), asked) == (5, 6, [1])


def test_triton_configs_become_keyword_arguments_and_stay_as_they_were():
    config = triton.Config({"tile": 2}, num_warps=8)
    before = dict(vars(config), kwargs=dict(config.kwargs))
    assert configs_of([config]) == [{"tile": 2, "num_warps": 8}]
    tuned = foretune.tune([{"config": config}], cache=False)(lambda x, config: config)
    assert tuned(1) is config
    assert vars(config) == before


def test_a_launch_option_that_the_function_would_never_see_is_refused():
    with pytest.raises(ForetuneError, match="no parameter num_stages, but a config sets it: tile: 2"):
        configs_of([triton.Config({"tile": 2}, num_stages=5)])
    hooked = triton.Config({"tile": 2}, pre_hook=lambda arguments: None)
    with pytest.raises(ForetuneError, match=r"pre_hook must be the value of a knob"):
        configs_of([hooked])


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ([], "at least one config but has none"),
        ({"tile": []}, "at least one config but has none"),
        ("tile", "a dict of lists, a list of dicts"),
        (3, "but is 3"),
        ({"tile": 3}, "a list of values for 'tile' but has 3"),
        ({"tile": "ab"}, "a list of values for 'tile' but has 'ab'"),
        ([3], "a dict or a triton.Config but one is 3"),
        ([triton.Config({}), {"tile": 1}], "only dicts or only triton.Configs"),
        (
            [{"tiles": 1}],
            "run has no keyword parameter 'tiles', which a config sets; it has x, tile, num_warps, config",
        ),
        ([{"tile": object()}], "a config's value must be a number"),
        (({"tile": at} for at in itertools.count()), "at most 100000 configs but has more"),
    ],
)
def test_what_is_no_space_is_refused_where_it_is_declared(space, said):
    with pytest.raises(ForetuneError, match=said):
        foretune.tune(space)(run)


def factory(value):
    def captured(x):
        return x + value

    return captured


class Model:
    def __init__(self, rows):
        self.rows = rows

    def forward(self, x):
        return x


def kernel_of(constant):
    @triton.jit
    def kernel(x_ptr):
        tl.store(x_ptr, constant)

    return kernel


@pytest.mark.parametrize(
    "values",
    [
        [lambda x: x, lambda x: x + 1],
        [factory(1), factory(2)],
        [partial(run, 1), partial(run, 2)],
        [Model, f"{__name__}.Model", run, f"{__name__}.run"],
        [kernel_of(tl.constexpr(1)), kernel_of(tl.constexpr(2))],
        [Model(1).forward, "forward", Model.forward],
        [None, "None", float("inf"), "float inf"],
    ],
    ids=["lambdas", "closures", "partials", "a class and its name", "kernels of a factory", "a method", "texts"],
)
def test_each_value_of_a_knob_is_a_config(values):
    assert [one["tile"] for one in configs_of({"tile": values})] == values


def test_a_value_that_is_given_twice_is_one_config():
    model, act = Model(1), factory(1)
    same = {"tile": [model.forward, model.forward, act, act, factory(1), partial(act, 1), partial(act, 1)]}
    assert len(configs_of(same)) == 3


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda: [Model(1).forward, Model(2).forward], r"<bound method Model.forward of .*> and <bound method"),
        (
            lambda: [factory(Model(1)), factory(Model(2))],
            r"<function factory.<locals>.captured.*> and <function factory",
        ),
        (lambda: [torch.compile(run), torch.compile(run, dynamic=True)], r"<function run .*> and <function run"),
        (lambda: [torch.zeros(2), torch.ones(2)], r"tensor\(\[0., 0.\]\) and tensor\(\[1., 1.\]\)"),
        (lambda: [lru_cache(run), lru_cache(maxsize=1)(run)], r"and <functools._lru_cache_wrapper"),
        (lambda: [[Model(1).forward], [Model(2).forward]], r"and \[<bound method"),
    ],
    ids=["methods", "closures", "torch.compile", "tensors", "caches", "lists"],
)
def test_values_that_nothing_tells_apart_are_refused_where_they_are_declared(values, said):
    values = values()  # not at import: torch.compile imports all of Dynamo
    with pytest.raises(
        ForetuneError, match=f"space has two values of 'tile' that another process cannot tell apart.*{said}"
    ):
        foretune.tune({"tile": values}, cache=False)(run)


class Callable:
    def __call__(self, x, tile):
        return x


async def coroutine(x, tile):
    return x


def generator(x, tile):
    yield x


async def both(x, tile):
    yield x


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (coroutine, "coroutine returns a coroutine, whose work is done after the call"),
        (partial(coroutine, 1), "coroutine returns a coroutine"),
        (generator, "generator returns a generator"),
        (both, "both returns an asynchronous generator"),
        (3, "must be a function but is 3"),
        (Callable, "must be a function but is <class"),
        (classmethod(run), "put the tuner below @classmethod"),
        (staticmethod(run), "put the tuner below @staticmethod"),
        (lambda x, tile, autotune: x, "must not have a parameter 'autotune'"),
    ],
)
def test_what_cannot_be_timed_by_calling_it_is_refused(function, said):
    with pytest.raises(ForetuneError, match=said):
        foretune.tune({"tile": [1]})(function)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": ["y"]}, "key names 'y', but the parameters are x, tile"),
        ({"key": 3}, "key must be a list"),
        ({"prune": 3}, "prune must be a function but is 3"),
        ({"work": 3}, "work must be a function but is 3"),
        ({"family": 3}, "must be a Family"),
        ({"n_warmup": 0}, "n_warmup must be an integer"),
        ({"timer": 3}, r"timer must have sample\(call, samples, undo\) but is 3"),
        ({"n_repeat": 0}, "n_repeat must be an integer"),
        ({"search": "anneal"}, "search must be 'exhaustive', 'model'"),
        ({"budget_s": -1}, "budget_s must be between"),
        ({"max_trials": 0}, "max_trials must be an integer"),
        ({"reset": 3}, "reset must be a function"),
        ({"restore": 3}, "restore must be a list"),
        ({"device": "h300"}, "unknown device 'h300'"),
        ({"cache": 3}, "cache must be a path"),
    ],
)
def test_an_option_that_is_none_is_refused_where_it_is_declared(options, said):
    with pytest.raises(ForetuneError, match=said):
        foretune.tune({"tile": [1]}, **options)(lambda x, tile: x)


def test_an_environment_that_says_something_else_is_refused_where_it_is_declared(monkeypatch):
    monkeypatch.setenv("FORETUNE_TUNE", "sometimes")
    with pytest.raises(ForetuneError, match="FORETUNE_TUNE must be one of known, strict, always but got 'sometimes'"):
        foretune.tune({"tile": [1]})(lambda x, tile: x)

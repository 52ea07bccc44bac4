"""What a call's key is, and that a tuned function is a function in every other way."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle

import foretune
import numpy as np
import pytest
from foretune import ForetuneError
from foretune.runtime.tuning.functions.calls import problem_of_key


@pytest.fixture
def tuned(watch):
    @foretune.tune({"tile": [1, 2]}, cache=False, timer=watch)
    def function(x, y=2, *more, tile, **named):
        """A docstring."""
        watch.spend(tile)
        return tile

    return function


def key(function, *args, **kwargs):
    return function.tune(*args, **kwargs).key


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Shape:
    rows: int
    tags: list


def test_arguments_count_however_they_are_given_and_so_do_defaults(tuned):
    assert key(tuned, 1) == key(tuned, x=1) == key(tuned, 1, 2) == key(tuned, y=2, x=1) == '{"more":[],"x":1,"y":2}'
    assert len({key(tuned, *args) for args in [(1,), (True,), (1.0,), ("1",), (None,), (1, 3), (1, 2, 3)]}) == 7
    assert key(tuned, 1, other=[3]) == '{"more":[],"other":[3],"x":1,"y":2}'


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, {"a": {2, 1}}], '[1,{"a":{"<set>":[1,2]}}]'),
        (Color.RED, f'"<enum {__name__}.Color.RED>"'),
        (Shape(3, [1]), f'{{"<dataclass {__name__}.Shape>":{{"rows":3,"tags":[1]}}}}'),
        (object(), '"builtins.object"'),
        (len, '"<function builtins.len>"'),
        (np.zeros((2, 3), np.float32), '{"dtype":"float32","shape":[2,3]}'),
        (np.float32(0.5), "0.5"),
        (np.int64(7), "7"),
        (np.bool_(True), "true"),
        (float("nan"), '"float nan"'),
        ({1: 2}, '{"<mapping>":[[1,2]]}'),
        ((1, [2.5, "fast"], None), '[1,[2.5,"fast"],null]'),
        (np.zeros((3, 2), np.float32).T, '{"dtype":"float32","shape":[2,3],"strides":[4,8]}'),
    ],
)
def test_nothing_need_be_hashable(watch, value, said):
    function = foretune.tune({"tile": [1, 2]}, cache=False, timer=watch)(lambda x, tile: tile)
    assert key(function, value) == f'{{"x":{said}}}'


def test_a_tensor_counts_by_shape_dtype_and_layout_and_not_by_what_is_in_it(tuned):
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 8)
    assert key(tuned, x) == key(tuned, x + 1)
    assert len({key(tuned, one) for one in (x, x.T, x.half(), torch.zeros(8, 4), x.T.contiguous().T)}) == 5


def test_a_list_that_contains_itself_is_refused(tuned):
    x = []
    x.append(x)
    with pytest.raises(ForetuneError, match="does it contain itself"):
        tuned(x)


def test_a_key_may_be_a_function_of_the_call_or_names(watch):
    by_function = foretune.tune({"tile": [1, 2]}, key=lambda x, y=0: {"rows": len(x)}, cache=False, timer=watch)
    by_name = foretune.tune({"tile": [1, 2]}, key=["y"], cache=False, timer=watch)

    def function(x, y=0, tile=None):
        return tile

    assert key(by_function(function), [1, 2]) == key(by_function(function), [3, 4], y=1) == '{"rows":2}'
    assert key(by_name(function), [1, 2]) == key(by_name(function), [3]) == '{"y":0}'


def test_what_the_function_does_not_take_is_its_own_type_error_and_nothing_runs(tuned, watch):
    with pytest.raises(TypeError, match="x"):
        tuned()
    strict = foretune.tune({"tile": [1]}, cache=False)(lambda x, tile: x)
    with pytest.raises(TypeError, match="unexpected"):
        strict(1, z=2)
    assert watch.us == 0


def test_a_knob_that_a_call_gives_stays_and_narrows_the_space(tuned, watch):
    space = {"tile": [1, 2], "unroll": [3, 1]}
    two = foretune.tune(space, cache=False, timer=watch)(
        lambda x, tile, unroll: watch.spend(tile * unroll) or (tile, unroll)
    )
    assert (two(0), two(0, tile=2), two(0, unroll=3), two(0, 2, 3)) == ((1, 1), (2, 1), (1, 3), (2, 3))
    with pytest.raises(ForetuneError, match="no config of the space has tile=5"):
        two(0, tile=5)


def test_it_is_a_function_in_every_other_way(tuned):
    assert (tuned.__name__, tuned.__doc__, tuned.__wrapped__.__name__) == ("function", "A docstring.", "function")
    assert copy.copy(tuned) is tuned
    assert copy.deepcopy({"f": tuned})["f"] is tuned
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    assert "function" in repr(tuned)


@foretune.tune({"tile": [1]}, cache=False)
def at_module_level(x, tile):
    return x


class Model:
    def __init__(self, watch):
        self.watch, self.rows = watch, 3

    @foretune.tune({"tile": [2, 1]}, cache=False)
    def forward(self, x, tile):
        self.watch.spend(tile)
        return (self.rows, x, tile)

    @classmethod
    @foretune.tune({"tile": [1]}, cache=False)
    def made(cls, tile):
        return cls, tile

    @staticmethod
    @foretune.tune({"tile": [1]}, cache=False)
    def alone(x, tile):
        return x, tile


def test_methods_of_all_kinds(watch, monkeypatch):
    monkeypatch.setattr(Model.forward, "_timer", watch)
    model = Model(watch)
    assert model.forward(5) == Model.forward(model, 5) == (3, 5, 1)
    assert model.forward.tune(5).best_config == {"tile": 1}
    assert (Model.made(), Model.alone(4), model.alone(4)) == ((Model, 1), (4, 1), (4, 1))
    assert model.forward == model.forward
    assert model.forward != Model(watch).forward
    assert '"self":"' in model.forward.tune(5).key  # an object counts by its type


def test_a_builtin_and_an_object_can_be_tuned():
    assert foretune.tune([{"default": 5}, {"default": 6}], cache=False)(max)([]) in (5, 6)

    class Scale:
        def __call__(self, x, tile):
            return x * tile

    assert foretune.tune({"tile": [3]}, cache=False)(Scale())(2) == 6


def test_a_key_becomes_a_problem_with_its_numbers_dtypes_and_the_rest_as_flags():
    tensor = {"shape": [64, 8], "dtype": "float16", "device": "cuda"}
    problem = problem_of_key("f", {"x": tensor, "causal": True, "scale": 0.5, "rows": -1})
    assert (dict(problem.dims), problem.dtype) == ({"x.0": 64, "x.1": 8}, "fp16")
    assert set(problem.flags) == {"x.device=cuda", "causal=True", "scale=0.5", "rows=-1"}
    assert problem_of_key("f", {"mode": "fast"}) is None
    assert problem_of_key("f", list(range(100))) is None
    assert dict(problem_of_key("f", 7).dims) == {"key": 7}

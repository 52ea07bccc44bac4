"""Distinct values have distinct keys, and equal values of one type the same key."""

from __future__ import annotations

import datetime
import enum
import json
import re
import uuid
from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import foretune
import numpy as np
import pytest
from foretune.runtime.tuning.functions.calls import problem_of_key
from foretune.runtime.tuning.functions.plain_values import plain, text_of, type_name
from foretune.runtime.tuning.launches import flag_of
from hypothesis import given, settings
from hypothesis import strategies as st


class Color(enum.Enum):
    RED = 1


class Other:
    class Color(enum.Enum):
        RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):
    FAST = "fast"


@dataclass
class Shape:
    rows: int


class Model:
    def __init__(self, rows=0):
        self.rows = rows

    def forward(self):
        return self.rows


def text(value):
    return text_of(plain(value, type_name))


def lambdas():
    return [lambda x: x, lambda x: x + 1, *(lambda x, n=n: x for n in (1, 2))]


def captured(value):
    return lambda: value


DISTINCT = [
    [None, "None", "null", False, 0, "0", "", [], {}, set(), b"", range(0)],
    [1, True, 1.0, "1", Decimal(1), Fraction(1), 1 + 0j, Level.LOW, [1], {1}, (1, 1), deque([1]), {1: 1}, {"1": 1}],
    [
        float("inf"),
        "inf",
        "float inf",
        Decimal("inf"),
        complex("inf"),
        -float("inf"),
        "float -inf",
        float("nan"),
        "float nan",
    ],
    ["x" * 500 + end for end in "ab"],
    [Decimal("0.1"), Decimal("0.10000000000000001"), 0.1, Fraction(1, 10), "0.1", "<Decimal 1e-1>"],
    [Fraction(1, 3), Fraction(33333333333333331, 100000000000000000), 1 / 3],
    [1j, 2j, "1j"],
    [datetime.date(2026, 1, 2), datetime.date(2026, 1, 3), datetime.datetime(2026, 1, 2), "2026-01-02"],
    [datetime.timedelta(1), datetime.timedelta(2), datetime.time(1), datetime.time(2), datetime.timezone.utc],
    [b"a", b"b", "a", b"c" * 99 + b"a", b"c" * 99 + b"b", [97]],
    [range(3), range(1, 3), range(0, 6, 2), [0, 1, 2], slice(3), slice(0, 3), (None, 3, None)],
    [uuid.UUID(int=1), uuid.UUID(int=2), str(uuid.UUID(int=1))],
    [Path("a"), Path("b"), "a"],
    [Color.RED, Other.Color.RED, "Color.RED", 1],
    [Mode.FAST, "fast", "Mode.FAST"],
    [frozenset({1, 2}), [1, 2], {1: 2}, frozenset({(1, 2)}), [[1, 2]]],
    [np.float32(0.1), 0.1, np.float64(0.2), np.datetime64(5, "ns"), np.timedelta64(5, "ns"), 5, np.complex64(1j)],
    [np.dtype("int32"), np.dtype(">i4"), np.dtype("float16"), np.dtype("S5"), np.dtype("S6"), "int32", np.int32],
    [
        np.zeros((2, 2)),
        np.asfortranarray(np.zeros((2, 2))),
        np.zeros((2, 4))[:, ::2],
        {"shape": [2, 2], "dtype": "float64"},
    ],
    [int, "builtins.int", len, "builtins.len", float, np.add, np.multiply],
    [Shape(1), Shape(2), {"Shape": {"rows": 1}}, {"rows": 1}],
    [re.compile("a"), re.compile("b"), re.compile("a", re.IGNORECASE)],
    [10**5000, 10**5000 + 1, -(10**5000), 10**700],
    lambdas(),
    [captured(1), captured(2), captured("1"), captured(captured)],
    [Model().forward, Model, Model.forward],
    [{"a": 1}, {"a": 1, "b": None}, {("a", 1): 1}, [["a", 1]], {"<mapping>": [[["a", 1], 1]]}],
    [{"Config": {"x": 1}}, {"<Config>": {"x": 1}}],
]


@pytest.mark.parametrize("values", DISTINCT, ids=lambda values: type(values[0]).__name__)
def test_distinct_values_have_distinct_keys(values):
    assert len({text(value) for value in values}) == len(values)


def test_what_torch_has_names_for_is_told_apart():
    torch = pytest.importorskip("torch")
    values = [torch.device("cuda:0"), torch.device("cuda:1"), "cuda:0", torch.float16, torch.float32, "torch.float16"]
    values += [torch.strided, torch.channels_last, torch.zeros(2, 2).to_sparse(), torch.zeros(2, 2)]
    assert len({text(value) for value in values}) == len(values)
    assert text(torch.float16) == '"torch.float16"'


def test_equal_values_have_one_key():
    assert text(Decimal("1.5")) == text(Decimal("1.500"))
    assert text(Decimal("-0")) == text(Decimal("0E+7"))
    assert text(range(0, 3, 2)) == text(range(0, 4, 2))
    assert text({1, 2}) == text(frozenset({2, 1}))
    assert text(bytearray(b"a")) == text(b"a")
    assert text((1, 2)) == text([1, 2])  # a shape may be written either way
    assert text(captured(1)) == text(captured(1))


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.sampled_from(
        ["None", "float inf", "<str a>", "<set>", "<Decimal 1e0>", "shape", "torch.int8", "Config", "<mapping>"]
    ),
    st.binary(max_size=80),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.dates(),
    st.datetimes(),
    st.timedeltas(),
    st.times(),
    st.uuids(),
    st.sampled_from([*Color, *Level, *Mode, int, len]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(SCALARS), inner, max_size=3),
        st.frozensets(SCALARS, max_size=3),
        st.builds(slice, inner, inner),
        st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)),
    ),
    max_leaves=5,
)


def typed(value):
    """A value with the types of all parts: Python takes 1, 1.0 and True for equal."""
    if isinstance(value, list):
        return "list", tuple(map(typed, value))
    if isinstance(value, dict):
        return "dict", frozenset((typed(name), typed(one)) for name, one in value.items())
    if isinstance(value, frozenset):
        return "set", frozenset(map(typed, value))
    if isinstance(value, slice):
        return "slice", typed([value.start, value.stop, value.step])
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES)
def test_values_have_one_key_if_and_only_if_they_are_the_same(one, other):
    assert (text(one) == text(other)) == (typed(one) == typed(other))


def test_an_integer_of_any_length_may_be_in_a_key_and_in_a_config(watch):
    tuned = foretune.tune({"seed": [10**5000, 10**5000 + 1]}, cache=False, timer=watch)(lambda x, seed: seed)
    assert tuned(10**5000) in (10**5000, 10**5000 + 1)
    result = tuned.tune(10**5000)
    assert len(result.key) < 500
    assert result.key != tuned.tune(10**5000 + 1).key
    assert json.dumps(result.to_json())
    assert result.to_csv()
    assert result.__rich__()


FLAGS = [
    [None, "None", "'None'", False, "False"],
    [float("inf"), "inf", -float("inf"), "-inf", float("nan"), "nan"],
    [0.5, "0.5", "'0.5'", 1e30, "1e30", -5, "-5", 10**5000, 10**5000 + 1],
    ["x" * 150 + end for end in "ab"],
    ["a\nb", "a b", "ab", "a\tb"],
    [(1, 2), "(1, 2)", [1, 2], ("1", 2), (Color.RED, 2), (Other.Color.RED, 2)],
    [Color.RED, Other.Color.RED, "Color.RED", Mode.FAST, "fast", "Mode.FAST"],
]


@pytest.mark.parametrize("values", FLAGS, ids=lambda values: str(values[0])[:9])
def test_distinct_values_are_distinct_flags_that_a_problem_may_have(values):
    flags = [flag_of("x", value) for value in values]
    assert len(set(flags)) == len(values)
    foretune.Problem.of("launch", flags=tuple(flags))


def test_triton_s_types_and_kernels_are_told_from_texts():
    import triton
    import triton.language as tl

    def factory(C):
        @triton.jit
        def act(x):
            return x + C

        return act

    values = [tl.float16, "fp16", tl.bfloat16, "bf16", factory(tl.constexpr(1)), factory(tl.constexpr(2)), "act"]
    assert len({flag_of("x", value) for value in values}) == len(values)
    assert len({text(value) for value in values}) == len(values)


def test_ordinary_values_are_flagged_as_they_always_were():
    values = {"mode": "fast", "a": "3d", "scale": 0.5, "b": -1, "c": None, "d": "ieee", "e": (1, 2), "f": "a b/c"}
    assert [flag_of(*one) for one in values.items()] == [f"{name}={value}" for name, value in values.items()]
    assert problem_of_key("f", {"n": 1, "x": None}) != problem_of_key("f", {"n": 1, "x": "None"})

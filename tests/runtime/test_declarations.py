"""A `TritonFamily` whose class says what cannot be is refused where it is declared, whatever is said."""

from __future__ import annotations

import math

import pytest
import triton
from foretune.datasets import ForetuneError
from foretune.runtime import TritonFamily, gpu_target

#: What no declaration may be.
NEVER = [0j, -1, math.nan, b"x", object(), len, int, "x" * 10_000, "a\n", [[[1]]], {1: object()}]
ATTRIBUTES = {
    "name": [*NEVER, None, "", "two words", "a:b", {}, []],
    "kernel": [*NEVER, None, "", 5],
    "configs": [*NEVER, 5, "", [], [5]],
    "dims_from": [*NEVER, None, "", {}, [], {"rows": 5}, {"rows": "nothing"}],
    "flags_from": [*NEVER, None, "", [], {"fused": 5}, {"fused": "nothing"}],
    "dtype_from": [*NEVER, "", [], {}, "nothing"],
    "dtypes": [*NEVER, None, "", [], ["int7"]],
    "output": [*NEVER, None, "", [], {}, "nothing"],
    "tiles": [*NEVER, None, "", [], {"BLOCK_M": 5}, {"BLOCK_M": "depth"}, {"BLOCK_X": "rows"}],
    "ranges": [*NEVER, None, "", [], {"rows": 5}, {"rows": (0, 8)}, {"rows": (8, 1)}, {"rows": (1, 10**400)}],
    "most_bytes": [*NEVER, None, "", [], math.inf, 10**400],
    "bucketed": [*NEVER, None, "", ["depth"]],
}


def declare(toy, **declared):
    right = {
        "name": "product",
        "kernel": triton.jit(toy.matmul_kernel),
        "configs": toy.triton_configs(),
        "dims_from": {"rows": "M", "n": "N", "k": "K"},
        "output": "c_ptr",
        "ranges": {"rows": (1, 64), "n": (1, 64), "k": {64, 128}},
        "arguments": lambda self, problem, where: {},
        "grid": lambda self, problem, config: (1,),
        "eager": lambda self, arguments: None,
    }
    return type("Product", (TritonFamily,), right | declared)()


def test_what_is_right_is_taken(toy):
    assert declare(toy, tiles={"BLOCK_M": "rows"}, bucketed=("rows",)).dims == ("rows", "n", "k")


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_what_cannot_be_is_refused_by_its_name(toy, attribute):
    wrong = []
    for value in ATTRIBUTES[attribute]:
        try:
            declare(toy, **{attribute: value})
            wrong.append(f"{value!r} was taken")
        except ForetuneError as error:  # noqa: PERF203 - a few dozen
            if len(str(error)) > 500:
                wrong.append(f"{value!r:.20}: {len(str(error))} characters")
        except Exception as error:  # noqa: BLE001 - is what this looks for
            wrong.append(f"{value!r:.20} raised {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranges", [{}, {"rows": (1, 64), "k": {64}}])
def test_a_dimension_without_a_range_is_refused_unless_cases_are_given(toy, ranges):
    missing = "n" if ranges else "rows"
    message = rf"Product must declare `ranges`: .* as \(1, 4096\) or \{{64, 128\}}, but {missing} has none"
    with pytest.raises(ForetuneError, match=message):
        declare(toy, ranges=ranges)
    given = declare(toy, ranges=ranges, cases=lambda self, **limits: TritonFamily.cases(self, **limits))
    with pytest.raises(ForetuneError, match=message):
        given.cases()


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("byts", lambda self, problem: 1.0, "bytes"),
        ("flop", lambda self, problem: 1.0, "flops"),
        ("suports", staticmethod(lambda config, problem, device: None), "supports"),
        ("tile", {"BLOCK_M": "rows"}, "tiles"),
        ("inplace", ("c_ptr",), "in_place"),
        ("ranges_", {"rows": (1, 8)}, "ranges"),
    ],
)
def test_a_misspelt_declaration_is_refused_unless_the_class_uses_it(toy, name, value, meant):
    with pytest.raises(ForetuneError, match=f"product: nothing uses {name}: did you mean {meant}?"):
        declare(toy, **{name: value})
    used = eval(f"lambda self, arguments: [self.{name} for _ in arguments]")
    assert declare(toy, **{name: value}, eager=used)
    assert declare(toy, **{f"_{name}": value, "block_of": value})


@pytest.mark.parametrize("device", [None, "h200", 5, {}])
def test_what_is_no_device_has_no_target(device):
    with pytest.raises(ForetuneError, match="device must be a DeviceSpec but is"):
        gpu_target(device)

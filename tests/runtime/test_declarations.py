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
        "arguments": lambda self, problem, where: {},
        "grid": lambda self, problem, config: (1,),
        "eager": lambda self, arguments: None,
    }
    return type("Product", (TritonFamily,), right | declared)()


def test_what_is_right_is_taken(toy):
    assert declare(toy, tiles={"BLOCK_M": "rows"}, ranges={"rows": (1, 64)}, bucketed=("rows",)).dims == (
        "rows",
        "n",
        "k",
    )


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


@pytest.mark.parametrize("device", [None, "h200", 5, {}])
def test_what_is_no_device_has_no_target(device):
    with pytest.raises(ForetuneError, match="device must be a DeviceSpec but is"):
        gpu_target(device)

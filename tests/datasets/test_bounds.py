"""Numbers from outside have bounds, and errors name them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Measurement, Problem, Ragged, Status
from foretune.datasets.measurement import LONGEST_US, SHORTEST_US
from foretune.datasets.problem import MOST_SEGMENTS, MOST_SIZE

PROBLEM, CONFIG, H200 = Problem.of("toy", rows=8), KernelConfig.of(BLOCK=16), DeviceSpec.named("h200")
HUGE = 10**400


@pytest.mark.parametrize("size", [2**63, HUGE, MOST_SIZE + 1, -1, 1.0, True, "8"])
def test_a_dimension(size: Any) -> None:
    with pytest.raises(ForetuneError, match=f"dimension rows must be an integer between 0 and {MOST_SIZE} but got"):
        Problem.of("toy", rows=size)
    with pytest.raises(ForetuneError, match="not a problem: dimension rows must be an integer"):
        Problem.from_json(PROBLEM.to_json() | {"dims": {"rows": size}})


def test_a_flag_that_is_given_as_a_dimension() -> None:
    with pytest.raises(ForetuneError, match=r"got True; a flag is given as flags=\('b_kn',\)"):
        Problem.of("matmul", m=1, b_kn=True)


def test_the_largest_dimension_stands_for_itself() -> None:
    largest = Problem.of("toy", rows=MOST_SIZE)
    assert largest.rounded("rows") == largest


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([HUGE], "each of the sizes along rows must be an integer between"),
        ([MOST_SIZE, 1], "the sum of the sizes along rows must be"),
        (range(MOST_SEGMENTS + 1), f"a list of at most {MOST_SEGMENTS} integers"),
        ({1, 2}, "a list of at most"),
    ],
)
def test_ragged_sizes(sizes: Any, said: str) -> None:
    with pytest.raises(ForetuneError, match=said):
        Ragged("rows", sizes)


def test_a_problem_is_the_same_however_it_is_said() -> None:
    one = Problem("toy", (("rows", 8), ("columns", 4)), "bf16", ("b", "a", "a"))
    assert one == Problem.of("toy", rows=8, columns=4, flags=("a", "b"))
    with pytest.raises(ForetuneError, match="dimension rows must be given once but is given as 8 and as 9"):
        Problem("toy", (("rows", 9), ("rows", 8)))


@pytest.mark.parametrize(
    "change",
    [
        {"family": "x" * 5000},
        {"family": "a\nb"},
        {"dims": [["rows", 8]]},
        {"dims": {"rows": {"rows": 8}}},
        {"dtype": {"x": ["bf16"]}},
        {"flags": "permute"},
        {"flags": [["a"]]},
        {"ragged": {"dim": "rows"}},
        {"ragged": {"dim": "rows", "sizes": [[8]]}},
        {"ragged": [8]},
        {"stride": 1},
    ],
)
def test_a_problem_of_odd_json(change: dict[str, Any]) -> None:
    with pytest.raises(ForetuneError, match="not a problem"):
        Problem.from_json(PROBLEM.to_json() | change)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"num_warps": 0}, "num_warps must be an integer between 1 and 32 but got 0"),
        ({"num_warps": 3}, "num_warps must be a power of two but got 3"),
        ({"num_warps": "4"}, "num_warps must be an integer between 1 and 32 but got '4'"),
        ({"num_warps": True}, "num_warps must be an integer"),
        ({"num_stages": -1}, "num_stages must be an integer between 0 and 1000"),
        ({"num_ctas": []}, "must be numbers but are"),
        ({"maxnreg": HUGE}, "maxnreg must be an integer between 1 and 2147483647"),
        ({"BLOCK": HUGE}, "BLOCK must be an integer between"),
        ({"BLOCK": float("nan")}, "BLOCK must be a number or a string but got nan"),
        ({"BLOCK": None}, "BLOCK must be a number or a string but got None"),
        ({"BLOCK": [16]}, "must be a number or a string"),
        ({"BLOCK": "x" * 5000}, "BLOCK must have at most 4096 characters"),
        ({"": 1}, "a config's knob must be a non-empty string of printable characters"),
        ({f"B{i}": i for i in range(65)}, "at most 64 pairs"),
    ],
)
def test_a_config(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ForetuneError, match=said):
        KernelConfig.from_json(CONFIG.to_json() | knobs)


def test_an_options_name_is_no_meta_parameter() -> None:
    with pytest.raises(ForetuneError, match="num_warps is a launch option"):
        KernelConfig((("num_warps", 8),))
    assert KernelConfig.of(cls=1, self=2)["cls"] == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sm_count": HUGE}, "sm_count must be a positive number but is 1000"),
        ({"sm_count": 1.5}, "sm_count must be a whole number but is 1.5"),
        ({"clock_mhz": float("inf")}, "clock_mhz must be a positive number but is inf"),
        ({"l2_bytes": 10**16}, "l2_bytes must be a positive number"),
        ({"name": "x" * 5000}, "name must have at most 200 characters"),
        ({"arch": "sm\x1b90"}, "arch must be a non-empty string of printable characters"),
        ({"matrix_tflops_by_dtype": (("bf16", HUGE),)}, "bf16 must be a positive number"),
        ({"matrix_tflops_by_dtype": (("fp16", 1.0), ("bf16", 1.0))}, "must map dtypes (bf16, fp16, fp32) to rates"),
    ],
)
def test_a_device(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ForetuneError, match=re.escape(said)):
        replace(H200, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time_us": 1e-30}, f"needs a time_us between {SHORTEST_US} and {LONGEST_US} but got 1e-30"),
        ({"time_us": 1e30}, "but got 1e+30"),
        ({"time_us": None}, "but got None"),
        ({"timing_pass": 0}, "timing_pass must be an integer between 1 and 3 but got 0"),
        ({"timing_pass": 127}, "timing_pass must be an integer between 1 and 3 but got 127"),
        ({"samples": -1}, "samples must be an integer between 0"),
        ({"registers": -1}, "registers must be an integer between 0"),
        ({"spread": float("nan")}, "spread must be between 0.0"),
        ({"status": "ok"}, "status must be a Status but is 'ok'"),
    ],
)
def test_a_measurement(change: dict[str, Any], said: str) -> None:
    good = {"status": Status.OK, "time_us": 5.0}
    Measurement(PROBLEM, "gpu", CONFIG, **good)  # type: ignore[arg-type]
    with pytest.raises(ForetuneError, match=re.escape(said)):
        Measurement(PROBLEM, "gpu", CONFIG, **good | change)  # type: ignore[arg-type]


def test_numpys_numbers_become_pythons() -> None:
    device = replace(H200, sm_count=np.int64(132), clock_mhz=np.float32(1980.0), l2_bytes=62914560.0)
    problem = Problem.of("toy", rows=np.int32(8), ragged={"rows": np.array([4, 4])})
    config = KernelConfig.of(BLOCK=np.int64(16), SCALE=np.float64(0.5), num_warps=np.int8(4))
    for value in (device, problem, config):
        assert type(value).from_json(json.loads(json.dumps(value.to_json()))) == value
    assert device == H200

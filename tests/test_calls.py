"""What is handed to the public calls: each argument gets odd values, one at a time, and takes those that it says it
takes; the others are a `ForetuneError`, never another exception and never silence."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import foretune
import numpy as np
import pytest
from fakes import FakeFamily, fake_cases
from foretune import collect, datasets, kernels, model, runtime  # noqa: F401
from foretune.datasets import (
    BinaryFacts,
    Case,
    DeviceSpec,
    ForetuneError,
    KernelConfig,
    Measurement,
    Problem,
    Ragged,
    Status,
    check_problem_of,
)
from foretune.runtime import resolve_mode

H200 = DeviceSpec.named("h200")
NAME = "grouped_gemm_fwd"
PROBLEM = Problem.of(NAME, groups=8, rows=256, n=512, k=512)
CONFIG = KernelConfig.of(BLOCK=16)
SPACE = kernels.find_family(NAME).space()[:3]

ODD = {
    "zero": 0,
    "minus one": -1,
    "one": 1,
    "fraction": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "400 digits": 10**400,
    "5000 digits": 10**5000,
    "true": True,
    "none": None,
    "empty text": "",
    "long text": "x" * 10_000,
    "control": "a\n\0",
    "text": "nothing",
    "bytes": b"x",
    "list": [],
    "tuple": (),
    "nested": [[[1]]],
    "pairs": (("a", []),),
    "mapping": {},
    "odd mapping": {1: object()},
    "object": object(),
    "class": int,
    "function": len,
    "path": Path("nowhere"),
    "set": set(),
    "numpy": np.int64(2),
    "array": np.zeros(2),
}
TEXTS = {"long text", "control", "text"}
LISTS = {"list", "tuple", "set", "mapping"}  # empty ones


def call(function, **arguments):
    return pytest.param(function, arguments, id=getattr(function, "func", function).__qualname__)


def given(good, *takes):
    """An argument: what is right, and the odd values that are right too."""
    return good, set(takes)


DEVICE_FIELDS = {name: given(value) for name, value in H200.to_json().items()}
DEVICE_FIELDS |= {
    name: given(DEVICE_FIELDS[name][0], "one", "numpy") for name in DEVICE_FIELDS if name.endswith(("count", "bytes"))
}
DEVICE_FIELDS |= {
    name: given(DEVICE_FIELDS[name][0], "one", "fraction", "numpy")
    for name in ("clock_mhz", "copy_bandwidth_gbs", "matrix_tflops")
}
DEVICE_FIELDS |= {name: given(name, "text") for name in ("name", "backend", "arch")}
DEVICE_FIELDS |= {
    "registers_per_sm": given(65536, "one", "numpy"),
    "warp_size": given(32, "one", "numpy"),
    "rates_measured": given(True, "true"),
    "read_bandwidth_gbs": given(None, "none", "one", "fraction", "numpy"),
    "l2_seen_bytes": given(None, "none", "one", "numpy"),
    "matrix_tflops_by_dtype": given((), "tuple"),
}

CALLS = [
    call(foretune.configs, family=given(NAME)),
    call(
        foretune.prune,
        family=given(NAME),
        k=given(8, "one", "400 digits", "5000 digits", "numpy"),
        problem=given(None, "none", "class", "function"),
        knobs=given(None, "none", "mapping"),
        fixed=given(None, "none", "mapping"),
        configs=given(None, "none"),
        device=given(None, "none"),
        bundle=given(None, "none"),
    ),
    call(
        foretune.shortlist,
        family=given(NAME),
        problem=given(PROBLEM),
        device=given("h200"),
        k=given(2, "one", "400 digits", "5000 digits", "numpy"),
        configs=given(SPACE, "none"),
        bundle=given(None, "none"),
    ),
    call(foretune.register, family=given(kernels.find_family(NAME))),
    call(foretune.load_bundle, path=given(None, "none")),
    call(
        foretune.collect_dataset,
        family=given(FakeFamily()),
        out=given("out", "text", "path"),  # and then there is no GPU
        cases=given(fake_cases()[:1], "none", *LISTS),
        plan=given("exhaustive"),
        resume=given(True, "true"),
        progress=given(False, "true"),
        budget_s=given(None, "none", "zero", "one", "fraction", "numpy"),
        gpus=given(None, "none", "one", "numpy", "400 digits", "5000 digits"),
    ),
    call(
        Problem,
        family=given("toy", "text"),
        dims=given((("rows", 4),), "tuple", "list"),
        dtype=given("bf16"),
        flags=given((), *LISTS),
        ragged=given(None, "none"),
    ),
    call(
        Problem.of,
        family=given("toy", "text"),
        dtype=given("bf16"),
        flags=given((), *LISTS),
        ragged=given(None, "none"),
        rows=given(4, "zero", "one", "numpy"),
    ),
    call(Problem.from_json, value=given(PROBLEM.to_json())),
    call(Ragged, dim=given("rows", "text"), sizes=given((1, 2), "list", "tuple")),
    call(Ragged.from_json, value=given({"dim": "rows", "sizes": [1]})),
    call(
        KernelConfig.of,
        BLOCK=given(16, "zero", "minus one", "one", "fraction", "true", "empty text", "text", "numpy"),
        num_warps=given(4, "one", "numpy"),
        num_stages=given(3, "zero", "one", "numpy"),
        num_ctas=given(1, "one", "numpy"),
        maxnreg=given(None, "none", "one", "numpy"),
        ir_override=given(None, "none", "text"),
    ),
    call(KernelConfig, meta=given((("BLOCK", 16),), "tuple", "list")),
    call(KernelConfig.from_json, knobs=given(CONFIG.to_json(), "mapping")),
    call(KernelConfig.from_triton, config=given(CONFIG.to_triton())),
    call(DeviceSpec, **DEVICE_FIELDS),
    call(DeviceSpec.from_json, value=given(H200.to_json())),
    call(DeviceSpec.named, name=given("h200")),
    call(DeviceSpec.find, device=given("h200")),
    call(DeviceSpec.load, path=given(Path(datasets.__file__).parent / "devices" / "h200.json")),
    call(H200.with_sms, sm_count=given(4, "one", "numpy")),
    call(
        Case,
        problem=given(PROBLEM),
        sources=given(("random",), *LISTS),
        scenario=given("", "empty text", "text"),
    ),
    call(
        Measurement,
        problem=given(PROBLEM),
        device=given("gpu", "text"),
        config=given(CONFIG),
        status=given(Status.OK),
        time_us=given(1.0, "one", "fraction", "numpy"),
        spread=given(None, "none", "zero", "one", "fraction", "numpy"),
        samples=given(1, "zero", "one", "numpy"),
        timing_pass=given(1, "one", "numpy"),
        compile_ms=given(None, "none", "zero", "one", "fraction", "numpy"),
        **{name: given(None, "none", "zero", "one", "numpy") for name in BinaryFacts._fields},
        run_id=given("", "empty text", "text"),
        error=given(None, "none", "empty text", *TEXTS),
    ),
    call(datasets.load, name_or_path=given("h100")),
    call(datasets.torch_dtype, name=given("bf16")),
    call(datasets.dtype_of_tensor, name=given("x", *ODD), tensor=given(np.zeros(1), "numpy", "array")),
    call(partial(check_problem_of, kernels.find_family(NAME)), problem=given(PROBLEM)),
    call(resolve_mode, requested=given(None, "none")),
    call(partial(runtime.sm_partition, carve=nullcontext), sms=given(4, "one", "numpy"), device=given(H200)),
    call(model.StaticRanker, size=given(8, "one", "numpy")),
    call(model.RandomRanker, seed=given(0, "zero", "one", "numpy")),
]


class ReachedError(Exception):
    """A collection was about to look for GPUs: all that it was given is in order."""


@pytest.fixture(autouse=True)
def nothing_lasts(monkeypatch):
    def reach(wanted=None):
        raise ReachedError

    monkeypatch.setattr("foretune.collect.campaign.visible_gpus", reach)
    monkeypatch.delenv("FORETUNE_MODE", raising=False)


def outcome(function, arguments):
    """What became of a call: None where it was taken, else what it says."""
    try:
        result = function(**arguments)
        if hasattr(result, "__enter__"):
            with result:
                pass
    except ReachedError:
        return None
    except ForetuneError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_each_argument_takes_what_it_says_and_refuses_all_else(function, arguments):
    good = {name: value for name, (value, _) in arguments.items()}
    wrong = []
    for name, (_, takes) in arguments.items():
        for word, value in ODD.items():
            try:
                said = outcome(function, good | {name: value})
            except Exception as error:  # noqa: BLE001 - is what this looks for
                wrong.append(f"{name}: {word} raised {type(error).__name__}: {error}")
                continue
            if said is None and word not in takes:
                wrong.append(f"{name}: {word} was taken")
            elif said is not None and word in takes:
                wrong.append(f"{name}: {word} was refused: {said}")
            elif said is not None and len(said) > 1000:
                wrong.append(f"{name}: {word} was refused in {len(said)} characters")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_the_right_arguments_are_taken(function, arguments):
    good = {name: value for name, (value, _) in arguments.items()}
    assert outcome(function, good) is None

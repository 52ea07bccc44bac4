"""A kernel's arguments may have any name and value: no name of ours is in the way, and no two values count as one."""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace

import foretune
import pytest
import triton
import triton.language as tl
from foretune.runtime import use_stub_driver
from foretune.runtime.tuning.launches import LaunchFamily

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")

#: Parameters, dimensions and keywords that are met between a launch and its problem. (Triton 3.9 itself takes no
#: `options` and no `device`, no `config` by name while it tunes, nor `self`, `grid` and `warmup`.)
NAMES = (
    *("elements", "configs", "kernel", "key", "problem", "args", "kwargs", "named_args", "named", "arguments", "meta"),
    *("call", "run", "family", "dtype", "flags", "dims", "ragged", "reset_only", "exception", "stand_in"),
    *("tuner", "attachment", "fn", "cache", "n", "quantiles", "shape", "knobs", "launch", "name", "timed"),
    *("one", "value", "values", "source", "target", "cls", "positions", "times", "names", "bundle", "jobs", "workers"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The kernel, from a file of its own, which Triton reads."""
    path = tmp_path_factory.mktemp("names") / "names_kernel.py"
    path.write_text(
        "import triton.language as tl\n\n"
        f"def names_kernel(x_ptr, {', '.join(NAMES)}, BLOCK: tl.constexpr):\n"
        f"    tl.store(x_ptr + tl.arange(0, BLOCK), {' + '.join(NAMES)})\n"
    )
    spec = importlib.util.spec_from_file_location("names_kernel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.names_kernel


@pytest.fixture
def bench(filler, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    with use_stub_driver(filler.H200):
        yield lambda kernel_call, quantiles: [float(kernel_call() is None)] * 3


@pytest.mark.parametrize("declare", ["autotune", "attach"])
def test_no_name_of_ours_is_in_the_way(source, bench, declare, recwarn):
    configs = [triton.Config({"BLOCK": size}, num_warps=1) for size in (16, 32)]
    jit = triton.jit(source, do_not_specialize=list(NAMES))
    if declare == "autotune":
        kernel = foretune.autotune(configs, list(NAMES), do_bench=bench, bucket=["elements"])(jit)
    else:
        kernel = foretune.attach(triton.autotune(configs, list(NAMES), do_bench=bench)(jit))
    problem = LaunchFamily(kernel).problem_from_call({"x_ptr": torch.zeros(64), **dict.fromkeys(NAMES, 32)})
    assert problem["elements"] == 32
    assert problem["tensors.elements"] == 64
    kernel[(1,)](torch.zeros(64), **dict.fromkeys(NAMES, 32))
    assert len(kernel.configs_timings) == 2
    kernel[(1,)](torch.zeros(64), *[33] * len(NAMES))
    assert len(kernel.cache) == 2
    assert [str(one.message) for one in recwarn if issubclass(one.category, foretune.ForetuneWarning)] == []


VALUES = [
    *(None, True, False, "None", "True", "False", "nan", "inf", math.inf, -math.inf, "-inf", math.nan, "", " "),
    *(0, 1, -1, "1", "-1", 1.5, "1.5", 1 << 50, str(1 << 50), tl.float16, "fp16", tl.void, "void", (1, 2), "(1, 2)"),
    *("relu", "re lu", "'relu'", "re\nlu", "x" * 100, "x" * 101, "x" * 102 + "a", "x" * 102 + "b"),
]


def test_values_that_differ_make_problems_that_differ(elsewhere):
    tuner = SimpleNamespace(fn=triton.jit(elsewhere.fill_kernel), configs=elsewhere.CONFIGS, keys=["n"])
    family = LaunchFamily(tuner)
    problems = {family.problem_from_call({"x_ptr": torch.zeros(8), "n": 8, "SCALE": value}) for value in VALUES}
    assert len(problems) == len(VALUES)


def test_a_plain_text_is_what_it_was():
    """What was tuned for a constant that is a word is still known."""
    tuner = SimpleNamespace(fn=triton.jit(_scaled), configs=[], keys=["n"])
    problem = LaunchFamily(tuner).problem_from_call({"x_ptr": torch.zeros(8), "n": 8, "SCALE": "relu"})
    assert (dict(problem.dims), problem.flags) == ({"elements": 8, "n": 8}, ("SCALE=relu",))


def _scaled(x_ptr, n, SCALE: tl.constexpr):
    tl.store(x_ptr, n)

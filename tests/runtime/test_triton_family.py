"""`TritonFamily`: what a few declarations make of a kernel, whatever decorators it is under."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from foretune.datasets import DeviceSpec, FamilyError, ForetuneError, KernelConfig, Problem
from foretune.runtime import TritonFamily, use_stub_driver
from foretune.runtime.launching.kernel import Kernel
from foretune.runtime.launching.results import poison, why_wrong
from foretune.runtime.timing.timer import resetting
from foretune.runtime.triton_family import TritonInputs
from quantizing import Quantize

H200 = DeviceSpec.named("h200")
CPU = replace(H200, backend="cpu")


def scale(x_ptr, y_ptr, bias_ptr, n, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr = False):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at) if EVEN else tl.load(x_ptr + at, mask=at < n)
    y = factor * x
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=at < n)
    tl.store(y_ptr + at, y, mask=at < n)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((16, 1), (64, 2), (64, 4))]
even = triton.heuristics({"EVEN": lambda given: given["n"] % 16 == 0})
even_blocks = triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
tuned = triton.autotune(configs=CONFIGS, key=["n"])
DECORATED = {
    "plain": triton.jit(scale),
    "tuned": tuned(triton.jit(scale)),
    "heuristics over autotune": even(tuned(triton.jit(scale))),
    "autotune over heuristics": tuned(even_blocks(triton.jit(scale))),
    "unspecialised": triton.jit(scale, do_not_specialize=["n"]),
    "unaligned": triton.jit(scale, do_not_specialize_on_alignment=["n"]),
}


class Scale(TritonFamily):
    name = "scale"
    kernel = DECORATED["plain"]
    configs = CONFIGS
    dims_from = {"n": "n"}
    flags_from = {"bias": "bias_ptr", "odd": lambda given: given["x_ptr"].data_ptr() % 16 != 0}
    dtypes = ("fp32", "fp16")
    output = "y_ptr"
    tiles = {"BLOCK": "n"}
    ranges = {"n": (1, 1 << 20)}

    def arguments(self, problem, where):
        n, options = problem["n"], {"dtype": getattr(torch, f"float{problem.itemsize * 8}"), "device": where}
        x = torch.randn(n + 1, **options)
        x = x[1:] if "odd" in problem.flags else x[:-1]
        bias = torch.randn(n, **options) if "bias" in problem.flags else None
        return {"x_ptr": x, "y_ptr": torch.empty(n, **options), "bias_ptr": bias, "n": n, "factor": 2.5}

    def grid(self, problem, config):
        return (triton.cdiv(problem["n"], config["BLOCK"]),)

    def eager(self, arguments):
        scaled = arguments["x_ptr"] * arguments["factor"]
        return scaled if arguments["bias_ptr"] is None else scaled + arguments["bias_ptr"]

    def bytes(self, problem):
        return 2.0 * problem["n"] * problem.itemsize


def scale_under(decorators, **declared):
    return type("Scale", (Scale,), {"kernel": DECORATED[decorators], **declared})()


def problem(n, *flags, dtype="fp32"):
    return Problem.of("scale", n=n, dtype=dtype, flags=flags)


PROBLEMS = [
    *(problem(n) for n in (1, 2, 16, 17, 32, 48, 100, 128, 2**31, 2**31 + 1)),
    *(problem(n, "bias") for n in (1, 16, 17, 100)),
    *(problem(n, "odd") for n in (16, 100)),
    *(problem(n, dtype="fp16") for n in (16, 100)),
]


# Binaries.


def cubins(cache):
    return {path.parent.name for path in cache.rglob("*.cubin")}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # not knobs.cache.dir, which would stay set
    return tmp_path


def launched_without_memory(family, problem, config):
    return family.launch(TritonInputs(family.arguments(problem, "meta"), problem), config)


@pytest.mark.compile
@pytest.mark.parametrize("decorators", DECORATED)
def test_compile_makes_the_binary_that_a_launch_needs_and_each_once(decorators, cache):
    family = scale_under(decorators)
    config = family.space()[0]
    with use_stub_driver(H200):
        for each in PROBLEMS:
            assert family.compile(config, each).metadata.num_warps == config.num_warps
    compiled = cubins(cache)
    assert len(compiled) == len({family.binary_key(config, each) for each in PROBLEMS})
    with use_stub_driver(H200) as driver:  # another one, which has nothing in memory
        for each in PROBLEMS:
            launched_without_memory(family, each, config)
    assert len(driver.launches) == len(PROBLEMS)
    assert cubins(cache) == compiled


@pytest.mark.compile
@pytest.mark.parametrize("flags", [(), ("bias",), ("odd",)])
def test_tensors_with_memory_need_the_same_binary(flags, cache):
    family, config = Scale(), Scale().space()[1]
    with use_stub_driver(H200):
        family.compile(config, problem(100, *flags))
    compiled = cubins(cache)
    with use_stub_driver(H200):
        family.launch(family.inputs(problem(100, *flags), CPU), config)
    assert cubins(cache) == compiled


@pytest.mark.compile
def test_the_users_own_autotuner_finds_the_binaries_too(cache):
    family = scale_under("autotune over heuristics")
    with use_stub_driver(H200):
        for config in family.space():
            family.compile(config, problem(100))
    compiled = cubins(cache)
    with use_stub_driver(H200) as driver:
        arguments = family.inputs(problem(100), CPU).arguments
        kernel = triton.autotune(configs=CONFIGS, key=["n"])(even_blocks(triton.jit(scale)))
        kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](**arguments)
    assert len(driver.launches) == len(CONFIGS) + 1
    assert cubins(cache) == compiled


def keys(decorators, *problems):
    family = scale_under(decorators)
    return len({family.binary_key(family.space()[0], each) for each in problems})


def test_integers_that_specialise_alike_share_a_binary():
    sizes = [problem(n) for n in (2, 17, 100, 1000)]
    multiples = [problem(n) for n in (16, 32, 4096)]
    assert keys("plain", *sizes) == keys("plain", *multiples) == 1
    assert keys("plain", *sizes, *multiples, problem(1)) == 3
    assert keys("plain", problem(16), problem(2**31)) == 2
    assert keys("unspecialised", *sizes, *multiples, problem(1)) == 1
    assert keys("unaligned", *sizes, *multiples, problem(1)) == 2


def test_what_heuristics_find_is_part_of_the_key():
    blocks = [problem(16 * n) for n in range(1, 9)]  # some are whole blocks of 64
    family = scale_under("autotune over heuristics")
    assert len({family.binary_key(family.space()[1], each) for each in blocks}) == 2
    assert len({family.binary_key(family.space()[0], each) for each in blocks}) == 1


# Launches.


@pytest.mark.interpret
@pytest.mark.parametrize("decorators", DECORATED)
@pytest.mark.parametrize("flags", [(), ("bias",)])
def test_every_config_computes_what_eager_does(decorators, flags):
    family = scale_under(decorators)
    for n in (1, 16, 50, 128):
        each = problem(n, *flags)
        inputs = family.inputs(each, CPU)
        expected = family.reference(inputs)
        for config in family.space():
            inputs.arguments["y_ptr"].fill_(float("nan"))
            y = family.launch(inputs, config)
            assert float((y - expected).norm()) <= family.tolerance(each) * float(expected.norm())


@pytest.mark.interpret
def test_an_interpreted_kernel_is_found_under_its_decorators_and_has_no_binary():
    for declared in DECORATED.values():
        kernel = Kernel(declared)
        assert kernel.is_interpreted
        assert kernel.parameters[:3] == ("x_ptr", "y_ptr", "bias_ptr")
    family = scale_under("autotune over heuristics")
    assert family.compile(family.space()[0], problem(16)) is None
    assert family.binary_key(family.space()[0], problem(16)) == family.binary_key(family.space()[0], problem(17))


def test_inputs_come_from_the_seed_and_the_output_is_poisoned():
    family = Scale()
    state = torch.get_rng_state()
    first, same, other = (family.inputs(problem(100), CPU, seed=seed).arguments for seed in (0, 0, 1))
    assert torch.equal(first["x_ptr"], same["x_ptr"])
    assert not torch.equal(first["x_ptr"], other["x_ptr"])
    assert first["y_ptr"].isnan().all()
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_must_be_where_they_are_wanted():
    class Elsewhere(Scale):
        def arguments(self, problem, where):
            return super().arguments(problem, "cpu")

    message = r"must return tensors on 'meta' but x_ptr is on 'cpu': pass device=where"
    with use_stub_driver(DeviceSpec.named("h200")), pytest.raises(ForetuneError, match=message):
        Elsewhere().compile(Elsewhere().space()[0], problem(100))


def test_an_output_that_is_no_tensor_is_refused():
    family = scale_under("plain", output=("y_ptr", "factor"))
    message = r"^family scale: factor, which is in output, must be a tensor but is 2\.5$"
    with pytest.raises(FamilyError, match=message):
        family.inputs(problem(4), CPU)
    with pytest.raises(FamilyError, match=message):
        family.tolerance(problem(4))


# Several outputs, and outputs of integers.


ROWS = Problem.of("quantize", rows=5, columns=50, dtype="fp32")


def test_each_output_is_filled_with_an_unlikely_value_unless_it_is_updated_in_place():
    family = Quantize()
    made = family.inputs(ROWS, CPU).arguments
    assert made["q_ptr"].eq(-128).all()
    assert made["scale_ptr"].isnan().all()
    assert made["large_ptr"].view(torch.uint8).eq(255).all()
    in_place = type("Quantize", (Quantize,), {"in_place": ("scale_ptr",)})()
    in_place.arguments = lambda problem, where: (
        Quantize.arguments(family, problem, where) | {"scale_ptr": torch.ones(5)}
    )
    made = in_place.inputs(ROWS, CPU).arguments
    assert made["q_ptr"].eq(-128).all()
    assert made["scale_ptr"].eq(1).all()


@pytest.mark.interpret
def test_each_output_is_compared_by_its_dtype():
    family = Quantize()
    assert family.tolerance(ROWS) == (0.0, 2e-3, 0.0)
    for config in family.space():
        inputs = family.inputs(ROWS, CPU)
        expected = family.reference(inputs)
        result = family.launch(inputs, config)
        assert [one.dtype for one in result] == [torch.int8, torch.float32, torch.bool]
        assert why_wrong(result, expected, family.tolerance(ROWS)) is None
        result[0][3, 4] += 1
        wanted = int(expected[0][3, 4])
        told = f"output 1 of 3: 1 of 250 elements differ: the first is {wanted + 1} instead of {wanted}"
        assert why_wrong(result, expected, family.tolerance(ROWS)) == told
        assert why_wrong(result, expected, 1e-2) is None, "one tolerance for all outputs"
        result[0][3, 4] -= 1
        result[1][2] *= 1.1
        assert why_wrong(result, expected, family.tolerance(ROWS)).startswith("output 2 of 3: relative error 0.0")
        result[1][2] /= 1.1
        result[2][1] ^= True
        assert why_wrong(result, expected, family.tolerance(ROWS)).startswith("output 3 of 3: 1 of 5 elements differ")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_element_that_the_kernel_does_not_write_is_found_in_each_output(place):
    family = Quantize()
    inputs = family.inputs(ROWS, CPU)
    expected = family.reference(inputs)
    result = [one.clone() for one in expected]
    left = inputs.arguments[family.output[place]]
    result[place].view(-1)[0] = left.view(-1)[0]
    if place == 2:  # a boolean that is neither
        result[place].view(torch.uint8)[0] = 255
    told = why_wrong(tuple(result), expected, family.tolerance(ROWS))
    n, name = expected[place].numel(), (-128, "NaN", 255)[place]
    assert told.startswith(f"output {place + 1} of 3: 1 of {n} elements are {name}, as the output is before a launch")


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32])
def test_integers_are_compared_exactly(dtype):
    most = torch.iinfo(dtype).max
    result, expected = torch.tensor([1, most - 1], dtype=dtype), torch.tensor([1, most - 2], dtype=dtype)
    assert why_wrong(expected, expected.clone(), 0.0) is None
    told = f"1 of 2 elements differ: the first is {most - 1} instead of {most - 2}"
    assert why_wrong(result, expected, 0.0) == told
    assert why_wrong(poison(result), expected, 0.0).startswith("2 of 2 elements are ")


def test_a_single_output_may_be_of_integers():
    family = type("Quantize", (Quantize,), {"output": ("q_ptr",), "eager": lambda self, given: given["x_ptr"].char()})()
    assert family.tolerance(ROWS) == 0.0
    assert family.reference(family.inputs(ROWS, CPU)).dtype == torch.int8


def test_a_reference_without_a_tensor_for_each_output_is_refused():
    family = type("Quantize", (Quantize,), {"eager": lambda self, given: given["x_ptr"]})()
    message = (
        r"^family quantize: eager\(\) must return one tensor for each output \(q_ptr, scale_ptr, large_ptr\) but "
        r"returned a tensor of shape \(5, 50\)$"
    )
    with pytest.raises(FamilyError, match=message):
        family.reference(family.inputs(ROWS, CPU))


# What is declared.


@pytest.mark.parametrize("missing", ["name", "kernel", "dims_from", "output", "arguments", "grid", "eager"])
def test_what_is_missing_is_named_where_the_class_is_declared(missing):
    declared = {name: value for name, value in vars(Scale).items() if name in _SAID and name != missing}
    with pytest.raises(ForetuneError, match=f"Broken must declare `{missing}`: "):
        type("Broken", (TritonFamily,), declared)


_SAID = ("name", "kernel", "configs", "dims_from", "flags_from", "output", "arguments", "grid", "eager")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"configs": None}, "declare `configs`"),
        ({"configs": [triton.Config({"BLOK": 16})]}, "no parameter BLOK; there are x_ptr, y_ptr"),
        ({"configs": [triton.Config({"BLOCK": 16}, pre_hook=print)]}, "pre_hook"),
        ({"kernel": scale}, "under triton.jit"),
        ({"dims_from": {"n": "size"}}, "no parameter size; there are x_ptr, "),
        ({"flags_from": {"bias": "b"}}, "no parameter b;"),
        ({"dtype_from": "z_ptr"}, "no parameter z_ptr;"),
        ({"output": "z_ptr"}, "no parameter z_ptr;"),
        ({"output": ("y_ptr", "z_ptr")}, "no parameter z_ptr;"),
        ({"output": ()}, "output must be a parameter or a tuple of different ones but is ()"),
        ({"output": ("y_ptr", "y_ptr")}, "output must be a parameter or a tuple of different ones"),
        ({"output": {"y_ptr"}}, "output must be a parameter or a tuple of different ones but is {'y_ptr'}"),
        ({"output": 3}, "output must be a list of at most"),
        ({"tiles": {"BLOCK": "m"}}, "no dimension m in dims_from; there are n"),
        ({"tiles": {"BLOCK_N": "n"}}, "no knob BLOCK_N; there are BLOCK, num_warps"),
        ({"bucketed": ("m",)}, "no dimension m in dims_from;"),
        ({"dtypes": ("fp16", "half")}, "no dtype half; there are bf16, fp16"),
        ({"ranges": {"n": (0, 8)}}, "n has 0 to 8"),
        ({"dims_from": {"n": ("x_ptr", 0)}}, "a parameter's name or a function of a launch's arguments for each"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(declared, message):
    with pytest.raises(ForetuneError, match=message.replace("(", r"\(").replace(")", r"\)")):
        type("Broken", (Scale,), declared)


def test_a_base_class_of_several_families_declares_nothing():
    class Rowwise(TritonFamily):
        def grid(self, problem, config):
            return (problem["n"],)

    assert not hasattr(Rowwise, "feature_names")


def test_an_autotuner_brings_its_configs():
    family = scale_under("heuristics over autotune", configs=None)
    assert family.space() == tuple(KernelConfig.from_triton(config) for config in CONFIGS)
    assert family.knobs == ("BLOCK", "num_warps", "num_stages")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"in_place": ("z_ptr",)}, "no parameter z_ptr;"),
        ({"in_place": "y_ptr"}, "in_place must be a list"),
        ({"ranges": {"n": set()}}, r"ranges of n must be a range, as \(1, 4096\), or a set of sizes, as \{64, 128\}"),
        ({"ranges": {"n": [64, 128]}}, r"a set of sizes, as \{64, 128\}, but is \[64, 128\]"),
        ({"ranges": {"n": (1, 2, 3)}}, "ranges of n must be a range"),
        ({"ranges": {"n": {0, 64}}}, "ranges of n must be an integer between 1 and"),
        ({"ranges": {"n": {64.0}}}, "ranges of n must be an integer"),
        ({"grid": (1,)}, r"grid must be a method with the parameters \(self, problem, config\)"),
        (
            {"grid": lambda problem, config: (1,)},
            r"grid must be a method with the parameters \(self, problem, config\)",
        ),
        ({"supports": lambda self, config, problem: None}, r"supports .* \(self, config, problem, device\)"),
        ({"eager": lambda self, x, y: x}, r"eager .* \(self, arguments\)"),
    ],
)
def test_a_wrong_type_is_refused_where_the_class_is_declared(declared, message):
    with pytest.raises(ForetuneError, match=f"^scale: .*{message}"):
        type("Broken", (Scale,), declared)


def test_methods_may_be_static():
    family = scale_under("plain", grid=staticmethod(lambda problem, config: [problem["n"]]))
    assert family.estimate_us(problem(132), H200, family.space()).tolist() == [1.0] * 3


@pytest.mark.parametrize("grid", [16, None, (), (1, 2, 3, 4), (1.0,), (True,), (-1,), "4", torch.Size([])])
def test_a_grid_that_is_none_is_named_where_it_is_first_used(grid):
    family = scale_under("plain", grid=lambda self, problem, config: grid)
    message = r"^family scale: grid\(\) must return a tuple of 1 to 3 integers >= 0, such as \(128,\), but returned "
    with pytest.raises(FamilyError, match=message):
        family.features(problem(16), H200, family.space())
    with pytest.raises(FamilyError, match=message):
        family.compile(family.space()[0], problem(16))
    with pytest.raises(FamilyError, match=message):
        launched_without_memory(family, problem(16), family.space()[0])


def test_an_argument_that_arguments_leaves_out_is_named():
    def arguments(self, problem, where):
        return {name: value for name, value in Scale.arguments(self, problem, where).items() if name != "n"}

    family = scale_under("plain", arguments=arguments)
    message = r"^family scale: arguments\(\) must return all parameters of the kernel except the knobs but lacks n$"
    for use in (family.compile, family.binary_key):
        with pytest.raises(FamilyError, match=message):
            use(family.space()[0], problem(16))
    with pytest.raises(FamilyError, match=message):
        family.inputs(problem(16), CPU)


def test_a_grid_may_be_of_numpys_integers():
    family = scale_under("plain", grid=lambda self, problem, config: [np.int64(problem["n"]), 2])
    assert np.isfinite(family.features(problem(16), H200, family.space())).all()


@pytest.mark.parametrize("answer", [True, False, "", 0])
def test_what_supports_returns_is_checked(answer):
    family = scale_under("plain", supports=lambda self, config, problem, device: answer)
    with pytest.raises(FamilyError, match=r"supports\(\) must return None or .* but returned"):
        family.supports(family.space()[0], problem(16), H200)


# Validity.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"BLOCK": 48}, "BLOCK must be one of 16, 64 but is 48"),
        ({"num_warps": 8}, "num_warps must be one of 1, 2, 4 but is 8"),
        ({"num_ctas": 2}, "num_ctas must be one of 1 but is 2"),
        ({"maxnreg": 64}, "maxnreg is no knob of scale; it has BLOCK, num_warps, num_stages"),
        ({"SPLIT": 2}, "SPLIT is no knob of scale"),
        ({"num_warps": 4}, "no config of scale has BLOCK=16 num_warps=4 num_stages=3"),
    ],
)
def test_a_config_of_another_space_is_refused_with_the_values_that_would_do(change, reason):
    config = KernelConfig.of(**(Scale().space()[0].to_json() | change))
    assert reason in Scale().supports(config, problem(16), H200)


def test_problems_of_other_dtypes_and_flags_are_refused():
    family = Scale()
    assert all(family.supports(config, problem(16, "bias"), H200) is None for config in family.space())
    assert "bf16" in family.supports(family.space()[0], problem(16, dtype="bf16"), H200)
    assert "relu" in family.supports(family.space()[0], problem(16, "relu"), H200)
    missing = KernelConfig.of(num_warps=1)
    assert family.supports(missing, problem(16), H200) == "BLOCK must be one of 16, 64 but is None"


def test_options_of_a_backend_are_knobs():
    family = scale_under("plain", configs=[triton.Config({"BLOCK": 16, "waves_per_eu": waves}) for waves in (0, 2)])
    assert "waves_per_eu" in family.knobs


def test_a_knob_that_some_configs_leave_unset_may_stay_so():
    capped = [triton.Config({"BLOCK": 16}, num_warps=1, maxnreg=limit) for limit in (None, 64)]
    family = scale_under("plain", configs=capped)
    assert "maxnreg" in family.knobs
    assert all(family.supports(config, problem(16), H200) is None for config in family.space())
    assert np.isfinite(family.features(problem(16), H200, family.space())).all()


# Calls.


def test_a_call_says_its_problem():
    x, y = torch.zeros(101, dtype=torch.float16), torch.zeros(100, dtype=torch.float16)
    call = {"x_ptr": x[:-1], "y_ptr": y, "bias_ptr": None, "n": 100, "factor": 1.0, "grid": (1,), "warmup": False}
    assert Scale().problem_from_call(call) == problem(100, dtype="fp16")
    assert Scale().problem_from_call(call | {"bias_ptr": y}) == problem(100, "bias", dtype="fp16")
    assert Scale().problem_from_call(call | {"x_ptr": x[1:]}) == problem(100, "odd", dtype="fp16")
    by_shape = scale_under("plain", dims_from={"n": lambda given: given["x_ptr"].shape[0]})
    assert by_shape.problem_from_call(call) == problem(100, dtype="fp16")
    by_default = scale_under("plain", flags_from={"even": "EVEN"})  # which has a default
    assert by_default.problem_from_call(call).flags == ()


def test_an_argument_that_is_missing_or_odd_is_named():
    with pytest.raises(ForetuneError, match="no argument n, bias_ptr: scale needs n, bias_ptr, x_ptr"):
        Scale().problem_from_call({"x_ptr": torch.zeros(4)})
    with pytest.raises(ForetuneError, match="x_ptr must be a tensor"):
        Scale().problem_from_call({"x_ptr": 4, "n": 4, "bias_ptr": None})
    by_tensor = scale_under("plain", dims_from={"n": "x_ptr"})
    with pytest.raises(ForetuneError, match=r"takes n from a tensor; .* call\[.x_ptr.\]\.shape\[0\]"):
        by_tensor.problem_from_call({"x_ptr": torch.zeros(4), "bias_ptr": None})


# The workload.


def test_cases_are_drawn_from_the_ranges_by_the_seed():
    family = Scale()
    cases = family.cases(random=30)
    assert len({case.problem for case in cases}) == 30
    assert cases == family.cases(random=30) != family.cases(random=30, seed=1)
    assert all(1 <= case.problem["n"] <= 1 << 20 for case in cases)
    assert {case.problem.dtype for case in cases} == {"fp16", "fp32"}
    assert {case.problem.flags for case in cases} == {(), ("bias",), ("odd",), ("bias", "odd")}


def test_problems_that_are_too_large_are_not_drawn():
    small = scale_under("plain", most_bytes=4096.0)
    assert {small.bytes(case.problem) <= 4096 for case in small.cases()} == {True}
    heavy = scale_under("plain", flops=lambda self, problem: 1e9 * problem["n"])
    assert {case.problem["n"] <= 100 for case in heavy.cases(max_tflop=0.1)} == {True}
    few = scale_under("plain", ranges={"n": (1, 2)}, flags_from={})
    assert len(few.cases()) == 4  # two sizes, two dtypes


def test_sizes_may_come_from_a_set():
    family = scale_under("plain", ranges={"n": {64, 128, 96}})
    assert {case.problem["n"] for case in family.cases()} == {64, 96, 128}
    assert len(family.cases()) == 3 * 2 * 4  # sizes, dtypes, flags
    fixed = scale_under("plain", ranges={"n": frozenset({64})}, flags_from={}, dtypes=("fp16",))
    assert [case.problem["n"] for case in fixed.cases()] == [64]


class Rows(Scale):
    """Needs a block that covers the row."""

    def supports(self, config, problem, device):
        if config["BLOCK"] < problem["n"]:
            return f"BLOCK must be at least n={problem['n']} but is {config['BLOCK']}"
        return super().supports(config, problem, device)


def test_only_problems_that_a_config_supports_are_drawn():
    family = type("Rows", (Rows,), {"ranges": {"n": (1, 1 << 10)}})()
    cases = family.cases(random=30)
    assert len(cases) == 30
    assert max(case.problem["n"] for case in cases) <= 64
    assert cases == family.cases(random=30)
    assert type("Scale", (Scale,), {"ranges": {"n": (1, 64)}})().cases(random=0) == ()


def test_a_family_that_supports_nothing_of_its_ranges_says_why():
    family = type("Rows", (Rows,), {"ranges": {"n": {100, 128}}})()
    message = r"supports\(\) refuses all configs for every problem drawn from ranges: BLOCK must be at least n=1"
    with pytest.raises(ForetuneError, match=message):
        family.cases()


# In place.


def add_one(x_ptr, seen_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)
    tl.store(seen_ptr + at, tl.load(seen_ptr + at, mask=at < n) + 1, mask=at < n)


class AddOne(TritonFamily):
    """Updates its output in place, and a second tensor too."""

    name = "add_one"
    kernel = triton.jit(add_one)
    configs = CONFIGS
    dims_from = {"n": "n"}
    dtypes = ("fp32",)
    output = "x_ptr"
    in_place = ("x_ptr", "seen_ptr")
    ranges = {"n": (1, 1 << 10)}

    def arguments(self, problem, where):
        n = problem["n"]
        seen = torch.zeros(n, dtype=torch.int32, device=where)
        return {"x_ptr": torch.randn(n, device=where), "seen_ptr": seen, "n": n}

    def grid(self, problem, config):
        return (triton.cdiv(problem["n"], config["BLOCK"]),)

    def eager(self, arguments):
        return arguments["x_ptr"].add_(1)  # in place as well


def test_what_is_updated_in_place_is_not_poisoned_and_can_be_reset():
    family, each = AddOne(), Problem.of("add_one", n=100, dtype="fp32")
    inputs = family.inputs(each, CPU)
    x, seen = inputs.arguments["x_ptr"], inputs.arguments["seen_ptr"]
    first = x.clone()
    assert x.isfinite().all()
    expected = family.reference(inputs)
    assert torch.equal(expected, first + 1)
    assert torch.equal(x, first), "the reference must not change the inputs"
    x.add_(5)
    seen.add_(5)
    assert torch.equal(family.reference(inputs), expected)
    family.reset(inputs)
    assert torch.equal(x, first)
    assert seen.count_nonzero() == 0


@pytest.mark.interpret
def test_every_launch_of_a_kernel_that_works_in_place_starts_from_fresh_inputs():
    family, each = AddOne(), Problem.of("add_one", n=100, dtype="fp32")
    inputs = family.inputs(each, CPU)
    expected = family.reference(inputs)
    for config in family.space():
        family.reset(inputs)
        assert why_wrong(family.launch(inputs, config), expected, family.tolerance(each)) is None
        assert inputs.arguments["seen_ptr"].eq(1).all()


@pytest.mark.interpret
def test_a_kernel_that_reads_its_poisoned_output_is_told_apart():
    family = type("AddOne", (AddOne,), {"in_place": ()})()
    inputs = family.inputs(Problem.of("add_one", n=100, dtype="fp32"), CPU)
    inputs.arguments["x_ptr"].fill_(0.0)
    expected = family.reference(inputs).clone()
    inputs.arguments["x_ptr"].fill_(float("nan"))
    wrong = why_wrong(family.launch(inputs, family.space()[0]), expected, 1e-2)
    assert "100 of 100 elements are NaN" in wrong
    assert "reads its output (list what it updates in TritonFamily.in_place)" in wrong


def test_the_reference_of_a_kernel_that_reads_its_poisoned_output_is_nan():
    family = type("AddOne", (AddOne,), {"in_place": ()})()
    reference = family.reference(family.inputs(Problem.of("add_one", n=100, dtype="fp32"), CPU))
    wrong = why_wrong(reference, reference, 1e-2)
    assert wrong.startswith("100 of 100 elements of the reference are NaN: perhaps it is computed from the output")
    assert len(wrong) <= 300, "a row stores no more"


def test_what_is_no_tensor_cannot_be_updated_in_place():
    family = type("AddOne", (AddOne,), {"in_place": ("x_ptr", "n")})()
    with pytest.raises(ForetuneError, match="n, which is in in_place, must be a tensor but is 100"):
        family.inputs(Problem.of("add_one", n=100, dtype="fp32"), CPU)


def test_timers_reset_what_is_updated_in_place_before_each_launch():
    family, each = AddOne(), Problem.of("add_one", n=4, dtype="fp32")
    inputs = family.inputs(each, CPU)
    (before,) = resetting(family, inputs).values()
    inputs.arguments["x_ptr"].fill_(7.0)
    before()
    assert torch.equal(inputs.arguments["x_ptr"] + 1, family.reference(inputs))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ForetuneError, match="no models"):
        Scale().cases(tokens=[16])


def test_the_estimate_grows_with_what_the_last_wave_lacks():
    family = Scale()
    full, half = (family.estimate_us(problem(n), H200, family.space()) for n in (132 * 64, 132 * 64 + 1))
    assert full.shape == (3,)
    assert half[1] > 1.9 * full[1] > 0
    assert math.isfinite(family.estimate_us(problem(0), H200, family.space())[0])


def test_the_source_hash_follows_the_kernel_and_not_its_decorators():
    assert len({scale_under(decorators).source_hash() for decorators in DECORATED}) == 1

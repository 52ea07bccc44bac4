"""What the contract launches of a family, and that a kernel which writes outside of its tensors fails it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import overrunning
import pytest
from foretune.datasets import DeviceSpec, ForetuneWarning, Problem
from foretune.kernels.contract_launches import (
    check_launches,
    covering_launches,
    interpretable,
    small_problems,
    warn_if_not_compared,
)
from foretune.kernels.testing import FamilyContract
from overrunning import AddRelu
from quantizing import Quantize

CPU = replace(DeviceSpec.named("h200"), backend="cpu", sm_count=4)


def declared(**attributes):
    return type("Declared", (AddRelu,), attributes)()


def launches(family, most=32):
    return covering_launches(family, small_problems(family, CPU), CPU, most)


def test_one_plain_run_finds_what_is_written_outside(tmp_path):
    """As a user runs it: without marks to register, and without TRITON_INTERPRET."""
    shutil.copy(overrunning.__file__, tmp_path / "test_own.py")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreter", "-W", "error"]
    run = subprocess.run([*command, "test_own.py"], cwd=tmp_path, env=kept, capture_output=True, text=True)
    assert "2 failed" in run.stdout, run.stdout[-4000:]
    overrun = (
        "ROWS=4 num_warps=4 num_stages=3 on add_relu columns=1 rows=1 fp32 writes 12 bytes outside of y_ptr, starting"
    )
    assert f"in the interpreter: AssertionError: BLOCK=64 {overrun} 0 bytes after its end" in run.stdout
    assert "the interpreter was ended by SIGSEGV while launching BLOCK=64 ROWS=4" in run.stdout
    assert "in far_kernel" in run.stdout


def test_every_value_of_each_knob_is_launched_with_sizes_that_it_does_not_divide():
    family = AddRelu()
    chosen = launches(family)
    assert chosen == launches(family)
    assert len(chosen) < 10
    assert {item for config, _ in chosen for item in config.to_json().items()} == {
        item for config in family.space() for item in config.to_json().items()
    }
    for knob, dim, tile in (("ROWS", "rows", 4), ("BLOCK", "columns", 64), ("BLOCK", "columns", 128)):
        sizes = [problem[dim] for config, problem in chosen if config[knob] == tile and problem[dim] % tile]
        assert min(sizes) < tile < max(sizes)
    assert any(problem["rows"] % config["ROWS"] and problem["columns"] % config["BLOCK"] for config, problem in chosen)
    assert launches(family, most=2) == chosen[:2]


def test_every_dtype_flag_and_size_of_a_set_is_launched():
    family = declared(
        dtypes=("fp16", "fp32"), flags_from={"bias": "bias_ptr"}, ranges={"rows": {64, 96}, "columns": (128, 256)}
    )
    problems = [problem for _, problem in launches(family)]
    assert {problem.dtype for problem in problems} == {"fp16", "fp32"}
    assert {problem.flags for problem in problems} == {(), ("bias",)}
    assert {problem["rows"] for problem in problems} == {64, 96}
    assert {problem["columns"] for problem in problems} == {128, 129, 257 - 128}


def test_a_family_without_tiles_has_each_dimension_longer_than_a_block():
    longest = [max(problem[dim] for _, problem in launches(declared(tiles={}))) for dim in ("rows", "columns")]
    assert longest == [129, 129]


def refusing(reason):
    def supports(self, config, problem, device):
        return super(type(self), self).supports(config, problem, device) or reason(config, problem)

    return declared(supports=supports)


def test_only_sizes_that_nothing_supports_are_rounded():
    """As for a kernel whose loop over the columns has no mask, or whose rows must be aligned."""
    whole = refusing(lambda config, problem: "BLOCK" if problem["columns"] % config["BLOCK"] else None)
    assert all(problem["columns"] % config["BLOCK"] == 0 for config, problem in launches(whole))
    assert any(problem["rows"] % config["ROWS"] for config, problem in launches(whole))
    aligned = refusing(lambda config, problem: "columns" if problem["columns"] % 16 else None)
    assert {problem["columns"] for _, problem in launches(aligned)} == {128, 144}
    for tile in (64, 128):
        assert any(config["BLOCK"] == tile and problem["columns"] % tile for config, problem in launches(aligned))


def test_large_problems_are_launched_only_with_few_programs():
    family = declared(ranges={"rows": (1024, 4096), "columns": (1024, 4096)})
    assert launches(family) == []
    assert launches(declared(ranges={"rows": (64, 4096), "columns": (1024, 4096)})) != []


def test_the_interpreter_gets_bf16_only_from_families_that_have_nothing_else():
    problems = [Problem.of("add_relu", rows=1, columns=1, dtype=dtype) for dtype in ("bf16", "fp32")]
    assert interpretable(problems) == problems[1:]
    assert interpretable(problems[:1]) == problems[:1]


def test_a_family_whose_results_the_interpreter_does_not_compare_is_named(recwarn):
    problems = [Problem.of("add_relu", rows=1, columns=1, dtype=dtype) for dtype in ("bf16", "fp32")]
    warn_if_not_compared(declared(), problems)
    assert not recwarn.list
    with pytest.warns(ForetuneWarning, match="add_relu: all of its problems are in bf16, and those results are not"):
        warn_if_not_compared(declared(), problems[:1])


@pytest.mark.interpret
def test_a_wrong_result_names_config_and_problem():
    family = declared(eager=lambda self, arguments: arguments["x_ptr"])
    config, problem = family.space()[0], Problem.of("add_relu", rows=3, columns=70, dtype="fp32")
    with pytest.raises(AssertionError, match=f"the result of {config} on {problem} is wrong: relative error"):
        check_launches(family, [(config, problem)], CPU)


QUANTIZED = Problem.of("quantize", rows=5, columns=50, dtype="fp32")


def quantizes(**attributes):
    family = type("Declared", (Quantize,), attributes)()
    check_launches(family, [(config, QUANTIZED) for config in family.space()], CPU)


def off_by_one(place):
    def eager(self, arguments):
        results = Quantize.eager(self, arguments)
        results[place] = results[place] + 1 if place < 2 else ~results[place]
        return results

    return eager


@pytest.mark.interpret
def test_every_output_is_compared():
    quantizes()
    for place, wrong in enumerate(("250 of 250 elements differ", "relative error", "5 of 5 elements differ")):
        with pytest.raises(AssertionError, match=f"is wrong: output {place + 1} of 3: {wrong}"):
            quantizes(eager=off_by_one(place))


@pytest.mark.interpret
def test_a_tensor_that_is_written_must_be_declared():
    """Else a wrong result in it would pass."""
    only_scale = {"output": "scale_ptr", "eager": lambda self, arguments: Quantize.eager(self, arguments)[1]}
    with pytest.raises(AssertionError, match="writes q_ptr, which is in neither `output` nor `in_place`: a result"):
        quantizes(**only_scale)
    with pytest.raises(AssertionError, match="writes large_ptr, which is in neither"):
        quantizes(**only_scale, in_place=("q_ptr",))
    quantizes(**only_scale, in_place=("q_ptr", "large_ptr"))


@pytest.mark.interpret
def test_a_launch_that_gives_fewer_outputs_than_the_reference_is_named():
    launch = lambda self, inputs, config: Quantize.launch(self, inputs, config)[:2]  # noqa: E731
    with pytest.raises(AssertionError, match=r"and a tensor of shape \(5,\), but a launch gives a tensor"):
        quantizes(launch=launch)


class TestQuantize(FamilyContract):
    family = Quantize

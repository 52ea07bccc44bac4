"""The launches of `FamilyContract`: which configs run which problems, and what each must compute and leave alone."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ..datasets import DeviceSpec, KernelConfig, Measurable, Problem
from ..datasets.errors import cause_of, reason_of, warn
from ..runtime import TritonFamily
from ..runtime.launching.results import Redzones, described, outputs_of, why_wrong

#: The most programs of a launch: the interpreter takes milliseconds for each.
MOST_PROGRAMS = 256
#: How many small shapes there are of each dtype and set of flags, without those of `_wide`.
_SHAPES = 5
#: The smallest value of a knob that is taken for a tile where a family does not declare its `tiles`.
_LEAST_TILE = 16
_ANNOUNCED = "launching "


def is_interpreting() -> bool:
    """Return whether Triton interprets kernels in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def small_problems(family: TritonFamily, device: DeviceSpec) -> list[Problem]:
    """Return small problems within a family's ranges: some larger than a tile, some smaller, most with odd sizes.

    Odd sizes are those that tiles, which are powers of two, do not divide. Where no config supports these, sizes are
    multiples of 16, or of the largest tile. There are problems of each dtype, without flags, with all and with each
    alone.
    """
    tiles: dict[str, list[int]] = {}
    for knob, dim in family.tiles.items():
        values = {config.to_json().get(knob) for config in family.space()}
        tiles.setdefault(dim, []).extend(value for value in values if isinstance(value, int) and value > 0)
    sizes = {dim: _sizes(family, dim, tiles.get(dim, [1])) for dim in family.dims}
    shapes = [{dim: some[place] for dim, some in sizes.items()} for place in range(_SHAPES)]
    shapes += [] if tiles else _wide(family, shapes[0])
    flags = dict.fromkeys([(), *((flag,) for flag in family.flags), tuple(sorted(family.flags))])
    return [
        replace(problem, dtype=dtype, flags=some)
        for problem in [_supported(family, shape, sizes, device) for shape in shapes]
        for dtype in family.dtypes
        for some in flags
    ]


def _sizes(family: TritonFamily, dim: str, tiles: Sequence[int]) -> list[int]:
    """Return sizes of a dimension to launch tiles with: three odd ones, the smallest, a tile, and a multiple of 16."""
    given = family.ranges[dim]
    if not isinstance(given, (tuple, list)):
        return [sorted(given)[place % len(given)] for place in range(_SHAPES + 1)]
    low, high = given
    odd = [min(max(size, low), high) for size in (2 * min(tiles) + 1, min(tiles) - 1, max(tiles) + 1)]
    odd = [size if size % 2 or low == high else size + 1 if size < high else size - 1 for size in odd]
    return odd + [min(max(size, low), high) for size in (low, max(tiles), (max(tiles) // 16 + 1) * 16)]


def _wide(family: TritonFamily, shape: dict[str, int]) -> list[dict[str, int]]:
    """Return one copy of the shape per dimension, in which this dimension is longer than a tile.

    It is for a family that declares no tiles.
    """
    values = [value for config in family.space() for _, value in config.meta if isinstance(value, int)]
    tile = min((value for value in values if value >= _LEAST_TILE), default=1)
    return [shape | {dim: _sizes(family, dim, [tile])[0]} for dim in family.dims]


def _supported(
    family: TritonFamily, shape: Mapping[str, int], sizes: Mapping[str, Sequence[int]], device: DeviceSpec
) -> Problem:
    """Return the problem of a shape, after replacing as few sizes as possible so that some config supports it.

    A size is replaced by one of the last two of its dimension in `sizes`: a multiple of 16, or the largest tile.
    """
    options = [(shape[dim], sizes[dim][-1], sizes[dim][-2]) for dim in family.dims]
    for chosen in sorted(product(range(3), repeat=len(options)), key=sum):
        dims = {dim: some[place] for dim, some, place in zip(family.dims, options, chosen, strict=True)}
        problem = Problem(family.name, tuple(sorted(dims.items())), family.dtypes[0])
        if any(family.supports(config, problem, device) is None for config in family.space()):
            return problem
    return Problem(family.name, tuple(sorted(shape.items())), family.dtypes[0])


def covering_launches(
    family: Measurable, problems: Sequence[Problem], device: DeviceSpec, most: int
) -> list[tuple[KernelConfig, Problem]]:
    """Return a few pairs of a config and a problem that it supports, enough to cover what all such pairs cover.

    They cover each value of each knob, each shape, dtype and flag, each tile with a smaller and with a larger size that
    it does not divide, and one launch where no tile divides its size. The same arguments give the same pairs.

    Args:
        family: The family.
        problems: Small problems. Each config runs the one that `check_problem` returns.
        device: The device to launch on.
        most: The most pairs.
    """
    pairs = [
        (config, family.check_problem(config, problem))
        for problem in sorted(problems, key=lambda problem: math.prod(size for _, size in problem.dims))
        for config in family.space(device)
        if family.supports(config, problem, device) is None
    ]
    facts = {pair: _facts(family, *pair) for pair in pairs if _programs(family, *pair) <= MOST_PROGRAMS}
    missing = set[Hashable]().union(*facts.values())
    chosen: list[tuple[KernelConfig, Problem]] = []
    while missing and len(chosen) < most:
        chosen.append(max(facts, key=lambda pair: len(facts[pair] & missing)))
        missing -= facts[chosen[-1]]
    return chosen


def _programs(family: Measurable, config: KernelConfig, problem: Problem) -> int:
    """Return how many programs a launch has; 0 if the family does not say."""
    return math.prod(family.grid(problem, config)) if isinstance(family, TritonFamily) else 0


def _facts(family: Measurable, config: KernelConfig, problem: Problem) -> set[Hashable]:
    """Return what a test with this launch covers: knob values, flags, sizes, dtype, tiles that do not divide a size."""
    knobs, dims = config.to_json(), dict(problem.dims)
    declared = getattr(family, "tiles", {}).items()
    tiles = [(k, tile, dims[dim]) for k, dim in declared if isinstance(tile := knobs.get(k), int) and tile > 0]
    partial = [(knob, tile, size > tile) for knob, tile, size in tiles if size % tile]
    flags = [(flag, flag in problem.flags) for flag in family.flags]
    return {*knobs.items(), *partial, *flags, problem.dims, problem.dtype_name, ("partial", len(partial) == len(tiles))}


def check_launches(family: Measurable, pairs: Sequence[tuple[KernelConfig, Problem]], device: DeviceSpec) -> None:
    """Launch the config of each pair on its problem; fail if a result is wrong, or other memory is overwritten.

    In the interpreter results in bf16 are not compared, because it computes some of them wrongly.

    Raises:
        AssertionError: A launch is wrong. The message names the config, the problem, and what is wrong.
    """
    made: dict[Problem, tuple[Any, Any, Redzones]] = {}
    for config, problem in pairs:
        if problem not in made:
            inputs = family.inputs(problem, device)
            redzones = Redzones(inputs)
            made[problem] = (inputs, family.reference(inputs), redzones)
        inputs, expected, redzones = made[problem]
        redzones.restore()
        print(f"{_ANNOUNCED}{config} on {problem}", flush=True)  # noqa: T201 - the last words of a process that crashes
        try:
            out = family.launch(inputs, config)
            if on_gpu := outputs_of(out)[0].is_cuda:
                import torch

                torch.cuda.synchronize()
        except Exception as error:
            raise AssertionError(f"{config} on {problem} fails: {reason_of(cause_of(error))}") from error
        outside = redzones.overwritten()
        assert outside is None, f"{config} on {problem} writes {outside}: is the mask of a store missing or wrong?"
        if isinstance(family, TritonFamily):
            undeclared = redzones.changed([inputs.arguments[name] for name in (*family._outputs, *family.in_place)])
            assert undeclared is None, (
                f"{config} on {problem} writes {undeclared}, which is in neither `output` nor `in_place`: a result "
                "belongs in `output`, so that it is compared, and a workspace in `in_place`"
            )
        assert described(out) == described(expected), (
            f"the reference is {described(expected)}, but a launch gives {described(out)}"
        )
        is_comparable = on_gpu or _is_exact(problem)
        wrong = why_wrong(out, expected, family.tolerance(problem)) if is_comparable else None
        hint = "around the tensors are random bytes: does a load lack its mask?"
        assert wrong is None, f"the result of {config} on {problem} is wrong: {wrong}; {hint}"


def interpretable(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems whose results the interpreter computes correctly, or all if there are none of these."""
    return [problem for problem in problems if _is_exact(problem)] or list(problems)


def warn_if_not_compared(family: Measurable, problems: Sequence[Problem]) -> None:
    """Warn if `check_launches` would compare no result in the interpreter."""
    if problems and not any(map(_is_exact, problems)):
        warn(
            f"{family.name}: all of its problems are in bf16, and those results are not compared in the interpreter: "
            "run its tests on a GPU, too, or let it have another dtype"
        )


def _is_exact(problem: Problem) -> bool:
    return "bf16" not in problem.dtype_name


def run_interpreted(request: pytest.FixtureRequest, folder: Path) -> None:
    """Run the requesting test once more in a process that interprets kernels, and fail if it fails there.

    Triton decides when it is imported whether it interprets. Also, a kernel that writes far outside of its tensors
    crashes the process that interprets it.

    Args:
        request: The request of the test.
        folder: An empty folder.
    """
    config, report = request.config, folder / "report.xml"
    options = [f"--rootdir={config.rootpath}", "-o", f"addopts=--import-mode={config.getoption('importmode')}"]
    options += ["-c", str(config.inipath)] if config.inipath else []
    place = f"{request.path}::{request.node.nodeid.partition('::')[2]}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *options, f"--junitxml={report}", place],
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"TRITON_INTERPRET": "1"},
        cwd=config.invocation_params.dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode == 0:
        return
    if report.exists() and (failed := ElementTree.parse(report).find(".//*[@message]")) is not None:
        pytest.fail(f"in the interpreter: {failed.get('message')}", pytrace=False)
    how = (
        f"was ended by {signal.Signals(-run.returncode).name}" if run.returncode < 0 else f"ended with {run.returncode}"
    )
    _, is_launching, output = run.stdout.rpartition(_ANNOUNCED)
    if is_launching:
        launch, _, output = output.partition("\n")
        how += f" while {is_launching}{launch}: does the kernel write far outside of its tensors?"
    pytest.fail(f"the interpreter {how}\n{output[:2000]}", pytrace=False)

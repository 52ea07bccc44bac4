"""What `foretune.spaces` says of a kernel family: all of it is what the family says of itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem, check_problem_of
from ...datasets.config import OPTIONS
from ...datasets.errors import shown
from .. import find_family, find_measurable
from .filtered import Filtered


def ready_space(
    family: Family | type[Family] | str, device: DeviceSpec | Path | str | None = None
) -> dict[str, list[Any]]:
    """A family's space as a plain dictionary: each knob with the values that it has there, in the order of the
    family's knobs; with a device, only what some problem on it supports.

    A copy, to be changed at will and handed to `generate`. The family's own space is that grid less the combinations
    that cannot be fast, so that the grid has all configs of the space. Raises `ForetuneError` for what is no family.

    >>> space = ready_space("grouped_gemm_fwd", "h200")
    >>> space["BLOCK_M"], space["num_warps"]
    ([16, 32, 64, 128, 256], [4, 8])
    """
    found = find_family(family)
    configs = found.space(None if device is None else DeviceSpec.find(device))
    knobs = [config.to_json() for config in configs]
    if unknown := sorted({knob for one in knobs for knob in one} - {*found.knobs, *OPTIONS}):
        raise ForetuneError(f"a config of {found.name} has {unknown[0]}, which is none of its knobs")
    present = [knob for knob in found.knobs if any(knob in one for one in knobs)]
    return {knob: sorted({one[knob] for one in knobs if knob in one}) for knob in present}


def filter_valid(configs: Iterable[KernelConfig], problem: Problem, device: DeviceSpec | Path | str) -> Filtered:
    """The configs that the problem's family supports on a device, and the reason for each that was dropped.

    Raises `ForetuneError` for a problem of a family that nobody knows, or that is not as its family has them, for what
    is no `KernelConfig`, and for what is no device.

    >>> from foretune.kernels.spaces.knob_grid import generate
    >>> problem = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    >>> space = ready_space("grouped_gemm_fwd") | {"BLOCK_K": [128], "GROUP_M": [1], "PROGRAMS_PER_SM": [1]}
    >>> left = filter_valid(generate(space), problem, "h200")
    >>> len(left.configs) > 100, sorted({reason.split()[0] for _, reason in left.dropped})
    (True, ['BLOCK_K', 'BLOCK_M', 'PINGPONG', 'needs'])
    """
    if not isinstance(problem, Problem):
        raise ForetuneError(f"problem must be a Problem but is {shown(problem)}")
    family, spec = find_family(problem.family), DeviceSpec.find(device)
    check_problem_of(family, problem)
    if not isinstance(configs, Iterable) or isinstance(configs, (str, bytes)):
        raise ForetuneError(f"configs must be a list of KernelConfigs but is {shown(configs)}")
    given = list(configs)
    for config in given:
        if not isinstance(config, KernelConfig):
            raise ForetuneError(f"each of configs must be a KernelConfig but one is {shown(config)}")
    return Filtered.by(given, lambda config: family.supports(config, problem, spec))


def default_config(problem: Problem, device: DeviceSpec | Path | str) -> KernelConfig:
    """The config that the problem's family runs where nothing is predicted. Raises `ForetuneError` as `filter_valid`
    does, for a family that only predicts, and where no config can run the problem.

    >>> problem = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    >>> default_config(problem, "h200")["BLOCK_N"] >= 32
    True
    """
    if not isinstance(problem, Problem):
        raise ForetuneError(f"problem must be a Problem but is {shown(problem)}")
    family = find_measurable(problem.family)
    check_problem_of(family, problem)
    spec = DeviceSpec.find(device)
    config = family.default(problem, spec)
    if reason := family.supports(config, problem, spec):
        raise ForetuneError(f"{family.name} has no default config for {problem} on {spec.name}: {reason}")
    return config

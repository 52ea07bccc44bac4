"""Build spaces from dictionaries of knobs, and query the space of a kernel family."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem, check_problem_of
from ...datasets.config import OPTIONS, check_config
from ...datasets.console import table
from ...datasets.errors import check_word, shown
from ..registry import find_family, find_measurable

#: The largest space that `generate` accepts, far more than can be measured.
MOST_CONFIGS = 1_000_000


def generate(
    space: Mapping[str, Iterable[Any]], *, keep: Callable[[KernelConfig], bool] | None = None
) -> tuple[KernelConfig, ...]:
    """Return all combinations of a {knob: values} dictionary, each once; the last knob varies fastest.

    Args:
        space: The values of each knob. num_warps, num_stages and num_ctas are knobs too.
        keep: A predicate; only configs for which it is true are returned.

    Returns:
        The configs, at least one.

    Raises:
        ForetuneError: A knob's values are not a list, the space has more than a million configs, or no config is left.

    >>> space = {"BLOCK_M": [64, 128], "num_warps": [4, 8]}
    >>> len(generate(space)), [str(one) for one in generate(space, keep=lambda c: c["BLOCK_M"] // c.num_warps == 8)]
    (4, ['BLOCK_M=64 num_warps=8 num_stages=3'])
    """
    if not isinstance(space, Mapping) or not space:
        raise ForetuneError(f"a space must be a dictionary of knobs, each with its values, but is {shown(space)}")
    knobs = {check_word("a space's knob", knob): checked_values(knob, values) for knob, values in space.items()}
    if (count := math.prod(map(len, knobs.values()))) > MOST_CONFIGS:
        raise ForetuneError(f"a space must have at most {MOST_CONFIGS} configs but has {count}")
    configs = tuple(dict.fromkeys(KernelConfig.of(**one) for one in combinations(knobs)))
    kept = configs if keep is None else tuple(filter(keep, configs))
    if not kept:
        raise ForetuneError(f"keep must let a config of the space through but refuses all {len(configs)}")
    return kept


def checked_values(knob: str, values: Any) -> list[Any]:
    """Return one knob's values as a list.

    Raises:
        ForetuneError: The values are not iterable, or there are none; the message names the knob.
    """
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ForetuneError(f"a space must have a list of values for {knob} but has {shown(values)}")
    if not (found := list(itertools.islice(values, MOST_CONFIGS + 1))):
        raise ForetuneError(f"a space must have at least one value for {knob} but has none")
    return found


def combinations(knobs: Mapping[str, list[Any]]) -> Iterable[dict[str, Any]]:
    """Yield a dictionary for each combination of the knobs' values."""
    return (dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values()))


@dataclass(frozen=True)
class Filtered:
    """A list of configs after a check: those that can run, in the list's order, and the dropped ones with reasons."""

    configs: tuple[KernelConfig, ...]
    dropped: tuple[tuple[KernelConfig, str], ...] = ()

    @classmethod
    def by(cls, configs: Iterable[KernelConfig], reason_against: Callable[[KernelConfig], str | None]) -> Filtered:
        """Split configs into those without a reason against them and the others; repeated configs count once.

        >>> ones = [KernelConfig.of(BLOCK=size) for size in (64, 128)]
        >>> left = Filtered.by(ones, lambda c: "too large" if c["BLOCK"] > 64 else None)
        >>> len(left.configs), left.dropped[0][1]
        (1, 'too large')
        """
        reasons = {config: reason_against(config) for config in configs}
        return cls(
            tuple(config for config, reason in reasons.items() if reason is None),
            tuple((config, reason) for config, reason in reasons.items() if reason is not None),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the configs, and the dropped ones with the reasons, as JSON values."""
        return {
            "configs": [config.to_json() for config in self.configs],
            "dropped": [{"config": config.to_json(), "reason": reason} for config, reason in self.dropped],
        }

    def __rich__(self) -> Any:
        counts = Counter(reason for _, reason in self.dropped).most_common()
        rows = [(count, reason) for reason, count in counts]
        left = f"{len(self.configs)} of {len(self.configs) + len(self.dropped)} configs are left."
        return table("Dropped configs", ("configs", "because"), rows, below=[left])


def ready_space(
    family: Family | type[Family] | str, device: DeviceSpec | Path | str | None = None
) -> dict[str, list[Any]]:
    """Return a family's space as a plain dictionary, in the order of the family's knobs.

    The dictionary can be changed and passed to `generate`. The family's own space is a subset of this grid: it leaves
    out combinations that cannot be fast.

    Args:
        family: A family, its class, its name, or "package.module:attribute".
        device: Leave out values that no config for this device has: a spec, the name of a shipped one, or its JSON
            file.

    Returns:
        A new dictionary of each knob's values, sorted.

    Raises:
        ForetuneError: The family or the device is unknown.

    >>> space = ready_space("grouped_gemm_fwd", "h200")
    >>> space["BLOCK_M"], space["num_warps"]
    ([16, 32, 64, 128, 256], [4, 8])
    """
    found = find_family(family)
    knobs = [config.to_json() for config in found.space(None if device is None else DeviceSpec.find(device))]
    if unknown := sorted({knob for one in knobs for knob in one} - {*found.knobs, *OPTIONS}):
        raise ForetuneError(f"a config of {found.name} has {unknown[0]}, which is not one of its knobs")
    present = [knob for knob in found.knobs if any(knob in one for one in knobs)]
    return {knob: sorted({one[knob] for one in knobs if knob in one}) for knob in present}


def filter_valid(configs: Iterable[KernelConfig], problem: Problem, device: DeviceSpec | Path | str) -> Filtered:
    """Return the configs that a problem's family supports on a device, and the reasons against the others.

    Args:
        configs: The configs to check.
        problem: A problem of a known family.
        device: A spec, the name of a shipped one, or its JSON file.

    Returns:
        The valid configs (`configs`) and the others (`dropped`), each with the reason.

    Raises:
        ForetuneError: The family or the device is unknown, the problem is not one of the family, or a config is not a
            `KernelConfig`.

    >>> problem = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    >>> space = ready_space("grouped_gemm_fwd") | {"BLOCK_K": [128], "GROUP_M": [1], "PROGRAMS_PER_SM": [1]}
    >>> left = filter_valid(generate(space), problem, "h200")
    >>> len(left.configs) > 100, sorted({reason.split()[0] for _, reason in left.dropped})
    (True, ['BLOCK_K', 'BLOCK_M', 'PINGPONG', 'needs'])
    """
    family, spec = find_family(_checked(problem).family), DeviceSpec.find(device)
    check_problem_of(family, problem)
    if not isinstance(configs, Iterable) or isinstance(configs, (str, bytes)):
        raise ForetuneError(f"configs must be a list of KernelConfigs but is {shown(configs)}")
    given = list(configs)
    for config in given:
        check_config(config)
    return Filtered.by(given, lambda config: family.supports(config, problem, spec))


def default_config(problem: Problem, device: DeviceSpec | Path | str) -> KernelConfig:
    """Return the config that a problem's family runs if nothing can be predicted.

    Args:
        problem: A problem of a known family that can be collected.
        device: A spec, the name of a shipped one, or its JSON file.

    Raises:
        ForetuneError: As for `filter_valid`; the family can only predict; or no config can run the problem.

    >>> problem = Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
    >>> default_config(problem, "h200")["BLOCK_N"] >= 32
    True
    """
    family = find_measurable(_checked(problem).family)
    check_problem_of(family, problem)
    spec = DeviceSpec.find(device)
    config = family.default(problem, spec)
    if reason := family.supports(config, problem, spec):
        raise ForetuneError(f"{family.name} has no default config for {problem} on {spec.name}: {reason}")
    return config


def _checked(problem: Problem) -> Problem:
    if not isinstance(problem, Problem):
        raise ForetuneError(f"problem must be a Problem but is {shown(problem)}")
    return problem

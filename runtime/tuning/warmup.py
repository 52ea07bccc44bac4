"""`warm_up`: the binaries that a family's launches will ask for, compiled ahead of a run into Triton's cache.

What a launch waits for the first time is the compiler. Nothing is launched here and nothing is timed, so no inputs are
needed, and with a stub driver no GPU either: a node that has none fills the cache of those that have.
"""

from __future__ import annotations

import csv
import importlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem, check_problem_of
from ...datasets.console.tables import table
from ...datasets.errors import abridged, check_integer, check_path, reason_of, shown
from ..launching.kernel import Kernel
from ..shortlist import make_shortlist
from .cache.cache_folder import known_kernels
from .compiling import compile_ahead
from .launch_arguments import stand_ins
from .launches import LaunchFamily
from .packages import autotuners_in

_OTHER_COLUMNS = ("dtype", "flags")


@dataclass(frozen=True)
class WarmedUp:
    """What a warm-up compiled. `failed` says which config of which problem did not compile, and why."""

    family: str
    device: str
    problems: int
    binaries: int
    failed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "device": self.device,
            "problems": self.problems,
            "binaries": self.binaries,
            "failed": list(self.failed),
        }

    def __rich__(self) -> Any:
        rows = [[str(self.problems), str(self.binaries), str(len(self.failed))]]
        title = f"{self.family} on {self.device}"
        return table(title, ("problems", "binaries compiled", "failed"), rows, below=self.failed[:8])


def warm_up(
    family: Measurable, problems: Sequence[Problem], device: DeviceSpec, *, k: int = 1, workers: int | None = None
) -> WarmedUp:
    """Compiles the `k` configs predicted to be fastest for each problem, each binary once, on `workers` threads (as
    many as there are cores, if left out), for the active Triton driver's target, which should be `device`'s.

    Raises `ForetuneError` for a family that cannot be compiled, a problem of another one, none, and `k` < 1.
    """
    if not isinstance(family, Measurable):
        raise ForetuneError(f"{family.name} only predicts: what is compiled must be a Measurable family")
    check_integer("the shortlist's length k", k, 1)
    if not problems:
        raise ForetuneError(f"there are no problems of {family.name} to warm up for")
    jobs: dict[Hashable, tuple[str, Any]] = {}
    for problem in problems:
        check_problem_of(family, problem)
        chosen = make_shortlist(family, family.at_call_time(problem), device, k=k)
        for config in chosen.configs[:k]:  # all of them where nothing was predicted: then the first
            job = partial(family.compile, config, problem)
            jobs.setdefault(family.binary_key(config, problem), (f"{config} of {problem}", job))
    return _compiled(family.name, device, len(problems), jobs, workers)


def _compiled(
    name: str, device: DeviceSpec, n_problems: int, jobs: Mapping[Hashable, tuple[str, Any]], workers: int | None
) -> WarmedUp:
    errors = compile_ahead([job for _, job in jobs.values()], workers)
    failed = [
        f"{what}: {type(error).__name__}: {abridged(str(error), 200)}"
        for (what, _), error in zip(jobs.values(), errors, strict=True)
        if error is not None
    ]
    return WarmedUp(name, device.name, n_problems, len(jobs) - len(failed), tuple(failed))


def warm_up_seen(name: str, device: DeviceSpec, *, workers: int | None = None) -> WarmedUp:
    """Compiles the binaries that autotuned kernels chose in earlier runs on this device (attached ones, and those of
    `foretune.autotune`): of the kernel "package.module.kernel", or of all that a package's modules have a name for.

    What was seen is what the choice cache keeps: of each key that was tuned, the arguments that a binary depends on and
    the config. The binaries are those of that torch and Triton for the kernel's source as it is now; what was tuned
    with another source is left out.

    Raises `ForetuneError` where there is no such module or kernel, and where nothing that is known of it can be
    compiled: it was not tuned on this device, its source has changed, or its arguments were more than values.
    """
    jobs: dict[Hashable, tuple[str, Any]] = {}
    problems: set[tuple[str, Problem]] = set()
    for tuner in _autotuners_named(name):
        kernel, function = Kernel(tuner), LaunchFamily(tuner).name
        for problem, config, arguments in _launches_seen(function, kernel.source_hash(), device):
            problems.add((function, problem))
            job = partial(_compile_seen, kernel, arguments, config)
            jobs.setdefault((function, config, str(arguments)), (f"{config} of {problem}", job))
    if not jobs:
        raise ForetuneError(
            f"nothing can be compiled for {shown(name)} on {device.name}: no launch is known that was tuned with its "
            "source as it is now (see foretune cache show)"
        )
    return _compiled(name, device, len(problems), jobs, workers)


def _launches_seen(
    function: str, source: str, device: DeviceSpec
) -> Iterator[tuple[Problem, KernelConfig, Mapping[str, Any]]]:
    """The launches that are known of a kernel, each with the configs that were the fastest or chosen."""
    for known in known_kernels(None):
        if known.kernel == function and _identity(known.device) == _identity(device):
            for one in known.latest().problems:
                configs = dict.fromkeys([*([one.best] if one.best else []), *one.chosen.values()])
                for config, launch in itertools.product(configs, one.launches):
                    if one.source == source and "arguments" in launch:
                        yield one.problem, config, launch["arguments"]


def _identity(device: DeviceSpec) -> tuple[str, str, int]:
    """What tells the files of two devices apart (see `shared_file`)."""
    return device.name, device.arch, device.sm_count


def _compile_seen(kernel: Kernel, arguments: Mapping[str, Any], config: KernelConfig) -> Any:
    return kernel.compile((1,), {**stand_ins(arguments), **config.to_triton().all_kwargs()})


def _autotuners_named(name: str) -> list[Any]:
    """Of a module and all below it, or of the module that a kernel's name begins with, that kernel."""
    module = name
    while module:
        try:
            found = autotuners_in(importlib.import_module(module))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise ForetuneError(f"{shown(name)} cannot be imported: {reason_of(error)}") from error
            module = module.rpartition(".")[0]
            continue
        except Exception as error:
            raise ForetuneError(f"{shown(name)} cannot be imported: {reason_of(error)}") from error
        return found if module == name else [one for one in found if LaunchFamily(one).name == name]
    raise ForetuneError(f"there is no module or kernel {shown(name)}")


def problems_from_csv(path: Path | str, family: Family) -> list[Problem]:
    """The problems in a CSV file: a column for each dimension but those that have a default, and, if they are there,
    `dtype` (the family's first where it is empty) and `flags`, with spaces between them. Each once.

    Raises `ForetuneError` naming the file, the line and what is wrong there.
    """
    path = check_path("the shapes' file", path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ForetuneError(f"{shown(str(path))} cannot be read: {error}") from None
    header = [name.strip() for name in rows[0]] if rows else []
    unknown = [name for name in header if name not in (*family.dims, *_OTHER_COLUMNS)]
    missing = [dim for dim in family.dims if dim not in header and dim not in family.default_dims]
    if unknown or missing or len(set(header)) < len(header):
        wrong = f"has {shown(unknown[0])}" if unknown else f"lacks {missing[0]}" if missing else "has a column twice"
        raise ForetuneError(
            f"{shown(str(path))} must have the columns {', '.join(family.dims)}, and may have dtype and flags, "
            f"but {wrong}"
        )
    found: dict[Problem, None] = {}
    for line, row in enumerate(rows[1:], 2):
        if not any(row):
            continue
        try:
            found[_problem(family, dict(zip(header, row, strict=True)))] = None
        except ValueError as error:
            raise ForetuneError(f"{shown(str(path))}, line {line}: {error}") from None
    return list(found)


def _problem(family: Family, row: dict[str, str]) -> Problem:
    dims = tuple((dim, int(row[dim]) if dim in row else family.default_dims[dim]) for dim in family.dims)
    flags = tuple(row.get("flags", "").split())
    problem = Problem(family.name, dims, row.get("dtype", "").strip() or family.dtypes[0], flags)
    check_problem_of(family, problem)
    return problem

"""`warm_up`: compile the binaries that a kernel's launches will need into Triton's cache, ahead of a run.

A first launch mostly waits for the compiler. Nothing is launched or timed here, so no inputs are needed, and with a
stub driver no GPU either: a node without GPUs can fill the cache of the nodes with GPUs.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem, check_problem_of
from ...datasets.console import table
from ...datasets.contents import same_source
from ...datasets.errors import abridged, cause_of, check_integer, check_path, shown
from ...datasets.files import read_regular
from ...datasets.problem import MOST_SIZE
from ..launching.ahead import compile_ahead
from ..launching.kernel import Kernel, stand_ins
from ..same_bits import keeping
from ..shortlist import make_shortlist
from .cache.known import KnownProblem, known_kernels
from .launches import ELEMENTS, OTHER_ELEMENTS, LaunchFamily, autotuners_named
from .own_timings import OwnTimings

if TYPE_CHECKING:
    from ...model import Bundle

T = TypeVar("T")
_OTHER_COLUMNS = ("dtype", "flags")
#: The most bytes that are read of a CSV file: enough for millions of shapes.
_MOST_CSV_BYTES = 1 << 28
#: A launch: its problem, its config and its arguments as `kept_arguments` returns them. A wanted launch has no config
#: yet.
Launch: TypeAlias = "tuple[Problem, KernelConfig, Mapping[str, Any]]"
Wanted: TypeAlias = "tuple[Problem, Mapping[str, Any]]"


@dataclass(frozen=True)
class WarmedUp:
    """The result of a warm-up: the numbers of problems and compiled binaries, and which configs failed and why."""

    family: str
    device: str
    problems: int
    binaries: int
    failed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return asdict(self) | {"failed": list(self.failed)}

    def __rich__(self) -> Any:
        rows = [[str(self.problems), str(self.binaries), str(len(self.failed))]]
        title = f"{self.family} on {self.device}"
        return table(title, ("problems", "binaries compiled", "failed"), rows, below=self.failed[:8])


def warm_up(
    family: Measurable,
    problems: Sequence[Problem],
    device: DeviceSpec,
    *,
    k: int = 1,
    bundle: Bundle | Path | str | None = None,
) -> WarmedUp:
    """Compile the `k` configs predicted to be fastest for each problem, each binary once.

    It compiles for the target of the active Triton driver, which should be that of `device`.

    Args:
        family: The family; it must be `Measurable`.
        problems: The family's problems.
        device: The device to predict for.
        k: The number of configs per problem.
        bundle: The bundle that predicts, or its folder; the shipped one if None.

    Raises:
        ForetuneError: The family cannot be compiled, there are no problems, one is another family's, `k` < 1, or the
            bundle is invalid.
    """
    if not isinstance(family, Measurable):
        raise ForetuneError(f"{family.name} only predicts: a warm-up needs a Measurable family")
    check_integer("the shortlist's length k", k, 1)
    if not problems:
        raise ForetuneError(f"there are no problems of {family.name} to warm up for")
    launches = []
    family = keeping(family)
    for problem in problems:
        check_problem_of(family, problem)
        chosen = make_shortlist(family, family.at_call_time(problem), device, k=k, bundle=bundle)
        # Without a prediction, a shortlist has all configs.
        launches += [(family, config, problem) for config in chosen.configs[:k]]
    return warm_up_launches(family.name, device, len(problems), launches)


def warm_up_launches(
    name: str,
    device: DeviceSpec,
    n_problems: int,
    launches: Iterable[tuple[Measurable, KernelConfig, Problem]],
    *,
    workers: int | None = None,
) -> WarmedUp:
    """Compile configs for problems, each binary once.

    It compiles for the target of the active Triton driver, which should be that of `device`.

    Args:
        name: What is warmed up, for the result.
        device: The device, for the result.
        n_problems: The number of problems, for the result.
        launches: The families, configs and problems.
        workers: The number of compiling threads; one per core if left out.
    """
    jobs: dict[Hashable, tuple[str, Any]] = {}
    for family, config, problem in launches:
        job = partial(family.compile, config, problem)
        jobs.setdefault((family.name, family.binary_key(config, problem)), (f"{config} of {problem}", job))
    return _compiled(name, device, n_problems, jobs, workers)


def _compiled(
    name: str, device: DeviceSpec, n_problems: int, jobs: Mapping[Hashable, tuple[str, Any]], workers: int | None = None
) -> WarmedUp:
    """Run compile jobs in `workers` threads, and return the result; `jobs` has (description, function) by binary."""
    errors = compile_ahead([job for _, job in jobs.values()], workers)
    failed = [
        f"{what}: {type(error).__name__}: {abridged(str(error), 200)}"
        for (what, _), error in zip(jobs.values(), [error and cause_of(error) for error in errors], strict=True)
        if error is not None
    ]
    return WarmedUp(name, device.name, n_problems, len(jobs) - len(failed), tuple(failed))


def warm_up_tuned(
    name: str,
    device: DeviceSpec,
    *,
    shapes: Path | str | None = None,
    logged: Sequence[Problem] = (),
    k: int = 1,
) -> WarmedUp:
    """Compile the binaries of kernels that earlier runs tuned on this device.

    For each tuned key of kernels that were attached or under `foretune.autotune`, the choice cache has the config and
    the arguments that the binary depends on. These launches are compiled; with `shapes` or `logged`, other launches
    instead. The binaries are those of this torch and Triton for the kernel's current source; what was tuned with
    another source is skipped.

    Args:
        name: A kernel, as "package.module.kernel", or a package: all kernels that its modules have a name for.
        device: The device.
        shapes: A CSV file with a row for each launch of one kernel and a column for each argument that changes; the
            other arguments are those of the nearest known launch.
        logged: Problems of these kernels from a FORETUNE_LOG.
        k: How many configs to compile for each launch of `shapes` and `logged`: the `k` fastest as predicted from the
            kernel's own timings. The configs that tuning would time first are compiled, too. If the kernel has no
            timing, all configs are compiled.

    Raises:
        ForetuneError: There is no such module or kernel, the file is invalid, or nothing can be compiled: nothing was
            tuned on this device, the source has changed, or the launch's arguments could not be stored.
    """
    check_integer("the shortlist's length k", k, 1)
    jobs: dict[Hashable, tuple[str, Any]] = {}
    problems: set[tuple[str, Problem]] = set()
    skipped: dict[str, None] = {}
    tuners = autotuners_named(name)
    functions = {LaunchFamily(tuner).name for tuner in tuners}  # several autotuners may share one function
    if not tuners:
        raise ForetuneError(f"{shown(name)} is not an autotuned kernel, nor a module that has one")
    if shapes is not None and len(functions) != 1:
        raise ForetuneError(
            f"{shown(str(shapes))} has the shapes of one kernel, but {shown(name)} has {len(functions)} kernels: "
            "name one as package.module.kernel"
        )
    for tuner in tuners:
        kernel, family = Kernel(tuner), LaunchFamily(tuner)
        seen = _known_problems(family.name, kernel.tuned_hash(), device)
        launches = list(_launches_of(seen))
        if shapes is not None or logged:
            like = [one for one in logged if one.family == family.name]
            wanted = [*_from_csv(shapes, launches), *_from_log(like, launches, skipped)]
            launches = list(_predicted(family, seen, wanted, k))
        for problem, config, arguments in launches:
            problems.add((family.name, problem))
            job = partial(_compile_known, kernel, arguments, config)
            jobs.setdefault((family.name, config, str(arguments)), (f"{config} of {problem}", job))
    if not jobs:
        raise ForetuneError(
            f"nothing can be compiled for {shown(name)} on {device.name}: no launch is known that was tuned with its "
            "current source (see foretune cache show)"
        )
    warmed = _compiled(name, device, len(problems) + len(skipped), jobs)
    return replace(warmed, failed=(*warmed.failed, *skipped))


def _known_problems(function: str, source: str, device: DeviceSpec) -> list[KnownProblem]:
    """Return the known problems of a kernel (by name and source hash) on a device, the newest last."""
    identity = attrgetter("name", "arch", "sm_count")  # distinguishes the cache files of two devices: `shared_file`
    return [
        one
        for known in known_kernels(None)
        if known.kernel == function and identity(known.device) == identity(device)
        for one in known.latest().problems
        if same_source(one.source, source)
    ]


def _launches_of(problems: Sequence[KnownProblem]) -> Iterator[Launch]:
    """Yield each known launch with the configs that were the fastest or chosen for its problem."""
    for one in problems:
        configs = dict.fromkeys([*([one.best] if one.best else []), *one.chosen.values()])
        for config, launch in itertools.product(configs, one.launches):
            if "arguments" in launch:
                yield one.problem, config, launch["arguments"]


def _from_csv(path: Path | str | None, launches: Sequence[Launch]) -> list[Wanted]:
    """Return the launches in the rows of a CSV file.

    Each takes the arguments that the file does not have from the nearest known launch. (This includes arguments that
    heuristics above an autotuner compute, which are often the same for nearby sizes.)
    """
    if path is None or not launches:
        return []
    path, header, rows = _read_csv(path)
    if not rows:
        raise ForetuneError(f"{shown(str(path))} must have a line for each launch but has none")
    like = [(problem, given) for problem, _, given in launches if all(type(given.get(name)) is int for name in header)]
    if not like or len(set(header)) < len(header):
        numbers = sorted(name for name, value in launches[-1][2].items() if type(value) is int)
        raise ForetuneError(
            f"{shown(str(path))} must have a column for each argument that changes, each once, among "
            f"{', '.join(numbers)}, but has {shown(', '.join(header))}"
        )

    def launch_of(row: Mapping[str, str]) -> Wanted:
        sizes = {name: _size(name, text) for name, text in row.items()}

        def distance(one: Wanted) -> float:
            return sum(abs(math.log2((size + 1) / (max(one[1][name], 0) + 1))) for name, size in sizes.items())

        problem, given = min(reversed(like), key=distance)  # of equally near ones, the newest
        resized = tuple((dim, sizes.get(dim, size)) for dim, size in problem.dims)
        return replace(problem, dims=resized), {**given, **sizes}

    return _each(path, header, rows, launch_of)


def _from_log(problems: Sequence[Problem], launches: Sequence[Launch], skipped: dict[str, None]) -> list[Wanted]:
    """Return the launches of logged problems.

    Arguments that the log lacks are those of the newest known launch with the same dtypes and flags. `skipped` gets a
    line for each problem without such a launch.
    """
    found: list[Wanted] = []
    for problem in problems:
        signature = (problem.dtype, problem.flags)
        like = next((given for one, _, given in reversed(launches) if (one.dtype, one.flags) == signature), None)
        if like is None:
            skipped[f"{problem}: no launch of its dtypes and flags is known"] = None
        else:
            no_argument = {ELEMENTS, OTHER_ELEMENTS} - like.keys()
            sizes = {name: size for name, size in problem.dims if name not in no_argument}
            found.append((problem, {**like, **sizes}))
    return found


def _predicted(
    family: LaunchFamily, seen: Sequence[KnownProblem], wanted: Sequence[Wanted], k: int
) -> Iterator[Launch]:
    """Yield each wanted launch with each config to compile for it, predicted from the timings of problems in `seen`.

    These are the `k` fastest ones and those that tuning would time first; without any timing, all known configs.
    """
    own, configs = OwnTimings(family), tuple(dict.fromkeys(config for one in seen for config in one.times_us))
    for one in seen:
        own.learn(one.problem, one.times_us)
    for problem, arguments in wanted if configs else ():
        advice = own.advise(problem, configs, k, at_once=k)
        first = own.advise(problem, configs).new  # what the run will time first
        positions = dict.fromkeys([*advice.positions[:k], *first]) if advice.sure else range(len(configs))
        for position in positions:
            yield problem, configs[position], arguments


def _compile_known(kernel: Kernel, arguments: Mapping[str, Any], config: KernelConfig) -> Any:
    """Compile a kernel for stored arguments and a config, and return the binary."""
    return kernel.compile((1,), {**stand_ins(arguments), **config.to_triton().all_kwargs()})


def problems_from_csv(path: Path | str, family: Family) -> list[Problem]:
    """Read problems from a CSV file, each once.

    The file has a column for each dimension without a default, and optionally `dtype` (empty for the family's first)
    and `flags`, separated by spaces.

    Args:
        path: The file.
        family: The family of the problems.

    Raises:
        ForetuneError: The file is invalid; the message names the file, the line and the reason.
    """
    path, header, rows = _read_csv(path)
    unknown = [name for name in header if name not in (*family.dims, *_OTHER_COLUMNS)]
    missing = [dim for dim in family.dims if dim not in header and dim not in family.default_dims]
    if unknown or missing or len(set(header)) < len(header):
        wrong = f"has {shown(unknown[0])}" if unknown else f"lacks {missing[0]}" if missing else "has a column twice"
        raise ForetuneError(
            f"{shown(str(path))} must have the columns {', '.join(family.dims)}, and may have dtype and flags "
            f"(separated by spaces), but {wrong}"
        )
    return list(dict.fromkeys(_each(path, header, rows, partial(_problem, family))))


def _each(
    path: Path, header: Sequence[str], rows: Iterable[tuple[int, list[str]]], read: Callable[[dict[str, str]], T]
) -> list[T]:
    """Call `read` with each row as a dict by column name, and return the results; errors name the file and line."""
    found, line = [], 0
    try:
        for line, row in rows:  # noqa: B007 - the message names it
            if len(row) != len(header):
                values = f"{len(header)} values ({', '.join(header)})"
                raise ForetuneError(f"a row must have {values} but has {len(row)}: {shown(','.join(row))}")
            found.append(read(dict(zip(header, row, strict=True))))
    except ForetuneError as error:
        raise ForetuneError(f"{shown(str(path))}, line {line}: {error}") from None
    return found


def _size(column: str, text: str) -> int:
    """Return the size that a CSV row has, as `text`, in a column; raise `ForetuneError` if it is not valid."""
    is_number = re.fullmatch(r"\s*[0-9]{1,18}\s*", text)  # fewer digits than Python refuses to read
    return check_integer(f"column {column}", int(text) if is_number else text, 0, MOST_SIZE)


def _read_csv(path: Path | str) -> tuple[Path, list[str], list[tuple[int, list[str]]]]:
    """Return a CSV file's path, its header, and each row that is not empty with the number of its last line.

    Raises:
        ForetuneError: The file cannot be read.
    """
    path = check_path("the shapes' file", path)
    try:
        text = read_regular(path, _MOST_CSV_BYTES, follow=True).decode("utf-8-sig")  # Excel writes a byte order mark
        reader = csv.reader(io.StringIO(text, newline=""))
        header = [name.strip() for name in next(reader, [])]
        return path, header, [(reader.line_num, row) for row in reader if any(row)]
    except (OSError, ValueError, csv.Error) as error:
        raise ForetuneError(f"{shown(str(path))} cannot be read: {error}") from None


def _problem(family: Family, row: Mapping[str, str]) -> Problem:
    """Return the problem that a CSV row, by column name, describes; dimensions that it lacks have the default size."""
    dims = tuple((dim, _size(dim, row[dim]) if dim in row else family.default_dims[dim]) for dim in family.dims)
    flags = tuple(row.get("flags", "").split())
    if any(set(flag) & set(",;+|/") for flag in flags):
        raise ForetuneError(f"column flags must have flags separated by spaces but has {shown(row['flags'])}")
    problem = Problem(family.name, dims, row.get("dtype", "").strip() or family.dtypes[0], flags)
    check_problem_of(family, problem)
    return problem

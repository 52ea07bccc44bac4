"""Create the content of pin files, from the choice cache or a bundle's predictions; compare a machine with a pin file.

`foretune pin` and `foretune pin --check` do this. `exports.py` makes Python files and FLA's tables from the same
values.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem, wrong_knobs
from ....datasets.console import table
from ....datasets.errors import reason_of
from ...how_many import HowMany
from ...launching.kernel import Kernel
from ...pin_file import PinFile, PinnedChoice, PinnedDevice, PinnedFunction, PinnedKernel, Versions
from ...prune import Pruner
from ...shortlist import bundle_of, chooser_of
from ...timing.flywheel import Software
from ..functions.calls import cpu_place
from ..functions.function_tuner import FunctionTuner
from ..known_times import values_of
from ..launches import autotuners_named
from .kernel_cache import choices_folder
from .known import KnownFunction, KnownKernel, KnownProblem, known_functions, known_kernels, unknown_name_error

if TYPE_CHECKING:
    import triton

    from ....model import Bundle


def pins_of_cache(names: Sequence[str] = ()) -> PinFile:
    """Return the chosen configs in the choice cache as the content of a pin file.

    For each kernel and device, and for each function and device, these are the results with the newest source and
    versions: the last choice of each problem, or the fastest config of one whose tuning was interrupted.

    Args:
        names: The names of kernels and functions in `foretune cache show`; all if empty.

    Raises:
        ForetuneError: The cache has nothing of one of these names, or no choice.
    """
    kernels, functions = known_kernels(None), known_functions()
    known = {one.kernel for one in kernels} | {one.name for one in functions}
    if unknown := [name for name in names if name not in known]:
        raise unknown_name_error(unknown[0], known)
    wanted = set(names or known)
    pinned = [pins_of_kernel(one) for one in kernels if one.kernel in wanted]
    found = PinFile(
        tuple(one for one in pinned if one is not None),
        tuple(pin for one in functions if one.name in wanted for pin in _pins_of_function(one)),
    )
    if not found.kernels and not found.functions:
        raise ForetuneError(f"there are no choices in {choices_folder()}: there is nothing to pin")
    return found


def pins_of_kernel(known: KnownKernel) -> PinnedKernel | None:
    """Return a pin file's entry with a kernel's stored choices for its newest source and software; None without any."""
    latest = known.latest()
    choices = {one.problem: _choice(one, one.choice) for one in latest.problems if one.choice is not None}
    if not choices:
        return None
    newest, device = latest.problems[-1], PinnedDevice.of(known.device)
    return PinnedKernel(known.kernel, device, newest.source, Versions.of(newest.software), choices, known.device)


def _choice(known: KnownProblem, config: KernelConfig) -> PinnedChoice:
    """Return a pin file's choice of `config` for a known problem, with its known launches and measured slowdowns."""
    times = {one: time_us for one, time_us in known.times_us.items() if time_us is not None}
    slowdowns = {config: 1.0}
    if times:
        best = min(times.values())
        slowdowns = dict.fromkeys(known.times_us, math.inf) | {one: time_us / best for one, time_us in times.items()}
    launches = []
    for launch in known.launches:
        kept = {"names": launch["names"], "key": launch["key"]}
        if launch.get("config", config.to_json()) != config.to_json():
            kept["config"] = launch["config"]
        launches.append(kept)
    return PinnedChoice(known.problem, config, tuple(launches), slowdowns)


def _pins_of_function(known: KnownFunction) -> Iterator[PinnedFunction]:
    """Yield a tuned function's cached choices: on each device, only those made with the newest source and software."""
    newest: dict[str, PinnedFunction] = {}
    for (name, source, device, key), label, record in known.records():
        if record.chosen is None:
            continue
        software = Software("", record.software.get("torch", ""), record.software.get("triton", ""))
        mine = PinnedFunction(name, device, source, Versions.of(software), {key: {label: record.chosen}})
        newest[device] = mine.joined(newest[device]) if device in newest else mine
    yield from newest.values()


def pins_of_predictions(
    family: Family,
    problems: Sequence[Problem],
    device: DeviceSpec | Path | str,
    *,
    bundle: Bundle | Path | str | None = None,
    configs: Sequence[KernelConfig] | None = None,
) -> PinnedKernel:
    """Return a pin file's entry with the configs that a bundle predicts for a family's problems.

    Problems that the family rounds to the same sizes form a bucket, which has one config.

    Args:
        family: The family.
        problems: The problems. The config of a bucket can run all of its problems here.
        device: The device.
        bundle: The bundle; the shipped one if left out.
        configs: The configs to choose from; the family's space if left out.

    Raises:
        ForetuneError: The bundle has no prediction for that family and device, it was not trained on the device's
            architecture, or no config can run all problems of a bucket.
    """
    from ....model import load_bundle

    spec = DeviceSpec.find(device)
    given = bundle_of(bundle)
    known = {one.arch for one in (given or load_bundle()).trained_on(family.name)}
    if spec.arch not in known:  # many configs would be tried there, but there can be only one choice
        raise ForetuneError(
            f"the bundle learned {family.name} on {', '.join(sorted(known))} and has no sure prediction for "
            f"{spec.name}, {spec.arch}: train one with data of that architecture"
        )
    buckets: dict[Problem, list[Problem]] = {}
    for problem in problems:
        buckets.setdefault(family.at_call_time(problem), []).append(problem.without_sizes())
    configs = None if configs is None else tuple(configs)
    choices, never = {}, dict.fromkeys(configs or family.space(spec), math.inf)  # those without a prediction cannot run
    for stand_in, members in buckets.items():
        slowdowns = predicted_slowdowns_of(family, stand_in, spec, given, configs)
        if slowdowns is None:
            raise ForetuneError(f"the bundle has no prediction for {family.name} on {spec.name}: train one that has")
        able = [one for one in slowdowns if all(family.supports(one, problem, spec) is None for problem in members)]
        if not able:
            raise ForetuneError(f"no config of {family.name} can run all problems of the bucket {stand_in}")
        config = min(able, key=slowdowns.__getitem__)
        choices[stand_in] = PinnedChoice(stand_in, config, (), {**never, **slowdowns})
    source = family.source_hash() if isinstance(family, Measurable) else ""
    return PinnedKernel(family.name, PinnedDevice.of(spec), source, Versions.here(), choices, spec)


def pins_of_pruned(
    tuner: triton.runtime.Autotuner,
    problems: Sequence[Problem],
    device: DeviceSpec | Path | str,
    *,
    bundle: Bundle | Path | str | None = None,
) -> PinnedKernel:
    """Return a pin file's entry with the predicted configs of a kernel under `triton.autotune` with `foretune.prune`.

    They are chosen from the kernel's own configs, and the entry has the hash of the kernel's own source.

    Args:
        tuner: The kernel's autotuner.
        problems: Problems of the pruner's family.
        device: The device.
        bundle: The bundle; the pruner's if left out.

    Raises:
        ForetuneError: The kernel has no such pruner; and as for `pins_of_predictions`.
    """
    kernel, pruner = Kernel(tuner), tuner.early_config_prune
    if not isinstance(pruner, Pruner):
        raise ForetuneError(f"{kernel.name} has no foretune.prune, which could predict for it")
    usable, values = pruner.own_knobs.usable(tuple(tuner.configs))
    found = pins_of_predictions(pruner.family, problems, device, bundle=bundle or pruner.bundle, configs=values)
    own = {value: KernelConfig.from_triton(tuner.configs[at]) for at, value in zip(usable, values, strict=True)}
    choices = {at: PinnedChoice(at, own[one.config]) for at, one in found.choices.items()}
    return replace(found, kernel=kernel.name, source=kernel.tuned_hash(), choices=choices)


def predicted_slowdowns_of(
    family: Family,
    problem: Problem,
    device: DeviceSpec,
    bundle: Bundle | None,
    configs: tuple[KernelConfig, ...] | None = None,
) -> Mapping[KernelConfig, float] | None:
    """Return the predicted slowdowns of all configs that can run a problem; None without a prediction."""
    chooser = chooser_of(family, device, configs, bundle)
    answer = chooser.choose(problem, HowMany(len(chooser.configs)))
    return dict(zip(answer.configs, answer.predicted_slowdown, strict=True)) if answer.predicted else None


@dataclass(frozen=True)
class Difference:
    """One difference between a pin file and this machine.

    Attributes:
        kernel: The kernel or function.
        what: What differs: "device", "kernel", "source", "torch", "triton", "fp_fusion", "problem" or "config".
        file: What the file has.
        here: What this machine has, or why the file's choice is not found or cannot run.
    """

    kernel: str
    what: str
    file: str
    here: str


@dataclass(frozen=True)
class PinCheck:
    """The result of `check_pins`: a row for each difference, and how much was compared."""

    path: Path
    device: str
    kernels: int
    choices: int
    differences: tuple[Difference, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        counted = {"file": str(self.path), "device": self.device, "kernels": self.kernels, "choices": self.choices}
        return counted | {"differences": [vars(one) for one in self.differences]}

    def __rich__(self) -> Any:
        rows = [list(vars(one).values()) for one in self.differences]
        found = f"{len(rows)} differences" if rows else "No difference"
        below = [f"{found} in {self.choices} choices of {self.kernels} kernels and functions; {self.device}."]
        return table(f"{self.path} and this machine", ("kernel", "what", "file", "here"), rows, below=below)


def check_pins(
    path: Path | str, device: DeviceSpec | None, family_of: Callable[[str], Family | None] = lambda name: None
) -> PinCheck:
    """Compare a pin file with a device, the sources of the kernels that can be imported here, and the versions here.

    Entries for other devices are not differences if the kernel is pinned for this one, too.

    Args:
        path: The file.
        device: The device; None for a machine without one.
        family_of: Returns the family of a name; None if there is none.

    Raises:
        ForetuneError: The file cannot be used.
    """
    path = Path(path)
    file = PinFile.read(path)
    here = None if device is None else PinnedDevice.of(device)
    found: dict[Difference, None] = {}
    kernels = _of_device(file.kernels, set() if here is None else {here}, found, "kernel")
    for kernel in kernels:
        found |= dict.fromkeys(_of_kernel(kernel, device, family_of))
    places = {cpu_place().name} | (set() if device is None else {device.name})
    functions = _of_device(file.functions, places, found, "function")
    for function in functions:
        found |= dict.fromkeys(_of_function(function))
    entries = (*kernels, *functions)
    n_choices = sum(len(one.choices) for one in entries)
    return PinCheck(path, str(here or "no GPU"), len(entries), n_choices, tuple(found))


def _of_device(entries: Any, here: set[Any], found: dict[Difference, None], name: str) -> list[Any]:
    """Return the entries for one of the devices in `here`; for each kernel without one, add a difference to `found`.

    `name` is the attribute of an entry that has the kernel's or function's name. The device of a function that several
    ranks tuned together ends with their number (" x8"), which does not count here.
    """
    mine = [one for one in entries if one.device in here or re.sub(r" x\d+$", "", str(one.device)) in here]
    names = {getattr(one, name) for one in mine}
    for other in sorted({getattr(one, name) for one in entries} - names):
        pinned = [str(one.device) for one in entries if getattr(one, name) == other]
        found[Difference(other, "device", ", ".join(pinned), ", ".join(sorted(map(str, here))) or "no GPU")] = None
    return mine


def _of_versions(name: str, versions: Versions) -> Iterator[Difference]:
    """Yield the differences between the versions in a pin file's entry `name` and those of this process."""
    for package, pinned, here in zip(Versions._fields, versions, Versions.here(), strict=True):
        if pinned != here:
            yield Difference(name, package, pinned or "none", here or "none")


def _of_kernel(
    kernel: PinnedKernel, device: DeviceSpec | None, family_of: Callable[[str], Family | None]
) -> Iterator[Difference]:
    """Yield the differences between a kernel's entry for this device and the kernel on this machine."""
    yield from _of_versions(kernel.kernel, kernel.versions)
    family = family_of(kernel.kernel)
    try:
        if family is not None:
            sources = {family.source_hash() if isinstance(family, Measurable) else ""}
            known: set[KernelConfig] = set()
        else:
            tuners = autotuners_named(kernel.kernel)
            sources = {Kernel(tuner).tuned_hash() for tuner in tuners}
            known = {value for tuner in tuners for value in values_of(tuner.configs).values()}
            if not tuners:
                raise ForetuneError("its module has no autotuner of that name")
    except Exception as error:  # noqa: BLE001 - a module may raise anything at import
        yield Difference(kernel.kernel, "kernel", kernel.source, reason_of(error))
        return
    if kernel.source not in sources:
        yield Difference(kernel.kernel, "source", kernel.source, ", ".join(sorted(sources)))
    for choice in kernel.choices.values():
        if family is not None and (near := family.at_call_time(choice.problem)) != choice.problem:
            yield Difference(kernel.kernel, "problem", str(choice.problem), f"launches of it look for {near}")
        of_launches = [KernelConfig.from_json(one["config"]) for one in choice.launches if "config" in one]
        for config in dict.fromkeys([choice.config, *of_launches]):
            if family is not None and device is not None:
                why = wrong_knobs(family, config) or family.supports(config, choice.problem, device)
            else:
                why = None if family is not None or config in known else "not among the kernel's configs"
            if why is not None:
                yield Difference(kernel.kernel, "config", f"{config} for {choice.problem}", why)


def _of_function(function: PinnedFunction) -> Iterator[Difference]:
    """Yield the differences between a tuned function's entry and the function on this machine."""
    yield from _of_versions(function.function, function.versions)
    module, _, name = function.function.rpartition(".")
    try:
        here = getattr(importlib.import_module(module), name)
        if not isinstance(here, FunctionTuner):
            raise ForetuneError("it is not a function under foretune.tune or foretune.contextual_autotune")
    except Exception as error:  # noqa: BLE001 - a module may raise anything at import
        yield Difference(function.function, "kernel", function.source, reason_of(error))
        return
    if here.digest != function.source:
        yield Difference(function.function, "source", function.source, here.digest)

"""Compare a machine with a pin file before a run: `foretune pin --check`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, wrong_knobs
from ....datasets.console import table
from ....datasets.errors import reason_of
from ...launching.kernel import Kernel
from ...pin_file import PinFile, PinnedDevice, PinnedFunction, PinnedKernel, Versions
from ..functions.calls import cpu_place
from ..functions.function_tuner import FunctionTuner
from ..known_times import values_of
from ..launches import autotuners_named


@dataclass(frozen=True)
class Difference:
    """One difference between a pin file and this machine.

    Attributes:
        kernel: The kernel or function.
        what: What differs: "device", "kernel", "source", "torch", "triton", "fp_fusion" or "config".
        file: What the file has.
        here: What this machine has, or why the file's choice cannot run.
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
    """Return the entries for the devices here, and add a difference for each kernel that is pinned for others only.

    `name` is the attribute with the kernel's or function's name. A function that ranks tuned together is pinned for a
    device and their number.
    """
    mine = [one for one in entries if one.device in here or re.sub(r" x\d+$", "", str(one.device)) in here]
    names = {getattr(one, name) for one in mine}
    for other in sorted({getattr(one, name) for one in entries} - names):
        pinned = [str(one.device) for one in entries if getattr(one, name) == other]
        found[Difference(other, "device", ", ".join(pinned), ", ".join(sorted(map(str, here))) or "no GPU")] = None
    return mine


def _of_versions(name: str, versions: Versions) -> Iterator[Difference]:
    """Yield the differences between versions and those of this process."""
    for package, pinned, here in zip(Versions._fields, versions, Versions.here(), strict=True):
        if pinned != here:
            yield Difference(name, package, pinned or "none", here or "none")


def _of_kernel(
    kernel: PinnedKernel, device: DeviceSpec | None, family_of: Callable[[str], Family | None]
) -> Iterator[Difference]:
    """Yield the differences of a kernel that is pinned for this device."""
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
        of_launches = [KernelConfig.from_json(one["config"]) for one in choice.launches if "config" in one]
        for config in dict.fromkeys([choice.config, *of_launches]):
            if family is not None and device is not None:
                why = wrong_knobs(family, config) or family.supports(config, choice.problem, device)
            else:
                why = None if family is not None or config in known else "not among the kernel's configs"
            if why is not None:
                yield Difference(kernel.kernel, "config", f"{config} for {choice.problem}", why)


def _of_function(function: PinnedFunction) -> Iterator[Difference]:
    """Yield the differences of a tuned function."""
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

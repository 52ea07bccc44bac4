"""Apply a pin file to launches: `pinned`, and `pinned_config`, which every adapter asks before it predicts or tunes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..datasets import DeviceSpec, KernelConfig, Problem
from ..datasets.errors import abridged, check_path
from . import arguments
from .arguments import PIN_VARIABLE, Mode, begin_pin_epoch, is_pinned, requested_or_set, resolve_mode, warn_once
from .node_copies import near_copy
from .pin_file import PinError, PinFile, PinnedDevice, PinnedFunction, PinnedKernel, Versions

#: The environment variable that sets `Missing`.
MISSING_VARIABLE = "FORETUNE_PIN_MISSING"


class Missing(str, Enum):
    """What happens at a launch that the pin file in force does not cover."""

    ERROR = "error"  # it raises a `PinError` that names the difference
    PREDICT = "predict"  # the predicted config runs, with one warning for each kernel


def resolve_missing(requested: str | None = None) -> Missing:
    """Return the requested treatment of uncovered launches, or else that of FORETUNE_PIN_MISSING, or else `error`.

    Raises `ForetuneError` with the valid values for any other value.

    >>> resolve_missing()
    <Missing.ERROR: 'error'>
    """
    return requested_or_set("missing", requested, MISSING_VARIABLE, Missing.ERROR)


class Pins:
    """A pin file that was read and checked, and how it is applied.

    Attributes:
        path: The file, as the user named it.
        missing: What happens to a launch that the file does not cover.
    """

    def __init__(self, path: Path | str, missing: str | None = None) -> None:
        self.missing = resolve_missing(missing)
        self.path = check_path("a pin file", path)
        near = near_copy(self.path.absolute())
        content = PinFile.read(near if near.is_file() else self.path, self.path)
        self._kernels = {(one.kernel, one.device): one for one in content.kernels}
        self._functions = {(one.function, one.device): one for one in content.functions}
        self._versions = Versions.here()
        self._warned: set[str] = set()

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *error: object) -> None:
        """Stop applying the pin file. Further calls do nothing."""
        if self in arguments.pins:
            arguments.pins.remove(self)
            begin_pin_epoch()

    def config_of(
        self,
        kernel: str,
        source: Callable[[], str] | None,
        device: DeviceSpec,
        problem: Problem | None,
        reason: Callable[[KernelConfig], str | None],
        key: list[Any] | None,
    ) -> KernelConfig:
        """Return the config of a launch, with the arguments of `pinned_config`; raise `PinError` without one."""
        here = PinnedDevice.of(device)
        entry = self._entry(kernel, here, self._kernels)
        self._check(entry, kernel, "" if source is None else source_of(source))
        if problem is None:
            raise PinError(f"{self.path} cannot cover this launch of {kernel}: its arguments do not make a problem")
        choice = entry.choices.get(problem)
        if choice is None:
            raise PinError(
                f"{self.path} does not cover {problem} on {here}: of {kernel} it has {len(entry.choices)} others"
            )
        config: KernelConfig = choice.config_of(key)
        if (why := reason(config)) is not None:
            raise PinError(f"{self.path} has {config} for {problem} on {here}, which cannot run: {why}")
        return config

    def function_configs(self, function: str, source: str, device: str, key: str) -> Mapping[str, str]:
        """Return the configs of a tuned function's call, as `PinnedFunction.choices` has them.

        Raises:
            PinError: The file does not cover the call.
        """
        entry = self._entry(function, device, self._functions)
        self._check(entry, function, source)
        if (chosen := entry.choices.get(key)) is None:
            raise PinError(
                f"{self.path} does not cover {function} for the key {abridged(key)}: it has {len(entry.choices)} others"
            )
        choices: Mapping[str, str] = chosen
        return choices

    def _entry(self, name: str, device: Any, entries: dict[tuple[str, Any], Any]) -> Any:
        """Return the one of the entries (by name and device) of a kernel or function; raise `PinError` without one."""
        if (entry := entries.get((name, device))) is not None:
            return entry
        if devices := [str(where) for known, where in entries if known == name]:
            raise PinError(f"{self.path} covers {name} on {', '.join(devices)}, but not on {device}")
        known = ", ".join(sorted({known for known, _ in entries})) or "none"
        raise PinError(f"{self.path} does not cover {name}: it covers {abridged(known)}")

    def _check(self, entry: PinnedKernel | PinnedFunction, name: str, source: str) -> None:
        """Raise `PinError` if an entry is of another source, or of other versions or settings."""
        if entry.source != source:
            raise PinError(f"{self.path} covers {name} with source {entry.source!r}, but its source is {source!r} now")
        for package, pinned, here in zip(Versions._fields, entry.versions, self._versions, strict=True):
            if pinned != here:
                raise PinError(f"{self.path} covers {name} with {package} {pinned!r}, but this process has {here!r}")

    def fall_back(self, name: str, error: PinError) -> None:
        """Raise the error; with `Missing.PREDICT`, warn about it instead, once for each kernel or function `name`."""
        if self.missing is Missing.ERROR:
            raise error
        if name not in self._warned:
            self._warned.add(name)
            warn_once(str(error), f": what the file does not cover of {name} is predicted")


def pinned(file: Path | str, missing: str | None = None) -> Pins:
    """Run the choices of a pin file, which `foretune pin` writes: nothing that it covers is predicted or tuned.

    It is in force from the call on, for the whole process, or for a `with` block; of several, the last one counts.
    FORETUNE_PIN=FILE does the same without code, from the first launch on. The file is read once, and its checksum is
    verified. Each kernel's source, the device, and the versions of torch and Triton are compared at the kernel's first
    launch. FORETUNE_MODE=off switches pins off, too.

    Args:
        file: The pin file.
        missing: What happens to a launch that the file does not cover, because of its kernel, source, device, versions
            or size: "error" raises, "predict" runs the predicted config, with one warning for each kernel.
            FORETUNE_PIN_MISSING if left out, else "error".

    Returns:
        A context manager that ends it.

    Raises:
        ForetuneError: The file cannot be read, is no pin file, or was changed after it was written; or `missing` is not
            one of these values. Launches raise it for what the file does not cover.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from foretune.runtime.pin_file import PinFile
    >>> path = Path(tempfile.mkdtemp()) / "foretune.lock"  # `foretune pin --out foretune.lock` writes it after a run
    >>> PinFile().save(path)
    >>> with pinned(path, missing="predict"):
    ...     pass  # steps that run the file's choices
    """
    pins = Pins(file, missing)
    arguments.pins.append(pins)
    begin_pin_epoch()
    return pins


def pins_in_force() -> Pins | None:
    """Return the pins that `pinned` or FORETUNE_PIN put in force; None without any, or with FORETUNE_MODE=off.

    Raises:
        PinError: The file that FORETUNE_PIN names cannot be used.
        ForetuneError: FORETUNE_PIN_MISSING or FORETUNE_MODE has an unknown value.
    """
    if not is_pinned() or resolve_mode() is Mode.OFF:
        return None
    if arguments.pins:
        pins = arguments.pins[-1]
        assert isinstance(pins, Pins)
        return pins
    return _from_environment(os.environ[PIN_VARIABLE])


def are_in_force() -> bool:
    """Return whether there are pins in force. Raises as `pins_in_force` does; Dynamo does not trace it."""
    return pins_in_force() is not None


are_in_force.__dict__["_dynamo_marked_constant"] = True


def is_covered(kernel: str) -> bool:
    """Return whether the pins in force have choices of a kernel, for any device."""
    return (pins := pins_in_force()) is not None and any(known == kernel for known, _ in pins._kernels)


@lru_cache(maxsize=1)
def _from_environment(path: str) -> Pins:
    """Return the pins of FORETUNE_PIN, which are read once."""
    return Pins(path)


def pinned_config(
    kernel: str,
    source: Callable[[], str] | None,
    device: DeviceSpec,
    problem: Problem | None,
    reason: Callable[[KernelConfig], str | None],
    key: list[Any] | None = None,
) -> KernelConfig | None:
    """Return the config that the pin file in force has for a launch.

    Returns None without a pin file, and for a launch that it does not cover if its predicted config shall run then.

    Args:
        kernel: The kernel's name.
        source: Returns the hash of the kernel's source. It is called once and must be hashable by what it belongs to,
            as a bound method is. None for a family without a kernel of its own.
        device: The device of the launch.
        problem: The problem that represents the launch; None if the launch is not a problem.
        reason: Returns why a config cannot run the launch; None if it can.
        key: Triton's key of the launch.

    Raises:
        PinError: The pin file does not cover the launch.
    """
    if (pins := pins_in_force()) is None:
        return None
    try:
        return pins.config_of(kernel, source, device, problem, reason, key)
    except PinError as error:
        pins.fall_back(kernel, error)
        return None


@lru_cache(maxsize=4096)
def source_of(source: Callable[[], str]) -> str:
    """Return the hash of a source, computed once, because hashing a large kernel takes longer than a prediction."""
    return source()

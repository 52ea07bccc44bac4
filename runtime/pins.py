"""Apply a pin file to launches: `pinned` puts a file in force, and `pinned_config` returns a launch's config from it.

Everything that launches kernels calls `pinned_config` before it predicts or tunes.
"""

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
    """The treatment of a launch that the pin file in force does not cover: an error, or the predicted config."""

    ERROR = "error"  # it raises a `PinError` that names the difference
    PREDICT = "predict"  # the predicted config runs, with one warning for each kernel


def resolve_missing(requested: str | None = None) -> Missing:
    """Return the treatment of uncovered launches: as requested, else that of FORETUNE_PIN_MISSING, else `error`.

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
        """Return the file's config for a launch, given the arguments of `pinned_config`.

        Raises `PinError` if the file does not cover the launch, or has a config for it that cannot run.
        """
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
        """Return the file's configs for a call of a tuned function, as texts by label (see `PinnedFunction.choices`).

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
        """Look up the entry of a kernel or function on a device among `entries`; raise `PinError` if there is none."""
        if (entry := entries.get((name, device))) is not None:
            return entry
        if devices := [str(where) for known, where in entries if known == name]:
            raise PinError(f"{self.path} covers {name} on {', '.join(devices)}, but not on {device}")
        known = ", ".join(sorted({known for known, _ in entries})) or "none"
        raise PinError(f"{self.path} does not cover {name}: it covers {abridged(known)}")

    def _check(self, entry: PinnedKernel | PinnedFunction, name: str, source: str) -> None:
        """Raise `PinError` unless an entry was made from this source and with this process's versions and settings."""
        if entry.source != source:
            raise PinError(f"{self.path} covers {name} with source {entry.source!r}, but its source is {source!r} now")
        for package, pinned, here in zip(Versions._fields, entry.versions, self._versions, strict=True):
            if pinned != here:
                raise PinError(f"{self.path} covers {name} with {package} {pinned!r}, but this process has {here!r}")

    def fall_back(self, name: str, error: PinError) -> None:
        """Handle an uncovered launch: raise the error, or with `Missing.PREDICT` only warn about it.

        There is one warning for each kernel or function `name`.
        """
        if self.missing is Missing.ERROR:
            raise error
        if name not in self._warned:
            self._warned.add(name)
            warn_once(str(error), f": what the file does not cover of {name} is predicted")


def pinned(file: Path | str, missing: str | None = None) -> Pins:
    """Use the configs of a pin file, which `foretune pin` writes: no launch that it covers is predicted or tuned.

    The file is in force from this call on, for the whole process or, in a `with` statement, until the block ends; of
    several files, the last one counts. FORETUNE_PIN=FILE does the same without code, from the first launch on.

    The file is read once, and its checksum is verified. Each kernel's source, the device, and the versions of torch and
    Triton are compared at the kernel's first launch. FORETUNE_MODE=off switches pins off, too.

    Args:
        file: The pin file.
        missing: What happens to a launch that the file does not cover, because of its kernel, source, device, versions
            or size: "error" raises, "predict" runs the predicted config, with one warning for each kernel.
            FORETUNE_PIN_MISSING if left out, else "error".

    Returns:
        A context manager whose end takes the file out of force.

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
    """Return the pin file that `pinned` or FORETUNE_PIN put in force; None without any, or with FORETUNE_MODE=off.

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
    """Return whether a pin file is in force. Raises as `pins_in_force` does; Dynamo does not trace it."""
    return pins_in_force() is not None


are_in_force.__dict__["_dynamo_marked_constant"] = True


def is_covered(kernel: str) -> bool:
    """Return whether the pin file in force has configs of a kernel, for any device."""
    return (pins := pins_in_force()) is not None and any(known == kernel for known, _ in pins._kernels)


@lru_cache(maxsize=1)
def _from_environment(path: str) -> Pins:
    """Return the pins of the file at `path`, which FORETUNE_PIN names; the file is read only once."""
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

    Returns None if no file is in force, and for an uncovered launch if uncovered launches are to be predicted.

    Args:
        kernel: The kernel's name.
        source: Returns the hash of the kernel's source; None for a family without a kernel of its own. Pass the same
            or an equal function each time, such as a bound method, because results are remembered by function.
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
    """Call `source` and return the hash that it returns; later calls with an equal `source` return the remembered hash.

    Hashing the source of a large kernel takes longer than a prediction.
    """
    return source()

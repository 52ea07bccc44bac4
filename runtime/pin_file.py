"""`PinFile`: the configs chosen for kernels and functions, stored in a file so that later runs use exactly these.

The file is sorted and indented JSON for review in git: the same choices give the same bytes. It has no date, no path
and no host name; a device is its name, arch and number of SMs, and a version is that of torch or Triton without the
build ("2.13.0" for "2.13.0+cu130"). Whether Triton fuses multiplications with additions by default is recorded as
the process that writes the file has it set. The checksum covers the content, not its layout, so line endings do not
matter.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ..datasets.errors import LONGEST_WORD, MOST, MOST_NAMES, abridged, check_integer, check_path, check_word, shown
from ..datasets.files import check_file, check_replaceable, read_regular, replacing
from .timing.flywheel import Software

T = TypeVar("T")
#: The value of a file's "format".
FORMAT = "foretune pin 1"
#: The largest file that is read, in bytes: enough for some hundred thousand choices.
_MOST_BYTES = 1 << 28


class PinError(ForetuneError):
    """A pin file cannot be used, or does not cover a launch. The message names the file and the difference."""


class PinnedDevice(NamedTuple):
    """The kind of GPU that configs were chosen for: name, architecture and number of SMs."""

    name: str
    arch: str
    sm_count: int

    @classmethod
    def of(cls, spec: DeviceSpec) -> PinnedDevice:
        """Return the identity of the device with this spec."""
        return cls(spec.name, spec.arch, spec.sm_count)

    def __str__(self) -> str:
        return f"{self.name} ({self.arch}, {self.sm_count} SMs)"


class Versions(NamedTuple):
    """The versions of torch and Triton that configs were chosen with, and the setting of Triton that changes results.

    Attributes:
        torch: The version of torch; "" if it is not installed.
        triton: The version of Triton; "" if it is not installed.
        fp_fusion: "on" or "off": whether Triton fuses multiplications with additions in launches that do not set this
            themselves (TRITON_DEFAULT_FP_FUSION; if unset, it depends on the version); "" without Triton.
    """

    torch: str
    triton: str
    fp_fusion: str

    @classmethod
    def of(cls, software: Software) -> Versions:
        """Return the versions in `software`, without the part that names a build, and this process's `fp_fusion`."""
        return cls(software.torch.partition("+")[0], software.triton.partition("+")[0], _fp_fusion())

    @classmethod
    def here(cls) -> Versions:
        """Return the versions of this process."""
        return cls.of(Software.here())


def _fp_fusion() -> str:
    """Return "on" or "off" for this process's setting of `Versions.fp_fusion`; "" without Triton."""
    try:
        from triton.knobs import language
    except ImportError:
        return ""
    is_forced_off = getattr(language, "force_disable_fp_fusion", False)  # since Triton 3.9
    return "on" if language.default_fp_fusion and not is_forced_off else "off"


@dataclass(frozen=True)
class PinnedChoice:
    """The pinned config of one problem, which also applies to all problems that are rounded to the same sizes.

    Attributes:
        problem: The problem.
        config: The config.
        launches: Known launches of the problem, each with the `names` of the arguments in Triton's own key, the `key`,
            and the launch's `config` if that is not the problem's, which happens if a kernel prunes its own configs.
        slowdowns: The times that the config was chosen by, if they are known: each config's time over the best one's,
            infinite for a failed config. They are not stored in the file.
    """

    problem: Problem
    config: KernelConfig
    launches: tuple[Mapping[str, Any], ...] = ()
    slowdowns: Mapping[KernelConfig, float] = field(default_factory=dict, compare=False)

    def config_of(self, key: list[Any] | None) -> KernelConfig:
        """Return the config for a launch: the launch's own one if `launches` has one for its `key`, else the problem's.

        `key` is the launch's key as Triton computes it; None if it is not known.
        """
        text = None if key is None else _text(key)
        for launch in self.launches if text is not None else ():
            if "config" in launch and _text(launch["key"]) == text:
                return KernelConfig.from_json(launch["config"])
        return self.config

    def to_json(self) -> dict[str, Any]:
        """Return the choice as a JSON object."""
        value: dict[str, Any] = {"problem": self.problem.to_json(), "config": self.config.to_json()}
        if self.launches:
            value["launches"] = sorted((dict(launch) for launch in self.launches), key=_text)
        return value

    @classmethod
    def from_json(cls, value: Any) -> PinnedChoice:
        """Return the choice in a JSON object; raise `ForetuneError` for anything else."""
        _check_fields("a choice", value, {"problem", "config"}, {"launches"})
        launches = value.get("launches", [])
        if not isinstance(launches, list) or not all(map(is_launch, launches)):
            raise ForetuneError(f"launches must be a list of objects with names and a key but is {shown(launches)}")
        problem, config = Problem.from_json(value["problem"]), KernelConfig.from_json(value["config"])
        return cls(problem, config, tuple(launches))


@dataclass(frozen=True)
class PinnedKernel:
    """An entry of a pin file: the configs chosen for one kernel on one device.

    Attributes:
        kernel: The kernel's name, "module.qualname"; for an op, or a kernel that is only pruned, the family's name.
        device: The device.
        source: The hash of the kernel's source; "" for a family without a kernel of its own.
        versions: The versions and the setting that the configs were chosen with.
        choices: The chosen config of each problem.
        spec: The device's limits and rates if they are known. They are not stored in the file.
    """

    kernel: str
    device: PinnedDevice
    source: str
    versions: Versions
    choices: Mapping[Problem, PinnedChoice]
    spec: DeviceSpec | None = field(default=None, compare=False)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The kernel and the device, which identify the entry: a file has one entry for each kernel and device."""
        return self.kernel, self.device

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a JSON object."""
        choices = sorted(self.choices.values(), key=lambda one: (str(one.problem.signature), one.problem.dims))
        return _head("kernel", self.kernel, self) | {"choices": [one.to_json() for one in choices]}

    @classmethod
    def from_json(cls, value: Any) -> PinnedKernel:
        """Return the entry in a JSON object; raise `ForetuneError` for anything else."""
        kernel, device, source, versions = _read_head("kernel", value)
        if not isinstance(value["choices"], list):
            raise ForetuneError(f"{kernel}: choices must be a list but is {shown(value['choices'])}")
        choices = [PinnedChoice.from_json(one) for one in value["choices"]]
        by_problem = {one.problem: one for one in choices}
        if len(by_problem) < len(choices):
            raise ForetuneError(f"{kernel} on {device.name} has a problem twice")
        return cls(kernel, device, source, versions, by_problem)

    def joined(self, other: PinnedKernel) -> PinnedKernel:
        """Return this entry with the choices of an older one added for other problems.

        If `other` has another source or other versions, this entry is returned unchanged.
        """
        if (other.source, other.versions) != (self.source, self.versions):
            return self
        return PinnedKernel(self.kernel, self.device, self.source, self.versions, {**other.choices, **self.choices})


@dataclass(frozen=True)
class PinnedFunction:
    """An entry of a pin file: the configs chosen for one function under `foretune.tune`, on one device.

    Attributes:
        function: The function's name, "module.qualname".
        device: The name of the device, or of the CPU, on which it is called.
        source: The digest of the function's source.
        versions: The versions and the setting that the configs were chosen with.
        choices: For each key of calls, a dict from a label to the text of the chosen config. The label is ""; for a
            function under `foretune.contextual_autotune`, there is one label for each kernel in it.
    """

    function: str
    device: str
    source: str
    versions: Versions
    choices: Mapping[str, Mapping[str, str]]

    @property
    def identity(self) -> tuple[Any, ...]:
        """The function and the device, which identify the entry: a file has one entry for each function and device."""
        return self.function, self.device

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a JSON object."""
        choices = {key: dict(one) if set(one) != {""} else one[""] for key, one in self.choices.items()}
        return _head("function", self.function, self) | {"choices": choices}

    @classmethod
    def from_json(cls, value: Any) -> PinnedFunction:
        """Return the entry in a JSON object; raise `ForetuneError` for anything else."""
        function, device, source, versions = _read_head("function", value)
        if not isinstance(value["choices"], dict):
            raise ForetuneError(f"{function}: choices must be an object but is {shown(value['choices'])}")
        choices = {key: {"": one} if isinstance(one, str) else one for key, one in value["choices"].items()}
        for configs in choices.values():
            if not isinstance(configs, dict) or not all(isinstance(text, str) for text in configs.values()):
                raise ForetuneError(f"{function}: each choice must be the text of a config but is {shown(configs)}")
        return cls(function, device, source, versions, choices)

    def joined(self, other: PinnedFunction) -> PinnedFunction:
        """Return this entry with the choices of an older one added for other keys of calls.

        If `other` has another source or other versions, this entry is returned unchanged.
        """
        if (other.source, other.versions) != (self.source, self.versions):
            return self
        choices = {**other.choices, **{key: {**other.choices.get(key, {}), **one} for key, one in self.choices.items()}}
        return PinnedFunction(self.function, self.device, self.source, self.versions, choices)


@dataclass(frozen=True)
class PinFile:
    """The content of a pin file: the configs chosen for kernels and for tuned functions.

    >>> problem, config = Problem.of("softmax", rows=64), KernelConfig.of(BLOCK=64)
    >>> device = PinnedDevice.of(DeviceSpec.named("h200"))
    >>> choices = {problem: PinnedChoice(problem, config)}
    >>> kernel = PinnedKernel("softmax", device, "a1b2", Versions("2.13.0", "3.9.0", "on"), choices)
    >>> PinFile.from_json(json.loads(PinFile((kernel,)).text())) == PinFile((kernel,))
    True
    """

    kernels: tuple[PinnedKernel, ...] = ()
    functions: tuple[PinnedFunction, ...] = ()

    def text(self) -> str:
        """Return the text of the file: indented JSON with a checksum."""
        content = self._content()
        return json.dumps(content | {"checksum": _checksum(content)}, indent=1, sort_keys=True, allow_nan=False) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Return the file's content, with a checksum, as a JSON object."""
        value: dict[str, Any] = json.loads(self.text())
        return value

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kernels": [one.to_json() for one in sorted(self.kernels, key=lambda one: one.identity)],
            "functions": [one.to_json() for one in sorted(self.functions, key=lambda one: one.identity)],
        }

    def save(self, path: Path | str) -> None:
        """Write the file atomically.

        Raises:
            ForetuneError: The file cannot be written, or it exists and is not a pin file.
        """
        check_pin_file(path)
        with replacing(path) as temporary:
            temporary.write_text(self.text(), encoding="utf-8")

    @classmethod
    def from_json(cls, value: Any) -> PinFile:
        """Return the pin file in a JSON object; raise `ForetuneError` for anything else, or a wrong checksum."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise ForetuneError(f"it is not a file of format {FORMAT!r}")
        _check_fields("the file", value, {"format", "checksum", "kernels", "functions"})
        expected = _checksum({name: one for name, one in value.items() if name != "checksum"})
        if value["checksum"] != expected:
            raise ForetuneError(
                f"its content was changed after it was written: checksum must be {expected!r} but is "
                f"{shown(value['checksum'])}"
            )
        kernels = _read_all("kernels", value["kernels"], PinnedKernel.from_json)
        return cls(kernels, _read_all("functions", value["functions"], PinnedFunction.from_json))

    @classmethod
    def read(cls, path: Path, name: Path | str | None = None) -> PinFile:
        """Read a pin file. Messages use `name`, if it is given, in place of `path`.

        Raises:
            PinError: The file cannot be read, is no pin file, or was changed after it was written.
        """
        try:
            content = json.loads(read_regular(path, _MOST_BYTES, follow=True), parse_constant=_refuse_constant)
            return cls.from_json(content)
        except OSError as error:
            raise PinError(f"{abridged(str(name or path))}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # including ForetuneError
            raise PinError(f"{abridged(str(name or path))}: not a usable pin file: {abridged(str(error))}") from None

    def with_those_of(self, older: PinFile) -> PinFile:
        """Return this content with the older file's entries added.

        If both have an entry of the same kernel or function and device, with the same source and versions, the older
        choices are kept for problems or calls that the newer entry does not have; otherwise only the newer entry is
        kept.
        """
        return PinFile(_joined(self.kernels, older.kernels), _joined(self.functions, older.functions))


def check_pin_file(path: Path | str) -> None:
    """Raise `ForetuneError` if the path exists and is not a pin file, or cannot be written, as `PinFile.save` would."""
    check_file(check_path("a pin file", path))
    check_replaceable(path, lambda content: f'"{FORMAT[:-1]}'.encode() in content, "a file that foretune pin wrote")


def _joined(newer: Iterable[Any], older: Iterable[Any]) -> tuple[Any, ...]:
    """Return the entries of a newer and an older file as one list, joining entries with the same identity."""
    found = {one.identity: one for one in older}
    for one in newer:
        found[one.identity] = one.joined(found[one.identity]) if one.identity in found else one
    return tuple(found.values())


def _head(what: str, name: str, one: Any) -> dict[str, Any]:
    """Return the JSON fields that entries of kernels and functions share: name, device, source and versions.

    `one` is the entry, and `what`, "kernel" or "function", the field that gets the name.
    """
    device = one.device._asdict() if isinstance(one.device, PinnedDevice) else one.device
    return {what: name, "device": device, "source": one.source, **one.versions._asdict()}


def _read_head(what: str, value: Any) -> tuple[str, Any, str, Versions]:
    """Read the fields that entries of kernels and functions share, and return name, device, source and versions.

    `what`, "kernel" or "function", is the field with the name. Raises `ForetuneError` if a field is not valid.
    """
    _check_fields(f"a {what}", value, {what, "device", "source", *Versions._fields, "choices"})
    name = check_word(what, value[what], 4 * LONGEST_WORD)
    texts = {part: value[part] for part in ("source", *Versions._fields)}
    for part, text in texts.items():
        if text != "":
            check_word(f"{part} of {name}", text)
    device = value["device"]
    if what == "function":
        check_word(f"device of {name}", device, 4 * LONGEST_WORD)
    else:
        _check_fields(f"device of {name}", device, set(PinnedDevice._fields))
        for part in ("name", "arch"):
            check_word(f"the device's {part}", device[part])
        device = PinnedDevice(device["name"], device["arch"], check_integer("sm_count", device["sm_count"], 1, MOST))
    return name, device, texts["source"], Versions(*(texts[part] for part in Versions._fields))


def _read_all(what: str, values: Any, read: Callable[[Any], T]) -> tuple[T, ...]:
    """Apply `read` to each value in a JSON list, and return the results.

    Raises `ForetuneError` if it is not a list, or if two entries have the same identity; messages call the list `what`.
    """
    if not isinstance(values, list):
        raise ForetuneError(f"{what} must be a list but is {shown(values)}")
    found = tuple(map(read, values))
    known: dict[Any, T] = {}
    for one in found:
        identity: tuple[Any, ...] = one.identity  # type: ignore[attr-defined]
        if known.setdefault(identity, one) is not one:
            raise ForetuneError(f"{what} has {identity[0]} on {identity[1]} twice")
    return found


def _check_fields(what: str, value: Any, needed: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Raise `ForetuneError` unless a value is an object with all `needed` fields and no others but `optional` ones.

    Messages call the value `what`.
    """
    if not isinstance(value, dict) or not needed <= set(value) <= needed | optional:
        raise ForetuneError(f"{what} must be an object with {', '.join(sorted(needed))} but is {shown(value)}")


def is_launch(launch: Any, *more: str) -> bool:
    """Return whether a JSON value is a valid entry of `PinnedChoice.launches`; it may also have the fields `more`.

    Raises `ForetuneError` if the config in it is not valid.
    """
    if not isinstance(launch, dict) or not {"names", "key"} <= set(launch) <= {"names", "key", "config", *more}:
        return False
    names, key = launch["names"], launch["key"]
    if "config" in launch:
        KernelConfig.from_json(launch["config"])
    return (
        all(isinstance(part, list) and len(part) <= MOST_NAMES for part in (names, key))
        and all(isinstance(name, str) for name in names)
        and all(type(one) in (int, float, bool, str, type(None)) for one in key)
        and all(math.isfinite(one) for one in key if type(one) is float)
    )


def _checksum(content: Mapping[str, Any]) -> str:
    """Return the checksum of a file's content."""
    return hashlib.sha256(_text(content).encode()).hexdigest()


def _text(value: Any) -> str:
    """Return a JSON value as compact, sorted text."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"it has {text}, which is not JSON")

"""What users hand to the run time, checked or refused where it is declared, not in a launch; and `warn_once`."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, check_attributes, wrong_knobs
from ..datasets.errors import ForetuneWarning as ForetuneWarning
from ..datasets.errors import check_word, shown, warn
from ..datasets.family import with_defaults

if TYPE_CHECKING:
    import triton


def family_of(family: Any) -> Family:
    """A family. Raises `ForetuneError` for anything else: names are the registry's, in kernels/."""
    if not isinstance(family, Family):
        raise ForetuneError(f"family must be a Family but is {shown(family)}")
    check_attributes(family)
    return family


def configs_of(family: Family, device: DeviceSpec, configs: Any) -> tuple[KernelConfig, ...]:
    """The configs to choose from: the given ones, or the family's space on the device, or where that can run none of
    them, its whole space. Raises `ForetuneError` for what is no list of the family's configs, or none."""
    if configs is None:
        return tuple(family.space(device)) or tuple(family.space())
    if not isinstance(configs, Collection) or isinstance(configs, (str, bytes)):
        raise ForetuneError(f"configs must be a list of KernelConfigs but is {shown(configs)}")
    for config in configs:
        if not isinstance(config, KernelConfig):
            raise ForetuneError(f"each of configs must be a KernelConfig but one is {shown(config)}")
        if (wrong := wrong_knobs(family, config)) is not None:
            raise ForetuneError(wrong)
    if not len(configs):
        raise ForetuneError(f"{family.name}: there must be at least one config but none was given")
    return tuple(configs)


_REMEDY = (
    "a kernel with other knobs than the family's needs prune(..., knobs={its own name: the family's}, "
    "fixed={what it lacks: the value that it has there})"
)


class OwnKnobs:
    """Turns a kernel's configs into its family's: `names` says what the family calls the kernel's knobs, and `fixed`
    which value stands for a knob that the kernel lacks. (For those in `Family.default_knobs` the family knows.)

    Raises `ForetuneError` for a knob that the family has not, and for one that is said twice.
    """

    def __init__(self, family: Family, names: Mapping[str, str] | None, fixed: Mapping[str, Any] | None) -> None:
        self._family, self._names, self._fixed = family, _mapping("knobs", names), _mapping("fixed", fixed)
        for theirs in self._names.values():
            check_word("each of knobs", theirs)
        said = [*self._names.values(), *self._fixed]
        for knob in said:
            if knob not in family.knobs:
                raise ForetuneError(f"{shown(knob)} is no knob of {family.name}; it has {', '.join(family.knobs)}")
            if said.count(knob) > 1:
                raise ForetuneError(f"{knob} is said more than once by knobs and fixed")
        KernelConfig.of(**self._fixed)

    def config(self, config: triton.Config) -> KernelConfig:
        """A config in the family's words. Raises `ForetuneError` where that is none of the family's."""
        found = KernelConfig.from_triton(config)
        if self._names or self._fixed:
            own = found.to_json()
            taken = [self._names.get(knob, knob) for knob in own] + [*self._fixed]
            if twice := [knob for knob in taken if taken.count(knob) > 1]:
                raise ForetuneError(f"{twice[0]} is said more than once by the config {found}, knobs and fixed")
            found = KernelConfig.of(**dict(zip(taken, [*own.values(), *self._fixed.values()], strict=True)))
        found = with_defaults(self._family, found)
        if (wrong := wrong_knobs(self._family, found)) is not None:
            raise ForetuneError(f"{wrong}; {_REMEDY}")
        return found

    def check(self, configs: Sequence[triton.Config]) -> None:
        """Raises `ForetuneError` for configs of which one is none of the family's, and for none at all."""
        if not isinstance(configs, Collection) or isinstance(configs, (str, bytes)) or not len(configs):
            raise ForetuneError(f"configs must be a list of triton.Configs, at least one, but is {shown(configs)}")
        for config in configs:
            self.config(config)

    def usable(self, configs: Sequence[triton.Config]) -> tuple[tuple[int, ...], tuple[KernelConfig, ...]]:
        """The positions of those that are the family's, and what they are. Raises `ForetuneError` where none is."""
        found: dict[int, KernelConfig] = {}
        trouble = ForetuneError("the launch has no configs")
        for position, config in enumerate(configs):
            try:
                found[position] = self.config(config)
            except ForetuneError as error:  # noqa: PERF203 - as what `supports` refuses: the others are ranked without it
                trouble = error
        if not found:
            raise trouble
        return tuple(found), tuple(found.values())


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ForetuneError(f"{name} must map knobs' names but is {shown(value)}")
    return {check_word(f"each name in {name}", key): one for key, one in (value or {}).items()}


VARIABLE = "FORETUNE_MODE"


class Mode(str, Enum):
    """What is done with a prediction."""

    OFF = "off"  # nothing: every supported config goes through, in order
    SHORTLIST = "shortlist"  # the k best go through, to be measured
    PREDICT = "predict"  # only the best goes through: nothing is left to measure


def resolve_mode(asked: str | None = None, default: Mode = Mode.SHORTLIST) -> Mode:
    """The mode that the caller asks for, or else the environment does now, or else the default.

    Raises `ForetuneError` listing the valid values.

    >>> resolve_mode(), resolve_mode("predict")
    (<Mode.SHORTLIST: 'shortlist'>, <Mode.PREDICT: 'predict'>)
    """
    name, value = ("mode", asked) if asked is not None else (VARIABLE, os.environ.get(VARIABLE) or default)
    try:
        return Mode(value.lower())
    except (ValueError, AttributeError):  # AttributeError: no text
        valid = ", ".join(mode.value for mode in Mode)
        raise ForetuneError(f"{name} must be one of {valid} but got {shown(value)}") from None


_said: set[str] = set()


def warn_once(reason: str, consequence: str = "") -> None:
    """Warns of a reason, and what follows from it, the first time that this process meets the reason.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_once("an example", ": one"); warn_once("an example", ": another")
    >>> len(caught)
    1
    """
    if reason not in _said:
        _said.add(reason)
        warn(reason + consequence)

"""Checks of the arguments that users pass to runtime/, and small state of the process that all of runtime/ reads.

The checks are made when a kernel or function is declared, not in a launch. The state says whether a pin file is in
force (`is_pinned`), and when configs must be chosen again (`epoch`); `pins.py` and `tuning/ranks/agreement.py` change
it. `Mode` lists the ways to use predictions, and `warn_once` gives each warning once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, check_attributes, wrong_knobs
from ..datasets.config import check_config
from ..datasets.errors import ForetuneWarning as ForetuneWarning
from ..datasets.errors import check_word, did_you_mean, reason_of, shown, warn
from ..datasets.family_checks import with_defaults

if TYPE_CHECKING:
    import triton

#: The environment variable with the path of a pin file.
PIN_VARIABLE = "FORETUNE_PIN"
#: The pins that `foretune.pinned` has put in force; the last one counts.
pins: list[object] = []
_epoch = _pin_epoch = 0


def epoch() -> int:
    """Return a counter that changes whenever a pin file or an agreement of ranks (`agree`) starts or stops to apply.

    A config that was chosen at another value of the counter must be chosen again.
    """
    return _epoch


def begin_epoch() -> None:
    """Advance the counter of `epoch`, so that all configs chosen so far in this process are chosen again."""
    global _epoch
    _epoch += 1


def pin_epoch() -> int:
    """Return a counter that changes whenever a pin file (`pinned`) starts or stops to apply."""
    return _pin_epoch


def begin_pin_epoch() -> None:
    """Advance the counters of `pin_epoch` and `epoch`, because a pin file starts or stops to apply."""
    global _pin_epoch
    _pin_epoch += 1
    begin_epoch()


def is_pinned() -> bool:
    """Return whether a pin file is in force: by `foretune.pinned` or FORETUNE_PIN.

    >>> is_pinned()
    False
    """
    return bool(pins) or bool(os.environ.get(PIN_VARIABLE))


def family_of(family: Any) -> Family:
    """Return the argument if it is a family object. Raises `ForetuneError` for anything else.

    Names of families are not accepted here; the registry in kernels/ resolves them.
    """
    if not isinstance(family, Family):
        raise ForetuneError(f"family must be a Family but is {shown(family)}")
    check_attributes(family)
    return family


def configs_of(family: Family, device: DeviceSpec, configs: Any) -> tuple[KernelConfig, ...]:
    """Return the checked configs to choose from.

    These are the given ones; if None, the family's space on the device, or its full space if the device can run none
    of it. Raises `ForetuneError` for anything but a non-empty list of the family's configs.
    """
    if configs is None:
        return tuple(family.space(device)) or tuple(family.space())
    if not isinstance(configs, Collection) or isinstance(configs, (str, bytes)):
        raise ForetuneError(f"configs must be a list of KernelConfigs but is {shown(configs)}")
    for config in configs:
        check_config(config)
        if (wrong := wrong_knobs(family, config)) is not None:
            raise ForetuneError(wrong)
    if not len(configs):
        raise ForetuneError(f"{family.name}: configs must have at least one config but is empty")
    return tuple(configs)


#: What to do about a config with other knobs than the family's.
_REMEDY = (
    "if the kernel names its knobs differently, pass prune(..., knobs={the kernel's name: the family's name}, "
    "fixed={a knob that the kernel lacks: its value})"
)


class OwnKnobs:
    """Translates configs from a kernel's own knob names to those of its family.

    Args:
        family: The kernel's family.
        names: The family's name of each knob, by the kernel's name of it.
        fixed: The values of the family's knobs that the kernel does not have. Knobs in `Family.default_knobs` need not
            be listed.

    Raises:
        ForetuneError: The family does not have a knob, a knob is given twice, or a fixed value is a text where the
            family's space has numbers, or the other way round.
    """

    def __init__(self, family: Family, names: Mapping[str, str] | None, fixed: Mapping[str, Any] | None) -> None:
        self._family, self._names, self._fixed = family, _mapping("knobs", names), _mapping("fixed", fixed)
        for theirs in self._names.values():
            check_word("each of knobs", theirs)
        given = [*self._names.values(), *self._fixed]
        for knob in given:
            if knob not in family.knobs:
                raise ForetuneError(f"{shown(knob)} is no knob of {family.name}; it has {', '.join(family.knobs)}")
            if given.count(knob) > 1:
                raise ForetuneError(f"{knob} is given more than once in knobs and fixed")
        KernelConfig.of(**self._fixed)
        for knob, value in self._fixed.items():
            values = list(dict.fromkeys(one[knob] for one in family.space()))
            if values and isinstance(value, str) != isinstance(values[0], str):
                others = ", ".join(map(str, values))
                raise ForetuneError(f"fixed: {knob} must be a value of the type of {others} but is {shown(value)}")

    def config(self, config: triton.Config) -> KernelConfig:
        """Translate a config to the family's knobs.

        Raises `ForetuneError` if the result does not have exactly those.
        """
        found = KernelConfig.from_triton(config)
        if self._names or self._fixed:
            own = found.to_json()
            taken = [self._names.get(knob, knob) for knob in own] + [*self._fixed]
            if twice := [knob for knob in taken if taken.count(knob) > 1]:
                raise ForetuneError(f"{twice[0]} is given more than once in the config {found}, knobs and fixed")
            found = KernelConfig.of(**dict(zip(taken, [*own.values(), *self._fixed.values()], strict=True)))
        found = with_defaults(self._family, found)
        if (wrong := wrong_knobs(self._family, found)) is not None:
            raise ForetuneError(f"{wrong}; {_REMEDY}")
        return found

    def check(self, configs: Sequence[triton.Config]) -> None:
        """Raise `ForetuneError` unless this is a non-empty list of configs that all translate to the family's knobs."""
        if not isinstance(configs, Collection) or isinstance(configs, (str, bytes)) or not len(configs):
            raise ForetuneError(f"configs must be a list of triton.Configs, at least one, but is {shown(configs)}")
        for config in configs:
            self.config(config)
        own = list(dict.fromkeys(knob for config in configs for knob in KernelConfig.from_triton(config).to_json()))
        for knob in self._names:
            if knob not in own:
                raise ForetuneError(
                    f"knobs: no config has {shown(knob)}{did_you_mean(knob, own)}; they have {', '.join(own)}"
                )

    def usable(self, configs: Sequence[triton.Config]) -> tuple[tuple[int, ...], tuple[KernelConfig, ...]]:
        """Return the positions of the configs that translate to the family's knobs, and the translated configs.

        Raises `ForetuneError` if there is no such config.
        """
        found: dict[int, KernelConfig] = {}
        trouble = ForetuneError("the launch has no configs")
        for position, config in enumerate(configs):
            try:
                found[position] = self.config(config)
            except ForetuneError as error:  # noqa: PERF203 - the other configs are ranked without this one
                trouble = error
        if not found:
            raise trouble
        return tuple(found), tuple(found.values())


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """Check that an argument maps knob names, or is None, and return it as a dict ({} for None).

    Raises `ForetuneError` for any other value; messages call the argument `name`.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ForetuneError(f"{name} must be a mapping of knob names but is {shown(value)}")
    return {check_word(f"each name in {name}", key): one for key, one in (value or {}).items()}


E = TypeVar("E", bound=Enum)
#: The environment variable with the mode.
VARIABLE = "FORETUNE_MODE"


class Mode(str, Enum):
    """The ways to use predictions when the config of a launch is chosen.

    - `off`: predictions are not used; all supported configs are kept.
    - `shortlist`: the best few configs are timed.
    - `predict`: the config predicted to be fastest runs, and nothing is timed.
    - `refine`: the program's own calls run and time the best few configs in turn.
    """

    OFF = "off"  # not at all: all supported configs go through in the given order
    SHORTLIST = "shortlist"  # the k best configs go through and are measured
    PREDICT = "predict"  # only the best config goes through, so nothing is measured
    REFINE = "refine"  # the best config at first, then others of the shortlist in turn: calls are the measurements


def requested_or_set(name: str, requested: str | None, variable: str, default: E) -> E:
    """Return the member of `default`'s enum that a word names.

    The word is `requested`, else the value of the environment variable `variable`; without either, `default` is the
    result. Raises `ForetuneError` with the valid words for any other word; the message calls the option `name`.
    """
    place, value = (name, requested) if requested is not None else (variable, os.environ.get(variable) or default.value)
    try:
        return type(default)(value.lower())
    except (ValueError, AttributeError):  # AttributeError: not a string
        valid = ", ".join(one.value for one in type(default))
        suggestion = did_you_mean(value, [one.value for one in type(default)]) if isinstance(value, str) else ""
        raise ForetuneError(f"{place} must be one of {valid} but got {shown(value)}{suggestion}") from None


def resolve_mode(requested: str | None = None, default: Mode = Mode.SHORTLIST) -> Mode:
    """Return the requested mode, or else that of FORETUNE_MODE, or else the default.

    While a pin file is in force nothing is tuned, so any mode but `off` becomes `predict`; it applies to launches that
    the file does not cover.

    Raises `ForetuneError` with the valid values for any other value.

    >>> resolve_mode(), resolve_mode("predict")
    (<Mode.SHORTLIST: 'shortlist'>, <Mode.PREDICT: 'predict'>)
    """
    mode = requested_or_set("mode", requested, VARIABLE, default)
    return Mode.PREDICT if mode is not Mode.OFF and is_pinned() else mode


@contextmanager
def harmless(what: str, consequence: str = "") -> Iterator[None]:
    """Turn an exception of the block into one warning, "what (the reason)consequence", so that the program goes on.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught, harmless("times cannot be stored", ": they are lost"):
    ...     {}["disk"]
    >>> str(caught[0].message)
    "times cannot be stored (KeyError: 'disk'): they are lost"
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what is only for later runs, say, must not stop a launch
        warn_once(f"{what} ({reason_of(error)})", consequence)


#: The reasons that this process has warned about.
_warned: set[str] = set()


def warn_once(reason: str, consequence: str = "") -> None:
    """Warn with a reason and its consequence, once for each reason in this process.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_once("an example", ": one"); warn_once("an example", ": another")
    >>> len(caught)
    1
    """
    if reason not in _warned:
        _warned.add(reason)
        warn(reason + consequence)

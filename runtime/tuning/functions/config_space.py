"""`ConfigSpace`: the configs that a function is tuned over, in any of the accepted notations."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....datasets import ForetuneError
from ....datasets.config import OPTIONS
from ....datasets.errors import check_word, shown
from .plain_values import Reader, is_config, refuse_config_value, text_of

#: Most configs of a space: more than can be measured in practice. Also stops generators without end.
MOST_CONFIGS = 100_000
#: Longer integers, in bits, are abridged in texts, since Python may refuse to write them in decimal.
_MOST_BITS = 2000
#: The value of a launch option that a `triton.Config` does not set, in every supported version of Triton.
_UNSET = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "ir_override": None}


@dataclass(frozen=True)
class Candidate:
    """One config: keyword arguments for the function (`knobs`), and a text that identifies it in caches."""

    knobs: Mapping[str, Any] = field(compare=False)
    text: str
    is_vague: bool = field(default=False, compare=False)  # other values may have the same text

    @classmethod
    def of(cls, knobs: Mapping[str, Any]) -> Candidate:
        """Return the candidate of these knobs.

        Raises:
            ForetuneError: A name is not a valid knob, or a value has no text that identifies it.
        """
        named = {check_word("a config's knob", name): value for name, value in knobs.items()}
        reader = Reader(refuse_config_value)
        text = text_of({name: reader.read(value) for name, value in named.items()})
        return cls(named, text, bool(reader.vague))

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self.knobs.items()) or "(no knobs)"


class ConfigSpace:
    """The list of configs of a function, read from the notation that the user chose.

    A `triton.Config` becomes keyword arguments: its meta-parameters, and the launch options for which the function has
    parameters.

    Args:
        space: A mapping from each knob to its values (all combinations; the last knob varies fastest); an iterable of
            mappings or of `triton.Config`s; or a function without arguments that returns one of these. The function is
            called when the first call is tuned, so it may query the device.
        function: The function that receives the knobs.

    Raises:
        ForetuneError: The space is empty, has more than `MOST_CONFIGS` configs or is not a space, or the function has
            no parameter for a knob.
    """

    def __init__(self, space: Any, function: Callable[..., Any]) -> None:
        self._space, self._function = space, function
        self._candidates: tuple[Candidate, ...] | None = None
        if isinstance(space, (str, bytes)) or not (callable(space) or isinstance(space, Iterable)):
            raise ForetuneError(
                "space must be a dict of lists, a list of dicts or of triton.Configs, or a function that returns one, "
                f"but is {shown(space)}"
            )
        if not callable(space):
            self.candidates()

    def candidates(self) -> tuple[Candidate, ...]:
        """Return all configs in the given order, without duplicates."""
        if self._candidates is None:
            space = self._space() if callable(self._space) else self._space
            self._candidates = _read(space, self._function)
            self._space = None
        return self._candidates

    @property
    def knobs(self) -> frozenset[str]:
        """The names of all knobs that any config sets."""
        return frozenset().union(*(candidate.knobs for candidate in self.candidates()))


def _read(space: Any, function: Callable[..., Any]) -> tuple[Candidate, ...]:
    if isinstance(space, Mapping):
        given: Iterable[Any] = _combinations(space)
    elif isinstance(space, Iterable) and not isinstance(space, (str, bytes)):
        given = space
    else:
        raise ForetuneError(f"space must have configs but is {shown(space)}")
    configs = list(itertools.islice(given, MOST_CONFIGS + 1))
    if not configs:
        raise ForetuneError("space must have at least one config but has none")
    if len(configs) > MOST_CONFIGS:
        raise ForetuneError(f"space must have at most {MOST_CONFIGS} configs but has more: does its generator end?")
    parameters = _keywords(function)
    if any(map(is_config, configs)):
        configs = _from_triton(configs, parameters)
    for config in configs:
        if not isinstance(config, Mapping):
            raise ForetuneError(f"each config must be a dict or a triton.Config but one is {shown(config)}")
        if parameters is not None and (unknown := [knob for knob in config if knob not in parameters]):
            raise ForetuneError(
                f"{_name(function)} has no keyword parameter {unknown[0]!r}, which a config sets; "
                f"it has {', '.join(parameters) or 'none'}"
            )
    found: dict[str, Candidate] = {}
    for candidate in map(Candidate.of, configs):
        _check_distinct(found.setdefault(candidate.text, candidate), candidate)
    return tuple(found.values())


def _check_distinct(known: Candidate, candidate: Candidate) -> None:
    """Raise `ForetuneError` if two different configs have the same text, since only one would be measured."""
    if not candidate.is_vague:
        return
    for knob, value in candidate.knobs.items():
        if not _is_same(known.knobs[knob], value):
            raise ForetuneError(
                f"space has two values of {knob!r} that another process cannot tell apart, "
                f"{shown(known.knobs[knob])} and {shown(value)}: use names as values and look them up in the function"
            )


def _is_same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # noqa: BLE001 - arrays compare by element, and custom comparisons may raise anything
        return False


def _shown(value: Any) -> str:
    return shown(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else str(value)


def _combinations(space: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    values = []
    for knob, some in space.items():
        if isinstance(some, (str, bytes, Mapping)) or not isinstance(some, Iterable):
            raise ForetuneError(f"space must have a list of values for {shown(knob)} but has {shown(some)}")
        values.append(list(itertools.islice(some, MOST_CONFIGS + 1)))
    return (dict(zip(space, combination, strict=True)) for combination in itertools.product(*values))


def _from_triton(configs: Sequence[Any], parameters: Sequence[str] | None) -> list[dict[str, Any]]:
    if (odd := next((config for config in configs if not is_config(config)), None)) is not None:
        raise ForetuneError(f"space must have only dicts or only triton.Configs but also has {shown(odd)}")
    read = []
    for config in configs:
        if getattr(config, "pre_hook", None) is not None:
            raise ForetuneError(f"a config with a pre_hook must be the value of a knob, [{{'config': ...}}]: {config}")
        options = {name: getattr(config, name, _UNSET[name]) for name in OPTIONS}
        if parameters is not None:
            lost = [name for name in OPTIONS if name not in parameters and options[name] != _UNSET[name]]
            if lost:
                raise ForetuneError(f"the function has no parameter {lost[0]}, but a config sets it: {config}")
            options = {name: value for name, value in options.items() if name in parameters}
        read.append(dict(config.kwargs) | {name: value for name, value in options.items() if value is not None})
    return read


def _keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of keyword parameters; None if the function takes any keyword or has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a builtin
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)

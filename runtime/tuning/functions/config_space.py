"""Read the configs that a function is tuned over from any of the supported forms: `ConfigSpace`."""

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

#: The maximum number of configs; a generator may be endless.
MOST_CONFIGS = 100_000
#: Integers of more bits are abbreviated, because Python may refuse to convert them to decimal.
_MOST_BITS = 2000
#: The values of launch options in a `triton.Config` that does not set them, on any Triton.
_UNSET = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "ir_override": None}


@dataclass(frozen=True)
class Candidate:
    """One config: the keyword arguments for the function, and the text that identifies it."""

    knobs: Mapping[str, Any] = field(compare=False)
    text: str
    is_vague: bool = field(default=False, compare=False)  # other values may have the same text

    @classmethod
    def of(cls, knobs: Mapping[str, Any]) -> Candidate:
        """Return the candidate with these keyword arguments.

        Raises:
            ForetuneError: A name is not valid, or a value cannot be identified by a text.
        """
        named = {check_word("a config's knob", name): value for name, value in knobs.items()}
        reader = Reader(refuse_config_value)
        text = text_of({name: reader.read(value) for name, value in named.items()})
        return cls(named, text, bool(reader.vague))

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self.knobs.items()) or "(no knobs)"


class ConfigSpace:
    """Reads a space of configs for a function.

    A space is a mapping from knobs to lists of values (all combinations, the last knob varying fastest); an iterable of
    mappings or of `triton.Config`s; or a function without arguments that returns one of these. Such a function is
    called when the first call is tuned, so that it can query the device.

    A `triton.Config` becomes keyword arguments: its meta-parameters, and those launch options that are parameters of
    the function.

    Args:
        space: The space.
        function: The function.

    Raises:
        ForetuneError: The space is empty or too large, or the function has no parameter for a knob.
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
        """Return all configs, each once, in the given order."""
        if self._candidates is None:
            space = self._space() if callable(self._space) else self._space
            self._candidates = _read(space, self._function)
            self._space = None
        return self._candidates

    @property
    def knobs(self) -> frozenset[str]:
        """The names of the knobs that any config sets."""
        return frozenset().union(*(candidate.knobs for candidate in self.candidates()))


def _read(space: Any, function: Callable[..., Any]) -> tuple[Candidate, ...]:
    """Return the candidates of a space."""
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
        raise ForetuneError(f"space must have at most {MOST_CONFIGS} configs but has more: is its generator endless?")
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
    """Raise `ForetuneError` for two candidates that share a text, so that only one would be tried."""
    if not candidate.is_vague:
        return
    for knob, value in candidate.knobs.items():
        if not _is_same(known.knobs[knob], value):
            raise ForetuneError(
                f"space has two values of {knob!r} that cannot be distinguished in another process, "
                f"{shown(known.knobs[knob])} and {shown(value)}: give them names, and have the function look them up"
            )


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; False if they cannot be compared."""
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # noqa: BLE001 - a comparison of arrays, or a user's own, may raise anything
        return False


def _shown(value: Any) -> str:
    """Return a value as a text."""
    return shown(value) if isinstance(value, int) and value.bit_length() > _MOST_BITS else str(value)


def _combinations(space: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Return all combinations of a mapping's values."""
    values = []
    for knob, some in space.items():
        if isinstance(some, (str, bytes, Mapping)) or not isinstance(some, Iterable):
            raise ForetuneError(f"space must have a list of values for {shown(knob)} but has {shown(some)}")
        values.append(list(itertools.islice(some, MOST_CONFIGS + 1)))
    return (dict(zip(space, combination, strict=True)) for combination in itertools.product(*values))


def _from_triton(configs: Sequence[Any], parameters: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the keyword arguments of `triton.Config`s, given the function's parameters (None: any)."""
    if (odd := next((config for config in configs if not is_config(config)), None)) is not None:
        raise ForetuneError(f"a space must have either dicts or triton.Configs but has {shown(odd)} too")
    read = []
    for config in configs:
        if getattr(config, "pre_hook", None) is not None:
            raise ForetuneError(f"a config with a pre_hook must be passed as a whole, as [{{'config': ...}}]: {config}")
        options = {name: getattr(config, name, _UNSET[name]) for name in OPTIONS}
        if parameters is not None:
            lost = [name for name in OPTIONS if name not in parameters and options[name] != _UNSET[name]]
            if lost:
                raise ForetuneError(f"the function has no parameter {lost[0]}, which a config sets: {config}")
            options = {name: value for name, value in options.items() if name in parameters}
        read.append(dict(config.kwargs) | {name: value for name, value in options.items() if value is not None})
    return read


def _keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the names of the parameters that can be passed by name; None if these are any, or unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # a builtin
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def _name(function: Callable[..., Any]) -> str:
    """Return the function's name."""
    return getattr(function, "__qualname__", type(function).__name__)

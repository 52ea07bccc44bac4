"""`ConfigSpace`: the configs of a tuned function, read from any accepted notation; `Search`: measures some of them."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from ....datasets import ForetuneError, KernelConfig, Problem
from ....datasets.config import OPTIONS
from ....datasets.errors import MOST, check_between, check_integer, check_word, shown
from ...arguments import harmless, warn_once
from ..own_timings import USUAL_COST_S, Advice, Advisor, OwnTimings
from ..session import TuningSession
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


#: Upper bound of `budget_s` in seconds (30 days), to catch mistakes.
_LONGEST_S = 30 * 86_400.0


class Search:
    """A strategy for searching the configs of a function.

    Args:
        strategy: "exhaustive"; "model": a model of the function's own timings searches each key (`OwnTimings`); or an
            `Advisor` of the user's, which selects the configs of a key at once.
        budget_s: The maximum seconds of tuning for each key, or None.
        max_trials: The maximum number of configs measured for each key, or None.

    Raises:
        ForetuneError: The strategy is unknown, or a limit is not a positive number.
    """

    def __init__(self, strategy: str | Advisor, budget_s: float | None, max_trials: int | None) -> None:
        is_advisor = hasattr(strategy, "learn") and hasattr(strategy, "advise")
        if strategy not in ("exhaustive", "model") and not is_advisor:
            raise ForetuneError(
                f"search must be 'exhaustive', 'model' or an object with learn and advise but is {shown(strategy)}"
            )
        if budget_s is not None:
            check_between("budget_s", budget_s, 0.0, _LONGEST_S)
        self.budget_s = budget_s
        self.max_trials = None if max_trials is None else check_integer("max_trials", max_trials, 1, MOST)
        self.is_guided = strategy != "exhaustive"
        self._advisor: Advisor | None = None if isinstance(strategy, str) else strategy
        self._is_theirs = self._advisor is not None
        self._learned: set[str] = set()

    def __str__(self) -> str:
        limits = [f"budget_s={self.budget_s}"] * (self.budget_s is not None)
        limits += [f"max_trials={self.max_trials}"] * (self.max_trials is not None)
        return " ".join(["model" if self.is_guided else "exhaustive", *limits])

    def run(
        self,
        session: TuningSession[Candidate],
        problem: Problem | None,
        candidates: Sequence[Candidate],
        exchange: Callable[[str, Any], list[Any]],
    ) -> str:
        """Measure the selected configs; if none of them works, the others one by one until one does.

        Args:
            session: Measures configs.
            problem: The problem of the key.
            candidates: All configs, in the order of the space.
            exchange: Returns the values of all ranks (see `Ranks.exchange`).

        Returns:
            A text that says how many configs were measured and why.
        """
        advised: set[int] = set()
        while True:
            advice = self._advise(problem, candidates, session)
            positions, reason = advice.positions, advice.reason
            if self.is_guided:  # each rank has its own model: all use that of rank 0
                positions, reason = exchange("the configs that are advised", [positions, reason])[0]
            if advised.issuperset(positions):
                break
            advised.update(positions)
            if over := session.measure([candidates[at] for at in positions]):
                reason = f"{reason}, ended by {over}"
                break
            if not self.is_guided or self._is_theirs:
                break
        for at, candidate in enumerate(candidates):
            if session.best is not None:
                break
            if at not in advised:
                session.measure([candidate])
        return f"{session.n_timed} measured {reason}"

    def _advise(
        self, problem: Problem | None, candidates: Sequence[Candidate], session: TuningSession[Candidate]
    ) -> Advice:
        """Return which configs to measure, in order: as the model or advisor selects, or else all of them.

        If a limit may end an exhaustive search, the first config of the space stays first, since the user put it there,
        and the others are shuffled with a fixed seed, so that the measured ones sample the whole space.
        """
        if self.is_guided:
            try:
                return self._advised(problem, candidates, session)
            except Exception as error:  # noqa: BLE001 - a failing model must not fail the tuning
                warn_once(f"no advice on which configs to measure ({type(error).__name__}: {error})", ": all are")
        positions = list(range(len(candidates)))
        if self.budget_s is not None or self.max_trials is not None:
            rest = positions[1:]
            random.Random(0).shuffle(rest)
            positions = positions[:1] + rest
        return Advice(tuple(positions), False, f"of {len(candidates)} configs")

    def learn(self, key: str, problem: Problem | None, times: Mapping[Candidate, float | None]) -> None:
        """Train the advisor on the times of a key, once for each key."""
        if not self.is_guided or problem is None or key in self._learned:
            return
        self._learned.add(key)
        with harmless("nothing was learned from the times of a key"):
            self._advisor_of(problem).learn(problem, {kernel_config(one): time_us for one, time_us in times.items()})

    def _advisor_of(self, problem: Problem) -> Advisor:
        if self._advisor is None:
            # `OwnTimings` reads only the name of a family.
            self._advisor = OwnTimings(cast(Any, SimpleNamespace(name=problem.family)))
        return self._advisor

    def _advised(
        self, problem: Problem | None, candidates: Sequence[Candidate], session: TuningSession[Candidate]
    ) -> Advice:
        if problem is None:
            raise ForetuneError("the key has no number in it")
        advisor, configs = self._advisor_of(problem), [kernel_config(one) for one in candidates]
        if isinstance(advisor, OwnTimings):
            known = {one: measured.time_us for one, measured in session.measured.items()}
            advisor.learn(problem, {kernel_config(one): time_us for one, time_us in known.items()})
            found = advisor.advise(problem, configs, "auto", session.cost_s or USUAL_COST_S)
            return found if found.positions else Advice(tuple(range(len(configs))), False, "all have failed before")
        advice = advisor.advise(problem, configs, "auto")
        positions = tuple(dict.fromkeys(int(position) for position in advice.positions))
        if not positions or not all(0 <= position < len(candidates) for position in positions):
            raise ForetuneError(
                f"advise must return positions from 0 to {len(candidates) - 1} but returned {shown(advice.positions)}"
            )
        return Advice(positions, True, f"{len(positions)} of {len(candidates)} configs advised: {advice.reason}")


def kernel_config(candidate: Candidate) -> KernelConfig:
    """Return a candidate as a `KernelConfig`; values other than numbers and strings are converted to strings.

    Raises:
        ForetuneError: A launch option has a value that no kernel takes.
    """
    values: dict[str, Any] = {}
    for name, value in candidate.knobs.items():
        known = getattr(value, "all_kwargs", None)
        if callable(known):
            values |= known()
        else:
            values[name] = value if isinstance(value, (int, float, str)) else str(value)
    return KernelConfig.of(**values)

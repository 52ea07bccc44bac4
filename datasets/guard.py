"""The guard around a kernel family's own code: what it raises, or returns that it must not, becomes a `FamilyError`.

`Family.__init_subclass__` puts it around every method of the contract that a class defines, so that no caller of a
method needs a guard of its own.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import FunctionType
from typing import Any, TypeAlias

from .config import KernelConfig
from .errors import FamilyError, ForetuneError, abridged, check_word, printable, reason_of, shown
from .feature_groups import FeatureGroup
from .measurement import Case
from .problem import Problem

#: Positional and keyword arguments.
_Given: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
#: Checks what a family's method returned for some arguments: None, or what it must return and the part that is not so.
_Check: TypeAlias = Callable[[Any, Any, _Given], tuple[str, Any] | None]

#: What differs between processes in how an object shows itself: a warning is given once for each text.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: How far the shares of likely problems may be from 1 in all.
_SHARES_OFF = 1e-3
#: How many checked objects are remembered.
_MOST_KNOWN = 128


def guard_methods(family: type, base: type) -> None:
    """Guard every method of the contract that a new class defines, or inherits from a class that is no `base`."""
    for name in CHECKS:
        owner = next((one for one in family.__mro__ if name in vars(one)), None)
        if owner is None or (owner is not family and issubclass(owner, base)):
            continue
        member = vars(owner)[name]
        if not getattr(member, "__isabstractmethod__", False) and (callable(member) or hasattr(member, "__func__")):
            setattr(family, name, _guarded(name, member))


def _guarded(name: str, member: Any) -> Callable[..., Any]:
    """Return a method with the guard around it.

    It gets copies of the arguments that it might change: lists, and a launch's arguments. (Not the mapping of what is
    known of binaries, which families recognize by its identity.)
    """
    member = getattr(member, "_unguarded", member)  # as in `launch = compile`
    method: Callable[..., Any] = member if isinstance(member, FunctionType) else _as_function(member)
    check, takes_lists = CHECKS[name], name in _TAKES_LISTS

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(type(self), name) is not call:  # `super().features(...)`: the answer of the subclass is checked
            return method(self, *args, **kwargs)
        if takes_lists:
            args, kwargs = tuple(map(_own, args)), {key: _own(value) for key, value in kwargs.items()}
        elif name == "problem_from_call":
            args = tuple(dict(value) if type(value) is dict else value for value in args)
        try:
            answer = method(self, *args, **kwargs)
        except ForetuneError:
            raise
        except (Exception, SystemExit) as error:
            raise FamilyError(
                f"family {name_of(self)}: {name}() raised {printable(abridged(reason_of(error)))}"
            ) from error
        if (wrong := check(self, answer, (args, kwargs))) is not None:
            shape = getattr(wrong[1], "shape", None)
            is_array = isinstance(shape, tuple)
            what = f"an array of shape {shape}" if is_array else _ADDRESS.sub("", printable(shown(wrong[1])))
            raise FamilyError(f"family {name_of(self)}: {name}() must return {wrong[0]} but returned {what}")
        return printable(answer) if name == "supports" and answer and not answer.isprintable() else answer

    call.__dict__["_unguarded"] = member
    return call


def _as_function(member: Any) -> Callable[..., Any]:
    """Return a class method, static method or other callable of a class as a function that takes the instance."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = member.__get__(self, type(self)) if hasattr(member, "__get__") else member
        return bound(*args, **kwargs)

    return method


def _own(value: Any) -> Any:
    return tuple(value) if type(value) is list else value


def name_of(family: Any) -> str:
    """Return a family's name for a message; its class's where it has none that can be read."""
    try:
        name = family.name
    except (Exception, SystemExit):  # noqa: BLE001 - a property may raise anything
        name = None
    return printable(abridged(name)) if isinstance(name, str) and name else type(family).__name__


# What each method must return.

_known: dict[int, tuple[Any, int]] = {}  # checked spaces and kinds, by id; kept alive, so that no id is used twice


def _known_count(value: Any) -> int | None:
    """Return what was noted of an object: families return the same ones again and again."""
    known = _known.get(id(value))
    return known[1] if known is not None and known[0] is value else None


def _note(value: Any, count: int) -> int:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[id(value)] = value, count
    return count


def _argument(given: _Given, place: int, name: str) -> Any:
    args, kwargs = given
    return args[place] if len(args) > place else kwargs[name]


def _must_be(wanted: str, is_right: Callable[[Any], bool]) -> _Check:
    return lambda family, answer, given: None if is_right(answer) else (wanted, answer)


def _space(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    if _known_count(answer):
        return None
    if not isinstance(answer, (tuple, list)):
        return "a tuple of KernelConfigs", answer
    if odd := [config for config in answer if not isinstance(config, KernelConfig)]:
        return "a tuple of KernelConfigs", odd[0]
    if not answer and given == ((), {}):
        return "at least one KernelConfig where no device is given", answer
    if type(answer) is tuple:
        _note(answer, len(answer))
    return None


def _is_value(answer: Any) -> bool:
    """Whether it can be hashed, and can equal another object."""
    try:
        hash(answer)
    except Exception:  # noqa: BLE001 - a __hash__ may raise anything
        return False
    return not hasattr(answer, "__next__")


def _features(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    shape = len(_argument(given, 2, "configs")), len(family.feature_names)
    if getattr(answer, "shape", None) == shape and getattr(getattr(answer, "dtype", None), "kind", "") in [*"fiub"]:
        return None
    return f"an array of {shape[0]} x {shape[1]} numbers (configs x feature_names)", answer


def _groups(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    n_problems, n_configs = len(_argument(given, 0, "problems")), len(_argument(given, 2, "configs"))

    def is_right(group: Any) -> bool:
        shape: tuple[int, ...] = getattr(group.values, "shape", ()) if isinstance(group, FeatureGroup) else ()
        return (
            len(shape) == 3
            and shape[0] == (1 if group.lasting else n_problems)
            and shape[2] == len(group.columns)
            and getattr(group.kind, "shape", None) == (n_configs,)
            and _count_of(group.kind) <= shape[1]
        )

    is_right_each = isinstance(answer, (tuple, list)) and all(map(is_right, answer))
    if is_right_each and sorted(at for one in answer for at in one.columns) == [*range(len(family.feature_names))]:
        return None
    return f"FeatureGroups of {n_problems} problems, {n_configs} configs and each of feature_names once", answer


def _count_of(kind: Any) -> float:
    """Return how many kinds the numbers in an array can be of; infinity where they are none."""
    if (known := _known_count(kind)) is not None:
        return known
    if kind.dtype.kind != "i" or (len(kind) and kind.min() < 0):
        return math.inf
    return _note(kind, int(kind.max(initial=-1)) + 1)


def _estimates(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    import numpy as np

    n_configs = len(_argument(given, 2, "configs"))
    try:
        times = np.asarray(answer, np.float64)
        is_right = times.shape == (n_configs,) and bool((times > 0).all())  # infinity is what does not run
    except Exception:  # noqa: BLE001 - anything may be in there
        is_right = False
    return None if is_right else (f"a time above 0 for each of {n_configs} configs", answer)


def _stands_for(place: int) -> _Check:
    """A `Problem` of the signature of the problem among the arguments, for which it stands."""

    def check(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
        if not isinstance(answer, Problem):
            return "a Problem", answer
        problem = _argument(given, place, "problem")
        is_right = answer.signature == problem.signature
        return None if is_right else (f"a problem of the family, dtype and flags of {problem}", answer)

    return check


def _are_shares(answer: Any) -> bool:
    def is_right(pair: Any) -> bool:
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Problem)
        return is_pair and isinstance(pair[0], Real) and bool(pair[0] >= 0)  # type: ignore[operator]

    if not isinstance(answer, (tuple, list)) or not answer or not all(map(is_right, answer)):
        return False
    return abs(sum(float(share) for share, _ in answer) - 1) <= _SHARES_OFF


def _cases(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        return "a list of Cases", answer
    odd = [case for case in answer if not isinstance(case, Case) or case.problem.family != family.name]
    return ("Cases of its own problems", odd[0]) if odd else None


def _is_count(answer: Any) -> bool:
    return isinstance(answer, Real) and not isinstance(answer, bool) and bool(0 <= answer < math.inf)  # type: ignore[operator]


def _is_tensor(answer: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is None or isinstance(answer, torch.Tensor)


def _is_word(answer: Any) -> bool:
    try:
        return bool(check_word("it", answer))
    except ForetuneError:
        return False


_anything = _must_be("anything", lambda answer: True)
_number = _must_be("a finite number >= 0", _is_count)
_hashable = _must_be("what can be hashed", _is_value)
#: The methods of `Family` and `Measurable`, and what checks their answers.
CHECKS: dict[str, _Check] = {
    "space": _space,
    "supports": _must_be("None, or the reason why not", lambda a: a is None or (isinstance(a, str) and a != "")),
    "supports_by": _hashable,
    "features": _features,
    "feature_groups": _groups,
    "problem_from_call": _must_be("a Problem", lambda answer: isinstance(answer, Problem)),
    "at_call_time": _stands_for(0),
    "likely": _must_be("pairs of a share and a Problem, whose shares are 1 in all", _are_shares),
    "estimate_us": _estimates,
    "cases": _cases,
    "flops": _number,
    "bytes": _number,
    "inputs": _anything,
    "reset": _anything,
    "launch": _anything,  # what it returns matters only where it is compared
    "reference": _must_be("a tensor", _is_tensor),
    "tolerance": _number,
    "compile": _anything,
    "source_hash": _must_be("a word", _is_word),
    "check_problem": _stands_for(1),
    "binary_key": _hashable,
    "default": _must_be("a KernelConfig", lambda answer: isinstance(answer, KernelConfig)),
}
_TAKES_LISTS = ("features", "feature_groups", "estimate_us")

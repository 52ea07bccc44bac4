"""The guard around a kernel family's own code: what it raises, or gives that it must not, becomes a `FamilyError`.

`Family.__init_subclass__` puts it around every method that a class defines, so that whoever calls one is guarded, and
no caller needs to be.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Real
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from ..case import Case
from ..config import KernelConfig
from ..errors import FamilyError, ForetuneError, abridged, check_word, printable, reason_of, shown
from ..feature_groups import FeatureGroup
from ..problem import Problem

if TYPE_CHECKING:
    from ..family import Family

#: Checks an answer: (family, answer, positional arguments, keyword arguments) -> the answer.
_Check = Callable[["Family", Any, tuple[Any, ...], Mapping[str, Any]], Any]

#: What differs between processes in how an object shows itself: a warning is given once for each text.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: How far the shares of likely problems may be from 1 in all.
_SHARES_OFF = 1e-3
#: The last spaces that were looked through: families give the same tuple again and again.
_MOST_SPACES = 64


def guard_methods(family: type[Family], base: type) -> None:
    """Guard every method of the contract that a new class defines, or has from a class that is no `base`."""
    for name in CHECKS:
        owner = next((one for one in family.__mro__ if name in vars(one)), None)
        if owner is None or (owner is not family and issubclass(owner, base)):
            continue
        method = vars(owner)[name]
        if getattr(method, "__isabstractmethod__", False):
            continue
        if isinstance(method, FunctionType):
            setattr(family, name, _guarded(name, method))
        elif callable(method) or hasattr(method, "__func__"):
            setattr(family, name, _Bound(name, method))


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A plain method with the guard around it."""
    method = getattr(method, "_unguarded", method)  # as in `launch = compile`

    @wraps(method)
    def call(self: Family, *args: Any, **kwargs: Any) -> Any:
        if getattr(type(self), name) is not call:  # `super().features(...)`: the answer of the subclass is checked
            return method(self, *args, **kwargs)
        return _asked(self, name, method, (self,), args, kwargs)

    call.__dict__["_unguarded"] = method
    return call


class _Bound:
    """A class method, static method or other callable with the guard around it, where it is called on a family."""

    def __init__(self, name: str, method: Any) -> None:
        self._name, self._method = name, getattr(method, "_method", method)

    def __get__(self, family: Family | None, owner: type[Family]) -> Any:
        method = self._method.__get__(family, owner) if hasattr(self._method, "__get__") else self._method
        outermost = next(vars(one)[self._name] for one in owner.__mro__ if self._name in vars(one))
        if family is None or outermost is not self:
            return method
        return lambda *args, **kwargs: _asked(family, self._name, method, (), args, kwargs)


def _asked(
    family: Family,
    name: str,
    method: Callable[..., Any],
    bound: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What a method gives, checked. What it may change of what it is given is a copy: lists, and a launch's arguments.
    (Not what is known of binaries, which families know by its identity.)"""
    if name in _TAKES_LISTS:
        args, kwargs = tuple(map(_own, args)), {key: _own(value) for key, value in kwargs.items()}
    elif name == "problem_from_call":
        args = tuple(dict(value) if type(value) is dict else value for value in args)
    try:
        answer = method(*bound, *args, **kwargs)
    except ForetuneError:
        raise
    except (Exception, SystemExit) as error:
        raise FamilyError(
            f"family {name_of(family)}: {name}() raised {printable(abridged(reason_of(error)))}"
        ) from error
    return CHECKS[name](family, answer, args, kwargs)


def _own(value: Any) -> Any:
    return tuple(value) if type(value) is list else value


def name_of(family: Family) -> str:
    """Return a family's name for a message; its class's where it has none that can be read."""
    try:
        name = family.name
    except (Exception, SystemExit):  # noqa: BLE001 - a property of somebody's own making
        name = None
    return printable(abridged(name)) if isinstance(name, str) and name else type(family).__name__


def _refuse(family: Family, name: str, wanted: str, answer: Any) -> NoReturn:
    shape = getattr(answer, "shape", None)
    what = f"an array of shape {shape}" if isinstance(shape, tuple) else _ADDRESS.sub("", printable(shown(answer)))
    raise FamilyError(f"family {name_of(family)}: {name}() must return {wanted} but returned {what}")


# What each method must give.


def _anything(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return answer


_spaces: dict[int, tuple[KernelConfig, ...]] = {}  # by id; kept alive, so that no id is used twice


def _space(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if answer is not None and _spaces.get(id(answer)) is answer:
        return answer
    if not isinstance(answer, (tuple, list)) or not all(isinstance(config, KernelConfig) for config in answer):
        odd = answer
        if isinstance(answer, (tuple, list)):
            odd = next(config for config in answer if not isinstance(config, KernelConfig))
        _refuse(family, "space", "a tuple of KernelConfigs", odd)
    if not answer and not args and not kwargs:
        _refuse(family, "space", "at least one KernelConfig where no device is given", answer)
    if type(answer) is tuple:
        if len(_spaces) >= _MOST_SPACES:
            _spaces.clear()
        _spaces[id(answer)] = answer
    return answer


def _reason(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    if answer is None:
        return None
    if not isinstance(answer, str) or not answer:
        _refuse(family, "supports", "None, or the reason why not", answer)
    return answer if answer.isprintable() else printable(answer)


def _hashable(name: str) -> _Check:
    def check(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            hash(answer)
        except Exception:  # noqa: BLE001 - somebody's own __hash__
            _refuse(family, name, "what can be hashed", answer)
        if hasattr(answer, "__next__"):  # equals nothing but itself
            _refuse(family, name, "a value", answer)
        return answer

    return check


def _features(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    shape = len(_argument(args, kwargs, 2, "configs")), len(family.feature_names)
    if getattr(answer, "shape", None) != shape or getattr(getattr(answer, "dtype", None), "kind", "") not in "fiub":
        _refuse(family, "features", f"an array of {shape[0]} x {shape[1]} numbers (configs x feature_names)", answer)
    return answer


def _groups(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    n_problems, n_configs = len(_argument(args, kwargs, 0, "problems")), len(_argument(args, kwargs, 2, "configs"))
    wanted = f"FeatureGroups of {n_problems} problems, {n_configs} configs and each of feature_names once"
    if not isinstance(answer, (tuple, list)):
        _refuse(family, "feature_groups", wanted, answer)
    columns: list[int] = []
    for group in answer:
        if not isinstance(group, FeatureGroup):
            _refuse(family, "feature_groups", wanted, answer)
        places, values, kind, lasting = group
        shape: tuple[int, ...] = getattr(values, "shape", ())
        n_rows = 1 if lasting else n_problems
        if len(shape) != 3 or shape[0] != n_rows or shape[2] != len(places):
            _refuse(family, "feature_groups", wanted, answer)
        if getattr(kind, "shape", None) != (n_configs,) or not _are_kinds(kind, shape[1]):
            _refuse(family, "feature_groups", wanted, answer)
        columns += places
    if sorted(columns) != list(range(len(family.feature_names))):
        _refuse(family, "feature_groups", wanted, answer)
    return answer


_kinds: dict[int, tuple[Any, int]] = {}  # by id; kept alive, as above


def _are_kinds(kind: Any, count: int) -> bool:
    """Whether all are of so many kinds."""
    if (known := _kinds.get(id(kind))) is not None and known[0] is kind:
        return known[1] <= count
    if kind.dtype.kind != "i" or (len(kind) and not 0 <= kind.min() <= kind.max() < count):
        return False
    if len(_kinds) >= _MOST_SPACES:
        _kinds.clear()
    _kinds[id(kind)] = kind, count
    return True


def _estimates(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    import numpy as np

    n_configs = len(_argument(args, kwargs, 2, "configs"))
    try:
        times = np.asarray(answer, np.float64)
    except Exception:  # noqa: BLE001 - anything may be in there
        times = None
    # (Infinity is what does not run.)
    if times is None or times.shape != (n_configs,) or not (times > 0).all():
        _refuse(family, "estimate_us", f"a time above 0 for each of {n_configs} configs", answer)
    return answer


def _problem(name: str, *, of: int | None = None) -> _Check:
    """A `Problem`, of the kind of the problem among the arguments if it stands for that."""

    def check(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(answer, Problem):
            _refuse(family, name, "a Problem", answer)
        if of is not None and answer.kind != (given := _argument(args, kwargs, of, "problem")).kind:
            _refuse(family, name, f"a problem of the family, dtype and flags of {given}", answer)
        return answer

    return check


def _likely(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    wanted = "pairs of a share and a Problem, whose shares are 1 in all"
    if not isinstance(answer, (tuple, list)) or not answer:
        _refuse(family, "likely", wanted, answer)
    shares = 0.0
    for pair in answer:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[1], Problem):
            _refuse(family, "likely", wanted, answer)
        share: Any = pair[0]
        if not isinstance(pair[0], Real) or not share >= 0:
            _refuse(family, "likely", wanted, answer)
        shares += float(share)
    if not abs(shares - 1) <= _SHARES_OFF:
        _refuse(family, "likely", wanted, answer)
    return answer


def _cases(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        _refuse(family, "cases", "a list of Cases", answer)
    for case in answer:
        if not isinstance(case, Case) or case.problem.family != family.name:
            _refuse(family, "cases", "Cases of its own problems", case)
    return answer


def _number(name: str) -> _Check:
    def check(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        number: Any = answer
        if not isinstance(answer, Real) or isinstance(answer, bool) or not 0 <= number < math.inf:
            _refuse(family, name, "a finite number >= 0", answer)
        return answer

    return check


def _tensor(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and not isinstance(answer, torch.Tensor):
        _refuse(family, "reference", "a tensor", answer)
    return answer


def _hash(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    try:
        return check_word("it", answer)
    except ForetuneError:
        _refuse(family, "source_hash", "a word", answer)


def _config(family: Family, answer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not isinstance(answer, KernelConfig):
        _refuse(family, "default", "a KernelConfig", answer)
    return answer


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs[name]


#: The methods of `Family` and `Measurable`, and what checks their answers.
CHECKS: dict[str, _Check] = {
    "space": _space,
    "supports": _reason,
    "supports_by": _hashable("supports_by"),
    "features": _features,
    "feature_groups": _groups,
    "problem_from_call": _problem("problem_from_call"),
    "at_call_time": _problem("at_call_time", of=0),
    "likely": _likely,
    "estimate_us": _estimates,
    "cases": _cases,
    "flops": _number("flops"),
    "bytes": _number("bytes"),
    "inputs": _anything,
    "launch": _anything,  # what it returns matters only where it is compared
    "reference": _tensor,
    "tolerance": _number("tolerance"),
    "compile": _anything,
    "source_hash": _hash,
    "check_problem": _problem("check_problem", of=1),
    "binary_key": _hashable("binary_key"),
    "default": _config,
}
_TAKES_LISTS = ("features", "feature_groups", "estimate_us")

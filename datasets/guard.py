"""Guards around the methods of kernel families: exceptions and wrong return values become a `FamilyError`.

`Family.__init_subclass__` wraps every method of the interface that a class defines, so callers need no checks of their
own.
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
from .errors import LONGEST_WORD, FamilyError, ForetuneError, abridged, printable, reason_of, shown
from .feature_groups import FeatureGroup
from .measurement import Case
from .problem import Problem

#: (positional arguments, keyword arguments) of a call.
_Given: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
#: Takes a family, the value that its method returned, and the arguments. Returns None if the value is right, else a
#: description of what it must be, and the wrong part.
_Check: TypeAlias = Callable[[Any, Any, _Given], tuple[str, Any] | None]

#: Addresses in the repr of objects. They are removed, so that equal messages are equal and shown only once.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: How far the sum of the weights of `Family.plausible` may be from 1.
_WEIGHTS_OFF = 1e-3
#: The number of objects whose check is remembered.
_MOST_KNOWN = 128


def guard_methods(family: type, base: type) -> None:
    """Replace the methods of a new family class that are named in `CHECKS` by guarded versions (see `_guarded`).

    Methods inherited from `base` or a subclass of `base` are not replaced: those of subclasses are guarded already.
    """
    for name in CHECKS:
        owner = next((one for one in family.__mro__ if name in vars(one)), None)
        if owner is None or (owner is not family and issubclass(owner, base)):
            continue
        member = vars(owner)[name]
        if not getattr(member, "__isabstractmethod__", False) and (callable(member) or hasattr(member, "__func__")):
            setattr(family, name, _guarded(name, member))


def _guarded(name: str, member: Any) -> Callable[..., Any]:
    """Return a version of the method `member` that checks its return value and turns errors into a `FamilyError`.

    It passes copies of arguments that the method might change: lists, and a launch's arguments. The mapping `binaries`
    is not copied, because families cache by its identity.
    """
    member = getattr(member, "_unguarded", member)  # as in `launch = compile`
    method: Callable[..., Any] = member if isinstance(member, FunctionType) else _as_function(member)
    check, takes_lists = CHECKS[name], name in _TAKES_LISTS

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            getattr(type(self), name) is not call
        ):  # called by a subclass as `super().features(...)`: only the outer result is checked
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
    """Return a function of (instance, *arguments) that calls `member`: a class method, static method or callable."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = member.__get__(self, type(self)) if hasattr(member, "__get__") else member
        return bound(*args, **kwargs)

    return method


def _own(value: Any) -> Any:
    """Return a list as a tuple, and any other value itself."""
    return tuple(value) if type(value) is list else value


def name_of(family: Any) -> str:
    """Return a family's name for a message, or its class's name if it has none."""
    try:
        name = family.name
    except (Exception, SystemExit):  # noqa: BLE001 - a property may raise anything
        name = None
    return printable(abridged(name)) if isinstance(name, str) and name else type(family).__name__


# The checks of return values.

#: Objects that passed a check, by id, with a count. They are kept alive, so that their ids are not reused.
_known: dict[int, tuple[Any, int]] = {}


def _known_count(value: Any) -> int | None:
    """Return the count that `_note` stored for an object that passed its check; None for any other object.

    Families often return the same object again, which then needs no second check.
    """
    known = _known.get(id(value))
    return known[1] if known is not None and known[0] is value else None


def _note(value: Any, count: int) -> int:
    """Return `count`, after storing it as the number of configs or of indexed rows of a value that passed its check."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[id(value)] = value, count
    return count


def _argument(given: _Given, place: int, name: str) -> Any:
    """Return the argument of a call, from `given` (its positional and keyword arguments), by position or by name."""
    args, kwargs = given
    return args[place] if len(args) > place else kwargs[name]


def _must_be(wanted: str, is_right: Callable[[Any], bool]) -> _Check:
    """Return a check that a method's return value satisfies `is_right`; messages describe it by `wanted`."""
    return lambda family, answer, given: None if is_right(answer) else (wanted, answer)


def _space(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    """Check the configs that `space` returned: None if right, else (what it must be, the wrong part).

    Without a device there must be at least one config.
    """
    if _known_count(answer):
        return None
    if not isinstance(answer, (tuple, list)):
        return "a tuple of KernelConfigs", answer
    if odd := [config for config in answer if not isinstance(config, KernelConfig)]:
        return "a tuple of KernelConfigs", odd[0]
    if not answer and given == ((), {}):
        return "at least one KernelConfig if no device is given", answer
    if type(answer) is tuple:
        _note(answer, len(answer))
    return None


def _is_value(answer: Any) -> bool:
    """Return whether a value can be a key: hashable, and not an iterator, which equals only itself."""
    try:
        hash(answer)
    except Exception:  # noqa: BLE001 - a __hash__ may raise anything
        return False
    return not hasattr(answer, "__next__")


def _features(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    """Check shape and dtype of what `features` returned: None if right, else (what it must be, the wrong part)."""
    shape = len(_argument(given, 2, "configs")), len(family.feature_names)
    if getattr(answer, "shape", None) == shape and getattr(getattr(answer, "dtype", None), "kind", "") in [*"fiub"]:
        return None
    return f"an array of {shape[0]} x {shape[1]} numbers (configs x feature_names)", answer


def _groups(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    """Check the shapes of the feature groups that a method returned, and that each feature column is in one of them.

    Returns None if they are right, else (what it must be, the wrong part).
    """
    n_problems, n_configs = len(_argument(given, 0, "problems")), len(_argument(given, 2, "configs"))

    def is_right(group: Any) -> bool:
        shape: tuple[int, ...] = getattr(group.values, "shape", ()) if isinstance(group, FeatureGroup) else ()
        return (
            len(shape) == 3
            and shape[0] == (1 if group.lasting else n_problems)
            and shape[2] == len(group.columns)
            and getattr(group.row_of_config, "shape", None) == (n_configs,)
            and _count_of(group.row_of_config) <= shape[1]
        )

    is_right_each = isinstance(answer, (tuple, list)) and all(map(is_right, answer))
    if is_right_each and sorted(at for one in answer for at in one.columns) == [*range(len(family.feature_names))]:
        return None
    return f"FeatureGroups of {n_problems} problems and {n_configs} configs with each of feature_names once", answer


def _count_of(kind: Any) -> float:
    """Return 1 + the largest index in `kind`, an array of row indices; infinity if it is not one."""
    if (known := _known_count(kind)) is not None:
        return known
    if kind.dtype.kind != "i" or (len(kind) and kind.min() < 0):
        return math.inf
    return _note(kind, int(kind.max(initial=-1)) + 1)


def _estimates(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    """Check that `estimate_us` returned a positive time per config: None if so, else (the rule, the wrong part)."""
    import numpy as np

    n_configs = len(_argument(given, 2, "configs"))
    try:
        times = np.asarray(answer, np.float64)
        is_right = times.shape == (n_configs,) and bool((times > 0).all())  # infinity means that a config cannot run
    except Exception:  # noqa: BLE001 - anything may be in there
        is_right = False
    return None if is_right else (f"a time above 0 for each of {n_configs} configs", answer)


def _stands_for(place: int) -> _Check:
    """Return a check that a method returned a `Problem` with the signature of its argument number `place`."""

    def check(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
        if not isinstance(answer, Problem):
            return "a Problem", answer
        problem = _argument(given, place, "problem")
        is_right = answer.signature == problem.signature
        return None if is_right else (f"a problem of the family, dtype and flags of {problem}", answer)

    return check


def _are_weighted(answer: Any) -> bool:
    """Return whether a value is a list of (weight, problem) pairs with weights of at least 0 that sum to 1."""

    def is_right(pair: Any) -> bool:
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Problem)
        return is_pair and isinstance(pair[0], Real) and bool(pair[0] >= 0)  # type: ignore[operator]

    if not isinstance(answer, (tuple, list)) or not answer or not all(map(is_right, answer)):
        return False
    return abs(sum(float(weight) for weight, _ in answer) - 1) <= _WEIGHTS_OFF


def _cases(family: Any, answer: Any, given: _Given) -> tuple[str, Any] | None:
    """Check that `cases` returned cases of the family: None if so, else (what it must be, the wrong part)."""
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        return "a list of Cases", answer
    odd = [case for case in answer if not isinstance(case, Case) or case.problem.family != family.name]
    return ("Cases whose problems are of this family", odd[0]) if odd else None


def _is_count(answer: Any) -> bool:
    """Return whether a value is a finite number >= 0."""
    return isinstance(answer, Real) and not isinstance(answer, bool) and bool(0 <= answer < math.inf)  # type: ignore[operator]


def _is_tensor(answer: Any) -> bool:
    """Return whether a value is a torch tensor; True if torch was not imported."""
    torch = sys.modules.get("torch")
    return torch is None or isinstance(answer, torch.Tensor)


def _for_each(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a predicate that applies `is_right` to a value, or to each item if the value is a tuple of several."""
    return lambda answer: all(map(is_right, answer)) if isinstance(answer, tuple) and answer else is_right(answer)


def _are_configs(answer: Any) -> bool:
    """Return whether a value is a tuple or list of configs."""
    return isinstance(answer, (tuple, list)) and all(isinstance(config, KernelConfig) for config in answer)


_anything = _must_be("anything", lambda answer: True)
_number = _must_be("a finite number >= 0", _is_count)
_hashable = _must_be("a hashable value", _is_value)
#: The methods of `Family` and `Measurable` -> the checks of their return values.
CHECKS: dict[str, _Check] = {
    "space": _space,
    "supports": _must_be("None or a non-empty reason", lambda a: a is None or (isinstance(a, str) and a != "")),
    "numerics": _hashable,
    "supports_by": _hashable,
    "features": _features,
    "feature_groups": _groups,
    "problem_from_call": _must_be("a Problem", lambda answer: isinstance(answer, Problem)),
    "at_call_time": _stands_for(0),
    "plausible": _must_be("pairs (weight, Problem) whose weights sum to 1", _are_weighted),
    "estimate_us": _estimates,
    "cases": _cases,
    "flops": _number,
    "bytes": _number,
    "inputs": _anything,
    "reset": _anything,
    "launch": _anything,  # the result is checked only where it is compared
    "reference": _must_be("a tensor or a tuple of tensors", _for_each(_is_tensor)),
    "tolerance": _must_be("a finite number >= 0 or a tuple of these", _for_each(_is_count)),
    "compile": _anything,
    "source_hash": _must_be(
        "a non-empty string", lambda a: isinstance(a, str) and a.isprintable() and 0 < len(a) <= LONGEST_WORD
    ),
    "usual": _must_be("a tuple of KernelConfigs", _are_configs),
    "check_problem": _stands_for(1),
    "binary_key": _hashable,
    "default": _must_be("a KernelConfig", lambda answer: isinstance(answer, KernelConfig)),
    "same_bits_config": _must_be("a KernelConfig", lambda answer: isinstance(answer, KernelConfig)),
}
#: Methods whose list arguments are passed as tuples.
_TAKES_LISTS = ("features", "feature_groups", "estimate_us")

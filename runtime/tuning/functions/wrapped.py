"""`WrappedFunction`: an object in the place of a function, that is a function in every way that one notices."""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import CodeType, ModuleType
from typing import Any, cast
from weakref import WeakKeyDictionary

from ....datasets import ForetuneError
from ....datasets.errors import check_words, shown
from ...arguments import warn_once
from ...launching.source_hash import captured_by, digest_of, hash_of_kernel, source_texts
from .config_cache import ConfigCache
from .plain_values import (
    MOST_DECORATORS,
    Reader,
    is_tensor,
    kernel_in,
    named_in_module,
    plain,
    text_of,
    type_name,
)

#: What a call may say to the tuner, which the function itself never sees.
CALL_OPTIONS = ("autotune", "autotune_verbose", "autotune_pg")
#: So many functions are followed to what they call in turn; of others, their own source counts.
_MOST_FUNCTIONS = 200


class WrappedFunction:
    """Stands for a function: as a method, in copies (a function's copy is itself), and pickled by its name.

    Raises:
        ForetuneError: It cannot be called, or does its work after it returns, as coroutines and generators do.
    """

    cache: ConfigCache

    def __init__(self, function: Callable[..., Any]) -> None:
        _check_function(function)
        functools.update_wrapper(cast(Any, self), function)
        self.function, self._token = function, secrets.token_hex(8)
        self.name = f"{getattr(function, '__module__', None) or type(function).__module__}.{_qualname(function)}"

    @cached_property
    def _digest(self) -> str:
        """A text that differs from those of other functions of this name; made in the first call, when all that the
        function calls is defined. Where it holds what another process cannot tell apart, nothing goes to the disk."""
        digest, vague = identity_of(self.function)
        if vague is None:
            return digest
        if self.cache.path is not None:
            warn_once(
                f"{self.name} holds {vague}, which nothing tells from others of its type in the next process",
                ": what is found out about the function is remembered in this process alone",
            )
            self.cache = ConfigCache()
        return f"{digest}-{self._token}"  # the cache may be one that somebody shares among functions

    @cached_property
    def _code(self) -> str:
        """Return a digest of the code alone, the same on all ranks of a job, which may hold other values."""
        return digest_of(_Identity(with_values=False).add(self.function).texts)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __copy__(self) -> WrappedFunction:
        return self

    def __deepcopy__(self, memo: Any) -> WrappedFunction:
        return self

    def __reduce__(self) -> str:
        return _qualname(self.function)  # as a function: its name, in its module

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}>"


class BoundFunction:
    """A method: the function with its first argument."""

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def tune(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.tune(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundFunction) and (
            (self.__func__, id(self.__self__)) == (other.__func__, id(other.__self__))
        )

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that is being made, and has nothing yet
            raise AttributeError(name)
        return getattr(self.__func__, name)


class CallKey:
    """Computes a call's key: what `key` returns for its arguments, or the values of the arguments that `key` names, or
    of all arguments, with defaults filled in. `plain` makes it JSON, so nothing need be hashable."""

    def __init__(self, function: Callable[..., Any], key: Any) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (ValueError, TypeError):  # a builtin
            self._signature = None
        self._fills_in = isinstance(function, WrappedFunction)  # arguments that its signature has, and a call has not
        self._key: Callable[..., Any] | None = key if callable(key) else None
        self._names = () if key is None or callable(key) else check_words("key", key)
        parameters = {} if self._signature is None else self._signature.parameters
        takes_any = self._signature is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if not takes_any and (unknown := [name for name in self._names if name not in parameters]):
            raise ForetuneError(f"key names {unknown[0]!r}, but the parameters are {', '.join(parameters) or 'none'}")
        if taken := [name for name in CALL_OPTIONS if name in parameters]:
            raise ForetuneError(f"the function has a parameter {taken[0]!r}, which a call says to the tuner")

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, defaults filled in. Raises `TypeError`, as the function would, for arguments that
        it does not take; `knobs` fill what the tuner sets."""
        if self._signature is None:
            return {f"{position}": value for position, value in enumerate(args)} | dict(kwargs)
        given = self._signature.bind_partial(*args, **kwargs).arguments
        missing = {name: value for name, value in knobs.items() if name not in given and name not in kwargs}
        if not self._fills_in:
            self._signature.bind(*args, **kwargs, **missing)
        bound = self._signature.bind_partial(*args, **kwargs)
        bound.apply_defaults()
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif name in given or name not in knobs:
                named[name] = value
        return named

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], named: Mapping[str, Any]) -> Any:
        """The key of a call, as JSON. Raises what `key` raises, and `ForetuneError` where an argument is missing."""
        if self._key is not None:
            return plain(self._key(*args, **kwargs), type_name)
        if missing := [name for name in self._names if name not in named]:
            raise ForetuneError(f"key names {missing[0]!r}, but the call has {', '.join(named) or 'no arguments'}")
        return plain({name: named[name] for name in self._names or named}, type_name)


def identity_of(function: Callable[..., Any]) -> tuple[str, str | None]:
    """Return a digest of all that a function does, and what the digest does not cover.

    The digest covers source or code (comments do not count), the values that the function captured, the arguments of a
    `functools.partial`, the state of an object that is called, or whose method is, and the functions of the same
    package and Triton kernels that are called by name, directly or not. Captured tensors count as in a key.

    Returns:
        The digest, the same in every process; and the type of a value that the function holds of which only the type
        is known, such as a model. None where there is no such value.
    """
    identity = _Identity().add(function)
    return digest_of(identity.texts), next(iter(identity.vague), None)


class _Identity:
    """Functions as texts that refer to each other by number and, with `with_values`, the values that they hold."""

    def __init__(self, with_values: bool = True) -> None:
        self._with_values = with_values
        self.texts: list[str] = []
        self.vague: list[str] = []  # types
        self._places: dict[int, int] = {}  # by the id of a function

    def add(self, function: Any) -> _Identity:
        """Add what is called, whatever it is; return this identity."""
        if isinstance(function, functools.partial):
            self.add(function.func)
            self._hold("arguments", [function.args, function.keywords])
        elif inspect.ismethod(function):
            self.add(function.__func__)
            self._hold_state(function.__self__)
        elif inspect.isfunction(function):
            self._function(function)
        elif hasattr(function, "__wrapped__"):
            self.add(function.__wrapped__)
        elif inspect.isroutine(function):
            self.texts.append("")  # in C: its name is known
        else:
            self.add(type(function).__call__)
            self._hold_state(function)
        return self

    def _function(self, function: Any) -> int:
        if (known := self._places.get(id(function))) is not None:
            return known
        place = self._places[id(function)] = len(self._places)
        self.texts += source_texts(function)
        if place > _MOST_FUNCTIONS:
            return place
        for name, value in sorted(captured_by(function).items()):
            self._hold(name, value, function)
        if "<locals>" in function.__qualname__ and (function.__defaults__ or function.__kwdefaults__):
            self._hold("defaults", [function.__defaults__, function.__kwdefaults__])
        for name, value in _called_by(function):
            self._hold(name, value, function)
        return place

    def _hold(self, name: str, value: Any, holder: Any = None) -> None:
        if (kernel := kernel_in(value)) is not None:
            described = f"kernel {hash_of_kernel(kernel)}"
        elif holder is not None and (own := _own_function(value, holder)) is not None:
            described = f"function {self._function(own)}"
        elif not self._with_values:
            return
        else:
            described, vague = _described(value) if holder is None else _first_described(holder, name, value)
            if holder is None or not _is_named(holder):
                self.vague += vague
        self.texts.append(f"{name} = {described}")

    def _hold_state(self, instance: Any) -> None:
        is_object = hasattr(instance, "__dict__") and not isinstance(instance, (type, ModuleType))
        self._hold(type_name(instance), vars(instance) if is_object else instance)


def _is_named(function: Any) -> bool:
    """Whether a function is what its module has under its name, perhaps below a decorator.

    Then the name and the source say which one it is, and what a decorator holds is the same in every process.
    """
    found = named_in_module(function)
    for _ in range(MOST_DECORATORS):
        if found is None or found is function:
            break
        found = getattr(found, "__wrapped__", None)
    return found is function


def _described(value: Any) -> tuple[str, list[str]]:
    """Return what stands for a value, and the types of what may be another one all the same."""
    reader = Reader(type_name)
    try:
        text = text_of(reader.object(value))
    except Exception:  # noqa: BLE001 - mocks and lazy objects answer anything, or raise anything
        return type_name(value), [type_name(value)]
    return text, [type_name(one) for one in reader.vague if not is_tensor(one)]


def _first_described(holder: Any, name: str, value: Any) -> tuple[str, list[str]]:
    """What stood for a value when it was first asked for: a list may be one that the function itself appends to."""
    first = _held.setdefault(holder, {})
    if name not in first:
        first[name] = _described(value)
    return first[name]


#: By function and name.
_held: WeakKeyDictionary[Any, dict[str, tuple[str, list[str]]]] = WeakKeyDictionary()


def _called_by(function: Any) -> Iterator[tuple[str, Any]]:
    """The functions of its package, and the kernels, that a function names."""
    names = sorted(_names_in(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            if _package(value.__name__) == _package(function.__module__):
                parts = ((f"{name}.{part}", vars(value).get(part)) for part in names)
                yield from (one for one in parts if _is_followed(one[1], function))
        elif _is_followed(value, function):
            yield name, value


def _is_followed(value: Any, holder: Any) -> bool:
    return _own_function(value, holder) is not None or kernel_in(value) is not None


def _own_function(value: Any, holder: Any) -> Any:
    """The Python function that a value is, or stands for, if it is of the package of the function that holds it."""
    if isinstance(value, (ModuleType, type)) or not callable(value):
        return None
    try:
        found = value if inspect.isfunction(value) else inspect.unwrap(value)
    except ValueError:  # wrappers in a circle
        return None
    is_own = inspect.isfunction(found) and _package(found.__module__) == _package(holder.__module__)
    return found if is_own else None


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _names_in(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names_in(one) for one in code.co_consts if isinstance(one, CodeType)))


def _qualname(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _check_function(function: Any) -> None:
    if isinstance(function, (classmethod, staticmethod)):
        raise ForetuneError(f"put the tuner below @{type(function).__name__}, next to the function")
    if not callable(function) or isinstance(function, type):
        raise ForetuneError(f"what is tuned must be a function but is {shown(function)}")
    inner = function if inspect.isroutine(function) or isinstance(function, functools.partial) else function.__call__
    for test, what in (
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isasyncgenfunction, "an asynchronous generator"),
        (inspect.isgeneratorfunction, "a generator"),
    ):
        if test(inner):
            raise ForetuneError(
                f"{_qualname(function)} returns {what}, whose work is done after the call: tune the function that it "
                "calls for the work"
            )

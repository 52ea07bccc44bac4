"""`WrappedFunction`: an object in the place of a function, that is a function in every way that one notices."""

from __future__ import annotations

import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from tokenize import TokenError
from typing import Any, cast

from ....datasets import ForetuneError
from ....datasets.errors import check_words, shown
from ...launching.source_hash import digest_of, structure
from .plain_values import plain, text_of, type_name

#: What a call may say to the tuner, which the function itself never sees.
CALL_OPTIONS = ("autotune", "autotune_verbose", "autotune_pg")


class WrappedFunction:
    """Stands for a function: as a method, in copies (a function's copy is itself), and pickled by its name.

    Raises `ForetuneError` for what cannot be called, and for what does its work later than it returns: coroutines and
    generators.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        _check_function(function)
        functools.update_wrapper(cast(Any, self), function)
        self.function = function
        self.name = f"{getattr(function, '__module__', None) or type(function).__module__}.{_qualname(function)}"

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
    """What a call's key is: what `key` makes of its arguments; or the values of the arguments that `key` names; or of
    all, with defaults filled in. What `plain` makes of that counts, so nothing need be hashable."""

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


def source_digest(function: Callable[..., Any]) -> str:
    """What a function does, as a short text: another source is another function. Comments do not count."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, TokenError):  # made in a shell, or in C; or its file is another by now
        code = getattr(function, "__code__", None)
        text = "" if code is None else f"{code.co_code.hex()} {text_of(plain(code.co_consts, type_name))}"
    with contextlib.suppress(SyntaxError):  # a lambda in the middle of something
        text = structure(text)
    return digest_of([text])


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

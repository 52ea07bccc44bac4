"""`WrappedFunction`: an object that replaces a function and behaves like it; and the identity of a function.

`CallKey` computes the key of a call, `identity_of` the digest of everything that a function's behaviour depends on.
"""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from ....datasets import ForetuneError
from ....datasets.errors import check_flag, check_words, shown
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

if TYPE_CHECKING:
    from typing_extensions import Self

#: The parameters and the result of a wrapped function, for type checkers.
P = ParamSpec("P")
R = TypeVar("R")
#: The object that a method is bound to, and the parameters of the method without it.
Instance = TypeVar("Instance")
Q = ParamSpec("Q")
#: Keyword arguments of a call that the tuner consumes; the function never receives them.
CALL_OPTIONS = ("autotune", "autotune_verbose", "autotune_pg")
#: `_Identity` follows the calls of this many functions; of all further ones only the source counts. Limits the time.
_MOST_FUNCTIONS = 200


class CallWithOptions(Generic[P, R]):
    """A callable that takes the parameters of a function, and options such as `autotune` (`CALL_OPTIONS`)."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(
        self, *args: Any, autotune: bool, autotune_verbose: bool = ..., autotune_pg: Any = ..., **kwargs: Any
    ) -> R: ...

    @overload
    def __call__(self, *args: Any, autotune_verbose: bool, autotune_pg: Any = ..., **kwargs: Any) -> R: ...

    @overload
    def __call__(self, *args: Any, autotune_pg: Any, **kwargs: Any) -> R: ...

    def __call__(  # type: ignore[misc]  # P might contain the options, but `CallKey` refuses such functions
        self, *args: Any, autotune: bool = True, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> Any:
        """Call the function with the fastest config; the first call with a new key tunes it.

        A contextual function tunes all kernels in it, unless an outer contextual function is being tuned, or a CUDA
        graph is captured.

        Args:
            args: Arguments of the function.
            autotune: False measures nothing: a new key runs the best known config, or the first one.
            autotune_verbose: Print the progress of tuning to stderr.
            autotune_pg: A torch process group whose ranks tune together.
            kwargs: Keyword arguments of the function; they may include knobs.

        Returns:
            The function's result.

        Raises:
            ForetuneError: An option is not valid, or the result's work is done after the call (futures, generators).
            TuningFailed: No config works, and they failed with exceptions of different types; the first one is the
                cause. If all exceptions have one type, the first exception itself is raised. The next call tries again.
        """
        return self._call(args, kwargs, check_flag("autotune", autotune), autotune_verbose, autotune_pg)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tunes: bool, verbose: bool, group: Any) -> Any:
        raise NotImplementedError


class WrappedFunction(CallWithOptions[P, R]):
    """An object that replaces a function, also as a method; copying returns itself, and pickling stores its name.

    Raises:
        ForetuneError: The object is not a function, or its work is done after it returns (coroutines, generators).
    """

    cache: ConfigCache

    def __init__(self, function: Callable[..., Any]) -> None:
        _check_function(function)
        functools.update_wrapper(cast(Any, self), function)
        self.function, self._token = function, secrets.token_hex(8)
        self.name = f"{getattr(function, '__module__', None) or type(function).__module__}.{_qualname(function)}"

    @cached_property
    def digest(self) -> str:
        """A text that distinguishes this function from others of the same name.

        It is computed in the first call, when all functions that this one calls are defined. If the function holds an
        object that another process cannot identify, nothing is written to disk.
        """
        digest, vague = identity_of(self.function)
        if vague is None:
            return digest
        if self.cache.path is not None:
            warn_once(
                f"{self.name} holds an object of type {vague}, which another process cannot tell from others",
                ": results of this function are kept in this process only",
            )
            self.cache = ConfigCache()
        return f"{digest}-{self._token}"  # the user may share one cache between functions

    @cached_property
    def _code(self) -> str:
        """A digest of the code without captured values, which may differ between the ranks of a job."""
        return digest_of(_Identity(with_values=False).add(self.function).texts)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(
        self: WrappedFunction[Concatenate[Instance, Q], R], instance: Instance, owner: Any = None
    ) -> BoundFunction[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the function itself for the class, and the bound method for an instance."""
        return self if instance is None else BoundFunction(self, instance)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> str:
        return _qualname(self.function)  # as for a plain function: its name in its module

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}>"


class BoundFunction(CallWithOptions[P, R]):
    """A bound method: a wrapped function and the object that is its first argument."""

    def __init__(self, function: Any, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], tunes: bool, verbose: bool, group: Any) -> Any:
        return self.__func__._call((self.__self__, *args), kwargs, tunes, verbose, group)

    def tune(self, *args: Any, **kwargs: Any) -> Any:
        """Tune the method for a call with these arguments, and return the measurements; see `TunedFunction.tune`."""
        return self.__func__.tune(self.__self__, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundFunction) and (
            (self.__func__, id(self.__self__)) == (other.__func__, id(other.__self__))
        )

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked while a copy is created, before it has attributes
            raise AttributeError(name)
        return getattr(self.__func__, name)


class CallKey:
    """Computes the key of a call, as JSON (see `plain`), so arguments need not be hashable.

    Args:
        function: The function that is called.
        key: A function of the call's arguments; or the names of the arguments that form the key; or None: all
            arguments, with defaults filled in.

    Raises:
        ForetuneError: `key` names an unknown parameter, or the function has a parameter in `CALL_OPTIONS`.
    """

    def __init__(self, function: Callable[..., Any], key: Any) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function)
        except (ValueError, TypeError):  # a builtin
            self._signature = None
        self._fills_in = isinstance(function, WrappedFunction)  # it fills in knobs: a call may lack required arguments
        self._key: Callable[..., Any] | None = key if callable(key) else None
        self._names = () if key is None or callable(key) else check_words("key", key)
        parameters = {} if self._signature is None else self._signature.parameters
        takes_any = self._signature is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if not takes_any and (unknown := [name for name in self._names if name not in parameters]):
            raise ForetuneError(f"key names {unknown[0]!r}, but the parameters are {', '.join(parameters) or 'none'}")
        if taken := [name for name in CALL_OPTIONS if name in parameters]:
            raise ForetuneError(f"the function must not have a parameter {taken[0]!r}: calls pass it to the tuner")

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name, with defaults filled in for all but the knobs.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            knobs: Values for the parameters that the tuner sets, used only to check the call.

        Raises:
            TypeError: The function does not accept these arguments.
        """
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
        """Return the key of a call as JSON: what `key` returns, or else the arguments in `named` that form the key.

        Raises what `key` raises, and `ForetuneError` if an argument is missing.
        """
        if self._key is not None:
            return plain(self._key(*args, **kwargs), type_name)
        if missing := [name for name in self._names if name not in named]:
            raise ForetuneError(f"key names {missing[0]!r}, but the call has {', '.join(named) or 'no arguments'}")
        return plain({name: named[name] for name in self._names or named}, type_name)


def identity_of(function: Callable[..., Any]) -> tuple[str, str | None]:
    """Return a digest of everything that a function's behaviour depends on, and the type of a value it cannot cover.

    The digest covers source or code without comments; captured values; the arguments of a `functools.partial`; the
    state of a callable object or of a method's object; and the functions of the same package and Triton kernels that
    are called by name, directly or indirectly. Captured tensors count by shape and dtype, as in a key.

    Returns:
        The digest, equal in every process; and the type of a captured value that is known only by its type, such as a
        model, or None if there is no such value.
    """
    identity = _Identity().add(function)
    return digest_of(identity.texts), next(iter(identity.vague), None)


class _Identity:
    """The texts that identify a function: sources, references between functions and, optionally, captured values."""

    def __init__(self, with_values: bool = True) -> None:
        self._with_values = with_values
        self.texts: list[str] = []
        self.vague: list[str] = []  # types of values that only the type identifies
        self._places: dict[int, int] = {}  # number of a function, by its id

    def add(self, function: Any) -> _Identity:
        """Add the texts that identify a callable (its code, closure, bound arguments), and return self."""
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
            self.texts.append("")  # written in C: its name identifies it
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
    """Return whether a function's module has the function, perhaps inside decorators, under its qualified name.

    If so, its name and source identify it, and the values that its decorators captured are the same in every process.
    """
    found = named_in_module(function)
    for _ in range(MOST_DECORATORS):
        if found is None or found is function:
            break
        found = getattr(found, "__wrapped__", None)
    return found is function


def _described(value: Any) -> tuple[str, list[str]]:
    """Return the text of a value, and the types of its parts that the text does not identify."""
    reader = Reader(type_name)
    try:
        text = text_of(reader.object(value))
    except Exception:  # noqa: BLE001 - mocks and lazy objects answer anything, or raise anything
        return type_name(value), [type_name(value)]
    return text, [type_name(one) for one in reader.vague if not is_tensor(one)]


def _first_described(holder: Any, name: str, value: Any) -> tuple[str, list[str]]:
    """Return `_described` of a value that the function `holder` captured, as it was when it was first read.

    Later contents do not count, because the function itself may append to a list that it captured.
    """
    first = _held.setdefault(holder, {})
    if name not in first:
        first[name] = _described(value)
    return first[name]


#: What `_described` returned first, by function and name of the value.
_held: WeakKeyDictionary[Any, dict[str, tuple[str, list[str]]]] = WeakKeyDictionary()


def _called_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of the same package and the kernels that a function refers to by name."""
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
    """Return the Python function in a value (unwrapped) if it belongs to the holder's package, else None."""
    if isinstance(value, (ModuleType, type)) or not callable(value):
        return None
    try:
        found = value if inspect.isfunction(value) else inspect.unwrap(value)
    except ValueError:  # wrappers that wrap each other
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
        raise ForetuneError(f"the tuned object must be a function but is {shown(function)}")
    inner = function if inspect.isroutine(function) or isinstance(function, functools.partial) else function.__call__
    for test, what in (
        (inspect.iscoroutinefunction, "a coroutine"),
        (inspect.isasyncgenfunction, "an asynchronous generator"),
        (inspect.isgeneratorfunction, "a generator"),
    ):
        if test(inner):
            raise ForetuneError(
                f"{_qualname(function)} returns {what}, whose work is done after the call: tune the function that does "
                "the work"
            )

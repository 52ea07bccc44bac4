"""`SideEffects` undoes a function's changes between repeated calls; `Snapshot` restores the contents of arguments."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import functools
import io
import random
import re
import sys
import tempfile
import types
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import check_words, shown

#: Containers whose items are kept and searched.
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
#: Methods that identify types whose objects are consumed by reading: files, sockets, pipes and queues.
_USED_UP = (("read", "readline"), ("recv", "close"), ("get", "put", "empty"))
#: Types of values that a function cannot change, or that are not data: they are not restored.
_UNCHANGING = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), type),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(enum.Enum, PurePath, uuid.UUID, re.Pattern, weakref.ref, functools.partial),
)
#: Packages and modules whose objects, except containers and arrays, are not restored: scalars, dtypes, devices,
#: streams, process groups, kernels with their binaries, locks, loggers.
_UNCHANGING_PACKAGES = ("_thread", "logging", "triton", __name__.partition(".")[0])
_UNCHANGING_MODULES = ("numpy", "numpy.dtypes", "pandas", "torch", "torch._C", "torch.cuda.streams")
#: A function that restores one value, and the value's parts with their paths, which are kept next.
_Kept = tuple[Callable[[], object], Iterable[tuple[str, Any]]]


@dataclass(frozen=True)
class SideEffects:
    """Undoes the changes that runs of a function make to its arguments; this is not timed.

    Attributes:
        reset: Called with the call's arguments before every run.
        restore: Names of arguments whose contents are kept when tuning begins and put back before every run (see
            `Snapshot`), including the last run, whose result the caller receives.

    Raises:
        ForetuneError: `reset` is not a function, or `restore` not a sequence of names.
    """

    reset: Callable[..., Any] | None = None
    restore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.reset is not None and not callable(self.reset):
            raise ForetuneError(f"reset must be a function of the call's arguments but is {shown(self.reset)}")
        object.__setattr__(self, "restore", check_words("restore", self.restore))

    def undo(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], named: Mapping[str, Any]
    ) -> Callable[[], None] | None:
        """Take a snapshot of a call's `restore` arguments; return a function that undoes a run.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            named: All arguments by name.

        Returns:
            The function, or None if there is neither `reset` nor `restore`.

        Raises:
            ForetuneError: An argument does not exist or cannot be restored.
        """
        if self.reset is None and not self.restore:
            return None
        if missing := [name for name in self.restore if name not in named]:
            known = ", ".join(named) or "none"
            raise ForetuneError(f"restore names {shown(missing[0])}, but the call's arguments are {known}")
        snapshot = Snapshot({name: named[name] for name in self.restore})

        def undo() -> None:
            snapshot.put_back()
            if self.reset is not None:
                self.reset(*args, **kwargs)

        return undo

    def used_up(self, named: Mapping[str, Any]) -> str | None:
        """Return a text that names an argument in `named` that the first run would consume, such as an iterator.

        Items of containers count, too. Return None if there is no such argument. With `reset`, only iterators of Python
        itself count, since `reset` may rewind all others.
        """
        left: list[tuple[str, Any]] = list(named.items())
        seen: set[int] = set()
        while left:
            name, value = left.pop()
            of_type = type(value)
            if _is_used_up(of_type) and (self.reset is None or of_type.__module__ in ("builtins", "itertools")):
                return f"argument {name} has a {of_type.__qualname__}, which the first run uses up"
            if isinstance(value, _CONTAINERS) and id(value) not in seen:
                seen.add(id(value))
                items = value.values() if isinstance(value, (dict, types.MappingProxyType)) else value
                kinds = {one for one in set(map(type, items)) if issubclass(one, _CONTAINERS) or _is_used_up(one)}
                left += [(name, one) for one in items if type(one) in kinds]
        return None


def _is_used_up(kind: type[Any]) -> bool:
    if issubclass(kind, (Iterator, AsyncIterator, Coroutine, io.IOBase, tempfile._TemporaryFileWrapper)):
        return True
    return any(all(callable(getattr(kind, name, None)) for name in names) for names in _USED_UP)


class Snapshot:
    """A deep copy of the contents of arguments, which can be restored in place.

    It covers tensors with their gradients, arrays, data frames, containers, random generators, objects with attributes,
    and everything in these. The same tensors, containers and objects get their earlier contents, so that references to
    them and views of them see these too. Of a torch module, it covers parameters, buffers, and attributes that are
    data; other objects in it, such as hooks, are left alone.

    Args:
        arguments: Arguments by name.

    Raises:
        ForetuneError: A value cannot be restored; the message names the part and its type.

    >>> layers = [[1.0], {"weights": bytearray(b"ab")}]
    >>> snapshot = Snapshot({"layers": layers})
    >>> layers[0][0] = 2.0; layers[1]["weights"][:] = b""; layers.append(3)
    >>> snapshot.put_back(); layers
    [[1.0], {'weights': bytearray(b'ab')}]
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._undone: list[Callable[[], object]] = []
        self._seen: dict[int, Any] = {}  # references, so that ids are not reused
        for name, value in arguments.items():
            if value is not None and _is_unchanging(value):
                raise _refusal(name, value)
            self._keep(name, value)

    def put_back(self) -> None:
        """Undo all changes since the snapshot was taken."""
        for undo in self._undone:
            undo()

    def _keep(self, name: str, value: Any) -> None:
        left = [(name, value, False)]
        while left:
            path, one, in_module = left.pop()
            if id(one) in self._seen or _is_unchanging(one):
                continue
            self._seen[id(one)] = one
            if (kept := self._kept(path, one, in_module)) is not None:
                undo, parts = kept
                self._undone.append(undo)
                is_module = in_module or _is_module(one)
                left += [(inner, part, is_module) for inner, part in parts]

    def _kept(self, path: str, value: Any, in_module: bool) -> _Kept | None:
        try:
            for is_such, keep in _KEEPERS:
                if is_such(value):
                    kept = keep(path, value)
                    kept[0]()  # raises now if the value cannot be written
                    return kept
            if in_module and not _is_module(value):
                return None
            if (attributes := _Attributes.of(value)) is not None:
                return attributes.put_back, attributes.parts(path)
        except Exception as error:
            raise _refusal(path, value, f" ({type(error).__name__}: {error})") from error
        raise _refusal(path, value)


def _refusal(path: str, value: Any, why: str = "") -> ForetuneError:
    text = " ".join(shown(value).split())  # on one line
    return ForetuneError(
        f"restore cannot put back {path}, which is {text} of type {type(value).__qualname__}{why}: use reset"
    )


def _is_unchanging(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, _UNCHANGING) or kind is object:
        return True
    if kind.__module__.partition(".")[0] in _UNCHANGING_PACKAGES:
        return True
    if kind.__module__.startswith(_UNCHANGING_MODULES):
        is_index = (pandas := sys.modules.get("pandas")) is not None and isinstance(value, pandas.Index)
        is_own = kind.__module__ in _UNCHANGING_MODULES or kind.__module__.startswith(("torch._C.", "pandas._"))
        return is_index or (is_own and not any(is_such(value) for is_such, _ in _KEEPERS))
    return False


def _is_module(value: Any) -> bool:
    return (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.nn.Module)


def _is_tensor(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("copy_", "clone", "detach"))


def _keep_tensor(path: str, value: Any) -> _Kept:
    own, kept = value.detach(), value.detach().clone()  # `own` keeps the memory, even if `value.data` is replaced
    has_grad = getattr(value, "is_leaf", False)
    grad = value.grad if has_grad else None
    memory = _memory_of(value)
    writable = _once_each(own) if memory is not None else None

    def put_back() -> None:
        if has_grad and value.grad is not grad:
            value.grad = grad
        if writable is None:  # sparse: a detached tensor would not share the new contents
            with sys.modules["torch"].no_grad():
                value.copy_(kept)
            return
        if _memory_of(value) != memory:
            value.data = own
        writable.copy_(_once_each(kept, own))

    return put_back, [] if grad is None else [(f"{path}.grad", grad)]


def _memory_of(tensor: Any) -> tuple[Any, ...] | None:
    """Return a tensor's shape, strides and address; None for sparse and similar layouts."""
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided" or not hasattr(tensor, "stride"):
        return None
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.data_ptr()


def _once_each(tensor: Any, like: Any = None) -> Any:
    """Return a view of an expanded tensor without its repeated elements, which `copy_` cannot write to.

    Dimensions of stride 0 are narrowed to size 1. If `like` is given, its strides decide instead of the tensor's.
    """
    for dim, (size, step) in enumerate(zip(tensor.shape, (tensor if like is None else like).stride(), strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_frame(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "_update_inplace")


def _keep_frame(path: str, value: Any) -> _Kept:
    kept, attrs = value.copy(), dict(value.attrs)

    def put_back() -> None:
        value._update_inplace(kept.copy())  # pandas has no public method for this
        value.attrs = dict(attrs)

    columns = [value] if value.ndim == 1 else [value.iloc[:, at] for at in range(value.shape[1])]
    return put_back, [(path, column.tolist()) for column in columns if column.dtype == object]


def _is_array(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("__array__", "__setitem__", "copy")) and not isinstance(value, dict)


def _keep_array(path: str, value: Any) -> _Kept:
    kept = value.copy()
    parts = [(path, value.tolist())] if getattr(value.dtype, "hasobject", False) else []
    if not getattr(getattr(value, "flags", None), "writeable", True):
        return _nothing, parts

    def put_back() -> None:
        if value.shape != kept.shape:
            value.resize(kept.shape, refcheck=False)
        value[...] = kept

    return put_back, parts


def _keep_container(path: str, value: Any) -> _Kept:
    """Copy the references to a container's items and attributes; return a function that restores them, and the parts.

    The parts are the items and attribute values to keep in turn, as (path, value).
    """
    is_mapping = isinstance(value, (dict, types.MappingProxyType))
    # Call methods of the base class: those of a subclass may refuse changes.
    base: Any = next((one for one in (OrderedDict, dict, list, deque, set) if isinstance(value, one)), None)
    kept = list(dict.items(value) if isinstance(value, dict) else value.items() if is_mapping else value)
    attributes = _Attributes(value)

    def put_back() -> None:
        if base is not None:
            base.clear(value)
            if is_mapping:
                for name, one in kept:
                    base.__setitem__(value, name, one)
            else:
                (base.update if base is set else base.extend)(value, kept)
        attributes.put_back()

    if is_mapping:
        parts = [(f"{path}[{shown(name)}]", one) for name, one in kept]
    elif isinstance(value, (set, frozenset)):
        parts = [(path, one) for one in kept]
    else:  # only items that can change: a list may have millions of numbers
        parts = [(f"{path}[{at}]", one) for at, one in enumerate(kept) if not _is_unchanging(one)]
    return put_back, [*parts, *attributes.parts(path)]


def _keep_buffer(path: str, value: Any) -> _Kept:
    kept = value[:]
    return lambda: value.__setitem__(slice(None), kept), ()


def _keep_view(path: str, value: memoryview) -> _Kept:
    if value.readonly:
        return _nothing, ()
    octets = value.cast("B")
    kept = bytes(octets)
    return lambda: octets.__setitem__(slice(None), kept), ()


def _keep_random(path: str, value: Any) -> _Kept:
    if hasattr(value, "bit_generator"):
        state = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", state), ()
    prefix = "get" if isinstance(value, random.Random) else "get_"
    state = getattr(value, f"{prefix}state")()
    return lambda: getattr(value, f"s{prefix[1:]}state")(state), ()


def _is_random(value: Any) -> bool:
    known = ("numpy.random", "torch"), ("Generator", "RandomState")
    is_known = type(value).__module__.startswith(known[0]) and type(value).__name__ in known[1]
    return isinstance(value, random.Random) or is_known


def _nothing() -> None:
    """Restore a value that cannot change: do nothing."""


class _Attributes:
    """A copy of an object's attributes, in `__dict__` and slots; restoring bypasses the class, which may be frozen."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._slots = list(_slots_of(type(value)))
        self._in_slots = {slot.__name__: slot.__get__(value) for slot in self._slots if _is_set(slot, value)}
        self._dict: dict[str, Any] = getattr(value, "__dict__", {})
        self._in_dict = dict(self._dict)

    @classmethod
    def of(cls, value: Any) -> _Attributes | None:
        """Return an object's attributes; None if it has none, or has state in C fields, which are not attributes."""
        of_type, pointer = type(value), tuple.__itemsize__
        parts = len(list(_slots_of(of_type))) + (of_type.__dictoffset__ > 0) + (of_type.__weakrefoffset__ > 0)
        is_visible = of_type.__itemsize__ == 0 and of_type.__basicsize__ <= object.__basicsize__ + pointer * parts
        has_some = hasattr(value, "__dict__") or any(_slots_of(of_type))
        return cls(value) if is_visible and has_some else None

    def parts(self, path: str) -> list[tuple[str, Any]]:
        """Return the attributes' values, with their paths below `path`."""
        return [(f"{path}.{name}", one) for name, one in (self._in_dict | self._in_slots).items()]

    def put_back(self) -> None:
        """Restore the attributes; delete those that are new."""
        for name in [name for name in self._dict if name not in self._in_dict]:
            del self._dict[name]
        self._dict.update(self._in_dict)
        for slot in self._slots:
            if slot.__name__ in self._in_slots:
                slot.__set__(self._value, self._in_slots[slot.__name__])
            elif _is_set(slot, self._value):
                slot.__delete__(self._value)


def _slots_of(kind: type[Any]) -> Iterator[Any]:
    for one in kind.__mro__:
        if "__slots__" in vars(one):
            yield from (value for value in vars(one).values() if isinstance(value, types.MemberDescriptorType))


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


#: How values are recognized, and the function that keeps them; the first match counts.
_KEEPERS: tuple[tuple[Callable[[Any], bool], Callable[[str, Any], _Kept]], ...] = (
    (_is_tensor, _keep_tensor),
    (_is_frame, _keep_frame),
    (_is_array, _keep_array),
    (lambda value: isinstance(value, _CONTAINERS), _keep_container),
    (lambda value: isinstance(value, (bytearray, array.array)), _keep_buffer),
    (lambda value: isinstance(value, memoryview), _keep_view),
    (_is_random, _keep_random),
)

"""`plain`: any Python value as JSON that is the same in every process, so that keys and configs can be told apart, and
found again, by text."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import inspect
import json
import math
import re
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from decimal import Decimal
from enum import Enum
from numbers import Complex, Integral, Rational, Real
from pathlib import PurePath
from types import ModuleType
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import shown
from ...launching.source_hash import captured_by, hash_of_kernel, is_kernel, source_texts

MOST_DECORATORS = 20
#: Deeper than any argument nests; a list that contains itself does not end.
_DEEPEST = 20
#: A key longer than this is kept by its beginning and a digest.
_LONGEST_TEXT = 400
#: Integers of more bits are written in hexadecimal: Python may refuse to write them in decimal.
_MOST_BITS = 2000
#: Bytes beyond this count by a digest.
_MOST_BYTES = 64
#: Texts that could be mistaken for what stands for another value.
_MISTAKABLE = re.compile(r"<.*>|float (inf|-inf|nan)|torch\.\w+", re.DOTALL)
#: Types of torch that have a text.
_TORCH_NAMES = ("device", "layout", "memory_format", "qscheme")
#: The keys of what stands for a tensor, and of what stands for a `triton.Config`: (required, possible).
_MISTAKABLE_KEYS = (
    ({"shape", "dtype"}, {"shape", "dtype", "device", "stride", "strides", "layout"}),
    ({"Config"}, {"Config", "pre_hook"}),
)


def plain(value: Any, unknown: Callable[[Any], Any]) -> Any:
    """Return a value as JSON: distinct values as distinct JSON, the same in every process.

    Numbers, texts, lists and mappings stand for themselves, and a tuple for a list of its items. Tensors and arrays
    stand for shape, dtype, device and, where it is not the usual one, layout: never for what is in them. Classes and
    functions of a module stand for their names, other functions for their code and what they captured. What else has a
    text is written as "<kind text>", and a text that looks so as "<str ...>".

    Args:
        value: The value.
        unknown: Returns what stands for an object of which nothing else is known.

    Raises:
        ForetuneError: For what nests without end.

    >>> import numpy as np
    >>> plain({"x": np.zeros((2, 3), np.float32), "tile": (16, 32), "of": len, "in": None}, unknown=repr)
    {'x': {'shape': [2, 3], 'dtype': 'float32'}, 'tile': [16, 32], 'of': '<function builtins.len>', 'in': None}
    """
    return Reader(unknown).read(value)


class Reader:
    """Reads values as `plain` does. `vague` has those whose stand-in may be that of another value, too."""

    def __init__(self, unknown: Callable[[Any], Any]) -> None:
        self._unknown = unknown
        self.vague: list[Any] = []
        self._depth = 0
        self._open: set[int] = set()  # ids of functions that are being read

    def read(self, value: Any) -> Any:
        """Return a value as JSON. Raises as `plain` does."""
        if self._depth > _DEEPEST:
            raise ForetuneError(f"a value must not nest deeper than {_DEEPEST} but one does: does it contain itself?")
        if value is None or isinstance(value, bool):
            return value
        self._depth += 1
        try:
            for is_such, stand_in in _KINDS:
                if is_such(value):
                    return stand_in(value, self)
            return self._unknown(value)
        finally:
            self._depth -= 1

    def read_all(self, values: Iterable[Any]) -> list[Any]:
        """Return several values as JSON."""
        return [self.read(value) for value in values]

    def object(self, value: Any) -> Any:
        """Return what stands for a value that an object or function holds: an unknown one counts by its type."""
        before, self._unknown = self._unknown, self._held
        try:
            return self.read(value)
        finally:
            self._unknown = before

    def _held(self, value: Any) -> Any:
        made = _reduced(value)
        if isinstance(made, str):  # pickled by its name, as a global
            return f"<global {type(value).__module__}.{made}>"
        if isinstance(made, tuple) and not any(part is not None for part in made[2:]):  # it has no state
            return {"<made>": self.object(list(made[:2]))}
        self.vague.append(value)
        return type_name(value)

    def function(self, value: Any) -> Any:
        """Return what stands for a function: its name in its module, or else its source and what it captured."""

        def texts() -> str:
            held = {"captured": captured_by(value), "defaults": value.__defaults__, "keywords": value.__kwdefaults__}
            lines = [*source_texts(value), *(f"{name} {text_of(self.object(one))}" for name, one in held.items())]
            return f"<function {_name_of(value)} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}>"

        return self._opened(value, texts)

    def wrapping(self, value: Any) -> Any:
        """Return what stands for an object in the place of a function, as of `foretune.tune` or `lru_cache`."""

        def wrapped() -> Any:
            if not _has_base(value, "WrappedFunction"):
                self.vague.append(value)
            return {f"<wrapped {type_name(value)}>": self.object(value.__wrapped__)}

        return self._opened(value, wrapped)

    def _opened(self, function: Any, read: Callable[[], Any]) -> Any:
        """Read a function, unless its name is enough or it is being read."""
        if named_in_module(function) is function or id(function) in self._open:
            return f"<function {_name_of(function)}>"
        self._open.add(id(function))
        try:
            return read()
        finally:
            self._open.discard(id(function))


def text_of(value: Any) -> str:
    """A value that `plain` made, on one line; long ones are shortened, and a digest tells them apart.

    >>> text_of({"b": 1, "a": [True, None]})
    '{"a":[true,null],"b":1}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT - 20]}...{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def type_name(value: Any) -> str:
    """What stands for an object of which nothing else is known.

    >>> type_name(object())
    'builtins.object'
    """
    return _name_of(type(value))


def refuse_config_value(value: Any) -> Any:
    """The `unknown` of configs: the cache must find them again. Raises `ForetuneError`."""
    raise ForetuneError(
        f"a config's value must be a number, a text, a class, a function, a triton.Config, or a list, mapping or "
        f"dataclass of such, but one is {shown(value)}: its name may stand for it, and the function look it up"
    )


def is_config(value: Any) -> bool:
    """Whether this is a `triton.Config`, or looks like one. (Triton need not be installed.)"""
    return isinstance(getattr(value, "kwargs", None), Mapping) and callable(getattr(value, "all_kwargs", None))


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor or an array, or looks like one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def named_in_module(function: Any) -> Any:
    """Return what a function's module has under the function's name; None where there is nothing."""
    found: Any = sys.modules.get(str(function.__module__))
    for name in str(function.__qualname__).split("."):
        found = getattr(found, name, None)
    return found


def kernel_in(value: Any) -> Any:
    """Return the Triton kernel that a value is, under whatever decorators; None for another value."""
    for _ in range(MOST_DECORATORS):
        if value is None or isinstance(value, (ModuleType, type)) or is_kernel(value):
            break
        value = getattr(value, "fn", None)
    return value if is_kernel(value) else None


def _reduced(value: Any) -> Any:
    try:
        return value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - what cannot be pickled may raise anything
        return None


def _has_base(value: Any, *names: str) -> bool:
    """Whether a class of such a name, of a package that need not be installed, is among a value's."""
    return any(base.__name__ in names for base in type(value).__mro__)


def _integer(value: Integral, reader: Reader) -> Any:
    number = int(value)
    return number if number.bit_length() <= _MOST_BITS else f"<int {number:#x}>"


def _real(value: Real, reader: Reader) -> Any:
    number = float(value)
    if not math.isfinite(number):
        return f"float {number}"
    return number if number == value else f"<{type(value).__name__} {value!r}>"  # of more digits than a float has


def _decimal(value: Decimal) -> str:
    """A Decimal as text, the same for equal ones."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        return str(value)
    text = "".join(map(str, digits)).lstrip("0")
    stripped = text.rstrip("0")
    return f"{'-' * sign}{stripped}e{exponent + len(text) - len(stripped)}" if stripped else "0"


def _class(value: type, reader: Reader) -> str:
    if named_in_module(value) is not value:
        reader.vague.append(value)
    return f"<class {_name_of(value)}>"


def _bytes(value: Any) -> str:
    content = bytes(value)
    return content.hex() if len(content) <= _MOST_BYTES else f"{len(content)} {hashlib.sha256(content).hexdigest()}"


def _range(value: range) -> str:
    return " ".join(f"{int(one):#x}" for one in (len(value), *value[:1], *([value.step] if len(value) > 1 else [])))


def _isoformat(value: Any) -> str:
    return str(value.isoformat())  # the value's own: pandas' has nanoseconds


def _tensor(value: Any, reader: Reader) -> Any:
    if not len(value.shape) and type(value).__module__ == "numpy":  # a scalar
        # A date or a duration, which item() makes an integer; or a number of more digits than Python's.
        if value.dtype.kind in "mM":
            return f"<{value.dtype} {value}>"
        item = value.item()
        return f"<{value.dtype} {value!r}>" if hasattr(item, "dtype") else reader.read(item)
    reader.vague.append(value)
    shape = [int(size) for size in value.shape]
    described: dict[str, Any] = {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}
    if (device := getattr(getattr(value, "device", None), "type", None)) is not None:
        described["device"] = device
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided":  # sparse: there are no strides
        described["layout"] = layout
    elif callable(stride := getattr(value, "stride", None)):
        strides = [int(step) for step in stride()]
        if strides != [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]:
            described["stride"] = strides
    elif not getattr(getattr(value, "flags", None), "c_contiguous", True):  # an array
        described["strides"] = [int(step) for step in value.strides]  # in bytes
    return described


def _config(value: Any, reader: Reader) -> Any:
    described, hook = {"Config": reader.read(value.all_kwargs())}, getattr(value, "pre_hook", None)
    return described if hook is None else described | {"pre_hook": reader.read(hook)}


def _mapping(value: Mapping[Any, Any], reader: Reader) -> Any:
    is_like_another = any(required <= value.keys() <= possible for required, possible in _MISTAKABLE_KEYS)
    if not is_like_another and all(isinstance(name, str) and not isinstance(name, Enum) for name in value):
        return {reader.read(name): reader.read(one) for name, one in value.items()}
    return {"<mapping>": sorted(map(reader.read_all, value.items()), key=text_of)}


def _dataclass(value: Any, reader: Reader) -> Any:
    fields = {field.name: reader.read(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {f"<dataclass {type_name(value)}>": fields}


def _kernel(value: Any, reader: Reader) -> str:
    kernel = kernel_in(value)
    if kernel is not value:  # the autotuner or the heuristics above it
        reader.vague.append(value)
    return f"<{type(value).__name__} {_name_of(kernel.fn)} {hash_of_kernel(kernel)}>"


def _is_method(value: Any) -> bool:
    return callable(value) and not isinstance(getattr(value, "__self__", None), (type(None), ModuleType))


def _method(value: Any, reader: Reader) -> Any:
    function = getattr(value, "__func__", None)
    name = value.__qualname__ if function is None else reader.read(function)
    return {"<method>": [name, reader.object(value.__self__)]}


def _compiled(value: Any, reader: Reader) -> Any:
    reader.vague.append(value)
    return {"<torch.compile>": reader.object(value._torchdynamo_orig_callable)}


def _text(kind: str, text: Callable[[Any], Any]) -> Callable[[Any, Reader], str]:
    return lambda value, reader: f"<{kind} {text(value)}>"


def _items(kind: str, items: Callable[[Any], Iterable[Any]]) -> Callable[[Any, Reader], Any]:
    return lambda value, reader: {f"<{kind}>": reader.read_all(items(value))}


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _number(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind) and type(value).__name__ != "timedelta64"  # for NumPy, an integer


#: How each kind of value is recognized, and what stands for it; the first that fits counts.
_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Reader], Any]], ...] = (
    (_of(Enum), _text("enum", lambda value: f"{_name_of(type(value))}.{value.name or value.value}")),
    (_of(str), lambda value, reader: f"<str {value}>" if _MISTAKABLE.fullmatch(value) else str(value)),
    (_number(Integral), _integer),
    (_number(Rational), _text("Fraction", lambda value: f"{int(value.numerator):#x}/{int(value.denominator):#x}")),
    (_number(Real), _real),
    (_of(type), _class),
    (_of(ModuleType), _text("module", lambda value: value.__name__)),
    (is_tensor, _tensor),
    (
        lambda value: _has_base(value, "dtype"),
        lambda value, reader: str(value) if type(value).__module__ == "torch" else f"<dtype {value}>",
    ),
    (
        lambda value: type(value).__module__ == "torch" and type(value).__name__ in _TORCH_NAMES,
        lambda value, reader: f"<{type(value).__name__} {value}>",
    ),
    (lambda value: type(value).__name__ == "ufunc", _text("ufunc", lambda value: value.__name__)),
    (_of(PurePath), _text("path", str)),
    (_of(Complex), _text("complex", lambda value: repr(complex(value)))),
    (_of(Decimal), _text("Decimal", _decimal)),
    (_of(bytes, bytearray), _text("bytes", _bytes)),
    (_of(range), _text("range", _range)),
    (_of(slice), _items("slice", lambda value: (value.start, value.stop, value.step))),
    (_of(datetime.datetime), _text("datetime", _isoformat)),
    (_of(datetime.date), _text("date", _isoformat)),
    (_of(datetime.time), _text("time", _isoformat)),
    (_of(datetime.timedelta), _text("timedelta", lambda value: f"{value.days} {value.seconds} {value.microseconds}")),
    (_of(datetime.tzinfo), _text("tzinfo", str)),
    (_of(uuid.UUID), _text("UUID", str)),
    (_of(re.Pattern), _text("pattern", lambda value: f"{value.flags} {value.pattern!r}")),
    (is_config, _config),
    (_of(Mapping), _mapping),
    (_of(list, tuple), lambda value, reader: reader.read_all(value)),
    (_of(deque), _items("deque", iter)),
    (_of(Set), lambda value, reader: {"<set>": sorted(reader.read_all(value), key=text_of)}),
    (dataclasses.is_dataclass, _dataclass),
    (lambda value: _has_base(value, "ProcessGroup"), _text("ranks", lambda value: value.size())),
    (_of(functools.partial), _items("partial", lambda value: (value.func, value.args, value.keywords))),
    (lambda value: hasattr(value, "_torchdynamo_orig_callable"), _compiled),
    (lambda value: hasattr(value, "fn") and kernel_in(value) is not None, _kernel),
    (_is_method, _method),
    (inspect.isfunction, lambda value, reader: reader.function(value)),
    (
        lambda value: callable(value) and hasattr(value, "__wrapped__") and hasattr(value, "__qualname__"),
        lambda value, reader: reader.wrapping(value),
    ),
    (lambda value: hasattr(value, "__qualname__") and hasattr(value, "__module__"), _text("function", _name_of)),
)

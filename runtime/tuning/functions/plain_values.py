"""`plain`: convert any Python value to JSON, equal in every process, to identify keys and configs in caches."""

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

#: Decorators are unwrapped at most this often; wrappers may refer to each other.
MOST_DECORATORS = 20
#: Deepest nesting of a value; a list that contains itself has no end.
_DEEPEST = 20
#: Longer texts, in characters, are shortened to their beginning and a digest.
_LONGEST_TEXT = 400
#: Integers of more bits are written in hexadecimal: Python may refuse to write them in decimal.
_MOST_BITS = 2000
#: Longer byte strings are represented by their length and a digest.
_MOST_BYTES = 64
#: Strings that look like the representation of another value, and therefore are marked as strings.
_MISTAKABLE = re.compile(r"<.*>|float (inf|-inf|nan)|torch\.\w+", re.DOTALL)
#: Types of torch that are represented by `str`.
_TORCH_NAMES = ("device", "layout", "memory_format", "qscheme")
#: The keys, required and possible, that represent a tensor and a `triton.Config`: mappings with these keys are marked.
_MISTAKABLE_KEYS = (
    ({"shape", "dtype"}, {"shape", "dtype", "device", "stride", "strides", "layout"}),
    ({"Config"}, {"Config", "pre_hook"}),
)


def plain(value: Any, unknown: Callable[[Any], Any]) -> Any:
    """Return a value as JSON: distinct values give distinct JSON, equal in every process.

    Numbers, strings, lists and mappings represent themselves; a tuple becomes a list. Tensors and arrays are
    represented by shape, dtype, device and, if it is not contiguous, layout, never by their contents. Classes and
    functions of a module are represented by their names, other functions by their code and captured values. Other
    types with a text become "<type text>"; a string that looks like this becomes "<str ...>".

    Args:
        value: The value.
        unknown: Returns the representation of an object of any other type.

    Raises:
        ForetuneError: The value nests deeper than 20 levels.

    >>> import numpy as np
    >>> plain({"x": np.zeros((2, 3), np.float32), "tile": (16, 32), "of": len, "in": None}, unknown=repr)
    {'x': {'shape': [2, 3], 'dtype': 'float32'}, 'tile': [16, 32], 'of': '<function builtins.len>', 'in': None}
    """
    return Reader(unknown).read(value)


class Reader:
    """Converts values to JSON, for `plain`; collects in `vague` the values that their JSON does not identify."""

    def __init__(self, unknown: Callable[[Any], Any]) -> None:
        self._unknown = unknown
        self.vague: list[Any] = []
        self._depth = 0
        self._open: set[int] = set()  # ids of functions that are being read: they may be recursive

    def read(self, value: Any) -> Any:
        """Convert a value to JSON: a str, number, bool, None, list or dict.

        Values of unknown types are passed to `unknown`.

        Raises:
            ForetuneError: The value nests deeper than 20 levels.
        """
        if self._depth > _DEEPEST:
            raise ForetuneError(f"a value must not nest deeper than {_DEEPEST} but one does: does it contain itself?")
        if value is None or isinstance(value, bool):
            return value
        self._depth += 1
        try:
            for is_such, represent in _REPRESENTATIONS:
                if is_such(value):
                    return represent(value, self)
            return self._unknown(value)
        finally:
            self._depth -= 1

    def read_all(self, values: Iterable[Any]) -> list[Any]:
        """Convert several values to JSON, and return them as a list."""
        return [self.read(value) for value in values]

    def object(self, value: Any) -> Any:
        """Convert a value that an object or function holds to JSON; a type without JSON is represented by its name.

        Values that are represented only by their type's name are added to `vague`.
        """
        before, self._unknown = self._unknown, self._held
        try:
            return self.read(value)
        finally:
            self._unknown = before

    def _held(self, value: Any) -> Any:
        made = _reduced(value)
        if isinstance(made, str):  # pickled by name, as a global object
            return f"<global {type(value).__module__}.{made}>"
        if isinstance(made, tuple) and not any(part is not None for part in made[2:]):  # without state
            return {"<made>": self.object(list(made[:2]))}
        self.vague.append(value)
        return type_name(value)

    def function(self, value: Any) -> Any:
        """Return the representation of a function: its name in its module, else its source and captured values."""

        def texts() -> str:
            held = {"captured": captured_by(value), "defaults": value.__defaults__, "keywords": value.__kwdefaults__}
            lines = [*source_texts(value), *(f"{name} {text_of(self.object(one))}" for name, one in held.items())]
            return f"<function {_name_of(value)} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}>"

        return self._opened(value, texts)

    def wrapping(self, value: Any) -> Any:
        """Return the JSON for an object that wraps a function, such as `foretune.tune` or `lru_cache` return."""

        def wrapped() -> Any:
            if not _has_base(value, "WrappedFunction"):
                self.vague.append(value)
            return {f"<wrapped {type_name(value)}>": self.object(value.__wrapped__)}

        return self._opened(value, wrapped)

    def _opened(self, function: Any, read: Callable[[], Any]) -> Any:
        """Return `read()`; but the function's name if that identifies the function, or if it is already being read."""
        if named_in_module(function) is function or id(function) in self._open:
            return f"<function {_name_of(function)}>"
        self._open.add(id(function))
        try:
            return read()
        finally:
            self._open.discard(id(function))


def text_of(value: Any) -> str:
    """Return JSON as one line of text; a long text is shortened and gets a digest.

    >>> text_of({"b": 1, "a": [True, None]})
    '{"a":[true,null],"b":1}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[: _LONGEST_TEXT - 20]}...{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def type_name(value: Any) -> str:
    """Return the qualified name of an object's type, which represents objects of which nothing else is known.

    >>> type_name(object())
    'builtins.object'
    """
    return _name_of(type(value))


def refuse_config_value(value: Any) -> Any:
    """Raise `ForetuneError` for a config's value that has no identifying text; never returns.

    Pass this function to `plain` as `unknown`.
    """
    raise ForetuneError(
        f"a config's value must be a number, a string, a class, a function, a triton.Config, or a list, mapping or "
        f"dataclass of these, but one is {shown(value)}: use a name as the value and look it up in the function"
    )


def is_config(value: Any) -> bool:
    """Return whether this is like a `triton.Config`, without importing Triton."""
    return isinstance(getattr(value, "kwargs", None), Mapping) and callable(getattr(value, "all_kwargs", None))


def is_tensor(value: Any) -> bool:
    """Return whether this is like a tensor or an array: it has a shape and a dtype."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _name_of(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def named_in_module(function: Any) -> Any:
    """Return the object that a function's module has under the function's qualified name; None if there is none."""
    found: Any = sys.modules.get(str(function.__module__))
    for name in str(function.__qualname__).split("."):
        found = getattr(found, name, None)
    return found


def kernel_in(value: Any) -> Any:
    """Return the Triton kernel in a value, inside any decorators; None if it is not a kernel."""
    for _ in range(MOST_DECORATORS):
        if value is None or isinstance(value, (ModuleType, type)) or is_kernel(value):
            break
        value = getattr(value, "fn", None)
    return value if is_kernel(value) else None


def _reduced(value: Any) -> Any:
    try:
        return value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - objects that cannot be pickled may raise anything
        return None


def _has_base(value: Any, *names: str) -> bool:
    """Return whether a value's type, or a base of it, has one of these names, such as "DataFrame", without its module.

    The package of the base is not imported for this.
    """
    return any(base.__name__ in names for base in type(value).__mro__)


def _integer(value: Integral, reader: Reader) -> Any:
    number = int(value)
    return number if number.bit_length() <= _MOST_BITS else f"<int {number:#x}>"


def _real(value: Real, reader: Reader) -> Any:
    number = float(value)
    if not math.isfinite(number):
        return f"float {number}"
    return number if number == value else f"<{type(value).__name__} {value!r}>"  # more digits than a float


def _decimal(value: Decimal) -> str:
    """Return a Decimal as text, equal for equal values."""
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
    return str(value.isoformat())  # the method of the value's type: that of pandas has nanoseconds


def _tensor(value: Any, reader: Reader) -> Any:
    if not len(value.shape) and type(value).__module__ == "numpy":  # a scalar
        # item() turns a date or duration into an integer, and does not convert a longdouble.
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
    if layout != "torch.strided":  # sparse: without strides
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
    if kernel is not value:  # the kernel's autotuner or heuristics
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


def _text(name: str, text: Callable[[Any], Any]) -> Callable[[Any, Reader], str]:
    return lambda value, reader: f"<{name} {text(value)}>"


def _items(name: str, items: Callable[[Any], Iterable[Any]]) -> Callable[[Any, Reader], Any]:
    return lambda value, reader: {f"<{name}>": reader.read_all(items(value))}


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _number(base: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, base) and type(value).__name__ != "timedelta64"  # an Integral in NumPy


#: How values are recognized, and the function that represents them; the first match counts.
_REPRESENTATIONS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Reader], Any]], ...] = (
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

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
from collections.abc import Callable, Mapping, Set
from decimal import Decimal
from enum import Enum
from numbers import Complex, Integral, Rational, Real
from pathlib import PurePath
from types import ModuleType
from typing import Any

from ....datasets import ForetuneError
from ....datasets.errors import shown
from ...launching.source_hash import captured_by, hash_of_kernel, is_kernel, source_texts

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

    def __init__(self, unknown: Callable[[Any], Any], outer: Reader | None = None) -> None:
        self._unknown = unknown
        self.vague: list[Any] = [] if outer is None else outer.vague
        self._open: set[int] = set() if outer is None else outer._open  # ids of functions that are being read

    def read(self, value: Any, depth: int = 0) -> Any:
        """Return a value as JSON. Raises as `plain` does."""
        if depth > _DEEPEST:
            raise ForetuneError(f"a value must not nest deeper than {_DEEPEST} but one does: does it contain itself?")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Enum):
            return f"<enum {_name_of(type(value))}.{value.name or value.value}>"
        if isinstance(value, str):
            return f"<str {value}>" if _MISTAKABLE.fullmatch(value) else str(value)
        if isinstance(value, Integral) and type(value).__name__ != "timedelta64":  # which NumPy takes for an integer
            number = int(value)
            return number if number.bit_length() <= _MOST_BITS else f"<int {number:#x}>"
        if isinstance(value, Rational) and not isinstance(value, Integral):
            return f"<Fraction {int(value.numerator):#x}/{int(value.denominator):#x}>"
        if isinstance(value, Real) and not isinstance(value, Integral):
            return _real(value)
        for is_such, stand_in in _KINDS:
            if is_such(value):
                return stand_in(value, self, depth + 1)
        return self._unknown(value)

    def object(self, value: Any, depth: int) -> Any:
        """Return what stands for a value that somebody holds on to: an unknown object counts by its type."""

        def unknown(one: Any) -> Any:
            made = _reduced(one)
            if isinstance(made, str):  # pickled by its name, as a global
                return f"<global {type(one).__module__}.{made}>"
            if isinstance(made, tuple) and not any(part is not None for part in made[2:]):  # it has no state
                return {"<made>": self.object(list(made[:2]), depth + 1)}
            self.vague.append(one)
            return type_name(one)

        return Reader(unknown, self).read(value, depth)

    def function(self, value: Any, depth: int) -> Any:
        """Return what stands for a function: its name in its module, or else its source and what it captured."""
        if _is_importable(value) or id(value) in self._open:
            return f"<function {_name_of(value)}>"
        self._open.add(id(value))
        try:
            held = {"captured": captured_by(value), "defaults": value.__defaults__, "keywords": value.__kwdefaults__}
            texts = [
                *source_texts(value),
                *(f"{name} {text_of(self.object(one, depth))}" for name, one in held.items()),
            ]
        finally:
            self._open.discard(id(value))
        return f"<function {_name_of(value)} {hashlib.sha256(chr(10).join(texts).encode()).hexdigest()[:16]}>"


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


def _is_importable(function: Any) -> bool:
    """Whether a function is what its module has under its name."""
    found: Any = sys.modules.get(str(function.__module__))
    for name in str(function.__qualname__).split("."):
        found = getattr(found, name, None)
    return found is function


def _reduced(value: Any) -> Any:
    try:
        return value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - what cannot be pickled may raise anything
        return None


def _real(value: Real) -> Any:
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


def _class(value: type, reader: Reader, depth: int) -> str:
    if not _is_importable(value):
        reader.vague.append(value)
    return f"<class {_name_of(value)}>"


def _dtype(value: Any, reader: Reader, depth: int) -> str:
    return str(value) if type(value).__module__ == "torch" else f"<dtype {value}>"


def _bytes(value: Any, reader: Reader, depth: int) -> str:
    content = bytes(value)
    if len(content) > _MOST_BYTES:
        return f"<bytes {len(content)} {hashlib.sha256(content).hexdigest()}>"
    return f"<bytes {content.hex()}>"


def _range(value: range) -> str:
    return " ".join(f"{int(one):#x}" for one in (len(value), *value[:1], *([value.step] if len(value) > 1 else [])))


def _numpy_scalar(value: Any, reader: Reader, depth: int) -> Any:
    if value.dtype.kind in "mM":  # a date or a duration, which item() makes an integer
        return f"<{value.dtype} {value}>"
    item = value.item()
    return f"<{value.dtype} {value!r}>" if hasattr(item, "dtype") else reader.read(item, depth)


def _tensor(value: Any, reader: Reader, depth: int) -> Any:
    if not len(value.shape) and type(value).__module__ == "numpy":  # a scalar
        return _numpy_scalar(value, reader, depth)
    reader.vague.append(value)
    shape = [int(size) for size in value.shape]
    said: dict[str, Any] = {"shape": shape, "dtype": str(value.dtype).removeprefix("torch.")}
    if (device := getattr(getattr(value, "device", None), "type", None)) is not None:
        said["device"] = device
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided":  # sparse: there are no strides
        said["layout"] = layout
    elif callable(stride := getattr(value, "stride", None)):
        strides = [int(step) for step in stride()]
        if strides != _usual_strides(shape):
            said["stride"] = strides
    elif not getattr(getattr(value, "flags", None), "c_contiguous", True):  # an array
        said["strides"] = [int(step) for step in value.strides]  # in bytes
    return said


def _usual_strides(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _config(value: Any, reader: Reader, depth: int) -> Any:
    hook = getattr(value, "pre_hook", None)
    said = {"Config": reader.read(value.all_kwargs(), depth)}
    return said | ({} if hook is None else {"pre_hook": reader.read(hook, depth)})


def _mapping(value: Mapping[Any, Any], reader: Reader, depth: int) -> Any:
    is_like_another = any(required <= value.keys() <= possible for required, possible in _MISTAKABLE_KEYS)
    if not is_like_another and all(isinstance(name, str) and not isinstance(name, Enum) for name in value):
        return {reader.read(name, depth): reader.read(one, depth) for name, one in value.items()}
    pairs = ([reader.read(name, depth), reader.read(one, depth)] for name, one in value.items())
    return {"<mapping>": sorted(pairs, key=text_of)}


def _sequence(value: Any, reader: Reader, depth: int) -> Any:
    return [reader.read(one, depth) for one in value]


def _slice(value: slice, reader: Reader, depth: int) -> Any:
    return {"<slice>": _sequence((value.start, value.stop, value.step), reader, depth)}


def _dataclass(value: Any, reader: Reader, depth: int) -> Any:
    fields = {field.name: reader.read(getattr(value, field.name), depth) for field in dataclasses.fields(value)}
    return {f"<dataclass {type_name(value)}>": fields}


def _partial(value: Any, reader: Reader, depth: int) -> Any:
    return {"<partial>": [reader.read(part, depth) for part in (value.func, value.args, value.keywords)]}


def _kernel(value: Any, reader: Reader, depth: int) -> str:
    kernel = value
    while not is_kernel(kernel):
        kernel = kernel.fn
    if kernel is not value:  # the autotuner or the heuristics above it
        reader.vague.append(value)
    return f"<{type(value).__name__} {_name_of(kernel.fn)} {hash_of_kernel(kernel)}>"


def _is_above_kernel(value: Any) -> bool:
    seen = 0
    while value is not None and not isinstance(value, (ModuleType, type)) and not is_kernel(value) and seen < 10:
        value, seen = getattr(value, "fn", None), seen + 1
    return is_kernel(value)


def _method(value: Any, reader: Reader, depth: int) -> Any:
    function = getattr(value, "__func__", None)
    name = value.__qualname__ if function is None else reader.read(function, depth)
    return {"<method>": [name, reader.object(value.__self__, depth)]}


def _compiled(value: Any, reader: Reader, depth: int) -> Any:
    reader.vague.append(value)
    return {"<torch.compile>": reader.object(value._torchdynamo_orig_callable, depth)}


def _wrapping(value: Any, reader: Reader, depth: int) -> Any:
    """An object in the place of a function, as `foretune.tune` and `functools.lru_cache` make it."""
    if _is_importable(value) or id(value) in reader._open:
        return f"<function {_name_of(value)}>"
    if not any(base.__name__ == "WrappedFunction" for base in type(value).__mro__):
        reader.vague.append(value)
    reader._open.add(id(value))
    try:
        return {f"<wrapped {type_name(value)}>": reader.object(value.__wrapped__, depth)}
    finally:
        reader._open.discard(id(value))


def _text(kind: str, text: Callable[[Any], Any]) -> Callable[[Any, Reader, int], str]:
    return lambda value, reader, depth: f"<{kind} {text(value)}>"


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


#: How each kind of value is recognized, and what stands for it; the first that fits counts.
_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Reader, int], Any]], ...] = (
    (_of(type), _class),
    (_of(ModuleType), _text("module", lambda value: value.__name__)),
    (is_tensor, _tensor),
    (lambda value: any(base.__name__ == "dtype" for base in type(value).__mro__), _dtype),
    (
        lambda value: (
            type(value).__module__ == "torch"
            and type(value).__name__ in ("device", "layout", "memory_format", "qscheme")
        ),
        lambda value, reader, depth: f"<{type(value).__name__} {value}>",
    ),
    (lambda value: type(value).__name__ == "ufunc", _text("ufunc", lambda value: value.__name__)),
    (_of(PurePath), _text("path", str)),
    (_of(Complex), _text("complex", lambda value: repr(complex(value)))),
    (_of(Decimal), _text("Decimal", _decimal)),
    (_of(bytes, bytearray), _bytes),
    (_of(range), _text("range", _range)),
    (
        _of(slice),
        lambda value, reader, depth: {"<slice>": _sequence((value.start, value.stop, value.step), reader, depth)},
    ),
    (_of(datetime.datetime), _text("datetime", lambda value: value.isoformat())),
    (_of(datetime.date), _text("date", lambda value: value.isoformat())),
    (_of(datetime.time), _text("time", lambda value: value.isoformat())),
    (_of(datetime.timedelta), _text("timedelta", lambda value: f"{value.days} {value.seconds} {value.microseconds}")),
    (_of(datetime.tzinfo), _text("tzinfo", str)),
    (_of(uuid.UUID), _text("UUID", str)),
    (_of(re.Pattern), _text("pattern", lambda value: f"{value.flags} {value.pattern!r}")),
    (is_config, _config),
    (_of(Mapping), _mapping),
    (_of(list, tuple), _sequence),
    (_of(deque), lambda value, reader, depth: {"<deque>": _sequence(value, reader, depth)}),
    (_of(Set), lambda value, reader, depth: {"<set>": sorted(_sequence(value, reader, depth), key=text_of)}),
    (dataclasses.is_dataclass, _dataclass),
    (
        lambda value: any(base.__name__ == "ProcessGroup" for base in type(value).__mro__),
        _text("ranks", lambda value: value.size()),
    ),
    (_of(functools.partial), _partial),
    (lambda value: hasattr(value, "_torchdynamo_orig_callable"), _compiled),
    (lambda value: hasattr(value, "fn") and _is_above_kernel(value), _kernel),
    (
        lambda value: not isinstance(getattr(value, "__self__", None), (type(None), ModuleType)) and callable(value),
        _method,
    ),
    (inspect.isfunction, lambda value, reader, depth: reader.function(value, depth)),
    (lambda value: callable(value) and hasattr(value, "__wrapped__") and hasattr(value, "__qualname__"), _wrapping),
    (
        lambda value: hasattr(value, "__qualname__") and hasattr(value, "__module__"),
        lambda value, reader, depth: f"<function {_name_of(value)}>",
    ),
)

"""`problem_of_key`: a function's key as a `Problem`, for models that learn from keys, and for tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....datasets import DTYPES, ForetuneError, Problem
from ....datasets.problem import MOST_SIZE, dtype_from_json, dtype_of_tensor
from ..flag_text import flag_of

#: What stands for the dtype of a function without tensors: that of Python's own floats.
_PYTHON = "fp64"


class _Tensor:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


def problem_of_key(function: str, key: Any) -> Problem | None:
    """A key that `plain` made, as a problem: whole numbers from 0 are dimensions, tensors have a dtype each, and all
    else is a flag. None where there is no number to it, or more than a problem has room for.

    >>> print(problem_of_key("scale", {"x": {"shape": [64, 8], "dtype": "float16"}, "mode": "fast"}))
    scale x.0=64 x.1=8 fp16 mode=fast
    """
    dims: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    flags: list[str] = []
    for path, value in _leaves("", key):
        name = path.replace(".shape", "") or "key"
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_SIZE:
            dims[name] = value
        elif path.endswith(".dtype") and (known := _dtype(value)) is not None:
            dtypes[path.removesuffix(".dtype")] = known
        else:
            flags.append(flag_of(name, value))
    try:
        dtype = dtype_from_json(dtypes or _PYTHON)
        return Problem(function[-200:], tuple(dims.items()), dtype, tuple(flags)) if dims else None
    except ForetuneError:  # 65 numbers, an unprintable text
        return None


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(f"{path}.{name}".lstrip("."), one)
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from _leaves(f"{path}.{position}".lstrip("."), one)
    else:
        yield path, value


def _dtype(value: Any) -> str | None:
    try:
        found = dtype_of_tensor("an argument", _Tensor(str(value)))
    except ForetuneError:
        return None
    return found if found in DTYPES else None

"""Store the arguments of a launch as JSON, to compile its binaries in another process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...datasets import ForetuneError
from ...datasets.errors import LONGEST_WORD, MOST_NAMES, shown

#: Arguments of a launch that its binary does not depend on.
OF_THE_LAUNCH = frozenset({"grid", "warmup"})


def kept_arguments(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parts of a launch's arguments that a binary depends on, as JSON; None if one cannot be stored.

    A tensor is stored as its dtype and whether its address is a multiple of 16 bytes, a Triton type as its name, and
    anything else as its value. Values that JSON cannot express, such as a host's tensor descriptor, cannot be stored.

    >>> kept_arguments({"n": 64, "SCALE": 0.5, "bias": None, "grid": (1,)})
    {'n': 64, 'SCALE': 0.5, 'bias': None}
    >>> kept_arguments({"shape": (1, 2)})
    """
    kept = {name: _kept(value) for name, value in arguments.items() if name not in OF_THE_LAUNCH}
    return kept if are_kept_arguments(kept) else None


def are_kept_arguments(value: Any) -> bool:
    """Return whether a value, perhaps from a file, has the form that `kept_arguments` returns."""
    return isinstance(value, dict) and len(value) <= MOST_NAMES and all(map(_is_kept, value, value.values()))


def stand_ins(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for which Triton compiles the same binary as for the stored ones (of `kept_arguments`).

    Raises:
        ForetuneError: A stored type does not exist in torch or Triton.
    """
    return {name: _stand_in(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _kept(value: Any) -> Any:
    """Return the stored form of one argument."""
    import triton.language as tl

    if isinstance(value, tl.dtype):
        return {"triton": value.name}
    if hasattr(value, "dtype") and hasattr(value, "data_ptr"):
        return {"tensor": str(value.dtype).removeprefix("torch."), "aligned": value.data_ptr() % 16 == 0}
    return value


def _is_kept(name: Any, value: Any) -> bool:
    """Return whether a name and a value are valid in stored arguments."""
    if isinstance(value, dict):
        dtype, is_aligned = value.get("tensor", value.get("triton")), value.get("aligned") is True
        return isinstance(dtype, str) and value in ({"tensor": dtype, "aligned": is_aligned}, {"triton": dtype})
    if type(value) is str:
        return len(value) <= LONGEST_WORD
    return isinstance(name, str) and (
        value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))
    )


def _stand_in(value: Mapping[str, Any]) -> Any:
    """Return a mock tensor, or a Triton type, for its stored form."""
    import torch
    import triton.language as tl
    from triton.runtime.jit import MockTensor

    class Unaligned(MockTensor):  # type: ignore[misc]  # Triton has no types
        @staticmethod
        def data_ptr() -> int:
            return 1

    if "triton" in value:
        with suppress(AssertionError):
            return tl.dtype(value["triton"])
    elif isinstance(dtype := getattr(torch, value["tensor"], None), torch.dtype):
        return MockTensor(dtype) if value["aligned"] else Unaligned(dtype)
    raise ForetuneError(f"an argument must be a value, or have a dtype of torch or Triton, but is {shown(value)}")

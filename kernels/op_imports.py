"""`attach_ops`: import the ops of a family's package at their first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach_ops(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package whose ops need torch and triton.

    Because a caller that looks up an op is about to call it, the first look-up also starts background work that a first
    call would wait for (hashing Triton's sources, collecting compilations).

    Args:
        package: The package's name. The package has an `__all__`.
        homes: The module of each op, relative to the package.

    >>> get, _ = attach_ops("foretune.kernels.grouped_gemm", {"grouped_gemm": ".op"})
    >>> get("grouped_gemm").__name__
    'grouped_gemm'
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from triton import knobs

        from ..runtime.launching.ahead import hash_triton_ahead

        # Imported here because every family's package imports this module, and predicting needs no threads.
        from ..runtime.launching.collector import collecting_later

        if not knobs.runtime.interpret:  # the interpreter compiles nothing
            hash_triton_ahead()
        with collecting_later():
            found = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return list(sys.modules[package].__all__)

    return get, names

"""Repeat launches of a binary with TMA descriptors, without making the same descriptors again.

Triton's launch function first replaces each descriptor by a tensor map and its sizes, which takes the host 1 to 2 us,
and then calls a function in C. `LaunchFunction` takes these two steps apart, so that the arguments of the second one
can be kept. They depend on the addresses of the tensors, but do not keep a tensor alive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from threading import local
from types import CellType, FunctionType
from typing import Any

#: The variable of Triton's launch function, a closure, that holds the function in C.
_IN_C = "launcher"


class LaunchFunction:
    """The launch function of a binary, in two steps: `arguments`, and a call of `launch` with them."""

    def __init__(self, run: Any) -> None:
        """Take Triton's launcher apart (`triton.backends.nvidia.driver.CudaLauncher`, in 3.6 to 3.9)."""
        expand = run.launch
        place = expand.__code__.co_freevars.index(_IN_C)
        self.launch: Callable[..., None] = expand.__closure__[place].cell_contents
        self._found = local()
        cells = list(expand.__closure__)
        cells[place] = CellType(self._keep)
        self._run = copy.copy(run)
        self._run.launch = FunctionType(
            expand.__code__, expand.__globals__, expand.__name__, expand.__defaults__, tuple(cells)
        )

    @classmethod
    def of(cls, binary: Any) -> LaunchFunction | None:
        """Return the launch function of a binary, or None if its arguments differ from launch to launch.

        They do if Triton passes it scratch memory or counts launches. None is also returned if Triton is built in
        another way.
        """
        with suppress(AttributeError, TypeError, ValueError):
            run, metadata = binary.run, binary.metadata
            if not (
                metadata.global_scratch_size or metadata.profile_scratch_size or getattr(run, "gsan_enabled", False)
            ):
                return cls(run)
        return None

    def arguments(self, *given: Any) -> tuple[Any, ...]:
        """Return the arguments of `launch` for those of `binary.run`. Each begins with the grid and the stream."""
        self._run(*given)
        found: tuple[Any, ...] = self._found.arguments
        del self._found.arguments
        return found

    def _keep(self, *arguments: Any) -> None:
        self._found.arguments = arguments

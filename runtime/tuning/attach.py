"""`attach`: a shortlist for a kernel that somebody else declared under `triton.autotune`; `detach` undoes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...datasets import Family, ForetuneError
from ...datasets.errors import shown
from ..how_many import Length, check_length
from ..mode import resolve_mode
from .attachment import Attachment
from .launches import autotuner_of
from .packages import autotuners_in

if TYPE_CHECKING:
    import triton

_changing = threading.Lock()


def _renew() -> None:
    """In a forked child, where the thread that held it may not have come along."""
    global _changing
    _changing = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def attach_to(kernel: Any, family: Family | None = None, k: Length = "auto") -> Any:
    """See `foretune.attach`."""
    tuner = autotuner_of(kernel)
    check_length(k)
    resolve_mode()  # a value that does not exist is refused here, not in a launch
    with _changing:
        if (there := Attachment.of(tuner)) is not None:
            raise ForetuneError(f"{there.name} is attached already: foretune.detach it first")
        Attachment(tuner, family, k).begin()
    return kernel


def detach(kernel: Any) -> None:
    """Undoes `attach`: the autotuner is as it was before, but for the configs that it has found since.

    Raises `ForetuneError` for what is not attached, and where somebody has replaced since what was attached.
    """
    tuner = autotuner_of(kernel)
    with _changing:
        _there(tuner).end()


@contextmanager
def attached(kernels: ModuleType | Iterable[Any]) -> Iterator[list[triton.runtime.Autotuner]]:
    """Attaches all autotuners of a package (whose modules are imported for it; one warning names those that cannot be),
    or these kernels, until the end of the block: `with foretune.attached(fla): train()`. Those that are attached
    already stay as they are.

    Raises `ForetuneError` for what is no module and no list of autotuned kernels.

    >>> import json
    >>> with attached(json) as tuners:
    ...     tuners
    []
    """
    begun: list[triton.runtime.Autotuner] = []
    try:
        for tuner in _autotuners(kernels):
            if Attachment.of(tuner) is None:
                attach_to(tuner)
                begun.append(tuner)
        yield begun
    finally:
        for tuner in reversed(begun):
            if Attachment.of(tuner) is not None:  # else somebody has detached it
                detach(tuner)


def _autotuners(kernels: Any) -> list[triton.runtime.Autotuner]:
    """Each once."""
    if isinstance(kernels, ModuleType):
        return autotuners_in(kernels)
    if isinstance(kernels, (str, bytes)) or not isinstance(kernels, Iterable):
        raise ForetuneError(f"kernels must be a module or a list of autotuned kernels but is {shown(kernels)}")
    return list(dict.fromkeys(autotuner_of(kernel) for kernel in kernels))


def _there(tuner: triton.runtime.Autotuner) -> Attachment:
    if (there := Attachment.of(tuner)) is None:
        raise ForetuneError(f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__} is not attached")
    return there

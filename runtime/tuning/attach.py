"""`attach`: a shortlist for a kernel that somebody else declared under `triton.autotune`; `detach` undoes it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...datasets import Family, ForetuneError
from ...datasets.errors import shown
from ..arguments import resolve_mode, warn_once
from ..how_many import Length, check_length
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


def _hold(tuner: triton.runtime.Autotuner) -> list[Attachment]:
    """Attach a tuner for one `attached` block, or count the block where others hold it; nothing after an `attach`."""
    with _changing:
        there = Attachment.of(tuner)
        if there is None:
            there = Attachment(tuner, None, "auto")
            there.begin()
        elif there.holders == 0:
            return []
        there.holders += 1
        return [there]


def _let_go(there: Attachment) -> list[ForetuneError]:
    """Detach at the end of the last block that holds it; the error where that cannot be."""
    with there.lock, _changing:  # after the launch that is going on, which may attach something itself
        there.holders -= 1
        if there.holders == 0 and there.is_on:  # else somebody has detached it
            try:
                there.end()
            except ForetuneError as error:
                return [error]
    return []


def detach(kernel: Any) -> None:
    """Undoes `attach`: the autotuner is as it was before, but for the configs that it has found since.

    Raises `ForetuneError` for what is not attached, and where somebody has replaced since what was attached.
    """
    tuner = autotuner_of(kernel)
    there = _there(tuner)
    with there.lock, _changing:
        _there(tuner).end()


@contextmanager
def attached(kernels: ModuleType | Iterable[Any]) -> Iterator[list[triton.runtime.Autotuner]]:
    """Attaches all autotuners of a package (whose modules are imported for it; one warning names those that cannot be),
    or these kernels, until the end of the block: `with foretune.attached(fla): train()`. Those that are attached
    already are left alone. Blocks may overlap, also in several threads: a kernel is attached until the last one ends.

    Raises `ForetuneError` for anything but a module or a list of autotuned kernels, and at the end of a block that has
    raised nothing itself where a kernel cannot be detached (see `detach`); the others are detached then, too.

    >>> import json
    >>> with attached(json) as tuners:
    ...     tuners
    []
    """
    held: list[Attachment] = []
    try:
        for tuner in _autotuners(kernels):
            held += _hold(tuner)
        yield [there.tuner for there in held]
    except BaseException:  # which must be what the caller sees
        for error in _let_go_of_all(held):
            warn_once(str(error), ": it stays attached")
        raise
    if errors := _let_go_of_all(held):
        raise errors[0]


def _let_go_of_all(held: Sequence[Attachment]) -> list[ForetuneError]:
    """Let go of each, whatever becomes of the others."""
    return [error for there in reversed(held) for error in _let_go(there)]


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

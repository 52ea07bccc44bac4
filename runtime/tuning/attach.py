"""`attach`: make the `triton.autotune` of a kernel that other code declares time a shortlist; `detach` undoes it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...datasets import Family, ForetuneError
from ...datasets.errors import shown
from ...datasets.forking import renew_in_children
from ..arguments import resolve_mode, warn_once
from ..how_many import Length, check_length
from ..prune import Pruner, warn_if_not_restored
from .launches import autotuner_of, autotuners_in
from .refine.calls import check_cost
from .triton_adapter import Attachment

if TYPE_CHECKING:
    import triton

    from ...model import Bundle


class _Changing:
    """The lock that a thread holds while it attaches or detaches a kernel."""

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock, at construction and in forked processes (see `renew_in_children`)."""
        self.lock = threading.Lock()


_changing = _Changing()


def attach_to(
    kernel: Any,
    family: Family | None = None,
    k: Length = "auto",
    bundle: Bundle | Path | str | None = None,
    mode: str | None = None,
    max_cost: float | str | None = None,
) -> Any:
    """Let a kernel's `triton.autotune` time only a shortlist, and return the kernel.

    `foretune.attach` calls this for a family that may also be given by name, and documents the arguments.
    """
    tuner = autotuner_of(kernel)
    check_length(k)
    resolve_mode(mode)  # raise for an invalid FORETUNE_MODE here, not in a launch
    limit = None if max_cost is None else check_cost(max_cost)
    if family is None and bundle is not None:
        raise ForetuneError("bundle needs a family, but family is None")
    pruner = None if family is None else Pruner(family, k, bundle=bundle)
    if (there := Attachment.of(tuner)) is not None and there.is_automatic:
        detach(kernel)
    with _changing.lock:
        if (there := Attachment.of(tuner)) is not None:
            raise ForetuneError(f"{there.name} is attached already: call foretune.detach first")
        Attachment(tuner, pruner, k, mode, limit).begin()
    if family is not None:
        warn_if_not_restored(family, tuner)
    return kernel


def attach_created(tuner: triton.runtime.Autotuner) -> bool:
    """Attach an autotuner without a family; a later call of `attach` for it replaces this attachment.

    Returns:
        True if it was attached; False if it was attached already, and nothing was done.
    """
    with _changing.lock:
        if Attachment.of(tuner) is not None:
            return False
        there = Attachment(tuner, None, "auto")
        there.is_automatic = True
        there.begin()
    return True


def _hold(tuner: triton.runtime.Autotuner) -> list[Attachment]:
    """Attach a tuner for one more `attached` block, and return a list with its attachment.

    If `attach` or FORETUNE_ATTACH has attached it, nothing is done and the list is empty.
    """
    with _changing.lock:
        there = Attachment.of(tuner)
        if there is None:
            there = Attachment(tuner, None, "auto")
            there.begin()
        elif there.holders == 0:
            return []
        there.holders += 1
        return [there]


def _release(there: Attachment) -> list[ForetuneError]:
    """End one block's hold on an attachment; detach the autotuner if this was the last hold.

    Returns a list with the error if detaching fails, else an empty list.
    """
    with there.lock, _changing.lock:  # wait for a running launch, which may attach something itself
        there.holders -= 1
        if there.holders == 0 and there.is_on:  # otherwise it was detached meanwhile
            try:
                there.end()
            except ForetuneError as error:
                return [error]
    return []


def detach(kernel: Any) -> None:
    """Undo `attach`: restore the autotuner. The configs that it has chosen in the meantime stay in its cache.

    Args:
        kernel: The attached kernel.

    Raises:
        ForetuneError: The kernel is not attached, or other code has replaced one of the hooks meanwhile.
    """
    tuner = autotuner_of(kernel)
    there = _attachment_of(tuner)
    with there.lock, _changing.lock:
        _attachment_of(tuner).end()


@contextmanager
def attached(kernels: Any) -> Iterator[list[triton.runtime.Autotuner]]:
    """Attach all autotuners of a package, one kernel or several, for the duration of a `with` block.

    Kernels attached by `attach` or FORETUNE_ATTACH are left alone. Blocks may overlap, also in several threads: the
    last one detaches.

    Args:
        kernels: An autotuned kernel, or a list of them; or a module, whose submodules are imported (one warning lists
            those that cannot be).

    Raises:
        ForetuneError: `kernels` is none of these; or, at the end of a block that has not raised, a kernel cannot be
            detached (see `detach`). The other kernels are detached then, too.

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
    except BaseException:  # the caller must see this exception, not one of detaching
        for error in _release_all(held):
            warn_once(str(error), ": it stays attached")
        raise
    if errors := _release_all(held):
        raise errors[0]


def _release_all(held: Sequence[Attachment]) -> list[ForetuneError]:
    """End the hold on each attachment and return the errors."""
    return [error for there in reversed(held) for error in _release(there)]


def _autotuners(kernels: Any) -> list[triton.runtime.Autotuner]:
    """Return the autotuners of a module, a kernel or a list of kernels, each once."""
    if isinstance(kernels, ModuleType):
        return autotuners_in(kernels)
    if hasattr(kernels, "fn"):
        kernels = [kernels]
    if isinstance(kernels, (str, bytes)) or not isinstance(kernels, Iterable):
        raise ForetuneError(f"kernels must be a module, an autotuned kernel or a list of them but is {shown(kernels)}")
    return list(dict.fromkeys(autotuner_of(kernel) for kernel in kernels))


def _attachment_of(tuner: triton.runtime.Autotuner) -> Attachment:
    """Return an autotuner's attachment; raise `ForetuneError` if it has none."""
    if (there := Attachment.of(tuner)) is None:
        raise ForetuneError(f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__} is not attached")
    return there

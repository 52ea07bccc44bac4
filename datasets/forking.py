"""`renew_in_children`: replace locks and similar state in forked processes, which must not share them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewing(Protocol):
    """An object with locks or other state that a forked process must not inherit."""

    def renew(self) -> None:
        """Create new locks and drop the state of the parent's threads."""


_all: weakref.WeakSet[Renewing] = weakref.WeakSet()


def renew_in_children(owner: Renewing) -> None:
    """Call `owner.renew()` now, and in every process that is forked from this one while `owner` exists."""
    owner.renew()
    _all.add(owner)


def _renew() -> None:
    """Renew all registered objects in a process that was just forked."""
    for owner in list(_all):
        owner.renew()


if hasattr(os, "register_at_fork"):  # missing on Windows, where datasets can still be read
    os.register_at_fork(after_in_child=_renew)

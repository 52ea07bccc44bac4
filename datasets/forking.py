"""`renew_in_children`: replace in a forked process what must not be shared with its parent, such as held locks."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewing(Protocol):
    """An object with locks or other state that a forked process must not inherit."""

    def renew(self) -> None:
        """Create the locks anew and drop the state of the parent's threads."""


_all: weakref.WeakSet[Renewing] = weakref.WeakSet()


def renew_in_children(owner: Renewing) -> None:
    """Call `owner.renew()` now, and in every process that is forked from this one while `owner` exists."""
    owner.renew()
    _all.add(owner)


def _renew() -> None:
    for owner in list(_all):
        owner.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, where datasets can be read
    os.register_at_fork(after_in_child=_renew)

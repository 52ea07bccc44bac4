"""`renew_in_children`: locks for a forked process, in which the thread that held one is not: nobody would let go."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewing(Protocol):
    """What has locks."""

    def renew(self) -> None:
        """Makes them anew, and forgets what a thread was about."""


_all: weakref.WeakSet[Renewing] = weakref.WeakSet()


def renew_in_children(owner: Renewing) -> None:
    """Has an object renew itself now, and in every process that is forked from this one."""
    owner.renew()
    _all.add(owner)


def _renew() -> None:
    for owner in list(_all):
        owner.renew()


os.register_at_fork(after_in_child=_renew)

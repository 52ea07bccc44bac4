"""Shortlists at run time: prune callbacks, compiling without a GPU, timing, and parts of a GPU.

Importing this imports neither torch nor triton.
"""

from __future__ import annotations

from ..datasets import ForetuneWarning
from .mode import Mode, mode
from .partition import partition
from .prune import Pruner, prune
from .shortlist import Shortlist, shortlist
from .stub import gpu_target, stub_driver, stubbed
from .timing import Timer, Timing
from .warn import warn_once

__all__ = [
    "ForetuneWarning",
    "Mode",
    "Pruner",
    "Shortlist",
    "Timer",
    "Timing",
    "gpu_target",
    "mode",
    "partition",
    "prune",
    "shortlist",
    "stub_driver",
    "stubbed",
    "warn_once",
]

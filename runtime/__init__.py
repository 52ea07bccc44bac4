"""Shortlists at run time: prune callbacks, choosing and launching for an op, timing, and parts of a GPU.

Importing this imports neither torch nor triton.
"""

from __future__ import annotations

from ..datasets import ForetuneWarning
from .launching.stub_driver import gpu_target, stubbed, use_stub_driver
from .mode import Mode, resolve_mode
from .prune import Pruner
from .shortlist import Shortlist, make_shortlist
from .timing.partition import sm_partition
from .timing.timer import Timer, Timing
from .triton_family import TritonFamily
from .warn import warn_once

__all__ = [
    "ForetuneWarning",
    "Mode",
    "Pruner",
    "Shortlist",
    "Timer",
    "Timing",
    "TritonFamily",
    "gpu_target",
    "make_shortlist",
    "resolve_mode",
    "sm_partition",
    "stubbed",
    "use_stub_driver",
    "warn_once",
]

"""`Reuse`: how far what was found out before is trusted, from the environment variable FORETUNE_TUNE; and where this
process runs."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from ....datasets import DeviceSpec, ForetuneError
from ....datasets.errors import shown
from ...launching.stub_driver import device_here
from ...timing.flywheel import Software

VARIABLE = "FORETUNE_TUNE"


class Reuse(str, Enum):
    """What becomes of a key that was tuned before."""

    KNOWN = "known"  # it is used, with a warning where another driver, torch, Triton or Python measured it
    STRICT = "strict"  # it is used where the same versions measured it
    ALWAYS = "always"  # every process tunes anew


def resolve_reuse() -> Reuse:
    """What the environment says now. Raises `ForetuneError` listing the valid values.

    >>> resolve_reuse()
    <Reuse.KNOWN: 'known'>
    """
    value = os.environ.get(VARIABLE) or Reuse.KNOWN.value
    try:
        return Reuse(value.lower())
    except ValueError:
        valid = ", ".join(reuse.value for reuse in Reuse)
        raise ForetuneError(f"{VARIABLE} must be one of {valid} but got {shown(value)}") from None


@dataclass(frozen=True)
class Place:
    """Where a call runs: the device's name and, for a GPU, its spec."""

    name: str
    spec: DeviceSpec | None

    @property
    def on_gpu(self) -> bool:
        return self.spec is not None


def place_of(arguments: Iterable[Any], n_ranks: int = 1) -> Place:
    """Where a call with these arguments runs: where its tensors are; without any, on the GPU that this process has
    begun to use, or else the CPU. What several ranks found out together is no other number's to know."""
    place = _one_place(arguments)
    return place if n_ranks == 1 else replace(place, name=f"{place.name} x{n_ranks}")


def _one_place(arguments: Iterable[Any]) -> Place:
    devices = {getattr(getattr(value, "device", None), "type", None) for value in arguments} - {None}
    torch = sys.modules.get("torch")
    if torch is None or ("cpu" in devices and "cuda" not in devices):
        return _cpu()
    if torch.cuda.is_available() and ("cuda" in devices or torch.cuda.is_initialized()):
        spec = device_here()
        return Place(spec.name, spec)
    return _cpu()


def software() -> dict[str, str]:
    """The versions that a time depends on."""
    return asdict(Software.here()) | {"python": platform.python_version()}


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, while nobody can wait for the device."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


@lru_cache
def _cpu() -> Place:
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = " ".join((model[1] if model else platform.processor() or platform.machine()).split())
    return Place(f"{name}, {os.cpu_count()} cores", None)

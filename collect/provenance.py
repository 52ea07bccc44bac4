"""Where measurements come from: what a reader needs in order to trust or repeat them."""

from __future__ import annotations

import datetime
import platform
import subprocess
from collections.abc import Iterable
from functools import cache
from itertools import zip_longest
from typing import Any

from ..datasets import DeviceSpec, Measurable


def run_provenance(family: Measurable, device: DeviceSpec) -> dict[str, Any]:
    """Versions, driver, clocks, kernel source hash and date of a run that starts now."""
    import torch

    return {
        "family": family.name,
        "kernel_source": family.source_hash(),
        "device": device.name,
        **_first_gpu(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def prepare(families: Iterable[Measurable]) -> None:
    """Does what makes the first `run_provenance` slow (it imports Triton and the families' kernels, and asks
    nvidia-smi), while the GPUs are being opened: they would wait for it."""
    for family in families:
        family.source_hash()
    triton_version()
    _first_gpu()


def triton_version() -> str:
    """The Triton that compiles here."""
    import triton

    return str(triton.__version__)


#: What a dataset calls what nvidia-smi knows.
_ASKED = {"driver": "driver_version", "clocks_sm_mhz": "clocks.sm", "clocks_max_sm_mhz": "clocks.max.sm"}


@cache  # the tool takes a second or more
def _first_gpu() -> dict[str, str | None]:
    """Driver and clocks of the first GPU, as the run begins; None where there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        printed = ""
    values = printed.partition("\n")[0].split(", ") if printed.strip() else []
    return dict(zip_longest(_ASKED, values))

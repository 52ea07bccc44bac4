"""Where measurements come from: what a reader needs in order to trust or repeat them."""

from __future__ import annotations

import datetime
import platform
import subprocess
from typing import Any

from ..datasets import DeviceSpec, Family


def provenance(family: Family, device: DeviceSpec) -> dict[str, Any]:
    """Versions, driver, clocks, kernel source hash and date of a run that starts now."""
    import torch

    return {
        "family": family.name,
        "kernel_source": family.source_hash(),
        "device": device.name,
        "driver": _query("driver_version"),
        "clocks_sm_mhz": _query("clocks.sm"),
        "clocks_max_sm_mhz": _query("clocks.max.sm"),
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def triton_version() -> str:
    """The Triton that compiles here."""
    import triton

    return str(triton.__version__)


def _query(field: str) -> str | None:
    """One value of nvidia-smi for the first GPU; None where there is no such tool."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return printed.splitlines()[0].strip() if printed.strip() else None

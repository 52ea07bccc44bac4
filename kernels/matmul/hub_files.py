"""Predict the tuned config files of Triton matrix products on Hugging Face's kernel hub.

The format is that of the example `gemm-triton-autotune` (huggingface/kernels#754): one file per shape of the weights
and card, `configs/N=..,K=..,device_name=...json` in the kernel's package. It maps numbers of rows to configs, and the
kernel reads the row whose number is nearest in log space. The kernel has the knobs of Triton's tutorial: BLOCK_SIZE_M,
_N and _K, GROUP_SIZE_M, warps and stages. So its configs are ranked as configs of the family `matmul` without TMA,
persistence, split K or warp specialization; these need the same amount of shared memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ...datasets.console import table
from ...datasets.errors import check_integer, shown
from ...datasets.files import write_new
from ..workloads import TOKENS
from .family import MOST_SIZE, Matmul
from .space import B_KN

if TYPE_CHECKING:
    from ...model import Bundle

#: Dtypes that the kernel multiplies.
DTYPES = ("bf16", "fp16")
#: The knobs in a file, by the family's names.
KNOBS = {
    "BLOCK_M": "BLOCK_SIZE_M",
    "BLOCK_N": "BLOCK_SIZE_N",
    "BLOCK_K": "BLOCK_SIZE_K",
    "GROUP_M": "GROUP_SIZE_M",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
}
#: What the kernel does not have.
_PLAIN = {"SPLIT_K": 1, "PROGRAMS_PER_SM": 0, "TMA": 0, "CONSUMERS": 0, "PINGPONG": 0}


@dataclass(frozen=True)
class HubFile:
    """The config file that a kernel of Hugging Face's hub reads for one shape of the weights on one card.

    `rows` has the configs by number of rows.
    """

    n: int
    k: int
    dtype: str
    device: DeviceSpec
    rows: Mapping[int, KernelConfig]
    reason: str

    @property
    def name(self) -> str:
        """The file's path in the kernel's package."""
        return f"configs/N={self.n},K={self.k},device_name={self.device.card_word}.json"

    @property
    def entries(self) -> dict[str, dict[str, int]]:
        """The file's JSON object: for each number of rows, as text, the values of the kernel's knobs by name."""
        return {str(m): {name: int(config[knob]) for knob, name in KNOBS.items()} for m, config in self.rows.items()}

    def save(self, folder: Path | str, *, force: bool = False) -> list[Path]:
        """Write the file below the folder of the kernel's package, and return a list with its path.

        Raises:
            ForetuneError: It exists with other content and `force` is false, or it cannot be written.
        """
        return write_new(folder, {self.name: json.dumps(self.entries, indent=4) + "\n"}, force=force)

    def to_json(self) -> dict[str, Any]:
        """Return the file's name, device, dtype, reason and rows as JSON values."""
        return {
            "file": self.name,
            "device": self.device.name,
            "dtype": self.dtype,
            "measured": False,
            "reason": self.reason,
            "rows": self.entries,
        }

    def __rich__(self) -> Any:
        return table(
            f"N={self.n}, K={self.k}, {self.dtype}, on {self.device.name}",
            ("M", *KNOBS.values()),
            [[m, *entry.values()] for m, entry in self.entries.items()],
            below=[f"{self.reason}; not measured with the kernel"],
        )


def predict_hub_file(
    n: int, k: int, device: DeviceSpec, *, dtype: str = "bf16", bundle: Bundle | None = None
) -> HubFile:
    """Return the config file for y (M, N) = a (M, K) @ b (K, N), with b stored as (K, N), for M from 1 to 16,384.

    Args:
        n: The columns of b.
        k: The rows of b.
        device: The GPU that the file is for.
        dtype: "bf16" or "fp16". The file's name does not have it.
        bundle: The bundle that predicts; None for the one in force.

    Raises:
        ForetuneError: An argument is invalid, or nothing can be predicted; the message says why.

    >>> file = predict_hub_file(4096, 4096, DeviceSpec.named("h200"))
    >>> file.name, file.entries["4096"]["BLOCK_SIZE_M"]
    ('configs/N=4096,K=4096,device_name=NVIDIA_H200.json', 128)
    """
    from ...runtime.shortlist import make_shortlist

    if dtype not in DTYPES:
        raise ForetuneError(f"dtype must be one of {', '.join(DTYPES)} but is {shown(dtype)}")
    family, n, k = Matmul(), check_integer("n", n, 1, MOST_SIZE), check_integer("k", k, 1, MOST_SIZE)
    configs = tuple(c for c in family.space(device) if all(c[knob] == value for knob, value in _PLAIN.items()))
    rows: dict[int, KernelConfig] = {}
    for m in TOKENS:
        problem = Problem.of(family.name, dtype=dtype, flags=(B_KN,), batch=1, m=m, n=n, k=k)
        chosen = make_shortlist(family, problem, device, k=1, configs=configs, bundle=bundle)
        if not chosen.predicted:
            raise ForetuneError(chosen.reason)
        rows[m] = chosen.configs[0]
    return HubFile(n, k, dtype, device, rows, chosen.reason)

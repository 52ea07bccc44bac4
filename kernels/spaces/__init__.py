"""`foretune.spaces`: spaces as plain dictionaries, the configs they generate, and the lists that compilers tune matrix
products over, as functions of a `DeviceSpec`.

A family states its space with `generate`, in its own space.py, and says in `supports` what is valid; everything here
that takes a family asks those two and adds no rule of its own::

    from ..spaces import generate

    def space(self, device=None):
        return generate({"BLOCK_M": [64, 128], "num_warps": [4, 8], "num_stages": [3]}, keep=lambda c: not spills(c))

A family of matrix products may start from a compiler's list: `matmul_configs(device, "exhaustive", TMA=[0, 1])` has
each config of the list with each value of the family's further knobs.
"""

from __future__ import annotations

from .checking import default_config, filter_valid, ready_space
from .filtered import Filtered
from .fitting import fit_configs, gemm_limit
from .knob_grid import generate
from .matmul import LISTS, matmul_configs, matmul_grid

__all__ = [
    "LISTS",
    "Filtered",
    "default_config",
    "filter_valid",
    "fit_configs",
    "gemm_limit",
    "generate",
    "matmul_configs",
    "matmul_grid",
    "ready_space",
]

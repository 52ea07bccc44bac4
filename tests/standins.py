"""Stand-ins for the families of the op's three kernels, until the real ones are there."""

from __future__ import annotations

from foretune import kernels
from foretune.datasets import KernelConfig


class StandIn:
    """The part of a `Family` that the op asks for."""

    def __init__(self, name, operands):
        self.name, self.operands = name, operands
        self.knobs = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "PROGRAMS_PER_SM", *operands, "FLATTEN")
        if name != "grouped_gemm_dw":
            self.knobs += ("SWAP",)
        self.knobs += ("num_warps", "num_stages")

    def default(self, problem, device):
        knobs = dict.fromkeys(self.knobs, 0)
        knobs |= {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 1, "PROGRAMS_PER_SM": 1}
        return KernelConfig.of(**knobs | {"num_warps": 4, "num_stages": 2})

    def space(self, device=None):
        return (self.default(None, device),)

    def supports(self, config, problem, device):
        if config["BLOCK_M"] > 256:
            return f"BLOCK_M is {config['BLOCK_M']}"
        permuted = {
            "grouped_gemm_fwd": {"permute_x": "TMA_X", "permute_y": "TMA_Y"},
            "grouped_gemm_dx": {"permute_x": "TMA_Y", "permute_y": "TMA_X"},
            "grouped_gemm_dw": {"permute_x": "TMA_X", "permute_y": "TMA_DY"},
        }[self.name]
        for flag in problem.flags:
            if config[permuted[flag]]:
                return f"{permuted[flag]} cannot be with {flag}"
        return None


def register():
    """Registers those that are missing; returns what was registered before."""
    before = dict(kernels._FAMILIES)
    for name, operands in (
        ("grouped_gemm_fwd", ("TMA_X", "TMA_W", "TMA_Y")),
        ("grouped_gemm_dx", ("TMA_X", "TMA_W", "TMA_Y")),
        ("grouped_gemm_dw", ("TMA_DY", "TMA_X", "TMA_DW")),
    ):
        if "TMA_X" not in getattr(kernels._FAMILIES.get(name), "knobs", ()):
            kernels._FAMILIES[name] = StandIn(name, operands)
    return before

"""`Operation`: what tells the three grouped GEMMs apart, for everything that all three do alike."""

from __future__ import annotations

from dataclasses import dataclass

#: The permutations that an operation can be fused with: `permute_x` where the layer gathers the rows of x while it
#: loads them, `permute_y` where it scatters the rows of y while it stores them. The backward operations mirror them.
PERMUTATIONS = ("permute_x", "permute_y")


@dataclass(frozen=True)
class Operation:
    """One product of a layer with w (groups, N, K): left @ right = out, each of which may go through TMA.

    `columns` and `depth` are the layer's dimensions that the output tile's columns and the contraction run along.
    """

    name: str
    columns: str
    depth: str
    tma_left: str  # the knob that loads the left operand with TMA
    tma_right: str
    tma_out: str
    permuted_by: tuple[tuple[str, str], ...]  # (permutation, the TMA knob that it rules out)

    @property
    def tma(self) -> tuple[str, str, str]:
        """The TMA knobs: left, right, out."""
        return self.tma_left, self.tma_right, self.tma_out


# y = x @ w.T: x is gathered, or y scattered.
FORWARD = Operation(
    "grouped_gemm_fwd", "n", "k", "TMA_X", "TMA_W", "TMA_Y", (("permute_x", "TMA_X"), ("permute_y", "TMA_Y"))
)
# dx = dy @ w, by the same kernel, whose x is dy and whose y is dx: dx is scattered, or dy gathered.
DX = Operation("grouped_gemm_dx", "k", "n", "TMA_X", "TMA_W", "TMA_Y", (("permute_x", "TMA_Y"), ("permute_y", "TMA_X")))
# dw = dy.T @ x: x or dy is sorted beforehand, so nothing is ruled out.
DW = Operation("grouped_gemm_dw", "k", "rows", "TMA_DY", "TMA_X", "TMA_DW", ())

OPERATIONS = {operation.name: operation for operation in (FORWARD, DX, DW)}

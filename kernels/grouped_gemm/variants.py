"""`Variant`: what tells the three grouped GEMMs apart; and the chunks of rows in which dW sums."""

from __future__ import annotations

from dataclasses import dataclass

#: The permutations that a variant can be fused with: `permute_x` where the layer gathers the rows of x while it
#: loads them, `permute_y` where it scatters the rows of y while it stores them. The backward operations mirror them.
PERMUTATIONS = ("permute_x", "permute_y")


@dataclass(frozen=True)
class Variant:
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
    dtype_argument: str  # the kernel's parameter that says the dtype
    permuting: tuple[tuple[str, str], ...]  # (permutation, the kernel's parameter that says so)
    kernel_n_k: tuple[str, str] = ("n", "k")  # the layer's dimensions that the kernel calls N and K

    @property
    def tma(self) -> tuple[str, str, str]:
        """The TMA knobs: left, right, out."""
        return self.tma_left, self.tma_right, self.tma_out

    @property
    def first_of_kernel(self) -> Variant:
        """The first variant that runs the same kernel: what depends on that alone is then found out once for both."""
        return next(variant for variant in VARIANTS.values() if variant.tma == self.tma)


# y = x @ w.T: x is gathered, or y scattered.
FORWARD = Variant(
    "grouped_gemm_fwd",
    columns="n",
    depth="k",
    tma_left="TMA_X",
    tma_right="TMA_W",
    tma_out="TMA_Y",
    permuted_by=(("permute_x", "TMA_X"), ("permute_y", "TMA_Y")),
    dtype_argument="x_ptr",
    permuting=(("permute_x", "GATHER"), ("permute_y", "SCATTER")),
)
# dx = dy @ w, by the same kernel, whose x is dy and whose y is dx: dx is scattered, or dy gathered.
DX = Variant(
    "grouped_gemm_dx",
    columns="k",
    depth="n",
    tma_left="TMA_X",
    tma_right="TMA_W",
    tma_out="TMA_Y",
    permuted_by=(("permute_x", "TMA_Y"), ("permute_y", "TMA_X")),
    dtype_argument="x_ptr",
    permuting=(("permute_x", "SCATTER"), ("permute_y", "GATHER")),
    kernel_n_k=("k", "n"),
)
# dw = dy.T @ x: x or dy is sorted beforehand, so nothing is ruled out, and the kernel does not know.
DW = Variant(
    "grouped_gemm_dw",
    columns="k",
    depth="rows",
    tma_left="TMA_DY",
    tma_right="TMA_X",
    tma_out="TMA_DW",
    permuted_by=(),
    dtype_argument="dy_ptr",
    permuting=(),
)

VARIANTS = {variant.name: variant for variant in (FORWARD, DX, DW)}


#: No piece is shorter: it would have too few steps to pay for the sum.
_LEAST_ROWS = 1024
_MULTIPLE = 128


def chunk_rows(rows: int, n: int, k: int, sm_count: int) -> int:
    """How many rows of one group dW sums at a time, at most: a sixth of what an SM has to do in all.

    One huge group among small ones is otherwise N x K / tile area long jobs for more SMs than that. Depends only on
    what the host knows. Where N x K is large no group is split, because its tiles alone keep the SMs even.

    >>> chunk_rows(65536, 1536, 2048, 132), chunk_rows(65536, 14336, 4096, 132)
    (8064, 65536)
    """
    tiles = cdiv(n, 128) * cdiv(k, 256)
    share = cdiv(rows * tiles, 6 * sm_count)
    return min(max(cdiv(share, _MULTIPLE) * _MULTIPLE, _LEAST_ROWS), max(rows, 1))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)

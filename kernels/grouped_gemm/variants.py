"""The differences between the three grouped GEMMs, and the chunks of rows over which dW sums."""

from __future__ import annotations

from dataclasses import dataclass

#: The permutations that can be fused into a layer: with `permute_x` it gathers the rows of x while loading them, with
#: `permute_y` it scatters the rows of y while storing them. The backward products mirror this.
PERMUTATIONS = ("permute_x", "permute_y")


@dataclass(frozen=True)
class Variant:
    """One of a layer's three matrix products (forward, dX, dW), written left @ right = out, with w (groups, N, K).

    Each of the operands and the output has a knob that turns on TMA.

    `columns` and `depth` name the layer's dimensions along which the output's columns and the contraction run.
    """

    name: str
    columns: str
    depth: str
    tma: tuple[str, str, str]  # the knobs that turn on TMA for the left operand, the right operand and the output
    dtype_argument: str  # the kernel's parameter whose dtype is the problem's
    permuting: tuple[tuple[str, str], ...]  # (permutation, the kernel's parameter that turns it on)
    kernel_n_k: tuple[str, str] = ("n", "k")  # the layer's dimensions that the kernel names N and K

    @property
    def permuted_by(self) -> tuple[tuple[str, str], ...]:
        """Pairs of a permutation and the TMA knob that must then be 0: of the gathered or scattered rows."""
        left, _, out = self.tma
        return tuple((flag, left if turned_on == "GATHER" else out) for flag, turned_on in self.permuting)

    @property
    def first_of_kernel(self) -> Variant:
        """The first variant that runs the same kernel as this one: forward for dX, else the variant itself.

        Values that depend on the kernel alone are cached under it.
        """
        return next(variant for variant in VARIANTS.values() if variant.tma == self.tma)


# y = x @ w.T: x is gathered, or y is scattered.
FORWARD = Variant(
    "grouped_gemm_fwd",
    columns="n",
    depth="k",
    tma=("TMA_X", "TMA_W", "TMA_Y"),
    dtype_argument="x_ptr",
    permuting=(("permute_x", "GATHER"), ("permute_y", "SCATTER")),
)
# dx = dy @ w, computed by the forward kernel with dy as its x and dx as its y: dx is scattered, or dy is gathered.
DX = Variant(
    "grouped_gemm_dx",
    columns="k",
    depth="n",
    tma=("TMA_X", "TMA_W", "TMA_Y"),
    dtype_argument="x_ptr",
    permuting=(("permute_x", "SCATTER"), ("permute_y", "GATHER")),
    kernel_n_k=("k", "n"),
)
# dw = dy.T @ x: the permuted operand, x or dy, is sorted in advance, so no TMA knob is excluded.
DW = Variant(
    "grouped_gemm_dw",
    columns="k",
    depth="rows",
    tma=("TMA_DY", "TMA_X", "TMA_DW"),
    dtype_argument="dy_ptr",
    permuting=(),
)

VARIANTS = {variant.name: variant for variant in (FORWARD, DX, DW)}


#: The smallest chunk, in rows: shorter ones have too few steps to pay for adding up the partial sums.
_LEAST_ROWS = 1024
_MULTIPLE = 128


def chunk_rows(rows: int, n: int, k: int, sm_count: int) -> int:
    """Return the maximum number of a group's rows that dW sums in one chunk: a sixth of the average work of an SM.

    Without chunks, one huge group among small ones would consist of N x K / (tile area) long jobs, too few to keep all
    SMs busy. The result depends only on values that the host knows. If N x K is large no group is split, because its
    tiles alone balance the SMs.

    >>> chunk_rows(65536, 1536, 2048, 132), chunk_rows(65536, 14336, 4096, 132)
    (8064, 65536)
    """
    tiles = cdiv(n, 128) * cdiv(k, 256)
    share = cdiv(rows * tiles, 6 * sm_count)
    return min(max(cdiv(share, _MULTIPLE) * _MULTIPLE, _LEAST_ROWS), max(rows, 1))


#: A kernel without tiles is faster for at most so many rows, if there are twice as many groups (H100;
#: tests/kernels/decode_on_gpu.py). More rows would cost too much where most of them are in one group.
_FEW_ROWS = 32
#: The largest N of that kernel, whose programs along N are the second dimension of its grid.
MOST_COLUMNS = 2**16 - 1


def is_few(rows: int, groups: int, n: int) -> bool:
    """Return whether `triton_kernels/few_rows.py` is faster than tiles: few rows, mostly in different groups.

    >>> is_few(8, 128, 512), is_few(64, 128, 512), is_few(8, 8, 512)
    (True, False, False)
    """
    return rows <= min(groups // 2, _FEW_ROWS) and n <= MOST_COLUMNS


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)

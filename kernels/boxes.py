"""The TMA descriptors that several products' launches make: of stacks of matrices, and of rows sorted by group."""

from __future__ import annotations

from ..runtime.launching.descriptors import Descriptor


def stack(
    tensor: int, matrices: int, rows: int, columns: int, box: tuple[int, int], *, ld: int | None = None, bits: int = 0
) -> Descriptor:
    """Return a descriptor of a stack of matrices that follow each other in memory, (matrices, rows, columns).

    The matrices are a dimension of their own, so that a box that extends past the end of one reads zeros there and
    writes nothing.

    Args:
        tensor: The index of the tensor among the launch's tensors.
        matrices: The number of matrices.
        rows: The rows of each.
        columns: The columns of each.
        box: The rows and columns of a box.
        ld: The elements between the beginnings of two rows; as many as columns if None.
        bits: See `Descriptor`.
    """
    ld = columns if ld is None else ld
    return Descriptor(tensor, (matrices, rows, columns), (rows * ld, ld, 1), (1, *box), bits)


def ragged(tensor: int, columns: int, box: tuple[int, int], *, bits: int = 0) -> Descriptor:
    """Return a descriptor of (rows, columns) sorted by group, for the functions of grouped_gemm's ragged.py.

    Args:
        tensor: The index of the tensor among the launch's tensors.
        columns: The columns.
        box: The rows and columns of a box, which ends where a group ends.
        bits: See `Descriptor`.
    """
    from .grouped_gemm.triton_kernels.ragged import FAR, MOST  # kernels are read when they are first launched

    far, most = int(FAR.value), int(MOST.value)
    return Descriptor(tensor, (most, most, far, columns), (2**34 - columns, columns, columns, 1), (1, 1, *box), bits)

"""A kernel of your own as a family: the softmax of each row of a matrix.

The class declares only what cannot be derived from the kernel. Everything else (compiling, launching, features, the
command line) is derived. `softmax_on_cpu.py` trains and predicts with it.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from foretune import DeviceSpec, KernelConfig, Problem, TritonFamily
from foretune.datasets import torch_dtype


@triton.jit
def softmax_kernel(x_ptr, y_ptr, n_rows, n_columns, x_stride, y_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Write the softmax of ROWS rows, each of which fits in one block."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]  # a whole row: BLOCK >= n_columns
    inside = (rows < n_rows) & (columns < n_columns)
    x = tl.load(x_ptr + rows.to(tl.int64) * x_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    powers = tl.exp(x - tl.max(x, axis=1)[:, None])
    y = powers / tl.sum(powers, axis=1)[:, None]
    tl.store(y_ptr + rows.to(tl.int64) * y_stride + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


#: The space: blocks of at least 2 and at most 64 elements for each thread.
CONFIGS = [
    triton.Config({"BLOCK": block, "ROWS": rows}, num_warps=warps)
    for block in (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    for rows in (1, 2, 4, 8)
    for warps in (2, 4, 8, 16)
    if 2 <= block * rows / (32 * warps) <= 64
]


class RowSoftmax(TritonFamily):
    """The family of the kernel: the softmax of each row of a `rows` x `columns` matrix."""

    name = "row_softmax"
    kernel = softmax_kernel
    configs = CONFIGS
    dims_from = {"rows": "n_rows", "columns": "n_columns"}
    dtypes = ("fp16", "fp32")
    output = "y_ptr"
    tiles = {"BLOCK": "columns", "ROWS": "rows"}
    ranges = {"rows": (1, 65536), "columns": (16, 16384)}

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem, or None: its block must cover a row."""
        reason = super().supports(config, problem, device)
        if reason is None and config["BLOCK"] < problem["columns"]:
            return f"BLOCK={config['BLOCK']} does not cover a row of {problem['columns']} columns"
        return reason

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one launch."""
        return 5.0 * problem["rows"] * problem["columns"]

    def bytes(self, problem: Problem) -> float:
        """Return the bytes that one launch reads and writes."""
        return 2.0 * problem["rows"] * problem["columns"] * problem.itemsize

    def arguments(self, problem: Problem, where: str) -> dict[str, object]:
        """Return the arguments of a launch, by parameter name, with tensors on the torch device `where`."""
        rows, columns = problem["rows"], problem["columns"]
        x = torch.randn(rows, columns, dtype=torch_dtype(problem.dtype_name), device=where)
        return {
            "x_ptr": x,
            "y_ptr": torch.empty_like(x),
            "n_rows": rows,
            "n_columns": columns,
            "x_stride": x.stride(0),
            "y_stride": x.stride(0),
        }

    def grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        """Return the grid of a launch."""
        return (-(-problem["rows"] // config["ROWS"]),)

    def eager(self, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute with PyTorch what the kernel should write."""
        return torch.softmax(arguments["x_ptr"].float(), dim=1)

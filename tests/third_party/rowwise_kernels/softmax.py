"""What Foretune needs to know of the softmax."""

import torch
from foretune import DeviceSpec, KernelConfig, Problem, TritonFamily
from foretune.datasets import torch_dtype

from .softmax_kernel import CONFIGS, softmax_kernel


class RowSoftmax(TritonFamily):
    name = "row_softmax"
    kernel = softmax_kernel
    configs = CONFIGS
    dims_from = {"rows": "n_rows", "columns": "n_columns"}
    dtypes = ("fp16", "fp32")
    output = "y_ptr"
    tiles = {"BLOCK": "columns", "ROWS": "rows"}
    ranges = {"rows": (1, 65536), "columns": (16, 16384)}

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        reason = super().supports(config, problem, device)
        if reason is None and config["BLOCK"] < problem["columns"]:
            return f"BLOCK={config['BLOCK']} does not cover a row of {problem['columns']} columns"
        return reason

    def flops(self, problem: Problem) -> float:
        return 5.0 * problem["rows"] * problem["columns"]

    def bytes(self, problem: Problem) -> float:
        return 2.0 * problem["rows"] * problem["columns"] * problem.itemsize

    def arguments(self, problem: Problem, where: str) -> dict:
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
        return (-(-problem["rows"] // config["ROWS"]),)

    def eager(self, arguments: dict) -> torch.Tensor:
        return torch.softmax(arguments["x_ptr"].float(), dim=1)

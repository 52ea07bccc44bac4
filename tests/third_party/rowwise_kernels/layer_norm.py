"""What Foretune needs to know of the LayerNorm."""

import torch
from foretune import DeviceSpec, KernelConfig, Problem, TritonFamily
from foretune.datasets import torch_dtype

from .layer_norm_kernel import CONFIGS, layer_norm_kernel


class LayerNorm(TritonFamily):
    name = "layer_norm"
    kernel = layer_norm_kernel
    configs = CONFIGS
    dims_from = {"rows": "n_rows", "columns": "n_columns"}
    dtypes = ("fp16", "fp32")
    output = "y_ptr"
    tiles = {"BLOCK": "columns", "ROWS": "rows"}
    ranges = {"rows": (1, 65536), "columns": (16, 16384)}

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        reason = super().supports(config, problem, device)
        if reason is None and config["BLOCK"] >= 2 * max(problem["columns"], 256):
            return f"BLOCK={config['BLOCK']} is mostly padding for {problem['columns']} columns"
        return reason

    def flops(self, problem: Problem) -> float:
        return 9.0 * problem["rows"] * problem["columns"]

    def bytes(self, problem: Problem) -> float:
        return 2.0 * (problem["rows"] + 1) * problem["columns"] * problem.itemsize

    def arguments(self, problem: Problem, where: str) -> dict:
        rows, columns = problem["rows"], problem["columns"]
        x, weight, bias = (
            torch.randn(shape, dtype=torch_dtype(problem.dtype_name), device=where)
            for shape in ((rows, columns), (columns,), (columns,))
        )
        tensors = {"x_ptr": x, "weight_ptr": weight, "bias_ptr": bias, "y_ptr": torch.empty_like(x)}
        return tensors | {"n_rows": rows, "n_columns": columns, "stride": x.stride(0), "eps": 1e-5}

    def grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        return (-(-problem["rows"] // config["ROWS"]),)

    def eager(self, arguments: dict) -> torch.Tensor:
        x, weight, bias = (arguments[name].float() for name in ("x_ptr", "weight_ptr", "bias_ptr"))
        return torch.nn.functional.layer_norm(x, x.shape[1:], weight, bias, arguments["eps"])

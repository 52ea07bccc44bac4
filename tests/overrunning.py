"""Kernels that write outside of their output, and the contract of each, which `test_contract_launches.py` runs."""

import torch
import triton
import triton.language as tl
from foretune import TritonFamily
from foretune.datasets import torch_dtype
from foretune.kernels.testing import FamilyContract


@triton.jit
def add_relu_kernel(x_ptr, bias_ptr, y_ptr, n_rows, n_columns, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (columns < n_columns) & (rows >= 0)  # and nothing for n_rows
    x = tl.load(x_ptr + rows * n_columns + columns, mask=inside & (rows < n_rows))
    bias = tl.load(bias_ptr + columns, mask=columns < n_columns)
    tl.store(y_ptr + rows * n_columns + columns, tl.maximum(x + bias, 0.0), mask=inside)


@triton.jit
def far_kernel(x_ptr, bias_ptr, y_ptr, n_rows, n_columns, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.arange(0, BLOCK).to(tl.int64)
    tl.store(y_ptr + columns + (1 << 40), tl.load(x_ptr + columns, mask=columns < n_columns))


class AddRelu(TritonFamily):
    """The first config alone is right whatever is launched."""

    name, kernel = "add_relu", add_relu_kernel
    configs = [triton.Config({"BLOCK": block, "ROWS": rows}) for rows in (1, 4) for block in (64, 128)]
    dims_from = {"rows": "n_rows", "columns": "n_columns"}
    dtypes = ("fp32",)
    output = "y_ptr"
    tiles = {"BLOCK": "columns", "ROWS": "rows"}
    ranges = {"rows": (1, 4096), "columns": (1, 4096)}

    def arguments(self, problem, where):
        shape, dtype = (problem["rows"], problem["columns"]), torch_dtype(problem.dtype_name)
        x, bias = (torch.randn(size, dtype=dtype, device=where) for size in (shape, shape[1:]))
        sizes = {"n_rows": shape[0], "n_columns": shape[1]}
        return {"x_ptr": x, "bias_ptr": bias, "y_ptr": torch.empty_like(x)} | sizes

    def grid(self, problem, config):
        return (triton.cdiv(problem["rows"], config["ROWS"]), triton.cdiv(problem["columns"], config["BLOCK"]))

    def eager(self, arguments):
        return torch.relu(arguments["x_ptr"] + arguments["bias_ptr"])


class Far(AddRelu):
    name, kernel = "far", far_kernel


class TestAddRelu(FamilyContract):
    family = AddRelu


class TestFar(FamilyContract):
    family = Far

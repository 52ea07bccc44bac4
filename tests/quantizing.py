"""A kernel with three outputs, of int8, fp32 and booleans, and its family."""

import torch
import triton
import triton.language as tl
from foretune import TritonFamily


@triton.jit
def quantize_kernel(x_ptr, q_ptr, scale_ptr, large_ptr, n_columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n_columns + at, mask=at < n_columns, other=0.0)
    scale = tl.max(tl.abs(x), 0) / 127
    q = x / scale
    q = tl.where(q >= 0, tl.floor(q + 0.5), tl.ceil(q - 0.5))
    tl.store(q_ptr + row * n_columns + at, q.to(tl.int8), mask=at < n_columns)
    tl.store(scale_ptr + row, scale)
    tl.store(large_ptr + row, scale > 0.02)


class Quantize(TritonFamily):
    """Has an int8, an fp32 and a boolean output."""

    name, kernel = "quantize", quantize_kernel
    configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
    dims_from = {"rows": lambda call: call["x_ptr"].shape[0], "columns": "n_columns"}
    dtypes = ("fp32",)
    output = ("q_ptr", "scale_ptr", "large_ptr")
    ranges = {"rows": (1, 64), "columns": (1, 64)}

    def arguments(self, problem, where):
        rows, columns = problem["rows"], problem["columns"]
        made = {"x_ptr": torch.randn(rows, columns, device=where)}
        # Filled, because empty memory may have the results of an earlier launch.
        made["q_ptr"] = torch.full((rows, columns), -128, dtype=torch.int8, device=where)
        made["scale_ptr"] = torch.full((rows,), -1.0, device=where)
        made["large_ptr"] = torch.full((rows,), 2, dtype=torch.uint8, device=where).view(torch.bool)
        return made | {"n_columns": columns}

    def grid(self, problem, config):
        return (problem["rows"],)

    def eager(self, arguments):
        x = arguments["x_ptr"]
        scale = x.abs().amax(1) / 127
        q = x / scale[:, None]
        return [torch.where(q >= 0, (q + 0.5).floor(), (q - 0.5).ceil()).to(torch.int8), scale, scale > 0.02]

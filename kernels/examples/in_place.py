"""A kernel that works in place: x = gelu(x + bias).

The parameter that the family's `output` names is then also an input. `in_place` lists it, so that Foretune restores it
before each launch, outside of the timed interval, instead of filling it with NaN. This serves collecting and tests.

In your program, pass `restore_value=["x_ptr"]` to `triton.autotune` (also with `foretune.prune`) and
`foretune.autotune`: without it, each config that they time changes x.
"""

from collections.abc import Mapping

import foretune
import torch
import triton
import triton.language as tl
from foretune import DeviceSpec, KernelConfig, Problem, TritonFamily
from foretune.datasets import torch_dtype


@triton.jit
def bias_gelu_kernel(x_ptr, bias_ptr, n_elements, n_columns, BLOCK: tl.constexpr):
    """Add the bias to BLOCK elements and apply GELU, in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n_elements
    x = tl.load(x_ptr + at, mask=inside).to(tl.float32)
    x += tl.load(bias_ptr + at % n_columns, mask=inside).to(tl.float32)
    y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(x_ptr + at, y.to(x_ptr.dtype.element_ty), mask=inside)


class BiasGelu(TritonFamily):
    """The family of the in-place kernel: GELU of a `rows` x `columns` matrix plus a bias for each column."""

    name = "bias_gelu"
    kernel = bias_gelu_kernel
    configs = [
        triton.Config({"BLOCK": block}, num_warps=warps)
        for block in (256, 512, 1024, 2048, 4096)
        for warps in (1, 2, 4, 8)
        if block >= 64 * warps
    ]
    dims_from = {"rows": lambda call: call["n_elements"] // call["n_columns"], "columns": "n_columns"}
    output = "x_ptr"
    in_place = ("x_ptr",)
    dtypes = ("bf16", "fp32")
    ranges = {"rows": (1, 65536), "columns": {768, 1024, 2048, 4096, 8192}}
    most_bytes = 2.0**30

    def bytes(self, problem: Problem) -> float:
        """Return the bytes that one launch reads and writes."""
        return 2.0 * problem["rows"] * problem["columns"] * problem.itemsize

    def arguments(self, problem: Problem, where: str) -> dict[str, object]:
        """Return the arguments of a launch, by parameter name, with tensors on the torch device `where`."""
        rows, columns, dtype = problem["rows"], problem["columns"], torch_dtype(problem.dtype_name)
        return {
            "x_ptr": torch.randn(rows, columns, dtype=dtype, device=where),
            "bias_ptr": torch.randn(columns, dtype=dtype, device=where),
            "n_elements": rows * columns,
            "n_columns": columns,
        }

    def grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        """Return the grid of a launch."""
        return (-(-problem["rows"] * problem["columns"] // config["BLOCK"]),)

    def eager(self, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute with PyTorch what the kernel should leave in x."""
        return torch.nn.functional.gelu(arguments["x_ptr"].float() + arguments["bias_ptr"].float())


def main() -> None:
    """Print how many configs can run a problem on an H200, and compile one for it. Needs no GPU."""
    family, device = BiasGelu(), DeviceSpec.named("h200")
    problem = Problem.of("bias_gelu", rows=4096, columns=1024, dtype="bf16")
    able = [config for config in family.space(device) if family.supports(config, problem, device) is None]
    with foretune.testing.use_stub_device(device):
        binary = family.compile(able[0], problem)
    print(f"{problem} on {device.name}: {len(able)} of {len(family.space())} configs can run")
    print(f"{able[0]} compiles to {len(binary.asm['ptx'].splitlines())} lines of PTX")


if __name__ == "__main__":
    main()

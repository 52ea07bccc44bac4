"""The engines' MoE products as `Measurable` families: inputs, launches, references and the workload.

torch and triton are imported inside the functions that need them. Of an engine only the kernel is loaded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, KernelConfig, Problem, torch_dtype
from ...runtime.launching.source_hash import combined_hash
from ..gemm_family import ROUNDED_ONCE, MeasuredFamily, seeded
from ..workloads import Draws
from . import workload
from .engines import (
    ENGINES,
    SCALED_BLOCK,
    SGLANG,
    EngineMissingError,
    default_config,
    engine_kernel,
    engine_of,
    engine_version,
    installed,
)
from .family import FusedMoeFamily
from .launching import BLOCKS_M, Product, uses_tma, with_tma

if TYPE_CHECKING:
    import torch

    from ...runtime.launching.kernel import Kernel

#: Launch options that the engines pass in addition to the kernel's constants.
_OPTIONS = ("num_warps", "num_stages", "num_ctas")


@dataclass(frozen=True)
class Blocks:
    """The routed rows in the layout that the kernel expects if its tiles have one particular BLOCK_SIZE_M.

    Rows are sorted by expert, and each expert's rows are padded to a multiple of BLOCK_SIZE_M.
    """

    sorted_rows: torch.Tensor | None  # (length,) int32; padding entries hold the number of rows; None if unsorted
    experts: torch.Tensor  # (blocks,) int32
    padded: torch.Tensor  # (1,) int32: the number of entries of sorted_rows in use


@dataclass(frozen=True)
class Inputs:
    """The tensors of one launch of an MoE product, on the device."""

    product: Product
    device: DeviceSpec
    x: torch.Tensor  # (input rows, k)
    w: torch.Tensor  # (experts, n, k)
    y: torch.Tensor  # (rows, n), filled with NaN
    x_scale: torch.Tensor | None  # (input rows, k / 128) float32
    w_scale: torch.Tensor | None  # (experts, n / 128, k / 128) float32
    chosen: torch.Tensor  # (tokens, topk) int32
    weights: torch.Tensor  # (tokens, topk) float32
    blocks: dict[int, Blocks]  # by BLOCK_SIZE_M
    #: By BLOCK_SIZE_M: sorted and padded x, and its scales. For the second product of SGLang's kernel on CUDA.
    sorted_x: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """The problem that the tensors are for."""
        return self.product.problem


class FusedMoe(FusedMoeFamily, MeasuredFamily):
    """Base of both families, `FusedMoeUp` and `FusedMoeDown`: inputs, launches and checks for measuring them."""

    # fp8 results are bf16, too, and Hopper accumulates 128 products with about 14 bits before it applies scales
    # (DeepSeek-V3's report, section 3.3.2).
    tolerances: ClassVar[Mapping[str, float]] = ROUNDED_ONCE | {"fp8e4m3": 8e-3}

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Return problems of real models and random layers for the installed engines, or for SGLang if there are none.

        The arguments are those of `MeasuredFamily.draw`.
        """
        engines = installed() or (SGLANG,)
        return workload.draw(self.name, self.down, engines, Draws(max_tflop, **drawn), models=models)

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of a problem."""
        product = Product(problem, self.down)
        return 2.0 * product.rows * product.n * product.k

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that a problem must read and write."""
        product = Product(problem, self.down)
        active = min(product.rows, problem["experts"])
        read = float(active) * product.n * product.k + float(product.input_rows) * product.k
        return read * problem.itemsize + 2.0 * product.rows * product.n

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config that the serving engine runs for a layer without a tuned file."""
        config = default_config(engine_of(problem), problem.dtype_name, problem["tokens"], problem["experts"])
        return with_tma(config, 0) if self.down else config

    def same_bits_config(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config that sets the option `same_bits`: it allows only configs whose results have the same bits.

        On the shipped data, configs of this class are closer to the fastest than those of any other class. The config
        is not the default, because defaults have values of BLOCK_SIZE_K that the space does not have.
        """
        step = 128 if problem.dtype == "fp8e4m3" else 64
        tile = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": step, "GROUP_SIZE_M": 1}
        config = KernelConfig.of(**tile, num_warps=4, num_stages=3)
        return with_tma(config, 0) if self.down else config

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        """Return random inputs on the device, and an output filled with NaN."""
        import torch

        where, generator = seeded(device, seed)
        product = Product(problem, self.down)
        dtype = torch_dtype(problem.dtype_name)
        made = torch.bfloat16 if product.is_scaled else dtype

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=where, dtype=made).to(dtype)

        def scales(*shape: int) -> torch.Tensor | None:
            return torch.rand(*shape, generator=generator, device=where) + 0.5 if product.is_scaled else None

        rows, experts, n, k = product.input_rows, problem["experts"], product.n, product.k
        blocks_k = -(-k // SCALED_BLOCK)
        chosen = chosen_experts(product, generator, where)
        inputs = Inputs(
            product=product,
            device=device,
            x=random(rows, k),
            w=random(experts, n, k),
            y=torch.full((product.rows, n), float("nan"), dtype=made, device=where),
            x_scale=scales(rows, blocks_k),
            w_scale=scales(experts, -(-n // SCALED_BLOCK), blocks_k),
            chosen=chosen,
            weights=torch.rand(chosen.shape, generator=generator, device=where),
            blocks={block: blocks_of(product, chosen, block) for block in BLOCKS_M},
        )
        if self.down and engine_of(problem) == SGLANG and where == "cuda":
            inputs.sorted_x.update({block: _sorted_x(inputs, block) for block in BLOCKS_M})
        return inputs

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the engine's kernel once and return the output."""
        kernel = _kernel(inputs.product.problem)
        grid = (inputs.product.programs(config),)
        kernel.launch(grid, _given(kernel, inputs.product, config, inputs.device, _tensors(inputs, config)))
        return inputs.y

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the kernel with a config for a problem, without launching it."""
        import triton

        product, kernel = Product(problem, self.down), _kernel(problem)
        target = triton.runtime.driver.active.get_current_target()
        # Only the device's backend and arch matter. The active driver, which may be a stub, reports both.
        h200 = DeviceSpec.named("h200")
        device = replace(h200, backend=target.backend, arch=f"sm_{target.arch}", name=f"any sm_{target.arch}")
        given = _given(kernel, product, config, device, _stand_ins(product, config))
        return kernel.compile((product.programs(config),), given)

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Compute in float32 with PyTorch what `launch` returns."""
        import torch

        product = inputs.product
        flat, weights = inputs.chosen.flatten(), inputs.weights.flatten()
        out = torch.full(inputs.y.shape, float("nan"), dtype=torch.float32, device=inputs.y.device)
        x = _unscaled(inputs.x, inputs.x_scale, rows_a_scale=1)
        for expert in torch.unique(flat).tolist():
            rows = (flat == expert).nonzero().flatten()
            scale = None if inputs.w_scale is None else inputs.w_scale[expert]
            w = _unscaled(inputs.w[expert], scale, rows_a_scale=SCALED_BLOCK)
            out[rows] = x[rows // product.top_k] @ w.T
        return out * weights[:, None] if self.down else out

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """Return a small problem with the same binary, to check a config's results.

        Sizes are equal modulo 256 to those of `problem`, or modulo 16 if the binary depends on nothing else. If no
        small problem has the same binary, `problem` itself is returned.
        """
        experts, tokens = problem["experts"], problem["tokens"]
        few = max(problem["topk"], 16)
        few += (experts - few) % 16
        small = Problem.of(
            self.name,
            dtype=problem.dtype_name,
            flags=problem.flags,
            experts=min(few, experts),
            topk=problem["topk"],
            hidden=min(problem["hidden"], 512 + problem["hidden"] % 256),
            inter=min(problem["inter"], 256 + problem["inter"] % 256),
            tokens=min(tokens, 96 + tokens % 16 if tokens <= 512 else 528 + tokens % 16),
        )
        return small if self.binary_key(config, small) == self.binary_key(config, problem) else problem

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return what determines the compiled binary of a config and problem."""
        return config, problem.signature, Product(problem, self.down).specialisation(config)

    def source_hash(self) -> str:
        """Return the hash of the kernels of all installed engines.

        Raises:
            EngineMissingError: No engine is installed.
        """
        found = installed()
        if not found:
            raise EngineMissingError(f"none of the engines is installed: pip install {' or '.join(ENGINES)}")
        return combined_hash(_kernel_of(engine).source_hash() for engine in found)


class FusedMoeUp(FusedMoe):
    """The family of a layer's first product: y[token, choice] = x[token] @ w13[expert].T, (tokens * topk, 2 * inter).

    >>> family, h200 = FusedMoeUp(), DeviceSpec.named("h200")
    >>> problem = Problem.of("fused_moe", experts=64, topk=8, hidden=2048, inter=1024, tokens=128)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    down = False


class FusedMoeDown(FusedMoe):
    """The family of a layer's second product: y[token, choice] = weight * x[token, choice] @ w2[expert].T.

    y is (tokens * topk, hidden).

    The engines sort rows once per layer, so the two products share BLOCK_SIZE_M there. With USE_TMA (SGLang), x is
    sorted and padded, as the first product stores it in that case.

    >>> FusedMoeDown().knobs[-1]
    'USE_TMA'
    """

    down = True


def _kernel(problem: Problem) -> Kernel:
    """Return the kernel of a problem's engine."""
    return _kernel_of(engine_of(problem))


def _kernel_of(engine: str) -> Kernel:
    """Return an engine's kernel, ready to compile and launch."""
    from ...runtime.launching.kernel import Kernel

    return Kernel(engine_kernel(engine))


def _given(
    kernel: Kernel, product: Product, config: KernelConfig, device: DeviceSpec, tensors: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments and options of a launch by name, only those that the installed kernel has.

    Raises:
        EngineMissingError: The kernel has a parameter that Foretune does not know.
    """
    import triton.language as tl

    kind = tl.float16 if product.problem.dtype == "fp16" else tl.bfloat16
    values = tensors | product.numbers(config) | product.constants(config, device) | {"compute_type": kind}
    options = [*_OPTIONS] + ["launch_pdl"] * ("USE_GDC" in kernel.parameters and "launch_pdl" in values)
    if unknown := [name for name in kernel.parameters if name not in values and name not in kernel.defaults]:
        engine = engine_of(product.problem)
        raise EngineMissingError(
            f"the fused_moe_kernel of {engine} {engine_version(engine)} has the parameter {unknown[0]}, which Foretune "
            "does not know; it supports the kernels of SGLang 0.5.23 and vLLM 0.32"
        )
    return {name: values[name] for name in (*kernel.parameters, *options) if name in values}


def _tensors(inputs: Inputs, config: KernelConfig) -> dict[str, Any]:
    """Return the kernel's tensors and descriptors by the engines' parameter names."""
    block_m = config["BLOCK_SIZE_M"]
    blocks, x, x_scale = inputs.blocks[block_m], inputs.x, inputs.x_scale
    if uses_tma(config):
        x, x_scale = inputs.sorted_x[block_m]
    tensors = {
        "a_ptr": x,
        "b_ptr": inputs.w,
        "c_ptr": inputs.y,
        "a_scale_ptr": x_scale,
        "b_scale_ptr": inputs.w_scale,
        "topk_weights_ptr": inputs.weights,
        "sorted_token_ids_ptr": blocks.sorted_rows,
        "expert_ids_ptr": blocks.experts,
        "num_tokens_post_padded_ptr": blocks.padded,
    }
    return tensors | _absent() | _descriptors(x, inputs.w, config)


def _stand_ins(product: Product, config: KernelConfig) -> dict[str, Any]:
    """Return tensors without memory that have the types and alignment of those from `_tensors`."""
    import torch

    def like(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape or (16,), dtype=dtype, device="meta")

    element = torch_dtype(product.problem.dtype_name)
    scale = like(torch.float32) if product.is_scaled else None
    w = like(element, product.problem["experts"], product.n, product.k)
    x = like(element, product.rows, product.k)
    tensors = {
        "a_ptr": x,
        "b_ptr": w,
        "c_ptr": like(torch.bfloat16 if product.is_scaled else element),
        "a_scale_ptr": scale,
        "b_scale_ptr": scale,
        "topk_weights_ptr": like(torch.float32),
        "sorted_token_ids_ptr": None if product.is_unsorted else like(torch.int32),
        "expert_ids_ptr": like(torch.int32),
        "num_tokens_post_padded_ptr": like(torch.int32),
    }
    return tensors | _absent() | _descriptors(x, w, config)


def _absent() -> dict[str, Any]:
    """Return the tensor parameters that Foretune's launches never use, each with the value None."""
    return dict.fromkeys(("a_desc", "b_desc", "bias_ptr", "b_bias_ptr", "add_mask_ptr"))


def _descriptors(x: torch.Tensor, w: torch.Tensor, config: KernelConfig) -> dict[str, Any]:
    """Return the TMA descriptors of a config with USE_TMA; otherwise nothing."""
    if not uses_tma(config):
        return {}
    from triton.tools.tensor_descriptor import TensorDescriptor

    m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    return {
        "a_desc": TensorDescriptor(x, list(x.shape), list(x.stride()), [m, k]),
        "b_desc": TensorDescriptor(w, list(w.shape), list(w.stride()), [1, n, k]),
    }


def _sorted_x(inputs: Inputs, block_m: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the second product's input and scales, sorted by expert in blocks of `block_m` rows, padded with zeros."""
    rows = inputs.blocks[block_m].sorted_rows
    assert rows is not None
    real = rows < inputs.product.rows
    x = inputs.x.new_zeros(len(rows), inputs.product.k)
    x[real] = inputs.x[rows[real].long()]
    if inputs.x_scale is None:
        return x, None
    scale = inputs.x_scale.new_zeros(len(rows), inputs.x_scale.shape[1])
    scale[real] = inputs.x_scale[rows[real].long()]
    return x, scale


def _unscaled(values: torch.Tensor, scale: torch.Tensor | None, rows_a_scale: int) -> torch.Tensor:
    """Return values, (rows, columns), as float32, multiplied by the scales of their (rows_a_scale, 128) blocks."""
    full = values.float()
    if scale is None:
        return full
    wide = scale.repeat_interleave(rows_a_scale, 0)[: full.shape[0]].repeat_interleave(SCALED_BLOCK, 1)
    return full * wide[:, : full.shape[1]]


def chosen_experts(product: Product, generator: torch.Generator, where: str) -> torch.Tensor:
    """Draw topk different experts for each token uniformly, on the torch device `where`: (tokens, topk) int32."""
    import torch

    tokens, experts, topk = (product.problem[dim] for dim in ("tokens", "experts", "topk"))
    chances = torch.rand(tokens, experts, generator=generator, device=where)
    return chances.topk(topk, dim=1).indices.to(torch.int32)


def blocks_of(product: Product, chosen: torch.Tensor, block_m: int) -> Blocks:
    """Sort the routed rows by their chosen experts (tokens, topk), in blocks of `block_m` rows of one expert.

    The engines do this with compiled CUDA kernels (`moe_align_block_size`), which need not be installed. Here it is
    plain PyTorch, which is not part of the timed launch.
    """
    import torch

    flat, experts = chosen.flatten(), product.problem["experts"]
    device, rows = flat.device, flat.numel()

    def filled(size: int, value: int) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.int32, device=device)

    if product.is_unsorted:
        return Blocks(None, flat.contiguous(), filled(1, rows * block_m))
    counts = torch.bincount(flat.long(), minlength=experts)
    padded = (counts + block_m - 1) // block_m * block_m
    begins = padded.cumsum(0) - padded  # the first entry of each expert in the padded list
    order = flat.long().argsort(stable=True)
    expert = flat[order].long()
    within = torch.arange(rows, device=device) - (counts.cumsum(0) - counts)[expert]
    length = product.sorted_length(block_m)
    sorted_rows = filled(length, rows)
    sorted_rows[begins[expert] + within] = order.to(torch.int32)
    blocks = torch.repeat_interleave(torch.arange(experts, device=device), padded // block_m).to(torch.int32)
    named = filled(-(-length // block_m), 0)
    named[: len(blocks)] = blocks
    return Blocks(sorted_rows, named, padded.sum().to(torch.int32).reshape(1))

"""The dense GEMM as a family: prediction, pruning and measurement.

torch and triton are imported when they are needed; prediction needs neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, KernelConfig, Problem, torch_dtype
from ...datasets.family import KernelChange
from ...runtime.launching.results import poison
from ..config_limits import TMA_ARCHS, WITHOUT_CONSUMERS, Knobs
from ..gemm_family import (
    BANDS_AND_PROGRAMS,
    ROUNDED_ONCE,
    Configs,
    GemmFamily,
    Groups,
    MeasuredFamily,
    saved_by_descriptors,
    seeded,
)
from ..numerics import padded, product_class
from ..workloads import Draws, load_dense_models
from . import workload
from .features import FEATURE_NAMES, feature_groups
from .space import (
    A_KM,
    ACTIVATIONS,
    ALIGNMENT_BYTES,
    B_KN,
    BIAS,
    DTYPES,
    FLAGS,
    KNOBS,
    activation_of,
    call_dims,
    full_space,
    is_aligned,
    output_dtype,
    smem_bytes,
    wrong_knob,
    wrong_unaligned_tile,
)

if TYPE_CHECKING:
    import torch

#: The largest dimension: rows and columns of tiles have 32 bits, and may reach past the end by a block.
MOST_SIZE = 2**30
#: The most tiles of a product, which are counted in 32 bits.
MOST_TILES = 2**31 - 1
#: The most partial sums of SPLIT_K, 8 GiB in float32. Products that would need more have enough tiles without splitting
#: K; with 50 GiB launches failed on an H200 (illegal memory accesses).
MOST_PARTIALS = 2**31 - 1
#: The smallest K at which a sum of products of int8, each at most 2^14, may overflow int32.
_EXACT_DEPTH = 2**17
#: The dtypes whose bits were compared on a card between kinds of instructions, and between values of BLOCK_K.
_COMPARED = ("bf16", "fp16", "tf32")
_KERNELS = ("epilogue", "gemm", "specialized", "split_k", "tile_order")


@dataclass(frozen=True)
class Inputs:
    """The tensors of one launch of a dense product, on the device, in the layouts that the problem's flags name."""

    a: torch.Tensor  # (batch, M, K) or (batch, K, M)
    b: torch.Tensor  # (batch, N, K) or (batch, K, N)
    bias: torch.Tensor | None  # (N,)
    y: torch.Tensor  # (batch, M, N); filled with NaN, or with the smallest int32
    problem: Problem
    device: DeviceSpec


class Matmul(GemmFamily, MeasuredFamily):
    """The family of dense products, y[i] = activation(a[i] @ b[i] + bias) for i < batch: a (M, K), b (K, N), y (M, N).

    A problem without flags is a linear layer's product, x (M, K) @ w.T: a is stored as (M, K) and b as (N, K), with
    rows along K. Flags are "a_km" (a is stored as (K, M)), "b_kn" (b is stored as (K, N)), "bias" (N,), and one of
    "relu", "gelu" (the exact one) and "silu". The gradient of the layer's input, dy @ w, has "b_kn"; that of its
    weight, dy.T @ x, has "a_km" and "b_kn".

    >>> family, h200 = Matmul(), DeviceSpec.named("h200")
    >>> problem = Problem.of("matmul", batch=1, m=8192, n=4096, k=4096, flags=("bias", "gelu"))
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "matmul"
    dims = ("batch", "m", "n", "k")
    dtypes = DTYPES
    knobs = KNOBS
    default_knobs: ClassVar[Mapping[str, Any]] = WITHOUT_CONSUMERS
    flags = FLAGS
    default_dims: ClassVar[Mapping[str, int]] = {"batch": 1}
    largest: ClassVar[Mapping[str, int]] = dict.fromkeys(dims, MOST_SIZE)
    independent = ("m",)
    bucketed = ("m", "k")  # at most one of them per problem: see `call_dims`
    feature_names = FEATURE_NAMES
    dtype_argument = "a_ptr"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {
        "batch": ("batch", 1),
        "m": ("M", 1),
        "n": ("N", 1),
        "k": ("K", 1),
    }
    least_elements = 1
    estimated_by = ("estimate_us",)
    # tf32 operands are rounded to 2^-11 each, or truncated, which is twice as far. int32 is exact.
    tolerances: ClassVar[Mapping[str, float]] = ROUNDED_ONCE | {"fp32": 1e-3, "int8": 1e-6}
    kernel_modules = ("warp_jobs", "dependent_launch", *(f"matmul.triton_kernels.{name}" for name in _KERNELS))
    launch_knobs = BANDS_AND_PROGRAMS | {"SPLIT_K": (1, 2), "PROGRAMS_PER_SM": (0, 1)}
    descriptors: ClassVar[Mapping[str, Sequence[int]]] = {"TMA": (0, 2, 3)}
    kernel_changes = (
        KernelChange(
            "60fcd5af84641d61+e1c74a513b4893dc", "cfca5e6091418bb9+2c4c4432f06ae5cb", None, saved_by_descriptors
        ),
        # Configs with two CONSUMERS and without PINGPONG store a tile during the next one: a little faster, and kept.
        KernelChange("cfca5e6091418bb9+2c4c4432f06ae5cb", "8a208e4fd62134e1+579eddff1e41ad97", None),
        # Programs with CONSUMERS set up fewer barriers: short times became a little shorter, and are kept.
        KernelChange("8a208e4fd62134e1+579eddff1e41ad97", "6947943392af5f84+69221114bde2afd4", None),
    )

    def full_space(self) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring, for all devices."""
        return full_space()

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        """Return the shared memory of one program, in bytes, if an element has `elements` bytes."""
        return smem_bytes(config, elements, device)

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        """Return why these knob values are invalid for every problem, or None if they are valid for some."""
        return wrong_knob(knobs)

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, or None."""
        after = [flag for flag in problem.flags if flag in (BIAS, *ACTIVATIONS)]
        if problem.dtype == "int8" and after:
            return f"{after[0]} is not available for int8, which is summed in int32"
        if len(activations := [flag for flag in after if flag != BIAS]) > 1:
            return f"a problem can have one activation at most but has {' and '.join(activations)}"
        for dim in self.dims:
            if not 1 <= problem[dim] <= MOST_SIZE:
                return f"{dim} must be between 1 and {MOST_SIZE} but is {problem[dim]}"
        return None

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config cannot run a problem on any device, or None."""
        knobs: Mapping[str, Any] = config.to_json()
        if not is_aligned(problem):
            if tma := knobs["TMA"]:
                return f"TMA must be 0 but is {tma}: rows of this problem do not begin at multiples of 16 bytes"
            if (wrong := wrong_unaligned_tile(knobs, problem.itemsize)) is not None:
                return wrong
        if knobs["CONSUMERS"] and problem.itemsize != 2:
            consumers, dtype = knobs["CONSUMERS"], problem.dtype_name
            return f"CONSUMERS must be 0 in {dtype} but is {consumers}: the warp-specialized kernel takes 16-bit dtypes"
        if problem.dtype == "int8" and knobs["BLOCK_K"] < 32:
            return f"BLOCK_K must be at least 32 in int8 but is {knobs['BLOCK_K']}"
        tiles = problem["batch"] * knobs["SPLIT_K"]
        tiles *= -(-problem["m"] // knobs["BLOCK_M"]) * -(-problem["n"] // knobs["BLOCK_N"])
        if tiles > MOST_TILES:
            return f"{tiles} tiles do not fit into 32 bits: BLOCK_M or BLOCK_N must be larger, or SPLIT_K smaller"
        partials = problem["batch"] * knobs["SPLIT_K"] * problem["m"] * problem["n"]
        if knobs["SPLIT_K"] > 1 and partials > MOST_PARTIALS:
            return (
                f"SPLIT_K must be smaller than {knobs['SPLIT_K']} for this problem: it needs {partials} partial sums, "
                f"and at most {MOST_PARTIALS} are allowed"
            )
        return None

    def numerics(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return the numerics class: configs of equal classes compute identical bits.

        It is `product_class` of the tile (tf32 for float32), and into how many parts SPLIT_K divides K. int8 has one
        class if K is so small that no sum overflows: integer sums are then exact in any order.
        """
        k, step, parts, dtype = problem["k"], config["BLOCK_K"], config["SPLIT_K"], problem.dtype_name
        if dtype == "int8" and k < _EXACT_DEPTH:
            return ("exact",)
        dtype = "tf32" if dtype == "fp32" else dtype
        found = product_class(config["BLOCK_M"], config.num_warps, step, k, dtype, _COMPARED)
        if parts == 1:
            return found
        return *found, parts, padded(-(-padded(k, step) // parts), step)  # the length of a part: `split_range`

    def supports_by(self, problem: Problem) -> Hashable:
        """Return a key: `supports` gives the same answers for two problems with equal keys."""
        batch, m, n = problem["batch"], problem["m"], problem["n"]
        # Whether too many tiles are possible: the smallest are 16 x 16, times 64 parts of K.
        if self.refused(problem) or batch * (m // 16 + 1) * (n // 16 + 1) > MOST_TILES // 64:
            return problem
        return problem.dtype, problem.flags, is_aligned(problem), min(MOST_PARTIALS // (batch * m * n), 64)

    def at_call_time(self, problem: Problem) -> Problem:
        """Return the problem for which a call's config is predicted; the size that varies between calls is rounded."""
        return problem.without_sizes().rounded(*call_dims(problem))

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        """Return the features of one problem, grouped by what the columns depend on."""
        return feature_groups(problem, device, configs)

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the flags of the problem that a launch's arguments describe."""
        given = {A_KM: arguments.get("A_KM"), B_KN: arguments.get("B_KN"), BIAS: arguments.get("bias_ptr") is not None}
        flags = [flag for flag, is_set in given.items() if is_set]
        return flags + [activation for activation in ACTIVATIONS if activation == arguments.get("ACTIVATION")]

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        return workload.draw(load_dense_models(models), Draws(max_tflop, **drawn))

    def flops(self, problem: Problem) -> float:
        """Return the number of floating-point operations of a problem."""
        return 2.0 * problem["batch"] * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that a problem must read and write."""
        batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
        out_itemsize = 4 if output_dtype(problem) == "int32" else problem.itemsize
        return float(batch) * (problem.itemsize * (m + n) * k + out_itemsize * m * n)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config to run when nothing was measured or predicted."""
        m = problem["m"]
        block_m, block_n, block_k = (16, 64, 128) if m <= 16 else (64, 64, 64) if m <= 64 else (128, 128, 64)
        aligned = is_aligned(problem)
        for stages in (4, 3, 2, 1):
            config = KernelConfig.of(
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_K=block_k * 2 // max(problem.itemsize, 2),
                GROUP_M=8 if block_m >= 64 else 1,
                SPLIT_K=1,
                PROGRAMS_PER_SM=0,
                TMA=int(device.arch in TMA_ARCHS and aligned),
                CONSUMERS=0,
                PINGPONG=0,
                num_warps=4 if aligned or block_m < 128 else 8,  # with fewer, registers spill
                num_stages=stages,
            )
            if self.device_limit(config, problem, device) is None:
                break
        return config

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        """Return random tensors of a problem on a device, with the output filled with NaN."""
        import torch

        where, generator = seeded(device, seed)
        dtype, out_dtype = torch_dtype(problem.dtype_name), torch_dtype(output_dtype(problem))
        batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))

        def random(*shape: int) -> torch.Tensor:
            if dtype == torch.int8:
                return torch.randint(-128, 128, shape, generator=generator, device=where, dtype=dtype)
            return torch.randn(*shape, generator=generator, device=where, dtype=dtype)

        return Inputs(
            a=random(batch, k, m) if A_KM in problem.flags else random(batch, m, k),
            b=random(batch, k, n) if B_KN in problem.flags else random(batch, n, k),
            bias=random(n) if BIAS in problem.flags else None,
            y=poison(torch.empty((batch, m, n), dtype=out_dtype, device=where)),
            problem=problem,
            device=device,
        )

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernel with a config, and return the output without waiting for it."""
        from .triton_kernels.launches import prepare_matmul

        i, flags = inputs, inputs.problem.flags
        launch = prepare_matmul(
            i.a,
            i.b,
            i.y,
            config,
            i.device.sm_count,
            a_km=A_KM in flags,
            b_kn=B_KN in flags,
            activation=activation_of(i.problem),
        )
        launch((i.a, i.b, i.y, i.bias))
        return i.y

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the correct output in float32, computed by PyTorch."""
        import torch
        from torch.nn import functional

        flags = inputs.problem.flags
        # float32 cannot hold all sums of products of int8; float64 can.
        wide = torch.float64 if inputs.a.dtype == torch.int8 else torch.float32
        a = inputs.a.mT if A_KM in flags else inputs.a
        b = inputs.b if B_KN in flags else inputs.b.mT
        y = a.to(wide) @ b.to(wide)
        if inputs.bias is not None:
            y += inputs.bias.to(wide)
        activation = activation_of(inputs.problem)
        return (y if activation == "none" else getattr(functional, activation)(y)).float()

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """Return a small problem, with no size a multiple of a block size, to check a config's results on."""
        # Two matrices, with sizes that are multiples of no block: more than one block of 256, less than two.
        m, n, k = 331, 301, 461
        if is_aligned(problem):
            unit = ALIGNMENT_BYTES // problem.itemsize
            n, k = n // unit * unit, k // unit * unit
            m = m // unit * unit if A_KM in problem.flags else m
        return Problem.of(self.name, dtype=problem.dtype_name, flags=problem.flags, batch=2, m=m, n=n, k=k)

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the kernel of a config, and return its binary."""
        from .triton_kernels.launches import compile_matmul

        return compile_matmul(
            torch_dtype(problem.dtype_name),
            torch_dtype(output_dtype(problem)),
            config,
            a_km=A_KM in problem.flags,
            b_kn=B_KN in problem.flags,
            bias=BIAS in problem.flags,
            activation=activation_of(problem),
            aligned=is_aligned(problem),
        )

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return a key that is equal for two configs and problems if they run the same compiled binary."""
        return super().binary_key(config, problem), is_aligned(problem)

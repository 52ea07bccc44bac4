"""The gated MLP as a family: prediction, pruning and measurement.

torch and triton are imported inside the functions that use them, because a prediction needs neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...datasets import Case, DeviceSpec, KernelConfig, Problem, torch_dtype
from ...datasets.family import KernelChange
from ...model.splits import RANDOM
from ..config_limits import TMA_ARCHS, Knobs
from ..gemm_family import BANDS_AND_PROGRAMS, Configs, GemmFamily, Groups, MeasuredFamily, saved_by_descriptors, seeded
from ..numerics import product_class
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, Draws, load_dense_models
from .space import (
    ACTIVATIONS,
    FEATURE_NAMES,
    FLAGS,
    SPACE,
    VALUES,
    feature_groups,
    flags_of,
    full_space,
    moved_bytes,
    smem_bytes,
    wrong_tile,
)

if TYPE_CHECKING:
    import torch

#: The dtypes whose bits were compared on a card between kinds of instructions, and between values of BLOCK_K.
_COMPARED = ("bf16", "fp16")
#: The largest M, and the largest N and K: the kernel holds each of them in a 32-bit integer.
MOST_ROWS, MOST_COLUMNS = 2**30, 2**30

#: Prefixes of the names of models that use gelu_tanh; all others use silu.
GELU_TANH = ("Gemma",)
#: Share of problems in fp16 (the others are bf16), of random shapes with gelu_tanh, and of problems with the flag
#: "saves", as in training.
FP16_SHARE, GELU_SHARE, SAVING_SHARE = 0.15, 0.15, 0.3
#: The ranges of N and of K of random shapes.
RANDOM_WIDTHS = ((128, 28672), (256, 16384))
#: The most floating-point operations of one problem, in 1e12: a few milliseconds with the best config on an H200.
MOST_TFLOP = 2.5


@dataclass(frozen=True)
class Inputs:
    """The tensors of one launch of the gated MLP's forward kernel, on the device.

    `out` is one flat buffer, filled with NaN so that a check finds elements that the kernel did not write. It holds h,
    m n elements. With the flag "saves", the rows of gate and up follow, 2 m n elements.
    """

    x: torch.Tensor  # (m, k)
    w: torch.Tensor  # (2 n, k), gate's rows first
    out: torch.Tensor  # (m n,), or (3 m n,) with "saves"
    problem: Problem
    device: DeviceSpec

    @property
    def h(self) -> torch.Tensor:
        """The output h, (m, n)."""
        m, n = self.problem["m"], self.problem["n"]
        return self.out[: m * n].view(m, n)

    @property
    def saved(self) -> torch.Tensor | None:
        """The saved gate and up, (m, 2 n); None without the flag "saves"."""
        m, n = self.problem["m"], self.problem["n"]
        return self.out[m * n :].view(m, 2 * n) if "saves" in self.problem.flags else None


class GatedMlp(GemmFamily, MeasuredFamily):
    """The family of `foretune.gated_mlp`'s forward kernel, h = act(x @ gate.T) * (x @ up.T).

    x is (m, k), h is (m, n), and gate and up are the first and last n rows of one weight (2 n, k). A problem's flags
    are "gelu" or "gelu_tanh" (with neither, the activation is silu), and "saves" if the kernel also stores gate and up
    for the backward pass.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = GatedMlp(), DeviceSpec.named("h200")
    >>> problem = Problem.of("gated_mlp", m=4096, n=14336, k=4096)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "gated_mlp"
    dims = ("m", "n", "k")
    dtypes = ("bf16", "fp16", "fp32")
    flags = FLAGS
    knobs, values = tuple(SPACE), VALUES
    largest: ClassVar[Mapping[str, int]] = {"m": MOST_ROWS, "n": MOST_COLUMNS, "k": MOST_COLUMNS}
    bucketed = ("m",)
    independent = ("m",)
    feature_names = FEATURE_NAMES
    dtype_argument = "x_ptr"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {"m": ("M", 1), "n": ("N8", 8), "k": ("K8", 8)}
    also_needed = ("ACTIVATION",)
    launch_knobs = BANDS_AND_PROGRAMS
    descriptors: ClassVar[Mapping[str, Sequence[int]]] = {"TMA": (0, 2)}
    kernel_changes = (KernelChange("de672f2f0b775d79", "cfb9fe1fdf520ee3", None, saved_by_descriptors),)

    def full_space(self) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring on some device."""
        return full_space()

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, or None."""
        if {"gelu", "gelu_tanh"} <= set(problem.flags):
            return "gelu and gelu_tanh exclude each other"
        return wrong_widths(problem["n"], problem["k"])

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config cannot run a problem on any device, or None."""
        return wrong_tile(config, problem.dtype_name)

    def numerics(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return the numerics class: configs of equal classes compute identical bits (see `product_class`)."""
        rows, warps, step = config["BLOCK_M"], config.num_warps, config["BLOCK_K"]
        return product_class(rows, warps, step, problem["k"], problem.dtype_name, _COMPARED)

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        """Return an upper bound of one program's shared memory, in bytes; `elements` are the bytes of an element."""
        return smem_bytes(config, elements, device.arch)

    def flops(self, problem: Problem) -> float:
        """Return the number of floating-point operations of both up projections."""
        return 4.0 * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that a problem must read and write."""
        return moved_bytes(problem)

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        """Return a problem's features for each config, grouped by what the columns depend on."""
        return feature_groups(problem, device, configs)

    def flags_of_call(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the flags of the problem that a launch's arguments describe."""
        return flags_of(arguments["ACTIVATION"], arguments.get("saved_ptr") is not None)

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        return draw_cases(load_dense_models(models), Draws(max_tflop, **drawn))

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config to run when nothing was measured or predicted."""
        many, smem = problem["m"] > 64, device.smem_per_block_bytes
        block_m, block_n, block_k = (128 if many else 16 if problem["m"] <= 16 else 64), 64, 64
        if smem < 96 * 1024:  # such as CDNA, which has 64 KiB
            block_m, block_n = min(block_m, 64), 32
        if problem.dtype == "fp32":
            block_m, block_n, block_k = 32, 32, 32
        return KernelConfig.of(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=8 if many else 1,
            PROGRAMS_PER_SM=0,
            TMA=int(device.arch in TMA_ARCHS),
            num_warps=4,
            # Four stages of (128 + 2 x 64) x 64 operands of 2 bytes, and the output's tile, take about 144 KiB on
            # sm_90, and 160 KiB on other devices (see `smem_bytes`).
            num_stages=4 if smem >= 160 * 1024 else 2,
        )

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        """Return random tensors of a problem on a device, with the output filled with NaN."""
        import torch

        where, generator = seeded(device, seed)
        dtype = torch_dtype(problem.dtype_name)
        m, n, k = (problem[dim] for dim in self.dims)
        parts = 3 if "saves" in problem.flags else 1
        return Inputs(
            x=torch.randn(m, k, generator=generator, device=where, dtype=dtype),
            # Divided by the root of k, gate and up have about unit variance, where activations are not linear.
            w=torch.randn(2 * n, k, generator=generator, device=where, dtype=dtype).div_(k**0.5),
            out=torch.full((parts * m * n,), float("nan"), dtype=dtype, device=where),
            problem=problem,
            device=device,
        )

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernel with a config, and return the output buffer without waiting for it."""
        from .op import prepare_gated

        i, (m, n, k) = inputs, (inputs.problem[dim] for dim in self.dims)
        prepare_gated(m, n, k, config, i.device.sm_count, activation_of(i.problem))((i.x, i.w, i.h, i.saved))
        return i.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the correct output buffer in float32, computed by PyTorch."""
        import torch

        both = inputs.x.float() @ inputs.w.float().t()
        gate, up = both.chunk(2, -1)
        h = activated(gate, activation_of(inputs.problem)) * up
        return torch.cat([h.flatten(), *[both.flatten()] * ("saves" in inputs.problem.flags)])

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """Return a small problem, with no size a multiple of a block size, to check a config's results on."""
        # M = 256 + 37, and N = K = 2 x 128 + 72: past the largest blocks, and still multiples of 8 where required.
        return replace(problem, dims=(("m", 293), ("n", 328), ("k", 328)))

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the kernel with a config for a problem's dtype and flags, and return the binary."""
        from .op import compile_gated

        element = torch_dtype(problem.dtype_name)
        return compile_gated(element, "saves" in problem.flags, config, activation_of(problem))

    def source_hash(self) -> str:
        """Return a hash of the source of the kernel and all functions that it calls."""
        from ...runtime.launching.source_hash import hash_of_kernel
        from .triton_kernels import gated_mlp_kernel

        return hash_of_kernel(gated_mlp_kernel)


def activation_of(problem: Problem) -> str:
    """Return the activation that a problem's flags name; the inverse of `flags_of`."""
    return next((flag for flag in problem.flags if flag in ACTIVATIONS), ACTIVATIONS[0])


def wrong_widths(n: int, k: int) -> str | None:
    """Return why the kernel cannot run with these N and K, or None if it can."""
    if n % 8 or k % 8 or min(n, k) < 8:
        return f"N and K must be positive multiples of 8 but are {n} and {k}"
    return None


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply the activation "silu", "gelu" or "gelu_tanh" to a tensor with plain PyTorch, and return the result."""
    from torch.nn import functional

    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def draw_cases(models: Sequence[DenseModel], draws: Draws) -> tuple[Case, ...]:
    """Draw problems of the gate-up layers of dense models, and random shapes.

    The layers are the distinct ones among those of each model on one of 1, 2, 4 or 8 tensor-parallel ranks. Each token
    count is drawn equally often for them.

    Args:
        models: The models whose layers to draw.
        draws: What to draw. Token counts (rows of x) are those of `kernels.workloads.TOKENS` if there are none; random
            shapes have a number of rows between the smallest and the largest.

    Raises:
        ForetuneError: Too few random shapes are within the limit.

    >>> from ..workloads import load_dense_models
    >>> len(draw_cases(load_dense_models()[:1], Draws(random=3)))
    11
    """
    rng, most_tflop, tokens = draws.rng, draws.limit(MOST_TFLOP), draws.tokens or TOKENS
    deck = Deck(tokens, rng)
    drawn: set[Problem] = set()

    def case(count: int, n: int, k: int, sources: tuple[str, ...]) -> Case | None:
        if 4e-12 * count * n * k > most_tflop or (problem := _problem(count, n, k, sources, rng)) in drawn:
            return None
        drawn.add(problem)
        return Case(problem, sources)

    def of_layer(layer: tuple[tuple[int, int], tuple[str, ...]]) -> Case | None:
        return case(deck.draw(), *layer[0], layer[1])

    def of_chance() -> Case | None:
        n, k = (int(np.exp(rng.uniform(*np.log(widths)))) for widths in RANDOM_WIDTHS)
        step = int(rng.choice((8, 64, 128)))
        n, k = (max(size // step * step, step) for size in (n, k))
        return case(draws.between(tokens), n, k, (RANDOM,))

    return draws.cases(_layers(models).items(), of_layer, [of_chance] * draws.random)


def _layers(models: Sequence[DenseModel]) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the names of the models' gate-up layers by shape (N, K) on one of 1, 2, 4 or 8 ranks."""
    layers: dict[tuple[int, int], tuple[str, ...]] = {}
    for model in models:
        for degree in TENSOR_PARALLEL:
            if model.splits(degree):
                shape = (model.intermediate_size // degree, model.hidden_size)
                layers[shape] = (*layers.get(shape, ()), f"{model.model}/gate_up")
    return layers


def _problem(m: int, n: int, k: int, sources: Sequence[str], rng: np.random.Generator) -> Problem:
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    gelu = sources[0].startswith(GELU_TANH) or (sources[0] == RANDOM and rng.uniform() < GELU_SHARE)
    flags = flags_of("gelu_tanh" if gelu else "silu", saves=bool(rng.uniform() < SAVING_SHARE))
    return Problem.of("gated_mlp", dtype=dtype, flags=flags, m=m, n=n, k=k)

"""Base class of families that measure the kernels which Inductor generates, and how they draw their problems.

torch and triton are imported when needed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Problem
from ...model.splits import RANDOM
from ..gemm_family import MeasuredFamily, seeded
from ..workloads import check_drawn, shuffled

if TYPE_CHECKING:
    import torch

    from .generated import GeneratedKernel, Operand


@dataclass(frozen=True)
class Inputs:
    """The tensors of one launch of a generated kernel, on the device, and its problem."""

    tensors: Mapping[str, torch.Tensor]  # outputs are poisoned with NaN
    problem: Problem


class GeneratedFamily(MeasuredFamily):
    """Base class of families whose kernels Inductor generates for a problem's operands."""

    #: The names of the kernel's output tensors that are compared with the reference.
    outputs: ClassVar[tuple[str, ...]] = ("y",)

    @abstractmethod
    def operands(self, problem: Problem) -> dict[str, Operand]:
        """Return (shape, strides, dtype) of each of the kernel's tensors by name; its main output is "y"."""

    @abstractmethod
    def generate(self, problem: Problem, config: KernelConfig) -> GeneratedKernel:
        """Generate Inductor's kernel for a problem and a config.

        Raises:
            ForetuneError: Inductor generates none.
        """

    @abstractmethod
    def templates(self) -> Iterable[Any]:
        """Return Inductor's templates that the kernels are generated from."""

    def fill(self, tensors: Mapping[str, torch.Tensor], problem: Problem, generator: torch.Generator) -> None:
        """Fill the tensors for which normal random numbers are no valid input. By default, there are none."""

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        """Return random operands, and outputs filled with NaN."""
        import torch

        where, generator = seeded(device, seed)
        tensors = {}
        for name, (shape, strides, dtype) in self.operands(problem).items():
            if 0 in strides:  # a bias: one row, expanded
                row = torch.randn(shape[-1], generator=generator, device=where)
                tensors[name] = row.to(dtype).expand(shape)
                continue
            tensors[name] = tensor = torch.empty_strided(shape, strides, dtype=dtype, device=where)
            if name in self.outputs:
                tensor.fill_(float("nan"))
            elif dtype.is_floating_point:
                tensor.copy_(torch.randn(shape, generator=generator, device=where))
        self.fill(tensors, problem, generator)
        return Inputs(tensors, problem)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Launch the generated kernel and return the outputs."""
        from ...runtime.launching.launcher import ensure_allocator
        from .generated import cached_kernel

        ensure_allocator()
        made = cached_kernel(inputs.problem, config, self.generate)
        made.kernel.launch(made.grid, made.arguments(inputs.tensors))
        outputs = tuple(inputs.tensors[name] for name in self.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the generated kernel without a launch."""
        import torch

        from .generated import cached_kernel

        made = cached_kernel(problem, config, self.generate)
        tensors = {
            name: torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            for name, (shape, strides, dtype) in self.operands(problem).items()
        }
        return made.kernel.compile(made.grid, made.arguments(tensors))

    def source_hash(self) -> str:
        """Return a hash of Inductor's templates, which depend on torch's version."""
        from ...runtime.launching.source_hash import digest_of
        from .generated import import_lowerings

        import_lowerings()
        return digest_of(str(template.src_hash) for template in self.templates())


#: Limits of one problem: a few milliseconds on an H200, and operands that leave room in its memory.
MOST_TFLOP, MOST_BYTES = 1.0, 4e9
#: Drawing stops after this many consecutive draws above the limits.
_MOST_DRAWS = 1000


def draw_cases(
    family: GeneratedFamily,
    layers: Mapping[str, Callable[[np.random.Generator], Problem]],
    of_chance: Callable[[np.random.Generator], Problem],
    *,
    per_layer: int,
    random: int,
    max_tflop: float | None,
    seed: int,
) -> tuple[Case, ...]:
    """Return `per_layer` problems of each layer and `random` random ones, shuffled.

    Args:
        family: The family.
        layers: For each layer, "model/layer", a function that draws one of its problems.
        of_chance: A function that draws a random problem.
        per_layer: Problems per layer. Layers whose problems are larger than the limit are left out.
        random: The number of random problems.
        max_tflop: The maximum size of a problem, in 1e12 floating-point operations; `MOST_TFLOP` if None.
        seed: The random seed.

    Raises:
        ForetuneError: A number is negative, or no random problem is within the limit.
    """
    check_drawn(None, per_layer=per_layer, random=random, seed=seed)
    rng = np.random.default_rng(seed)
    limit = (MOST_TFLOP if max_tflop is None else max_tflop) * 1e12
    sources: dict[Problem, list[str]] = {}
    for source, drawn in [*layers.items()] * per_layer + [(RANDOM, of_chance)] * random:
        for _ in range(_MOST_DRAWS if source == RANDOM else 50):
            problem = drawn(rng)
            if problem not in sources and family.flops(problem) <= limit and family.bytes(problem) <= MOST_BYTES:
                sources[problem] = [source]
                break
        else:
            if source == RANDOM:
                raise ForetuneError(f"no random shape has at most {limit * 1e-12} TFLOP: allow more")
    cases = [Case(problem, tuple(names)) for problem, names in sources.items()]
    return shuffled(cases, rng)


def log_uniform(rng: np.random.Generator, low: int, high: int, step: int = 1) -> int:
    """Return a random multiple of `step` between the limits, drawn uniformly on a logarithmic scale."""
    return max(step, int(np.exp(rng.uniform(np.log(low), np.log(high)))) // step * step)

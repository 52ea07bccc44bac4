"""Inductor's grouped_mm as a `Measurable` family, on MoE layers. torch and triton are imported when needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Case, Problem, torch_dtype
from ..grouped_gemm.group_sizes import drawn_sizes
from ..workloads import chosen, load_models
from .generated_family import GeneratedFamily, Inputs, draw_cases, log_uniform
from .templates import InductorGroupedMMFamily, split_dim

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...datasets import KernelConfig
    from .generated import GeneratedKernel, Operand

#: Token counts of one call, from decoding to training.
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
#: The products of an MoE layer, y = x @ w.T, and in training dx = dy @ w and dw = dy.T @ x: flags, and the positions of
#: m, n and k in (rows, n, k).
PASSES = {
    "forward": (("a_ragged", "b_transposed"), (0, 1, 2)),
    "dx": (("a_ragged",), (0, 2, 1)),
    "dw": (("both_ragged", "a_transposed"), (1, 2, 0)),
}
SHARES = {"forward": 0.6, "dx": 0.2, "dw": 0.2}
#: The least token count of training.
LEAST_TRAINED = 2048
#: Expert-parallel ranks, which share the experts evenly.
RANKS = (1, 2, 4, 8, 16, 32, 64)
#: The most bytes of the weights of one call.
MOST_WEIGHTS = 1e9
#: Rows of groups start at multiples of this many elements where TMA loads them: 16 bytes.
_ALIGNMENT = 8


class InductorGroupedMM(InductorGroupedMMFamily, GeneratedFamily):
    """The family of Inductor's grouped_mm, with all that `foretune collect` needs.

    >>> from foretune.kernels import find_family
    >>> len(find_family("inductor:grouped_mm").cases(random=3, per_layer=1))
    71
    """

    def draw(
        self, models: Path | str | None, max_tflop: float | None, *, tokens: Sequence[int] | None = None, **drawn: Any
    ) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        counts = tuple(tokens or TOKENS)
        layers = {
            f"{model.model}/{name}": partial(_of_layer, model.num_experts, model.top_k, n, k, counts)
            for model in load_models(models)
            for name, (n, k) in model.projections().items()
        }
        return draw_cases(self, layers, _of_chance, max_tflop=max_tflop, **drawn)

    def operands(self, problem: Problem) -> dict[str, Operand]:
        """Return (shape, strides, dtype) of each of the kernel's tensors by name; its main output is "y"."""
        import torch

        groups, m, n, k = (problem[dim] for dim in self.dims)
        dtype = torch_dtype(problem.dtype_name)
        out = torch.bfloat16 if problem.dtype == "fp8e4m3" else dtype
        a_is_split = bool({"a_ragged", "both_ragged"} & set(problem.flags))
        b_is_split = bool({"b_ragged", "both_ragged"} & set(problem.flags))

        def matrices(rows: int, columns: int, is_one: bool, is_transposed: bool, dtype: torch.dtype) -> Operand:
            strides = (1, rows) if is_transposed else (columns, 1)
            if is_one:
                return (rows, columns), strides, dtype
            return (groups, rows, columns), (rows * columns, *strides), dtype

        operands = {
            "a_ptr": matrices(m, k, a_is_split, "a_transposed" in problem.flags, dtype),
            "b_ptr": matrices(k, n, b_is_split, "b_transposed" in problem.flags, dtype),
        }
        if a_is_split or b_is_split:
            operands["offsets_ptr"] = ((groups,), (1,), torch.int32)
        return {**operands, "y": matrices(m, n, a_is_split != b_is_split, False, out)}

    def generate(self, problem: Problem, config: KernelConfig) -> GeneratedKernel:
        """Generate Inductor's kernel for a problem and a config."""
        import torch
        from torch._inductor.lowering import lowerings

        from .generated import lowered_kernel

        lower: Any = lowerings[torch.ops.aten._grouped_mm.default]
        return lowered_kernel(self.operands(problem), lambda nodes: lower(*nodes.values()), config)

    def fill(self, tensors: Mapping[str, torch.Tensor], problem: Problem, generator: torch.Generator) -> None:
        """Set the groups' end offsets: the split dimension is divided at random, as if each row chose its group."""
        import numpy as np
        import torch

        if "offsets_ptr" not in tensors:
            return
        dim = split_dim(problem)
        assert dim is not None
        step = 1 if dim == "m" else _ALIGNMENT
        rng = np.random.default_rng(generator.initial_seed())
        sizes = drawn_sizes("uniform", problem[dim] // step, problem["groups"], rng)
        ends = np.cumsum(sizes) * step
        ends[-1] = problem[dim]
        tensors["offsets_ptr"].copy_(torch.from_numpy(ends.astype(np.int32)))

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the result of the products in float32."""
        import torch

        a, b = (inputs.tensors[name].float() for name in ("a_ptr", "b_ptr"))
        if "offsets_ptr" not in inputs.tensors:
            return a @ b
        y = torch.zeros(inputs.tensors["y"].shape, device=a.device)
        start = 0
        for group, end in enumerate(inputs.tensors["offsets_ptr"].tolist()):
            if "a_ragged" in inputs.problem.flags:
                y[start:end] = a[start:end] @ b[group]
            elif "b_ragged" in inputs.problem.flags:
                y[:, start:end] = a[group] @ b[:, start:end]
            else:
                y[group] = a[:, start:end] @ b[start:end]
            start = end
        return y

    def templates(self) -> Iterable[Any]:
        """Return Inductor's templates that the kernels are generated from."""
        from torch._inductor.kernel import mm_grouped

        return (mm_grouped.triton_grouped_mm_template,)


def _of_layer(experts: int, top_k: int, n: int, k: int, tokens: Sequence[int], rng: np.random.Generator) -> Problem:
    ranks = [count for count in RANKS if experts % count == 0 and experts // count * n * k * 2 <= MOST_WEIGHTS]
    groups = experts // int(rng.choice(ranks or [experts]))
    count = int(rng.choice(tokens))
    rows = max(count * top_k * groups // experts, 1)
    return _product(groups, rows, n, k, count >= LEAST_TRAINED, rng)


def _of_chance(rng: np.random.Generator) -> Problem:
    groups, rows = log_uniform(rng, 2, 128), log_uniform(rng, 1, 65536)
    n, k = (log_uniform(rng, 64, 8192, 64) for _ in range(2))
    return _product(groups, rows, n, k, rows >= LEAST_TRAINED, rng)


def _product(groups: int, rows: int, n: int, k: int, is_trained: bool, rng: np.random.Generator) -> Problem:
    passing = chosen({name: share for name, share in SHARES.items() if is_trained or name == "forward"}, rng)
    flags, places = PASSES[passing]
    if passing == "dw":
        rows = max(rows // _ALIGNMENT, groups) * _ALIGNMENT
    m, n, k = ((rows, n, k)[place] for place in places)
    return Problem.of("inductor_grouped_mm", dtype="bf16", flags=flags, groups=groups, m=m, n=n, k=k)

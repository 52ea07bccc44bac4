"""The comparison of the dense GEMM with cuBLAS, as torch calls it, and with Inductor's max-autotune.

The products are real layers, from decode to training, forward and backward, and squares. The goals are defined here
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, ForetuneError, Measurable, Problem
from ...datasets.errors import warn
from ...model.splits import RANDOM
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row
from ..registry import judge_predicted
from ..workloads import DenseModel, load_dense_models
from .family import Inputs, Matmul
from .space import A_KM, B_KN, BIAS, activation_of

if TYPE_CHECKING:
    import torch

#: Layers: model, layer, tensor-parallel degree.
LAYERS = (
    ("Llama-3.1-8B", "gate_up", 1),
    ("Llama-3.1-70B", "qkv", 8),
    ("Qwen3-4B", "down", 1),
    ("Gemma-3-12B", "o", 1),
)
#: Tokens of a forward pass, and of the three passes of training.
FORWARD, TRAINED = (1, 16, 128), 8192
#: Variations of one layer: (dtype, flags).
WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fp16", ()),
    ("fp32", ()),
    ("int8", ()),
    ("bf16", (BIAS,)),
    ("bf16", (BIAS, "gelu")),
)
SQUARES = (1024, 4096, 8192)


def suite_cases(models: Sequence[DenseModel]) -> dict[str, Case]:
    """Return the problems to compare on, by a name "MODEL/LAYER pass tokens"; the same in every process.

    Raises:
        ForetuneError: A model of the suite is not among `models`.

    >>> from ..workloads import load_dense_models
    >>> suite_cases(load_dense_models())["Qwen3-4B/down dw 8192"].problem["k"]
    8192
    """
    by_name = {model.model: model for model in models}
    cases = {}
    for name, layer, degree in LAYERS:
        if name not in by_name:
            raise ForetuneError(
                f"the suite needs the model {name}, but the given models are {', '.join(sorted(by_name))}"
            )
        n, k = by_name[name].linear_layers(degree)[layer]
        source = f"{name}/{layer}"
        for tokens in (*FORWARD, TRAINED):
            cases[f"{source} forward {tokens}"] = _case(source, "forward", tokens, n, k)
        cases[f"{source} dx {TRAINED}"] = _case(source, "dx", TRAINED, k, n, flags=(B_KN,))
        cases[f"{source} dw {TRAINED}"] = _case(source, "dw", n, k, TRAINED, flags=(A_KM, B_KN))
    name, layer, degree = LAYERS[2]
    n, k = by_name[name].linear_layers(degree)[layer]
    for dtype, flags in WAYS:
        for tokens in (64, TRAINED):
            way = " ".join((*flags, *([] if dtype == "bf16" else [dtype])))
            cases[f"{name}/{layer} {way} {tokens}"] = _case(
                f"{name}/{layer}", "forward", tokens, n, k, dtype=dtype, flags=flags
            )
    for size in SQUARES:
        cases[f"square {size}"] = _case(RANDOM, "forward", size, size, size)
    cases["batched 32 x 1024"] = Case(Problem.of("matmul", batch=32, m=1024, n=1024, k=128), (RANDOM,), "batched")
    return cases


def _case(
    source: str, scenario: str, m: int, n: int, k: int, *, dtype: str = "bf16", flags: tuple[str, ...] = ()
) -> Case:
    """Return the case of one (m, k) by (k, n) product from this source; `scenario` is its pass, such as "forward"."""
    return Case(Problem.of("matmul", dtype=dtype, flags=flags, batch=1, m=m, n=n, k=k), (source,), scenario)


class MatmulComparison:
    """The comparison of the dense GEMM with other implementations: problems, contenders and goals.

    It implements `runtime.timing.compare.Comparison`; `compare_kernels` times the contenders.
    """

    others = ("cublas", "inductor")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the problems of the comparison, by name."""
        return suite_cases(load_dense_models())

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Inputs, device: DeviceSpec, best: BestConfigs
    ) -> dict[str, Callable[[], Any]]:
        """Return functions by contender that each compute the problem once.

        "cublas" is `torch.matmul`, `addmm`, `bmm` or `_int_mm`, followed by the activation as a separate kernel.
        "inductor" is the same under `torch.compile(mode="max-autotune-no-cudagraphs")`, which fuses the activation.
        """
        if reason := no_torch_product(problem):
            warn(f"{problem} is compared with nothing: {reason}")
            return {}
        product, operands = torch_product(problem), torch_operands(inputs)
        compiled = max_autotuned(product)
        return {
            "cublas": lambda: in_tf32(product, *operands),
            "inductor": lambda: in_tf32(compiled, *operands),
        }

    def launch_path(self, device: DeviceSpec) -> LaunchPath:
        """Measure the host time of a call of the op and of a bare launch of its kernel."""
        return time_launch_path(device)

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the goals for the predicted config's speed over each contender, judged by the measured `rows`."""
        what = "dense GEMM, predicted config, over"
        return [
            *judge_predicted(rows, {"cublas": (0.85, 0.95)}, f"{what} cuBLAS"),
            *judge_predicted(rows, {"inductor": (0.85, 1.0)}, f"{what} Inductor's max-autotune"),
        ]


#: Found by `kernels.registry.comparison_of`.
COMPARISON = MatmulComparison()


def no_torch_product(problem: Problem) -> str | None:
    """Return why torch cannot compute a problem on a GPU, or None."""
    if problem.dtype != "int8":
        return None
    if problem["batch"] > 1 or problem["m"] <= 16 or problem["n"] % 8 or problem["k"] % 8:
        return "torch._int_mm needs a single matrix with more than 16 rows, and N and K that are multiples of 8"
    return None


def torch_operands(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Return a problem's inputs in the shapes that torch expects: a (M, K), b (K, N) and the bias, if any.

    In a batch, a and b have three dimensions.
    """
    flags = inputs.problem.flags
    a = inputs.a.mT if A_KM in flags else inputs.a
    b = inputs.b if B_KN in flags else inputs.b.mT
    if len(a) == 1:
        a, b = a[0], b[0]
    return (a, b) if inputs.bias is None else (a, b, inputs.bias)


def torch_product(problem: Problem) -> Callable[..., torch.Tensor]:
    """Return the problem's product in torch, a function of `torch_operands`.

    It is a new function each time, so that compiling one does not affect the next.
    """
    import torch
    from torch.nn import functional

    activation = activation_of(problem)
    after = None if activation == "none" else getattr(functional, activation)
    is_int8, is_batch = problem.dtype == "int8", problem["batch"] > 1

    def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if is_int8:
            y: torch.Tensor = torch._int_mm(a, b)
        elif bias is None:
            y = torch.matmul(a, b)
        else:
            y = torch.baddbmm(bias, a, b) if is_batch else torch.addmm(bias, a, b)
        return y if after is None else after(y)

    return product


def in_tf32(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function while torch multiplies float32 as tf32, as Foretune's kernel does, and return its result."""
    import torch

    before = torch.get_float32_matmul_precision()
    if before == "high":
        return function(*arguments)
    torch.set_float32_matmul_precision("high")
    try:
        return function(*arguments)
    finally:
        torch.set_float32_matmul_precision(before)


def max_autotuned(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a version of `product` that Inductor compiles with max-autotune on the first call."""
    import torch

    torch.compiler.reset()  # else the ninth shape exceeds Dynamo's limit and runs uncompiled
    return torch.compile(product, mode="max-autotune-no-cudagraphs", dynamic=False)


def time_launch_path(device: DeviceSpec) -> LaunchPath:
    """Measure the host times of the op and of a bare launch of its kernel, in turns.

    The problem is so small that the GPU finishes each launch before the host makes the next.
    """
    import torch

    from .op import matmul
    from .triton_kernels.gemm import matmul_kernel

    family = Matmul()
    problem = Problem.of("matmul", batch=1, m=64, n=256, k=256)
    inputs, config = family.inputs(problem, device), family.default(problem, device)
    if config["TMA"]:
        config = type(config).from_json(config.to_json() | {"TMA": 0})  # so that no descriptors are needed
    if reason := family.supports(config, problem, device):
        raise ForetuneError(f"the launch path cannot be timed on {device.name}: {reason}")
    a, b = torch_operands(inputs)
    constants = {"A_KM": False, "B_KN": False, "ACTIVATION": "none", "ALIGNED": True}
    constants |= {"SPLIT": False, "PERSISTENT": False, "PDL": False}
    grid = (-(-64 // config["BLOCK_M"]) * -(-256 // config["BLOCK_N"]),)

    def bare() -> None:
        y = torch.empty_like(inputs.y)
        matmul_kernel[grid](
            inputs.a, inputs.b, y, *[None] * 4, 1, 64, 256, 256, 256, 256, 256, **constants, **config.to_json()
        )

    def op() -> torch.Tensor:
        return matmul(a, b, config=config)

    return LaunchPath.timed("foretune.matmul", op, bare)

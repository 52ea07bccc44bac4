"""The products of a serving engine's MoE layer as families: what predicting and pruning need, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ..gemm_family import Configs, DeclaredFamily, Groups
from .engines import SGLANG, VLLM, Layer
from .features import FEATURE_NAMES, estimates, feature_groups
from .launching import KNOBS, TMA, Product, full_space, wrong_for, wrong_knob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPES = ("bf16", "fp16", "fp8e4m3")
UP, DOWN = "fused_moe", "fused_moe_down"
#: Ten times as many experts as any model has, and rows that the kernel counts in 32 bits.
LARGEST = {"experts": 65536, "topk": 65536, "tokens": 2**24, "hidden": 2**20, "inter": 2**20}


class FusedMoeFamily(DeclaredFamily):
    """What predicting and pruning need, for both products of a layer.

    Problems have the dimensions of the layer on one rank, `inter` after the activation, so that w13 is (experts, 2 *
    inter, hidden) and w2 (experts, hidden, inter). Tokens choose `topk` experts at random, as in the engines' tuners.
    fp8e4m3 has a float32 scale for each 128 x 128 block of weights and each 128 of a row, and bf16 results. The flag
    "vllm" says that vLLM's kernel runs it; without it SGLang's does.
    """

    down: ClassVar[bool]
    dims = ("experts", "hidden", "inter", "tokens", "topk")
    dtypes = DTYPES
    flags = (VLLM,)
    largest: ClassVar[Mapping[str, int]] = LARGEST
    ragged: ClassVar[Mapping[str, str]] = {}
    bucketed = ("tokens",)
    feature_names = FEATURE_NAMES

    def __init__(self) -> None:
        self.name = DOWN if self.down else UP  # type: ignore[misc]
        self.knobs = (*KNOBS, TMA) if self.down else KNOBS  # type: ignore[misc]

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """The configs that SGLang's tuner tries: 1,920, and twice as many of the second product, with TMA or without;
        with a device those that run one of its dtypes there.

        >>> from foretune.kernels import find_family
        >>> [len(find_family(name).space()) for name in ("fused_moe", "fused_moe_down")]
        [1920, 3840]
        """
        space = full_space(self.down)
        if device is None:
            return space
        able = [Layer(8, 2, 1024, 1024, dtype).problem(self.name, SGLANG, 64) for dtype in ("bf16", "fp8e4m3")]
        return tuple(c for c in space if any(wrong_for(c, problem, device) is None for problem in able))

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        return wrong_knob(knobs, self.down)

    def wrong_problem(self, problem: Problem) -> str | None:
        for dim in self.dims:
            if problem[dim] < 1:
                return f"{dim} must be >= 1 but is {problem[dim]}"
        if problem["topk"] > problem["experts"]:
            return f"topk must be at most experts, {problem['experts']}, but is {problem['topk']}"
        return None

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if device.backend == "hip":
            return f"the engines run other kernels and knobs on {device.name}"
        return wrong_for(config, problem, device)

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        return feature_groups(Product(problem, self.down), device, configs)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        return estimates(Product(problem, self.down), device, configs)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        topk = "ROUTER_TOPK" if self.down else "top_k"
        needed = ("a_ptr", "b_ptr", "N", "K", "num_valid_tokens", topk)
        if missing := [name for name in needed if name not in arguments]:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}, by which {self.name} knows its problem: "
                "prune(..., problem=a function of the arguments) says it otherwise"
            )
        n, k = int(arguments["N"]), int(arguments["K"])
        choices = int(arguments[topk])
        if choices < 1:
            raise ForetuneError(f"{topk} must be >= 1 but is {choices}")
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor("a_ptr", arguments["a_ptr"]),
            flags=(VLLM,) if "naive_block_assignment" in arguments else (),
            experts=int(arguments["b_ptr"].shape[0]),
            topk=choices,
            hidden=n if self.down else k,
            inter=k if self.down else n // 2,
            tokens=int(arguments["num_valid_tokens"]) // choices,
        )

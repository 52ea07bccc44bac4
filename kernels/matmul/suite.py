"""The products that kernels are compared on: real layers from decode to training, forward and backward, and squares."""

from __future__ import annotations

from collections.abc import Sequence

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..dense_llms import DenseModel
from .layouts import A_KM, B_KN, BIAS

#: Layers: model, layer, tensor-parallel degree.
LAYERS = (
    ("Llama-3.1-8B", "gate_up", 1),
    ("Llama-3.1-70B", "qkv", 8),
    ("Qwen3-4B", "down", 1),
    ("Gemma-3-12B", "o", 1),
)
#: Tokens of a forward pass, and of training's three passes.
FORWARD, TRAINED = (1, 16, 128), 8192
#: One layer in other dtypes, and with what may follow: (dtype, flags).
WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fp16", ()),
    ("fp32", ()),
    ("int8", ()),
    ("bf16", (BIAS,)),
    ("bf16", (BIAS, "gelu")),
)
SQUARES = (1024, 4096, 8192)


def suite_cases(models: Sequence[DenseModel]) -> dict[str, Case]:
    """The suite by name, "MODEL/LAYER pass tokens"; the same in every process.

    Raises `ForetuneError` where a model is not among `models`.

    >>> from ..dense_llms import load_dense_models
    >>> suite_cases(load_dense_models())["Qwen3-4B/down dw 8192"].problem["k"]
    8192
    """
    by_name = {model.model: model for model in models}
    cases = {}
    for name, layer, degree in LAYERS:
        if name not in by_name:
            raise ForetuneError(f"the suite needs the model {name} but there are {', '.join(sorted(by_name))}")
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
    return Case(Problem.of("matmul", dtype=dtype, flags=flags, batch=1, m=m, n=n, k=k), (source,), scenario)

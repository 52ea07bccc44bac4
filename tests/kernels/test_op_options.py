"""Options of every op that are none: said by name, in a plain call and where PyTorch traces one."""

from __future__ import annotations

import foretune
import pytest
import torch
from foretune import ForetuneError
from foretune.datasets import DeviceSpec
from foretune.runtime import use_stub_driver

X, W = torch.zeros(16, 64).bfloat16(), torch.zeros(32, 64).bfloat16()
HEADS, ANGLES = torch.zeros(4, 2, 16).bfloat16(), torch.zeros(4, 8)
SIZES = torch.tensor([8, 8], dtype=torch.int32)
#: Each op with a name of its own for a config.
CALLS = {
    "matmul": lambda **options: foretune.matmul(X, W.T, **options),
    "gated_mlp": lambda **options: foretune.gated_mlp(X, W, **options),
    "grouped_gemm": lambda **options: foretune.grouped_gemm(X, torch.stack([W, W]), SIZES, **options),
    "rms_norm_rope": lambda **options: foretune.rms_norm_rope(HEADS, HEADS, ANGLES, ANGLES, **options),
    "scaled_gemm": lambda **options: foretune.scaled_gemm(X, W, **options),
    "scaled_grouped_gemm": lambda **options: foretune.scaled_grouped_gemm(X, torch.stack([W, W]), SIZES, **options),
}


@pytest.fixture(autouse=True)
def stub():
    with use_stub_driver(DeviceSpec.named("h200")):
        yield


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": {"BLOCK_M": 16}}, "a KernelConfig but one is {'BLOCK_M': 16}"),
        ({"config": "BLOCK_M=16"}, "config must be a KernelConfig but is 'BLOCK_M=16'"),
        ({"mode": ["predict"]}, r"must be a string, .* but one is \['predict'\]"),
    ],
    ids=["a dictionary", "a text", "a list"],
)
def test_what_is_no_option_is_said(op, options, said):
    with pytest.raises(ForetuneError, match=said):
        CALLS[op](**options)


def test_what_is_no_config_is_said_to_a_tensor_of_a_subclass_too():
    class Own(torch.Tensor):
        pass

    with pytest.raises(ForetuneError, match="config must be a KernelConfig but is a dict"):
        foretune.matmul(X.as_subclass(Own), W.T, config={"BLOCK_M": 16})

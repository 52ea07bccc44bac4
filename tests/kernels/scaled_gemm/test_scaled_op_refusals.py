"""What the ops refuse, and how they say so."""

from __future__ import annotations

from dataclasses import replace

import foretune
import pytest
import torch
from foretune import ForetuneError
from foretune.kernels.scaled_gemm.quantize import quantize_blocks_128, quantize_rows_128
from foretune.runtime import use_stub_driver
from scaled import H200
from torch._subclasses import FakeTensorMode

X, W = torch.zeros(8, 32, dtype=torch.bfloat16), torch.zeros(2, 48, 32, dtype=torch.bfloat16)
SIZES = torch.tensor([4, 4])
X8, X_SCALE = quantize_rows_128(X)
W8, W_SCALE = quantize_blocks_128(W)
TOLD = {"x_scale": X_SCALE, "w_scale": W_SCALE}

WRONG = {
    "scales must be one of tensorwise, rowwise, blockwise but is 'columns'": ((X, W, SIZES), {"scales": "columns"}),
    "x must be a tensor but is a str": (("x", W, SIZES), {}),
    "w must be torch.bfloat16 or torch.float8_e4m3fn but is torch.float32": ((X, W.float(), SIZES), {}),
    "x_scale is given, so x must be torch.float8_e4m3fn but is torch.bfloat16": ((X, W, SIZES), TOLD),
    "x is torch.float8_e4m3fn, so x_scale must be given but is None": ((X8, W, SIZES), {}),
    "w must have 3 dimensions": ((X8, W8[0], SIZES), TOLD),
    "w must be contiguous": ((X8, W8.transpose(1, 2), SIZES), TOLD),
    r"x must have K = 16 columns, as w \(2, 48, 16\) does, but has 32": ((X8, W8[:, :, :16].contiguous(), SIZES), TOLD),
    "N and K of w must be multiples of 16 but are 40 and 32": ((X, W[:, :40].contiguous(), SIZES), {}),
    "N and K of w must be at least 16 but are 0 and 32": ((X8, W8[:, :0].contiguous(), SIZES), TOLD),
    r"x must have 2 dimensions but has shape \(1, 8, 32\)": ((X[None], W, SIZES), {}),
    r"w must have 3 dimensions but has shape \(32,\)": ((X, W[0, 0], SIZES), {"scales": "tensorwise"}),
    r"x must have at least 16 columns but has shape \(8, 0\)": ((X[:, :0], W[..., :0], SIZES), {"scales": "rowwise"}),
    "group_sizes must be a tensor but is None: call foretune.scaled_gemm for a dense": ((X, W, None), {}),
    "group_sizes must be a tensor but is a list": ((X, W, [4, 4]), {}),
    "group_sizes must have 2 entries, one per group of w, but has 3": ((X, W, torch.tensor([4, 4, 0])), {}),
    "group_sizes must be int32 or int64 but is torch.float32": ((X, W, SIZES.float()), {}),
    r"x_scale must have shape \(8, 1\) for blockwise scales but has \(8, 2\)": (
        (X8, W8, SIZES),
        TOLD | {"x_scale": torch.ones(8, 2)},
    ),
    "w_scale must be torch.float32 but is torch.float64": ((X8, W8, SIZES), TOLD | {"w_scale": W_SCALE.double()}),
    "mode must be": ((X, W, SIZES), {"mode": "slow"}),
    "grad_dtype must be one of e4m3, e5m2 but is 'e3m4'": ((X, W, SIZES), {"grad_dtype": "e3m4"}),
    "dw_dtype must be one of bf16, fp8 but is 'fp16'": ((X, W, SIZES), {"dw_dtype": "fp16"}),
    "BLOCK_M cannot be 24": ((X, W, SIZES), {"config": foretune.KernelConfig.of(BLOCK_M=24)}),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_wrong_is_named(why):
    tensors, options = WRONG[why]
    with use_stub_driver(H200), pytest.raises(ForetuneError, match=why):
        foretune.scaled_grouped_gemm(*tensors, **options)


#: Errors that come before anything is launched, also where gradients are needed.
WITH_GRADIENTS = (
    "group_sizes must be int32 or int64 but is torch.float32", "group_sizes must be a tensor but is a list",
    r"x must have 2 dimensions but has shape \(1, 8, 32\)", r"w must have 3 dimensions but has shape \(32,\)",
    "x must be a tensor but is a str", "group_sizes must have 2 entries, one per group of w, but has 3",
    "N and K of w must be multiples of 16 but are 40 and 32",
)  # fmt: skip


@pytest.mark.parametrize("dw_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("why", WITH_GRADIENTS)
def test_what_is_wrong_is_named_where_gradients_are_needed(why, dw_dtype):
    (x, w, sizes), options = WRONG[why]
    options = {**options, "dw_dtype": dw_dtype}
    x, w = (one.clone().requires_grad_() if isinstance(one, torch.Tensor) else one for one in (x, w))
    with use_stub_driver(H200), pytest.raises(ForetuneError, match=why):
        foretune.scaled_grouped_gemm(x, w, sizes, **options)


def test_a_gpu_without_fp8_is_refused():
    a100 = replace(H200, name="A100", arch="sm_80")
    with use_stub_driver(a100), pytest.raises(ForetuneError, match="sm_80 does not support fp8e4m3; sm_89, sm_90"):
        foretune.scaled_gemm(X, W[0])


def test_the_cpu_is_refused():
    with pytest.raises(ForetuneError, match="x must be on a GPU but is on the CPU"):
        foretune.scaled_gemm(X, W[0])
    with pytest.raises(ForetuneError, match="x must be on a GPU but is on the CPU"):
        foretune.scaled_grouped_gemm(X, W, SIZES)


def test_fp8_has_no_gradient():
    x = X8.clone().requires_grad_()
    with use_stub_driver(H200), pytest.raises(ForetuneError, match="which gets none: pass the bfloat16 tensor"):
        foretune.scaled_gemm(x, W[0], x_scale=X_SCALE)


def test_scales_have_no_gradient():
    scale = W_SCALE.clone().requires_grad_()
    with use_stub_driver(H200):
        with pytest.raises(ForetuneError, match=r"w_scale requires a gradient, .*: pass w_scale.detach\(\)"):
            foretune.scaled_grouped_gemm(X8, W8, SIZES, x_scale=X_SCALE, w_scale=scale)
        made_of_x = X_SCALE.clone().requires_grad_()  # as quantising a tensor that has one makes them
        with pytest.raises(ForetuneError, match=r"x requires a gradient but is torch.float8_e4m3fn, which gets none"):
            foretune.scaled_gemm(X8.clone().requires_grad_(), W[0], x_scale=made_of_x)


def test_what_pytorch_traces_has_the_right_shape_and_is_checked():
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(tensor) for tensor in (X8, W8, X_SCALE, W_SCALE, SIZES)]
        y = foretune.scaled_grouped_gemm(*tensors[:2], tensors[4], x_scale=tensors[2], w_scale=tensors[3])
        assert (y.shape, y.dtype) == ((8, 48), torch.bfloat16)
        with pytest.raises(
            ForetuneError, match=r"w_scale must have shape \(2, 48\) for rowwise scales but has \(2, 1, 1\)"
        ):
            torch.ops.foretune.scaled_product(*tensors, "rowwise", None, None)

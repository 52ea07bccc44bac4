"""The kernel of the dense GEMM against plain PyTorch, in the interpreter: every layout, way and epilogue, and sizes
off every block. Not in bfloat16, whose `tl.dot` is wrong there (Triton 3.6 to 3.9)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")]

MATMUL = find_family("matmul")
#: Fewer programs than tiles nearly everywhere, so that persistent programs take several.
CPU = replace(DeviceSpec.named("h200"), backend="cpu", sm_count=3)
LAYOUTS = ((), ("a_km",), ("b_kn",), ("a_km", "b_kn"))
WHOLE, PERSISTENT, SPLIT = {}, {"PROGRAMS_PER_SM": 1}, {"SPLIT_K": 3}


def config(**knobs):
    return KernelConfig.of(
        **{"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 2, "SPLIT_K": 1, "PROGRAMS_PER_SM": 0, "TMA": 0}
        | {"num_warps": 4, "num_stages": 2}
        | knobs
    )


def problem(dtype="fp16", flags=(), batch=2, m=40, n=48, k=80):
    return Problem.of("matmul", dtype=dtype, flags=flags, batch=batch, m=m, n=n, k=k)


def assert_right(call, **knobs):
    import torch

    one = config(**knobs)
    assert MATMUL.supports(one, call, CPU) is None
    inputs = MATMUL.inputs(call, CPU)
    expected, y = MATMUL.reference(inputs), MATMUL.launch(inputs, one)
    assert y.shape == expected.shape
    assert y.dtype == (torch.int32 if call.dtype == "int8" else inputs.a.dtype)
    error, norm = y.float() - expected, float(expected.norm())
    assert float(error.norm()) <= MATMUL.tolerance(call) * norm, f"{call} {one}"
    # The norm alone would not see one wrong element of many.
    limit = 10 * MATMUL.tolerance(call) * (expected.abs() + norm / expected.numel() ** 0.5)
    assert bool((error.abs() <= limit).all()), f"{call} {one}"


@pytest.mark.parametrize("way", [WHOLE, PERSISTENT, SPLIT], ids=["a tile", "persistent", "split"])
@pytest.mark.parametrize("tma", [0, 1, 2])
@pytest.mark.parametrize("flags", LAYOUTS)
def test_every_layout_and_way(flags, tma, way):
    if tma == 2 and way is SPLIT:
        pytest.skip("parts are stored through pointers")
    assert_right(problem(flags=flags), TMA=tma, **way)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize(("tma", "way"), [(0, SPLIT), (1, PERSISTENT), (2, WHOLE)])
def test_the_other_dtypes(dtype, tma, way):
    flags = ("b_kn",) if dtype == "fp32" else ()
    assert_right(problem(dtype, flags), TMA=tma, **way)


@pytest.mark.parametrize("flags", LAYOUTS)
@pytest.mark.parametrize("way", [PERSISTENT, SPLIT], ids=["persistent", "split"])
def test_sizes_that_nothing_divides(flags, way):
    assert_right(problem(flags=flags, m=19, n=37, k=45), **way)


@pytest.mark.parametrize("dims", [{"m": 1, "n": 1, "k": 1}, {"m": 1, "n": 33, "k": 7, "batch": 1}])
def test_the_smallest(dims):
    for way in (WHOLE, PERSISTENT, SPLIT):
        assert_right(problem(**dims), **way)


@pytest.mark.parametrize("after", [("bias",), ("relu",), ("bias", "gelu"), ("bias", "silu")])
@pytest.mark.parametrize("way", [PERSISTENT, SPLIT], ids=["persistent", "split"])
def test_what_follows_the_product(after, way):
    assert_right(problem(flags=after, batch=1), TMA=1, **way)


def test_more_parts_than_steps():
    assert_right(problem(k=33), SPLIT_K=8)


def test_rows_that_are_further_apart_than_long():
    """Slices of wider matrices, in and out; nothing beside them is touched."""
    import torch
    from foretune.kernels.matmul.triton_kernels.gemm import launch_matmul

    for width, knobs in ((64, {"TMA": 2}), (61, {}), (64, {"SPLIT_K": 2})):
        a, b = (torch.randn(1, 40, width, dtype=torch.float16)[:, :, :48] for _ in range(2))
        wide = torch.full((1, 40, 56), float("nan"), dtype=torch.float16)
        launch_matmul(a, b, wide[:, :, :40], config(**knobs), 3)
        torch.testing.assert_close(wide[:, :, :40].float(), a.float() @ b.float().mT, atol=2e-2, rtol=2e-3)
        assert bool(wide[:, :, 40:].isnan().all())

"""dW in fp8 in Triton's interpreter: quantizing along both dimensions, the kernel's ways, and the op's gradients.

The interpreter rounds some numbers wrongly to fp8 (3.6 to 3.9: the carry into the exponent is lost), so all numbers are
7 times a power of two, whose quotients by any scale are fp8 numbers: nothing is rounded but the result.
"""

from __future__ import annotations

import foretune
import pytest
import torch
from foretune.datasets import KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
from foretune.kernels.registry import comparison_of
from foretune.kernels.scaled_gemm.quantize import (
    GRADIENTS,
    dequantized_columns,
    dequantized_x,
    error_bound,
    quantize_w,
    quantize_x,
)
from foretune.kernels.scaled_gemm.triton_kernels.both_ways import quantize_both_ways, quantize_weights_both_ways
from foretune.kernels.scaled_gemm.triton_kernels.launches import prepare_scaled_dw
from scaled import CPU, H200

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")]

FAMILY = find_family("scaled_grouped_gemm_dw")
#: Empty groups, single rows, and groups over several blocks of 128 rows; three more rows belong to none.
SIZES, MORE = (37, 0, 1, 300, 0, 129), 3
KINDS = {"blockwise": True, "rowwise": False}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_gradient = pytest.mark.parametrize("gradient", GRADIENTS)


def exact_numbers(rows, columns, seed=0):
    """(rows, columns) in bf16: 7 times a power of two, or 0."""
    random = torch.Generator().manual_seed(seed)
    powers = torch.randint(0, 6, (rows, columns), generator=random)
    signs = torch.randint(-1, 2, (rows, columns), generator=random)
    return (7.0 * signs * 2.0**powers).bfloat16()


def config(m, n, tma=0, stages=3, band=2, programs=1, warps=4):
    knobs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128, "GROUP_M": band, "PROGRAMS_PER_SM": programs}
    return KernelConfig.of(**knobs, TMA=tma, CONSUMERS=0, IN_FLIGHT=1, num_warps=warps, num_stages=stages)


def starts(sizes):
    return [(sum(sizes[:group]), size, group) for group, size in enumerate(sizes)]


def exact_dw(dy, x, sizes):
    return torch.stack(
        [dy[row : row + size].double().T @ x[row : row + size].double() for row, size, _ in starts(sizes)]
    )


@every_kind
@every_gradient
@pytest.mark.parametrize("sizes", [SIZES, (128, 256), (0, 0), (5,)], ids=str)
def test_both_copies_have_the_numbers_and_blocks_end_with_zeros(kind, gradient, sizes):
    x, blockwise, rows = exact_numbers(sum(sizes) + MORE, 144), KINDS[kind], sum(sizes)
    tile_map = TileMap.build(torch.tensor(sizes, dtype=torch.int32), len(x))
    x8, scale, xt8, xt_scale = quantize_both_ways(x, tile_map, GRADIENTS[gradient], blockwise=blockwise)
    assert x8.dtype == xt8.dtype == GRADIENTS[gradient]
    assert torch.equal(dequantized_x(x8, scale, kind)[:rows], x[:rows].float())
    for row, size, group in starts(sizes):
        found = dequantized_columns(xt8, xt_scale, row, size, group, blockwise)
        assert torch.equal(found, x[row : row + size].float().T)
        first = row // 128 + group
        assert not xt8[:, first * 128 + size : (first + -(-size // 128)) * 128].float().any()
    alone = quantize_both_ways(x, tile_map, GRADIENTS[gradient], blockwise=blockwise, with_rows=False)
    assert alone[:2] == (None, None)
    for row, size, group in starts(sizes):
        assert torch.equal(dequantized_columns(*alone[2:], row, size, group, blockwise), x[row : row + size].float().T)


@every_kind
def test_scales_are_those_of_quantize(kind):
    x = torch.randn(sum(SIZES), 272).bfloat16()
    tile_map = TileMap.build(torch.tensor(SIZES, dtype=torch.int32), len(x))
    _, scale, _, xt_scale = quantize_both_ways(x, tile_map, GRADIENTS["e4m3"], blockwise=KINDS[kind])
    expected = quantize_x(x, kind)[1]
    largest = torch.nn.functional.pad(x, (0, 112)).view(len(x), 3, 128) if KINDS[kind] else x[:, None]
    assert torch.equal(scale, largest.float().abs().amax(-1) / 448)
    assert torch.allclose(scale, expected, rtol=2.0**-23, atol=0)
    assert scale.stride() == expected.stride()
    for row, size, group in starts(SIZES):
        of_group = x[row : row + size].float().abs()
        if KINDS[kind]:
            for block, rows in enumerate(of_group.split(128) if size else ()):
                assert torch.equal(xt_scale[row // 128 + group + block, :272], rows.amax(0) / 448)
        else:
            largest = of_group.amax(0) if size else torch.zeros(272)
            assert torch.equal(xt_scale[group, :272], largest)


@every_kind
@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(("m", "n", "chunk"), [(64, 64, None), (128, 256, 128), (64, 128, 256)])
def test_any_tile_and_groups_in_chunks(kind, tma, m, n, chunk):
    dy, x, sizes = exact_numbers(sum(SIZES) + MORE, 80), exact_numbers(sum(SIZES) + MORE, 144, 1), torch.tensor(SIZES)
    tile_map, blockwise = TileMap.build(sizes.int(), len(x), chunk or len(x)), KINDS[kind]
    (dyt, dy_scale), (xt, x_scale) = (
        quantize_both_ways(one, tile_map, GRADIENTS["e4m3"], blockwise=blockwise)[2:] for one in (dy, x)
    )
    dw = torch.full((len(SIZES), 80, 144), float("nan")).bfloat16()
    run = prepare_scaled_dw(
        len(x), len(SIZES), tile_map.chunk_rows, 80, 144, config(m, n, tma), 3, blockwise=blockwise, gradient=dyt.dtype
    )
    run((dyt, xt, dy_scale, x_scale, dw, tile_map.entries))
    for (row, size, group), exact in zip(starts(SIZES), exact_dw(dy, x, SIZES), strict=True):
        rows = slice(row, row + size)
        bound = error_bound(dy[rows].double().T, x[rows].double().T)
        assert bool(((dw[group].double() - exact).abs() <= bound).all()), f"group {group}"


@every_kind
@every_gradient
@pytest.mark.parametrize("given", [False, True], ids=["bf16", "fp8"])
def test_an_op_has_the_gradients_of_both(kind, gradient, given):
    x, w, dy = exact_numbers(sum(SIZES) + MORE, 144), exact_numbers(len(SIZES) * 80, 144, 1), None
    w, dy = w.view(len(SIZES), 80, 144).requires_grad_(), exact_numbers(len(x), 80, 2)
    options = {"dw_dtype": "fp8"}
    if given:
        x, options["x_scale"] = quantize_x(x, kind)
    else:
        x.requires_grad_()
    sizes = torch.tensor(SIZES)
    y = foretune.scaled_grouped_gemm(x, w, sizes, scales=kind, grad_dtype=gradient, mode="off", **options)
    y.backward(dy)
    exact = dequantized_x(x, options["x_scale"], kind) if given else x.detach()
    for (row, size, group), dw in zip(starts(SIZES), exact_dw(dy, exact, SIZES), strict=True):
        if not size:
            assert not w.grad[group].any()
            continue
        assert float((w.grad[group].double() - dw).norm() / dw.norm()) < 4e-3
        if not given:
            dx = dy[row : row + size].double() @ w[group].detach().double()
            assert float((x.grad[row : row + size].double() - dx).norm() / dx.norm()) < 4e-3
    if not given:
        assert not x.grad[sum(SIZES) :].any()


@pytest.mark.parametrize(("rows", "groups"), [(0, 2), (0, 0), (4, 0)])
def test_gradients_of_nothing_are_zero(rows, groups):
    x, w = (
        exact_numbers(rows, 48).requires_grad_(),
        exact_numbers(groups * 32, 48).view(groups, 32, 48).requires_grad_(),
    )
    y = foretune.scaled_grouped_gemm(x, w, torch.zeros(groups, dtype=torch.int32), dw_dtype="fp8", mode="off")
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert w.grad.shape == w.shape
    assert not x.grad.any()
    assert not w.grad.any()


def test_invalid_sizes_stay_inside_of_the_tensors():
    x, dy = exact_numbers(300, 48), exact_numbers(300, 32, 1)
    w = exact_numbers(3 * 32, 48, 2).view(3, 32, 48).requires_grad_()
    y = foretune.scaled_grouped_gemm(x, w, torch.tensor([200, -5, 400]), dw_dtype="fp8", mode="off")
    y.backward(dy)
    exact = exact_dw(dy, x, (200, 0, 100))
    for group in (0, 2):
        assert float((w.grad[group].double() - exact[group]).norm() / exact[group].norm()) < 4e-3
    assert not w.grad[1].any()


def test_a_wrong_scale_is_seen():
    dims = {"groups": 2, "rows": 192, "n": 80, "k": 144}
    problem = Problem.of(FAMILY.name, dtype="fp8e4m3", ragged={"rows": (150, 42)}, **dims)
    inputs = FAMILY.inputs(problem, CPU)
    launched, reference = FAMILY.launch(inputs, config(64, 64)).double(), FAMILY.reference(inputs).double()
    assert float((launched - reference).norm() / reference.norm()) < FAMILY.tolerance(inputs.problem)
    inputs.x_scale.mul_(1.1)
    changed = FAMILY.reference(inputs).double()
    assert float((launched - changed).norm() / changed.norm()) > FAMILY.tolerance(inputs.problem)


@every_kind
@pytest.mark.parametrize(("n", "k"), [(80, 272), (128, 128), (16, 400)])
def test_weights_and_their_transpose_are_those_of_quantize(kind, n, k):
    w = exact_numbers(3 * n, k).view(3, n, k)
    w[1, :16, :16] = 0
    w8, scale, wt8, wt_scale = quantize_weights_both_ways(w, blockwise=KINDS[kind])
    for matrix, fp8, found in ((w, w8, scale), (w.transpose(1, 2), wt8, wt_scale)):
        expected, expected_scale = quantize_w(matrix, kind)
        assert torch.equal(fp8.float(), expected.float())
        assert torch.equal(found, expected_scale)
        assert fp8.is_contiguous()
        assert found.is_contiguous()


@every_kind
def test_contenders_get_the_same_numbers_in_groups_that_torch_can_take(kind):
    flags = (kind,) if KINDS[kind] else ()

    def contenders(sizes):
        dims = {"groups": len(sizes), "rows": sum(sizes), "n": 80, "k": 144}
        problem = Problem.of(FAMILY.name, dtype="fp8e4m3", flags=flags, ragged={"rows": sizes}, **dims)
        inputs = FAMILY.inputs(problem, CPU)
        return inputs, comparison_of(FAMILY).contenders(FAMILY, problem, inputs, CPU, {})

    inputs, ways = contenders((32, 0, 160, 16))
    reference = FAMILY.reference(inputs)
    for way in ways.values():
        assert float((way().float() - reference).norm() / reference.norm()) < 6e-3
    assert "bf16" in ways
    assert contenders((32, 8))[1] == {}


def test_the_suite_of_dw_has_problems_that_it_runs():
    cases = comparison_of(FAMILY).suite(FAMILY)
    assert {case.problem.flags for case in cases.values()} == {("blockwise",), ()}
    for case in cases.values():
        assert FAMILY.supports(FAMILY.default(case.problem, H200), case.problem, H200) is None
        assert not any(size % 16 for size in case.problem.ragged.sizes)


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_has_the_same_gradients(kind, backend):
    x, dy = exact_numbers(sum(SIZES), 144), exact_numbers(sum(SIZES), 80, 2)
    w, sizes, found = exact_numbers(len(SIZES) * 80, 144, 1).view(len(SIZES), 80, 144), torch.tensor(SIZES), []

    def step(x, w):
        return foretune.scaled_grouped_gemm(x, w, sizes, scales=kind, dw_dtype="fp8", mode="off")

    torch._dynamo.reset()
    for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
        leaves = [one.clone().requires_grad_() for one in (x, w)]
        y = run(*leaves)
        y.backward(dy)
        found.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for one, same in zip(*found, strict=True):
        assert torch.equal(one, same)

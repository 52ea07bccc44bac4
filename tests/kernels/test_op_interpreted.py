"""The op in Triton's interpreter: results and every gradient against plain loops, for all options together."""

from __future__ import annotations

import pytest
import torch
from foretune import KernelConfig, grouped_gemm
from foretune.datasets import ForetuneError
from foretune.kernels.grouped_gemm.op import OP
from foretune.kernels.grouped_gemm.space import chunk_rows
from foretune.kernels.grouped_gemm.triton_kernels import rowwise, tiles
from foretune.kernels.op_calls import Memo
from foretune.runtime.launching.stub_driver import interpreter
from grouped import guarded
from loops import error, grouped_loop

pytestmark = pytest.mark.interpret

#: The interpreter's bfloat16 product is wrong (Triton 3.6 to 3.9).
HALF, SINGLE = torch.float16, torch.float32
#: Relative errors of results, and of gradients, for some of which an operand is rounded on the way.
TOLERANCES = {HALF: (4e-4, 6e-4), SINGLE: (5e-7, 1e-6)}
TOPK, N, K = 2, 40, 72  # off every block
SIZES = (17, 0, 1, 38, 16)  # ragged, empty, one row, whole tiles
SIDES = {"sorted": {}, "permute_x": {"permute_x": True}, "permute_y": {"permute_y": True}}


def configs(side, *, tma):
    """A config of each kernel, with TMA on all operands that the permutation leaves where they are."""
    straight_x, straight_y = tma * (side != "permute_x"), tma * (side != "permute_y")
    blocks = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64, "num_stages": 2}
    return {
        "config": KernelConfig.of(**blocks, TMA_X=straight_x, TMA_W=tma, TMA_Y=straight_y),
        "config_dx": KernelConfig.of(**blocks, TMA_X=straight_y, TMA_W=tma, TMA_Y=straight_x),
        "config_dw": KernelConfig.of(**blocks, TMA_DY=straight_y, TMA_X=straight_x, TMA_DW=tma),
    }


class Case:
    """The tensors of a call, each of which wants a gradient."""

    def __init__(self, side, dtype, *, weights=None, bias=None, sizes=SIZES, n=N, k=K):
        generator = torch.Generator().manual_seed(0)
        rows = sum(sizes)
        shapes = {"x": (rows // TOPK if side == "permute_x" else rows, k), "w": (len(sizes), n, k)}
        dtypes = {"x": dtype, "w": dtype}
        if weights is not None:
            shapes["weights"], dtypes["weights"] = (rows,), weights
        if bias is not None:
            shapes["bias"], dtypes["bias"] = (len(sizes), n), bias
        self.tensors = {
            name: torch.randn(shape, generator=generator).to(dtypes[name]) for name, shape in shapes.items()
        }
        self.dy = torch.randn(rows, n, generator=generator).to(dtype)
        self.indices = None if side == "sorted" else torch.randperm(rows, generator=generator)
        self.sizes, self.options = sizes, {"topk": TOPK, **SIDES[side]}

    def run(self, *, sizes_dtype=torch.int32, **chosen):
        """y and the gradients of the op."""
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in self.tensors.items()}
        y = grouped_gemm(
            leaves["x"],
            leaves["w"],
            torch.tensor(self.sizes, dtype=sizes_dtype),
            gather_indices=self.indices,
            topk_weights=leaves.get("weights"),
            bias=leaves.get("bias"),
            **self.options,
            **chosen,
        )
        y.backward(self.dy)
        return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    def expected(self):
        """The same of the loop, in double precision."""
        leaves = {name: tensor.double().requires_grad_() for name, tensor in self.tensors.items()}
        y = grouped_loop(sizes=self.sizes, indices=self.indices, **leaves, **self.options)
        y.backward(self.dy.double())
        return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def assert_right(results, expected, dtype):
    assert results["y"].dtype == dtype
    of_y, of_grads = TOLERANCES[dtype]
    assert results.keys() == expected.keys()
    for name, reference in expected.items():
        assert results[name].shape == reference.shape
        # The gradient of a weight is one sum of N x K normal products: of few, all may be near zero by chance.
        usual = (reference.numel() * expected["w"][0].numel()) ** 0.5 if name == "weights" else 0.0
        assert error(results[name], reference, usual) <= (of_y if name == "y" else of_grads), name  # false for NaN


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weights", [None, SINGLE])
@pytest.mark.parametrize("side", SIDES)
def test_all_options_together(side, weights, biased):
    case = Case(side, HALF, weights=weights, bias=HALF if biased else None)
    assert_right(case.run(**configs(side, tma=0)), case.expected(), HALF)


@pytest.mark.parametrize("optional", [None, SINGLE])
@pytest.mark.parametrize("side", SIDES)
def test_tma(side, optional):
    case = Case(side, HALF, weights=optional, bias=optional)
    assert_right(case.run(**configs(side, tma=1)), case.expected(), HALF)


@pytest.mark.parametrize("side", SIDES)
def test_float32_is_exact_to_its_last_digits(side):
    case = Case(side, SINGLE, weights=SINGLE, bias=SINGLE)
    assert_right(case.run(**configs(side, tma=0)), case.expected(), SINGLE)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1), (0, 0, 6), (6, 0, 0), (64, 32), (40,), (0, 2, 0)],
    ids=["one row each", "last", "first", "whole tiles", "one group", "two rows"],
)
def test_any_group_sizes(sizes, side):
    case = Case(side, HALF, weights=SINGLE, bias=HALF, sizes=sizes)
    assert_right(case.run(**configs(side, tma=1)), case.expected(), HALF)


@pytest.mark.parametrize(
    # The narrower operand is what weights scale for the gradient of w: elsewhere in this file dy, here x as well.
    ("side", "n", "k"),
    [("permute_x", 8, 8), ("permute_y", 8, 136), ("permute_x", 136, 8), ("permute_y", 136, 8), ("sorted", 136, 8)],
)
def test_any_multiple_of_8(side, n, k):
    case = Case(side, HALF, weights=SINGLE, bias=HALF, n=n, k=k)
    assert_right(case.run(mode="off"), case.expected(), HALF)


def test_a_long_group_is_summed_in_chunks():
    case = Case("permute_y", HALF, weights=SINGLE, bias=HALF, sizes=(3, 1400, 5), n=8, k=8)
    assert chunk_rows(1408, 8, 8, interpreter().sm_count) < 1400
    blocks = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), 128)
    chosen = {name: KernelConfig.of(**blocks) for name in ("config", "config_dx", "config_dw")}
    assert_right(case.run(**chosen), case.expected(), HALF)


@pytest.mark.parametrize("weights", [HALF, torch.bfloat16])
def test_weights_and_bias_of_other_dtypes(weights):
    case = Case("permute_y", HALF, weights=weights, bias=SINGLE)
    results = case.run(mode="off")
    expected = case.expected()
    of_weights = error(results.pop("weights"), expected.pop("weights"))
    assert of_weights <= {HALF: 6e-4, torch.bfloat16: 4e-3}[weights]
    assert_right(results, expected, HALF)


def test_group_sizes_and_indices_of_the_other_integers():
    case = Case("permute_x", HALF, weights=SINGLE)
    narrow = case.run(mode="off")
    case.indices = case.indices.int()
    wide = case.run(mode="off", sizes_dtype=torch.int64)
    assert all(torch.equal(narrow[name], wide[name]) for name in narrow)


def test_weights_of_the_shape_of_a_router():
    case = Case("permute_y", HALF, weights=SINGLE)
    flat = case.run(mode="off")
    case.tensors["weights"] = case.tensors["weights"].view(-1, TOPK)
    square = case.run(mode="off")
    assert square["weights"].shape == case.tensors["weights"].shape
    assert all(torch.equal(flat[name].flatten(), square[name].flatten()) for name in flat)


def test_indices_without_a_permutation_are_of_the_weights_alone():
    case = Case("sorted", HALF, weights=SINGLE)
    case.indices = torch.randperm(sum(SIZES), generator=torch.Generator().manual_seed(1))
    assert_right(case.run(mode="off"), case.expected(), HALF)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("wanted", ["x", "w", "weights", "bias"])
def test_any_gradient_alone(wanted, side):
    case = Case(side, HALF, weights=SINGLE, bias=HALF)
    tensors = {name: tensor.clone().requires_grad_(name == wanted) for name, tensor in case.tensors.items()}
    y = grouped_gemm(
        tensors["x"],
        tensors["w"],
        torch.tensor(SIZES, dtype=torch.int32),
        gather_indices=case.indices,
        topk_weights=tensors["weights"],
        bias=tensors["bias"],
        mode="off",
        **case.options,
    )
    y.backward(case.dy)
    assert error(tensors[wanted].grad, case.expected()[wanted]) <= TOLERANCES[HALF][1]
    assert all(tensor.grad is None for name, tensor in tensors.items() if name != wanted)


def test_a_frozen_weight_keeps_no_activation_alive():
    case = Case("sorted", HALF)
    x = case.tensors["x"].requires_grad_()
    y = grouped_gemm(x, case.tensors["w"], torch.tensor(SIZES, dtype=torch.int32), mode="off")
    kept = {id(tensor) for tensor in y.grad_fn.saved_tensors if tensor is not None}
    assert id(case.tensors["w"]) in kept
    assert id(x) not in kept


def test_a_gradient_that_is_not_contiguous():
    case = Case("sorted", HALF)
    x = case.tensors["x"].clone().requires_grad_()
    grouped_gemm(x, case.tensors["w"], torch.tensor(SIZES, dtype=torch.int32), mode="off").sum().backward()
    case.dy = torch.ones_like(case.dy)
    assert error(x.grad, case.expected()["x"]) <= TOLERANCES[HALF][1]


@pytest.mark.parametrize("side", SIDES)
def test_no_rows(side):
    case = Case(side, HALF, weights=SINGLE, bias=HALF, sizes=(0, 0))
    results = case.run(mode="off")
    assert results["y"].shape == (0, N)
    assert results["x"].shape == (0, K)
    assert not results["w"].any()
    assert not results["bias"].any()


def test_no_groups():
    x = torch.ones(4, K, dtype=HALF, requires_grad=True)
    y = grouped_gemm(x, torch.ones(0, N, K, dtype=HALF), torch.zeros(0, dtype=torch.int32))
    y.sum().backward()
    assert y.shape == (4, N)
    assert not x.grad.any()


@pytest.mark.parametrize("sizes", [(20, 0, 20, 0, 10), (-5, 30, -(2**30), 20, 0)], ids=["too few", "negative"])
@pytest.mark.large
def test_rows_of_no_group(sizes):
    """Rows past the sum of the sizes are of no group: what groups have is right, and weights there get no gradient."""
    counted = tuple(max(size, 0) for size in sizes)
    case, some = Case("sorted", HALF, weights=SINGLE, bias=HALF), sum(counted)
    case.sizes = sizes
    results = case.run(mode="off")
    case.sizes = (*counted, sum(SIZES) - some)
    case.tensors["w"] = torch.cat([case.tensors["w"], torch.zeros(1, N, K, dtype=HALF)])
    case.tensors["bias"] = torch.cat([case.tensors["bias"], torch.zeros(1, N, dtype=HALF)])
    expected = case.expected()
    assert not results["weights"][some:].any()
    expected = {name: value[:-1] if name in ("w", "bias") else value[:some] for name, value in expected.items()}
    assert_right({**results, **{name: results[name][:some] for name in ("y", "x", "weights")}}, expected, HALF)


@pytest.fixture
def dirty_memory():
    """Fresh memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("weights", [None, SINGLE])
@pytest.mark.parametrize("sizes", [(20, 0, 20, 0, 10), (0,) * 5, SIZES], ids=["too few", "none", "all"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.usefixtures("dirty_memory")
def test_the_gradient_of_rows_of_no_group_is_zero(side, sizes, weights):
    case, some = Case(side, HALF, weights=weights, bias=HALF), sum(sizes)
    case.sizes = sizes
    if weights is not None and side == "sorted":
        case.tensors["weights"][some:] = float("nan")  # which nobody reads
    results = case.run(mode="off")
    expected = torch.zeros(sum(SIZES), K)
    x, w, dy = (tensor.float() for tensor in (case.tensors["x"], case.tensors["w"], case.dy))
    rows = torch.arange(sum(SIZES)) if case.indices is None else case.indices
    start = 0
    for group, size in enumerate(sizes):
        there = rows[start : start + size]
        scale = 1.0 if weights is None else case.tensors["weights"][there, None]
        expected[there if side == "permute_x" else slice(start, start + size)] = (
            scale * dy[there if side == "permute_y" else slice(start, start + size)]
        ) @ w[group]
        start += size
    if side == "permute_x":
        expected = expected.view(*x.shape[:1], TOPK, K).sum(1)
    torch.testing.assert_close(results["x"].float(), expected, rtol=1e-2, atol=5e-2)
    assert not results["x"][expected == 0].any()
    assert results["w"].isfinite().all()


@pytest.mark.usefixtures("dirty_memory")
def test_a_bias_gradient_reads_no_more_partial_sums_than_there_are(monkeypatch):
    """Sizes that sum to more than the rows have more tiles than sums were made room for."""

    def amid_nan(shape, **options):
        return guarded(torch.zeros(shape, **options))[0]

    monkeypatch.setattr(rowwise.torch, "empty", amid_nan)
    rows = 520
    tile_map = tiles.TileMap.build(torch.full((3,), 2**31 - 1, dtype=torch.int32), rows)
    grads = rowwise.bias_grads(torch.ones(rows, 8), None, tile_map, None, False, SINGLE)
    assert grads.isfinite().all()


@pytest.mark.large
def test_sizes_that_promise_too_many_rows_end_where_the_rows_do():
    case = Case("permute_y", HALF, weights=SINGLE, bias=HALF)
    case.sizes = (17, 0, 1, 38, 1000)
    results = case.run(mode="off")
    case.sizes = SIZES
    assert_right(results, case.expected(), HALF)


@pytest.mark.parametrize("side", ["permute_x", "permute_y"])
@pytest.mark.large
def test_an_index_out_of_range_writes_nothing_outside(side):
    case = Case(side, HALF, weights=SINGLE, bias=HALF)
    guarded = {name: torch.cat([tensor, tensor]) for name, tensor in case.tensors.items()}
    before = {name: tensor.clone() for name, tensor in guarded.items()}
    case.tensors = {name: guarded[name][: len(tensor)] for name, tensor in case.tensors.items()}
    case.indices[::5] = torch.tensor(10**9)
    case.indices[3::10] = torch.tensor(-7)
    case.run(mode="off")
    assert all(torch.equal(guarded[name], before[name]) for name in guarded)


class TestTheDebugSwitch:
    @pytest.fixture(autouse=True)
    def switched_on(self, monkeypatch):

        monkeypatch.setattr(OP, "calls", Memo())
        monkeypatch.setenv("FORETUNE_CHECK", "1")

    def test_lets_pass_what_is_in_order(self):
        case = Case("permute_x", HALF)
        assert_right(case.run(mode="off"), case.expected(), HALF)

    @pytest.mark.parametrize(
        ("sizes", "why"),
        [
            ((17, 0, 1, 38, 17), "must sum to at most 72, the number of rows, but sum to 73"),
            ((18, -1, 1, 38, 16), "must be >= 0 but contains -1"),
        ],
    )
    def test_refuses_sizes(self, sizes, why):
        case = Case("sorted", HALF)
        case.sizes = sizes
        with pytest.raises(ForetuneError, match=why):
            case.run(mode="off")

    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.usefixtures("dirty_memory")
    def test_zeroes_rows_of_no_group(self, side):
        case, sizes = Case(side, HALF), (17, 0, 1, 20, 0)
        everything = case.run(mode="off")["y"]
        case.sizes = sizes
        y = case.run(mode="off")["y"]
        outside = torch.arange(72) >= sum(sizes)
        if side == "permute_y":
            outside = torch.zeros(72, dtype=bool).index_fill(0, case.indices[outside], True)
        assert not y[outside].any()
        assert y.isfinite().all()
        if side == "sorted":
            assert torch.equal(y[:18], everything[:18])

    @pytest.mark.usefixtures("dirty_memory")
    def test_zeroes_all_where_there_are_no_groups(self):
        y = grouped_gemm(torch.ones(4, K), torch.ones(0, N, K), torch.zeros(0, dtype=torch.int32))
        assert not y.any()

    @pytest.mark.parametrize(
        ("first", "why"), [(72, "entry 0 .* is 1$"), (-1, "entry 0 .* is -1$"), (5, "entry 0 .* is 1$")]
    )
    def test_refuses_indices(self, first, why):
        case = Case("permute_y", HALF)
        case.indices[case.indices == 0] = first
        with pytest.raises(ForetuneError, match=f"each of 0 to 71 once, but {why}"):
            case.run(mode="off")

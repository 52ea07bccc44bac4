"""The op on the card: results and gradients, `torch.compile`, CUDA graphs, determinism, waiting for nothing, launch
times, and tensors of more than 2^31 elements."""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from foretune import KernelConfig, grouped_gemm
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm import unsloth_grouped_gemm
from foretune.kernels.grouped_gemm.op import OP
from foretune.kernels.grouped_gemm.passes import Options, Shape, Step
from foretune.kernels.grouped_gemm.space import chunk_rows
from foretune.kernels.grouped_gemm.triton_kernels import gemm, tiles
from foretune.kernels.grouped_gemm.triton_kernels.rowwise import sum_rows
from foretune.kernels.op_calls import Memo
from foretune.runtime import ForetuneWarning, choice
from foretune.runtime.launching.launcher import ensure_allocator
from foretune.runtime.launching.stub_driver import live
from grouped import launch_gemm
from loops import error, grouped_loop, moe_fused, moe_loop

pytestmark = [
    pytest.mark.gpu,
    # Right results are the same with and without a prediction.
    pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning"),
]

TOPK, GROUPS, N, K = 2, 16, 648, 328  # off every block
SIDES = {"sorted": {}, "permute_x": {"permute_x": True}, "permute_y": {"permute_y": True}}
side = pytest.mark.parametrize("side", SIDES)
#: Of results, and of gradients, for some of which an operand is rounded on the way.
TOLERANCES = {torch.bfloat16: (4e-3, 6e-3), torch.float16: (5e-4, 8e-4), torch.float32: (1e-5, 1e-5)}


def routed(rows, groups=GROUPS, *, skewed=False, seed=0):
    """Sizes as routing makes them, a quarter of the groups without a row; `skewed`: half of the rows in one group."""
    shares = np.ones(groups)
    shares[::4] = 0
    if skewed:
        shares *= 0.5 / shares.sum()
        shares[1] = 0.5
    return np.random.default_rng(seed).multinomial(rows, shares / shares.sum()).tolist()


class Layer:
    """The tensors of one call on the card, each of which wants a gradient."""

    def __init__(self, side, rows, *, groups=GROUPS, n=N, k=K, dtype=torch.bfloat16, full=True, sizes=None):
        torch.manual_seed(0)
        make = partial(torch.randn, device="cuda")
        self.leaves = {
            "x": make(rows // TOPK if side == "permute_x" else rows, k).to(dtype),
            "w": make(groups, n, k).to(dtype),
        }
        if full:
            self.leaves |= {"topk_weights": torch.rand(rows, device="cuda"), "bias": make(groups, n).to(dtype)}
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.dy = make(rows, n).to(dtype)
        self.options = {"topk": TOPK, **SIDES[side]}
        self.indices = torch.randperm(rows, device="cuda") if side != "sorted" else None
        self.sizes = sizes or routed(rows, groups)
        self.group_sizes = torch.tensor(self.sizes, dtype=torch.int32, device="cuda")

    def __call__(self, op=grouped_gemm, **chosen):
        return op(group_sizes=self.group_sizes, gather_indices=self.indices, **self.leaves, **self.options, **chosen)

    def run(self, **chosen):
        """[y, a gradient of each leaf] of the op."""
        y = self(**chosen)
        return [y.detach(), *torch.autograd.grad(y, list(self.leaves.values()), self.dy)]

    def expected(self):
        """The same of the loop, in float32 (float64 for float32)."""
        exact = torch.float64 if self.dy.dtype == torch.float32 else torch.float32
        leaves = {name: leaf.detach().to(exact).requires_grad_() for name, leaf in self.leaves.items()}
        options = {"weights": leaves.get("topk_weights"), "bias": leaves.get("bias"), **self.options}
        y = grouped_loop(leaves["x"], leaves["w"], self.sizes, indices=self.indices, **options)
        return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), self.dy.to(exact))]

    def assert_right(self, results, expected):
        of_y, of_grads = TOLERANCES[self.dy.dtype]
        for name, result, reference in zip(["y", *self.leaves], results, expected, strict=True):
            assert error(result, reference) <= (of_y if name == "y" else of_grads), name  # false for NaN


@pytest.fixture(autouse=True)
def exact_reference():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("rows", [48, 3000, 20000])
@pytest.mark.parametrize("dtype", TOLERANCES)
@side
def test_results_and_gradients(side, dtype, rows):
    layer = Layer(side, rows, dtype=dtype)
    layer.assert_right(layer.run(), layer.expected())


@pytest.mark.parametrize("full", [False, True])
@side
def test_one_group_with_half_of_the_rows(side, full):
    layer = Layer(side, 20000, full=full, sizes=routed(20000, skewed=True))
    assert max(layer.sizes) > chunk_rows(20000, N, K, torch.cuda.get_device_properties(0).multi_processor_count)
    layer.assert_right(layer.run(), layer.expected())


def test_the_shortlist_is_timed_once_and_right():
    layer = Layer("permute_x", 4096)
    layer.assert_right(layer.run(mode="shortlist"), layer.expected())
    measured = dict(choice._measured)
    layer.run(mode="shortlist")
    assert choice._measured == measured


@pytest.mark.parametrize("gemm", ["ours", "unsloths"])
def test_an_moe_layer(gemm):
    torch.manual_seed(0)
    tokens, experts, hidden, inner, topk = 1000, 32, 512, 384, 4
    shapes = {"x": (tokens, hidden), "router": (experts, hidden), "w13": (experts, 2 * inner, hidden)}
    shapes["w2"] = (experts, hidden, inner)
    layer = {name: (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).bfloat16() for name, shape in shapes.items()}

    def ours(x, w, sizes, topk, indices, **options):
        return grouped_gemm(x, w, sizes, topk=topk, gather_indices=indices, **options)

    def unsloths(x, w, sizes, topk, indices, **options):
        weighs = options.get("topk_weights") is not None
        return unsloth_grouped_gemm(x, w, sizes, topk, indices, fuse_mul_post=weighs, **options)

    def run(moe, dtype, **options):
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in layer.items()}
        y = moe(**leaves, topk=topk, **options)
        torch.manual_seed(1)
        return [
            y.detach(),
            *torch.autograd.grad(y, list(leaves.values()), torch.randn(y.shape, device="cuda").to(dtype)),
        ]

    results = run(moe_fused, torch.bfloat16, gemm={"ours": ours, "unsloths": unsloths}[gemm])
    for result, reference in zip(results, run(moe_loop, torch.float32), strict=True):
        assert error(result, reference) <= 3e-2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@side
def test_compiled_whole_it_equals_eager(side, mode):
    layer = Layer(side, 3000)
    layer.dy = None  # below, the gradient of a sum, whose rows are all alike

    def step(group_sizes, gather_indices, **leaves):
        y = grouped_gemm(group_sizes=group_sizes, gather_indices=gather_indices, **leaves, **layer.options)
        return (y.float() ** 2).sum(), y

    def run(function):
        loss, y = function(layer.group_sizes, layer.indices, **layer.leaves)
        return [y.detach().clone(), *(grad.clone() for grad in torch.autograd.grad(loss, list(layer.leaves.values())))]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    expected = run(step)
    for _ in range(3):  # reduce-overhead records a CUDA graph in the second run and replays it in the third
        for result, reference in zip(run(compiled), expected, strict=True):
            assert torch.equal(result, reference)


def test_one_compiled_graph_serves_any_number_of_rows():
    torch._dynamo.reset()

    def call(group_sizes, gather_indices, x, w):
        return grouped_gemm(x, w, group_sizes, gather_indices=gather_indices, topk=TOPK, permute_x=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3000, 3002, 48):
            layer = Layer("permute_x", rows, full=False)
            arguments = {"group_sizes": layer.group_sizes, "gather_indices": layer.indices, **layer.leaves}
            assert torch.equal(compiled(**arguments), call(**arguments))


@side
def test_a_cuda_graph_is_replayed_with_other_sizes(side):
    rows = 6000
    layer = Layer(side, rows)
    for _ in range(2):  # compiles, loads, chooses
        layer.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layer.run()
    balanced = [rows // GROUPS] * GROUPS
    for sizes in (layer.sizes, routed(rows, skewed=True), [0] * (GROUPS - 1) + [rows], balanced):
        layer.sizes = sizes
        layer.group_sizes.copy_(torch.tensor(sizes))
        if layer.indices is not None:
            layer.indices.copy_(torch.randperm(rows))
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        layer.assert_right(results, layer.expected())


@side
def test_every_run_gives_the_same_bits(side):
    layer = Layer(side, 20000, sizes=routed(20000, skewed=True))
    first = layer.run()
    for _ in range(5):
        noise = torch.randn(1 << 24, device="cuda")  # other memory, other timing
        again = layer.run()
        del noise
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@side
def test_forward_and_backward_wait_for_nothing(side):
    layer = Layer(side, 3000)
    layer.run()  # compiles, loads, chooses, and fills the allocator's cache
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second and more
    asleep = torch.cuda.Event()
    asleep.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = layer.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not asleep.query()  # the device is not even past the sleep
    layer.assert_right(results, layer.expected())


def test_the_debug_switch_does_wait_and_raises(monkeypatch):
    monkeypatch.setattr(OP, "calls", Memo())
    monkeypatch.setenv("FORETUNE_CHECK", "1")
    layer = Layer("permute_x", 3000)
    layer.assert_right(layer.run(), layer.expected())
    layer.group_sizes[3] += 1
    with pytest.raises(ValueError, match="group_sizes must sum to at most 3000, the number of rows, but sum to 3001"):
        layer.run()


def test_wild_sizes_and_indices_write_nothing_outside():
    """Nor fault: the guards are this process's own memory, so faults are for compute-sanitizer to see."""
    layer = Layer("permute_y", 3000)
    layer.indices[::3] = 10**9
    layer.indices[1::3] = -(10**9)
    layer.group_sizes[:4] = torch.tensor([-5, 2**31 - 1, -(2**31), 7000])
    layer.run()
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_gpu_that_is_not_the_current_one():
    layer = Layer("permute_x", 3000)
    expected = layer.run()
    layer.leaves = {name: leaf.detach().to("cuda:1").requires_grad_() for name, leaf in layer.leaves.items()}
    layer.indices, layer.group_sizes, layer.dy = (t.to("cuda:1") for t in (layer.indices, layer.group_sizes, layer.dy))
    for result, reference in zip(layer.run(), expected, strict=True):
        assert result.device.index == 1
        assert torch.equal(result.cpu(), reference.cpu())


def microseconds(call, loops=200, rounds=30):
    """The time of one call on the host, in the quietest round; the queue is drained between rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(loops):
            call()
        best = min(best, (time.perf_counter() - began) / loops)
    return best * 1e6


def test_a_hot_call_takes_no_more_than_two_bare_launches(capsys):
    """Small tensors, so that the host is never held up by the device."""
    rows = 64
    layer = Layer("permute_x", rows, n=128, k=64)
    weighted = {name: leaf.detach() for name, leaf in layer.leaves.items()}
    x, w, sizes = layer.leaves["x"].detach().repeat(2, 1), weighted["w"], layer.group_sizes
    y, tile_map = torch.empty(rows, 128, dtype=x.dtype, device="cuda"), tiles.TileMap.build(sizes, rows)
    times, ratios = {}, {}
    for name, tma in (("pointers", 0), ("TMA", 1)):
        config = KernelConfig.of(
            BLOCK_M=16,
            BLOCK_N=64,
            BLOCK_K=64,
            GROUP_M=1,
            PROGRAMS_PER_SM=1,
            TMA_X=tma,
            TMA_W=tma,
            TMA_Y=0,
            CONSUMERS=0,
            PINGPONG=0,
            num_stages=3,
        )
        forward = find_family("grouped_gemm_fwd")
        problem = Step(Shape(rows, GROUPS, 128, 64), x.dtype, x.get_device(), Options()).problem(forward.name)
        if forward.supports(config, problem, live(x.get_device())):
            continue
        arguments = (x, w, y, tile_map.entries, *[None] * 6, rows, rows, GROUPS, 128 // 8, 64 // 8, 1)
        constants = {"TRANSPOSED": False, "GATHER": False, "SCATTER": False, **config.to_json()}
        ensure_allocator()  # for the descriptors of the bare launch, which its programs make
        bare = microseconds(lambda a=arguments, c=constants: gemm.grouped_gemm_kernel[(8,)](*a, **c))
        hot = microseconds(lambda config=config: grouped_gemm(x, w, sizes, config=config))
        times |= {f"{name}: kernel[grid](...)": bare, f"{name}: the op": hot}
        ratios[name] = hot / bare
    times["launch_gemm"] = microseconds(lambda: launch_gemm(x, w, y, tile_map, config, 132))
    times["TileMap.build"] = microseconds(lambda: tiles.TileMap.build(sizes, rows))
    times["the op, config chosen"] = microseconds(lambda: grouped_gemm(x, w, sizes))
    times["the op, permute_x, weights, bias"] = microseconds(
        lambda: grouped_gemm(group_sizes=sizes, gather_indices=layer.indices, **weighted, **layer.options)
    )
    times["the op, recording for backward"] = microseconds(lambda: grouped_gemm(x, layer.leaves["w"], sizes))
    times["the op through the dispatcher"] = microseconds(
        lambda: torch.ops.foretune.grouped_gemm(x, w, sizes, None, None, None, 1, False, False, *[None] * 4)
    )
    recorded = layer()
    leaves = list(layer.leaves.values())
    dy = torch.ones_like(recorded)
    times["backward, all gradients"] = microseconds(
        lambda: torch.autograd.grad(recorded, leaves, dy, retain_graph=True)
    )
    lines = [f"  {name:40}{value:8.1f}" for name, value in times.items()]
    lines += [f"  {name}: the op over a bare launch{'':10}{ratio:.2f}" for name, ratio in ratios.items()]
    with capsys.disabled():
        sys.stdout.write("\n".join(["\nmicroseconds on the host:", *lines, ""]))
    assert max(ratios.values()) <= 2.0


class TestMoreThan2To31Elements:
    """Only some rows are compared: the last ones are where a 32-bit offset would have wrapped around."""

    @pytest.fixture(autouse=True)
    def memory(self):
        if torch.cuda.get_device_properties(0).total_memory < 60e9:
            pytest.skip("needs 60 GB of GPU memory")
        yield
        torch.cuda.empty_cache()

    def test_weights(self):
        groups, n, k, rows = 64, 8192, 4352, 2048
        assert groups * n * k > 2**31
        sizes = [rows // 2] + [0] * (groups - 2) + [rows // 2]
        layer = Layer("sorted", rows, groups=groups, n=n, k=k, full=False, sizes=sizes)
        y, dx, dw = layer.run()
        x, w, last = layer.leaves["x"].detach(), layer.leaves["w"].detach(), slice(rows // 2, None)
        assert error(y[last], x[last].float() @ w[-1].float().T) <= 4e-3
        assert error(dx[last], layer.dy[last].float() @ w[-1].float()) <= 4e-3
        assert error(dw[-1], layer.dy[last].float().T @ x[last].float()) <= 4e-3
        assert not dw[1:-1].any()

    @pytest.mark.parametrize("side", ["sorted", "permute_y"])
    def test_rows(self, side):
        groups, n, k, rows = 2, 8192, 64, 2**18 + 4096
        assert rows * n > 2**31
        layer = Layer(side, rows, groups=groups, n=n, k=k, sizes=[rows // 2, rows // 2])
        y, dx, dw, dweights, dbias = layer.run()
        leaves = {name: leaf.detach().float() for name, leaf in layer.leaves.items()}
        weights, bias = leaves["topk_weights"], leaves["bias"]
        some = slice(rows - 1000, None)
        where = torch.arange(rows, device="cuda") if layer.indices is None else layer.indices
        scale, dy = weights[where[some], None], layer.dy[where[some]].float()
        products = leaves["x"][some] @ leaves["w"][-1].T + bias[-1]
        assert error(y[where[some]], products * scale) <= 4e-3
        assert error(dx[some], dy @ leaves["w"][-1] * scale) <= 6e-3
        assert error(dweights[where[some]], (dy * products).sum(-1)) <= 6e-3
        of_w, of_bias = torch.zeros(n, k, device="cuda"), torch.zeros(n, device="cuda")
        for start in range(rows // 2, rows, 4096):
            part = slice(start, min(start + 4096, rows))
            weighted = layer.dy[where[part]].float() * weights[where[part], None]
            of_w += weighted.T @ leaves["x"][part]
            of_bias += weighted.sum(0)
        assert error(dw[-1], of_w) <= 6e-3
        assert error(dbias[-1], of_bias) <= 6e-3

    def test_the_sum_over_topk(self):
        rows, width = 2**18 + 4096, 8192
        x, scale = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16), torch.rand(rows, device="cuda")
        y = sum_rows(x, 2, scale)
        expected = (x[-2000:].float() * scale[-2000:, None]).view(1000, 2, width).sum(1)
        assert error(y[-1000:], expected) <= 4e-3


def test_a_prediction_is_never_a_reason_to_fail(monkeypatch):
    monkeypatch.setattr(OP, "calls", Memo())
    monkeypatch.setattr("foretune.runtime.arguments._warned", set())
    monkeypatch.setattr(choice, "chooser_of", lambda *_: 1 / 0)
    layer = Layer("permute_x", 3000, full=False)
    with pytest.warns(ForetuneWarning, match="no prediction"):
        results = layer.run()
    layer.assert_right(results, layer.expected())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.run()

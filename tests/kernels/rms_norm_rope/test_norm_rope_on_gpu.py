"""RMSNorm with rotary embedding on the card: results and gradients of the op and of whole spaces, determinism, CUDA
graphs, `torch.compile`, waiting for nothing, one binary for all shapes, and what it is compared with."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from foretune import DeviceSpec, Problem, rms_norm_rope
from foretune.collect.compiling import compile_ahead
from foretune.kernels import find_family
from foretune.kernels.registry import comparison_of

pytestmark = [
    pytest.mark.gpu,
    # Right results are the same with and without a prediction.
    pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning"),
]

EPS = 1e-6
#: Of results, and of gradients.
TOLERANCES = {torch.bfloat16: (4e-3, 5e-3), torch.float16: (5e-4, 6e-4), torch.float32: (1e-5, 1e-5)}
FAMILIES = ("rms_norm_rope_fwd", "rms_norm_rope_bwd")


@pytest.fixture(scope="module")
def device():
    return DeviceSpec.live()


def tensors(tokens, q_heads, kv_heads, head_dim, dtype=torch.bfloat16, *, normed=True):
    """q and k as parts of one projection, cos, sin, and both weights."""
    torch.manual_seed(0)
    both = torch.randn(tokens, q_heads + 2 * kv_heads, head_dim, device="cuda").to(dtype)
    q, k, _ = both.split((q_heads, kv_heads, kv_heads), 1)
    angles = torch.randn(tokens, head_dim // 2, device="cuda")
    weights = [(1 + torch.randn(head_dim, device="cuda") / 4).to(dtype) for _ in range(2)] if normed else [None, None]
    return [q, k, angles.cos(), angles.sin(), *weights]


def plain(q, k, cos, sin, q_weight, k_weight, *, interleaved):
    """The same in double precision."""

    def one(x, weight):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        c, s = cos[:, None].double(), sin[:, None].double()
        pairs = first * c - second * s, second * c + first * s
        return torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)

    return one(q.double(), q_weight), one(k.double(), k_weight)


def run(function, given, **options):
    """Both results, and the gradients of q, k and the weights, by `plain` unrounded."""
    given, dtype = [None if tensor is None else tensor.detach() for tensor in given], given[0].dtype
    if function is plain:
        given = [None if tensor is None else tensor.double() for tensor in given]
    leaves = [given[place].requires_grad_() for place in (0, 1, 4, 5) if given[place] is not None]
    out = function(*given, **options)
    seeds = [torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y).to(dtype).to(y.dtype) for y in out]
    return [y.detach() for y in out], list(torch.autograd.grad(out, leaves, seeds))


def assert_close(ours, expected, tolerances):
    for some, others, most in zip(ours, expected, tolerances, strict=True):
        for one, other in zip(some, others, strict=True):
            assert float((one.double() - other.double()).norm() / other.double().norm()) < most


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("head_dim", "dtype", "normed"),
    [
        *((head_dim, torch.bfloat16, True) for head_dim in (16, 96, 128, 512)),
        (128, torch.bfloat16, False),
        (80, torch.float16, True),
        (64, torch.float32, True),
    ],
    ids=str,
)
def test_results_and_gradients(head_dim, dtype, interleaved, normed):
    for tokens, q_heads, kv_heads in ((1, 1, 1), (77, 5, 3), (300, 32, 4)):
        given = tensors(tokens, q_heads, kv_heads, head_dim, dtype, normed=normed)
        ours = run(rms_norm_rope, given, interleaved=interleaved)
        assert_close(ours, run(plain, given, interleaved=interleaved), TOLERANCES[dtype])


@pytest.mark.parametrize("flags", [(), ("interleaved",)], ids=["halves", "interleaved"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_config_of_the_space_is_right(name, flags, device):
    family, seen, wrong = find_family(name), set(), []
    problem = Problem.of(name, flags=flags, tokens=300, q_heads=8, kv_heads=2, head_dim=128)
    configs = [config for config in family.space(device) if family.supports(config, problem, device) is None]
    todo = []
    for config in configs:
        if (key := family.binary_key(config, problem)) not in seen:
            seen.add(key)
            todo.append(config)
    compile_ahead(family, [(config, problem) for config in todo], device)
    for config in todo:
        inputs = family.inputs(family.check_problem(config, problem), device)
        expected, out = family.reference(inputs), family.launch(inputs, config).float()
        if not float((out - expected).norm() / expected.norm()) <= family.tolerance(problem):
            wrong.append(config)
    assert not wrong, f"{len(wrong)} of {len(todo)} configs are wrong: {wrong[:3]}"
    assert len(todo) > 50


def test_the_same_bits_every_time_and_no_waiting():
    given = tensors(4099, 32, 8, 128)
    first = run(rms_norm_rope, given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [run(rms_norm_rope, given) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for results in again:
        assert all(map(torch.equal, chain(*results), chain(*first)))


def test_a_cuda_graph_replays_with_other_values():
    given = tensors(64, 8, 2, 128)
    rms_norm_rope(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = rms_norm_rope(*given)
    given[0].copy_(torch.randn_like(given[0]))
    graph.replay()
    assert all(map(torch.equal, out, rms_norm_rope(*given)))


def test_a_layer_that_inductor_compiles_gets_the_same():
    torch._dynamo.reset()
    given = tensors(128, 8, 2, 128)

    def layer(*tensors):
        q, k = rms_norm_rope(*tensors)
        return 2 * q, k + 1

    assert_close(run(torch.compile(layer, fullgraph=True), given), run(layer, given), (1e-6, 1e-6))


def test_rows_past_32_bits_of_elements():
    tokens, q_heads, head_dim = 2**31 // (32 * 256) + 5, 32, 256
    given = tensors(tokens, q_heads, 1, head_dim)[:4]
    with torch.no_grad():
        q, k = rms_norm_rope(*given)
        last = [tensor[-9:] for tensor in given]
        assert_close([[q[-9:], k[-9:]]], [plain(*last, None, None, interleaved=False)], (4e-3,))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_it_is_compared_with_computes_the_same(name, device):
    from foretune.kernels.rms_norm_rope import contenders

    family = find_family(name)
    problem = Problem.of(name, tokens=64, q_heads=8, kv_heads=2, head_dim=128)
    inputs = family.inputs(problem, device)
    assert {"eager", "compile"} <= set(comparison_of(family).contenders(family, problem, inputs, device, {}))
    expected = contenders._plain(inputs.q, inputs.k, inputs.rotation)
    for way in (contenders._compiled(), contenders._liger(problem, inputs)):
        if way is not None:
            out = way(inputs.q.contiguous(), inputs.k.contiguous(), inputs.rotation)
            assert_close([out], [expected], (1e-2,))  # Liger rounds after the norm

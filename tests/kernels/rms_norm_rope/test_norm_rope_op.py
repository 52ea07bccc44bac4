"""The op in Triton's interpreter: results and every gradient against plain PyTorch in double precision, what it
refuses, and how PyTorch traces it."""

from __future__ import annotations

import pytest
import torch
from foretune import ForetuneError, KernelConfig, rms_norm_rope

pytestmark = pytest.mark.interpret

BATCH, SEQUENCE, Q_HEADS, KV_HEADS, HEAD_DIM, EPS = 2, 3, 4, 1, 16, 1e-5
HALF, SINGLE = torch.float16, torch.float32
NAMES = ("q", "k", "q_weight", "k_weight")


@pytest.fixture(autouse=True)
def not_predicted(monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")


def tensors(dtype=SINGLE, *, fused=False, per_token=False, columns=HEAD_DIM // 2):
    """q, k, both weights (leaves), cos and sin; q and k as parts of one projection if `fused`."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    both = random(BATCH, SEQUENCE, Q_HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)
    parts = both.split((Q_HEADS, KV_HEADS, KV_HEADS), -2)[:2]
    q, k = parts if fused else (part.contiguous() for part in parts)
    angles = random(*([BATCH] if per_token else []), SEQUENCE, HEAD_DIM // 2).repeat_interleave(1, -1)
    angles = torch.cat([angles] * (2 * columns // HEAD_DIM), -1)
    weights = {name: 1 + random(HEAD_DIM) / 4 for name in NAMES[2:]}
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in {"q": q, "k": k, **weights}.items()}
    return leaves | {"cos": angles.cos(), "sin": angles.sin()}


def plain(q, k, cos, sin, q_weight=None, k_weight=None, *, interleaved=False, weight_offset=0.0):
    """The same in double precision, a pair after the other."""

    def one(x, weight):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + weight_offset)
        half = HEAD_DIM // 2
        out = [None] * HEAD_DIM
        for pair in range(half):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            c, s = cos[..., None, pair].double(), sin[..., None, pair].double()
            out[first] = x[..., first] * c - x[..., second] * s
            out[second] = x[..., second] * c + x[..., first] * s
        return torch.stack(out, -1)

    return one(q.double(), q_weight), one(k.double(), k_weight)


def run(function, given, **options):
    """Both results, and the gradients of all leaves."""
    leaves = {name: given[name].detach().clone().requires_grad_() for name in NAMES if name in given}
    # Cloned above, so views are made anew: only their values count for gradients.
    out = function(**given | leaves, **options)
    seeds = [torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype) for y in out]
    return [y.detach() for y in out] + list(torch.autograd.grad(out, list(leaves.values()), seeds))


def assert_close(ours, expected, tolerance):
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).norm() / other.norm()) < tolerance


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(HALF, 1e-3), (SINGLE, 1e-6)])
def test_results_and_gradients(dtype, tolerance, interleaved):
    given = tensors(dtype)
    options = {"interleaved": interleaved, "weight_offset": 1.0 if interleaved else 0.0}
    assert_close(run(rms_norm_rope, given, eps=EPS, **options), run(plain, given, **options), tolerance)


def test_without_weights_it_rotates_alone():
    given = {name: tensor for name, tensor in tensors().items() if "weight" not in name}
    assert_close(run(rms_norm_rope, given), run(plain, given), 1e-6)


@pytest.mark.parametrize("layout", [{"fused": True}, {"per_token": True}, {"columns": HEAD_DIM}])
def test_every_layout_of_heads_and_angles(layout):
    given = {name: tensor.detach() for name, tensor in tensors(**layout).items()}
    assert_close(rms_norm_rope(**given, eps=EPS), plain(**given), 1e-6)


def test_a_view_that_begins_anywhere_and_heads_apart_are_copied_first():
    given = {name: tensor.detach() for name, tensor in tensors(HALF).items()}
    odd = torch.empty(given["q"].numel() + 1, dtype=HALF)[1:].view_as(given["q"]).copy_(given["q"])
    apart = given["k"].transpose(1, 2).contiguous().transpose(1, 2)
    expected = rms_norm_rope(**given)
    assert all(map(torch.equal, rms_norm_rope(**given | {"q": odd, "k": apart}), expected))


def test_no_tokens_are_none():
    given = tensors()
    empty = {name: given[name][:, :0] for name in ("q", "k")}
    out = rms_norm_rope(**given | empty)
    out[0].sum().backward()
    assert out[0].shape == (BATCH, 0, Q_HEADS, HEAD_DIM)
    assert not given["q_weight"].grad.any()


def test_a_compiled_layer_is_one_graph_and_gets_the_same():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    given, counter, config = tensors(), CompileCounterWithBackend("aot_eager"), KernelConfig.of(HEADS=2)

    def layer(**tensors):
        q, k = rms_norm_rope(**tensors, eps=EPS, config=config)
        return q.sin(), k

    assert all(map(torch.equal, run(torch.compile(layer, backend=counter, fullgraph=True), given), run(layer, given)))
    assert counter.frame_count == 1


def test_pytorchs_own_checks_of_the_operator():
    given = tensors()
    ordered = [given[name] for name in ("q", "k", "cos", "sin", "q_weight", "k_weight")]
    rest = (EPS, 0.0, False, None, None, "off")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.foretune.rms_norm_rope, (*ordered, *rest), test_utils=checks)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"q": torch.zeros(2, 3, 4, 24), "k": torch.zeros(2, 3, 1, 24)}, "head_dim must be a multiple of 16"),
        ({"q": torch.zeros(16, 16)}, r"q must be \(\.\.\., tokens, heads, head_dim\)"),
        ({"q": 7}, "q must be a tensor but is a int"),
        ({"q": torch.zeros(2, 3, 4, 16, dtype=torch.int32)}, "q must be of floats"),
        ({"k": torch.zeros(2, 4, 1, 16)}, r"must have the same shape except for the heads"),
        ({"k": torch.zeros(2, 3, 1, 16).half()}, "k is torch.float16 but q is torch.float32"),
        ({"cos": torch.zeros(3, 8), "sin": torch.zeros(3, 16)}, "must have the same shape and dtype"),
        ({"cos": torch.zeros(4, 8), "sin": torch.zeros(4, 8)}, "4 rows, which must divide the 6 tokens"),
        ({"cos": torch.zeros(3, 4), "sin": torch.zeros(3, 4)}, "must have head_dim / 2 = 8 columns, or 16"),
        ({"cos": torch.zeros(3, 16), "sin": torch.zeros(3, 16), "interleaved": True}, r"pass cos\[..., ::2\]"),
        ({"cos": torch.zeros(3, 8, requires_grad=True)}, r"pass cos.detach\(\)"),
        ({"k_weight": None}, "must both be tensors or both be None"),
        ({"q_weight": torch.zeros(64)}, r"q_weight must have shape \(16,\).*OLMo-2"),
        ({"eps": -1.0}, "eps must be a finite number >= 0 but is -1.0"),
        ({"config": KernelConfig.of(ROWS=3)}, "ROWS cannot be 3: 1, 2, 4, 8, 16"),
        ({"interleaved": "yes"}, "interleaved must be true or false but is 'yes'"),
        ({"mode": "fast"}, "fast"),
    ],
)
def test_what_cannot_be_is_named(wrong, named):
    given = {name: tensor.detach() for name, tensor in tensors().items()}
    with pytest.raises(ForetuneError, match=named):
        rms_norm_rope(**given | wrong)

"""The kernel of the dense GEMM against plain PyTorch, in the interpreter: every layout, way and epilogue, and sizes
off every block. Not in bfloat16, whose `tl.dot` is wrong there (Triton 3.6 to 3.9)."""

from __future__ import annotations

import pytest
from foretune.datasets import ForetuneError
from products import CPU, LAYOUTS, MATMUL, config, problem

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")]

WAYS = {
    "pointers": {},
    "persistent": {"TMA": 1, "PROGRAMS_PER_SM": 1},
    "stores": {"TMA": 2, "PROGRAMS_PER_SM": 2},
    "split": {"TMA": 1, "SPLIT_K": 2},
}
PERSISTENT, SPLIT = {"PROGRAMS_PER_SM": 1}, {"SPLIT_K": 3}


def assert_right(call, **knobs):
    import torch

    one = config(**knobs)
    assert MATMUL.supports(one, call, CPU) is None
    inputs = MATMUL.inputs(call, CPU)
    expected, y = MATMUL.reference(inputs), MATMUL.launch(inputs, one)
    assert y.dtype == (torch.int32 if call.dtype == "int8" else inputs.a.dtype)
    assert_close(y, expected, MATMUL.tolerance(call), f"{call} {one}")


def assert_close(y, expected, tolerance, what=""):
    assert y.shape == expected.shape
    error, norm = y.float() - expected, float(expected.norm())
    assert float(error.norm()) <= tolerance * norm, what
    # The norm alone would not see one wrong element of many.
    assert bool((error.abs() <= 10 * tolerance * (expected.abs() + norm / max(expected.numel(), 1) ** 0.5)).all()), what


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("flags", LAYOUTS, ids="-".join)
def test_every_layout_and_way(flags, way):
    assert_right(problem(flags=flags, m=24), **WAYS[way])


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("way", ["persistent", "split"])
def test_the_other_dtypes(dtype, way):
    assert_right(problem(dtype, ("b_kn",), batch=1, n=48, k=80), **WAYS[way])


@pytest.mark.parametrize(
    ("flags", "way"), list(zip(LAYOUTS, (PERSISTENT, SPLIT) * 2, strict=True)), ids=["nt", "tt", "nn", "tn"]
)
def test_sizes_that_nothing_divides(flags, way):
    assert_right(problem(flags=flags, m=19, n=37, k=45), **way)


@pytest.mark.parametrize("way", [{}, PERSISTENT, SPLIT], ids=["a tile", "persistent", "split"])
def test_the_smallest_and_more_parts_than_steps(way):
    assert_right(problem(m=1, n=1, k=1), **way)


@pytest.mark.parametrize("after", [("bias",), ("relu",), ("bias", "gelu"), ("bias", "silu")], ids="-".join)
@pytest.mark.parametrize("way", ["persistent", "split"])
def test_what_follows_the_product(after, way):
    assert_right(problem(flags=after, batch=1, m=16), **WAYS[way])


@pytest.mark.parametrize(("width", "knobs"), [(64, {"TMA": 2}), (61, {}), (64, {"SPLIT_K": 2})])
def test_rows_that_are_further_apart_than_long(width, knobs):
    """Slices of wider matrices, in and out; nothing beside them is touched."""
    import torch
    from foretune.kernels.matmul.triton_kernels.launches import prepare_matmul

    a, b = (torch.randn(1, 24, width, dtype=torch.float16)[:, :, :48] for _ in range(2))
    wide = torch.full((1, 24, 40), float("nan"), dtype=torch.float16)
    y = wide[:, :, :24]
    prepare_matmul(a, b, y, config(**knobs), 3)((a, b, y, None))
    assert_close(y, a.float() @ b.float().mT, 5e-4)
    assert bool(wide[:, :, 24:].isnan().all())


@pytest.mark.parametrize("splits", [2, 4, 5, 8])
def test_any_number_of_parts_is_added_up(splits):
    assert_right(problem(batch=2, m=16, k=264), SPLIT_K=splits)


def test_the_bits_of_split_k_are_the_same_in_every_run():
    call = problem(batch=1, m=16, k=200)
    first, second = (MATMUL.launch(MATMUL.inputs(call, CPU), config(SPLIT_K=4)) for _ in range(2))
    assert first.equal(second)


def operands():
    """(a, b) of every kind that people have: as stored, slices, batches, one row or column, copies, and nothing."""
    import torch

    def r(*shape):
        return torch.randn(*shape, dtype=torch.float16)

    return {
        "nt": (r(20, 32), r(24, 32).T),
        "nn": (r(20, 32), r(32, 24)),
        "tn": (r(32, 16).T, r(32, 24)),
        "a batch by one": (r(2, 10, 32), r(24, 32).T),
        "a batch": (r(2, 10, 32), r(2, 32, 24)),
        "a broadcast": (r(1, 10, 32).expand(2, 10, 32), r(2, 32, 24)),
        "a row": (r(1, 33)[:, :32], r(32, 24)),
        "a column": (r(20, 32), r(32, 1)),
        "every other": (r(20, 64)[:, ::2], r(64, 24)[::2]),
        "off by 2 bytes": (r(641)[1:].view(20, 32), r(32, 24)),
        "no rows": (r(0, 32), r(32, 8)),
        "no depth": (r(4, 0), r(0, 8)),
    }


def test_the_op_takes_whatever_is_a_matrix():
    import torch
    from foretune.kernels.matmul import matmul

    for kind, (a, b) in operands().items():
        bias = torch.randn(b.shape[-1], dtype=torch.float16)
        expected = torch.nn.functional.silu(a.float() @ b.float() + bias.float())
        assert_close(matmul(a, b, bias, "silu", config=config()), expected, 1e-3, kind)


def test_what_lies_across_k_is_copied_where_that_is_worth_it(monkeypatch):
    from foretune.kernels.matmul import matmul, op
    from foretune.kernels.matmul.space import A_KM, B_KN

    launched = []

    def prepared(*args, a_km, b_kn, **kwargs):
        launched.append((a_km, b_kn))
        return prepare(*args, a_km=a_km, b_kn=b_kn, **kwargs)

    prepare = op.prepare_matmul
    monkeypatch.setattr(op, "prepare_matmul", prepared)
    monkeypatch.setattr(op, "worth_turning", lambda problem, device: (A_KM in problem.flags, B_KN in problem.flags))
    for kind in ("nn", "tn", "a batch by one", "a batch", "a row"):
        a, b = operands()[kind]
        assert_close(matmul(a, b, mode="off"), a.float() @ b.float(), 1e-3, kind)
        assert launched.pop() == (False, False)
    a, b = operands()["tn"]
    assert_close(matmul(a, b, config=config()), a.float() @ b.float(), 1e-3)
    assert launched == [(True, True)]  # a config that somebody asks for is for the operands as they lie


@pytest.mark.parametrize(("batch", "rows", "columns", "apart"), [(1, 64, 128, 128), (2, 7, 130, 131), (3, 68, 4, 12)])
def test_a_turned_copy_is_the_same_matrix(batch, rows, columns, apart):
    import torch
    from foretune.kernels.matmul.triton_kernels.turning import turned_copy

    x = torch.randn(batch, rows, apart)[:, :, :columns]
    copy = turned_copy(x)
    assert copy.is_contiguous()
    assert torch.equal(copy.mT, x)


@pytest.mark.parametrize(
    "shapes",
    [
        ((20, 32), (32, 24)),
        ((2, 10, 32), (32, 24)),
        ((2, 10, 32), (2, 32, 24)),
        ((20, 0), (0, 24)),
    ],
)
def test_the_gradients_are_those_of_torch(shapes):
    import torch
    from foretune.kernels.matmul import matmul

    ours = [torch.randn(*shape, dtype=torch.float16, requires_grad=True) for shape in (*shapes, (24,))]
    theirs = [tensor.detach().float().requires_grad_() for tensor in ours]
    expected = torch.nn.functional.gelu(theirs[0] @ theirs[1] + theirs[2])
    dy = torch.randn_like(expected)
    expected.backward(dy)
    matmul(*ours, "gelu", mode="off").backward(dy.half())
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine.grad, other.grad, 2e-3)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_compiled_layer_is_one_graph_and_gets_the_same(activation):
    import torch
    from foretune.kernels.matmul import matmul
    from torch._dynamo.testing import CompileCounterWithBackend

    def layer(x, w, bias):
        return matmul(2 * x, w.T, bias, activation, mode="off").sin()

    def run(function):
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(*shape, generator=generator).half() for shape in ((2, 10, 32), (24, 32), (24,))]
        y = function(*(tensor.requires_grad_() for tensor in made))
        seed = torch.linspace(-1, 1, y.numel()).view_as(y).half()
        return y, *torch.autograd.grad(y, made, seed)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    assert all(map(torch.equal, run(compiled), run(layer)))
    with torch.no_grad():  # the activation is fused
        fixed = [torch.ones(*shape, dtype=torch.float16) for shape in ((2, 10, 32), (24, 32), (24,))]
        assert torch.equal(compiled(*fixed), layer(*fixed))
    assert counter.frame_count == 2


def test_pytorchs_own_checks_of_the_operator():
    import torch
    from foretune.kernels.matmul import op as _  # noqa: F401

    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    a, b = torch.ones(2, 8, 32, dtype=torch.float16), torch.ones(32, 16, dtype=torch.float16)
    for needs, bias, after in ((True, b[0], None), (False, None, "gelu")):
        arguments = (a.requires_grad_(needs), b, bias, after, None, "off")
        torch.library.opcheck(torch.ops.foretune.matmul, arguments, test_utils=checks)
    with pytest.raises(ForetuneError, match=r"no gradient with a fused activation \(relu\): call foretune\.matmul"):
        torch.ops.foretune.matmul(a.requires_grad_(), b, None, "relu", None, "off")


def test_the_op_refuses_what_is_none():
    import torch
    from foretune.kernels.matmul import matmul

    a, b = torch.ones(16, 32, dtype=torch.float16), torch.ones(32, 16, dtype=torch.float16)
    whole = torch.ones(16, 16, dtype=torch.int8)
    wrong = {
        "a must be a tensor but is a int": (7, b),
        "b must have 32 rows, .* but has shape \\(16, 32\\)": (a, a),
        "dtype of b must be torch.float16, as a's is, but is torch.float32": (a, b.float()),
        "dtype of a must be one of .*bfloat16.* but is torch.float64": (a.double(), b.double()),
        "b must have 2 or 3 dimensions but has 1": (a, b[0]),
        "a must be a batch of 2 matrices, as b is": (a, b.expand(2, 32, 16)),
        "bias must have shape \\(16,\\), one entry per column of b, but has \\(32,\\)": (a, b, b[:, 0]),
        "bias must be torch.float16 on cpu, as a is, but is torch.float32": (a, b, b[0].float()),
        "activation must be one of relu, gelu, silu but is 'tanh'": (a, b, None, "tanh"),
        "relu is not available for int8, which is summed in int32": (whole, whole, None, "relu"),
    }
    for why, call in wrong.items():
        with pytest.raises(ForetuneError, match=why):
            matmul(*call)
    with pytest.raises(ForetuneError, match="BLOCK_M cannot be 24"):
        matmul(a, b, config=config(24))

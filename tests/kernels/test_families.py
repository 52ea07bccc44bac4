"""The families beside their spaces: the problem of a call, check problems, references."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
from foretune.datasets import ForetuneError
from foretune.kernels.grouped_gemm.triton_kernels import tiles
from grouped import CPU, DTYPES, DW, DX, FAMILIES, FLAGS, FORWARD, H200, made, problem

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def named(value):
    """A family's name: its address is another one in every process, and pytest's workers compare."""
    return str(getattr(value, "name", value))


@pytest.fixture
def no_maps(monkeypatch):
    """Inputs without the map that a launch would need, and that takes a device to make."""
    import torch

    def build(sizes, rows, chunk_rows=None, long_rows=0):
        return tiles.TileMap(torch.empty(0, dtype=torch.int32), rows, len(sizes), chunk_rows or max(rows, 1), long_rows)

    monkeypatch.setattr(tiles.TileMap, "build", build)


#: The kernel's N and K, and its tensor that says the dtype: dX contracts over the layer's N.
CALLED = {FORWARD: ("x_ptr", 2048, 1024), DX: ("x_ptr", 1024, 2048), DW: ("dy_ptr", 2048, 1024)}
FLAGGED = [
    (FORWARD, "GATHER", "permute_x"),
    (FORWARD, "SCATTER", "permute_y"),
    (DX, "SCATTER", "permute_x"),
    (DX, "GATHER", "permute_y"),
]


def call(family, dtype="torch.bfloat16", **changed):
    tensor, n, k = CALLED[family]
    arguments = {tensor: SimpleNamespace(dtype=dtype), "rows": 4096, "groups": 64, "N8": n // 8, "K8": k // 8}
    return {**arguments, "GROUP_M": 8, "grid": None, "warmup": False, **changed}


@every_family
def test_the_problem_of_a_call(family):
    assert family.problem_from_call(call(family)) == problem(family, rows=4096)
    for dtype, name in (("torch.float16", "fp16"), ("torch.float32", "fp32")):
        assert family.problem_from_call(call(family, dtype)) == problem(family, rows=4096, dtype=name)
    assert family.problem_from_call(call(family, rows=0))["rows"] == 0


@pytest.mark.parametrize(("family", "argument", "flag"), FLAGGED, ids=named)
def test_the_problem_of_a_call_that_permutes(family, argument, flag):
    others = {name: False for other, name, _ in FLAGGED if other is family}
    assert family.problem_from_call(call(family, **others)).flags == ()
    assert family.problem_from_call(call(family, **others | {argument: True})).flags == (flag,)


@pytest.mark.parametrize(
    ("family", "flags"), [*itertools.product((FORWARD, DX), FLAGS), (DW, ())], ids=named
)  # dW's kernel never sees a permutation
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_launch_of_a_problem_is_a_call_of_that_problem(family, flags, dtype, no_maps):
    """What the kernel is given says what the problem was, less the group sizes."""
    inputs = made(family, (3, 0, 9), n=16, k=24, flags=flags, dtype=dtype, device=CPU)
    arguments = inspect.signature(family.kernel()[0].fn).parameters
    bound = dict(zip(arguments, family.arguments(inputs), strict=False))
    assert family.problem_from_call(bound | family.constants(inputs.problem)) == inputs.problem.without_sizes()


@every_family
def test_the_problem_of_a_call_never_looks_at_tensor_contents(family):
    class Tensor:
        dtype = "torch.bfloat16"

        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

    family.problem_from_call(call(family, **{CALLED[family][0]: Tensor()}, map_ptr=Tensor(), indices_ptr=Tensor()))


@every_family
@pytest.mark.parametrize("missing", [["rows"], ["N8", "K8"], ["tensor"]])
def test_a_call_with_other_parameter_names_is_told_so(family, missing):
    missing = [CALLED[family][0] if name == "tensor" else name for name in missing]
    arguments = {name: value for name, value in call(family).items() if name not in missing}
    with pytest.raises(ForetuneError, match=f"has no argument {', '.join(missing)}: .*problem="):
        family.problem_from_call(arguments)


@every_family
def test_a_call_with_an_unknown_dtype_is_told_so(family):
    tensor = CALLED[family][0]
    with pytest.raises(ForetuneError, match=rf"{tensor} must be a tensor of .*fp32.* but its dtype is complex64"):
        family.problem_from_call(call(family, "torch.complex64"))
    with pytest.raises(ForetuneError, match="its dtype is None"):
        family.problem_from_call(call(family, **{tensor: 7}))


@every_family
def test_a_call_with_a_negative_size_is_told_so(family):
    with pytest.raises(ForetuneError, match=r"dimension rows must be an integer between 0 and .* but got -1"):
        family.problem_from_call(call(family, rows=-1))


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_problem_has_every_edge(family, flags, dtype):
    asked = problem(family, flags=flags, dtype=dtype)
    check = family.check_problem(family.space()[0], asked)
    assert check.signature == asked.signature
    assert {0, 1} < set(check.ragged.sizes)
    assert max(check.ragged.sizes) > 256
    assert all(check[dim] % block for dim in ("n", "k") for block in (32, 64, 128, 256))
    for config in family.space(H200):  # and what is refused, is refused for every problem of that dtype and flags
        assert family.check_problem(config, asked) == check
        assert family.supports(config, check, H200) == family.supports(config, asked, H200)


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_the_reference_is_the_gradient_that_pytorch_computes(family, flags, no_maps):
    """Of the layer y[where it goes] = x[where it comes from] @ w[group].T, row by row."""
    import torch

    rows, sizes = 12, (3, 0, 1, 8)
    mine = made(family, sizes, n=16, k=24, flags=flags, dtype="fp32")
    groups = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    permuted = torch.arange(rows) if mine.indices is None else mine.indices.long()
    x = {FORWARD: mine.left, DW: mine.right}.get(family, torch.zeros(rows, 24))
    w = mine.right if family is not DW else torch.zeros(4, 16, 24)
    x = x.repeat_interleave(mine.topk, 0).clone().requires_grad_()  # a row of it for each of y, as dX has
    w = w.clone().requires_grad_()
    loaded = x[permuted if flags == ("permute_x",) else torch.arange(rows)]
    y = torch.einsum("rk,rnk->rn", loaded, w[groups])
    if flags == ("permute_y",):
        y = torch.zeros_like(y).index_copy(0, permuted, y)
    expected = y.detach()
    if family is not FORWARD:
        y.backward(mine.left)
        expected = x.grad if family is DX else w.grad
    torch.testing.assert_close(family.reference(mine), expected, rtol=1e-5, atol=1e-5)


@every_family
@pytest.mark.parametrize(("rows", "groups"), [(0, 4), (3, 8), (4096, 64), (100, 1)])
def test_what_unknown_sizes_are_likely_to_be(family, rows, groups):
    unknown = problem(family, (rows // groups,) * groups).without_sizes()
    likely = family.plausible(replace(unknown, dims=tuple((d, rows if d == "rows" else s) for d, s in unknown.dims)))
    assert sum(share for share, _ in likely) == pytest.approx(1.0)
    assert len({one for _, one in likely}) == len(likely)
    for _, one in likely:
        assert one.ragged.total == rows
        assert len(one.ragged.sizes) == groups
        assert one.without_sizes() == likely[0][1].without_sizes()


@every_family
def test_known_sizes_are_what_they_are(family):
    known = problem(family, (3, 5))
    assert family.plausible(known) == ((1.0, known),)

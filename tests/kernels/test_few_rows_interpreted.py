"""The kernels for a few rows, and the routing, in Triton's interpreter: against float64, and against the tiled kernels.
Which calls run them, and which do not."""

from __future__ import annotations

from itertools import product

import foretune
import pytest
import torch
from experts import EXPERTS, TOPK, Experts, routed
from foretune import ForetuneError, KernelConfig
from foretune.kernels.grouped_gemm import few_rows_gemm, grouped_gemm, route
from foretune.kernels.grouped_gemm.op import OP as GROUPED
from foretune.kernels.grouped_gemm.triton_kernels import few_rows as grouped_few_rows
from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
from foretune.kernels.integrations import experts as integration
from foretune.kernels.integrations.experts import experts_forward
from foretune.kernels.matmul.op import OP as MATMUL
from foretune.kernels.matmul.triton_kernels import few_rows as matmul_few_rows
from foretune.kernels.op_calls import Memo
from loops import error

pytestmark = pytest.mark.interpret

TOLERANCES = {torch.float32: 5e-7, torch.float16: 4e-4, torch.bfloat16: 8e-3}  # the interpreter's bf16 truncates
HALVES = torch.float16, torch.bfloat16  # which differ from float32 only where they are loaded and stored


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.fixture
def launched(monkeypatch):
    """The kernels for a few rows that calls have prepared; nothing is known of earlier calls."""
    names = []

    def counted(function, name):
        return lambda *given, **options: names.append(name) or function(*given, **options)

    monkeypatch.setattr(GROUPED, "calls", Memo())
    monkeypatch.setattr(MATMUL, "calls", Memo())
    for module, name in ((grouped_few_rows, "grouped_gemm"), (matmul_few_rows, "matmul")):
        monkeypatch.setattr(module, "prepare_few_rows", counted(module.prepare_few_rows, name))
    monkeypatch.setattr(integration, "few_rows_gemm", counted(integration.few_rows_gemm, "experts"))
    return names


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        *((m, n, k, torch.float32) for m in (1, 2) for n, k in ((40, 72), (8, 1032), (24, 8))),
        *((2, 40, 72, half) for half in HALVES),
    ],
    ids=str,
)
def test_a_few_rows_times_a_matrix(m, n, k, dtype, launched):
    a = random(m, k + 8, dtype=dtype)[:, :k]  # rows with padding
    w, bias = random(n, k + 16, dtype=dtype)[:, :k], random(n, dtype=dtype)
    exact = a.double() @ w.double().T
    assert error(foretune.matmul(a, w.T), exact) < TOLERANCES[dtype]
    found = foretune.matmul(a, w.T, bias, "silu")
    assert error(found, torch.nn.functional.silu(exact + bias)) < 2 * TOLERANCES[dtype]
    assert launched == ["matmul", "matmul"]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_what_follows_is_the_same_as_for_more_rows(activation, launched):
    a, w = random(5, 64), random(16, 64)
    more = foretune.matmul(a, w.T, None, activation, mode="off")
    assert error(foretune.matmul(a[:2], w.T, None, activation), more[:2]) < 1e-3  # as tf32
    batch = foretune.matmul(a[:2].view(2, 1, 64), w.T, None, activation)  # the batch dimension is merged into the rows
    assert error(batch.view(2, 16), more[:2]) < 1e-3
    assert launched == ["matmul", "matmul"]


A, W = random(2, 64), random(16, 64)
TILE = KernelConfig.of(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32)
#: Calls that need a config, or a layout that the kernel does not read.
TILED = {
    "three rows": lambda: foretune.matmul(random(3, 64), W.T),
    "a config": lambda: foretune.matmul(A, W.T, config=TILE),
    "the default": lambda: foretune.matmul(A, W.T, mode="off"),
    "the default's bits": lambda: foretune.matmul(A, W.T, same_bits=True),
    "bits for all sizes": lambda: foretune.matmul(A, W.T, invariant="m"),
    "stored as (K, N)": lambda: foretune.matmul(A, W.T.contiguous()),
    "stored as (K, M)": lambda: foretune.matmul(A.T.contiguous().T, W.T),
    "a batch": lambda: foretune.matmul(A.view(2, 1, 64), W.T.expand(2, 64, 16).contiguous()),
    "odd rows": lambda: foretune.matmul(A[:, :63], W[:, :63].T),
    "int8": lambda: foretune.matmul(torch.ones(2, 64, dtype=torch.int8), torch.ones(16, 64, dtype=torch.int8).T),
}


@pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning")
@pytest.mark.parametrize("why", TILED)
def test_other_products_are_tiled(why, launched):
    TILED[why]()
    assert launched == []


@pytest.mark.parametrize("mode", ["predict", "shortlist", "refine"])
def test_a_mode_that_tunes_has_nothing_to_tune(mode, launched):
    assert error(foretune.matmul(A, W.T, mode=mode), A @ W.T) < 5e-7
    assert launched == ["matmul"]


def test_the_environment_can_ask_for_a_configs_bits(launched, monkeypatch):
    monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    foretune.matmul(A, W.T)
    monkeypatch.setenv("FORETUNE_SAME_BITS", "0")
    monkeypatch.setenv("FORETUNE_MODE", "off")
    grouped_gemm(A, random(4, 8, 64), torch.tensor([1, 0, 1, 0]))
    assert launched == []


SIZES = {
    "one row each": (1, 0, 1, 0, 1, 0, 1, 0, 1, 0),
    "few groups": (0, 2, 0, 0, 0, 0, 3, 0, 0, 0),
    "fewer": (1, 0, 0, 0, 0, 1, 0, 0, 0, 1),
    "more": (2, 2, 2, 2, 2, 2, 2, 2, 2, 2),
    "negative": (-3, 2, 0, 0, 0, 1, -1, 2, 0, 0),
}


SIDES = None, "permute_x", "permute_y"


@pytest.mark.parametrize(
    ("side", "sizes", "dtype"),
    [*product(SIDES, SIZES, [torch.float32]), *product(SIDES, ["few groups"], HALVES)],
    ids=str,
)
def test_a_few_sorted_rows(side, sizes, dtype, launched):
    rows, n, k, topk = 5, 24, 72, 5 if side == "permute_x" else 1
    x, w, bias = random(rows // topk, k, dtype=dtype), random(10, n, k, dtype=dtype), random(10, n, dtype=dtype)
    weights, indices = random(rows), torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    group_sizes = torch.tensor(SIZES[sizes], dtype=torch.int32)
    sides = {"gather_indices": indices, "topk": topk} | ({} if side is None else {side: True})
    groups = torch.repeat_interleave(torch.arange(10), group_sizes.clamp(min=0))[:rows]
    for options in ({}, {"bias": bias}, {"topk_weights": weights, "bias": bias}):
        expected = torch.zeros(rows, n, dtype=torch.float64)  # also where no group is
        for i, group in enumerate(groups.tolist()):
            y = x[indices[i] // topk if side == "permute_x" else i].double() @ w[group].double().T
            y += options["bias"][group].double() if "bias" in options else 0
            y *= weights[indices[i]] if "topk_weights" in options else 1
            expected[indices[i] if side == "permute_y" else i] = y
        for given in (group_sizes, group_sizes.long()):
            found = grouped_gemm(x, w, given, **sides, **options)
            assert error(found, expected) < 2 * TOLERANCES[dtype]
    assert launched == ["grouped_gemm"] * 6


def test_indices_out_of_range_store_nothing(launched):
    x, w, indices = random(3, 16), random(6, 8, 16), torch.tensor([7, 1, -1])
    sizes = torch.tensor([1, 1, 1, 0, 0, 0])
    y = grouped_gemm(x, w, sizes, gather_indices=indices, permute_y=True)
    assert error(y[1], x[1] @ w[1].T) < 5e-7
    grouped_gemm(x, w, sizes, gather_indices=indices, permute_x=True)
    assert launched == ["grouped_gemm"] * 2


def test_contents_are_checked_by_the_tiled_kernel(launched, monkeypatch):
    monkeypatch.setenv("FORETUNE_CHECK", "1")
    x, w = random(3, 16), random(6, 8, 16)
    assert (grouped_gemm(x, w, torch.tensor([1, 0, 1, 0, 0, 0]))[2] == 0).all()
    with pytest.raises(ForetuneError, match="group_sizes must be >= 0"):
        grouped_gemm(x, w, torch.tensor([1, -1, 1, 0, 0, 0]))
    assert launched == []


@pytest.mark.parametrize(
    ("sums", "topk", "dtype"),
    [*product([False, True], [1, 2, 3], [torch.float32]), *product([False, True], [2], HALVES)],
    ids=str,
)
def test_rows_that_are_not_sorted(sums, topk, dtype):
    tokens, groups, n, k = 3, 4, 24, 40
    rows = tokens * topk
    x, w = random(rows if sums else tokens, k, dtype=dtype), random(groups, n, k, dtype=dtype)
    bias, weights = random(groups, n, dtype=dtype), random(rows)
    chosen = torch.randint(0, groups, (rows,), generator=torch.Generator().manual_seed(topk))
    chosen[1], chosen[2] = groups, -1
    for options in ({}, {"bias": bias}, {"weights": weights, "bias": bias}):
        expected = torch.zeros(rows, n, dtype=torch.float64)
        for row, group in enumerate(chosen.tolist()):
            if 0 <= group < groups:
                expected[row] = x[row if sums else row // topk].double() @ w[group].double().T
                expected[row] += options["bias"][group] if "bias" in options else 0
                expected[row] *= weights[row] if "weights" in options else 1
        expected = expected.view(tokens, topk, n).sum(1) if sums else expected
        found = few_rows_gemm(x, w, chosen, topk=topk, sums=sums, **options)
        assert error(found, expected) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk": 3}, "the 4 rows must be topk = 3 for each token"),
        ({"topk": 0}, "the 4 rows must be topk = 0 for each token"),
        ({"topk": 1}, r"x must have shape \(4, 16\) but has .*2, 16"),
        ({"topk": 2, "sums": True}, r"x must have shape \(4, 16\) but has .*2, 16"),
        ({"topk": 2, "weights": random(3)}, r"weights must have shape \(4,\) but has .*3"),
        ({"topk": 2, "bias": random(4, 8)}, r"bias must have shape \(3, 8\) but has .*4, 8"),
        ({"topk": 2, "w": random(3, 12, 16)}, "N and K of w must be multiples of 8 but are 12 and 16"),
        ({"topk": 2, "chosen": random(4)}, "chosen must be int32 or int64"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    given = {"x": random(2, 16), "w": random(3, 8, 16), "chosen": torch.zeros(4, dtype=torch.long)} | arguments
    with pytest.raises(ForetuneError, match=message):
        few_rows_gemm(given.pop("x"), given.pop("w"), given.pop("chosen"), **given)


def test_a_few_rows_have_no_gradient_of_their_own():
    w = random(3, 8, 16).requires_grad_()
    y = torch.ops.foretune.few_rows_gemm(random(2, 16), w, torch.zeros(4, dtype=torch.long), None, None, 2, False)
    with pytest.raises(ForetuneError, match=r"foretune\.few_rows_gemm has no"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (37, 7), (1025, 3), (0, 4), (5000, 3)])
def test_routing_sorts_stably_and_has_the_tile_map(rows, groups, dtype):
    chosen = torch.randint(-1, groups + 1, (rows,), generator=torch.Generator().manual_seed(rows)).to(dtype)
    order, routing = route(chosen, groups)
    nowhere = (chosen < 0) | (chosen >= groups)
    assert torch.equal(order.long(), chosen.masked_fill(nowhere, groups).sort(stable=True).indices)
    assert routing[-1].tolist() == [int((chosen == group).sum()) for group in range(groups)]
    if rows:
        given = TileMap.build(routing, rows)
        assert given.entries is routing
        made = TileMap.build(routing[-1].clone(), rows)
        flat = routing.flatten()[: len(made.entries)]
        counts = made.entries[:6].tolist()
        assert flat[:8].tolist()[:7] == made.entries[:7].tolist()
        for block, count in enumerate(counts):
            start = 8 + block * (-(-rows // 16) + groups) * 4
            assert torch.equal(flat[start : start + 4 * count], made.entries[start : start + 4 * count])
        split = TileMap.build(routing, rows, 512)  # of other chunks than the routing's
        assert split.entries is not routing or rows == 512


def test_the_routing_stands_for_the_sizes_also_in_the_gradients():
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, 5, (40,), generator=generator)
    order, routing = route(chosen, 5)
    found = []
    for sizes in (routing, routing[-1].clone()):
        x, w, weights = (random(*shape).requires_grad_() for shape in ((20, 16), (5, 24, 16), (40,)))
        options = {"gather_indices": order, "topk": 2, "permute_x": True, "topk_weights": weights, "mode": "off"}
        y = grouped_gemm(x, w, sizes, **options)
        y.square().sum().backward()
        found.append((y, x.grad, w.grad, weights.grad))
    for of_routing, of_sizes in zip(*found, strict=True):
        assert torch.equal(of_routing, of_sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int32), "group_sizes must be the routing of 6 rows"),
        (torch.zeros(1, 1, 4, dtype=torch.int32), "group_sizes must have shape .*, or be route.s routing, but has"),
        (torch.zeros(29, 3, dtype=torch.int32), "group_sizes must have 4 entries, one per group of w, but has 3"),
    ],
)
def test_a_routing_of_another_shape_is_refused(sizes, message):
    with pytest.raises(ForetuneError, match=message):
        grouped_gemm(random(6, 16), random(4, 8, 16), sizes)


def test_a_few_rows_have_no_gradient():
    x, w, chosen = random(2, 16).requires_grad_(), random(3, 8, 16), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ForetuneError, match="few_rows_gemm has no gradient"):
        few_rows_gemm(x, w, chosen, topk=2)
    with torch.no_grad():
        assert few_rows_gemm(x, w, chosen, topk=2).shape == (4, 8)
    with pytest.raises(ForetuneError, match="w must have at least one group"):
        few_rows_gemm(x.detach(), w[:0], chosen, topk=2)


def test_routing_refuses_what_it_cannot_sort():
    with pytest.raises(ForetuneError, match="groups must be at least 1 but is 0"):
        route(torch.zeros(4, dtype=torch.long), 0)
    with pytest.raises(ForetuneError, match="chosen must have 1 dimensions"):
        route(torch.zeros(4, 2, dtype=torch.long), 3)


@pytest.mark.parametrize("arguments", [(torch.tensor([2, 0, 5]), 3)])
def test_pytorchs_own_checks_of_the_routing(arguments):
    tests = ("test_schema", "test_faketensor")  # what is not written differs from call to call
    torch.library.opcheck(torch.ops.foretune.route, arguments, test_utils=tests)


def test_pytorchs_own_checks_of_a_few_rows():
    arguments = (random(2, 16), random(3, 8, 16), torch.tensor([0, 1, 2, 3]), random(4), random(3, 8), 2, False)
    torch.library.opcheck(torch.ops.foretune.few_rows_gemm, arguments)


LAYOUTS = {
    "gated": {},
    "without a gate": {"has_gate": False},
    "interleaved, transposed, bias": {"is_concatenated": False, "is_transposed": True, "has_bias": True},
}


@pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning")
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_a_few_tokens_are_what_a_loop_gives(layout, parallel, launched):
    experts, (x, chosen, weights) = Experts(**LAYOUTS[layout]), routed(tokens=EXPERTS // 2 // TOPK)
    if parallel:
        experts._is_expert_parallel, chosen[0, 1] = True, EXPERTS
    with torch.no_grad():
        found, expected = experts_forward(experts, x, chosen, weights), experts.looped(x, chosen, weights)
    assert error(found, expected) < 1e-6
    assert launched == ["experts", "experts"]


def test_experts_that_learn_or_have_a_norm_are_sorted(launched, monkeypatch):
    x, chosen, weights = routed(tokens=1)
    experts, normed = Experts(), Experts(has_norm=True)
    experts_forward(experts, x, chosen, weights).sum().backward()
    assert experts.down_proj.grad is not None
    with torch.no_grad():
        assert error(experts_forward(normed, x, chosen, weights), normed.looped(x, chosen, weights)) < 1e-5
        monkeypatch.setenv("FORETUNE_MODE", "off")
        experts_forward(experts, x, chosen, weights)
    assert "experts" not in launched


@pytest.mark.parametrize("tokens", [1, 8])
def test_experts_in_a_compiled_function(tokens):
    experts, given = Experts(), routed(tokens=tokens)
    compiled = torch.compile(experts_forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert error(compiled(experts, *given), experts.looped(*given)) < 1e-5

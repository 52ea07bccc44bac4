"""The lists of `foretune.spaces` beside the tables of the installed torch's Inductor: how many, and how far they reach.

Importing Inductor's templates takes 12 s of CPU, so all of this is slow.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from foretune.kernels.spaces import matmul_configs, matmul_grid
from grouped import H200, HOST, MI300X, XPU

pytestmark = pytest.mark.slow

LARGE = (8192, 8192, 8192)
SHAPES = (LARGE, (1, 4096, 4096), (64, 64, 64), (100, 17, 3000))
BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
UNBOUNDED = replace(H200, smem_per_block_bytes=10**9)


@pytest.fixture(scope="module")
def templates():
    return pytest.importorskip("torch._inductor.template_heuristics.triton", reason="this torch has them elsewhere")


@pytest.fixture
def inductor(templates, monkeypatch):
    """Its heuristics for a backend, and what they make of a list for a product, as in an exhaustive search."""
    from torch._inductor import config

    sizes = SimpleNamespace(optimization_hint_with_override=lambda size, hint_override=None: size)
    monkeypatch.setattr(templates, "V", SimpleNamespace(graph=SimpleNamespace(sizevars=sizes)))
    monkeypatch.setattr(templates, "get_backend_num_stages", lambda: 2)  # which asks for a GPU: 2 is ROCm's
    monkeypatch.setattr(templates, "get_default_kpack", lambda block_k=16: 1 if block_k <= 16 else 2)

    class Inductor:
        def __getattr__(self, name):
            return getattr(templates, f"{name}ConfigHeuristic")()

        def fitted(self, heuristic, configs, shape):
            with config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"):
                made = heuristic.preprocess_mm_configs(*shape, configs=configs)
                return [one.kwargs | {"num_warps": one.num_warps, "num_stages": one.num_stages} for one in made]

    return Inductor()


def tile(one):
    return tuple(one[knob] for knob in BLOCKS)


def test_the_exhaustive_list_on_cuda_is_theirs_and_so_is_what_is_left_of_it(inductor):
    theirs = inductor.CUDA
    assert len(theirs.exhaustive_configs) == len(matmul_configs(H200, "exhaustive")) == 1875
    for shape in SHAPES:
        knobs = (*BLOCKS, "num_warps", "num_stages")
        left = {tuple(one[k] for k in knobs) for one in inductor.fitted(theirs, theirs.exhaustive_configs, shape)}
        ours = {tuple(one[k] for k in knobs) for one in matmul_configs(UNBOUNDED, "exhaustive", shape=shape)}
        assert ours == left
        within = {tuple(one[k] for k in knobs) for one in matmul_configs(H200, "exhaustive", shape=shape)}
        assert within <= left


def test_the_exhaustive_list_on_rocm_is_theirs_less_what_their_own_filter_says_crashes(inductor):
    theirs = inductor.ROCm
    assert len(theirs.exhaustive_configs) == 12_000
    kept = theirs._prune_exhaustive_configs(theirs.exhaustive_configs, 2)
    assert len(kept) == len(matmul_configs(MI300X, "exhaustive")) == 10_800
    grid = matmul_grid(MI300X)
    for knob in ("matrix_instr_nonkdim", "waves_per_eu", "kpack", "num_warps", "num_stages", "group_m"):
        assert sorted({getattr(one, knob) for one in kept}) == grid[knob.upper() if knob == "group_m" else knob]


def test_the_tiles_of_the_exhaustive_list_on_a_cpu_are_theirs(inductor):
    theirs = inductor.CPU
    for shape in SHAPES:
        left = {tile(one) for one in inductor.fitted(theirs, theirs.exhaustive_configs, shape)}
        ours = [tile(one) for one in matmul_configs(HOST, "exhaustive", shape=shape)]
        assert set(ours) == left
        assert len(ours) == len(left)  # once each: there are neither warps nor stages


#: (device, Inductor's backend, our list, Inductor's, its number, and ours)
LISTS = [
    (H200, "CUDA", "default", "mm_configs", 21, 20),
    (H200, "CUDA", "extra", "extra_mm_configs", 10, 11),
    (H200, "CUDA", "persistent", "persistent_mm_configs", 8, 10),
    (H200, "CUDA", "int8", "int8_mm_configs", 11, 18),
    (H200, "CUDA", "scaled", "scaled_mm_configs", 105, 100),
    (MI300X, "ROCm", "default", "mm_configs", 36, 33),
    (XPU, "XPU", "default", "mm_configs", 23, 22),
    (HOST, "CPU", "default", "mm_configs", 21, 20),
]


@pytest.mark.parametrize(("device", "backend", "which", "theirs", "count", "own_count"), LISTS)
def test_each_of_their_tiles_has_one_of_ours_within_a_factor_of_two(
    inductor, device, backend, which, theirs, count, own_count
):
    """In all three sides at once. The extra lists are for those who have tried the default ones. Inductor halves its
    list for a CPU."""
    heuristic = getattr(inductor, backend)
    own = [tile(one) for one in matmul_configs(device, which)]
    assert (len(getattr(heuristic, theirs)), len(own)) == (count, own_count)
    if which == "extra":
        own += [tile(one) for one in matmul_configs(device)]
    their = [(one.block_m, one.block_n, one.block_k) for one in getattr(heuristic, theirs)]
    if backend == "CPU":
        their = [tile(one) for one in inductor.fitted(heuristic, heuristic.mm_configs, LARGE)]
    far = [
        one
        for one in their
        if not any(all(max(a, b) <= 2 * min(a, b) for a, b in zip(one, mine, strict=True)) for mine in own)
    ]
    assert far == []

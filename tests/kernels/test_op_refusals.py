"""What the op refuses, and what it says. None of this needs a GPU, or a kernel."""

from __future__ import annotations

import operator

import pytest
import torch
from foretune import KernelConfig, agree, grouped_gemm
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.kernels.grouped_gemm.op import calls
from foretune.runtime import use_stub_driver

ROWS, GROUPS, N, K, TOPK = 12, 3, 16, 24, 2


def call(**changed):
    tensors = {
        "x": torch.zeros(ROWS, K),
        "w": torch.zeros(GROUPS, N, K),
        "group_sizes": torch.zeros(GROUPS, dtype=torch.int32),
    }
    return grouped_gemm(**tensors | changed)


INDICES, WEIGHTS, BIAS = torch.arange(ROWS), torch.ones(ROWS), torch.zeros(GROUPS, N)
REFUSALS = {
    "both permutations": (
        {"permute_x": True, "permute_y": True, "gather_indices": INDICES},
        "permute_x and permute_y exclude each other",
    ),
    "permute_x without indices": ({"permute_x": True}, "permute_x=True needs gather_indices, but they are None"),
    "permute_y without indices": ({"permute_y": True}, "permute_y=True needs gather_indices, but they are None"),
    "topk": ({"topk": 0}, "topk must be an integer >= 1 but is 0"),
    "topk's type": ({"topk": 2.0}, "topk must be an integer >= 1 but is 2.0"),
    "x is no tensor": ({"x": [[1.0]]}, "x must be a tensor but is a list"),
    "sizes are no tensor": ({"group_sizes": [4, 4, 4]}, "group_sizes must be a tensor but is a list"),
    "x has a batch": ({"x": torch.zeros(1, ROWS, K)}, r"x must have 2 dimensions but is \(1, 12, 24\)"),
    "w is one matrix": ({"w": torch.zeros(N, K)}, r"w must have 3 dimensions but is \(16, 24\)"),
    "K": ({"x": torch.zeros(ROWS, 32)}, r"x has 32 columns but w \(3, 16, 24\), .* has K = 24"),
    "w is transposed": ({"w": torch.zeros(GROUPS, K, N)}, "x has 24 columns but w .* has K = 16"),
    "N of 12": ({"w": torch.zeros(GROUPS, 12, K)}, "N and K of w must be multiples of 8 but are 12 and 24"),
    "N of 0": ({"w": torch.zeros(GROUPS, 0, K)}, "N and K of w must be at least 8 but are 0 and 24"),
    "x's dtype": (
        {"x": torch.zeros(ROWS, K, dtype=torch.float64)},
        "x must be one of .*bfloat16.* but is torch.float64",
    ),
    "w's dtype": ({"w": torch.zeros(GROUPS, N, K).half()}, "w is torch.float16 but x is torch.float32: cast one"),
    "sizes' dtype": ({"group_sizes": torch.zeros(GROUPS)}, "group_sizes must be int32 or int64 but is torch.float32"),
    "sizes' length": ({"group_sizes": torch.zeros(4).int()}, "there are 4 group_sizes but w has 3 groups"),
    "indices' dtype": (
        {"gather_indices": INDICES.float(), "permute_y": True},
        "gather_indices must be int32 or int64 but is torch.float32",
    ),
    "indices of x's rows": (
        {"gather_indices": INDICES, "permute_x": True, "topk": TOPK},
        "one of gather_indices a row, for 12 rows of x times topk = 2, but there are 12",
    ),
    "indices of y's rows": ({"gather_indices": INDICES[:6], "permute_y": True}, "a row, for 12 rows of x, .* are 6"),
    "weights' length": ({"topk_weights": WEIGHTS[:6]}, "one of topk_weights a row of y, so 12, but there are 6"),
    "weights' dtype": ({"topk_weights": WEIGHTS.int()}, "topk_weights must be one of .* but is torch.int32"),
    "bias' shape": ({"bias": BIAS[:1]}, r"bias must be \(3, 16\) but is \(1, 16\)"),
    "bias' dtype": ({"bias": BIAS.double()}, "bias must be one of .* but is torch.float64"),
    "x is a column slice": (
        {"x": torch.zeros(ROWS, 2 * K)[:, :K]},
        r"x must be contiguous but has strides \(48, 1\) at shape \(12, 24\): call x.contiguous\(\) first",
    ),
    "w is a transposed view": (
        {"w": torch.zeros(GROUPS, K, N).transpose(1, 2)},
        r"w must be contiguous but has strides \(384, 1, 16\)",
    ),
    "a device": ({"w": torch.zeros(GROUPS, N, K, device="meta")}, "w is on meta but x is on cpu"),
    "the CPU": ({}, "x must be on a GPU but is on the CPU"),
    "no rows on the CPU": ({"x": torch.zeros(0, K)}, "x must be on a GPU but is on the CPU"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_names_what_is_wrong(name):
    changed, why = REFUSALS[name]
    with pytest.raises(ForetuneError, match=why):
        call(**changed)


@pytest.mark.parametrize("name", ["K", "permute_x without indices"])
def test_it_is_refused_every_time(name):
    changed, why = REFUSALS[name]
    for _ in range(2):
        with pytest.raises(ForetuneError, match=why):
            call(**changed)


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
class TestOnADevice:
    """What is refused after all shapes are right."""

    @pytest.fixture(autouse=True)
    def stub(self):
        with use_stub_driver(DeviceSpec.named("h200")):
            yield

    def test_an_odd_address(self):
        odd = torch.zeros(1 + ROWS * K)[1:].view(ROWS, K)
        with pytest.raises(ForetuneError, match=r"x must begin at a multiple of 16 bytes.*x\.clone\(\)"):
            call(x=odd)
        with pytest.raises(ForetuneError, match=r"w must begin at"):
            call(w=torch.zeros(2 + GROUPS * N * K)[2:].view(GROUPS, N, K))

    def test_a_mode_that_does_not_exist(self, monkeypatch):
        with pytest.raises(ForetuneError, match="mode must be one of off, shortlist, predict but got 'fast'"):
            call(mode="fast")
        monkeypatch.setenv("FORETUNE_MODE", "quick")
        with pytest.raises(ForetuneError, match="FORETUNE_MODE must be one of off, shortlist, predict but got 'quick'"):
            call()

    @pytest.mark.parametrize("which", ["config", "config_dx", "config_dw"])
    def test_a_knob_that_does_not_exist(self, which):
        family = {"config": "fwd", "config_dx": "dx", "config_dw": "dw"}[which]
        with pytest.raises(ForetuneError, match=f"BLOCK_SIZE_M is no knob of grouped_gemm_{family}; it has BLOCK_M"):
            call(**{which: KernelConfig.of(BLOCK_SIZE_M=64)})

    @pytest.mark.parametrize(
        ("knobs", "why"),
        [
            ({"BLOCK_M": 24}, "BLOCK_M cannot be 24: a power of two between 16 and 256"),
            ({"BLOCK_M": 512}, "BLOCK_M cannot be 512"),
            ({"BLOCK_K": 8}, "BLOCK_K cannot be 8: a power of two between 16 and 512"),
            ({"GROUP_M": 0}, "GROUP_M cannot be 0: between 1 and 1024"),
            ({"TMA_W": 2}, "TMA_W cannot be 2: 0 or 1"),
            ({"num_warps": 32}, "num_warps cannot be 32: 1, 2, 4, 8 or 16"),
            ({"BLOCK_N": 512, "num_stages": 8}, "needs [0-9]+ bytes of shared memory but NVIDIA H200 has 232448"),
        ],
    )
    def test_a_config_that_no_kernel_takes(self, knobs, why):
        with pytest.raises(ForetuneError, match=why):
            call(x=torch.zeros(ROWS, K).half(), w=torch.zeros(GROUPS, N, K).half(), config=KernelConfig.of(**knobs))

    @pytest.mark.parametrize(
        ("permutation", "which", "knob"),
        [
            ("permute_x", "config", "TMA_X"),
            ("permute_y", "config", "TMA_Y"),
            ("permute_x", "config_dx", "TMA_Y"),
            ("permute_y", "config_dx", "TMA_X"),
        ],
    )
    def test_tma_on_what_is_permuted(self, permutation, which, knob):
        with pytest.raises(ForetuneError, match=knob):
            call(gather_indices=INDICES, **{permutation: True, which: KernelConfig.of(**{knob: 1})})


def test_small_tensors_may_begin_anywhere():
    with use_stub_driver(DeviceSpec.named("h200")) as driver:
        sizes, weights = torch.zeros(1 + GROUPS, dtype=torch.int32)[1:], torch.ones(1 + ROWS)[1:]
        call(group_sizes=sizes, topk_weights=weights, mode="off")
    assert [launch.kernel for launch in driver.launches] == ["tile_map_kernel", "grouped_gemm_kernel"]


def test_the_memo_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(calls, "_calls", calls.Memo())
    monkeypatch.setattr(calls._calls, "most", 5)
    with use_stub_driver(DeviceSpec.named("h200")):
        for rows in range(1, 20):
            call(x=torch.zeros(rows, K), mode="off")
            assert len(calls._calls) <= 5


def test_a_call_is_looked_up_until_the_ranks_are_to_agree_on_its_config(monkeypatch):
    monkeypatch.setattr(calls, "_calls", calls.Memo())
    x, w, sizes = torch.zeros(ROWS, K), torch.zeros(GROUPS, N, K), torch.zeros(GROUPS, dtype=torch.int32)

    def looked_up():
        forward = calls.call_of(calls.Options(), (x, w, sizes, None, None, None))
        return forward, calls.call_of_backward(x, forward.shape, calls.Options())

    with use_stub_driver(DeviceSpec.named("h200")):
        before = looked_up()
        assert all(map(operator.is_, looked_up(), before))
        with agree():
            within = looked_up()
        assert not any(map(operator.is_, within, before))
        assert not any(map(operator.is_, looked_up(), within))

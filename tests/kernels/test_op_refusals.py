"""What the op refuses, and what it says. None of this needs a GPU, or a kernel."""

from __future__ import annotations

import operator
from functools import partial

import foretune
import numpy as np
import pytest
import torch
from foretune import KernelConfig, agree, grouped_gemm
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.kernels.grouped_gemm.op import GRADIENT, OP
from foretune.kernels.grouped_gemm.passes import Options
from foretune.kernels.op_calls import Memo
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
        "permute_x and permute_y cannot both be True",
    ),
    "permute_x without indices": (
        {"permute_x": True},
        "permute_x=True needs gather_indices, but gather_indices is None",
    ),
    "permute_y without indices": (
        {"permute_y": True},
        "permute_y=True needs gather_indices, but gather_indices is None",
    ),
    "topk": ({"topk": 0}, "topk must be an integer >= 1 but is 0"),
    "topk's type": ({"topk": 2.0}, "topk must be an integer >= 1 but is 2.0"),
    "topk is true": ({"topk": True}, "topk must be an integer >= 1 but is True"),
    "topk is a text": ({"topk": "2"}, "topk must be an integer >= 1 but is '2'"),
    "topk is a tensor": ({"topk": torch.tensor(2)}, "topk must be an integer >= 1 but is tensor"),
    "permute_x's type": ({"permute_x": 1, "gather_indices": INDICES}, "permute_x must be true or false but is 1"),
    "permute_y's type": ({"permute_y": "no", "gather_indices": INDICES}, "permute_y must be true or false but is 'no'"),
    "x is no tensor": ({"x": [[1.0]]}, "x must be a tensor but is a list"),
    "sizes are no tensor": ({"group_sizes": [4, 4, 4]}, "group_sizes must be a tensor but is a list"),
    "w is none": ({"w": None}, "w must be a tensor but is a NoneType"),
    "sizes are none": ({"group_sizes": None}, "group_sizes must be a tensor but is a NoneType"),
    "x is a class": ({"x": torch.Tensor}, "x must be a tensor but is a "),
    "weights are a list": ({"topk_weights": [1.0] * ROWS}, "topk_weights must be a tensor but is a list"),
    "weights of NumPy": ({"topk_weights": WEIGHTS.numpy()}, "topk_weights must be a tensor but is a ndarray"),
    "weights' dimensions": ({"topk_weights": WEIGHTS.view(2, 2, 3)}, r"must have 1 dimensions but is \(2, 2, 3\)"),
    "indices of weights alone, a list": (
        {"gather_indices": [0] * ROWS, "topk_weights": WEIGHTS},
        "gather_indices must be a tensor but is a list",
    ),
    "indices of weights alone, floats": (
        {"gather_indices": INDICES.float(), "topk_weights": WEIGHTS},
        "gather_indices must be int32 or int64 but is torch.float32",
    ),
    "indices of weights alone, two dimensions": (
        {"gather_indices": INDICES.view(2, 6), "topk_weights": WEIGHTS},
        r"gather_indices must have 1 dimensions but is \(2, 6\)",
    ),
    "indices of weights alone, too few": (
        {"gather_indices": INDICES[:6], "topk_weights": WEIGHTS},
        "gather_indices must have 12 entries, one per entry of topk_weights, but has 6",
    ),
    "indices of weights alone, elsewhere": (
        {"gather_indices": INDICES.to("meta"), "topk_weights": WEIGHTS},
        "gather_indices is on meta but topk_weights is on cpu",
    ),
    "bias is a list": ({"bias": [[0.0]]}, "bias must be a tensor but is a list"),
    "x is complex": ({"x": torch.zeros(ROWS, K, dtype=torch.cfloat)}, "x must be one of .* but is torch.complex64"),
    "x is of truths": ({"x": torch.zeros(ROWS, K, dtype=bool)}, "x must be one of .* but is torch.bool"),
    "x has a batch": ({"x": torch.zeros(1, ROWS, K)}, r"x must have 2 dimensions but is \(1, 12, 24\)"),
    "w is one matrix": ({"w": torch.zeros(N, K)}, r"w must have 3 dimensions but is \(16, 24\)"),
    "K": ({"x": torch.zeros(ROWS, 32)}, r"x must have K = 24 columns, as w \(3, 16, 24\) .*, but has 32"),
    "w is transposed": ({"w": torch.zeros(GROUPS, K, N)}, "x must have K = 16 columns, as w .*, but has 24"),
    "N of 12": ({"w": torch.zeros(GROUPS, 12, K)}, "N and K of w must be multiples of 8 but are 12 and 24"),
    "N of 0": ({"w": torch.zeros(GROUPS, 0, K)}, "N and K of w must be at least 8 but are 0 and 24"),
    "x's dtype": (
        {"x": torch.zeros(ROWS, K, dtype=torch.float64)},
        "x must be one of .*bfloat16.* but is torch.float64",
    ),
    "w's dtype": ({"w": torch.zeros(GROUPS, N, K).half()}, "w is torch.float16 but x is torch.float32: cast one"),
    "sizes' dtype": ({"group_sizes": torch.zeros(GROUPS)}, "group_sizes must be int32 or int64 but is torch.float32"),
    "sizes' length": (
        {"group_sizes": torch.zeros(4).int()},
        "group_sizes must have 3 entries, one per group of w, but has 4",
    ),
    "indices' dtype": (
        {"gather_indices": INDICES.float(), "permute_y": True},
        "gather_indices must be int32 or int64 but is torch.float32",
    ),
    "indices of x's rows": (
        {"gather_indices": INDICES, "permute_x": True, "topk": TOPK},
        r"gather_indices must have 24 entries, one per row \(12 rows of x times topk = 2\), but has 12",
    ),
    "indices of y's rows": (
        {"gather_indices": INDICES[:6], "permute_y": True},
        "must have 12 entries, one per row of x, but has 6",
    ),
    "weights' length": (
        {"topk_weights": WEIGHTS[:6]},
        "topk_weights must have 12 entries, one per row of y, but has 6",
    ),
    "weights' dtype": ({"topk_weights": WEIGHTS.int()}, "topk_weights must be one of .* but is torch.int32"),
    "bias' shape": ({"bias": BIAS[:1]}, r"bias must have shape \(3, 16\), N entries per group, but has \(1, 16\)"),
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


#: Kinds of tensors without strides, by what makes one of a dense one.
ODD = {
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": torch.Tensor.to_sparse_csr,
    "sparse_bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda dense: torch.nested.nested_tensor([dense, dense]),
    "jagged": lambda dense: torch.nested.nested_tensor([dense, dense], layout=torch.jagged),
    "quantized": lambda dense: torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8),
}
M, W8 = torch.zeros(16, 16), torch.zeros(16, 16).to(torch.float8_e4m3fn)
ANGLES, HEADS, ONES = torch.zeros(4, 8), torch.zeros(4, 2, 16), torch.ones(1)
#: Of each op a call with one of its arguments replaced, by its name.
OF_OPS = {
    "matmul": (foretune.matmul, {"a": M, "b": M, "bias": M[0]}),
    "gated_mlp": (foretune.gated_mlp, {"x": M, "w_gate_up": M}),
    "rms_norm_rope": (
        foretune.rms_norm_rope,
        {"q": HEADS, "k": HEADS, "cos": ANGLES, "sin": ANGLES, "q_weight": M[0], "k_weight": M[0]},
    ),
    "grouped_gemm": (
        foretune.grouped_gemm,
        {
            "x": M,
            "w": torch.zeros(2, 16, 16),
            "group_sizes": torch.zeros(2, dtype=torch.int32),
            "bias": torch.zeros(2, 16),
            "topk_weights": M[0],
        },
    ),
    "scaled_gemm": (foretune.scaled_gemm, {"x": M.bfloat16(), "w": M.bfloat16()}),
    "scaled_gemm of fp8": (
        partial(foretune.scaled_gemm, x=W8, w=W8, scales="tensorwise"),
        {"x_scale": ONES, "w_scale": ONES},
    ),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors", "ignore:Sparse", "ignore:.*quantize")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("op", OF_OPS)
def test_tensors_without_strides_are_refused_by_name(op, kind):
    function, arguments = OF_OPS[op]
    refused = 0
    for name, tensor in arguments.items():
        try:
            odd = ODD[kind](tensor)
        except (RuntimeError, TypeError, IndexError):  # which there is not of every shape and dtype
            continue
        refused += 1
        why = f"^{name} must be a dense tensor but is a {'nested' if kind == 'jagged' else kind} one"
        with use_stub_driver(DeviceSpec.named("h200")), pytest.raises(ForetuneError, match=why):
            function(**arguments | {name: odd})
    assert refused or op.startswith("scaled_gemm")


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
class TestOptionsThatEqualOthers:
    """Calls are looked up by their options, in which True is equal to 1 and to 1.0."""

    @pytest.fixture(autouse=True)
    def stub(self, monkeypatch):
        monkeypatch.setenv("FORETUNE_MODE", "off")
        with use_stub_driver(DeviceSpec.named("h200")):
            yield

    @pytest.mark.parametrize("wrong", [True, 1.0])
    @pytest.mark.parametrize("first", [1, "wrong"])
    def test_topk(self, first, wrong, monkeypatch):
        monkeypatch.setattr(OP, "calls", Memo())
        x = torch.zeros(ROWS, K, requires_grad=True)
        for topk in (1, wrong) if first == 1 else (wrong, 1):
            if topk is wrong:
                with pytest.raises(ForetuneError, match=f"topk must be an integer >= 1 but is {wrong}"):
                    call(x=x, topk=wrong)
            else:
                assert call(x=x, topk=topk).shape == (ROWS, N)
        assert [type(one.options.topk) for one in OP.calls.values()] == [int]

    def test_topk_of_numpy_is_an_integer(self, monkeypatch):
        monkeypatch.setattr(OP, "calls", Memo())
        call(topk=np.int64(1))
        assert [type(one.options.topk) for one in OP.calls.values()] == [int]

    @pytest.mark.parametrize("wrong", [{"eps": True}, {"weight_offset": True}, {"interleaved": 0}])
    def test_numbers_of_norms(self, wrong):
        right = {"eps": 1.0, "weight_offset": 1.0, "interleaved": False}
        function, arguments = OF_OPS["rms_norm_rope"]
        function(**arguments, **right)
        (name,) = wrong
        with pytest.raises(ForetuneError, match=f"{name} must be (a number >= 0|true or false) but is"):
            function(**arguments, **right | wrong)

    @pytest.mark.parametrize("wrong", ["no", 1, None])
    def test_recompute(self, wrong):
        function, arguments = OF_OPS["gated_mlp"]
        function(**arguments)
        with pytest.raises(ForetuneError, match="recompute must be true or false but is"):
            function(**arguments, recompute=wrong)

    def test_an_index_of_weights_alone_that_is_out_of_range_takes_some_other_weight(self):
        call(gather_indices=INDICES + 10**6, topk_weights=WEIGHTS)
        call(gather_indices=INDICES - 10**6, topk_weights=WEIGHTS)


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
        with pytest.raises(
            ForetuneError, match=r"x must begin at an address that is a multiple of 16 bytes.*pass x\.clone\(\)"
        ):
            call(x=odd)
        with pytest.raises(ForetuneError, match=r"w must begin at"):
            call(w=torch.zeros(2 + GROUPS * N * K)[2:].view(GROUPS, N, K))

    def test_a_mode_that_does_not_exist(self, monkeypatch):
        with pytest.raises(ForetuneError, match="mode must be one of off, shortlist, predict, refine but got 'fast'"):
            call(mode="fast")
        monkeypatch.setenv("FORETUNE_MODE", "quick")
        with pytest.raises(
            ForetuneError, match="FORETUNE_MODE must be one of off, shortlist, predict, refine but got 'quick'"
        ):
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
    monkeypatch.setattr(OP, "calls", Memo())
    monkeypatch.setattr(OP.calls, "most", 5)
    with use_stub_driver(DeviceSpec.named("h200")):
        for rows in range(1, 20):
            call(x=torch.zeros(rows, K), mode="off")
            assert len(OP.calls) <= 5


def test_a_call_is_looked_up_until_the_ranks_are_to_agree_on_its_config(monkeypatch):
    for op in (OP, GRADIENT):
        monkeypatch.setattr(op, "calls", Memo())
    x, w, sizes = torch.zeros(ROWS, K), torch.zeros(GROUPS, N, K), torch.zeros(GROUPS, dtype=torch.int32)

    def looked_up():
        tensors = (x, w, sizes, None, None, None)
        needs = (True, True, False, False)
        return OP.call_of((*tensors, *Options())), GRADIENT.call_of((torch.zeros(ROWS, N), *tensors, *Options(), needs))

    with use_stub_driver(DeviceSpec.named("h200")):
        before = looked_up()
        assert all(map(operator.is_, looked_up(), before))
        with agree():
            within = looked_up()
        assert not any(map(operator.is_, within, before))
        assert not any(map(operator.is_, looked_up(), within))

"""Unsloth's interface: what its configs become, what is refused, and that its arguments are passed on."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch
from foretune.datasets import ForetuneError
from foretune.kernels.grouped_gemm import (
    KernelConfigBackward_dW,
    KernelConfigBackward_dX,
    KernelConfigForward,
    unsloth,
    unsloth_grouped_gemm,
)

BLOCKS = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "num_warps": 8, "num_stages": 4}
KINDS = (KernelConfigForward, KernelConfigBackward_dX, KernelConfigBackward_dW)


def test_the_signature_is_unsloths():
    assert list(inspect.signature(unsloth_grouped_gemm).parameters) == [
        "X", "W", "m_sizes", "topk", "gather_indices", "permute_x", "permute_y", "topk_weights", "fuse_mul_post",
        "kernel_config_fwd", "kernel_config_bwd_dX", "kernel_config_bwd_dW", "autotune", "is_first_gemm", "dX_only",
        "dW_only",
    ]  # fmt: skip


def test_the_fields_are_unsloths():
    common = [*BLOCKS, "flatten", "permute_x", "permute_y", "fuse_mul_post", "use_tma_store"]
    assert [[field.name for field in fields(kind)] for kind in KINDS] == [
        [*common, "use_tma_load_w", "use_tma_load_x"],
        [*common, "use_tma_load_dy", "use_tma_load_w"],
        [*common, "use_tma_load_dy", "use_tma_load_x"],
    ]


@pytest.mark.parametrize(
    ("kind", "output_rows", "output_columns", "contraction"),
    [(KernelConfigForward, 16, 32, 64), (KernelConfigBackward_dX, 16, 64, 32), (KernelConfigBackward_dW, 32, 64, 16)],
)
def test_blocks_are_of_the_product_that_the_kernel_makes(kind, output_rows, output_columns, contraction):
    """Unsloth names blocks by the dimensions of the layer, whichever of them a product contracts."""
    ours = kind(**BLOCKS).ours()
    assert (ours["BLOCK_M"], ours["BLOCK_N"], ours["BLOCK_K"]) == (output_rows, output_columns, contraction)
    assert (ours["num_warps"], ours["num_stages"]) == (8, 4)


@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        (KernelConfigForward, "use_tma_load_x", "TMA_X"),
        (KernelConfigForward, "use_tma_load_w", "TMA_W"),
        (KernelConfigForward, "use_tma_store", "TMA_Y"),
        (KernelConfigBackward_dX, "use_tma_load_dy", "TMA_X"),
        (KernelConfigBackward_dX, "use_tma_load_w", "TMA_W"),
        (KernelConfigBackward_dX, "use_tma_store", "TMA_Y"),
        (KernelConfigBackward_dW, "use_tma_load_dy", "TMA_DY"),
        (KernelConfigBackward_dW, "use_tma_load_x", "TMA_X"),
        (KernelConfigBackward_dW, "use_tma_store", "TMA_DW"),
    ],
)
def test_each_tma_knob_is_of_the_same_operand(kind, theirs, ours):
    knobs = kind(**{theirs: True}).ours().to_json()
    assert {name for name, value in knobs.items() if name.startswith("TMA_") and value} == {ours}


CONFLICTS = [
    (KernelConfigForward, "use_tma_load_x", "permute_x"),
    (KernelConfigForward, "use_tma_store", "permute_y"),
    (KernelConfigBackward_dX, "use_tma_load_dy", "permute_y"),
    (KernelConfigBackward_dX, "use_tma_store", "permute_x"),
    (KernelConfigBackward_dW, "use_tma_load_dy", "permute_y"),
    (KernelConfigBackward_dW, "use_tma_load_x", "permute_x"),
]
ARGUMENTS = {
    KernelConfigForward: "kernel_config_fwd",
    KernelConfigBackward_dX: "kernel_config_bwd_dX",
    KernelConfigBackward_dW: "kernel_config_bwd_dW",
}


def call(**options):
    x, w, sizes = torch.zeros(4, 8), torch.zeros(2, 8, 8), torch.zeros(2, dtype=torch.int32)
    return unsloth_grouped_gemm(x, w, sizes, 1, torch.arange(4), **options)


@pytest.mark.parametrize(("kind", "tma", "permutation"), CONFLICTS)
def test_tma_on_what_is_permuted_is_refused(kind, tma, permutation):
    why = f"{kind.__name__}: {tma} must be False with {permutation}=True, because TMA cannot move permuted rows"
    with pytest.raises(ForetuneError, match=why):
        kind(**{tma: True, permutation: True})
    with pytest.raises(ForetuneError, match=why):  # also where only the call says what is permuted
        call(**{permutation: True, ARGUMENTS[kind]: kind(**{tma: True})})


@pytest.mark.parametrize("kind", KINDS)
def test_both_permutations_are_refused(kind):
    with pytest.raises(ForetuneError, match="permute_x and permute_y cannot both be True"):
        kind(permute_x=True, permute_y=True)
    with pytest.raises(ForetuneError, match="permute_x and permute_y cannot both be True"):
        call(permute_x=True, permute_y=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"autotune": True, "kernel_config_bwd_dX": KernelConfigBackward_dX()}, "autotune=True chooses the configs"),
        ({"dX_only": True, "dW_only": True}, "dX_only and dW_only cannot both be True"),
        ({"fuse_mul_post": True}, "fuse_mul_post=True needs topk_weights, but topk_weights is None"),
    ],
)
def test_options_that_cannot_be_together_are_refused(options, why):
    with pytest.raises(ForetuneError, match=why):
        call(**options)


@pytest.fixture
def passed(monkeypatch):
    """What reaches our op."""
    arguments = {}

    def op(x, w, group_sizes, **options):
        arguments.update(options, x=x, w=w, group_sizes=group_sizes)

    monkeypatch.setattr(unsloth, "grouped_gemm", op)
    return arguments


def test_weights_are_multiplied_in_only_where_asked_for(passed):
    weights = torch.ones(4)
    call(topk_weights=weights)
    assert passed["topk_weights"] is None
    call(topk_weights=weights, fuse_mul_post=True)
    assert passed["topk_weights"] is weights


def test_autotune_is_the_mode_that_benchmarks(passed):
    call(autotune=True)
    assert passed["mode"] == "shortlist"
    call()
    assert passed["mode"] is None


def test_one_gradient_only(passed):
    x, w = torch.zeros(4, 8, requires_grad=True), torch.zeros(2, 8, 8, requires_grad=True)
    for options, of_x, of_w in (({}, True, True), ({"dX_only": True}, True, False), ({"dW_only": True}, False, True)):
        unsloth_grouped_gemm(x, w, torch.zeros(2).int(), 1, **options)
        assert (passed["x"].requires_grad, passed["w"].requires_grad) == (of_x, of_w)


def test_tokens_may_come_in_batches(passed):
    unsloth_grouped_gemm(torch.zeros(2, 3, 8), torch.zeros(2, 8, 8), torch.zeros(2).int(), 1)
    assert passed["x"].shape == (6, 8)


def test_each_config_goes_to_its_kernel(passed):
    call(
        kernel_config_fwd=KernelConfigForward(**BLOCKS),
        kernel_config_bwd_dX=KernelConfigBackward_dX(**BLOCKS),
        kernel_config_bwd_dW=KernelConfigBackward_dW(**BLOCKS),
    )
    assert passed["config"] == KernelConfigForward(**BLOCKS).ours()
    assert passed["config_dx"] == KernelConfigBackward_dX(**BLOCKS).ours()
    assert passed["config_dw"] == KernelConfigBackward_dW(**BLOCKS).ours()

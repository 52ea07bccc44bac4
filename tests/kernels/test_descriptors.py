"""TMA descriptors that the host makes: how many a config has, and what that has saved since programs made them."""

from __future__ import annotations

import pytest
import torch
from foretune.datasets import DeviceSpec, Problem
from foretune.kernels import find_family, gemm_family
from foretune.kernels.gated_mlp import op as gated
from foretune.kernels.gemm_family import saved_by_descriptors
from foretune.kernels.grouped_gemm.triton_kernels import launches as grouped
from foretune.kernels.matmul.triton_kernels import launches as dense
from foretune.kernels.scaled_gemm.triton_kernels import launches as scaled

H200 = DeviceSpec.named("h200")
#: The dtypes of the tensors of launches in fp8.
FP8 = [torch.float8_e4m3fn] * 2 + [torch.float32] * 2 + [torch.bfloat16]
FP8_DW = [*FP8, torch.bfloat16]
#: What a family's launches make for a config.
MADE = {
    "matmul": lambda config: dense._descriptors((64,) * 7, config, False, True),
    "scaled_gemm": lambda config: scaled._descriptors(64, 1, 64, 64, config),
    "scaled_grouped_gemm_fwd": lambda config: scaled._descriptors(64, 8, 64, 64, config),
    "scaled_grouped_gemm_dw": lambda config: scaled._dw_descriptors(64, 8, 1, 64, 64, config),
    "grouped_gemm_fwd": lambda config: grouped.gemm_descriptors(64, 8, 64, 64, config, False),
    "grouped_gemm_dx": lambda config: grouped.gemm_descriptors(64, 8, 64, 64, config, True),
    "grouped_gemm_dw": lambda config: grouped.dw_descriptors(8, 1, 64, 64, config),
    "gated_mlp": lambda config: gated._descriptors(64, 64, 64, config),
}


@pytest.mark.parametrize("name", MADE)
def test_what_a_family_declares_is_what_its_launches_make(name):
    family = find_family(name)
    flags = {"dtype": "fp8e4m3"} if name.startswith("scaled") else {}
    problem = Problem.of(name, **dict.fromkeys(family.dims, 4096) | family.default_dims, **flags)
    space = [config for config in family.space(H200) if config["PROGRAMS_PER_SM"]]
    counts = saved_by_descriptors(family, problem, H200, space) / gemm_family._DESCRIPTOR_US
    made = [sum(one is not None for one in MADE[name](config)) for config in space]
    assert counts.round(6).tolist() == made
    assert len(set(made)) > 1


@pytest.mark.parametrize("name", MADE)
def test_triton_accepts_every_descriptor(name):
    """Its own constructor, which launches bypass, checks the same facts."""
    dtypes = {"scaled_grouped_gemm_dw": FP8_DW, "scaled_gemm": FP8, "scaled_grouped_gemm_fwd": FP8}
    tensors = [torch.empty(1, dtype=dtype, device="meta") for dtype in dtypes.get(name, [torch.bfloat16] * 4)]
    descriptors = {one for config in find_family(name).space(H200) for one in MADE[name](config) if one is not None}
    for one in descriptors:
        made = one.of(tensors)
        assert vars(type(made)(**vars(made))) == vars(made)
    assert len({one.tensor for one in descriptors}) > 1


def test_programs_that_are_not_persistent_have_made_theirs_in_every_round():
    """A tile of 128 x 256 fits once on an SM: 264 tiles are two rounds of 132 programs."""
    family = find_family("matmul")
    problem = Problem.of("matmul", batch=1, m=128 * 264, n=256, k=4096)
    knobs = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "SPLIT_K": 1, "TMA": 1, "CONSUMERS": 0, "num_stages": 4}
    once, twice = (
        next(c for c in family.space(H200) if knobs.items() <= c.to_json().items() and c["PROGRAMS_PER_SM"] == programs)
        for programs in (1, 0)
    )
    saved = saved_by_descriptors(family, problem, H200, [once, twice])
    assert saved.tolist() == pytest.approx([saved[0], 2 * saved[0]])
    assert saved[0] == pytest.approx(saved_by_descriptors(family, problem, H200, [once])[0])
    assert saved[0] > 0

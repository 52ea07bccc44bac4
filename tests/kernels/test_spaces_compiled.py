"""The lists of a matrix product, compiled for GPUs that need not be here: what is let through fits, what is pruned for
its shared memory would not."""

from __future__ import annotations

import random

import pytest
from foretune.kernels.spaces import fit_configs, generate, matmul_configs, matmul_grid
from foretune.kernels.spaces.matmul import smem_bytes
from grouped import A100, B200, H200, MI300X
from plain_matmul import compiled

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

DEVICES = (A100, H200, B200, MI300X)
#: Barriers.
SLACK = 64


def lists(device):
    """(config, dtype) of each list but the exhaustive one, in the dtypes that the arch has."""
    for which, dtype in (("default", "bf16"), ("extra", "bf16"), ("persistent", "bf16"), ("int8", "int8")):
        yield from ((config, dtype) for config in matmul_configs(device, which))
    if device.arch in ("sm_90", "sm_100"):
        yield from ((config, "fp8e4m3") for config in matmul_configs(device, "scaled"))


def check(config, device, dtype):
    binary, said = compiled(config, device, dtype), smem_bytes(config, device, dtype)
    exchanged = config["BLOCK_M"] * config["BLOCK_N"] * (4 if dtype == "int8" else 2)  # when the result is stored
    assert said <= binary.metadata.shared <= max(said + SLACK, exchanged)
    assert binary.metadata.shared <= device.smem_per_block_bytes


@pytest.mark.parametrize("device", DEVICES, ids=lambda one: one.arch)
def test_a_small_config_takes_what_is_said(device):
    check(next(one for one in matmul_configs(device) if one["BLOCK_M"] == 64), device, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=lambda one: one.arch)
def test_a_sample_of_every_list_takes_what_is_said(device):
    for config, dtype in random.Random(0).sample([*lists(device)], 24):
        check(config, device, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES, ids=lambda one: one.arch)
def test_what_is_pruned_for_its_shared_memory_would_not_fit(device):
    fitted = fit_configs(matmul_configs(device, "exhaustive"), (8192, 8192, 8192), device)
    over = [config for config, reason in fitted.dropped if "of shared memory" in reason]
    nearest = sorted(over, key=lambda one: smem_bytes(one, device, "bf16"))[:200]
    for config in random.Random(0).sample(nearest, 3):
        assert compiled(config, device).metadata.shared > device.smem_per_block_bytes
    for config in random.Random(0).sample(fitted.configs, 5):
        check(config, device, "bf16")


def test_rocm_s_options_are_the_compiler_s():
    config = generate(matmul_grid(MI300X) | {"BLOCK_M": [32], "BLOCK_N": [32], "BLOCK_K": [32]})[-1]
    binary = compiled(config, MI300X)
    for option in ("matrix_instr_nonkdim", "waves_per_eu", "kpack"):
        assert getattr(binary.metadata, option) == config[option]

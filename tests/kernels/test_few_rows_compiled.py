"""The binaries of the kernels for a few rows: wide loads, and nothing that moves an operand between threads."""

from __future__ import annotations

import re

import pytest
import torch
from foretune.datasets import DeviceSpec
from foretune.kernels.grouped_gemm.triton_kernels import few_rows as grouped
from foretune.kernels.matmul.triton_kernels import few_rows as dense
from foretune.runtime import use_stub_driver

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

BF16 = torch.bfloat16


def of_matmul(rows):
    blocks = dense._BLOCKS[rows]
    return dense.few_rows_matmul_kernel.warmup(
        *(BF16,) * 3, None, *(64,) * 5, ACTIVATION="none", ROWS=rows, BLOCK_N=blocks.n, BLOCK_K=blocks.k,
        STAGES=blocks.stages, num_warps=blocks.warps, grid=(1,),
    )  # fmt: skip


def of_experts(terms, *, is_sorted=False):
    blocks = grouped.chosen_blocks(terms)
    groups = torch.int32 if is_sorted else torch.int64
    return grouped.few_rows_kernel.warmup(
        *(BF16,) * 3, groups, None, torch.float32 if terms else None, None, *(64,) * 7, SORTED=is_sorted, LANES=128,
        GATHER=False, SCATTER=False, TERMS=terms, BLOCK_N=blocks.n, BLOCK_K=blocks.k, num_warps=blocks.warps, grid=(1,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("binary", "shared_bytes"),
    [
        pytest.param(lambda: of_matmul(1), 64, id="one row"),
        pytest.param(lambda: of_matmul(2), 16384, id="two rows, in stages"),
        pytest.param(lambda: of_experts(0), 256, id="up"),
        pytest.param(lambda: of_experts(0, is_sorted=True), 1024, id="sorted"),
        pytest.param(lambda: of_experts(8), 64, id="eight experts"),
        pytest.param(lambda: of_experts(2), 64, id="two experts"),
    ],
)
def test_operands_are_loaded_16_bytes_at_a_time_by_the_threads_that_multiply_them(binary, shared_bytes):
    with use_stub_driver(DeviceSpec.named("h100")):
        compiled = binary()
    ptx = compiled.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32|cp\.async\S* .*, 0x10|cp\.async\S* .*16", ptx)
    assert not re.search(r"ld\.global\S*\.b16", ptx)  # no single elements
    assert compiled.metadata.shared <= shared_bytes  # what the sums need, or the stages

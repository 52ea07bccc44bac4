"""What adds up the parts of a split contraction begins while the product ends, where the card can do that and nowhere
else."""

from __future__ import annotations

import pytest
from foretune.kernels.matmul.triton_kernels import split_k
from foretune.runtime import use_stub_driver
from products import A100, B200, H200, MATMUL, MI300X, config, problem
from scaled import DENSE, SPLIT, split
from scaled import config as scaled_config
from scaled import problem as scaled_problem

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

SIZES = {"m": 32, "n": 64, "k": 512}
#: Of each family a problem, a config that cuts its contraction, and one that does not.
FAMILIES = {
    "matmul": (MATMUL, problem("bf16", **SIZES), config(16, 64, 64, SPLIT_K=4), config(16, 64, 64)),
    "scaled_gemm": (
        DENSE,
        scaled_problem(DENSE, "rowwise", rows=32, n=64, k=512),
        split(*SPLIT[0]),
        scaled_config(16, 64, load=1),
    ),
}


def binaries(family, call, one, device, monkeypatch):
    """(product, sum) as they are compiled, the second None where there is none."""
    sums, warmup = [], split_k.add_partials_kernel.warmup
    monkeypatch.setattr(split_k.add_partials_kernel, "warmup", lambda *a, **k: sums.append(warmup(*a, **k)))
    with use_stub_driver(device):
        product = family.compile(one, call)
    return product, sums[0] if sums else None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", [H200, B200], ids=lambda device: device.arch)
def test_the_sum_waits_for_a_product_that_lets_it_begin(name, device, monkeypatch):
    family, call, one, _ = FAMILIES[name]
    product, added = binaries(family, call, one, device, monkeypatch)
    assert "griddepcontrol.launch_dependents" in product.asm["ptx"]
    assert not product.metadata.launch_pdl  # what came before it may write what it reads
    ptx = added.asm["ptx"]
    assert added.metadata.launch_pdl
    assert ptx.count("griddepcontrol.wait") == 1
    assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]


@pytest.mark.parametrize("device", [A100, MI300X], ids=lambda device: device.arch)
def test_other_cards_have_no_such_instruction(device, monkeypatch):
    family, call, one, _ = FAMILIES["matmul"]
    for binary in binaries(family, call, one, device, monkeypatch):
        assert not getattr(binary.metadata, "launch_pdl", False)
        assert not any("griddepcontrol" in text for text in binary.asm.values() if isinstance(text, str))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_product_that_is_whole_lets_nothing_begin_early(name, monkeypatch):
    family, call, _, whole = FAMILIES[name]
    product, added = binaries(family, call, whole, H200, monkeypatch)
    assert added is None
    assert "griddepcontrol" not in product.asm["ptx"]

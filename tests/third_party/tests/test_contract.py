"""The families keep to what Foretune asks of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foretune import DeviceSpec, Problem, TritonFamily
from foretune.kernels.testing import FamilyContract
from rowwise_kernels.layer_norm import LayerNorm
from rowwise_kernels.softmax import RowSoftmax

CPU = replace(DeviceSpec.named("h200"), backend="cpu")


class TestRowSoftmax(FamilyContract):
    family = RowSoftmax


class TestLayerNorm(FamilyContract):
    family = LayerNorm


def error(family, problem, config):
    inputs = family.inputs(problem, CPU)
    expected = family.reference(inputs)
    return float((family.launch(inputs, config).float() - expected).norm() / expected.norm())


@pytest.mark.interpret
@pytest.mark.parametrize("family", [RowSoftmax(), LayerNorm()], ids=lambda family: family.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (5, 257), (3, 2048)])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_every_config_computes_what_eager_does(family, rows, columns, dtype):
    problem = Problem.of(family.name, rows=rows, columns=columns, dtype=dtype)
    configs = [config for config in family.space() if family.supports(config, problem, CPU) is None]
    assert configs
    worst = max(error(family, problem, config) for config in configs)
    assert worst <= family.tolerance(problem)


@pytest.mark.interpret
def test_a_softmax_block_that_is_shorter_than_a_row_is_wrong():
    """Which is why `supports` refuses it: a collection would find a wrong result, and not by mistake."""
    problem = Problem.of("row_softmax", rows=2, columns=300, dtype="fp32")
    family, short = RowSoftmax(), RowSoftmax().space()[0]
    assert short["BLOCK"] < 300
    assert "does not cover a row of 300 columns" in family.supports(short, problem, CPU)
    assert TritonFamily.supports(family, short, problem, CPU) is None
    assert not error(family, problem, short) <= family.tolerance(problem)

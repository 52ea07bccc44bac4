"""The kernel in Triton's interpreter, which takes fp8: every kind of scales, every way to load, multiply and store."""

from __future__ import annotations

import pytest
from scaled import CPU, DENSE, GROUPED, config, problem, trouble

pytestmark = pytest.mark.interpret

#: Groups without rows and with one, and one over two tiles.
SIZES = (5, 0, 1, 21)


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("way", [(0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 0)], ids=lambda way: "".join(map(str, way)))
def test_each_kind_of_scales_is_right_whatever_the_way(kind, way):
    # Off every block: K = 128 + 16, N = 64 + 16.
    inputs = DENSE.inputs(problem(DENSE, kind, m=21, n=80, k=144), CPU)
    assert trouble(DENSE, inputs, config(16, 64, *way)) is None


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("way", [(0, 0, 0), (0, 1, 1), (1, 1, 0)], ids=lambda way: "".join(map(str, way)))
def test_groups_have_their_own_weights_and_scales(kind, way):
    inputs = GROUPED.inputs(problem(GROUPED, kind, SIZES, n=80, k=144), CPU)
    assert trouble(GROUPED, inputs, config(16, 64, *way)) is None


@pytest.mark.parametrize("swap", [0, 1])
def test_a_tile_wider_than_a_block_of_scales_has_several(swap):
    inputs = DENSE.inputs(problem(DENSE, "blockwise", m=9, n=272, k=144), CPU)
    assert trouble(DENSE, inputs, config(16, 256, swap)) is None


def test_a_step_may_be_a_part_of_a_block_of_scales():
    inputs = DENSE.inputs(problem(DENSE, "blockwise", m=9, n=48, k=272), CPU)
    assert trouble(DENSE, inputs, config(16, 32, k=64)) is None


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize(("swap", "load"), [(0, 0), (1, 1)])
def test_parts_of_a_contraction_add_up_to_it(kind, swap, load):
    # Three steps in two parts, and in four, of which the last has none.
    inputs = DENSE.inputs(problem(DENSE, kind, m=21, n=80, k=272), CPU)
    for splits in (2, 4):
        assert trouble(DENSE, inputs, config(16, 64, swap, load, splits=splits, programs=0)) is None


def test_a_program_a_tile_gives_the_same():
    inputs = DENSE.inputs(problem(DENSE, "rowwise", m=40, n=48, k=48), CPU)
    assert trouble(DENSE, inputs, config(16, 16, programs=0, k=32)) is None


def test_a_wrong_scale_is_seen():
    inputs = DENSE.inputs(problem(DENSE, "blockwise", m=16, n=144, k=144), CPU)
    reference = inputs.w_scale[1, 1].clone()
    found = []
    for factor in (1.0, 1.1):
        inputs.w_scale[1, 1] = reference
        launched = DENSE.launch(inputs, config(16, 64)).clone()
        inputs.w_scale[1, 1] = reference * factor
        found.append(trouble(_Replayed(DENSE, launched), inputs, config(16, 64)) is None)
    assert found == [True, False]


class _Replayed:
    """A family whose launch gives what it was given."""

    def __init__(self, family, out):
        self.launch = lambda inputs, config: out
        self.tolerance = family.tolerance

"""`Pruner` under the real `triton.autotune` on kernels that run, in the interpreter."""

from __future__ import annotations

import pytest
from foretune.runtime import ForetuneWarning, Pruner

pytestmark = pytest.mark.interpret


def _one_shot(kernel_call, quantiles):
    kernel_call()
    return [1.0] * len(quantiles)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_the_shortlist_computes_the_product(toy, how):
    import torch

    family = toy.ToyFamily()
    kernel = toy.tuned(Pruner(family, 2, device=toy.H200, bundle=toy.ToyBundle()), do_bench=_one_shot)
    a, b, c = toy.operands(33, 40, 48)
    if how == "positional":
        kernel[toy.grid](a, b, c, 33, 40, 48)
    else:
        kernel[toy.grid](a_ptr=a, b_ptr=b, c_ptr=c, M=33, N=40, K=48)
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-2, rtol=1e-2)
    assert list(kernel.configs_timings) == [kernel.configs[5], kernel.configs[4]]
    assert {name: family.calls[0][name] for name in "MNK"} == {"M": 33, "N": 40, "K": 48}


def test_a_family_that_does_not_understand_the_launch_stops_nothing(toy):
    import torch

    def lost(arguments):
        raise KeyError("tokens")

    kernel = toy.tuned(Pruner(toy.ToyFamily(), 1, problem=lost, device=toy.H200), do_bench=_one_shot)
    a, b, c = toy.operands(16, 16, 16)
    with pytest.warns(ForetuneWarning, match="problem= reads .tokens.; the launch has"):
        kernel[toy.grid](a, b, c, 16, 16, 16)
    torch.testing.assert_close(c, a.float() @ b.float(), atol=1e-2, rtol=1e-2)
    assert len(kernel.configs_timings) == 6

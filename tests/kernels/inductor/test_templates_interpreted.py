"""The kernels that Inductor generates for its templates, against the references, in Triton's interpreter.

Inductor's decorator wants a compiled kernel, so the functions in it are interpreted.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from foretune.datasets import DeviceSpec, Problem
from foretune.kernels import find_family
from foretune.kernels.inductor.generated import cached_kernel
from foretune.runtime import use_stub_driver

pytestmark = pytest.mark.interpret

H100 = DeviceSpec.named("h100")
CPU = replace(H100, backend="cpu", sm_count=4)


def problem(family, flags=(), dtype="fp32", **dims):
    return Problem.of(f"inductor_{family}", dtype=dtype, flags=flags, **dims)


def grouped(*flags, m=70, n=64, k=96):
    return problem("grouped_mm", flags, groups=3, m=m, n=n, k=k)


def convolution(*flags, groups=1, side=7, k=16, window=9, stride=1):
    sizes = {"images": 2, "m": 2 * side * side, "n": 24, "k": k, "window": window, "stride": stride}
    return problem("convolution", flags, groups=groups, **sizes)


def attention(family, *flags, length=200, **more):
    sizes = {"batch": 4, "groups": 2, "queries": length, "keys": length, "head_qk": 32, "head_v": 32}
    return problem(family, flags, **{**sizes, **more})


PROBLEMS = [
    grouped("a_ragged", "b_transposed"),
    grouped("a_ragged"),
    grouped("b_ragged", m=64, n=72),
    grouped("both_ragged", "a_transposed", m=64, n=72),
    grouped(m=64, n=72),
    convolution("channels_last"),
    convolution(groups=2, stride=2),
    convolution("channels_last", side=3, k=3, window=16, stride=4),
    convolution("channels_last", side=4, window=1, stride=2),
    attention("flex_attention", "block_mask", length=300),
    attention("flex_attention"),
    attention("flex_decoding", "block_mask", batch=2, groups=1, queries=4, keys=1024, splits=4),
    attention("flex_decoding", "block_mask", batch=2, groups=1, queries=6, keys=1024, splits=4),
    attention("flex_backward", "block_mask", length=300),
    attention("flex_backward"),
]


@pytest.fixture(autouse=True)
def functions_only(monkeypatch):
    from torch._inductor.runtime import triton_heuristics

    monkeypatch.setattr(triton_heuristics, "template", lambda **_: lambda fn: SimpleNamespace(fn=fn))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_generated_kernel_computes_the_reference(problem):
    family = find_family(problem.family)
    config = family.default(problem, H100)
    with use_stub_driver(H100):
        cached_kernel(problem, config, family.generate)
    inputs = family.inputs(problem, CPU)
    outputs, references = family.launch(inputs, config), family.reference(inputs)
    if not isinstance(outputs, tuple):
        outputs, references = (outputs,), (references,)
    assert len(outputs) == len(references) == len(family.outputs)
    for name, y, reference in zip(family.outputs, outputs, references, strict=True):
        assert y.shape == reference.shape, name
        error = float((y - reference).norm() / reference.norm())
        assert error < 1e-6, f"{name} is off by {error}"


def test_groups_are_split_at_random_and_add_up():
    made = [find_family("inductor:grouped_mm").inputs(grouped("a_ragged"), CPU, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (one.tensors["offsets_ptr"].tolist() for one in made)
    assert first == again != other
    assert first[-1] == other[-1] == 70

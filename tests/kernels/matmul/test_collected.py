"""The whole way of the dense GEMM without a GPU: collected by the thin plan from a replay of its estimates, trained,
predicted and pruned."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import foretune
import numpy as np
import pytest
from foretune.datasets import KernelConfig, load
from foretune.model.train import train_bundle
from products import H200, MATMUL, problem
from replay import run
from replay_runner import ReplayRunner


class Timed:
    """The family with times: its estimates, and 1 % of noise."""

    def __init__(self, family, problem):
        self.family = family
        self.configs = tuple(one for one in family.space(H200) if family.supports(one, problem, H200) is None)
        self.times = dict(zip(self.configs, family.estimate_us(problem, H200, self.configs), strict=True))

    def __getattr__(self, name):
        return getattr(self.family, name)

    def time_us(self, problem, config, *, timing_pass):
        rng = np.random.default_rng([zlib.crc32(f"{problem} {config}".encode()), timing_pass])
        return float(self.times[config] * rng.normal(1, 0.01))


class Runner(ReplayRunner):
    def prepare(self, family, problem):
        super().prepare(Timed(family, problem), problem)

    def probe(self, family, problem, config):
        return 100.0


@pytest.mark.slow
def test_what_is_collected_is_learned_and_prunes(tmp_path):
    cases = MATMUL.cases(per_layer=1, random=20)[:24]
    summary = run(cases, tmp_path / "data", Runner(), families={"matmul": MATMUL}, plan="thin")
    assert summary.complete
    assert summary.measurements > 24 * 80
    bundle = train_bundle(load(tmp_path / "data"), {"matmul": MATMUL})
    call = problem("bf16", (), 1, 4096, 4096, 4096)
    chosen = foretune.shortlist("matmul", call, H200, k=4, bundle=bundle)
    assert chosen.predicted
    timed = Timed(MATMUL, call)
    assert timed.times[chosen.configs[0]] <= 1.3 * min(timed.times.values())
    pruner = foretune.prune("matmul", k=4, device=H200, bundle=bundle)
    arguments = {"a_ptr": SimpleNamespace(dtype="bf16"), "batch": 1, "M": 4096, "N": 4096, "K": 4096}
    kept = pruner(foretune.configs("matmul"), arguments | {"A_KM": False, "B_KN": False, "ACTIVATION": "none"})
    assert [KernelConfig.from_triton(config) for config in kept] == list(chosen.configs)

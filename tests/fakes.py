"""A family that needs no GPU and no Triton: an analytic time model, noise, failures, and a dataset made of it."""

from __future__ import annotations

import itertools
import math
import zlib
from functools import cache, lru_cache

import numpy as np
from foretune.datasets import Case, DeviceSpec, KernelConfig, Measurable, Problem, Status
from foretune.runtime.timing.timer import Timing

DEVICE = DeviceSpec.named("h200")


class FakeTimer:
    """A timer on a device where the next launch takes `us`, which is less with a clean L2."""

    def __init__(self, *, clean=False):
        self.us = 90.0 if clean else 100.0

    def time(self, launch, *, samples):
        launch()
        return Timing(self.us, 0.01, samples(self.us))

    def sample(self, launch, samples, before=None):
        launch()
        return [self.us] * samples


class FakeFamily(Measurable):
    """Tiles of a grouped product, timed by waves, padding, pipelining and a little interplay of them all."""

    name = "fake"
    dims = ("groups", "k", "n", "rows")
    dtypes = ("bf16",)
    flags = ("a", "b")  # which change nothing
    bucketed = ("rows",)
    knobs = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    feature_names = (
        "rows", "n", "k", "groups", "sizes_known", "largest", "block_m", "block_n", "block_k", "warps", "stages",
        "tiles", "waves", "wave_fill", "padding", "smem", "steps", "roofline_us",
    )  # fmt: skip

    def space(self, device=None):
        axes = itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (32, 64), (4, 8), (2, 3, 4))
        return tuple(
            KernelConfig.of(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=w, num_stages=s) for m, n, k, w, s in axes
        )

    def default(self, problem, device):
        return KernelConfig.of(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=3)

    def supports(self, config, problem, device):
        wrong = [f"{knob}={config[knob]}" for knob in self.knobs if not _is_count(config[knob])]
        if wrong:
            return f"{wrong[0]}: knobs must be whole numbers from 1"
        used = _smem(config)
        return None if used <= 100_000 else f"needs {used} bytes of shared memory"

    def features(self, problem, device, configs, binaries=None):
        tile = np.array([[c["BLOCK_M"], c["BLOCK_N"], c["BLOCK_K"], c.num_warps, c.num_stages] for c in configs], float)
        m, n, k, warps, stages = tile.T
        tiles = _tiles(problem, m, n)
        waves = tiles / device.sm_count
        largest = problem.ragged.max if problem.ragged else problem["rows"] / problem["groups"]
        columns = [
            problem["rows"], problem["n"], problem["k"], problem["groups"], problem.ragged is not None, largest,
            m, n, k, warps, stages, tiles, waves, waves / np.ceil(waves),
            tiles * m * n / (problem["rows"] * problem["n"]), stages * (m + n) * k * 2, np.ceil(problem["k"] / k),
            _roofline_us(problem, m, n),
        ]  # fmt: skip
        return np.stack([np.broadcast_to(column, m.shape) for column in columns], axis=1).astype(np.float32)

    def time_us(self, problem, config, *, timing_pass):
        """What a measurement gives; None where the config fails."""
        seed = zlib.crc32(str(config).encode(), _checksum(problem))
        if seed % 97 == 0:
            return None
        m, n = config["BLOCK_M"], config["BLOCK_N"]
        waves = math.ceil(_tiles_of(problem, m, n) / DEVICE.sm_count)
        steps = math.ceil(problem["k"] / config["BLOCK_K"])
        rate = min(m, 96) * min(n, 128) / (1 + 0.3 * abs(math.log2(m * n / 2048 / config.num_warps)))
        one_tile = steps * (0.05 + m * n * config["BLOCK_K"] / rate / 4e3 / (1 + 0.2 * config.num_stages))
        noise = np.random.default_rng([seed, timing_pass]).normal(1, 0.01)
        return float((2 + waves * one_tile) * noise)

    def source_hash(self):
        return "fake-source"

    def problem_from_call(self, arguments):
        raise NotImplementedError

    def estimate_us(self, problem, device, configs):
        blocks = np.array([[config["BLOCK_M"], config["BLOCK_N"]] for config in configs], float).reshape(-1, 2)
        return _roofline_us(problem, *blocks.T)

    def cases(self, *, random=3, **more):
        return fake_cases(randoms=random)

    def flops(self, problem):
        return 2.0 * problem["rows"] * problem["n"] * problem["k"]

    def bytes(self, problem):
        return 2.0 * (problem["groups"] * problem["n"] * problem["k"] + problem["rows"] * (problem["n"] + problem["k"]))

    def binary_key(self, config, problem):
        return config, problem.signature

    inputs = launch = reference = tolerance = compile = problem_from_call


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _smem(config):
    return config.num_stages * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * 2


def _tiles(problem, m, n):
    sizes = problem.ragged.sizes if problem.ragged else (problem["rows"] // problem["groups"],) * problem["groups"]
    return sum(np.ceil(size / m) for size in sizes) * np.ceil(problem["n"] / n)


# A dataset of fakes asks both once for every config and pass: half a second's worth, in each process that makes one.
_tiles_of = lru_cache(maxsize=4096)(_tiles)


@lru_cache(maxsize=64)
def _checksum(problem):
    return zlib.crc32(str(problem.to_json()).encode())


def _roofline_us(problem, m, n):
    return 1.0 + _tiles(problem, m, n) * m * n * problem["k"] / 3e8


def fake_cases(models: int = 6, tokens: tuple[int, ...] = (64, 512, 4096), randoms: int = 3) -> tuple[Case, ...]:
    """Layers of made-up models "A-1B", "B-1B", ..., and random shapes."""
    random = np.random.default_rng(0)
    cases = []
    for model in range(models):
        n, k, groups = (
            int(random.integers(4, 40)) * 64,
            int(random.integers(4, 40)) * 64,
            2 ** int(random.integers(2, 6)),
        )
        for rows in tokens:
            shares = random.dirichlet(np.full(groups, 2.0))
            cases.append(
                _case(f"{chr(65 + model)}-1B/w13", "zipf", rows, n, k, tuple(np.floor(shares * rows).astype(int)))
            )
            cases.append(_case(f"{chr(65 + model)}-1B/w2", "balanced", rows, k, n, (rows // groups,) * groups))
    for _ in range(randoms):
        rows, n, k = (int(size) * 8 for size in random.integers(8, 256, 3))
        cases.append(_case("random", "uniform", rows, n, k, (rows // 4,) * 4))
    return tuple(cases)


def _case(source, routing, rows, n, k, sizes):
    sizes = (int(rows - sum(sizes[1:])), *(int(size) for size in sizes[1:]))
    problem = Problem.of("fake", groups=len(sizes), rows=rows, n=n, k=k, ragged={"rows": sizes})
    return Case(problem, (source,), routing)


def fake_dataset(cases: tuple[Case, ...] | None = None):
    """Every config of the space on every case, in all three passes, as `foretune.datasets.load` would give it."""
    # Here, so that processes which only replay times start quickly.
    from foretune.datasets.dataset import Dataset

    cases = cases or fake_cases()
    facts = {"registers": 64, "spills": 0, "smem_bytes": 1024}
    frame = _frame_of(tuple(case.problem for case in cases)).assign(run_id="fake-run", **facts)
    return Dataset("fake", 2, (DEVICE,), {}, cases, FakeFamily().space(), frame)


@lru_cache(maxsize=4)
def _frame_of(problems):
    import pandas as pd

    rows = [(at, *row) for at, problem in enumerate(problems) for row in _rows_of(problem)]
    frame = pd.DataFrame(rows, columns=["problem", "config", "device", "status", "time_us", "timing_pass"])
    return frame.astype({"time_us": float})


@cache
def _rows_of(problem):
    """(config, device, status, time, pass) of every measurement: kept, as most datasets have the same problems."""
    family, rows = FakeFamily(), []
    for column, config in enumerate(family.space()):
        reason = family.supports(config, problem, DEVICE)
        for timing_pass in (1, 2, 3):
            time = None if reason else family.time_us(problem, config, timing_pass=timing_pass)
            status = Status.INVALID if reason else Status.LAUNCH_FAILED if time is None else Status.OK
            rows.append((column, DEVICE.name, status.value, time, timing_pass))
    return rows

"""Autotuned Triton kernels, ours and attached ones: launches under the stub driver, odd options, times and failures.

The kernel's own prune callback allows some configs for a size. What runs at last must be one that it allows, and of
those that were timed the fastest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import foretune
import torch
import triton
from foretune.datasets import DeviceSpec
from foretune.runtime import arguments, use_stub_driver
from foretune.runtime.tuning.session import TuningFailed
from fuzz.judging import REFUSED, TroubleError, within
from fuzz.oddities import VALUES
from hypothesis import strategies as st

H200 = DeviceSpec.named("h200")
WARPS = (1, 2, 4, 8)
SIZES = (16, 17, 32, 48, 64, 100, 128, 1024, 1040)
#: What a `do_bench` may return or raise for a config besides a time in milliseconds.
ODD_TIMES: list[Any] = [
    -1.0, 0.0, math.nan, math.inf, "3", None, [1.0, 2.0, 3.0], [-1.0] * 3, RuntimeError("illegal memory access"),
    triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory"), MemoryError("no memory"),
]  # fmt: skip


class Step(NamedTuple):
    """One thing that happens: a launch with a size, a new process, or that an odd time is given from now on or not."""

    what: str  # "launch", "process", "odd", "mend", "capture"
    size: int


class Launches(NamedTuple):
    attached: bool
    steps: tuple[Step, ...]
    options: tuple[tuple[str, Any], ...]
    prune: str  # "none", "divides", "mutates", "copies", "empty", "raises"
    odd: tuple[int, Any]  # which config, and what its timing gives


_OPTIONS: dict[str, list[Any]] = {
    "bucket": [["M"], ["N"], ["Z"], "M", []],
    "key": [["M", "N"], ["M"], [], ["Z"]],
    "reset_to_zero": [None, ["out_ptr"], ["oops"], [], "out_ptr"],
    "restore_value": [None, ["out_ptr"], ["oops"], []],
    "budget_s": [None, 0.0, 1e-9, -1.0],
    "workers": [1, 2, 0],
    "configs": ["list", "generator", "twice", "one", "none"],
    "k": ["auto", 1, 2, 1000],
}
_option = st.sampled_from(sorted(_OPTIONS)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.sampled_from(_OPTIONS[name]) | st.sampled_from(_OPTIONS[name]) | st.sampled_from(VALUES)
    )
)
inputs = st.builds(
    Launches,
    st.booleans(),
    st.lists(
        st.builds(
            Step,
            st.sampled_from(["launch", "launch", "launch", "launch", "process", "odd", "mend", "capture"]),
            st.sampled_from(SIZES),
        ),
        min_size=1,
        max_size=8,
    ).map(tuple),
    st.lists(_option, max_size=2, unique_by=lambda option: option[0]).map(tuple),
    st.sampled_from(["none", "divides", "divides", "mutates", "copies", "empty", "raises"]),
    st.tuples(st.integers(0, 3), st.sampled_from(ODD_TIMES)),
)


@cache
def _filler() -> Any:
    """The module of the cheapest kernel, whose source file Triton reads."""
    file = Path(__file__).parents[1] / "runtime" / "filler.py"
    spec = importlib.util.spec_from_file_location("foretune_filler", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["foretune_filler"] = module
    spec.loader.exec_module(module)
    return module


def check(one: Launches, folder: Path) -> str:
    """Judge one input: "answered", "refused", or trouble."""
    name = hashlib.sha256(ascii(one).encode()).hexdigest()[:16]
    kept = {"FORETUNE_CACHE_DIR": str(folder / name), "TRITON_CACHE_DIR": str(folder / "triton")}
    with mock.patch.dict(os.environ, kept), warnings.catch_warnings(), use_stub_driver(H200) as driver:
        warnings.simplefilter("ignore")
        arguments._warned.clear()
        return "refused" if within(lambda: _run(one, driver)) is REFUSED else "answered"


class _PruneError(Exception):
    """The kernel's own callback raises it, and so may a launch."""


class _Bench:
    """A `do_bench` that launches once; its time is the number of warps, or what is odd about a config."""

    def __init__(self, driver: Any, odd: tuple[int, Any]) -> None:
        self.driver, self.odd, self.is_odd = driver, odd, False

    def __call__(self, run: Callable[[], Any], quantiles: Any = None) -> Any:
        run()
        warps = self.driver.launches[-1].metadata.num_warps
        if self.is_odd and warps == WARPS[self.odd[0]]:
            if isinstance(self.odd[1], BaseException):
                raise self.odd[1]
            return self.odd[1]
        return [float(warps)] * 3


def _run(one: Launches, driver: Any) -> None:
    bench, options = _Bench(driver, one.odd), dict(one.options)
    kernel = _declared(one, options, bench)
    for step in one.steps:
        if step.what == "process":
            kernel = _declared(one, options, bench)
        elif step.what in ("odd", "mend"):
            bench.is_odd = step.what == "odd"
        else:
            _launch(one, kernel, step, bench)


def _allowed(one: Launches, size: int) -> list[int]:
    """The numbers of warps that the kernel's own callback leaves."""
    return [warps for warps in WARPS if not size % warps] if one.prune == "divides" else list(WARPS)


def _prune(one: Launches) -> Callable[..., Any] | None:
    def early_config_prune(configs: list[Any], named: dict[str, Any], **kwargs: Any) -> Any:
        if one.prune == "raises":
            raise _PruneError
        if one.prune == "empty":
            return []
        if one.prune == "mutates":
            configs[-1].kwargs["BLOCK"] = 32
        if one.prune == "copies":
            return [triton.Config(dict(config.kwargs), num_warps=config.num_warps) for config in configs]
        size = {**named, **kwargs}["M"]
        return [config for config in configs if config.num_warps in _allowed(one, size)]

    return None if one.prune == "none" else early_config_prune


def _declared(one: Launches, options: dict[str, Any], bench: _Bench) -> Any:
    filler = _filler()
    given = {name: value for name, value in options.items() if name not in ("configs", "key")}
    configs: Any = options.get("configs", "list")
    shapes = {
        "list": lambda: filler.configs(),
        "generator": lambda: (config for config in filler.configs()),
        "twice": lambda: filler.configs() * 2,
        "one": lambda: filler.configs((4,)),
        "none": list,
    }
    if isinstance(configs, str) and configs in shapes:
        configs = shapes[configs]()
    key = options.get("key", ["M", "N"])
    pruner = _prune(one)
    callbacks = {} if pruner is None else {"prune_configs_by": {"early_config_prune": pruner}}
    kernel = triton.jit(filler.fill_kernel)
    if not one.attached:
        return foretune.autotune(configs, key, do_bench=bench, **callbacks, **given)(kernel)
    own = {name: given[name] for name in ("reset_to_zero", "restore_value") if name in given}
    try:
        tuner = triton.autotune(configs, key, do_bench=bench, **callbacks, **own)(kernel)
    except Exception:  # noqa: BLE001 - Triton refuses it
        raise foretune.ForetuneError("Triton's own refusal") from None
    if not isinstance(tuner.configs, list):
        raise foretune.ForetuneError("no autotuner of Triton's could run")
    return foretune.attach(tuner, **({"k": given["k"]} if "k" in given else {}))


def _launch(one: Launches, kernel: Any, step: Step, bench: _Bench) -> None:
    filler = _filler()
    out = torch.zeros(step.size, 16)
    capturing = mock.patch("torch.cuda.is_current_stream_capturing", return_value=step.what == "capture")
    try:
        with capturing:
            filler.launch(kernel, step.size, 16, out)
    except (_PruneError, triton.runtime.errors.AutotunerError):
        if one.prune not in ("raises", "empty"):
            raise
        return
    except TuningFailed:
        return
    except Exception as error:
        excused = one.attached and (error is one.odd[1] or bench.is_odd)  # as with Triton's own autotuner
        if not excused and not _is_triton_own(error, one):
            raise
        return
    warps = kernel.best_config.num_warps
    if len(kernel.configs) == 1:  # Triton asks no callback then
        return
    if warps not in _allowed(one, step.size):
        raise TroubleError("silent change", "a config that the kernel's own callback forbids", f"{warps} {step}")


def _is_triton_own(error: Exception, one: Launches) -> bool:
    """Whether stock Triton, with the same options, raises the same type."""
    options = {
        name: value for name, value in one.options if name in ("configs", "key", "reset_to_zero", "restore_value")
    }
    with suppress(Exception), mock.patch.object(foretune, "attach", lambda tuner, **_: tuner):
        kernel = _declared(one._replace(attached=True), options, _Bench(triton.runtime.driver.active, one.odd))
        try:
            _filler().launch(kernel, SIZES[0], 16, torch.zeros(SIZES[0], 16))
        except Exception as own:  # noqa: BLE001
            return type(own) is type(error)
    return False

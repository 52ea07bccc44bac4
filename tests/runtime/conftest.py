"""Fixtures of the tests of runtime/: the toy kernel, and a clean slate of warnings and memos."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from foretune.datasets import ForetuneError
from foretune.runtime.facts.prior import Prior

_HERE = Path(__file__).parent


def _module(name):
    """A module of this folder. Triton needs its source file, and pytest's importlib mode has no path to import from."""
    spec = importlib.util.spec_from_file_location(f"foretune_{name}", _HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"foretune_{name}"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def toy():
    return _module("toy")


@pytest.fixture(scope="session")
def filler():
    return _module("filler")


@pytest.fixture(scope="session")
def stamping():
    return _module("stamping")


@pytest.fixture(scope="session")
def elsewhere():
    return _module("tuned_elsewhere")


@pytest.fixture
def gpu_kernels(monkeypatch, tmp_path):
    """The module of that name, which processes of its kernels import, too; on an empty choice cache."""
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(_HERE)
    yield importlib.import_module("gpu_kernels")
    sys.modules.pop("gpu_kernels")
    sys.modules["torch"]._dynamo.reset()


@pytest.fixture
def disk(monkeypatch):
    """A choice cache that keeps what it is told in here, for whoever imports one."""
    kept = {}
    monkeypatch.setitem(
        sys.modules, "foretune.runtime.tuning.cache.kernel_cache", _module("memory_cache").MemoryCache.module(kept)
    )
    return kept


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    from foretune.runtime import arguments, make_shortlist

    monkeypatch.setattr(arguments, "_warned", set())
    monkeypatch.setattr(sys.modules[make_shortlist.__module__], "_choosers", {})
    monkeypatch.delenv("FORETUNE_MODE", raising=False)


@pytest.fixture
def without_prior(monkeypatch):
    """Search without what is predicted of a kernel's source, which is different in each release."""

    def none(cls):
        raise ForetuneError("no prior")

    monkeypatch.setattr(Prior, "shipped", classmethod(none))

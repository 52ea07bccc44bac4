"""Which tests run in this process: those in Triton's interpreter, or all others (see README.md beside this file);
and the fixtures of more than one folder."""

from __future__ import annotations

import atexit
import gc
import os

# For this process and those that tests start, before numpy and torch read it: on tensors as small as theirs a second
# thread only spins, which took 40 % of the CPU time of interpreted tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Generator

import pytest
from foretune.kernels import registry
from interpreting import look_for_overflow, patch_once_a_launch

# Triton decides when it is imported whether it interprets, so a process can do one or the other.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
#: Of the interpreted tests, one in so many runs.
EVERY = int(os.environ.get("FORETUNE_EVERY", "1"))
#: The marks of tests that `FamilyContract` brings: it has none, because users would have to register them.
CONTRACT_MARKS = {
    "test_what_supports_passes_compiles": pytest.mark.compile,
    "test_launches_in_the_interpreter": pytest.mark.interpret,
    "test_launches_on_a_gpu": pytest.mark.gpu,
}
#: Files that take longest, and so are begun first: at the end, other workers would wait for them.
LONGEST = ("test_interpreted.py", "test_packaging.py", "test_third_party.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # By file: all workers must have the same order, though each collects in another.
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path))
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if item.name in CONTRACT_MARKS:
            item.add_marker(CONTRACT_MARKS[item.name])
        fits = (item.get_closest_marker("interpret") is not None) == INTERPRETING
        (chosen if fits else left_out).append(item)
    if INTERPRETING and EVERY > 1:
        left_out += [item for at, item in enumerate(chosen) if at % EVERY]
        chosen = chosen[::EVERY]
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_collection() -> None:
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Begin elsewhere in each folder than other workers: the byte code that one has written, the others read.

    In a fresh checkout, each of three workers took 20 s to compile what it imports and to rewrite the tests' asserts.
    """
    report = yield
    if isinstance(collector, pytest.Directory):
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
        begin = len(report.result) * worker // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        report.result = [*report.result[begin:], *report.result[:begin]]
    return report


def pytest_collection_finish() -> None:
    """Search for garbage rarely, and not in modules and test items, which live until the end.

    Otherwise, the searches take a tenth of the CPU time of the tests.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise Triton's bindings report them as leaks
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_sessionstart() -> None:
    if INTERPRETING:
        patch_once_a_launch()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if INTERPRETING:
        look_for_overflow(item.get_closest_marker("large") is not None)
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """An empty Triton cache on disk, so that every compile is a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="module", autouse=True)
def registry_of_module():
    """Forget the families that fixtures of a module registered or named by their place, as `own_registry` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._registered))
        yield


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Forget the families that a test registered or named by their place; otherwise other tests would list them."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

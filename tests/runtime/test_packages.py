"""FORETUNE_ATTACH: autotuners of named packages are attached when they are created, and only those."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading

import foretune
import pytest
import triton
from autotuned_kernel import KERNEL
from foretune.runtime import ForetuneWarning, use_stub_driver
from foretune.runtime.tuning import attach, packages
from foretune.runtime.tuning.packages import attach_named, attach_packages, is_installed, packages_of
from foretune.runtime.tuning.triton_adapter import Attachment
from triton.runtime import Autotuner

#: The packages and modules that tests write.
WRITTEN = {"one", "one_dependency", "oneself", "two", "three"}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Leave Triton, this process's imports and the packages in force as they were."""
    for name in ("names", "wrapped", "begun", "follows"):
        monkeypatch.setattr(packages._State, name, getattr(packages._State, name))
    monkeypatch.setattr(packages._State, "used", set())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(Autotuner, "__init__", Autotuner.__init__)
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in WRITTEN:
            del sys.modules[name]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write modules below a folder of `sys.path`, by path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()

    return write


def is_attached(kernel):
    return Attachment.of(kernel) is not None


def test_kernels_of_named_packages_are_attached_and_no_others(write):
    write({"one/__init__.py": "", "one/ops.py": KERNEL, "oneself.py": KERNEL, "two/ops.py": KERNEL, "three.py": KERNEL})
    attach_packages(("one", "two.ops"))  # `two` is a namespace package
    from_one, from_two = importlib.import_module("one.ops").kernel, importlib.import_module("two.ops").kernel
    assert is_attached(from_one)
    assert is_attached(from_two)
    for other in ("oneself", "three"):
        assert not is_attached(importlib.import_module(other).kernel)


def test_what_was_imported_before_is_attached_at_once_and_nothing_is_imported(write):
    write({"one/__init__.py": "", "one/ops.py": KERNEL, "one/late.py": "raise AssertionError('imported')"})
    captured = importlib.import_module("one.ops").kernel
    attach_packages(("one",))
    assert is_attached(captured)
    assert "one.late" not in sys.modules


def test_kernels_are_found_wherever_they_are_created(write):
    write(
        {
            "one/__init__.py": "def __getattr__(name):\n    from .ops import kernel\n    return kernel",
            "one/ops.py": KERNEL,
        }
    )
    head, decorated = KERNEL.split("@", 1)
    made = textwrap.indent(f"@{decorated}return kernel", "    ")
    write({"one/made.py": f"{head}def make():\n{made}"})
    write({"one/again.py": "import functools\nfrom .ops import kernel\nlaunch = functools.partial(kernel.run)"})
    write({"one/under.py": KERNEL.replace("@triton.autotune", "@triton.heuristics({})\n@triton.autotune")})
    attach_packages(("one",))
    assert is_attached(importlib.import_module("one").anything)  # a submodule that is imported late
    made = importlib.import_module("one.made")
    assert is_attached(made.make())
    assert made.make() is not made.make()
    assert is_attached(importlib.import_module("one.under").kernel.fn)
    again = importlib.import_module("one.again")
    assert again.launch.func.__module__ == attach.Attachment.__module__  # the partial calls our `run`
    ops = importlib.import_module("one.ops")
    before = ops.kernel
    assert is_attached(importlib.reload(ops).kernel)
    assert ops.kernel is not before


def test_a_class_of_their_own_is_attached_once_it_is_complete(write):
    text = KERNEL.replace('@triton.autotune(CONFIGS, key=["n"])', "")
    write(
        {
            "one.py": text
            + """
class Cached(triton.runtime.Autotuner):
    def __init__(self, *given):
        super().__init__(*given)
        self.pre_hook = print
        self.fails = 0

kernel = Cached(kernel, kernel.arg_names, CONFIGS, ["n"], None, None)
"""
        }
    )
    attach_packages(("one",))
    kernel = importlib.import_module("one").kernel
    assert is_attached(kernel)
    assert kernel.pre_hook is print
    foretune.detach(kernel)
    assert not is_attached(kernel)
    assert kernel.fails == 0


def test_an_import_that_raises_raises_the_same_and_may_be_repeated(write):
    write({"one/__init__.py": "", "one/ops.py": KERNEL + "\nimport one_dependency\n"})
    attach_packages(("one",))
    with pytest.raises(ModuleNotFoundError, match="one_dependency"):
        importlib.import_module("one.ops")
    write({"one_dependency.py": ""})
    assert is_attached(importlib.import_module("one.ops").kernel)


def test_attaching_twice_is_attaching_once(write):
    write({"one.py": KERNEL})
    attach_packages(("one",))
    created, n_finders = Autotuner.__init__, len(sys.meta_path)
    kernel = importlib.import_module("one").kernel
    there = Attachment.of(kernel)
    attach_packages(("one",))
    attach_packages(("one", "json"))
    assert Autotuner.__init__ is created
    assert len(sys.meta_path) == n_finders
    assert Attachment.of(kernel) is there


def test_calls_of_attach_go_before_the_variable(write):
    write({"one.py": KERNEL})
    attach_packages(("one",))
    kernel = importlib.import_module("one").kernel
    there = Attachment.of(kernel)
    with foretune.attached([kernel]) as tuners:
        assert tuners == []
    assert Attachment.of(kernel) is there
    foretune.attach(kernel, k=3)
    assert Attachment.of(kernel) is not there
    with pytest.raises(foretune.ForetuneError, match="is attached already"):
        foretune.attach(kernel)
    foretune.detach(kernel)
    assert not is_attached(kernel)


def test_kernels_of_foretune_autotune_are_left_alone(write):
    write({"one.py": "import foretune\n" + KERNEL.replace("triton.autotune", "foretune.autotune")})
    attach_packages(("one",))
    assert not is_attached(importlib.import_module("one").kernel)


def test_the_autotuner_that_dynamo_makes_for_a_graph_is_left_alone(write, monkeypatch):
    torch = pytest.importorskip("torch")
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    pruned = 'key=["n"], prune_configs_by={"early_config_prune": lambda configs, named, **given: configs[:1]}'
    write({"one.py": KERNEL.replace('key=["n"]', pruned)})
    attach_packages(("one",))
    kernel = importlib.import_module("one").kernel
    traced = []

    def backend(graph, inputs):
        found = [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
        traced.extend(kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in found)
        return lambda *_: (torch.zeros(1),)

    def call(x):
        kernel[(4,)](x, x.shape[0])
        return x + 1

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)  # there is no GPU here
    torch._dynamo.reset()
    with use_stub_driver(foretune.DeviceSpec.named("h200")):
        torch.compile(call, backend=backend, fullgraph=True)(torch.zeros(64))
    (dynamos,) = traced
    assert dynamos is not kernel
    assert len(dynamos.configs) == 1
    assert not is_attached(dynamos)
    assert is_attached(kernel)


def test_threads_that_create_kernels_at_once_attach_each(write):
    write({"one.py": KERNEL})
    attach_packages(("one",))
    one = importlib.import_module("one")
    made: list[Autotuner] = []
    started = threading.Barrier(8)

    def make():
        started.wait()
        made.append(triton.autotune(one.CONFIGS, ["n"])(one.kernel.fn))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(is_attached, made))
    assert len(made) == 8


def test_the_signature_that_dynamo_reads_stays():
    before = inspect.signature(Autotuner.__init__)
    attach_packages(("json",))
    assert inspect.signature(Autotuner.__init__) == before
    assert hasattr(Autotuner.__init__, "__wrapped__")


def test_in_mode_off_nothing_is_changed(write, monkeypatch):
    write({"one.py": KERNEL})
    monkeypatch.setenv("FORETUNE_MODE", "off")
    before, finders = Autotuner.__init__, list(sys.meta_path)
    attach_packages(("one", "no_such_package"), children=True)
    assert Autotuner.__init__ is before
    assert sys.meta_path == finders
    assert not is_attached(importlib.import_module("one").kernel)


def test_trouble_with_a_kernel_is_one_warning_and_the_kernel_is_created(write, monkeypatch):
    def fails(tuner):
        raise ZeroDivisionError("ours")

    write({"one.py": KERNEL})
    attach_packages(("one",))
    monkeypatch.setattr(attach, "attach_created", fails)
    with pytest.warns(ForetuneWarning, match="FORETUNE_ATTACH: kernel: ZeroDivisionError: ours: it is not attached"):
        kernel = importlib.import_module("one").kernel
    assert isinstance(kernel, Autotuner)
    assert not is_attached(kernel)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fla,,json", "packages must be names of modules, separated by commas, but one is ''"),
        ("./fla", "but one is './fla'"),
        (" ", "but one is ''"),
    ],
)
def test_a_list_that_names_no_modules_is_refused(text, message, monkeypatch):
    with pytest.raises(foretune.ForetuneError, match=message):
        packages_of(text)
    monkeypatch.setenv("FORETUNE_ATTACH", text)
    with pytest.warns(ForetuneWarning, match=f"FORETUNE_ATTACH: .*{message}: nothing is attached"):
        attach_named()


def test_odd_entries_among_imported_modules_are_passed_over(write, monkeypatch):
    write({"one/__init__.py": "", "one/ops.py": KERNEL})
    monkeypatch.setitem(sys.modules, "one.gone", None)
    monkeypatch.setitem(sys.modules, "one.odd", object())
    kernel = importlib.import_module("one.ops").kernel
    attach_packages(("one",))
    assert is_attached(kernel)


def test_an_invalid_mode_is_one_warning(monkeypatch):
    monkeypatch.setenv("FORETUNE_ATTACH", "json")
    monkeypatch.setenv("FORETUNE_MODE", "quick")
    with pytest.warns(ForetuneWarning, match="FORETUNE_ATTACH: FORETUNE_MODE must be one of .* but got 'quick'"):
        attach_named()


def test_a_bug_of_ours_is_one_warning(monkeypatch):
    monkeypatch.setenv("FORETUNE_ATTACH", "json")
    monkeypatch.setattr(packages, "_wrap", lambda module: 1 / 0)
    with pytest.warns(ForetuneWarning, match="FORETUNE_ATTACH: ZeroDivisionError: .*: nothing is attached"):
        attach_named()


def test_a_package_that_is_not_installed_is_one_warning_and_the_others_are_attached(write):
    write({"one.py": KERNEL})
    with pytest.warns(ForetuneWarning, match="FORETUNE_ATTACH names 'oen', which is not installed: no kernel of it"):
        attach_packages(("oen", "one"))
    assert is_attached(importlib.import_module("one").kernel)


def test_looking_for_a_package_imports_nothing(write):
    write(
        {
            "one/__init__.py": "raise AssertionError('imported')",
            "one/ops.py": "",
            "two/ops/deep.py": "",
            "two/three.py": "",
        }
    )
    for name in ("one", "one.ops", "two", "two.three", "two.ops.deep", "json.decoder", "sys"):
        assert is_installed(name)
    for name in ("oen", "one.opps", "two.four", "one.ops.deep", "sys.path"):
        assert not is_installed(name)
    assert not {"one", "two"} & sys.modules.keys()


def run(code, tmp_path, **environment):
    """Return the JSON that a new process prints."""
    child = subprocess.run(
        [sys.executable, "-W", "always", "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout), child.stderr


def test_importing_foretune_with_the_variable_stays_cheap(tmp_path):
    code = "import foretune, sys, json; print(json.dumps(sorted(sys.modules)))"
    modules, stderr = run(code, tmp_path, FORETUNE_ATTACH="no_such_package,fla")
    assert not {name.partition(".")[0] for name in modules} & {"torch", "triton", "numpy", "fla"}
    assert stderr == ""  # a package may be missing in a process that uses no kernels


def test_the_variable_attaches_when_triton_is_imported_later(tmp_path, write):
    write({"one.py": KERNEL})
    code = """
        import foretune, json, sys, inspect
        import one, triton
        from foretune.runtime.tuning.triton_adapter import Attachment
        spec = sys.modules["triton.runtime.autotuner"].__spec__
        source = inspect.getsource(triton.runtime.Autotuner)
        print(json.dumps([Attachment.of(one.kernel) is not None, type(spec.loader).__name__, source[:15]]))
    """
    seen, stderr = run(code, tmp_path, FORETUNE_ATTACH="one,no_such_package")
    assert seen == [True, "SourceFileLoader", "class Autotuner"]
    assert stderr.count("ForetuneWarning") == 1
    assert "FORETUNE_ATTACH names 'no_such_package', which is not installed: no kernel of it is attached" in stderr


def test_the_log_names_what_is_attached_and_a_package_without_kernels(tmp_path, write):
    write({"one.py": KERNEL})
    code = """
        import foretune, logging
        logging.basicConfig(level="INFO")
        import one
        print(0)
    """
    _, stderr = run(code, tmp_path, FORETUNE_ATTACH="one,json")
    assert stderr.splitlines() == [
        "INFO:foretune:foretune: attached one.kernel",
        "INFO:foretune:foretune: no autotuned kernel of json was created in this process",
    ]

"""`import foretune` is cheap, because every kernel file that uses it pays for it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import foretune
import pytest

HEAVY = ("torch", "triton", "lightgbm", "sklearn", "pandas", "pyarrow", "numpy", "typer", "rich")


def run(code: str, cwd: Path) -> str:
    """What a fresh interpreter prints, started where no checkout is on its path by accident."""
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "statement", ["import foretune", "import foretune; dir(foretune); foretune.DeviceSpec.named('h200')"]
)
def test_the_face_imports_nothing_heavy(statement: str, tmp_path: Path) -> None:
    loaded = run(f"{statement}; import sys; print(*sorted(sys.modules))", tmp_path).split()
    assert not {module.split(".")[0] for module in loaded} & set(HEAVY)


def test_the_face_imports_no_other_module_of_ours(tmp_path: Path) -> None:
    loaded = run("import foretune, sys; print(*sys.modules)", tmp_path).split()
    assert [module for module in loaded if module.startswith("foretune")] == ["foretune"]


@pytest.mark.parametrize("floor", ["datasets", "runtime"])
def test_these_floors_import_neither_torch_nor_lightgbm(floor: str, tmp_path: Path) -> None:
    loaded = run(f"import foretune.{floor}, sys; print(*sorted(sys.modules))", tmp_path).split()
    assert not {module.split(".")[0] for module in loaded} & {"torch", "triton", "lightgbm"}


def test_the_run_time_imports_what_is_asked_of_it(tmp_path: Path) -> None:
    loaded = run("import foretune.runtime as it, sys; it.Mode; print(*sys.modules)", tmp_path).split()
    ours = {module for module in loaded if module.startswith("foretune.")}
    assert {module for module in ours if not module.startswith("foretune.datasets")} == {
        "foretune.runtime",
        "foretune.runtime.arguments",
    }


def test_an_op_imports_no_kernel_that_it_may_not_launch_and_nothing_that_tunes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    loaded = run("import foretune, sys; foretune.grouped_gemm; print(*sys.modules)", tmp_path).split()
    kernels = "foretune.kernels.grouped_gemm.triton_kernels."
    assert {module.removeprefix(kernels) for module in loaded if module.startswith(kernels)} == {
        "launches",
        "tiles",
    }
    assert not {module for module in loaded if module.startswith(("foretune.runtime.tuning.cache", "foretune.collect"))}
    assert "foretune.runtime.pins" not in loaded


def test_an_ops_import_does_not_have_every_module_looked_at(tmp_path: Path) -> None:
    """`inspect` does that for who asks in which module a line is, and remembers the files that it saw."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    code = """
        import inspect, torch, triton, foretune
        for op in ("grouped_gemm", "gated_mlp", "rms_norm_rope", "scaled_gemm"):
            known = set(inspect.modulesbyfile)
            getattr(foretune, op)
            print(len(set(inspect.modulesbyfile) - known))
    """
    assert [int(line) < 3 for line in run(textwrap.dedent(code), tmp_path).split()] == [True] * 4


def test_nothing_is_collected_while_an_op_is_imported(tmp_path: Path) -> None:
    """Beside torch a collection takes as long as all of the import."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    code = """
        import gc, sys, torch, triton, foretune

        class Watch:
            def find_spec(self, name, path, target=None):
                if name.startswith("foretune") and gc.isenabled():
                    print(name)

        sys.meta_path.insert(0, Watch())
        foretune.grouped_gemm
        assert "foretune.kernels.grouped_gemm.op" in sys.modules
    """
    # What switches it off.
    first = ["runtime", "runtime.launching", "runtime.launching.collector", "datasets", "datasets.forking"]
    assert run(textwrap.dedent(code), tmp_path).split() == [f"foretune.{module}" for module in first]


def test_predicting_imports_no_other_family_and_nothing_that_compiles(tmp_path: Path) -> None:
    code = """
        import foretune, sys
        foretune.shortlist("matmul", foretune.Problem.of("matmul", batch=1, m=64, n=512, k=512), "h200", k=1)
        print(*sys.modules)
    """
    loaded = run(textwrap.dedent(code), tmp_path).split()
    assert not {"concurrent.futures", "foretune.runtime.launching.ahead", "foretune.kernels.grouped_gemm"} & {*loaded}


def test_predicting_needs_neither_triton_nor_torch_nor_lightgbm(tmp_path: Path) -> None:
    """A laptop may have none of them: Triton is for Linux alone."""
    code = """
        import sys
        sys.modules |= dict.fromkeys(("torch", "triton", "lightgbm"))  # importing one of these now fails
        import foretune
        problem = foretune.Problem.of("grouped_gemm_fwd", groups=64, rows=8192, n=2048, k=1024)
        print(foretune.shortlist("grouped_gemm_fwd", problem, "h200", k=3).predicted)
    """
    assert run(textwrap.dedent(code), tmp_path) == "True\n"


def test_every_public_name_is_there() -> None:
    assert dir(foretune) == sorted(foretune.__all__)
    for name in foretune.__all__:
        assert getattr(foretune, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tuning'"):
        foretune.tuning  # noqa: B018


def test_a_device_may_be_named_by_its_short_name() -> None:
    problem = foretune.Problem.of("grouped_gemm_fwd", groups=8, rows=256, n=512, k=512)
    by_name = foretune.shortlist("grouped_gemm_fwd", problem, "h200", k=2)
    assert by_name == foretune.shortlist("grouped_gemm_fwd", problem, foretune.DeviceSpec.named("h200"), k=2)


def test_configs_are_fresh_objects_at_every_call() -> None:
    one, other = foretune.configs("grouped_gemm_fwd"), foretune.configs("grouped_gemm_fwd")
    assert [config.all_kwargs() for config in one] == [config.all_kwargs() for config in other]
    assert not {id(config) for config in one} & {id(config) for config in other}
    one[0].kwargs.clear()
    assert foretune.configs("grouped_gemm_fwd")[0].kwargs


@pytest.mark.parametrize("call", [foretune.configs, foretune.prune])
def test_an_unknown_family_is_refused_with_the_known_ones(call: object) -> None:
    with pytest.raises(ValueError, match=r"'gemm'; known: .*grouped_gemm_fwd"):
        call("gemm")  # type: ignore[operator]

"""The examples run: each script, the notebook, and the contract of each family."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "kernels" / "examples"


def printed(*arguments: str, **variables: str) -> str:
    """Run a Python in the folder of the examples, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORETUNE_", "TRITON_"))}
    run = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, env=kept | variables, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return run.stdout


def test_softmax_on_cpu_prunes_to_four() -> None:
    assert "85 configs -> 4 timed; chosen: BLOCK: 2048" in printed("softmax_on_cpu.py")


def test_prune_matmul_times_8_of_360() -> None:
    assert "timed 8 of 360 - chosen: BM: " in printed("prune_matmul.py")


@pytest.mark.parametrize(("script", "able"), [("in_place.py", "19 of 19"), ("attention.py", "48 of 54")])
def test_kernels_are_compiled_without_a_gpu(script: str, able: str) -> None:
    told = printed(script)
    assert f"on NVIDIA H200: {able} configs can run" in told
    assert "lines of PTX" in told


@pytest.mark.slow
def test_new_gpu_prints_the_regret_before_and_after() -> None:
    before, after = printed("new_gpu.py").splitlines()
    assert before.startswith("before: ")
    assert after.startswith("after: ")


@pytest.mark.slow
def test_inductor_compiles_on_the_cpu() -> None:
    assert "torch.Size([16, 64])" in printed("inductor.py")


def test_families_keep_the_contract() -> None:
    # As the command `pytest` does, without the current folder on the path (from Python 3.11).
    options = {"PYTHONSAFEPATH": "1", "TRITON_INTERPRET": "1"}
    told = printed("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_families.py", **options)
    assert " passed" in told
    assert "failed" not in told


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    notebook = nbformat.read(EXAMPLES / "softmax.ipynb", 4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    *_, last = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert "BLOCK=2048" in last["text"]

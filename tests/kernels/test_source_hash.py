"""The hash of a family's kernels: of all that runs, and of nothing else."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from foretune import datasets
from foretune.datasets.contents import kernel_sources, other_sources, since
from foretune.kernels import find_family, warp_jobs
from foretune.kernels.grouped_gemm.triton_kernels import (
    dw,
    dw_map,
    gemm,
    ragged,
    ragged_boxes,
    sorting,
    specialized_dw,
    specialized_gemm,
    tiles,
)
from foretune.runtime.launching.source_hash import structure, undisturbed
from grouped import DW, DX, FAMILIES, FORWARD
from triton.runtime.jit import JITFunction

MODULES = (dw, dw_map, gemm, ragged, ragged_boxes, sorting, specialized_dw, specialized_gemm, tiles)
MODULES += (warp_jobs,)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


#: Whose kernels are ours: an engine need not be here, and Inductor takes seconds to import.
OURS = ("gated_mlp", "grouped_gemm_dw", "grouped_gemm_fwd", "matmul", "rms_norm_rope_fwd", "scaled_gemm")


def test_the_source_hash_is_the_same_in_every_process():
    script = f"from foretune.kernels import find_family; print([find_family(n).source_hash() for n in {OURS}])"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([find_family(name).source_hash() for name in OURS])


@pytest.mark.parametrize("name", OURS)
def test_shipped_data_are_of_todays_kernels(name):
    """Whether their hashes were recorded before or after `hash_of_kernel` got its second part."""
    family = find_family(name)
    manifests = [json.loads(path.read_text()) for path in Path(datasets.__file__).parent.glob("*/dataset.json")]
    recorded = {source for one in manifests for source in kernel_sources(one["provenance"], name)}
    assert recorded
    recorded = {since(family.kernel_changes, source)[0] for source in recorded}
    assert not other_sources(recorded, family.source_hash())


def kernels_of(family):
    """(module, name) of every kernel that a launch runs or calls, found by the names in their sources."""
    homes = {
        kernel: (module, name)
        for module in MODULES
        for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction) and kernel.fn.__module__ == module.__name__
    }
    besides = [dw.sum_partials_kernel, sorting.sorted_rows_kernel, specialized_dw.specialized_dw_kernel]
    besides += [dw_map.dw_map_kernel]
    besides = besides if family is DW else [specialized_gemm.specialized_gemm_kernel]
    found, left = set(), [family.kernel()[0], tiles.tile_map_kernel, *besides]
    while left:
        kernel = left.pop()
        if kernel not in found:
            found.add(kernel)
            names = set(re.findall(r"\w+", kernel.src)) & kernel.fn.__globals__.keys()
            left += [
                kernel.fn.__globals__[name] for name in names if isinstance(kernel.fn.__globals__[name], JITFunction)
            ]
    return {homes[kernel] for kernel in found if kernel in homes}


@every_family
def test_the_source_hash_changes_with_the_source_of_every_kernel_that_runs(family, monkeypatch):
    before, used = family.source_hash(), kernels_of(family)
    assert {name for _, name in used} > {"tile_map_kernel", "tile_position", "ragged_descriptor", "clamped"}
    for module, name in used:
        changed = triton.jit(getattr(module, name).fn)
        changed._unsafe_update_src(changed.src + "\n    pass\n")
        with monkeypatch.context() as patch:
            patch.setattr(module, name, changed)
            assert family.source_hash() != before, name
    assert family.source_hash() == before


def test_the_source_hash_is_that_of_what_a_kernel_computes(monkeypatch):
    """Not of its comments and line breaks: a dataset stays one of this kernel when somebody explains it better."""
    before = DW.source_hash()
    changed = triton.jit(dw.store_partial.fn)
    changed._unsafe_update_src(changed.src.replace("out, slot, m,", "out,  # where\n    slot, m,") + "    # the end\n")
    monkeypatch.setattr(dw, "store_partial", changed)
    assert DW.source_hash() == before


def test_the_kernels_of_one_family_do_not_change_the_hash_of_another(monkeypatch):
    hashes = {family: family.source_hash() for family in FAMILIES}
    assert hashes[FORWARD] == hashes[DX] != hashes[DW]
    changed = triton.jit(dw.grouped_gemm_dw_kernel.fn)
    changed._unsafe_update_src(changed.src + "\n    pass\n")
    monkeypatch.setattr(dw, "grouped_gemm_dw_kernel", changed)
    assert [family.source_hash() == hashes[family] for family in FAMILIES] == [True, True, False]


def test_a_thread_that_parses_at_the_same_time_changes_nothing(monkeypatch):
    """Python 3.11's parser counts the depth of both in one place: "AST constructor recursion depth mismatch"."""
    source, parse, failures = "def f(x):\n    return x + 1", ast.parse, [SystemError("depth mismatch")] * 5

    def disturbed(text):
        if failures:
            raise failures.pop()
        return parse(text)

    expected = structure(source)
    monkeypatch.setattr(ast, "parse", disturbed)
    assert structure(source) == expected
    assert not failures


def test_another_system_error_is_raised_at_once():
    calls = []

    def broken():
        calls.append(1)
        raise SystemError("returned NULL without setting an exception")

    with pytest.raises(SystemError, match="returned NULL"):
        undisturbed(broken)
    assert len(calls) == 1

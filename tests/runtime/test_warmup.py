"""`warm_up`: binaries compiled ahead of a run, for problems from a file."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import foretune
import numpy as np
import pytest
import triton
import triton.language as tl
from commands import call, words
from foretune.datasets import ForetuneError, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.model import Bundle
from foretune.runtime import TritonFamily, use_stub_driver
from foretune.runtime.facts.prior import Prior
from foretune.runtime.launching.kernel import are_kept_arguments, stand_ins
from foretune.runtime.tuning.cache.known import known_kernels
from foretune.runtime.tuning.launches import autotuners_named
from foretune.runtime.tuning.warmup import WarmedUp, problems_from_csv, warm_up, warm_up_tuned

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]


@triton.jit
def scale_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


class Scale(TritonFamily):
    name, kernel, output = "scale", scale_kernel, "y_ptr"
    dims_from = {"n": "n"}
    dtypes = ("fp32", "fp16")
    configs = (KernelConfig.of(BLOCK=64), KernelConfig.of(BLOCK=100))  # Triton has no range of 100
    ranges = {"n": (1, 4096)}

    def arguments(self, problem, where):
        x = torch.ones(problem["n"], device=where)
        return {"x_ptr": x, "y_ptr": x, "n": problem["n"]}

    def grid(self, problem, config):
        return (triton.cdiv(problem["n"], config["BLOCK"]),)

    def eager(self, arguments):
        return 2 * arguments["x_ptr"]


def _shapes(tmp_path, text):
    path = tmp_path / "shapes.csv"
    path.write_text(text)
    return path


def test_each_binary_is_compiled_once_and_what_fails_is_said(toy, monkeypatch):
    # As if its source said that all configs are equally fast.
    monkeypatch.setattr(Prior, "log_slowdowns", lambda *given: np.zeros(len(given[3])))
    problems = [Problem.of("scale", n=n, dtype="fp32") for n in (1024, 2048, 1000)]
    with use_stub_driver(toy.H200):
        warmed = warm_up(Scale(), problems, toy.H200, k=2)
        again = warm_up(Scale(), problems, toy.H200)
    assert (warmed.problems, warmed.binaries) == (3, 2)  # 1024 and 2048 are multiples of 16, 1000 is not
    assert len(warmed.failed) == 2
    assert all(text.startswith("BLOCK=100") for text in warmed.failed)
    assert again.failed == ()


def test_problems_come_from_a_file_each_once(tmp_path):
    path = _shapes(tmp_path, "dtype, n\n,64\nfp16,64\n\nfp32,64\n")
    assert problems_from_csv(path, Scale()) == [Problem.of("scale", n=64, dtype=d) for d in ("fp32", "fp16")]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = _shapes(tmp_path, "\ufeffn,dtype\n 64 ,fp16\n")
    assert problems_from_csv(path, Scale()) == [Problem.of("scale", n=64, dtype="fp16")]


def test_a_column_may_be_left_out_that_has_a_default(tmp_path):
    path = _shapes(tmp_path, "m,n,k\n8,16,32\n")
    assert problems_from_csv(path, find_family("matmul")) == [Problem.of("matmul", batch=1, m=8, n=16, k=32)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have the columns n, and may have dtype and flags .separated by spaces., but lacks n"),
        ("m,n\n1,2\n", "but has 'm'"),
        ("n,n\n1,2\n", "but has a column twice"),
        ("n\nmany\n", "shapes.csv', line 2: column n must be an integer between 0 and 1099511627776 but got 'many'"),
        ("n\n1\n1,2\n", r"shapes.csv', line 3: a row must have 1 values \(n\) but has 2: '1,2'"),
        ("n,dtype\n1\n", r"line 2: a row must have 2 values \(n, dtype\) but has 1: '1'"),
        ("n\n-1\n", "line 2: column n must be an integer between 0 and 1099511627776 but got '-1'"),
        ("n\n1.5\n", "line 2: column n must be .* but got '1.5'"),
        ("n,dtype\n,fp32\n", "line 2: column n must be .* but got ''"),
        (f"n\n{'9' * 5000}\n", "line 2: column n must be "),
        ('n,flags\n1,"\n"\n\nmany,\n', "line 5: column n must be .* but got 'many'"),  # a quoted line break
        ("n,dtype\n1,int3\n", "line 2: dtype must be one of"),
        ("n,flags\n1,odd\n", "line 2: odd is not a flag of scale"),
        ("n,flags\n1,odd;even\n", "line 2: column flags must have flags separated by spaces but has 'odd;even'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, why):
    with pytest.raises(ForetuneError, match=why):
        problems_from_csv(_shapes(tmp_path, text), Scale())


def test_what_cannot_be_warmed_up_is_named(tmp_path, toy):
    with pytest.raises(ForetuneError, match="toy only predicts"):
        warm_up(toy.ToyFamily(), [], toy.H200)
    with pytest.raises(ForetuneError, match="there are no problems of scale"):
        warm_up(Scale(), [], toy.H200)
    with pytest.raises(ForetuneError, match="cannot be read"):
        problems_from_csv(tmp_path / "nothing.csv", Scale())
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ForetuneError, match=r"pipe\.csv' cannot be read: it is a pipe, not a regular file"):
        problems_from_csv(tmp_path / "pipe.csv", Scale())


def test_the_command_fills_triton_s_cache_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    path = _shapes(tmp_path, "groups,rows,n,k\n8,256,512,512\n")
    result = call("warmup grouped_gemm_fwd --device h200 --json --shapes", path)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) | {"device": ""} == {
        "family": "grouped_gemm_fwd",
        "device": "",
        "problems": 1,
        "binaries": 1,
        "failed": [],
    }
    assert any(name.endswith(".cubin") for _, _, names in os.walk(tmp_path / "triton") for name in names)


def test_the_bundle_that_predicts_may_be_named(tmp_path):
    path = _shapes(tmp_path, "groups,rows,n,k\n8,256,512,512\n")
    Bundle({}, "0.1.0").save(tmp_path / "empty")
    result = call("warmup grouped_gemm_fwd --device h200 --shapes", path, "--bundle", tmp_path / "empty")
    assert result.exit_code == 1
    assert "the bundle has no family 'grouped_gemm_fwd'" in result.stderr
    result = call("warmup some.kernel --device h200 --bundle", tmp_path / "empty")
    assert result.exit_code == 2
    assert "needs a kernel family, whose configs a bundle predicts" in words(result.output)


def test_the_problems_of_a_dataset_may_be_taken(tmp_path, monkeypatch):
    import stores
    from foretune.runtime.tuning import warmup

    taken = []
    monkeypatch.setattr(
        warmup, "warm_up", lambda family, problems, **more: taken.append(problems) or WarmedUp("", "", 1, 1, ())
    )
    mine = [Problem.of("grouped_gemm_fwd", groups=2, rows=64, n=64, k=64, dtype="bf16")]
    stores.write(tmp_path / "log", problems=[*mine, Problem.of("another", n=8)])
    path = _shapes(tmp_path, "groups,rows,n,k\n2,64,64,64\n4,64,64,64\n")
    assert call("warmup grouped_gemm_fwd --device h200 --data", tmp_path / "log", "--shapes", path).exit_code == 0
    assert call("warmup grouped_gemm_fwd --device h200 --data", tmp_path / "log").exit_code == 0
    assert taken == [problems_from_csv(path, find_family("grouped_gemm_fwd")), mine]


def test_the_command_wants_to_know_which_problems():
    result = call("warmup grouped_gemm_fwd --device h200")
    assert result.exit_code == 2
    assert "give problems with --shapes or --data" in result.output


@pytest.mark.parametrize("name", ["grouped_gem", "no/such"])
def test_what_is_no_family_and_no_module_is_named_with_the_families(name, tmp_path):
    result = call(f"warmup {name} --device h200 --shapes", _shapes(tmp_path, "n\n8\n"))
    assert result.exit_code == 1
    assert "known: fused_moe" in result.stderr


TUNED = """
import foretune, triton
import triton.language as tl


@triton.jit
def fill(x_ptr, n, rows, bias, SCALE: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.full((BLOCK,), SCALE + rows, TYPE), mask=None if EVEN else at < n)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32)]
kernel = triton.heuristics({"EVEN": lambda call: call["n"] % call["BLOCK"] == 0})(fill)
options = {"configs": CONFIGS, "key": ["n"], "do_bench": lambda run, quantiles: [1.0] * 3}
attached, ours = triton.autotune(**options)(kernel), foretune.autotune(**options)(kernel)


@triton.autotune([triton.Config({"BLOCK": block}) for block in (16, 32)], key=["family"], do_bench=options["do_bench"])
@triton.jit
def another(x_ptr, family, dtype, BLOCK: tl.constexpr):
    tl.store(x_ptr + family, BLOCK + dtype)
"""


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Writes a module with kernels, and imports it as another process would."""
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "foretune"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tuned_package.py").write_text(TUNED)

    def imported():
        sys.modules.pop("tuned_package", None)
        import tuned_package

        return tuned_package

    yield imported
    sys.modules.pop("tuned_package", None)


def _launch(kernel, n, x):
    kernel[(triton.cdiv(n, 16),)](x, n, rows=1, bias=None, SCALE=2.0, TYPE=tl.bfloat16)


@pytest.mark.parametrize("whose", ["attached", "ours"])
def test_what_was_tuned_is_compiled_ahead_in_another_process(tuned, toy, tmp_path, monkeypatch, whose):
    x, hits = torch.zeros(128, dtype=torch.bfloat16), []
    launches = ((64, x), (65, x), (33, x[1:]))  # other binaries: of 16, of none, and not aligned

    def run():
        kernel = getattr(tuned(), whose)
        with use_stub_driver(toy.H200), foretune.attached([kernel] if whose == "attached" else []):
            for n, data in launches:
                _launch(kernel, n, data)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    run()
    (known,) = known_kernels("tuned_package.fill")
    assert [launch["key"] for one in known.problems for launch in one.launches] == [
        [n, "torch.bfloat16"] for n, _ in launches
    ]  # as Triton's own cache has it
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    tuned()
    result = call("warmup tuned_package.fill --device h200 --json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) | {"device": ""} == {
        "family": "tuned_package.fill",
        "device": "",
        "problems": 3,
        "binaries": 3,
        "failed": [],
    }
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **seen: hits.append(seen["cache_hit"]))
    run()
    assert hits == [True] * 3


def _tune(tuned, toy, *sizes):
    """Attached; what compiles is in `TRITON_CACHE_DIR`."""
    x, kernel = torch.zeros(8192, dtype=torch.bfloat16), tuned().attached
    with use_stub_driver(toy.H200), foretune.attached([kernel]):
        for n in sizes:
            _launch(kernel, n, x)


@pytest.mark.parametrize("whence", ["a file", "a log"])
def test_launches_like_those_that_were_tuned_are_compiled_ahead(tuned, toy, tmp_path, monkeypatch, whence):
    """Of 128 and 129, others than were tuned, with the configs that their run will time first."""
    hits = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    if whence == "a log":
        monkeypatch.setenv("FORETUNE_LOG", str(tmp_path / "log"))
        _tune(tuned, toy, 128, 129)
        monkeypatch.delenv("FORETUNE_LOG")
        call("cache clear")
    _tune(tuned, toy, 64, 65)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    tuned()
    told = ["--shapes", _shapes(tmp_path, "n\n128\n129\n")] if whence == "a file" else ["--data", tmp_path / "log"]
    result = call("warmup tuned_package.fill --device h200 --json", *told)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["problems"], said["binaries"], said["failed"]) == (2, 4, []), said["failed"]
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **seen: hits.append(seen["cache_hit"]))
    _tune(tuned, toy, 128, 129)
    assert len(hits) >= 4
    assert all(hits)


def test_of_a_kernel_that_was_tuned_the_predicted_configs_are_compiled(tuned, toy, tmp_path):
    _tune(tuned, toy, *range(64, 192, 16))
    near, far = (_shapes(tmp_path, f"n\n{text}\n").rename(tmp_path / text[:3]) for text in ("100\n101", "5000"))
    with use_stub_driver(toy.H200):
        assert warm_up_tuned("tuned_package.fill", toy.H200, shapes=near).binaries == 4  # a search starts with two
        assert warm_up_tuned("tuned_package.fill", toy.H200, shapes=near, k=2).binaries == 4
        assert warm_up_tuned("tuned_package.fill", toy.H200, shapes=far).binaries == 2


def test_a_row_is_otherwise_like_the_nearest_launch_whatever_its_arguments_are_called(
    tuned, toy, tmp_path, monkeypatch
):
    from foretune.runtime.tuning import warmup

    kernel, x, compiled = tuned().another, torch.zeros(8), set()
    monkeypatch.setattr(warmup, "_compile_known", lambda kernel, given, config: compiled.add(tuple(given.items())[1:]))
    with use_stub_driver(toy.H200), foretune.attached([kernel]):
        for family, dtype in ((32, 1), (4096, 32), (2048, 7)):
            kernel[(1,)](x, family, dtype)
    warm_up_tuned("tuned_package.another", toy.H200, shapes=_shapes(tmp_path, "family\n48\n16\n4080\n"))
    assert compiled == {(("family", n), ("dtype", dtype)) for n, dtype in ((48, 1), (16, 1), (4080, 32))}
    with pytest.raises(ForetuneError, match=r"line 2: .*-1"):
        warm_up_tuned("tuned_package.another", toy.H200, shapes=_shapes(tmp_path, "family,dtype\n-1,2\n"))


def test_a_logged_launch_of_another_kind_is_named(tuned, toy):
    _tune(tuned, toy, 64)
    (known,) = known_kernels("tuned_package.fill")
    (seen,) = known.problems
    like, other = (replace(seen.problem, flags=(*seen.problem.flags, *more)) for more in ((), ("bias",)))
    with use_stub_driver(toy.H200):
        warmed = warm_up_tuned("tuned_package", toy.H200, logged=[like, other, Problem.of("another", n=8)])
    assert (warmed.problems, warmed.binaries) == (2, 1)
    assert warmed.failed == (f"{other}: no launch of its dtypes and flags is known",)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "tuned_package.fill",
            "m\n8\n",
            "a column for each argument that changes, each once, among n, rows, but has 'm'",
        ),
        ("tuned_package.fill", "n,n\n8,8\n", "each once, among n, rows, but has 'n, n'"),
        ("tuned_package.fill", "n\n", "must have a line for each launch but has none"),
        ("tuned_package.fill", "", "must have a line for each launch but has none"),
        ("tuned_package.fill", "n\n8\nx\n", "line 3: column n must be an integer between 0 and .* but got 'x'"),
        ("tuned_package.fill", "n\n-8\n", "line 2: .*-8"),
        ("tuned_package.fill", "n\n8,8\n", r"line 2: a row must have 1 values \(n\) but has 2: '8,8'"),
        ("tuned_package", "n\n8\n", "the shapes of one kernel, but 'tuned_package' has 2 kernels"),
        ("json", "n\n8\n", "'json' is not an autotuned kernel, nor a module that has one"),
    ],
)
def test_shapes_that_are_none_of_a_kernels_are_refused(tuned, toy, tmp_path, name, text, said):
    _tune(tuned, toy, 64)
    with pytest.raises(ForetuneError, match=said):
        warm_up_tuned(name, toy.H200, shapes=_shapes(tmp_path, text))


def test_kernels_of_the_working_directory_are_found(tmp_path, monkeypatch):
    """As in a console script, whose `sys.path` does not have it."""
    (tmp_path / "of_this_folder.py").write_text(
        "import triton\n\n\n@triton.autotune([triton.Config({})], [])\n@triton.jit\ndef kernel(x):\n    pass\n\n\n"
        "tuned = kernel\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != ""])
    assert autotuners_named("of_this_folder.kernel") == autotuners_named("of_this_folder.tuned")
    assert len(autotuners_named("of_this_folder")) == 1


def test_what_cannot_be_compiled_ahead_of_a_package_is_named(tuned, toy, tmp_path):
    tuned()
    with pytest.raises(ForetuneError, match="no launch is known that was tuned"):
        warm_up_tuned("tuned_package", toy.H200)
    with pytest.raises(ForetuneError, match=r"there is no module or kernel 'no_such_package.kernel'"):
        warm_up_tuned("no_such_package.kernel", toy.H200)
    (tmp_path / "broken_package.py").write_text("import no_such_package")
    with pytest.raises(ForetuneError, match="'broken_package' cannot be imported: ModuleNotFoundError"):
        warm_up_tuned("broken_package", toy.H200)


@pytest.mark.parametrize(
    "kept",
    [
        {"x": {"tensor": 3, "aligned": True}},
        {"x": {"tensor": "float32", "aligned": "yes"}},
        {"x": {}},
        {"x": [1]},
        {"x": float("nan")},
        {"x": "y" * 10_000},
        {1: 2},
        [],
    ],
)
def test_what_a_file_says_of_arguments_is_not_taken_on_trust(kept):
    assert not are_kept_arguments(kept)


@pytest.mark.parametrize("value", [{"tensor": "save", "aligned": True}, {"triton": "jit"}, {"triton": "load"}])
def test_a_type_that_is_none_compiles_nothing(value):
    with pytest.raises(ForetuneError, match="have a dtype of torch or Triton"):
        stand_ins({"x": value})

"""`foretune run`: a program runs as `python` runs it, with packages attached, also in its child processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from py_compile import compile
from typing import Any
from zipfile import ZipFile

import autotuned_kernel
import pytest
from commands import call, words
from foretune.kernels.commands import running
from foretune.runtime.pin_file import PinFile

#: A module with an autotuned kernel, and a function that returns whether it is attached, and the environment.
KERNEL = (
    autotuned_kernel.KERNEL
    + """
def state():
    import os, sys
    hooks = sys.modules.get("foretune.runtime.tuning.triton_adapter")
    attached = hooks is not None and hooks.Attachment.of(kernel) is not None
    return [attached, *(os.environ.get(f"FORETUNE_{name}") for name in ("ATTACH", "MODE", "PIN", "LOG", "USE"))]
"""
)
Write = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files into a folder, and return it."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return tmp_path

    return write


def python(*given: object, cwd: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, in a folder."""
    hidden = {f"FORETUNE_{name}" for name in ("MODE", "ATTACH", "USE", "LOG", "PIN")}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    settings = {"capture_output": True, "text": True, **settings}
    settings["env"] = environment | {"PYTHONDONTWRITEBYTECODE": "1"} | settings.get("env", {})
    return subprocess.run([sys.executable, *map(str, given)], cwd=cwd, **settings)


def foretune_run(*given: object, cwd: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "foretune", "run", *given, cwd=cwd, **settings)


def assert_as_python(given: list[str], cwd: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a program both ways, compare all that can be seen from outside, and return what `python` did."""
    expected = python(*given, cwd=cwd, **settings)
    found = foretune_run(*given, cwd=cwd, **settings)
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, expected.stderr, expected.returncode)
    return expected


SEES = """
    import json, sys, __main__
    from helper import HELP
    here = {name: str(globals().get(name)) for name in ("__name__", "__file__", "__package__", "__doc__", "__cached__")}
    here |= {"argv": sys.argv, "path": sys.path[0], "spec": getattr(__spec__, "name", None)}
    here |= {"loader": type(__loader__).__name__, "main": vars(__main__) is globals(), "help": HELP}
    here |= {"builtins": str(__builtins__), "hook": sys.excepthook is sys.__excepthook__}
    print(json.dumps(here))
"""
OPTIONS = ["--json", "", "--mode", "off", "--help", "--", "-m", "x y"]


def test_a_script_sees_what_it_sees_under_python(write: Write) -> None:
    folder = write({"code/train.py": f"'''Its text.'''\n{textwrap.dedent(SEES)}", "code/helper.py": "HELP = 1"})
    (folder / "link.py").symlink_to(folder / "code" / "train.py")
    for script in ("code/train.py", str(folder / "code" / "train.py"), "link.py"):
        seen = json.loads(assert_as_python([script, *OPTIONS], folder).stdout)
        assert (seen["argv"], seen["path"]) == ([script, *OPTIONS], str(folder / "code"))


def test_a_module_a_folder_and_an_archive_see_what_they_see_under_python(write: Write) -> None:
    folder = write({"pack/__init__.py": "", "pack/train.py": SEES, "helper.py": "HELP = 1"})
    write({"pack/__main__.py": SEES, "app/__main__.py": SEES, "app/helper.py": "HELP = 2"})
    with ZipFile(folder / "app.zip", "w") as archive:
        for name in ("__main__.py", "helper.py"):
            archive.write(folder / "app" / name, name)
    for given in (["-m", "pack.train"], ["-m", "pack"], ["app"], ["app.zip"]):
        assert_as_python([*given, *OPTIONS], folder)


def test_a_compiled_script_runs(write: Write) -> None:
    folder = write({"train.py": SEES, "helper.py": "HELP = 1"})
    compile(str(folder / "train.py"), cfile=str(folder / "train.pyc"), doraise=True)
    assert_as_python(["train.pyc", *OPTIONS], folder)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has -P")
def test_a_safe_path_stays_one(write: Write) -> None:
    folder = write({"train.py": "import sys; print(sys.path)", "pack/__init__.py": "", "pack/train.py": "print(1)"})
    assert_as_python(["train.py"], folder, env={"PYTHONSAFEPATH": "1"})
    assert_as_python(["-m", "pack.train"], folder, env={"PYTHONSAFEPATH": "1"})


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "raise SystemExit('a message')",
        "import atexit; value = 7; atexit.register(lambda: print(value, __name__)); exit()",
        "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as e:\n    raise RuntimeError('two') from e",
        "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_filename)\n1 / 0",
        "raise OSError(2, 'theirs')",
        "def f(:\n",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import warnings; warnings.warn('theirs'); print(warnings.filters, warnings.showwarning.__module__)",
        "import threading; threading.Thread(target=lambda: print(threading.main_thread().name)).start()",
        "import pickle\nclass Theirs: pass\nprint(type(pickle.loads(pickle.dumps(Theirs()))) is Theirs)",
        "import no_such_module",
        "import sys; sys.stdout.write('-'.join(sys.argv)); sys.stderr.write(sys.stdin.read())",
    ],
)
def test_a_script_ends_as_under_python(code: str, write: Write) -> None:
    assert_as_python(["train.py", "--json"], write({"train.py": code}), input="what it reads")


@pytest.mark.parametrize("code", ["def f():\n    1 / 0\nf()", "import sys; sys.exit(3)", "raise KeyboardInterrupt"])
def test_a_module_ends_as_under_python(code: str, write: Write) -> None:
    assert_as_python(["-m", "train"], write({"train.py": code}))


def test_a_missing_module_is_python_s_message(write: Write) -> None:
    assert assert_as_python(["-m", "no_such_module"], write({})).returncode == 1


def test_ctrl_c_is_the_program_s(write: Write) -> None:
    code = """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("saved")
            raise
    """
    ended = assert_as_python(["train.py"], write({"train.py": code}))
    assert (ended.stdout, ended.returncode) == ("saved\n", -signal.SIGINT)


def test_packages_are_attached_and_the_variables_are_inherited(write: Write) -> None:
    code = """
        import json, subprocess, sys
        from kernels.ops import state
        child = "import os; print([os.environ.get(f'FORETUNE_{n}') for n in ('ATTACH', 'MODE', 'PIN', 'LOG', 'USE')])"
        print(json.dumps([state(), eval(subprocess.check_output([sys.executable, "-c", child]))]))
    """
    folder = write({"kernels/ops.py": KERNEL, "train.py": code, "p.lock": "{}"})
    given = ["--attach", "kernels.ops, json", "--mode", "PREDICT", "--pin", "p.lock", "--log=logged"]
    ran = foretune_run(*given, "train.py", cwd=folder)
    assert ran.stderr == ""
    inside, child = json.loads(ran.stdout)
    expected = ["kernels.ops,json", "predict", str(folder / "p.lock"), str(folder / "logged"), None]
    assert (inside, child) == ([True, *expected], expected)
    assert json.loads(foretune_run("train.py", cwd=folder).stdout) == [[False, *[None] * 5], [None] * 5]
    off = json.loads(foretune_run("--mode", "off", "--attach", "kernels", "train.py", cwd=folder).stdout)
    assert off[0] == [False, "kernels", "off", None, None, None]
    by_variable = foretune_run("train.py", cwd=folder, env={"FORETUNE_ATTACH": "kernels"})
    assert json.loads(by_variable.stdout)[0][:2] == [True, "kernels"]


def test_an_own_kernel_of_the_script_is_attached_as_main(write: Write) -> None:
    folder = write({"train.py": f"{KERNEL}\nprint(state()[0])"})
    assert foretune_run("--attach", "__main__", "train.py", cwd=folder).stdout == "True\n"
    assert foretune_run("--attach", "kernels,json", "train.py", cwd=folder).returncode == 1


CHILDREN = """
    import json, multiprocessing, sys
    from kernels import state

    def grandchild(queue):
        queue.put(state()[0])

    def child(queue, method):
        queue.put(state()[0])
        multiprocessing.get_context(method).Process(target=grandchild, args=(queue,)).start()

    if __name__ == "__main__":
        for method in ("spawn", "forkserver", "fork"):
            queue = multiprocessing.get_context(method).Queue()
            multiprocessing.get_context(method).Process(target=child, args=(queue, method)).start()
            print(method, queue.get(timeout=120), queue.get(timeout=120))
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_child_processes_of_multiprocessing_are_attached(write: Write, as_module: bool) -> None:
    folder = write({"kernels.py": KERNEL, "train.py": CHILDREN})
    given = ["-m", "train"] if as_module else ["train.py"]
    ran = foretune_run("--attach", "kernels", *given, cwd=folder)
    assert ran.stdout.splitlines() == [f"{method} True True" for method in ("spawn", "forkserver", "fork")], ran.stderr
    ran = foretune_run("--attach", "kernels", "--mode", "off", *given, cwd=folder)
    assert ran.stdout.splitlines() == [f"{method} False False" for method in ("spawn", "forkserver", "fork")]


#: A program that compiles a product, in itself or in a child process, and prints how many choices each product keeps.
COMPILES = """
    import multiprocessing, os, sys

    def compiled():
        import torch
        from torch._inductor import config
        with config.patch(max_autotune_gemm_backends="ATEN", force_disable_caches=True):
            kept = []
            if "foretune.kernels.integrations.inductor" in sys.modules or "foretune" in sys.modules:
                from foretune.kernels.integrations.inductor import Limits
                limited = Limits.of_templates
                Limits.of_templates = lambda self, *given: kept.append(self.k) or limited(self, *given)
            torch.compile(lambda x: x @ x)(torch.ones(32, 32))
        print(kept, config.max_autotune_gemm, config.max_autotune_gemm_search_space, flush=True)
        os._exit(0)  # taking torch's modules apart lasts a second

    if __name__ == "__main__":
        if sys.argv[1:] == ["--child"]:
            child = multiprocessing.get_context("spawn").Process(target=compiled)
            child.start()
            child.join()
        else:
            compiled()
"""


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        (["--use", "inductor:3", "train.py"], "[3] True EXHAUSTIVE"),
        (["--use", "inductor:auto", "train.py", "--child"], "['auto'] True EXHAUSTIVE"),
        (["--use", "inductor", "--mode", "off", "train.py"], "[] False DEFAULT"),
    ],
)
def test_inductor_uses_foretune_in_the_program_and_its_children(given: list[str], printed: str, write: Write) -> None:
    folder = write({"train.py": COMPILES})
    ran = foretune_run(*given, cwd=folder)
    assert (ran.stdout, ran.returncode) == (f"{printed}\n", 0), ran.stderr


def test_a_wrong_variable_is_one_warning_when_foretune_is_imported(write: Write) -> None:
    ran = python("-c", "import foretune; print(1)", cwd=write({}), env={"FORETUNE_USE": "keras"})
    assert ran.stdout == "1\n"
    assert ran.stderr.count("FORETUNE_USE: the project must be inductor or inductor:K but is 'keras'") == 1


def test_each_rank_of_torchrun_is_attached(write: Write) -> None:
    pytest.importorskip("torch")
    code = """
        import os, sys
        from kernels import state
        with open(f"rank{os.environ['RANK']}", "w") as file:
            file.write(f"{state()[0]} {os.environ['WORLD_SIZE']} {sys.argv}")
        sys.exit(int(sys.argv[1]))
    """
    folder = write({"kernels.py": KERNEL, "train.py": code})
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    foretune = [sys.executable, "-m", "foretune", "run", "--attach", "kernels", "train.py"]
    for status in (0, 1):
        ran = python(*torchrun, *foretune, status, cwd=folder)
        assert ran.returncode == status, ran.stderr
        wrote = [(folder / f"rank{rank}").read_text() for rank in range(2)]
        expected = f"True 2 ['train.py', '{status}']"
        # The first rank that fails may end the other before it writes.
        assert expected in wrote if status else wrote == [expected] * 2


def test_a_pin_file_is_in_force_in_the_program(write: Write) -> None:
    code = """
        import foretune

        @foretune.tune({"by": [1, 2]})
        def double(number, by=1):
            return number * 2

        print(double(4))
    """
    folder = write({"train.py": code})
    PinFile().save(folder / "empty.lock")
    ran = foretune_run("--pin", "empty.lock", "train.py", cwd=folder)
    assert (ran.stdout, ran.returncode) == ("", 1)
    assert f"{folder / 'empty.lock'} does not cover __main__.double" in ran.stderr
    assert foretune_run("--pin", "empty.lock", "--mode", "off", "train.py", cwd=folder).stdout == "8\n"


def test_a_launch_is_tuned_as_after_attach(write: Write) -> None:
    """With a search, of which the log says how far it is."""
    code = """
        import logging, sys
        import foretune, torch
        from kernels import kernel
        logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
        with foretune.testing.use_stub_device("h200"):
            kernel[lambda meta: (1,)](torch.zeros(64), 64)
        print(len(kernel.configs_timings or ()), kernel.best_config)
    """
    pytest.importorskip("torch")
    folder = write({"kernels.py": KERNEL, "train.py": code})
    cold = {"FORETUNE_CACHE_DIR": str(folder / "choices"), "TRITON_CACHE_DIR": str(folder / "triton")}
    ran = foretune_run("--attach", "kernels", "train.py", cwd=folder, env=cold)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^kernels\.kernel .*2 of 2 configs: ", ran.stdout, re.MULTILINE), ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("2 BLOCK: ")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("run", 2, "Missing argument 'SCRIPT|MODULE'"),
        ("run nope.py --attach fla", 2, "there is no 'nope.py'; for a module, give -m"),
        ("run --attach fla,,x {script}", 2, "packages must be names of modules, separated by commas, but one is ''"),
        ("run --attach ./fla {script}", 2, "but one is './fla'"),
        ("run --use keras {script}", 2, "the project must be inductor or inductor:K but is 'keras'"),
        ("run --use inductor:0 {script}", 2, "length k must be an integer >= 1 but got 0"),
        ("run --mode quick {script}", 2, "mode must be one of off, shortlist, predict, refine but got 'quick'"),
        ("run --pin nope.lock {script}", 2, "there is no file 'nope.lock'"),
        ("run --log {script} {script}", 2, "is a file: name a folder"),
        ("run --lr 1 {script}", 2, "No such option: --lr"),
        ("run --mode= {script} --json", 2, "--mode: is empty: is a shell variable unset?"),
    ],
)
def test_wrong_usage_names_what_is_wrong(line: str, code: int, message: str, write: Write) -> None:
    script = write({"train.py": ""}) / "train.py"
    result = call(line.format(script=script))
    assert result.exit_code == code
    assert message in words(result.stderr)
    assert result.stdout == ""


def test_words_of_the_program_are_not_ours(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "chosen", None)
    script = write({"train.py": ""}) / "train.py"
    assert call(f"run --mode off {script} --attach '' --json --mode x -- -m").exit_code == 0
    assert running.chosen is not None
    assert running.chosen.arguments == ("--attach", "", "--json", "--mode", "x", "--", "-m")
    assert (running.chosen.is_module, dict(running.chosen.environment)) == (False, {"FORETUNE_MODE": "off"})


def test_a_package_that_is_not_installed_is_an_error_before_the_program_runs(write: Write) -> None:
    folder = write({"train.py": "print('runs')", "kernels/__init__.py": "raise AssertionError('imported')"})
    for names, missing in (("jsen", "jsen"), ("json,kernels.opps", "kernels.opps")):
        ran = foretune_run("--attach", names, "train.py", cwd=folder)
        assert (ran.stdout, ran.returncode) == ("", 1)
        assert ran.stderr == f"Error: '{missing}' is not installed, so it cannot be attached\n"
    ran = foretune_run("--attach", "json", "train.py", cwd=folder, env={"FORETUNE_MODE": "quick"})
    assert (ran.stdout, ran.returncode) == ("", 1)
    assert ran.stderr.startswith("Error: FORETUNE_MODE must be one of ")
    assert foretune_run("--attach", "kernels", "train.py", cwd=folder).stdout == "runs\n"


def test_no_heavy_module_is_imported_before_the_program(write: Write) -> None:
    """It may still set variables that such modules read at import."""
    folder = write(
        {"train.py": "import sys; print({m.split('.')[0] for m in sys.modules} & {'torch', 'triton', 'numpy'})"}
    )
    assert foretune_run("--attach", "json", "train.py", cwd=folder).stdout == "set()\n"


def test_the_script_of_the_command_line_does_the_same(write: Write) -> None:
    script = shutil.which("foretune", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("not installed as a script")
    folder = write({"train.py": SEES + "\n    1 / 0", "helper.py": "HELP = 1"})
    expected = python("train.py", cwd=folder)
    found = subprocess.run([script, "run", "train.py"], cwd=folder, capture_output=True, text=True)
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, expected.stderr, 1)


@pytest.mark.slow
def test_the_training_script_prints_the_same_losses_each_way(tmp_path: Path) -> None:
    """`tests/training_on_gpu.py`, whose real models need a GPU."""
    pytest.importorskip("torch")
    script = Path(__file__).parents[1] / "training_on_gpu.py"
    options = ["--train", "gla", "--tiny", "--steps", "2"]
    ways = python(script, *options, cwd=tmp_path), foretune_run("--attach", "torch", script, *options, cwd=tmp_path)
    plain, attached = (json.loads(ran.stdout.splitlines()[-1]) for ran in ways)
    assert plain["losses"] == attached["losses"]
    assert len(plain["seconds"]) == len(attached["seconds"]) == 2


@pytest.mark.parametrize(("model", "package"), [("gla", "fla.models"), ("qwen3_moe", "liger_kernel.transformers")])
def test_the_models_of_the_training_script_can_be_built(model: str, package: str) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    import torch
    from training_on_gpu import model_of

    with torch.device("meta"):
        assert sum(weight.numel() for weight in model_of(model).parameters()) > 2e8

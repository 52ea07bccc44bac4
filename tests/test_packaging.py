"""What pip installs is whole, from a wheel and from an sdist, far from the checkout."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import foretune
import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()  # read as text: Python 3.10 has no tomllib
# What a package contains besides its modules, and that goes missing when package-data forgets it.
DATASETS = {manifest.parent for manifest in (ROOT / "datasets").glob("*/dataset.json")}
DATA_FOLDERS = {ROOT / "datasets" / "devices", ROOT / "model" / "shipped", *DATASETS}

# On a copy, because setuptools leaves its build/ behind; without pip's isolation, which would need an index.
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
USE = """
import foretune, foretune.datasets, pathlib, sys
assert pathlib.Path(foretune.__file__).is_relative_to(sys.argv[1]), foretune.__file__
assert foretune.DeviceSpec.named("h200").sm_count == 132
from foretune.kernels.workloads import load_models
assert load_models()
print(*foretune.datasets.names())
for name in foretune.datasets.names():
    assert foretune.datasets.load(name).families
if foretune.datasets.names():
    foretune.load_bundle()
"""


def packages_on_disk() -> set[str]:
    floors = [path for path in ROOT.iterdir() if path.name not in ("tests", "build") and not path.name.startswith(".")]
    inits = [path.parent.relative_to(ROOT) for floor in floors for path in floor.rglob("__init__.py")]
    return {"foretune", *(".".join(("foretune", *folder.parts)) for folder in inits)}


def shipped_files() -> set[str]:
    """Every file that an install must have, as a path below the root."""
    folders = {ROOT.joinpath(*name.split(".")[1:]) for name in packages_on_disk()} | DATA_FOLDERS
    kinds = (".py", ".pyi", ".csv", ".typed", ".json", ".parquet", ".npz", ".html")
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        if folder.is_dir()
        for path in folder.iterdir()
        if path.suffix in kinds or (folder in DATA_FOLDERS and path.is_file())
    }


def build(kind: str, source: Path, out: Path) -> Path:
    run = subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return out / run.stdout.split()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, under another name than the package's."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made from the sdist: what is missing from either is missing here."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data") if sys.version_info >= (3, 12) else archive.extractall(folder)
    (unpacked,) = folder.iterdir()
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


def pip_install(target: Path, *what: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*command, "--target", str(target), *what], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]


def use(site: Path, home: Path, cwd: Path) -> list[str]:
    """Uses the package installed in `site` from elsewhere; `home` is where its files must lie."""
    run = subprocess.run(
        [sys.executable, "-c", USE, str(home)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout.split()


def test_every_package_on_disk_is_listed() -> None:
    (listed,) = re.findall(r"^packages = \[(.*?)\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r'"(.+?)"', listed)) == packages_on_disk()


def test_the_sdist_has_every_file_that_is_installed(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert shipped_files() <= names
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_the_wheel_has_every_file_and_no_other_top_level_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"foretune/{name}" for name in shipped_files()} <= names
    version = foretune.__version__
    assert {name.split("/")[0] for name in names} == {"foretune", f"foretune-{version}.dist-info"}
    assert not any("/tests/" in name or "__pycache__" in name for name in names)


def test_the_wheel_says_that_it_has_types_and_what_it_runs_on(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "foretune/py.typed" in archive.namelist()
        metadata = email.message_from_bytes(archive.read(f"foretune-{foretune.__version__}.dist-info/METADATA"))
    classifiers = metadata.get_all("Classifier") or []
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    pythons = [tuple(map(int, found)) for one in classifiers for found in re.findall(r"Python :: (\d+)\.(\d+)$", one)]
    first, last = (tuple(map(int, bound.split("."))) for bound in re.findall(r"[\d.]+", metadata["Requires-Python"]))
    assert sorted((first, last)) == [pythons[0], (pythons[-1][0], pythons[-1][1] + 1)]
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_wheel_works_far_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    pip_install(tmp_path / "site", str(wheel))
    assert use(tmp_path / "site", tmp_path / "site", tmp_path) == foretune.datasets.names()
    assert (tmp_path / "site" / "bin" / "foretune").exists()


def test_an_editable_install_works_far_from_the_checkout(source: Path, tmp_path: Path) -> None:
    pip_install(tmp_path / "site", "-e", str(source))
    # pip reads .pth files only in site directories, so this one is made such.
    (finder,) = (tmp_path / "site").glob("__editable___*_finder.py")
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import {finder.stem} as finder; finder.install()\n")
    assert use(tmp_path / "site", source, tmp_path) == foretune.datasets.names()


@pytest.mark.slow
def test_the_bare_install_prunes_a_real_autotuner(wheel: Path, tmp_path: Path) -> None:
    """In a fresh environment, with no more than what `pip install foretune` brings from the index."""
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    constraints = str(ROOT / ".ci" / "constraints.txt")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "-q", "--no-compile", "-c", constraints, str(wheel)]
    installed = subprocess.run(install, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr[-4000:]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        [str(python), str(ROOT / "tests" / "bare.py")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert re.fullmatch(r"\d+ declared, 3 compiled and launched\n", run.stdout)


def test_the_readme_gives_the_commands_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    first, second = re.findall(r"^```sh\n(python3 -m venv .*)\n```$", readme, re.MULTILINE)
    assert "kernels/examples/prune_matmul.py" in first
    assert "'.[test]'" in second
    assert "pytest" in second
    assert all("-c .ci/constraints.txt" in command for command in (first, second))
    assert f"## Run the tests\n\n```sh\n{second}\n```" in readme  # where .ci/run looks for it

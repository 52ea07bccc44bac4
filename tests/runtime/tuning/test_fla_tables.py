"""What the cache knows, as FLA's autotuner reads it: by its own reader where that is installed.

(`pip install --no-deps fla-core==0.6.0`)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import call
from foretune.datasets import ForetuneError, KernelConfig
from foretune.runtime.tuning.cache.exports import export_fla_tables
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache
from remembered import CONFIGS, H100, H200, KERNEL, problem, remember

BEST = {64: CONFIGS[0], 256: CONFIGS[0], 1024: CONFIGS[2], 4096: CONFIGS[4]}
#: The fastest over all four problems, of those that failed on none.
BEST_FOR_ALL = CONFIGS[2]


def as_config(value: dict[str, Any]) -> KernelConfig:
    return KernelConfig.of(**value["kwargs"], **{name: value[name] for name in value if name != "kwargs"})


@pytest.fixture
def fla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """FLA's module that reads such files, alone: the package itself imports the transformers."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("fla-core is not installed")
    (root,) = spec.submodule_search_locations
    monkeypatch.setenv("FLA_CACHE_MODE", "full")
    monkeypatch.setenv("FLA_CONFIG_DIR", str(tmp_path / "tables" / "NVIDIA_H200"))
    place = importlib.util.spec_from_file_location("fla_cache", Path(root) / "ops" / "utils" / "cache.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, "fla_cache", module)
    place.loader.exec_module(module)
    return module


def test_flas_own_reader_finds_the_best_of_each_launch(fla: ModuleType, tmp_path: Path) -> None:
    remember()
    export_fla_tables(tmp_path / "tables")
    for rows, best in BEST.items():
        key = fla.AutotuneKey((rows, 128, "torch.bfloat16", "torch.float32"))
        assert as_config(fla.load_cached_config("softmax_kernel", key)) == best
    unseen = fla.AutotuneKey((5, 128, "torch.float16", "torch.float32"))
    assert as_config(fla.load_cached_config("softmax_kernel", unseen)) == BEST_FOR_ALL
    file = fla.KernelConfigFile.from_file(tmp_path / "tables" / "NVIDIA_H200" / "softmax_kernel.json")
    assert file.kernel_name == "softmax_kernel"
    assert len(file.autotune_entries) == 4


def test_the_folder_is_named_as_fla_names_the_gpu(fla: ModuleType, tmp_path: Path) -> None:
    remember(H100)
    (written,) = export_fla_tables(tmp_path / "tables").files
    assert Path(written).parent.name == fla.sanitize_gpu_name(H100.name)


def test_flas_files_are_what_its_reader_asks_for(tmp_path: Path) -> None:
    """The same without FLA: an entry by the MD5 of the key as compact JSON."""
    remember()
    export_fla_tables(tmp_path)
    table = json.loads((tmp_path / "NVIDIA_H200" / "softmax_kernel.json").read_text())
    assert set(table) == {"kernel_name", "triton_version", "autotune_entries", "default_config"}
    # echo -n '[64,128,"torch.bfloat16","torch.float32"]' | md5sum
    entry = table["autotune_entries"]["adf0d5b04bddfbd4d293432741c06fe0"]
    assert entry["autotune_key"] == [64, 128, "torch.bfloat16", "torch.float32"]
    assert as_config(entry["config"]) == BEST[64]


def test_the_command_writes_them(tmp_path: Path) -> None:
    remember()
    result = json.loads(call(f"cache export {KERNEL} --format fla --json --out", tmp_path / "tables").stdout)
    assert (result["format"], result["launches"]) == ("fla", 4)
    assert all(Path(file).read_text() for file in result["files"])
    assert result["out"] == str(tmp_path / "tables")
    first = [Path(file).read_bytes() for file in result["files"]]
    export_fla_tables(tmp_path / "tables")
    assert [Path(file).read_bytes() for file in result["files"]] == first


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForetuneError, match="there is nothing to export"):
        export_fla_tables(tmp_path)
    ChoiceCache.of(KERNEL, "s1", H200).record(problem(8), CONFIGS[0], None)
    with pytest.raises(ForetuneError, match="there is nothing to export"):
        export_fla_tables(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ForetuneError, match="is a file"):
        export_fla_tables(tmp_path / "file")


HOSTILE = ["../../x", "/abs/x", "..", "日本", "x/../../y", "x" * 190]


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_a_device_or_kernel_is_called_its_tables_lie_in_the_folder(name: str, tmp_path: Path) -> None:
    device = dataclasses.replace(H200, name=name, arch=name)
    remember(device, kernel=f"package.{name}")
    remember(dataclasses.replace(H200, name=f"{name}!", arch=f"{name}!"))
    files = [Path(file) for file in export_fla_tables(tmp_path / "in" / "out").files]
    assert len(set(files)) == 2
    assert all(file.resolve().is_relative_to(tmp_path / "in" / "out") for file in files)
    assert {path for path in (tmp_path / "in").rglob("*") if path.is_file()} == set(files)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "in"}


def test_what_somebody_else_has_in_the_folder_is_not_replaced(tmp_path: Path) -> None:
    remember()
    (path,) = map(Path, export_fla_tables(tmp_path / "out").files)
    before = path.read_text()
    for content in ('{\n    "kernel_name": "softmax_kernel"\n}', '{"name": "mine"}'):
        path.write_text(content)
        with pytest.raises(ForetuneError, match=f"{path.name} is not a table that Foretune wrote for fla"):
            export_fla_tables(tmp_path / "out")
        assert path.read_text() == content
    path.unlink()
    (tmp_path / "elsewhere").write_text(before)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForetuneError, match="nothing is written there"):
        export_fla_tables(tmp_path / "out")
    assert path.is_symlink()

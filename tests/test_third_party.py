"""A package of somebody else's, installed: two kernels, and at most sixty lines each for Foretune to know them.

All of it as its author would: by name, on the command line, in the kernels' own autotuners. No line of Foretune knows
the package. What runs on a GPU is in `third_party/on_gpu.py`.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import foretune
import pytest

HERE = Path(__file__).parent
PACKAGE = HERE / "third_party"
FAMILIES = {"row_softmax": "rowwise_kernels.softmax:RowSoftmax", "layer_norm": "rowwise_kernels.layer_norm:LayerNorm"}


@dataclass(frozen=True)
class Installed:
    """An environment in which pip has installed the package."""

    folder: Path

    def python(self, *arguments: str, given: str = "", **variables: str) -> str:
        """What a Python prints that must end well."""
        path = [self.folder / "target", Path(foretune.__file__).parents[1], HERE]
        own = {"PYTHONPATH": os.pathsep.join(map(str, path)), "TRITON_CACHE_DIR": str(self.folder / "cache")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FORETUNE_", "TRITON_"))}
        run = subprocess.run(
            [sys.executable, *arguments],
            env=kept | own | variables,
            cwd=self.folder,
            input=given,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        return run.stdout

    def foretune(self, *arguments: object) -> str:
        return self.python("-m", "foretune", *map(str, arguments))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(PACKAGE, folder / "source")  # setuptools leaves its build/ behind
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "target")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder / "source")], check=True)
    return Installed(folder)


@pytest.fixture(scope="module")
def data(installed, tmp_path_factory):
    """A collection of both families, times replayed and small problems launched."""
    out = tmp_path_factory.mktemp("collected") / "data"
    installed.python(str(PACKAGE / "replayed.py"), str(out), TRITON_INTERPRET="1")
    return out


@pytest.fixture(scope="module")
def bundle(installed, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "bundle"
    installed.foretune("train", "--data", data, "--out", out)
    return out


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_a_family_is_at_most_sixty_lines(name):
    lines = (PACKAGE / "rowwise_kernels" / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


FIND = """
import json, foretune
from foretune.kernels import find_family
from rowwise_kernels.softmax import RowSoftmax
places = json.loads(input())
found = [[find_family(name), find_family(place)] for name, place in places.items()]
for (name, place), (by_name, by_place) in zip(places.items(), found):
    assert by_name is by_place and by_name.name == name
    assert [c.kwargs for c in foretune.configs(name)] == [c.kwargs for c in foretune.configs(place)]
    assert name in foretune.families()
ours = RowSoftmax()
assert [c.kwargs for c in foretune.configs(ours)] == [c.kwargs for c in foretune.configs("row_softmax")]
assert foretune.prune(ours, k=4).family is ours
assert foretune.prune(RowSoftmax, k=4).family.name == foretune.prune("row_softmax", k=4).family.name
"""


def test_it_is_found_by_name_by_place_and_as_an_object(installed):
    installed.python("-c", FIND, given=json.dumps(FAMILIES))


def test_nothing_that_is_supported_computes_a_wrong_result(data):
    from foretune.datasets import load

    dataset = load(data)
    assert sorted(dataset.families) == sorted(FAMILIES)
    rows = dataset.measurements
    assert set(rows["status"]) == {"ok", "hopeless", "invalid"}
    small = [at for at, case in enumerate(dataset.cases) if case.problem["rows"] * case.problem["columns"] <= 3_000]
    launched = rows[rows["problem"].isin(small) & (rows["status"] == "ok")]
    assert len(launched.groupby(["problem", "config"], observed=True)) > 100
    # The softmax refuses blocks that are shorter than a row, and so says which problem each config can run.
    for name in FAMILIES:
        refused = dataset.rows(name)["status"] == "invalid"
        assert 0.1 < refused.mean() < 0.9


@pytest.mark.slow
def test_cross_validation_tells_what_a_ranker_of_it_is_worth(installed, data):
    judged = json.loads(installed.foretune("evaluate", "--data", data, "--json"))["families"]
    assert sorted(judged) == sorted(FAMILIES)
    for one in judged.values():
        learned, random = one["regret"], one["baselines"]["random"]
        assert learned["1"]["geomean"] < random["1"]["geomean"]
        assert learned["8"]["geomean"] < random["8"]["geomean"]
        assert one["noise_floor"] < 1.05


@pytest.mark.slow
def test_what_a_card_measured_of_it_is_learned_better_than_any_list(installed):
    """64 shapes of each, from an H200 (`on_gpu.py` collected them, 2026-11)."""
    judged = json.loads(
        installed.foretune("evaluate", "--data", HERE.parent / "kernels" / "examples" / "measured_h200", "--json")
    )["families"]
    assert sorted(judged) == sorted(FAMILIES)
    for one in judged.values():
        assert one["problems"] == 64
        for k in "14":
            rivals = [baseline[k]["geomean"] for baseline in one["baselines"].values()]
            assert one["regret"][k]["geomean"] < min(rivals)


@cache
def predicted(installed, bundle, family, rows, columns, dtype):
    """The four configs that the command line names, best first."""
    shape = ("--rows", rows, "--columns", columns, "--dtype", dtype, "--configs", 4)
    printed = installed.foretune("predict", family, "--device", "h200", "--bundle", bundle, "--json", *shape)
    return [each["config"] for each in json.loads(printed)["shortlist"]]


def test_the_command_line_predicts_by_name_and_by_place(installed, bundle):
    by_name = predicted(installed, bundle, "row_softmax", 4096, 1000, "fp16")
    by_place = predicted(installed, bundle, FAMILIES["row_softmax"], 4096, 1000, "fp16")
    assert by_name == by_place
    assert len(by_name) == 4
    assert all(config["BLOCK"] >= 1000 for config in by_name)


def test_the_data_can_be_exported(installed, data, tmp_path):
    from foretune.datasets import load

    out = tmp_path / "norm.csv"
    installed.foretune("export", data, "--format", "csv", "--family", "layer_norm", "--out", out)
    with out.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(load(data).rows("layer_norm"))
    assert {"rows", "columns", "BLOCK", "ROWS", "num_warps", "time_us"} <= rows[0].keys()


PRUNE = """
import json, torch
from foretune import DeviceSpec, KernelConfig
from foretune.runtime import use_stub_driver

h200 = DeviceSpec.named("h200")
DeviceSpec.live = classmethod(lambda cls, index=None: h200)  # as it is beside the card
from rowwise_kernels import ops

with use_stub_driver(h200):
    ops.softmax(torch.zeros(4096, 1000, dtype=torch.float16))
    ops.layer_norm(torch.zeros(64, 200), torch.zeros(200), torch.zeros(200))
tuned = {"row_softmax": ops.tuned_softmax, "layer_norm": ops.tuned_layer_norm}
timed = {name: map(KernelConfig.from_triton, kernel.configs_timings) for name, kernel in tuned.items()}
print(json.dumps({name: [config.to_json() for config in configs] for name, configs in timed.items()}))
"""


def test_its_own_autotuners_measure_the_shortlist_alone(installed, bundle):
    timed = json.loads(installed.python("-c", PRUNE, ROWWISE_BUNDLE=str(bundle)))
    shapes = {"row_softmax": (4096, 1000, "fp16"), "layer_norm": (64, 200, "fp32")}
    assert timed == {name: predicted(installed, bundle, name, *shape) for name, shape in shapes.items()}


def test_without_a_bundle_at_most_the_four_best_by_the_source_are_measured(installed):
    run = json.loads(installed.python("-c", PRUNE.replace("4096, 1000", "64, 10000")))
    assert {config["BLOCK"] for config in run["row_softmax"]} == {16384}
    assert {config["BLOCK"] for config in run["layer_norm"]} == {256}
    assert len(run["row_softmax"]) == 3
    assert len(run["layer_norm"]) == 4


AHEAD = """
import json, os, torch
from pathlib import Path
from foretune import DeviceSpec, Problem
from foretune.collect.compiling import compile_ahead
from foretune.runtime import use_stub_driver

h200 = DeviceSpec.named("h200")
DeviceSpec.live = classmethod(lambda cls, index=None: h200)
from rowwise_kernels import ops
from rowwise_kernels.layer_norm import LayerNorm

def binaries():
    return sorted(path.parent.name for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))

family, problem = LayerNorm(), Problem.of("layer_norm", rows=48, columns=320, dtype="fp32")
configs = [config for config in family.space() if family.supports(config, problem, h200) is None]
if __name__ == "__main__":
    compile_ahead(family, [(config, problem) for config in configs], h200, 2)
    compiled = binaries()
    with use_stub_driver(h200):
        for rows in (48, 64, 4096):  # three problems, and the autotuner asks for each
            ops.layer_norm(torch.zeros(rows, 320), torch.zeros(320), torch.zeros(320))
    print(json.dumps([len(configs), len(compiled), binaries() == compiled]))
"""


@pytest.mark.slow
def test_what_other_processes_compile_ahead_its_autotuner_finds(installed, tmp_path):
    """In processes that know the family by its name alone; one binary for problems whose integers specialise alike."""
    configs, compiled, nothing_new = json.loads(installed.python("-c", AHEAD, TRITON_CACHE_DIR=str(tmp_path)))
    assert configs == compiled > 10
    assert nothing_new

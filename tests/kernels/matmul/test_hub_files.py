"""Tuned files for the kernel hub: names and content as the hub's example reads them; and each config fits."""

from __future__ import annotations

import json
import math

import pytest
from commands import call
from foretune import ForetuneError
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.matmul.hub_files import KNOBS, predict_hub_file
from foretune.runtime import make_shortlist
from plain_matmul import compiled

H100, H200 = (DeviceSpec.named(name) for name in ("h100", "h200"))


def read(folder, device_name, m, n, k):
    """The config that a kernel runs, by the rules of the hub's documentation."""
    name = f"N={n},K={k},device_name={device_name.replace(' ', '_')}.json"
    rows = {int(rows): entry for rows, entry in json.loads((folder / "configs" / name).read_text()).items()}
    return rows[min(rows, key=lambda one: abs(math.log(m / one)))]


@pytest.mark.parametrize("device", [H100, H200], ids=lambda one: one.arch)
@pytest.mark.parametrize("m", [1, 64, 1500, 100_000])
def test_a_kernel_reads_what_is_predicted_for_the_nearest_size(device, m, tmp_path):
    assert predict_hub_file(14336, 4096, device).save(tmp_path)[0].parent == tmp_path / "configs"
    found = read(tmp_path, device.name, m, 14336, 4096)
    assert list(found) == ["BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"]
    family = find_family("matmul")
    fixed = {"SPLIT_K": 1, "PROGRAMS_PER_SM": 0, "TMA": 0, "CONSUMERS": 0, "PINGPONG": 0}
    plain = tuple(one for one in family.space(device) if all(one[knob] == value for knob, value in fixed.items()))
    nearest = min((2**exponent for exponent in range(15)), key=lambda one: abs(math.log(m / one)))
    problem = Problem.of("matmul", flags=("b_kn",), batch=1, m=nearest, n=14336, k=4096)
    best = make_shortlist(family, problem, device, k=1, configs=plain).configs[0]
    assert found == {name: best[knob] for knob, name in KNOBS.items()}


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
@pytest.mark.parametrize("device", [H100, H200], ids=lambda one: one.name)
def test_every_config_fits_a_plain_kernel(device):
    entries = predict_hub_file(4096, 4096, device).entries.values()
    for config in {tuple(entry[name] for name in KNOBS.values()) for entry in entries}:
        binary = compiled(KernelConfig.of(**dict(zip(KNOBS, config, strict=True))), device)
        assert binary.metadata.shared <= device.smem_per_block_bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp8e4m3"}, "dtype must be one of bf16, fp16 but is 'fp8e4m3'"),
        ({"n": 0}, "n must be an integer between 1 and 1073741824 but got 0"),
        ({"k": 2**31}, "k must be an integer between 1 and 1073741824 but got 2147483648"),
    ],
)
def test_what_cannot_be_predicted_is_refused(arguments, message):
    with pytest.raises(ForetuneError, match=message):
        predict_hub_file(**{"n": 64, "k": 64, "device": H200} | arguments)


def test_the_command_writes_a_file_and_replaces_none(tmp_path):
    line = f"export hub --n 4096 --k 4096 --device h100 --out {tmp_path}"
    result = json.loads(call(f"{line} --json").stdout)
    file = "configs/N=4096,K=4096,device_name=NVIDIA_H100_80GB_HBM3.json"
    assert (result["file"], result["out"], result["measured"]) == (file, str(tmp_path), False)
    assert json.loads((tmp_path / file).read_text()) == result["rows"]
    assert "not measured with the kernel" in call(line).stdout  # the same content
    (tmp_path / file).write_text("{}")
    refused = call(line)
    assert refused.exit_code == 1
    assert f"{file} exists already: pass another folder, or --force to replace it" in refused.stderr
    assert (tmp_path / file).read_text() == "{}"
    assert call(f"{line} --force").exit_code == 0
    assert json.loads((tmp_path / file).read_text()) == result["rows"]

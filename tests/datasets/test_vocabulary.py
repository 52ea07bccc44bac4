"""Values survive JSON and Triton unchanged, and refuse impossible attributes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from foretune.datasets import (
    DTYPES,
    DeviceSpec,
    ForetuneError,
    KernelConfig,
    Measurement,
    Problem,
    Ragged,
    Status,
    dtype_of_tensor,
    torch_dtype,
)

PROBLEM = Problem.of("toy", segments=2, rows=8, n=16, k=32, dtype="fp16", flags=("b", "a"), ragged={"rows": (0, 8)})
CONFIG = KernelConfig.of(BLOCK_M=128, TMA=1, num_warps=8, num_stages=4)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("problem", [PROBLEM, PROBLEM.without_sizes(), Problem.of("empty")])
def test_a_problem_survives_json(problem: Problem) -> None:
    again = Problem.from_json(through_json(problem.to_json()))
    assert again == problem
    assert hash(again) == hash(problem)


FP8 = Problem.of("linear", m=8, n=16, k=32, dtype={"x": "fp8e4m3", "w": "fp8e4m3", "y": "bf16"})
W4A16 = Problem.of("linear", m=8, n=16, k=32, dtype={"y": "bf16", "x": "bf16", "w": "int4"})
INT8 = Problem.of("linear", m=8, n=16, k=32, dtype={"x": "int8", "w": "int8", "y": "int32"})


@pytest.mark.parametrize("problem", [FP8, W4A16, INT8, Problem.of("linear", m=8, dtype="int8")])
def test_a_dtype_for_each_operand_survives_json(problem: Problem) -> None:
    again = Problem.from_json(through_json(problem.to_json()))
    assert again == problem
    assert (hash(again), again.signature, str(again)) == (hash(problem), problem.signature, str(problem))


def test_each_operand_has_its_dtype_and_its_bytes() -> None:
    assert [W4A16.dtype_of(operand) for operand in "xwy"] == ["bf16", "int4", "bf16"]
    assert [W4A16.itemsize_of(operand) for operand in "xwy"] == [2, 0.5, 2]
    assert [FP8.itemsize_of(operand) for operand in "xwy"] == [1, 1, 2]
    assert FP8.dtype_name == "w=fp8e4m3,x=fp8e4m3,y=bf16"
    assert str(W4A16) == "linear k=32 m=8 n=16 w=int4,x=bf16,y=bf16"
    assert W4A16.to_json()["dtype"] == {"w": "int4", "x": "bf16", "y": "bf16"}
    with pytest.raises(ForetuneError, match="no operand 'z'; it has w, x, y"):
        W4A16.dtype_of("z")
    with pytest.raises(ForetuneError, match=r"different dtypes \(w=int4,x=bf16,y=bf16\): use itemsize_of"):
        W4A16.itemsize  # noqa: B018


def test_one_dtype_for_all_has_one_form() -> None:
    short = Problem.of("linear", m=8, dtype="fp16")
    alike = {"x": "fp16", "w": "fp16"}
    spelled = [
        Problem.of("linear", m=8, dtype=alike),
        replace(short, dtype=alike),  # type: ignore[arg-type]
        replace(short, dtype=tuple(alike.items())),
        Problem.from_json(short.to_json() | {"dtype": alike}),
    ]
    assert set(spelled) == {short}
    assert {one.dtype for one in spelled} == {"fp16"}
    assert (short.dtype_of("whatever"), short.itemsize, short.itemsize_of("x")) == ("fp16", 2, 2)


def test_the_order_of_the_operands_makes_no_other_problem() -> None:
    turned = replace(W4A16, dtype=tuple(reversed(W4A16.dtype)))  # type: ignore[arg-type]
    assert turned == W4A16
    assert hash(turned) == hash(W4A16)
    assert len({W4A16, FP8, replace(W4A16, dtype="bf16")}) == 3


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_torchs_or_is_said_not_to_be(name: str) -> None:
    torch = pytest.importorskip("torch")
    if name == "int4":
        with pytest.raises(ForetuneError, match="torch has no dtype 'int4'"):
            torch_dtype(name)
        return
    tensor = torch.empty(1, dtype=torch_dtype(name))
    assert dtype_of_tensor("x", tensor) == name
    assert tensor.itemsize == Problem.of("copy", dtype=name).itemsize


@pytest.mark.parametrize(("theirs", "ours"), [("float16", "fp16"), ("float8_e5m2", "fp8e5m2")])
def test_a_dtype_of_torch_is_refused_with_our_name_of_it(theirs: str, ours: str) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (getattr(torch, theirs), f"torch.{theirs}"):
        with pytest.raises(ForetuneError, match=rf"torch\.{theirs}'? \(did you mean '{ours}'\?\)$"):
            Problem.of("copy", dtype=dtype)


def test_a_tensor_of_no_known_dtype_is_refused_by_name() -> None:
    with pytest.raises(ForetuneError, match=r"bias must be a tensor of bf16, .* but its dtype is complex64"):
        dtype_of_tensor("bias", SimpleNamespace(dtype="torch.complex64"))
    with pytest.raises(ForetuneError, match=r"bias must be a tensor of .* but its dtype is None"):
        dtype_of_tensor("bias", 3)


@pytest.mark.parametrize(
    "config", [CONFIG, KernelConfig.of(), KernelConfig.of(KIND="row", SCALE=0.5, maxnreg=128, num_ctas=2)]
)
def test_a_config_survives_json_and_triton(config: KernelConfig) -> None:
    assert KernelConfig.from_json(through_json(config.to_json())) == config
    assert KernelConfig.from_triton(config.to_triton()) == config


def test_a_triton_config_survives_foretune() -> None:
    triton = pytest.importorskip("triton")
    config = triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=8, num_stages=5, maxnreg=96)
    again = KernelConfig.from_triton(config).to_triton()
    assert again.all_kwargs() == config.all_kwargs()


def test_every_call_makes_a_new_triton_config() -> None:
    one, other = CONFIG.to_triton(), CONFIG.to_triton()
    one.kwargs["BLOCK_M"] = 16
    assert other.kwargs["BLOCK_M"] == CONFIG["BLOCK_M"] == 128


def test_knobs_are_ordered_by_name_so_that_equal_configs_are_equal() -> None:
    assert KernelConfig.of(B=1, A=2) == KernelConfig.of(A=2, B=1)
    with pytest.raises(KeyError, match="C"):
        CONFIG["C"]


@pytest.mark.parametrize("name", DeviceSpec.names())
def test_a_device_survives_json(name: str) -> None:
    spec = DeviceSpec.named(name)
    assert DeviceSpec.from_json(through_json(spec.to_json())) == spec


def test_an_unknown_device_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ForetuneError, match=r"'h300'; known: .*h200"):
        DeviceSpec.named("h300")


#: A spec in a file from before further rates were measured.
OLD = DeviceSpec.named("h200").to_json()
MEASURED = replace(
    DeviceSpec.named("h200"),
    read_bandwidth_gbs=4500.0,
    l2_seen_bytes=30 << 20,
    matrix_tflops_by_dtype=(("bf16", 785.0), ("fp32", 50.0)),
)


@pytest.mark.parametrize("spec", [DeviceSpec.named("h200"), MEASURED])
def test_a_device_survives_its_file(spec: DeviceSpec, tmp_path: Path) -> None:
    spec.save(tmp_path / "mine.json")
    again = DeviceSpec.find(str(tmp_path / "mine.json"))
    assert again == spec
    assert hash(again) == hash(spec)


def test_a_device_of_before_more_was_measured_is_read_and_written_as_it_was() -> None:
    assert set(MEASURED.to_json()) - set(OLD) == {"read_bandwidth_gbs", "l2_seen_bytes", "matrix_tflops_by_dtype"}
    spec = DeviceSpec.from_json(OLD)
    assert (spec.read_bandwidth_gbs, spec.l2_seen_bytes, spec.matrix_tflops_by_dtype) == (None, None, ())
    assert spec.to_json() == OLD


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sm_count": 0}, "sm_count must be a positive number but is 0"),
        ({"sm_count": "132"}, "sm_count must be a positive number but is '132'"),
        ({"clock_mhz": float("nan")}, "clock_mhz must be a positive number but is nan"),
        ({"copy_bandwidth_gbs": True}, "copy_bandwidth_gbs must be a positive number but is True"),
        ({"arch": 90}, "arch must be a non-empty string of printable characters but is 90"),
        ({"name": ""}, "name must be a non-empty string of printable characters but is ''"),
        ({"rates_measured": 1}, "rates_measured must be true or false but is 1"),
        ({"cores": 4}, "missing or unknown: cores"),
        ({"matrix_tflops_by_dtype": {"int8": 9.0}}, "must map dtypes (bf16, fp16, fp32) to rates but is"),
        ({"matrix_tflops_by_dtype": [["bf16", 9.0]]}, "must map dtypes (bf16, fp16, fp32) to rates but is"),
        ({"matrix_tflops_by_dtype": {"bf16": -9.0}}, "bf16 must be a positive number but is -9.0"),
        ({"l2_seen_bytes": -1}, "l2_seen_bytes must be a positive number but is -1"),
    ],
)
def test_a_device_that_cannot_be_is_refused_by_file_and_value(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OLD | change))
    with pytest.raises(ForetuneError, match=f"mine.json: .*{re.escape(named)}"):
        DeviceSpec.find(str(path))


def test_a_device_without_a_required_field_is_refused(tmp_path: Path) -> None:
    for field in OLD.keys() - {"rates_measured"}:
        with pytest.raises(ForetuneError, match=f"missing or unknown: {field}"):
            DeviceSpec.from_json({name: value for name, value in OLD.items() if name != field})


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b'{"name": ', b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_device_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ForetuneError, match=r"mine\.json: not (JSON|a device spec)"):
        DeviceSpec.load(path)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("h300", r"unknown device 'h300'; known: .*h200, or the path of"),
        ("no/such.json", r"no/such\.json: cannot be read"),
    ],
)
def test_a_device_that_is_nowhere_is_refused_with_the_known_ones(name: str, named: str) -> None:
    with pytest.raises(ForetuneError, match=named):
        DeviceSpec.find(name)


def test_a_folder_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(ForetuneError, match="cannot be read: Is a directory"):
        DeviceSpec.find(str(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rows": -1}, "dimension rows must be an integer between 0 and 1099511627776 but got -1"),
        ({"dtype": "int7"}, "bf16, fp16, .* but got 'int7'"),
        ({"dtype": {"x": "bf16", "w": "int7"}}, "bf16, fp16, .* but got 'int7'"),
        ({"dtype": {}}, "dtype must map at least one operand to its dtype but is {}"),
        (
            {"columns": 2, "ragged": {"rows": (1,)}},
            "ragged sizes are given along 'rows', which is not one of the dimensions columns",
        ),
        ({"rows": 9, "ragged": {"rows": (4, 4)}}, "sizes along rows sum to 8 but rows=9"),
        (
            {"rows": 0, "ragged": {"rows": (4, -4)}},
            "each of the sizes along rows must be an integer between 0 and 1099511627776 but got -4",
        ),
        ({"rows": 4, "columns": 4, "ragged": {"rows": (4,), "columns": (4,)}}, "one dimension but has rows, columns"),
        ({"rows": 4, "ragged": {}}, "ragged must name exactly one dimension but has none"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused_by_value(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ForetuneError, match=named):
        Problem.of("toy", **wrong)


@pytest.mark.parametrize("value", [None, [], 5, {}, {"family": "toy"}, PROBLEM.to_json() | {"dims": {"n": "8"}}])
def test_json_that_is_no_problem_is_refused(value: Any) -> None:
    with pytest.raises(ForetuneError, match="not a problem"):
        Problem.from_json(value)


@pytest.mark.parametrize("value", [None, [], 5, {"BLOCK_M": None}, {"BLOCK_M": [16]}])
def test_json_that_is_no_config_is_refused(value: Any) -> None:
    with pytest.raises(ForetuneError, match="config"):
        KernelConfig.from_json(value)


def test_ragged_sizes_that_are_unknown_and_that_are_all_empty() -> None:
    assert PROBLEM.without_sizes().ragged is None
    assert PROBLEM.ragged == Ragged("rows", (0, 8))
    empty = Ragged("rows", (0, 0))
    assert (empty.active, empty.max, empty.mean, empty.skew) == (0, 0, 0.0, 1.0)
    assert Ragged("rows", ()).mean == 0.0


@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("time_us", [None, 1.0, 0.0, float("inf"), float("nan")])
def test_a_time_goes_with_its_status(status: Status, time_us: float | None) -> None:
    right = time_us == 1.0 if status in (Status.OK, Status.EARLY_STOPPED) else time_us is None
    if right:
        Measurement(PROBLEM, "gpu", CONFIG, status, time_us=time_us)
    else:
        with pytest.raises(ForetuneError, match=status.value):
            Measurement(PROBLEM, "gpu", CONFIG, status, time_us=time_us)


@pytest.mark.parametrize("size", [*range(17), 24, 96, 384, 640, 768, 1536, 3072, 4096, 6144, 1 << 20])
def test_small_and_usual_sizes_stand_for_themselves(size: int) -> None:
    assert Problem.of("linear", m=size).rounded("m")["m"] == size


def test_a_rounded_problem_is_near_those_it_stands_for_and_stays_itself() -> None:
    for size in range(1, 5000, 7):
        stand_in = Problem.of("linear", m=size, n=7).rounded("m")
        assert 0 <= stand_in["m"] - size < size / 8
        step = max(1 << size.bit_length() >> 4, 1)
        assert all(-(-size // tile) == -(-stand_in["m"] // tile) for tile in (16, 32, 64, 128, 256) if tile >= step)
        assert stand_in.rounded("m") == stand_in
        assert stand_in["n"] == 7
    assert Problem.of("linear", m=1000).rounded("n") == Problem.of("linear", m=1000)

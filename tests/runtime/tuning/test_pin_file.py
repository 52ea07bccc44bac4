"""The pin file: its bytes, what of it is refused, and the command that writes it and compares it with a machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from commands import call, words
from foretune.datasets import ForetuneError, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.runtime import Mode, choice, use_stub_driver
from foretune.runtime.pin_file import PinError, PinFile, Versions
from foretune.runtime.pins import pinned
from foretune.runtime.timing.flywheel import Software
from foretune.runtime.tuning.cache.exports import export_fla_tables, freeze_choices
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache
from foretune.runtime.tuning.cache.pinning import check_pins, pins_of_cache
from pinning import DRIFT, pinned_kernel, save, softmax
from remembered import CONFIGS, H100, H200, KERNEL, problem, remember

SHAPES = "groups,rows,n,k\n16,512,1024,512\n16,500,1024,512\n16,4096,1024,512\n"
FAMILY = "grouped_gemm_fwd"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "foretune.lock"


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.csv"
    path.write_text(SHAPES)
    return path


def changed(lock: Path, change: Any) -> None:
    """Change the JSON of a file, but not its checksum."""
    value = json.loads(lock.read_text())
    change(value)
    lock.write_text(json.dumps(value))


def resealed(lock: Path, change: Any) -> None:
    """Change the JSON of a file, and write the checksum that the error names, as a reviewer would."""
    changed(lock, change)
    with pytest.raises(PinError) as raised:
        PinFile.read(lock)
    right = str(raised.value).partition("checksum must be '")[2][:64]
    changed(lock, lambda value: value.update(checksum=right))


# The file


def test_equal_choices_give_equal_bytes_in_any_order(lock: Path, tmp_path: Path) -> None:
    one, two = softmax(64), softmax(128, block=16, device=H100)
    several = dataclasses.replace(one, choices={**softmax(8).choices, **softmax(512).choices})
    backwards = dataclasses.replace(one, choices={**softmax(512).choices, **softmax(8).choices})
    assert PinFile((several, two)).text() == PinFile((two, backwards)).text()
    text = PinFile((several, two)).text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
    rows = [choice["problem"]["dims"]["rows"] for choice in json.loads(text)["kernels"][1]["choices"]]
    assert rows == [8, 512]  # as numbers, not as text


def test_it_has_nothing_of_this_machine(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember()
    first = pins_of_cache().text()
    assert str(lock.parent) not in first
    assert "driver" not in first
    assert "+" not in json.dumps(json.loads(first)["kernels"][0]["torch"])
    for variable in ("HOSTNAME", "USER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "another")
    assert pins_of_cache().text() == first


def test_a_build_of_the_same_version_is_the_same_version() -> None:
    assert Versions.of(Software("570.1", "2.13.0+cu130", "3.9.0+git1"))[:2] == ("2.13.0", "3.9.0")


@pytest.mark.parametrize(("value", "setting", "other"), [("0", "off", "on"), ("1", "on", "off"), ("True", "on", "off")])
def test_the_default_of_fusion_is_recorded_and_compared(
    lock: Path, monkeypatch: pytest.MonkeyPatch, value: str, setting: str, other: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", value)
    family = find_family(FAMILY)
    wanted = family.at_call_time(Problem.of(FAMILY, groups=16, rows=512, n=1024, k=512))
    save(lock, pinned_kernel(FAMILY, {wanted: family.default(wanted, H200)}, source=family.source_hash()))
    assert json.loads(lock.read_text())["kernels"][0]["fp_fusion"] == setting
    assert check(lock)[0] == 0
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0" if value != "0" else "1")
    code, found = check(lock)
    assert code == 1
    (row,) = found["differences"]
    assert (row["what"], row["file"], row["here"]) == ("fp_fusion", setting, other)


def test_line_endings_and_layout_do_not_matter(lock: Path) -> None:
    save(lock, softmax())
    lock.write_bytes(lock.read_bytes().replace(b"\n", b"\r\n"))
    assert PinFile.read(lock).kernels == (softmax(),)


def test_a_changed_file_is_refused_until_its_checksum_is_changed_too(lock: Path) -> None:
    save(lock, softmax())

    def change(value: Any) -> None:
        value["kernels"][0]["choices"][0]["config"]["BLOCK"] = 128

    changed(lock, change)
    with pytest.raises(PinError, match=r"foretune\.lock: .*content was changed after it was written: checksum must"):
        PinFile.read(lock)
    lock.write_text(PinFile((softmax(),)).text())
    resealed(lock, change)
    assert PinFile.read(lock).kernels == (softmax(block=128),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a usable pin file"),
        ("[]", "it is not a file of format 'foretune pin 1'"),
        ('{"format": "foretune pin 2"}', "it is not a file of format 'foretune pin 1'"),
        ('{"format": "foretune pin 1"}', "the file must be an object with checksum, format, functions, kernels"),
        ("<<<<<<< HEAD", "not a usable pin file"),
        ('{"format": NaN}', "it has NaN, which is not JSON"),
        ("[" * 100_000, "not a usable pin file"),
    ],
)
def test_what_is_no_pin_file_is_refused(lock: Path, content: str, message: str) -> None:
    lock.write_text(content)
    with pytest.raises(PinError, match=message) as raised:
        PinFile.read(lock)
    assert str(raised.value).startswith(str(lock))


def kernel_of(value: Any) -> Any:
    return value["kernels"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(more=1), "the file must be an object with"),
        (lambda v: v.update(kernels={}), "kernels must be a list but is {}"),
        (lambda v: v["kernels"].append(kernel_of(v)), r"kernels has softmax on NVIDIA H200 .* twice"),
        (lambda v: kernel_of(v)["choices"].append(kernel_of(v)["choices"][0]), "softmax on NVIDIA H200 has a problem"),
        (lambda v: kernel_of(v).pop("source"), "a kernel must be an object with choices, device, fp_fusion, kernel"),
        (lambda v: kernel_of(v).update(kernel=""), "kernel must be a non-empty string"),
        (lambda v: kernel_of(v).update(source="\n"), "source of softmax must be a non-empty string of printable"),
        (lambda v: kernel_of(v)["device"].update(sm_count=0), "sm_count must be an integer between 1"),
        (lambda v: kernel_of(v)["device"].update(host="me"), "device of softmax must be an object with"),
        (lambda v: kernel_of(v)["choices"][0].pop("config"), "a choice must be an object with config, problem"),
        (lambda v: kernel_of(v)["choices"][0]["config"].update(num_warps=3), "num_warps must be a power of two"),
        (lambda v: kernel_of(v)["choices"][0]["problem"].update(dtype="int3"), "dtype must be one of"),
        (lambda v: kernel_of(v)["choices"][0].update(launches=[{"key": [1]}]), "launches must be a list of objects"),
        (lambda v: v["functions"].append(1), "a function must be an object with"),
    ],
)
def test_what_is_malformed_is_named_even_with_a_right_checksum(lock: Path, change: Any, message: str) -> None:
    save(lock, softmax())
    resealed_or_malformed = pytest.raises(PinError, match=message)
    changed(lock, change)
    value = json.loads(lock.read_text())
    with pytest.raises(PinError) as raised:
        PinFile.read(lock)
    if "checksum must be '" in str(raised.value):
        value["checksum"] = str(raised.value).partition("checksum must be '")[2][:64]
        lock.write_text(json.dumps(value))
    with resealed_or_malformed:
        PinFile.read(lock)


def test_nothing_else_is_replaced(lock: Path) -> None:
    lock.write_text('{"mine": 1}')
    with pytest.raises(ForetuneError, match="is not a file that foretune pin wrote, so it is not replaced"):
        PinFile((softmax(),)).save(lock)
    assert lock.read_text() == '{"mine": 1}'
    lock.unlink()
    PinFile().save(lock)
    PinFile((softmax(),)).save(lock)
    assert PinFile.read(lock) == PinFile((softmax(),))


def test_another_file_keeps_what_is_of_the_same_source_and_versions() -> None:
    older = PinFile((softmax(8), softmax(8, device=H100), pinned_kernel("other", {})))
    same = PinFile((softmax(64),)).with_those_of(older)
    assert {(one.kernel, one.device.name, len(one.choices)) for one in same.kernels} == {
        ("softmax", H200.name, 2),
        ("softmax", H100.name, 1),
        ("other", H200.name, 0),
    }
    other = PinFile((softmax(64, source="s2"),)).with_those_of(older)
    assert [len(one.choices) for one in other.kernels if one.source == "s2"] == [1]


# What is pinned


def test_the_cache_s_newest_source_is_pinned_with_the_launches(lock: Path) -> None:
    remember(source="old")
    remember()
    remember(H100)
    cache = ChoiceCache.of(KERNEL, "s1", H200)
    cache.choose(Problem(KERNEL, problem(64).dims), "b1", CONFIGS[5])  # as ranks may agree, though another is faster
    said = call("pin --json --out", lock)
    assert said.exit_code == 0, said.stderr
    assert json.loads(said.stdout) == {"kernels": 2, "functions": 0, "choices": 8, "out": str(lock)}
    entries = {one.device.name: one for one in PinFile.read(lock).kernels}
    mine = entries[H200.name]
    assert (mine.kernel, mine.source, mine.versions) == (KERNEL, "s1", Versions.here())
    by_rows = {at["rows"]: one for at, one in mine.choices.items()}
    assert by_rows[64].config == CONFIGS[5]
    assert by_rows[4096].config == CONFIGS[4]  # the fastest, since none was chosen
    assert by_rows[64].launches == (
        {"names": ["rows", "columns"], "key": [64, 128, "torch.bfloat16", "torch.float32"]},
    )
    first = lock.read_bytes()
    assert call("pin --out", lock).exit_code == 0
    assert lock.read_bytes() == first


def test_only_what_is_named_is_pinned_and_the_rest_is_kept_if_asked(lock: Path) -> None:
    remember()
    remember(kernel="package.other")
    assert call("pin package.other --out", lock).exit_code == 0
    assert [one.kernel for one in PinFile.read(lock).kernels] == ["package.other"]
    assert call(f"pin {KERNEL} --add --out", lock).exit_code == 0
    assert {one.kernel for one in PinFile.read(lock).kernels} == {KERNEL, "package.other"}
    assert call(f"pin {KERNEL} --out", lock).exit_code == 0
    assert {one.kernel for one in PinFile.read(lock).kernels} == {KERNEL}
    said = call("pin nothing --out", lock)
    assert said.exit_code == 1
    assert "has no choices of 'nothing', only of package." in words(said.stderr)


def test_what_a_bundle_predicts_for_shapes_is_what_an_op_would_run(lock: Path, shapes: Path) -> None:
    said = call(f"pin {FAMILY} --device h200 --shapes {shapes} --out", lock)
    assert said.exit_code == 0, said.stderr
    assert "Pinned: 2 choices of 1 kernels and functions on NVIDIA H200." in said.stdout
    (entry,) = PinFile.read(lock).kernels
    family = find_family(FAMILY)
    assert entry.source == family.source_hash()
    for rows in (512, 500, 4096):
        wanted = Problem.of(FAMILY, groups=16, rows=rows, n=1024, k=512)
        predicted = choice.choose(family, wanted, H200, Mode.PREDICT, lambda config: pytest.fail("launched"))
        assert entry.choices[family.at_call_time(wanted)].config == predicted


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pin", "give one of --out and --check"),
        ("pin --out a --check b", "give one of --out and --check"),
        ("pin --out a.lock --device h200", "needs --shapes or --data"),
        ("pin --out a.lock --bundle b", "needs --shapes or --data"),
        ("pin --check a.lock --add", "does not apply to --check"),
        ("pin --check a.lock --shapes b.csv", "does not apply to --check"),
        ("pin --out a.lock --shapes b.csv", "name one kernel family or pruned kernel"),
    ],
)
def test_wrong_usage_is_named(line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = call(line)
    assert said.exit_code == 2
    assert message in words(said.stderr)


PRUNED = """
import foretune
import triton
import triton.language as tl
from foretune.datasets import Problem

configs = [triton.Config({"BM": m, "BN": 64, "BK": 64}, num_warps=4, num_stages=3) for m in (32, 64)]
fixed = {"GROUP_M": 1, "SPLIT_K": 1, "PROGRAMS_PER_SM": 0, "TMA": 0, "CONSUMERS": 0, "PINGPONG": 0}
pruner = foretune.prune(
    "matmul",
    knobs={"BM": "BLOCK_M", "BN": "BLOCK_N", "BK": "BLOCK_K"},
    fixed=fixed,
    problem=lambda call: Problem.of("matmul", batch=1, m=call["M"], n=64, k=64),
)


@triton.autotune(configs, ["M"], prune_configs_by={"early_config_prune": pruner})
@triton.jit
def product(x_ptr, M, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    at = tl.arange(0, BM)
    tl.store(x_ptr + at, 1.0, mask=at < M)
"""


def test_a_pruned_kernel_is_pinned_to_one_of_its_own_configs(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "pruned_module.py").write_text(PRUNED)
    (tmp_path / "shapes.csv").write_text("batch,m,n,k\n1,60,64,64\n1,2048,64,64\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = f"pin pruned_module.product --device h200 --shapes {tmp_path / 'shapes.csv'} --out"
    said = call(line, lock)
    assert said.exit_code == 0, said.stderr
    import pruned_module  # type: ignore[import-not-found]

    assert "No problem has a flag (" in said.stdout
    (entry,) = PinFile.read(lock).kernels
    assert entry.kernel == "pruned_module.product"
    assert {config.to_json()["BM"] for config in (one.config for one in entry.choices.values())} <= {32, 64}
    assert check(lock) == (0, check(lock)[1])
    swapped = {at: dataclasses.replace(one, config=swap(one.config)) for at, one in entry.choices.items()}
    save(lock, dataclasses.replace(entry, choices=swapped))
    by_m = {at["m"]: one.config["BM"] for at, one in swapped.items()}
    with use_stub_driver(H200), pinned(lock):
        for m in (60, 2048):
            pruned_module.product[(1,)](torch.zeros(64), m)
            near = find_family("matmul").at_call_time(Problem.of("matmul", batch=1, m=m, n=64, k=64))["m"]
            assert pruned_module.product.best_config.kwargs["BM"] == by_m[near]
        with pytest.raises(PinError, match=r"does not cover matmul .* m=512 .*: of pruned_module\.product it"):
            pruned_module.product[(1,)](torch.zeros(64), 512)
    save(lock, dataclasses.replace(entry, source="older"))
    with (
        use_stub_driver(H200),
        pinned(lock),
        pytest.raises(PinError, match="product with source 'older'"),
    ):
        pruned_module.product[(1,)](torch.zeros(64), 1024)
    said = call("pin json --device h200 --shapes", tmp_path / "shapes.csv", "--out", lock)
    assert said.exit_code == 1
    assert "json must name a kernel with foretune.prune; known here: none" in words(said.stderr)


def swap(config: KernelConfig) -> KernelConfig:
    """The other one of the two configs, which is not predicted."""
    return KernelConfig.from_json(config.to_json() | {"BM": 96 - config["BM"]})


def test_an_empty_cache_has_nothing_to_pin(lock: Path) -> None:
    said = call("pin --out", lock)
    assert said.exit_code == 1
    assert "there is nothing to pin" in words(said.stderr)
    assert not lock.exists()


# The exports are made from a pin file, too


def test_the_exports_of_a_pin_file_choose_what_it_has(lock: Path, tmp_path: Path) -> None:
    remember()
    pins = pins_of_cache()
    pins.save(lock)
    ChoiceCache.of(KERNEL, "newer", H200).record(problem(64), CONFIGS[0], 1.0)  # the cache has changed since
    said = call(f"cache freeze {KERNEL} --pin {lock} --json --out", tmp_path / "heuristic.py")
    assert said.exit_code == 0, said.stderr
    names: dict[str, Any] = {}
    exec((tmp_path / "heuristic.py").read_text(), names)
    (entry,) = pins.kernels
    for at, one in entry.choices.items():
        assert KernelConfig.from_json(names["choose"](dict(at.dims))) == one.config
    said = call(f"cache export --format fla --pin {lock} --json --out", tmp_path / "tables")
    assert said.exit_code == 0, said.stderr
    (file,) = json.loads(said.stdout)["files"]
    table = json.loads(Path(file).read_text())
    assert table["triton_version"] == entry.versions.triton
    configs = {one["autotune_key"][0]: one["config"]["kwargs"]["BLOCK"] for one in table["autotune_entries"].values()}
    assert configs == {at["rows"]: one.config["BLOCK"] for at, one in entry.choices.items()}
    with pytest.raises(ForetuneError, match=rf"the pin file does not cover another: it covers {KERNEL}"):
        freeze_choices("another", pins=pins)
    with pytest.raises(ForetuneError, match="the pin file does not cover another"):
        export_fla_tables(tmp_path / "tables", "another", pins)


@pytest.mark.parametrize(
    "line", [f"cache freeze {FAMILY} --device h200 --pin p --out h.py", "cache export --pin p --out e.json"]
)
def test_a_pin_file_is_refused_where_it_does_not_apply(line: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    said = call(line)
    assert said.exit_code == 2
    assert "--pin" in words(said.stderr)


# Comparing with a machine


def check(lock: Path, *more: str) -> tuple[int, Any]:
    said = call("pin --json --device h200 --check", lock, *more)
    return said.exit_code, json.loads(said.stdout)


def test_a_machine_that_is_as_the_file_says_has_no_difference(lock: Path, shapes: Path) -> None:
    assert call(f"pin {FAMILY} --device h200 --shapes {shapes} --out", lock).exit_code == 0
    assert call(f"pin {FAMILY} --device h100 --shapes {shapes} --add --out", lock).exit_code == 0
    code, found = check(lock)
    assert (code, found["kernels"], found["choices"], found["differences"]) == (0, 1, 2, [])
    said = call("pin --device h200 --check", lock)
    assert "No difference in 2 choices of 1 kernels and functions" in said.stdout


WHAT = {
    "a changed source": "source",
    "another device": "device",
    "a part of the device": "device",
    "another Triton": "triton",
    "another torch": "torch",
    "another default of fusion": "fp_fusion",
    "a kernel that is not covered": "kernel",
    "a config that the kernel does not have": "config",
}


@pytest.mark.parametrize("kind", DRIFT)
def test_each_difference_is_a_row_and_the_exit_code(lock: Path, kind: str) -> None:
    family = find_family(FAMILY)
    wanted = family.at_call_time(Problem.of(FAMILY, groups=16, rows=512, n=1024, k=512))
    entry = pinned_kernel(FAMILY, {wanted: family.default(wanted, H200)}, source=family.source_hash())
    change, _ = DRIFT[kind]
    save(lock, change(entry))
    code, found = check(lock)
    assert code == 1
    (row,) = found["differences"]
    assert row["what"] == WHAT[kind]
    said = call("pin --device h200 --check", lock)
    assert said.exit_code == 1
    assert f"1 differences in {found['choices']} choices" in words(said.stdout)


def test_a_choice_that_no_launch_looks_for_is_a_difference(lock: Path) -> None:
    family = find_family(FAMILY)
    odd = Problem.of(FAMILY, groups=16, rows=523, n=1024, k=512)
    save(lock, pinned_kernel(FAMILY, {odd: family.default(odd, H200)}, source=family.source_hash()))
    (row,) = check(lock)[1]["differences"]
    assert (row["what"], "rows=523 " in row["file"], "rows=576 " in row["here"]) == ("problem", True, True)


def test_kernels_and_functions_are_compared_by_their_modules(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pinned_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import pinned_module  # type: ignore[import-not-found]
    from foretune.runtime.launching.kernel import Kernel

    name = "pinned_module.fill"
    cache = ChoiceCache.of(name, Kernel(pinned_module.fill).tuned_hash(), H200)
    cache.choose(Problem.of(name, n=64), "", KernelConfig.of(BLOCK=32))
    assert pinned_module.total(1000) == 499500
    pins = pins_of_cache()
    pins.save(lock)
    assert check_pins(lock, H200).differences == ()
    (kernel,) = pins.kernels
    (function,) = pins.functions
    config = KernelConfig.of(BLOCK=77)
    choices = {at: dataclasses.replace(one, config=config) for at, one in kernel.choices.items()}
    PinFile(
        (
            dataclasses.replace(kernel, choices=choices, source="s"),
            dataclasses.replace(kernel, kernel="no.such.one"),
        ),
        (dataclasses.replace(function, source="t"), dataclasses.replace(function, function="pinned_module.none")),
    ).save(lock)
    rows = {(one.kernel, one.what): one.here for one in check_pins(lock, H200).differences}
    assert set(rows) == {
        (name, "source"),
        (name, "config"),
        ("no.such.one", "kernel"),
        ("pinned_module.total", "source"),
        ("pinned_module.none", "kernel"),
    }
    assert rows[name, "config"] == "not among the kernel's configs"
    assert rows[name, "source"] == kernel.source
    assert check_pins(lock, None).differences[0].what == "device"


MODULE = """
import foretune
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": block}) for block in (32, 64)], key=["n"])
@triton.jit
def fill(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 1.0, mask=at < n)


@foretune.tune({"chunk": [64, 256]}, key=["rows"], n_warmup=1, n_repeat=1)
def total(rows, chunk=64):
    return sum(sum(range(at, min(at + chunk, rows))) for at in range(0, rows, chunk))
"""

"""Names and values that nobody expects, of devices, kernels, dimensions and knobs, in what is written for others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from foretune.datasets import KernelConfig, Problem
from foretune.kernels.fused_moe.engines import ENGINES, Layer
from foretune.kernels.fused_moe.tuned_files import Pair, Row, TunedFiles
from foretune.runtime.tuning.cache import exports
from foretune.runtime.tuning.cache.cache_folder import export_choices, import_choices
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache
from foretune.runtime.tuning.cache.known import known_kernels
from fuzz.caches import FOREIGN, _cache_in, _snapshot
from fuzz.judging import REFUSED, same, within
from fuzz.oddities import NUMBERS, TEXTS
from hypothesis import strategies as st
from remembered import CONFIGS, H200, KERNEL, remember

PATHS = [
    "../../x", "/abs/x", "..", ".", "../x.json", "x/../../y", "/", "//", "~", "a/b", "\\..\\x", "C:x", "NVIDIA H200",
    "NVIDIA-H200", "sm_90", "sm90", "x" * 200, "\U0001f600" * 60, "日本",
    '"', "'''", '"""', "\\", "{}", "%s", "${HOME}", "$(id)", "#", "- a: b", "*",
    "[a-z]", "__import__('os')", "\u2028", "\x7f", "\u202e",
]  # fmt: skip
words = st.sampled_from(PATHS) | st.sampled_from(PATHS + TEXTS) | st.text(min_size=1, max_size=12)
values = st.sampled_from([*NUMBERS, *PATHS]) | words | st.integers(1, 512)
#: What somebody else has in the folder that is written to: a file, or a link that leads out.
THERE = ["sm90.json", "autotune_profiles.yaml", "NVIDIA_H200", "NVIDIA_H200/kernel.json", "x", "out.py", "configs"]


class Written(NamedTuple):
    device: str = H200.name
    arch: str = H200.arch
    kernel: str = KERNEL
    dimension: str = "rows"
    flag: str = "f"
    dtype: Any = "bf16"
    knob: str = "BLOCK"
    value: Any = 16
    key: Any = 64
    triton: str = "3.6.0"
    engine: str = "vllm"
    there: str = ""
    linked: bool = False


_fields: dict[str, st.SearchStrategy[Any]] = {
    "device": words,
    "arch": words,
    "kernel": words,
    "dimension": words,
    "flag": words,
    "dtype": st.sampled_from(["fp16", "fp8e4m3", {"x": "bf16", "w": "int8"}]) | words.map(lambda word: {word: "bf16"}),
    "knob": words,
    "value": values,
    "key": values,
    "triton": words,
    "engine": st.sampled_from(ENGINES),
    "there": st.sampled_from(THERE),
    "linked": st.booleans(),
}
inputs = (
    st.lists(st.sampled_from([*_fields]), min_size=1, max_size=3, unique=True)
    .flatmap(lambda names: st.fixed_dictionaries({name: _fields[name] for name in names}))
    .map(lambda drawn: Written(**drawn))
)


def check(written: Written, folder: Path) -> str:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    out, outside = run / "in" / "out", run / "outside"
    out.mkdir(parents=True)
    outside.mkdir()
    (outside / "foreign").write_text(FOREIGN)
    if written.there:
        _put_there(out / written.there, outside, written.linked)
    foreign = _snapshot(out)
    with _cache_in(run / "cache"), chdir(run):
        remember()
        outcomes = [within(lambda: _remembered(written))]
        if outcomes[0] is REFUSED:
            return "refused"
        before = _snapshot(run)
        for work in (*_tables(out), lambda: _frozen(written, out), lambda: _tuned_files(written).save(out)):
            outcomes.append(within(work))
            after = _snapshot(run)
            for path in {*before, *after}:
                if path in foreign or not Path(path).is_relative_to(out):
                    same("a file outside, or somebody else's", (path, before.get(path)), (path, after.get(path)))
        within(lambda: _carried(written, run))
    same(
        "the parent folder",
        {"in", "cache", "outside", "elsewhere", "e.json"},
        {*os.listdir(run), "elsewhere", "e.json"},
    )
    return "refused in part" if REFUSED in outcomes else "answered"


def _put_there(path: Path, outside: Path, is_link: bool) -> None:
    path.parent.mkdir(exist_ok=True)
    if not is_link:
        path.write_text(FOREIGN)
    elif path.suffix:
        path.symlink_to(outside / "foreign")
    else:
        path.symlink_to(outside)


def _remembered(written: Written) -> None:
    """Times of a kernel with these names, as tuning would keep them."""
    device = replace(H200, name=written.device, arch=written.arch)
    cache = ChoiceCache.of(written.kernel, "s1", device)
    for rows in (8, 64):
        cache.record_all(
            _problem(written, rows), {config: rows + place for place, config in enumerate(_configs(written))}
        )
        cache.saw_launch(_problem(written, rows), [written.dimension], [written.key, rows, written.flag])


def _problem(written: Written, rows: int) -> Problem:
    return Problem.of(written.kernel, dtype=written.dtype, flags=(written.flag,), **{written.dimension: rows})


def _configs(written: Written) -> tuple[KernelConfig, ...]:
    return KernelConfig.of(**{written.knob: written.value}), CONFIGS[0]


def _tables(out: Path) -> list[Callable[[], Any]]:
    def write() -> None:
        for path in exports.export_fla_tables(out).files:
            json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=lambda word: same("no JSON", "", word))

    return [write]


def _frozen(written: Written, out: Path) -> None:
    frozen = exports.freeze_choices(written.kernel)
    frozen.save(out / "out.py")
    names: dict[str, Any] = {}
    exec(compile((out / "out.py").read_text(encoding="utf-8"), "out.py", "exec"), names)
    for known in known_kernels(written.kernel):
        for one in known.problems:
            problem = one.problem
            chosen = names["choose"](dict(problem.dims), problem.dtype_name, problem.flags, known.device.name)
            if frozen.measured == (1.0, 1.0, frozen.problems):
                same("frozen", str(one.best), str(KernelConfig.from_json(chosen)))


def _tuned_files(written: Written) -> TunedFiles:
    device = replace(H200, name=written.device, arch=written.arch)
    config = KernelConfig.of(
        BLOCK_SIZE_M=16, BLOCK_SIZE_N=64, BLOCK_SIZE_K=64, GROUP_SIZE_M=1, num_warps=4, num_stages=3
    )
    rows = (Row(1, Pair.alike(config).entries, "", {"ours": 1.0, "default": 2.0}),)
    layer = Layer(8, 2, 64, 64)
    return TunedFiles(written.engine, layer, device, written.triton, rows, False, 1.0, "")


def _carried(written: Written, run: Path) -> None:
    """What was exported is imported as it was."""
    before = known_kernels(None)
    export_choices(run / "e.json")
    with _cache_in(run / "elsewhere"):
        import_choices(run / "e.json")
        there = {(one.kernel, one.device): one for one in known_kernels(None)}
        same("imported", {(one.kernel, one.device): one for one in before}, there)

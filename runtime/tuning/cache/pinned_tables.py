"""What the cache knows, in the files that other projects' own autotuners read: Megatron's pinned table, FLA's config
files and Axolotl's profiles.

Megatron and FLA look a launch up by Triton's own key of it, which is known of launches that were seen
(`ChoiceCache.saw_launch`); of others they get the one config that is best for all problems together.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError, KernelConfig
from ....datasets.errors import shown
from ....datasets.files import check_folder, check_replaceable, file_word, inside, replacing
from .cache_folder import KnownKernel, cache_contents, known_kernels

#: What a config counts as on a problem where it was not timed: a slowdown.
_UNTIMED = 2.0


@dataclass(frozen=True)
class Exported:
    """The files that were written, and for how many launches, beside those for all launches of a kernel."""

    format: str
    files: tuple[str, ...]
    launches: int

    def to_json(self) -> dict[str, Any]:
        return {"format": self.format, "files": list(self.files), "launches": self.launches}

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(f"Written for {self.launches} launches: {', '.join(self.files)}")


def export_tables(out: Path | str, format: str, kernel: str | None = None) -> Exported:
    """Writes what the cache knows, of all kernels or of one, into a folder, in the format of "megatron", "fla" or
    "axolotl". Of each kernel and device it is what was found out with the source and the software of the newest entry.

    Files are named by words of the devices and kernels and lie in the folder, whatever these are called.

    Raises `ForetuneError` for another format, a folder that cannot be written, a file in it that is something else, and
    where nothing is known.

    >>> export_tables("tables", "megatron").files  # doctest: +SKIP
    ('tables/sm90.json',)
    """
    if format not in FORMATS:
        raise ForetuneError(f"format must be one of {', '.join(FORMATS)} but is {shown(format)}")
    check_folder(out)
    found = known_kernels(kernel) if kernel is not None else cache_contents().kernels
    kernels = [one for one in map(KnownKernel.latest, found) if any(problem.best for problem in one.problems)]
    if not kernels:
        raise ForetuneError("nothing that could be exported is remembered: no time and no choice")
    write, mark = FORMATS[format]
    files = {inside(out, name): text for name, text in write(kernels).items()}
    for path in files:
        check_folder(path.parent)
        if path.exists() and not path.is_file():
            raise ForetuneError(f"{path} is not a regular file, so no table is written in its place")
        check_replaceable(path, lambda content: mark in content, f"a table that Foretune wrote for {format}")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return Exported(format, tuple(map(str, files)), sum(len(_launches(one)) for one in kernels))


def _megatron(kernels: Sequence[KnownKernel]) -> dict[str, str]:
    """A file an arch: {"arch", "triton", "packages", "source", "kernels": {kernel: {launch: config}}}, where a launch
    is "M=8|N=64|torch.bfloat16" and "*" stands for all others.

    Newer Megatrons ask for a kernel by module and name, older ones by name alone: it is there by both, unless two
    kernels share the name.
    """
    files: dict[str, str] = {}
    for arch in dict.fromkeys(one.device.arch.replace("_", "") for one in kernels):
        mine = [one for one in kernels if one.device.arch.replace("_", "") == arch]
        tables: dict[str, Any] = {}
        for one in mine:
            entries = {_megatron_key(launch): _config(config) for config, launch in _launches(one)}
            # A kernel that prunes its configs itself may not be able to run any one config everywhere.
            is_pruned = any("config" in launch for _, launch in _launches(one))
            others = {} if is_pruned else {"*": _config(_best_for_all(one))}
            tables[one.kernel] = {**tables.get(one.kernel, {}), **entries, **others}
        short = [_short(name) for name in tables]
        tables |= {_short(name): tables[name] for name in list(tables) if short.count(_short(name)) == 1}
        content = {
            "arch": arch,
            "triton": mine[-1].problems[-1].software.triton,
            "packages": {},
            "source": "foretune",
            "kernels": tables,
        }
        files[_unused(files, file_word(arch, "0-9A-Za-z-"), arch)] = (
            json.dumps(content, indent=1, sort_keys=True) + "\n"
        )
    return files


def _megatron_key(launch: Mapping[str, Any]) -> str:
    names, key = launch["names"], launch["key"]
    values = [f"{name}={value}" for name, value in zip(names, key, strict=False)]
    return "|".join([*values, *map(str, key[len(names) :])])


def _fla(kernels: Sequence[KnownKernel]) -> dict[str, str]:
    """A folder a device, for FLA_CONFIG_DIR, and in it a file a kernel, by its bare name: entries by the MD5 of
    Triton's key as compact JSON, and a config for all others."""
    files: dict[str, str] = {}
    for one in kernels:
        entries = {}
        for config, launch in _launches(one):
            text = json.dumps(launch["key"], separators=(",", ":"), sort_keys=True)
            digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
            entries[digest] = {"autotune_key": launch["key"], "config": _config(config)}
        content = {
            "kernel_name": _short(one.kernel),
            "triton_version": one.problems[-1].software.triton,
            "autotune_entries": entries,
            "default_config": _config(_best_for_all(one)),
        }
        stem = f"{file_word(one.device.name)}/{file_word(_short(one.kernel), '0-9A-Za-z_-')}"
        files[_unused(files, stem, f"{one.device.name} {one.kernel}")] = json.dumps(content, indent=1) + "\n"
    return files


def _axolotl(kernels: Sequence[KnownKernel]) -> dict[str, str]:
    """One YAML file: `autotune_profiles`, a list of kernel, gpu, match (dimensions) and configs, the best first."""
    lines = [_AXOLOTL_HEAD, "autotune_profiles:"]
    for one in kernels:
        for problem in one.problems:
            if problem.best is None:
                continue
            match = json.dumps(dict(problem.problem.dims))
            ranked = sorted(
                (config for config, time_us in problem.times_us.items() if time_us is not None),
                key=lambda config: problem.times_us[config] or 0.0,
            )
            lines += [f"  - kernel: {json.dumps(_short(one.kernel))}", f"    gpu: {json.dumps(one.device.name)}"]
            lines += [f"    match: {match}", "    configs:"]
            lines += [f"      - {json.dumps(config.to_json())}" for config in ranked[:4] or [problem.best]]
    return {"autotune_profiles.yaml": "\n".join(lines) + "\n"}


_AXOLOTL_HEAD = "# Written by foretune cache export."
#: What writes the files of a format, and what is in each of them alone: FLA's own files have another indentation.
FORMATS: dict[str, tuple[Callable[[Sequence[KnownKernel]], dict[str, str]], bytes]] = {
    "megatron": (_megatron, b'\n "source": "foretune",\n'),
    "fla": (_fla, b'{\n "kernel_name": "'),
    "axolotl": (_axolotl, _AXOLOTL_HEAD.encode()),
}


def _unused(files: Collection[str], stem: str, of: str) -> str:
    """A file's name that none of the files has: with a digest of what it is of, where another's is written alike."""
    name = f"{stem}.json"
    return name if name not in files else f"{stem}-{hashlib.sha256(of.encode()).hexdigest()[:12]}.json"


def _launches(known: KnownKernel) -> list[tuple[KernelConfig, Mapping[str, Any]]]:
    """Each launch and its config: its own where the kernel prunes its configs itself, else its problem's best."""
    return [
        (KernelConfig.from_json(launch["config"]) if "config" in launch else problem.best, launch)
        for problem in known.problems
        if problem.best
        for launch in problem.launches
    ]


def _best_for_all(known: KnownKernel) -> KernelConfig:
    """The config with the least mean logarithm of the slowdown over all problems; one that failed anywhere is none."""
    costs: dict[KernelConfig, float] = {}
    problems = [problem for problem in known.problems if problem.best is not None]
    configs = dict.fromkeys(config for problem in problems for config in (problem.best, *problem.times_us) if config)
    for config in configs:
        costs[config] = 0.0
        for problem in problems:
            timed = [time_us for time_us in problem.times_us.values() if time_us is not None]
            time_us = problem.times_us.get(config, math.nan)
            if time_us is None:
                costs[config] = math.inf
            elif not timed:
                costs[config] += 0.0 if config == problem.best else math.log(_UNTIMED)
            else:
                costs[config] += math.log(_UNTIMED if math.isnan(time_us) else time_us / min(timed))
    return min(costs, key=costs.__getitem__)


def _config(config: KernelConfig | None) -> dict[str, Any]:
    """Every option is there, also those that are unset: both projects compare or read all of them."""
    assert config is not None
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    return {"kwargs": dict(config.meta)} | {name: getattr(config, name) for name in options}


def _short(kernel: str) -> str:
    """What the kernel's function is called."""
    return kernel.rpartition(".")[2] or kernel

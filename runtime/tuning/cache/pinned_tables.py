"""`export_fla_tables`: what the cache knows, in the files that FLA's autotuner reads (FLA_CONFIG_DIR).

FLA looks a launch up by Triton's own key of it, which is known of launches that were seen (`ChoiceCache.saw_launch`).
For other launches it gets the one config that is best for all problems together.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError, KernelConfig
from ....datasets.disk.atomic import replacing
from ....datasets.disk.regular import check_replaceable, file_word, inside
from ....datasets.disk.writable import check_folder
from .cache_folder import KnownKernel, cache_contents, known_kernels

#: What a config counts as on a problem where it was not timed: a slowdown.
_UNTIMED = 2.0


#: What no file but ours begins with: FLA's own files have another indentation.
MARK = b'{\n "kernel_name": "'


@dataclass(frozen=True)
class Exported:
    """The files that were written, and for how many launches, beside those for all launches of a kernel."""

    files: tuple[str, ...]
    launches: int

    def to_json(self) -> dict[str, Any]:
        return {"format": "fla", "files": list(self.files), "launches": self.launches}

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(f"Written for {self.launches} launches: {', '.join(self.files)}")


def export_fla_tables(out: Path | str, kernel: str | None = None) -> Exported:
    """Write what the cache knows, of all kernels or of one, into a folder for FLA.

    Of each kernel and device it is what was measured with the source and the software of the newest entry. Files are
    named by words of the devices and kernels and lie in the folder, whatever these are called.

    Raises:
        ForetuneError: The folder cannot be written, a file in it is something else, or nothing is known.

    >>> export_fla_tables("tables").files  # doctest: +SKIP
    ('tables/NVIDIA_H200/softmax_kernel.json',)
    """
    check_folder(out)
    found = known_kernels(kernel) if kernel is not None else cache_contents().kernels
    kernels = [one for one in map(KnownKernel.latest, found) if any(problem.best for problem in one.problems)]
    if not kernels:
        raise ForetuneError("nothing that could be exported is remembered: no time and no choice")
    files = {inside(out, name): text for name, text in _tables(kernels).items()}
    for path in files:
        check_folder(path.parent)
        if path.exists() and not path.is_file():
            raise ForetuneError(f"{path} is not a regular file, so no table is written in its place")
        check_replaceable(path, lambda content: MARK in content, "a table that Foretune wrote for fla")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return Exported(tuple(map(str, files)), sum(len(_launches(one)) for one in kernels))


def _tables(kernels: Sequence[KnownKernel]) -> dict[str, str]:
    """Return files by name: a folder for each device, and in it a file for each kernel, by its bare name.

    A file has an entry for each launch, by the MD5 of Triton's key as compact JSON, and a config for all others.
    """
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
        if (name := f"{stem}.json") in files:  # another device or kernel is written alike
            name = f"{stem}-{hashlib.sha256(f'{one.device.name} {one.kernel}'.encode()).hexdigest()[:12]}.json"
        files[name] = json.dumps(content, indent=1) + "\n"
    return files


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
    """Every option is there, also those that are unset: FLA reads all of them."""
    assert config is not None
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    return {"kwargs": dict(config.meta)} | {name: getattr(config, name) for name in options}


def _short(kernel: str) -> str:
    """What the kernel's function is called."""
    return kernel.rpartition(".")[2] or kernel

"""Export pinned choices for programs without Foretune: as a plain Python file, or as tables for FLA's autotuner."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

from ....datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem
from ....datasets.console import percent, printable
from ....datasets.errors import abridged, check_integer
from ....datasets.files import check_file, check_folder, check_replaceable, file_word, inside, replacing
from ...pin_file import PinFile, PinnedKernel
from ...shortlist import bundle_of
from .decision_list import UNKNOWN, Example, Rule, learn_rules
from .known import known_kernels
from .pinning import pins_of_kernel, pins_of_predictions, predicted_slowdowns_of

if TYPE_CHECKING:
    from ....model import Bundle

#: The upper limit of the number of rules: far more than are readable or useful.
MOST_RULES = 1000
#: A line that identifies a frozen file.
_MARK = "#: Meta-parameters and launch options of each config."
#: The beginning of our tables for FLA; FLA's own files have another indentation.
FLA_MARK = b'{\n "kernel_name": "'
#: The geometric mean slowdown, the worst slowdown, and the number of problems.
Loss: TypeAlias = "tuple[float, float, int]"
Slowdowns: TypeAlias = "Mapping[KernelConfig, float]"


@dataclass(frozen=True)
class Frozen:
    """A Python function, as source code, that chooses a kernel's config by rules, and how much time the rules lose.

    Attributes:
        kernel: The kernel's name.
        source: The code.
        rules: The number of rules ("if") in it.
        problems: The number of problems that the choices were made for.
        devices: The names of the devices.
        measured: Slowdowns over the best measured config of each problem; None if nothing was measured.
        predicted: Slowdowns over the best predicted config of each problem; None if nothing predicts.
    """

    kernel: str
    source: str
    rules: int
    problems: int
    devices: tuple[str, ...]
    measured: Loss | None
    predicted: Loss | None

    def save(self, path: Path | str) -> None:
        """Write the file atomically.

        Raises:
            ForetuneError: The file cannot be written, or it exists and was not written by `foretune cache freeze`.
        """
        check_frozen_file(path)
        with replacing(path) as temporary:
            temporary.write_text(self.source, encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a dict for JSON, without the source."""
        return {
            "kernel": self.kernel,
            "rules": self.rules,
            "problems": self.problems,
            "devices": list(self.devices),
            "over_measured_best": _loss_to_json(self.measured),
            "over_predicted_best": _loss_to_json(self.predicted),
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        loss = "; compared with ".join(_loss_lines(self.measured, self.predicted))
        return Text(printable(f"{self.kernel}: {self.rules} rules for {self.problems} problems; compared with {loss}."))


def check_frozen_file(path: Path | str) -> None:
    """Raise `ForetuneError` if `Frozen.save` would refuse to write this file."""
    check_file(path)
    check_replaceable(path, lambda content: _MARK.encode() in content, "a file that foretune cache freeze wrote")


def freeze_choices(
    kernel: str,
    *,
    pins: PinFile | None = None,
    family: Family | None = None,
    bundle: Bundle | Path | str | None = None,
    most_rules: int = 32,
) -> Frozen:
    """Turn the choices of a kernel, on all devices, into source code.

    Args:
        kernel: The kernel's name in `foretune cache show`.
        pins: The content of a pin file. If left out, the newest results in the choice cache are used, and the rules are
            learned from its times.
        family: The kernel's family. With it, and without `pins`, the loss against the configs that the bundle predicts
            to be fastest is reported too, for devices that the bundle knows.
        bundle: The bundle that predicts; the shipped one if left out.
        most_rules: The maximum number of rules.

    Raises:
        ForetuneError: There are no choices of that kernel.

    >>> freeze_choices("module.kernel").save("heuristic.py")  # doctest: +SKIP
    """
    check_integer("the number of rules", most_rules, 1, MOST_RULES)
    pinned = _pinned(kernel, pins)
    if not pinned:
        raise ForetuneError(f"the cache has no times or choices of {kernel}: there is nothing to freeze")
    origins = [
        f"{one.device.name}: source {one.source}, "
        + ", ".join(f"{name} {value}" for name, value in one.versions._asdict().items() if value)
        for one in pinned
    ]
    predicted: list[Slowdowns] = []
    if family is not None and pins is None:
        given = bundle_of(bundle)
        predicted = [
            (one.spec and predicted_slowdowns_of(family, choice.problem, one.spec, given)) or {}
            for one in pinned
            for choice in one.choices.values()
        ]
    return _frozen(kernel, "tuned", pinned, origins, most_rules, predicted)


def freeze_predictions(
    family: Measurable,
    device: DeviceSpec | Path | str,
    *,
    bundle: Bundle | Path | str | None = None,
    cases: Sequence[Problem] | None = None,
    most_rules: int = 32,
) -> Frozen:
    """Turn a bundle's predictions for a family on a device into source code.

    Args:
        family: The family.
        device: The device.
        bundle: The bundle; the shipped one if left out.
        cases: The problems; the family's own workload if left out.
        most_rules: The maximum number of rules.

    Raises:
        ForetuneError: The family has no workload, or the bundle has no prediction for that device.

    >>> freeze_predictions(family, "h200").save("heuristic.py")  # doctest: +SKIP
    """
    from ....model import load_bundle

    check_integer("the number of rules", most_rules, 1, MOST_RULES)
    if cases is None and not isinstance(family, Measurable):
        raise ForetuneError(f"{family.name} only predicts: it has no workload to freeze choices for")
    problems = [case.problem for case in family.cases()] if cases is None else list(cases)
    pinned = pins_of_predictions(family, problems, device, bundle=bundle)
    if not pinned.choices:
        raise ForetuneError(f"the workload of {family.name} is empty: there is nothing to freeze")
    origins = [f"{pinned.device.name}: predicted by bundle {(bundle_of(bundle) or load_bundle()).digest[:12]}"]
    predicted = [choice.slowdowns for choice in pinned.choices.values()]
    return _frozen(family.name, "predicted", [pinned], origins, most_rules, predicted, are_measured=False)


def _pinned(kernel: str | None, pins: PinFile | None) -> list[PinnedKernel]:
    """Return the pinned choices of a kernel (None: of all kernels), from a pin file or else from the choice cache."""
    if pins is None:
        return [one for one in map(pins_of_kernel, known_kernels(kernel)) if one is not None]
    covered = [one for one in pins.kernels if one.choices]
    found = [one for one in covered if kernel in (None, one.kernel)]
    if not found:
        known = ", ".join(sorted({one.kernel for one in covered})) or "no kernel"
        raise ForetuneError(f"the pin file does not cover {kernel or 'a kernel'}: it covers {abridged(known)}")
    return found


def _examples(pinned: PinnedKernel) -> list[Example]:
    """Return the choices of a kernel as examples for `learn_rules`."""
    return [
        Example(one.problem.without_sizes(), pinned.device.name, one.slowdowns or {one.config: 1.0})
        for one in pinned.choices.values()
    ]


def _frozen(
    kernel: str,
    how: str,
    pinned: Sequence[PinnedKernel],
    origins: Sequence[str],
    most_rules: int,
    predicted_slowdowns: Sequence[Slowdowns],  # one for each choice; empty if nothing was predicted
    *,
    are_measured: bool = True,
) -> Frozen:
    """Learn rules from pinned choices, write them as source, and compute how much time they lose.

    The docstring of the source says how the choices were made (`how`) and has the lines `origins`.
    `predicted_slowdowns` has the predicted slowdowns of each choice's configs, or is empty. `are_measured` says whether
    the choices have measured slowdowns.
    """
    examples = [example for one in pinned for example in _examples(one)]
    measured_slowdowns = [example.slowdowns for example in examples] if are_measured else []
    rules = learn_rules(examples, most_rules)
    chosen = _run(_source([], rules), examples)  # runs the generated source itself
    measured, predicted = _loss(measured_slowdowns, chosen), _loss(predicted_slowdowns, chosen)
    devices = tuple(dict.fromkeys(example.device for example in examples))
    lines = [
        f"Configs of {kernel}, {how} on {', '.join(devices)}: {len(rules)} rules for {len(examples)} problems.",
        "",
        *origins,
        "",
        *(f"Compared with {line}." for line in _loss_lines(measured, predicted)),
        "",
        "These losses are for the problems that the rules were made from; configs suit shapes near those. The",
        "rules do not check whether the kernel can run a config: check its conditions (such as divisible dimensions).",
    ]
    return Frozen(kernel, _source(lines, rules), len(rules), len(examples), devices, measured, predicted)


def _source(lines: Sequence[str], rules: Sequence[Rule]) -> str:
    """Return the Python source of rules, with these lines as its docstring."""
    configs = list(dict.fromkeys(rule.config for rule in rules))
    body = []
    for rule in rules:
        if rule.conditions:
            body.append(f"    if {' and '.join(rule.conditions)}:")
        body.append(f"    {'    ' if rule.conditions else ''}return dict(CONFIGS[{configs.index(rule.config)}])")
    text = "\n".join(lines).replace("\\", "\\\\").replace('"', '\\"')
    return "\n".join(
        (
            f'"""{text}\n"""' if lines else '""""""',
            "",
            _MARK,
            "CONFIGS = (",
            *(f"    {config.to_json()!r}," for config in configs),
            ")",
            "",
            "",
            'def choose(dims, dtype="bf16", flags=(), device=""):',
            '    """Return the config for a problem, as a dict of meta-parameters and launch options.',
            "",
            "    `dims` are the problem's dimensions by name. `dtype` is that of all operands, or a text such as",
            '    "w=int4,x=bf16". `flags` are the layout flags that are set. `device` is the name of the GPU.',
            '    """',
            *body,
            "",
        )
    )


def _run(source: str, examples: Sequence[Example]) -> list[KernelConfig]:
    """Execute the code of a frozen file, and return the config that its function `choose` returns for each example."""
    names: dict[str, Any] = {}
    exec(compile(source, "<frozen choices>", "exec"), names)
    return [
        KernelConfig.from_json(
            names["choose"](
                dict(example.problem.dims), example.problem.dtype_name, example.problem.flags, example.device
            )
        )
        for example in examples
    ]


def _loss(slowdowns: Sequence[Slowdowns], chosen: Sequence[KernelConfig]) -> Loss | None:
    """Return the loss of the chosen configs over the problems with a known slowdown; None if there are none."""
    known = [of_problem.get(config, math.inf) for of_problem, config in zip(slowdowns, chosen, strict=False)]
    known = [slowdown for slowdown in known if math.isfinite(slowdown)]
    return (math.exp(fmean(map(math.log, known))), max(known), len(known)) if known else None


def _loss_to_json(loss: Loss | None) -> dict[str, Any] | None:
    """Return a loss as a dict for JSON."""
    if loss is None:
        return None
    mean, worst, problems = loss
    return {"geometric_mean": round(mean, 4), "worst": round(worst, 4), "problems": problems}


def _loss_lines(measured: Loss | None, predicted: Loss | None) -> list[str]:
    """Return a line of text for each known loss."""
    losses = (("the best measured config", measured), ("the best predicted config", predicted))
    lines = [
        f"{what}: {percent(loss[0])} % slower (geometric mean of {loss[2]} problems), {percent(loss[1])} % at worst"
        for what, loss in losses
        if loss is not None
    ]
    return lines or ["the best config: unknown, because nothing was measured or predicted"]


@dataclass(frozen=True)
class ExportedTables:
    """The files that `export_fla_tables` wrote, and the number of launches that have an entry in them."""

    files: tuple[str, ...]
    launches: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict for JSON."""
        return {"format": "fla", "files": list(self.files), "launches": self.launches}

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(f"Written for {self.launches} launches: {', '.join(self.files)}")


def export_fla_tables(out: Path | str, kernel: str | None = None, pins: PinFile | None = None) -> ExportedTables:
    """Write the choices of all kernels, or of one, into a folder as config files of flash-linear-attention (FLA).

    File names are made from the names of devices and kernels, and never lead out of the folder.

    Args:
        out: The folder.
        kernel: The kernel's name; None for all.
        pins: The content of a pin file; the choice cache's newest results if left out.

    Raises:
        ForetuneError: The folder cannot be written, a file in it is not such a table, or there are no choices.

    >>> export_fla_tables("tables").files  # doctest: +SKIP
    ('tables/NVIDIA_H200/softmax_kernel.json',)
    """
    check_folder(out)
    pinned = _pinned(kernel, pins)
    if not pinned:
        raise ForetuneError("there is nothing to export: the cache has no times and no choices")
    files = {inside(out, name): text for name, text in _tables(pinned).items()}
    for path in files:
        check_folder(path.parent)
        if path.exists() and not path.is_file():
            raise ForetuneError(f"{path} is not a regular file, so no table is written in its place")
        check_replaceable(path, lambda content: FLA_MARK in content, "a table that Foretune wrote for fla")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return ExportedTables(tuple(map(str, files)), sum(len(_launches(one)) for one in pinned))


def _tables(pinned: Sequence[PinnedKernel]) -> dict[str, str]:
    """Return the files' contents by name: a folder per device, and in it a file per kernel, by its unqualified name.

    A file has an entry for each launch, under the MD5 of Triton's key as compact JSON, and a default config.
    """
    files: dict[str, str] = {}
    for one in pinned:
        entries = {}
        for config, key in _launches(one):
            text = json.dumps(key, separators=(",", ":"), sort_keys=True)
            digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
            entries[digest] = {"autotune_key": key, "config": _config(config)}
        short = one.kernel.rpartition(".")[2]
        content = {
            "kernel_name": short,
            "triton_version": one.versions.triton,
            "autotune_entries": entries,
            "default_config": _config(_best_for_all(one)),
        }
        stem = f"{file_word(one.device.name)}/{file_word(short, '0-9A-Za-z_-')}"
        if (name := f"{stem}.json") in files:  # another device or kernel has the same file name
            name = f"{stem}-{hashlib.sha256(f'{one.device.name} {one.kernel}'.encode()).hexdigest()[:12]}.json"
        files[name] = json.dumps(content, indent=1) + "\n"
    return files


def _launches(pinned: PinnedKernel) -> list[tuple[KernelConfig, list[Any]]]:
    """Return the config and Triton's key of each known launch of a kernel's choices."""
    return [
        (choice.config_of(launch["key"]), launch["key"])
        for choice in pinned.choices.values()
        for launch in choice.launches
    ]


def _best_for_all(pinned: PinnedKernel) -> KernelConfig:
    """Return a kernel's config with the least geometric mean slowdown over all problems."""
    examples = _examples(pinned)
    configs = dict.fromkeys(config for example in examples for config in example.slowdowns)
    return min(configs, key=lambda config: sum(math.log(one.slowdowns.get(config, UNKNOWN)) for one in examples))


def _config(config: KernelConfig) -> dict[str, Any]:
    """Return a config in FLA's format, with all options, because FLA reads even those that are unset."""
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    return {"kwargs": dict(config.meta)} | {name: getattr(config, name) for name in options}

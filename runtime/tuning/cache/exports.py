"""What the cache knows, for programs without it: one plain Python file, or the tables that FLA's autotuner reads."""

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
from ....datasets.errors import check_integer
from ....datasets.files import check_file, check_folder, check_replaceable, file_word, inside, replacing
from ...how_many import HowMany
from ...shortlist import bundle_of, chooser_of
from .decision_list import UNKNOWN, Example, Rule, learn_rules
from .known import KnownKernel, known_kernels

if TYPE_CHECKING:
    from ....model import Bundle

#: More rules than anybody reads, and than any gain would need.
MOST_RULES = 1000
#: A line that every frozen file has.
_MARK = "#: Meta-parameters and launch options of each config."
#: What our tables for FLA begin with: FLA's own files have another indentation.
FLA_MARK = b'{\n "kernel_name": "'
#: The mean and the worst slowdown, over so many problems.
Loss: TypeAlias = "tuple[float, float, int]"
Slowdowns: TypeAlias = "Mapping[KernelConfig, float]"


@dataclass(frozen=True)
class Frozen:
    """Choices as source code, and what they lose over the best config of each problem, measured or predicted; None
    where nothing was."""

    kernel: str
    source: str
    rules: int
    problems: int
    devices: tuple[str, ...]
    measured: Loss | None
    predicted: Loss | None

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all.

        Raises:
            ForetuneError: It cannot be written, or there is a file that is no frozen one.
        """
        check_frozen_file(path)
        with replacing(path) as temporary:
            temporary.write_text(self.source, encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
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

        loss = "; next to ".join(_loss_lines(self.measured, self.predicted))
        return Text(printable(f"{self.kernel}: {self.rules} rules for {self.problems} problems; next to {loss}."))


def check_frozen_file(path: Path | str) -> None:
    """Raise `ForetuneError` where `Frozen.save` would."""
    check_file(path)
    check_replaceable(path, lambda content: _MARK.encode() in content, "a file that foretune cache freeze wrote")


def freeze_choices(
    kernel: str,
    *,
    family: Family | None = None,
    bundle: Bundle | Path | str | None = None,
    most_rules: int = 32,
) -> Frozen:
    """Freeze what the cache knows of a kernel on all its devices, with the newest source and software of each.

    Args:
        kernel: Its name, as `foretune cache show` has it.
        family: The kernel's family: then the loss against the bundle is reported too, where that knows the device.
        bundle: The bundle for that; the shipped one if left out.
        most_rules: Write at most so many rules.

    Raises:
        ForetuneError: The cache knows nothing of that kernel.

    >>> freeze_choices("module.kernel").save("heuristic.py")  # doctest: +SKIP
    """
    check_integer("the number of rules", most_rules, 1, MOST_RULES)
    known = [one.latest() for one in known_kernels(kernel)]
    examples = [example for one in known for example in _examples(one)]
    if not examples:
        raise ForetuneError(f"no time and no choice of {kernel} is remembered: there is nothing to freeze")
    origins = [
        f"{one.device.name}: source {one.problems[-1].source}, "
        + ", ".join(f"{name} {value}" for name, value in vars(one.problems[-1].software).items() if value)
        for one in known
        if one.problems
    ]
    predicted: list[Slowdowns] = []
    if family is not None:
        specs, given = {one.device.name: one.device for one in known}, bundle_of(bundle)
        predicted = [_predicted(family, one.problem, specs[one.device], given) or {} for one in examples]
    measured = [example.slowdowns for example in examples]
    return _frozen(kernel, "remembered from tuning", examples, origins, most_rules, measured, predicted)


def freeze_predictions(
    family: Measurable,
    device: DeviceSpec | Path | str,
    *,
    bundle: Bundle | Path | str | None = None,
    cases: Sequence[Problem] | None = None,
    most_rules: int = 32,
) -> Frozen:
    """Freeze what a bundle predicts for a family on a device, over the family's own workload or `cases`.

    Raises:
        ForetuneError: The family has no workload, or the bundle predicts nothing for that device.

    >>> freeze_predictions(family, "h200").save("heuristic.py")  # doctest: +SKIP
    """
    from ....model import load_bundle

    check_integer("the number of rules", most_rules, 1, MOST_RULES)
    if cases is None and not isinstance(family, Measurable):
        raise ForetuneError(f"{family.name} only predicts: it has no workload to freeze choices for")
    spec = DeviceSpec.find(device)
    problems = [case.problem for case in family.cases()] if cases is None else list(cases)
    given = bundle_of(bundle)
    used = given or load_bundle()
    known = {one.arch for one in used.trained_on(family.name)}
    if spec.arch not in known:  # what is tried there is many configs, and a file has one
        raise ForetuneError(
            f"the bundle learned {family.name} on {', '.join(sorted(known))} and predicts nothing sure for "
            f"{spec.name}, {spec.arch}: train one that does"
        )
    examples, never = [], dict.fromkeys(family.space(spec), math.inf)  # what is not predicted cannot run
    for problem in dict.fromkeys(map(family.at_call_time, problems)):
        slowdowns = _predicted(family, problem, spec, given)
        if slowdowns is None:
            raise ForetuneError(f"the bundle predicts nothing for {family.name} on {spec.name}: train one that does")
        examples.append(Example(problem, spec.name, {**never, **slowdowns}))
    if not examples:
        raise ForetuneError(f"the workload of {family.name} is empty: there is nothing to freeze")
    origins = [f"{spec.name}: predicted by bundle {used.digest[:12]}"]
    predicted = [example.slowdowns for example in examples]
    return _frozen(family.name, "predicted", examples, origins, most_rules, [], predicted)


def _examples(known: KnownKernel) -> list[Example]:
    found = []
    for one in known.problems:
        times = {config: time_us for config, time_us in one.times_us.items() if time_us is not None}
        if times:
            best = min(times.values())
            slowdowns = dict.fromkeys(one.times_us, math.inf) | {c: t / best for c, t in times.items()}
        elif one.best is not None:
            slowdowns = {one.best: 1.0}
        else:
            continue
        found.append(Example(one.problem.without_sizes(), known.device.name, slowdowns))
    return found


def _predicted(family: Family, problem: Problem, device: DeviceSpec, bundle: Bundle | None) -> Slowdowns | None:
    """Return the predicted slowdowns of all configs that can run a problem; None where nothing is predicted."""
    chooser = chooser_of(family, device, bundle=bundle)
    answer = chooser.choose(problem, HowMany(len(chooser.configs)))
    return dict(zip(answer.configs, answer.predicted_slowdown, strict=True)) if answer.predicted else None


def _frozen(
    kernel: str,
    how: str,
    examples: Sequence[Example],
    origins: Sequence[str],
    most_rules: int,
    measured_slowdowns: Sequence[Slowdowns],  # of each example; empty where nothing was measured
    predicted_slowdowns: Sequence[Slowdowns],
) -> Frozen:
    rules = learn_rules(examples, most_rules)
    chosen = _run(_source(kernel, [], rules), examples)  # what the very file answers, not what we think that it would
    measured, predicted = _loss(measured_slowdowns, chosen), _loss(predicted_slowdowns, chosen)
    devices = tuple(dict.fromkeys(example.device for example in examples))
    lines = [
        f"Configs of {kernel}, {how} on {', '.join(devices)}: {len(rules)} rules for {len(examples)} problems.",
        "",
        *origins,
        "",
        *(f"Next to {line}." for line in _loss_lines(measured, predicted)),
        "",
        "That is for the problems it was made of; a config is good for shapes near those. Whether the kernel can run",
        "it for another one is not asked: check the kernel's own conditions (divisible dimensions, say) yourself.",
    ]
    return Frozen(kernel, _source(kernel, lines, rules), len(rules), len(examples), devices, measured, predicted)


def _source(kernel: str, lines: Sequence[str], rules: Sequence[Rule]) -> str:
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
            '    """The config for a problem: `dims` has its dimensions by name; `dtype` is one name for all operands,',
            '    or "w=int4,x=bf16"; `flags` are the layout flags that are set; `device` names the card."""',
            *body,
            "",
        )
    )


def _run(source: str, examples: Sequence[Example]) -> list[KernelConfig]:
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
    """Return what the chosen configs lose, over the problems where that is known; None where it never is."""
    known = [of_problem.get(config, math.inf) for of_problem, config in zip(slowdowns, chosen, strict=False)]
    known = [slowdown for slowdown in known if math.isfinite(slowdown)]
    return (math.exp(fmean(map(math.log, known))), max(known), len(known)) if known else None


def _loss_to_json(loss: Loss | None) -> dict[str, Any] | None:
    if loss is None:
        return None
    mean, worst, problems = loss
    return {"geometric_mean": round(mean, 4), "worst": round(worst, 4), "problems": problems}


def _loss_lines(measured: Loss | None, predicted: Loss | None) -> list[str]:
    losses = (("the best config that was measured", measured), ("the best that the bundle predicts", predicted))
    lines = [
        f"{what}: {percent(loss[0])} % slower (geometric mean of {loss[2]} problems), {percent(loss[1])} % at worst"
        for what, loss in losses
        if loss is not None
    ]
    return lines or ["what would be best, which nothing tells: not known"]


@dataclass(frozen=True)
class ExportedTables:
    """The files that were written, and for how many launches they have a config of its own."""

    files: tuple[str, ...]
    launches: int

    def to_json(self) -> dict[str, Any]:
        return {"format": "fla", "files": list(self.files), "launches": self.launches}

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(f"Written for {self.launches} launches: {', '.join(self.files)}")


def export_fla_tables(out: Path | str, kernel: str | None = None) -> ExportedTables:
    """Write what the cache knows, of all kernels or of one, into a folder for FLA.

    Of each kernel and device it is what was measured with the source and the software of the newest entry. Files are
    named by words of the devices and kernels and lie in the folder, whatever these are called.

    Raises:
        ForetuneError: The folder cannot be written, a file in it is something else, or nothing is known.

    >>> export_fla_tables("tables").files  # doctest: +SKIP
    ('tables/NVIDIA_H200/softmax_kernel.json',)
    """
    check_folder(out)
    kernels = [
        one for one in map(KnownKernel.latest, known_kernels(kernel)) if any(problem.best for problem in one.problems)
    ]
    if not kernels:
        raise ForetuneError("nothing that could be exported is remembered: no time and no choice")
    files = {inside(out, name): text for name, text in _tables(kernels).items()}
    for path in files:
        check_folder(path.parent)
        if path.exists() and not path.is_file():
            raise ForetuneError(f"{path} is not a regular file, so no table is written in its place")
        check_replaceable(path, lambda content: FLA_MARK in content, "a table that Foretune wrote for fla")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return ExportedTables(tuple(map(str, files)), sum(len(_launches(one)) for one in kernels))


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
    """Return the config with the least geometric mean slowdown over all problems; none that failed on one."""
    examples = _examples(known)
    configs = dict.fromkeys(config for example in examples for config in example.slowdowns)
    return min(configs, key=lambda config: sum(math.log(one.slowdowns.get(config, UNKNOWN)) for one in examples))


def _config(config: KernelConfig | None) -> dict[str, Any]:
    """Every option is there, also those that are unset: FLA reads all of them."""
    assert config is not None
    options = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    return {"kwargs": dict(config.meta)} | {name: getattr(config, name) for name in options}


def _short(kernel: str) -> str:
    """What the kernel's function is called."""
    return kernel.rpartition(".")[2] or kernel

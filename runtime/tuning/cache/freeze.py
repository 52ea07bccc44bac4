"""`freeze_choices`, `freeze_predictions`: choices as one plain Python file, for those who can take no dependency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ....datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Measurable, Problem
from ....datasets.console import percent, printable
from ....datasets.errors import check_integer
from ....datasets.files import check_file, check_replaceable, replacing
from ...arguments import bundle_of
from .cache_folder import KnownKernel, known_kernels
from .decision_list import Example, Rule, learn_rules

if TYPE_CHECKING:
    from ....model import Bundle

#: More rules than anybody reads, and than any gain would need.
MOST_RULES = 1000
#: A line that every frozen file has.
_MARK = "#: Meta-parameters and launch options of each config."


@dataclass(frozen=True)
class Frozen:
    """Choices as source code, and what they lose: the geometric mean and the worst slowdown over the best known config
    of each problem, measured ("" where nothing was) or predicted."""

    kernel: str
    source: str
    rules: int
    problems: int
    devices: tuple[str, ...]
    measured: tuple[float, float, int] | None  # mean and worst slowdown, over so many problems
    predicted: tuple[float, float, int] | None  # likewise, over the bundle's best

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
    """What the cache knows of a kernel, of all its devices, with the source and the software of the newest entry of
    each. With the kernel's `family` the loss against the bundle is told too, where the bundle knows the device.

    Raises `ForetuneError` where the cache knows nothing of that kernel.

    >>> freeze_choices("module.kernel").save("heuristic.py")  # doctest: +SKIP
    """
    check_integer("the number of rules", most_rules, 1, MOST_RULES)
    known = [one.latest() for one in known_kernels(kernel)]
    examples = [example for one in known for example in _examples(one)]
    if not examples:
        raise ForetuneError(f"no time and no choice of {kernel} is remembered: there is nothing to freeze")
    predict = None if family is None else _prediction(family, bundle)
    specs = {one.device.name: one.device for one in known}
    told = [
        f"{one.device.name}: source {one.problems[-1].source}, "
        + ", ".join(f"{name} {value}" for name, value in vars(one.problems[-1].software).items() if value)
        for one in known
        if one.problems
    ]
    return _frozen(kernel, "remembered from tuning", examples, told, most_rules, specs, predict, is_measured=True)


def freeze_predictions(
    family: Measurable,
    device: DeviceSpec | Path | str,
    *,
    bundle: Bundle | Path | str | None = None,
    cases: Sequence[Problem] | None = None,
    most_rules: int = 32,
) -> Frozen:
    """What a bundle predicts for a family on a device, over the family's own workload (or `cases`): for a kernel that
    nobody tuned there.

    Raises `ForetuneError` for a family without a workload, and where the bundle predicts nothing for that device.

    >>> freeze_predictions(family, "h200").save("heuristic.py")  # doctest: +SKIP
    """
    check_integer("the number of rules", most_rules, 1, MOST_RULES)
    if cases is None and not isinstance(family, Measurable):
        raise ForetuneError(f"{family.name} only predicts: it has no workload to freeze choices for")
    spec = DeviceSpec.find(device)
    problems = [case.problem for case in family.cases()] if cases is None else list(cases)
    known = {one.arch for one in _bundle(bundle).trained_on(family.name)}
    if spec.arch not in known:  # what is tried there is many configs, and a file has one
        raise ForetuneError(
            f"the bundle learned {family.name} on {', '.join(sorted(known))} and predicts nothing sure for "
            f"{spec.name}, {spec.arch}: train one that does"
        )
    predict = _prediction(family, bundle)
    examples, never = [], dict.fromkeys(family.space(spec), math.inf)  # what is not predicted cannot run
    for problem in dict.fromkeys(map(family.at_call_time, problems)):
        slowdowns = predict(problem, spec)
        if slowdowns is None:
            raise ForetuneError(f"the bundle predicts nothing for {family.name} on {spec.name}: train one that does")
        examples.append(Example(problem, spec.name, never | slowdowns))
    if not examples:
        raise ForetuneError(f"the workload of {family.name} is empty: there is nothing to freeze")
    told = [f"{spec.name}: predicted by bundle {_digest(bundle)}"]
    return _frozen(family.name, "predicted", examples, told, most_rules, {spec.name: spec}, predict, is_measured=False)


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


#: Predicted slowdowns of all configs that can run a problem, or None.
Predict = Callable[[Problem, DeviceSpec], "dict[KernelConfig, float] | None"]


def _bundle(bundle: Bundle | Path | str | None) -> Bundle:
    from ....model import load_bundle

    return bundle_of(bundle) or load_bundle()


def _prediction(family: Family, bundle: Bundle | Path | str | None) -> Predict:
    from ...how_many import HowMany
    from ...shortlist import chooser_of

    given = bundle_of(bundle)

    def predict(problem: Problem, device: DeviceSpec) -> dict[KernelConfig, float] | None:
        chooser = chooser_of(family, device, bundle=given)
        answer = chooser.choose(problem, HowMany(len(chooser.configs)))
        return dict(zip(answer.configs, answer.predicted_slowdown, strict=True)) if answer.predicted else None

    return predict


def _digest(bundle: Bundle | Path | str | None) -> str:
    return _bundle(bundle).digest[:12]


def _frozen(
    kernel: str,
    how: str,
    examples: Sequence[Example],
    told: Sequence[str],
    most_rules: int,
    specs: dict[str, DeviceSpec],
    predict: Predict | None,
    *,
    is_measured: bool,
) -> Frozen:
    rules = learn_rules(examples, most_rules)
    chosen = _run(_source(kernel, [], rules), examples)  # what the very file answers, not what we think that it would
    measured = None
    if is_measured:
        known = [example.slowdowns.get(config) for example, config in zip(examples, chosen, strict=True)]
        measured = _loss([slowdown for slowdown in known if slowdown is not None and math.isfinite(slowdown)])
    predicted = None
    if predict is not None:
        by_example = [predict(example.problem, specs[example.device]) or {} for example in examples]
        found = [slowdowns.get(config) for slowdowns, config in zip(by_example, chosen, strict=True)]
        predicted = _loss([slowdown for slowdown in found if slowdown is not None])
    devices = tuple(dict.fromkeys(example.device for example in examples))
    lines = [
        f"Configs of {kernel}, {how} on {', '.join(devices)}: {len(rules)} rules for {len(examples)} problems.",
        "",
        *told,
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


def _loss(slowdowns: Sequence[float]) -> tuple[float, float, int] | None:
    if not slowdowns:
        return None
    return math.exp(fmean(map(math.log, slowdowns))), max(slowdowns), len(slowdowns)


def _loss_to_json(loss: tuple[float, float, int] | None) -> dict[str, Any] | None:
    if loss is None:
        return None
    mean, worst, problems = loss
    return {"geometric_mean": round(mean, 4), "worst": round(worst, 4), "problems": problems}


def _loss_lines(measured: tuple[float, float, int] | None, predicted: tuple[float, float, int] | None) -> list[str]:
    told = (("the best config that was measured", measured), ("the best that the bundle predicts", predicted))
    lines = [
        f"{what}: {percent(loss[0])} % slower (geometric mean of {loss[2]} problems), {percent(loss[1])} % at worst"
        for what, loss in told
        if loss is not None
    ]
    return lines or ["what would be best, which nothing tells: not known"]

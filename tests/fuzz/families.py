"""Families of third parties with one fault each: a method or attribute that raises, exits or gives what it must not.

Each is taken through everything that takes a family. What comes of it must be what a sound family gives, or a refusal
in words, or a prediction that was given up with a warning. During a collection the fault costs the rows it concerns.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import foretune
import numpy as np
import torch
from commands import invoke
from fakes import DEVICE, FakeFamily, FakeTimer, fake_cases
from foretune import kernels
from foretune.collect import cases as collected_cases
from foretune.collect import compiling
from foretune.collect import runner as runners
from foretune.datasets import ForetuneError, ForetuneWarning, KernelConfig, Measurement, Status, load
from foretune.datasets.store import Writer
from foretune.kernels import registry
from foretune.model import LightGBMRanker, evaluate_bundle, train_bundle
from foretune.runtime import arguments as warned
from foretune.runtime import make_shortlist
from foretune.runtime.timing import timer
from foretune.runtime.tuning.warmup import warm_up
from forging import hand_made
from fuzz.judging import REFUSED, TroubleError, within
from hypothesis import strategies as st
from replay import ReplayGpu, ReplayPool, run

CASES = fake_cases(models=4, tokens=(64,), randoms=0)
PROBLEM = CASES[0].problem
ARGUMENTS = dict(PROBLEM.dims)
BUNDLE = hand_made()
SPACE = FakeFamily().space()[::8]
#: Where a method fails for one config only.
ODD_ONE = SPACE[5]


class Binary:
    n_regs, n_spills = 32, 0

    class metadata:  # noqa: N801 - Triton's name
        shared = 0

    def _init_handles(self):
        pass


class Sound(FakeFamily):
    """What the faulty ones would be: it can be predicted, trained and collected."""

    feature_names = FakeFamily.feature_names
    bucketed = ()
    largest = {"rows": 2**20}
    default_dims = {"groups": 4}
    default_knobs = {"num_stages": 3}
    reads_binaries = False

    def space(self, device=None):
        return SPACE

    def supports_by(self, problem):
        return problem

    def feature_groups(self, problems, device, configs, binaries=None):
        return super().feature_groups(problems, device, configs)

    def plausible(self, problem):
        return ((1.0, problem),)

    def problem_from_call(self, arguments):
        dims = {dim: arguments[dim] for dim in self.dims}
        return foretune.Problem.of("fake", **dims)

    def at_call_time(self, problem):
        return problem.without_sizes()

    def cases(self, *, random=3, seed=0, max_tflop=None, **more):
        return CASES

    def binary_key(self, config, problem):
        return config, problem.signature

    def inputs(self, problem, device, *, seed=0):
        return [problem]

    def launch(self, inputs, config):
        return torch.ones(4)

    def reference(self, inputs):
        return torch.ones(4)

    def tolerance(self, problem):
        return 0.01

    def compile(self, config, problem):
        return Binary()

    def check_problem(self, config, problem):
        return problem


ATTRIBUTES = (
    "name", "dims", "dtypes", "knobs", "feature_names", "flags", "default_dims", "default_knobs", "largest", "bucketed",
    "reads_binaries", "kernel_changes",
)  # fmt: skip
METHODS = (
    "space", "supports", "supports_by", "features", "feature_groups", "problem_from_call", "at_call_time", "plausible",
    "estimate_us", "cases", "flops", "bytes", "inputs", "launch", "reference", "tolerance", "compile", "source_hash",
    "check_problem", "binary_key", "default",
)  # fmt: skip
MEMBERS = (*ATTRIBUTES, *METHODS)


def _raise(error: BaseException) -> Any:
    raise error


def _shorter(value: Any) -> Any:
    """Less than there should be, or of another shape."""
    if isinstance(value, dict):
        return {"nothing": 1}
    if isinstance(value, torch.Tensor | np.ndarray | tuple | list | str):
        return value[:-1]
    return (value, value)


def _of_numbers(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(value: Any) -> Any:
        if isinstance(value, np.ndarray | torch.Tensor):
            return change(value)
        if isinstance(value, bool | int | float):
            return change(float(value))
        if isinstance(value, dict):
            return {name: change(1.0) for name in value}
        return change(1.0)

    return changed


#: What a fault makes of the right answer.
FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": lambda value: _raise(RuntimeError("broken\x1b[31m\nhere")),
    "exits": lambda value: _raise(SystemExit(3)),
    "none": lambda value: None,
    "wrong type": lambda value: object(),
    "shorter": _shorter,
    "not a number": _of_numbers(lambda number: number * math.nan),
    "negative": _of_numbers(lambda number: -1.0 - abs(number)),
    "generator": lambda value: (one for one in ([value] if not isinstance(value, tuple | list) else value)),
    "text": lambda value: "\x1b[31mred\n" * 3,
    "mutates": lambda value: value,
    "raises at one": lambda value: value,
}


def _emptied(values: Any) -> None:
    """Changes what can be changed in place."""
    for value in values:
        if isinstance(value, dict | list | set):
            value.clear()


def _method(name: str, fault: str) -> Callable[..., Any]:
    sound, change = getattr(Sound, name), FAULTS[fault]

    def method(self, *args, **kwargs):
        given = [*args, *kwargs.values()]
        if fault == "raises at one" and any(isinstance(one, KernelConfig) and one == ODD_ONE for one in given):
            raise RuntimeError("broken\x1b[31m\nhere")
        value = sound(self, *args, **kwargs) if fault not in ("raises", "exits") else None
        if fault == "mutates":
            _emptied(given)
        return change(value)

    method.__name__ = name
    return method


def faulty(member: str, fault: str) -> type[Sound]:
    """The class of a family with this fault."""
    if member in ATTRIBUTES:
        value = getattr(Sound, member)
        raises = fault in ("raises", "exits")
        what = property(lambda self: FAULTS[fault](value)) if raises else FAULTS[fault](value)
    else:
        what = _method(member, fault)
    return type("Faulty", (Sound,), {member: what, "__module__": "faulty_here"})


# What takes a family.


class CompilingPool(ReplayPool):
    """Compiles at once, in this process."""

    def __init__(self, family):
        super().__init__()
        self.family = family

    def request(self, binary, rank):
        if binary not in self.known:
            self.known[binary] = replace(compiling._compile(self.family, binary), compile_ms=1.0)
        return self.known[binary]


@cache
def _root() -> Path:
    import atexit
    import tempfile

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


QUICK = partial(LightGBMRanker, trees=4, epochs=0)


def shortlist(family: Any, folder: Path) -> Any:
    found = foretune.shortlist(family, PROBLEM, DEVICE, 2, bundle=BUNDLE)
    return [str(config) for config in found.configs]


def shortlist_of_object(family: Any, folder: Path) -> Any:
    found = make_shortlist(family(), PROBLEM, DEVICE, k="auto", bundle=BUNDLE, configs=list(SPACE[:9]))
    return [str(config) for config in found.configs]


def shortlist_of_calls(family: Any, folder: Path) -> Any:
    found = foretune.shortlist(family, PROBLEM, DEVICE, expected_calls=1e5, bundle=BUNDLE)
    return [str(config) for config in found.configs]


def launch(family: Any, folder: Path) -> Any:
    """A prune callback in a launch: never fails once it is declared."""
    configs = [config.to_triton() for config in SPACE]
    try:
        callback = foretune.prune(family, 2, device=DEVICE, bundle=BUNDLE)
    except ForetuneError:
        return REFUSED
    try:
        kept = callback(configs, dict(ARGUMENTS), grid=(1,))
    except BaseException as error:
        raise TroubleError("traceback", "a launch fails", f"{type(error).__name__}: {error}") from error
    if not kept or {*map(id, kept)} - {*map(id, configs)}:
        raise TroubleError("silent change", "a launch: none of its configs, or others")
    return [str(config) for config in kept]


def tune(family: Any, folder: Path) -> Any:
    knobs = [config.to_json() for config in SPACE[:4]]

    @foretune.tune(knobs, family=family, cache=False, device=DEVICE, timer=FakeTimer(), work=None)
    def work(groups, k, n, rows, **config):
        return 1

    try:
        return work(**ARGUMENTS)
    except foretune.TuningFailed as error:
        if "fake" in str(error):
            return REFUSED
        raise


def cover(family: Any, folder: Path) -> Any:
    found = foretune.cover(family, PROBLEM, "rows", (64, 128), 2, device=DEVICE, sizes=[64, 128], bundle=BUNDLE)
    return [str(found.config_for(size)) for size in (64, 128)]


def train(family: Any, folder: Path) -> Any:
    return train_bundle(dataset(), {"fake": kernels.find_family(family)}, QUICK).digest


def adapt(family: Any, folder: Path) -> Any:
    return foretune.adapt(dataset(), bundle=BUNDLE, family=family).digest


def evaluate(family: Any, folder: Path) -> Any:
    found = evaluate_bundle(dataset(), BUNDLE, kernels.find_family(family), folds=2, jobs=1)
    return found.to_json()


def space(family: Any, folder: Path) -> Any:
    return [str(config) for config in foretune.configs(family)], foretune.spaces.ready_space(family, DEVICE)


def valid(family: Any, folder: Path) -> Any:
    foretune.register(family)
    found = foretune.spaces.filter_valid(SPACE, PROBLEM, DEVICE)
    return [str(one) for one in found.configs], str(foretune.spaces.default_config(PROBLEM, DEVICE))


def warm(family: Any, folder: Path) -> Any:
    found = warm_up(kernels.find_family(family), [PROBLEM], DEVICE, k=2)
    if found.failed:
        warnings.warn(ForetuneWarning(f"fake: {found.failed}"), stacklevel=1)
    return found.to_json()


def collect(family: Any, folder: Path) -> Any:
    """On a GPU that is none, from the drawing of the cases on: rows but for times, and what was skipped."""
    found = kernels.find_measurable(family)
    drawn = collected_cases.first_cases(found, collected_cases.draw_cases(found))[:2]
    families = {found.name: found}
    collected_cases.check_request(families, drawn)
    with patch.object(timer, "Timer", FakeTimer), patch.object(runners, "_device_answers", lambda: True):
        gpu = ReplayGpu(runners.GpuRunner(DEVICE))
        summary = run(drawn, folder / "out", phases=[[gpu]], families=families, pool=CompilingPool(found))
    data = load(folder / "out") if (folder / "out").exists() else None
    rows = {}
    for row in () if data is None else data.measurements.itertuples():
        at = (data.cases[row.problem].problem, str(data.configs[row.config]), row.timing_pass)
        rows[at] = (row.status, row.error)
    return rows, summary.skipped


def of_entry_point(family: Any, folder: Path) -> Any:
    points = (types.SimpleNamespace(name="fake", value="faulty_here:Faulty", load=lambda: family),)
    with patch.object(registry, "_entry_points", lambda: points):
        return sorted(foretune.families())


def _command(words: str) -> Callable[[Any, Path], Any]:
    def command(family: Any, folder: Path) -> Any:
        sys.modules["faulty_here"] = module = types.ModuleType("faulty_here")
        module.Faulty = family  # type: ignore[attr-defined]
        places = {"data": _data(), "bundle": _bundle(), "out": folder / "out", "spec": "h200"}
        with patch.object(foretune.model, "LightGBMRanker", QUICK):
            result = invoke([*words.format(**places).split(), "--json"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise TroubleError(
                "traceback", f"{words.split()[0]}: {type(result.exception).__name__}", result.output[-300:]
            )
        try:
            said = json.loads(result.stdout)
        except ValueError:
            raise TroubleError("silent change", f"{words.split()[0]}: no JSON", result.stdout[:200]) from None
        if result.exit_code not in (0, 1, 2) or "\x1b" in result.stdout + result.stderr:
            raise TroubleError("traceback", f"{words.split()[0]}: exit code {result.exit_code}, or escape codes")
        if result.exit_code:
            assert said["error"]
            raise ForetuneError(said["error"])
        if "Warning" in result.stderr:
            warnings.warn(ForetuneWarning(result.stderr), stacklevel=1)
        return said

    return command


@cache
def _data() -> Path:
    """All of the space on all cases, as the sound family's time model has it."""
    family, writer = Sound(), Writer(_root() / "data", "mine", [DEVICE], {"family": "fake"}, run_id="r1")
    for case in CASES:
        rows = []
        for config in SPACE:
            times = [family.time_us(case.problem, config, timing_pass=number) for number in (1, 2, 3)]
            if family.supports(config, case.problem, DEVICE) is None and times[0] is not None:
                rows += [
                    Measurement(case.problem, DEVICE.name, config, Status.OK, time_us=us, samples=7, timing_pass=number)
                    for number, us in enumerate(times, 1)
                ]
        writer.append(case, rows)
    return _root() / "data"


@cache
def dataset() -> Any:
    return load(_data())


@cache
def _bundle() -> Path:
    BUNDLE.save(_root() / "bundle")
    return _root() / "bundle"


FROM = "faulty_here:Faulty"
LAYER = "--device {spec} --bundle {bundle}"
ENTRIES: dict[str, Callable[[Any, Path], Any]] = {
    "shortlist": shortlist,
    "shortlist of an object": shortlist_of_object,
    "shortlist of calls": shortlist_of_calls,
    "launch": launch,
    "tune": tune,
    "cover": cover,
    "train": train,
    "adapt": adapt,
    "evaluate": evaluate,
    "space": space,
    "valid": valid,
    "warm up": warm,
    "collect": collect,
    "families": of_entry_point,
    "command predict": _command(f"predict {FROM} {LAYER} --groups 4 --rows 64 --n 512 --k 512"),
    "command cover": _command(f"cover {FROM} {LAYER} --groups 4 --dynamic rows --range 64:96 --n 512 --k 512"),
    "command adapt": _command(f"adapt --data {{data}} --bundle {{bundle}} --family {FROM} --out {{out}}"),
    "command evaluate": _command(f"evaluate --data {{data}} --bundle {{bundle}} --family {FROM}"),
}


class Faulty(NamedTuple):
    member: str
    fault: str
    entry: str


#: What is another answer and no wrong one.
SOUND_TOO = {
    ("space", "shorter"), ("supports", "none"), ("features", "negative"), ("feature_groups", "negative"),
    ("source_hash", "shorter"),
}  # fmt: skip


def _is_one(member: str, fault: str) -> bool:
    """Whether there is such a fault."""
    if (member, fault) in SOUND_TOO:
        return False
    if fault == "raises at one":
        return member in METHODS and "config" in inspect.signature(getattr(Sound, member)).parameters
    return not (fault == "mutates" and member in ATTRIBUTES)


PRODUCT = [Faulty(*one) for one in itertools.product(MEMBERS, FAULTS, ENTRIES) if _is_one(*one[:2])]
inputs = st.sampled_from(PRODUCT)


def _made(family: type[Sound], entry: str, folder: Path) -> tuple[Any, list[str]]:
    registry._registered.clear()
    warned._warned.clear()
    shutil.rmtree(folder / "out", ignore_errors=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with np.errstate(all="ignore"):
            try:
                answer = within(partial(ENTRIES[entry], family, folder))
            except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
                raise TroubleError("traceback", f"{entry}: {type(error).__name__} passes") from error
    return answer, [str(one.message) for one in caught if issubclass(one.category, ForetuneWarning)]


_sound: dict[str, Any] = {}


def check(one: Faulty, folder: Path) -> str:
    if one.entry not in _sound:
        _sound[one.entry] = _made(Sound, one.entry, folder)[0]
        if _sound[one.entry] is REFUSED:
            raise TroubleError("silent change", f"{one.entry} refuses the sound family")
    try:
        answer, told = _made(faulty(one.member, one.fault), one.entry, folder)
    except TroubleError as trouble:
        raise TroubleError(trouble.kind, f"{' '.join(one)}: {trouble.where}", trouble.text) from None
    if answer is REFUSED:
        return "refused"
    if one.entry == "collect":
        return _judged_rows(one, answer)
    if answer == _sound[one.entry]:
        return "as of a sound one"
    if any("fake" in text or one.member in text for text in told):
        return "given up with a warning"
    raise TroubleError("silent change", f"{one.entry}: {one.member} {one.fault}", str(answer)[:300])


def _judged_rows(one: Faulty, answer: Any) -> str:
    (rows, skipped), (sound, _) = answer, _sound["collect"]
    if (rows, skipped) == _sound["collect"]:
        return "as of a sound one"
    odd = {at: row for at, row in rows.items() if row[0] not in ("ok", "hopeless") and row != sound.get(at)}
    untold = [row for row in odd.values() if not row[1]]
    lost = {at for at in sound if at not in rows and at[2] == 1} if not skipped else set()
    if untold or lost or not (odd or skipped):
        raise TroubleError("silent change", f"{' '.join(one)}", f"{untold[:1]} {len(lost)} {skipped[:1]}")
    if one.fault == "raises at one" and ({at[1] for at in odd} != {str(ODD_ONE)} or skipped):
        raise TroubleError("silent change", f"{' '.join(one)} costs more than a row", f"{len(odd)} {skipped[:1]}")
    return "rows say it"

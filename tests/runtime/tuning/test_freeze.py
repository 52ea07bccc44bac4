"""Choices as one plain file: a bare interpreter answers what was known, and the file says what it loses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call, words
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.model import Bundle, Ranker
from foretune.model.calibration.training_domain import Distance
from foretune.runtime.tuning.cache.decision_list import Example, learn_rules
from foretune.runtime.tuning.cache.exports import Frozen, freeze_choices, freeze_predictions
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache
from remembered import CONFIGS, H100, H200, KERNEL, problem, remember, time_us

# Reads questions as JSON, and answers with what the frozen file says. Started with -I -S: there are no packages at all.
ASKS = """
import json, runpy, sys
frozen = runpy.run_path(sys.argv[1])
questions = json.load(sys.stdin)
assert not {"foretune", "numpy", "triton"} & set(sys.modules)
print(json.dumps([frozen["choose"](**question) for question in questions]))
"""


def asked(path: Path, questions: list[dict[str, Any]]) -> list[KernelConfig]:
    answered = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ASKS, str(path)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=True,
    )
    return [KernelConfig.from_json(config) for config in json.loads(answered.stdout)]


def question(one: Problem, device: DeviceSpec) -> dict[str, Any]:
    return {"dims": dict(one.dims), "dtype": one.dtype_name, "flags": list(one.flags), "device": device.name}


def test_a_bare_interpreter_chooses_what_was_the_best_on_each_device(tmp_path: Path) -> None:
    for device in (H200, H100):
        remember(device)
    said = call(f"cache freeze {KERNEL} --out", tmp_path / "heuristic.py")
    assert said.exit_code == 0, said.stderr
    cases = [(rows, device) for rows in (64, 256, 1024, 4096) for device in (H200, H100)]
    chosen = asked(tmp_path / "heuristic.py", [question(problem(rows), device) for rows, device in cases])
    for (rows, device), config in zip(cases, chosen, strict=True):
        times = {one: time_us(rows, one, device) or math.inf for one in CONFIGS}
        assert config == min(times, key=times.__getitem__)
    text = (tmp_path / "heuristic.py").read_text()
    assert "Compared with the best measured config: 0.0 % slower (geometric mean of 8 problems), 0.0 % at" in text
    assert "NVIDIA H200: source s1, torch " in text
    assert "import" not in text


def test_fewer_rules_lose_more_and_say_so(tmp_path: Path) -> None:
    remember()
    few, all_ = (freeze_choices(KERNEL, most_rules=rules) for rules in (1, 32))
    assert (few.rules, all_.rules) == (1, 3)
    assert few.measured is not None
    assert all_.measured == (1.0, 1.0, 4)
    few.save(tmp_path / "few.py")
    (config, *_) = chosen = asked(
        tmp_path / "few.py", [question(problem(rows), H200) for rows in (64, 256, 1024, 4096)]
    )
    best = [min(time_us(rows, one) or math.inf for one in CONFIGS) for rows in (64, 256, 1024, 4096)]
    slower = [
        (time_us(rows, config) or math.nan) / least for rows, least in zip((64, 256, 1024, 4096), best, strict=True)
    ]
    assert set(chosen) == {config}
    assert few.measured == pytest.approx((math.exp(np.log(slower).mean()), max(slower), 4))


def test_a_config_that_failed_somewhere_is_not_chosen_there() -> None:
    always = dict.fromkeys(CONFIGS, 1.0)
    examples = [Example(problem(rows), "d", always | {CONFIGS[0]: bad}) for rows, bad in ((8, 0.9), (16, math.inf))]
    (rule,) = learn_rules(examples, 1)
    assert rule.config != CONFIGS[0]


def test_rules_may_ask_for_dtype_flags_device_and_quotients() -> None:
    slow, fast = CONFIGS[:2]

    def example(best: KernelConfig, device: str = "d", **more: Any) -> Example:
        return Example(Problem.of("f", **({"m": 64, "n": 64} | more)), device, {slow: 2.0, fast: 2.0, best: 1.0})

    for examples, expected in (
        ([example(slow, dtype="bf16"), example(fast, dtype="fp32")], "dtype == 'bf16'"),
        ([example(slow, flags=("a",)), example(fast)], "'a' in flags"),
        ([example(slow, device="A"), example(fast, device="B")], "device == 'A'"),
        (
            [example(slow, m=8, n=64), example(slow, m=80, n=640), example(fast, m=64, n=64), example(fast, m=9, n=8)],
            "dims['m'] <= 0.35 * dims['n']",
        ),
    ):
        first, last = learn_rules(examples)
        assert (first.conditions, last.conditions) == ((expected,), ())


def test_the_same_knowledge_gives_the_same_file() -> None:
    remember()
    assert freeze_choices(KERNEL).source == freeze_choices(KERNEL).source


def test_only_the_newest_source_counts() -> None:
    remember(source="old")
    new = ChoiceCache.of(KERNEL, "new", H200)
    new.record(problem(64), CONFIGS[5], 1.0)
    frozen = freeze_choices(KERNEL)
    assert (frozen.problems, frozen.rules) == (1, 1)
    assert "source new" in frozen.source
    assert repr(CONFIGS[5].to_json()) in frozen.source


def test_choices_without_times_are_frozen_too() -> None:
    cache = ChoiceCache.of(KERNEL, "s1", H200)
    cache.choose(problem(64), "b1", CONFIGS[3])
    frozen = freeze_choices(KERNEL)
    assert (
        frozen.to_json() | {"devices": []}
        == {
            "kernel": KERNEL,
            "rules": 1,
            "problems": 1,
            "devices": [],
            "over_measured_best": {"geometric_mean": 1.0, "worst": 1.0, "problems": 1},
            "over_predicted_best": None,
        }
        or frozen.measured is None
    )


def test_odd_names_stay_words(tmp_path: Path) -> None:
    """What an imported cache calls things is no code, and breaks no docstring."""
    kernel = 'k"""\\'
    odd = Problem(kernel, (("a{}'\"", 3), ("import os", 4)), flags=("{0}",))
    other = Problem(kernel, (("a{}'\"", 300), ("import os", 4)))
    cache = ChoiceCache.of(kernel, "s1", H200)
    cache.record_all(odd, {KernelConfig.of(**{"B'{": 1, "T": "x'y\\"}): 1.0, CONFIGS[0]: 9.0})
    cache.record_all(other, {KernelConfig.of(**{"B'{": 1, "T": "x'y\\"}): 9.0, CONFIGS[0]: 1.0})
    frozen = freeze_choices(kernel)
    frozen.save(tmp_path / "odd.py")
    chosen = asked(tmp_path / "odd.py", [question(odd, H200), question(other, H200)])
    assert chosen == [KernelConfig.of(**{"B'{": 1, "T": "x'y\\"}), CONFIGS[0]]


class Learned(Bundle):
    """Predicts by the fake's own time model."""

    digest = "d" * 64

    def calibration(self, family: str) -> None:
        """There is none."""

    def distance(self, family: str, problem: Problem, device: DeviceSpec) -> Distance:
        return Distance(0.0)

    def trained_on(self, family: str) -> tuple[DeviceSpec, ...]:
        return (DEVICE,)

    def wrong_results(self, family: str, problem: Problem) -> tuple[KernelConfig, ...]:
        return ()

    fastest = Ranker.fastest

    def ranker(self, family: str) -> Any:
        return self

    def predict(self, family: Any, problem: Problem, device: DeviceSpec, configs: Any) -> Any:
        return np.array([family.time_us(problem, config, timing_pass=1) or 1e6 for config in configs])


def test_a_family_that_nobody_tuned_is_frozen_from_predictions(tmp_path: Path) -> None:
    family, bundle = FakeFamily(), Learned({}, "")
    cases = [case.problem for case in fake_cases(models=3, randoms=1)]
    frozen = freeze_predictions(family, "h200", bundle=bundle, cases=cases, most_rules=8)
    assert 2 <= frozen.rules <= 8
    assert frozen.measured is None
    assert frozen.predicted is not None
    frozen.save(tmp_path / "heuristic.py")
    problems = list(dict.fromkeys(map(family.at_call_time, cases)))
    assert frozen.problems == frozen.predicted[2] == len(problems)
    slower = []
    for one, config in zip(
        problems, asked(tmp_path / "heuristic.py", [question(one, DEVICE) for one in problems]), strict=True
    ):
        assert family.supports(config, one, DEVICE) is None
        able = [each for each in family.space() if family.supports(each, one, DEVICE) is None]
        times = dict(zip(able, bundle.predict(family, one, DEVICE, able), strict=True))
        slower.append(times[config] / min(times.values()))
    assert frozen.predicted[:2] == pytest.approx((math.exp(np.log(slower).mean()), max(slower)))
    assert 1.0 < frozen.predicted[0] < 1.5
    assert "predicted by bundle dddddddddddd" in frozen.source


def test_a_tuned_family_is_told_what_it_loses_against_the_bundle_as_well() -> None:
    family = FakeFamily()
    cache = ChoiceCache.of("fake", "s1", H200)
    for case in fake_cases(models=1):
        near = family.at_call_time(case.problem)
        cache.record_all(near, {config: family.time_us(near, config, timing_pass=2) for config in family.space()[:9]})
    frozen = freeze_choices("fake", family=family, bundle=Learned({}, ""))
    assert frozen.measured is not None
    assert frozen.predicted is not None
    assert frozen.predicted[0] > frozen.measured[0]  # of nine configs, the best are not
    assert "the best predicted config: " in frozen.source


def test_what_cannot_be_frozen_is_refused(tmp_path: Path) -> None:
    remember()
    with pytest.raises(ForetuneError, match="has no choices of 'nothing'"):
        freeze_choices("nothing")
    with pytest.raises(ForetuneError, match="the number of rules must be an integer between 1 and 1000 but got 0"):
        freeze_choices(KERNEL, most_rules=0)
    with pytest.raises(
        ForetuneError, match="the bundle learned fake on sm_90 and has no sure prediction for AMD, gfx942"
    ):
        freeze_predictions(
            FakeFamily(),
            DeviceSpec.from_json(DEVICE.to_json() | {"name": "AMD", "arch": "gfx942"}),
            bundle=Learned({}, ""),
            cases=[fake_cases()[0].problem],
        )
    ChoiceCache.of("empty", "s1", H200).saw_launch(problem(1), ["rows"], [1])
    with pytest.raises(ForetuneError, match="there is nothing to freeze"):
        freeze_choices("empty")
    with pytest.raises(ForetuneError, match="is a folder"):
        Frozen("k", "", 1, 1, (), None, None).save(tmp_path)


def test_a_frozen_file_replaces_a_frozen_file_and_nothing_else(tmp_path: Path) -> None:
    remember()
    (tmp_path / "mine.py").write_text("CONFIGS = ()")
    said = call(f"cache freeze {KERNEL} --out", tmp_path / "mine.py")
    assert said.exit_code == 1
    assert "mine.py is not a file that foretune cache freeze wrote, so it is not replaced" in words(said.stderr)
    assert (tmp_path / "mine.py").read_text() == "CONFIGS = ()"
    for _ in range(2):
        assert call(f"cache freeze {KERNEL} --out", tmp_path / "new.py").exit_code == 0

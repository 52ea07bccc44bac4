"""Argument vectors for every command of `__main__.py`, run in this process. Nothing is measured, and nothing that is
shipped is learned from: what would need a GPU or minutes is replaced by a refusal."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import foretune.datasets
from foretune.__main__ import app
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.model import LightGBMRanker
from forging import hand_made
from fuzz.datasets import base
from fuzz.judging import TroubleError, same, traced
from fuzz.oddities import TEXTS
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner, Result

DIMENSIONS = ["--groups", "--rows", "--n", "--k"]
#: Sensible values of options and arguments; what stands in braces is a place in the folder of the run.
DATA, OUT = ["{parts}", "{sealed}"], ["{new}/a", "{new}/b", "out"]
FAMILIES = ["fakes:FakeFamily", "grouped_gemm_fwd"]
COUNTS = ["1", "2", "8"]
SENSIBLE = {
    "--data": DATA, "--like": DATA, "data": DATA, "--out": OUT, "--family": FAMILIES, "family": FAMILIES,
    "--bundle": ["{bundle}"], "--split": ["model", "device"], "--share": ["0.5", "1"], "--device": ["h200", "{spec}"],
    "spec": ["h200", "{spec}"], "--format": ["csv", "t4"], "--dtype": ["bf16"], "--budget": ["1s", "2m"],
    "--plan": ["exhaustive", "adaptive"], "--tokens": ["16,256"], "--sms": ["32", "16,64"], "--name": ["mine"],
    "--max-tflop": ["1", "0.5"], "--models": ["{models}"],
    **{dimension: ["8", "64", "1024"] for dimension in DIMENSIONS},
}  # fmt: skip
#: What is right nowhere, or elsewhere.
ODD = [text for text in TEXTS if "\0" not in text]  # the system passes no NUL
ODD += ["{parts}", "{bundle}", "{folder}", "{file}", "{parts}/dataset.json", "{missing}", "--help", "--", "1,,2", "1e9"]
ODD += [str(number) for number in (2**31, 2**63, -(2**63), 10**30)] + ["\x1b]0;x\x07", "١٦", "½", "٣,٤"]


class Line(NamedTuple):
    words: tuple[str, ...]


class Parameter(NamedTuple):
    name: str  # of an option with its dashes
    takes_value: bool


def _commands(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Parameter]]]:
    """Every command with its parameters, as typer knows them."""
    for inner, one in getattr(command, "commands", {}).items():
        yield from _commands(one, (*name, inner))
    parameters = [Parameter(one.opts[0], not getattr(one, "is_flag", False)) for one in command.params]
    if name:
        yield name, parameters


COMMANDS = dict(_commands(get_command(app)))
#: Without these a command does nothing but say so; with them given more often than not, more of it is reached.
WANTED = ("--data", "--out", "--format", "--device")


def _value(parameter: str) -> st.SearchStrategy[str]:
    sensible = st.sampled_from(SENSIBLE.get(parameter, COUNTS))
    odd = st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0"), max_size=12)
    return st.integers(0, 11).flatmap(lambda drawn: odd if drawn == 0 else sensible)


def _words(parameter: Parameter) -> st.SearchStrategy[tuple[str, ...]]:
    name = parameter.name
    if not name.startswith("-"):
        return st.lists(_value(name), min_size=1, max_size=2 if name == "data" else 1).map(tuple)
    if not parameter.takes_value:
        return st.just((name,))
    return _value(name).map(lambda value: (name, value)) | _value(name).map(lambda value: (f"{name}={value}",))


def _lines(name: tuple[str, ...], parameters: list[Parameter]) -> st.SearchStrategy[Line]:
    parts = [
        st.integers(0, 4).flatmap(lambda drawn, p=parameter: _words(p) if drawn < _often(p) else st.just(()))
        for parameter in parameters
    ]
    if name == ("predict",):
        parts += [_value(dimension).map(lambda value, d=dimension: (d, value)) for dimension in DIMENSIONS]
    more = st.sampled_from([*[()] * 12, ("extra",), ("--unknown", "1"), ("-h",), ("--permute_x",)])
    return st.tuples(*parts, more).map(lambda said: Line((*name, *(word for words in said for word in words))))


def _often(parameter: Parameter) -> int:
    return (
        5 if parameter.name in WANTED or not parameter.name.startswith("-") else 2 if parameter.name == "--json" else 1
    )


inputs = st.sampled_from(sorted(COMMANDS.items())).flatmap(lambda one: _lines(*one))


@cache
def _places(folder: Path) -> dict[str, str]:
    datasets = base(folder)
    hand_made().save(folder / "bundle")
    DeviceSpec.named("h200").save(folder / "spec.json")
    (folder / "file").write_text("what nobody expects")
    (folder / "models.csv").write_text("model,hidden_size\nA-1B,64\n")
    (folder / "cwd").mkdir()
    return {
        "{parts}": str(datasets[False]), "{sealed}": str(datasets[True]), "{bundle}": str(folder / "bundle"),
        "{spec}": str(folder / "spec.json"), "{folder}": str(folder), "{file}": str(folder / "file"),
        "{models}": str(folder / "models.csv"), "{missing}": str(folder / "missing"), "{new}": str(folder / "new"),
    }  # fmt: skip


def _refuse(*_: Any, **__: Any) -> Any:
    raise ForetuneError("no GPU is visible here, and nobody waits for a training on shipped data")


@contextmanager
def _bounded(folder: Path) -> Iterator[None]:
    """In a folder, without a GPU, without shipped datasets, with two trees."""
    before = os.getcwd()
    load = foretune.datasets.load
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch("foretune.datasets.load", lambda name: _refuse() if name in ("h100", "h200") else load(name)))
        enter(patch.object(DeviceSpec, "live", _refuse))
        for gone in ("collect.campaign.collect_on_gpus", "collect.cluster.dask_campaign.collect_on_cluster"):
            enter(patch(f"foretune.{gone}", _refuse))
        enter(patch("foretune.runtime.quickstart.run_quickstart", _refuse))
        enter(patch.dict(LightGBMRanker.__init__.__kwdefaults__, trees=2, min_rows=1))
        enter(warnings.catch_warnings())
        os.chdir(folder)
        stack.callback(os.chdir, before)
        yield


def check(line: Line, folder: Path) -> str:
    places = _places(folder)
    words = [_placed(word, places) for word in line.words]
    with _bounded(folder / "cwd"):
        result = CliRunner().invoke(app, words, env={"COLUMNS": "100"})
    if not isinstance(result.exception, (SystemExit, type(None))):
        raise traced(result.exception) from result.exception
    if result.exit_code not in (0, 1, 2):
        raise TroubleError("traceback", f"{line.words[0]}: exit code {result.exit_code}")
    if "\x1b" in result.output:
        raise TroubleError("silent change", f"{line.words[0]}: a code for the terminal came through")
    if result.exit_code == 0 and not {"--help", "-h"} & set(words):
        _check_answer(line, words, result, folder / "cwd")
    if result.exit_code == 1 and not result.stderr.rstrip().split("\n")[-1].startswith("Error: "):
        raise TroubleError("traceback", f"{line.words[0]}: an error of no line or several", repr(result.stderr[-200:]))
    return {0: "answered", 1: "refused", 2: "wrong usage"}[result.exit_code]


def _check_answer(line: Line, words: list[str], result: Result, here: Path) -> None:
    if not result.stdout.strip():
        raise TroubleError("silent change", f"{line.words[0]}: done without a word")
    value = json.loads(result.stdout) if "--json" in words else None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word.endswith("=") or (following == "" and word.startswith("--") and word != "--json"):
            raise TroubleError("silent change", f"{line.words[0]}: {word.rstrip('=')} is empty, and taken as left out")
        if word == "--out" and following:
            same(f"{words[0]}: what --out names", True, (here / following).exists())
        if word == "--top" and value is not None and words[0] == "predict":
            same("--top", True, len(value["shortlist"]) <= int(str(following)))


def _placed(word: str, places: dict[str, str]) -> str:
    for place, path in places.items():
        word = word.replace(place, path)
    return word

"""Argument vectors for every command of `__main__.py`, run in this process. Nothing is measured, and nothing that is
shipped is learned from: what would need a GPU or minutes is replaced by a refusal."""

from __future__ import annotations

import csv
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import foretune.datasets
from commands import built, invoke
from foretune.__main__ import app
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.model import LightGBMRanker, load_bundle
from forging import hand_made
from fuzz.datasets import base, rows_of
from fuzz.judging import TroubleError, same, traced
from fuzz.oddities import TEXTS
from hypothesis import strategies as st
from typer.testing import Result

DIMENSIONS = ["--groups", "--rows", "--n", "--k"]
#: Sensible values of options and arguments; what stands in braces is a place in the folder of the run.
DATA, OUT = ["{parts}", "{sealed}"], ["{new}/a", "{new}/b", "out"]
FAMILIES = [*["fakes:FakeFamily"] * 3, "grouped_gemm_fwd"]
COUNTS = ["1", "2", "8"]
SENSIBLE = {
    "--data": DATA, "--like": DATA, "data": DATA, "--out": OUT, "--family": FAMILIES, "family": FAMILIES,
    "--bundle": ["{bundle}"], "--split": ["model", "device"], "--share": ["0.5", "1"], "--device": ["h200", "{spec}"],
    "spec": ["h200", "{spec}"], "--format": ["csv", "t4"], "--dtype": ["bf16"], "--budget": ["1s", "2m"],
    "--plan": ["exhaustive", "adaptive"], "--tokens": ["16,256"], "--sms": ["32", "64"], "--name": ["mine"],
    "kernels": FAMILIES, "--dynamic": ["rows", "n"], "--range": ["8:12", "64:66"], "--hints": ["64", "8,64"],
    "program": ["{file}", "json.tool"], "--attach": ["json,foretune"], "--mode": ["off"], "--pin": ["{file}"],
    "--log": ["{new}/log"], "--max-tflop": ["1", "0.5"], "--models": ["{models}", "{file}"],
    "--model": ["Grok-1", "{file}"],
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
    several: bool


def _commands(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Parameter]]]:
    """Every command with its parameters, as typer knows them."""
    for inner, one in getattr(command, "commands", {}).items():
        yield from _commands(one, (*name, inner))
    parameters = [
        Parameter(one.opts[0], not getattr(one, "is_flag", False), one.multiple or one.nargs == -1)
        if one.param_type_name == "option"
        else Parameter(one.opts[0], True, one.nargs == -1)
        for one in command.params
    ]
    if name:
        yield name, parameters


COMMANDS = dict(_commands(built(app)))
#: Without these a command does nothing but say so; with them given more often than not, more of it is reached.
WANTED = ("--data", "--out", "--format", "--device", "--dynamic", "--range")


def _value(parameter: str) -> st.SearchStrategy[str]:
    sensible = st.sampled_from(SENSIBLE.get(parameter, COUNTS))
    odd = st.sampled_from(ODD) | st.text(st.characters(exclude_characters="\0"), max_size=12)
    return st.integers(0, 8).flatmap(lambda drawn: odd if drawn == 8 else sensible)  # small ones are drawn more often


def _words(parameter: Parameter) -> st.SearchStrategy[tuple[str, ...]]:
    name = parameter.name
    if not name.startswith("-"):
        return st.lists(_value(name), min_size=1, max_size=2 if parameter.several else 1).map(tuple)
    if not parameter.takes_value:
        return st.just((name,))
    return _value(name).map(lambda value: (name, value)) | _value(name).map(lambda value: (f"{name}={value}",))


def _lines(name: tuple[str, ...], parameters: list[Parameter]) -> st.SearchStrategy[Line]:
    parts = [
        st.integers(0, 4).flatmap(lambda drawn, p=parameter: _words(p) if drawn >= 5 - _often(p) else st.just(()))
        for parameter in parameters
    ]
    if name in (("predict",), ("cover",)):
        parts += [_value(dimension).map(lambda value, d=dimension: (d, value)) for dimension in DIMENSIONS]
    more = st.sampled_from([*[()] * 12, ("extra",), ("--unknown", "1"), ("-h",), ("--permute_x",)])
    return st.tuples(*parts, more).map(lambda said: Line((*name, *(word for words in said for word in words))))


def _often(parameter: Parameter) -> int:
    return (
        5
        if parameter.name in WANTED or not parameter.name.startswith("-")
        else 2
        if parameter.name in ("--json", "--bundle")
        else 1
    )


inputs = st.sampled_from([*COMMANDS.items()][::-1]).flatmap(lambda one: _lines(*one))


@cache
def _places(folder: Path) -> dict[str, str]:
    datasets = base(folder)
    hand_made().save(folder / "bundle")
    DeviceSpec.named("h200").save(folder / "spec.json")
    (folder / "file").write_text("what nobody expects")
    (folder / "models.csv").write_text("model,num_experts,top_k,hidden_size,moe_intermediate_size\nA-1B,8,2,64,128\n")
    (folder / "cwd").mkdir()
    return {
        "{parts}": str(datasets[False]), "{sealed}": str(datasets[True]), "{bundle}": str(folder / "bundle"),
        "{spec}": str(folder / "spec.json"), "{folder}": str(folder), "{file}": str(folder / "file"),
        "{models}": str(folder / "models.csv"), "{missing}": str(folder / "missing"), "{new}": str(folder / "new"),
    }  # fmt: skip


#: How far a command comes here that would measure, or learn from what is shipped.
NOT_HERE = "no GPU is visible here"


def _refuse(*_: Any, **__: Any) -> Any:
    raise ForetuneError(f"{NOT_HERE}, and nobody waits for a training on shipped data")


@contextmanager
def _bounded(folder: Path) -> Iterator[None]:
    """In a folder, without a GPU, without shipped datasets, with two trees."""
    before = os.getcwd()
    load = foretune.datasets.load
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(patch("foretune.datasets.load", lambda name: _refuse() if name in ("h100", "h200") else load(name)))
        enter(patch.object(DeviceSpec, "live", _refuse))
        for gone in ("collect.campaign.collect_on_gpus", "collect.cluster.collect_on_cluster"):
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
    for written in (folder / "new", folder / "cwd" / "out"):
        shutil.rmtree(written) if written.is_dir() else written.unlink(missing_ok=True)
    (folder / "new").mkdir()
    with _bounded(folder / "cwd"):
        result = invoke(words, env={"COLUMNS": "100"})
        if isinstance(result.exception, TroubleError):  # it took too long
            raise result.exception
        if not isinstance(result.exception, (SystemExit, type(None))):
            raise traced(result.exception) from result.exception
        if result.exit_code not in (0, 1, 2):
            raise TroubleError("traceback", f"{line.words[0]}: exit code {result.exit_code}")
        if "\x1b" in result.output:
            raise TroubleError("silent change", f"{line.words[0]}: a code for the terminal came through")
        # What `run` has chosen is run after the command line has ended, which is not done here.
        if result.exit_code == 0 and words[0] != "run" and not {"--help", "-h"} & set(words):
            _check_answer(words, result)
    said = result.stderr.rstrip().split("\n")[-1]
    if result.exit_code == 1 and not said.startswith("Error: "):
        raise TroubleError("traceback", f"{line.words[0]}: an error of no line or several", repr(result.stderr[-200:]))
    return "not here" if NOT_HERE in said else {0: "answered", 1: "refused", 2: "wrong usage"}[result.exit_code]


def _check_answer(words: list[str], result: Result) -> None:
    """What a command did is what its words say, as typer reads them."""
    command, name, rest = built(app), "", words
    while getattr(command, "commands", None) and rest and rest[0] in command.commands:
        command, name, rest = command.commands[rest[0]], rest[0], rest[1:]
    with command.make_context(name, list(rest)) as context:
        given = context.params
    if not result.stdout.strip():
        raise TroubleError("silent change", f"{name}: done without a word")
    value = json.loads(result.stdout) if given.get("as_json") else None
    for option, said in given.items():
        if said in ("", [""]) or (option == "out" and str(said) == "."):
            raise TroubleError("silent change", f"{name}: {option} is empty, and taken as left out")
    out, load = given.get("out"), foretune.datasets.load
    match name:
        case "train":
            same("train: families", True, set(load_bundle(out).families) <= set(load(given["data"][0]).families))
        case "seal":
            same("seal: rows", *(sorted(rows_of(load(one)), key=repr) for one in (given["data"], out)))
        case "merge":
            ours = set().union(*(rows_of(load(one)) for one in given["data"]))
            same("merge: rows", ours, set(rows_of(load(out))))
        case "export" if given["problem"] is None and given["family"] is None:
            rows = len(load(given["data"]).measurements)
            if given["format"] == "csv":
                with open(out, newline="") as file:
                    same("export: rows", rows, len(list(csv.reader(file))) - 1)
            else:
                json.loads(out.read_text())
        case "device":
            spec = DeviceSpec.find(given["spec"])
            spec = spec.with_sms(given["sms"]) if given["sms"] else spec
            same("device: --json", spec, DeviceSpec.from_json(value) if value else spec)
            same("device: --out", spec, DeviceSpec.find(out) if out else spec)
        case "predict" if value is not None:
            if isinstance(k := given["top"] or given["configs"], int):  # with "auto", the bundle's calibration decides
                same("predict: --configs", True, len(value["shortlist"]) <= k)
            same("predict: --device", DeviceSpec.find(given["device"]).name, value["device"])
        case "evaluate" | "replay" if given["data"] is None:
            raise TroubleError("silent change", f"{name}: judged what nobody named")


def _placed(word: str, places: dict[str, str]) -> str:
    for place, path in places.items():
        word = word.replace(place, path)
    return word

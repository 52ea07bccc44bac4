"""Measure the autotuned kernels of other packages, as installed: `python measure.py OUT [recipe ...] [--deadline 420]`.

Each file of recipes/ names a package and makes calls of it. Workers, several on each GPU, take units (one call each)
from a common list: the first shape of every op, all packages in turn, then the second, and so on. Every autotuned
launch with new sizes is measured (measurer.py): configs are compiled in parallel, and one process at a time measures on
a GPU. A worker that dies or hangs is started again and goes on behind the config that ended it. OUT has
corpus.jsonl.gz, rewritten every half minute (one line per kernel and sizes, never a kernel's source), and log.txt.
Foretune and the packages must be on the path.

With `--wide N`, lists have up to N configs: at most 8 of the authors' and others around them (`wider`). Each call is
then made with three batch sizes, because these share binaries.

`--part 1/4` takes a fourth of the units, for processes that share no folder. Processes with a common `--shared` folder
share all units.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

HERE = Path(__file__).parent
#: What recipes and workers import from: this folder, and that of `turn`.
sys.path += [str(HERE), str(HERE.parents[1] / "third_party")]
#: Seconds without a new line after which a worker is restarted.
STALL_S = {"timing": 25, "other": 150}
#: How often a unit is begun before it is given up, and how often a worker is restarted.
TRIES, RESTARTS = 3, 60


def recipes(names=()) -> list[str]:
    """Return the names of the recipes, all of them by default."""
    return list(names) or sorted(path.stem for path in (HERE / "recipes").glob("[a-z]*.py"))


def recipe(name: str):
    """Import a recipe: `PACKAGE`, the name of the distribution, and `calls()`, lists of functions by op.

    The functions import the package, so importing a recipe and calling `calls` needs neither a package nor torch.
    """
    return importlib.import_module(f"recipes.{name}")


def units(calls: dict[str, dict[str, list]], part: str = "1/1") -> list[tuple[str, str, int]]:
    """Return (recipe, op, index) of every call, the most valuable first.

    Args:
        calls: For each recipe the calls by op.
        part: "i/n" for every n-th unit, from the i-th on.
    """
    found = [
        (index, place, name, op)
        for name, ops in calls.items()
        for place, (op, functions) in enumerate(ops.items())
        for index in range(len(functions))
    ]
    at, parts = map(int, part.split("/"))
    return [(name, op, index) for index, _, name, op in sorted(found)][at - 1 :: parts]


def work(options) -> None:
    """Be one worker: take units until the deadline."""
    import torch
    from autotuners_on_gpu import turn
    from foretune.runtime import Timer
    from inputs import batches
    from measurer import UNIT_S, Measurer, tag_of

    threading.Thread(target=_end_at, args=(options.until,), daemon=True).start()
    journal = options.shared / f"{options.worker}.jsonl"
    measurer = Measurer(partial(turn, options.gpu), options.shared, journal, options, Timer)
    claims = options.shared / "units"
    calls = {name: recipe(name).calls() for name in options.recipes}
    measurer.install()
    measurer.phase = int(options.wide > 0)
    for name, op, index in units(calls, options.part):
        text = f"{name}-{op}-{index}"
        try:
            (claims / text).touch(exist_ok=False)
        except FileExistsError:
            if text not in measurer.begun or measurer.begun[text] >= TRIES or (claims / f"{text}.done").exists():
                continue
        measurer.write(unit=text)
        measurer.unit_ends = time.monotonic() + UNIT_S
        try:
            measurer.tag = tag_of(recipe(name).PACKAGE, f"{name}.{op}.{index}")
            for call in batches(calls[name][op][index]) if options.wide else [calls[name][op][index]]:
                torch.manual_seed(index)
                call()
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the other units still count
            measurer.write(trouble=text, error=f"{type(error).__name__}: {error}"[:300])
            print(text, traceback.format_exc()[-1500:], flush=True)
            torch.cuda.synchronize()  # a lost context ends this process
        finally:
            torch.cuda.empty_cache()
        (claims / f"{text}.done").touch()


def _end_at(until: float) -> None:
    time.sleep(max(until - time.time(), 0))
    os._exit(0)


def merged(folder: Path) -> list[dict]:
    """Return the tunings in all journals of a folder, each with its trials."""
    found: dict[str, dict] = {}
    for path in sorted(folder.glob("*.jsonl")):
        begun: dict[str, tuple[str, dict]] = {}
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        for at, line in enumerate(map(json.loads, lines)):
            if "compiled" in line:
                tuning = found[line["compiled"]]
                for name in ("configs", "seconds", "threads"):
                    tuning["compiled"][name] = tuning["compiled"].get(name, 0) + line[name]
            elif "begin" in line and "config" in line and at + 1 < len(lines):
                begun[json.dumps([line["begin"], line["config"]])] = line["begin"], line["config"]
            elif "tuning" in line and "config" in line:
                begun.pop(json.dumps([line["tuning"], line["config"]]), None)
                found[line["tuning"]]["trials"].append({k: v for k, v in line.items() if k != "tuning"})
            elif "tuning" in line:
                found.setdefault(line["tuning"], line | {"trials": [], "compiled": {}})
        for tuning, config in begun.values():
            found[tuning]["trials"].append({"config": config, "failure": "the process died or hung"})
    return list(found.values())


def save(folder: Path, out: Path) -> list[dict]:
    """Write the tunings in all journals to OUT/corpus.jsonl.gz, and return them."""
    tunings = merged(folder)
    text = "".join(json.dumps(line) + "\n" for line in tunings)
    (out / "corpus.tmp").write_bytes(gzip.compress(text.encode(), 6))
    (out / "corpus.tmp").replace(out / "corpus.jsonl.gz")
    return tunings


def summary(tunings: list[dict]) -> str:
    """Return a table of what was measured, by package."""
    lines = [f"{'package':28}{'kernels':>8}{'keys':>6}{'configs':>9}{'failed':>8}{'differ':>8}"]
    for package in [*sorted({one["package"] for one in tunings}), "all"]:
        found = [one for one in tunings if package in (one["package"], "all")]
        trials = [trial for one in found for trial in one["trials"]]
        failed, differ = (sum(what in trial for trial in trials) for what in ("failure", "differs"))
        kernels = len({one["kernel"] for one in found})
        lines.append(f"{package:28}{kernels:8}{len(found):6}{len(trials):9}{failed:8}{differ:8}")
    return "\n".join(lines)


class Worker:
    """A process of the parent, started again when it dies or hangs before the deadline."""

    def __init__(self, name: str, gpu: str, options) -> None:
        self.name, self._gpu, self._options, self._starts = name, gpu, options, 0
        self._journal = options.shared / f"{name}.jsonl"
        self.start()

    def start(self) -> None:
        self._starts, self._started = self._starts + 1, time.time()
        options = self._options
        given = {"--worker": self.name, "--gpu": self._gpu, "--shared": options.shared, "--until": options.until}
        given |= {f"--{name}": vars(options)[name] for name in ("most", "wide", "keys", "threads", "part")}
        command = [sys.executable, __file__, options.out, *options.recipes]
        command += [str(one) for pair in given.items() for one in pair]
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": self._gpu,
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": options.cache,
        }
        log = (options.out / "log.txt").open("a")
        self._process = subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=log)

    def look(self) -> bool:
        """Restart the process if needed; return whether it still runs."""
        code = self._process.poll()
        if code is None:
            lines = self._journal.read_bytes()[-400:].splitlines() if self._journal.exists() else []
            written = self._journal.stat().st_mtime if lines else 0.0
            timing = written > self._started and lines[-1].startswith(b'{"begin"') and b'"config"' in lines[-1]
            quiet = time.time() - max(written, self._started)
            if quiet < STALL_S["timing" if timing else "other"]:
                return True
            self._process.kill()
            self._process.wait()
        if code == 0 or self._starts > RESTARTS or time.time() > self._options.until - 10:
            return False
        self.start()
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("recipes", nargs="*", help="names of files in recipes/; all by default")
    parser.add_argument("--deadline", type=float, default=420.0, help="seconds after which everything ends")
    parser.add_argument("--processes", type=int, default=6, help="workers for each GPU")
    parser.add_argument("--threads", type=int, default=3, help="compiling threads of each worker")
    parser.add_argument("--most", type=int, default=20, help="configs of a key, of the authors' list")
    parser.add_argument("--wide", type=int, default=0, help="configs of a key, of a wider list; 0: the authors' list")
    parser.add_argument("--keys", type=int, default=8, help="keys of a kernel")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th unit")
    parser.add_argument("--shared", type=Path, help="folder for claims and journals; a new one by default")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.recipes = recipes(options.recipes)
    if options.worker:
        work(options)
        return
    options.until = time.time() + options.deadline
    options.out.mkdir(parents=True, exist_ok=True)
    options.shared = options.shared or Path(mkdtemp())
    options.cache = options.shared / "triton"
    (options.shared / "units").mkdir(parents=True, exist_ok=True)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_gpus())))
    running = [Worker(f"{gpu}-{at}", gpu, options) for at in range(options.processes) for gpu in gpus.split(",")]
    saved = time.time()
    while running:
        time.sleep(1)
        running = [one for one in running if one.look()]
        if time.time() > saved + 30:
            save(options.shared, options.out)
            saved = time.time()
    tunings = save(options.shared, options.out)
    print(summary(tunings))


def _gpus() -> int:
    out = subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True, text=True).stdout
    return out.count("GPU ")


if __name__ == "__main__":
    main()

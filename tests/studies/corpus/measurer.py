"""Measure every autotuned launch: all configs of a new key are compiled in parallel, timed one by one and recorded.

`Measurer.install` replaces `run` of each autotuner that is created from then on. A journal (one JSON object per line)
receives a line when something begins, so that a restarted process skips what ended the previous one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import statistics
import time
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

#: A config that takes this many times as long as the best one so far is launched only once ("early").
FAR_BEHIND = 4.0
#: Device microseconds for the samples of one config.
BUDGET_US = 4000.0
#: Errors of a config that leave the GPU as it was.
UNUSABLE = ("OutOfResources", "CompilationError", "CompileTimeAssertionFailure", "PTXASError")
WARPS, STAGES = (1, 2, 4, 8), (1, 2, 3, 4)
#: Knobs whose values are extended by powers of two.
TILE = re.compile(r"B[A-Z]|(\w+_)?(BLOCK|TILE)(_\w+)?")
#: How many of the authors' configs are in a wide list.
OWN = 8
#: Seconds after which no more configs of a key are compiled, and how many are compiled before looking.
COMPILE_S, CHUNK = 30.0, 12
#: Seconds after which a unit goes on with further sizes of the kernels that it has measured, if lists are wide.
UNIT_S = 120.0
#: Bytes of the largest tensor whose results are compared.
COMPARED = 1 << 29


def plain(value):
    """An argument of a launch as JSON: its dtype and sizes, never its contents."""
    if hasattr(value, "base") and hasattr(value, "block_shape"):
        return {"descriptor": plain(value.base), "block": list(value.block_shape)}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        found = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return found if value.is_contiguous() else found | {"stride": list(value.stride())}
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)[:80]


def knobs(config) -> dict:
    return {name: plain(value) for name, value in config.all_kwargs().items()}


def digest(*parts) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}"


def largest_dim(arguments) -> int:
    """The largest dimension of the tensors among the arguments of a launch."""
    return max((size for one in arguments for size in getattr(one, "shape", ())), default=1)


def wider(configs, own, most: int, bound: int) -> list:
    """Configs with more tiles, warps and stages than the authors' list has; at most `most`.

    Tile sizes are powers of two from half of the authors' smallest to twice their largest. The product of a config's
    tile sizes, and the part of each warp, is at most twice the authors' largest. Knobs that are no tile sizes have the
    authors' values. The order is arbitrary but always the same, so that all keys of a kernel get the same configs.

    Args:
        configs: The authors' list.
        own: Those of it that are measured anyway.
        most: The number of configs.
        bound: The largest dimension of the tensors; no new tile size exceeds the next power of two.
    """
    import triton

    first = configs[0]
    if "num_warps" in first.kwargs or "num_stages" in first.kwargs:
        return []
    known = {json.dumps(knobs(one), sort_keys=True) for one in own}
    names = [name for name in first.kwargs if all(name in one.kwargs for one in configs)]
    values = {
        name: list({json.dumps(plain(one.kwargs[name])): one.kwargs[name] for one in configs}.values())
        for name in names
    }
    tiles = [name for name in names if TILE.fullmatch(name) and all(map(_is_power, values[name]))]
    for name in tiles:
        least, largest = min(values[name]), max(values[name])
        powers = [2**n for n in range(20) if (least // 2 if least > 16 or least < 8 else least) <= 2**n <= 2 * largest]
        values[name] = [one for one in powers if one in values[name] or one < 2 * bound]

    def elements(given) -> int:
        return math.prod(given[name] for name in tiles)

    area = 2 * max(elements(one.kwargs) for one in configs)
    of_warp = 2 * max(elements(one.kwargs) / one.num_warps for one in configs) if tiles else math.inf
    all_warps = sorted({*WARPS, *(one.num_warps for one in configs)})
    all_stages = sorted({*STAGES, *(one.num_stages for one in configs)})
    found = []
    for *chosen, warps, stages in itertools.product(*values.values(), all_warps, all_stages):
        given = {**first.kwargs, **dict(zip(names, chosen, strict=True))}
        if elements(given) > area or elements(given) / warps > of_warp:
            continue
        one = triton.Config(given, warps, stages, first.num_ctas)
        one.maxnreg, one.pre_hook = first.maxnreg, first.pre_hook
        if (text := json.dumps(knobs(one), sort_keys=True)) not in known:
            found.append((digest(text), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])[:most]]


def _is_power(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value & (value - 1) == 0


class Results:
    """Compares what configs of a key compute with what the first one did.

    Args:
        arguments: The arguments of the launch by name.
    """

    def __init__(self, arguments) -> None:
        import torch

        tensors = {name: getattr(one, "base", one) for name, one in arguments.items()}
        self._tensors = {
            name: one.data for name, one in tensors.items() if isinstance(one, torch.Tensor) and one.nbytes <= COMPARED
        }
        self._before = {name: one.clone() for name, one in self._tensors.items()}
        self._expected: dict | None = None

    def reset(self) -> None:
        """Give the tensors that the kernel writes the values that they had before the first launch."""
        for name in self._expected or ():
            self._tensors[name].copy_(self._before[name])

    def differ(self) -> bool:
        """Return whether the last launch computed something else than the first one."""
        if self._expected is None:
            written = [name for name, one in self._tensors.items() if not _same_bytes(one, self._before[name])]
            self._before = {name: self._before[name] for name in written}
            self._expected = {name: self._tensors[name].clone() for name in written}
        return any(_distance(self._tensors[name], one) > 0.03 for name, one in self._expected.items())


def _same_bytes(one, other) -> bool:
    import torch

    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def _distance(one, expected) -> float:
    """The mean difference of two tensors, relative to the mean magnitude of the second one."""
    one, expected = (each.float().nan_to_num(0, 0, 0).clamp(-1e4, 1e4) for each in (one, expected))
    return ((one - expected).abs().mean() / (expected.abs().mean() + 1e-20)).item()


class Measurer:
    """What a worker measures with, and what it knows.

    Args:
        turn: Returns a context in which no other worker times on this GPU.
        shared: The folder in which processes claim tunings.
        journal: The file of this worker's results; what it has already is not measured again.
        options: The command line: `most`, `wide`, `keys`, `threads`.
        make_timer: Returns a `foretune.runtime.Timer`.
    """

    def __init__(self, turn, shared: Path, journal: Path, options, make_timer) -> None:
        self._turn, self._shared, self._path, self._options = turn, shared, journal, options
        self._make_timer, self._timer = make_timer, None
        self._lengths = options.most, options.wide
        self.tag: dict = {}
        self.phase = 0
        self.unit_ends = math.inf
        self._results: dict[str, dict[str, float | None]] = {}
        self._known: dict[str, dict] = {}
        self._good: dict = {}
        self._cut: dict[str, int] = {}
        self._compared: Results | None = None
        self._own: set[str] = set()
        self.begun: dict[str, int] = {}
        if journal.exists():
            self._recall([json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")])
        self._journal = journal.open("a")

    def _recall(self, lines: list[dict]) -> None:
        """Take up what an earlier process of this worker has written; what ended it is a failure."""
        for line in lines:
            if "unit" in line:
                self.begun[line["unit"]] = self.begun.get(line["unit"], 0) + 1
            elif "begin" in line:
                of = digest(line["config"]) if "config" in line else "compiling"
                self._known.setdefault(line["begin"], {})[of] = {}
            elif "compiled" in line:
                self._known.setdefault(line["compiled"], {}).pop("compiling", None)
            elif "tuning" in line and "config" in line:
                self._known.setdefault(line["tuning"], {})[digest(line["config"])] = line
            elif "tuning" in line:
                self._own.add(line["tuning"])

    def write(self, **line) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()

    def install(self) -> None:
        """Replace `run` of every autotuner that is created from now on."""
        from triton.runtime.autotuner import Autotuner

        created = Autotuner.__init__

        def create(tuner, *args, **kwargs) -> None:
            created(tuner, *args, **kwargs)
            if len(tuner.configs) > 1:
                tuner.run = lambda *args, **kwargs: self.launch(tuner, args, kwargs)

        Autotuner.__init__ = create

    def launch(self, tuner, args, kwargs):
        """Measure the key of a launch if nobody has, and launch with the fastest config."""
        from foretune.runtime.tuning.one_launch import OneLaunch

        one = OneLaunch(tuner, args, kwargs)
        tuner.nargs = one.named
        times = self._times(tuner, one)
        order = sorted((time_us, at) for at, time_us in enumerate(times.values()) if time_us is not None)
        configs = [list(times)[at] for _, at in order]
        configs += [self._good[tuner]] if tuner in self._good else []
        for config in configs or self._planned(tuner, kwargs) or tuner.configs:
            try:
                result = one.launch(config)
            except Exception as error:
                if type(error).__name__ not in UNUSABLE:
                    raise
                continue
            self._good[tuner] = tuner.best_config = config
            tuner.nargs = None
            return result
        raise RuntimeError(f"no config of {tuner.base_fn.__name__} can be launched")

    def _planned(self, tuner, kwargs) -> list:
        """The configs of this phase that the autotuner's own pruning lets through, the same ones for all keys."""

        def pruned(configs) -> list:
            if tuner.early_config_prune and configs:
                with suppress(Exception):  # it may expect other lists than this one
                    configs = list(tuner.early_config_prune(configs, tuner.nargs, **kwargs)) or configs
            return list({digest(knobs(one)): one for one in configs}.values())

        own, (most, wide) = sorted(pruned(tuner.configs), key=lambda one: digest(knobs(one))), self._lengths
        if self.phase == 0:
            return own[:most]
        own, bound = own[: min(OWN, wide)], largest_dim(tuner.nargs.values())
        return own + pruned(wider(tuner.configs, own, wide - len(own), bound))

    def _claims(self, name: str, tuning: str) -> bool:
        """Whether this process is the one that measures a key; a kernel has at most `keys` of them."""
        if tuning in self._own:
            return True
        folder = self._shared / "claims" / f"{digest(name)}-{self.phase}"
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.iterdir())) >= self._options.keys or (self.phase and not self._owns(name)):
            return False
        try:
            (folder / tuning).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _owns(self, name: str) -> bool:
        """Whether this unit is the only one that measures a kernel: of a wide list, few binaries should be compiled."""
        *_, index = self.tag["unit"].split(".")
        path = self._shared / f"{digest(name)}-{index}.owner"
        if time.monotonic() > self.unit_ends and not path.exists():
            return False
        with suppress(FileExistsError), path.open("x") as file:
            file.write(self.tag["unit"])
        return path.read_text() == self.tag["unit"]

    def _times(self, tuner, one) -> dict:
        """Return the time of each measured config of a launch's key, None for failures; {} if others measure it."""
        from foretune.runtime.launching.source_hash import hash_of_kernel
        from foretune.runtime.tuning.one_launch import key_of_launch

        jit = tuner.fn
        while not hasattr(jit, "cache_key"):
            jit = jit.fn
        name = f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"
        key = [plain(value) for value in key_of_launch(tuner, one.arguments)]
        given = {at: plain(value) for at, value in one.arguments.items() if at not in ("grid", "warmup")}
        tuning = digest(name, key, given, self.phase)  # sizes that the key omits count, too
        if tuning in self._results:
            return self._results[tuning]
        if not self._claims(name, tuning):
            return {}
        configs = self._planned(tuner, one.kwargs)[: self._cut.get(name)]
        known = self._known.get(tuning, {})
        self.write(
            tuning=tuning,
            **self.tag,
            kernel=name,
            source_hash=hash_of_kernel(jit),
            phase=self.phase,
            keys=list(tuner.keys),
            key=key,
            declared=len(tuner.configs),
            planned=len(configs),
            arguments=given,
        )
        todo = [config for config in configs if digest(knobs(config)) not in known]
        if "compiling" in known:  # an earlier process did not survive it
            todo = []
        broken, done = self._compile(tuning, one, todo)
        if done < len(todo):
            configs = [config for config in configs if config not in todo[done:]]
            todo, self._cut[name] = todo[:done], len(configs)
        times = {config: known.get(digest(knobs(config)), {}).get("us") for config in configs}
        with self._turn():
            self._compared = Results(one.arguments) if self.phase else None
            for config in todo:
                if config in broken:
                    self.write(tuning=tuning, config=knobs(config), failure=reason(broken[config]))
                    continue
                best = min((time_us for time_us in times.values() if time_us is not None), default=float("inf"))
                times[config] = self._timed(tuning, tuner, one, config, best)
            if self._compared:
                self._compared.reset()
        self._results[tuning] = times
        return times

    def _compile(self, tuning: str, one, configs) -> tuple[dict, int]:
        """Compile configs in parallel, until it takes too long.

        Returns:
            The errors of those that cannot be compiled, and the number of configs that it got to.
        """
        from foretune.runtime.launching.ahead import compile_ahead

        began, broken, done = time.perf_counter(), {}, 0
        while done < len(configs) and (not done or time.perf_counter() - began < COMPILE_S):
            chunk = configs[done : done + CHUNK]
            self.write(begin=tuning)
            one.prepare()
            errors = compile_ahead([partial(one.compile, config) for config in chunk], self._options.threads)
            broken |= {config: error for config, error in zip(chunk, errors, strict=True) if error is not None}
            done += len(chunk)
        seconds = round(time.perf_counter() - began, 3)
        self.write(compiled=tuning, configs=done, seconds=seconds, threads=self._options.threads)
        return broken, done

    def _timed(self, tuning: str, tuner, one, config, best: float) -> float | None:
        """Time one config and write the result down; return its median in microseconds, or None."""
        import torch

        if self._timer is None:
            self._timer = self._make_timer()
        self.write(begin=tuning, config=knobs(config))
        line: dict = {"tuning": tuning, "config": knobs(config)}
        if self.phase and config in tuner.configs:
            line["own"] = True
        everything = one.everything(config)
        found: dict = {}

        def restore() -> None:
            if getattr(tuner, "restore_copies", None):
                tuner.post_hook(everything, exception=None)

        def before() -> None:
            restore()
            if config.pre_hook is not None:
                config.pre_hook(everything)
            tuner.pre_hook(everything)

        def launch() -> None:
            found["binary"] = tuner.fn.run(*one.args, **one.kwargs, **config.all_kwargs())

        try:
            if self._compared:
                self._compared.reset()
            before()
            launch()  # compiles or loads, and raises what fails
            torch.cuda.synchronize()
            if self._compared and self._compared.differ():
                line["differs"] = True
            first = self._timer.sample(launch, 1, before)
            least = 2 if first[0] > 5 * BUDGET_US else 4
            count = 0 if first[0] > FAR_BEHIND * best else int(min(max(BUDGET_US / (first[0] + 60), least), 30))
            samples = (self._timer.sample(launch, count, before) if count else []) or first
            line |= {"us": round(statistics.median(samples), 3), "samples": len(samples)}
            if count:  # two halves: choose by one, report the other
                line["halves"] = [round(statistics.median(samples[at::2]), 3) for at in (0, 1)]
            else:
                line["early"] = True
        except Exception as error:  # noqa: BLE001 - a config may fail in any way; its kind is the result
            line["failure"] = reason(error)
        try:
            torch.cuda.synchronize()
            restore()
        except Exception:  # noqa: BLE001 - the context is lost
            self.write(**line)
            os._exit(3)
        if (binary := found.get("binary")) is not None:
            line |= {"regs": binary.n_regs, "spills": binary.n_spills, "shared": binary.metadata.shared}
        grid = one.kwargs.get("grid")
        with suppress(KeyError):  # it may need what triton.heuristics computes
            line["grid"] = [int(n) for n in (grid(everything) if callable(grid) else grid)]
        self.write(**line)
        return None if "differs" in line else line.get("us")


def tag_of(distribution: str, unit: str) -> dict:
    """What every tuning of a unit has in common."""
    import torch
    import triton

    card = torch.cuda.get_device_name()
    return {"package": distribution, "version": version(distribution), "unit": unit, "device": card} | {
        "torch": torch.__version__,
        "triton": triton.__version__,
    }

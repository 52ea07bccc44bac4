"""Measure every autotuned launch: all configs of a new key are compiled in parallel, timed one by one and recorded.

`Measurer.install` replaces `run` of each autotuner that is created from then on. A journal (one JSON object per line)
receives a line when something begins, so that a restarted process skips what ended the previous one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
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
WARPS, STAGES = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5)


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


def wider(configs, most: int) -> list:
    """Configs with the authors' block sizes in new combinations, and other numbers of warps and stages; at most `most`.

    The order is arbitrary but always the same, so that all keys of a kernel get the same ones.
    """
    import triton

    first = configs[0]
    if "num_warps" in first.kwargs or "num_stages" in first.kwargs or not most:
        return []
    known = {json.dumps(knobs(one), sort_keys=True) for one in configs}
    names = [name for name in first.kwargs if all(name in one.kwargs for one in configs)]
    values = [
        list({json.dumps(plain(one.kwargs[name])): one.kwargs[name] for one in configs}.values()) for name in names
    ]
    found = []
    for chosen in itertools.product(*values, WARPS, STAGES):
        *blocks, warps, stages = chosen
        one = triton.Config({**first.kwargs, **dict(zip(names, blocks, strict=True))}, warps, stages, first.num_ctas)
        one.maxnreg, one.pre_hook = first.maxnreg, first.pre_hook
        if (text := json.dumps(knobs(one), sort_keys=True)) not in known:
            found.append((digest(text), one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])[:most]]


class Measurer:
    """What a worker measures with, and what it knows.

    Args:
        turn: Returns a context in which no other worker times on this GPU.
        shared: The folder in which processes claim tunings.
        journal: The file of this worker's results; what it has already is not measured again.
        options: The command line: `most`, `more`, `keys`, `threads`.
        make_timer: Returns a `foretune.runtime.Timer`.
    """

    def __init__(self, turn, shared: Path, journal: Path, options, make_timer) -> None:
        self._turn, self._shared, self._path, self._options = turn, shared, journal, options
        self._make_timer, self._timer = make_timer, None
        self._lengths = options.most, options.more
        self.tag: dict = {}
        self.phase = 0
        self._results: dict[str, dict[str, float | None]] = {}
        self._known: dict[str, dict] = {}
        self._good: dict = {}
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

        own, most, more = sorted(pruned(tuner.configs), key=lambda one: digest(knobs(one))), *self._lengths
        rest = own[most : most + more]
        return own[:most] if self.phase == 0 else rest + pruned(wider(tuner.configs, more - len(rest)))

    def _claims(self, name: str, tuning: str) -> bool:
        """Whether this process is the one that measures a key; a kernel has at most `keys` of them."""
        if tuning in self._own:
            return True
        folder = self._shared / "claims" / f"{digest(name)}-{self.phase}"
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.iterdir())) >= self._options.keys:
            return False
        try:
            (folder / tuning).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

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
        configs = self._planned(tuner, one.kwargs)
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
        broken = self._compile(tuning, one, todo)
        times = {config: known.get(digest(knobs(config)), {}).get("us") for config in configs}
        with self._turn():
            for config in todo:
                if config in broken:
                    self.write(tuning=tuning, config=knobs(config), failure=reason(broken[config]))
                    continue
                best = min((time_us for time_us in times.values() if time_us is not None), default=float("inf"))
                times[config] = self._timed(tuning, tuner, one, config, best)
        self._results[tuning] = times
        return times

    def _compile(self, tuning: str, one, configs) -> dict:
        """Compile configs in parallel; return the errors of those that cannot be compiled."""
        from foretune.runtime.launching.ahead import compile_ahead

        began = time.perf_counter()
        self.write(begin=tuning)
        one.prepare()
        errors = compile_ahead([partial(one.compile, config) for config in configs], self._options.threads)
        seconds = round(time.perf_counter() - began, 3)
        self.write(compiled=tuning, configs=len(configs), seconds=seconds, threads=self._options.threads)
        return {config: error for config, error in zip(configs, errors, strict=True) if error is not None}

    def _timed(self, tuning: str, tuner, one, config, best: float) -> float | None:
        """Time one config and write the result down; return its median in microseconds, or None."""
        import torch

        if self._timer is None:
            self._timer = self._make_timer()
        self.write(begin=tuning, config=knobs(config))
        line: dict = {"tuning": tuning, "config": knobs(config)}
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
            before()
            launch()  # compiles or loads, and raises what fails
            torch.cuda.synchronize()
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
        if binary is not None and "us" in line:
            self._keep_ttir(tuning, binary)
        return line.get("us")

    def _keep_ttir(self, tuning: str, binary) -> None:
        """Keep the TTIR of the first binary of a key that runs, for analysis only."""
        path = self._path.parent / "ttir" / f"{tuning}.ttir"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            lines = binary.asm["ttir"].splitlines()
            path.write_text("\n".join(line for line in lines if not line.startswith("#loc")))


def tag_of(distribution: str, unit: str) -> dict:
    """What every tuning of a unit has in common."""
    import torch
    import triton

    card = torch.cuda.get_device_name()
    return {"package": distribution, "version": version(distribution), "unit": unit, "device": card} | {
        "torch": torch.__version__,
        "triton": triton.__version__,
    }

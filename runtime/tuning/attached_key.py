"""`KeyTuning`: the state of an attached autotuner while it tunes one key; `CoarseKeys`: a warning about coarse keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...datasets import Problem
from ..arguments import warn_once
from ..launching.ahead import load_binary
from ..launching.kernel import Kernel
from .known_times import KeyTimes, is_lasting
from .one_launch import OneLaunch, key_of_launch, microseconds
from .refine.refinement import Refinement
from .session import Measured, TuningSession
from .shortlisters import Shortlister

if TYPE_CHECKING:
    import triton


#: The number of launches of a key that are compared with the one that it was tuned for, and of all keys together.
_LAUNCHES, _ALL_LAUNCHES = 16, 1000


@dataclass
class KeyTuning:
    """The state of an attached autotuner while it tunes one key; the loop that times the configs is Triton's own.

    Attributes:
        allowed: The configs that the kernel's own pruning keeps.
        arguments: The launch's arguments by name.
        keys: The keys that Triton had a config for before.
        uncompiled: The configs that are compiled in parallel before the next one is timed.
        slowdowns: In mode `refine`, the configs' predicted slowdowns.
        scale: In mode `refine`, the launch's predicted time in microseconds.
        refining: In mode `refine`, the `Refinement` that chooses the configs of later launches, and `scale`.
    """

    tuner: triton.runtime.Autotuner
    shortlister: Shortlister
    times: KeyTimes
    allowed: tuple[triton.Config, ...]
    problem: Problem
    arguments: Mapping[str, Any]
    uncompiled: tuple[triton.Config, ...] = ()
    slowdowns: Mapping[triton.Config, float] = field(default_factory=dict)
    scale: float = 1.0
    refining: tuple[Refinement[triton.Config], float] | None = None

    def __post_init__(self) -> None:
        self.session: TuningSession[triton.Config] = TuningSession(self.times)
        self.keys = set(self.tuner.cache)

    def prepare(self, configs: Sequence[triton.Config]) -> None:
        """Load the known times of configs that are about to be timed, and list what must be compiled."""
        tuner, session = self.tuner, self.session
        # A kernel's own do_bench may return another kind of value, which Triton would compare with known times. So
        # known times are used only if all configs have one.
        if tuner._do_bench is None or len(self.times.recall(configs)) == len(configs):
            session.recall(configs)
        # Compile ahead only if no pre_hook can change arguments that a binary depends on, and no perf_model drops
        # configs.
        left = [config for config in configs if config not in session.measured]
        plain = tuner.perf_model is None and not any(config.pre_hook for config in left)
        if plain and len(configs) > 1 and not Kernel(tuner).is_interpreted:
            self.uncompiled = tuple(left)

    def compile(self, args: Sequence[Any], meta: Mapping[str, Any]) -> None:
        """Compile the `uncompiled` configs in parallel for a launch with these arguments.

        Errors are ignored, because Triton meets them when it times the config.
        """
        configs, self.uncompiled = self.uncompiled, ()
        given = {name: value for name, value in meta.items() if name != "warmup"}
        self.session.compile(configs, lambda config: self.tuner.fn.warmup(*args, **given, **config.all_kwargs()))

    def compiled(self, config: triton.Config, args: Sequence[Any], meta: Mapping[str, Any]) -> bool:
        """Compile and load a config for a launch with these arguments, and return whether that works.

        A failure that is the config's own is recorded, so that `more` does not propose the config again.
        """
        if config in self.session.failed:
            return True  # all others have failed, too
        launch = OneLaunch(self.tuner, tuple(args), meta)
        error = self.session.compile([config], lambda config: load_binary(launch.compile(config)))[config]
        if isinstance(error, Exception) and is_lasting(error):
            self.session.keep(config, Measured.failed(error), error)
            return False
        return True

    def more(self) -> list[triton.Config]:
        """Return the configs that have a time, fastest first, then those to time next, if the search goes on.

        The known times of these configs are loaded, and the others are listed for compilation; see `prepare`.
        """
        positions = self.shortlister.positions(self.problem, self.allowed, self.session.cost_s)
        configs = [self.allowed[position] for position in positions]
        self.prepare(configs)
        return configs

    def in_tritons_cache(self) -> triton.Config | None:
        """Learn this key's times from Triton's own cache on disk, and return the best config; None without times."""
        if not getattr(self.tuner, "cache_results", False):
            return None
        key = key_of_launch(self.tuner, self.arguments)
        try:
            self.tuner.check_disk_cache(key, self.allowed, _missing)
        except LookupError:
            return None
        for config, timing in self.tuner.configs_timings.items():
            self.session.keep(config, Measured.of(microseconds(timing)))
        best: triton.Config = self.tuner.cache[key]
        return best


class CoarseKeys:
    """Warns if an autotuner's key is too coarse: one config runs for launches with equal keys that differ in size.

    The sizes are dimensions of the problem, such as the number of elements of the launch's tensors. One warning names
    the kernel, its key, and the sizes. Only the first launches of each key are compared, so that later ones cost
    nothing.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.watched: dict[Any, list[Any]] = {}  # by key: its shortlister, its problem, and the launches left
        self._left = _ALL_LAUNCHES

    def watch(self, key: Any, tuning: KeyTuning) -> None:
        """Start to compare the next launches of a tuned key with the launch that it was tuned for."""
        if self._left > 0:
            self.watched[key] = [tuning.shortlister, tuning.problem, _LAUNCHES]

    def check(self, tuner: triton.runtime.Autotuner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Warn if this launch has a watched key and other sizes than the launch that its key was tuned for."""
        self._left -= 1
        arguments = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        key = key_of_launch(tuner, arguments)
        if self._left <= 0:
            self.watched.clear()
        if key not in self.watched:
            return
        shortlister, tuned, _ = entry = self.watched[key]
        entry[2] -= 1
        if entry[2] <= 0:
            del self.watched[key]
        sizes = dict(shortlister.problem(arguments).dims)
        differ = [f"{name} ({size} and {sizes[name]})" for name, size in tuned.dims if sizes.get(name, size) != size]
        if differ:
            self.watched.clear()
            self._left = 0
            values = ", ".join(f"{name}={value}" for name, value in zip(tuner.keys, key, strict=False))
            what = f"{self._name}: its key ({', '.join(tuner.keys)}) is too coarse: launches with {values} differ in "
            warn_once(what + ", ".join(differ), f": the config that is fastest for {tuned} runs for all of them")


def _missing() -> None:
    """Raise `LookupError`: Triton calls this in place of its benchmark if its cache on disk has no times."""
    raise LookupError

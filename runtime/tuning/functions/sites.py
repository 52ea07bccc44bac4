"""`Sites`: where something is tuned in a function: an autotuned kernel, or a tuned function, each with one key.

Triton's autotuners run the config that the context gives them (`forced`): nothing of a kernel is changed, and nothing
stays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...launching.kernel import Kernel
from ...launching.source_hash import digest_of
from ..triton_adapter import Attachment
from .calls import Call
from .config_space import Candidate
from .in_step import listed
from .plain_values import plain, text_of, type_name
from .running import context_now

Run = Callable[..., Any]


@dataclass
class Site:
    """Where something is tuned.

    `now` is the config that it runs; `settle` has it run one from now on, outside of any context too.
    """

    name: str
    key: str
    label: str  # what a cache knows it by
    candidates: tuple[Candidate, ...]
    settle: Callable[[Candidate], Any]
    now: Candidate
    source: str = ""  # of a kernel: another source is another question, though ranks may have others
    broken: dict[str, Exception] = field(default_factory=dict)  # by a config's text: why it cannot run here
    proven: dict[str, Candidate] = field(default_factory=dict)
    is_tuned: bool = False
    is_met: bool = True  # in the last run

    @property
    def question(self) -> str:
        """What is asked here, as a digest: ranks must have it in common. Their keys may differ, as shards do."""
        return digest_of([self.name, *(one.text for one in self.candidates)])

    @property
    def done(self) -> str:
        """What a choice is kept for."""
        return f"{self.question} {self.source}".rstrip()

    @property
    def terms(self) -> str:
        """The same to be read."""
        return f"{self.name} with {listed([one.text for one in self.candidates])}"

    def check(self, candidate: Candidate) -> None:
        """Raises why a config could not run here, if so."""
        if candidate.text in self.broken:
            raise self.broken[candidate.text]

    def run(self, launch: Callable[[Candidate], Any]) -> Any:
        """Launch with the config whose turn it is.

        Where that fails another one runs, so that the function goes on: other ranks wait for its collectives. Raises
        what the last one raised where none works.
        """
        self.is_met = True
        turns = {one.text: one for one in (self.now, *self.proven.values(), *self.candidates)}
        tried: Exception | None = None
        for text, candidate in turns.items():
            if text in self.broken:
                tried = self.broken[text]
                continue
            try:
                result = launch(candidate)
            except Exception as error:  # noqa: BLE001 - a config that fails is one config less
                self.broken[text] = tried = error
            else:
                self.proven[text] = candidate
                return result
        assert tried is not None
        raise tried


class Sites:
    """The sites that a function ran into, in that order.

    `known` has what was chosen before, and for which question, by label: such a site runs that, and is tuned.
    """

    def __init__(self, known: Mapping[str, tuple[str | None, str]]) -> None:
        self._known = known
        self._sites: dict[Any, Site] = {}
        self._configs: dict[Any, dict[str, Any]] = {}  # of kernels: the autotuner's own objects, by text

    @property
    def found(self) -> list[Site]:
        return list(self._sites.values())

    def run_function(self, function: Any, call: Call) -> Any:
        """Run a call of a `TunedFunction`."""
        place = (id(function), call.key, text_of(plain(call.fixed, str)))
        site = self._sites.get(place)
        if site is None:
            site = self._add(
                place,
                function.name,
                call.key,
                function.candidates(call),
                lambda candidate: function.remember(call, candidate),
            )
        return site.run(lambda candidate: function.run(call, candidate))

    def run_kernel(self, kernel: Any, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a launch of a Triton autotuner; `run` is the autotuner's own."""
        real = kernel.cache

        def launch(config_of: Callable[[Any], Any]) -> Any:
            kernel.cache = ForcedCache(real, config_of)
            try:
                return run(kernel, *args, **kwargs)
            finally:
                kernel.cache = real

        try:
            return launch(_stop)
        except _KeyFoundError as found:  # made by the autotuner itself; nothing was launched yet
            key = found.key
        place = (id(kernel), key)
        site = self._sites.get(place)
        if site is None:
            kernel.nargs = dict(zip(kernel.arg_names, args, strict=False))  # what `prune_configs` looks at
            configs = {text_of(plain(config, str)): config for config in kernel.prune_configs(kwargs)}
            self._configs[place] = configs
            site = self._add(
                place,
                f"{kernel.base_fn.__module__}.{kernel.base_fn.__qualname__}",
                text_of(plain(key, type_name)),
                tuple(Candidate(config.all_kwargs(), text) for text, config in configs.items()),
                lambda candidate: real.__setitem__(key, configs[candidate.text]),
                Kernel(kernel).source_hash(),
            )
        configs = self._configs[place]
        return site.run(lambda candidate: launch(lambda _: configs[candidate.text]))

    def _add(
        self,
        place: Any,
        name: str,
        key: str,
        candidates: tuple[Candidate, ...],
        settle: Callable[[Candidate], Any],
        source: str = "",
    ) -> Site:
        # Kernels that one function makes have one name: then it is the order of their first launches that counts.
        alike = sum((one.name, one.key) == (name, key) for one in self.found)
        label = f"{name} {key}" + (f" #{alike + 1}" if alike else "")
        site = self._sites[place] = Site(name, key, label, candidates, settle, candidates[0], source)
        chosen, done = self._known.get(site.label, (None, ""))
        known = next((one for one in candidates if one.text == chosen and site.done == done), None)
        site.now, site.is_tuned = known or site.now, known is not None or len(candidates) == 1
        return site


class _KeyFoundError(Exception):
    """Ends a launch at the point where the autotuner has made its key."""

    def __init__(self, key: Any) -> None:
        self.key = key


def _stop(key: Any) -> Any:
    raise _KeyFoundError(key)


class ForcedCache(dict[Any, Any]):
    """Stands for an autotuner's cache in one launch: `config_of` gives the config of whatever key the autotuner makes.

    So every version of Triton makes its own key, and launches as it does. Other threads see the real cache.
    """

    def __init__(self, real: Any, config_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self._real, self._config_of = real, config_of
        self._context = context_now()

    def __contains__(self, key: object) -> bool:
        return self._is_ours() or key in self._real

    def __getitem__(self, key: Any) -> Any:
        return self._config_of(key) if self._is_ours() else self._real[key]

    def get(self, key: Any, default: Any = None) -> Any:
        return self._config_of(key) if self._is_ours() else self._real.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._real[key] = value

    def _is_ours(self) -> bool:
        return self._context is not None and context_now() is self._context


@contextmanager
def forced() -> Iterator[None]:
    """While the block runs, have every autotuner of this process ask the context of its thread, where there is one."""
    autotuner = sys.modules.get("triton.runtime.autotuner")
    if autotuner is None:  # nobody has a kernel
        yield
        return
    replaced = {one: one.__dict__["run"] for one in _family_of(autotuner.Autotuner) if "run" in one.__dict__}
    replaced[Attachment] = Attachment.run
    for one, run in replaced.items():
        one.run = _asking_attached(run) if one is Attachment else _asking(run)
    try:
        yield
    finally:
        for one, run in replaced.items():
            one.run = run


def _asking_attached(run: Run) -> Run:
    """As `_asking`, for the `run` of an attached autotuner, which the context bypasses: it decides what is timed."""

    def ask(attachment: Attachment, /, *args: Any, **kwargs: Any) -> Any:
        if context_now() is None:
            return run(attachment, *args, **kwargs)

        def own(_: Any, /, *args: Any, **kwargs: Any) -> Any:
            return attachment.own_run(*args, **kwargs)

        with attachment.lock:
            return _asking(own)(attachment.tuner, *args, **kwargs)

    return ask


def _asking(run: Run) -> Run:
    def ask(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        context: Any = context_now()
        # A subclass's `run` calls that of its base, for a launch that has been asked about.
        if context is None or isinstance(kernel.cache, ForcedCache) or len(kernel.configs) < 2:
            return run(kernel, *args, **kwargs)
        return context.run_kernel(kernel, run, args, kwargs)

    return ask


def _family_of(base: type[Any]) -> list[type[Any]]:
    return [base, *(one for child in base.__subclasses__() for one in _family_of(child))]

"""`Sites`: where something is tuned in a function: an autotuned kernel, or a tuned function, each with one key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...launching.kernel import Kernel
from ...launching.source_hash import digest_of
from .calls import Call
from .config_space import Candidate
from .forced_autotuners import ForcedCache, Run
from .in_step import listed
from .plain_values import plain, text_of, type_name


@dataclass
class Site:
    """`now` is the config that it runs; `settle` has it run one from now on, outside of any context too."""

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
        texts = [self.name, *(one.text for one in self.candidates)]
        return digest_of(texts)

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
        """Launches with the config that is its turn. Where that fails another one runs, so that the function goes on:
        other ranks wait for its collectives. Raises what the last one did where none works."""
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
    """What a function ran into, in the order of first meeting. `known` has what was chosen before, and for which
    question, by label: such a site runs that, and is tuned."""

    def __init__(self, known: Mapping[str, tuple[str | None, str]]) -> None:
        self._known = known
        self._sites: dict[Any, Site] = {}
        self._configs: dict[Any, dict[str, Any]] = {}  # of kernels: the autotuner's own objects, by text

    @property
    def found(self) -> list[Site]:
        return list(self._sites.values())

    def run_function(self, function: Any, call: Call) -> Any:
        """A call of a `TunedFunction`."""
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
        """A launch of a Triton autotuner."""
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

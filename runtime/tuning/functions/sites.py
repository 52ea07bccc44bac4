"""`Sites`: the autotuned kernels and tuned functions that a contextual function calls, one `Site` for each key of each.

While such a function is tuned, its `Sites` object (the context) chooses the config of each launch, for which `forced`
replaces the `run` method of Triton's autotuners. Kernels are not modified permanently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...launching.kernel import Kernel
from ...launching.source_hash import digest_of
from ..one_launch import ForcedCache
from ..triton_adapter import Attachment
from .calls import FunctionCall
from .config_space import Candidate
from .in_step import context_now, listed
from .plain_values import plain, text_of, type_name

Run = Callable[..., Any]


@dataclass
class Site:
    """One key of an autotuned kernel or tuned function that a contextual function calls.

    Attributes:
        name: The name of the kernel or function.
        key: The key, as text.
        label: Identifies the site in the cache.
        candidates: All configs.
        settle: Makes a config the permanent choice, also outside of contexts.
        now: The config that runs next.
        source: The source hash of a kernel: a changed source is tuned again. Ranks may have different ones.
        broken: The exceptions of the configs that failed at this site, by the config's text.
        proven: The configs that worked at this site, by their text.
        is_tuned: Whether the choice is final.
        is_reached: Whether the last run of the function reached this site.
    """

    name: str
    key: str
    label: str
    candidates: tuple[Candidate, ...]
    settle: Callable[[Candidate], Any]
    now: Candidate
    source: str = ""
    broken: dict[str, Exception] = field(default_factory=dict)
    proven: dict[str, Candidate] = field(default_factory=dict)
    is_tuned: bool = False
    is_reached: bool = True

    @property
    def done(self) -> str:
        """A text that identifies the site's configs and source; a stored choice is valid only if this text is equal."""
        return f"{digest_of([self.name, *(one.text for one in self.candidates)])} {self.source}".rstrip()

    @property
    def terms(self) -> str:
        """The site's name and configs as readable text, which must be the same on all ranks."""
        return f"{self.name} with {listed([one.text for one in self.candidates])}"

    def check(self, candidate: Candidate) -> None:
        """Raise the exception of a config if it failed at this site."""
        if candidate.text in self.broken:
            raise self.broken[candidate.text]

    def run(self, launch: Callable[[Candidate], Any]) -> Any:
        """Launch with the current config, `now`; return the result.

        If it fails, other configs are tried, so that the function completes: other ranks wait for its collectives. If
        none works, raise the last exception.
        """
        self.is_reached = True
        turns = {one.text: one for one in (self.now, *self.proven.values(), *self.candidates)}
        tried: Exception | None = None
        for text, candidate in turns.items():
            if text in self.broken:
                tried = self.broken[text]
                continue
            try:
                result = launch(candidate)
            except Exception as error:  # noqa: BLE001 - a failing config is only excluded
                self.broken[text] = tried = error
            else:
                self.proven[text] = candidate
                return result
        assert tried is not None
        raise tried


class Sites:
    """The sites that a function reached, in order. A site is a kernel or function that it calls, and one key of it.

    Args:
        known: Earlier choices by label, each a config's text and the `Site.done` for which it is valid, None for any.
            A site with a valid choice runs it and counts as tuned.
    """

    def __init__(self, known: Mapping[str, tuple[str | None, str | None]]) -> None:
        self._known = known
        self._sites: dict[Any, Site] = {}
        self._configs: dict[Any, dict[str, Any]] = {}  # kernels' own config objects, by text

    @property
    def found(self) -> list[Site]:
        """All sites, in the order of their first launches."""
        return list(self._sites.values())

    def run_function(self, function: Any, call: FunctionCall) -> Any:
        """Run a call of a `TunedFunction` with its site's current config; return the result."""
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
        """Launch a kernel with its site's current config, and return the launch's result.

        `run` is the `run` method of the kernel's autotuner.
        """
        real, context = kernel.cache, context_now()

        def launch(config_of: Callable[[Any], Any]) -> Any:
            kernel.cache = ForcedCache(real, config_of, lambda: context_now() is context)
            try:
                return run(kernel, *args, **kwargs)
            finally:
                kernel.cache = real

        try:
            return launch(_stop)
        except _KeyFoundError as found:  # the autotuner computed its key; nothing was launched
            key = found.key
        place = (id(kernel), key)
        site = self._sites.get(place)
        if site is None:
            kernel.nargs = dict(zip(kernel.arg_names, args, strict=False))  # `prune_configs` reads them
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
        # Kernels created by the same function have the same name: number them in the order of their first launches.
        alike = sum((one.name, one.key) == (name, key) for one in self.found)
        label = f"{name} {key}" + (f" #{alike + 1}" if alike else "")
        site = self._sites[place] = Site(name, key, label, candidates, settle, candidates[0], source)
        chosen, done = self._known.get(site.label, (None, ""))
        known = next((one for one in candidates if one.text == chosen and done in (None, site.done)), None)
        site.now, site.is_tuned = known or site.now, known is not None or len(candidates) == 1
        return site


class _KeyFoundError(Exception):
    """Raised to end a launch once the autotuner has computed its key, before the kernel runs."""

    def __init__(self, key: Any) -> None:
        self.key = key


def _stop(key: Any) -> Any:
    raise _KeyFoundError(key)


@contextmanager
def forced() -> Iterator[None]:
    """While the block runs, let a contextual function that is being tuned choose the configs of autotuners' launches.

    Launches in threads without such a tuning are not affected.
    """
    autotuner = sys.modules.get("triton.runtime.autotuner")
    if autotuner is None:  # no kernel was declared
        yield
        return
    replaced = {one: one.__dict__["run"] for one in _family_of(autotuner.Autotuner) if "run" in one.__dict__}
    replaced[Attachment] = Attachment.run
    for one, run in replaced.items():
        one.run = _intercepting_attached(run) if one is Attachment else _intercepting(run)
    try:
        yield
    finally:
        for one, run in replaced.items():
            one.run = run


def _intercepting_attached(run: Run) -> Run:
    """Return a replacement of `Attachment.run` that lets the thread's context (`Sites`), if any, choose the config.

    With a context, the attachment's own tuning is bypassed; without one, the given `run` is called.
    """

    def intercept(attachment: Attachment, /, *args: Any, **kwargs: Any) -> Any:
        if context_now() is None:
            return run(attachment, *args, **kwargs)

        def own(_: Any, /, *args: Any, **kwargs: Any) -> Any:
            return attachment.own_run(*args, **kwargs)

        with attachment.lock:
            return _intercepting(own)(attachment.tuner, *args, **kwargs)

    return intercept


def _intercepting(run: Run) -> Run:
    """Return a replacement of `Autotuner.run` that lets the thread's context (`Sites`), if any, choose the config.

    Without a context, it calls the given `run`.
    """

    def intercept(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        context: Any = context_now()
        # A `ForcedCache` means that the `run` of a subclass was intercepted, and now calls that of its base class.
        if context is None or isinstance(kernel.cache, ForcedCache) or len(kernel.configs) < 2:
            return run(kernel, *args, **kwargs)
        return context.run_kernel(kernel, run, args, kwargs)

    return intercept


def _family_of(base: type[Any]) -> list[type[Any]]:
    return [base, *(one for child in base.__subclasses__() for one in _family_of(child))]

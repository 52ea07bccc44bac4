"""Triton's autotuners, made to run the config that a context gives them, while that is tuned: nothing of a kernel is
changed, and nothing stays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..attach import Attachment
from .running import context_now

Run = Callable[..., Any]


class KernelContext(Protocol):
    """What decides for kernels."""

    def run_kernel(self, kernel: Any, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A launch of an autotuned kernel; `run` is the autotuner's own."""


class ForcedCache(dict[Any, Any]):
    """Stands for an autotuner's cache in one launch: whatever key the autotuner makes of it, `config_of` says what that
    was tuned to. So every Triton makes its own key, and launches as it does. Other threads see the real cache."""

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
    """While the block runs, every autotuner of this process asks the context of its thread, where there is one."""
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
    """As `_asking`, for the `run` that an attached autotuner has of its own: a context goes past it, since it decides
    itself what is timed and when."""

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

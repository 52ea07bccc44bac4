"""`remembered`: a faster `functools.lru_cache` for functions of a tuple of configs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

from ..datasets import KernelConfig

T = TypeVar("T")
Configs = tuple[KernelConfig, ...]


def remembered(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that caches up to `maxsize` results of a function of a tuple of configs.

    The function's other arguments must be hashable. A tuple that was passed before is recognized by its identity,
    because hashing a thousand configs takes 0.3 ms, a third of the time that a prediction may take. A tuple that is
    equal, but another object, gets the same result.

    >>> count = remembered(maxsize=8)(len)
    >>> count((KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=32)))
    2
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        by_equality = lru_cache(maxsize)(function)
        by_identity: dict[tuple[Hashable, ...], tuple[Configs, T]] = {}

        def found(configs: Configs, *args: Hashable) -> T:
            key = (id(configs), *args)
            known = by_identity.get(key)
            if known is None:
                known = configs, by_equality(configs, *args)  # keeps the tuple alive, so that its id is not reused
                if len(by_identity) >= maxsize:
                    by_identity.clear()
                by_identity[key] = known
            return known[1]

        return found

    return decorate

"""`Filtered`: which configs are left, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...datasets import KernelConfig
from ...datasets.console import table


@dataclass(frozen=True)
class Filtered:
    """The configs that are left of a list, in its order, and those that were dropped, each with the reason."""

    configs: tuple[KernelConfig, ...]
    dropped: tuple[tuple[KernelConfig, str], ...] = ()

    @classmethod
    def by(cls, configs: Iterable[KernelConfig], reason_against: Callable[[KernelConfig], str | None]) -> Filtered:
        """Keeps those that there is no reason against; each once.

        >>> ones = [KernelConfig.of(BLOCK=size) for size in (64, 128)]
        >>> left = Filtered.by(ones, lambda c: "too large" if c["BLOCK"] > 64 else None)
        >>> len(left.configs), left.dropped[0][1]
        (1, 'too large')
        """
        reasons = {config: reason_against(config) for config in configs}
        return cls(
            tuple(config for config, reason in reasons.items() if reason is None),
            tuple((config, reason) for config, reason in reasons.items() if reason is not None),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "configs": [config.to_json() for config in self.configs],
            "dropped": [{"config": config.to_json(), "reason": reason} for config, reason in self.dropped],
        }

    def __rich__(self) -> Any:
        counts = Counter(reason for _, reason in self.dropped).most_common()
        rows = [(count, reason) for reason, count in counts]
        left = f"{len(self.configs)} of {len(self.configs) + len(self.dropped)} configs are left."
        return table("Dropped configs", ("configs", "because"), rows, below=[left])

"""`KernelConfig`: one point of a kernel's tuning space, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .errors import ForetuneError

if TYPE_CHECKING:
    import triton

Knob: TypeAlias = int | str | float
#: The launch options of `triton.Config` that are values; the rest of a config is meta-parameters.
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


@dataclass(frozen=True)
class KernelConfig:
    """Meta-parameters and launch options of one kernel variant. Hashable, JSON-able, ordered by knob name.

    >>> config = KernelConfig.of(num_warps=8, BLOCK_M=128, BLOCK_N=64)
    >>> config["BLOCK_M"], config["num_warps"]
    (128, 8)
    >>> KernelConfig.from_json(config.to_json()) == config
    True
    """

    meta: tuple[tuple[str, Knob], ...]  # (name, value), sorted by name
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    ir_override: str | None = None

    @classmethod
    def of(cls, **knobs: Any) -> KernelConfig:
        """A config from flat keywords: those of `OPTIONS` are launch options, all others meta-parameters."""
        options = {name: knobs.pop(name) for name in OPTIONS if name in knobs}
        return cls(tuple(sorted(knobs.items())), **options)

    def __getitem__(self, knob: str) -> Any:
        for name, value in self.meta:
            if name == knob:
                return value
        if knob in OPTIONS:
            return getattr(self, knob)
        raise KeyError(knob)

    def to_json(self) -> dict[str, Knob]:
        """All knobs, flat; options that Triton leaves unset (None) are left out."""
        options = {name: getattr(self, name) for name in OPTIONS}
        return dict(self.meta) | {name: value for name, value in options.items() if value is not None}

    @classmethod
    def from_json(cls, knobs: Mapping[str, Any]) -> KernelConfig:
        """The inverse of `to_json`. Raises `ForetuneError` for a value that is not a number or a string."""
        if not isinstance(knobs, Mapping):
            raise ForetuneError(f"not a config: {knobs!r}")
        for name, value in knobs.items():
            if not isinstance(value, (int, float, str)):
                raise ForetuneError(f"config knob {name} must be a number or a string but got {value!r}")
        return cls.of(**knobs)

    def to_triton(self) -> triton.Config:
        """A new `triton.Config` with these values."""
        import triton

        options = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        return triton.Config(dict(self.meta), **options)

    @classmethod
    def from_triton(cls, config: triton.Config) -> KernelConfig:
        """The values of a `triton.Config`. A `pre_hook` is code, not a value: it stays with the original,
        which is what prune callbacks hand back."""
        options: dict[str, Any] = {name: getattr(config, name, None) for name in OPTIONS}
        return cls(tuple(sorted(config.kwargs.items())), **options)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.to_json().items() if name != "num_ctas")

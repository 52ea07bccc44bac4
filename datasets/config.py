"""`KernelConfig`, the immutable knob values of one kernel variant; `remembered`, a cache for functions of configs."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from .errors import MOST, MOST_NAMES, ForetuneError, check_integer, check_word, shown

if TYPE_CHECKING:
    import triton

Knob: TypeAlias = int | str | float
_T = TypeVar("_T")
#: The launch options of `triton.Config`. All other knobs are meta-parameters of the kernel.
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
#: The most characters of a knob's value.
_LONGEST_TEXT = 4096


@dataclass(frozen=True)
class KernelConfig:
    """The meta-parameters and launch options of one kernel variant. Hashable, and convertible to and from JSON.

    `KernelConfig.of` builds one from keywords. The constructor only refuses values that no kernel can have;
    `Family.supports` says what a particular kernel accepts.

    Attributes:
        meta: The meta-parameters as (name, value), sorted by name.
        num_warps: Warps of a block; a power of two from 1 to 32.
        num_stages: Software pipelining stages.
        num_ctas: Blocks of a cluster.
        maxnreg: The maximum number of registers per thread; None leaves it to the compiler.
        ir_override: Triton's option of that name; None if it is not set.

    Raises:
        ForetuneError: A knob has a value that no kernel can have. The message names the knob.

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
    # All knobs that are not None. `__getitem__` reads it at every launch.
    _knobs: dict[str, Knob] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        meta, knobs = _checked_meta(self.meta)
        values = (self.num_warps, self.num_stages, self.num_ctas, self.maxnreg, self.ir_override)
        try:
            options, given = _options(*values)
        except TypeError:  # a list, say
            raise ForetuneError(f"config knobs {', '.join(OPTIONS)} must be numbers but are {shown(values)}") from None
        # Does what `object.__setattr__` does in a third of the time; spaces have thousands of configs.
        self.__dict__.update(options, meta=meta, _knobs=knobs | given)

    @classmethod
    def of(cls, /, **knobs: Any) -> KernelConfig:
        """Return a config from keywords: the names in `OPTIONS` are launch options, all others meta-parameters.

        >>> str(KernelConfig.of(BLOCK=256, num_warps=8))
        'BLOCK=256 num_warps=8 num_stages=3'
        """
        options = {name: knobs.pop(name) for name in OPTIONS if name in knobs}
        return cls(tuple(knobs.items()), **options)

    def __getitem__(self, knob: str) -> Any:
        """Return the value of a knob; None for a launch option that is not set."""
        if knob in self._knobs:
            return self._knobs[knob]
        if knob in OPTIONS:
            return None
        raise KeyError(knob)

    def to_json(self) -> dict[str, Knob]:
        """Return all knobs in one dict, without launch options that are None."""
        return dict(self._knobs)

    @classmethod
    def from_json(cls, knobs: Mapping[str, Any]) -> KernelConfig:
        """Return the config with the knobs in a dict from `to_json`; raise `ForetuneError` if they are not valid."""
        if not isinstance(knobs, Mapping) or not all(isinstance(name, str) for name in knobs):
            raise ForetuneError(f"a config must be a mapping from knob names to values but is {shown(knobs)}")
        return cls.of(**knobs)

    def to_triton(self) -> triton.Config:
        """Return a new `triton.Config` with these values."""
        import triton

        options = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        return triton.Config(dict(self.meta), **options)

    @classmethod
    def from_triton(cls, config: triton.Config) -> KernelConfig:
        """Return the values of a `triton.Config`.

        A `pre_hook` is code and not a value, so it is not copied. Prune callbacks return the original `triton.Config`
        objects, which keep theirs.
        """
        if not isinstance(meta := getattr(config, "kwargs", None), Mapping):
            raise ForetuneError(f"a config must be a triton.Config but is {shown(config)}")
        options: dict[str, Any] = {name: getattr(config, name, None) for name in OPTIONS}
        return cls(tuple(meta.items()), **options)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.to_json().items() if name != "num_ctas")


def _checked_meta(meta: Any) -> tuple[tuple[tuple[str, Knob], ...], dict[str, Knob]]:
    """Check the meta-parameters and return them sorted by name, and as a dict."""
    if not isinstance(meta, (tuple, list)) or len(meta) > MOST_NAMES:
        raise ForetuneError(
            f"the meta-parameters of a config must be at most {MOST_NAMES} pairs (knob, value) but are {shown(meta)}"
        )
    try:
        checked = sorted([_knob(name, value) for name, value in meta], key=itemgetter(0))
    except ForetuneError:
        raise
    except (TypeError, ValueError):  # not pairs, or a value that cannot be hashed
        raise ForetuneError(
            f"the value of each knob must be a number or a string but the config has {shown(meta)}"
        ) from None
    knobs = dict(checked)
    if len(knobs) < len(checked):
        raise ForetuneError(f"a config must name each knob once but has {shown(meta)}")
    return tuple(checked), knobs


def check_config(config: Any) -> KernelConfig:
    """Return one item of a user's list of configs unchanged, after checking its type.

    Raises:
        ForetuneError: It is not a `KernelConfig`.
    """
    if not isinstance(config, KernelConfig):
        raise ForetuneError(
            "each of configs must be a KernelConfig (KernelConfig.from_triton makes one of a triton.Config) "
            f"but one is {shown(config)}"
        )
    return config


# Cached, because thousands of configs share the same few values. typed=True keeps True and 1 apart.
@lru_cache(maxsize=4096, typed=True)
def _knob(name: Any, value: Any) -> tuple[str, Knob]:
    """Check one meta-parameter; return its name, and its value as a plain Python bool, float, int or str."""
    name = check_word("a config's knob", name)
    if name in OPTIONS:
        raise ForetuneError(f"{name} is a launch option and not a meta-parameter: use KernelConfig.of({name}=...)")
    if isinstance(value, bool):
        return name, value
    if isinstance(value, float) and math.isfinite(value):
        return name, float(value)  # np.float64 is a float with another repr
    if isinstance(value, Integral):
        return name, check_integer(f"config knob {name}", value, -(2**63), 2**63 - 1)
    if isinstance(value, str):
        return name, str(value) if value == "" else check_word(f"config knob {name}", value, _LONGEST_TEXT)
    raise ForetuneError(f"config knob {name} must be a number or a string but got {shown(value)}")


@lru_cache(maxsize=1024, typed=True)
def _options(
    num_warps: Any, num_stages: Any, num_ctas: Any, maxnreg: Any, ir_override: Any
) -> tuple[dict[str, Any], dict[str, Knob]]:
    """Check the launch options; return a dict of all of them, and one of those that are not None."""
    warps = check_integer("config knob num_warps", num_warps, 1, 32)  # a block has at most 1024 threads
    if warps & (warps - 1):
        raise ForetuneError(f"config knob num_warps must be a power of two but got {warps}")
    stages = check_integer("config knob num_stages", num_stages, 0, 1000)
    ctas = check_integer("config knob num_ctas", num_ctas, 1, 16)  # in a cluster
    registers = None if maxnreg is None else check_integer("config knob maxnreg", maxnreg, 1, MOST)
    text = None if ir_override is None else check_word("config knob ir_override", ir_override, _LONGEST_TEXT)
    options = dict(zip(OPTIONS, (warps, stages, ctas, registers, text), strict=True))
    return options, {name: value for name, value in options.items() if value is not None}


def remembered(maxsize: int) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Return a decorator that caches up to `maxsize` results of a function whose first argument is a tuple of configs.

    The other arguments must be hashable. A tuple that was passed before is recognized by its identity,
    because hashing a thousand configs takes 0.3 ms, a third of the time that a prediction may take. A tuple that is
    equal, but another object, gets the same result.

    >>> count = remembered(maxsize=8)(len)
    >>> count((KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=32)))
    2
    """

    def decorate(function: Callable[..., _T]) -> Callable[..., _T]:
        by_equality = lru_cache(maxsize)(function)
        by_identity: dict[tuple[Hashable, ...], tuple[tuple[KernelConfig, ...], _T]] = {}

        def found(configs: tuple[KernelConfig, ...], *args: Hashable) -> _T:
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

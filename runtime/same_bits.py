"""`keeping`: restrict a family to the configs of one numerics class, which compute identical bits.

`Family.numerics` defines the classes. The restriction is a copy of the family whose `supports` refuses the configs of
other classes. Because shortlists, prunes, covers and tunings choose only supported configs, the results of a kernel do
not depend on which config is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar, cast

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_flag, shown

#: The environment variable that requests `same_bits` where the option is None.
VARIABLE = "FORETUNE_SAME_BITS"
#: The name that every family accepts for its first independent dimension.
ROWS = "m"
#: The size whose `same_bits_config` defines the class that `invariant` keeps: many rows, as in a prefill, which need
#: the fastest instructions (tests/studies/same_bits.py prints what that costs for a few rows).
_MANY = 1 << 20

F = TypeVar("F", bound=Family)


def keeping(family: F, same_bits: bool | None = None, invariant: str | None = None) -> F:
    """Return the family restricted to one numerics class (configs that compute identical bits), if that is requested.

    Args:
        family: The family.
        same_bits: Keep the class of `Family.same_bits_config` for the problem, which is the default config unless the
            family declares another. None: as FORETUNE_SAME_BITS says.
        invariant: Keep one class for all sizes of this dimension, so that results do not depend on its size. It is one
            of the family's `independent` dimensions, or "m" for the first of them. The class is that of the config for
            size 2^20. It implies `same_bits`.

    Raises:
        ForetuneError: `invariant` is not such a dimension, or an option or FORETUNE_SAME_BITS has another value.

    >>> from foretune.kernels import find_family
    >>> h200, row = DeviceSpec.named("h200"), Problem.of("matmul", batch=1, m=1, n=4096, k=4096, dtype="fp16")
    >>> keeping(find_family("matmul"), same_bits=True).default(row, h200)["BLOCK_M"]
    16
    >>> kept = keeping(find_family("matmul"), invariant="m")
    >>> {config["SPLIT_K"] for config in kept.space(h200) if not kept.supports(config, row, h200)}
    {1}
    """
    dim = None if invariant is None else _checked_dim(family, invariant)
    if is_restricted(family) or (dim is None and not is_requested(same_bits)):
        return family
    return cast("F", _restricted(family, dim))


def is_restricted(family: Family) -> bool:
    """Return whether a family was restricted by `keeping`."""
    return unrestricted(family) is not family


def unrestricted(family: F) -> F:
    """Return the family that `keeping` restricted; the family itself if it is not restricted."""
    return cast("F", getattr(family, "__dict__", {}).get("unrestricted", family))


@lru_cache(maxsize=256)
def keeping_class_of(family: Family, config: KernelConfig) -> Family:
    """Return the family restricted to the configs that are in the same numerics class as `config` for each problem."""
    return _view(family, lambda problem, device: config, "the first supported config")


def why_none_kept(family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> str | None:
    """Return why a restricted family supports none of `configs`, if only the restriction to a class is the cause.

    Returns None if it supports one of them, if it is not restricted, or if none can run without the restriction either.
    """
    if not is_restricted(family):
        return None
    first: str | None = None
    for config in configs:
        if (reason := family.supports(config, problem, device)) is None:
            return None
        if first is None and unrestricted(family).supports(config, problem, device) is None:
            first = f"{family.name}: none of the {len(configs)} configs keeps the same bits: {reason}"
    return first


def is_requested(same_bits: bool | None = None) -> bool:
    """Return whether the same bits are requested: by the option `same_bits`, or if it is None by FORETUNE_SAME_BITS."""
    if same_bits is not None:
        return check_flag("same_bits", same_bits)
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ForetuneError(f"{VARIABLE} must be 0 or 1 but is {shown(value)}")
    return value == "1"


def _checked_dim(family: Family, invariant: Any) -> str:
    """Return the dimension that `invariant` names ("m": the first independent one); raise `ForetuneError` otherwise."""
    able = family.independent
    if isinstance(invariant, str) and able and invariant in (ROWS, *able):
        return invariant if invariant in able else able[0]
    if not able:
        raise ForetuneError(
            f"invariant must be None for {family.name} but is {shown(invariant)}: the family declares no dimension "
            "whose entries are computed without each other (`independent`)"
        )
    raise ForetuneError(
        f"invariant must be a dimension whose entries {family.name} computes without each other, {', '.join(able)}, "
        f"but is {shown(invariant)}"
    )


@lru_cache(maxsize=256)
def _restricted(family: Family, dim: str | None) -> Family:
    """Return a copy of the family that supports only configs that compute the same bits as `family.same_bits_config`.

    With `dim`, that config is taken for the problem with a large size in this dimension.
    """

    @lru_cache(maxsize=4096)
    def model(problem: Problem, device: DeviceSpec) -> KernelConfig:
        if dim is not None:
            many = min(_MANY, family.largest.get(dim, _MANY))
            dims = tuple((name, many if name == dim else size) for name, size in problem.dims)
            problem = replace(problem, dims=dims, ragged=None)
        return family.same_bits_config(problem, device)

    return _view(family, model, "the default config" if dim is None else f"the default config for many {dim}")


def _view(family: Family, model: Callable[[Problem, DeviceSpec], KernelConfig], whose: str) -> Family:
    """Return a copy of a family that supports only configs with the same bits as the config `model(problem, device)`.

    Messages call that config `whose`.
    """
    view: Any = copy(family)

    def supports(config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        reason = family.supports(config, problem, device)
        if reason is None:
            own, kept = family.numerics(config, problem), family.numerics(model(problem, device), problem)
            if own != kept:
                reason = f"its results may have other bits: its numerics class is {own}, but that of {whose} is {kept}"
        return reason

    def default(problem: Problem, device: DeviceSpec) -> KernelConfig:
        for config in (family.default(problem, device), model(problem, device)):
            if supports(config, problem, device) is None:
                return config
        return Family.default(view, problem, device)

    # Attributes of the instance hide the methods of its class, also where other methods of the family call them.
    view.supports, view.default, view.supports_by = supports, default, lambda problem: problem
    view.unrestricted = family
    return cast("Family", view)

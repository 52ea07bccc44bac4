"""CONSUMERS, a knob of several families: so many groups of four warps multiply while one more warp loads. It asks for
Hopper and for Gluon, and this says where they are not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module

from ..datasets import DeviceSpec, KernelConfig, Measurable, Problem
from ..datasets.errors import reason_of
from ..runtime.arguments import warn_once
from .knob_values import Knobs

#: What these knobs are of a kernel that has none of this: `Family.default_knobs`.
WITHOUT_CONSUMERS = {"CONSUMERS": 0, "PINGPONG": 0}


def no_consumers(knobs: Knobs, device: DeviceSpec) -> str | None:
    """The reason why a device cannot run a config for its CONSUMERS, or None.

    >>> no_consumers({"CONSUMERS": 2}, DeviceSpec.named("h200")) is None
    True
    """
    interpreted = device.backend == "cpu"
    if not knobs["CONSUMERS"] or (device.arch == "sm_90" and not interpreted):
        return None
    where = "the interpreter" if interpreted else device.arch
    return f"CONSUMERS cannot be {knobs['CONSUMERS']}: {where} has no products of Hopper's; 0"


def undecided(knobs: Knobs, decided: Mapping[str, int]) -> str | None:
    """The reason why a knob is not what CONSUMERS decide, or None.

    >>> undecided({"CONSUMERS": 2, "SPLIT_K": 4}, {"SPLIT_K": 1})
    'SPLIT_K cannot be 4 with CONSUMERS = 2: 1'
    """
    for knob, value in decided.items():
        if knobs[knob] != value:
            return f"{knob} cannot be {knobs[knob]} with CONSUMERS = {knobs['CONSUMERS']}: {value}"
    return None


def wrong_tile_of_all_warps(knobs: Knobs) -> str | None:
    """The reason why a tile is none that kernels without CONSUMERS have, or None.

    >>> wrong_tile_of_all_warps({"BLOCK_M": 128, "BLOCK_N": 160})
    'BLOCK_N cannot be 160 with CONSUMERS = 0: a power of two between 16 and 256'
    """
    for block in ("BLOCK_M", "BLOCK_N"):
        if knobs[block].bit_count() > 1:
            return f"{block} cannot be {knobs[block]} with CONSUMERS = 0: a power of two between 16 and 256"
    return None


def wrong_tile_of_consumers(knobs: Knobs, tiles: Collection[tuple[int, int]]) -> str | None:
    """The reason why a tile is none of those (BLOCK_M, BLOCK_N) that CONSUMERS and PINGPONG have, or has no stages to
    load ahead, or None.

    >>> knobs = {"CONSUMERS": 2, "PINGPONG": 1, "BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 4}
    >>> wrong_tile_of_consumers(knobs, [(128, 128), (64, 256)])
    'BLOCK_M x BLOCK_N cannot be 64 x 64 with CONSUMERS = 2 and PINGPONG = 1: 128 x 128, 64 x 256'
    """
    consumers, m, n = knobs["CONSUMERS"], knobs["BLOCK_M"], knobs["BLOCK_N"]
    if (m, n) not in tiles:
        able = ", ".join(f"{m} x {n}" for m, n in tiles)
        given = f"CONSUMERS = {consumers} and PINGPONG = {knobs['PINGPONG']}"
        return f"BLOCK_M x BLOCK_N cannot be {m} x {n} with {given}: {able}"
    if knobs["num_stages"] < 2:
        return f"num_stages cannot be {knobs['num_stages']} with CONSUMERS = {consumers}: at least 2"
    return None


def default_without_gluon(
    config: KernelConfig, family: Measurable, problem: Problem, device: DeviceSpec
) -> KernelConfig:
    """A config that was chosen, or the family's default with one warning where it has CONSUMERS and this Triton no
    Gluon: a prediction makes no kernel fail."""
    if not config.to_json().get("CONSUMERS") or (reason := why_no_gluon()) is None:
        return config
    warn_once(f"CONSUMERS cannot run with this Triton ({reason})", "; the family's default config is taken")
    return family.default(problem, device)


@cache
def why_no_gluon() -> str | None:
    """The reason why Gluon, which is experimental, is not where Triton 3.6 to 3.9 have it, or None."""
    try:
        import_module(f"{__package__}.hopper")
    except Exception as error:  # noqa: BLE001 - whatever an import raises
        return reason_of(error)
    return None

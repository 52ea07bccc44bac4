"""What a person hands to the run time, made what it must be or refused where it is declared, not in a launch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, check_attributes, wrong_knobs
from ..datasets.errors import check_path, shown

if TYPE_CHECKING:
    from ..model import Bundle


def family_of(family: Any) -> Family:
    """A family. Raises `ForetuneError` for anything else: names are the registry's, in kernels/."""
    if not isinstance(family, Family):
        raise ForetuneError(f"family must be a Family but is {shown(family)}")
    check_attributes(family)
    return family


def bundle_of(bundle: Bundle | Path | str | None) -> Bundle | None:
    """A bundle as it is, or the one in a folder; None stands for the shipped one. Raises `ForetuneError` for what is
    none of these, and `BundleError` as `load_bundle` does."""
    if bundle is None:
        return None
    from ..model import Bundle, load_bundle
    from ..model.folders import FILE
    from .node_copies import near_copy

    if isinstance(bundle, (str, Path)):
        file = near_copy(check_path("bundle", bundle) / FILE)
        return load_bundle(file.parent if file.is_file() else bundle)
    if not isinstance(bundle, Bundle):
        raise ForetuneError(f"bundle must be a Bundle, or the path of one's folder, but is {shown(bundle)}")
    return bundle


def configs_of(family: Family, device: DeviceSpec, configs: Any) -> tuple[KernelConfig, ...]:
    """The configs to choose from: the given ones, or the family's space on the device, or where that can run none of
    them, its whole space. Raises `ForetuneError` for what is no list of the family's configs, or none."""
    if configs is None:
        return tuple(family.space(device)) or tuple(family.space())
    if not isinstance(configs, Collection) or isinstance(configs, (str, bytes)):
        raise ForetuneError(f"configs must be a list of KernelConfigs but is {shown(configs)}")
    for config in configs:
        if not isinstance(config, KernelConfig):
            raise ForetuneError(f"each of configs must be a KernelConfig but one is {shown(config)}")
        if (wrong := wrong_knobs(family, config)) is not None:
            raise ForetuneError(wrong)
    if not len(configs):
        raise ForetuneError(f"{family.name}: there must be at least one config but none was given")
    return tuple(configs)

"""Plugins of vLLM and SGLang: predicted configs for MoE layers without a tuned file, and attached Triton kernels.

Both engines call their plugins (entry points in pyproject.toml) in each of their processes before a model is loaded.
The engines' modules are changed once the engine has imported them; nothing is imported here.

An engine looks for a tuned file with `get_moe_configs`, whose arguments lack the layer's hidden size and experts per
token. If there is no file, it calls `get_default_config`, whose arguments have them. So the latter is replaced by a
function that returns the row that `foretune export` would write for the layer, and `get_moe_configs` by one that does
so for SGLang's second product.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from functools import cache, partial, wraps
from typing import Any, NamedTuple

from ...datasets import DeviceSpec
from ...datasets.errors import reason_of
from ...runtime.arguments import Mode, resolve_mode, warn_once
from ...runtime.same_bits import is_requested
from ...runtime.tuning.packages import attach_more_packages, when_imported
from ..fused_moe.engines import SCALED_BLOCK, SGLANG, VLLM, Layer, engine_version
from ..fused_moe.tuned_files import row_for, rows_in
from ..fused_moe.tuning import tune_layer

_log = logging.getLogger("foretune")
#: Engine -> its module that looks up configs.
_MODULES = {
    VLLM: "vllm.model_executor.layers.fused_moe.fused_moe",
    SGLANG: "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config",
}
#: The parameters of each engine's `get_default_config`.
_PARAMETERS = {
    VLLM: ("M", "E", "N", "K", "topk", "dtype", "block_shape"),
    SGLANG: ("M", "E", "N", "K", "topk", "dtype", "is_marlin", "block_shape"),
}
#: Packages with each engine's Mamba and gated delta net kernels. Their LoRA kernels are not autotuned.
_AUTOTUNED = {
    VLLM: ("vllm.model_executor.layers.mamba", "vllm.third_party.flash_linear_attention"),
    SGLANG: ("sglang.kernels.ops.mamba", "sglang.kernels.ops.attention.fla"),
}


class _Tables(NamedTuple):
    """The rows (configs by number of tokens) of an MoE layer's tuned files; SGLang may have one file per product."""

    up: Mapping[int, Mapping[str, Any]]
    down: Mapping[int, Mapping[str, Any]] | None


def plug_into_vllm() -> None:
    """Use Foretune in this process of vLLM (entry point of "vllm.general_plugins")."""
    _plug_into(VLLM)


def plug_into_sglang() -> None:
    """Use Foretune in this process of SGLang (entry point of "sglang.srt.plugins")."""
    _plug_into(SGLANG)


@cache  # engines may call their plugins several times
def _plug_into(engine: str) -> None:
    """Make an engine look up predicted configs, and attach its autotuned kernels. An error becomes one warning."""
    try:
        when_imported(_MODULES[engine], partial(_answer, engine))
        attach_more_packages(_AUTOTUNED[engine])
    except Exception as error:  # noqa: BLE001 - an engine must start
        warn_once(f"{engine}: {reason_of(error)}", ": Foretune is not used in all of its kernels")


def _answer(engine: str, module: Any) -> None:
    """Have an engine's module use predicted configs for layers without a tuned file."""
    own_default, own_configs = module.get_default_config, module.get_moe_configs
    if tuple(inspect.signature(own_default).parameters) != _PARAMETERS[engine]:
        warn_once(
            f"Foretune does not know get_default_config of {engine} {engine_version(engine)}",
            ": MoE layers without a tuned file run the engine's default configs",
        )
        return
    last = threading.local()  # the tables of this thread's last lookup

    @wraps(own_default)
    def get_default_config(
        M: int, E: int, N: int, K: int, topk: int, dtype: str | None, *more: Any, **named: Any
    ) -> dict[str, Any]:
        last.tables = None
        rest = dict(zip(_PARAMETERS[engine][6:], more, strict=False)) | named
        if _is_free(engine, module) and not rest.get("is_marlin"):
            last.tables = _tables(engine, E, N, K, topk, dtype, tuple(rest.get("block_shape") or ()))
        if last.tables is None:
            default: dict[str, Any] = own_default(M, E, N, K, topk, dtype, *more, **named)
            return default
        return dict(row_for(last.tables.up, M))

    module.get_default_config = get_default_config
    if engine != SGLANG:
        return
    signature = inspect.signature(own_configs)

    @wraps(own_configs)
    def get_moe_configs(*args: Any, **named: Any) -> Any:
        # For the second product, SGLang calls this right after `get_default_config` if neither product has a file.
        found, tables = own_configs(*args, **named), getattr(last, "tables", None)
        if found is None and tables is not None and signature.bind(*args, **named).arguments.get("down_moe"):
            return tables.down
        return found

    module.get_moe_configs = get_moe_configs


def _is_free(engine: str, module: Any) -> bool:
    """Return whether Foretune may choose an engine's configs: not in mode "off", nor if equal bits are requested."""
    try:
        if resolve_mode() is Mode.OFF or is_requested():
            return False
        if engine == VLLM:
            return not module.envs.VLLM_BATCH_INVARIANT
        return not module.get_exec().deterministic.enable_deterministic_inference
    except Exception as error:  # noqa: BLE001 - an invalid value in the environment, or another version of the engine
        warn_once(reason_of(error), f": {engine}'s default configs run")
        return False


@cache
def _tables(
    engine: str, experts: int, inter: int, hidden: int, topk: int, dtype: str | None, block_shape: tuple[int, ...]
) -> _Tables | None:
    """Return an MoE layer's predicted rows; None for an unknown dtype, and with a warning if predicting fails.

    `dtype` and `block_shape` (the scales' blocks) are the engine's: None and () for unquantized weights.
    """
    if dtype is None and not block_shape:
        ours = "bf16"  # the engines have the same files for fp16
    elif dtype == "fp8_w8a8" and block_shape == (SCALED_BLOCK, SCALED_BLOCK):
        ours = "fp8e4m3"
    else:
        return None
    layer = Layer(experts, topk, hidden, inter, ours)
    try:
        files = tune_layer(engine, layer, DeviceSpec.live())
    except Exception as error:  # noqa: BLE001 - a prediction must not make a request fail
        warn_once(f"{engine}: {layer}: {reason_of(error)}", ": the engine's default configs run")
        return None
    _log.info("foretune: %s: %s: %s", engine, layer, files.verdict)
    up, *down = map(rows_in, files.tables().values())
    return _Tables(up, down[0] if down else None)

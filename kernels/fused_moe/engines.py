"""Facts about the serving engines: names of tuned files, default configs, tuning spaces, and the kernel's source.

They describe SGLang 0.5.23 and vLLM 0.32. Neither needs to be installed; if they are,
`tests/kernels/test_fused_moe_engines.py` compares the facts with the engines' own functions. Importing an engine takes
dozens of packages and compiled extensions, which a machine that only tunes need not have. The kernel needs none of
them. It is read from the installed file together with the functions that it calls, and only these run. Foretune holds
no copy of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ...datasets.errors import shown
from ...runtime.launching.source_hash import parsed

SGLANG, VLLM = "sglang", "vllm"
ENGINES = (SGLANG, VLLM)
#: Batch sizes (tokens) that both engines' tuners measure. An engine uses the row whose batch size is nearest.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
#: In fp8, weights have one scale per block of this many rows and columns, and activations one per this many columns.
SCALED_BLOCK = 128
#: What the engines call the dtypes in a file's name; bf16 and fp16 share the files without one.
_DTYPES = {"bf16": "", "fp16": "", "fp8e4m3": ",dtype=fp8_w8a8"}
_BLOCKS_M, _BLOCKS_N, _BLOCKS_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128, 256)
_GROUPS_M, _WARPS, _STAGES = (1, 16, 32, 64), (4, 8), (2, 3, 4, 5)


@dataclass(frozen=True)
class Layer:
    """The experts of one MoE layer on one rank.

    `inter` is the rank's part of the intermediate size after the activation (N in the engines' file names).
    """

    experts: int
    topk: int
    hidden: int
    inter: int
    dtype: str = "bf16"

    def problem(self, family: str, engine: str, tokens: int) -> Problem:
        """Return the problem of one product ("fused_moe" or "fused_moe_down") in an engine, for a number of tokens."""
        flags = (VLLM,) if engine == VLLM else ()
        return Problem.of(
            family,
            dtype=self.dtype,
            flags=flags,
            experts=self.experts,
            topk=self.topk,
            hidden=self.hidden,
            inter=self.inter,
            tokens=tokens,
        )


def check_engine(engine: str) -> str:
    """Return `engine` unchanged after checking that it is one of `ENGINES`.

    Raises:
        ForetuneError: It is not; the message lists them.
    """
    if engine not in ENGINES:
        raise ForetuneError(f"engine must be one of {', '.join(ENGINES)} but is {shown(engine)}")
    return engine


def engine_of(problem: Problem) -> str:
    """Return the engine whose kernel a problem is for."""
    return VLLM if VLLM in problem.flags else SGLANG


def file_name(engine: str, layer: Layer, device: DeviceSpec, *, down: bool = False) -> str:
    """Return the name of the file that an engine looks up for a layer on a device.

    Args:
        engine: "sglang" or "vllm".
        layer: The layer on one rank.
        device: The GPU.
        down: Name SGLang's separate file for the second product.

    Raises:
        ForetuneError: `down` with vLLM, which has one file for both products.

    >>> layer = Layer(experts=128, topk=8, hidden=2048, inter=384, dtype="fp8e4m3")
    >>> file_name("vllm", layer, DeviceSpec.named("h200"))
    'E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json'
    """
    if down and engine == VLLM:
        raise ForetuneError("vLLM has one file for both products and no separate file for the second")
    card = device.card_word
    if engine == VLLM and "H200" in card.split("_"):
        card = "NVIDIA_H200"  # vLLM uses this name for all variants of the card
    dtype = _DTYPES[layer.dtype]
    if dtype:  # formatted as Python prints a list; vLLM removes the spaces
        blocks = str([SCALED_BLOCK] * 2)
        dtype += f",block_shape={blocks if engine == SGLANG else blocks.replace(' ', '')}"
    return f"E={layer.experts},N={layer.inter},device_name={card}{dtype}{'_down' * down}.json"


def folder_name(engine: str, triton: str) -> str:
    """Return the path of an engine's files below the folder in its environment variable, for a version of Triton.

    The variables are SGLANG_MOE_CONFIG_DIR and VLLM_TUNED_CONFIG_FOLDER.

    >>> folder_name("sglang", "3.6.0"), folder_name("vllm", "3.6.0")
    ('configs/triton_3_6_0', '.')
    """
    return f"configs/triton_{triton.replace('.', '_')}" if engine == SGLANG else "."


@cache
def tuner_space(engine: str, dtype: str) -> tuple[KernelConfig, ...]:
    """Return the configs that an engine's tuner measures.

    They are 1,920 configs; for block-scaled fp8 640 (vLLM) or 1,280 (SGLang). vLLM runs its fp8 configs with
    BLOCK_SIZE_K = 256 as 128, so its tuner measures each of these twice.

    >>> [len(tuner_space(engine, dtype)) for engine in ("vllm", "sglang") for dtype in ("bf16", "fp8e4m3")]
    [1920, 640, 1920, 1280]
    """
    space = [
        KernelConfig.of(
            BLOCK_SIZE_M=m, BLOCK_SIZE_N=n, BLOCK_SIZE_K=k, GROUP_SIZE_M=group, num_warps=warps, num_stages=stages
        )
        for stages, m, k, n, warps, group in product(_STAGES, _BLOCKS_M, _BLOCKS_K, _BLOCKS_N, _WARPS, _GROUPS_M)
    ]
    if dtype != "fp8e4m3":
        return tuple(space)
    if engine == VLLM:
        return tuple(c for c in space if not c["BLOCK_SIZE_N"] % SCALED_BLOCK and not c["BLOCK_SIZE_K"] % SCALED_BLOCK)
    return tuple(c for c in space if SCALED_BLOCK % c["BLOCK_SIZE_K"] == 0)


def default_config(engine: str, dtype: str, tokens: int, experts: int) -> KernelConfig:
    """Return the config that an engine runs on CUDA if it finds no file.

    It depends on little more than the number of tokens.

    >>> str(default_config("sglang", "bf16", tokens=4096, experts=64))
    'BLOCK_SIZE_K=32 BLOCK_SIZE_M=64 BLOCK_SIZE_N=64 GROUP_SIZE_M=8 num_warps=4 num_stages=3'
    """
    m, n, k, group, warps, stages = default_knobs(engine, dtype, tokens, experts)
    return KernelConfig.of(
        BLOCK_SIZE_M=m, BLOCK_SIZE_N=n, BLOCK_SIZE_K=k, GROUP_SIZE_M=group, num_warps=warps, num_stages=stages
    )


def default_knobs(engine: str, dtype: str, tokens: int, experts: int) -> tuple[int, int, int, int, int, int]:
    """Return the values of `default_config`: BLOCK_SIZE_M, _N and _K, GROUP_SIZE_M, num_warps and num_stages.

    If the engine specifies no warps or stages, they are Triton's defaults.
    """
    choose = _sglang_default if engine == SGLANG else _vllm_default
    return choose(dtype == "fp8e4m3", tokens, experts)


def _sglang_default(fp8: bool, tokens: int, experts: int) -> tuple[int, int, int, int, int, int]:
    """Return SGLang's default config for bf16 or fp8, in the order of `default_knobs`."""
    if fp8:
        return 64, SCALED_BLOCK, SCALED_BLOCK, 32, 4, 3
    return (16, 32, 64, 1, 4, 3) if tokens <= experts else (64, 64, 32, 8, 4, 3)


def _vllm_default(fp8: bool, tokens: int, experts: int) -> tuple[int, int, int, int, int, int]:
    """Return vLLM's default config for bf16 or fp8, in the order of `default_knobs`."""
    if fp8:
        n, stages = (64, 4 if tokens <= 4 else 3) if tokens <= 8 else (SCALED_BLOCK, 3)
        return 16 if tokens <= 64 else 64, n, SCALED_BLOCK, 1 if tokens <= 16 else 32, 4, stages
    m = next((block for most, block in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    n, k = (64, 128) if tokens <= 64 else (128, 64)
    return m, n, k, 16 if tokens // experts > 128 else 1, 4 if tokens <= 128 else 8, 4 if tokens <= 32 else 3


def swaps(config: KernelConfig, dtype: str, device: DeviceSpec) -> bool:
    """Return whether the kernel computes the transposed product: both engines do so in fp8 on Hopper for few rows."""
    few = config["BLOCK_SIZE_M"] < 64 <= config["BLOCK_SIZE_N"]
    return dtype == "fp8e4m3" and device.arch == "sm_90" and few


#: Paths of the kernel's file below the package's folder, newest version first.
_KERNEL_FILES = {
    SGLANG: (
        "kernels/ops/moe/fused_moe_triton_kernels.py",  # 0.5.2x
        "srt/layers/moe/fused_moe_triton/fused_moe_triton_kernels.py",  # 0.5
    ),
    VLLM: ("model_executor/layers/fused_moe/fused_moe.py",),
}
#: Folders of the tuned files that the engine ships, newest version first.
_SHIPPED = {
    SGLANG: ("srt/layers/moe/moe_runner/triton_utils", "srt/layers/moe/fused_moe_triton"),
    VLLM: ("model_executor/layers/fused_moe/configs",),
}
_KERNEL = "fused_moe_kernel"


class EngineMissingError(ForetuneError, ImportError):
    """The required engine is not installed, or its version has no kernel that Foretune knows."""


def installed() -> tuple[str, ...]:
    """Return the installed engines, without importing them."""
    return tuple(engine for engine in ENGINES if _found(engine, _KERNEL_FILES[engine]) is not None)


def engine_version(engine: str) -> str:
    """Return an installed engine's version; "of unknown version" if its package metadata is missing."""
    try:
        return version(engine)
    except PackageNotFoundError:
        return "of unknown version"


def shipped_folder(engine: str) -> Path | None:
    """Return the folder of the tuned files that an installed engine ships; None if it is not installed."""
    return _found(engine, _SHIPPED[engine])


@cache
def engine_kernel(engine: str) -> Any:
    """Return the engine's own `fused_moe_kernel`, a `triton.jit` function.

    Raises:
        EngineMissingError: The engine is not installed; the message says what to install.
    """
    file = _found(engine, _KERNEL_FILES[engine])
    if file is None:
        raise EngineMissingError(
            f"{engine} is not installed, but its kernel is needed: pip install {engine}, or pip install --no-deps "
            f"{engine} for only its Python files"
        )
    import triton
    import triton.language as tl

    return functions_of(file, [_KERNEL], {"triton": triton, "tl": tl})[_KERNEL]


def functions_of(file: Path, names: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Load functions from a Python file without running the rest of it.

    The functions and plain constants of the file that they use are loaded as well.

    Args:
        file: The file.
        names: The functions to load.
        given: Values of all other global names that they use.

    Returns:
        The functions by name.

    Raises:
        EngineMissingError: The file does not define one of `names`.
    """
    tree = parsed(file.read_text(encoding="utf-8"))
    defined: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            defined |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    needed: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in needed:
            continue
        if name not in defined:
            raise EngineMissingError(f"{file} has no {name}: Foretune does not know this version of the engine")
        needed.add(name)
        used = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        pending += [other for other in used if other in defined and other not in given]
    nodes = {id(defined[name]): defined[name] for name in needed}
    future = parsed("from __future__ import annotations").body  # so that annotations are not evaluated
    body = future + [node for node in tree.body if id(node) in nodes]
    namespace = dict(given) | {"__name__": f"foretune.engine.{file.stem}", "__file__": str(file)}
    # Compiled with the file's own name and line numbers, because Triton reads the source from there.
    exec(compile(ast.Module(body, []), str(file), "exec", dont_inherit=True), namespace)
    return {name: namespace[name] for name in names}


def _found(engine: str, places: Iterable[str]) -> Path | None:
    """Return the first of the paths `places` that exists in the installed package of an engine, or None."""
    try:
        spec = find_spec(engine)
    except (ImportError, ValueError):  # ValueError: sys.modules holds a module without a spec
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for place in places:
            if (path := Path(folder, place)).exists():
                return path
    return None

"""What the serving engines have of their own: names of tuned files, default configs, the spaces that their tuners try,
and the source of their kernel, without importing the engine.

Facts of SGLang 0.5.23 and vLLM 0.32, which neither needs to be here for; `tests/kernels/test_fused_moe_engines.py` asks
the engines' own functions where they are. Importing SGLang or vLLM takes dozens of packages and compiled extensions,
which a machine that tunes need not have. The kernel needs none of them: it is read from the installed file, with the
functions that it calls, and that is all that runs. Nothing of it is kept here.
"""

from __future__ import annotations

import ast
import re
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
from ...datasets.files import file_word
from ...runtime.launching.source_hash import parsed

SGLANG, VLLM = "sglang", "vllm"
ENGINES = (SGLANG, VLLM)
#: Whose file a row is of by the batch sizes that both engines' tuners measure: the row nearest to a batch is its.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
#: The side of a block of weights that has one scale (activations have one for so many of a row), in fp8.
SCALED_BLOCK = 128
#: More characters than any card's name has, and few enough for a file's name.
_LONGEST_CARD = 60
#: What the engines call the dtypes in a file's name; bf16 and fp16 share the files without one.
_DTYPES = {"bf16": "", "fp16": "", "fp8e4m3": ",dtype=fp8_w8a8"}
_BLOCKS_M, _BLOCKS_N, _BLOCKS_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (64, 128, 256)
_GROUPS_M, _WARPS, _STAGES = (1, 16, 32, 64), (4, 8), (2, 3, 4, 5)


@dataclass(frozen=True)
class Layer:
    """The experts of one layer on one rank: `inter` is what the rank has of the intermediate size, after the
    activation (the engines' N)."""

    experts: int
    topk: int
    hidden: int
    inter: int
    dtype: str = "bf16"

    def problem(self, family: str, engine: str, tokens: int) -> Problem:
        """One of its two products for so many tokens."""
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
    """One of `ENGINES`. Raises `ForetuneError` listing them for any other word."""
    if engine not in ENGINES:
        raise ForetuneError(f"engine must be one of {', '.join(ENGINES)} but is {shown(engine)}")
    return engine


def engine_of(problem: Problem) -> str:
    """Whose kernel a problem is about."""
    return VLLM if VLLM in problem.flags else SGLANG


def file_name(engine: str, layer: Layer, device: DeviceSpec, *, down: bool = False) -> str:
    """The file that an engine looks up for a layer on a device; `down` for the second product's own, which SGLang has.

    >>> layer = Layer(experts=128, topk=8, hidden=2048, inter=384, dtype="fp8e4m3")
    >>> file_name("vllm", layer, DeviceSpec.named("h200"))
    'E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json'
    """
    if down and engine == VLLM:
        raise ForetuneError("vLLM has one file for both products, so none for the second alone")
    card = device.card.replace(" ", "_")
    if re.search(r"[^\w.,()+@-]", card) or len(card) > _LONGEST_CARD:
        card = file_word(card)  # no engine finds the file of such a card
    if engine == VLLM and "H200" in card.split("_"):
        card = "NVIDIA_H200"  # of all its variants
    dtype = _DTYPES[layer.dtype]
    if dtype:  # as Python prints a list; vLLM takes the spaces out
        blocks = str([SCALED_BLOCK] * 2)
        dtype += f",block_shape={blocks if engine == SGLANG else blocks.replace(' ', '')}"
    return f"E={layer.experts},N={layer.inter},device_name={card}{dtype}{'_down' * down}.json"


def folder_name(engine: str, triton: str) -> str:
    """Where below the folder that an engine is told (SGLANG_MOE_CONFIG_DIR, VLLM_TUNED_CONFIG_FOLDER) its files lie.

    >>> folder_name("sglang", "3.6.0"), folder_name("vllm", "3.6.0")
    ('configs/triton_3_6_0', '.')
    """
    return f"configs/triton_{triton.replace('.', '_')}" if engine == SGLANG else "."


@cache
def tuner_space(engine: str, dtype: str) -> tuple[KernelConfig, ...]:
    """What the engine's tuner tries: 1,920 configs, and of block-scaled fp8 640 (vLLM's) or 1,280 (SGLang's).

    vLLM's fp8 ones with BLOCK_SIZE_K = 256 it runs as 128, so each of these is tried twice.

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
    """What an engine runs on CUDA where it finds no file: it looks at little more than the number of tokens.

    >>> str(default_config("sglang", "bf16", tokens=4096, experts=64))
    'BLOCK_SIZE_K=32 BLOCK_SIZE_M=64 BLOCK_SIZE_N=64 GROUP_SIZE_M=8 num_warps=4 num_stages=3'
    """
    m, n, k, group, warps, stages = default_knobs(engine, dtype, tokens, experts)
    return KernelConfig.of(
        BLOCK_SIZE_M=m, BLOCK_SIZE_N=n, BLOCK_SIZE_K=k, GROUP_SIZE_M=group, num_warps=warps, num_stages=stages
    )


def default_knobs(engine: str, dtype: str, tokens: int, experts: int) -> tuple[int, int, int, int, int, int]:
    """(BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M, num_warps, num_stages) of `default_config`; warps and
    stages are Triton's own where the engine says none."""
    choose = _sglang_default if engine == SGLANG else _vllm_default
    return choose(dtype == "fp8e4m3", tokens, experts)


def _sglang_default(fp8: bool, tokens: int, experts: int) -> tuple[int, int, int, int, int, int]:
    if fp8:
        return 64, SCALED_BLOCK, SCALED_BLOCK, 32, 4, 3
    return (16, 32, 64, 1, 4, 3) if tokens <= experts else (64, 64, 32, 8, 4, 3)


def _vllm_default(fp8: bool, tokens: int, experts: int) -> tuple[int, int, int, int, int, int]:
    if fp8:
        n, stages = (64, 4 if tokens <= 4 else 3) if tokens <= 8 else (SCALED_BLOCK, 3)
        return 16 if tokens <= 64 else 64, n, SCALED_BLOCK, 1 if tokens <= 16 else 32, 4, stages
    m = next((block for most, block in ((32, 16), (96, 32), (512, 64)) if tokens <= most), 128)
    n, k = (64, 128) if tokens <= 64 else (128, 64)
    return m, n, k, 16 if tokens // experts > 128 else 1, 4 if tokens <= 128 else 8, 4 if tokens <= 32 else 3


def swaps(config: KernelConfig, dtype: str, device: DeviceSpec) -> bool:
    """Whether both engines have the kernel compute the transposed product: of fp8 on Hopper, for few rows."""
    few = config["BLOCK_SIZE_M"] < 64 <= config["BLOCK_SIZE_N"]
    return dtype == "fp8e4m3" and device.arch == "sm_90" and few


#: Where the kernel is, and since when, below the package's folder: the newest place first.
_KERNEL_FILES = {
    SGLANG: (
        "kernels/ops/moe/fused_moe_triton_kernels.py",  # 0.5.2x
        "srt/layers/moe/fused_moe_triton/fused_moe_triton_kernels.py",  # 0.5
    ),
    VLLM: ("model_executor/layers/fused_moe/fused_moe.py",),
}
#: Where the tuned files are that the engine ships.
_SHIPPED = {
    SGLANG: ("srt/layers/moe/moe_runner/triton_utils", "srt/layers/moe/fused_moe_triton"),
    VLLM: ("model_executor/layers/fused_moe/configs",),
}
_KERNEL = "fused_moe_kernel"


class EngineMissingError(ForetuneError, ImportError):
    """The engine whose kernel was asked for is not installed, or is one that has no such kernel."""


def installed() -> tuple[str, ...]:
    """The engines that are installed here, none of which is imported by the question."""
    return tuple(engine for engine in ENGINES if _found(engine, _KERNEL_FILES[engine]) is not None)


def engine_version(engine: str) -> str:
    """The installed engine's version; "of unknown version" for one that was copied here without its metadata."""
    try:
        return version(engine)
    except PackageNotFoundError:
        return "of unknown version"


def shipped_folder(engine: str) -> Path | None:
    """What an installed engine has in place of the folder that it could be told; None where it is not installed."""
    return _found(engine, _SHIPPED[engine])


@cache
def engine_kernel(engine: str) -> Any:
    """The engine's own `fused_moe_kernel`, under `triton.jit`.

    Raises `EngineMissingError` saying what to install.
    """
    file = _found(engine, _KERNEL_FILES[engine])
    if file is None:
        raise EngineMissingError(
            f"{engine}'s kernel is not installed here: pip install {engine} (its Python files are enough, without what "
            f"it depends on: pip install --no-deps {engine})"
        )
    import triton
    import triton.language as tl

    return functions_of(file, [_KERNEL], {"triton": triton, "tl": tl})[_KERNEL]


def functions_of(file: Path, names: Iterable[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Functions of a Python file, by name, with those functions and plain constants of it that they use; all other
    names that they use must be `given`. The rest of the file does not run.

    Raises `EngineMissingError` for a name that the file does not define.
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
            raise EngineMissingError(f"{file} has no {name}: it is another version than Foretune knows")
        needed.add(name)
        used = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        pending += [other for other in used if other in defined and other not in given]
    nodes = {id(defined[name]): defined[name] for name in needed}
    future = parsed("from __future__ import annotations").body  # annotations of what is not given stay text
    body = future + [node for node in tree.body if id(node) in nodes]
    namespace = dict(given) | {"__name__": f"foretune.engine.{file.stem}", "__file__": str(file)}
    # Compiled under the file's own name and lines, where Triton looks for the source.
    exec(compile(ast.Module(body, []), str(file), "exec", dont_inherit=True), namespace)
    return {name: namespace[name] for name in names}


def _found(engine: str, places: Iterable[str]) -> Path | None:
    """The first of these places below the folder of an installed package."""
    try:
        spec = find_spec(engine)
    except (ImportError, ValueError):  # ValueError: somebody put a module without a spec in its place
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for place in places:
            if (path := Path(folder, place)).exists():
                return path
    return None

"""Functions of an engine that is installed, without importing the engine.

Importing SGLang or vLLM takes dozens of packages and compiled extensions, which a machine that tunes need not have. The
kernel needs none of them: it is read from the installed file, with the functions that it calls, and that is all that
runs. Nothing of it is kept here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...datasets import ForetuneError
from ...runtime.launching.source_hash import parsed
from .engines import ENGINES, SGLANG, VLLM

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

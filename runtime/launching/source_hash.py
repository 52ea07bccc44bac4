"""What a kernel's source says, whatever it looks like: `structure` of one function, and hashes of all of a kernel."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Iterable
from types import ModuleType
from typing import Any

#: Fields of syntax nodes that differ between Python versions or say nothing of what is computed.
_IDLE_FIELDS = ("ctx", "kind", "type_comment", "type_params", "decorator_list")


def structure(source: str) -> str:
    """A function's syntax tree as text, without docstring, comments and line breaks, which change no binary: data that
    were measured with a kernel stay its data when somebody explains it better. The same in every version of Python.

    >>> structure("def f(x):\\n    return x + 1") == structure("def f(x):  # adds\\n    return (x +\\n            1)")
    True
    """
    tree = parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return _text(tree)


def parsed(source: str) -> ast.Module:
    """`ast.parse`, which Python 3.11 may end with a SystemError while another thread parses: then once more."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def _text(node: Any) -> str:
    if isinstance(node, ast.AST):
        fields = (getattr(node, name, None) for name in node._fields if name not in _IDLE_FIELDS)
        return f"{type(node).__name__}({','.join(map(_text, fields))})"
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    return repr(node)


def hash_of_modules(*modules: ModuleType) -> str:
    """A hash of all kernels and device functions that these modules name."""
    from triton.runtime.jit import JITFunction

    found = {
        (module.__name__, name): structure(value.src)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    }
    return digest_of(found[key] for key in sorted(found))


def hash_of_kernel(kernel: Any) -> str:
    """A hash of a `triton.jit` kernel and of all device functions that it calls, directly or not."""
    found: dict[str, str] = {}
    _gather(kernel, found)
    return digest_of(found[name] for name in sorted(found))


def _gather(kernel: Any, found: dict[str, str]) -> None:
    function = kernel.fn
    key = f"{function.__module__}.{function.__qualname__}"
    if key in found:
        return
    found[key] = structure(textwrap.dedent(inspect.getsource(function)))
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if hasattr(called, "fn") and inspect.isfunction(called.fn):  # compiled or interpreted
            _gather(called, found)


def digest_of(texts: Iterable[str]) -> str:
    """A short hash of texts in their order: 64 bits, in hexadecimal."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

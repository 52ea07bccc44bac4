"""`structure`: what a kernel's source says, whatever it looks like."""

from __future__ import annotations

import ast
from typing import Any

#: Fields of syntax nodes that differ between Python versions or say nothing of what is computed.
_IDLE_FIELDS = ("ctx", "kind", "type_comment", "type_params", "decorator_list")


def structure(source: str) -> str:
    """A function's syntax tree as text, without docstring, comments and line breaks, which change no binary: data that
    were measured with a kernel stay its data when somebody explains it better. The same in every version of Python.

    >>> structure("def f(x):\\n    return x + 1") == structure("def f(x):  # adds\\n    return (x +\\n            1)")
    True
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return _text(tree)


def _text(node: Any) -> str:
    if isinstance(node, ast.AST):
        fields = (getattr(node, name, None) for name in node._fields if name not in _IDLE_FIELDS)
        return f"{type(node).__name__}({','.join(map(_text, fields))})"
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    return repr(node)

"""What a Python function says, as texts that are the same in every process."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache
from tokenize import TokenError
from types import CodeType
from typing import Any

from .source_hash import parsed, structure


def source_texts(function: Callable[..., Any]) -> list[str]:
    """Return the source of a function, without comments, as texts that differ where the function does.

    Usually one. The code of a lambda that shares its lines with another one, and of a wrapper, is a second text. A
    function without a source file, such as one made in a shell, counts by its code.
    """
    inner = inspect.unwrap(function)
    code, own = getattr(inner, "__code__", None), getattr(function, "__code__", None)
    texts = [""] if code is None else list(_texts_of(code))
    return texts if own is code or own is None else [*texts, _code_text(own)]


@lru_cache(maxsize=4096)
def _texts_of(code: CodeType) -> tuple[str, ...]:
    try:
        text = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError, SyntaxError, TokenError):  # made in a shell; or its file is another by now
        return (_code_text(code),)
    lambdas = text.count("lambda")
    with contextlib.suppress(SyntaxError):  # a lambda in the middle of something
        lambdas = sum(isinstance(node, ast.Lambda) for node in ast.walk(parsed(text)))
        text = structure(text)
    return (text, _code_text(code)) if code.co_name == "<lambda>" and lambdas > 1 else (text,)


def _code_text(code: CodeType) -> str:
    """A code object with those in it: what it runs, not where it is."""
    constants = ", ".join(map(_constant, code.co_consts))
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return f"{code.co_name} {code.co_argcount} {code.co_flags} {code.co_code.hex()} {names} [{constants}]"


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _code_text(value)
    if isinstance(value, (tuple, frozenset)):
        parts = map(_constant, value)
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return hex(value) if type(value) is int else repr(value)

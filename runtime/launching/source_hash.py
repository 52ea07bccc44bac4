"""Hashes of kernels that do not depend on formatting: `structure` of one function, and hashes of whole kernels."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from numbers import Complex, Integral
from tokenize import TokenError
from types import CodeType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
#: Fields of syntax nodes that differ between Python versions or do not affect what is computed.
_IDLE_FIELDS = ("ctx", "kind", "type_comment", "type_params", "decorator_list")
#: Modules whose contents are fixed by the versions of Triton and Python, as in Triton's own cache keys.
_FIXED_MODULES = ("triton", "math", "copy")
#: The separator between the two parts of a hash; see `hash_of_kernel`.
SEPARATOR = "+"
#: How often a text is parsed if another thread disturbs Python 3.11's parser, and what the error then says.
_MOST_PARSES, _DISTURBED = 20, "depth mismatch"
#: The depth at which a nested constant is cut off, for lists that contain themselves.
_DEEPEST = 20


def structure(source: str) -> str:
    r"""Return the syntax tree of a function's source as text, without docstring, comments and line breaks.

    Docstrings and comments do not change the binary, so measurements of a kernel stay valid when they change. The text
    is the same in every version of Python.

    >>> structure("def f(x):\n    return x + 1") == structure("def f(x):  # adds\n    return (x +\n            1)")
    True
    """
    tree = parsed(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return _text(tree)


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source text."""
    return undisturbed(lambda: ast.parse(source))


def undisturbed(parse: Callable[[], T]) -> T:
    """Call `parse` and return its result; call it again if another thread disturbed Python 3.11's parser.

    The parser then raises a SystemError ("AST constructor recursion depth mismatch"), whatever the text is. Other
    errors pass through.
    """
    for _ in range(_MOST_PARSES - 1):
        try:
            return parse()
        except SystemError as error:  # noqa: PERF203 - one attempt in nearly all cases
            if _DISTURBED not in str(error):
                raise
    return parse()


def _text(node: Any) -> str:
    """Return a syntax node as text."""
    if isinstance(node, ast.AST):
        fields = (getattr(node, name, None) for name in node._fields if name not in _IDLE_FIELDS)
        return f"{type(node).__name__}({','.join(map(_text, fields))})"
    if isinstance(node, list):
        return f"[{','.join(map(_text, node))}]"
    return repr(node)


def hash_of_modules(*modules: ModuleType) -> str:
    """Return a hash of all kernels and device functions in these modules, in the form of `hash_of_kernel`."""
    from triton.runtime.jit import JITFunction

    found = {
        (module.__name__, name): value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) or type(value).__name__ == "InterpretedFunction"
    }
    kernels = [found[key] for key in sorted(found)]
    return _with_dependencies(digest_of(structure(_source_of(one)) for one in kernels), kernels, kernels)


def hash_of_kernel(kernel: Any) -> str:
    """Return a hash of a `triton.jit` kernel, compiled or interpreted, and of everything that its binary depends on.

    It covers what Triton's `JITFunction.cache_key` covers (device functions under any name, captured variables and
    constexpr globals), and constants that the kernel reads through a module or as defaults of parameters. It is the
    same in every process, on every Python, and in the interpreter.

    Returns:
        16 hexadecimal digits for the sources of the kernel and of the device functions that it calls by their own
        names. If the binary depends on more, `SEPARATOR` and 16 digits for everything follow. Data that Foretune
        recorded before the second part existed have only the first; see `datasets.contents.same_source`.
    """
    found: dict[str, tuple[Any, str]] = {}
    _gather(kernel, found)
    base = digest_of(found[name][1] for name in sorted(found))
    return _with_dependencies(base, [kernel], [one for one, _ in found.values()])


def combined_hash(hashes: Iterable[str]) -> str:
    """Return one hash for several kernels that are measured together, made from the hash of each."""
    hashes = list(hashes)
    base = digest_of(one.partition(SEPARATOR)[0] for one in hashes)
    return f"{base}{SEPARATOR}{digest_of(hashes)}" if any(SEPARATOR in one for one in hashes) else base


def _gather(kernel: Any, found: dict[str, tuple[Any, str]]) -> None:
    """Add the kernel, and each function that it calls by a bare name, to `found`: its name -> (function, source).

    The first part of a kernel's hash is made from these. It must not change, because recorded data contain it.
    """
    function = kernel.fn
    key = f"{function.__module__}.{function.__qualname__}"
    if key in found:
        return
    found[key] = kernel, structure(_source_of(kernel))
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if is_kernel(called):
            _gather(called, found)


def _with_dependencies(base: str, kernels: Iterable[Any], covered: Iterable[Any]) -> str:
    """Return the hash `base`, with a second part if the kernels depend on more than the `covered` functions."""
    found = _Dependencies(covered)
    for kernel in kernels:
        found.add(kernel)
    return f"{base}{SEPARATOR}{digest_of(found.texts)}" if found.has_more else base


class _Dependencies:
    """The functions that kernels call, directly or indirectly, as texts that refer to each other by number.

    `has_more` is True if a binary depends on more than the sources of the `covered` functions, which are hashed
    already: if a called function is not covered, shares its name with another one, is called by a name that is not its
    own or is marked noinline, or if a function refers to constants.
    """

    def __init__(self, covered: Iterable[Any]) -> None:
        self.texts: list[str] = []
        self.has_more = False
        self._covered = {id(one) for one in covered}
        self._places: dict[int, int] = {}  # by the id of a function
        self._names: set[str] = set()

    def add(self, function: Any) -> int:
        """Add a kernel or device function, and return its number."""
        place = self._places.setdefault(id(function), len(self.texts))
        if place < len(self.texts):
            return place
        self.texts.append("")
        name = function.fn.__name__
        self.has_more |= id(function) not in self._covered or name in self._names
        self._names.add(name)
        self.texts[place] = self._text(function)
        return place

    def _text(self, function: Any) -> str:
        """Return a function's structure and the values that it refers to, as text."""
        source = _source_of(function)
        lines = [structure(source)]
        if getattr(function, "noinline", getattr(function, "kwargs", {}).get("noinline")):
            lines.append("noinline")
        for path, value, is_global in sorted(_references(function.fn, source), key=lambda one: one[0]):
            described = self._described(path, value)
            if described is not None:
                lines.append(f"{path} = {described}")
                self.has_more |= not (is_global and is_kernel(value) and value.fn.__name__ == path)
        self.has_more |= "noinline" in lines
        return "\n".join(lines)

    def _described(self, path: str, value: Any, depth: int = 0) -> str | None:
        """Return a text that identifies a value in every process; None for modules and for parts of Triton.

        `path` is how the function refers to the value, such as "a.b", and `depth` is how deeply the value is nested.
        """
        from triton.language.core import constexpr

        def deeper(one: Any) -> str:
            return str(self._described(path, one, depth + 1))

        if isinstance(value, ModuleType) or _is_fixed(value.fn if is_kernel(value) else value):
            return None
        if depth > _DEEPEST:
            return "..."
        if isinstance(value, constexpr):
            return f"constexpr {deeper(value.value)}"
        if is_kernel(value):
            return f"function {self.add(value)}"
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name} {deeper(value.value)}"
        if value is None or isinstance(value, (bool, str, bytes)):
            return repr(value)
        if isinstance(value, Integral):
            return hex(int(value))  # without Python's limit on decimal digits
        if isinstance(value, Complex):
            return repr(complex(value))
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__}({', '.join(map(deeper, value))})"
        if isinstance(value, (set, frozenset)):
            return f"set({', '.join(sorted(map(deeper, value)))})"
        if isinstance(value, Mapping):
            return f"mapping({', '.join(sorted(f'{deeper(key)}: {deeper(one)}' for key, one in value.items()))})"
        if type(value).__name__ == "dtype":
            return f"dtype {value}"
        if isinstance(value, type) and getattr(value, "__triton_aggregate__", False):
            fields = {name: getattr(one, "__name__", str(one)) for name, one in value.__annotations__.items()}
            parts = (fields, *(getattr(value, name, ()) for name in ("__aggregate_defaults__", "hash_attrs")))
            return f"aggregate {deeper(parts)}"
        if inspect.isfunction(value):
            return _python_function(value)
        named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
        return f"{named.__module__}.{named.__qualname__}"


def _references(function: Any, source: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield what a function refers to outside of itself as (path, value, whether it is a global), each path once."""
    (tree,) = parsed(source).body
    assert isinstance(tree, ast.FunctionDef)
    captured = captured_by(function)
    local = _local_names(tree)
    annotations = [one.annotation for one in ast.walk(tree.args) if isinstance(one, ast.arg) and one.annotation]
    nodes = [node for part in (*annotations, *tree.body) for node in ast.walk(part)]
    for path in {path for node in nodes if (path := _path(node)) and path[0] not in local}:
        name, *attributes = path
        value = captured.get(name, function.__globals__.get(name, _MISSING))
        for attribute in attributes:
            if value is _MISSING or _is_fixed(value):
                break
            value = _attribute(value, attribute)
        if value is not _MISSING and not (attributes and _is_fixed(value)):
            yield ".".join(path), value, name not in captured and not attributes
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty and name in _computed_defaults(tree.args):
            yield f"default {name}", parameter.default, False


#: The value of a name or an attribute that does not exist.
_MISSING = object()


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute, or `_MISSING` if reading it fails."""
    try:
        return getattr(value, name)
    except Exception:  # noqa: BLE001 - an attribute of a user's object may raise anything
        return _MISSING


def captured_by(function: Any) -> dict[str, Any]:
    """Return the variables that a function captured from enclosing functions, as far as they have values."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    captured = {name: _attribute(cell, "cell_contents") for name, cell in cells}  # a variable may be unassigned
    return {name: value for name, value in captured.items() if value is not _MISSING}


def _path(node: ast.AST) -> tuple[str, ...]:
    """Return the names in a syntax node like `a.b.c`, ("a", "b", "c"); () for any other node."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (path := _path(node.value)):
        return (*path, node.attr)
    return ()


def _local_names(tree: ast.FunctionDef) -> set[str]:
    """Return the parameters of a function's syntax tree, and the names that it assigns before it reads them.

    Triton lets a function read a global and assign a local variable of that name afterwards.
    """
    local = {one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)}
    for part in tree.body:
        for node in ast.walk(part):
            if isinstance(node, ast.comprehension):
                local |= {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
    names = [node for part in tree.body for node in ast.walk(part) if isinstance(node, ast.Name)]
    first: dict[str, bool] = {}
    for node in sorted(names, key=lambda one: (one.lineno, one.col_offset)):
        first.setdefault(node.id, isinstance(node.ctx, ast.Store))
    return local | {name for name, is_stored in first.items() if is_stored}


def _computed_defaults(arguments: ast.arguments) -> set[str]:
    """Return the parameters whose defaults refer to variables, so that the source does not show their values."""
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [
        *zip(reversed(positional), reversed(arguments.defaults), strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {
        one.arg
        for one, default in pairs
        if default is not None and any(isinstance(node, ast.Name) for node in ast.walk(default))
    }


def _python_function(function: Any) -> str:
    """Return a text that identifies a plain Python function that a kernel calls in Triton's interpreter.

    It is the structure of the function's source; without source, the function's qualified name.
    """
    try:
        return f"python {structure(textwrap.dedent(inspect.getsource(function)))}"
    except (OSError, TypeError, SyntaxError):
        return f"python {function.__module__}.{function.__qualname__}"


def is_kernel(value: Any) -> bool:
    """Return whether this is a function under `triton.jit`, compiled or interpreted."""
    return not isinstance(value, ModuleType) and inspect.isfunction(_attribute(value, "fn"))


def _is_fixed(value: Any) -> bool:
    """Return whether a value is a module, function or class of Triton or of the standard modules `math` and `copy`.

    The versions of Triton and Python determine these, so hashes need not cover them.
    """
    if isinstance(value, ModuleType):
        module: Any = value.__name__
    else:
        module = value.__module__ if isinstance(value, type) or inspect.isroutine(value) else None
    return isinstance(module, str) and module.partition(".")[0] in _FIXED_MODULES


def _source_of(kernel: Any) -> str:
    """Return the source that Triton compiles; in the interpreter, the source in the file."""
    return str(kernel.src) if hasattr(kernel, "src") else textwrap.dedent(inspect.getsource(kernel.fn))


def digest_of(texts: Iterable[str]) -> str:
    """Return a hash of texts in their order: 64 bits, as 16 hexadecimal digits."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def source_texts(function: Callable[..., Any]) -> list[str]:
    """Return the source of a function, without comments, as texts that differ between different functions.

    Usually there is one text, the source. For a lambda that shares its lines with another one, and for a wrapper, a
    text of the byte code follows. A function without a source file, such as one from a shell, has only that text.
    """
    inner = inspect.unwrap(function)
    code, own = getattr(inner, "__code__", None), getattr(function, "__code__", None)
    texts = [""] if code is None else list(_texts_of(code))
    return texts if own is code or own is None else [*texts, _code_text(own)]


@lru_cache(maxsize=4096)
def _texts_of(code: CodeType) -> tuple[str, ...]:
    """Return the source of a code object as texts: the source, the byte code, or both; see `source_texts`."""
    try:
        text = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError, SyntaxError, TokenError):  # defined in a shell, or the file has changed
        return (_code_text(code),)
    lambdas = text.count("lambda")
    with contextlib.suppress(SyntaxError):  # a lambda inside of an expression
        lambdas = sum(isinstance(node, ast.Lambda) for node in ast.walk(parsed(text)))
        text = structure(text)
    return (text, _code_text(code)) if code.co_name == "<lambda>" and lambdas > 1 else (text,)


def _code_text(code: CodeType) -> str:
    """Return a code object and the ones nested in it as text, without file names and line numbers."""
    constants = ", ".join(map(_constant, code.co_consts))
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return f"{code.co_name} {code.co_argcount} {code.co_flags} {code.co_code.hex()} {names} [{constants}]"


def _constant(value: Any) -> str:
    """Return a constant of a code object as text, the same in every process."""
    if isinstance(value, CodeType):
        return _code_text(value)
    if isinstance(value, (tuple, frozenset)):
        parts = map(_constant, value)
        return f"{type(value).__name__}({', '.join(sorted(parts) if isinstance(value, frozenset) else parts)})"
    return hex(value) if type(value) is int else repr(value)

"""Interpret the source of a Triton kernel on tensor shapes instead of contents, to count its work: `facts_of`."""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import operator
import textwrap
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from .functions import Block, Dtype, Facts, Functions, Guess, Loop, Range, is_number, itemsize_of, plain, value_of

#: How deep functions may call each other, and the longest loop that is unrolled.
_DEEPEST, _UNROLLED = 12, 8
#: How often a loop runs whose end is decided on the GPU.
_TRIPS = 4
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def facts_of(kernel: Any, arguments: Mapping[str, Any], position: int = 4, programs: int = 9) -> Facts:
    """Return the bytes, operations and loops of one program of a launch, counted from the kernel's source.

    Args:
        kernel: A `triton.jit` function, without other decorators.
        arguments: The values of its parameters, those of the config included. A tensor is anything that has a dtype.
        position: The assumed position of the program in the grid, along each axis.
        programs: The assumed size of the grid, along each axis.

    >>> import triton
    >>> import triton.language as tl
    >>> @triton.jit
    ... def double(x_ptr, n, BLOCK: tl.constexpr):
    ...     at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ...     tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)
    >>> from types import SimpleNamespace
    >>> facts = facts_of(double, {"x_ptr": SimpleNamespace(dtype="bf16"), "n": 5000, "BLOCK": 256})
    >>> facts.load_bytes, facts.store_bytes, facts.scattered_bytes
    (512.0, 512.0, 0.0)
    """
    run = _Interpreter(position, programs)
    run.call(kernel, (), {name: _argument(name, value) for name, value in arguments.items()})
    return run.facts


def _argument(name: str, value: Any) -> Any:
    """Return a launch argument as an abstract value: a pointer for a tensor, a block for a descriptor."""
    if hasattr(value, "block_shape") and hasattr(value, "base"):
        shape = tuple(value.block_shape)
        return Block(shape, 8, (*(0.0 for _ in shape[1:]), 1.0), itemsize_of(value.base.dtype), name)
    if hasattr(value, "dtype"):
        return Block((), 8, (), itemsize_of(value.dtype), name)
    return plain(value)


class _Method(NamedTuple):
    """The method `name` of the abstract value `of`, which the kernel's source has named and not called yet."""

    of: Any
    name: str


class _ReturnedError(Exception):
    """Raised by a `return` statement to end the interpretation of a jitted function, with the returned value."""

    def __init__(self, value: Any) -> None:
        self.value = value


@lru_cache(maxsize=1024)
def _source(function: Any) -> tuple[list[ast.stmt], ChainMap[str, Any], dict[str, Any]]:
    """Return a jitted function's statements, its non-local variables, and its parameters' defaults."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    closure = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    parameters = inspect.signature(function).parameters.items()
    defaults = {name: None if one.default is one.empty else plain(one.default) for name, one in parameters}
    return tree.body, ChainMap(dict(closure), function.__globals__, vars(builtins)), defaults


@lru_cache(maxsize=4096)
def _assigned(loop: ast.AST) -> tuple[str, ...]:
    """Return the names of the variables that a loop assigns."""
    return tuple({n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)})


class _Interpreter(Functions):
    """Interprets a kernel's syntax tree: statements by methods `run_NODE`, expressions by methods `eval_NODE`.

    `env` maps the local variables of the current function to their abstract values.
    """

    def __init__(self, position: int, programs: int) -> None:
        super().__init__(position, programs)
        self._names: Mapping[str, Any] = {}
        self._depth = 0

    def call(self, jitted: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Interpret the body of a jitted function with these arguments, and return its value."""
        if self._depth >= _DEEPEST:
            return Guess(0)
        body, names, defaults = _source(jitted.fn)
        env = {**defaults, **dict(zip(defaults, args, strict=False))}
        env |= {name: value for name, value in keywords.items() if name in defaults}
        outer, self._names = self._names, names
        self._depth += 1
        try:
            self.run(body, env)
        except _ReturnedError as returned:
            return returned.value
        finally:
            self._names = outer
            self._depth -= 1
        return None

    # Statements. Others, as `pass` or `assert`, do nothing.

    def run(self, body: Sequence[ast.stmt], env: dict[str, Any]) -> None:
        """Interpret statements in order; those without a `run_` method have no effect."""
        for one in body:
            if (method := getattr(self, f"run_{type(one).__name__.lower()}", None)) is not None:
                method(one, env)

    def run_expr(self, node: ast.Expr, env: dict[str, Any]) -> None:
        """Evaluate an expression statement, such as a store, for its effect."""
        self.eval(node.value, env)

    def run_assign(self, node: ast.Assign, env: dict[str, Any]) -> None:
        """Assign the value of an expression to one or more targets."""
        value = self.eval(node.value, env)
        for target in node.targets:
            self._assign(target, value, env)

    def run_annassign(self, node: ast.AnnAssign, env: dict[str, Any]) -> None:
        """Interpret an assignment with a type annotation."""
        if node.value is not None:
            self._assign(node.target, self.eval(node.value, env), env)

    def run_augassign(self, node: ast.AugAssign, env: dict[str, Any]) -> None:
        """Interpret an augmented assignment such as `x += y`."""
        left = env.get(node.target.id, Guess(0)) if isinstance(node.target, ast.Name) else Guess(0)
        self._assign(node.target, self._binary(node.op, left, self.eval(node.value, env)), env)

    def _assign(self, target: ast.expr, value: Any, env: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            many = value if isinstance(value, (tuple, list)) else [value] * len(target.elts)
            for one, part in zip(target.elts, many, strict=False):
                self._assign(one, part, env)

    def run_return(self, node: ast.Return, env: dict[str, Any]) -> None:
        """End the current function with the value of the `return` statement, by an exception."""
        raise _ReturnedError(None if node.value is None else self.eval(node.value, env))

    def run_if(self, node: ast.If, env: dict[str, Any]) -> None:
        """Interpret the branch of an `if` statement that its condition selects.

        If only the GPU knows the condition, interpret each branch that does not end with `return`, `break` or
        `continue`.
        """
        test = self.eval(node.test, env)
        if not isinstance(test, (Guess, Block)):
            self.run(node.body if test else node.orelse, env)
            return
        for branch in (node.body, node.orelse):
            if branch and not isinstance(branch[-1], (ast.Return, ast.Break, ast.Continue)):
                self.run(branch, env)

    def run_for(self, node: ast.For, env: dict[str, Any]) -> None:
        """Interpret a `for` loop over a range or a tuple.

        A short unrolled range or a tuple is interpreted item by item; for other ranges, the body is interpreted once
        and its work multiplied by the number of iterations.
        """
        items = self.eval(node.iter, env)
        if not isinstance(items, Range):
            items = items if isinstance(items, (tuple, list)) else (Guess(0),)
        else:
            *bounds, is_unrolled = items
            is_known = all(isinstance(one, int) for one in bounds)
            start, stop, step = (float(value_of(one) or 0) for one in bounds)
            trips = max(math.ceil((stop - start) / (step or 1)), 0 if is_known else 1)
            if not (is_known and is_unrolled and trips <= _UNROLLED):
                if trips:
                    self._assign(node.target, Guess(start + trips // 2 * step), env)
                    self._loop(node, trips, env)
                return
            items = range(bounds[0], bounds[1], bounds[2] or 1)
        for one in items:
            self._assign(node.target, one, env)
            self.run(node.body, env)

    def run_while(self, node: ast.While, env: dict[str, Any]) -> None:
        """Interpret the body of a `while` loop once, and assume that it runs a fixed number of times (`_TRIPS`)."""
        self._loop(node, _TRIPS, env)

    def _loop(self, node: ast.For | ast.While, trips: float, env: dict[str, Any]) -> None:
        """Interpret the body of a loop once, multiply its work by `trips`, and record the loop in `facts.loops`."""
        assigned = [(name, env[name]) for name in _assigned(node) if name in env]
        carried = [one for _, one in assigned if isinstance(one, Block) and not one.pointed]
        loop = Loop(trips, carried_bytes=float(sum(one.size * one.itemsize for one in carried)))
        # Numbers change from one iteration to the next.
        env |= {name: Guess(value) for name, value in assigned if isinstance(value, (int, float))}
        self.facts.loops.append(loop)
        self.loops.append(loop)
        self.times *= trips
        self.run(node.body, env)
        self.times /= trips
        self.loops.pop()

    def run_with(self, node: ast.With, env: dict[str, Any]) -> None:
        """Interpret the body of a `with` block, such as one of warp specialization."""
        self.run(node.body, env)

    # Expressions. Others count as an unknown number.

    def eval(self, node: ast.expr, env: dict[str, Any]) -> Any:
        """Return the abstract value of an expression; a guess of 0 if there is no method for its syntax."""
        method = getattr(self, f"eval_{type(node).__name__.lower()}", None)
        return Guess(0) if method is None else method(node, env)

    def eval_constant(self, node: ast.Constant, env: dict[str, Any]) -> Any:
        """Return the value of a literal number, text or None."""
        return node.value

    def eval_name(self, node: ast.Name, env: dict[str, Any]) -> Any:
        """Return the value of a local, closure, global or builtin variable."""
        return env[node.id] if node.id in env else plain(self._names.get(node.id, Guess(0)))

    def eval_tuple(self, node: ast.Tuple | ast.List, env: dict[str, Any]) -> tuple[Any, ...]:
        """Return the values of the items of a tuple or list display."""
        return tuple(self.eval(one, env) for one in node.elts)

    eval_list = eval_tuple

    def eval_attribute(self, node: ast.Attribute, env: dict[str, Any]) -> Any:
        """Return an attribute of a value or module, or a `_Method` if a method of a tensor or number is named."""
        of, name = self.eval(node.value, env), node.attr
        if isinstance(of, Dtype):
            return Dtype(of.pointed) if name == "element_ty" and of.pointed else 8 * of.itemsize
        if isinstance(of, Block) and name in ("shape", "T", "dtype", "type"):
            return of.shape if name == "shape" else of.transposed() if name == "T" else Dtype(of.itemsize, of.pointed)
        if isinstance(of, (int, float)) and name == "value":
            return of
        if isinstance(of, (Block, Guess, int, float)):
            return _Method(of, name)
        return plain(getattr(of, name, Guess(0)))

    def eval_subscript(self, node: ast.Subscript, env: dict[str, Any]) -> Any:
        """Return an item of a tuple, or a tensor with a new axis at each `None` in the subscript."""
        of = self.eval(node.value, env)
        if isinstance(of, Block):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            for axis, part in enumerate(parts):
                if isinstance(part, ast.Constant) and part.value is None:
                    of = of.with_axis(axis)
            return of
        at = None if isinstance(node.slice, ast.Slice) else self.eval(node.slice, env)
        if not isinstance(of, (tuple, list)) or not of:
            return Guess(0)
        return of[at] if isinstance(at, int) and -len(of) <= at < len(of) else of[0]

    def eval_unaryop(self, node: ast.UnaryOp, env: dict[str, Any]) -> Any:
        """Return the value of `-x` or `not x`; for `~x` and `+x`, that of x."""
        value = self.eval(node.operand, env)
        if isinstance(value, Block) or not isinstance(node.op, (ast.USub, ast.Not)):
            return value
        number = value_of(value)
        result = (not number) if isinstance(node.op, ast.Not) else -number if is_number(number) else 0
        return Guess(result) if isinstance(value, Guess) else result

    def eval_boolop(self, node: ast.BoolOp, env: dict[str, Any]) -> Any:
        """Return the value of `and` or `or`; if no known operand decides it, an unknown operand."""
        is_and, unknown, result = isinstance(node.op, ast.And), None, None
        for one in node.values:
            result = self.eval(one, env)
            if isinstance(result, (Guess, Block)):
                unknown = result
            elif bool(result) != is_and:
                return result
        return result if unknown is None else unknown

    def eval_compare(self, node: ast.Compare, env: dict[str, Any]) -> Any:
        """Return the result of a comparison; of a chain `a < b < c`, `a` compared with `c` by the last operator."""
        left, right, op = self.eval(node.left, env), self.eval(node.comparators[-1], env), node.ops[-1]
        if isinstance(op, (ast.Is, ast.IsNot)) or left is None or right is None:
            return (left is right) == isinstance(op, (ast.Is, ast.Eq))
        if isinstance(op, (ast.In, ast.NotIn)):
            return isinstance(right, (tuple, list, str)) and (left in right) == isinstance(op, ast.In)
        if isinstance(left, (str, Dtype)) or not (isinstance(left, Block) or is_number(left)):
            return (left == right) == isinstance(op, ast.Eq)
        return self._binary(op, left, right)

    def eval_ifexp(self, node: ast.IfExp, env: dict[str, Any]) -> Any:
        """Return the value of `x if test else y`; x if the test is a tensor."""
        test = self.eval(node.test, env)
        return self.eval(node.body if isinstance(test, Block) or value_of(test) else node.orelse, env)

    def eval_namedexpr(self, node: ast.NamedExpr, env: dict[str, Any]) -> Any:
        """Assign the value of `x := y` to x, and return it."""
        env[node.target.id] = value = self.eval(node.value, env)
        return value

    def eval_binop(self, node: ast.BinOp, env: dict[str, Any]) -> Any:
        """Return the value of an arithmetic expression with two operands."""
        return self._binary(node.op, self.eval(node.left, env), self.eval(node.right, env))

    def _binary(self, node: ast.operator | ast.cmpop, left: Any, right: Any) -> Any:
        """Return the result of a binary operator on tensors, numbers or tuples; a guess if an operand is one."""
        op = _OPERATORS.get(type(node))
        if isinstance(left, Block) or isinstance(right, Block):
            block = self.elementwise(op, left, right)
            return replace(block, itemsize=1, strides=()) if isinstance(node, ast.cmpop) else block
        if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
            return (*left, *right)
        if op is None or not (is_number(left) and is_number(right)):
            return Guess(0)
        numbers = value_of(left) or 0, value_of(right) or 0
        try:
            result = op(*numbers)
        except TypeError:  # bits of a guess
            result = op(*map(int, numbers))
        except (ZeroDivisionError, OverflowError, ValueError):
            result = 0
        return Guess(result) if isinstance(left, Guess) or isinstance(right, Guess) else result

    def eval_call(self, node: ast.Call, env: dict[str, Any]) -> Any:
        """Interpret a call: the body of a jitted function of the user, or else one of `Functions` by its name."""
        function, args = self.eval(node.func, env), list[Any]()
        for one in node.args:
            value = self.eval(one.value if isinstance(one, ast.Starred) else one, env)
            args += value if isinstance(one, ast.Starred) and isinstance(value, (tuple, list)) else [value]
        keywords = {one.arg: self.eval(one.value, env) for one in node.keywords if one.arg}
        if isinstance(function, _Method):
            return self.called(function.name, [function.of, *args], keywords)
        is_theirs = not str(getattr(function, "__module__", "triton")).startswith("triton")
        if is_theirs and inspect.isfunction(getattr(function, "fn", None)):
            return self.call(function, args, keywords)
        return self.called(getattr(function, "__name__", ""), args, keywords)

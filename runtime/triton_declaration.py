"""Functions on a `TritonFamily` subclass's declarations: checks, the space of configs, and random problem sizes."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from difflib import get_close_matches
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

from ..datasets import DTYPES, FamilyError, ForetuneError, KernelConfig
from ..datasets.errors import abridged, check_between, check_integer, check_word, check_words, shown
from ..datasets.problem import MOST_SIZE

if TYPE_CHECKING:
    import numpy as np

    from ..datasets import Problem
    from .triton_family import TritonFamily

#: Where a dimension, a flag or the dtype comes from: a parameter's name, or a function of a launch's arguments by
#: parameter name.
Source: TypeAlias = "str | Callable[[Mapping[str, Any]], Any]"
#: The sizes of a dimension: the smallest and the largest, or a set of all.
Sizes: TypeAlias = "tuple[int, int] | Set[int]"
#: What a subclass must declare, with the meaning that an error message states.
REQUIRED = {
    "name": "the name of the family",
    "kernel": "the triton.jit function, with its decorators",
    "dims_from": "a mapping of each dimension to the parameter that holds its size, or to a function of the arguments",
    "output": "the parameter that the kernel writes its result to, or a tuple of several",
    "arguments": "a method that returns a launch's arguments by parameter name",
    "grid": "a method that returns the grid of a launch",
    "eager": "a method that computes the same result with plain PyTorch",
}
#: How similar a name must be to a declared one to count as a misspelling of it; "byts" and "bytes" have 0.89.
_SIMILAR = 0.8
#: Launch options that a config may have among its meta-parameters: those of AMD's compiler.
OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint")
#: The methods that a subclass may define, with the parameters that they are called with.
_PARAMETERS = {
    "arguments": ("problem", "where"),
    "grid": ("problem", "config"),
    "eager": ("arguments",),
    "supports": ("config", "problem", "device"),
    "flops": ("problem",),
    "bytes": ("problem",),
}


def check_types(family: type[TritonFamily]) -> None:
    """Check the type of each declared attribute, the parameters of each method, and the spelling of other attributes.

    Raises:
        ForetuneError: An attribute is not of its type, or misspelt. The message names the family and the attribute.
    """
    name = family.name
    if set(check_word("name", name)) & set(": ,"):
        raise ForetuneError(f"name must be one word, without colon or comma, but is {shown(name)}")
    for attribute, check in _CHECKS.items():
        try:
            check(attribute, getattr(family, attribute))
        except ForetuneError as error:  # noqa: PERF203 - a dozen
            raise ForetuneError(f"{name}: {error}") from None
    for method, parameters in _PARAMETERS.items():
        is_bound = isinstance(inspect.getattr_static(family, method), (staticmethod, classmethod))
        try:
            inspect.signature(getattr(family, method)).bind(*(() if is_bound else (None,)), *parameters)
        except (TypeError, ValueError):
            wanted = ", ".join(("self", *parameters))
            raise ForetuneError(f"{name}: {method} must be a method with the parameters ({wanted})") from None
    _check_spelling(family)


def check_names(family: type[TritonFamily]) -> None:
    """Check that each name in a declaration exists: parameters of the kernel, dimensions, knobs and dtypes.

    Raises:
        ForetuneError: A name does not exist, or the two bounds of a range are in the wrong order.
    """
    parameters, dims = family._kernel.parameters, family.dims
    sources = (*family.dims_from.values(), *family.flags_from.values(), family.dtype_from)
    named = [*sources, *family._outputs, *family.in_place]
    meta = [name for config in family._space for name, _ in config.meta if name not in OPTIONS]
    uses = [
        *((name, "parameter", parameters) for name in [*named, *meta] if isinstance(name, str)),
        *((dim, "dimension", dims) for dim in (*family.tiles.values(), *family.ranges, *family.bucketed)),
        *((dim, "dimension", dims) for dim in family.independent),
        *((knob, "knob", family.knobs) for knob in (*family.tiles, *getattr(family.numerics, "knobs", ()))),
        *((dtype, "dtype", DTYPES) for dtype in family.dtypes),
    ]
    for name, what, known in uses:
        if name not in known:
            declared = " in dims_from" if what == "dimension" else ""
            raise ForetuneError(
                f"{family.name}: there is no {what} {abridged(name, 100)}{declared}; there are {', '.join(known)}"
            )
    for dim, sizes in family.ranges.items():
        if not isinstance(sizes, Set) and not 1 <= sizes[0] <= sizes[1]:
            raise ForetuneError(
                f"{family.name}: ranges must be 1 <= low <= high but {dim} has {sizes[0]} to {sizes[1]}"
            )


def check_ranges(family: type[TritonFamily]) -> None:
    """Check that each dimension has a range, which `TritonFamily.cases` draws from.

    Raises:
        ForetuneError: A dimension has none.
    """
    if missing := [dim for dim in family.dims if dim not in family.ranges]:
        raise ForetuneError(
            f"{family.__name__} must declare `ranges`: the sizes of each dimension that `cases` draws, as (1, 4096) or "
            f"{{64, 128}}, but {missing[0]} has none"
        )


def outside_ranges(family: type[TritonFamily], problem: Problem) -> str:
    """Return a text that names the sizes of a problem that are not in the declared `ranges`; "" if all are.

    Such a problem is predicted as any other, but no collection of the family draws it.
    """
    texts = []
    for dim, sizes in family.ranges.items():
        size = problem[dim]
        if isinstance(sizes, Set):
            inside, declared = size in sizes, f"is not one of {', '.join(map(str, sorted(sizes)))}"
        else:
            inside, declared = sizes[0] <= size <= sizes[1], f"is not between {sizes[0]} and {sizes[1]}"
        if not inside:
            texts.append(f"{dim}={size} {declared}")
    return f"outside of the declared ranges: {', '.join(texts)}" if texts else ""


def _check_spelling(family: type[TritonFamily]) -> None:
    """Check that no attribute of the class looks like a misspelt declaration, such as a method `byts`.

    Raises:
        ForetuneError: The name of a public attribute is nearly that of a declaration, and no code of the class uses it.
    """
    own = vars(family)
    used = {name for value in own.values() for name in _names_in(getattr(_function_of(value), "__code__", None))}
    known = {name for base in family.__mro__[1:] for name in vars(base)} | REQUIRED.keys() | used
    for name in own:
        similar = get_close_matches(name, [*REQUIRED, *_CHECKS, *_PARAMETERS], 1, _SIMILAR)
        if similar and name not in known and not name.startswith("_"):
            raise ForetuneError(f"{family.name}: nothing uses {name}: did you mean {similar[0]}?")


def _function_of(value: Any) -> Any:
    """Return the function behind a method or a property; other values unchanged."""
    return inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))


def _names_in(code: Any) -> Iterator[str]:
    """Yield the names that a code object and the functions nested in it use."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant)


def space_of(family: type[TritonFamily]) -> tuple[KernelConfig, ...]:
    """Return the declared `triton.Config`s as `KernelConfig`s.

    Raises:
        ForetuneError: There are none, or one has a `pre_hook`.
    """
    configs = family._kernel.configs if family.configs is None else family.configs
    if not configs:
        raise ForetuneError(f"{family.name}: declare `configs`, or give a kernel under a triton.autotune that has some")
    if any(getattr(config, "pre_hook", None) for config in configs):
        raise ForetuneError(f"{family.name}: a config with a pre_hook cannot be stored: declare `configs` without it")
    values = (config if isinstance(config, KernelConfig) else KernelConfig.from_triton(config) for config in configs)
    return tuple(dict.fromkeys(values))


def why_not_in_space(family: type[TritonFamily], config: KernelConfig) -> str | None:
    """Return None if a config is in the family's space, else the reason why not.

    Configs outside of the space are refused, because it is unknown whether they compile and compute correct results.
    """
    if repr(config) in family._members:  # not equality: 64 equals 64.0, but compiles to another binary
        return None
    knobs = config.to_json()
    if unknown := [knob for knob in knobs if knob not in family._values]:
        return f"{unknown[0]} is no knob of {family.name}; it has {', '.join(family.knobs)}"
    for knob, allowed in family._values.items():
        value = knobs.get(knob)
        if not any(value == one and type(value) is type(one) for one in allowed):
            values = ", ".join(sorted(map(str, allowed), key=lambda value: (len(value), value)))
            return f"{knob} must be one of {values} but is {value!r}"
    return f"no config of {family.name} has {config}"


def drawn_size(source: np.random.Generator, sizes: Sizes) -> int:
    """Draw a random size: evenly from a set, or on a logarithmic scale from a range (smallest, largest).

    Of the sizes from a range, a third are rounded to powers of two, and a third to multiples of 64.
    """
    if isinstance(sizes, Set):
        return int(source.choice(sorted(sizes)))
    low, high = sizes
    size = math.exp(source.uniform(math.log(low), math.log(high)))
    way = source.integers(3)
    if way == 0:
        size = 2 ** round(math.log2(size))
    elif way == 1 and size >= 64:
        size = round(size / 64) * 64
    return min(max(int(size), low), high)


def checked_arguments(family: type[TritonFamily], arguments: Any, where: str) -> dict[str, Any]:
    """Check the launch arguments that a family's `arguments` returned for torch device `where`; return them as a dict.

    Raises:
        FamilyError: It is no mapping; it lacks a parameter of the kernel that neither a config nor a default nor a
            heuristic sets; an output or a tensor that is updated in place is no tensor; or a tensor is on another
            device.
    """
    import torch

    if not isinstance(arguments, Mapping):
        raise FamilyError(f"family {family.name}: arguments() must return a mapping but returned {shown(arguments)}")
    kernel = family._kernel
    given = {*arguments, *family.knobs, *kernel.defaults, *kernel.computed}
    if missing := [name for name in kernel.parameters if name not in given]:
        raise FamilyError(
            f"family {family.name}: arguments() must return all parameters of the kernel except the knobs but lacks "
            f"{', '.join(missing)}"
        )
    for what, names in (("output", family._outputs), ("in_place", family.in_place)):
        if wrong := [name for name in names if not isinstance(arguments.get(name), torch.Tensor)]:
            value = shown(arguments.get(wrong[0]))
            raise FamilyError(f"family {family.name}: {wrong[0]}, which is in {what}, must be a tensor but is {value}")
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.device.type != torch.device(where).type:
            raise FamilyError(
                f"family {family.name}: arguments(problem, where) must return tensors on {where!r} but {name} is on "
                f"{str(value.device)!r}: pass device=where"
            )
    return dict(arguments)


def checked_grid(name: str, grid: Any, config: KernelConfig) -> tuple[int, ...]:
    """Check the grid that a family's `grid` returned, and return it as a tuple of Python integers.

    Args:
        name: The family's name, for the message.
        grid: The returned value.
        config: The config of the launch, for the message.

    Raises:
        FamilyError: It is not a tuple or list of one to three integers that are 0 or more.

    >>> checked_grid("softmax", (128,), KernelConfig.of(num_warps=4))
    (128,)
    >>> checked_grid("softmax", 128, KernelConfig.of(num_warps=4))
    Traceback (most recent call last):
    foretune.datasets.errors.FamilyError: family softmax: grid() must return a tuple of 1 to 3 integers >= 0, such as \
(128,), but returned 128 for num_warps=4 num_stages=3
    """
    try:
        if isinstance(grid, (tuple, list)) and 1 <= len(grid) <= 3 and not any(isinstance(n, bool) for n in grid):
            sizes = tuple(map(operator.index, grid))
            if min(sizes) >= 0:
                return sizes
    except TypeError:  # a float, say
        pass
    raise FamilyError(
        f"family {name}: grid() must return a tuple of 1 to 3 integers >= 0, such as (128,), but returned "
        f"{shown(grid)} for {config}"
    )


def found(source: Source, arguments: Mapping[str, Any]) -> Any:
    """Return the launch argument named `source`, or if `source` is a function, its result for all arguments."""
    return arguments[source] if isinstance(source, str) else source(arguments)


def size_of(name: str, dim: str, source: Source, arguments: Mapping[str, Any]) -> int:
    """Return the size of a dimension in a launch of the family `name`.

    `source` is the declared source of the size: the name of a launch argument, or a function of all arguments.

    Raises:
        ForetuneError: The source gives a tensor instead of a size.
    """
    if hasattr(size := found(source, arguments), "data_ptr"):
        text = f'lambda call: call["{source}"].shape[0]' if isinstance(source, str) else "one that returns a size"
        raise ForetuneError(f"{name}: dims_from takes {dim} from a tensor; give a function, such as {text}")
    return int(size)


def is_on(value: Any) -> bool:
    """Return whether a flag with this value is on: a tensor turns it on, None and false values do not."""
    return value is not None and (hasattr(value, "dtype") or bool(value))


def _sources(what: str, value: Any) -> None:
    for source in _mapping(what, value).values():
        if not callable(source) and not isinstance(source, str):
            raise ForetuneError(
                f"{what} must have a parameter's name or a function of a launch's arguments for each, such as "
                f'lambda call: call["x_ptr"].shape[0], but has {shown(source)}'
            )


def _dims(what: str, value: Any) -> None:
    _sources(what, value)
    if not value:
        raise ForetuneError(f"{what} must name a dimension but is {shown(value)}")


def _dtypes(what: str, value: Any) -> None:
    if not check_words(what, value):
        raise ForetuneError(f"{what} must name a dtype but is {shown(value)}")


def _ranges(what: str, value: Any) -> None:
    for dim, sizes in _mapping(what, value).items():
        is_range = isinstance(sizes, tuple) and len(sizes) == 2
        if not is_range and not (isinstance(sizes, Set) and sizes):
            raise ForetuneError(
                f"{what} of {dim} must be a range, as (1, 4096), or a set of sizes, as {{64, 128}}, but is "
                f"{shown(sizes)}"
            )
        for size in sizes:
            check_integer(f"{what} of {dim}", size, 0 if is_range else 1, MOST_SIZE)


def _output(what: str, value: Any) -> None:
    names = check_words(what, (value,) if isinstance(value, str) else value)
    if isinstance(value, Set) or not 0 < len(names) == len(set(names)):
        raise ForetuneError(f"{what} must be a parameter or a tuple of different ones but is {shown(value)}")


def _configs(what: str, value: Any) -> None:
    if value is not None and (isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection)):
        raise ForetuneError(f"{what} must be a list of configs but is {shown(value)}")


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ForetuneError(f"{what} must be a mapping but is {shown(value)}")
    check_words(f"each key of {what}", value)
    return value


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "dims_from": _dims,
    "flags_from": _sources,
    "dtype_from": lambda what, value: value is None or check_word(what, value),
    "dtypes": _dtypes,
    "output": _output,
    "in_place": check_words,
    "configs": _configs,
    "tiles": lambda what, value: [
        check_word(f"each dimension in {what}", dim) for dim in _mapping(what, value).values()
    ],
    "ranges": _ranges,
    "most_bytes": lambda what, value: check_between(what, value, 0.0, 1e18),
    "bucketed": check_words,
}

"""`Kernel`: a declared Triton kernel with its decorators, launched or compiled with one config at a time.

`kept_arguments` turns the arguments of a launch into JSON, from which another process can compile its binaries.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from ...datasets import ForetuneError
from ...datasets.errors import LONGEST_WORD, MOST_NAMES, shown
from .source_hash import digest_of, hash_of_kernel

if TYPE_CHECKING:
    import triton


class Kernel:
    """A `triton.jit` function, compiled or interpreted, optionally under `triton.autotune` and `triton.heuristics`.

    The decorators may be in any order. Launches skip the autotuner, of which only the configs are used, and run the
    heuristics.

    Raises:
        ForetuneError: `declared` is not a Triton kernel.
    """

    def __init__(self, declared: Any) -> None:
        self.configs: Sequence[triton.Config] = ()  # the autotuner's
        self._heuristics: list[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = []  # outermost first
        jit = declared
        while hasattr(jit, "fn") and not inspect.isfunction(jit.fn):
            self.configs = self.configs or getattr(jit, "configs", ())
            if values := getattr(jit, "values", None):
                self._heuristics.append(values)
            jit = jit.fn
        if not hasattr(jit, "fn"):
            raise ForetuneError(f"a kernel must be a function under triton.jit but is {shown(declared)}")
        self.jit = jit
        parameters = inspect.signature(jit.fn).parameters
        self.parameters = tuple(parameters)
        self.defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}

    @property
    def name(self) -> str:
        """The name of the kernel's function, "module.qualname"."""
        return f"{self.jit.fn.__module__}.{self.jit.fn.__qualname__}"

    @property
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs the kernel, so that it has no binaries."""
        return not hasattr(self.jit, "params")

    @property
    def constants(self) -> frozenset[str]:
        """The names of the parameters annotated as `constexpr`."""
        parameters = inspect.signature(self.jit.fn).parameters.values()
        return frozenset(p.name for p in parameters if "constexpr" in str(p.annotation))

    @property
    def computed(self) -> frozenset[str]:
        """The names of the parameters that heuristics compute."""
        return frozenset(name for values in self._heuristics for name in values)

    def launch(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Any:
        """Launch once with these arguments, which include a config's knobs; return the binary (interpreted: None)."""
        self._settle()
        return self.jit[grid](**self.given(arguments))

    def compile(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Any:
        """Return the binary that `launch` runs with these arguments; None for an interpreted kernel.

        It is compiled for the active driver's target unless Triton's cache has it. Tensors may be on torch's "meta"
        device, without memory.
        """
        self._settle()
        return self.jit.warmup(grid=grid, **self.given(arguments))

    def specialisation(self, arguments: Mapping[str, Any]) -> Hashable:
        """Return what determines the binary besides the source, the launch options and the target.

        That is the value of each constant, and how Triton specializes each other parameter: its type, and for integers
        and addresses whether they are 1 or multiples of 16. Returns () for an interpreted kernel.
        """
        if self.is_interpreted:
            return ()
        from triton.backends.compiler import BaseBackend
        from triton.runtime.jit import native_specialize_impl

        given = self.defaults | self.given(arguments)
        made: list[Hashable] = []
        for p in self.jit.params:
            value = given.get(p.name)
            if p.is_constexpr:
                made.append(repr(value))
            else:
                free, aligned = not p.do_not_specialize, not p.do_not_specialize_on_alignment
                made.append((native_specialize_impl(BaseBackend, value, p.is_const, free, aligned), _is_large(value)))
        return tuple(made)

    def source_hash(self) -> str:
        """Return the hash of the kernel's source and of all that its binary depends on, by `hash_of_kernel`."""
        return hash_of_kernel(self.jit)

    def tuned_hash(self) -> str:
        """Return the hash of the kernel together with the hooks of its configs, by `hash_of_tuned`."""
        return hash_of_tuned(self.jit, self.configs)

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments together with those that heuristics compute."""
        given = dict(arguments)
        for values in self._heuristics:
            for name, heuristic in values.items():
                given[name] = heuristic(given)
        return given

    def _settle(self) -> None:
        """Compute the cache keys of the functions that the kernel calls, which its own key in Triton 3.6 needs."""
        if not self.is_interpreted:
            from .launcher import settle

            settle(self.jit)


def _is_large(value: Any) -> bool:
    """Return whether a tensor's storage has 2 GiB or more: binaries for AMD depend on that."""
    return hasattr(value, "untyped_storage") and value.untyped_storage().nbytes() >= 2**31


def hash_of_tuned(kernel: Any, configs: Sequence[triton.Config]) -> str:
    """Return a hash of what an autotuner times: a `triton.jit` kernel, and the `pre_hook` of each config.

    It equals `hash_of_kernel` if no config has a hook. If all configs share one hook, the hash does not depend on the
    number of configs.
    """
    source = hash_of_kernel(kernel)
    hooks = [_hook_text(getattr(config, "pre_hook", None)) for config in configs]
    if not any(hooks):
        return source
    if len(set(hooks)) == 1:
        return digest_of([source, hooks[0]])
    return digest_of([source, *(f"{config} {hook}" for config, hook in zip(configs, hooks, strict=True))])


def _hook_text(hook: Any) -> str:
    """Return a text that identifies a hook: its code and the plain values that it captured; "" for None."""
    if hook is None:
        return ""
    if isinstance(hook, partial):
        return f"{_hook_text(hook.func)} {_plain_text(hook.args)} {_plain_text(sorted(hook.keywords.items()))}"
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):  # a callable object
        function = type(hook).__call__
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    captured = [cell.cell_contents for cell in cells] + [getattr(function, "__defaults__", None)]
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', '')}.{name} {_plain_text(code)} {_plain_text(captured)}"


def _plain_text(value: Any) -> str:
    """Return the `repr` of plain values, and the type of other values, whose `repr` may have an address."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {_plain_text(value.co_consts)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain_text, value))})"
    plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    return repr(value) if plain else type(value).__qualname__


#: Arguments of a launch that its binary does not depend on.
OF_THE_LAUNCH = frozenset({"grid", "warmup"})


def kept_arguments(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the parts of a launch's arguments that a binary depends on, as JSON; None if one cannot be stored.

    A tensor is stored as its dtype and whether its address is a multiple of 16 bytes, a Triton type as its name, and
    anything else as its value. Values that JSON cannot express, such as a host's tensor descriptor, cannot be stored.

    >>> kept_arguments({"n": 64, "SCALE": 0.5, "bias": None, "grid": (1,)})
    {'n': 64, 'SCALE': 0.5, 'bias': None}
    >>> kept_arguments({"shape": (1, 2)})
    """
    kept = {name: _kept(value) for name, value in arguments.items() if name not in OF_THE_LAUNCH}
    return kept if are_kept_arguments(kept) else None


def are_kept_arguments(value: Any) -> bool:
    """Return whether a value, perhaps from a file, has the form that `kept_arguments` returns."""
    return isinstance(value, dict) and len(value) <= MOST_NAMES and all(map(_is_kept, value, value.values()))


def stand_ins(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for which Triton compiles the same binary as for the stored ones (of `kept_arguments`).

    Raises:
        ForetuneError: A stored type does not exist in torch or Triton.
    """
    return {name: _stand_in(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _kept(value: Any) -> Any:
    """Return one argument as `kept_arguments` stores it."""
    import triton.language as tl

    if isinstance(value, tl.dtype):
        return {"triton": value.name}
    if hasattr(value, "dtype") and hasattr(value, "data_ptr"):
        return {"tensor": str(value.dtype).removeprefix("torch."), "aligned": value.data_ptr() % 16 == 0}
    return value


def _is_kept(name: Any, value: Any) -> bool:
    """Return whether `name` and `value` can be an argument in the form that `kept_arguments` stores."""
    if isinstance(value, dict):
        dtype, is_aligned = value.get("tensor", value.get("triton")), value.get("aligned") is True
        return isinstance(dtype, str) and value in ({"tensor": dtype, "aligned": is_aligned}, {"triton": dtype})
    if type(value) is str:
        return len(value) <= LONGEST_WORD
    return isinstance(name, str) and (
        value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))
    )


def _stand_in(value: Mapping[str, Any]) -> Any:
    """Return a mock tensor, or a Triton type, for its stored form."""
    import torch
    import triton.language as tl
    from triton.runtime.jit import MockTensor

    class Unaligned(MockTensor):  # type: ignore[misc]  # Triton has no types
        @staticmethod
        def data_ptr() -> int:
            return 1

    if "triton" in value:
        with suppress(AssertionError):
            return tl.dtype(value["triton"])
    elif isinstance(dtype := getattr(torch, value["tensor"], None), torch.dtype):
        return MockTensor(dtype) if value["aligned"] else Unaligned(dtype)
    raise ForetuneError(f"an argument must be a value, or have a dtype of torch or Triton, but is {shown(value)}")

"""`Kernel`: a Triton kernel as somebody declared it, with what its decorators add, for one config at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from ...datasets import ForetuneError
from ...datasets.errors import shown
from .source_hash import digest_of, hash_of_kernel

if TYPE_CHECKING:
    import torch
    import triton


class Kernel:
    """A `triton.jit` function, compiled or interpreted, perhaps under `triton.autotune` and `triton.heuristics` in any
    order. An autotuner is taken for its configs and left out of launches; heuristics are asked at each of them.

    Raises `ForetuneError` for what is no Triton kernel.
    """

    def __init__(self, declared: Any) -> None:
        self.configs: Sequence[triton.Config] = ()  # the autotuner's
        self._heuristics: list[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = []  # the outermost first
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
    def is_interpreted(self) -> bool:
        """Whether Triton's interpreter runs it: then there are no binaries."""
        return not hasattr(self.jit, "params")

    @property
    def constants(self) -> frozenset[str]:
        """The parameters that are constants of a binary, compiled or interpreted."""
        parameters = inspect.signature(self.jit.fn).parameters.values()
        return frozenset(p.name for p in parameters if "constexpr" in str(p.annotation))

    @property
    def computed(self) -> frozenset[str]:
        """The parameters that heuristics give."""
        return frozenset(name for values in self._heuristics for name in values)

    def launch(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Any:
        """Launches once with these arguments, a config's knobs among them."""
        self._settle()
        return self.jit[grid](**self._given(arguments))

    def compile(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Any:
        """The binary that `launch` runs with such arguments, compiled for the active driver's target unless Triton's
        cache has it; None for an interpreted kernel. Tensors may be on torch's "meta" device, without memory."""
        self._settle()
        return self.jit.warmup(grid=grid, **self._given(arguments))

    def specialisation(self, arguments: Mapping[str, Any]) -> Hashable:
        """What decides on the binary beside the source, the launch options and the target: of each constant its value,
        and of every other parameter what Triton makes of it: its type, and for integers and addresses that it
        specialises whether they are 1 or multiples of 16."""
        if self.is_interpreted:
            return ()
        from triton.backends.compiler import BaseBackend
        from triton.runtime.jit import native_specialize_impl

        given = self.defaults | self._given(arguments)
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
        """See `hash_of_kernel`."""
        return hash_of_kernel(self.jit)

    def tuned_hash(self) -> str:
        """See `hash_of_tuned`."""
        return hash_of_tuned(self.jit, self.configs)

    def _given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with what heuristics add to them."""
        given = dict(arguments)
        for values in self._heuristics:
            for name, heuristic in values.items():
                given[name] = heuristic(given)
        return given

    def _settle(self) -> None:
        if not self.is_interpreted:
            from .launcher import settle

            settle(self.jit)


def _is_large(value: Any) -> bool:
    """Whether a tensor has 2 GiB or more, which AMD's binaries depend on."""
    return hasattr(value, "untyped_storage") and value.untyped_storage().nbytes() >= 2**31


def hash_of_tuned(kernel: Any, configs: Sequence[triton.Config]) -> str:
    """Return a hash of what an autotuner of a `triton.jit` kernel times: the kernel, and the `pre_hook` of each config.

    It is `hash_of_kernel` where no config has a hook. Where all configs share one, the hash does not depend on how many
    configs there are.
    """
    source = hash_of_kernel(kernel)
    hooks = [_hook_text(getattr(config, "pre_hook", None)) for config in configs]
    if not any(hooks):
        return source
    if len(set(hooks)) == 1:
        return digest_of([source, hooks[0]])
    return digest_of([source, *(f"{config} {hook}" for config, hook in zip(configs, hooks, strict=True))])


def _hook_text(hook: Any) -> str:
    """Return a hook's code, and the plain values that it captured, as text."""
    if hook is None:
        return ""
    if isinstance(hook, partial):
        return f"{_hook_text(hook.func)} {_plain_text(hook.args)} {_plain_text(sorted(hook.keywords.items()))}"
    function = getattr(hook, "__func__", hook)
    if not hasattr(function, "__code__"):  # an object that can be called
        function = type(hook).__call__
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    captured = [cell.cell_contents for cell in cells] + [getattr(function, "__defaults__", None)]
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', '')}.{name} {_plain_text(code)} {_plain_text(captured)}"


def _plain_text(value: Any) -> str:
    """Return the `repr` of plain values, and the type of all else, whose `repr` has an address."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {_plain_text(value.co_consts)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_plain_text, value))})"
    plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
    return repr(value) if plain else type(value).__qualname__


def poison(output: torch.Tensor) -> torch.Tensor:
    """Fill an output that no kernel has written yet with NaN, or where its dtype has none with the least integer.

    A kernel that writes too little is then found out. Returns the tensor.

    >>> import torch
    >>> poison(torch.zeros(2)).tolist(), poison(torch.zeros(1, dtype=torch.int8)).tolist()
    ([nan, nan], [-128])
    """
    import torch

    if output.is_floating_point():
        return output.fill_(float("nan"))
    return output.fill_(torch.iinfo(output.dtype).min)

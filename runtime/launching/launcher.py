"""`Launcher`: launches a kernel without Triton's own look at every argument, from the second time on.

`kernel[grid](...)` takes 10-14 us of Python for the kernels here, nearly all of it to find out which binary the
arguments need; a launch through this takes 3 (one 2026 core, Triton 3.6 and 3.9). It is legal because so little can
differ: no integer is specialised, so the binary depends on the constants, the tensors' dtypes, which of them are
absent, and that all of them start at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import triton
from triton import knobs
from triton.runtime import JITFunction, _allocation, driver

from ...datasets import ForetuneError
from .ahead import compile_ahead_of, is_only_compiling, make_launch_function_ahead, wait_for
from .triton_hash import wait_for_the_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ...datasets import KernelConfig

_ALIGNMENT = 16  # bytes; what Triton specialises pointers on


class Launcher:
    """Launches one `triton.jit` function, whose parameters are tensors first, then integers, then constants.

    Raises `ForetuneError` for a kernel with an integer that Triton would specialise.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.is_compiled = kernel, isinstance(kernel, JITFunction)  # not so in the interpreter
        if self.is_compiled:
            pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
            free = {p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize} - set(pointers)
            if free:
                raise ForetuneError(f"{kernel.__name__} must not specialise its integers, but does {sorted(free)}")
            settle(kernel)
        # By config and constants, and then by device and dtypes: the binary, and the values of the parameters after the
        # integers.
        self._known: dict[tuple[Any, ...], dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        integers: Sequence[int],
        config: KernelConfig | None = None,
        **constants: Any,
    ) -> None:
        """Launches on the current device and stream. `constants` and the knobs of `config` are all that the kernel
        needs besides, launch options included."""
        self.prepare(grid, integers, config, **constants)(tensors)

    def prepare(
        self, grid: tuple[int, int, int], integers: Sequence[int], config: KernelConfig | None = None, **constants: Any
    ) -> PreparedLaunch:
        """A launch as above, for who launches the same on other tensors again and again."""
        known = self._known.setdefault((config, *constants.values()), {})
        return PreparedLaunch(self, known, grid, tuple(integers), config, constants)

    @property
    def is_known(self) -> bool:
        """Whether a binary of the kernel is at hand, of some config."""
        return any(list(self._known.values()))  # a list, since other threads may add to it

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a launch on the current device can begin while the one before it ends, with `launch_pdl`."""
        if not self.is_compiled:
            return False
        target = driver.active.get_current_target()
        return target.backend == "cuda" and int(target.arch) >= 90

    def forget(self) -> None:
        """Goes through Triton's JIT again, as when nothing was launched yet."""
        for known in self._known.values():
            known.clear()


class PreparedLaunch:
    """A launch of which all but the tensors is known."""

    __slots__ = ("_config", "_constants", "_grid", "_integers", "_known", "_launcher")

    def __init__(
        self,
        launcher: Launcher,
        known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]],
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        config: KernelConfig | None,
        constants: dict[str, Any],
    ) -> None:
        self._launcher, self._known, self._grid, self._integers = launcher, known, grid, integers
        self._config, self._constants = config, constants

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launches on the current device and stream."""
        if not self._launcher.is_compiled:
            self._through_jit(tensors)
            return
        active = driver.active
        device = active.get_current_device()
        facts: list[Any] = [device]
        addresses: list[int | None] = []
        bits = 0
        for tensor in tensors:
            if tensor is None:
                facts.append(None)
                addresses.append(None)
            else:
                facts.append(tensor.dtype)
                address = tensor.data_ptr()
                addresses.append(address)
                bits |= address
        aligned = bits % _ALIGNMENT == 0
        key = tuple(facts)
        known = self._known.get(key)
        if is_only_compiling():
            if known is None:
                self._compile_ahead(key, tensors)
            return
        if known is not None and aligned:
            binary, rest = known
            if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
                binary[self._grid](*addresses, *self._integers, *rest)  # a profiler listens
                return
            stream, metadata = active.get_current_stream(device), binary.packed_metadata
            binary.run(
                *self._grid, stream, binary.function, metadata, None, None, None, *addresses, *self._integers, *rest
            )
            return
        if known is None:
            begin_compiling()
            make_launch_function_ahead(self._launcher.kernel, (*tensors, *self._integers), self._values())
            wait_for(self._job(key))
        binary = self._through_jit(tensors)
        # (AMD's binaries depend on more: on which tensors have less than 2 GiB.)
        if aligned and binary is not None and binary.metadata.target.backend == "cuda":
            given = len(tensors) + len(self._integers)
            values = self._values()
            self._known[key] = binary, tuple(values[name] for name in self._launcher.kernel.arg_names[given:])

    def _through_jit(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        return self._launcher.kernel[self._grid](*tensors, *self._integers, **self._values())

    def _compile_ahead(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]) -> None:
        kernel, device, given = self._launcher.kernel, key[0], (*tensors, *self._integers)
        kernel.device_caches[device]  # made here, or two threads would make one each and use one of them

        def compile_there() -> None:
            driver.active.set_current_device(device)
            begin_compiling()
            make_launch_function_ahead(kernel, given, self._values())
            binary = kernel.warmup(*given, grid=self._grid, **self._values())
            # Nothing is loaded into the GPU yet, which may just capture a graph: only what launches it, into Triton.
            driver.active.launcher_cls(binary.src, binary.metadata)

        compile_ahead_of(self._job(key), compile_there)

    def _job(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._launcher, self._config, *self._constants.values(), *key

    def _values(self) -> dict[str, Any]:
        """Of the config's knobs and the constants."""
        return self._constants if self._config is None else self._constants | self._config.to_json()


def launch_nothing(tensors: Sequence[torch.Tensor | None]) -> None:
    """What stands for a `PreparedLaunch` where there is nothing to do: a grid must not be empty."""


def begin_compiling() -> None:
    """Waits for Triton's hash, and does meanwhile what else the first compile in a process begins with: Triton imports
    Gluon when it looks at its first argument, 50 ms, and asks the assembler for its version, 10 ms."""
    with suppress(Exception):  # not public: where it moved, or fails, that is left to the compile
        from triton.backends.compiler import BaseBackend
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import native_specialize_impl

        native_specialize_impl(BaseBackend, 0, False, True, True)
        make_backend(driver.active.get_current_target()).hash()
    wait_for_the_hash()


def settle(kernel: JITFunction[Any]) -> None:
    """Gives the functions that a kernel calls their cache keys before the kernel gets its own.

    A key of Triton 3.6 has the constants that the called functions use, but only if those have their keys already
    (`_update_hash` merges the constants first and asks for the key then). So the key of one source would depend on
    which kernel a process compiled first, and a binary that another process compiled would not be found on the disk.
    """
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, JITFunction) and called is not kernel:  # which may call itself, with other constants
            settle(called)
    kernel.cache_key  # noqa: B018 - a property that computes it


# Device memory for the tensor descriptors that a kernel with TMA loads makes for itself.


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    import torch

    # From PyTorch's caching allocator: stream-ordered, and part of the pool while a CUDA graph is captured.
    return torch.empty(size, dtype=torch.int8, device="cuda")


def ensure_allocator() -> None:
    """Gives Triton an allocator in this context (it keeps one a thread) unless the caller has set one."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)


def with_scratch(
    prepared: Callable[[Sequence[torch.Tensor | None]], None],
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """The same launches, with an allocator in the context that each of them finds."""

    def launch(tensors: Sequence[torch.Tensor | None]) -> None:
        ensure_allocator()
        prepared(tensors)

    return launch

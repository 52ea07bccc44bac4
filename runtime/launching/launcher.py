"""`Launcher`: launch a kernel, from the second launch on without Triton's slow inspection of the arguments.

`kernel[grid](...)` takes 10-14 us of Python for the kernels here, nearly all of it to find the binary for the
arguments; a launch through this class takes 3 us (one core of 2026, Triton 3.6 and 3.9). This is correct because few
facts determine the binary: no integer is specialized, so it depends on the constants, the boxes of TMA descriptors, the
tensors' dtypes, which tensors are None, and on all of them starting at a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton import knobs
from triton.runtime import JITFunction, _allocation, driver

from ...datasets import ForetuneError
from .ahead import (
    compile_ahead_of,
    is_loading,
    is_only_compiling,
    load_binary,
    make_launch_function_ahead,
    wait_for,
    wait_for_the_hash,
)
from .repeated import LaunchFunction
from .source_hash import undisturbed

if TYPE_CHECKING:
    import torch

    from ...datasets import KernelConfig
    from .descriptors import Descriptor

_ALIGNMENT = 16  # bytes; the alignment that Triton specializes pointers on
#: The most launches whose arguments a `Launcher` keeps, about 2 KB each: more than a step of training usually has of
#: one kernel.
_MOST_KEPT = 8192


class Launcher:
    """Launches one `triton.jit` function.

    Its parameters are tensors (named `*_ptr`) first, then TMA descriptors (`*_desc`), then integers, then constants.

    Raises:
        ForetuneError: The kernel has an integer that Triton would specialize.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.is_compiled = kernel, isinstance(kernel, JITFunction)  # False in the interpreter
        if self.is_compiled:
            others = [name for name in kernel.arg_names if name.endswith(("_ptr", "_desc"))]
            free = {p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize} - set(others)
            if free:
                raise ForetuneError(
                    f"{kernel.__name__} must list its integers in do_not_specialize but lacks {sorted(free)}"
                )
            settle(kernel)
        # By config, constants and boxes, then by device and dtypes.
        self._known: dict[tuple[Any, ...], dict[tuple[Any, ...], _Known]] = {}
        # By prepared launch, device, dtypes and addresses: the entry of `_known`, and the arguments of its launch
        # function after the stream.
        self._kept: dict[tuple[Any, ...], tuple[_Known, tuple[Any, ...]]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        integers: Sequence[int],
        config: KernelConfig | None = None,
        descriptors: Sequence[Descriptor | None] = (),
        /,
        **constants: Any,
    ) -> None:
        """Launch on the current device and stream.

        Args:
            grid: The grid, which must not be empty.
            tensors: The kernel's tensors, None for those that are absent.
            integers: The kernel's integers.
            config: The config; its knobs are constants and launch options.
            descriptors: The kernel's TMA descriptors, None for those that are absent.
            constants: The other constants of the kernel, and launch options.
        """
        self.prepare(grid, integers, config, descriptors, **constants)(tensors)

    def prepare(
        self,
        grid: tuple[int, int, int],
        integers: Sequence[int],
        config: KernelConfig | None = None,
        descriptors: Sequence[Descriptor | None] = (),
        /,
        **constants: Any,
    ) -> PreparedLaunch:
        """Return a function that launches on given tensors; all other arguments of the kernel are fixed."""
        return PreparedLaunch(self, grid, tuple(integers), config, tuple(descriptors), constants)

    def compile(
        self,
        types: Sequence[torch.dtype | None],
        integers: int,
        config: KernelConfig,
        descriptors: Sequence[Descriptor | None] = (),
        /,
        **constants: Any,
    ) -> Any:
        """Compile the binary that launches on tensors of these dtypes run, for the active driver's target; return it.

        Args:
            types: The dtypes of the kernel's tensors, None for those that are absent.
            integers: The number of the kernel's integers, on whose values a binary does not depend.
            config: The config.
            descriptors: The kernel's TMA descriptors, None for those that are absent, of any sizes.
            constants: The other constants of the kernel, and launch options.
        """
        import torch

        tensors = [None if dtype is None else torch.empty(1, dtype=dtype, device="meta") for dtype in types]
        given = *types, *_described(descriptors, tensors), *[64] * integers
        return self.kernel.warmup(*given, grid=(1,), **constants, **config.to_json())

    @property
    def is_known(self) -> bool:
        """Whether the launcher has a binary of the kernel, with any config."""
        return any(list(self._known.values()))  # a copy, because other threads may add to it

    @property
    def has_dependent_launch(self) -> bool:
        """Whether the current device supports programmatic dependent launch (`launch_pdl`)."""
        if not self.is_compiled:
            return False
        target = driver.active.get_current_target()
        return target.backend == "cuda" and int(target.arch) >= 90

    def forget(self) -> None:
        """Forget all binaries, so that the next launch goes through Triton's JIT."""
        for known in self._known.values():
            known.clear()
        self._kept.clear()


class _Known(NamedTuple):
    """A binary, as launches that bypass Triton's JIT need it.

    Attributes:
        binary: Triton's compiled kernel.
        rest: The values of the kernel's parameters after the integers.
        function: The launch function of a binary with TMA descriptors, if its arguments can be kept.
    """

    binary: Any
    rest: tuple[Any, ...]
    function: LaunchFunction | None


class PreparedLaunch:
    """A launch with everything fixed except the tensors. Made by `Launcher.prepare`."""

    __slots__ = ("_config", "_constants", "_descriptors", "_fixed", "_grid", "_integers", "_known", "_launcher")

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, int, int],
        integers: tuple[int, ...],
        config: KernelConfig | None,
        descriptors: tuple[Descriptor | None, ...],
        constants: dict[str, Any],
    ) -> None:
        self._launcher, self._grid, self._integers = launcher, grid, integers
        self._config, self._descriptors, self._constants = config, descriptors, constants
        # What decides the binary, apart from the device and the tensors.
        self._fixed = (config, *constants.values(), *[one and (one.block, one.bits) for one in descriptors])
        self._known = launcher._known.setdefault(self._fixed, {})

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch on these tensors, on the current device and stream."""
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
            binary, rest, function = known
            if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
                boxes = _described(self._descriptors, tensors)
                binary[self._grid](*addresses, *boxes, *self._integers, *rest)  # for a profiler's hooks
                return
            stream = active.get_current_stream(device)
            if function is not None:
                place = self, *key, *addresses
                kept = self._launcher._kept.get(place)
                if kept is not None and kept[0] is known:
                    function.launch(*self._grid, stream, *kept[1])
                    return
            first = *self._grid, stream, binary.function, binary.packed_metadata, None, None, None
            given = *first, *addresses, *_described(self._descriptors, tensors), *self._integers, *rest
            if function is None:
                binary.run(*given)
            else:
                self._launch_and_keep(place, known, function, given)
            return
        if known is None:
            begin_compiling()
            make_launch_function_ahead(self._launcher.kernel, self._given(tensors), self._values())
            wait_for(self._job(key))
        binary = self._through_jit(tensors)
        if aligned:
            self._remember(key, binary)

    def _launch_and_keep(
        self, place: tuple[Any, ...], known: _Known, function: LaunchFunction, given: tuple[Any, ...]
    ) -> None:
        """Launch with the arguments `given` of `binary.run`, and keep what Triton makes of them under `place`."""
        found, kept = function.arguments(*given), self._launcher._kept
        if found[:4] == given[:4]:  # the grid and the stream
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[place] = known, found[4:]
        function.launch(*found)

    def _remember(self, key: tuple[Any, ...], binary: Any) -> None:
        """Keep a binary under `key`, so that later launches with equally aligned tensors bypass Triton's JIT."""
        # AMD's binaries also depend on which tensors have less than 2 GiB, so they are not remembered.
        if binary is not None and binary.metadata.target.backend == "cuda":
            given = len(key) - 1 + len(self._descriptors) + len(self._integers)
            values = self._values()
            rest = tuple(values[name] for name in self._launcher.kernel.arg_names[given:])
            function = LaunchFunction.of(binary) if any(self._descriptors) else None
            self._known[key] = _Known(binary, rest, function)

    def _through_jit(self, tensors: Sequence[torch.Tensor | None]) -> Any:
        """Launch on these tensors through Triton's JIT; return the binary, or None in the interpreter."""
        kernel, given, values = self._launcher.kernel[self._grid], self._given(tensors), self._values()
        return undisturbed(lambda: kernel(*given, **values))

    def _compile_ahead(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor | None]) -> None:
        """Start to compile the binary for these tensors in a thread; in `only_compiling(load=True)` also to load it."""
        kernel, device, given, loads = self._launcher.kernel, key[0], self._given(tensors), is_loading()
        kernel.device_caches[device]  # created here: two threads would create one each

        def compile_there() -> None:
            driver.active.set_current_device(device)
            begin_compiling()
            make_launch_function_ahead(kernel, given, self._values())
            binary = undisturbed(lambda: kernel.warmup(*given, grid=self._grid, **self._values()))
            if loads:
                load_binary(binary)
                self._remember(key, binary)
            else:  # only build Triton's launch function
                driver.active.launcher_cls(binary.src, binary.metadata)

        compile_ahead_of(("loaded", *self._job(key)) if loads else self._job(key), compile_there)

    def _job(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key of the job that compiles the launch with this `key`, for `compile_ahead_of` and `wait_for`."""
        return self._launcher, *self._fixed, *key

    def _given(self, tensors: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
        """Return the kernel's positional arguments: tensors, descriptors and integers."""
        return *tensors, *_described(self._descriptors, tensors), *self._integers

    def _values(self) -> dict[str, Any]:
        """Return the config's knobs and the constants as one dict by name."""
        return self._constants if self._config is None else self._constants | self._config.to_json()


def _described(descriptors: Sequence[Descriptor | None], tensors: Sequence[Any]) -> list[Any]:
    """Return Triton's descriptors of a launch on these tensors, None for those that are absent."""
    return [None if descriptor is None else descriptor.of(tensors) for descriptor in descriptors]


def launch_nothing(tensors: Sequence[torch.Tensor | None]) -> None:
    """Do nothing; replaces a `PreparedLaunch` whose grid would be empty, which CUDA refuses."""


def begin_compiling() -> None:
    """Do the work that otherwise the process's first compile would start with, and wait for the hash of Triton.

    Without it, Triton's first compile imports Gluon (50 ms) and asks the assembler for its version (10 ms).
    """
    with suppress(Exception):  # private functions: if they have moved or fail, the compile does this itself
        from triton.backends.compiler import BaseBackend
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import native_specialize_impl

        native_specialize_impl(BaseBackend, 0, False, True, True)
        make_backend(driver.active.get_current_target()).hash()
    wait_for_the_hash()


def settle(kernel: JITFunction[Any]) -> None:
    """Compute the cache keys of all functions that a kernel calls, before its own key is computed.

    In Triton 3.6, a kernel's key has the constants that the called functions use, but only if these functions have
    their keys already (`_update_hash` merges the constants before it computes the key). Otherwise the key would depend
    on which kernel the process compiled first, and a binary of another process would not be found on disk.
    """
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, JITFunction) and called is not kernel:  # a kernel may call itself
            settle(called)
    kernel.cache_key  # noqa: B018 - a property that computes it


# Device memory for the tensor descriptors that kernels create.


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Return `size` bytes of stream-ordered scratch memory from PyTorch (from the graph's pool during its capture)."""
    import torch

    return torch.empty(size, dtype=torch.int8, device="cuda")


def ensure_allocator() -> None:
    """Set Triton's allocator in this context (Triton keeps one for each thread), unless the caller has set one."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        triton.set_allocator(_scratch)

"""`Launcher`: launches a kernel without Triton's own look at every argument, from the second time on.

`kernel[grid](...)` takes 10-14 us of Python for the kernels here, nearly all of it to find out which binary the
arguments need; a launch through this takes 3 (one 2026 core, Triton 3.6 and 3.9). It is legal because so little can
differ: no integer is specialised, so the binary depends on the constants, the tensors' dtypes, which of them are
absent, and that all of them start at a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime import JITFunction, driver

from ...datasets import ForetuneError
from .ahead import compile_ahead_of, is_only_compiling, wait_for
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
        self._kernel, self._compiled = kernel, isinstance(kernel, JITFunction)  # not so in the interpreter
        if self._compiled:
            pointers = [name for name in kernel.arg_names if name.endswith("_ptr")]
            free = {p.name for p in kernel.params if not p.is_constexpr and not p.do_not_specialize} - set(pointers)
            if free:
                raise ForetuneError(f"{kernel.__name__} must not specialise its integers, but does {sorted(free)}")
            settle(kernel)
        # (binary, the values of the parameters after the integers) by all that decides on the binary
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

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
        if not self._compiled:
            self._through_jit(grid, tensors, integers, config, constants)
            return
        device = driver.active.get_current_device()
        key: list[Any] = [device, config, *constants.values()]
        addresses: list[int | None] = []
        bits = 0
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                addresses.append(None)
            else:
                key.append(tensor.dtype)
                address = tensor.data_ptr()
                addresses.append(address)
                bits |= address
        aligned = bits % _ALIGNMENT == 0
        known = self._known.get(tuple(key))
        if is_only_compiling():
            if known is None:
                self._compile_ahead(tuple(key), grid, tensors, integers, config, constants)
            return
        if known is not None and aligned:
            binary, rest = known
            if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
                binary[grid](*addresses, *integers, *rest)  # a profiler listens
                return
            stream, metadata = driver.active.get_current_stream(device), binary.packed_metadata
            binary.run(*grid, stream, binary.function, metadata, None, None, None, *addresses, *integers, *rest)
            return
        if known is None:
            wait_for_the_hash()
            wait_for((self, *key))
        binary = self._through_jit(grid, tensors, integers, config, constants)
        # (AMD's binaries depend on more: on which tensors have less than 2 GiB.)
        if aligned and binary is not None and binary.metadata.target.backend == "cuda":
            given = len(tensors) + len(integers)
            values = _all(config, constants)
            self._known[tuple(key)] = binary, tuple(values[name] for name in self._kernel.arg_names[given:])

    def _through_jit(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        integers: Sequence[int],
        config: KernelConfig | None,
        constants: dict[str, Any],
    ) -> Any:
        return self._kernel[grid](*tensors, *integers, **_all(config, constants))

    def _compile_ahead(
        self,
        key: tuple[Any, ...],
        grid: tuple[int, int, int],
        tensors: Sequence[torch.Tensor | None],
        integers: Sequence[int],
        config: KernelConfig | None,
        constants: dict[str, Any],
    ) -> None:
        device, given = key[0], (*tensors, *integers)
        self._kernel.device_caches[device]  # made here, or two threads would make one each and use one of them

        def compile_there() -> None:
            wait_for_the_hash()
            driver.active.set_current_device(device)
            binary = self._kernel.warmup(*given, grid=grid, **_all(config, constants))
            # Triton 3.6 has a C compiler make the function that launches it, 0.2 s: here, and so before it is needed.
            # Nothing is loaded into the GPU yet, which may just capture a graph.
            driver.active.launcher_cls(binary.src, binary.metadata)

        compile_ahead_of((self, *key), compile_there)

    def forget(self) -> None:
        """Goes through Triton's JIT again, as when nothing was launched yet."""
        self._known.clear()


def settle(kernel: JITFunction[Any]) -> None:
    """Gives the functions that a kernel calls their cache keys before the kernel gets its own.

    A key of Triton 3.6 has the constants that the called functions use, but only if those have their keys already
    (`_update_hash` merges the constants first and asks for the key then). So the key of one source would depend on
    which kernel a process compiled first, and a binary that another process compiled would not be found on the disk.
    """
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if isinstance(called, JITFunction):
            settle(called)
    kernel.cache_key  # noqa: B018 - a property that computes it


def _all(config: KernelConfig | None, constants: dict[str, Any]) -> dict[str, Any]:
    return constants if config is None else constants | config.to_json()

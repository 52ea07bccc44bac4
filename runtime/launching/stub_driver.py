"""`use_stub_driver`: use Triton without a GPU: kernels are compiled, but not launched.

While it is active, `triton.jit` and `triton.autotune` compile for a device that need not be in this machine, and refuse
configs that do not fit that device, as they would on it. Tests run on it, and worker processes compile on it ahead of a
process that has the GPU.

**The binaries are cache hits for the real driver.** Triton's key (`runtime/cache.py: get_cache_key`, the same in 3.6.0
and 3.9.0) has the installation, the kernel's source with its globals, the signature with constants and alignments,
ptxas and the target's arch, the options, and TRITON_* variables. The driver provides only the target, and the stub's is
that of the real driver, such as `GPUTarget("cuda", 90, 32)`. The caller must keep the rest equal: TRITON_CACHE_DIR and
the other TRITON_* variables, and the specialization of arguments (`warmup` accepts `torch.bfloat16` for a 16-byte
aligned tensor of that dtype).
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, ForetuneError
from ...datasets.errors import shown

if TYPE_CHECKING:
    import torch
    from triton.backends.compiler import GPUTarget

# Triton keeps compiled kernels in memory by device index. A kernel that the stub "loaded" launches nothing, so a real
# device must never find it: every stub has an index that no device has.
_indices = itertools.count(1 << 20)


def stubbed() -> StubDriver | None:
    """Return the active stub driver, or None.

    >>> stubbed() is None
    True
    """
    import triton

    active = triton.runtime.driver._active
    return active if isinstance(active, StubDriver) else None


def measures(tuner: Any = None) -> bool:
    """Return whether timed launches run on a GPU, so that their times may be kept and logged.

    Returns False under a stub driver, which launches nothing, and in Triton's interpreter, which runs on the CPU, but
    True for an autotuner with its own `do_bench`, whose times are trusted.

    Args:
        tuner: The autotuner that times; None for Foretune's own timer.

    >>> with use_stub_driver(DeviceSpec.named("h200")):
    ...     measures()
    False
    """
    if sys.modules.get("triton") is None or getattr(tuner, "_do_bench", None) is not None:
        return True
    from triton import knobs

    return stubbed() is None and not knobs.runtime.interpret


@contextmanager
def use_stub_driver(device: DeviceSpec) -> Iterator[StubDriver]:
    """Make Triton compile for a device and launch nothing until the end of the block; yield the driver.

    Tensors may be on the CPU. A config that needs more shared memory than the device has raises Triton's
    `OutOfResources` when it would be loaded, so not in `warmup`. Autotuners see 1 ms for every config, unless they are
    declared with `do_bench`; these times are not kept or logged (see `measures`).

    Args:
        device: The device; it need not be in this machine.

    Raises:
        ForetuneError: Triton has no compiler for the device's arch.

    >>> with use_stub_driver(DeviceSpec.named("h200")) as driver:
    ...     print(driver.get_current_target())
    GPUTarget(backend='cuda', arch=90, warp_size=32)
    """
    import triton

    # The private attribute, because `driver.active` would look for a GPU; None if nothing has looked for one yet.
    previous = triton.runtime.driver._active
    stub = StubDriver(device)
    triton.runtime.driver.set_active(stub)
    try:
        yield stub
    finally:
        triton.runtime.driver.set_active(previous)


def gpu_target(device: DeviceSpec) -> GPUTarget:
    """Return the target that Triton compiles for on a device.

    Raises `ForetuneError` for an arch without a compiler.

    >>> gpu_target(DeviceSpec.named("h200"))
    GPUTarget(backend='cuda', arch=90, warp_size=32)
    """
    from triton.backends.compiler import GPUTarget

    if not isinstance(device, DeviceSpec):
        raise ForetuneError(f"device must be a DeviceSpec but is {shown(device)}")
    if device.backend == "cuda" and (match := re.fullmatch(r"sm_(\d+)", device.arch)):
        return GPUTarget("cuda", int(match[1]), device.warp_size)
    if device.backend == "hip":
        return GPUTarget("hip", device.arch, device.warp_size)
    raise ForetuneError(f"arch must be like sm_90 on cuda or gfx942 on hip but got {device.arch!r} on {device.backend}")


@dataclass(frozen=True)
class StubLaunch:
    """A launch that a stub driver recorded instead of running it."""

    kernel: str
    grid: tuple[int, int, int]
    metadata: Any  # Triton's own: num_warps, shared, ...


class StubDriver:
    """A driver for Triton (`triton.backends.driver.DriverBase`) that pretends to be the GPU of a `DeviceSpec`.

    It lists launches in `launches` instead of running them.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device, self.target, self.index = device, gpu_target(device), next(_indices)
        self.utils = _Utils(device.smem_per_block_bytes)
        self.launches: list[StubLaunch] = []

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Return a launcher for a compiled kernel, which appends each launch to `launches` and does nothing else."""

        def launch(grid_x: int, grid_y: int, grid_z: int, *_: Any) -> None:
            self.launches.append(StubLaunch(metadata.name, (grid_x, grid_y, grid_z), metadata))

        return launch

    def get_current_target(self) -> GPUTarget:
        """Return the target (backend, architecture, warp size) of the device that the stub stands in for."""
        return self.target

    def get_current_device(self) -> int:
        """Return the stub's device index, which no real device has."""
        return self.index

    def set_current_device(self, device: int) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the CPU as torch's device, because the stub's tensors are there."""
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmarker that runs a call once and returns 1 ms for each quantile."""

        def one_shot(kernel_call: Callable[[], object], *, quantiles: Sequence[float], **how: Any) -> Any:
            if stubbed() is None:  # an autotuner that was first used in the block still has it
                import triton

                return triton.runtime.driver.active.get_benchmarker()(kernel_call, quantiles=quantiles, **how)
            kernel_call()
            return [1.0] * len(quantiles)

        return one_shot


class _Utils:
    """The part of the stub driver that answers Triton's device queries, and pretends to load binaries."""

    def __init__(self, smem_per_block_bytes: int) -> None:
        self._smem_per_block_bytes = smem_per_block_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the one device property that Triton needs: the most shared memory of a block, in bytes."""
        return {"max_shared_mem": self._smem_per_block_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        """Return (module, function, registers, spills, maximum threads per block) without loading the binary.

        The module is None, because Triton 3.8 and later unload a kernel's module with the driver that is active when
        the kernel is deleted.
        """
        return None, None, 0, 0, 1024


# The current device.


def device_here() -> DeviceSpec:
    """Return the spec of torch's current GPU, or of the active stub driver's device.

    Raises `ForetuneError` if there is neither.
    """
    if "triton" in sys.modules and (stub := stubbed()) is not None:
        return stub.device
    try:
        import torch
    except ImportError:
        return live(None)  # raises an error that names what is missing
    return live(torch.cuda.current_device() if torch.cuda.is_available() else None)


@lru_cache
def live(index: int | None) -> DeviceSpec:
    """Return the spec of the GPU with this index, or of the current GPU if None."""
    return DeviceSpec.live(index)


@lru_cache
def interpreter() -> DeviceSpec:
    """Return the device that stands for Triton's interpreter: an H200 with 4 SMs, and so several tiles per program."""
    return replace(DeviceSpec.named("h200"), name="Triton's interpreter", backend="cpu", sm_count=4)

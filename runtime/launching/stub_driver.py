"""`use_stub_driver`: Triton's whole path without a GPU, short of the launch.

With it active, `triton.jit` and `triton.autotune` compile for a device that need not be here, and refuse what
does not fit that device, exactly as they would beside it. That is how CI tests the run time, and how worker
processes compile ahead of a process that has the GPU.

**The binaries are cache hits for the real driver.** Triton's key (`runtime/cache.py: get_cache_key`, the same in
3.6.0 and 3.9.0) is made of the installation, the kernel's source with its globals, the signature with constants and
alignments, ptxas and the target's arch, the options, and TRITON_* variables. Of these the driver says only
the target, which is `GPUTarget("cuda", 90, 32)` here and there. So the caller keeps the rest alike: the same
TRITON_CACHE_DIR and TRITON_* environment, and arguments that specialise alike (`warmup` takes `torch.bfloat16` for a
16-byte aligned tensor of that type).
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

# Triton keeps compiled kernels by device index, in memory. A kernel that the stub "loaded" never launches
# anything, so a real device must never find it there: every stub has an index that no device has.
_indices = itertools.count(1 << 20)


def stubbed() -> StubDriver | None:
    """The stub that is active now, or None.

    >>> stubbed() is None
    True
    """
    import triton

    active = triton.runtime.driver._active
    return active if isinstance(active, StubDriver) else None


def measures(tuner: Any = None) -> bool:
    """Return whether what is timed now runs on a GPU, so that its time may be kept and logged.

    A stub driver launches nothing, and Triton's interpreter runs on the CPU. What an autotuner's own `do_bench` returns
    is its author's word.

    Args:
        tuner: The autotuner that times; None for a timer of ours.

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
    """Makes Triton compile for `device` and launch nothing, until the end of the block.

    Tensors may be on the CPU. A config that needs more shared memory than the device has raises Triton's
    `OutOfResources` when it would be loaded, so not in `warmup`. All configs take 1 ms, unless an autotuner was
    declared with `do_bench`; no such time is kept or logged (see `measures`).

    Raises `ForetuneError` for a device whose arch Triton has no compiler for.

    >>> with use_stub_driver(DeviceSpec.named("h200")) as driver:
    ...     print(driver.get_current_target())
    GPUTarget(backend='cuda', arch=90, warp_size=32)
    """
    import triton

    # Read as an attribute because `driver.active` would look for a GPU; None means that nobody has looked yet.
    previous = triton.runtime.driver._active
    stub = StubDriver(device)
    triton.runtime.driver.set_active(stub)
    try:
        yield stub
    finally:
        triton.runtime.driver.set_active(previous)


def gpu_target(device: DeviceSpec) -> GPUTarget:
    """What Triton compiles for on this device.

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
    """A launch that would have happened."""

    kernel: str
    grid: tuple[int, int, int]
    metadata: Any  # Triton's own: num_warps, shared, ...


class StubDriver:
    """What Triton asks of a driver (`triton.backends.driver.DriverBase`), answered from a `DeviceSpec`."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device, self.target, self.index = device, gpu_target(device), next(_indices)
        self.utils = _Utils(device.smem_per_block_bytes)
        self.launches: list[StubLaunch] = []

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """The launcher of a compiled kernel: it takes note, and that is all."""

        def launch(grid_x: int, grid_y: int, grid_z: int, *_: Any) -> None:
            self.launches.append(StubLaunch(metadata.name, (grid_x, grid_y, grid_z), metadata))

        return launch

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Callable[..., Any]:
        def one_shot(kernel_call: Callable[[], object], *, quantiles: Sequence[float], **how: Any) -> Any:
            if stubbed() is None:  # an autotuner that was first used in the block has kept it
                import triton

                return triton.runtime.driver.active.get_benchmarker()(kernel_call, quantiles=quantiles, **how)
            kernel_call()
            return [1.0] * len(quantiles)

        return one_shot


class _Utils:
    """The part of a driver that deals with binaries."""

    def __init__(self, smem_per_block_bytes: int) -> None:
        self._smem_per_block_bytes = smem_per_block_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._smem_per_block_bytes}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        """(module, function, registers, spills, largest block in threads). There is no module: Triton 3.8 and
        later unload one when the kernel goes, by whatever driver is active then."""
        return None, None, 0, 0, 1024


# The device that launches run on.


def device_here() -> DeviceSpec:
    """Return the spec of torch's current GPU, or of the one that a stub driver stands in for.

    Raises `ForetuneError` where there is neither.
    """
    if "triton" in sys.modules and (stub := stubbed()) is not None:
        return stub.device
    return live(_current_index())


def _current_index() -> int | None:
    try:
        import torch
    except ImportError:
        return None  # `DeviceSpec.live` says what is missing
    return torch.cuda.current_device() if torch.cuda.is_available() else None


@lru_cache
def live(index: int | None) -> DeviceSpec:
    """Return the spec of a live GPU, or of the current one."""
    return DeviceSpec.live(index)


@lru_cache
def interpreter() -> DeviceSpec:
    """Return what Triton's interpreter stands in for: an H200 of few SMs, so that programs take several tiles."""
    return replace(DeviceSpec.named("h200"), name="Triton's interpreter", backend="cpu", sm_count=4)

"""`sm_partition`: some of a GPU's SMs as a device of its own.

It lets code that depends on the device be trained and tested on several devices with one card. A CUDA green context
runs only on its own SMs (64 of an H200's 132 take 2.0 times as long for a matrix product, 2026-11), but shares the
memory, the L2 and the clocks of the full card.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

from ...datasets import DeviceSpec, ForetuneError

#: A context manager that sets a stream on at least this many SMs of the current device, and yields how many it got.
Carve = Callable[[int], AbstractContextManager[int]]

_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_RESOURCE_WORDS = 64  # a CUdevResource is 144 bytes in CUDA 12.4 to 13.3
_SM_COUNT_WORD = 24  # ... whose union, 96 bytes in, starts with smCount


@contextmanager
def sm_partition(sms: int, device: DeviceSpec | None = None, *, carve: Carve | None = None) -> Iterator[DeviceSpec]:
    """Run the work queued in the block on some SMs of the current device; yield the partition's spec.

    Create inputs and timers and launch kernels inside of the block. Only work on the current stream is confined.

    Args:
        sms: The number of SMs. The driver may give more (on an H100 and later, the next multiple of 8); the yielded
            spec has the actual number.
        device: The spec of the current device; queried if None.
        carve: Makes a partition of this many SMs for a `with` block; a green context if None. Tests replace it.

    Raises:
        ForetuneError: The device does not have so many SMs, or there are no green contexts.

    >>> from contextlib import nullcontext
    >>> with sm_partition(60, DeviceSpec.named("h200"), carve=lambda sms: nullcontext(sms + -sms % 8)) as device:
    ...     device.name, device.sm_count
    ('NVIDIA H200 (64 SMs)', 64)
    """
    device = DeviceSpec.live() if device is None else DeviceSpec.find(device)
    device.with_sms(sms)  # raises for an impossible number
    with (carve or _green_context)(sms) as given:
        yield device.with_sms(given)


@contextmanager
def _green_context(sms: int) -> Iterator[int]:
    """Make a green context's stream the current one for the block; yield its number of SMs."""
    import torch

    outside = torch.cuda.current_stream()
    _, stream = _made(torch.cuda.current_device(), sms)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield _granted(stream.cuda_stream, ctypes.CDLL("libcuda.so.1"))
    finally:
        outside.wait_stream(stream)


@cache
def _made(index: int, sms: int) -> tuple[Any, Any]:
    """Return a green context with `sms` SMs of a device, and its stream; both live until the process ends.

    PyTorch's allocator keeps memory by stream, so a deleted stream's handle must not be used again.
    """
    try:
        from torch.cuda.green_contexts import SUPPORTED, GreenContext
    except ImportError:
        SUPPORTED = False
    if not SUPPORTED:
        raise ForetuneError("partitions need green contexts: PyTorch 2.11 or later with CUDA")
    try:
        context: Any = GreenContext.create(num_sms=sms, device_id=index)
        return context, context.Stream()
    except RuntimeError as error:
        raise ForetuneError(f"no partition of {sms} SMs: {str(error).splitlines()[0]}") from error


def _granted(stream: int, driver: Any) -> int:
    """Return the number of SMs of a green context's stream, as the driver (libcuda) reports it."""
    context, resource = ctypes.c_void_p(), (ctypes.c_uint32 * _RESOURCE_WORDS)()
    for function, arguments in (
        ("cuStreamGetGreenCtx", (ctypes.c_void_p(stream), ctypes.byref(context))),
        ("cuGreenCtxGetDevResource", (context, resource, _SM_RESOURCE)),
    ):
        if failure := getattr(driver, function)(*arguments):
            raise ForetuneError(f"{function} fails with error {failure}; it needs a driver of CUDA 12.4 or later")
    return int(resource[_SM_COUNT_WORD])

"""`sm_partition`: some of a GPU's SMs as a device of its own.

What depends on a device can so be trained and tested on several of them with one card: a CUDA green context runs
only on its own SMs (64 of an H200's 132 take 2.0x as long for a matrix product, 2026-11), while the memory, the L2
and the clocks stay the whole card's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

from ...datasets import DeviceSpec, ForetuneError

#: Makes the current stream one that runs on at least so many SMs of the current device, and says on how many.
Carve = Callable[[int], AbstractContextManager[int]]

_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_RESOURCE_WORDS = 64  # a CUdevResource is 144 bytes in CUDA 12.4 to 13.3
_SM_COUNT_WORD = 24  # ... whose union, 96 bytes in, starts with smCount


@contextmanager
def sm_partition(sms: int, device: DeviceSpec | None = None, *, carve: Carve | None = None) -> Iterator[DeviceSpec]:
    """Work queued inside runs on `sms` SMs of `device`, the current one; yields their spec (`DeviceSpec.with_sms`).

    The driver may give more SMs than asked for (on an H100 and later, the next multiple of 8): the spec says how many
    it gave. Inputs, timers and launches belong inside, and only work on the current stream is confined. `carve` is
    what takes the SMs: tests put one of their own in its place.

    Raises `ForetuneError` for a number of SMs that the device does not have, and where there are no green contexts.

    >>> from contextlib import nullcontext
    >>> with sm_partition(60, DeviceSpec.named("h200"), carve=lambda sms: nullcontext(sms + -sms % 8)) as device:
    ...     device.name, device.sm_count
    ('NVIDIA H200 (64 SMs)', 64)
    """
    device = DeviceSpec.live() if device is None else DeviceSpec.find(device)
    device.with_sms(sms)  # which refuses what it does not have
    with (carve or _green_context)(sms) as given:
        yield device.with_sms(given)


@contextmanager
def _green_context(sms: int) -> Iterator[int]:
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
    """A green context and its stream. Kept for good: PyTorch's allocator keeps memory by stream, and must not meet
    the handle of one that is gone."""
    try:
        from torch.cuda.green_contexts import SUPPORTED, GreenContext
    except ImportError:
        SUPPORTED = False
    if not SUPPORTED:
        raise ForetuneError("there are no partitions here: they are green contexts of PyTorch 2.11 or later with CUDA")
    try:
        context: Any = GreenContext.create(num_sms=sms, device_id=index)
        return context, context.Stream()
    except RuntimeError as error:
        raise ForetuneError(f"no partition of {sms} SMs: {str(error).splitlines()[0]}") from error


def _granted(stream: int, driver: Any) -> int:
    """On how many SMs a green context's stream runs, as the driver (libcuda) tells."""
    context, resource = ctypes.c_void_p(), (ctypes.c_uint32 * _RESOURCE_WORDS)()
    for function, arguments in (
        ("cuStreamGetGreenCtx", (ctypes.c_void_p(stream), ctypes.byref(context))),
        ("cuGreenCtxGetDevResource", (context, resource, _SM_RESOURCE)),
    ):
        if failure := getattr(driver, function)(*arguments):
            raise ForetuneError(f"{function} fails with error {failure}: is the driver older than CUDA 12.4?")
    return int(resource[_SM_COUNT_WORD])

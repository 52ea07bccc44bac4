"""Where the tensors of a call are, and what else of them decides on it: what every op asks before it chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import JITFunction

from ..datasets import ForetuneError
from ..runtime import stubbed
from ..runtime.choice import interpreter, live

if TYPE_CHECKING:
    from ..datasets import DeviceSpec


def place_of(name: str, tensor: Any) -> int:
    """The index of the GPU that a tensor is on; off the GPU that of a stub driver, or -1.

    Raises `ForetuneError`, which calls it `name`, for what is no tensor.

    >>> place_of("x", torch.zeros(2))
    -1
    """
    if not isinstance(tensor, torch.Tensor):
        raise ForetuneError(f"{name} must be a tensor but is a {type(tensor).__name__}")
    place = tensor.get_device()
    if place < 0:
        stub = stubbed()
        place = -1 if stub is None else stub.index
    return place


def device_at(name: str, place: int, kernel: Any) -> DeviceSpec:
    """The device at a place of `place_of`, where this `triton.jit` kernel is to run.

    Raises `ForetuneError`, which calls the tensor `name`, for one on the CPU, except in Triton's interpreter.
    """
    stub = stubbed()
    if stub is not None and place == stub.index:
        return stub.device
    if place >= 0:
        return live(place)
    if isinstance(kernel, JITFunction):
        raise ForetuneError(
            f"{name} must be on a GPU but is on the CPU (that is for debugging, with TRITON_INTERPRET=1)"
        )
    return interpreter()


def facts_of(tensor: Any) -> Any:
    """All of a tensor that a call's being in order depends on, as one value; of something else its type, or None.

    >>> facts_of(torch.zeros(2, 3)) == facts_of(torch.ones(2, 3)), facts_of(None)
    (True, None)
    """
    if not isinstance(tensor, torch.Tensor):
        return None if tensor is None else type(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()

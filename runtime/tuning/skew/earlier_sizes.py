"""`EarlierSizes`: how the work of earlier calls was split, as far as that has come to the host. Nobody waits for it."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....datasets import ForetuneError
from ....datasets.errors import check_integer, check_word, shown
from ...warn import warn_once
from .skew import Skew, sorted_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Once the skew is known, a copy is begun with every so many-th call: layers do not change that fast, and with every
#: eighth a hot call took 9.6 us more of the host (H200, 2026-11, tests/kernels/test_layer_on_gpu.py).
EVERY = 32
#: So many copies make a skew: one call alone has luck in it, and a choice made by that is half as good.
COPIES = 4
#: Skews that layers go by; when there are more, all are forgotten.
_MOST_IN_USE = 256
_in_use: list[Skew] = []


class EarlierSizes:
    """The sizes that a ragged dimension had in earlier calls of one layer on one device, to sharpen the next choice.

    `note` queues a copy of a call's sizes to the host behind the kernels that are queued, now and then, and looks
    whether the last one has arrived; it never waits, and does nothing while a CUDA graph is captured. `COPIES` of them,
    largest size to largest size, make the `skew`, which is None until then. Sizes that are on the CPU are taken at
    once. Threads may share it. Copies and unpickled objects start with no known sizes, so that a module that holds one
    can be copied and pickled.

    `dim` is the dimension that the sizes split; `every` how many calls there are to a copy, once the skew is known.

    Raises `ForetuneError` for what these cannot be.

    >>> earlier = EarlierSizes("rows")
    >>> earlier.skew is None, earlier.key
    (True, 0)
    >>> for sizes in ([0, 37, 2, 1], [35, 4, 0, 1], [1, 2, 36, 1], [4, 0, 0, 36]):
    ...     earlier.note(torch.tensor(sizes))
    >>> earlier.skew.sizes(800)
    (720, 60, 15, 5)
    """

    def __init__(self, dim: str, *, every: int = EVERY) -> None:
        self.dim, self.every = check_word("the ragged dimension", dim), check_integer("every", every, 1)
        self.skew: Skew | None = None  # what came last, and a new object only where it has changed
        self._until_next = 0  # calls until a copy is begun
        self._transfer: _Transfer | None = None
        self._under_way = False
        self._sum: NDArray[np.int64] | None = None  # of the copies since the last skew, each sorted
        self._copies = 0
        self._busy = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), every=self.every), (self.dim,)

    def __repr__(self) -> str:
        return f"<EarlierSizes of {self.dim}: {'unknown' if self.skew is None else self.skew}>"

    @property
    def key(self) -> int:
        """A number of 31 bits that is another where the skew is another, 0 while it is unknown: what an autotuned
        kernel takes as an argument of its key, so that its pruner is asked anew."""
        skew = self.skew
        return 0 if skew is None else hash(skew.steps) & 0x7FFFFFFF | 1

    def note(self, sizes: torch.Tensor) -> None:
        """Notes the sizes of a call, (segments,) integers, from the thread and on the stream that launch it.

        Raises `ForetuneError` for what is no such tensor; any other trouble is a warning, and the sizes unknown.
        """
        if not self._under_way and self._until_next > 0:  # nearly every call; threads may miscount, and no harm done
            self._until_next -= 1
            return
        if not isinstance(sizes, torch.Tensor) or sizes.dim() != 1 or sizes.is_floating_point():
            raise ForetuneError(f"sizes must be a tensor of integers with one dimension but are {shown(sizes)}")
        if not self._busy.acquire(blocking=False):  # another thread is at it
            return
        try:
            self._go_on(sizes)
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            self._until_next, self._under_way, self.skew = 1 << 62, False, None
            warn_once(f"sizes of earlier calls stay unknown ({type(error).__name__}: {error})")
        finally:
            self._busy.release()

    def _go_on(self, sizes: torch.Tensor) -> None:
        if not sizes.is_cuda:
            self._take(sizes.numpy())
            self._until_next = self._pause()
            return
        if torch.cuda.is_current_stream_capturing():  # even to ask whether a copy has arrived would spoil the capture
            return
        if self._under_way:
            assert self._transfer is not None
            self._until_next -= 1
            if not self._transfer.arrived():
                return
            self._take(self._transfer.there)
            self._under_way = False
        if self._until_next <= 0:
            if self._transfer is None or not self._transfer.takes(sizes):
                self._transfer = _Transfer(sizes)
            self._transfer.begin(sizes)
            self._under_way, self._until_next = True, self._pause()

    def _pause(self) -> int:
        """Calls that begin no copy after one that does."""
        return 0 if self.skew is None else self.every - 1

    def _take(self, sizes: NDArray[Any]) -> None:
        descending = sorted_sizes(sizes)
        if self._sum is None or len(self._sum) != len(descending):
            self._sum, self._copies = np.zeros(len(descending), dtype=np.int64), 0
        self._sum += descending
        self._copies += 1
        if self._copies == COPIES:
            skew, self._sum = Skew.of(self.dim, self._sum), None
            if skew is not None and (self.skew is None or not skew.near(self.skew)):
                self.skew = _shared(skew)


def _shared(skew: Skew) -> Skew:
    """One that is near and that some layer goes by, else this one: what is predicted for one layer serves others."""
    for known in _in_use:
        if known.near(skew):
            return known
    if len(_in_use) >= _MOST_IN_USE:
        _in_use.clear()
    _in_use.append(skew)
    return skew


class _Transfer:
    """Copies tensors of one kind to the host, one at a time: pinned memory, and the event of its being written. One
    such memory is enough, because it is read before the next copy is begun."""

    def __init__(self, like: torch.Tensor) -> None:
        self._kind = like.shape, like.dtype, like.device
        self._memory = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self._arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.there = self._memory.numpy()

    def takes(self, tensor: torch.Tensor) -> bool:
        return self._kind == (tensor.shape, tensor.dtype, tensor.device)

    def begin(self, tensor: torch.Tensor) -> None:
        """On the current stream of the tensor's device, so that nothing can change the tensor before it is copied."""
        self._memory.copy_(tensor, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        return bool(self._arrived.query())

"""`L2Flush`: evicts everything from a GPU's L2, so that the next launch finds it cold."""

from __future__ import annotations

from typing import Any

from ..warn import warn_once

#: Enough that nothing of the last launch is left in the L2; a bigger buffer only costs time.
_FLUSH_L2_SIZES = 2
#: Integers of the smallest buffer that is tried: 64 KiB.
_SMALLEST = 1 << 14


class L2Flush:
    """Queues the eviction on the current stream of one CUDA or HIP device.

    `flush_bytes` is how much is written to evict the L2: twice its size if left out. With `clean` it is read instead,
    and no launch finds lines that must go to memory before its own can come. With `may_shrink` the buffer is as large
    as fits where so much memory is not free; `is_whole` says whether it is as large as it should be.
    """

    def __init__(
        self, device: Any, flush_bytes: int | None = None, *, clean: bool = False, may_shrink: bool = False
    ) -> None:
        import torch

        if flush_bytes is None:
            flush_bytes = _FLUSH_L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer, self.is_whole = _allocated(max(flush_bytes // 4, 1), device, may_shrink=may_shrink)
        self._clean = clean

    def __call__(self) -> None:
        if self._clean:
            self._buffer.sum()
        else:
            self._buffer.fill_(0x5EED)


def _allocated(count: int, device: Any, *, may_shrink: bool) -> tuple[Any, bool]:
    """A buffer of so many 32-bit integers, or of as many as fit (halved until they do), and whether it is all of them.

    Raises torch's `OutOfMemoryError` where it may not shrink, and where not even `_SMALLEST` fit.
    """
    import torch

    wanted = count
    while True:
        try:
            # Written, not read, and not with zeros: those may take a short cut (compression) on the way to memory.
            buffer = torch.full((count,), 0x5EED, dtype=torch.int32, device=device)
        except torch.cuda.OutOfMemoryError:
            if not may_shrink or count <= _SMALLEST:
                raise
            count //= 2
            continue
        if count < wanted:
            what = f"{4 * wanted >> 20} MiB of GPU memory to clear the L2 with are not free"
            warn_once(what, f": {4 * count >> 10} KiB are used, and kernels may find some of their inputs in the L2")
        return buffer, count == wanted

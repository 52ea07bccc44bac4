"""`L2Flush`: evicts everything from a GPU's L2, so that the next launch finds it cold."""

from __future__ import annotations

from typing import Any

#: Enough that nothing of the last launch is left in the L2; a bigger buffer only costs time.
_FLUSH_L2_SIZES = 2


class L2Flush:
    """Queues the eviction on the current stream of one CUDA or HIP device.

    `flush_bytes` is how much is written to evict the L2: twice its size if left out. With `clean` it is read instead,
    and no launch finds lines that must go to memory before its own can come.
    """

    def __init__(self, device: Any, flush_bytes: int | None = None, *, clean: bool = False) -> None:
        import torch

        if flush_bytes is None:
            flush_bytes = _FLUSH_L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
        # Written, not read, and not with zeros: those may take a short cut (compression) on the way to memory.
        self._buffer = torch.full((max(flush_bytes // 4, 1),), 0x5EED, dtype=torch.int32, device=device)
        self._clean = clean

    def __call__(self) -> None:
        if self._clean:
            self._buffer.sum()
        else:
            self._buffer.fill_(0x5EED)

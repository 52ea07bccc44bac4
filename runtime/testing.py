"""`use_stub_device`: try out and test code that uses Foretune on a machine without a GPU.

This module is `foretune.testing`; `from foretune import testing` imports it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ..datasets import DeviceSpec
from .launching.stub_driver import StubDriver, use_stub_driver

#: The stand-ins that are not closed, so that one stays active whose caller keeps no reference to it.
_active: set[StubDevice] = set()


class StubDevice(ExitStack):
    """A stand-in for a GPU, which is active until `close` is called or the `with` block ends.

    At its end, the driver that Triton used before is restored. Further calls of `close` do nothing.

    Attributes:
        device: The GPU that it stands in for.
        driver: The driver that Triton uses in the meantime. Its `launches` lists every launch, none of which is run.
    """

    def __init__(self, device: DeviceSpec) -> None:
        super().__init__()
        self.device = device
        self.driver: StubDriver = self.enter_context(use_stub_driver(device))
        _active.add(self)
        self.callback(_active.discard, self)

    def __enter__(self) -> StubDriver:  # type: ignore[override]
        """Use the stub in place of a GPU, and return its driver."""
        return self.driver


def use_stub_device(device: DeviceSpec | Path | str) -> StubDevice:
    """Make Triton compile for a GPU that need not be present, and launch nothing.

    `triton.jit` and `triton.autotune` then work without a GPU: they compile, refuse what does not fit the GPU, and let
    Foretune prune the configs. Kernels do not run, so tensors, which may be on the CPU, keep their contents. Each
    config seems to take 1 ms, so a search may time more or fewer configs than on a GPU. These times are not stored or
    logged.

    The stand-in is active from this call on. In a `with` statement it is active until the block ends, else until
    `close` is called on the returned object, or the process ends. It is active in the whole process, like Triton's own
    driver.

    Args:
        device: The name of a shipped device, such as "h200", a spec, or a JSON file as `foretune device` writes it.

    Returns:
        The stand-in; in a `with` statement its driver.

    Raises:
        ForetuneError: There is no device of that name, or Triton has no compiler for its arch.

    >>> import torch, triton, triton.language as tl
    >>> @triton.jit
    ... def double(x_ptr, n, BLOCK: tl.constexpr):
    ...     at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ...     tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)
    >>> with use_stub_device("h200") as driver:
    ...     compiled = double[(8,)](torch.ones(1024), 1024, BLOCK=128)
    >>> driver.launches[0].kernel, driver.launches[0].grid, compiled.metadata.target.arch
    ('double', (8, 1, 1), 90)
    """
    return StubDevice(DeviceSpec.find(device))

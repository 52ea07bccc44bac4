"""`IsolatedTimer`: time configs in a separate process, so that an illegal memory access does not end this one.

An illegal access breaks the CUDA context of its process for good: no later launch works, and catching the exception
does not help. So the launch is repeated in a spawned process, which imports the kernel's module, gets the same
arguments, and times. Each tuning pays for one start (torch, Triton, the module and a CUDA context), and for another one
after each config that ends the process.

Limits: The kernel must be importable by module and name, and a script needs the guard that `multiprocessing` requires
(`if __name__ == "__main__"`). Arguments must be tensors or picklable. Tensors keep shape, strides, offset and dtype.
Values are copied for integer tensors, and for float tensors of at most `_MOST_BYTES`; larger float tensors are filled
with random numbers, so a kernel whose time depends on their values is timed on other data. The device's memory must
hold the tensors twice.
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, ForetuneError
from ...datasets.errors import abridged
from ..launching.stub_driver import stubbed, use_stub_driver
from .launches import autotuner_of

if TYPE_CHECKING:
    import torch
    import triton

    from .one_launch import OneLaunch

#: The largest float tensor whose values are copied, in bytes.
_MOST_BYTES = 1 << 20
#: Time limits in seconds: the process counts as stuck after the first, a config as hanging after the second.
START_S, CONFIG_S = 120.0, 60.0
#: Seconds that a process gets to end after its pipe is closed.
_ENDING_S = 5.0


class CrashError(ForetuneError):
    """A config ended the process that timed it, or hung."""


class NoIsolationError(ForetuneError):
    """No separate process can repeat this launch; the message says why."""


class IsolatedTimer:
    """Times the configs of one launch in a separate process; a context manager that ends the process.

    The process is started at the first use, and again after each config that broke it.
    """

    def __init__(self, tuner: Any, call: OneLaunch) -> None:
        self._tuner, self._call = tuner, call
        self._connection: Connection | None = None
        self._process: Any = None
        self._refusal: str | None = None  # why no process can be started, once that is known

    def __enter__(self) -> IsolatedTimer:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def time_us(self, config: triton.Config) -> float:
        """Return the time of a config in microseconds, as `OneLaunch.time_us` does.

        Raises:
            CrashError: The config ended the process, or hung.
            NoIsolationError: No process can repeat the launch.
        """
        if self._refusal is not None:
            raise NoIsolationError(self._refusal)
        if config not in self._tuner.configs:
            raise NoIsolationError("a config that a prune callback made cannot be sent to another process")
        connection = self._started()
        connection.send(self._tuner.configs.index(config))
        if not connection.poll(CONFIG_S):
            self._process.kill()
            self._end()
            raise CrashError(f"it did not end within {CONFIG_S:.0f} s")
        try:
            result, is_broken = connection.recv()
        except (EOFError, OSError):
            code = self._end()
            raise CrashError(f"it ended the process that timed it (exit code {code})") from None
        if is_broken:
            self._end()
            raise CrashError(str(result))
        if isinstance(result, Exception):
            raise result
        return float(result)

    def _started(self) -> Connection:
        """Return the connection to the process, which is started if necessary."""
        if self._connection is not None:
            return self._connection
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        try:
            request = _Request.of(self._tuner, self._call)
            process = context.Process(target=_serve, args=(theirs, request), daemon=True)
            process.start()
        except Exception as error:  # noqa: BLE001 - pickling and the system may raise anything
            self._refusal = f"its launch cannot be repeated in another process ({type(error).__name__}: {error})"
            raise NoIsolationError(self._refusal) from None
        finally:
            theirs.close()
        self._process = process
        self._connection = ours
        try:
            trouble = ours.recv() if ours.poll(START_S) else f"it was not ready within {START_S:.0f} s"
        except (EOFError, OSError):
            trouble = "it ended at once"
        if trouble is not None:
            self._end()
            self._refusal = f"the process that should time its configs did not start ({trouble})"
            raise NoIsolationError(self._refusal)
        return ours

    def _end(self) -> int | None:
        """End the process and return its exit code; None if it was not running."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is None:
            return None
        self._process.join(_ENDING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        code: int | None = self._process.exitcode
        self._process = None
        return code


@dataclass(frozen=True)
class _Request:
    """A launch in a form that can be sent to another process."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grids: tuple[Any, ...]  # one for each config
    stub: DeviceSpec | None
    device_index: int | None

    @classmethod
    def of(cls, tuner: Any, call: OneLaunch) -> _Request:
        """Return the request to measure the configs of `tuner`, an autotuner, for a launch."""
        import torch

        stub, index = stubbed(), torch.cuda.current_device() if torch.cuda.is_available() else None
        grid = call.kwargs["grid"]
        grids = [grid(call.everything(config)) if callable(grid) else grid for config in tuner.configs]
        kwargs = {name: _packed(value) for name, value in call.kwargs.items() if name != "grid"}
        function = tuner.base_fn
        args, device = tuple(map(_packed, call.args)), None if stub is None else stub.device
        return cls(function.__module__, function.__qualname__, args, kwargs, tuple(grids), device, index)


@dataclass(frozen=True)
class _Tensor:
    """A tensor's layout and, if its values are integers or few, its values, on the CPU."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str
    values: bytes | None  # the bytes of the whole storage
    elements: int  # number in the storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        """Return the picklable form of a tensor."""
        import torch

        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        keep = not is_float or flat.nbytes <= _MOST_BYTES
        values = flat.cpu().view(torch.uint8).numpy().tobytes() if keep else None
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            str(tensor.device),
            values,
            flat.numel(),
        )

    def tensor(self) -> torch.Tensor:
        """Return a tensor of this layout, with the stored values or random ones."""
        import torch

        if self.values is not None:
            flat = torch.frombuffer(bytearray(self.values), dtype=torch.uint8) if self.values else torch.empty(0)
            flat = flat.view(self.dtype) if self.values else flat.to(self.dtype)
            flat = flat.to(self.device)
        else:
            flat = torch.empty(self.elements, dtype=self.dtype, device=self.device)
            if flat.element_size() > 1:
                flat.normal_()
            else:  # torch cannot draw 8-bit floats
                flat.copy_(torch.randn(self.elements, device=self.device))
        return flat.as_strided(self.shape, self.strides, self.offset)


def _packed(value: Any) -> Any:
    """Return the picklable form of an argument."""
    is_tensor = hasattr(value, "untyped_storage") and hasattr(value, "storage_offset")
    return _Tensor.of(value) if is_tensor else value


def _unpacked(value: Any) -> Any:
    """Return the argument that `_packed` made picklable, in its original form."""
    return value.tensor() if isinstance(value, _Tensor) else value


def _serve(connection: Connection, request: _Request) -> None:
    """Do the work of the separate process: time each requested config, until the pipe closes or the device breaks."""
    with ExitStack() as stack:
        try:
            from .one_launch import OneLaunch

            if request.device_index is not None:
                import torch

                torch.cuda.set_device(request.device_index)
            if request.stub is not None:
                stack.enter_context(use_stub_driver(request.stub))
            tuner = autotuner_of(attrgetter(request.qualname)(importlib.import_module(request.module)))
            args, kwargs = tuple(map(_unpacked, request.args)), {k: _unpacked(v) for k, v in request.kwargs.items()}
            connection.send(None)
        except Exception as error:  # noqa: BLE001 - sent to the waiting process
            connection.send(abridged(f"{type(error).__name__}: {error}"))
            return
        while True:
            try:
                position = connection.recv()
            except EOFError:
                return
            call = OneLaunch(tuner, args, {**kwargs, "grid": request.grids[position]})
            result: float | Exception
            try:
                result = call.time_us(tuner.configs[position])
            except Exception as error:  # noqa: BLE001 - a failing config
                result = ForetuneError(abridged(f"{type(error).__name__}: {error}"))
            connection.send((result, is_broken := _is_broken()))
            if is_broken:
                return


def _is_broken() -> bool:
    """Return whether the device no longer works; an illegal access shows at the next synchronization."""
    import torch

    if not torch.cuda.is_available() or stubbed() is not None:
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - any error
        return True
    return False

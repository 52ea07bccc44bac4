"""What the ops of several families share: where a call runs, which config it runs, and how a config reaches the
dispatcher.

Needs torch and triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from triton import knobs

from ..datasets import ForetuneError, KernelConfig, Problem, dtype_of_tensor, torch_dtype
from ..runtime import Mode, resolve_mode, stubbed
from ..runtime.choice import choose, given, interpreter, live
from ..runtime.tuning.ranks.agreement import epoch
from . import find_measurable

if TYPE_CHECKING:
    from ..datasets import DeviceSpec

#: Calls that are remembered. When there are more, all are forgotten: to find one out again takes milliseconds at most.
_MEMO_SIZE = 4096
#: Launches one config on the call's tensors, which are on that device.
Launch: TypeAlias = "Callable[[KernelConfig, DeviceSpec], object]"
#: What the ops compute in, by torch's name.
DTYPES = {torch_dtype(name): name for name in ("bf16", "fp16", "fp32")}


class ConfiguredLaunch:
    """Launches a family's kernel with the config that is chosen for a call's shape: once a shape, then looked up.

    FORETUNE_MODE is read when a shape is first met.
    """

    def __init__(self, family: str) -> None:
        self._family = family
        # By place, ranks, dtype, sizes, flags and options.
        self._known: dict[tuple[Any, ...], tuple[KernelConfig, DeviceSpec]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        dims: tuple[int, ...],
        flags: tuple[str, ...],
        config: KernelConfig | None,
        mode: str | None,
        launch: Launch,
    ) -> None:
        """Launches on the device of `x`, whose dtype is the problem's. `dims` are in the family's order.

        Raises `ForetuneError` for a mode that does not exist, a tensor that is not on a GPU, and a `config` that cannot
        run this.
        """
        place = place_of(x)
        key = (place, epoch(), x.dtype, dims, flags, config, mode)
        known = self._known.get(key)
        if known is None:
            known = self._choose(x, place, dims, flags, config, mode, launch)
            if len(self._known) >= _MEMO_SIZE:
                self._known.clear()
            self._known[key] = known
        chosen, device = known
        with on_device_of(x):
            launch(chosen, device)

    def _choose(
        self,
        x: torch.Tensor,
        place: int,
        dims: tuple[int, ...],
        flags: tuple[str, ...],
        config: KernelConfig | None,
        mode: str | None,
        launch: Launch,
    ) -> tuple[KernelConfig, DeviceSpec]:
        family, device = find_measurable(self._family), device_at(place)
        asked = resolve_mode(mode, default=Mode.PREDICT)
        sizes = dict(zip(family.dims, dims, strict=True))
        problem = Problem.of(family.name, dtype=dtype_of_tensor("x", x), flags=flags, ragged=None, **sizes)
        if reason := family.supports(family.default(problem, device), problem, device):  # a GPU without fp8, say
            raise ForetuneError(f"{family.name} cannot run {problem} on {device.name}: {reason}")
        if config is not None:
            chosen = given(config, family, problem, device)
        else:
            chosen = choose(family, problem, device, asked, partial(_launched, launch, device))
        return chosen, device


def _launched(launch: Launch, device: DeviceSpec, config: KernelConfig) -> None:
    launch(config, device)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """A block in which launches go to the GPU that x is on."""
    index = x.get_device()
    return _nothing if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def place_of(x: torch.Tensor, name: str = "x") -> int:
    """The index of the GPU that x is on; off the GPU that of a stub driver, or -1. Raises `ForetuneError`, which calls
    it `name`, for what is no tensor.

    >>> place_of(torch.zeros(2))
    -1
    """
    if not isinstance(x, torch.Tensor):
        raise ForetuneError(f"{name} must be a tensor but is a {type(x).__name__}")
    place = x.get_device()
    if place >= 0:
        return place
    stub = stubbed()
    return -1 if stub is None else stub.index


def device_at(place: int, name: str = "x") -> DeviceSpec:
    """The device there. Raises `ForetuneError`, which calls the tensor `name`, for one on the CPU, except in Triton's
    interpreter."""
    stub = stubbed()
    if stub is not None and place == stub.index:
        return stub.device
    if place >= 0:
        return live(place)
    if not knobs.runtime.interpret:
        raise ForetuneError(
            f"{name} must be on a GPU but is on the CPU (that is for debugging, with TRITON_INTERPRET=1)"
        )
    return interpreter()


def facts(tensor: Any) -> Any:
    """All of a tensor that a call's being in order depends on."""
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        return type(tensor)
    return tensor.shape, tensor.dtype, tensor.get_device(), tensor.stride(), tensor.requires_grad


def needs_operator(tensors: tuple[Any, ...]) -> bool:
    """Whether PyTorch wants to see an operator: it traces, a dispatch mode is on, or a tensor is of a subclass, whose
    own way with operators must not be bypassed. Else calling the dispatcher would cost more than the launch."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    for tensor in tensors:  # noqa: SIM110 - half the time of `any`
        if type(tensor) not in _PLAIN and isinstance(tensor, torch.Tensor):
            return True
    return False  # what is no tensor at all is refused later


def register_fake(operator: str, fake: Callable[..., Any], library: Any) -> None:
    """`torch.library.register_fake`, which has `inspect` find the line that calls it: unless that is told which module
    this file is, it looks at every module that is loaded, 30 ms with torch."""
    vars(inspect).get("modulesbyfile", {})[__file__] = __name__
    torch.library.register_fake(operator, fake, lib=library)


_nothing = nullcontext()
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def encode(config: KernelConfig | None) -> str | None:
    """A config as a string that `decode` reads. In plain Python that Dynamo traces.

    >>> encode(KernelConfig.of(BLOCK_M=64))
    'BLOCK_M=64;num_warps=4;num_stages=3;num_ctas=1'
    """
    return None if config is None else ";".join([f"{name}={value}" for name, value in config.to_json().items()])


@lru_cache(maxsize=4096)
def decode(text: str | None) -> KernelConfig | None:
    """The inverse of `encode`, for knobs that are integers. Raises `ForetuneError` for a text that is none.

    >>> decode("BLOCK_M=64;num_warps=8")["num_warps"]
    8
    """
    if text is None:
        return None
    try:
        return KernelConfig.of(**{name: int(value) for name, value in (knob.split("=") for knob in text.split(";"))})
    except ValueError:
        raise ForetuneError(f"a config must be like 'BLOCK_M=64;num_warps=8' but is {text!r}") from None

"""What the ops of all families share: where a call runs, which config it runs, what is remembered of calls that are
alike, and how a config reaches the dispatcher.

Needs torch and triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from triton import knobs

from ..datasets import ForetuneError, KernelConfig, Problem, torch_dtype
from ..datasets.errors import shown
from ..runtime import Mode, resolve_mode, stubbed
from ..runtime.choice import choose, given
from ..runtime.launching.collector import collecting_later
from ..runtime.launching.stub_driver import interpreter, live
from ..runtime.tuning.ranks.agreement import epoch
from . import find_measurable
from .config_limits import default_without_gluon

if TYPE_CHECKING:
    from ..datasets import DeviceSpec

#: Of our operators, for PyTorch's `FlopCounterMode`.
flop_formulas: dict[Any, Any] = {}
#: Launches on the tensors of one call.
Launch: TypeAlias = "Callable[[Sequence[torch.Tensor | None]], object]"
#: What the ops compute in, by torch's name.
DTYPES = {torch_dtype(name): name for name in ("bf16", "fp16", "fp32")}
#: Dtypes of group sizes and indices.
INTEGERS = (torch.int32, torch.int64)
_ALIGNMENT = 16  # bytes
Made = TypeVar("Made")
Seen = TypeVar("Seen")
#: The environment variable that has every call check what only the device knows.
CHECK_VARIABLE = "FORETUNE_CHECK"


class Memo(dict[tuple[Any, ...], Made]):
    """What was found out once for all calls that are alike, by their `key_of`. A full one is emptied: to find one out
    again takes milliseconds at most.

    >>> memo = Memo()
    >>> memo.add(("alike",), "found out"), memo.found(("alike",)), memo.found(("unlike",))
    ('found out', 'found out', None)
    """

    most = 4096

    def found(self, key: tuple[Any, ...]) -> Made | None:
        """Return the value of this key, or None. Raises `ForetuneError` if an option in it is a list or a dictionary,
        which a config is not."""
        try:
            return self.get(key)
        except TypeError:
            wrong = shown(_unhashable(key))
            raise ForetuneError(f"each option must be a word, a number or a KernelConfig but one is {wrong}") from None

    def add(self, key: tuple[Any, ...], made: Made) -> Made:
        if len(self) >= self.most:
            self.clear()
        self[key] = made
        return made


def key_of(tensors: Sequence[Any], options: Hashable, name: str = "x") -> tuple[Any, ...]:
    """All that calls which are alike have in common: options, and of each tensor what its being in order, its layout
    and the config depend on. Its first entry is the place of the first tensor, which is called `name` in what is
    raised.

    A config that was chosen before the ranks agree on one is chosen anew, so their epoch is part of it.
    """
    return (place_of(tensors[0], name), epoch(), options, *map(_facts, tensors))


class Call(Generic[Seen]):
    """The facts that similar calls share, found out at the first of them and then looked up.

    Args:
        seen: How the family sees their tensors: sizes, layouts, shapes to return.
        launch: What launches their kernel; None where there is nothing to compute.
        copies: Whether the kernel cannot read one of their tensors as it lies.
    """

    def __init__(self, seen: Seen, launch: ConfiguredLaunch | None = None, *, copies: bool = False) -> None:
        self.seen, self.launch, self.copies = seen, launch, copies
        #: Whether FORETUNE_CHECK has calls wait for the device and check what only it knows.
        self.contents_checked = os.environ.get(CHECK_VARIABLE, "") not in ("", "0")
        self.is_differentiable = False  # whether a tensor wants a gradient
        self.compiled: set[tuple[bool, ...]] = set()  # the gradients whose first step has been compiled


class ConfiguredLaunch:
    """Launches a family's kernel in calls that are alike, with one config: the one that is given, or the one that is
    chosen at the first of them, which is when FORETUNE_MODE has been read.

    `prepare` makes what launches one config on a device, for tensors like those of the first call. Raises
    `ForetuneError` for a mode that does not exist, a place that is no GPU (for `device_at`, which calls the tensor
    `name`), and a `config` that cannot run the problem, or a GPU.
    """

    def __init__(
        self,
        problem: Problem,
        place: int,
        config: KernelConfig | None,
        mode: str | None,
        prepare: Callable[[KernelConfig, DeviceSpec, Sequence[torch.Tensor | None]], Launch],
        name: str = "x",
    ) -> None:
        self._problem, self._prepare = problem, prepare
        self._family, self._device = find_measurable(problem.family), device_at(place, name)
        self._mode = resolve_mode(mode, default=Mode.PREDICT)
        default = self._family.default(problem, self._device)
        if reason := self._family.supports(default, problem, self._device):  # a GPU without fp8, say
            raise ForetuneError(f"{problem.family} cannot run {problem} on {self._device.name}: {reason}")
        self._given = None if config is None else given(config, self._family, problem, self._device)
        self._launch: Launch | None = None

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch on the device of the first of the tensors."""
        with on_device_of(tensors[0]):
            (self._launch or self._first)(tensors)

    def here(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch on the current device, where the tensors are."""
        (self._launch or self._first)(tensors)

    def _first(self, tensors: Sequence[torch.Tensor | None]) -> None:
        with collecting_later():
            self._launch = self._chosen(tensors)
            self._launch(tensors)

    def _chosen(self, tensors: Sequence[torch.Tensor | None]) -> Launch:
        if self._given is not None:
            return self._prepare(self._given, self._device, tensors)

        def prepared(config: KernelConfig) -> Launch:
            runs = default_without_gluon(config, self._family, self._problem, self._device)
            return self._prepare(runs, self._device, tensors)

        def launch(config: KernelConfig) -> None:
            prepared(config)(tensors)

        return prepared(choose(self._family, self._problem, self._device, self._mode, launch))


def on_device_of(x: torch.Tensor | None) -> AbstractContextManager[Any]:
    """A block in which launches go to the GPU that x is on."""
    index = -1 if x is None else x.get_device()
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


def _unhashable(key: Any) -> Any:
    """Return the part of a key, whose options are grouped, that has no hash."""
    for one in key:
        try:
            hash(one)
        except TypeError:  # noqa: PERF203 - a handful of options
            return _unhashable(one) if isinstance(one, tuple) else one
    return key


def _facts(tensor: Any) -> Any:
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor):
        return type(tensor)
    try:
        return tensor.shape, tensor.dtype, tensor.get_device(), tensor.stride(), tensor.requires_grad
    except RuntimeError:  # sparse and nested ones have no strides, or no shape: `check_tensor` refuses them
        return type(tensor)


def check_tensor(name: str, tensor: Any) -> None:
    """Raise `ForetuneError` for anything but a tensor with strides: nested, quantized, sparse and mkldnn ones.

    >>> check_tensor("a", torch.eye(2).to_sparse())
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: a must be a dense tensor but is a sparse_coo one: call a.to_dense()
    """
    if not isinstance(tensor, torch.Tensor):
        raise ForetuneError(f"{name} must be a tensor but is a {type(tensor).__name__}")
    if tensor.is_nested:
        raise ForetuneError(f"{name} must be a dense tensor but is a nested one: call {name}.to_padded_tensor(0.0)")
    if tensor.is_quantized:
        kind = tensor.dtype
        raise ForetuneError(f"{name} must be a dense tensor but is a quantized one, {kind}: call {name}.dequantize()")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        raise ForetuneError(f"{name} must be a dense tensor but is a {layout} one: call {name}.to_dense()")


class Operand(NamedTuple):
    """Requirements for one tensor of a call."""

    name: str
    dims: int | None = None  # any number of them if None
    dtypes: Sequence[torch.dtype] = ()  # one of these; any if empty
    needed: bool = True  # whether it must not be None
    floating: bool = False  # whether it must be of some floating dtype
    alike: bool = False  # whether it has the dtype of the call's first tensor
    contiguous: bool = False

    def check(self, tensor: Any, first: torch.Tensor, name_of_first: str) -> None:
        """Raise `ForetuneError` naming what is wrong with it, or where it is on another device than the first."""
        name, dims = self.name, self.dims
        check_tensor(name, tensor)
        require(dims in (None, tensor.dim()), f"{name} must have {dims} dimensions but is {tuple(tensor.shape)}")
        require(not self.floating or tensor.is_floating_point(), f"{name} must be of floats but is {tensor.dtype}")
        require(tensor.device == first.device, f"{name} is on {tensor.device} but {name_of_first} is on {first.device}")
        if self.dtypes and tensor.dtype not in self.dtypes:
            able = "int32 or int64" if self.dtypes == INTEGERS else ", ".join(map(str, self.dtypes))
            one_of = "one of " if len(self.dtypes) > 2 else ""
            raise ForetuneError(f"{name} must be {one_of}{able} but is {tensor.dtype}")
        require(
            not self.alike or tensor.dtype == first.dtype,
            f"{name} is {tensor.dtype} but {name_of_first} is {first.dtype}: cast one of them",
        )
        require(
            not self.contiguous or tensor.is_contiguous(),
            f"{name} must be contiguous but has strides {tuple(tensor.stride())} at shape {tuple(tensor.shape)}: "
            f"call {name}.contiguous() first",
        )


def check_operands(declared: Sequence[Operand], tensors: Sequence[Any]) -> None:
    """Raise `ForetuneError` naming what is wrong with the tensors of a call, each by itself."""
    for operand, tensor in zip(declared, tensors, strict=True):
        if tensor is not None or operand.needed:
            operand.check(tensor, tensors[0], declared[0].name)


def require(is_so: bool, otherwise: str) -> None:
    """Raise `ForetuneError` with this message unless it is so."""
    if not is_so:
        raise ForetuneError(otherwise)


def ready(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy that is contiguous and begins at a multiple of 16 bytes, as TMA and vector loads do."""
    x = x.contiguous()
    return x if are_placed([x]) else x.clone()


def are_placed(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether all begin at multiples of 16 bytes, as TMA and vector loads do.

    >>> are_placed((torch.zeros(8), None)), are_placed([torch.zeros(8)[1:]])
    (True, False)
    """
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % _ALIGNMENT == 0


def needs_operator(tensors: tuple[Any, ...]) -> bool:
    """Return whether PyTorch wants to see an operator: it traces, a dispatch mode is on, a function transform or
    forward-mode AD is active, the tensors have no memory (meta), or one is of a subclass, whose own way with operators
    must not be bypassed. Otherwise calling the dispatcher would cost more than the launch."""
    if torch.compiler.is_compiling():
        return True
    if _dispatch_modes():
        _tell_flop_counters()
        return True
    if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:  # `is_transformed`
        return True
    for tensor in tensors:
        if type(tensor) not in _PLAIN and isinstance(tensor, torch.Tensor) and not tensor.is_nested:
            return True
    return getattr(tensors[0], "is_meta", False) is True  # what is no tensor at all is refused later


def is_transformed() -> bool:
    """Return whether one of torch.func's transforms, or forward-mode AD, is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def needs_gradient(tensors: Sequence[Any]) -> bool:
    """Return whether one of a call's tensors wants a gradient, and gradients are on."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):
                return True
    return False


def _tell_flop_counters() -> None:
    """Tell active counters of the ops' formulas: one made before an op was imported copied the registry too early."""
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            for operator, formula in flop_formulas.items():
                registry.setdefault(operator, formula)


_dispatch_modes = torch._C._len_torch_dispatch_stack
_nothing = nullcontext()
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def encode(config: KernelConfig | None) -> str | None:
    """A config as a string that `decode` reads. In plain Python that Dynamo traces.

    >>> encode(KernelConfig.of(BLOCK_M=64))
    'BLOCK_M=64;num_warps=4;num_stages=3;num_ctas=1'
    """
    if config is not None and not isinstance(config, KernelConfig):
        raise ForetuneError(f"config must be a KernelConfig but is a {type(config).__name__}")
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

"""Code that all ops share: the device and config of a call, the memo of similar calls, and encoded configs.

Needs torch and triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from triton import knobs

from ..datasets import ForetuneError, KernelConfig, Problem, torch_dtype
from ..datasets.errors import shown
from ..runtime import Mode, stubbed
from ..runtime.choice import choose, given, refinement
from ..runtime.how_many import predicted_us
from ..runtime.launching.ahead import is_only_compiling, only_compiling
from ..runtime.launching.collector import collecting_later
from ..runtime.launching.stub_driver import interpreter, live
from ..runtime.same_bits import keeping
from ..runtime.tuning.ranks.agreement import epoch
from . import find_measurable
from .config_limits import default_without_gluon
from .op_choice import HowChosen

if TYPE_CHECKING:
    from ..datasets import DeviceSpec
    from ..runtime.tuning.refine.refinement import Refinement
    from .launchers import Launch

#: The FLOP formulas of the operators, for PyTorch's `FlopCounterMode`.
flop_formulas: dict[Any, Any] = {}
#: The dtypes that ops compute in, and their names in `Problem`.
DTYPES = {torch_dtype(name): name for name in ("bf16", "fp16", "fp32")}
#: Dtypes of group sizes and indices.
INTEGERS = (torch.int32, torch.int64)
_ALIGNMENT = 16  # bytes
Made = TypeVar("Made")
Seen = TypeVar("Seen")
#: The environment variable that makes every call check values on the device, which synchronizes.
CHECK_VARIABLE = "FORETUNE_CHECK"


class Memo(dict[tuple[Any, ...], Made]):
    """Values computed once for all similar calls, by their `key_of`.

    It is cleared when it is full, because recomputing a value takes a few milliseconds at most.

    >>> memo = Memo()
    >>> memo.add(("alike",), "found out"), memo.found(("alike",)), memo.found(("unlike",))
    ('found out', 'found out', None)
    """

    most = 4096

    def found(self, key: tuple[Any, ...]) -> Made | None:
        """Return the value of a key, or None.

        Raises:
            ForetuneError: An option in the key is not hashable, such as a list.
        """
        try:
            return self.get(key)
        except TypeError:
            wrong = shown(_unhashable(key))
            raise ForetuneError(
                f"each option must be a string, a number or a KernelConfig but one is {wrong}"
            ) from None

    def add(self, key: tuple[Any, ...], made: Made) -> Made:
        """Store `made` as the value of a key, and return it."""
        if len(self) >= self.most:
            self.clear()
        self[key] = made
        return made


def key_of(tensors: Sequence[Any], options: Hashable, name: str = "x") -> tuple[Any, ...]:
    """Return a key that is equal for similar calls: device, epoch of rank agreement, options, and tensor metadata.

    The metadata are all that checks, layout and config depend on. The first item is the device index of the first
    tensor. The epoch is part of the key because a config chosen before the ranks agreed on one must be chosen again.

    Args:
        tensors: The call's tensors.
        options: The call's other arguments.
        name: The name of the first tensor, for error messages.
    """
    return (place_of(tensors[0], name), epoch(), options, *map(_facts, tensors))


class Call(Generic[Seen]):
    """The data that similar calls of an op share, computed at the first of them.

    Calls are similar if their `key_of` is equal.

    Args:
        seen: What the family derived from the tensors: sizes, layouts, shapes to return.
        launch: Launches the kernel; None if there is nothing to compute.
        copies: Whether a tensor must be copied because the kernel cannot read its layout.
    """

    def __init__(self, seen: Seen, launch: ConfiguredLaunch | None = None, *, copies: bool = False) -> None:
        self.seen, self.launch, self.copies = seen, launch, copies
        #: Whether calls synchronize with the device and check values there (FORETUNE_CHECK).
        self.contents_checked = os.environ.get(CHECK_VARIABLE, "") not in ("", "0")
        self.is_differentiable = False  # whether a tensor requires a gradient
        self.compiled: set[tuple[bool, ...]] = set()  # combinations of gradients whose kernels are compiled


class ConfiguredLaunch:
    """Launches a family's kernel for similar calls with one config: a given one, or one chosen at the first call.

    FORETUNE_MODE is read when the object is created.

    Args:
        problem: The problem of these calls.
        place: The device index of the tensors, as `place_of` returns it.
        config: The config; chosen at the first call if None.
        mode: How a config is chosen: the operator's option, see `how_chosen`.
        prepare: `prepare(config, device, tensors)` returns a function that launches one config, for tensors like these.
        name: The name of the first tensor, for error messages.

    Raises:
        ForetuneError: The mode is unknown, `place` is not a GPU (see `device_at`), or the config or the GPU cannot run
            the problem.
    """

    def __init__(
        self,
        problem: Problem,
        place: int,
        config: KernelConfig | None,
        mode: HowChosen | str | None,
        prepare: Callable[[KernelConfig, DeviceSpec, Sequence[torch.Tensor | None]], Launch],
        name: str = "x",
    ) -> None:
        self._problem, self._prepare = problem, prepare
        how = mode if isinstance(mode, HowChosen) else HowChosen.of(mode)
        self._mode, self._device = how.mode, device_at(place, name)
        self._family = find_measurable(problem.family)
        if config is None:
            # A product of the backward pass may sum over the rows; then it keeps the class of its default config.
            same_bits, invariant = how.same_bits, how.invariant
            if invariant is not None and not self._family.independent:
                same_bits, invariant = True, None
            self._family = keeping(self._family, same_bits, invariant)
        default = self._family.default(problem, self._device)
        if reason := self._family.supports(default, problem, self._device):  # for example, a GPU without fp8
            raise ForetuneError(f"{problem.family} cannot run {problem} on {self._device.name}: {reason}")
        self._given = None if config is None else given(config, self._family, problem, self._device)
        self._launch: Launch | None = None

    def __call__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch the kernel on these tensors, on the device of the first one."""
        with on_device_of(tensors[0]):
            (self._launch or self._first)(tensors)

    def here(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Launch the kernel on these tensors, which must be on the current device."""
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

        if self._mode is Mode.REFINE:
            chooses = refinement(self._family, self._problem, self._device)
            if chooses is not None:
                return self._refining(chooses, lru_cache(maxsize=None)(prepared))
        return prepared(choose(self._family, self._problem, self._device, self._mode, launch))

    def _refining(self, chooses: Refinement[KernelConfig], prepared: Callable[[KernelConfig], Launch]) -> Launch:
        """Return a function whose every call asks `chooses` for a config, and launches `prepared` of it."""
        scale = predicted_us(self._family, self._problem, self._device, chooses.candidates[0])

        def launch(tensors: Sequence[torch.Tensor | None]) -> None:
            if is_only_compiling():
                prepared(chooses.candidates[0])(tensors)
                return

            def compile_one(config: KernelConfig) -> Sequence[Future[Any]]:
                empty = [one if one is None else torch.empty_like(one, device="meta") for one in tensors]
                with only_compiling(load=True) as jobs:
                    prepared(config)(empty)
                return jobs

            chooses.run(lambda config: prepared(config)(tensors), compile_one, scale)
            if chooses.final is not None:
                self._launch = prepared(chooses.final)

        return launch


def on_device_of(x: torch.Tensor | None) -> AbstractContextManager[Any]:
    """Return a context in which launches go to the GPU of a tensor."""
    index = -1 if x is None else x.get_device()
    return _nothing if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def place_of(x: torch.Tensor, name: str = "x") -> int:
    """Return the index of a tensor's GPU; for a CPU tensor the index of an active stub driver, or -1.

    Raises:
        ForetuneError: `x` is not a tensor.

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
    """Return the device with an index that `place_of` returned.

    Raises:
        ForetuneError: The tensor, called `name` in the message, is on the CPU, and Triton is not in interpreter mode.
    """
    stub = stubbed()
    if stub is not None and place == stub.index:
        return stub.device
    if place >= 0:
        return live(place)
    if not knobs.runtime.interpret:
        raise ForetuneError(
            f"{name} must be on a GPU but is on the CPU (tensors on the CPU are for debugging with TRITON_INTERPRET=1)"
        )
    return interpreter()


def _unhashable(key: Any) -> Any:
    """Return the part of a nested key that has no hash."""
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
    except RuntimeError:  # sparse and nested tensors lack strides or a shape; `check_tensor` rejects them
        return type(tensor)


def check_tensor(name: str, tensor: Any) -> None:
    """Check that a value is a tensor with strides: not nested, quantized, sparse or mkldnn.

    Raises:
        ForetuneError: It is not; the message names the conversion to call.

    >>> check_tensor("a", torch.eye(2).to_sparse())
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: a must be a dense tensor but is a sparse_coo one: call a.to_dense()
    """
    if not isinstance(tensor, torch.Tensor):
        raise ForetuneError(f"{name} must be a tensor but is a {type(tensor).__name__}")
    if tensor.is_nested:
        raise ForetuneError(f"{name} must be a dense tensor but is a nested one: call {name}.to_padded_tensor(0.0)")
    if tensor.is_quantized:
        dtype = tensor.dtype
        raise ForetuneError(f"{name} must be a dense tensor but is a quantized one, {dtype}: call {name}.dequantize()")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        raise ForetuneError(f"{name} must be a dense tensor but is a {layout} one: call {name}.to_dense()")


class Operand(NamedTuple):
    """Requirements for one tensor of a call: its number of dimensions, its dtype, and whether it is contiguous."""

    name: str
    dims: int | None = None  # any number if None
    dtypes: Sequence[torch.dtype] = ()  # the valid ones; any if empty
    needed: bool = True  # whether it must not be None
    floating: bool = False  # whether it must have a floating-point dtype
    alike: bool = False  # whether it must have the dtype of the call's first tensor
    contiguous: bool = False

    def check(self, tensor: Any, first: torch.Tensor, name_of_first: str) -> None:
        """Check a tensor against these requirements, and that it is on the device of the first tensor.

        Raises:
            ForetuneError: It is not valid; the message names the requirement.
        """
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
    """Check each of a call's tensors against its declared requirements.

    Raises:
        ForetuneError: A tensor is not valid.
    """
    for operand, tensor in zip(declared, tensors, strict=True):
        if tensor is not None or operand.needed:
            operand.check(tensor, tensors[0], declared[0].name)


def require(is_so: bool, otherwise: str) -> None:
    """Raise `ForetuneError` with this message unless the condition is true."""
    if not is_so:
        raise ForetuneError(otherwise)


def ready(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a contiguous copy that starts at a multiple of 16 bytes, as TMA and vector loads need."""
    x = x.contiguous()
    return x if are_placed([x]) else x.clone()


def are_placed(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Return whether all tensors start at multiples of 16 bytes, as TMA and vector loads need.

    >>> are_placed((torch.zeros(8), None)), are_placed([torch.zeros(8)[1:]])
    (True, False)
    """
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % _ALIGNMENT == 0


def needs_operator(tensors: tuple[Any, ...]) -> bool:
    """Return whether a call must go through PyTorch's dispatcher, which would cost more than the launch.

    This is the case while PyTorch traces, a dispatch mode, function transform or forward-mode AD is active, for meta
    tensors, and for tensor subclasses, which may override operators.
    """
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
    return getattr(tensors[0], "is_meta", False) is True  # other types are rejected later


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward-mode AD is active."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def needs_gradient(tensors: Sequence[Any]) -> bool:
    """Return whether gradients are on and one of a call's tensors requires one."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if getattr(tensor, "requires_grad", False):
                return True
    return False


def _tell_flop_counters() -> None:
    """Add the ops' formulas to active flop counters, which copy PyTorch's registry when they are created."""
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            for operator, formula in flop_formulas.items():
                registry.setdefault(operator, formula)


_dispatch_modes = torch._C._len_torch_dispatch_stack
_nothing = nullcontext()
_PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}


def encode(config: KernelConfig | None) -> str | None:
    """Return a config as text for `decode`, in plain Python that Dynamo can trace.

    >>> encode(KernelConfig.of(BLOCK_M=64))
    'BLOCK_M=64;num_warps=4;num_stages=3;num_ctas=1'
    """
    if config is not None and not isinstance(config, KernelConfig):
        raise ForetuneError(f"config must be a KernelConfig but is a {type(config).__name__}")
    return None if config is None else ";".join([f"{name}={value}" for name, value in config.to_json().items()])


@lru_cache(maxsize=4096)
def decode(text: str | None) -> KernelConfig | None:
    """Return the config that `encode` wrote; all its knobs are integers.

    Raises:
        ForetuneError: The text is not an encoded config.

    >>> decode("BLOCK_M=64;num_warps=8")["num_warps"]
    8
    """
    if text is None:
        return None
    try:
        return KernelConfig.of(**{name: int(value) for name, value in (knob.split("=") for knob in text.split(";"))})
    except ValueError:
        raise ForetuneError(f"a config must be like 'BLOCK_M=64;num_warps=8' but is {text!r}") from None

"""`Call`: all that is the same for every call of one shape, found out once and then looked up."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from ....datasets import KernelConfig, Problem
from ....runtime import Mode, resolve_mode, stubbed
from ....runtime.choice import Launch, choose, given
from ....runtime.tuning.ranks.agreement import epoch
from ... import find_measurable, op_calls
from ...config_limits import default_without_gluon
from ...op_calls import Memo, device_at, key_of, place_of
from ..variants import chunk_rows
from .checks import DTYPES, Shape, check_call

#: The environment variable that has every call check what only the device knows.
CHECK_VARIABLE = "FORETUNE_CHECK"
_calls: Memo[Call] = Memo()


class Options(NamedTuple):
    """What a call asks for besides its tensors; `grouped_gemm` says what each means."""

    topk: int = 1
    permute_x: bool = False
    permute_y: bool = False
    config: KernelConfig | None = None
    config_dx: KernelConfig | None = None
    config_dw: KernelConfig | None = None
    mode: str | None = None


class Call:
    """All calls of one shape on one device. FORETUNE_MODE and FORETUNE_CHECK are read when it is made.

    Raises `ForetuneError` for a mode that does not exist and for a config that cannot run this.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, place: int, options: Options) -> None:
        self.shape, self.dtype, self.options = shape, dtype, options
        self.device = device_at(place)
        self.gpu = place if self.device.backend != "cpu" and stubbed() is None else None  # its index
        self.contents_checked = contents_are_checked()
        self.mode = resolve_mode(options.mode, default=Mode.PREDICT)
        self.chunk_rows = chunk_rows(shape.rows, shape.n, shape.k, self.device.sm_count)
        self.differentiable = False  # whether a tensor wants a gradient
        self.compiled: set[Any] = set()  # the gradients whose first step has been compiled
        explicit = {
            "grouped_gemm_fwd": options.config,
            "grouped_gemm_dx": options.config_dx,
            "grouped_gemm_dw": options.config_dw,
        }
        #: The config that the forward pass ran last, and what launches it.
        self.prepared: tuple[KernelConfig, op_calls.Launch] | None = None
        self._given = {
            name: given(config, find_measurable(name), self.problem(name), self.device)
            for name, config in explicit.items()
            if config is not None and shape.groups and shape.k  # otherwise there is nothing to run it on
        }
        self._chosen: dict[str, KernelConfig] = {}

    def elsewhere(self) -> bool:
        """Whether the call is of another GPU than the current one, which is what a launch goes to."""
        return self.gpu is not None and self.gpu != torch.cuda.current_device()

    def problem(self, family: str) -> Problem:
        """What the host knows of the problem that one of the kernels solves."""
        permuted = {"permute_x": self.options.permute_x, "permute_y": self.options.permute_y}
        flags = tuple(name for name, is_set in permuted.items() if is_set)
        return Problem.of(family, dtype=DTYPES[self.dtype], flags=flags, **self.shape._asdict())

    def config(self, family: str, launch: Launch) -> KernelConfig:
        """The config to launch, chosen the first time; see `choose` for `launch`."""
        config = self._given.get(family)
        if config is not None:
            return config
        config = self._chosen.get(family)
        if config is None:
            config = choose(
                find_measurable(family),
                self.problem(family),
                self.device,
                self.mode,
                lambda config: launch(self._runnable(family, config)),
            )
            config = self._chosen[family] = self._runnable(family, config)
        return config

    def _runnable(self, family: str, config: KernelConfig) -> KernelConfig:
        """What runs here where a config was chosen; see `default_without_gluon`."""
        return default_without_gluon(config, find_measurable(family), self.problem(family), self.device)


def contents_are_checked() -> bool:
    """Return whether FORETUNE_CHECK has calls wait for the device and check what only it knows."""
    return os.environ.get(CHECK_VARIABLE, "") not in ("", "0")


def call_of(options: tuple[Any, ...], tensors: tuple[Any, ...]) -> Call:
    """The call that these make, checked: options in the order of `Options`, and tensors in that of the op's operator.
    Raises `ForetuneError` as `check_call` and `Call` do."""
    key = key_of(tensors, options)
    call = _calls.found(key)
    if call is None:
        shape = check_call(*tensors, *options[:3])
        call = _calls.add(key, Call(shape, tensors[0].dtype, key[0], Options(*options)))
        call.differentiable = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return call


def call_of_backward(dy: torch.Tensor, shape: Shape, options: Options) -> Call:
    """The call whose backward pass this is. Nothing is checked: the forward pass was."""
    place = place_of(dy)
    key = (place, epoch(), options, shape, dy.dtype)
    call = _calls.found(key)
    return _calls.add(key, Call(shape, dy.dtype, place, options)) if call is None else call

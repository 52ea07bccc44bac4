"""`OneLaunch`: one launch of an autotuned kernel, with whatever config."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...datasets import ForetuneError
from ...datasets.errors import shown
from ..launching.ahead import make_launch_function_ahead
from ..launching.stub_driver import stubbed
from ..timing.timer import timer_of
from .launch_arguments import OF_THE_LAUNCH
from .session import is_capturing

if TYPE_CHECKING:
    import triton
    from triton.runtime import Autotuner


def times_one() -> bool:
    """Return whether this Triton (before 3.8) times a config that is the only one left, and then resets the tensors."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


class OneConfigCache(dict[Any, Any]):
    """Stands for an autotuner's cache in one launch: every key has the same config, and nothing is kept."""

    def __init__(self, config: triton.Config) -> None:
        super().__init__()
        self._config = config

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: Any) -> triton.Config:
        return self._config

    def get(self, key: Any, default: Any = None) -> triton.Config:
        return self._config


def key_of_launch(tuner: Autotuner, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return Triton's key of a launch with these arguments, which are given in the order of the call."""
    given = {name: value for name, value in arguments.items() if name in tuner.arg_names}
    key = [given[name] for name in tuner.keys if name in given]
    return (*key, *(str(value.dtype) for value in given.values() if hasattr(value, "dtype")))


class OneLaunch:
    """The arguments of a launch: `args` and `kwargs` as they were passed, `named` the positional ones by name, and
    `arguments` all of them. `was_timed` says whether its tensors may have been altered by launches to time configs."""

    def __init__(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._tuner, self.args, self.kwargs = tuner, args, kwargs
        self.was_timed = False
        self.named: dict[str, Any] = dict(zip(tuner.arg_names, args, strict=False))
        self.ran_out = False  # whether the time was over before any config was timed

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.named, **self.kwargs}

    def launch(self, config: triton.Config) -> Any:
        """Launches, with the config's own hook before, and nothing else of the autotuner's."""
        if config.pre_hook is not None:
            config.pre_hook(self.everything(config))
        return self._tuner.fn.run(*self.args, **self.kwargs, **config.all_kwargs())

    def prepare(self) -> None:
        """Has what launches any of the kernel's binaries made, before it is known which it will be."""
        given = {**self.kwargs, **self._tuner.configs[0].all_kwargs()}
        options = {name: value for name, value in given.items() if name not in OF_THE_LAUNCH}
        make_launch_function_ahead(self._tuner.fn, self.args, options)

    def compile(self, config: triton.Config) -> Any:
        """Compiles without a launch. The config's hook comes first: it may make the descriptors that decide on the
        binary."""
        if config.pre_hook is not None:
            config.pre_hook(self.everything(config))
        kwargs = {name: value for name, value in self.kwargs.items() if name != "warmup"}
        return self._tuner.fn.warmup(*self.args, **kwargs, **config.all_kwargs())

    def time_us(self, config: triton.Config) -> float:
        """The time of a launch with the config, all of the autotuner's hooks around each. Raises whatever the launch
        raises; what is to be restored is, then too."""
        tuner = self._tuner
        if twice := self.kwargs.keys() & config.kwargs.keys():
            raise ForetuneError(f"{', '.join(sorted(twice))}: given by the launch and by the autotuner")
        everything, self.was_timed = self.everything(config), True

        def run() -> None:
            if config.pre_hook is not None:
                config.pre_hook(everything)
            tuner.pre_hook(everything)
            try:
                tuner.fn.run(*self.args, **self.kwargs, **config.all_kwargs())
            except BaseException as error:
                tuner.post_hook(everything, exception=error)
                raise
            tuner.post_hook(everything, exception=None)

        return _timed_ms(tuner, run) * 1e3

    def can_be_timed(self) -> bool:
        """Whether there is a device that can be waited for, or something that times without one."""
        if self._tuner._do_bench is not None or stubbed() is not None:
            return not is_capturing()
        import torch

        return torch.cuda.is_available() and not is_capturing()

    def reset(self, config: triton.Config) -> None:
        """Makes the tensors what they were, after configs were timed."""
        self._tuner.pre_hook(self.everything(config), reset_only=True)

    def everything(self, config: triton.Config) -> dict[str, Any]:
        return {**self.arguments, **config.all_kwargs()}


def _timed_ms(tuner: Autotuner, run: Callable[[], None]) -> float:
    """By the autotuner's own `do_bench` where it was given one, else by our timer, which takes 5 ms of device time and
    no launch gap (Triton's takes 125 ms a config), else by Triton's for this driver."""
    if tuner._do_bench is None and stubbed() is None:
        import torch

        run()  # compiles and loads; what fails does so here
        try:
            return timer_of(torch.cuda.current_device()).time(run).time_us / 1e3
        except ForetuneError:
            pass  # a hook waits for the device: that, our timer cannot take
    return milliseconds(tuner.do_bench(run, quantiles=(0.5, 0.2, 0.8)))


def milliseconds(timing: Any) -> float:
    """Return the time that a `do_bench` gave: its median, or the first of all quantiles; inf for a config that failed.

    Raises:
        ForetuneError: It is no time: negative or 0, NaN, or not a number.
    """
    first = timing[0] if isinstance(timing, (list, tuple)) and timing else timing
    try:
        time_ms = float(first)
    except Exception:  # noqa: BLE001 - it may be anything
        time_ms = math.nan
    if not time_ms > 0 or isinstance(first, (str, bytes, bool)):
        raise ForetuneError(f"do_bench must return milliseconds > 0 but returned {shown(timing)}")
    return time_ms

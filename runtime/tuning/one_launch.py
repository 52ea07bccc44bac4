"""Launch an autotuned kernel once, with any of its configs: `OneLaunch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from ...datasets import ForetuneError
from ...datasets.errors import shown
from ..launching.ahead import in_background, load_binary, make_launch_function_ahead
from ..launching.kernel import OF_THE_LAUNCH, Kernel, kept_arguments, stand_ins
from ..launching.stub_driver import stubbed
from ..timing.timer import timer_of
from .gaussian_process import MOST_SLOWDOWN
from .session import is_capturing

if TYPE_CHECKING:
    import triton
    from triton.runtime import Autotuner

    from .refine.refinement import Refinement


def times_one() -> bool:
    """Return whether Triton is older than 3.8: it then times even a single remaining config, and resets the tensors."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


#: A config is timed no further if its first launch takes this many times the best config's time. The model of own
#: timings makes no difference between such configs.
FAR_BEHIND = math.exp(MOST_SLOWDOWN)


class ForcedCache(dict[Any, Any]):
    """Replaces an autotuner's cache during one launch: every key has the config that `config_of` returns for it.

    This makes Triton itself compute the key and launch the given config. While `applies` returns False, for example in
    another thread, the `real` cache is used.
    """

    def __init__(self, real: Any, config_of: Callable[[Any], Any], applies: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._real, self._config_of, self._applies = real, config_of, applies

    def __contains__(self, key: object) -> bool:
        return self._applies() or key in self._real

    def __getitem__(self, key: Any) -> Any:
        return self._config_of(key) if self._applies() else self._real[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the forced config for any key; if forcing does not apply now, the real cache's, else `default`."""
        return self._config_of(key) if self._applies() else self._real.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._real[key] = value


def own_key(tuner: Autotuner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a launch's key as Triton computes it, but in the order of the kernel's parameters.

    So keyword arguments in another order give the same key.
    """
    given = dict(zip(tuner.arg_names, args, strict=False))
    given.update(kwargs)
    key = [given[name] for name in tuner.keys if name in given]
    for name in tuner.arg_names:
        dtype = getattr(given.get(name), "dtype", None)
        if dtype is not None:
            key.append(str(dtype))
    return tuple(key)


def key_of_launch(tuner: Autotuner, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return Triton's key of a launch; `arguments` are in the order of the call."""
    given = {name: value for name, value in arguments.items() if name in tuner.arg_names}
    key = [given[name] for name in tuner.keys if name in given]
    return (*key, *(str(value.dtype) for value in given.values() if hasattr(value, "dtype")))


def launch_undecided(
    tuner: Autotuner,
    undecided: dict[Any, tuple[Refinement[triton.Config], float]],
    key: Any,
    found: tuple[Refinement[triton.Config], float],
    arguments: Mapping[str, Any],
    launch: Callable[[triton.Config], Any],
) -> Any:
    """Launch with the config that mode `refine` tries next for a key, and return the launch's result.

    Once the key's config is decided, it is stored in the autotuner's cache.

    Args:
        tuner: The autotuner.
        undecided: For each key without a decision, the `Refinement` that chooses its config, and the predicted time of
            its launches.
        key: The key of the launch.
        found: The entry of the key in `undecided`, read before; another thread may have removed it since.
        arguments: The arguments of the launch by name, in the order of the call.
        launch: Launches a config.
    """
    refinement, scale = found
    result = refinement.run(launch, partial(compile_in_background, tuner, arguments), scale)
    if refinement.final is not None:
        tuner.cache[key] = refinement.final
        undecided.pop(key, None)
    return result


def compile_in_background(
    tuner: Autotuner, arguments: Mapping[str, Any], config: triton.Config
) -> Sequence[Future[Any]]:
    """Start to compile and load a config for launches with arguments like these, and return the jobs.

    The job uses mock tensors, so that it does not keep the real ones alive. Raises `ForetuneError` if an argument
    cannot be replaced by a mock.
    """
    from triton.runtime import driver

    if (kept := kept_arguments(arguments)) is None:
        raise ForetuneError("an argument of the launch has no stand-in")
    given, device = {**stand_ins(kept), **config.all_kwargs()}, driver.active.get_current_device()

    def compile_there() -> None:
        driver.active.set_current_device(device)
        load_binary(Kernel(tuner).compile((1,), given))

    return [in_background(compile_there)]


class OneLaunch:
    """One launch of an autotuned kernel: its arguments, and methods that launch, compile or time it with a config.

    `args` and `kwargs` are the arguments as they were passed, `named` are the positional ones by name, and `arguments`
    are all by name. `was_timed` is True once launches that time configs may have changed the tensors.
    """

    def __init__(self, tuner: Autotuner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._tuner, self.args, self.kwargs = tuner, args, kwargs
        self.was_timed = False
        self.named: dict[str, Any] = dict(zip(tuner.arg_names, args, strict=False))

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the launch by parameter name, positional ones included."""
        return {**self.named, **self.kwargs}

    def launch(self, config: triton.Config) -> Any:
        """Launch with a config after its own hook, without the autotuner's other hooks; return the launch's result."""
        if config.pre_hook is not None:
            config.pre_hook(self.everything(config))
        return self._tuner.fn.run(*self.args, **self.kwargs, **config.all_kwargs())

    def prepare(self) -> None:
        """Start to build Triton's launch function of the kernel, which all configs share, before a config is chosen."""
        given = {**self.kwargs, **self._tuner.configs[0].all_kwargs()}
        options = {name: value for name, value in given.items() if name not in OF_THE_LAUNCH}
        make_launch_function_ahead(self._tuner.fn, self.args, options)

    def compile(self, config: triton.Config) -> Any:
        """Compile a config without launching it, and return what the kernel's `warmup` returns.

        The config's hook runs first, because it may make the tensor descriptors that a binary depends on.
        """
        if config.pre_hook is not None:
            config.pre_hook(self.everything(config))
        kwargs = {name: value for name, value in self.kwargs.items() if name != "warmup"}
        return self._tuner.fn.warmup(*self.args, **kwargs, **config.all_kwargs())

    def time_us(self, config: triton.Config, best_us: float | None = None) -> float:
        """Return the time of a launch with a config, in microseconds.

        If the first launch takes much longer than `best_us`, the best time so far, no further launch is timed.

        All of the autotuner's hooks run around each launch. What the launch raises is passed on, after tensors have
        been restored.
        """
        tuner = self._tuner
        if twice := self.kwargs.keys() & config.kwargs.keys():
            raise ForetuneError(f"{', '.join(sorted(twice))}: set both by the launch and by the autotuner's configs")
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

        return _timed_ms(tuner, run, math.inf if best_us is None else FAR_BEHIND * best_us) * 1e3

    def can_be_timed(self) -> bool:
        """Return whether the launch can be timed: with a GPU or a custom timer, but not during CUDA graph capture."""
        if self._tuner._do_bench is not None or stubbed() is not None:
            return not is_capturing()
        import torch

        return torch.cuda.is_available() and not is_capturing()

    def reset(self, config: triton.Config) -> None:
        """Reset the tensors that the autotuner is declared to reset, after its configs were timed."""
        self._tuner.pre_hook(self.everything(config), reset_only=True)

    def everything(self, config: triton.Config) -> dict[str, Any]:
        """Return all arguments and the config's values by name."""
        return {**self.arguments, **config.all_kwargs()}


def save_tensors(tuner: Autotuner, arguments: Mapping[str, Any], reset_only: bool = False) -> None:
    """Reset and save tensors before a launch: the default `pre_hook` of `foretune.autotune`.

    It does what Triton's does, but skips a tensor that is None or left out, for which Triton before 3.9 raises.
    """
    for name in tuner.reset_to_zero:
        if arguments.get(name) is not None:
            arguments[name].zero_()
    if not reset_only:
        saved = [name for name in tuner.restore_value if arguments.get(name) is not None]
        tuner.restore_copies = {name: arguments[name].clone() for name in saved}


def restore_tensors(tuner: Autotuner, arguments: Mapping[str, Any], exception: BaseException | None) -> None:
    """Restore the tensors that `save_tensors` saved: the default `post_hook`. `exception` is not used."""
    copies, tuner.restore_copies = tuner.restore_copies, {}
    for name, value in copies.items():
        arguments[name].copy_(value)


def _timed_ms(tuner: Autotuner, run: Callable[[], None], give_up_us: float) -> float:
    """Return the time of `run`, a function that launches the kernel, in milliseconds.

    If the first launch takes longer than `give_up_us`, it is the only one. The autotuner's own `do_bench` measures if
    there is one. Otherwise Foretune's timer does, which takes 5 ms of device time and counts no launch gaps (Triton's
    benchmark takes 125 ms a config); if it cannot, Triton's does.
    """
    if tuner._do_bench is None and stubbed() is None:
        import torch

        run()  # compiles and loads, and raises what fails
        try:
            return timer_of(torch.cuda.current_device()).time(run, give_up_us=give_up_us).time_us / 1e3
        except ForetuneError:
            pass  # a hook synchronizes with the device, which our timer does not support
    return milliseconds(tuner.do_bench(run, quantiles=(0.5, 0.2, 0.8)))


def milliseconds(timing: Any) -> float:
    """Return the time in a `do_bench` result: its median, or the first of several quantiles; inf for a failed config.

    Raises:
        ForetuneError: The result is not a time: 0, negative, NaN or not a number.
    """
    first = timing[0] if isinstance(timing, (list, tuple)) and timing else timing
    try:
        time_ms = float(first)
    except Exception:  # noqa: BLE001 - a user's do_bench may return anything
        time_ms = math.nan
    if not time_ms > 0 or isinstance(first, (str, bytes, bool)):
        raise ForetuneError(f"do_bench must return milliseconds > 0 but returned {shown(timing)}")
    return time_ms


def microseconds(timing: Any) -> float | None:
    """Convert a benchmarker's result from milliseconds (a median, or several quantiles) to microseconds.

    Returns None for a failed config.

    Raises:
        ForetuneError: The result is not a time (see `milliseconds`).
    """
    time_us = 1e3 * milliseconds(timing)
    return time_us if math.isfinite(time_us) else None

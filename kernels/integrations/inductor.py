"""`foretune.use("inductor")`: Inductor generates, compiles and times only the choices predicted fastest.

Choices of mm, addmm, bmm, baddbmm and scaled_mm are limited before code is generated
(`InductorChoices._finalize_template_configs`), those of grouped_mm, convolution and flex attention before it is
compiled (`select_algorithm.add_preprocessing_fn`). Reductions get their list of configs when their source is written
(`TritonScheduling._emit_kernel_to_wrapper`). These are private hooks of torch 2.11 and 2.13.

All choices are timed by Foretune's `Timer`. Inductor's own benchmarker reads short kernels as up to twice as long as
they are, ATen's most of all, and therefore chooses others: for 512 x 4096 x 4096, it read cuBLAS's 25 us as 56 (torch
2.11 on an H100, in the tables that Inductor logs under `tests/inductor_on_gpu.py`). `Timer`, which holds the device
back until all launches are queued, read 25. Kernels that Inductor compares with its choices, such as those with a fused
epilogue, are timed in the same way, so that all times are comparable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ...datasets.errors import reason_of
from ...runtime.arguments import Mode, resolve_mode, warn_once
from ...runtime.how_many import Length, check_length
from ...runtime.launching.source_hash import digest_of
from ...runtime.launching.stub_driver import device_here
from ...runtime.shortlist import bundle_in_force, bundle_of
from ...runtime.timing.timer import Timer, timer_of

if TYPE_CHECKING:
    from pathlib import Path

    from ...model import Bundle

#: Choices, or the source of a kernel.
Limited = TypeVar("Limited", list[Any], str)
#: The default number of choices per op.
DEFAULT_K: Length = 8
#: Keyword arguments of `benchmark_gpu` that `Timer` can ignore: durations, and whether the benchmark may decide.
_KNOWN = {"warmup", "rep", "is_vetted_benchmarking", "device_type"}


def install(k: Length = DEFAULT_K, bundle: Bundle | Path | str | None = None) -> Callable[[], None]:
    """Limit Inductor's choices, and return a function that removes the limits.

    Nothing is limited with FORETUNE_MODE=off, or, with one warning, if this torch lacks the hooks.

    Args:
        k: How many choices of each op are kept; see `foretune.use`.
        bundle: The bundle that predicts, or its folder; the shipped one if None.

    Raises:
        ForetuneError: `k` is neither "auto" nor at least 1, the bundle cannot be read, or torch is not installed.
    """
    limits = Limits(check_length(k), bundle_of(bundle))
    if resolve_mode() is Mode.OFF:
        return lambda: None
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ForetuneError(f"foretune.use('inductor') needs torch: {error}") from error
    try:
        return _Seams(limits).install()
    except (ImportError, AttributeError) as error:
        warn_once(
            f"foretune.use('inductor') supports the Inductor of torch 2.11 to 2.13, and this one differs: {error}",
            ": it chooses without Foretune",
        )
        return lambda: None


@dataclass(frozen=True)
class Limits:
    """Reduces Inductor's choices for each op to those that the bundle predicts to be fastest, `k` in most cases."""

    k: Length
    bundle: Bundle | None = None
    device: DeviceSpec | None = None  # the current device if None

    @cached_property
    def uuid(self) -> str:
        """A text for the keys of Inductor's caches, which changes with everything that affects which choice wins."""
        from ...model.calibration import conformal
        from ...runtime import how_many, shortlist
        from ..inductor import choices, family, matmul, reduction, templates, worth

        # The code that ranks and limits, and the code that takes times.
        ranking = choices, family, matmul, reduction, templates, worth, how_many, shortlist, conformal
        deciding = *ranking, Limits, _Seams, _default_addmm, _or_all, timed_by_us, _timer
        sources = (inspect.getsource(one) for one in deciding)
        try:
            digest = bundle_in_force(self.bundle).digest
        except ForetuneError:
            digest = "none"
        return f"foretune-{self.k}-{digest_of([digest, *sources])}"

    def of_templates(self, choices: Sequence[Any], inputs: Any, op: str) -> list[Any]:
        """Return those of the `KernelTemplateChoice`s of one lowering of `op` that are kept.

        Choices without a tile (ATen, decompose-k) come first, then the fastest ones. If Inductor lists choices for
        several hints of a size, k of each are kept. If ATen is among the choices, exact float32 products of 16 rows or
        more are left to it.
        """
        from ..inductor.choices import mm_config, mm_problem, multiplies_as_tf32

        hints = [choice.params.to_kwargs().get("hint_override") for choice in choices]
        configs = [mm_config(choice) for choice in choices]
        with_tile = [choice for choice, config in zip(choices, configs, strict=True) if config is not None]
        tf32 = any(map(multiplies_as_tf32, with_tile))
        if with_tile and self.is_left_to_aten(inputs, op, tf32):
            return [choice for choice, config in zip(choices, configs, strict=True) if config is None]
        return self._limited(choices, configs, hints, partial(mm_problem, inputs, op, tf32))

    def of_callers(self, choices: Sequence[Any]) -> list[Any]:
        """Return the choices of an op that Inductor may time: those predicted fastest, and ATen's.

        The code of all is generated already. With k=1 there is one choice, because Inductor neither times a list of one
        nor, if it is ATen's, compiles it.
        """
        from ..inductor.choices import caller_config, caller_problem, one_choice

        configs = [caller_config(choice) for choice in choices]
        first = next((choice for choice, config in zip(choices, configs, strict=True) if config is not None), None)
        limited = list(choices)
        if first is not None:
            limited = self._limited(choices, configs, [None] * len(choices), lambda _: caller_problem(first))
        return one_choice(limited) if self.k == 1 else limited

    def is_left_to_aten(self, inputs: Any, op: str, tf32: bool | None = None) -> bool:
        """Return whether a call of `op` keeps none of Inductor's templates, because ATen is expected to be faster.

        With k=1, it depends on which of the two is expected to be faster. With k="auto", templates are dropped that are
        not worth timing, and with every k > 1 those of slow products in exact float32. `tf32` is None until Inductor
        lists templates; until then, products in exact float32 are not recognized.
        """
        from torch._inductor.utils import use_aten_gemm_kernels

        from ..inductor.choices import mm_problem
        from ..inductor.worth import is_first_choice_faster, is_slow_as_exact, is_worth_timing

        if not use_aten_gemm_kernels():
            return False
        problem = mm_problem(inputs, op, self.k == 1 if tf32 is None else tf32)
        if problem is None or self.k == 1:
            return self.k == 1 and (problem is None or not is_first_choice_faster(problem))
        if tf32 is not None and is_slow_as_exact(problem):
            return True
        return self.k == "auto" and not is_worth_timing(problem, self.device or device_here())

    def of_reduction(self, source: str, touched_bytes: Callable[[], int]) -> str:
        """Return a generated kernel's source, with predicted configs if it is a reduction that the bundle has learned.

        These are at most `MOST_TIMED` configs predicted fastest, and the one of Inductor's list predicted fastest. With
        k=1 there is one config (see `chosen`), or for a rare kernel and on an unknown arch, Inductor's own list.

        Args:
            source: The kernel's source.
            touched_bytes: Returns the bytes that a launch reads and writes.
        """
        from ..inductor.reduction import MOST_TIMED, ReductionSource, chosen

        kernel = ReductionSource.read(source, touched_bytes)
        if kernel is None or kernel.problem.family not in bundle_in_force(self.bundle).families:
            return source
        configs = kernel.candidates()
        most = MOST_TIMED if self.k == "auto" else min(self.k, MOST_TIMED)
        fastest = [configs[place] for place in self._fastest(kernel.problem, configs, most)]
        if not fastest or (self.k == 1 and (len(fastest) > 1 or kernel.is_rare)):
            return source
        device = self.device or device_here()
        return kernel.with_configs(chosen(kernel, fastest[:most], device, self.bundle))

    def _limited(
        self,
        choices: Sequence[Any],
        configs: Sequence[KernelConfig | None],
        hints: Sequence[int | None],
        problem_of: Callable[[int | None], Problem | None],
    ) -> list[Any]:
        kept = [choice for choice, config in zip(choices, configs, strict=True) if config is None]
        ranked = [(*one, hint) for *one, hint in zip(choices, configs, hints, strict=True) if one[1] is not None]
        for wanted in dict.fromkeys(hint for _, _, hint in ranked):
            known = [(choice, config) for choice, config, hint in ranked if hint == wanted]
            problem = problem_of(wanted)
            fastest = range(len(known)) if problem is None else self._fastest(problem, tuple(one for _, one in known))
            kept += [known[position][0] for position in fastest]
        return kept

    def _fastest(
        self, problem: Problem, configs: tuple[KernelConfig, ...], most: Length | None = None
    ) -> tuple[int, ...]:
        """Return the positions of the configs to keep, from `best_first`; they are cached, because layers repeat."""
        from ..inductor.choices import best_first

        device = self.device or device_here()
        key = problem, device, configs
        if key not in self._answers:
            self._answers[key] = best_first(problem, configs, device, most or self.k, self.bundle)
        return self._answers[key]

    @cached_property
    def _answers(self) -> dict[tuple[Problem, DeviceSpec, tuple[KernelConfig, ...]], tuple[int, ...]]:
        return {}


class _Seams:
    """The functions and settings of Inductor that `install` replaces to limit its choices, and the original values."""

    def __init__(self, limits: Limits) -> None:
        from torch._inductor import config, select_algorithm
        from torch._inductor.choices import InductorChoices
        from torch._inductor.codegen.triton import TritonScheduling
        from torch._inductor.kernel_inputs import MMKernelInputs
        from torch._inductor.runtime.benchmarking import benchmarker

        self.limits, self.mm_inputs = limits, MMKernelInputs
        self.config: Any = config
        self.choices: Any = InductorChoices
        self.selector: Any = select_algorithm.get_algorithm_selector_cache()
        self.preprocess = self.limited_callers  # every access would create a new bound method
        self.finalize = InductorChoices._finalize_template_configs
        self.finalized = self._limited_templates()
        self.handler = config.inductor_choices_class
        self.preprocessing: list[Any] = self.selector.preprocessing_fns
        self.benchmarker: Any = type(benchmarker)
        self.benchmark = self.benchmarker.benchmark_gpu
        self.timed = timed_by_us(self.benchmark, lambda: self.is_on)
        self.scheduling: Any = TritonScheduling
        self.emit: Any = TritonScheduling._emit_kernel_to_wrapper
        self.emitting = self._with_configs()

    def install(self) -> Callable[[], None]:
        """Install the limits, and return `restore`."""
        _use_torchs_ptxas()
        self.choices._finalize_template_configs = self.finalized
        self.config.inductor_choices_class = partial(choices_with_uuid, self.limits.uuid, self.handler)
        # A new list, because another thread may be iterating over the current one.
        self.selector.preprocessing_fns = [*self.preprocessing, self.preprocess]
        self.benchmarker.benchmark_gpu = self.timed
        self.scheduling._emit_kernel_to_wrapper = self.emitting
        return self.restore

    def restore(self) -> None:
        """Restore the original values, except where other code has replaced Foretune's since."""
        if self.choices._finalize_template_configs is self.finalized:
            self.choices._finalize_template_configs = self.finalize
        if self.is_on:
            self.config.inductor_choices_class = self.handler
        self.selector.preprocessing_fns = [fn for fn in self.selector.preprocessing_fns if fn is not self.preprocess]
        if self.benchmarker.benchmark_gpu is self.timed:
            self.benchmarker.benchmark_gpu = self.benchmark
        if self.scheduling._emit_kernel_to_wrapper is self.emitting:
            self.scheduling._emit_kernel_to_wrapper = self.emit

    @property
    def is_on(self) -> bool:
        """Whether Inductor's config has the handler that `install` sets, so that cache keys include `Limits.uuid`.

        It is looked up each time, because torch 2.13 has a config per thread, which threads that start later copy.
        """
        handler = self.config.inductor_choices_class
        return getattr(handler, "func", None) is choices_with_uuid and handler.args[0] == self.limits.uuid

    def _limited_templates(self) -> Callable[..., list[Any]]:
        """Return a replacement of Inductor's `_finalize_template_configs` that keeps only the limited choices."""

        @wraps(self.finalize)
        def finalize(*given: Any, **named: Any) -> list[Any]:
            if not self.is_on:
                return self.finalize(*given, **named)
            _or_all([], lambda: self._drop_templates(*_context_of(*given, **named)))
            listed = self.finalize(*given, **named)
            return _or_all(listed, lambda: self._limited(listed, *_context_of(*given, **named)))

        return finalize

    def _with_configs(self) -> Callable[..., None]:
        """Return a replacement of Inductor's `_emit_kernel_to_wrapper` that gives reductions predicted configs."""

        @wraps(self.emit)
        def emit(scheduling: Any, wrapper: Any, kernel: Any, source: str, *more: Any, **named: Any) -> None:
            if self.is_on:
                touched = kernel.estimate_kernel_num_bytes
                source = _or_all(source, lambda: self.limits.of_reduction(source, touched))
            self.emit(scheduling, wrapper, kernel, source, *more, **named)

        return emit

    def _drop_templates(
        self, handler: Any, template_choices: dict[str, Any], kernel_inputs: Any, op_name: str
    ) -> list[Any]:
        """Remove all but ATen's generators from `template_choices` if ATen is expected to be faster; return []."""
        is_product = isinstance(kernel_inputs, self.mm_inputs) and kernel_inputs.device_type == "cuda"
        if is_product and self.limits.is_left_to_aten(kernel_inputs, op_name):
            left = {uid: choices for uid, choices in template_choices.items() if uid.startswith("aten::")}
            if "aten::bias_addmm" in left:
                left = _default_addmm(handler, kernel_inputs) or left
            template_choices.clear()
            template_choices.update(left)
        return []

    def _limited(self, listed: list[Any], _: Any, __: Any, kernel_inputs: Any, op_name: str) -> list[Any]:
        is_product = isinstance(kernel_inputs, self.mm_inputs)
        return self.limits.of_templates(listed, kernel_inputs, op_name) if is_product else listed

    def limited_callers(self, choices: list[Any]) -> list[Any]:
        """Return the generated choices of an op that Inductor may time; all of them while `use` is not active."""
        return _or_all(choices, lambda: self.limits.of_callers(choices)) if self.is_on else choices


def _use_torchs_ptxas() -> None:
    """Set TRITON_PTXAS_PATH, if it is not set, to the ptxas that Inductor's compile workers use.

    Inductor sets it in this process only sometimes (torch 2.11). Otherwise the process looks for binaries under other
    keys than those of the workers, and compiles every choice again, one after the other.
    """
    with suppress(ImportError):
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

        _set_triton_ptxas_path()


def _context_of(
    handler: Any, template_choices: Any, kernel_inputs: Any, templates: Any, op_name: str, *more: Any, **named: Any
) -> tuple[Any, Any, Any, str]:
    """Return (handler, template_choices, kernel_inputs, op_name) from a call of `_finalize_template_configs`.

    The arguments are those of that call. If torch has changed its signature, calling `_context_of` raises TypeError.
    """
    return handler, template_choices, kernel_inputs, op_name


def _default_addmm(handler: Any, kernel_inputs: Any) -> dict[str, Any]:
    """Return, by its uid, a generator of the ATen choice that Inductor's default mode has for an addmm.

    Return {} if the bias is not a row expanded to a matrix; torch 2.11 expands it under max-autotune. ATen's addmm of
    such a bias is slow, and `bias_addmm` extracts the row in Python in each call: without CUDA graphs, a DiT took 7 %
    longer.
    """
    from torch._inductor import ir
    from torch._inductor.kernel.mm import aten_addmm

    bias, *matrices = kernel_inputs.nodes()
    if len(bias.get_size()) != 2 or bias.get_stride()[0] != 0:
        return {}
    storage, layout = ir.as_storage_and_layout(bias)
    row_layout = ir.FixedLayout(layout.device, layout.dtype, layout.size[1:], layout.stride[1:], layout.offset)
    row = ir.ReinterpretView(data=storage, layout=row_layout)
    scalars = {name: kernel_inputs.get_scalar(name) for name in ("alpha", "beta")}
    inputs = type(kernel_inputs)([row, *matrices], scalars=scalars)
    return {aten_addmm.uid: handler.get_ktc(inputs, aten_addmm, "addmm")}


def _or_all(choices: Limited, limited: Callable[[], Limited]) -> Limited:
    """Return the limited choices, or all of them, with a warning, if limiting fails, so that no compilation fails."""
    try:
        return limited()
    except Exception as error:  # noqa: BLE001
        warn_once(f"foretune.use('inductor'): no prediction ({reason_of(error)})", ": Inductor tries all choices")
        return choices


def choices_with_uuid(uuid: str, theirs: Callable[[], Any] | None) -> Any:
    """Return Inductor's handler of choices, with a `uuid()` that includes the limits.

    torch 2.13 puts `uuid()` into the keys of its caches; 2.11 puts the arguments of this call there.

    Args:
        uuid: The `Limits.uuid`.
        theirs: Creates the handler that was installed before; Inductor's own if None.
    """
    from torch._inductor.choices import InductorChoices

    handler: Any = InductorChoices() if theirs is None else theirs()
    known = getattr(handler, "uuid", str)()
    handler.uuid = lambda: f"{uuid}-{known}" if known else uuid
    return handler


def timed_by_us(theirs: Callable[..., Any], is_on: Callable[[], bool]) -> Callable[..., Any]:
    """Return a replacement of `theirs`, Inductor's `benchmark_gpu`, that times launches with `Timer`, in milliseconds.

    Calls while `is_on` returns False, with other options, on other devices or in Inductor's deterministic mode, and
    launches that synchronize, use the original method.
    """

    @wraps(theirs)
    def benchmark_gpu(benchmarker: Any, launch: Callable[[], Any], *more: Any, **how: Any) -> Any:
        from torch._inductor import config

        on_cuda = str(how.get("device_type") or "cuda").startswith("cuda")
        is_known = not more and _KNOWN.issuperset(how) and on_cuda and not config.deterministic
        timer = _timer() if is_known and is_on() else None
        if timer is not None:
            try:
                return timer.time(launch).time_us / 1000
            except ForetuneError:
                pass
        return theirs(benchmarker, launch, *more, **how)

    return benchmark_gpu


def _timer() -> Timer | None:
    """Return the current device's timer, or None, with a warning if creating it fails."""
    import torch

    try:
        return timer_of(torch.cuda.current_device()) if torch.cuda.is_available() else None
    except Exception as error:  # noqa: BLE001
        warn_once(f"foretune.use('inductor'): no timer ({reason_of(error)})", ": Inductor uses its own times")
        return None

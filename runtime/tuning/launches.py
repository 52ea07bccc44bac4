"""What a launch of anybody's autotuner is as a `Problem`, where nobody declared a family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import shown
from ...datasets.problem import DTYPES, MOST_SIZE, dtype_of_tensor
from ..launching.kernel import Kernel
from .flag_text import flag_of

if TYPE_CHECKING:
    import numpy as np
    import triton
    from numpy.typing import NDArray

    from ...datasets import BinaryFacts

#: The dimension that no argument has: how much data the tensors of a launch have, to a power of two. A grid's size, and
#: whether the data fit into the cache, hang on sizes that many kernels are never told.
ELEMENTS = "elements"
#: What it is called for a kernel that has an argument of that name: no argument can be called so.
OTHER_ELEMENTS = "tensors.elements"


def autotuner_of(kernel: Any) -> triton.runtime.Autotuner:
    """The autotuner of a kernel: itself, or the one under `triton.heuristics` and whatever else has an `fn`.

    Raises `ForetuneError` where there is none.
    """
    from triton.runtime import Autotuner

    found, seen = kernel, 0
    while not isinstance(found, Autotuner) and seen < 100 and not isinstance(found, type):
        found, seen = getattr(found, "fn", None), seen + 1
    if not isinstance(found, Autotuner):
        raise ForetuneError(f"a kernel must have a triton.autotune but this one has none: {shown(kernel)}")
    return found


class LaunchFamily(Family):
    """The family of one autotuner, named "module.qualname". Its problems are what decides on a config, as far as the
    host sees it:

    - dimensions: integers that are in the autotuner's key or constants (a key of `["BC"]` hides the sizes that matter),
      and `elements`, the number of all tensors' elements to the nearest power of two;
    - flags: constants and keys that are True, as their names; what is None, text or a number of another kind, as
      "name=value";
    - the dtype of each tensor. One that Foretune has no word for is a flag.

    It predicts nothing by itself: `OwnTimings` learns from what the autotuner measures.
    """

    knobs = ()
    feature_names = ()
    dtypes = DTYPES

    def __init__(self, tuner: triton.runtime.Autotuner) -> None:
        kernel = Kernel(tuner)
        function = kernel.jit.fn
        if odd := [one for one in tuner.configs if not isinstance(getattr(one, "kwargs", None), Mapping)]:
            raise ForetuneError(f"an autotuner's configs must be triton.Configs but one is {shown(odd[0])}")
        self.name = f"{function.__module__}.{function.__qualname__}"  # type: ignore[misc]  # of an instance, here
        tuned = {knob for config in tuner.configs for knob in config.kwargs}
        self._parameters = tuple(name for name in kernel.parameters if name not in tuned)
        self._defaults = {name: value for name, value in kernel.defaults.items() if name not in tuned}
        self._decisive = frozenset(self._parameters) & (frozenset(tuner.keys) | kernel.constants)
        self._elements = OTHER_ELEMENTS if ELEMENTS in self._decisive else ELEMENTS
        self.dims = (*sorted(self._decisive), self._elements)  # type: ignore[misc]  # those that a problem may have
        self._configs = tuple(tuner.configs)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        given = {**self._defaults, **{name: arguments[name] for name in self._parameters if name in arguments}}
        dims: list[tuple[str, int]] = []
        flags: list[str] = []
        dtypes: dict[str, str] = {}
        elements = 0
        for name, value in given.items():
            tensor: Any = (
                getattr(value, "base", None) if hasattr(value, "block_shape") else value
            )  # a host's descriptor
            if hasattr(tensor, "dtype") and hasattr(tensor, "shape"):
                elements += math.prod(tensor.shape)
                dtype = str(tensor.dtype).removeprefix("torch.")
                try:
                    dtypes[name] = dtype_of_tensor(name, tensor)
                except ForetuneError:
                    flags.append(f"{name}:{dtype}")
            elif value is None:
                flags.append(f"{name}=None")
            elif name not in self._decisive or value is False:
                continue
            elif value is True:
                flags.append(name)
            elif isinstance(value, int) and 0 <= value <= MOST_SIZE:
                dims.append((name, int(value)))
            else:
                flags.append(flag_of(name, value))
        dims.append((self._elements, _power_of_two(elements)))
        return Problem(self.name, tuple(sorted(dims)), tuple(sorted(dtypes.items())) or "bf16", tuple(sorted(flags)))

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        return tuple(dict.fromkeys(KernelConfig.from_triton(config) for config in self._configs))

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """None: what a config of somebody else's kernel cannot run, its own `early_config_prune` says."""
        return None

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        """None, (n_configs, 0): what `OwnTimings` is asked does not hang on what a knob's value means. A smooth model
        over dimensions and knobs was tried and is worse (README.md)."""
        import numpy as np

        return np.zeros((len(configs), 0), np.float32)


def _power_of_two(count: int) -> int:
    return min(2 ** round(math.log2(count)), MOST_SIZE) if count > 0 else 0

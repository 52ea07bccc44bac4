"""Anybody's autotuned kernels: where they are, and what their launches are as a `Problem` without a family."""

from __future__ import annotations

import hashlib
import importlib
import math
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import shown, warn
from ...datasets.problem import DTYPES, MOST_SIZE, dtype_of_tensor
from ..launching.kernel import Kernel
from ..launching.source_hash import hash_of_kernel, is_kernel

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
#: A longer text is kept by its beginning and a digest.
_LONGEST = 100
#: Texts that could be mistaken for what stands for another value, such as a number, None or a dtype.
_MISTAKABLE = re.compile(
    r"none|true|false|[+-]?0x.*|['\"<(\[{].*|[lt]\(.*"
    r"|(torch\.)?(void|bool|u?int\d+|bfloat16|float\d+\w*|complex\d+|[bf]p?f?\d+|fp\d+e\d+\w*|pointer<.*)",
    re.IGNORECASE | re.DOTALL,
)


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


def autotuners_in(module: ModuleType) -> list[triton.runtime.Autotuner]:
    """Those that a module, or any module of a package below it, has a name for, each once. Modules that were not
    imported yet are; one warning says which could not be.

    >>> import json
    >>> autotuners_in(json)
    []
    """
    from triton.runtime import Autotuner, Heuristics
    from triton.runtime.jit import KernelInterface

    failed: dict[str, str] = {}
    found: dict[triton.runtime.Autotuner, None] = {}
    for one in _modules(module, failed):
        for value in list(vars(one).values()):
            if isinstance(value, KernelInterface) and _is_autotuned(value, (Autotuner, Heuristics)):
                found[autotuner_of(value)] = None
    if failed:
        names = ", ".join(f"{name} ({why})" for name, why in sorted(failed.items())[:3])
        more = f", and {len(failed) - 3} more" if len(failed) > 3 else ""
        warn(f"{len(failed)} modules of {module.__name__} cannot be imported, so their kernels are left: {names}{more}")
    return list(found)


def _is_autotuned(kernel: object, layers: tuple[type, ...]) -> bool:
    autotuner = layers[0]
    while isinstance(kernel, layers):
        if isinstance(kernel, autotuner):
            return True
        kernel = getattr(kernel, "fn", None)
    return False


def _modules(module: ModuleType, failed: dict[str, str]) -> list[ModuleType]:
    """A module and all below it, each after its parent. `failed` gets those that cannot be imported, and why."""
    modules = [module]
    prefix = f"{module.__name__}."
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), prefix):
        if found.name.rpartition(".")[2] == "__main__":  # importing it would run it
            continue
        try:
            below = sys.modules.get(found.name) or importlib.import_module(found.name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever somebody's module does when it is imported
            failed[found.name] = f"{type(error).__name__}: {str(error)[:80]}"
        else:
            modules += _modules(below, failed)
    return modules


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


def flag_of(name: str, value: Any) -> str:
    """Return "name=value" for a value of which there is no other word.

    Numbers, None and texts stand for themselves. A text that could be mistaken for another value is quoted.

    >>> flag_of("bias", None), flag_of("bias", "None"), flag_of("mode", "fast"), flag_of("scale", 0.5)
    ('bias=None', "bias='None'", 'mode=fast', 'scale=0.5')
    """
    text = _text(value)
    if len(text) > _LONGEST or not text.isprintable():
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
        text = f"{''.join(c for c in text[: _LONGEST - 20] if c.isprintable())}...{digest}"
    return f"{name}={text}"


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return f"<{type(value).__module__}.{type(value).__qualname__}.{value.name or value.value}>"
    if isinstance(value, str):
        return repr(str(value)) if _MISTAKABLE.fullmatch(value) or _is_number(value) else str(value)
    if isinstance(value, int) and value.bit_length() > 300:
        return hex(value)  # Python may refuse to write it in decimal
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__[0]}({', '.join(map(_text, value))})" if _has_objects(value) else str(value)
    if is_kernel(value):
        return f"<{value.fn.__module__}.{value.fn.__qualname__} {hash_of_kernel(value)}>"
    return str(value)


def _has_objects(values: Any) -> bool:
    """Whether a list holds anything but numbers and texts, whose own representation may be that of another value."""
    return any(not isinstance(one, (int, float, str, type(None))) or isinstance(one, Enum) for one in values)


def _is_number(text: str) -> bool:
    try:
        complex(text)
    except ValueError:
        return False
    return True

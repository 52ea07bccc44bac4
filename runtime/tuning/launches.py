"""Find the autotuned kernels of any package, and describe their launches as `Problem`s without a declared family."""

from __future__ import annotations

import hashlib
import importlib
import math
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import reason_of, shown, warn
from ...datasets.files import find_modules_here
from ...datasets.problem import DTYPES, MOST_SIZE, dtype_of_tensor
from ..launching.kernel import Kernel
from ..launching.source_hash import hash_of_kernel, is_kernel

if TYPE_CHECKING:
    import triton

#: A dimension that no argument has: the total number of elements of a launch's tensors, to the nearest power of two.
#: The grid's size, and whether the data fit into the cache, depend on sizes that many kernels do not take as arguments.
ELEMENTS = "elements"
#: Its name for a kernel with an argument of that name: no argument can have a dot in its name.
OTHER_ELEMENTS = "tensors.elements"
#: Longer texts are stored as their beginning and a digest; in characters.
_LONGEST = 100
#: Texts that could be mistaken for another value's representation, such as a number, None or a dtype.
_MISTAKABLE = re.compile(
    r"none|true|false|[+-]?0x.*|['\"<(\[{].*|[lt]\(.*"
    r"|(torch\.)?(void|bool|u?int\d+|bfloat16|float\d+\w*|complex\d+|[bf]p?f?\d+|fp\d+e\d+\w*|pointer<.*)",
    re.IGNORECASE | re.DOTALL,
)


def autotuner_of(kernel: Any) -> triton.runtime.Autotuner:
    """Return a kernel's autotuner.

    It is the kernel itself, or the autotuner under `triton.heuristics` or other wrappers that have an `fn`.

    Raises:
        ForetuneError: The kernel has no autotuner.
    """
    from triton.runtime import Autotuner

    found, seen = kernel, 0
    while not isinstance(found, Autotuner) and seen < 100 and not isinstance(found, type):
        found, seen = getattr(found, "fn", None), seen + 1
    if not isinstance(found, Autotuner):
        raise ForetuneError(f"a kernel must have a triton.autotune but this one has none: {shown(kernel)}")
    return found


def autotuners_in(module: ModuleType) -> list[triton.runtime.Autotuner]:
    """Return the autotuned kernels that are variables of a module, or of any module below it, each autotuner once.

    Modules that are not imported yet are imported; one warning lists those that cannot be.

    >>> import json
    >>> autotuners_in(json)
    []
    """
    failed: dict[str, str] = {}
    found = autotuners_among(_modules(module, failed))
    if failed:
        names = ", ".join(f"{name} ({why})" for name, why in sorted(failed.items())[:3])
        more = f", and {len(failed) - 3} more" if len(failed) > 3 else ""
        warn(f"skipped {len(failed)} modules of {module.__name__} that cannot be imported: {names}{more}")
    return found


def autotuners_among(modules: Iterable[ModuleType]) -> list[triton.runtime.Autotuner]:
    """Return the autotuners of the kernels that are variables of these modules, each once."""
    from triton.runtime import Autotuner, Heuristics
    from triton.runtime.jit import KernelInterface

    found: dict[triton.runtime.Autotuner, None] = {}
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, KernelInterface) and _is_autotuned(value, (Autotuner, Heuristics)):
                found[autotuner_of(value)] = None
    return list(found)


def autotuners_named(name: str) -> list[triton.runtime.Autotuner]:
    """Return the autotuned kernels of a module and all modules below it, or the one kernel of that name.

    A module is installed or in the working directory. A kernel is named by the function that it compiles, or by the
    variable that has its autotuner.

    Raises:
        ForetuneError: There is no such module, or it cannot be imported.
    """
    find_modules_here()
    module = name
    while module:
        try:
            imported = importlib.import_module(module)
            found = autotuners_in(imported)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise ForetuneError(f"{shown(name)} cannot be imported: {reason_of(error)}") from error
            module = module.rpartition(".")[0]
            continue
        except Exception as error:
            raise ForetuneError(f"{shown(name)} cannot be imported: {reason_of(error)}") from error
        if module == name:
            return found
        with suppress(ForetuneError):
            return [autotuner_of(vars(imported).get(name.removeprefix(f"{module}.")))]
        return [one for one in found if LaunchFamily(one).name == name]
    raise ForetuneError(f"there is no module or kernel {shown(name)}")


def _is_autotuned(kernel: object, layers: tuple[type, ...]) -> bool:
    """Return whether a kernel is an autotuner, or is wrapped around one, as by `triton.heuristics`.

    `layers` has the type of autotuners first, and then the types of the wrappers.
    """
    autotuner = layers[0]
    while isinstance(kernel, layers):
        if isinstance(kernel, autotuner):
            return True
        kernel = getattr(kernel, "fn", None)
    return False


def _modules(module: ModuleType, failed: dict[str, str]) -> list[ModuleType]:
    """Return a module and all modules below it, parents first; add to `failed` why some cannot be imported."""
    modules = [module]
    prefix = f"{module.__name__}."
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), prefix):
        if found.name.rpartition(".")[2] == "__main__":  # importing it would run it
            continue
        try:
            below = sys.modules.get(found.name) or importlib.import_module(found.name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign module may raise anything at import
            failed[found.name] = f"{type(error).__name__}: {str(error)[:80]}"
        else:
            modules += _modules(below, failed)
    return modules


class LaunchFamily(Family):
    """A family made of one autotuner, named "module.qualname", for kernels without a declared family.

    Its problems are what determines the best config, as far as the host sees it:

    - dimensions: the integers in the autotuner's key or among the constants (a key of `["BC"]` hides the sizes that
      matter), and `elements`, the total number of the tensors' elements to the nearest power of two;
    - flags: constants and keys that are True, by name; None, texts and other values as "name=value";
    - the dtype of each tensor. A dtype that Foretune has no name for is a flag.

    It predicts nothing by itself: `OwnTimings` learns from what the autotuner measures.
    """

    knobs = ()
    feature_names = ()
    features = None  # type: ignore[assignment]  # `OwnTimings` has its own, of the knobs and the problem's dimensions
    dtypes = DTYPES

    def __init__(self, tuner: triton.runtime.Autotuner) -> None:
        kernel = Kernel(tuner)
        function = kernel.jit.fn
        if odd := [one for one in tuner.configs if not isinstance(getattr(one, "kwargs", None), Mapping)]:
            raise ForetuneError(f"an autotuner's configs must be triton.Configs but one is {shown(odd[0])}")
        self.name = f"{function.__module__}.{function.__qualname__}"  # type: ignore[misc]  # set on the instance
        tuned = {knob for config in tuner.configs for knob in config.kwargs}
        self._parameters = tuple(name for name in kernel.parameters if name not in tuned)
        self._defaults = {name: value for name, value in kernel.defaults.items() if name not in tuned}
        self._decisive = frozenset(self._parameters) & (frozenset(tuner.keys) | kernel.constants)
        self._elements = OTHER_ELEMENTS if ELEMENTS in self._decisive else ELEMENTS
        self.dims = (*sorted(self._decisive), self._elements)  # type: ignore[misc]  # all that a problem may have
        self._configs = tuple(tuner.configs)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """Return the problem (sizes, dtypes and flags) that a launch with these arguments, given by name, solves."""
        given = {**self._defaults, **{name: arguments[name] for name in self._parameters if name in arguments}}
        dims: list[tuple[str, int]] = []
        flags: list[str] = []
        dtypes: dict[str, str] = {}
        elements = 0
        for name, value in given.items():
            is_descriptor = hasattr(value, "block_shape")  # a host's tensor descriptor
            tensor: Any = getattr(value, "base", None) if is_descriptor else value
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
        nearest = min(2 ** round(math.log2(elements)), MOST_SIZE) if elements else 0  # power of two, by ratio
        dims.append((self._elements, nearest))
        return Problem(self.name, tuple(sorted(dims)), tuple(sorted(dtypes.items())) or "bf16", tuple(sorted(flags)))

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return the autotuner's configs, each once."""
        return tuple(dict.fromkeys(KernelConfig.from_triton(config) for config in self._configs))

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return None: a foreign kernel's own `early_config_prune` decides which configs can run."""
        return None


def flag_of(name: str, value: Any) -> str:
    """Return "name=value" for an argument that is neither a dimension nor a plain flag.

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
    """Return a value as text, which is different for different values."""
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
    """Return whether a list has items other than numbers, strings and None, whose `repr` need not identify them."""
    return any(not isinstance(one, (int, float, str, type(None))) or isinstance(one, Enum) for one in values)


def _is_number(text: str) -> bool:
    """Return whether Python's `complex` can read a text as a number."""
    try:
        complex(text)
    except ValueError:
        return False
    return True

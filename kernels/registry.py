"""Find kernel families by name: the families of this package, registered ones, and those of entry points.

Another package makes its families known by name with an entry point in the group `foretune.families`:

    [project.entry-points."foretune.families"]
    row_softmax = "their_package.softmax:RowSoftmax"

`comparison_of` finds what a family is compared with, in the module `contenders` of its package. `attach_ops` imports
the ops of such a package at their first use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets import Family, ForetuneError, Measurable, check_attributes
from ..datasets.errors import did_you_mean, printable, reason_of, shown, warn
from ..datasets.files import find_modules_here

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint
    from types import ModuleType

    from ..model.baselines import Baseline
    from ..runtime.timing.compare import Comparison, Goal, Row

#: The entry points that name families of other packages.
GROUP = "foretune.families"
#: The families of this package and their modules. A module is imported when its family is first looked up.
_OURS = {
    "fused_moe": ".fused_moe:FusedMoeUp",
    "fused_moe_down": ".fused_moe:FusedMoeDown",
    "gated_mlp": ".gated_mlp:GatedMlp",
    "grouped_gemm_dw": ".grouped_gemm:GroupedGemmDW",
    "grouped_gemm_dx": ".grouped_gemm:GroupedGemmDX",
    "grouped_gemm_fwd": ".grouped_gemm:GroupedGemmForward",
    "inductor_convolution": ".inductor:InductorConvolution",
    "inductor_flex_attention": ".inductor:InductorFlexAttention",
    "inductor_flex_backward": ".inductor:InductorFlexBackward",
    "inductor_flex_decoding": ".inductor:InductorFlexDecoding",
    "inductor_grouped_mm": ".inductor:InductorGroupedMM",
    "inductor_mm": ".inductor:InductorMM",
    "inductor_persistent_reduction": ".inductor:InductorPersistentReduction",
    "inductor_reduction": ".inductor:InductorReduction",
    "matmul": ".matmul:Matmul",
    "rms_norm_rope_bwd": ".rms_norm_rope:RmsNormRopeBackward",
    "rms_norm_rope_fwd": ".rms_norm_rope:RmsNormRopeForward",
    "scaled_gemm": ".scaled_gemm:ScaledGemm",
    "scaled_grouped_gemm_dw": ".scaled_gemm:ScaledGroupedGemmDW",
    "scaled_grouped_gemm_fwd": ".scaled_gemm:ScaledGroupedGemmForward",
}
#: Inductor's names of its ops, as in `foretune collect inductor:mm`. All its matrix products are one family.
_OTHER_NAMES = {name.replace("_", ":", 1): name for name in _OURS if name.startswith("inductor_")} | dict.fromkeys(
    ("inductor:addmm", "inductor:baddbmm", "inductor:bmm", "inductor:scaled_mm"), "inductor_mm"
)
_registered: dict[str, Family] = {}


def register(family: Family | type[Family]) -> Family:
    """Register a family under its name for this process, and return it.

    A family that was registered under the same name before is replaced.

    Args:
        family: The family, or its class, which is instantiated without arguments.

    Returns:
        The family object, which `find_family` returns for this name from now on.

    Raises:
        ForetuneError: `family` is not a `Family`, or the class cannot be instantiated without arguments.

    >>> register(find_family("grouped_gemm_fwd")).name
    'grouped_gemm_fwd'
    """
    made = _family_of(family)
    _registered[made.name] = made
    return made


def families() -> dict[str, Family]:
    """Return all families by name: those of this package, registered ones, and those of entry points.

    An entry point that cannot be loaded is left out with a warning.

    >>> "grouped_gemm_dw" in families()
    True
    """
    found = {}
    for name in _names():
        try:
            found[name] = find_family(name)
        except ForetuneError as error:  # noqa: PERF203 - a handful of names
            warn(f"{name} is left out: {error}")
    return found


def find_family(family: str | Family | type[Family]) -> Family:
    """Return the family given by its name, import path, class or the object itself; the same object each time.

    Args:
        family: A name; "package.module:attribute" of an installed module or of one in the working directory;
            "path/to/file.py:attribute"; a class, which is instantiated once without arguments; or a family, which is
            returned unchanged.

    Raises:
        ForetuneError: The name is unknown (the message lists the known ones and how to add one), nothing can be
            imported from the path, or the value is not a `Family`.

    >>> find_family("grouped_gemm_dw").knobs[:3]
    ('BLOCK_M', 'BLOCK_N', 'BLOCK_K')
    >>> find_family("foretune.kernels.grouped_gemm:GroupedGemmDW") is find_family("grouped_gemm_dw")
    True
    """
    if not isinstance(family, str):
        return _family_of(family)
    family = _OTHER_NAMES.get(family, family)
    if family in _registered:
        return _registered[family]
    if family in _OURS:
        module, _, attribute = _OURS[family].partition(":")
        return _registered.setdefault(family, _family_of(getattr(import_module(module, __package__), attribute)))
    if ":" in family or family.endswith(".py"):
        found = _family_at(family)
        _registered.setdefault(found.name, found)  # from now on by its name too, unless that is taken
        return found
    for entry in _entry_points():
        if entry.name == family:
            return _registered.setdefault(family, _family_of_entry(entry))
    names = _names()
    raise ForetuneError(
        f"unknown kernel family {shown(family)}{did_you_mean(family, names)}; known: {', '.join(names)}. To add one: "
        f'foretune.register(family), an entry point in the group "{GROUP}", or name it as package.module:attribute or '
        "path/to/file.py:attribute"
    )


def find_measurable(family: str | Family | type[Family]) -> Measurable:
    """Return a family as `find_family` does, and require that it can be collected.

    Raises:
        ForetuneError: The family can only predict (it is not a `Measurable`), or as for `find_family`.
    """
    found = find_family(family)
    if not isinstance(found, Measurable):
        raise ForetuneError(f"{found.name} can be predicted but not collected: it is a Family but not a Measurable")
    return found


def _names() -> list[str]:
    return sorted({*_OURS, *_registered, *(printable(entry.name) for entry in _entry_points())})


def _entry_points() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # slow: a third of the import time of foretune

    return tuple(entry_points(group=GROUP))


def _family_of_entry(entry: EntryPoint) -> Family:
    place = printable(f"the entry point {entry.name} = {entry.value}")
    try:
        family = _family_of(entry.load())
    except (Exception, SystemExit) as error:  # importing a third-party module can raise anything
        raise ForetuneError(f"{place} cannot be loaded: {printable(reason_of(error))}") from error
    if family.name != entry.name:
        raise ForetuneError(f"{place} leads to the family {family.name}: the entry point must have its name")
    return family


def _family_at(place: str) -> Family:
    """Return the family at package.module:attribute or path/to/file.py:attribute.

    A module is installed or in the working directory. A file is imported as a module of its name from its folder, which
    is appended to `sys.path`, so that child processes find it too.
    """
    module, _, attribute = place.rpartition(":") if ":" in place else (place, "", "")
    try:
        if not attribute:
            raise ForetuneError(f"give the class or object in the file too, as {shown(f'{module}:YourFamily')}")
        find_modules_here()
        is_file = module.endswith(".py") or "/" in module
        found: Any = _module_in(Path(module), attribute) if is_file else import_module(module)
        for name in attribute.split("."):
            if not hasattr(found, name):
                there = [key for key, value in vars(found).items() if _is_family_in(found, value)]
                hint = did_you_mean(name, there)
                raise ForetuneError(f"it has no {shown(name)}{hint}; its families: {', '.join(there) or 'none'}")
            found = getattr(found, name)
        return _family_of(found)
    except (Exception, SystemExit) as error:  # as above
        raise ForetuneError(f"no kernel family at {shown(place)}: {printable(reason_of(error))}") from error


def _is_family_in(module: Any, value: Any) -> bool:
    """Return whether a value is a family, or a family's class that this module defines rather than imports."""
    is_class = isinstance(value, type) and issubclass(value, Family)
    return isinstance(value, Family) or (is_class and value.__module__ == getattr(module, "__name__", None))


def _module_in(path: Path, attribute: str) -> ModuleType:
    """Import a Python file and return its module; an error names `attribute`, which the caller will look up in it."""
    path = path.resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ForetuneError(f"there is no Python file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        module = import_module(path.stem)
    except ImportError as error:
        if "no known parent package" not in str(error):
            raise
        names, folder = [path.parent.name, path.stem], path.parent.parent
        while (folder / "__init__.py").exists():
            names, folder = [folder.name, *names], folder.parent
        raise ForetuneError(
            f"{path.name} has relative imports, so it must be imported in its package: name it as "
            f"{'.'.join(names)}:{attribute} and run in {folder}, or install the package"
        ) from error
    origin = getattr(module, "__file__", None)
    if origin is None or Path(origin).resolve() != path:
        raise ForetuneError(
            f"importing {path.stem!r} finds {origin or 'a built-in module'} instead of {path}: rename the file"
        )
    return module


def _family_of(value: Any) -> Family:
    if isinstance(value, type) and issubclass(value, Family):
        value = _made(value)
    if not isinstance(value, Family):
        raise ForetuneError(f"a kernel family must be a Family, a class of one, or its name, but is {shown(value)}")
    check_attributes(value)
    return value


@cache
def _made(family: type[Family]) -> Family:
    """Return the only instance of a family's class, made at the first call: caches are keyed by object identity."""
    try:
        return family()
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, TypeError) else printable(reason_of(error))
        raise ForetuneError(f"{family.__name__} cannot be made without arguments: {why}") from error


def comparison_of(family: Family) -> Comparison:
    """Return the object `COMPARISON` of the module `contenders` in the family's package.

    An exception raised while that module is imported propagates unchanged.

    Raises:
        ForetuneError: There is no such module or object.
    """
    module = _contenders(family)
    comparison: Comparison | None = getattr(module, "COMPARISON", None)
    if comparison is None:
        place = f"{_package(family)}.contenders"
        raise ForetuneError(f"{family.name} has nothing to be compared with: no COMPARISON in {place}")
    return comparison


def baselines_of(family: Family) -> Mapping[str, Baseline]:
    """Return the rankers that only this family is compared with, by name.

    They are the mapping `BASELINES` of the module `contenders` in the family's package; empty if there is none, or if
    the family is no `Measurable`, because these rankers use its default config.

    >>> from foretune.kernels import find_family
    >>> [list(baselines_of(find_family(name))) for name in ("grouped_gemm_fwd", "inductor_mm", "inductor_reduction")]
    [[], ['inductor'], []]
    """
    found: Mapping[str, Baseline] = getattr(_contenders(family), "BASELINES", {})
    return found if isinstance(family, Measurable) else {}


def judge_predicted(
    rows: Sequence[Row], over: Mapping[str, Sequence[float]], what: str = "predicted config, over {}"
) -> list[Goal]:
    """Return the goals for the speed of the predicted config relative to each contender.

    Args:
        rows: The rows of a comparison. A row without a contender's time does not count for that contender.
        over: By contender, the minimum speedup of each row and, optionally, of the geometric mean.
        what: The text of a goal, with `{}` for the contender's name.
    """
    from ..runtime.timing.compare import judge_least

    goals: list[Goal] = []
    for name, least in over.items():
        chosen = [row for row in rows if name in row.others_us]
        ratios = [row.others_us[name] / row.predicted_us for row in chosen]
        goals += judge_least(what.format(name), chosen, ratios, *least)
    return goals


def _contenders(family: Family) -> ModuleType | None:
    """Return the family's module `contenders`, or None if there is none; exceptions of its import propagate."""
    package = _package(family)
    place = f"{package}.contenders"
    return import_module(place) if package and find_spec(place) else None


def _package(family: Family) -> str:
    return type(family).__module__.rpartition(".")[0]


def attach_ops(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package whose ops need torch and triton.

    Because a caller that looks up an op is about to call it, the first look-up also starts background work that a first
    call would wait for (hashing Triton's sources, collecting compilations).

    Args:
        package: The package's name. The package has an `__all__`.
        homes: The module of each op, relative to the package.

    >>> get, _ = attach_ops("foretune.kernels.grouped_gemm", {"grouped_gemm": ".op"})
    >>> get("grouped_gemm").__name__
    'grouped_gemm'
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from triton import knobs

        from ..runtime.launching.ahead import hash_triton_ahead

        # Imported here because every family's package imports this module, and predicting needs no threads.
        from ..runtime.launching.collector import collecting_later

        if not knobs.runtime.interpret:  # the interpreter compiles nothing
            hash_triton_ahead()
        with collecting_later():
            found = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return list(sys.modules[package].__all__)

    return get, names

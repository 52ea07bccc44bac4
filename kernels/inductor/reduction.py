"""The reductions that Inductor generates: a family whose problems are read from the generated source.

Inductor takes the config of a reduction from a few rules, or times a handful. On 178 reductions of real layers the best
of these was 20 % slower than the best of 40 (NOTES.md). Here the source of a kernel becomes a problem, its configs are
ranked by what was measured of other kernels, and the source is rewritten to have a list with the fastest. Only text is
changed: `cached_autotune`, which Inductor's own rules call with their list, is called with ours.

Importing this needs neither torch nor triton. The sources of torch 2.11 and 2.13 are understood; others are left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, wrong_knobs
from ...datasets.problem import DTYPES
from ...runtime.shortlist import predicted_slowdowns
from ..config_limits import MOST_THREADS
from .family import columns_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...model import Bundle

#: Flags: loads are contiguous along the reduction, or along the rows.
INNER, OUTER = "inner", "outer"
#: Inductor's largest blocks of rows, and the most elements of a tile; larger tiles only hold one persistent row.
MOST_ROWS, MOST_TILE = 4096, 16384
#: The elements of a tile for each thread: most measured configs are within these limits, and all fast ones.
LEAST_EACH, MOST_EACH = 1, 64
_LEAST_TILE = 64
#: The most configs of a reduction that are timed next to Inductor's. Each adds a fifth to the first call of a layer.
MOST_TIMED = 3
#: A config of Inductor's own stays the only one of a reduction if it is predicted slower by less than this factor. With
#: it, 8 instead of 19 of 158 reductions became over 5 % slower, and the mean did not change.
DOUBT = 1.1
#: Rows that Inductor keeps in registers if they are contiguous. It rarely loops over one: the shipped data have one
#: such kernel, and the config predicted first took 1.74 times as long as its own for a masked softmax of 197 elements.
_MOST_PERSISTENT = 1024
_WARPS = (1, 2, 4, 8, 16, 32)
_DECORATOR = re.compile(r"@triton_heuristics\.(reduction|persistent_reduction)\((.*?)\n\)\n@triton\.jit", re.DOTALL)
_HINT = re.compile(r"\s*reduction_hint=[\w.]+,")
#: Options of a kernel's metadata that bind its config: its bits are wanted, or its blocks have other limits.
_BINDING = (
    "deterministic",
    "batch_invariant",
    "force_filter_reduction_configs",
    "are_deterministic_algorithms_enabled",
    "no_x_dim",
    "native_matmul",
    "RSPLIT_SIZE",
    "combo_grid_meta",
    "tma_min_block_sizes",
    "min_xblock",
    "min_rblock",
)
_LOADS, _STORES = re.compile(r"\btl\.load\("), re.compile(r"\btl\.(?:store|atomic_add)\(")
_REDUCTIONS = re.compile(r"\b(?:tl\.sum|triton_helpers\.\w+2|tl\.reduce|welford)\(")
_HEAVY = re.compile(r"\b(?:libdevice|tl_math|tl)\.(?:exp|log|erf|tanh|rsqrt|sqrt|sigmoid|sin|cos)\w*\(")
#: Triton's names of element types that differ from Foretune's.
_DTYPES = {"fp8e4nv": "fp8e4m3", "fp8e5": "fp8e5m2", "u8": "uint8"} | {f"i{bits}": f"int{bits}" for bits in (8, 16, 32)}
#: The features, and what they are; `feature_text` adds the logarithm to those that begin with log_.
_FEATURES = {
    "log_x": "rows",
    "log_r": "elements of a row",
    "log_bytes": "bytes that a launch reads and writes",
    "log_memory_us": "microseconds that moving them takes",
    "log_bytes_of_element": "bytes moved for each element that is reduced",
    "loads": "loads in the source",
    "stores": "stores in the source",
    "reductions": "reductions in the source",
    "heavy": "exponentials, roots and the like in the source",
    "is_inner": "1 if loads are contiguous along the reduction",
    "is_outer": "1 if loads are contiguous along the rows",
    "log_itemsize": "bytes of an element of the first operand",
    "log_xblock": "rows of a tile",
    "log_rblock": "elements of a row in a tile",
    "log_warps": "warps of a program",
    "log_tile": "elements of a tile",
    "log_each": "elements of a tile for each thread",
    "log_steps": "steps of the loop over a row",
    "log_programs": "programs",
    "log_waves": "programs over those that the device holds at once",
    "fill_of_x": "share of the tiles' rows that exist",
    "fill_of_r": "share of the tiles' columns that exist",
    "loaded_each": "elements that a thread loads in a step",
    "log_bytes_of_program": "bytes that a program moves",
    "log_bytes_of_step": "bytes that a program moves in a step",
}


@dataclass(frozen=True)
class ReductionSource:
    """The source of a generated reduction over rows.

    Attributes:
        text: The source.
        kind: Inductor's heuristic, "reduction" or "persistent_reduction".
        problem: The problem.
    """

    text: str
    kind: str
    problem: Problem

    @classmethod
    def read(cls, text: str, touched_bytes: Callable[[], int]) -> ReductionSource | None:
        """Parse the source of a kernel; return None if it is no such reduction, or if its config must not be changed.

        Args:
            text: The Python source, as Inductor compiles it.
            touched_bytes: Returns the bytes that a launch reads and writes, as Inductor estimates them.
        """
        found = _DECORATOR.findall(text)
        if len(found) != 1:
            return None
        kind, arguments = found[0]
        call = ast.parse(f"f({arguments})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        meta, triton_meta = (_literals(given.get(name)) for name in ("inductor_meta", "triton_meta"))
        hints, hint = ast.literal_eval(given["size_hints"]), given.get("reduction_hint")
        if set(hints) != {"x", "r0_"} or any(meta.get(name) or triton_meta.get(name) for name in _BINDING):
            return None
        if "DeviceProperties(type='cuda'" not in arguments:
            return None
        pointers = [type_[1:] for type_ in triton_meta.get("signature", {}).values() if type_.startswith("*")]
        family = _FAMILIES[kind]
        dtype = next((name for name in map(_dtype, pointers) if name in family.dtypes), None)
        if dtype is None:
            return None
        body = text.split("\n@triton.jit", 1)[1].split("\ndef get_args")[0]
        flags = [flag for flag in (INNER, OUTER) if getattr(hint, "attr", "").lower().startswith(flag)]
        return cls(
            text,
            kind,
            Problem.of(
                family.name,
                dtype=dtype,
                flags=tuple(flags),
                x=_size(body, "xnumel", hints["x"]),
                r=_size(body, "r0_numel", hints["r0_"]),
                bytes=max(int(touched_bytes()), 1),
                loads=len(_LOADS.findall(body)),
                stores=len(_STORES.findall(body)),
                reductions=len(_REDUCTIONS.findall(body)),
                heavy=len(_HEAVY.findall(body)),
            ),
        )

    @property
    def is_rare(self) -> bool:
        """True if it loops over contiguous rows that Inductor usually keeps in registers; few were measured."""
        looped = self.problem.family == InductorReduction.name
        return looped and INNER in self.problem.flags and self.problem["r"] <= _MOST_PERSISTENT

    def candidates(self) -> tuple[KernelConfig, ...]:
        """Return the configs that compete for this kernel: those that its family lists for its problem."""
        return _FAMILIES[self.kind]().listed(self.problem)

    def listed(self) -> list[KernelConfig]:
        """Return the configs that Inductor would tune over, found by calling its heuristics' decorator."""
        from torch._inductor.runtime import hints, triton_heuristics

        found = _DECORATOR.search(self.text)
        assert found is not None
        names = {**vars(hints), "triton_heuristics": triton_heuristics, "__file__": None}
        listed = eval(f"triton_heuristics.{self.kind}({found[2].rstrip().rstrip(',')}, return_configs=True)", names)
        return [KernelConfig.of(**one.kwargs, num_warps=one.num_warps, num_stages=one.num_stages) for one in listed]

    def with_configs(self, configs: Sequence[KernelConfig]) -> str:
        """Return the source with these configs instead of Inductor's; Inductor times them if there are several."""
        found = _DECORATOR.search(self.text)
        assert found is not None
        listed = ", ".join(map(_as_source, configs))
        # Inductor would add smaller blocks for kernels with many registers. The ranker has chosen among these too.
        others = _HINT.sub("", found[2]).replace("'dynamic_scale_rblock': True", "'dynamic_scale_rblock': False")
        head = f"@triton_heuristics.cached_autotune(\n    configs=[{listed}],"
        kind = f"    heuristic_type=triton_heuristics.HeuristicType.{self.kind.upper()},"
        return f"{self.text[: found.start()]}{head}\n{kind}{others}\n)\n@triton.jit{self.text[found.end() :]}"


def chosen(
    kernel: ReductionSource, fastest: Sequence[KernelConfig], device: DeviceSpec, bundle: Bundle | None = None
) -> list[KernelConfig]:
    """Return the configs to give to a kernel: `fastest`, and the one of Inductor's list that is predicted fastest.

    If `fastest` is one config, only one is returned, so that nothing is timed: Inductor's if it is predicted to be
    slower by less than a factor of `DOUBT`, else `fastest`.

    Args:
        kernel: The kernel.
        fastest: The configs that are predicted to be the fastest, best first.
        device: The device.
        bundle: The bundle that predicts; the shipped one if None.
    """
    family = _FAMILIES[kernel.kind]()
    theirs = [config for config in kernel.listed() if family.supports(config, kernel.problem, device) is None]
    if not theirs:
        return list(fastest)
    predicted = predicted_slowdowns(family, kernel.problem, device, (fastest[0], *theirs), bundle).tolist()
    place = min(range(len(theirs)), key=predicted[1:].__getitem__)
    if len(fastest) > 1:
        return list(dict.fromkeys([*fastest, theirs[place]]))
    return [theirs[place] if predicted[1 + place] < DOUBT * predicted[0] else fastest[0]]


def _literals(node: ast.expr | None) -> dict[str, Any]:
    """Return the entries of a dictionary's source whose values are literals."""
    found = {}
    for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
        try:
            found[ast.literal_eval(key)] = ast.literal_eval(value)  # type: ignore[arg-type]
        except ValueError:  # noqa: PERF203 - two dozen entries
            continue
    return found


def _size(body: str, name: str, hint: int) -> int:
    """Return a size that the source states; Inductor's hint, a power of two, if it is dynamic."""
    stated = re.search(rf"\n    {name} = (\d+)\n", body)
    return int(stated[1]) if stated else int(hint)


def _dtype(name: str) -> str:
    return _DTYPES.get(name, name)


def _as_source(config: KernelConfig) -> str:
    named = config.to_json()
    blocks = {knob: named[knob] for knob in ("XBLOCK", "R0_BLOCK") if knob in named}
    return f"triton_heuristics.Config({blocks!r}, num_warps={config.num_warps}, num_stages={config.num_stages})"


class InductorReduction(Family):
    """A reduction of x rows of r elements in a loop over blocks, with all that Inductor fuses into it.

    `bytes` is what one launch moves; `loads`, `stores`, `reductions` and `heavy` (exponentials, roots and so on) count
    operations in the source. The number of stages has no effect: Triton pipelines only loops with matrix products.

    >>> counts = {"loads": 3, "stores": 2, "reductions": 1, "heavy": 1}
    >>> problem = Problem.of("inductor_reduction", x=2048, r=2560, bytes=21 << 20, **counts)
    >>> len(InductorReduction().listed(problem))
    358
    """

    name = "inductor_reduction"
    dims = ("x", "r", "bytes", "loads", "stores", "reductions", "heavy")
    dtypes = tuple(name for name in DTYPES if name != "int4")
    flags = (INNER, OUTER)
    knobs: ClassVar[tuple[str, ...]] = ("XBLOCK", "R0_BLOCK", "num_warps", "num_stages")
    is_persistent: ClassVar[bool] = False
    smallest: ClassVar[Mapping[str, int]] = dict.fromkeys(("loads", "stores", "reductions", "heavy"), 0)
    feature_texts = _FEATURES
    feature_names = tuple(_FEATURES)

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return all configs; `listed` selects those to choose from for one problem."""
        return _space(self.is_persistent)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or None."""
        if (wrong := wrong_knobs(self, config)) is not None:
            return wrong
        rows, row = config["XBLOCK"], _padded(problem["r"])
        block = row if self.is_persistent else config["R0_BLOCK"]
        if config.num_stages != 1:
            return f"num_stages must be 1 but is {config.num_stages}"
        if rows > min(_padded(problem["x"]), MOST_ROWS):
            return f"XBLOCK must be at most {min(_padded(problem['x']), MOST_ROWS)} but is {rows}"
        if block > row:
            return f"R0_BLOCK must be at most {row} but is {block}"
        if rows * block > max(2 * MOST_TILE, block):
            return f"XBLOCK must be at most {max(2 * MOST_TILE // block, 1)} but is {rows}"
        if config.num_warps * device.warp_size > MOST_THREADS // 2:
            return f"num_warps must be at most {MOST_THREADS // 2 // device.warp_size} but is {config.num_warps}"
        return None

    def listed(self, problem: Problem) -> tuple[KernelConfig, ...]:
        """Return the configs to choose from for a problem: tiles that fit into it, of the sizes that were measured."""
        return _listed(_padded(problem["x"]), _padded(problem["r"]), self.is_persistent)

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        """Return the features, (n_configs, n_features)."""
        import numpy as np

        knobs = columns_of(tuple(configs), self.knobs)
        x, r, moved = float(problem["x"]), float(problem["r"]), float(problem["bytes"])
        rows, warps = knobs["XBLOCK"], knobs["num_warps"]
        block = np.full(len(rows), float(_padded(problem["r"]))) if self.is_persistent else knobs["R0_BLOCK"]
        tile, programs, steps = rows * block, np.ceil(x / rows), np.ceil(r / block)
        each = tile / (warps * device.warp_size)
        resident = np.maximum(MOST_THREADS // (warps * device.warp_size), 1.0) * device.sm_count
        element = moved / (x * r)
        of_problem = [
            np.log2(x),
            np.log2(r),
            np.log2(moved),
            np.log2(moved / (device.copy_bandwidth_gbs * 1e3)),
            np.log2(element),
            *(float(problem[dim]) for dim in ("loads", "stores", "reductions", "heavy")),
            *(float(flag in problem.flags) for flag in (INNER, OUTER)),
            np.log2(problem.itemsize),
        ]
        of_config = [
            *map(np.log2, (rows, block, warps, tile, each, steps, programs, programs / resident)),
            x / (programs * rows),
            r / (steps * block),
            each * problem["loads"],
            np.log2(moved / programs),
            np.log2(moved / (programs * steps)),
        ]
        columns = [np.broadcast_to(np.asarray(column, float), rows.shape) for column in (*of_problem, *of_config)]
        return np.stack(columns, axis=1).astype(np.float32)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """Raise `ForetuneError`: a problem is read from a kernel's source, not from its arguments."""
        raise ForetuneError(f"{self.name}: foretune.use('inductor') reads the problem from the source of each kernel")


class InductorPersistentReduction(InductorReduction):
    """A reduction of x rows of r elements that are all in registers at once, with all that Inductor fuses into it."""

    name = "inductor_persistent_reduction"
    knobs = ("XBLOCK", "num_warps", "num_stages")
    is_persistent = True


#: The family of each of Inductor's heuristics.
_FAMILIES = {"reduction": InductorReduction, "persistent_reduction": InductorPersistentReduction}


def _padded(size: int) -> int:
    """Return the next power of two."""
    return 1 << max(size - 1, 0).bit_length()


@cache
def _space(is_persistent: bool) -> tuple[KernelConfig, ...]:
    rows = [2**i for i in range(13)]
    if is_persistent:
        return tuple(KernelConfig.of(XBLOCK=x, num_warps=warps, num_stages=1) for x, warps in product(rows, _WARPS))
    return tuple(
        KernelConfig.of(XBLOCK=x, R0_BLOCK=r, num_warps=warps, num_stages=1)
        for x, r, warps in product(rows, [2**i for i in range(17)], _WARPS)
        if x * r <= 65536
    )


@cache
def _listed(x: int, r: int, is_persistent: bool) -> tuple[KernelConfig, ...]:
    found = []
    least = min(_LEAST_TILE if x * r <= 1 << 17 else 4 * _LEAST_TILE, x * r)
    for config in _space(is_persistent):
        rows, block, warps = config["XBLOCK"], r if is_persistent else config["R0_BLOCK"], config.num_warps
        tile, each = rows * block, rows * block / (32 * warps)
        fits = rows <= x and block <= r and least <= tile <= max(MOST_TILE, r if is_persistent else 0)
        if fits and (LEAST_EACH <= each <= MOST_EACH or warps == (1 if each < LEAST_EACH else 32)):
            found.append(config)
    return tuple(found)

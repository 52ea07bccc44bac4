"""What the tests of the scaled GEMMs share: configs by short names, inputs, and what is wrong with a result."""

from __future__ import annotations

from dataclasses import replace

from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.kernels.scaled_gemm.space import flags_of, granularity_of

DENSE, GROUPED = (find_family(name) for name in ("scaled_gemm", "scaled_grouped_gemm_fwd"))
FAMILIES = (DENSE, GROUPED)
H200 = DeviceSpec.named("h200")
#: Where the interpreter runs: fewer programs than tiles, so that programs take several.
CPU = replace(H200, backend="cpu", sm_count=3)
#: Every way to load, multiply and store: (BLOCK_M, BLOCK_N, SWAP_AB, TMA_LOAD, TMA_STORE, warps, stages).
WAYS = (
    (128, 128, 0, 1, 1, 8, 4),
    (128, 256, 0, 1, 0, 8, 3),
    (64, 128, 0, 0, 0, 4, 3),
    (256, 32, 0, 1, 1, 8, 3),
    (16, 128, 1, 1, 0, 4, 4),
    (32, 256, 1, 0, 0, 4, 3),
    (16, 64, 0, 1, 0, 4, 4),
    (32, 128, 0, 0, 0, 4, 3),
)
#: CONSUMERS, BLOCK_N and stages, of which each means another loop.
SPECIALIZED = ((2, 64, 8), (2, 128, 4), (2, 144, 6), (2, 160, 6), (2, 192, 5), (3, 128, 4))
#: Of split contractions: (BLOCK_M, BLOCK_N, SWAP_AB, TMA_LOAD), and into how many parts.
SPLIT = (((16, 64, 1, 0), 4), ((64, 128, 0, 1), 2), ((64, 32, 0, 0), 8))


def config(m, n, swap=0, load=0, store=0, warps=4, stages=3, *, k=128, band=8, programs=1, splits=1, consumers=0):
    """A config of either family."""
    knobs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": band, "SPLIT_K": splits, "PROGRAMS_PER_SM": programs}
    ways = {"SWAP_AB": swap, "TMA_LOAD": load, "TMA_STORE": store, "CONSUMERS": consumers}
    return KernelConfig.of(**knobs, **ways, num_warps=warps, num_stages=stages)


def specialized(consumers, n, stages, **knobs):
    """A config whose warps have jobs."""
    return config(64 * consumers, n, 0, 1, 1, 4, stages, consumers=consumers, **knobs)


def split(way, splits, **knobs):
    """A config that cuts the contraction."""
    return config(*way, stages=4, splits=splits, programs=0, **knobs)


def problem(family, kind="blockwise", sizes=None, **dims):
    """A problem of a layer; of the grouped family groups and rows follow from the group sizes."""
    told = {} if sizes is None else {"groups": len(sizes), "rows": sum(sizes)}
    ragged = None if sizes is None else {"rows": sizes}
    return Problem.of(family.name, dtype="fp8e4m3", flags=flags_of(kind), ragged=ragged, **told, **dims)


def checked(family, kind):
    """The problem that any config's result is checked on."""
    return family.check_problem(None, problem(family, kind, **dict.fromkeys(family.dims, 16)))


def exact(inputs, block_k=128):
    """What a launch should give, and how far off each element may be, in float64; NaN where nothing is written."""
    import torch
    from foretune.kernels.scaled_gemm.quantize import dequantized_weight, dequantized_x, error_bound

    kind, i = granularity_of(inputs.problem), inputs
    x = dequantized_x(i.x, i.x_scale, kind, torch.float64)
    y, bound = (i.out.double().fill_(float("nan")) for _ in range(2))
    sizes = [len(i.x)] if i.group_sizes is None else i.group_sizes.tolist()
    start = 0
    for group, size in enumerate(sizes):
        w, scale = (i.w, i.w_scale) if i.group_sizes is None else (i.w[group], i.w_scale[group])
        w, rows = dequantized_weight(w, scale, kind, torch.float64), x[start : start + size]
        y[start : start + size], bound[start : start + size] = rows @ w.T, error_bound(rows, w, block_k)
        start += size
    return y, bound


def trouble(family, inputs, config):
    """What is wrong with the result of a launch, or None."""
    import torch

    inputs.out.fill_(float("nan"))
    out = family.launch(inputs, config).double()
    y, bound = exact(inputs, config["BLOCK_K"])
    untouched = torch.isnan(y)
    if not torch.equal(torch.isnan(out), untouched):
        return f"{int((torch.isnan(out) != untouched).sum())} elements are written that should not be, or not written"
    out, y, bound = out[~untouched], y[~untouched], bound[~untouched]
    if not len(y):
        return None
    if over := int(((out - y).abs() > bound).sum()):
        return f"{over} of {len(y)} elements are further off than can be"
    error = float((out - y).norm() / y.norm())
    return f"relative error {error:.2g}" if error > family.tolerance(inputs.problem) else None


def named(value):
    """A parameter of a test as its id says it."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "name", None)

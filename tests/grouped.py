"""What the tests of the grouped GEMMs share: devices, configs by short names, inputs under other group sizes, and what
is wrong with a result."""

from __future__ import annotations

import itertools
from dataclasses import replace

from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import find_family

FORWARD, DX, DW = (find_family(f"grouped_gemm_{name}") for name in ("fwd", "dx", "dw"))
FAMILIES = (FORWARD, DX, DW)
FLAGS = ((), ("permute_x",), ("permute_y",))
DTYPES = ("bf16", "fp16", "fp32")

H200 = DeviceSpec.named("h200")
A100 = replace(H200, name="A100", arch="sm_80", sm_count=108, smem_per_block_bytes=166912)
A10 = replace(H200, name="A10", arch="sm_86", sm_count=72, smem_per_block_bytes=101376)
L40S = replace(H200, name="L40S", arch="sm_89", sm_count=142, smem_per_block_bytes=101376, smem_per_sm_bytes=102400)
B200 = replace(H200, name="B200", arch="sm_100", sm_count=148)
RTX_5090 = replace(L40S, name="RTX 5090", arch="sm_120", sm_count=170)
MI300X = replace(
    H200, name="MI300X", backend="hip", arch="gfx942", warp_size=64, sm_count=304, smem_per_block_bytes=65536
)
MI350X = replace(MI300X, name="MI350X", arch="gfx950", smem_per_block_bytes=163840)
XPU = replace(H200, name="Max 1550", backend="xpu", arch="pvc", warp_size=16, smem_per_block_bytes=131072)
#: Of Triton's backend for CPUs.
HOST = replace(H200, name="host", backend="cpu", arch="x86_64", warp_size=1)
#: Where the interpreter runs. Fewer programs than tiles nearly everywhere, so that programs take several.
CPU = replace(H200, backend="cpu", sm_count=3)


#: PINGPONG, BLOCK_M, BLOCK_N and stages of CONSUMERS, of which each means other loops.
OVER_ROWS = ((1, 128, 128, 5), (0, 128, 256, 4))
SPECIALIZED = {FORWARD: OVER_ROWS, DX: OVER_ROWS, DW: ((0, 128, 256, 4), (0, 256, 128, 4))}


def specialized(family, pingpong, m, n, stages, band=8):
    """A config with CONSUMERS."""
    return config(family, m, n, 64, tma=(1, 1, 1), stages=stages, band=band, jobs=(2, pingpong))


def config(family, m, n, k, *, tma=(0, 0, 0), warps=4, stages=2, band=1, programs=1, jobs=(0, 0)):
    """A config of a family; `tma` is (left, right, out), and `jobs` (CONSUMERS, PINGPONG)."""
    return KernelConfig.of(
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP_M=band,
        PROGRAMS_PER_SM=programs,
        num_warps=warps,
        num_stages=stages,
        **dict(zip(family.variant.tma, tma, strict=True)),
        **dict(zip(("CONSUMERS", "PINGPONG"), jobs, strict=True)),
    )


def named(value):
    """A parameter of a test as its id says it: a family, a device, a config's blocks, flags, TMA knobs."""
    if isinstance(value, KernelConfig):
        return "x".join(str(value[f"BLOCK_{axis}"]) for axis in "MNK")
    if isinstance(value, tuple):
        return "".join(map(str, value)) or "sorted"
    return getattr(value, "arch", None) or getattr(value, "name", None)


def tma_ways(family, flags, device=H200):
    """Every (left, right, out) that the family supports with these flags."""
    call = problem(family, flags=flags, dtype="fp16")
    ways = itertools.product((0, 1), repeat=3)
    return [tma for tma in ways if family.supports(config(family, 32, 32, 32, tma=tma), call, device) is None]


def problem(family, sizes=None, *, flags=(), dtype="bf16", **dims):
    """A problem of a layer; groups and rows follow from the group sizes where these are given."""
    told = {} if sizes is None else {"groups": len(sizes), "rows": sum(sizes)}
    dims = {"groups": 64, "rows": 8192, "n": 2048, "k": 1024} | told | dims
    return Problem.of(family.name, dtype=dtype, flags=flags, ragged=None if sizes is None else {"rows": sizes}, **dims)


def made(family, sizes, n=40, k=72, *, flags=(), dtype="fp16", device=CPU, chunk_rows=None, seed=0):
    """Inputs for these group sizes, the output poisoned with NaN; `chunk_rows` replaces the family's own."""
    inputs = family.inputs(problem(family, sizes, flags=flags, dtype=dtype, n=n, k=k), device, seed=seed)
    return inputs if chunk_rows is None else routed(inputs, sizes, chunk_rows)


def routed(inputs, sizes, chunk_rows=None):
    """The same tensors under other group sizes, which need not sum to the rows."""
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    told = torch.tensor(sizes, dtype=torch.int32, device=inputs.out.device)
    rows, long_rows = inputs.tile_map.rows, 3 * (chunk_rows or 1 << 20) if inputs.tile_map.long_rows else 0
    return replace(inputs, group_sizes=told, tile_map=TileMap.build(told, rows, chunk_rows, long_rows))


def as_they_count(sizes, rows):
    """Group sizes as the kernels take them: none are negative, and they end where the rows do."""
    counted = []
    for size in sizes:
        counted.append(min(max(size, 0), rows - sum(counted)))
    return tuple(counted)


def expected(family, inputs):
    """The reference for whatever group sizes, NaN where nothing is written."""
    import torch

    sizes = as_they_count(inputs.group_sizes.tolist(), inputs.tile_map.rows)
    return family.reference(replace(inputs, group_sizes=torch.tensor(sizes, device=inputs.out.device)))


def trouble(out, reference, dtype="fp16"):
    """What is wrong with a result, or None. The reference is NaN where nothing should have been written.

    The norm alone would not see one wrong element of many."""
    import torch

    untouched = torch.isnan(reference)
    if not torch.equal(torch.isnan(out), untouched):
        return (
            f"{int((torch.isnan(out) & ~untouched).sum())} NaN, {int((~torch.isnan(out) & untouched).sum())} too many"
        )
    reference, out = reference[~untouched], out[~untouched].float()
    if not len(reference):
        return None
    difference, norm = out - reference, float(reference.norm())
    if norm == 0:
        return f"{int((difference != 0).sum())} are not zero" if bool((difference != 0).any()) else None
    error = float(difference.norm()) / norm
    limit = FORWARD.tolerance(problem(FORWARD, dtype=dtype))
    if not error <= limit:
        return f"relative error {error:.2g}"
    off = int((difference.abs() > 10 * limit * (reference.abs() + norm / len(reference) ** 0.5)).sum())
    return f"{off} wrong elements" if off else None


def assert_right(family, inputs, config):
    """Launches the config and compares every element with the reference, also those that no group owns."""
    found = trouble(family.launch(inputs, config), expected(family, inputs), inputs.problem.dtype)
    assert found is None, f"{found}: {config}"


def guarded(tensor, guard=300, value=float("nan")):
    """The tensor amid `guard` rows of NaN before and after it (rows of its first dimension), and those rows."""
    import torch

    whole = torch.full((len(tensor) + 2 * guard, *tensor.shape[1:]), value, dtype=tensor.dtype, device=tensor.device)
    whole[guard : guard + len(tensor)] = tensor
    return whole[guard : guard + len(tensor)], (whole[:guard], whole[guard + len(tensor) :])


def launch_gemm(x, w, y, tile_map, config, sm_count, *, gather=None, scatter=None, scale=None, bias=None, **options):
    """Launch forward, or dX with `transposed`, of these tensors; at most one of `gather` and `scatter` is given."""
    from foretune.kernels.grouped_gemm.triton_kernels.launches import prepare_gemm

    sides = {"x_rows": len(x), "gathers": gather is not None, "scatters": scatter is not None}
    launch = prepare_gemm(tile_map.rows, tile_map.groups, y.shape[1], x.shape[1], config, sm_count, **sides, **options)
    launch((x, w, y, tile_map.entries, scatter if gather is None else gather, scale, bias))

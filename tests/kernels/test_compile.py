"""The kernels compiled for GPUs that need not be here: what the binaries are, and how many there are."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import replace
from functools import partial
from tempfile import NamedTemporaryFile

import pytest
from foretune.datasets import KernelConfig
from foretune.kernels.grouped_gemm.contenders import autotuned
from foretune.kernels.grouped_gemm.space import chunks_of, smem_bytes
from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
from foretune.runtime import use_stub_driver
from grouped import (
    A100,
    B200,
    DW,
    DX,
    FAMILIES,
    FLAGS,
    FORWARD,
    H200,
    MI300X,
    SPECIALIZED,
    config,
    made,
    named,
    problem,
    specialized,
)

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

X, Y = ("permute_x",), ("permute_y",)
# Each corner of the spaces: few rows and many, the deepest pipelines and the shallowest, every way to load and store.
SAMPLE = [
    (H200, FORWARD, (), config(FORWARD, 16, 128, 128, stages=4)),
    (H200, FORWARD, (), config(FORWARD, 16, 64, 128, stages=5, tma=(1, 1, 0))),
    (H200, FORWARD, (), config(FORWARD, 64, 32, 64, stages=4, tma=(1, 1, 1))),
    (H200, FORWARD, Y, config(FORWARD, 128, 128, 64, stages=3, warps=8, tma=(1, 1, 0))),
    (H200, DX, (), config(DX, 32, 64, 64, stages=6)),
    (H200, DX, X, config(DX, 128, 64, 128, stages=2, tma=(1, 1, 0))),
    (H200, DX, Y, config(DX, 64, 128, 64, stages=4, tma=(0, 1, 0))),
    (H200, DW, (), config(DW, 64, 64, 64, stages=3, tma=(1, 1, 1))),
    (H200, DW, (), config(DW, 64, 64, 32, stages=5)),
    (H200, DW, (), config(DW, 64, 128, 64, stages=4, tma=(0, 1, 1))),
    (B200, FORWARD, (), config(FORWARD, 16, 128, 64, stages=6, tma=(1, 1, 0))),
    (B200, DX, Y, config(DX, 64, 32, 64, stages=4)),
    (B200, DW, (), config(DW, 64, 64, 32, stages=5, tma=(0, 1, 1))),
    (A100, FORWARD, (), config(FORWARD, 16, 64, 128, stages=5)),
    (A100, DX, (), config(DX, 32, 64, 64, stages=4)),
    (A100, DW, (), config(DW, 64, 64, 64, stages=3)),
    (MI300X, FORWARD, (), config(FORWARD, 16, 64, 128, stages=3)),
    (MI300X, DX, (), config(DX, 64, 64, 64, stages=3)),
    (MI300X, DW, (), config(DW, 64, 64, 64, stages=3)),
]
#: Larger blocks on the same paths, which take longer to compile.
LARGER = [
    (H200, FORWARD, (), config(FORWARD, 64, 256, 64, stages=4, tma=(1, 1, 1))),
    (H200, DW, (), config(DW, 64, 256, 64, stages=3, tma=(1, 1, 1))),
    (B200, DW, (), config(DW, 64, 128, 32, stages=5, tma=(0, 1, 1))),
    (A100, DW, (), config(DW, 64, 128, 64, stages=3)),
    (H200, FORWARD, X, config(FORWARD, 128, 256, 64, stages=3, warps=8, tma=(0, 1, 0))),
    (H200, DX, (), config(DX, 128, 256, 64, stages=3, warps=8, tma=(1, 1, 1))),
    (A100, DX, (), config(DX, 32, 256, 64, stages=4)),
    (H200, DW, (), config(DW, 128, 64, 64, stages=4)),
    (B200, DX, Y, config(DX, 64, 128, 64, stages=4)),
    (H200, FORWARD, (), config(FORWARD, 32, 256, 64, stages=5, tma=(1, 1, 0))),
    (H200, FORWARD, (), config(FORWARD, 128, 128, 64, stages=3, warps=8)),
    (H200, DX, (), config(DX, 64, 32, 128, stages=4, tma=(1, 1, 0))),
    (H200, DW, (), config(DW, 128, 128, 32, stages=6, warps=8, tma=(1, 1, 1))),
    (H200, DW, (), config(DW, 128, 256, 64, stages=2, warps=8, tma=(1, 1, 1))),
    (B200, FORWARD, (), config(FORWARD, 128, 256, 64, stages=3, warps=8, tma=(1, 1, 1))),
    (B200, DX, X, config(DX, 256, 64, 64, stages=2, warps=8, tma=(1, 1, 0))),
    (B200, DW, (), config(DW, 128, 128, 64, stages=3, warps=8, tma=(1, 1, 1))),
    (A100, FORWARD, X, config(FORWARD, 128, 128, 64, stages=3, warps=8)),
    (A100, DW, (), config(DW, 128, 128, 32, stages=3, warps=8)),
    (MI300X, FORWARD, X, config(FORWARD, 128, 128, 64, stages=2, warps=8)),
]
#: Where `smem_bytes` is exact.
EXACT = ("sm_90", "sm_100")


@pytest.mark.parametrize(
    ("device", "family", "flags", "config"),
    [*SAMPLE, *(pytest.param(*one, marks=pytest.mark.slow) for one in LARGER)],
    ids=named,
)
def test_a_binary_is_as_expected(device, family, flags, config):
    with use_stub_driver(device):
        binary = family.compile(config, problem(family, flags=flags))
    said = smem_bytes(family.variant, config, 2, device)
    assert binary.metadata.shared == said if device.arch in EXACT else binary.metadata.shared <= said
    if device.backend == "cuda":
        check_cuda(binary, device, family, config)
    else:
        assert "v_mfma" in binary.asm["amdgcn"]


def check_cuda(binary, device, family, config):
    ptx, ir, large = binary.asm["ptx"], binary.asm["ttgir"], config["BLOCK_M"] >= 64
    assert ("wgmma.mma_async" in ptx) == (large and device.arch == "sm_90")
    assert ("tcgen05.mma" in ptx) == (large and device.arch == "sm_100")

    # TMA moves what the knobs say and nothing else; all other loads are asynchronous copies of 16 bytes, which they
    # can only be where the compiler knows that rows are aligned.
    left, right, out = (config[knob] for knob in family.variant.tma)
    operands = ("dy", "x", "dw") if family is DW else ("x", "w", "y")
    described = {name for name, tma in zip(operands, (left, right, out), strict=True) if tma}
    if family is DW and out:
        described.add("partial")
    assert set(re.findall(r"%(\w+)_desc: !tt.tensordesc", binary.asm["ttir"])) == described  # made by the host
    assert "make_tensor_descriptor" not in binary.asm["ttir"]
    assert ("cp.async.bulk.tensor" in re.sub(r".*global\.shared::cta.*", "", ptx)) == bool(left or right)
    assert ("async_tma_copy_local_to_global" in ir) == bool(out)
    assert ("cp.async.cg.shared.global" in ptx) == (not (left and right))
    assert "cp.async.ca.shared.global" not in ptx

    # The loops are pipelined: a prologue loads all stages ahead, where a loop that is not has one load an operand.
    loads = {"tma": ir.count("async_tma_copy_global_to_local"), "pointers": ir.count("async_copy_global_to_local")}
    if device.arch == "sm_90":
        expected = {"tma": config.num_stages * (left + right), "pointers": config.num_stages * (2 - left - right)}
        assert loads == expected
        assert spilled_bytes(binary) == 0
    elif device.arch == "sm_100":
        assert loads["tma"] >= config.num_stages * (left + right)
    elif family is not DW:
        assert loads["pointers"] == 2 * config.num_stages
    else:  # dy goes through registers: sm_80's mma takes it transposed
        assert loads["pointers"] >= config.num_stages


# dX is another binary of the forward pass's kernel: of one tile by default.
@pytest.mark.parametrize(
    ("family", "one"),
    [
        pytest.param(family, one, marks=[pytest.mark.slow] if family is DX and place else [])
        for family, tiles in SPECIALIZED.items()
        for place, one in enumerate(tiles)
    ],
    ids=named,
)
def test_warps_have_one_job_each(one, family):
    """One loads through TMA, and none waits for a product that was not issued after the one that it waits for."""
    chosen = specialized(family, *one)
    with use_stub_driver(H200):
        binary = family.compile(chosen, problem(family))
    said = smem_bytes(family.variant, chosen, 2, H200)
    assert said - 88 <= binary.metadata.shared <= said
    ptx = binary.asm["ptx"]
    assert set(re.findall(r"wgmma.wait_group.sync.aligned (\d+);", ptx)) == {"0", "1"}
    assert "cp.async.bulk.tensor" in ptx
    assert spilled_bytes(binary) == 0


def spilled_bytes(binary):
    """Local memory of a thread, which is what the compiler spills to."""
    import triton

    cubin = binary.asm["cubin"]
    tool = triton.knobs.nvidia.cuobjdump.path
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", run.stdout)[1])


def test_the_sample_is_of_the_spaces():
    for device, family, flags, chosen in SAMPLE + LARGER:
        call = problem(family, flags=flags)
        binaries = {family.binary_key(each, call) for each in family.space()}
        assert family.binary_key(chosen, call) in binaries, (device.arch, str(chosen))
        assert family.supports(chosen, call, device) is None, (device.arch, str(chosen))


# dX is another binary of the forward pass's kernel: on one arch by default.
@pytest.mark.parametrize(
    ("family", "device"),
    [
        *itertools.product((FORWARD, DW), (H200, A100, B200, MI300X)),
        (DX, H200),
        *(pytest.param(DX, device, marks=pytest.mark.slow) for device in (A100, B200, MI300X)),
    ],
    ids=named,
)
def test_the_default_of_float32_fits_as_it_says(family, device):
    call = problem(family, dtype="fp32")
    default = family.default(call, device)
    with use_stub_driver(device):
        binary = family.compile(default, call)
    assert binary.metadata.shared <= smem_bytes(family.variant, default, 4, device)


# (groups, rows, N, K): N and K multiples of 8 that are and are not of 16, sizes that are 1 or multiples of 16 and not.
SHAPES = [
    (1, 1, 8, 8),
    (1, 16, 64, 64),
    (2, 17, 72, 40),
    (7, 33, 128, 24),
    (16, 1, 136, 16),
    (64, 128, 16, 72),
    (100, 1000, 24, 8),
    (128, 129, 8, 128),
    (256, 48, 40, 32),
    (512, 513, 32, 8),
]
HERE = replace(H200, backend="cpu")  # whose tensors are where the stub driver takes them


def inputs_of(family, groups, rows, n, k, **told):
    sizes = (rows, *(0,) * (groups - 1))
    return made(family, sizes, n=n, k=k, device=HERE, **{"dtype": "bf16"} | told)


def gemms(compiles):
    return [name for name, _ in compiles if name.startswith("grouped_gemm")]


@pytest.mark.parametrize("family", FAMILIES, ids=named)
@pytest.mark.parametrize(
    ("flags", "tma"), [((), (0, 0, 0)), ((), (1, 1, 1)), (X, (0, 0, 0)), (Y, (0, 0, 0))], ids=named
)
def test_one_binary_serves_every_shape(family, flags, tma, compiles):
    chosen = config(family, 32, 32, 32, stages=3, tma=tma)  # of blocks that compile in half a second
    with use_stub_driver(H200) as driver:
        for i, shape in enumerate(SHAPES):
            # The first groups are split or not, and x has a row for one of y or for several.
            family.launch(inputs_of(family, *shape, flags=flags, chunk_rows=(None, 16)[i % 2]), chosen)
        for band, programs in ((8, 1), (8, 2), (1, 3)):
            knobs = chosen.to_json() | {"GROUP_M": band, "PROGRAMS_PER_SM": programs}
            family.launch(inputs_of(family, *SHAPES[5], flags=flags), KernelConfig.from_json(knobs))
        [kernel] = gemms(compiles)
        others = ["tile_map_kernel"]
        if family is DW:
            others += ["sum_partials_kernel", *(["sorted_rows_kernel"] if flags else [])]
        assert sorted(name for name, _ in compiles) == sorted([kernel, *others])
        # And it is the one that `compile` makes ahead.
        family.compile(chosen, problem(family, flags=flags))
    assert gemms(compiles) == [kernel]
    assert sum(launch.kernel == kernel for launch in driver.launches) == len(SHAPES) + 3


@pytest.mark.parametrize(("family", "binaries"), [(FORWARD, 4), (DX, 4), (DW, 2)], ids=named)
def test_another_dtype_or_permutation_is_another_binary(family, binaries, compiles):
    """But dW's kernel never sees a permutation."""
    chosen = config(family, 32, 32, 32)
    calls = [("bf16", ()), ("fp16", ()), ("bf16", X), ("bf16", Y)]
    with use_stub_driver(H200):
        for dtype, flags in calls * 2:
            family.launch(inputs_of(family, *SHAPES[2], dtype=dtype, flags=flags), chosen)
    assert len(gemms(compiles)) == binaries


def test_forward_and_dx_are_two_binaries_of_one_kernel(compiles):
    with use_stub_driver(H200):
        for family in (FORWARD, DX, FORWARD, DX):
            family.launch(inputs_of(family, *SHAPES[2]), config(family, 32, 32, 32))
    assert gemms(compiles) == ["grouped_gemm_kernel"] * 2


def test_the_grid_is_what_the_device_holds_or_the_tiles_there_may_be():
    def grids(family, programs, *shapes):
        chosen = config(family, 64, 64, 32, stages=2, programs=programs)
        with use_stub_driver(H200) as driver:
            for shape in shapes:
                family.launch(inputs_of(family, *shape), chosen)
        return [launch.grid[0] for launch in driver.launches if launch.kernel.startswith("grouped_gemm")]

    shapes = ((1, 17, 64, 64), (512, 513, 128, 8), (3, 0, 64, 64))
    assert grids(FORWARD, 2, *shapes) == [2, 264]  # no rows, no launch
    assert grids(DX, 2, *shapes) == [2, 264]
    assert grids(DW, 2, *shapes) == [2, 264]
    assert grids(FORWARD, 0, *shapes) == [2, (9 + 512) * 2]
    assert grids(DW, 0, *shapes[:2]) == [2, 2 * 513]


@pytest.mark.parametrize("one", SPECIALIZED[DW], ids=str)
def test_specialized_dw_takes_tiles_from_a_counter(one):
    """Then its chunks are as long as the average work of an SM."""
    with use_stub_driver(H200) as driver:
        inputs = inputs_of(DW, 4, 4096, 2048, 1024)
        chunks = chunks_of(4096, 2048, 1024, "bf16", H200)
        driver.launches.clear()
        inputs = replace(inputs, tile_map=TileMap.build(inputs.group_sizes, 4096, *chunks))
        DW.launch(inputs, specialized(DW, *one))
    kernels = [launch.kernel for launch in driver.launches]
    assert kernels == ["dw_map_kernel", "specialized_dw_kernel", "sum_partials_kernel"]
    assert driver.launches[-1].grid[1] == 4096 // 2048  # groups that may be split


def pruned_by(prune):
    import triton

    return partial(triton.autotune, prune_configs_by={"early_config_prune": prune})


@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_the_autotuner_compiles_each_binary_once_and_calls_the_users_prune(family, compiles):
    configs = [config(family, 32, 32, 32), config(family, 32, 64, 32, tma=(1, 1, 1))]
    asked = []

    def prune(configs, named_args, **kwargs):
        asked.append(family.problem_from_call(named_args | kwargs))
        return configs

    with use_stub_driver(H200) as driver:
        _, call = autotuned(
            family, inputs_of(family, *SHAPES[2]), [config.to_triton() for config in configs], pruned_by(prune)
        )
        for shape in (SHAPES[2], SHAPES[3], SHAPES[2]):
            call(inputs_of(family, *shape))
    assert [(p["groups"], p["rows"], p["n"], p["k"]) for p in asked] == [SHAPES[2], SHAPES[3]]
    assert len(gemms(compiles)) == len(configs)
    launched = [launch for launch in driver.launches if launch.kernel.startswith("grouped_gemm")]
    assert launched[-1].grid == (H200.sm_count, 1, 1)


@pytest.mark.parametrize("family", [FORWARD, DX], ids=named)
def test_the_autotuner_tunes_anew_for_another_permutation(family):
    """A config that was measured on one may be refused for the other."""
    asked = []

    def prune(configs, named_args, **kwargs):
        asked.append(family.problem_from_call(named_args | kwargs).flags)
        return configs

    configs = [config(family, 32, 32, 32, stages=stages).to_triton() for stages in (2, 3)]
    with use_stub_driver(H200):
        _, call = autotuned(family, inputs_of(family, *SHAPES[2]), configs, pruned_by(prune))
        for flags in FLAGS * 2:
            call(inputs_of(family, *SHAPES[2], flags=flags))
    assert asked == list(FLAGS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=named)
@pytest.mark.parametrize("device", [H200, A100, B200, MI300X], ids=named)
def test_the_whole_space_compiles_and_needs_no_more_shared_memory_than_it_says(device, family):
    wrong = {}
    with use_stub_driver(device):
        for config in {family.binary_key(config, problem(family)): config for config in family.space(device)}.values():
            shared = family.compile(config, problem(family)).metadata.shared
            said = smem_bytes(family.variant, config, 2, device)
            least = said if device.arch in EXACT else 0
            if config["CONSUMERS"]:
                least = said - 88
            if not least <= shared <= said:
                wrong[str(config)] = (shared, said)
    assert wrong == {}

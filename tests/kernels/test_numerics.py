"""The numerics classes of every family: deterministic, reachable, and the same for all rows."""

from __future__ import annotations

import json
from dataclasses import replace

import foretune
import pytest
import torch
from commands import call, words
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem
from foretune.kernels import families, find_family, op_calls
from foretune.kernels.op_choice import HowChosen, how_chosen
from foretune.runtime import Mode, use_stub_driver
from foretune.runtime.same_bits import keeping

H200 = DeviceSpec.named("h200")
#: Families that declare which configs share bits; the others are Inductor's, whose templates are torch's.
DECLARED = [name for name in families() if not name.startswith("inductor")]
SIZES = (1, 7, 64, 1000, 16384)


def suite(family):
    """A few of the problems that the family is measured on."""
    return [case.problem.without_sizes() for case in family.cases(random=8, per_layer=1)][:12]


def resized(problem, dim, size):
    return replace(problem, dims=tuple((name, size if name == dim else own) for name, own in problem.dims))


def some(family, problem, count=40):
    """Configs of the space that can run a problem, spread over the space."""
    able = [config for config in family.space(H200) if family.supports(config, problem, H200) is None]
    return able[:: max(len(able) // count, 1)]


@pytest.mark.parametrize("name", DECLARED)
def test_classes_are_the_same_each_time_and_fewer_than_configs(name):
    family, other = find_family(name), type(find_family(name))()
    for problem in suite(family)[:4]:
        configs = some(family, problem, 10**6)
        classes = [family.numerics(config, problem) for config in configs]
        assert classes == [other.numerics(config, problem) for config in configs]
        assert (len(set(classes)) < len(configs)) != name.startswith("rms_norm_rope") or not configs


@pytest.mark.parametrize("name", DECLARED)
def test_the_class_that_is_kept_has_a_config_for_every_problem(name):
    family = find_family(name)
    kept = keeping(family, same_bits=True)
    for problem in suite(family):
        able, kept_config = some(family, problem, 300), family.same_bits_config(problem, H200)
        in_class = [config for config in able if kept.supports(config, problem, H200) is None]
        assert kept.supports(kept_config, problem, H200) is None
        assert kept.supports(kept.default(problem, H200), problem, H200) is None
        assert in_class or not able  # no config of these spaces runs float32


@pytest.mark.parametrize("name", [name for name in DECLARED if find_family(name).independent])
def test_the_invariant_class_is_one_and_can_run_every_size(name):
    family = find_family(name)
    (dim,) = family.independent
    kept = keeping(family, invariant=dim)
    for problem in suite(family)[:6]:
        classes = set()
        for size in SIZES:
            one = resized(problem, dim, size)
            config = kept.default(one, H200)
            assert family.supports(config, one, H200) is None
            classes.add(family.numerics(config, one))
        assert len(classes) == 1


@pytest.mark.parametrize("name", [name for name in DECLARED if find_family(name).independent])
def test_a_class_does_not_depend_on_the_rows(name):
    family = find_family(name)
    (dim,) = family.independent
    for problem in suite(family)[:4]:
        for config in some(family, problem):
            classes = {family.numerics(config, resized(problem, dim, size)) for size in SIZES}
            assert len(classes) == 1


def test_what_sums_over_rows_has_no_invariant():
    with pytest.raises(ForetuneError, match="invariant must be None for grouped_gemm_dw but is 'rows'"):
        keeping(find_family("grouped_gemm_dw"), invariant="rows")


def test_classes_of_products():
    family, problem = find_family("matmul"), Problem.of("matmul", batch=1, m=64, n=4096, k=2880)
    base = family.default(replace(problem, dims=(("batch", 1), ("k", 2880), ("m", 4096), ("n", 4096))), H200).to_json()

    def of(**knobs):
        return family.numerics(KernelConfig.of(**base | knobs), problem)

    assert of(BLOCK_M=64, num_warps=8) == of(TMA=0, num_stages=2) == of(GROUP_M=1, PROGRAMS_PER_SM=1) == of()
    # Compared on a card: both kinds of instructions, and zeros past the end of K.
    assert of(BLOCK_M=32) == of(num_warps=2) == of(BLOCK_K=128) == of(BLOCK_K=32) == of()
    assert of(SPLIT_K=2) != of()
    assert of(SPLIT_K=2, BLOCK_K=32) != of(SPLIT_K=2) != of(SPLIT_K=4)  # halves of 1440 and of 1472
    assert of(SPLIT_K=4) == of(SPLIT_K=4, BLOCK_M=16) == of(SPLIT_K=4, BLOCK_K=128)  # parts of 768
    whole = replace(problem, dtype="int8")
    assert family.numerics(KernelConfig.of(**base | {"BLOCK_M": 16, "SPLIT_K": 8}), whole) == ("exact",)


@pytest.mark.parametrize(
    ("name", "dtype", "same_depth"),
    [
        ("matmul", "bf16", True),
        ("matmul", "fp32", True),
        ("matmul", "fp16", True),
        ("grouped_gemm_fwd", "bf16", True),
        ("grouped_gemm_fwd", "fp16", True),
        ("gated_mlp", "fp16", True),
        ("gated_mlp", "fp32", False),
    ],
)
def test_only_in_dtypes_that_a_card_compared_any_depth_of_tiles_is_one_class(name, dtype, same_depth):
    family = find_family(name)
    sizes = {"k": 2880, "n": 4096} | ({"m": 64} if "m" in family.dims else {"groups": 4, "rows": 64})
    problem = Problem.of(name, dtype=dtype, **({"batch": 1} if name == "matmul" else {}), **sizes)
    base = family.default(problem, H200).to_json() | {"BLOCK_M": 64, "num_warps": 4, "BLOCK_K": 64}

    def of(**knobs):
        return family.numerics(KernelConfig.of(**base | knobs), problem)

    assert of(BLOCK_M=16) == of()  # in fp32 of gated_mlp, no tile is multiplied on tensor cores
    assert (of(BLOCK_K=128) == of()) == same_depth


def test_fp8_is_never_the_same_on_both_kinds_of_instructions():
    family = find_family("scaled_gemm")
    problem = Problem.of(family.name, m=64, n=4096, k=4096, dtype="fp8e4m3")
    base = family.default(problem, H200).to_json() | {"SWAP_AB": 0, "num_warps": 4}
    few, many = (family.numerics(KernelConfig.of(**base | {"BLOCK_M": rows}), problem) for rows in (16, 64))
    assert few != many


def test_a_norm_keeps_one_config_of_one_token_per_tile():
    family = find_family("rms_norm_rope_fwd")
    problem = Problem.of(family.name, tokens=64, q_heads=32, kv_heads=8, head_dim=128)
    kept = keeping(family, invariant="tokens")
    able = [config for config in family.space() if kept.supports(config, problem, H200) is None]
    assert [config["ROWS"] for config in able] == [1]


def test_families_of_torchs_templates_keep_each_config_alone():
    family = find_family("inductor_mm")
    problem, config = Problem.of("inductor_mm", batch=1, m=64, n=64, k=64), family.space()[0]
    assert family.numerics(config, problem) == config
    assert not isinstance(family, Measurable) or family.independent == ()


# The options of the ops.

X = torch.zeros(8, 512).bfloat16()
W = torch.zeros(1024, 512).bfloat16()
MANY = torch.zeros(2048, 512).bfloat16()


@pytest.fixture
def ran(monkeypatch):
    """The family, problem and config of each launch that an op prepares, on an H200 that is not here."""
    found = []
    own = op_calls.default_without_gluon

    def seen(config, family, problem, device):
        found.append((family, problem, config))
        return own(config, family, problem, device)

    monkeypatch.setattr(op_calls, "default_without_gluon", seen)
    with use_stub_driver(H200):
        yield found


def heads(tokens):
    q, k = torch.zeros(tokens, 8, 128).bfloat16(), torch.zeros(tokens, 2, 128).bfloat16()
    angles, weight = torch.zeros(tokens, 64), torch.ones(128).bfloat16()
    return q, k, angles, angles, weight, weight


#: Each op on some rows.
CALLS = {
    "matmul": lambda rows, **options: foretune.matmul(MANY[:rows], W.T, **options),
    "gated_mlp": lambda rows, **options: foretune.gated_mlp(MANY[:rows], W, **options),
    "grouped_gemm_fwd": lambda rows, **options: foretune.grouped_gemm(
        MANY[:rows], torch.stack([W, W]), torch.tensor([rows, 0], dtype=torch.int32), **options
    ),
    "rms_norm_rope_fwd": lambda rows, **options: foretune.rms_norm_rope(*heads(rows), **options),
    "scaled_gemm": lambda rows, **options: foretune.scaled_gemm(MANY[:rows], W, **options),
    "scaled_grouped_gemm_fwd": lambda rows, **options: foretune.scaled_grouped_gemm(
        MANY[:rows], torch.stack([W, W]), torch.tensor([rows, 0], dtype=torch.int32), **options
    ),
}


class ChosenError(Exception):
    """Ends a call whose config is chosen: launching it would compile it, which is not the point."""


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("op", CALLS)
def test_an_op_keeps_one_class(op, ran, monkeypatch):
    family, seen = find_family(op), op_calls.default_without_gluon

    def chosen(config, family, problem, device):
        seen(config, family, problem, device)
        raise ChosenError if problem.family == op else AssertionError(problem)

    monkeypatch.setattr(op_calls, "default_without_gluon", chosen)

    def choose(rows, **options):
        with pytest.raises(ChosenError):
            CALLS[op](rows, **options)
        return ran[-1][1:]

    invariant, same = ([choose(rows, **one) for rows in (3, 700)] for one in ({"invariant": "m"}, {"same_bits": True}))
    assert len({family.numerics(config, problem) for problem, config in invariant}) == 1
    monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    for problem, config in [*same, choose(5)]:
        assert family.numerics(config, problem) == family.numerics(family.same_bits_config(problem, H200), problem)


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
def test_gradients_keep_a_class_too(ran):
    x, w = MANY[:64].clone().requires_grad_(), torch.stack([W, W]).requires_grad_()
    y = foretune.grouped_gemm(x, w, torch.tensor([60, 4], dtype=torch.int32), invariant="rows")
    y.backward(torch.zeros_like(y))
    by_family = {problem.family: (problem, config) for _, problem, config in ran}
    assert set(by_family) == {"grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw"}
    for name, (problem, config) in by_family.items():
        options = {"same_bits": True} if name == "grouped_gemm_dw" else {"invariant": "rows"}
        assert keeping(find_family(name), **options).supports(config, problem, H200) is None


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
def test_a_given_config_is_not_restricted(monkeypatch):
    monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    with use_stub_driver(H200) as driver:
        foretune.matmul(X, W.T, config=KernelConfig.of(BLOCK_M=64, num_warps=8, num_stages=3))
        assert driver.launches[-1].metadata.num_warps == 8


@pytest.mark.parametrize("op", CALLS)
def test_wrong_options_of_an_op_are_errors(op):
    with use_stub_driver(H200):
        with pytest.raises(ForetuneError, match=r"invariant must be a dimension whose entries .* but is 'columns'"):
            CALLS[op](4, invariant="columns")
        with pytest.raises(ForetuneError, match="invariant must be the name of a dimension but is 3"):
            CALLS[op](4, invariant=3)
        with pytest.raises(ForetuneError, match="same_bits must be true or false but is 'yes'"):
            CALLS[op](4, same_bits="yes")


def test_one_scale_of_all_rows_has_no_invariant():
    with use_stub_driver(H200), pytest.raises(ForetuneError, match="invariant='m' needs rowwise or blockwise scales"):
        foretune.scaled_gemm(X, W, scales="tensorwise", invariant="m")


@pytest.mark.parametrize("mode", [None, "predict", "off"])
@pytest.mark.parametrize("same_bits", [None, True, False])
@pytest.mark.parametrize("invariant", [None, "rows"])
def test_the_operators_option_has_all_three(mode, same_bits, invariant):
    found = HowChosen.of(how_chosen(mode, same_bits, invariant))
    assert found == (Mode(mode or "predict"), same_bits, invariant)


def test_a_cover_by_measured_times_keeps_one_class():
    family = find_family("matmul")
    problem = Problem.of("matmul", batch=1, m=1, n=4096, k=4096)
    found = foretune.cover("matmul", problem, "m", (64, 4096), 4, device="h200", data="h200_cover", invariant="m")
    assert len({family.numerics(config, problem) for config in found.configs}) == 1
    assert min(found.losses) >= 0


def test_the_commands_take_both_options():
    problem = "matmul --device h200 --n 4096 --k 4096"
    family = find_family("matmul")

    def classes(line):
        printed = json.loads(call(f"{line} --json").stdout)
        configs = printed.get("configs") or [one["config"] for one in printed["shortlist"]]
        at = Problem.of("matmul", batch=1, m=8, n=4096, k=4096)
        return {family.numerics(KernelConfig.from_json(config), at) for config in configs}

    assert len(classes(f"predict {problem} --m 8 --configs 12")) > 1
    for line in ("predict --m 8 --configs 12 --same-bits", "predict --m 8 --configs 12 --invariant m"):
        assert classes(line.replace("predict", f"predict {problem}")) == {("tensor_core",)}
    assert classes(f"cover {problem} --dynamic m --range 1:4096 --invariant m") == {("tensor_core",)}
    refused = call(f"predict {problem} --m 8 --invariant n")
    assert refused.exit_code == 1
    assert "m, but is 'n'" in words(refused.stderr)

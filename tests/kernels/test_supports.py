"""`supports` is the only statement of validity: whatever it passes compiles and fits, and whatever cannot is refused
with a reason that names the knob and the values that would do."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from foretune.datasets import ForetuneError, KernelConfig, load
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm.space import smem_bytes
from foretune.model import Bundle, Ranker
from foretune.model.calibration.training_domain import Distance
from foretune.runtime import Pruner, make_shortlist, use_stub_driver
from grouped import A100, B200, DTYPES, DW, FAMILIES, FLAGS, FORWARD, H200, problem

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
DEVICES = (H200, H200.with_sms(64), H200.with_sms(8), A100, B200)
#: What a knob is set to: what people try, and what nobody would.
POOL = (0, -1, 1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2**31)
POOL += ("64", "fast", "", 64.0, 1.5, math.inf, True, False, None)
NO_KNOBS = ("num_ctas", "maxnreg", "ir_override", "BLOCK_X", "block_m", "TMA")
GONE = object()
#: What is said of knobs that are right one by one.
_OF_TWO_KNOBS = r"must be smaller|at most|must be 0|cannot be 1|TMA moves|with CONSUMERS = \d|^CONSUMERS cannot be 2"
#: What each knob's words say, which must be in the reason.
WORDS = {
    "BLOCK_M": "a power of two between 16 and 256",
    "BLOCK_N": "a power of two between 16 and 512",
    "BLOCK_K": "a power of two between 16 and 512",
    "GROUP_M": "between 1 and 1024",
    "PROGRAMS_PER_SM": "between 0 and 64",
    "num_warps": "1, 2, 4, 8 or 16",
    "num_stages": "between 1 and 8",
    "num_ctas": "1",
}


def problems(family):
    for dtype, flags, dims in itertools.product(DTYPES, FLAGS, ({}, {"groups": 1, "rows": 1, "n": 8, "k": 8})):
        yield problem(family, dtype=dtype, flags=flags, **dims)


def mutated(rng, family, config):
    """The config with one to three knobs changed, and the changes; some knobs are gone, and some are none."""
    names = (*family.knobs, *NO_KNOBS)
    changes = {}
    for which in rng.choice(len(names), rng.integers(1, 4), replace=False):
        changes[names[which]] = GONE if rng.random() < 0.05 else POOL[rng.integers(len(POOL))]
    knobs = {knob: value for knob, value in (config.to_json() | changes).items() if value is not GONE}
    try:
        return KernelConfig.of(**knobs), changes
    except ForetuneError as error:  # no family takes that: then another one
        if not any(knob in str(error) for knob in changes):
            raise
        return mutated(rng, family, config)


def draws(family, count, seed=0):
    """(config, changes, problem, device), `count` of them."""
    rng, space, calls = np.random.default_rng(seed), family.space(), list(problems(family))
    for _ in range(count):
        config, changes = mutated(rng, family, space[rng.integers(len(space))])
        yield config, changes, calls[rng.integers(len(calls))], DEVICES[rng.integers(len(DEVICES))]


def is_sound(value, words):
    """Whether a knob's value is what its words say."""
    if type(value) is not int:
        return False
    low, high = (int(number) for number in re.findall(r"\d+", words)[-2:]) if "between" in words else (0, 0)
    if "power of two" in words:
        return low <= value <= high and value & (value - 1) == 0
    if "between" in words:
        return low <= value <= high
    return value in [int(number) for number in re.findall(r"\d+", words)]


@every_family
def test_a_refusal_names_a_knob_and_what_it_may_be(family):
    jobs = {"CONSUMERS": "0 or 2", "PINGPONG": "0 or 1"}
    refused, passed, words = 0, 0, WORDS | dict.fromkeys(family.variant.tma, "0 or 1") | jobs
    for config, changes, call, device in draws(family, 4000):
        reason = family.supports(config, call, device)
        knobs = config.to_json()
        unsound = {knob for knob in words if knob != "num_ctas" and not is_sound(knobs.get(knob), words[knob])}
        unsound |= set(knobs) - set(words)
        if knobs.get("num_ctas") is not config.num_ctas or type(config.num_ctas) is not int or config.num_ctas != 1:
            unsound.add("num_ctas")
        if reason is None:
            passed += 1
            assert not unsound, (changes, unsound)
            assert smem_bytes(family.variant, config, call.itemsize, device) <= device.smem_per_block_bytes
            assert np.isfinite(family.features(call, device, [config])).all()
            continue
        refused += 1
        named = [knob for knob in (*words, *knobs) if re.search(rf"(?<!\w){knob}(?!\w)", reason)]
        assert named, reason
        if unsound:  # named is one that is wrong, with what would do
            knob = reason.split()[0]
            assert knob in unsound, (reason, unsound)
            assert words[knob] in reason if knob in words else all(known in reason for known in family.knobs), reason
        else:
            assert re.search(_OF_TWO_KNOBS, reason), reason
    assert passed > 100
    assert refused > 1000


EXAMPLES = {"BLOCK_N": 48, "BLOCK_K": 24, "num_warps": 32, "PROGRAMS_PER_SM": -1, "TMA_X": 7}


def example(knob, family=FORWARD):
    call = problem(family)
    return KernelConfig.from_json(family.default(call, H200).to_json() | {knob: EXAMPLES[knob]})


@every_family
@pytest.mark.parametrize("knob", EXAMPLES)
def test_the_examples_of_what_once_passed(family, knob):
    reason = family.supports(example(knob, family), problem(family), H200)
    assert reason.startswith(f"{knob} cannot be {EXAMPLES[knob]}: ")


class BadOnesFirst(Bundle):
    """Predicts that the examples are the fastest."""

    digest = "bad-ones-first"

    def calibration(self, family_name):
        return None

    def distance(self, family_name, problem, device):
        return Distance(0.0)

    def trained_on(self, family_name):
        return (H200,)

    fastest, trust_ = Ranker.fastest, Ranker.trust_

    def ranker(self, family_name):
        return self

    def wrong_results(self, family_name, problem):
        return ()

    def predict(self, family, problem, device, configs):
        bad = [example(knob, family) for knob in EXAMPLES]
        return np.array([1.0 if config in bad else 2.0 for config in configs])


@every_family
@pytest.mark.parametrize("bundle", [BadOnesFirst({}, "4.6"), None], ids=["bad ones first", "shipped"])
def test_they_are_on_no_shortlist_and_no_pruner_lets_them_through(family, bundle):
    bad = tuple(example(knob, family) for knob in EXAMPLES)
    configs = (*bad, *family.space(H200)[:20], *bad)
    best = make_shortlist(family, problem(family), H200, k=8, configs=configs, bundle=bundle)
    assert best.predicted
    assert len(best.configs) == 8
    assert not set(bad) & set(best.configs)
    pruner = Pruner(family, 8, problem=lambda arguments: problem(family), device=H200, bundle=bundle)
    pruned = pruner([config.to_triton() for config in configs], {})
    assert [KernelConfig.from_triton(config) for config in pruned] == list(best.configs)


@pytest.mark.parametrize(
    ("family", "knobs", "told", "why"),
    [
        (
            FORWARD,
            {"BLOCK_M": 256, "BLOCK_N": 128},
            {},
            "at most 16384 elements with num_warps = 4, .* but is 256 x 128",
        ),
        (FORWARD, {"BLOCK_M": 256, "BLOCK_N": 512, "num_warps": 16}, {}, "at most 65536 elements .* but is 256 x 512"),
        (
            FORWARD,
            {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 512, "num_warps": 1},
            {},
            "BLOCK_K must be at most 204 .* but is 512",
        ),
        (
            DW,
            {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 256},
            {"dtype": "fp32"},
            "BLOCK_K must be at most 128 in fp32 .* but is 256",
        ),
        (FORWARD, {"BLOCK_M": 64}, {"dtype": "fp32"}, "at most 4096 elements in fp32 but is 64 x 128"),
    ],
)
def test_blocks_that_a_compiler_takes_minutes_over_are_refused(family, knobs, told, why):
    call = problem(family, **told)
    config = KernelConfig.from_json(family.default(problem(family), H200).to_json() | knobs)
    assert re.search(why, family.supports(config, call, H200))


def test_an_answer_does_not_depend_on_what_was_asked_before():
    """64 and 64.0 and True and 1 are equal, and hash alike."""
    config, call = FORWARD.default(problem(FORWARD), H200), problem(FORWARD)
    for knob, value in (("BLOCK_K", 64.0), ("TMA_X", True)):
        other = KernelConfig.from_json(config.to_json() | {knob: value})
        assert other == config
        assert FORWARD.supports(config, call, H200) is None
        assert FORWARD.supports(other, call, H200).startswith(f"{knob} cannot be {value!r}: ")
        assert FORWARD.supports(config, call, H200) is None


def passed(family, count, seed):
    """Of mutated configs that `supports` passes, and that are of no binary of the space, so many on each arch."""
    known = {family.binary_key(config, call) for config in family.space() for call in problems(family)}
    found = {device.arch: {} for device in (H200, A100, B200)}
    for config, _, call, device in draws(family, 100_000, seed):
        mine = found[device.arch]
        if len(mine) < count and family.supports(config, call, device) is None:
            key = family.binary_key(config, call)
            if key not in known:
                mine.setdefault(key, (config, call, device))
        if all(len(some) == count for some in found.values()):
            break
    return [each for some in found.values() for each in some.values()]


def trouble_compiling(family, cases):
    wrong = {}
    for config, call, device in cases:
        with use_stub_driver(device):
            try:
                shared = family.compile(config, call).metadata.shared
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises is what this looks for
                wrong[f"{device.arch} {call} {config}"] = f"{type(error).__name__}: {error}"
                continue
        if shared > (said := smem_bytes(family.variant, config, call.itemsize, device)):
            wrong[f"{device.arch} {call} {config}"] = f"{shared} bytes of shared memory, not {said}"
    return wrong


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
@every_family
def test_what_passes_compiles_and_fits(family):
    """On one arch for each family: `-m slow` compiles a hundred on every arch."""
    arch = dict(zip(FAMILIES, (H200.arch, A100.arch, B200.arch), strict=True))[family]
    cases = [case for case in passed(family, 1, seed=1) if case[-1].arch == arch]
    assert len(cases) == 1
    assert trouble_compiling(family, cases) == {}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
@every_family
def test_much_of_what_passes_compiles_and_fits(family):
    assert trouble_compiling(family, passed(family, 100, seed=2)) == {}


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("knob", ["BLOCK_N", "BLOCK_K"])
def test_what_is_refused_would_not_compile(knob):
    with use_stub_driver(H200), pytest.raises(Exception):  # noqa: B017, PT011 - it differs between versions
        FORWARD.compile(example(knob), problem(FORWARD))


def test_every_config_that_ran_on_an_h200_is_supported_there():
    dataset = load("h200")
    device = {spec.name: spec for spec in dataset.devices}
    ran = dataset.measurements[dataset.measurements.status == "ok"]
    for row in ran.sample(4000, random_state=0).itertuples():
        call, config = dataset.cases[row.problem].problem, dataset.configs[row.config]
        assert find_family(call.family).supports(config, call, device[row.device]) is None, (str(call), str(config))


@every_family
@pytest.mark.parametrize(
    ("dim", "size"), [("groups", 100_000_000), ("groups", 2**31), ("rows", 2**30), ("n", 2**31), ("k", 2**40)]
)
def test_a_layer_larger_than_any_is_refused_before_anything_is_computed(family, dim, size):
    with pytest.raises(
        ForetuneError, match=f"{dim} of {family.name} must be at most {family.largest[dim]} but is {size}"
    ):
        make_shortlist(family, problem(family, **{dim: size}), H200)


@every_family
def test_the_largest_layer_has_finite_features(family):
    largest = problem(family, **family.largest)
    assert np.isfinite(family.features(family.at_call_time(largest), H200, family.space()[:4])).all()

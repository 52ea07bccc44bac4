"""`FamilyContract`: the rules that every `Family` must keep, as pytest tests.

A test class inherits it and names its family:

    from foretune.kernels.testing import FamilyContract

    class TestSoftmax(FamilyContract):
        family = RowSoftmax

One run of pytest does it all, without a GPU too: kernels are compiled for `device`, and launched in a second process,
which interprets them. On a machine with a GPU they are launched there as well. Results must equal the reference, and
the memory around the tensors must not change. For a kernel that the interpreter cannot run, set
`test_launches_in_the_interpreter = None`.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ..datasets import (
    DTYPES,
    BinaryFacts,
    DeviceSpec,
    ForetuneError,
    KernelConfig,
    Measurable,
    Problem,
)
from ..datasets.errors import cause_of
from ..datasets.feature_groups import FeatureGroup, joined
from ..runtime import TritonFamily, use_stub_driver
from . import find_family
from .contract_launches import (
    check_launches,
    covering_launches,
    interpretable,
    is_interpreting,
    run_interpreted,
    small_problems,
    warn_if_not_compared,
)

#: Bad values, to which each knob of a config is set, one at a time.
SILLY: tuple[Any, ...] = (0, -1, 3, 48, 2**31, 64.5, "fast", None)
NO_KNOB = "NO_SUCH_KNOB"


class FamilyContract:
    """Tests that every `Family` must pass: inherit from this class, set `family`, and override hooks if needed."""

    family: ClassVar[Any]  # a family, its class, or its name
    device: ClassVar[DeviceSpec] = DeviceSpec.named(
        "h200"
    )  # the device to predict and compile for; it need not be present
    compiled: ClassVar[int] = 4  # how many configs of the space are compiled
    launched: ClassVar[int] = 32  # the most configs that are launched

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "family" in vars(cls):
            cls.family = find_family(cls.family)

    # Hooks.

    def problems(self) -> Sequence[Problem]:
        """Return a few problems to test with; by default the first cases that the family draws."""
        assert isinstance(self.family, Measurable), "override `problems`: a family that only predicts draws no cases"
        return [case.problem for case in self.family.cases(random=4)][:8]

    def small_problems(self) -> Sequence[Problem]:
        """Return small problems to launch, in the interpreter and on a GPU; none to skip the launches.

        The default for a `TritonFamily` is sizes from `ranges` that the `tiles` do not divide; for other families it is
        the smallest one of fifty cases.
        """
        family = self.measurable
        if isinstance(family, TritonFamily) and set(family.dims) <= set(family.ranges):
            return small_problems(family, self.device)
        drawn = interpretable([case.problem for case in family.cases(random=50)])
        return sorted(drawn, key=lambda problem: math.prod(size for _, size in problem.dims))[:1]

    def call(self, problem: Problem) -> Mapping[str, Any] | None:
        """Return a launch's arguments for this problem by parameter name, or None if they need a device."""
        return self.family.arguments(problem, "meta") if isinstance(self.family, TritonFamily) else None

    # Declarations.

    def test_it_says_what_it_is(self) -> None:
        """The declared attributes are complete and consistent."""
        family = self.family
        assert family.name, "name must not be empty"
        assert not set(family.name) & set(": ,"), f"name must be one word but is {family.name!r}"
        for what in ("dims", "dtypes", "knobs", "feature_names"):
            values = getattr(family, what)
            assert values, f"{what} must not be empty"
            assert len(set(values)) == len(values), f"{what} must have no repeats but is {values}"
        assert set(family.dtypes) <= set(DTYPES), f"dtypes must be of {', '.join(DTYPES)} but are {family.dtypes}"
        defaults = {dim: size for dim, size in family.default_dims.items() if dim not in family.dims or size < 1}
        assert not defaults, f"default_dims must be sizes from 1 of {family.dims} but has {defaults}"
        unknown = sorted(set(family.default_knobs) - set(family.knobs))
        assert not unknown, f"default_knobs must be of {family.knobs} but has {unknown}"
        assert set(family.bucketed) <= set(family.dims), f"bucketed must be of {family.dims} but is {family.bucketed}"

    def test_other_processes_get_it(self) -> None:
        """A pickled family has the same name and space."""
        there = pickle.loads(pickle.dumps(self.family))
        assert there.name == self.family.name, "pickling lost the name: declare the class at the top of a module"
        assert there.space() == self.family.space(), "a pickled family must have the same space"

    def test_the_space_has_its_knobs_and_no_repeats(self) -> None:
        """Configs are distinct, have exactly the declared knobs, and convert to `triton.Config` and back unchanged."""
        family, space = self.family, self.family.space()
        assert space, "space() must have at least one config"
        assert len(set(space)) == len(space), "space() must have no config twice"
        for config in space:
            knobs = set(config.to_json()) - {"num_ctas"}
            assert knobs == set(family.knobs) - {"num_ctas"}, f"knobs are {family.knobs}, but a config has {knobs}"
        assert set(family.space(self.device)) <= set(space), "space(device) must be part of space()"
        assert KernelConfig.from_triton(space[0].to_triton()) == space[0], "a config must survive triton.Config"

    def test_problems_and_configs_survive_json(self) -> None:
        """Problems and configs are equal after a round trip through JSON."""
        for problem in self.problems():
            assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem, f"JSON changed {problem}"
        for config in self.family.space():
            assert KernelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config, f"JSON changed {config}"

    # Problems and configs.

    def test_problems_are_of_the_family(self) -> None:
        """Problems have the family's name, dimensions and flags."""
        for problem in self.problems():
            assert problem.family == self.family.name, f"{problem} must be of the family {self.family.name}"
            dims = {name for name, _ in problem.dims}
            assert dims == set(self.family.dims), f"{problem} must have the dimensions {self.family.dims}"
            assert set(problem.flags) <= set(self.family.flags), f"{problem} has flags that the family does not list"

    def test_supports_says_none_or_why_not_and_the_same_again(self) -> None:
        """`supports` always gives the same answer, None or a reason, and accepts some config for each problem."""
        for problem in self.problems():
            reasons = [self.family.supports(config, problem, self.device) for config in self.family.space()]
            for reason in reasons:
                assert reason is None or (isinstance(reason, str) and reason), f"a reason must be text, not {reason!r}"
            assert None in reasons, f"no config supports {problem}: {reasons[0]}"
            again = [self.family.supports(config, problem, self.device) for config in self.family.space()]
            assert reasons == again, f"supports must give the same answer every time: {problem}"

    def test_a_config_with_a_wrong_knob_is_refused_by_its_name(self) -> None:
        """`supports` refuses unknown and missing knobs, and its reasons name the knob."""
        for config, problem, knob, value in self.mutations():
            reason = self.reason_against(config, problem)
            if knob == NO_KNOB or knob not in config.to_json():
                assert reason is not None, f"supports must refuse a config with {knob} {value}: ask what knobs it has"
            if reason is not None:
                assert knob in reason, f"{knob}={value!r} was refused, but the reason does not name {knob}: {reason}"

    def test_what_supports_passes_compiles(self) -> None:
        """Configs that `supports` accepts compile and fit into shared memory."""
        if is_interpreting():
            pytest.skip("nothing compiles in the interpreter")
        family, space, problems = self.measurable, self.family.space(), self.problems()
        some = [space[place * len(space) // self.compiled] for place in range(self.compiled)]
        pairs = [(config, problem) for config, problem in zip(some, [*problems] * len(some), strict=False)]
        pairs += [(config, problem) for config, problem, _, _ in self.mutations()]
        made = set()
        with use_stub_driver(self.device):
            for config, problem in pairs:
                if (
                    self.reason_against(config, problem) is not None
                    or (key := family.binary_key(config, problem)) in made
                ):
                    continue
                made.add(key)
                try:
                    binary = family.compile(config, problem)
                except Exception as error:
                    raise AssertionError(f"supports passes {config} on {problem}, which does not compile") from error
                shared, most = binary.metadata.shared, self.device.smem_per_block_bytes
                assert shared <= most, f"supports passes {config} on {problem}: {shared} bytes of shared memory"
        assert made, "supports passed none of the configs that were tried"

    # Features and predictions.

    def test_features_are_finite_float32_a_row_for_each_config(self) -> None:
        """Features are finite float32 values of shape (n_configs, n_features)."""
        for problem, configs in self.supported():
            for known in (problem, problem.without_sizes()):
                table = self.family.features(known, self.device, configs)
                assert table.shape == (len(configs), len(self.family.feature_names)), (
                    "features: (n_configs, n_features)"
                )
                assert table.dtype == np.float32, f"features must be float32 but are {table.dtype}"
                bad = {self.family.feature_names[column] for column in np.argwhere(~np.isfinite(table))[:, 1]}
                assert not bad, f"features must be finite, but {', '.join(sorted(bad))} is not for {known}"

    def test_a_configs_features_do_not_depend_on_the_others(self) -> None:
        """A config has the same features alone as among others."""
        for problem, configs in self.supported():
            table = self.family.features(problem, self.device, configs)
            some = np.random.default_rng(0).permutation(len(configs))[:10]
            alone = self.family.features(problem, self.device, [configs[place] for place in some])
            assert np.array_equal(alone, table[some]), f"a config's features must be its own: {problem}"

    def test_groups_of_features_are_the_features(self) -> None:
        """`feature_groups` of one problem or several give the same values as `features`."""
        family, configs = self.family, self.family.space(self.device)
        lasting: dict[Any, FeatureGroup] = {}
        for problem, _ in self.supported():
            problems = [one for _, one in family.plausible(problem.without_sizes())]
            groups = family.feature_groups(problems, self.device, configs)
            for place, one in enumerate(problems):
                table = family.features(one, self.device, configs)
                assert np.array_equal(joined(groups, place), table), f"the groups must hold the features of {one}"
            for group in groups:
                if group.lasting:
                    first = lasting.setdefault((group.columns, problem.dtype, problem.flags), group)
                    assert group.values is first.values, (
                        f"the values of a lasting group must be one object for all problems: {problem}"
                    )

    def test_supports_depends_on_nothing_but_what_it_is_said_to(self) -> None:
        """Problems with equal `supports_by` get equal answers from `supports`."""
        family, known = self.family, dict[Any, list[bool]]()
        drawn = family.cases(random=6, max_tflop=1e-3) if isinstance(family, Measurable) else ()
        for problem in (*self.problems(), *(case.problem for case in drawn[:64])):
            able = [family.supports(config, problem, self.device) is None for config in family.space()]
            first = known.setdefault(family.supports_by(problem), able)
            assert able == first, f"supports_by must tell {problem} from another that other configs run"

    def test_features_do_with_what_is_known_of_binaries(self) -> None:
        """Features are finite whether facts about all, some or no compiled binaries are known."""
        if not self.family.reads_binaries:
            pytest.skip("the family does not use binaries")
        for problem, configs in self.supported():
            facts = {config: BinaryFacts(registers=64, spills=0, smem_bytes=1024) for config in configs[::2]}
            for known in (None, {}, facts):
                table = self.family.features(problem, self.device, configs, known)
                assert np.isfinite(table).all(), "features must be finite also where a binary is not known"

    def test_estimates_are_positive(self) -> None:
        """`estimate_us` returns a positive, finite time for each config."""
        for problem, configs in self.supported():
            us = np.asarray(self.family.estimate_us(problem.without_sizes(), self.device, configs))
            assert us.shape == (len(configs),), f"estimate_us must give a time for each config but gave {us.shape}"
            assert (np.isfinite(us) & (us > 0)).all(), f"estimate_us must be positive and finite: {problem}"

    def test_classes_of_bits_do_not_depend_on_independent_dimensions(self) -> None:
        """`numerics` is hashable and has the same value at all sizes of `independent` dimensions."""
        for problem, configs in self.supported():
            for dim in self.family.independent:
                dims = tuple((name, 1 if name == dim else size) for name, size in problem.dims)
                other = replace(problem, dims=dims, ragged=None)
                for config in configs[:50]:
                    classes = {self.family.numerics(config, problem), self.family.numerics(config, other)}
                    assert len(classes) == 1, f"the class of {config} depends on {dim}, which is in `independent`"
            kept = self.family.same_bits_config(problem, self.device)
            assert self.family.supports(kept, problem, self.device) is None, f"same_bits_config must run {problem}"

    def test_what_stands_for_a_problem_at_call_time(self) -> None:
        """`at_call_time` keeps the signature, drops ragged sizes, is idempotent, and stays supported."""
        for problem in self.problems():
            near = self.family.at_call_time(problem)
            assert near.signature == problem.signature, "at_call_time must keep family, dtype and flags"
            assert near.ragged is None, "at_call_time must forget ragged sizes: they are on the device"
            assert self.family.at_call_time(near) == near, "at_call_time twice must be as once"
            reasons = [self.family.supports(config, near, self.device) for config in self.family.space()]
            assert None in reasons, f"no config supports {near}, which stands for {problem}: {reasons[0]}"

    def test_a_launch_says_its_problem(self) -> None:
        """`problem_from_call` derives the problem from a launch's arguments, and rejects a launch without any."""
        with pytest.raises(ForetuneError):
            self.family.problem_from_call({})
        calls = [(problem, self.call(problem)) for problem in self.problems()]
        if all(call is None for _, call in calls):
            pytest.skip("override `call` to return the arguments of a launch")
        for problem, call in calls:
            if call is not None:
                found = self.family.problem_from_call({**call, "grid": (1,), "warmup": False})
                assert found == problem.without_sizes(), f"a launch of {problem} was taken for one of {found}"

    # Collecting.

    @property
    def measurable(self) -> Measurable:
        """The family, if it can be collected; otherwise the test is skipped."""
        if not isinstance(self.family, Measurable):
            pytest.skip("the family only predicts")
        return self.family

    def test_cases_follow_their_seed_and_their_limits(self) -> None:
        """`cases` depends on its seed alone, and draws supported problems within `max_tflop`."""
        family, most_tflop = self.measurable, 1e-3
        cases = list(family.cases(random=6, max_tflop=most_tflop))
        assert cases, "cases() must draw some problems"
        assert cases == list(family.cases(random=6, max_tflop=most_tflop)), "the same seed must draw the same cases"
        assert cases != list(family.cases(random=6, max_tflop=most_tflop, seed=1)), "another seed must draw others"
        for problem in (case.problem for case in cases):
            assert problem.family == family.name, f"cases() drew {problem} of another family"
            assert family.flops(problem) <= most_tflop * 1e12, f"{problem} is of more than max_tflop={most_tflop}"
            reasons = (family.supports(config, problem, self.device) for config in family.space())
            assert None in reasons, f"cases() drew {problem}, which no config supports"

    def test_work_is_not_negative(self) -> None:
        """`flops` and `bytes` are finite and not negative."""
        for problem in self.problems():
            for what in ("flops", "bytes"):
                assert 0 <= getattr(self.measurable, what)(problem) < math.inf, f"{what} must be 0 or more: {problem}"

    def test_the_default_is_supported(self) -> None:
        """The default config of each problem is supported."""
        for problem in self.problems():
            config = self.measurable.default(problem, self.device)
            reason = self.measurable.supports(config, problem, self.device)
            assert reason is None, f"the default {config} is not supported for {problem}: {reason}"

    def test_a_result_is_checked_on_a_problem_that_the_config_takes(self) -> None:
        """`check_problem` keeps the signature, stays supported, and has a tolerance."""
        for problem, configs in self.supported():
            for config in configs:
                check = self.measurable.check_problem(config, problem)
                assert check.signature == problem.signature, f"check_problem must keep dtype and flags: {problem}"
                reason = self.measurable.supports(config, check, self.device)
                assert reason is None, f"check_problem gives {config} a problem it does not support: {reason}"
                self.measurable.tolerance(check)  # raises if it is not a number >= 0, or several

    def test_equal_calls_share_a_binary(self) -> None:
        """`binary_key` is hashable, and equal for equal calls."""
        for problem, configs in self.supported():
            for config in configs:
                key = self.measurable.binary_key(config, problem)
                hash(key)
                other = KernelConfig.from_json(config.to_json())
                again = self.measurable.binary_key(other, Problem.from_json(problem.to_json()))
                assert key == again, f"binary_key must be the same for equal calls: {config} on {problem}"

    def test_the_source_hash_is_stable(self) -> None:
        """`source_hash` is not empty, and equal for a pickled family."""
        first, second = self.measurable.source_hash(), pickle.loads(pickle.dumps(self.measurable)).source_hash()
        assert first, "source_hash must not be empty"
        assert first == second, "source_hash must depend on the source alone"

    def test_launches_in_the_interpreter(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        """Launches in the interpreter compute the reference, and write nothing outside of their tensors.

        The configs have every value of each knob that a small problem supports, and tiles that divide no size. Results
        in bf16 are not compared, with a warning if there are no others.
        """
        here = replace(self.device, backend="cpu", sm_count=4)
        problems = interpretable(self.small_problems())
        warn_if_not_compared(self.measurable, problems)
        pairs = self.launches(problems, here)
        if is_interpreting():
            check_launches(self.measurable, pairs, here)
        else:
            run_interpreted(request, tmp_path)

    def test_launches_on_a_gpu(self) -> None:
        """Launches on a GPU, in every dtype, compute the reference and write nothing outside of their tensors."""
        import torch

        if is_interpreting() or not torch.cuda.is_available():
            pytest.skip("there is no GPU, or TRITON_INTERPRET is 1")
        here = DeviceSpec.live()
        check_launches(self.measurable, self.launches(self.small_problems(), here), here)

    # Helpers.

    def launches(self, problems: Sequence[Problem], device: DeviceSpec) -> list[tuple[KernelConfig, Problem]]:
        """Return the pairs of a config and a problem to launch; skip the test if there are no problems."""
        if not problems:
            pytest.skip("override `small_problems` to return the problems to launch")
        pairs = covering_launches(self.measurable, problems, device, self.launched)
        assert pairs, "no config supports one of `small_problems` with few programs: override it to return others"
        return pairs

    def supported(self) -> Iterator[tuple[Problem, list[KernelConfig]]]:
        """Yield each problem with at most forty configs that are supported for it."""
        for problem in self.problems():
            configs = [c for c in self.family.space() if self.family.supports(c, problem, self.device) is None]
            yield problem, configs[:: max(len(configs) // 40, 1)]

    def mutations(self) -> Iterator[tuple[KernelConfig, Problem, str, Any]]:
        """Yield (config, problem, knob, value): supported configs with one knob added, removed or set to a bad value.

        Values that `KernelConfig` itself rejects are left out.
        """
        for problem, configs in self.supported():
            knobs = configs[0].to_json()
            yield KernelConfig.of(**knobs, **{NO_KNOB: 1}), problem, NO_KNOB, 1
            for knob in self.family.knobs:
                if knob in dict(configs[0].meta):
                    less = {name: value for name, value in knobs.items() if name != knob}
                    yield KernelConfig.of(**less), problem, knob, "missing"
                for value in SILLY:
                    with suppress(ForetuneError):
                        yield KernelConfig.of(**knobs | {knob: value}), problem, knob, value

    def reason_against(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return what `supports` answers, and fail if it raises."""
        try:
            reason: str | None = self.family.supports(config, problem, self.device)
        except Exception as error:
            cause = cause_of(error)
            raise AssertionError(
                f"supports must answer for any config, but raised {type(cause).__name__}: {cause} for "
                f"{config.to_json()}. Ask first whether the knobs are right, as super().supports does"
            ) from error
        return reason

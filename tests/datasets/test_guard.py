"""The guards around a family's methods: each fault is an error that names the family and the method."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.datasets import Family, FamilyError, ForetuneError, KernelConfig, check_attributes
from foretune.datasets.errors import cause_of
from foretune.datasets.family import KernelChange

PROBLEM = fake_cases(models=1)[0].problem
SPACE = FakeFamily().space()


def family_with(**members):
    return type("Theirs", (FakeFamily,), members)()


def test_what_a_method_raises_is_an_error_that_names_it_on_one_line_and_the_original_is_its_cause():
    def supports(self, config, problem, device):
        raise RuntimeError("out of\n\x1b[31mluck")

    with pytest.raises(FamilyError) as caught:
        family_with(supports=supports).supports(SPACE[0], PROBLEM, DEVICE)
    assert str(caught.value) == r"family fake: supports() raised RuntimeError: out of\n\x1b[31mluck"
    assert type(cause_of(caught.value)) is RuntimeError


def test_an_exit_is_an_error_and_an_interrupt_is_not():
    def exiting(error):
        def space(self, device=None):
            raise error

        return family_with(space=space)

    with pytest.raises(FamilyError, match=r"family fake: space\(\) raised SystemExit: 3"):
        exiting(SystemExit(3)).space()
    with pytest.raises(KeyboardInterrupt):
        exiting(KeyboardInterrupt()).space()


def test_a_refusal_of_the_family_is_left_as_it_is():
    def problem_from_call(self, arguments):
        raise ForetuneError("rows is missing")

    with pytest.raises(ForetuneError, match=r"^rows is missing$"):
        family_with(problem_from_call=problem_from_call).problem_from_call({})


@pytest.mark.parametrize(
    ("method", "answer", "arguments", "told"),
    [
        ("space", None, (), "must return a tuple of KernelConfigs but returned None"),
        ("space", iter(SPACE), (), "must return a tuple of KernelConfigs but returned <tuple_iterator object>"),
        ("space", (SPACE[0], 1), (), "must return a tuple of KernelConfigs but returned 1"),
        ("space", (), (), r"must return at least one KernelConfig if no device is given but returned \(\)"),
        ("supports", True, (SPACE[0], PROBLEM, DEVICE), "must return None or a non-empty reason but returned True"),
        ("supports", "", (SPACE[0], PROBLEM, DEVICE), "must return None or a non-empty reason but returned ''"),
        ("supports_by", [], (PROBLEM,), r"must return a hashable value but returned \[\]"),
        ("features", np.zeros((2, 3)), (PROBLEM, DEVICE, SPACE[:2]), r"array of 2 x 18 numbers .* of shape \(2, 3\)"),
        (
            "feature_groups",
            [1],
            ([PROBLEM], DEVICE, SPACE[:2]),
            "must return FeatureGroups of 1 problems and 2 configs",
        ),
        ("estimate_us", [1.0], (PROBLEM, DEVICE, SPACE[:2]), "must return a time above 0 for each of 2 configs"),
        ("estimate_us", [1.0, np.nan], (PROBLEM, DEVICE, SPACE[:2]), "must return a time above 0 for each of 2"),
        ("problem_from_call", {}, ({},), "must return a Problem but returned {}"),
        ("at_call_time", None, (PROBLEM,), "must return a Problem but returned None"),
        ("at_call_time", fake_cases()[0].problem, (PROBLEM,), None),
        ("plausible", [(0.5, PROBLEM)], (PROBLEM,), "must return pairs \\(weight, Problem\\) whose weights sum to 1"),
        ("cases", (one for one in ()), (), "must return a list of Cases but returned <generator object"),
        ("bytes", float("nan"), (PROBLEM,), "must return a finite number >= 0 but returned nan"),
        ("flops", True, (PROBLEM,), "must return a finite number >= 0 but returned True"),
        ("tolerance", -1, (PROBLEM,), "must return a finite number >= 0 or a tuple of these but returned -1"),
        ("tolerance", (0.0, -1), (PROBLEM,), "or a tuple of these but returned"),
        ("tolerance", (0.0, 1e-3), (PROBLEM,), None),
        ("reference", (torch.ones(1), 1), (None,), "must return a tensor or a tuple of tensors but returned"),
        ("source_hash", "", (), "must return a non-empty string but returned ''"),
        ("usual", [None], (PROBLEM, DEVICE), "must return a tuple of KernelConfigs but returned .None."),
        ("check_problem", None, (SPACE[0], PROBLEM), "must return a Problem but returned None"),
        ("binary_key", {}, (SPACE[0], PROBLEM), "must return a hashable value but returned {}"),
        ("default", {}, (PROBLEM, DEVICE), "must return a KernelConfig but returned {}"),
    ],
)
def test_a_wrong_answer_names_what_was_due(method, answer, arguments, told):
    theirs = family_with(**{method: lambda self, *args, **kwargs: answer})
    if told is None:
        assert getattr(theirs, method)(*arguments) is answer
        return
    with pytest.raises(FamilyError, match=rf"^family fake: {method}\(\) .*{told}"):
        getattr(theirs, method)(*arguments)


def test_a_reason_with_escape_codes_is_written_out():
    theirs = family_with(supports=lambda self, config, problem, device: "\x1b[31mred\n")
    assert theirs.supports(SPACE[0], PROBLEM, DEVICE) == r"\x1b[31mred\n"


def test_what_is_given_is_a_copy():
    def problem_from_call(self, arguments):
        arguments.clear()
        return PROBLEM

    arguments = {"rows": 8}
    assert family_with(problem_from_call=problem_from_call).problem_from_call(arguments) is PROBLEM
    assert arguments == {"rows": 8}


def test_an_inherited_method_may_be_completed_and_is_judged_as_a_whole():
    class More(FakeFamily):
        feature_names = (*FakeFamily.feature_names, "more")

        def features(self, problem, device, configs, binaries=None):
            table = super().features(problem, device, configs)  # of one column less than `feature_names`
            return np.hstack([table, np.ones((len(table), 1), np.float32)])

        def supports(self, config, problem, device):
            try:
                return super().supports(KernelConfig.of(BLOCK_M=1), problem, device)
            except KeyError:  # as it was raised
                return None

    assert More().features(PROBLEM, DEVICE, SPACE[:2]).shape == (2, 19)
    assert More().supports(SPACE[0], PROBLEM, DEVICE) is None


class Mixin:
    def space(self, device=None):
        raise RuntimeError("mixed in")


@pytest.mark.parametrize(
    "members",
    [
        {"space": staticmethod(lambda device=None: 1 / 0)},
        {"space": classmethod(lambda cls, device=None: 1 / 0)},
        {"space": functools.lru_cache(lambda self, device=None: 1 / 0)},
        {"space": functools.partial(lambda device=None: 1 / 0)},
    ],
)
def test_a_method_of_any_make_is_guarded(members):
    with pytest.raises(FamilyError, match=r"family fake: space\(\) raised ZeroDivisionError"):
        family_with(**members).space()


def test_a_method_of_a_mixin_is_guarded():
    with pytest.raises(FamilyError, match=r"family fake: space\(\) raised RuntimeError: mixed in"):
        type("Theirs", (Mixin, FakeFamily), {})().space()


def raising(self):
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (
            {"name": "\x1b[31mred"},
            r"the name of Theirs must be a non-empty string of printable characters but is '\\x1b\[31mred'",
        ),
        ({"name": "../up"}, r"the name of Theirs must consist of letters, digits and _ \. : \+ - but is '../up'"),
        ({"name": "two words"}, "the name of Theirs must consist of letters"),
        ({"name": property(raising)}, "family Theirs: name raised RuntimeError: no"),
        ({"dims": property(raising)}, "family fake: dims raised RuntimeError: no"),
        ({"dims": None}, "dims of family fake must be a list of at most 256 strings but is None"),
        (
            {"dims": ("rows", "\n")},
            r"each of dims of family fake must be a non-empty string of printable characters but is '\\n'",
        ),
        ({"dims": ("rows", "rows")}, "dims of family fake must be a tuple without duplicates"),
        ({"dtypes": ()}, "dtypes of family fake must not be empty"),
        ({"knobs": ("BLOCK M",)}, "each of knobs of family fake must consist of letters"),
        ({"largest": {"m": 8}}, "largest of family fake may only name its dims but has 'm'"),
        ({"largest": {"rows": -1}}, "largest of family fake: rows must be an integer >= 1 but got -1"),
        ({"default_knobs": ()}, r"default_knobs of family fake must be a mapping but is \(\)"),
        ({"kernel_changes": {"old": "new"}}, "kernel_changes of family fake must be a tuple of KernelChange"),
        (
            {"kernel_changes": (KernelChange("a", "b", {"NO": 1}),)},
            "kernel_changes of family fake must be a tuple of K",
        ),
        (
            {"kernel_changes": (KernelChange("a", "b", None, 0.85),)},
            r"kernel_changes of family fake must be .* whose saved_us is a function, or None, but is .*0.85",
        ),
        (
            {"kernel_changes": (KernelChange("a", "b", None, keeps_times=1),)},
            r"kernel_changes of family fake must be a tuple of KernelChange\(.*keeps_times\).* but is .*keeps_times=1",
        ),
        ({"bucketed": ("m",)}, "bucketed of family fake may only name its dims but has m"),
        ({"reads_binaries": None}, "reads_binaries of family fake must be true or false but is None"),
    ],
)
def test_what_a_family_declares_is_checked_where_it_is_handed_over(members, told):
    with pytest.raises(ForetuneError, match=f"^{told}"):
        check_attributes(family_with(**members))


def test_base_classes_stay_abstract():
    class Half(Family):
        def space(self, device=None):
            return SPACE

    with pytest.raises(TypeError, match="abstract"):
        Half()

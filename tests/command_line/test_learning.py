"""`foretune.train`, `foretune.evaluate` and `foretune.report` on the small measured data of a third-party family."""

from __future__ import annotations

import sys
from pathlib import Path

import foretune
import pytest
from foretune import ForetuneError
from foretune.kernels import find_family

ROOT = Path(__file__).parents[2]
DATA = ROOT / "kernels" / "examples" / "measured_h200"


@pytest.fixture(scope="module")
def softmax():
    sys.path.append(str(ROOT / "tests" / "third_party"))
    pytest.importorskip("torch")
    from rowwise_kernels.softmax import RowSoftmax

    yield RowSoftmax
    sys.path.remove(str(ROOT / "tests" / "third_party"))


@pytest.fixture(scope="module")
def bundle(softmax):
    pytest.importorskip("lightgbm")
    return foretune.train(DATA, family=softmax)


@pytest.fixture(autouse=True)
def known_data():
    """Nothing is held out of a bundle that was trained on the same data, which a warning says."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which flatter it")
        yield


def test_a_trained_bundle_predicts_and_can_be_read_again(bundle, softmax, tmp_path):
    bundle.save(tmp_path / "bundle")
    problem = foretune.Problem.of("row_softmax", rows=4096, columns=1024, dtype="fp16")
    chosen = foretune.shortlist(softmax, problem, "h200", k=3, bundle=bundle)
    again = foretune.shortlist(softmax, problem, "h200", k=3, bundle=tmp_path / "bundle")
    assert (len(chosen.configs), again.configs) == (3, chosen.configs)


def test_other_families_of_a_bundle_are_kept(bundle, softmax):
    kept = foretune.train([DATA], family=[softmax], keep=foretune.load_bundle())
    assert set(kept.families) == {*foretune.load_bundle().families, "row_softmax"}


def test_a_bundle_is_evaluated_as_it_is(bundle, softmax):
    judged = foretune.evaluate(DATA, bundle=bundle, family=softmax, jobs=1)
    regret = judged["row_softmax"].to_json()["regret"]
    assert list(judged) == ["row_softmax"]
    # Not necessarily smaller for a larger k: the best is chosen by one timing pass and judged by another.
    assert all(1 <= regret[k]["geomean"] < 1.05 for k in ("1", "8"))


def test_a_report_is_one_page(bundle, softmax, tmp_path):
    pytest.importorskip("matplotlib")
    made = foretune.report(DATA, bundle=bundle, family=softmax, quick=True)
    made.save(tmp_path / "report.html")
    assert repr(made) == f"<Report on {DATA}: row_softmax>"
    assert "row_softmax" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("function", [foretune.train, foretune.evaluate, foretune.report])
def test_families_that_are_not_registered_must_be_given(function):
    either = r"package\.module:Class or path/to/file\.py:Class \(family= in"
    with pytest.raises(ForetuneError, match=rf"measured_h200 has .*: pass --family {either}"):
        function(DATA)


def test_a_family_to_adapt_that_is_not_registered_must_be_given(bundle):
    with pytest.raises(ForetuneError, match=r"row_softmax, for which no family .* \(family= in Python\)"):
        foretune.adapt(DATA, bundle=bundle)


def test_a_bundle_without_the_families_is_refused(softmax):
    with pytest.raises(ForetuneError, match=r"bundle has no family 'row_softmax'; it has .*\. Use another bundle, or"):
        foretune.evaluate(DATA, bundle=foretune.load_bundle(), family=softmax)


def test_an_unknown_family_is_not_reported_as_one_that_the_bundle_lacks():
    with pytest.raises(ForetuneError, match=r"unknown kernel family 'matmull' \(did you mean 'matmul'\?\)"):
        foretune.evaluate(DATA, bundle=foretune.load_bundle(), family="matmull")


def test_a_misspelt_class_in_a_file_is_corrected():
    with pytest.raises(ForetuneError, match=r"has no 'RowSoftmx' \(did you mean 'RowSoftmax'\?\); its families: RowSo"):
        find_family(f"{DATA.parent / 'softmax.py'}:RowSoftmx")

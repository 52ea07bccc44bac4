"""A report says what was found, in one file that is the same every time, loads nothing, and can be read anywhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from xml.etree import ElementTree

import lightgbm
import numpy as np
import pytest
from browser import CHROMIUM, chromium
from commands import call
from fakes import FakeFamily, fake_dataset
from foretune import datasets, kernels
from foretune.datasets import Case, ForetuneError, Problem
from foretune.model import Forest, LightGBMRanker, StaticRanker, cross_validate, train_bundle
from foretune.model.baselines import Rivals
from foretune.model.contributions import tree_shap
from foretune.model.evaluation import CAN_RISE
from foretune.model.report import figures, make_report
from foretune.model.report.figures import accuracy_figures
from foretune.model.report.maps import knob_figures

FAMILY = FakeFamily()
QUICK = partial(LightGBMRanker, trees=12, epochs=0)
HOSTILE = "<script>alert(1)</script>&\"'$x_1$"
SVG = "{http://www.w3.org/2000/svg}"


def hostile():
    """A small dataset whose names would do harm if anybody let them."""
    problems = [
        Problem.of("fake", groups=4, n=512, rows=rows, k=k, ragged={"rows": (rows // 2, rows // 2, 0, 0)})
        for k in (256, 1024, 2048)
        for rows in (64, 512, 2048, 4096)
    ]
    cases = tuple(Case(problem, (f"{'ABC'[at // 4]}-1B/w{HOSTILE}",), HOSTILE) for at, problem in enumerate(problems))
    dataset = fake_dataset(cases)
    device = replace(dataset.devices[0], name=HOSTILE)
    rows = dataset.measurements.assign(device=HOSTILE, compile_ms=300.0 + dataset.measurements["config"])
    return replace(dataset, name=HOSTILE, devices=(device,), measurements=rows)


DATASET = hostile()


@pytest.fixture(scope="module")
def report():
    return make_report(DATASET, {"fake": FAMILY}, ranker=QUICK)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "bundle"
    train_bundle(DATASET, {"fake": FAMILY}, QUICK).save(folder)
    return folder


def test_contributions_are_those_of_lightgbm():
    random = np.random.default_rng(0)
    rows = random.normal(size=(500, 6)).astype(np.float32)
    rows[:, 3] = rows[:, 3].round()
    target = rows[:, 0] * rows[:, 1] + np.sin(3 * rows[:, 2]) + rows[:, 3] ** 2
    options = {"num_leaves": 31, "use_missing": False, "min_data_in_leaf": 3, "verbosity": -1, "num_threads": 1}
    booster = lightgbm.train({"objective": "regression", **options}, lightgbm.Dataset(rows, target), 10)
    theirs = booster.predict(rows[:50], pred_contrib=True)
    values, mean = tree_shap(Forest.from_lightgbm(booster.dump_model()), rows[:50], rows)
    np.testing.assert_allclose(values, theirs[:, :-1], rtol=0, atol=1e-9)
    np.testing.assert_allclose(mean, theirs[:, -1])


def test_contributions_add_up_where_the_background_never_went():
    random = np.random.default_rng(0)
    rows = random.normal(size=(300, 4)).astype(np.float32)
    data = lightgbm.Dataset(rows, rows[:, 0] * rows[:, 1])
    options = {"objective": "regression", "use_missing": False, "verbosity": -1, "num_threads": 1}
    forest = Forest.from_lightgbm(lightgbm.train(options, data, 5).dump_model())
    values, mean = tree_shap(forest, rows, rows[:2])
    np.testing.assert_allclose(values.sum(axis=1) + mean, forest.predict(rows), atol=1e-6)


def test_the_worst_problems_are_the_slowest_first_choices(report):
    found = report.families["fake"]
    worst = found.worst(4)
    assert [choice.regret for choice in worst] == sorted(found.evaluation.regret[1], reverse=True)[:4]
    grid = found.evaluation.grid
    rows = {str(case.problem.without_sizes()): row for row, case in enumerate(grid.cases)}
    for choice in worst:
        times = dict(zip(grid.configs, grid.second_us[rows[choice.problem]], strict=True))
        assert choice.best_us == times[choice.best] == np.nanmin(list(times.values()))
        slowest = np.nanmax(list(times.values()))
        assert choice.first_us == (None if np.isnan(times[choice.first]) else times[choice.first])
        assert (choice.first_us or slowest) / choice.best_us == pytest.approx(choice.regret)
        assert choice.best_predicted >= choice.first_predicted
        assert bool(choice.differences) == (choice.first != choice.best) == (choice.best_rank > 1)


def test_a_shortlist_covers_a_problem_if_it_has_a_good_config(report):
    found = report.families["fake"]
    grid, places = found.evaluation.grid, found.evaluation.places[0]
    for k in (1, 3, 8):
        served = []
        for row in range(len(grid)):
            order = sorted(np.flatnonzero(~np.isnan(places[row])), key=lambda at, row=row: places[row, at])
            times = np.nan_to_num(grid.times_us[row], nan=np.inf)
            served.append(min(times[order[:k]]) <= 1.01 * min(times[order]))
        assert found.coverage_by_k()[k - 1] == pytest.approx(np.mean(served))
    assert (np.diff(found.coverage_by_k()) >= 0).all()


def test_an_evaluation_says_what_was_predicted_of_the_candidates_alone(report):
    judged = report.families["fake"].evaluation
    assert judged.predicted.shape == (2, len(judged.cases), len(judged.grid.configs))
    assert judged.grid.cases == judged.cases
    part = cross_validate(DATASET, FAMILY, StaticRanker, tested=1, rivals=Rivals({}, {}))
    assert part.predicted.shape[1] == len(part.cases) == len(part.grid) < len(judged.cases)
    assert part.baselines == {}
    assert not np.isnan(np.nanmin(part.predicted, axis=2)).any()


def test_the_learning_curve_learns_from_more_and_more_problems(report):
    points = report.families["fake"].curve
    learned = [point.problems for point in points]
    assert learned == sorted(set(learned))
    assert learned[-1] < len(DATASET.cases)
    assert all(point.trees == 12 for point in points)
    assert all(point.regret[k].geomean >= 1.0 for point in points for k in (1, 8))


def test_the_page_loads_and_runs_nothing_whatever_the_names_are(report):
    html = report.html
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;" in html
    assert "default-src 'none'" in html
    named = re.findall(r'(?:src|href|xlink:href|action|url)\s*[=(]\s*["\']?([^"\')\s>]*)', html)
    assert named
    assert all(one.startswith(("#", "data:,")) for one in named)


def test_the_headline_is_computed_and_stands_at_the_top(report):
    found = report.families["fake"]
    told, headline = found.evaluation, found.headline
    candidates = np.isfinite(told.predicted[0])
    assert headline.k == 8
    assert headline.configs == candidates.any(axis=0).sum()
    assert headline.regret == pytest.approx(np.exp(np.log(told.regret[8]).mean()), abs=1e-4)
    equal = replace(found, trial_ms=None).headline.tuning_ratio  # with the same time for each config
    assert equal == pytest.approx(candidates.sum() / (8 * len(candidates)))
    assert 0.5 * equal < headline.tuning_ratio < 2 * equal
    assert report.html.index(str(headline)) < report.html.index('<h2 id="f0-heading"')
    assert report.to_json()["families"]["fake"]["headline"]["text"] == str(headline)


def test_the_page_has_definitions_version_date_and_command(report):
    for term in ("regret", "noise floor", "interval", "sizes unknown", "random", "static", "nearest"):
        assert f"<dt>{term}</dt>" in report.html
    assert re.search(r"<dt>version</dt><dd>foretune \d", report.html)
    assert re.search(r"<dt>date</dt><dd>20\d\d-\d\d-\d\d \d\d:\d\d UTC</dd>", report.html)
    assert "<dt>command</dt>" not in report.html  # of a report that no command made
    assert (
        "<dt>command</dt><dd><code>foretune report --out a</code>"
        in replace(report, facts=report.facts | {"command": "foretune report --out a"}).html
    )


def test_the_table_says_why_a_value_can_rise_with_k(report):
    assert CAN_RISE in report.__rich__().below


def test_devices_are_compared_only_if_there_are_several(report):
    found = report.families["fake"]
    assert "f0-devices" not in report.html
    assert '<th scope="col">device</th>' not in report.html
    other = replace(found.evaluation.devices[0], name="another")
    devices = tuple(other if row % 2 else one for row, one in enumerate(found.evaluation.devices))
    several = replace(report, families={"fake": replace(found, evaluation=replace(found.evaluation, devices=devices))})
    assert "f0-devices" in several.html
    assert '<th scope="col">device</th>' in several.html


def test_no_curve_is_drawn_below_the_noise_floor(report, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_legend", lambda ax: None)
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda ax, x, y, *a, **k: drawn.extend(y))
    monkeypatch.setattr("matplotlib.axes.Axes.fill_between", lambda ax, x, low, high, **k: drawn.extend([*low, *high]))
    found = report.families["fake"]
    noisy = replace(found, evaluation=replace(found.evaluation, full_search=np.full(len(found.places), 1.07)))
    for draw in (figures._regret, figures._learning):
        drawn.clear()
        draw(noisy, "f0")
        assert len(drawn) >= 4
        assert min(drawn) == pytest.approx(7.0)


def test_every_figure_is_an_accessible_picture_of_text_and_shapes(report):
    figures = [figure for one in report.sections.values() for figure in one.figures]
    assert {figure.key.split("-")[1] for figure in figures} == {
        "regret", "learning", "features", "reliability", "coverage", "shape", "knobs"
    }  # fmt: skip
    for figure in figures:
        svg = ElementTree.fromstring(figure.inline())
        assert (svg.get("role"), svg.get("aria-labelledby")) == ("img", f"{figure.key}-title")
        assert svg.find(f"{SVG}title").text == figure.title
        assert len(svg.find(f"{SVG}desc").text) > 20
        assert len(list(svg.iter(f"{SVG}text"))) > 3
        assert not list(svg.iter(f"{SVG}image"))
        assert "var(--ink, " in figure.inline()
    ids = re.findall(r'\bid="([^"]+)"', report.html)
    assert len(ids) == len(set(ids))


def test_the_same_findings_give_the_same_bytes_whatever_matplotlib_is_set_to(report):
    import matplotlib

    with matplotlib.rc_context({"font.size": 40, "text.usetex": True, "svg.fonttype": "path"}):
        drawn = accuracy_figures(report.families["fake"], "f0")
        assert [figure.inline() for figure in drawn] == [figure.inline() for figure in report.sections["fake"].accuracy]


def test_single_problems_are_drawn_over_the_knobs_that_they_differ_in(report):
    found = report.families["fake"]

    def titles(**fixed):
        """What is drawn where all other configs are gone."""
        grid = found.evaluation.grid
        kept = [at for at, one in enumerate(grid.configs) if all(one[knob] == fixed[knob] for knob in fixed)]
        predicted = found.evaluation.predicted[:, :, kept]
        evaluation = replace(found.evaluation, grid=grid.select_configs(kept), predicted=predicted)
        return [figure.title for figure in knob_figures(replace(found, evaluation=evaluation), "f0")]

    fixed = {"BLOCK_M": 16, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    assert all("by BLOCK_N and BLOCK_M" in figure.title for figure in report.sections["fake"].knobs)
    assert all(title.endswith("by BLOCK_N") for title in titles(**fixed))
    assert titles(**fixed, BLOCK_N=32) == []


def test_what_draws_is_asked_for_before_the_work(monkeypatch):
    monkeypatch.setattr("foretune.model.report.find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(
        ForetuneError, match=r"a report needs matplotlib: pip install matplotlib \(Foretune's extra 'report'\)"
    ):
        make_report(None, {})


@pytest.fixture
def on_the_command_line(monkeypatch):
    kernels.register(FAMILY)
    monkeypatch.setattr(datasets, "load", lambda name: DATASET)


@pytest.mark.usefixtures("on_the_command_line")
def test_the_command_writes_the_page_and_the_plots(bundle, tmp_path):
    command = f"report --data d --bundle {bundle} --quick --out {tmp_path / 'r.html'} --plots {tmp_path / 'plots'}"
    told = json.loads(call(f"{command} --json").stdout)
    assert told["families"]["fake"]["regret"]["1"]["geomean"] >= 1.0
    assert len(told["families"]["fake"]["worst"]) == 10
    assert told["families"]["fake"]["learning_curve"] == []
    assert (told["out"], told["plots"]) == (str(tmp_path / "r.html"), str(tmp_path / "plots"))
    page = (tmp_path / "r.html").read_text()
    assert f"<code>foretune report --data d --bundle {bundle} --quick" in page
    assert "was trained on 100 % of these measurements" in page
    plots = sorted(path.stem for path in (tmp_path / "plots").iterdir())
    assert plots == sorted(re.findall(r'aria-labelledby="(f0-[^"]+)-title"', page))
    for path in (tmp_path / "plots").iterdir():
        assert ElementTree.parse(path).getroot().tag == f"{SVG}svg"
    refused = call(f"report --bundle {bundle} --out {tmp_path / 'missing' / 'r.html'}")
    assert refused.exit_code == 1
    assert "make the folder" in refused.stderr


@pytest.mark.usefixtures("on_the_command_line")
def test_a_regret_that_is_too_large_fails_and_is_named(bundle):
    command = f"evaluate --data d --bundle {bundle}"
    regret1 = json.loads(call(f"{command} --json").stdout)["families"]["fake"]["regret"]["1"]["geomean"] - 1
    short = call(f"{command} --max-regret1 {regret1 / 2}")
    assert short.exit_code == 1
    assert f"but is: fake {100 * regret1:.2f} %" in short.stderr
    assert "% slower than the best config" in short.stdout
    told = json.loads(call(f"{command} --max-regret1 {regret1 / 2} --json").stdout)
    assert (told["max_regret1"], "fake" in told["error"], "fake" in told["families"]) == (regret1 / 2, True, True)
    held = call(f"{command} --max-regret1 {regret1 + 1e-6} --json")
    assert held.exit_code == 0
    assert "error" not in json.loads(held.stdout)
    assert call(f"{command} --max-regret1 -1").exit_code == 2


#: Texts of figures that overlap, or leave their figure, or are too small to read; and what is wider than the page.
LOOK = """(() => {
  const found = [];
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) found.push(`the page is ${wide} px too wide`);
  for (const cell of document.querySelectorAll("td, tbody th, dd, li, figcaption, h4"))
    if (cell.scrollWidth > cell.clientWidth + 1 && getComputedStyle(cell).display !== "inline")
      found.push(`cut: ${cell.textContent.trim()}`);
  for (const svg of document.querySelectorAll("svg.figure")) {
    const room = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text")].map(text => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([text, a], at) => {
      if (a.left < room.left - 1 || a.right > room.right + 1 || a.top < room.top - 1 || a.bottom > room.bottom + 1)
        found.push(`outside: ${text}`);
      if (a.height < 7 && a.width < 7) found.push(`too small: ${text}`);
      for (const [other, b] of boxes.slice(at + 1)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 3) found.push(`overlap: ${text} and ${other}`);
      }
    });
  }
  return found;
})()"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_browser_shows_all_of_it_from_phones_to_desks(report, tmp_path):
    report.save(tmp_path / "report.html")
    with chromium(tmp_path / "profile") as browser:
        colours = set()
        for width, dark in ((400, False), (1000, True), (1400, False), (1600, False)):
            browser.open(tmp_path / "report.html", width=width, dark=dark)
            assert browser.value("innerWidth") == width
            assert browser.value(LOOK) == []
            if width >= 1000:  # figures stand side by side, and use the width
                rights = browser.value(
                    "[...document.querySelectorAll('.figures > *')].map(f => f.getBoundingClientRect().right)"
                )
                assert width - max(rights) < 40
            script = "['color', 'background-color'].map(name => getComputedStyle(document.body)[name]).join(' on ')"
            colours.add(browser.value(script))
            text = "getComputedStyle(document.querySelector('svg.figure text')).fill"
            assert browser.value(f"{text} === getComputedStyle(document.body).color")
        assert len(colours) == 2
        drawn = [figure for one in report.sections.values() for figure in one.figures]
        assert browser.value("document.querySelectorAll('svg.figure').length") == len(drawn) > 7
    assert browser.complaints == []

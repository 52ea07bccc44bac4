"""Covers: from predictions and from times, what they refuse, and a compiled graph that stays dynamic."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import foretune
import numpy as np
import pytest
import torch
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.datasets import Case, ForetuneError, KernelConfig, Problem
from foretune.kernels import find_family
from foretune.model import Bundle
from foretune.runtime.covering import Cover, make_cover, make_hint_matrix, measured_cover

SIZES = (64, 128, 256, 512, 1024, 2048)
PROBLEM = Problem.of("fake", groups=4, n=1024, k=512, rows=64)
LAYER = Problem.of("grouped_gemm_fwd", groups=64, rows=1, n=2048, k=1024)


class Fast(Bundle):
    """Predicts that rows, rounded up to tiles of the config, are all that counts, and for each tile a little."""

    digest = "fast" * 16

    def __init__(self):
        self.asked = []

    def ranker(self, family):
        return self

    def trained_on(self, family):
        return (DEVICE,)

    def wrong_results(self, family, problem):
        return frozenset()

    def predict(self, family, problem, device, configs):
        self.asked.append(problem["rows"])
        tiles = [-(-problem["rows"] // c["BLOCK_M"]) * (c["BLOCK_M"] + 40) for c in configs]
        return np.array([one * 1.01 ** (c["BLOCK_N"] / 32) for one, c in zip(tiles, configs, strict=True)])


@pytest.fixture(scope="module")
def data():
    cases = tuple(Case(foretune.Problem.of("fake", groups=4, n=1024, k=512, rows=rows), ("a/b",)) for rows in SIZES)
    return fake_dataset(cases)


def cover(k=2, span=(8, 512), **options):
    return make_cover(FakeFamily(), PROBLEM, "rows", span, k, DEVICE, bundle=Fast(), **options)


def test_a_cover_s_table_is_what_is_best_at_each_size():
    found = cover(k=4, sizes=[16, 32, 64, 128])
    blocks = [found.config_for(size)["BLOCK_M"] for size in (16, 32, 64, 128)]
    assert blocks == [16, 32, 64, 128]
    assert found.crossovers == (17, 33, 65)  # between two sizes that were looked at, the larger one's runs
    assert found.losses == pytest.approx([0, 0, 0, 0])
    assert (found.index_for(1), found.index_for(9999)) == (0, 3)  # outside, the nearest range's
    assert [found.config_for(size)["BLOCK_M"] for size in (17, 32, 33)] == [32, 32, 64]


def test_fewer_configs_lose_more_and_say_what():
    one, two, three = (cover(k=k) for k in (1, 2, 3))
    assert one.mean_loss > two.mean_loss > three.mean_loss > 0
    assert len(one.configs) == len(one.choices) == 1
    assert one.crossovers == ()
    for found in (one, two, three):
        assert found.worst_loss >= found.mean_loss
        assert len(found.choices) == len(found.crossovers) + 1 <= 8
        assert len(found.losses) == len(found.sizes)
        assert (found.sizes[0], found.sizes[-1]) == (8, 512)
        assert {9, 16, 18, 144, 320, 384} <= set(found.sizes)  # sizes that calls are rounded up to


def test_as_few_as_lose_no_more_than_is_said():
    for within in (0.0, 0.05, 0.3, 10.0):
        found = cover(k=None, within=within)
        assert found.worst_loss <= within + 1e-9
        if len(found.configs) > 1:  # one less does not do, wherever it is changed over
            assert cover(k=len(found.configs) - 1, ranges=256).worst_loss > within
    assert len(cover(k=None, within=10.0).configs) == 1
    assert len(cover(k=None, within=0.3).configs) < len(cover(k=None, within=0.0).configs)
    assert len(cover(k=None).configs) == 3


def test_what_cannot_be_held_loses_as_little_as_it_can():
    found = cover(k=None, within=0.0, ranges=2)
    assert len(found.choices) == 2
    assert found.worst_loss > 0
    assert found.mean_loss == cover(k=16, ranges=2).mean_loss


def test_measured_times_are_covered_within_so_much_too(data):
    found = measured_cover(FakeFamily(), PROBLEM, "rows", (64, 2048), None, DEVICE, data, within=0.02)
    three = measured_cover(FakeFamily(), PROBLEM, "rows", (64, 2048), None, DEVICE, data)
    assert found.worst_loss <= 0.03  # chosen on the first pass, and judged on the second
    assert len(found.configs) >= 1
    assert len(three.configs) <= 3
    matrix = make_hint_matrix(FakeFamily(), PROBLEM, "rows", (64, 2048), None, DEVICE, data, hints=[64], within=0.02)
    assert matrix.measured == found


def test_ranges_and_weights_are_heeded():
    assert len(cover(k=3, ranges=2).choices) == 2
    assert cover(k=1, sizes=[16, 16, 16, 16, 128]).configs[0]["BLOCK_M"] == 16
    assert cover(k=1, sizes=[16, 128, 128, 128, 128]).configs[0]["BLOCK_M"] == 128


def test_sizes_are_predicted_themselves_and_not_their_bucket():
    bundle = Fast()
    make_cover(FakeFamily(), PROBLEM, "rows", (64, 4096), 2, DEVICE, bundle=bundle)
    assert {*range(64, 4097, 64)} <= {*bundle.asked}


def test_what_the_family_refuses_at_a_size_does_not_run_there():
    class Odd(FakeFamily):
        def supports(self, config, problem, device):
            if config["BLOCK_M"] == 16 and problem["rows"] == 11:
                return "not 11"
            return super().supports(config, problem, device)

    found = make_cover(Odd(), PROBLEM, "rows", (8, 64), 2, DEVICE, bundle=Fast(), sizes=[8, 16, 32, 64])
    assert all(Odd().supports(found.config_for(rows), found.problem.rounded(), DEVICE) is None for rows in (8, 64))
    assert found.config_for(11)["BLOCK_M"] != 16
    assert cover(span=(8, 64), sizes=[8, 16, 32, 64]).config_for(11)["BLOCK_M"] == 16

    class Never(FakeFamily):
        def supports(self, config, problem, device):
            return "never" if problem["rows"] > 40 else None

    with pytest.raises(ForetuneError, match=r"no config of fake can run .*rows=64.*: never"):
        make_cover(Never(), PROBLEM, "rows", (8, 64), 2, DEVICE, bundle=Fast(), sizes=[8, 64])


def test_by_times_the_choice_is_of_one_pass_and_the_loss_of_another(data):
    family = FakeFamily()
    found = measured_cover(family, PROBLEM, "rows", (64, 2048), 2, DEVICE, data)
    grid = data.grid("fake")
    assert found.sizes == SIZES
    for size, loss in zip(found.sizes, found.losses, strict=True):
        row = next(at for at, case in enumerate(grid.cases) if case.problem["rows"] == size)
        column = grid.configs.index(found.config_for(size))
        assert loss == pytest.approx(grid.second_us[row, column] / np.nanmin(grid.second_us[row]) - 1)
    assert measured_cover(family, PROBLEM, "rows", (64, 512), 2, DEVICE, data).sizes == SIZES[:4]
    with pytest.raises(ForetuneError, match=r"at two sizes of rows or more between 64 and 100.*but has 1"):
        measured_cover(family, PROBLEM, "rows", (64, 100), 2, DEVICE, data)


def test_a_hint_is_best_where_it_was_tuned_and_loses_elsewhere(data):
    made = make_hint_matrix(FakeFamily(), PROBLEM, "rows", (64, 2048), 2, DEVICE, data, hints=(64, 2048), bundle=Fast())
    losses = dict(made.losses)
    assert list(losses) == ["hint 64", "hint 2048", "nearest hint", "cover", "cover, measured"]
    assert losses["hint 64"][0] == made.noise[0]
    assert losses["hint 2048"][-1] == made.noise[-1]
    assert losses["nearest hint"][:2] == losses["hint 64"][:2]
    assert losses["nearest hint"][-2:] == losses["hint 2048"][-2:]
    assert max(losses["cover, measured"]) <= max(losses["hint 64"])
    assert json.loads(json.dumps(made.to_json()))["sizes"] == list(SIZES)
    assert made.predicted.reason == made.reason
    shown = made.__rich__()
    assert shown.rows[-1][0] == "worst"
    assert len(shown.rows) == len(SIZES) + 2
    with pytest.raises(ForetuneError, match="a size that fake measured but is 65"):
        make_hint_matrix(FakeFamily(), PROBLEM, "rows", (64, 2048), 2, DEVICE, data, hints=(65,), bundle=Fast())


def test_what_a_cut_collection_has_not_measured_is_not_said_to_fail(data):
    rows, grid = data.measurements, data.grid("fake")
    place = {case.problem["rows"]: row for row, case in enumerate(grid.cases)}
    hinted, best = (grid.configs[int(np.nanargmin(grid.first_us[place[size]]))] for size in (64, 1024))
    assert hinted != best
    lost = data.cases.index(grid.cases[place[1024]])
    there = (rows["problem"] != lost) | (rows["config"] != data.configs.index(hinted))
    whole = make_hint_matrix(FakeFamily(), PROBLEM, "rows", (64, 2048), 2, DEVICE, data, hints=(64,), bundle=Fast())
    cut = replace(data, measurements=rows[there].reset_index(drop=True))
    made = make_hint_matrix(FakeFamily(), PROBLEM, "rows", (64, 2048), 2, DEVICE, cut, hints=(64,), bundle=Fast())
    assert (whole.partial, made.partial) == ((), (1024,))
    before, after = (list(dict(one.losses)["hint 64"]) for one in (whole, made))
    assert np.isnan(after.pop(4))
    before.pop(4)
    assert after == before
    assert made.to_json()["not_measured"]["hint 64"] == [1024]
    shown = made.__rich__()
    assert shown.rows[4][1] == "not measured"
    assert shown.rows[-1][1] == f"{100 * max(after):.1f}"
    assert f"hint 64: {sum(loss <= 0.02 for loss in after)} of 5 sizes within 2 %" in shown.below
    assert "rows 1024, so the best may be faster there" in shown.below
    assert "measured at any size, so" in replace(made, partial=made.sizes).__rich__().below


def test_a_size_that_was_hardly_begun_is_left_out(data):
    rows = data.measurements
    lost = next(at for at, case in enumerate(data.cases) if case.problem["rows"] == 1024)
    few = rows["config"] < len(data.configs) // 4
    cut = replace(data, measurements=rows[(rows["problem"] != lost) | few].reset_index(drop=True))
    found = measured_cover(FakeFamily(), PROBLEM, "rows", (64, 2048), 2, DEVICE, cut)
    assert found.sizes == tuple(size for size in SIZES if size != 1024)
    assert found.reason == "measured in fake, without rows 1024, where too few configs were measured"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dynamic": "m"}, "one of groups, rows, n, k, but is 'm'"),
        ({"range": (64,)}, r"range must be \(smallest, largest\) size but is \(64,\)"),
        ({"range": (64, 8)}, "the largest size must be"),
        ({"range": (0, 8)}, "the smallest size must be"),
        ({"range": (1, 2**40)}, "the largest size must be"),
        ({"k": 0}, "k, the number of configs, must be"),
        ({"k": 17}, "k, the number of configs, must be"),
        ({"ranges": 0}, "ranges must be"),
        ({"within": -0.1}, "within must be"),
        ({"within": "2 %"}, "within must be"),
        ({"k": 3, "within": 0.02}, "k and within exclude each other but are 3 and 0.02"),
        ({"sizes": []}, "sizes must be a list of sizes"),
        ({"sizes": [32]}, "each of sizes must be"),
        ({"sizes": itertools.cycle([64, 128])}, "sizes must be a list of sizes, 1 to 1048576 of them, but has more"),
        ({"configs": []}, "at least one config"),
        ({"configs": [3]}, "must be a KernelConfig .* but one is 3"),
        ({"problem": "matmul"}, "must be a Problem but is 'matmul'"),
        (
            {"family": "matmul", "dynamic": "m", "problem": Problem.of("matmul", m=8, n=64, k=64)},
            r"must have the dimensions batch, m, n, k but this one has k, m, n \(batch=1 is usual\)",
        ),
        ({"data": "h200", "sizes": [64]}, "sizes is for predictions"),
        ({"device": "h300"}, "unknown device 'h300'"),
    ],
)
def test_what_cannot_be_covered_is_said(changed, said):
    given = {"family": "grouped_gemm_fwd", "problem": LAYER, "dynamic": "rows", "range": (64, 128), "device": "h200"}
    with pytest.raises(ForetuneError, match=said):
        foretune.cover(**given | changed)


def test_the_shipped_bundle_covers_a_layer_s_rows():
    found = foretune.cover("grouped_gemm_fwd", LAYER, "rows", (64, 4096), device="h200", sizes=[64, 256, 1024, 4096])
    family = find_family("grouped_gemm_fwd")
    assert 1 <= len(found.configs) <= 3
    assert found.worst_loss < 0.05
    for rows in (64, 100, 1000, 4096):
        one = Problem.of("grouped_gemm_fwd", groups=64, rows=rows, n=2048, k=1024)
        assert family.supports(found.config_for(rows), one, DEVICE) is None
    said = found.to_json()
    assert said["choices"][0] == 0
    assert len(said["losses"]) == len(said["sizes"]) == 4
    assert len(found.__rich__().rows) == len(found.choices)


@pytest.mark.parametrize("size", [16.0, float("nan"), True, "16", None, torch.tensor(16), [16], 16 + 0j])
def test_a_size_that_is_no_integer_is_refused(size):
    found = cover(k=3, sizes=[16, 32, 64, 128], span=(8, 128))
    for ask in (found.config_for, found.index_for):
        with pytest.raises(ForetuneError, match="size must be an integer but is"):
            ask(size)


def test_a_size_may_be_an_integer_of_numpys():
    found = cover(k=3, sizes=[16, 32, 64, 128], span=(8, 128))
    assert all(found.config_for(np.int64(size)) is found.config_for(size) for size in (8, 33, 128))


def test_a_compiled_graph_stays_dynamic_and_is_compiled_once_a_range():
    found, compiled = cover(k=3, sizes=[16, 32, 64, 128], span=(8, 128)), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=True, fullgraph=True)
    def rows_of_tiles(x):
        return x * found.config_for(x.shape[0])["BLOCK_M"]

    for rows in range(9, 128, 7):
        assert rows_of_tiles(torch.ones(rows))[0] == found.config_for(rows)["BLOCK_M"]
    assert len(compiled) == len(found.choices)


def test_has_a_short_repr_and_html():
    small, large = (KernelConfig.of(BLOCK_M=block) for block in (16, 128))
    problem = Problem.of("linear", m=8, n=4096, k=4096)
    found = Cover(problem, "m", (small, large), (65,), (0, 1), (8, 512), (0.0, 0.0123), "NVIDIA H200", "a <test>")
    assert repr(found) == "<Cover of linear: 2 configs for m 8-512 on NVIDIA H200, worst loss 1.2 %>"
    assert "<td>8-64</td>" in found._repr_html_()
    assert "a &lt;test&gt;" in found._repr_html_()

"""The network: what it predicts, what it refuses, and what it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.datasets import ForetuneError, ForetuneWarning
from foretune.model import LightGBMRanker
from foretune.model.rows import TrainingRows
from foretune.model.scoring.network import LIMIT, MOST_LOG, MOST_UNITS, Network
from foretune.model.scoring.training import LIST_SHARE, TEMPERATURE, gradient_of, softmax_of, train_network

FAMILY, GRID = FakeFamily(), fake_dataset().grid("fake")


def network(features=5, values=3, units=(8, 4), seed=0, scale=0.5):
    random = np.random.default_rng(seed)

    def drawn(*shape):
        return random.normal(0, scale, shape).astype(np.float32)

    return Network(
        mean=drawn(features),
        scale=np.abs(drawn(features)) + np.float32(0.1),
        which=random.integers(0, features, values).astype(np.int32),
        value=np.arange(values, dtype=np.float32),
        weight1=drawn(features + values, units[0]),
        bias1=drawn(units[0]),
        weight2=drawn(*units),
        bias2=drawn(units[1]),
        weight3=drawn(units[1]),
        bias3=drawn(1),
    )


def table(rows, features=5, seed=1):
    return np.random.default_rng(seed).integers(-3, 4, (rows, features)).astype(np.float32)


def by_torch(net, features):
    x = torch.from_numpy(features).double()
    standard = ((x - torch.from_numpy(net.mean)) / torch.from_numpy(net.scale)).clamp(-LIMIT, LIMIT)
    x = torch.cat([standard, (x[:, net.which.tolist()] == torch.from_numpy(net.value)).double()], 1)
    for weight, bias in ((net.weight1, net.bias1), (net.weight2, net.bias2)):
        x = torch.relu(x @ torch.from_numpy(weight).double() + torch.from_numpy(bias).double())
    return (x @ torch.from_numpy(net.weight3).double() + float(net.bias3[0])).numpy()


def test_it_predicts_what_torch_does():
    net, features = network(), table(100)
    np.testing.assert_allclose(net.predict(features), by_torch(net, features), atol=1e-7)
    assert len(net.predict(features[:0])) == 0


def test_a_row_has_the_same_figure_among_any_others():
    net, features = network(units=(64, 32)), table(1000)
    everything = net.predict(features)
    order = np.random.default_rng(2).permutation(1000)
    assert (net.predict(features[order]) == everything[order]).all()
    for count in (1, 31, 33, 500):
        assert (net.predict(features[:count]) == everything[:count]).all()


def test_no_figure_is_out_of_reach():
    net = network(scale=100.0)
    assert np.abs(net.predict(table(50))).max() == MOST_LOG == net.reach


def test_affine():
    net, features = network(), table(20)
    np.testing.assert_allclose(net.affine(-2.0, 0.5).predict(features), 0.5 - 2 * net.predict(features), atol=1e-6)


def test_flat_arrays_and_back():
    net = network()
    assert all(array.ndim == 1 for array in net.arrays().values())
    assert (Network.restored(**net.arrays()).predict(table(9)) == net.predict(table(9))).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mean": np.zeros(5)}, "mean of a network must be an array of float32"),
        ({"bias1": np.full(8, np.nan, np.float32)}, "bias1 of a network must be finite"),
        ({"scale": np.zeros(5, np.float32)}, "scale of a network must be positive"),
        ({"which": np.array([0, 1, 5], np.int32)}, "which of a network must be positions of its 5 features"),
        ({"which": np.array([0, 1, -1], np.int32)}, "which of a network must be positions of its 5 features"),
        ({"weight3": np.zeros(5, np.float32)}, r"weight3 of a network must be \(4,\) but is \(5,\)"),
        ({"weight2": np.zeros((8, MOST_UNITS + 1), np.float32)}, "a network has at most"),
    ],
)
def test_what_is_no_network_is_refused(changed, message):
    with pytest.raises(ForetuneError, match=message):
        replace(network(), **changed)


def rows(queries=60, configs=40, seed=0):
    """Log slowdowns that two features decide, one of which is a problem's."""
    random = np.random.default_rng(seed)
    problem = np.repeat(random.integers(0, 3, queries), configs)
    config = np.tile(np.arange(configs) % 4, queries)
    log = 0.3 * np.abs(config - problem) + 0.01 * random.random(queries * configs)
    features = np.stack([problem, config, random.random(len(log))], 1).astype(np.float32)
    return TrainingRows(features, log - log.min(), np.full(queries, configs), np.arange(queries))


def test_it_learns_an_order():
    learned, other = rows(), rows(seed=1)
    net = train_network(learned, seed=0, epochs=12)
    assert set(net.which.tolist()) == {1}  # the config's feature alone has an input for each value
    predicted = net.predict(other.features).reshape(60, 40)
    true = other.log_slowdown.reshape(60, 40)
    chosen = true[np.arange(60), predicted.argmin(1)] - true.min(1)
    assert chosen.mean() < 0.02 < (true.mean(1) - true.min(1)).mean()


def test_the_gradient_is_that_of_the_loss():
    random, sizes = np.random.default_rng(0), np.array([1, 7, 30])
    guess, target, count = random.random((3, sizes.sum()), np.float32)
    predicted = torch.tensor(guess, requires_grad=True)
    lists = [
        -(torch.softmax(-one / TEMPERATURE, 0) * torch.log_softmax(-told / TEMPERATURE, 0)).sum()
        for one, told in zip(
            torch.from_numpy(target).split(sizes.tolist()), predicted.split(sizes.tolist()), strict=True
        )
    ]
    errors = torch.from_numpy(count) * (predicted - torch.from_numpy(target)).abs()
    (LIST_SHARE * torch.stack(lists).mean() + errors.mean()).backward()
    found = gradient_of(guess, target, count, softmax_of(target, sizes), sizes)
    np.testing.assert_allclose(found, predicted.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_the_same_seed_gives_the_same_network_also_side_by_side():
    from foretune.datasets.progress import side_by_side

    one, two = side_by_side([lambda: train_network(rows(12), seed=3, epochs=2)] * 2, jobs=2)
    again, other = (train_network(rows(12), seed=seed, epochs=2) for seed in (3, 4))
    assert all((array == two.arrays()[name]).all() for name, array in one.arrays().items())
    assert all((array == again.arrays()[name]).all() for name, array in one.arrays().items())
    assert (other.weight1 != one.weight1).any()


def test_without_torch_trees_alone_are_trained_and_a_warning_says_so(monkeypatch):
    from foretune.model import gbdt

    monkeypatch.setattr(gbdt, "find_spec", lambda name: None)
    with pytest.warns(ForetuneWarning, match="torch is not installed, so the ranker has trees but no network"):
        ranker = LightGBMRanker(trees=4).fit(GRID, FAMILY)
    assert ranker.network_ is None
    assert len(ranker.predict(FAMILY, GRID.cases[0].problem, DEVICE, GRID.configs)) == len(GRID.configs)

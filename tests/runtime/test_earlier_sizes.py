"""What the host comes to know of earlier calls' sizes, and what a layer then chooses: without kernels or a GPU.

A tensor that says it is on a card, and copies that arrive when the test says so, stand for those.
"""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.runtime import ForetuneWarning, Pruner, use_stub_driver
from foretune.runtime.how_many import HowMany
from foretune.runtime.shortlist import chooser_of
from foretune.runtime.tuning.skew import choice_by_skew, earlier_sizes
from foretune.runtime.tuning.skew.choice_by_skew import GAIN, ChoiceBySkew
from foretune.runtime.tuning.skew.earlier_sizes import COPIES, EVERY, EarlierSizes
from foretune.runtime.tuning.skew.skew import Skew

EVEN, UNEVEN = (100, 101, 99, 100), (0, 370, 20, 10)


class OnCard(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True


def told(earlier, sizes):
    """Notes so many calls of these sizes that they are what is known, and gives `earlier` back."""
    for _ in range(COPIES):
        earlier.note(torch.tensor(sizes))
    return earlier


def on_card(sizes):
    return torch.tensor(sizes).as_subclass(OnCard)


class Card:
    """What copies were begun, and whether the last one has arrived."""

    def __init__(self, patch):
        self.begun, self.asked, self.has_arrived, self.capturing, card = [], 0, True, False, self

        class Transfer:
            def __init__(self, like):
                self.kind = like.shape

            def takes(self, tensor):
                return self.kind == tensor.shape

            def begin(self, tensor):
                card.begun.append(self)
                self.there = tensor.as_subclass(torch.Tensor).numpy()

            def arrived(self):
                card.asked += 1
                return card.has_arrived

        patch.setattr(earlier_sizes, "_Transfer", Transfer)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.capturing)


@pytest.fixture
def card(monkeypatch):
    return Card(monkeypatch)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(earlier_sizes, "_in_use", [])
    monkeypatch.setattr("foretune.runtime.warn._said", set())


def test_a_skew_knows_no_order_and_scales():
    assert Skew.of("rows", UNEVEN) == Skew.of("rows", (20, 0, 10, 370))
    assert Skew.of("rows", UNEVEN).sizes(4000) == (3700, 200, 100, 0)
    assert Skew.of("rows", UNEVEN).near(Skew.of("rows", (200, 3700, 0, 100)))
    assert Skew.of("rows", EVEN).sizes(8) == (2, 2, 2, 2)


@pytest.mark.parametrize("total", [0, 1, 7, 400, 10**9])
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, (5,), (0,) * 300 + (1,), tuple(range(512)), (2**40,) * 3])
def test_the_sizes_of_a_skew_sum_to_any_total(sizes, total):
    made = Skew.of("rows", sizes).sizes(total)
    assert (len(made), sum(made)) == (len(sizes), total)
    assert min(made) >= 0


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN, tuple(range(512))])
def test_the_sizes_of_a_skew_are_those_that_it_was_made_of(sizes):
    assert Skew.of("rows", sizes).sizes(sum(sizes)) == tuple(sorted(sizes, reverse=True))


@pytest.mark.parametrize("sizes", [(), (0, 0), (-3, 0)])
def test_nothing_has_no_skew(sizes):
    assert Skew.of("rows", sizes) is None


def test_negative_sizes_count_as_none():
    assert Skew.of("rows", (-(2**31), 370, 20, 10)) == Skew.of("rows", UNEVEN)


def test_a_problem_without_that_dimension_is_refused():
    with pytest.raises(ForetuneError, match="the sizes are of rows, but the dimensions are m"):
        Skew.of("rows", EVEN).split(Problem.of("toy", m=8))


def test_what_has_not_arrived_is_not_waited_for(card):
    earlier, card.has_arrived = EarlierSizes("rows"), False
    for _ in range(30):
        earlier.note(on_card(EVEN))
    assert (earlier.skew, len(card.begun)) == (None, 1)  # one at a time
    card.has_arrived = True
    for begun in range(2, COPIES + 1):
        earlier.note(on_card(UNEVEN))
        assert (earlier.skew, len(card.begun)) == (None, begun)
    earlier.note(on_card(EVEN))
    one_and_three = [a + 3 * b for a, b in zip(sorted(EVEN), sorted(UNEVEN), strict=True)]
    assert earlier.skew == Skew.of("rows", one_and_three)  # of the calls that were copied, largest to largest


def test_a_copy_is_begun_now_and_then_once_the_skew_is_known(card):
    earlier = EarlierSizes("rows")
    for _ in range(COPIES + 1):
        earlier.note(on_card(EVEN))
    assert earlier.skew is not None
    begun, card.asked = len(card.begun), 0
    for _ in range(3 * EVERY):
        earlier.note(on_card(EVEN))
    assert (len(card.begun) - begun, card.asked) == (
        3,
        3,
    )  # each had arrived when it was asked for, and then nobody asks


def test_under_capture_nothing_is_begun_and_nobody_asks(card):
    earlier, card.capturing = EarlierSizes("rows", every=1), True
    earlier.note(on_card(EVEN))
    assert card.begun == []
    card.capturing = False
    earlier.note(on_card(EVEN))
    card.capturing = True
    earlier.note(on_card(EVEN))
    assert (len(card.begun), card.asked, earlier.skew) == (1, 0, None)


def test_another_number_of_segments_gets_memory_of_its_own(card):
    earlier = EarlierSizes("rows", every=1)
    for sizes in (EVEN, EVEN, *[(1, 2)] * (COPIES + 1)):
        earlier.note(on_card(sizes))
    first, second, third, fourth, *_ = card.begun
    assert first is second
    assert third is fourth is not second
    assert earlier.skew == Skew.of("rows", (COPIES, 2 * COPIES))


def test_a_thread_that_meets_another_goes_on(card):
    earlier = EarlierSizes("rows", every=1)
    with earlier._busy:
        thread = threading.Thread(target=earlier.note, args=(on_card(EVEN),))
        thread.start()
        thread.join()  # would last for ever if it waited
    assert card.begun == []


def test_trouble_is_one_warning_and_the_sizes_unknown(card):
    earlier = EarlierSizes("rows", every=1)
    earlier.note(on_card(EVEN))
    card.begun[0].arrived = lambda: 1 / 0
    with pytest.warns(ForetuneWarning, match=r"stay unknown \(ZeroDivisionError"):
        earlier.note(on_card(EVEN))
    earlier.note(on_card(EVEN))
    assert (earlier.skew, len(card.begun)) == (None, 1)


def test_a_device_that_cannot_be_copied_from_is_such_trouble(monkeypatch):
    """The real `_Transfer`: nothing here has an event for a tensor of the CPU."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    earlier = EarlierSizes("rows")
    with pytest.warns(ForetuneWarning, match="sizes of earlier calls stay unknown"):
        earlier.note(on_card(EVEN))
    assert earlier.skew is None


@pytest.mark.parametrize("sizes", [EVEN, torch.ones(4), torch.ones(2, 2, dtype=torch.int32)])
def test_what_are_no_sizes_is_refused(sizes):
    with pytest.raises(ForetuneError, match="sizes must be a tensor of integers with one dimension"):
        EarlierSizes("rows").note(sizes)


@pytest.mark.parametrize(("arguments", "why"), [(("",), "dimension must be a word"), (("rows", 0), "every must be")])
def test_what_cannot_be_is_refused(arguments, why):
    with pytest.raises(ForetuneError, match=why):
        EarlierSizes(arguments[0], every=(*arguments, 1)[1])


def test_a_change_within_the_grid_is_none_and_layers_share_what_is_near():
    one, other = EarlierSizes("rows", every=1), EarlierSizes("rows", every=1)
    known, key = told(one, EVEN).skew, one.key
    told(one, (90, 105, 95, 110))
    told(other, (90, 105, 95, 110))
    assert one.skew is known is other.skew
    told(one, UNEVEN)
    assert one.skew is not known
    assert 0 != one.key != key
    assert other.key == key


# What a layer chooses.

SLOW, FAST, FASTEST = SPACE = tuple(KernelConfig.of(BLOCK_M=block) for block in (16, 32, 64))
H200 = DeviceSpec.named("h200")


class Family:
    name = "toy"
    refused = None

    def at_call_time(self, problem):
        return problem.without_sizes().rounded("rows")

    def supports(self, config, problem, device):
        return "refused" if config is self.refused else None


class Layer(ChoiceBySkew):
    """A layer whose predictions are the test's: the best config and what it gains, by skew."""

    def __init__(self, patch):
        super().__init__("rows")
        self.earlier = EarlierSizes("rows", every=1)
        self.family, self.best, self.gain, self.asked = Family(), {None: SLOW}, 1.0, []
        patch.setattr(choice_by_skew, "choose", self.predict)
        patch.setattr(choice_by_skew, "chooser_of", lambda *_: SimpleNamespace(gain=lambda *_: self.gain))

    def predict(self, family, problem, device, mode, launch, skew):
        self.asked.append((problem["rows"], skew))
        return self.best[None if skew is None else skew.steps[0] > 4]

    def run(self, rows=400):
        return self.choice(self.family, Problem.of("toy", rows=rows), H200).config


@pytest.fixture
def layer(monkeypatch):
    made = Layer(monkeypatch)
    made.best |= {False: FAST, True: FASTEST}
    return made


def test_a_layer_changes_when_the_skew_does(layer):
    assert layer.run() is SLOW
    for sizes, chosen in ((EVEN, FAST), (UNEVEN, FASTEST), (EVEN, FAST)):
        told(layer.earlier, sizes)
        assert [layer.run(), layer.run()] == [chosen] * 2
    assert len(layer.asked) == 4


def test_a_gain_that_is_not_worth_it_changes_nothing(layer):
    layer.run()
    told(layer.earlier, EVEN)
    layer.gain = GAIN / 2
    assert layer.run() is SLOW
    told(layer.earlier, UNEVEN)
    layer.gain = GAIN
    assert layer.run() is FASTEST


def test_a_bucket_has_one_choice(layer):
    for rows in (400, 401, 800):
        assert layer.run(rows) is SLOW
    assert layer.asked == [(395, None), (790, None)]


def test_under_capture_the_config_stays(layer, monkeypatch):
    layer.run()
    told(layer.earlier, UNEVEN)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [layer.run(), layer.run()] == [SLOW, SLOW]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert layer.run() is FASTEST


def test_a_config_of_the_bucket_that_cannot_run_this_problem_is_not_run(layer):
    layer.run()
    layer.family.refused, layer.best[None] = SLOW, FAST
    assert layer.run() is FAST


# Pruning.


def test_a_pruner_goes_by_what_is_known(toy):
    earlier, bundle = EarlierSizes("rows", every=1), toy.ToyBundle()
    pruner = Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=bundle, earlier=earlier)
    call = {"a_ptr": None, "M": 64, "N": 64, "K": 64}
    pruner(toy.triton_configs(), call)
    told(earlier, UNEVEN)
    pruner(toy.triton_configs(), call)
    unknown, known = bundle.predicted
    assert unknown.ragged is None
    assert known.ragged.sizes == Skew.of("rows", UNEVEN).sizes(64)


def by_skew(problem, configs):
    """The fourth config is the fastest where the sizes are known, else the last."""
    return [6.0, 5.0, 4.0, 2.0 if problem.ragged else 3.0, 8.0, 2.5]


def test_a_chooser_says_what_a_config_gains_over_another(toy):
    chooser = chooser_of(toy.ToyFamily(), toy.H200, bundle=toy.ToyBundle(by_skew))
    problem, skew, (*_, fourth, _, last) = Problem.of("toy", rows=64, n=64, k=64), Skew.of("rows", EVEN), toy.CONFIGS
    assert chooser.choose(problem, HowMany(1), None).configs == (last,)
    assert chooser.choose(problem, HowMany(1), skew).configs == (fourth,)
    assert chooser.gain(last, fourth, problem, skew) == pytest.approx(0.25)
    assert (
        chooser.gain(KernelConfig.of(BLOCK_M=1), fourth, problem, skew) == 0.0
    )  # none of them: nothing is known of it


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
def test_an_autotuner_prunes_anew_when_the_skew_is_another(toy):
    earlier, a = EarlierSizes("rows", every=1), torch.ones(64, 64, dtype=torch.float16)
    pruner = Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=toy.ToyBundle(by_skew), earlier=earlier)
    pruned_by = {"early_config_prune": pruner}
    kernel = triton.jit(do_not_specialize=["skew"])(toy.skewed_kernel)
    tuned = triton.autotune(configs=toy.triton_configs(), key=["M", "N", "K", "skew"], prune_configs_by=pruned_by)(
        kernel
    )
    chosen = []
    with use_stub_driver(toy.H200):
        for sizes in (EVEN, (101, 100, 100, 99), UNEVEN):
            tuned[(1,)](a, 64, 64, 64, skew=earlier.key)
            chosen.append((tuned.best_config.kwargs["BLOCK_M"], len(tuned.cache)))
            told(earlier, sizes)
    assert chosen == [(64, 1), (32, 2), (32, 2)]  # unknown; even; still so


@pytest.mark.parametrize("earlier", [EarlierSizes("tokens"), "rows"])
def test_a_pruner_refuses_what_knows_nothing_of_its_family(toy, earlier):
    with pytest.raises(ForetuneError, match="earlier must be an EarlierSizes of one of rows"):
        Pruner(toy.ToyFamily(), earlier=earlier)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_that_holds_earlier_sizes_can_be_copied_and_pickled(copied):
    module = torch.nn.Linear(1, 1)
    module.earlier = told(EarlierSizes("rows", every=5), UNEVEN)
    other = copied(module)
    if other.earlier is not module.earlier:  # copy.copy shares attributes
        assert (other.earlier.dim, other.earlier.every, other.earlier.skew) == ("rows", 5, None)
        told(other.earlier, UNEVEN)
    assert other.earlier.skew.sizes(500) == module.earlier.skew.sizes(500)

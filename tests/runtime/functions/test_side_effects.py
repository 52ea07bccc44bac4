"""What a function changes, and what it uses up, is as if its trials had never been."""

from __future__ import annotations

import array
import collections
import io
import itertools
import queue
import random
import socket
import tempfile
import types
from dataclasses import dataclass, field

import foretune
import numpy as np
import pandas as pd
import pytest
import torch
from foretune import ForetuneError, ForetuneWarning
from foretune.runtime.tuning.functions.side_effects import Snapshot

TRIALS = {"n_warmup": 2, "n_repeat": 3}


def tuned(watch, function, **options):
    """The function with two configs; the calls of each take as long as its tile says."""

    def run(x, tile):
        watch.spend(tile)
        return function(x)

    return foretune.tune({"tile": [3, 2]}, key=lambda x: "", cache=False, timer=watch, **TRIALS, **options)(run)


class Plain:
    def __init__(self, value):
        self.value = value


class Slots:
    __slots__ = ("later", "value")

    def __init__(self, value):
        self.value = value


@dataclass(frozen=True)
class Frozen:
    value: list = field(default_factory=lambda: [1.0])


class Output(collections.OrderedDict):
    """As transformers' `ModelOutput`, which refuses to be updated."""

    def update(self, *args, **kwargs):
        raise RuntimeError("no update")


class NamedList(list):
    name = "class"


Pair = collections.namedtuple("Pair", ["first", "second"])


def add_to(tensor):
    with torch.no_grad():
        tensor += 1


class Momentum:
    """As torch's optimizers, whose state is by parameter and made in the first step."""

    def __init__(self, parameters):
        self.parameters, self.state, self.steps = list(parameters), collections.defaultdict(dict), 0

    def step(self):
        self.steps += 1
        for parameter in self.parameters:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            momentum.add_(parameter.grad)
            parameter.data -= 0.1 * momentum


def step(x):
    x["model"](torch.ones(1)).sum().backward()
    x["optimizer"].step()


def stateful():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return {"model": model, "optimizer": Momentum(model.parameters())}


def weights(x):
    weight, optimizer = x["model"].weight, x["optimizer"]
    return weight.item(), weight.grad.item(), optimizer.steps, optimizer.state[weight]["momentum"].item()


def normed():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    model.seen, model.hook = [], threading_lock()
    return model


def threading_lock():
    import threading

    return threading.Lock()


def run_normed(model):
    model(torch.tensor([[1.0], [3.0]]))
    model.seen.append(1)
    model.eval()


def shared():
    base = torch.zeros(4)
    return [base, base[1:3], base.view(2, 2)]


def put_in_order(counts):
    counts["a"] += 1
    counts["b"] += 1
    counts.move_to_end("a")


CASES = {
    "list of tensors": (lambda: [torch.zeros(1)], lambda x: add_to(x[0]), lambda x: x[0].item()),
    "list of arrays": (lambda: [np.zeros(1)], lambda x: x[0].__iadd__(1), lambda x: x[0].item()),
    "nested list": (lambda: [[1.0, [2.0]]], lambda x: x[0][1].append(x[0].pop(0)), list),
    "dict of lists": (lambda: {"a": [0]}, lambda x: x["a"].append(1) or x.update(b=len(x)), dict),
    "ordered dict": (lambda: collections.OrderedDict(a=0, b=0), put_in_order, lambda x: list(x.items())),
    "counter": (lambda: collections.Counter("ab"), lambda x: x.update("a"), dict),
    "default dict": (lambda: collections.defaultdict(list), lambda x: x["a"].append(1), dict),
    "dict that refuses updates": (lambda: Output(a=[]), lambda x: x["a"].append(1), dict),
    "user's dict": (lambda: collections.UserDict(a=1), lambda x: x.update(b=len(x)), dict),
    "tuple of tensors": (lambda: (torch.zeros(1), [1]), lambda x: add_to(x[0]), lambda x: x[0].item()),
    "named tuple": (lambda: Pair([0], 1), lambda x: x.first.append(1), lambda x: x.first),
    "read-only mapping": (lambda: types.MappingProxyType({"a": [0]}), lambda x: x["a"].append(1), dict),
    "deque": (lambda: collections.deque([1, 2], maxlen=3), lambda x: x.append(len(x)), list),
    "set": (lambda: {1}, lambda x: x.add(len(x) + 1), sorted),
    "frozen set of objects": (
        lambda: frozenset([Plain(0)]),
        lambda x: inc(next(iter(x))),
        lambda x: next(iter(x)).value,
    ),
    "bytearray": (lambda: bytearray(b"a"), lambda x: x.append(len(x)), bytes),
    "array.array": (lambda: array.array("d", [1.0]), lambda x: x.append(x[-1] + 1), list),
    "memory view": (lambda: memoryview(bytearray(b"ab")), lambda x: x.__setitem__(0, x[0] + 1), bytes),
    "list with attributes": (
        lambda: NamedList([1]),
        lambda x: x.append(1) or setattr(x, "name", len(x)),
        lambda x: (list(x), x.name),
    ),
    "object": (
        lambda: Plain([0]),
        lambda x: x.value.append(1) or setattr(x, "n", len(x.value)),
        lambda x: (x.value, x.n),
    ),
    "slots": (
        lambda: Slots(0),
        lambda x: inc(x) or setattr(x, "later", hasattr(x, "later")),
        lambda x: (x.value, x.later),
    ),
    "frozen dataclass": (Frozen, lambda x: x.value.append(2), lambda x: x.value),
    "namespace": (lambda: types.SimpleNamespace(value=0), lambda x: inc(x), lambda x: x.value),
    "array of objects": (lambda: np.array([[0], None], dtype=object), lambda x: x[0].append(1), lambda x: x[0]),
    "structured array": (lambda: np.zeros(1, [("a", "f8")]), lambda x: x["a"].__iadd__(1), lambda x: x["a"].item()),
    "array that grows": (lambda: np.zeros(1), lambda x: x.resize(x.size + 1, refcheck=False), lambda x: x.shape),
    "masked array": (lambda: np.ma.array([1.0, 2.0]), lambda x: x.__setitem__(0, np.ma.masked), lambda x: x.tolist()),
    "data frame": (
        lambda: pd.DataFrame({"a": [1.0]}),
        lambda x: x.insert(0, f"c{x.shape[1]}", x["a"] + 1),
        lambda x: x.to_dict(),
    ),
    "data frame's values": (
        lambda: pd.DataFrame({"a": [1.0]}),
        lambda x: x.__setitem__("a", x["a"] + 1),
        lambda x: x.to_dict(),
    ),
    "data frame of lists": (lambda: pd.DataFrame({"a": [[0]]}), lambda x: x["a"][0].append(1), lambda x: x["a"][0]),
    "series": (lambda: pd.Series([1.0]), lambda x: x.__setitem__(0, x[0] + 1), list),
    "gradient": (
        lambda: torch.ones(1, requires_grad=True),
        lambda x: (2 * x).sum().backward(),
        lambda x: x.grad.item(),
    ),
    "expanded tensor": (lambda: torch.zeros(1).expand(3), lambda x: add_to(x[0]), lambda x: x.tolist()),
    "resized tensor": (lambda: torch.zeros(1), lambda x: x.resize_(x.numel() + 1).fill_(1), lambda x: x.shape),
    "tensor with other data": (lambda: torch.zeros(1), lambda x: setattr(x, "data", x.data + 1), lambda x: x.item()),
    "sparse tensor": (
        lambda: torch.zeros(2).to_sparse(),
        lambda x: x.add_(torch.ones(2).to_sparse()),
        lambda x: x.to_dense().tolist(),
    ),
    "tensors that share memory": (shared, lambda x: [add_to(one) for one in x], lambda x: x[0].tolist()),
    "module and optimizer": (stateful, step, weights),
    "module's buffers and modes": (
        normed,
        run_normed,
        lambda x: (x[0].running_mean.item(), x[0].num_batches_tracked.item(), x.seen, x.training),
    ),
    "random": (lambda: random.Random(0), lambda x: x.random(), lambda x: x.random()),
    "numpy's random": (lambda: np.random.default_rng(0), lambda x: x.random(), lambda x: x.random()),
    "numpy's old random": (lambda: np.random.RandomState(0), lambda x: x.rand(), lambda x: x.rand()),
    "torch's random": (
        lambda: torch.Generator().manual_seed(0),
        lambda x: torch.rand(1, generator=x),
        lambda x: torch.rand(1, generator=x).item(),
    ),
}


def inc(x):
    x.value += 1


@pytest.mark.parametrize("case", CASES)
def test_what_is_restored_is_changed_once_however_deep(watch, case):
    make, change, seen = CASES[case]
    once = make()
    change(once)
    expected = seen(once)
    x = make()
    result = tuned(watch, lambda x: (change(x), id(x))[1], restore=["x"])(x)
    assert watch.samples == 6
    assert (seen(x), result) == (expected, id(x))


def test_containers_and_tensors_stay_the_same_objects_and_views_see_it():
    base = np.zeros(4)
    inner, tensor = [1], torch.zeros(2)
    x = {"inner": inner, "view": base[:2], "tensor": tensor, "itself": None}
    x["itself"] = x
    snapshot = Snapshot({"x": x, "y": [inner]})
    base += 1
    add_to(tensor)
    x["inner"] = [5]
    inner.append(2)
    del x["view"], x["itself"]
    snapshot.put_back()
    assert x["inner"] is inner
    assert inner == [1]
    assert x["tensor"] is tensor
    assert tensor.tolist() == [0.0, 0.0]
    assert base.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert x["itself"] is x


def test_what_lies_deep_ends_no_stack():
    x = []
    for _ in range(5000):
        x = [x]
    Snapshot({"x": x}).put_back()


class Counter(io.BytesIO):
    """Has state that is written in C."""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "x, which is 3 of type int: use reset"),
        ("text", "x, which is 'text' of type str"),
        ([1, {"a": io.BytesIO()}], r"x\[1\]\['a'\], which is .* of type BytesIO"),
        (Plain(Counter()), r"x\.value, which is .* of type Counter"),
        ((iter([1]),), r"x\[0\], which is .* of type list_iterator"),
        (torch.zeros(2).untyped_storage(), "x, which is .* of type UntypedStorage"),
        (ValueError("x"), "x, which is .* of type ValueError"),
    ],
)
def test_what_cannot_be_put_back_is_refused_by_name_and_type(value, said):
    with pytest.raises(ForetuneError, match=f"restore cannot put back {said}"):
        Snapshot({"x": value})


def test_what_cannot_be_written_to_is_refused_at_the_call(watch):
    class Immutable:
        """As arrays of JAX."""

        shape, dtype = (1,), np.dtype("float32")

        def __array__(self):
            return np.zeros(1)

        def copy(self):
            return self

        def __setitem__(self, at, value):
            raise TypeError("arrays are immutable")

    with pytest.raises(ForetuneError, match=r"restore cannot put back x\[0\].*TypeError: arrays are immutable"):
        tuned(watch, lambda x: None, restore=["x"])([Immutable()])
    assert watch.samples == 0


def test_a_contextual_function_restores_as_deep(watch):
    part = foretune.tune({"tile": [3, 2]}, cache=False, timer=watch)(lambda tile: watch.spend(tile))

    def function(x):
        part()
        x[0].add_(1)

    x = [torch.ones(1)]
    foretune.contextual_autotune(restore=["x"], key=lambda x: "", cache=False, timer=watch)(function)(x)
    assert x[0].tolist() == [2.0]


def opened():
    file = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the test's argument
    file.write("1\n2\n")
    file.seek(0)
    return file


def named_file():
    file = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - the test's argument
    file.write("1\n2\n")
    file.seek(0)
    return file


def filled():
    found = queue.Queue()
    for number in (1, 2):
        found.put(number)
    return found


def received(x):
    return sum(x.recv(2))


def connected():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"\x01\x02")
    theirs.close()
    return ours


def total(x):
    return sum(int(one) for one in x)


USED_UP = {
    "generator": (lambda: (one for one in (1, 2)), total),
    "map": (lambda: map(int, (1, 2)), total),
    "zip": (lambda: zip((1, 2), strict=False), lambda x: sum(one for (one,) in x)),
    "filter": (lambda: filter(None, (1, 2)), total),
    "iterator": (lambda: iter([1, 2]), total),
    "islice": (lambda: itertools.islice(itertools.count(1), 2), total),
    "open file": (opened, total),
    "text in memory": (lambda: io.StringIO("1\n2\n"), total),
    "named file": (named_file, total),
    "queue": (filled, lambda x: x.get(timeout=5) + x.get(timeout=5)),
    "socket": (connected, received),
    "in a list": (lambda: [iter([1, 2])], lambda x: total(x[0])),
    "in a dict in a tuple": (lambda: ({"x": iter([1, 2])},), lambda x: total(x[0]["x"])),
    "in a deque": (lambda: collections.deque([iter([1, 2])]), lambda x: total(x[0])),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("case", USED_UP)
def test_what_a_trial_would_use_up_runs_untuned_with_one_warning(watch, case):
    make, function = USED_UP[case]
    tuned_function = tuned(watch, function)
    with pytest.warns(
        ForetuneWarning, match=r"argument x has a .*, which the first run uses up: the best known config runs"
    ):
        assert tuned_function(make()) == 3
    assert tuned_function(make()) == 3
    assert watch.samples == 0
    with pytest.raises(ForetuneError, match=r"argument x has a .*, which the first run uses up: pass a list"):
        tuned_function.tune(make())


def test_what_is_known_already_runs_with_an_iterator_too(watch):
    tiles = []
    function = foretune.tune({"tile": [3, 2]}, key=lambda x: "", cache=False, timer=watch)(
        lambda x, tile: watch.spend(tile) or tiles.append(tile) or total(x)
    )
    function([1, 2])
    tiles.clear()
    assert (function(iter([1, 2])), tiles) == (3, [2])


def test_a_file_that_reset_winds_back_is_tuned_and_an_iterator_is_not(watch):
    function = tuned(watch, total, reset=lambda x: x.seek(0))
    assert function(io.StringIO("1\n2\n")) == 3
    assert watch.samples == 6
    with pytest.warns(ForetuneWarning, match="argument x has a list_iterator"):
        assert tuned(watch, total, reset=lambda x: None)(iter([1, 2])) == 3
    assert watch.samples == 6


def test_a_contextual_function_does_not_use_up_an_iterator(watch):
    part = foretune.tune({"tile": [3, 2]}, cache=False, timer=watch)(lambda tile: watch.spend(tile))
    function = foretune.contextual_autotune(cache=False, timer=watch)(lambda x: (part(), total(x))[1])
    with pytest.warns(ForetuneWarning, match="argument x has a generator.*: it is not tuned as a whole"):
        assert function(one for one in (1, 2)) == 3
    with pytest.raises(ForetuneError, match="argument x has a generator"):
        function.tune(one for one in (1, 2))

"""A choice belongs to one function: to its code, what it holds on to and what it calls."""

from __future__ import annotations

import linecache
import types
from functools import partial

import foretune
import pytest
import torch
from foretune import ConfigCache, ForetuneWarning
from foretune.runtime.launching.source_hash import digest_of, structure
from foretune.runtime.tuning.functions.wrapped import identity_of


def digest(function):
    return identity_of(function)[0]


def shell(text, **given):
    """The function `f` of what somebody typed, which has no file."""
    module = types.ModuleType("shell")
    vars(module).update(given)
    exec(compile(text, "<shell>", "exec"), vars(module))
    return module.f


def work(mode, x, tile=1):
    return mode, x, tile


def closure(value):
    def captured(x, tile=1):
        return x, value

    return captured


def defaulted(value):
    def function(x, tile=1, mode=value):
        return mode

    return function


def recursive():
    def function(x, tile=1):
        return function(x - 1) if x else 0

    return function


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x, tile=1):
        return x * self.factor

    def method(self, x, tile=1):
        return x + self.factor

    @classmethod
    def made(cls, x, tile=1):
        return cls, x


class Other(Scale):
    pass


PAIRS = {
    "partial": (lambda: partial(work, "a"), lambda: partial(work, "b")),
    "partial by name": (lambda: partial(work, mode="a"), lambda: partial(work, mode="b")),
    "partial of partial": (lambda: partial(partial(work, "a"), 1), lambda: partial(partial(work, "a"), 2)),
    "number": (lambda: closure(1), lambda: closure(2)),
    "None and its text": (lambda: closure(None), lambda: closure("None")),
    "list": (lambda: closure([1]), lambda: closure([1, 2])),
    "function": (lambda: closure(work), lambda: closure(shell("def f(x): return x"))),
    "closure": (lambda: closure(closure(1)), lambda: closure(closure(2))),
    "partial in closure": (lambda: closure(partial(work, "a")), lambda: closure(partial(work, "b"))),
    "shape of a tensor": (lambda: closure(torch.zeros(2)), lambda: closure(torch.zeros(3))),
    "default": (lambda: defaulted("a"), lambda: defaulted("b")),
    "method": (lambda: Scale(1).method, lambda: Scale(2).method),
    "method of a class": (lambda: Scale.made, lambda: Other.made),
    "callable object": (lambda: Scale(1), lambda: Scale(2)),
    "lambdas on a line": (lambda: [lambda x: x, lambda x: x + 1][0], lambda: [lambda x: x, lambda x: x + 1][1]),
    "code": (lambda: shell("def f(x): return x + 1"), lambda: shell("def f(x): return x + 2")),
    "callee in a shell": (lambda: shell("def f(x): return slow(x)"), lambda: shell("def f(x): return fast(x)")),
    "attribute in a shell": (lambda: shell("def f(x): return x.slow"), lambda: shell("def f(x): return x.fast")),
    "comprehension": (
        lambda: shell("def f(x): return [i + 1 for i in x]"),
        lambda: shell("def f(x): return [i + 2 for i in x]"),
    ),
    "lambda inside": (
        lambda: shell("def f(x): return map(lambda i: i + 1, x)"),
        lambda: shell("def f(x): return map(lambda i: i + 2, x)"),
    ),
    "nested function": (
        lambda: shell("def f(x):\n def g():\n  return slow(x)\n return g()"),
        lambda: shell("def f(x):\n def g():\n  return fast(x)\n return g()"),
    ),
    "constants of one length": (lambda: shell("def f(x): return 'a', 1"), lambda: shell("def f(x): return 'a', 1.0")),
    "what it calls": (
        lambda: shell("def g(x): return x + 1\ndef f(x): return g(x)"),
        lambda: shell("def g(x): return x + 2\ndef f(x): return g(x)"),
    ),
    "what that calls": (
        lambda: shell("def h(x): return x + 1\ndef g(x): return h(x)\ndef f(x): return g(x)"),
        lambda: shell("def h(x): return x + 2\ndef g(x): return h(x)\ndef f(x): return g(x)"),
    ),
}


@pytest.mark.parametrize("pair", PAIRS, ids=PAIRS)
def test_functions_that_do_something_else_are_others(pair):
    one, other = PAIRS[pair]
    assert digest(one()) == digest(one()) != digest(other())
    assert identity_of(one())[1] is None


def test_the_choice_of_one_is_not_that_of_another(watch):
    """By what a call measures: the second function has its own times, whatever was found out about the first."""
    ran = []

    def timed(costs, x, tile):
        ran.append((costs, tile))
        watch.spend(dict(costs)[tile])
        return tile

    def tuned(costs):
        return foretune.tune({"tile": [1, 2]}, timer=watch)(partial(timed, costs))

    assert tuned(((1, 5), (2, 1)))(0) == 2
    assert tuned(((1, 1), (2, 5)))(0) == 1
    ran.clear()
    assert tuned(((1, 5), (2, 1)))(0) == 2  # known, from the disk
    assert len(ran) == 1


def test_a_function_without_more_keeps_the_digest_that_its_records_have():
    text = "def work(mode, x, tile=1):\n    return mode, x, tile\n"
    assert digest(work) == digest_of([structure(text)])
    assert identity_of(recursive())[1] is None


def test_a_function_that_calls_itself_or_a_tuned_one_ends(watch):
    tuned = foretune.tune({"tile": [1, 2]}, cache=False, timer=watch)(recursive())
    assert tuned(2) == 0
    assert digest(closure(tuned)) == digest(closure(tuned))


@torch.no_grad()  # which holds on to an object of its own
def without_gradients(x, tile=1):
    return x


def test_what_a_decorator_of_a_named_function_holds_is_the_same_in_every_process():
    assert identity_of(without_gradients)[1] is None
    assert identity_of(torch.no_grad()(closure(1)))[1] is not None


def test_a_wrapper_and_what_it_wraps_are_two():
    from functools import wraps

    def twice(function):
        @wraps(function)
        def both(*args, **named):
            return function(*args, **named), function(*args, **named)

        return both

    assert len({digest(work), digest(twice(work)), digest(twice(closure(1))), digest(twice(closure(2)))}) == 4


@pytest.mark.parametrize("cache", [True, "file"])
def test_what_only_this_process_can_tell_apart_is_kept_in_memory(watch, tmp_path, cache):
    where = cache if cache is True else tmp_path / "functions.json"
    model = torch.nn.Linear(2, 2)
    tuned = [foretune.tune({"tile": [1, 2]}, timer=watch, cache=where)(closure(one)) for one in (model, Scale(1))]
    for function, name in zip(tuned, ("Linear", "Scale"), strict=True):
        with pytest.warns(
            ForetuneWarning, match=rf"closure.<locals>.captured holds an object of type torch|holds .*{name}"
        ):
            function(0)
        assert (function.cache.path, len(function.cache)) == (None, 1)
    assert not list(tmp_path.rglob("*.json"))


def test_functions_that_share_a_cache_do_not_share_what_only_this_process_can_tell_apart(watch):
    cache = ConfigCache()
    for model in (torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)):
        foretune.tune({"tile": [1, 2]}, timer=watch, cache=cache)(closure(model))(0)
    assert len(cache) == 2


def test_a_kernel_that_a_function_launches_is_part_of_it(tmp_path):
    def launching(constant):
        text = f"import triton\n@triton.jit\ndef kernel(x):\n    x + {constant}\ndef f(x):\n    kernel[(1,)](x)\n"
        path = str(tmp_path / f"kernel{constant}.py")
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        module = types.ModuleType("shell")
        exec(compile(text, path, "exec"), vars(module))
        return module.f

    assert digest(launching(1)) == digest(launching(1)) != digest(launching(2))

"""Children: what they say arrives, in order, and their end too; what they hold ends with them."""

from __future__ import annotations

import os
import signal
import sys

import children
import pytest
from foretune.collect import processes
from foretune.collect.processes import Child, Watch
from waiting import until


class Noted:
    """What a watch said of one child."""

    def __init__(self, watch, serve, *arguments):
        self.watch, self.messages, self.exitcode = watch, [], None
        self.child = Child(serve, *arguments)
        watch.add(self.child, self.messages.append, self.ended)

    def ended(self, exitcode):
        self.exitcode = exitcode

    def until(self, condition):
        def comes_about():
            self.watch.handle(0.1)
            return condition(self)

        until(lambda: condition(self) or comes_about(), lambda: vars(self))
        return self


def has_ended(noted):
    return noted.exitcode is not None


@pytest.fixture
def watch():
    with Watch() as watch:
        yield watch


def test_all_that_a_child_said_arrives_before_its_end(watch):
    noted = Noted(watch, children.count, 200).until(has_ended)
    assert noted.messages == list(range(200))
    assert noted.exitcode == 0


def test_children_are_served_by_turns(watch):
    first, second = Noted(watch, children.echo), Noted(watch, children.echo)
    first.child.send("a")
    second.child.send("b")
    first.until(lambda noted: noted.messages)
    second.until(lambda noted: noted.messages)
    assert (first.messages, second.messages) == (["a"], ["b"])
    assert not has_ended(first)


@pytest.mark.parametrize(
    ("end", "exitcode"),
    [(signal.SIGKILL, -9), (signal.SIGSEGV, -11)],
)
def test_how_a_child_ended_is_told(watch, end, exitcode):
    noted = Noted(watch, children.echo)
    noted.child.send("up")
    noted.until(lambda noted: noted.messages)
    os.kill(noted.child.pid, end)
    assert noted.until(has_ended).exitcode == exitcode
    noted.child.send("to nobody")  # raises nothing
    noted.child.kill()


def test_a_child_that_is_killed_is_not_listened_to_any_more(watch):
    noted = Noted(watch, children.echo)
    noted.child.send("up")
    noted.until(lambda noted: noted.messages)
    noted.child.send("late")
    assert noted.child.connection.poll(None)  # it has answered
    watch.kill(noted.child)
    assert noted.until(has_ended).exitcode == -9
    assert noted.messages == ["up"]


@pytest.mark.parametrize("ended", [False, True])
def test_a_child_that_is_dismissed_ends_and_nothing_is_told_of_it(watch, ended):
    noted, other = Noted(watch, children.echo), Noted(watch, children.echo)
    noted.child.send("up")
    noted.until(lambda noted: noted.messages)
    noted.child.send("late")
    assert noted.child.connection.poll(None)  # it has answered
    if ended:
        watch.kill(noted.child)
    watch.dismiss(noted.child)
    other.child.send("up")
    other.until(lambda other: other.messages and noted.child.exitcode is not None)
    watch.handle(0.1)
    assert (noted.child.exitcode, noted.messages) == (-9, ["up"])
    assert not has_ended(noted)


def test_a_child_that_does_not_end_even_killed_is_given_up(watch, monkeypatch):
    monkeypatch.setattr(processes, "_UNKILLABLE_SECONDS", 0.3)
    monkeypatch.setattr(Child, "exitcode", None)  # as the system says of one that waits for a driver
    noted = Noted(watch, children.echo)
    noted.exitcode = "lives"
    watch.kill(noted.child)
    noted.until(lambda noted: noted.exitcode != "lives")
    assert noted.exitcode is None


def test_a_child_that_dies_in_the_middle_of_a_message_has_ended(watch):
    assert Noted(watch, children.half_a_message).until(has_ended).messages == []


def test_ctrl_c_does_not_reach_a_child(watch):
    noted = Noted(watch, children.echo)
    noted.child.send("up")
    noted.until(lambda noted: noted.messages)
    assert os.getpgid(noted.child.pid) != os.getpgrp()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_leaving_the_block_ends_children_and_what_they_started():
    with Watch() as watch:
        noted = Noted(watch, children.with_a_sleeper).until(lambda noted: noted.messages)
        pids = [noted.child.pid, *noted.messages]
        assert all(children.lives(pid) for pid in pids)
    children.assert_end(pids)


def test_a_callers_main_module_is_not_run_again(tmp_path):
    """No `if __name__ == "__main__"` is needed around a collection."""
    import subprocess

    script = tmp_path / "main.py"
    script.write_text(
        "import children\nfrom foretune.collect.processes import Child\nprint('once')\n"
        "child = Child(children.count, 1)\nprint(child.connection.recv())\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["once", "0"]

"""Results render themselves, are written and pickled; what times are worth; and how calls are timed."""

from __future__ import annotations

import csv
import io
import pickle
import subprocess
import sys
from dataclasses import replace

import foretune
import pytest
import triton
from foretune import DeviceSpec, ForetuneError
from foretune.runtime.tuning.functions.call_timer import EventTimer, HostTimer, KernelTimer
from foretune.runtime.tuning.functions.calls import Work
from rich.console import Console


@pytest.fixture
def result(watch):
    def function(x, tile, mode):
        if tile == 3:
            raise RuntimeError("a, b\n[red]")
        watch.spend(tile)

    space = [{"tile": tile, "mode": mode} for tile in (4, 3, 2) for mode in ("fast", triton.Config({"B": 1}))]
    work = {"flops": 8e6, "bytes": 4e6}
    return foretune.tune(space, work=lambda x: work, device="h200", cache=False, timer=watch)(function).tune(64)


def test_a_result_says_all_there_is(result):
    said = result.to_json()
    assert (said["best_config"], said["best_time_us"], said["key"]) == ({"tile": 2, "mode": "fast"}, 2.0, '{"x":64}')
    assert said["problem"]["dims"] == {"x": 64}
    assert [row["status"] for row in said["trials"]] == ["ok", "ok", "launch_failed", "launch_failed", "ok", "ok"]
    assert said["trials"][4]["tflops"] == 4.0
    assert said["trials"][4]["bandwidth_gbs"] == 2000.0
    h200 = DeviceSpec.named("h200")
    assert said["trials"][4]["roofline_percent"] == pytest.approx(100 * 4e6 / h200.copy_bandwidth_gbs / 1e3 / 2)
    assert {"python", "torch", "triton", "driver"} == set(said["software"])
    assert result.best.metrics["tflops"] == 4.0
    assert pickle.loads(pickle.dumps(result)).to_json() == said


def test_it_is_one_line_and_a_table_in_a_notebook(result):
    result = replace(result, function="scale", device="cpu")
    assert repr(result) == '<TuneResult of scale {"x":64} on cpu: 6 trials, best tile=2 mode=fast (2 us)>'
    assert "best tile=2 mode=fast>" in repr(replace(result, best_time_us=None))
    long = replace(result, key='"\n' * 1000, trials=())
    assert "\n" not in repr(long)
    assert len(repr(long)) < 200
    shown = result._repr_html_()
    assert shown.count("<tr>") == 7  # a header and six trials
    assert "a, b\\n[red]" in shown


def test_it_is_a_table_a_file_and_a_data_frame(result, tmp_path):
    console = Console(width=200, file=io.StringIO())
    console.print(result)
    shown = console.file.getvalue()
    assert shown.index("\n2 ") < shown.index("\n4 ") < shown.index("\n3 ")  # fastest first, failures last
    assert "a, b\\n[red]" in shown
    rows = list(csv.DictReader(io.StringIO(result.to_csv(tmp_path / "result.csv"))))
    assert (tmp_path / "result.csv").read_text() == result.to_csv()
    assert [row["time_us"] for row in rows] == ["4.0", "4.0", "", "", "2.0", "2.0"]
    assert rows[2]["error"] == "RuntimeError: a, b\\n[red]"
    frame = result.to_dataframe()
    assert frame["time_us"].min() == 2.0
    assert list(frame.columns)[:4] == ["tile", "mode", "status", "time_us"]


def test_tuning_needs_no_pandas(tmp_path):
    code = """
        import sys
        sys.modules |= dict.fromkeys(("pandas", "torch", "triton", "pyarrow"))
        import foretune
        result = foretune.tune({"tile": [1, 2]}, cache=False)(lambda x, tile: x).tune(1)
        try:
            result.to_dataframe()
        except foretune.ForetuneError as error:
            print(error, len(result.to_csv().splitlines()))
    """
    import textwrap

    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert ran.stdout == "to_dataframe needs pandas, which is not installed; to_csv and to_json do not 3\n"


def test_what_a_call_is_worth():
    assert foretune.gemm_work(64, 32, 16, dtype="fp16", out_dtype="fp32", batch=2) == Work(
        2 * 2 * 64 * 32 * 16, 2 * ((64 * 16 + 16 * 32) * 2 + 64 * 32 * 4), "fp16"
    )
    assert foretune.elementwise_work(100, reads=2, writes=1, dtype="int4").bytes == 150.0
    for wrong in (
        lambda: foretune.gemm_work(-1, 2, 3),
        lambda: foretune.elementwise_work(1, dtype="half"),
        lambda: Work(flops=-1),
    ):
        with pytest.raises(ForetuneError):
            wrong()
    with pytest.raises(
        ForetuneError, match="work must return a Work, or a mapping of flops, bytes and dtype, but returned 3"
    ):
        foretune.tune({"tile": [1]}, work=lambda x: 3, cache=False)(lambda x, tile: x).tune(1)


def test_the_host_is_timed_by_its_clock_without_what_is_undone():
    now = [0.0]

    def spend(seconds):
        now[0] += seconds

    timer = HostTimer(lambda: now[0])
    assert timer.sample(lambda: spend(2e-6), 3, lambda: spend(1.0)) == pytest.approx([2.0] * 3, abs=1e-6)


class Queue:
    """A device that works while one waits for it."""

    def __init__(self):
        self.us, self.log = 0.0, []

    def flush(self):
        self.us += 500
        self.log.append("flush")

    def mark(self):
        return self.us

    def wait(self):
        self.log.append("wait")

    def elapsed_us(self, start, end):
        return end - start


def test_between_events_there_is_the_call_alone_and_exactly_as_many_calls():
    queue = Queue()

    def call():
        queue.log.append("call")
        queue.us += 7

    assert EventTimer(queue).sample(call, 2, lambda: queue.log.append("undo")) == [7.0, 7.0]
    assert queue.log == ["undo", "flush", "wait", "call", "wait"] * 2


@pytest.mark.parametrize("waits_from", [0, 1])
def test_calls_that_wait_for_the_device_are_timed_by_events_from_the_first_on_or_refused(waits_from):
    class Timer:
        calls = 0

        def sample(self, call, samples):
            self.calls += 1
            if self.calls > waits_from:
                raise ForetuneError("the device got ahead")
            return [3.0] * samples

    timer = Timer()
    kernel_timer = KernelTimer(timer, EventTimer(Queue()))
    if waits_from:
        assert kernel_timer.sample(lambda: None, 1, None) == [3.0]
        with pytest.raises(ForetuneError, match="got ahead"):
            kernel_timer.sample(lambda: None, 1, None)
    else:
        assert kernel_timer.sample(lambda: None, 1, None) == [0.0]
        kernel_timer.sample(lambda: None, 1, None)
        assert timer.calls == 1
    assert kernel_timer.sample(lambda: None, 1, lambda: None) == [0.0]


def test_verbose_calls_say_each_config_on_stderr(watch, capsys):
    tuned = foretune.tune({"tile": [5, 2]}, cache=False, timer=watch)(lambda x, tile: watch.spend(tile))
    tuned(1)
    assert capsys.readouterr().err == ""
    tuned(2, autotune_verbose=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "1/2 tile=5: 5.0 us (best 5.0 us: tile=5)",
        "2/2 tile=2: 2.0 us (best 2.0 us: tile=2)",
    ]

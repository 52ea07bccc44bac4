"""Parts of a GPU as devices: what a spec of one says (on a CPU, with a fake driver), and that they are (on a GPU)."""

from __future__ import annotations

import itertools
import statistics
from contextlib import contextmanager

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, Problem
from foretune.kernels import find_family
from foretune.runtime import Timer, sm_partition
from foretune.runtime.timing.device_rates import _granted

H200 = DeviceSpec.named("h200")


class FakeCarver:
    """Gives SMs by eights, and notes when it has them back."""

    def __init__(self):
        self.log = []

    @contextmanager
    def carve(self, sms):
        self.log.append(sms)
        try:
            yield sms + -sms % 8
        finally:
            self.log.append("back")


@pytest.mark.parametrize(("asked", "given"), [(1, 8), (60, 64), (64, 64), (125, 128)])
def test_the_spec_says_what_the_driver_gave(asked, given):
    with sm_partition(asked, H200, carve=FakeCarver().carve) as device:
        assert (device.sm_count, device.name) == (given, f"NVIDIA H200 ({given} SMs)")
        assert device == H200.with_sms(given)


def test_the_sms_are_given_back_even_after_an_error():
    carver = FakeCarver()
    with pytest.raises(ZeroDivisionError), sm_partition(64, H200, carve=carver.carve):
        raise ZeroDivisionError
    assert carver.log == [64, "back"]


@pytest.mark.parametrize("sms", [-8, 0, 133])
def test_sms_that_are_not_there_are_refused_before_the_driver_is_asked(sms):
    carver = FakeCarver()
    with (
        pytest.raises(ForetuneError, match=f"SMs must be 1 to 132 for NVIDIA H200 but is {sms}"),
        sm_partition(sms, H200, carve=carver.carve),
    ):
        pass
    assert not carver.log


def test_without_a_gpu_there_is_no_partition(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ForetuneError, match="no GPU is visible here"), sm_partition(64):
        pass


class FakeDriver:
    """The two functions of libcuda, with a green context of so many SMs."""

    def __init__(self, sms=64, **failing):
        self.sms, self.failing = sms, failing

    def cuStreamGetGreenCtx(self, stream, context):  # noqa: N802 - the driver's name
        assert stream.value == 7
        return self.failing.get("stream", 0)

    def cuGreenCtxGetDevResource(self, context, resource, kind):  # noqa: N802
        resource[0], resource[96 // 4] = kind, self.sms  # CUdevResource: the type, 92 bytes of padding, smCount
        return self.failing.get("context", 0)


def test_the_driver_is_asked_how_many_it_gave():
    assert _granted(7, FakeDriver(64)) == 64
    with pytest.raises(ForetuneError, match="cuStreamGetGreenCtx fails with error 801"):
        _granted(7, FakeDriver(stream=801))
    with pytest.raises(ForetuneError, match="cuGreenCtxGetDevResource fails with error 1"):
        _granted(7, FakeDriver(context=1))


def rows(device):
    """The device's rates, as one list."""
    return [device.copy_bandwidth_gbs, device.matrix_tflops]


def test_the_rule_for_rates_of_a_part():
    assert H200.with_sms(66).matrix_tflops == pytest.approx(H200.matrix_tflops / 2)
    parts = [H200.with_sms(sms) for sms in range(1, 133)]
    for smaller, larger in itertools.pairwise(parts):
        assert all(less <= more for less, more in zip(rows(smaller), rows(larger), strict=True))
    assert parts[-1] == H200
    for part in parts[:-1]:
        assert not part.rates_measured
        for limit in ("arch", "smem_per_block_bytes", "smem_per_sm_bytes", "registers_per_sm", "l2_bytes", "clock_mhz"):
            assert getattr(part, limit) == getattr(H200, limit)
        assert DeviceSpec.from_json(part.to_json()) == part


@pytest.mark.parametrize(("sms", "copied_gbs"), [(16, 1525), (32, 2905), (64, 4308), (96, 4263), (132, 4258)])
def test_the_rule_for_bandwidth_fits_what_parts_of_a_card_drew(sms, copied_gbs):
    assert H200.with_sms(sms).copy_bandwidth_gbs == pytest.approx(copied_gbs, rel=0.05)


@pytest.mark.parametrize("sms", [0, 133])
def test_a_part_has_some_of_the_sms(sms):
    with pytest.raises(ForetuneError, match=f"SMs must be 1 to 132 for NVIDIA H200 but is {sms}"):
        H200.with_sms(sms)


def test_two_parts_of_one_card_have_the_same_space_and_other_features():
    kernel, part = find_family("grouped_gemm_fwd"), H200.with_sms(64)
    problem = Problem.of(kernel.name, groups=8, rows=4096, n=4096, k=4096)
    space = kernel.space(H200)
    assert kernel.space(part) == space
    sm_count = kernel.feature_names.index("sm_count")
    assert set(kernel.features(problem, part, space)[:, sm_count]) == {64.0}


@pytest.fixture
def seen_sms(stamping):
    """Asks the SMs themselves: the number of different ones that a full grid of programs finds itself on."""
    import torch

    def count():
        out = torch.zeros(16384, dtype=torch.int32, device="cuda")
        stamping.sms(out)
        return len(out.unique())

    return count


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [8, 32, 60, 64, 96])
def test_work_inside_runs_on_the_sms_of_the_spec_and_on_no_others(asked, seen_sms):
    whole = DeviceSpec.live()
    assert seen_sms() == whole.sm_count
    with sm_partition(asked) as device:
        print(f"asked for {asked}, given {device.sm_count}")  # noqa: T201
        assert asked <= device.sm_count < whole.sm_count
        assert seen_sms() == device.sm_count
    assert seen_sms() == whole.sm_count


@pytest.mark.gpu
def test_a_matrix_product_takes_as_much_longer_as_there_are_fewer_sms():
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def us():
        y = torch.empty_like(a)
        torch.mm(a, a, out=y)
        return statistics.median(Timer().time(lambda: torch.mm(a, a, out=y)).time_us for _ in range(3))

    whole = DeviceSpec.live()
    before = us()
    with sm_partition(64) as device:
        inside = us()
    after = us()
    print(f"{before:.0f} us, on {device.sm_count} SMs {inside:.0f} us, then {after:.0f} us")  # noqa: T201
    # A full card runs at its power limit, a part of it below: a little less than in proportion.
    assert inside / before == pytest.approx(whole.sm_count / device.sm_count, rel=0.2)
    assert after == pytest.approx(before, rel=0.1)


@pytest.mark.gpu
@pytest.mark.usefixtures("own_cache")
def test_a_kernel_that_sizes_itself_by_the_spec_is_right_and_slower_in_a_part():
    kernel, whole, times = find_family("grouped_gemm_fwd"), DeviceSpec.live(), {}
    problem = Problem.of(kernel.name, groups=8, rows=16384, n=4096, k=4096)

    def run(device):
        config = kernel.default(problem, device)
        check = kernel.check_problem(config, problem)
        inputs = kernel.inputs(check, device, seed=1)
        reference = kernel.reference(inputs)
        error = float((kernel.launch(inputs, config).float() - reference).norm() / reference.norm())
        assert error <= kernel.tolerance(check)
        large = kernel.inputs(problem, device)
        kernel.launch(large, config)
        times[device.sm_count] = Timer().time(lambda: kernel.launch(large, config)).time_us

    run(whole)
    for sms in (32, 64, 96):
        with sm_partition(sms) as device:
            run(device)
    run(whole)
    print(times)  # noqa: T201
    assert sorted(times, key=times.get) == sorted(times, reverse=True)
    (given,) = [sms for sms in times if 64 <= sms < 96]
    assert times[given] / times[whole.sm_count] == pytest.approx(whole.sm_count / given, rel=0.25)


@pytest.mark.gpu
def test_the_rule_is_near_what_a_part_of_the_card_reaches():
    """Prints what to make `_GBS_OF_AN_SM` of."""
    from foretune.runtime.timing.device_rates import measured

    whole, parts = measured(DeviceSpec.live()), []
    for sms in (16, 32, 64, 96):
        with sm_partition(sms, whole) as device:
            parts.append((device, measured(device)))
        for spec in parts[-1]:
            print(spec.to_json())  # noqa: T201
    for device, found in parts:
        assert found.matrix_tflops == pytest.approx(device.matrix_tflops, rel=0.3)
        assert found.copy_bandwidth_gbs == pytest.approx(device.copy_bandwidth_gbs, rel=0.3)

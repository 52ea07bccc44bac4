"""Pin files of tests: made from values, changed, and read back."""

from __future__ import annotations

from dataclasses import replace

from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.runtime.pin_file import PinFile, PinnedChoice, PinnedDevice, PinnedKernel, Versions

H200, H100 = DeviceSpec.named("h200"), DeviceSpec.named("h100")


def pinned_kernel(kernel, choices, source="s1", device=H200, versions=None):
    """The entry of a kernel; `choices` are configs by problem."""
    entries = {problem: PinnedChoice(problem, config) for problem, config in choices.items()}
    return PinnedKernel(kernel, PinnedDevice.of(device), source, versions or Versions.here(), entries)


def softmax(rows=64, block=64, **more):
    """An entry of one choice."""
    return pinned_kernel("softmax", {Problem.of("softmax", rows=rows): KernelConfig.of(BLOCK=block)}, **more)


def with_config(kernel, config):
    """The entry with another config for each of its problems."""
    return replace(kernel, choices={at: replace(one, config=config) for at, one in kernel.choices.items()})


def with_problem(kernel, **dims):
    """The entry for other problems: with these sizes."""
    moved = {}
    for problem, one in kernel.choices.items():
        other = replace(problem, dims=tuple(({**dict(problem.dims), **dims}).items()))
        moved[other] = replace(one, problem=other)
    return replace(kernel, choices=moved)


#: What may have changed since a file was written: the entry that a launch then finds, and what the error says.
DRIFT = {
    "a changed source": (lambda one: replace(one, source="older"), "with source 'older', but its source is"),
    "another device": (
        lambda one: replace(one, device=PinnedDevice.of(H100)),
        r"on NVIDIA H100 80GB HBM3 \(sm_90, 132 SMs\), but not on NVIDIA H200 \(sm_90, 132 SMs\)",
    ),
    "a part of the device": (
        lambda one: replace(one, device=PinnedDevice.of(H200)._replace(sm_count=64)),
        r"64 SMs\), but not on NVIDIA H200 \(sm_90, 132 SMs\)",
    ),
    "another Triton": (
        lambda one: replace(one, versions=one.versions._replace(triton="3.1.0")),
        "with triton '3.1.0', but this process has",
    ),
    "another torch": (
        lambda one: replace(one, versions=one.versions._replace(torch="2.1.0")),
        "with torch '2.1.0', but this process has",
    ),
    "another default of fusion": (
        lambda one: replace(one, versions=one.versions._replace(fp_fusion="no")),
        "with fp_fusion 'no', but this process has 'o",
    ),
    "a kernel that is not covered": (
        lambda one: replace(one, kernel="another"),
        "does not cover .*: it covers another",
    ),
    "a config that the kernel does not have": (
        lambda one: with_config(one, KernelConfig.of(BLOCK=77, num_warps=1)),
        "has BLOCK=77 num_warps=1 num_stages=3 for .*, which cannot run: ",
    ),
}


def save(path, *kernels):
    """Write a pin file of these entries."""
    PinFile(kernels).save(path)
    return path

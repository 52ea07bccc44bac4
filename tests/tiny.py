"""Families of a few configs that compile, or fail to, in ways of their own. A module of its own, because worker
processes import it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import triton
import triton.language as tl
from fakes import FakeFamily
from foretune.datasets import KernelConfig


@triton.jit
def scale_kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)


class TinyFamily(FakeFamily):
    """One kernel in blocks of BLOCK; GRID is a runtime argument, so it makes no binary of its own."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log  # a line for each binary that was compiled

    def space(self, device=None):
        return tuple(KernelConfig.of(BLOCK=block, GRID=grid) for block in (64, 128, 256) for grid in (1, 2))

    def binary_key(self, config, problem):
        return config["BLOCK"], problem.signature

    def compile(self, config, problem):
        if self.log is not None:
            with self.log.open("a") as lines:
                lines.write(f"{config} {problem.dtype} {os.getpid()}\n")
        return self.build(config)

    def build(self, config):
        import torch

        return scale_kernel.warmup(torch.float32, 100, BLOCK=config["BLOCK"], grid=(1,))


class SpecialisedFamily(TinyFamily):
    """As ordinary kernels are: Triton makes a binary of its own for n=1, for multiples of 16 and for other n."""

    def binary_key(self, config, problem):
        return config["BLOCK"], problem.signature, problem["n"] == 1, problem["n"] % 16 == 0

    def compile(self, config, problem):
        super().compile(config, problem)
        import torch

        return scale_kernel.warmup(torch.float32, problem["n"], BLOCK=config["BLOCK"], grid=(1,))


class NotingFamily(TinyFamily):
    """Its compiler does nothing but to note that it was asked."""

    def build(self, config):
        pass


class RaisingFamily(TinyFamily):
    """Blocks of 128 do not compile."""

    def build(self, config):
        if config["BLOCK"] == 128:
            raise RuntimeError("no blocks of 128, please")


class PrintingFamily(TinyFamily):
    """Its compiler is one of those that talk."""

    def build(self, config):
        os.write(1, b"the whole program")
        os.write(2, b"and what is wrong with it")


class KillingFamily(TinyFamily):
    """Blocks of 64 end their process, blocks of 128 are killed by the system."""

    def build(self, config):
        if config["BLOCK"] == 64:
            os._exit(3)
        if config["BLOCK"] == 128:
            os.kill(os.getpid(), signal.SIGKILL)


class UnluckyFamily(TinyFamily):
    """Blocks of 128 are killed the first time."""

    def build(self, config):
        if config["BLOCK"] == 128 and self.log.read_text().count("BLOCK=128") == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class EndlessFamily(TinyFamily):
    """Blocks of 128 are compiled for ever, in a process of the compiler's own."""

    def build(self, config):
        if config["BLOCK"] == 128:
            sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            with self.log.open("a") as lines:
                lines.write(f"sleeper {sleeper.pid}\n")
            sleeper.wait()

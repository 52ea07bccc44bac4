"""Compile a product with `foretune.use("inductor")` in several processes, and print what each took as a line of JSON.

`python tests/cached_compile.py "--cache A" "--cache A --k 3"` runs two, one after the other; test_caches.py runs more.
They are forked, so that Inductor is imported once, which takes longer (4 s) than compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import foretune
import torch
import torch._inductor.compile_fx
from foretune.kernels.integrations.inductor import Limits
from torch._dynamo.utils import counters
from torch._inductor import config, remote_cache
from torch._inductor.select_algorithm import AlgorithmSelectorCache


def main() -> None:
    for line in sys.argv[1:]:
        child = os.fork()
        if not child:
            compile_product(line.split())
            sys.stdout.flush()
            os._exit(0)  # taking all modules apart lasts a second
        if os.waitpid(child, 0)[1]:
            sys.exit(f"failed: {line}")


def compile_product(given: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", required=True, help="the folder of Inductor's own cache")
    parser.add_argument("--k", default="2")
    parser.add_argument("--where", default="cpu")
    parser.add_argument("--load", type=Path, help="artifacts that torch.compiler loads first")
    parser.add_argument("--save", type=Path, help="where torch.compiler saves the artifacts")
    parser.add_argument("--remote", type=Path, help="a folder that serves as Inductor's remote cache")
    options = parser.parse_args(given)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = options.cache
    listed, timed = [], []
    limited, autotune = Limits.of_templates, AlgorithmSelectorCache.autotune
    # Inductor's own counters also count what it recalls from a cache.
    AlgorithmSelectorCache.autotune = lambda self, name, *given, **named: (
        timed.append(name) or autotune(self, name, *given, **named)  # type: ignore[func-returns-value]
    )
    Limits.of_templates = lambda self, choices, *given: (
        listed.append(len(choices)) or limited(self, choices, *given)  # type: ignore[func-returns-value]
    )
    if options.remote:
        options.remote.mkdir(exist_ok=True)
        remote_cache.RemoteFxGraphCache.backend_override_cls = lambda *_: InFolder(options.remote)
        config.fx_graph_remote_cache, config.fx_graph_cache = True, False
    if options.load:
        assert torch.compiler.load_cache_artifacts(options.load.read_bytes()) is not None
    dtype = torch.bfloat16 if options.where == "cuda" else torch.float32
    if options.where == "cpu":  # its other templates take a C++ compiler half a minute
        config.max_autotune_gemm_backends = "ATEN"
    torch.manual_seed(0)
    x, w = (torch.randn(256, 512, device=options.where, dtype=dtype) for _ in range(2))
    k = options.k if options.k == "auto" else int(options.k)
    with foretune.use("inductor", k=k):
        compiled = torch.compile(lambda x, w: x @ w.T, options={"max_autotune_gemm": True})
        began = time.perf_counter()
        y = compiled(x, w)
        seconds = time.perf_counter() - began
    torch.testing.assert_close(y, x @ w.T, rtol=2e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-4)
    if options.save:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        options.save.write_bytes(saved[0])
    hits = counters["inductor"]["fxgraph_cache_hit"]
    sys.stdout.write(json.dumps({"listed": listed, "timed": timed, "hits": hits, "seconds": round(seconds, 2)}) + "\n")


class InFolder(remote_cache.RemoteCacheBackend[bytes]):
    """A remote cache of one file for each key."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _get(self, key: str) -> bytes | None:
        path = self.folder / key.replace("/", "_")
        return path.read_bytes() if path.exists() else None

    def _put(self, key: str, data: bytes) -> None:
        (self.folder / key.replace("/", "_")).write_bytes(data)


if __name__ == "__main__":
    main()

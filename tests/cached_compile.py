"""Compile a product with `foretune.use("inductor")` and print what that took as JSON: test_caches.py runs it twice.

`python tests/cached_compile.py --k 2 [--where cuda] [--load FILE] [--save FILE] [--remote FOLDER]`. Inductor's own
cache is where TORCHINDUCTOR_CACHE_DIR says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import foretune
import torch
from foretune.kernels.integrations.inductor import Limits
from torch._dynamo.utils import counters
from torch._inductor import config, remote_cache
from torch._inductor.select_algorithm import AlgorithmSelectorCache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", default="2")
    parser.add_argument("--where", default="cpu")
    parser.add_argument("--load", type=Path, help="artifacts that torch.compiler loads first")
    parser.add_argument("--save", type=Path, help="where torch.compiler saves the artifacts")
    parser.add_argument("--remote", type=Path, help="a folder that serves as Inductor's remote cache")
    options = parser.parse_args()
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
    sys.stdout.write(json.dumps({"listed": listed, "timed": timed, "hits": hits, "seconds": round(seconds, 2)}))


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

"""Compile a model whose matrix products Inductor tunes, and let Foretune choose what it tries: `python inductor.py`.

For each product, Inductor generates, compiles and times a list of choices. `foretune.use("inductor", k=8)` ranks a wide
list (EXHAUSTIVE) first, and passes on the best 8. Run it on a GPU.
"""

import time
from typing import Any

import foretune
import torch
from torch import nn


class Block(nn.Module):
    """One feed-forward block of a transformer."""

    def __init__(self, hidden: int = 2048, inner: int = 8192) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the block's output."""
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def main() -> None:
    """Compile and run the block, and print how long the first call took."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, rows = (2048, 4096) if where == "cuda" else (64, 16)
    with torch.device(where):
        model = Block(hidden, 4 * hidden).to(torch.bfloat16 if where == "cuda" else torch.float32).eval()
        x = torch.randn(rows, hidden, dtype=next(model.parameters()).dtype)
    options: dict[str, Any] = {"max_autotune_gemm": True, "max_autotune_gemm_search_space": "EXHAUSTIVE"}
    began = time.perf_counter()
    with torch.no_grad(), foretune.use("inductor", k=8):
        y = torch.compile(model, options=options)(x)
    print(f"{where}: first call {time.perf_counter() - began:.1f} s, {y.shape}")


if __name__ == "__main__":
    main()

"""Train, evaluate and predict for your own kernel, without a GPU: `python softmax_on_cpu.py`.

The measurements in `measured_h200/` were collected on an H200 by `foretune collect softmax:RowSoftmax`. With a GPU of
your own, collect yours instead. Takes less than a minute.
"""

import tempfile
from pathlib import Path

import foretune
import rich
import torch
import triton
from foretune import Problem
from softmax import CONFIGS, RowSoftmax, softmax_kernel

DATA = Path(__file__).parent / "measured_h200"


def main() -> None:
    """Evaluate predictions, train a bundle, predict a shortlist and prune an autotuner with it; print each result."""
    # How good would the predictions be? Cross-validation: each problem is judged by a ranker that never saw it.
    for evaluation in foretune.evaluate(DATA, family=RowSoftmax).values():
        rich.print(evaluation)

    # Train on everything, and keep the result in a folder.
    with tempfile.TemporaryDirectory() as folder:
        foretune.train(DATA, family=RowSoftmax).save(f"{folder}/bundle")

        # Predict for a shape that was never measured.
        problem = Problem.of("row_softmax", rows=3000, columns=1500, dtype="fp16")
        print(foretune.shortlist(RowSoftmax, problem, "h200", k=4, bundle=f"{folder}/bundle"))

        # Prune: triton.autotune now times 4 configs of 85. A stub driver takes the GPU's place.
        pruner = foretune.prune(RowSoftmax, k=4, bundle=f"{folder}/bundle")
        tuned = triton.autotune(CONFIGS, key=["n_rows", "n_columns"], prune_configs_by={"early_config_prune": pruner})(
            softmax_kernel
        )
        x = torch.randn(3000, 1500, dtype=torch.float16)
        with foretune.testing.use_stub_device("h200"):
            tuned[lambda meta: (triton.cdiv(3000, meta["ROWS"]),)](x, torch.empty_like(x), 3000, 1500, 1500, 1500)
        timed = getattr(tuned, "configs_timings", {})  # Triton times nothing if one config is left
        print(f"{len(CONFIGS)} configs -> {len(timed)} timed; chosen: {tuned.best_config}")


if __name__ == "__main__":
    main()

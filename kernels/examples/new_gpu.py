"""From a bundle for one GPU to predictions for another: `python new_gpu.py`, without a GPU.

The bundle is trained on measurements of an H200, and the "new" card is an H100. `few_h100/` took half a minute there:

    foretune collect softmax:RowSoftmax --out few_h100 --random 24 --seed 5 --plan thin --share 0.35

`foretune.adapt` adds trees to the bundle that learn from these; the old measurements are not needed. `measured_h100/`
has the problems of `measured_h200/` on the H100, and judges the bundle before and after. For this kernel the two cards
are so alike that adapting gains nothing on average, and a single first choice can become worse: `few_h100/` has two
problems of more than 4,096 columns, with three configs each. So first evaluate the bundle on a few measurements of a
new card, and keep the adapted one only if it is better on measurements that it was not adapted to.
"""

from pathlib import Path

import foretune
from softmax import RowSoftmax

HERE = Path(__file__).parent


def main() -> None:
    """Train for the old card, adapt to the new one, and print the regret there before and after."""
    old = foretune.train(HERE / "measured_h200", family=RowSoftmax)
    adapted = foretune.adapt(HERE / "few_h100", bundle=old, family=RowSoftmax)
    for name, bundle in (("before", old), ("after", adapted)):
        judged = foretune.evaluate(HERE / "measured_h100", bundle=bundle, family=RowSoftmax)["row_softmax"]
        regret = judged.to_json()["regret"]
        percents = ", ".join(f"{100 * (regret[k]['geomean'] - 1):.1f} % with {k}" for k in ("1", "4", "8"))
        print(f"{name}: the best of the first k is slower than the best config by {percents}")


if __name__ == "__main__":
    main()
